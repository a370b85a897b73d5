"""The records with rows of several JAX releases, of the same programs, of the rules' pages and of
JAX's FP8 libraries: they are whole, and true of what is installed.

The rules' programs are compiled and compared in tests/fp8lens/test_rules.py.
"""

import json
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from fp8lens.rules.find import explain
from helpers.records.results import load_census, load_engine, load_releases, load_rules
from helpers.rule_index import holds
from tests.weekly import one_in
from tools.recorders import census, data, engine, releases
from tools.recorders import rule_programs as rules

RECORDS = {module.RECORD.name: module.RECORD for module in (census, engine, releases, rules)}
FOLDER = data.RESULTS


def newest(record: data.Record) -> dict:
    """The rows of the installed release, or of the newest."""
    found = record.read()
    return found.get(jax.__version__, found[max(found, key=data.by_number)])["rows"]


@pytest.mark.parametrize("name", RECORDS)
def test_every_release_has_every_row_and_its_provenance(name):
    record = RECORDS[name]
    found = record.read()
    assert {*record.releases, data.locked()["jax"]} <= set(found), f"run `make {name}`"
    assert list(found) == sorted(found, key=data.by_number)
    for version, entry in found.items():
        assert {entry["packages"][package] for package in data.OF_JAX} == {version}
        assert set(entry["packages"]) == {*data.OF_JAX, *data.ASSEMBLER, *record.libraries}
        assert entry["command"] == f"make {name}"
        assert list(entry["rows"]) == list(record.names(version)), f"run `make {name}`"


@pytest.mark.parametrize("load", [load_census, load_engine, load_releases, load_rules])
def test_a_row_changed_by_hand_is_not_read(load, tmp_path):
    assert load(FOLDER)
    name = load.__name__.removeprefix("load_")
    text = (FOLDER / f"{name}.json").read_text()
    (tmp_path / f"{name}.json").write_text(text.replace('"kernels": 1', '"kernels": 2', 1))
    with pytest.raises(ValueError, match=f"not as it was recorded: `make {name}"):
        load(tmp_path)


def test_recording_changes_what_has_changed_alone(monkeypatch, tmp_path, capsys):
    """A row is measured in a process; the others stay, and so does the date of what is the same."""
    record = releases.RECORD
    before = record.read()[jax.__version__]
    monkeypatch.setattr(data, "RESULTS", tmp_path)
    old = json.loads(json.dumps(before))
    old["rows"]["no clamp"]["kernels"] += 1
    here = data.Record(**{**vars(record), "environment": lambda version: [sys.executable]})
    for given, date, said in ((old, None, "no clamp: "), (before, before["date"], "0 cha")):
        here.write({jax.__version__: given})
        here.record(jax.__version__, "no clamp")
        made = here.read()[jax.__version__]
        assert made["rows"] == before["rows"] and made["digest"] == data.digest(made)
        assert date in (None, made["date"]) and said in capsys.readouterr().out


def test_changes_are_rows_as_they_were_and_are():
    old, new = {"same": 1, "a": {"b": [1]}, "gone": 1}, {"same": 1, "a": {"b": [2]}, "new": 3}
    assert data.changes(old, new) == [
        'a: {"b": [1]}, now {"b": [2]}',
        "gone: 1, now null",
        "new: null, now 3",
    ]


# JAX's releases -----------------------------------------------------------------------------------


def test_programs_become_what_is_recorded():
    """A sample of them."""
    names = one_in(8, releases.programs())
    then = newest(releases.RECORD)
    made = json.loads(json.dumps(releases.rows(names)))
    assert made == {name: then[name] for name in names}, "run `make releases`"


def test_a_program_that_does_not_compile_is_a_row():
    made = releases.row(releases.Program(releases.dot, (releases.A, releases.shape(3, 5))))
    assert "Error: " in made["error"] and "\n" not in made["error"]


# The rules' pages ---------------------------------------------------------------------------------


def test_the_rules_programs_are_compiled_for_every_chip_and_hold():
    for name, row in newest(rules.RECORD).items():
        chips = rules.chips_of(explain(name))
        assert tuple(row["chips"]) == chips and holds(name, row["chips"][chips[0]]), name


# JAX's libraries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["JAX, chapter 09", "Flax, Fp8DotGeneralOp"])
def test_a_layer_of_a_way_becomes_what_is_recorded(way):
    then = newest(census.RECORD)
    names = [name for name in then if name.startswith(f"{way} | layer | ")]
    made = json.loads(json.dumps(census.rows(names)))
    assert names and made == {name: then[name] for name in names}, "run `make census`"


def test_ways_are_told_of_and_their_rows_add_up():
    ways = census.ways()
    assert json.loads(census.RECORD.path.read_text())["ways"] == census.about(), "make census"
    for name, way in ways.items():
        assert way.package in census.LIBRARIES and bool(way.says) == bool(way.url), name
        assert bool(way.fixes) == bool(way.setting) and way.fixes in ("", *ways), name
    for name, row in newest(census.RECORD).items():
        if "error" not in row:
            told = [n for n, _, _ in row["lost"]]  # a matmul may have a reason for each operand
            lost = row["matmuls"] - row["fp8"]
            assert max(told, default=0) <= lost, name
            assert sum(told) >= lost or row["unknown"], name


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
