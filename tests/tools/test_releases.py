"""The record of what each JAX release compiles: it is whole, and it is true of the release that is
installed.
"""

import copy
import json
import re
import sys

import jax
import pytest

from helpers.records.results import digest, load_releases
from tests.weekly import one_in
from tools.records import data, releases

RECORDED = releases.read()
NEWEST = max(RECORDED, key=releases.by_number)
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)


def some(*names: str) -> dict:
    """The data of the installed release, or the newest, with these rows alone."""
    version = jax.__version__ if jax.__version__ in RECORDED else NEWEST
    entry = copy.deepcopy(RECORDED[version])
    entry["rows"] = {name: entry["rows"][name] for name in names}
    return {version: entry}


@needs_compiler
def test_rows_are_what_the_installed_jax_compiles(monkeypatch):
    """A sample: reference E and chapter 14 compare theirs, which are most, in each run."""
    chosen = dict(one_in(8, releases.programs().items()))
    monkeypatch.setattr(releases, "programs", lambda: chosen)
    problems = releases.check(some(*chosen))
    assert not problems, "\n".join(problems)


@needs_compiler
def test_a_changed_row_is_named_with_its_fix(monkeypatch, tmp_path, capsys):
    names = ("relu", "no clamp", "relu(unscaled) times 2")
    chosen = {name: releases.programs()[name] for name in names}
    monkeypatch.setattr(releases, "programs", lambda: chosen)
    monkeypatch.setattr(releases, "DATA", tmp_path / "releases.json")
    changed = some(*names)
    assert releases.check(changed) == []
    (entry,) = changed.values()
    entry["rows"]["relu"]["gemms"][0]["epilogue"] = "DEFAULT"
    entry["rows"]["no clamp"]["kernels"] = 1
    del entry["rows"]["relu(unscaled) times 2"]
    found = releases.check(changed)
    assert [problem.split(":")[0] for problem in found] == list(chosen)
    assert "make releases" in found[0] and "RELU" in found[0]
    assert len(releases.check(changed, only="clamp")) == 1
    releases.write(changed)
    assert releases.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "is not as it was recorded: `make releases` records it again" in said
    entry["digest"] = digest(entry)
    releases.write(changed)
    assert releases.main(["--check"]) == 1
    assert "no clamp: 1 kernel: " in capsys.readouterr().out


@needs_compiler
def test_a_program_that_does_not_compile_is_a_row():
    made = releases.row(releases.Program(releases.dot, (releases.A, releases.shape(3, 5))))
    assert re.match(r"\w+Error: .*\b5\b", made["error"]) and "\n" not in made["error"]


def test_every_release_has_every_program_and_its_provenance():
    missing = {*releases.RELEASES, releases.locked()["jax"]} - set(RECORDED)
    assert not missing, f"JAX {', '.join(sorted(missing))} is not recorded: {releases.FIX}"
    assert list(RECORDED) == sorted(RECORDED, key=releases.by_number)
    for version, entry in RECORDED.items():
        assert {entry["packages"][name] for name in releases.OF_JAX} == {version}
        assert set(entry["packages"]) == {*releases.OF_JAX, *releases.ASSEMBLER}
        assert entry["command"] == releases.COMMAND
        assert list(entry["rows"]) == list(releases.programs()), f"{version}: {releases.FIX}"
        for row in entry["rows"].values():
            assert 0 < len(row.get("gemms", "?")) <= row.get("kernels", 1)


def test_an_altered_release_is_recorded_again(monkeypatch, tmp_path):
    monkeypatch.setattr(releases, "DATA", tmp_path / "releases.json")
    altered = some("relu")
    (entry,) = altered.values()
    now = copy.deepcopy(entry)
    now["digest"] = digest(now)
    assert data.is_news({**now, "digest": "another"}, now)
    assert data.is_news({**now, "rows": {}}, now)
    assert not data.is_news({**now, "date": now["date"]}, now)


def test_a_row_changed_by_hand_is_not_read(tmp_path):
    assert load_releases(releases.DATA.parent) == RECORDED
    text = releases.DATA.read_text()
    (tmp_path / "releases.json").write_text(text.replace('"kernels": 1', '"kernels": 2', 1))
    oldest = min(RECORDED, key=releases.by_number)
    with pytest.raises(ValueError, match=f"JAX {oldest} is not as it was recorded: `make releases"):
        load_releases(tmp_path)


def test_data_tells_nothing_of_the_machine_and_is_written_alike(monkeypatch, tmp_path):
    text = releases.DATA.read_text()
    assert not re.search(r'"[^"]*(?<![\w.:*])/(?:\w+/)+', text)
    monkeypatch.setattr(releases, "DATA", tmp_path / "releases.json")
    releases.write(RECORDED)
    assert releases.DATA.read_text() == text and json.loads(text)["releases"] == RECORDED


def test_what_changed_is_told_row_by_row(capsys):
    relu = {
        "target": "H100",
        "gemm": "cublaslt",
        "kernels": 1,
        "gemms": [
            {
                "count": 1,
                "library": "cublasLt",
                "lhs_dtype": "f8e4m3fn",
                "rhs_dtype": "f8e4m3fn",
                "math_dtype": "f8e4m3fn",
                "epilogue": "RELU",
                "amax": False,
                "alpha": 1,
                "beta": 0,
                "scales": "abd",
                "precision": "DEFAULT",
                "algorithm": "",
                "tile": "",
                "out_dtype": "f8e4m3fn",
                "outside": 0,
            }
        ],
    }
    lost = copy.deepcopy(relu) | {"kernels": 2}
    lost["gemms"][0] |= {"epilogue": "DEFAULT", "outside": 1}
    rows = {"1.9": {"relu": relu, "same": relu}, "1.10": {"relu": lost, "same": relu}}
    releases.print_changes({version: {"rows": made} for version, made in rows.items()})
    assert capsys.readouterr().out.splitlines()[1:] == [
        "JAX 1.9 to 1.10: 1 of 2 rows changed",
        "  relu",
        "    1.9       1 kernel: cublasLt f8e4m3fn RELU scales abd -> f8e4m3fn",
        "    1.10      2 kernels: cublasLt f8e4m3fn DEFAULT scales abd -> f8e4m3fn (1 outside)",
    ]
    assert releases.changes(
        {"new": relu}, {"new": {"target": "H100", "gemm": "cublaslt", "error": "E: x"}}
    ) == [
        ("new", "1 kernel: cublasLt f8e4m3fn RELU scales abd -> f8e4m3fn", "does not compile: E: x")
    ]


def test_recording_keeps_the_date_of_what_has_not_changed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(releases, "DATA", tmp_path / "releases.json")
    releases.write(RECORDED)
    before = releases.DATA.read_text()
    again = copy.deepcopy(RECORDED[NEWEST]) | {"date": "2100-01-01"}
    again["digest"] = digest(again)
    monkeypatch.setattr(releases, "environment", lambda version: sys.executable)
    monkeypatch.setattr(data, "measure", lambda *_: again)
    releases.record([NEWEST])
    assert releases.DATA.read_text() == before
    again["rows"]["relu"]["kernels"] += 1
    releases.record([NEWEST])
    assert "relu\n    was 1 kernel" in capsys.readouterr().out
    assert releases.read()[NEWEST]["date"] == "2100-01-01"
