"""Results recorded on GPUs: what is in notebooks/results is whole and possible, and bad files are refused."""
import json
from pathlib import Path

import jsonschema
import pytest

from helpers import TARGETS
from helpers.results import COMMANDS, Record, load, not_measured

FOLDER = Path(__file__).resolve().parent.parent / "notebooks" / "results"
SCHEMA = json.loads((FOLDER / "schema.json").read_text())
RECORDED = sorted(FOLDER.glob("*/*.json"))


def problems(data: dict) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


def provenance(**changed) -> dict:
    return {"device": "NVIDIA H200", "rehearsal": False, "driver": "580.1", "cuda": "13.0", "cuda_runtime": "13.0",
            "cublas": "13.1.0", "power_limit": "700.00 W", "max_clock": "1980 MHz", "jax": "0.12.0", "python": "3.12.3",
            "system": "Linux x86_64", "packages": {}, "date": "2026-01-02", "commit": "0123456789" * 4,
            "changed": False, "command": "make gpu", "xla_flags": ""} | changed


def record(part: str = "notebooks", cases: dict | None = None, **changed) -> dict:
    cases = cases or {"01": {"passed": True, "code_cells": 3, "seconds": 1.5, "took": 2.0}}
    return {"schema": 1, "part": part, "provenance": provenance(**changed), "cases": cases}


def faster_than_the_chip(data: dict) -> list[str]:
    """Forms whose time is shorter than the FLOPs or the bytes take at the chip's peak: no call can be."""
    chip = Record("speed", data["provenance"], data["cases"]).chip
    return [f"{case}: {name}" for case, row in data["cases"].items() for name, form in row.get("forms", {}).items()
            if form.get("device_seconds") and form.get("gemms")
            and form["device_seconds"] < 0.95 * row["flops"] / chip.peak_flops["f8e4m3fn"]]


def timed_without_all_kernels(data: dict) -> list[str]:
    """Forms of which the GPU's clock saw fewer kernels than there are matmuls: their time is not the whole."""
    return [f"{case}: {name}" for case, row in data["cases"].items()
            for name, form in {**row.get("forms", {}), **row.get("precisions", {})}.items()
            if form.get("device_seconds") and form["launches"] < len(form.get("gemms", "1"))]


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert problems(record()) == []
    assert set(SCHEMA["properties"]["part"]["enum"]) == set(COMMANDS)


@pytest.mark.parametrize("changed, where", [
    ({"device": "cpu"}, "device"), ({"commit": "abc"}, "commit"), ({"date": "today"}, "date"),
    ({"cublas": "none"}, "cublas"), ({"command": "by hand"}, "command"), ({"host": "mine"}, "provenance"),
])
def test_the_schema_refuses_a_provenance_that_says_too_little_or_too_much(changed, where):
    assert any(where in problem for problem in problems(record(**changed)))


@pytest.mark.parametrize("case", [
    {"passed": True}, {"passed": False, "code_cells": 3, "seconds": 1.0, "took": 2.0},
    {"passed": True, "code_cells": 3, "seconds": 0, "took": 2.0}, {"error": "FileNotFoundError: /home/user/file"},
])
def test_the_schema_refuses_a_case_that_is_not_whole(case):
    assert problems(record(cases={"01": case}))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_results_are_measurements_that_can_be(path):
    data = json.loads(path.read_text())
    assert problems(data) == []
    assert not data["provenance"]["rehearsal"], "a rehearsal on the CPU is not a result"
    assert data["part"] == path.stem
    assert faster_than_the_chip(data) == [] and timed_without_all_kernels(data) == []


def test_an_impossible_time_is_found():
    form = {"device_seconds": 1e-4, "wall_seconds": 1e-4, "quartiles": [1e-4, 1e-4], "launches": 1, "longest": ["x"],
            "gemms": ["cublasLt"]}
    case = {"shape": [8192] * 3, "flops": 2 * 8192**3, "forms": {"FP8": form, "slow": form | {"device_seconds": 1e-3}},
            "took": 1.0}
    data = record("speed", {"8192: main": case})
    assert problems(data) == [] and faster_than_the_chip(data) == ["8192: main: FP8"]
    assert timed_without_all_kernels(data) == []
    form["gemms"] = ["cublasLt", "cublasLt"]
    assert timed_without_all_kernels(data) == ["8192: main: FP8"]


def test_what_is_recorded_is_loaded_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    for model in ("h100", "h200"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "notebooks.json").write_text(json.dumps(record(device=f"NVIDIA {model.upper()}")))
    first, second = load("notebooks", tmp_path)
    assert first.provenance["device"] == "NVIDIA H100" and second.cases["01"]["passed"]
    for fact in ("NVIDIA H200", "driver 580.1", "CUDA 13.0", "cuBLAS 13.1.0", "JAX 0.12.0", "0123456", "`make gpu`"):
        assert fact in second.source
    assert (first.chip, second.chip) == (TARGETS["H100"], TARGETS["H200"])
    assert "with changes" not in first.source and "2026" not in first.source
    assert load("speed", tmp_path) == ()
    monkeypatch.setenv("FP8_RESULTS", str(tmp_path))
    assert len(load("notebooks", "elsewhere")) == 2


def test_a_rehearsal_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "notebooks.json").write_text(json.dumps(record(rehearsal=True, device="cpu")))
    (rehearsal,) = load("notebooks", tmp_path)
    assert "REHEARSAL" in rehearsal.source and rehearsal.chip is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps(record("speed")), '{"part": "notebooks", "cases": {}}'])
def test_a_file_that_is_no_record_is_named_with_the_command_that_writes_one(tmp_path, monkeypatch, text):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "notebooks.json").write_text(text)
    with pytest.raises(ValueError, match=r"notebooks.json is no record of 'notebooks'.*`make gpu`"):
        load("notebooks", tmp_path)


def test_parts_are_known_by_name():
    with pytest.raises(ValueError, match="parts are agreement, numerics"):
        load("agreements")
    assert "make train-bench" in not_measured("train") and "make gpu" in not_measured("speed")


def test_choices_of_all_cases_are_one_text_for_xla():
    cases = {"one": {"choices": "results {\n}\n"}, "two": {"choices": ""}, "failed": {"error": "no"}}
    assert Record("autotune", provenance(), cases).choices == "version: 3\nresults {\n}\n"
