"""A name is shown and never judged by. What holds for whole programs under other names is in
test_corpus.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fp8lens
from fp8lens import inspect
from fp8lens.cli import main
from fp8lens.hlo.parse import parse_hlo_module
from tests.programs.corpus import by_warpgroup, shape
from tests.programs.renamed import HOSTILE, figures

ROOT = Path(fp8lens.__file__).parent
PARSER = ROOT / "hlo" / "parse.py"
e4m3, bf16 = jnp.float8_e4m3fn, jnp.bfloat16


def test_no_line_is_searched():
    """An instruction's text has names and strings in it: outside of the parser nobody reads it, but
    attributes.
    """
    files = [*ROOT.rglob("*.py"), *ROOT.parent.joinpath("helpers").rglob("*.py")]
    found = [
        f"{path.name}:{node.lineno}"
        for path in files
        if path != PARSER
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("cmd", "lines")
    ]
    assert PARSER in files and not found


def test_a_scope_changes_nothing():
    """Written in JAX, which quotes it itself: a loop of four iterations stays one of four."""

    def loop(scope):
        def fn(x):
            with jax.named_scope(scope):
                return jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ x), x)

        return fn

    x = shape(64, 64, dtype=bf16)
    plain, *others = (inspect(loop(scope), x) for scope in ("plain", *HOSTILE[:2]))
    assert [row.count for row in plain.report.rows] == [4]
    for other in others:
        assert figures(other) == figures(plain)


def test_a_kernels_name_is_not_its_code():
    """Mosaic's kernel is judged by what it multiplies: neither name nor scope can say that it is
    FP8, or is not.
    """

    def named(scope):
        def fn(a, b):
            with jax.named_scope(scope):
                return by_warpgroup(a, b)

        return fn

    instruction = "wgmma.mma_async.sync.aligned.m64n128k32.f32.{0}.{0}"
    fp8 = shape(64, 128, dtype=e4m3), shape(128, 128, dtype=e4m3)
    wide = shape(64, 64, dtype=bf16), shape(64, 128, dtype=bf16)
    assert not inspect(named(instruction.format("bf16")), *fp8).reasons
    (reason,) = inspect(named(instruction.format("e4m3")), *wide).reasons
    assert "multiplies bf16" in reason.reason and "f8" not in reason.reason


CPU = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[64,64]) -> f32[64,64] {{
  %a = f32[64,64]{{1,0}} parameter(0)
  ROOT %dot = f32[64,64]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}, metadata={{op_name="jit(f)/{scope}/dot_general"}}
}}
"""


@pytest.mark.parametrize(
    "scope", ["plain", "fingerprint_before_lhs", '\\"__cu', '\\"operation_queue_id\\"']
)
def test_a_scope_makes_no_program_a_gpus(scope, tmp_path, capsys):
    file = tmp_path / "module.txt"
    file.write_text(CPU.format(scope=scope))
    assert main([str(file), "--require-fp8"]) == 2
    assert "nothing says that XLA compiled it for a GPU" in capsys.readouterr().err


def test_a_frame_is_read_from_the_metadata():
    """And not from a scope with the words of one."""
    text = (
        CPU.format(scope="stack_frame_id=2")
        .replace('"}', '" stack_frame_id=1}')
        .replace(
            "\nENTRY",
            '\nFileNames\n1 "mine.py"\n2 "evil.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
            "1 {file_name_id=1 function_name_id=1 line=3}\n2 {file_name_id=2 function_name_id=1 "
            "line=4}\n\n"
            "StackFrames\n1 {file_location_id=1}\n2 {file_location_id=2}\n\nENTRY",
        )
    )
    assert parse_hlo_module(text).entry["dot"].frames == (("mine.py", 3),)
