import html
import io
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp8lens.hlo import parse_hlo_module
from fp8lens.hlo.text import format_hlo_module, print_hlo_module
from helpers import aot_compile

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
OLD = sorted(Path(__file__).parent.glob("hlo/*.txt"))


def scaled(a, b, a_scale, b_scale, d_scale):
    d = jax.nn.relu(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T))
    return jnp.clip(d * d_scale, -448, 448).astype(e4m3), jnp.max(jnp.abs(d))


SHAPES = (
    jax.ShapeDtypeStruct((32, 64), e4m3),
    jax.ShapeDtypeStruct((128, 64), e4m3),
    *[jax.ShapeDtypeStruct((), f32)] * 3,
)


@pytest.fixture(scope="module")
def fused():
    return aot_compile(scaled, *SHAPES)


def linalg(x):
    return jnp.linalg.cholesky(x), jnp.sort(x)


SQUARE = jax.ShapeDtypeStruct((16, 16), f32)
PROGRAMS = {
    "fused": lambda: aot_compile(scaled, *SHAPES),
    "unoptimized": lambda: jax.jit(scaled).lower(*SHAPES),
    "linalg": lambda: aot_compile(linalg, SQUARE),
    "linalg, CPU": lambda: jax.jit(linalg).lower(SQUARE).compile(),
    **{path.stem: path.read_text for path in OLD},
}


def test_text_of_a_fused_matmul(fused):
    assert (
        format_hlo_module(fused).splitlines()
        == """\
HloModule jit_scaled, entry_computation_layout={(f8e4m3fn[32,64], f8e4m3fn[128,64], f32[], f32[],
    f32[])->(f8e4m3fn[32,128], f32[])}

ENTRY %main.4 (a.1: f8e4m3fn[32,64], b.1: f8e4m3fn[128,64], a_scale.1: f32[], b_scale.1: f32[],
    d_scale.1: f32[]) -> (f8e4m3fn[32,128], f32[]) {
  %d_scale.1 = f32[] parameter(4)
  %b_scale.1 = f32[] parameter(3)
  %a_scale.1 = f32[] parameter(2)
  %b.1 = f8e4m3fn[128,64] parameter(1)
  %a.1 = f8e4m3fn[32,64] parameter(0)
  %cublas-gemm.1.clone.1 = (f8e4m3fn[32,128], f32[], s8[4194304]) custom-call(%a.1, %b.1,
      %a_scale.1, %b_scale.1, %d_scale.1), custom_call_target="__cublas$lt$matmul$f8"
  %get-tuple-element.1.0 = f32[] get-tuple-element(%cublas-gemm.1.clone.1), index=1
  %get-tuple-element.4 = f8e4m3fn[32,128] get-tuple-element(%cublas-gemm.1.clone.1), index=0
  ROOT %tuple.1.0 = (f8e4m3fn[32,128], f32[]) tuple(%get-tuple-element.4, %get-tuple-element.1.0)
}""".splitlines()
    )


@pytest.mark.parametrize("options", [{}, {"metadata": True, "backend_cfg": True}], ids=["", "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_printed_parses_to_the_same_program(name, options):
    module = parse_hlo_module(PROGRAMS[name]())
    text = format_hlo_module(module, **options)
    again = parse_hlo_module(text)
    for i, other in zip(module, again, strict=True):
        assert (i.name, i.opcode, i.operands) == (other.name, other.opcode, other.operands)
        assert i.called == other.called
        if options:
            assert i.backend_config == other.backend_config
            assert (i.metadata and i.metadata.op_name) == (
                other.metadata and other.metadata.op_name
            )
    assert format_hlo_module(again, **options) == text
    assert max(map(len, text.splitlines())) <= 102
    noise = r'"/|fingerprint|FileNames|StackFrames|/\*index|sdy|scheduling_name'
    assert not re.search(noise, text)
    assert options or not re.search("metadata=|backend_config=", text)


def test_only_layouts_that_matter_are_shown():
    dot = aot_compile(
        jnp.matmul, jax.ShapeDtypeStruct((32, 64), e4m3), jax.ShapeDtypeStruct((64, 128), e4m3)
    )
    text = format_hlo_module(dot)
    assert "{0,1}" in text and "{1,0}" not in text.replace("dimensions={1,0}", "")
    shown = "parameter(0), sharding={devices=[2,1]<=[2]}"
    one = f"HloModule m\nENTRY %e {{\n  ROOT %p = f32[2,3]{{1,0}} {shown}\n}}"
    assert f"= f32[2,3] {shown}" in format_hlo_module(one)
    assert "f32[2,3]{1,0:T(8,128)} p" in format_hlo_module(one.replace("{1,0}", "{1,0:T(8,128)}"))


def test_metadata_names_the_line(fused, monkeypatch):
    lines = Path(__file__).read_text().splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if text.startswith("    return jnp.clip")]
    for folder, file in ((Path(__file__).parents[2], "tests/fp8lens/"), (OLD[0].parent, "")):
        monkeypatch.chdir(folder)
        text = format_hlo_module(fused, metadata=True)
        assert f'source_file="{file}test_hlo_text.py" source_line={line}' in text


def test_backend_config_is_readable(fused):
    text = format_hlo_module(fused, backend_cfg=True)
    assert (
        '\n          "epilogue": "RELU",\n' in text
        and '\n          "damax_output": true,\n' in text
    )


def test_two_compiles_of_one_function_print_alike(fused):
    first = format_hlo_module(fused)
    jax.clear_caches()
    assert format_hlo_module(aot_compile(scaled, *SHAPES)) == first
    code = (
        "import sys; from tests.fp8lens.test_hlo_text import *; "
        "sys.stdout.write(format_hlo_module(aot_compile(scaled, *SHAPES)))"
    )
    root = Path(__file__).parent.parent.parent
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=root, text=True, capture_output=True, check=True
    )
    assert other.stdout == first


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_only_where_there_is_some(fused, monkeypatch, capsys):
    plain = format_hlo_module(fused)
    assert print_hlo_module(fused) is None and capsys.readouterr().out == plain
    for stream, term, no_color, coloured in (
        (Terminal(), "xterm", "", True),
        (Terminal(), "dumb", "", False),
        (Terminal(), "xterm", "1", False),
        (io.StringIO(), "xterm", "", False),
    ):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("NO_COLOR", no_color)
        print_hlo_module(fused, file=stream)
        assert ("\033[" in stream.getvalue()) == coloured
        assert re.sub(r"\033\[[\d;]*m", "", stream.getvalue()) == plain
        assert not coloured or '\033[1;35m"__cublas$lt$matmul$f8"\033[0m' in stream.getvalue()


def test_notebooks_get_colour_and_plain_text(fused):
    import nbformat
    from nbclient import NotebookClient

    code = (
        "from helpers import print_hlo_module\nfrom pathlib import Path\n"
        "for name in ('jax_0_4_31_plain', 'jax_0_4_14_ffi'):\n"
        "    print_hlo_module(Path(f'hlo/{name}.txt').read_text())"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, resources={"metadata": {"path": Path(__file__).parent}}).execute()
    first, second = notebook.cells[0].outputs
    data = first["data"]
    assert data["text/plain"] == format_hlo_module(
        (Path(__file__).parent / "hlo/jax_0_4_31_plain.txt").read_text()
    )
    # A browser drops the line's end behind <pre>; folded, JupyterLab shows what stands before it.
    unescaped = html.unescape(
        re.sub(r"<[^>]+>", "", re.sub(r"(<pre[^>]*>)\n", r"\1", data["text/html"]))
    )
    assert (
        unescaped == data["text/plain"]
        and 'font-weight:bold">"__cublas$lt$matmul$f8"</span>' in data["text/html"]
    )
    assert 'lapack_\\"spotrf\\"{' in second["data"]["text/plain"]
