"""A record of what programs cost fails where something has become worse, and nowhere else."""

import copy
import functools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml

from fp8lens import assert_no_worse, inspect
from fp8lens.cli import main
from fp8lens.guard import changes
from fp8lens.records import MEMORY, entry_of, read_record, write_record
from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, f32, bf16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16
README = (Path(__file__).parents[2] / "fp8lens" / "README.md").read_text()


def S(*dims, dtype=bf16):
    return jax.ShapeDtypeStruct(dims, dtype)


ARGS = S(256, 512), S(256, 512), S(1024, 512), S(384, 512), S(dtype=f32)


def layer(x, y, up, gate, scale):
    """Two matmuls of different sizes, each in a layer of its own."""
    with jax.named_scope("up"):
        h = scaled_dot(to_e4m3(x, scale), to_e4m3(up, scale), scale, scale, bf16)
    with jax.named_scope("gate"):
        g = scaled_dot(to_e4m3(y, scale), to_e4m3(gate, scale), scale, scale, bf16)
    return jax.nn.relu(h), g


def renamed(a, b, first, second, s):
    """The same, under other names and in another order."""
    with jax.named_scope("second"):
        second = scaled_dot(to_e4m3(b, s), to_e4m3(second, s), s, s, bf16)
    with jax.named_scope("first"):
        first = jax.nn.relu(scaled_dot(to_e4m3(a, s), to_e4m3(first, s), s, s, bf16))
    return first, second


def edited(x, y, up, gate, scale):
    """One matmul is not quantized."""
    h, _ = layer(x, y, up, gate, scale)
    with jax.named_scope("gate"):
        return h, y @ gate.T


def with_a_kernel(x, y, up, gate, scale):
    h, g = layer(x, y, up, gate, scale)
    return jax.nn.silu(h), g


RECORDED = entry_of(inspect(layer, *ARGS))


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "fp8.json"
    write_record(path, "layer", RECORDED)
    return path


@pytest.mark.parametrize("same", [layer, renamed])
def test_names_and_order_change_nothing(same):
    found = changes(RECORDED, inspect(same, *ARGS))
    assert (found.worse, found.better, found.about) == ((), (), ())


def test_a_matmul_that_lost_fp8_is_named_with_its_line_and_rule():
    found = changes(RECORDED, inspect(edited, *ARGS))
    line = edited.__code__.co_firstlineno + 4
    first, *_ = found.worse
    assert re.match(rf"gate \(\S*test_guard.py:{line}\) lost FP8, because ", first)
    assert first.endswith("[not-quantized]")
    back = changes(entry_of(inspect(edited, *ARGS)), inspect(layer, *ARGS))
    assert "gate (" in back.better[0] and "is in FP8 now" in back.better[0]


def test_a_kernel_more_is_told_with_its_reason():
    found = changes(RECORDED, inspect(with_a_kernel, *ARGS))
    assert any(
        re.match(r"1 kernel more \(.*\): 1 after .*; new is that .* \[[\w-]+\]$", said)
        for said in found.worse
    )


LOOP = S(dtype=jnp.int32), S(256, 256), S(256, 256)


def repeated(times):
    """A loop of a length that is known, or else not."""

    def fn(n, x, w):
        return jax.lax.fori_loop(0, times or n, lambda _, x: jnp.tanh(x @ w), x)

    return inspect(fn, *LOOP)


def test_a_loop_whose_length_is_not_known_any_more_is_worse():
    known, unknown = repeated(10), repeated(None)
    found = changes(entry_of(known), unknown)
    each = "kernels? more in each iteration of loops of unknown length"
    assert re.search(rf"{each} \(\d+, recorded 0\)", "; ".join(found.worse)), found
    # Not fewer in all, where that is only because its length is not known.
    assert not any("fewer (" in better for better in found.better), found
    assert "How often loops run is not known" in str(found)
    found = changes(entry_of(unknown), known)
    assert re.search(r"not known for 0 kernels, recorded [1-9]", str(found.about)), found


def test_a_record_counts_what_the_ledger_counts():
    def chosen(n, x, w):
        thrice = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)
        return jax.lax.cond(n > 0, lambda: thrice, lambda: x @ w)

    seen = inspect(chosen, *LOOP)
    work = entry_of(seen)["work"]
    assert sum(row["kernels"] for row in work) == seen.ledger.kernels
    assert sum(row["bytes"] for row in work) == seen.ledger.bytes_moved
    assert {row["runs"] for row in entry_of(seen)["matmuls"]} == {1, 3}


@pytest.mark.parametrize(
    "before, after, worse",
    [
        ("default", "highest", "is multiplied in f32, and no longer in TF32"),
        ("BF16_BF16_F32", "default", "in tf32, and no longer in 16 bits"),
    ],
)
def test_a_matmul_in_a_slower_type_is_worse(before, after, worse):
    """A router's, which was never meant to be FP8."""
    args = S(256, 512, dtype=f32), S(512, 64, dtype=f32)
    one, other = (
        inspect(functools.partial(jax.lax.dot, precision=how), *args) for how in (before, after)
    )
    (said,) = changes(entry_of(one), other).worse
    assert worse in said
    assert " now, and was in " in changes(entry_of(other), one).better[0]


@pytest.mark.parametrize("what", ["bytes", *MEMORY])
@pytest.mark.parametrize("may_grow, is_worse", [(0.05, True), (0.08, False)])
def test_growth_counts_from_a_share_on(what, may_grow, is_worse):
    before = copy.deepcopy(RECORDED)
    for figures in before["work"] if what == "bytes" else [before["memory"]]:
        figures[what] /= 1.06
    found = changes(before, inspect(layer, *ARGS), may_grow)
    # What is within the limit is said all the same.
    (said,) = found.worse if is_worse else found.about
    assert "(+6.0%)" in said and said.startswith("More, within") != is_worse


def test_a_newer_jax_is_named_and_another_chip_refused():
    found = changes(RECORDED | {"jax": "0.0.1"}, inspect(layer, *ARGS))
    assert not found.worse and "Recorded with JAX 0.0.1" in str(found)
    with pytest.raises(ValueError, match="compile it alike"):
        changes(RECORDED | {"compiled": "for another"}, inspect(layer, *ARGS))


def test_a_program_of_another_name_is_not_compared(record):
    write_record(record, "other", RECORDED)
    with pytest.raises(KeyError, match="layer, other, and not .*test_guard.py:renamed: .*--name"):
        assert_no_worse(renamed, *ARGS, record=record)


WRITER = """
import sys
from fp8lens.records import write_record
for n in range(20):
    write_record("fp8.json", f"{sys.argv[1]}{n}", {"number": n})
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name], env=env) for name in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert len(read_record("fp8.json")) == 80 and os.listdir() == ["fp8.json"]


def test_a_second_program_of_a_name_is_refused(record):
    write_record(record, "layer", RECORDED)  # the same program once more
    with pytest.raises(ValueError, match="another program as layer already: give each a name"):
        write_record(record, "layer", RECORDED | {"jax": "0.0.1"})
    assert read_record(record)["layer"] == RECORDED


def test_a_damaged_record_is_refused(record):
    for damaged in (None, RECORDED | {"jax": 1e999}, RECORDED | {"digest": ""}):
        document = json.loads(record.read_text())
        document["programs"]["layer"] = damaged
        record.write_text(json.dumps(document))
        with pytest.raises(ValueError, match="layer is not as fp8lens wrote it: .*--save"):
            read_record(record)


def test_what_is_no_record_is_refused(record):
    old = json.dumps(json.loads(record.read_text()) | {"version": 3})
    for text in (old, "", "[]", "{", "null", "[" * 100_000, "\udcff"):
        record.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match="version 3, .*--save" if text is old else "--save"):
            read_record(record)


MODEL = """
import jax, jax.numpy as jnp
from helpers.numerics.recipes import scaled_dot, to_e4m3

def layer(x, w, scale):
    y = scaled_dot(to_e4m3(x, scale), to_e4m3(w, scale), scale, scale, jnp.bfloat16)
    return jax.nn.relu(y)

def sample():
    S = jax.ShapeDtypeStruct
    x, w = S((256, 512), jnp.bfloat16), S((1024, 512), jnp.bfloat16)
    return x, w, S((), jnp.float32)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the README's layer.py, which is the folder of commands too."""
    monkeypatch.chdir(tmp_path)
    Path("layer.py").write_text(MODEL)
    return tmp_path


def shell(command, **variables):
    """A command as a shell of the README's reader runs it: its status and its output."""
    folders = f"{Path(sys.executable).parent}:{os.getcwd()}/bin:{os.environ['PATH']}"
    env = os.environ | {"PATH": folders, "PYTHONPATH": str(Path(__file__).parents[2])} | variables
    env.pop("PYTEST_XDIST_TESTRUNUID", None)  # else it were a part of this run
    ran = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, env=env)
    return ran.returncode, ran.stdout + ran.stderr


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_readmes_commands_hook_and_workflow_do_what_it_says(project):
    (both,) = [block for block in blocks("bash") if "--save" in block]
    save, against = both.splitlines()
    workflow, hook = (yaml.safe_load(block) for block in blocks("yaml"))
    (step,) = [
        step["run"]
        for step in workflow["jobs"]["fp8"]["steps"]
        if step.get("run", "").startswith("fp8lens")
    ]
    entry = hook["repos"][0]["hooks"][0]["entry"]
    assert shlex.split(entry) == shlex.split(against)

    status, said = shell(f"{save} && {against}")
    assert status == 0 and said.endswith("Nothing is worse than recorded.\n"), said
    edited = MODEL.replace("relu(y)", "silu(y)").replace("x, scale), to", "x, scale) * 1, to")
    Path("layer.py").write_text(edited)
    status, said = shell(step)
    assert status == 1 and "layer.py:layer, against fp8.json: " in said, said

    assert re.search(r"layer.py:\d+\).* new is that .*\]", Path("fp8.md").read_text())


def test_the_readmes_test_is_updated_by_pytests_option(project):
    (test,) = [block for block in blocks("python") if "assert_no_worse" in block]
    Path("test_layer.py").write_text(test)
    pytest_ = "python -m pytest -q -p no:cacheprovider test_layer.py"
    assert shell(f"{pytest_} --fp8lens-update")[0] == 0
    assert [*read_record("fp8.json")] == ["layer.py:layer"]  # as the command names it
    Path("layer.py").write_text(MODEL.replace("relu(y)", "silu(y)"))
    status, said = shell(pytest_)
    assert status == 1 and "is worse than recorded in fp8.json: 1 kernel more" in said, said
    with pytest.raises(FileNotFoundError, match="run pytest once with --fp8lens-update"):
        assert_no_worse(layer, *ARGS, record="none.json")


def test_a_record_is_not_renewed_where_something_is_worse(project, capsys):
    command = ["layer.py:layer", "--args", "sample"]
    both = [*command, "--against", "fp8.json", "--save", "fp8.json"]
    assert main([*command, "--save", "fp8.json"]) == 0 and main(both) == 0
    text = Path("fp8.json").read_text()
    Path("layer.py").write_text(MODEL.replace("relu(y)", "silu(y)"))
    assert main(both) == 1 and Path("fp8.json").read_text() == text
    assert "the record is not renewed, because something is worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, says",
    [
        (("--against", "none.json"), "there is no record 'none.json': write it with --save"),
        (("--save", "bad.json"), "bad.json is no record of fp8lens"),
        (("--name", "mine"), "--name is for --save, or for --against with a record"),
    ],
)
def test_what_cannot_be_used_is_said(words, says, project, capsys):
    Path("bad.json").write_text("{}")
    assert main(["layer.py:layer", "--args", "sample", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_share_is_a_number_from_zero_on():
    with pytest.raises(ValueError, match="a share such as"):
        assert_no_worse(layer, *ARGS, record="fp8.json", may_grow=math.nan)
