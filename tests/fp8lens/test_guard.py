"""A record of what programs cost fails where something has become worse, and nowhere else."""

import copy
import json
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
from fp8lens.guard import changes, entry_of, read_record, recorded, write_record
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
    """One matmul adds 1 between its dequantization and the dot."""
    with jax.named_scope("up"):
        h = scaled_dot(to_e4m3(x, scale), to_e4m3(up, scale), scale, scale, bf16)
    with jax.named_scope("gate"):
        wide = to_e4m3(y, scale).astype(bf16) * scale.astype(bf16) + 1
        g = jax.lax.dot(wide, (to_e4m3(gate, scale).astype(bf16) * scale.astype(bf16)).T)
    return jax.nn.relu(h), g


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
def test_names_and_order_change_nothing(same, record):
    found = assert_no_worse(same, *ARGS, record=record)
    assert (found.worse, found.better, found.about) == ((), (), ())


def test_a_matmul_that_lost_fp8_is_named_with_its_line_and_rule():
    found = changes(RECORDED, inspect(edited, *ARGS))
    line = 1 + Path(__file__).read_text().splitlines().index(
        "        g = jax.lax.dot(wide, (to_e4m3(gate, scale).astype(bf16) * scale.astype(bf16)).T)"
    )
    first, *_ = found.worse
    assert re.match(rf"gate \(\S*test_guard.py:{line}\) lost FP8: \S+ \wB more, because ", first)
    assert first.endswith("[operation-between]")
    back = changes(entry_of(inspect(edited, *ARGS)), inspect(layer, *ARGS))
    assert not back.worse and "gate (" in back.better[0] and "is in FP8 now" in back.better[0]


def test_a_kernel_more_is_told_with_its_reason():
    found = changes(RECORDED, inspect(with_a_kernel, *ARGS))
    assert any(
        re.match(r"1 kernel more \(.*\): 1 after .*, because ", said) for said in found.worse
    )


@pytest.mark.parametrize("name", ["bytes moved", "memory at the peak"])
@pytest.mark.parametrize(
    "growth, may_grow, worse", [(1.03, 0.02, 1), (1.03, 0.05, 0), (1.01, 0.02, 0)]
)
def test_growth_counts_from_a_share_on(name, growth, may_grow, worse):
    before = copy.deepcopy(RECORDED)
    before["totals"][name] /= growth
    found = changes(before, inspect(layer, *ARGS), may_grow)
    assert len(found.worse) == worse
    assert not worse or f"(+{growth - 1:.1%})" in found.worse[0]


def test_a_newer_jax_is_named():
    found = changes(RECORDED | {"jax": "0.0.1"}, inspect(layer, *ARGS))
    assert not found.worse and "Recorded with JAX 0.0.1" in str(found)


def test_another_chip_is_refused(record):
    with pytest.raises(ValueError, match="compile it alike"):
        assert_no_worse(layer, *ARGS, record=record, target="B200")


def test_a_record_has_many_programs(record):
    write_record(record, "other", RECORDED)
    assert [*read_record(record)] == ["layer", "other"]
    with pytest.raises(KeyError, match="layer, other, and not third"):
        recorded(record, "third")
    assert not [p for p in record.parent.iterdir() if p != record]


def damages(document, path=()):
    """Each value of a document replaced by something else, and each key left out."""
    items = document.items() if isinstance(document, dict) else enumerate(document[:1])
    for key, value in items:
        yield (*path, key), None
        yield (*path, key), ["x"]
        if isinstance(value, dict | list):
            yield from damages(value, (*path, key))


def test_a_damaged_record_is_refused_or_still_right(record):
    """Whatever of it is another value, the error is a sentence, or the program is compared."""
    whole, seen = json.loads(record.read_text()), inspect(layer, *ARGS)
    tried = 0
    for path, value in damages(whole):
        document = copy.deepcopy(whole)
        at = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        record.write_text(json.dumps(document))
        try:
            str(changes(recorded(record, "layer"), seen))
        except (ValueError, KeyError) as error:
            assert "fp8" in str(error) or "record" in str(error)
        tried += 1
    assert tried > 60
    for text in ("", "[]", "{", "null", '{"programs": {}}', "[" * 100_000):
        record.write_text(text)
        with pytest.raises(ValueError, match="--save"):
            recorded(record, "layer")


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
    root = Path(__file__).parents[2]
    folders = f"{Path(sys.executable).parent}:{os.getcwd()}/bin:{os.environ['PATH']}"
    env = os.environ | {"PATH": folders, "PYTHONPATH": str(root)} | variables
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
    (comment,) = [step for step in workflow["jobs"]["fp8"]["steps"] if "if" in step]
    entry = hook["repos"][0]["hooks"][0]["entry"]
    assert shlex.split(entry) == shlex.split(against)

    status, said = shell(f"{save} && {against}")
    assert status == 0 and said.endswith("Nothing is worse than recorded.\n"), said
    edited = MODEL.replace("relu(y)", "silu(y)").replace("x, scale), to", "x, scale) * 1, to")
    Path("layer.py").write_text(edited)
    status, said = shell(step)
    assert status == 1 and "layer.py:layer, against fp8.json: " in said, said

    # GitHub's own command, which keeps what it is given.
    Path("bin").mkdir()
    Path("bin/gh").write_text('#!/bin/bash\necho "$@" > gh.txt\ncat "$5" >> gh.txt\n')
    Path("bin/gh").chmod(0o755)
    assert set(comment["env"]) == {"GH_TOKEN", "PULL_REQUEST"}
    assert shell(comment["run"], PULL_REQUEST="7")[0] == 0
    command, text = Path("gh.txt").read_text().split("\n", 1)
    assert command == "pr comment 7 --body-file fp8.md"
    assert re.match(r"layer.py:layer, against fp8.json: .*layer.py:\d+\).* because .*\]", text), (
        text
    )


def test_the_readmes_test_is_updated_by_pytests_option(project):
    (test,) = [block for block in blocks("python") if "assert_no_worse" in block]
    Path("test_layer.py").write_text(test)
    pytest_ = "python -m pytest -q -p no:cacheprovider test_layer.py"
    status, said = shell(pytest_)
    assert status == 1 and "run pytest once with --fp8lens-update" in said, said
    assert shell(f"{pytest_} --fp8lens-update")[0] == 0
    assert shell(pytest_)[0] == 0
    Path("layer.py").write_text(MODEL.replace("relu(y)", "silu(y)"))
    status, said = shell(pytest_)
    assert status == 1 and "is worse than recorded in fp8.json: 1 kernel more" in said, said


@pytest.mark.parametrize(
    "words, says",
    [
        (("--against", "none.json"), "there is no record 'none.json': write it with --save"),
        (("--against", "bad.json"), "bad.json is no record of fp8lens"),
        (("--save", "no/such/folder.json"), "--save: "),
        (("--save", "bad.json"), "bad.json is no record of fp8lens"),
        (("--against", "layer.txt"), "names no function and no record"),
    ],
)
def test_what_cannot_be_used_is_said(words, says, project, capsys):
    Path("bad.json").write_text("{}")
    assert main(["layer.py:layer", "--args", "sample", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_share_is_a_number_from_zero_on(capsys):
    with pytest.raises(SystemExit):
        main(["layer.py:layer", "--may-grow", "-1"])
    assert "no share such as 0.02" in capsys.readouterr().err
    for share in (-0.1, True, "2%"):
        with pytest.raises(ValueError, match="a share such as"):
            assert_no_worse(layer, *ARGS, record="fp8.json", may_grow=share)
