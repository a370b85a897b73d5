"""Results recorded on GPUs: those in notebooks/results are possible, and bad files are refused."""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import TARGETS, parse_hlo_module, report_gemms
from helpers.records.results import (
    COMMANDS,
    Figure,
    Record,
    digest,
    goals,
    load,
    load_published,
    load_scale,
    load_sums,
    load_tensors,
    not_measured,
)
from tools.records.form import problems

FOLDER = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
RECORDED = sorted(FOLDER.glob("*/*.json"))


def provenance(**changed) -> dict:
    return {
        "device": "NVIDIA H200",
        "rehearsal": False,
        "driver": "580.1",
        "cuda": "13.0",
        "cuda_runtime": "13.0",
        "cublas": "13.1.0",
        "power_limit": "700.00 W",
        "max_clock": "1980 MHz",
        "jax": "0.12.0",
        "python": "3.12.3",
        "system": "Linux x86_64",
        "packages": {},
        "date": "2026-01-02",
        "commit": "0123456789" * 4,
        "changed": False,
        "command": "make gpu",
        "xla_flags": "",
    } | changed


WHEN = {"run": 0, "at": "2026-01-02T03:04:05+00:00"}


def record(part: str = "notebooks", cases: dict | None = None, **changed) -> dict:
    cases = cases or {"01": {"passed": True, "code_cells": 3, "seconds": 1.5, "took": 2.0} | WHEN}
    made = {"schema": 2, "part": part, "runs": [provenance(**changed)], "cases": cases}
    return made | {"digest": digest(made)}


def faster_than_the_chip(data: dict) -> list[str]:
    """Forms whose time is shorter than the FLOPs or the bytes take at the chip's peak: no call can
    be.
    """
    chip = Record("speed", data["runs"], data["cases"]).chip
    return [
        f"{case}: {name}"
        for case, row in data["cases"].items()
        for name, form in row.get("forms", {}).items()
        if form.get("device_seconds")
        and form.get("gemms")
        and form["device_seconds"] < 0.95 * row["flops"] / chip.peak_flops["f8e4m3fn"]
    ]


def timed_without_all_kernels(data: dict) -> list[str]:
    """Forms of which the GPU's clock saw fewer kernels than there are matmuls: their time is not
    the whole.
    """
    return [
        f"{case}: {name}"
        for case, row in data["cases"].items()
        for name, form in {**row.get("forms", {}), **row.get("precisions", {})}.items()
        if form.get("device_seconds") and form["launches"] < len(form.get("gemms", "1"))
    ]


def test_the_schema_has_every_part():
    assert problems(record()) == []
    schema = json.loads((FOLDER / "schema.json").read_text())
    assert set(schema["properties"]["part"]["enum"]) == set(COMMANDS)


@pytest.mark.parametrize(
    "changed, where",
    [
        ({"device": "cpu"}, "device"),
        ({"commit": "abc"}, "commit"),
        ({"date": "today"}, "date"),
        ({"cublas": "none"}, "cublas"),
        ({"command": "by hand"}, "command"),
        ({"host": "mine"}, "runs"),
    ],
)
def test_the_schema_refuses_a_provenance_that_says_too_little_or_too_much(changed, where):
    assert any(where in problem for problem in problems(record(**changed)))


@pytest.mark.parametrize(
    "case",
    [
        {"passed": True} | WHEN,
        {"passed": False, "code_cells": 3, "seconds": 1.0, "took": 2.0} | WHEN,
        {"passed": True, "code_cells": 3, "seconds": 0, "took": 2.0} | WHEN,
        {"passed": True, "code_cells": 3, "seconds": 1.0, "took": 2.0, "run": 0},
        {"error": "FileNotFoundError: /home/user/file"} | WHEN,
        {"error": "RuntimeError: no"},
    ],
)
def test_the_schema_refuses_a_case_that_is_not_whole(case):
    assert problems(record(cases={"01": case}))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recorded_results_are_measurements_that_can_be(path):
    data = json.loads(path.read_text())
    assert problems(data) == []
    assert not any(run["rehearsal"] for run in data["runs"]), (
        "a rehearsal on the CPU is not a result"
    )
    assert len({run["device"] for run in data["runs"]}) == 1
    assert {case["run"] for case in data["cases"].values()} == set(range(len(data["runs"])))
    assert data["part"] == path.stem and data["digest"] == digest(data)
    assert faster_than_the_chip(data) == [] and timed_without_all_kernels(data) == []


KEPT = sorted(FOLDER.glob("*/hlo.jsonl.gz"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_the_parser_reads_what_a_gpus_own_compiler_wrote(path):
    for row in map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines()):
        module = parse_hlo_module(row["hlo"])
        assert module.entry.instructions and report_gemms(module) is not None, row["program"]


def timed(seconds: float | None, **more) -> dict:
    row = {
        "device_seconds": seconds,
        "wall_seconds": 1e-3,
        "quartiles": [1e-4, 1e-4],
        "launches": 1,
        "longest": [["x", 1e-4, 1]],
        **more,
    }
    return row if seconds else row | {"no_clock": "CUPTI recorded no kernel"}


def test_an_impossible_time_is_found():
    form = timed(1e-4, gemms=["cublasLt"])
    case = {
        "shape": [8192] * 3,
        "flops": 2 * 8192**3,
        "forms": {"FP8": form, "slow": form | {"device_seconds": 1e-3}},
        "took": 1.0,
    } | WHEN
    data = record("speed", {"8192: main": case})
    assert problems(data) == [] and faster_than_the_chip(data) == ["8192: main: FP8"]
    assert timed_without_all_kernels(data) == []
    form["gemms"] = ["cublasLt", "cublasLt"]
    assert timed_without_all_kernels(data) == ["8192: main: FP8"]
    del form["launches"]
    assert problems(data)


def test_a_time_that_is_not_the_gpus_says_why():
    case = {"shape": [8] * 3, "flops": 1024, "forms": {"FP8": timed(None)}, "took": 1.0} | WHEN
    assert problems(record("speed", {"x": case})) == []
    del case["forms"]["FP8"]["no_clock"]
    assert problems(record("speed", {"x": case}))


def test_what_is_recorded_is_loaded_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    for model in ("h100", "h200"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "notebooks.json").write_text(
            json.dumps(record(device=f"NVIDIA {model.upper()}"))
        )
    first, second = load("notebooks", tmp_path)
    assert first.provenance["device"] == "NVIDIA H100" and second.cases["01"]["passed"]
    for fact in (
        "NVIDIA H200",
        "driver 580.1",
        "CUDA 13.0",
        "cuBLAS 13.1.0",
        "JAX 0.12.0",
        "0123456",
        "`make gpu`",
    ):
        assert fact in second.source
    assert (first.chip, second.chip) == (TARGETS["H100"], TARGETS["H200"])
    assert "with changes" not in first.source and "2026" not in first.source
    runs = [
        {"commit": "1" * 40, "changed": None},
        {"changed": True},
        {"changed": True, "date": "2027-01-01"},
    ]
    mixed = Record("notebooks", tuple(provenance(**run) for run in runs), {}).source
    assert (
        mixed.count("cuBLAS") == 2 and "0123456 with changes; some cases with driver 580.1" in mixed
    )
    assert "1111111, not compared" in mixed
    assert load("speed", tmp_path) == ()
    monkeypatch.setenv("FP8_RESULTS", str(tmp_path))
    assert len(load("notebooks", "elsewhere")) == 2


def test_a_rehearsal_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "notebooks.json").write_text(
        json.dumps(record(rehearsal=True, device="cpu"))
    )
    (rehearsal,) = load("notebooks", tmp_path)
    assert "REHEARSAL" in rehearsal.source and rehearsal.chip is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        json.dumps(record("speed")),
        '{"part": "notebooks", "cases": {}}',
        '{"part": "notebooks", "runs": [], "cases": {}}',
        json.dumps(record()).replace('"seconds": 1.5', '"seconds": 1.4'),
    ],
)
def test_a_file_that_is_no_record_is_named_with_the_command_that_writes_one(
    tmp_path, monkeypatch, text
):
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
    cases = {
        "one": {"choices": "results {\n}\n"},
        "two": {"choices": ""},
        "failed": {"error": "no"},
    }
    assert Record("autotune", (provenance(),), cases).choices == "version: 3\nresults {\n}\n"


# Goals --------------------------------------------------------------------------------------------


def test_goals_are_found_by_part_and_case():
    for part in ("speed", "train"):
        for one in goals(part, None, FOLDER):
            assert one in goals(one.part, one.case, FOLDER)
            assert not goals(one.part, "elsewhere", FOLDER)


def test_a_goal_is_reached_or_missed_by_its_own_clock_or_says_which():
    step = goals("train", "training step", FOLDER)[0]

    def cases(fp8: float) -> dict:
        rows = {"bf16": {"wall_seconds": 1.0}, "bf16+fp8": {"wall_seconds": fp8}}
        return {"training step": {"precisions": rows}}

    for device, most in (("NVIDIA H200", 0.65), ("NVIDIA H100 80GB HBM3", 0.69)):
        for fp8, word in ((most - 0.001, "reached"), (most + 0.001, "MISSED")):
            said = step.verdict(Record("train", (provenance(device=device),), cases(fp8)))
            assert f"wanted at most {most} on an" in said and said.endswith(f"{fp8:.3f}, {word}")
    assert (
        "0.69 on an H100 (roofline 0.679), 0.65 on an H200 (roofline 0.643); not measured"
        in step.verdict(None)
    )
    unlike = cases(0.1)
    for form, attention in (("bf16", "cudnn"), ("bf16+fp8", "xla")):
        unlike["training step"]["precisions"][form]["attention"] = attention
    assert "of two kinds of attention" in step.verdict(Record("train", (provenance(),), unlike))
    elsewhere = step.verdict(Record("train", (provenance(device="cpu"),), cases(0.1)))
    assert elsewhere.endswith("0.100, on cpu")
    assert step.verdict(
        Record("train", (provenance(),), {"training step": {"error": "x"}})
    ).endswith("not measured")
    faster, *_ = goals("speed", "8192: main", FOLDER)
    forms = {faster.of: timed(5e-4), faster.over: timed(1e-3)}

    def verdict() -> str:
        found = {"8192: main": {"forms": forms}}
        return faster.verdict(Record("speed", (provenance(),), found))

    assert verdict().endswith("2.000, reached")
    forms[faster.of] = timed(None)
    assert verdict().endswith("1.000, MISSED, by the host's clock")


def test_the_form_that_torch_is_compared_with_is_like_it():
    like, as_is = (goal for goal in goals("speed", "8192: main", FOLDER) if "torch" in goal.name)
    assert (
        like.of == "FP8 scaled, FP8 out, untuned"
        and like.over == as_is.over == "torch._scaled_mm, FP8 out"
    )
    assert "amax" in as_is.of and "like for like" in like.name


# Published ----------------------------------------------------------------------------------------

PUBLISHED = json.loads((FOLDER / "published.json").read_text())["figures"]
CHAPTER = FOLDER.parent / "11_performance.md"


def test_the_sources_of_what_others_published_stand_in_the_chapter():
    found = load_published(FOLDER)
    assert [one.name for one in found] == [one["name"] for one in PUBLISHED] and len(found) > 8
    chapter = CHAPTER.read_text()
    for one in found:
        assert one.url in chapter, f"{one.name} is in no reference"
        for row in one.rows:
            if one.chip and row.shape and row.seconds:  # no kernel is faster than its roofline
                assert 0.2 < row.estimate(TARGETS[one.chip]) / row.seconds < 1, (one.name, row)


def test_the_sources_of_what_others_published_of_many_gpus_stand_in_their_chapters():
    names = "14_many_gpus.md", "15_experts.md"
    chapters = "".join((FOLDER.parent / name).read_text() for name in names)
    for one in load_scale(FOLDER):
        for url in (one.url, *one.beside):
            assert url in chapters, f"{one.name} is in no reference"


def test_a_figure_says_how_long_it_took_how_much_faster_that_is_and_what_the_roofline_says():
    by_rate = Figure("FP8", 100.0, "TFLOP/s", (64, 32, 16), over=50.0)
    by_time = Figure("FP8", 2.0, "ms", (8192, 8192, 8192), over=3.0, quantized="A", per="row")
    assert by_rate.seconds == pytest.approx(2 * 64 * 32 * 16 / 1e14) and by_rate.speedup == 2
    assert by_time.seconds == 2e-3 and by_time.speedup == 1.5 and by_time.flops == 2 * 8192**3
    chip = TARGETS["H100"]
    alone = Figure("FP8", 2.0, "ms", (8192, 8192, 8192)).estimate(chip)
    assert alone == pytest.approx(2 * 8192**3 / chip.peak_flops["f8e4m3fn"])
    assert by_time.estimate(chip) - alone == pytest.approx(3 * 8192**2 / chip.memory_bandwidth)
    by_tensor = Figure("FP8", 2.0, "ms", (8192, 8192, 8192), quantized="A", per="tensor")
    assert (by_tensor.bytes_moved, dataclasses.replace(by_tensor, known=True).bytes_moved) == (5, 3)
    rest = Figure("a training run", 1.25, "times bf16")
    assert (rest.speedup, rest.seconds, rest.flops, rest.dtype) == (1.25, None, 0, None)
    assert (
        Figure("bf16, forward", 1, "ms").dtype == "bf16"
        and Figure("FP8", 9.0, "tokens/s").speedup is None
    )


ROWS_OF_TABLE = [
    {"of": "FP8", "value": 700, "unit": "TFLOP/s", "shape": [64, 64, 128]},
    {"of": "FP8", "value": 1126, "unit": "TFLOP/s", "shape": [64, 64, 128]},
]


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"chip": "H10"}, "unknown chip"),
        ({"quotes": []}, "in no quote: 64, 1126"),
        (
            {
                "quotes": ["| 64 | 64 | 128 | 700 |", "| 64 | 64 | 32 | 1126 |"],
                "rows": ROWS_OF_TABLE,
            },
            "1126 is in no quote that has its shape",
        ),
        ({"by": "me"}, "by"),
        ({"quotes": ["1127 TFLOPS"]}, "in no quote: 64, 1126"),
        ({"rows": [{"of": "FP8", "value": 1126, "unit": "TFLOP/s", "over": 7}]}, "in no quote: 7"),
        (
            {"rows": [{"of": "FP8", "value": 1126, "unit": "TFLOP/s", "shape": [64, 64, 63]}]},
            "in no quote: 63",
        ),
        ({"rows": [{"of": "FP8", "unit": "TFLOP/s"}]}, "value"),
        (
            {"rows": [{"of": "FP8", "value": 1600, "unit": "TFLOP/s"}]},
            "81% of the H100's peak: say in remark",
        ),
        (
            {
                "rows": [{"of": "FP8", "value": 2000, "unit": "TFLOP/s"}],
                "remark": "a rest before each",
            },
            "101% of the H100's",
        ),
        ({"rows": [{"of": "bf16", "value": 1126, "unit": "TFLOP/s"}]}, "114% of the H100's"),
        (
            {"rows": [{"of": "bf16", "value": 1, "unit": "ms", "shape": [8192, 8192, 8192]}]},
            "111% of the H100's",
        ),
    ],
)
def test_a_published_figure_that_cannot_be_so_is_refused_by_name(tmp_path, changed, said):
    entry = {
        "name": "ours",
        "url": "https://example.org/a",
        "date": "2026-01-02",
        "hardware": "NVIDIA H100",
        "chip": "H100",
        "counts": "one matmul",
        "baseline": "none",
        "remark": "",
        "quotes": ["1126 TFLOPS for (64, 64, 64); 1600, 2000, 1 ms for 8192"],
        "rows": [{"of": "FP8", "value": 1126, "unit": "TFLOP/s", "shape": [64, 64, 64]}],
    }
    path = tmp_path / "published.json"
    path.write_text(json.dumps({"figures": [entry]}))
    assert load_published(tmp_path)[0].rows[0].shape == (64, 64, 64)
    path.write_text(json.dumps({"figures": [entry, entry | {"name": "theirs"} | changed]}))
    with pytest.raises(ValueError, match=f"published.json: 'theirs': .*{re.escape(said)}"):
        load_published(tmp_path)
    path.write_text(json.dumps({"figures": [entry, entry]}))
    with pytest.raises(ValueError, match="one name"):
        load_published(tmp_path)


def test_the_chapter_says_once_that_nothing_was_measured():
    """A column or a table is there where there is something in it."""
    outputs = [
        output.get("text", "")
        for cell in json.loads(CHAPTER.with_suffix(".ipynb").read_text())["cells"]
        for output in cell.get("outputs", ())
    ]
    said = "".join("".join(text) for text in outputs)
    assert "not measured" not in said and ("nothing yet" in said) == (
        not any(FOLDER.glob("h*/*.json"))
    )
    assert RECORDED or not re.search("MISSED|, reached$", said, re.M)


# A training's tensors -----------------------------------------------------------------------------


def test_a_training_is_read_as_it_was_written(tmp_path):
    recorded = load_tensors(FOLDER)
    steps = len(recorded.losses)
    assert set(recorded.amaxes) == set(recorded.tensors) == set("xwg") and steps >= 500
    assert all(len(trace) == steps for trace in recorded.amaxes.values())
    assert np.mean(recorded.losses[-50:]) < 0.6 * recorded.losses[0]
    (tokens, k), (n, k_of_w), of_g = (recorded.tensors[name].shape for name in "xwg")
    assert k_of_w == k and of_g == (tokens, n)
    for tensor in recorded.tensors.values():
        assert tensor.dtype == jnp.bfloat16 and np.isfinite(tensor.astype(np.float32)).all()
    text = (FOLDER / "tensors.json").read_text()
    (tmp_path / "tensors.json").write_text(text.replace('"parameters": 5', '"parameters": 6'))
    with pytest.raises(ValueError, match="not as it was recorded: `make tensors`"):
        load_tensors(tmp_path)


# Sums on a tensor core, as others measured them ---------------------------------------------------


def test_sums_are_read_as_they_were_written(tmp_path):
    source, found = load_sums(FOLDER)
    assert source.startswith("NVIDIA H100") and set(found) == {"float8_e4m3fn", "float8_e5m2"}
    for name, (a, b, sums) in found.items():
        assert (
            a.dtype == b.dtype == name
            and a.shape == b.shape == (1000, 32)
            and sums.shape == (1000,)
        )
        exact = np.sum(a.astype(np.float64) * b.astype(np.float64), axis=1)
        largest = np.max(np.abs(a.astype(np.float64) * b.astype(np.float64)), axis=1)
        # Each of 32 products loses less than a unit 13 bits below the largest exponent, and so
        # does the sum.
        assert np.all(np.abs(sums - exact) <= 33 * 2.0**-12 * np.maximum(largest, np.abs(exact)))
        assert np.any(sums != exact)
    text = (FOLDER / "sums.json").read_text()
    (tmp_path / "sums.json").write_text(text.replace('"each": 5', '"each": 6'))
    with pytest.raises(ValueError, match="not as it was written: tools/records/sums.py"):
        load_sums(tmp_path)
