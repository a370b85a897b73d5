"""The record of what the programs on the rules' pages become. That it is true of the installed
release is held in tests/fp8lens/test_rules.py, which compiles them.
"""

import copy
import json
import sys

import jax
import pytest

from fp8lens.rules.page import Page, Program, explain
from helpers.records.results import digest, load_rules
from helpers.rule_index import holds
from tools.recorders import data, rules

RECORDED = rules.read()
NEWEST = max(RECORDED, key=data.by_number)
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)
NAMES = ("late-relu", "no-clamp")


@pytest.fixture
def two(monkeypatch, tmp_path):
    """The record of two rules, which may be changed, in a file of its own."""
    chosen = {name: explain(name) for name in NAMES}
    monkeypatch.setattr(rules, "pages", lambda: chosen)
    monkeypatch.setattr(rules, "DATA", tmp_path / "rules.json")
    found = copy.deepcopy(RECORDED)
    for entry in found.values():
        entry["rows"] = {name: entry["rows"][name] for name in NAMES}
        entry["digest"] = digest(entry)
    rules.write(found)
    return found


def test_a_release_has_its_provenance_and_every_chip():
    for version, entry in RECORDED.items():
        assert {entry["packages"][name] for name in rules.OF_JAX} == {version}
        assert entry["command"] == rules.COMMAND
        for name, row in entry["rows"].items():
            assert tuple(row["chips"]) == rules.chips_of(explain(name)), name
    newest = RECORDED[NEWEST]["rows"].items()
    assert all(holds(name, row["chips"][rules.chips_of(explain(name))[0]]) for name, row in newest)


def test_data_is_written_alike(monkeypatch, tmp_path):
    text = rules.DATA.read_text()
    monkeypatch.setattr(rules, "DATA", tmp_path / "rules.json")
    rules.write(RECORDED)
    assert rules.DATA.read_text() == text and json.loads(text)["releases"] == RECORDED


def test_a_row_changed_by_hand_is_not_read(two, tmp_path):
    assert load_rules(tmp_path) == two
    text = rules.DATA.read_text()
    rules.DATA.write_text(text.replace('"kernels": 2', '"kernels": 3', 1))
    oldest = min(two, key=data.by_number)
    with pytest.raises(ValueError, match=f"JAX {oldest} is not as it was recorded: `make rules"):
        load_rules(tmp_path)


def test_a_program_that_was_changed_or_is_new_is_named(two, monkeypatch):
    assert rules.unrecorded(two) == []
    del two[NEWEST]["rows"]["no-clamp"]
    (found,) = rules.unrecorded(two)
    assert f"JAX {NEWEST}: the programs of no-clamp" in found and "make rules" in found
    page = rules.pages()["late-relu"]
    other = Page(page.rule, page.why, Program(page.loses.code, 'target="B200"'), page.keeps)
    monkeypatch.setattr(rules, "pages", lambda: {"late-relu": other})
    assert [line for line in rules.unrecorded(two) if "late-relu" in line]
    assert rules.chips_of(other) == ("B200",)
    del two[min(two, key=data.by_number)]
    assert "is not recorded" in rules.unrecorded(two)[0]


@needs_compiler
def test_the_check_names_what_became_something_else(two, monkeypatch, capsys):
    version = jax.__version__ if jax.__version__ in two else NEWEST
    monkeypatch.setattr(rules, "chips_of", lambda page: ("H100",))
    for entry in two.values():
        for row in entry["rows"].values():
            del row["chips"]["B200"]
    assert rules.check(two) == []
    two[version]["rows"]["late-relu"]["chips"]["H100"]["keeps"]["kernels"] += 1
    (found,) = rules.check(two)
    assert found.startswith("late-relu, H100, keeps: was FP8, ") and "make rules" in found
    assert rules.check(two, only="clamp") == []
    rules.write(two)
    assert rules.main(["--check"]) == 1
    assert "is not as it was recorded" in capsys.readouterr().out


@needs_compiler
def test_a_program_that_does_not_compile_is_a_row():
    made = rules.tried(Program("def layer(a, b):\n    return a @ b"), "H100")
    assert set(made) == {"error"} and "\n" not in made["error"]
    assert rules.describe(made).startswith("does not compile: TypeError")


def test_recording_keeps_the_date_of_what_has_not_changed(two, monkeypatch, capsys):
    before = rules.DATA.read_text()
    again = copy.deepcopy(two[NEWEST]) | {"date": "2100-01-01"}
    again["digest"] = digest(again)
    monkeypatch.setattr(rules, "environment", lambda version: sys.executable)
    monkeypatch.setattr(data, "measure", lambda *_: again)
    rules.record([NEWEST])
    assert rules.DATA.read_text() == before
    again["rows"]["late-relu"]["chips"]["H100"]["loses"]["bytes"] += 1
    rules.record([NEWEST])
    assert "late-relu, H100, loses: was FP8, " in capsys.readouterr().out
    assert rules.read()[NEWEST]["date"] == "2100-01-01"
