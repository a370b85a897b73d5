"""The census of FP8 libraries: it is whole, it is true of what is installed, and it names a library
that loses FP8.
"""

import copy
import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from jax.sharding import PartitionSpec as P

from helpers.records.results import digest, load_census
from tests.weekly import NIGHTLY
from tools.records import census, data

RECORDED = census.read()
NEWEST = max(RECORDED, key=data.by_number)
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)


@needs_compiler
def test_rows_are_what_the_installed_libraries_become():
    rows = census.measured("" if NIGHTLY else " | layer | ", whole=False)["rows"]
    problems = census.check(RECORDED, rows)
    assert rows and not problems, "\n".join(problems)


def test_two_releases_have_every_way_and_their_provenance():
    assert set(RECORDED) == {census.BEFORE, data.locked()["jax"]}, census.FIX
    for version, entry in RECORDED.items():
        assert {entry["packages"][name] for name in data.OF_JAX} == {version}
        assert all(entry["packages"][name] for name in census.LIBRARIES)
        wanted = [
            " | ".join((name, *case))
            for name in census.ways()
            for case in census.cases(name, version)
        ]
        assert list(entry["rows"]) == wanted, f"{version}: {census.FIX}"
        for name, row in entry["rows"].items():
            if "error" not in row:
                assert 0 <= row["fp8"] <= row["matmuls"] and 0 <= row["fp8_flops"] <= row["flops"]
                lost = row["matmuls"] - row["fp8"]
                told = [n for n, _, _ in row["lost"]]  # a matmul may have a reason for each operand
                assert sum(told) >= lost or row["unknown"], name
                assert max(told, default=0) <= lost, name
                costs = {"peak", "gathered", "summed", "again_matmuls", "again_quantizations"}
                assert (costs <= row.keys()) == (name.split(" | ")[1] in census.COSTLY), name


def test_sharded_rows_gather_sum_and_run_again():
    rows = load_census(census.DATA.parent).releases[NEWEST]["rows"]
    divided = {name: row for name, row in rows.items() if name[1] == "sharded"}
    assert divided
    for row in divided.values():
        assert row["again_matmuls"] == 1  # the first of two: the backward pass reads its result
        assert sum(row["gathered"].values()) > 0 < sum(row["summed"].values())
    others = (row for name, row in rows.items() if name[1] in ("experts", "ragged", "routed"))
    assert all(row["gathered"] == row["summed"] == {} for row in others)


def test_ways_name_what_they_alter_and_where_they_are_promised():
    ways = census.ways()
    assert json.loads(census.DATA.read_text())["ways"] == census.about(), census.FIX
    for name, way in ways.items():
        assert way.package in (*census.LIBRARIES, "jax") and bool(way.says) == bool(way.url), name
        assert bool(way.fixes) == bool(way.setting) and way.fixes in ("", *ways), name


def test_data_tells_nothing_of_the_machine_and_is_written_alike(monkeypatch, tmp_path):
    text = census.DATA.read_text()
    assert not re.search(r"(?<![\w.:*/])/(?:home|root|tmp|usr|work)/|site-packages", text)
    monkeypatch.setattr(census, "DATA", tmp_path / "census.json")
    census.write(RECORDED)
    assert census.DATA.read_text() == text


def test_a_row_changed_by_hand_is_not_read(tmp_path):
    found = load_census(census.DATA.parent)
    assert list(found.releases) == list(RECORDED) and set(found.ways) == set(census.ways())
    assert (
        found.releases[NEWEST]["rows"]["bf16, no FP8", "layer", "forward", "H100", "cublaslt"][
            "fp8"
        ]
        == 0
    )
    text = census.DATA.read_text()
    (tmp_path / "census.json").write_text(text.replace('"fp8": 1', '"fp8": 2', 1))
    with pytest.raises(
        ValueError, match="is not as it was recorded: `make census` records it again"
    ):
        load_census(tmp_path)


@pytest.mark.parametrize(
    "contents",
    [None, b"", b"[]", b"{}", b'{"releases": {"0.12.0": 3}}', b"\xff", b'{"releases": {'],
)
def test_a_file_that_is_no_census_is_answered_with_its_fix(monkeypatch, tmp_path, capsys, contents):
    monkeypatch.setattr(census, "DATA", tmp_path / "census.json")
    if contents is not None:
        census.DATA.write_bytes(contents)
        with pytest.raises(
            SystemExit, match="census.json cannot be read .* delete it and run `make census`"
        ):
            census.read()
    assert census.main(["--check"]) == 1
    assert "`make census` writes it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="census.json cannot be read .*`make census` writes it"):
        load_census(tmp_path)


def test_a_census_of_nothing_is_none(tmp_path):
    (tmp_path / "census.json").write_text('{"ways": {}, "releases": {}}')
    with pytest.raises(ValueError, match="`make census` records it again"):
        load_census(tmp_path)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["banana"], "'banana' is no release of JAX"),
        (["--check", "0.11.2"], "takes no release"),
    ],
)
def test_wrong_arguments_are_answered(capsys, arguments, said):
    with pytest.raises(SystemExit):
        census.main(arguments)
    assert said in capsys.readouterr().err


NAME = "one | layer | forward | H100 | cublaslt"


def mini(monkeypatch, row: dict) -> tuple[dict, dict]:
    """A census of one way that became `row`, as recorded with the versions that are installed, and
    what is measured now: the same.
    """
    monkeypatch.setattr(census, "ways", lambda: {"one": census.Way(census.linen, "flax")})
    packages = {"jax": census.version_of("jax"), "flax": census.version_of("flax")}
    return {jax.__version__: {"packages": packages, "rows": {NAME: dict(row)}}}, {NAME: dict(row)}


def recorded_as(found: dict, **changes) -> dict:
    found = copy.deepcopy(found)
    (entry,) = found.values()
    entry["rows"][NAME] |= changes
    return found


def test_a_library_that_loses_fp8_is_named_with_its_fix(monkeypatch):
    found, now = mini(monkeypatch, {"matmuls": 3, "fp8": 1, "kernels": 4})
    assert census.check(found, now) == []
    (said,) = census.check(recorded_as(found, fp8=3), now)
    assert said.startswith(f"{NAME}: fp8 3, now 1: run `make census`")
    (said,) = census.check(found, {NAME: {"error": "it ended"}})
    assert said.startswith(f"{NAME}: was compiled, now it ended: run `make census`")


def test_with_other_versions_only_what_lost_fp8_is_a_problem(monkeypatch):
    row = {"matmuls": 3, "fp8": 1, "kernels": 4, "flops": 30, "fp8_flops": 10}
    found, now = mini(monkeypatch, row)
    monkeypatch.setattr(census, "version_of", lambda package: "99.0")
    assert census.check(recorded_as(found, kernels=9), now) == []
    (said,) = census.check(recorded_as(found, fp8_flops=30), now)
    assert "100% of FLOPs in FP8, now 33%" in said
    bf16, error = {"fp8_flops": 0, "flops": 30}, {"error": "TypeError: x"}
    assert "0% of FLOPs in FP8, now TypeError: x" in census.lost({"a": bf16}, {"a": error})[0]
    assert census.lost({"a": error}, {"a": bf16}) == census.lost({"a": error}, {"a": error}) == []


def test_fewer_matmuls_of_the_same_flops_are_no_loss():
    joined = {"matmuls": 20, "fp8": 14, "flops": 1792, "fp8_flops": 1236}
    assert (
        census.lost(
            {"a": {"matmuls": 21, "fp8": 15, "flops": 1792, "fp8_flops": 1236}}, {"a": joined}
        )
        == []
    )


def test_what_cannot_be_made_is_a_row_without_a_path():
    def broken():
        raise ImportError("cannot import name 'x' from 'y' (/some/where/site-packages/y.py)\nmore")

    assert census.row(broken, False, "H100", "cublaslt") == {
        "error": "ImportError: cannot import name 'x' from 'y'"
    }


def test_a_program_is_made_once_for_all_chips(monkeypatch):
    made = []

    def program(make, model, train):
        made.append((model, train))

    monkeypatch.setattr(census, "ways", lambda: {"one": census.Way(census.linen, "flax")})
    monkeypatch.setattr(census, "program", program)
    monkeypatch.setattr(census, "row", lambda program, *chip: {"made": program(), "chip": chip})
    rows = dict(census.rows_of("one"))
    assert list(rows) == census.names_of_rows("one", jax.__version__)
    assert len(made) == len(set(made)) == 6


def test_each_way_has_a_process_and_all_are_merged_in_order(monkeypatch):
    asked = []

    def in_a_process(way, only, whole):
        asked.append(way)
        return {
            name: {"error": "none"} for name in census.names_of_rows(way, jax.__version__, only)
        }

    monkeypatch.setattr(census, "in_a_process", in_a_process)
    monkeypatch.setattr(census, "version_of", lambda package: "1.0")
    made = census.measured("| layer |")
    with_layers = [name for name, way in census.ways().items() if "layer" in way.models]
    assert sorted(asked) == sorted(with_layers)
    rows = RECORDED[NEWEST]["rows"]
    kernels = {
        name: sum(row.get("kernels", 0) for row in found.values())
        for name, found in census.by_way(rows).items()
    }
    begun = [kernels[name] for name in census.longest_first([*census.ways()], RECORDED)]
    assert begun == sorted(begun, reverse=True)
    assert list(made["rows"]) == [name for name in rows if "| layer |" in name]
    monkeypatch.setattr(census, "version_of", lambda package: "1" if package == "keras" else None)
    asked.clear()
    census.measured()
    assert asked == ["Keras, float8"]


@needs_compiler
def test_what_is_isolated_becomes_the_same():
    """Compiled apart, a program has the same row."""
    program = functools.partial(census.program, census.by_hand, "layer", True)
    isolated, here = (census.row(program, isolate, "H100", "triton") for isolate in (True, False))
    assert isolated == here and here["matmuls"] == 3


@needs_compiler
def test_without_machine_code_a_row_is_the_same():
    program = functools.partial(census.program, census.by_hand, "layer", True)
    early, whole = (census.row(program, False, "H100", "cublaslt", of) for of in (False, True))
    assert early == whole and whole["matmuls"] == whole["fp8"] == 3


@needs_compiler
@pytest.mark.parametrize("general", [fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8DotGeneralOp])
def test_linens_own_vmap_makes_the_same_experts(general):
    several = nn.vmap(
        census.MLP,
        variable_axes={"params": 0, fp8_ops.OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
    )(general)

    def theirs():
        state = jax.eval_shape(several.init, {"params": jax.random.key(0)}, census.PERMUTED)
        return several.apply, (state, census.PERMUTED), {}

    def ours():
        make = functools.partial(census.linen, general=general)
        return census.program(make, "experts", False)

    one, two = (census.row(make, False, "H100", "cublaslt", costs=True) for make in (ours, theirs))
    assert one == two and one["matmuls"] == 2


@needs_compiler
def test_what_is_sent_is_counted_by_its_type():
    """A weight is gathered in FP8, and its gradient is summed in f32."""

    def step(x, w):
        codes = jax.lax.with_sharding_constraint(w.astype(jnp.float8_e4m3fn), P())
        return x @ codes.astype(jnp.bfloat16).T, jax.lax.dot(x.T, x).astype(jnp.float32)

    x, w = (jax.ShapeDtypeStruct((256, 128), jnp.bfloat16) for _ in range(2))
    specs = {"mesh_shape": {"data": 4}, "in_specs": (P("data"), P("data"))}
    row = census.row(lambda: (step, (x, w), specs), False, "H100", "cublaslt", costs=True)
    assert row["gathered"] == {"f8e4m3fn": 256 * 128 * 3 // 4}
    assert sum(row["summed"].values()) > 0 and row["again_matmuls"] == 0


@pytest.mark.parametrize("library", ["cublasLt", "cublas", "triton", "kernel"])
def test_what_xla_itself_multiplies_is_compiled_whole(library):
    asked = []

    def compiled(compiler_options):
        asked.append(compiler_options)
        return SimpleNamespace(report=SimpleNamespace(rows=[SimpleNamespace(library=library)]))

    assert bool(census.of_libraries(compiled)) == library.startswith("cublas")
    assert asked == [{**census.OPTIONS, **census.NO_CODE}]


@pytest.mark.parametrize(
    "end, said",
    [
        ("import sys; sys.exit('no')", "its process ended with status 1"),
        ("import os; os.abort()", "its process was ended by signal 6"),
        ("pass", "its process ended with status 0"),
    ],
)
def test_a_library_that_ends_its_process_is_an_error_in_the_rows_that_it_lacks(
    monkeypatch, end, said
):
    first, *rest = census.names_of_rows("Keras, float8", jax.__version__)
    written = json.dumps([first, {"fp8": 1}])
    path = "json.loads(sys.argv[1])[2]"
    code = f"import json, sys; print({written!r}, file=open({path}, 'a'), flush=True); {end}"
    rows = census.in_a_process("Keras, float8", code=code)
    assert rows == {first: {"fp8": 1}} | {name: {"error": said} for name in rest}


def test_a_library_that_hangs_is_stopped(monkeypatch):
    monkeypatch.setattr(census, "MINUTES", 0.01)
    rows = census.in_a_process("Keras, float8", code="import time; time.sleep(600)")
    assert list(rows) == census.names_of_rows("Keras, float8", jax.__version__)
    assert all(
        row["error"] == "its process was stopped after 0.01 minutes" for row in rows.values()
    )


def test_recording_says_what_was_lost_and_keeps_the_date_of_the_rest(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(census, "DATA", tmp_path / "census.json")
    census.write(RECORDED)
    before = census.DATA.read_text()
    again = copy.deepcopy(RECORDED[NEWEST]) | {"date": "2100-01-01"}
    again["digest"] = digest({key: value for key, value in again.items() if key != "digest"})
    monkeypatch.setattr(census, "environment", lambda version: sys.executable)

    def run(command, **_):
        Path(command[command.index("--measure") + 1]).write_text(json.dumps(again))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(data.subprocess, "run", run)
    assert census.record([NEWEST]) == 0 and census.DATA.read_text() == before
    name = next(name for name, row in again["rows"].items() if row.get("fp8"))
    again["rows"][name]["fp8_flops"] -= 1
    again["digest"] = digest({key: value for key, value in again.items() if key != "digest"})
    assert census.record([NEWEST]) == 1
    assert (
        f"LOST FP8: {name}" in capsys.readouterr().out
        and census.read()[NEWEST]["date"] == "2100-01-01"
    )


def test_some_rows_alone_are_measured_and_the_others_kept_where_the_packages_are_the_same(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(census, "DATA", tmp_path / "census.json")
    census.write(RECORDED)
    monkeypatch.setattr(census, "environment", lambda version: sys.executable)
    entry = copy.deepcopy(RECORDED[NEWEST])
    entry["rows"] = {
        name: row | {"kernels": 9} for name, row in entry["rows"].items() if "qwix, PTQ" in name
    }
    asked = []

    def run(command, **_):
        asked.append(command[-1])
        Path(command[command.index("--measure") + 1]).write_text(json.dumps(entry))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(data.subprocess, "run", run)
    census.main([NEWEST, "--only", "qwix, PTQ"])
    now = census.read()[NEWEST]
    assert asked == ["qwix, PTQ"] and now["digest"] == digest(now)
    assert list(now["rows"]) == list(RECORDED[NEWEST]["rows"])
    differ = {name for name, row in now["rows"].items() if row != RECORDED[NEWEST]["rows"][name]}
    assert differ == set(entry["rows"]) and differ
    entry["packages"]["qwix"] = "99.0"
    with pytest.raises(SystemExit, match="measure all, without --only"):
        census.main([NEWEST, "--only", "qwix, PTQ"])
