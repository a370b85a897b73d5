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
    LINES,
    Figure,
    Record,
    goals,
    load,
    load_published,
    load_scale,
    load_sums,
    load_tensors,
    read_lines,
    rows_of,
)
from tools.recorders.form import problems

FOLDER = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
RECORDED = sorted(FOLDER.glob(f"*/{LINES}"))


def provenance(**changed) -> dict:
    return {
        "device": "NVIDIA H200",
        "rehearsal": False,
        "driver": "580.1",
        "cuda": "13.0",
        "cuda_runtime": "13.0",
        "cublas": "13.1.0",
        "jax": "0.12.0",
        "python": "3.12.3",
        "system": "Linux x86_64",
        "packages": {},
        "date": "2026-01-02",
        "commit": "0123456789" * 4,
        "changed": False,
        "xla_flags": "",
    } | changed


def line(what: dict, form: str = "FP8", run: int = 0, case: str = "8192: main") -> dict:
    at = "2026-01-02T03:04:05+00:00"
    return {
        "run": run,
        "stage": "first",
        "at": at,
        "part": "speed",
        "case": case,
        "form": form,
    } | what


def wall(seconds: float) -> dict:
    return {"wall": {"seconds": seconds, "calls": 3, "chip": {}}}


def device(seconds: float, launches: float = 1) -> dict:
    return {
        "device": {"seconds": seconds, "launches": launches, "longest": [["x", seconds, launches]]}
    }


def write(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / LINES
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def impossible(lines: list[dict]) -> list[str]:
    """Forms whose time is shorter than the FLOPs take at the chip's peak: no call can be."""
    chip = TARGETS[
        next(name for name in ("H100", "H200") if name in lines[0]["provenance"]["device"])
    ]
    peak = chip.peak_flops["f8e4m3fn"]
    return [
        f"{case}: {form}"
        for (part, case, form), row in rows_of(lines).items()
        for seconds in (row.get("device_seconds"), row.get("wall_seconds"))
        if seconds and "flops" in row and row.get("gemms") and seconds < 0.95 * row["flops"] / peak
    ]


@pytest.mark.parametrize(
    "one",
    [
        {"provenance": provenance(device="cpu")},
        {"provenance": provenance(commit="abc")},
        {"provenance": provenance(date="today")},
        {"provenance": provenance(cublas="none")},
        {"provenance": provenance(host="mine")},
        line({}),
        line({"error": "FileNotFoundError: /home/user/file"}),
        line({"made": {}} | wall(1.0)),
        line(wall(0.0)),
        line({"device": {"seconds": 1.0}}),
        line({"made": {"by": "hand"}}),
    ],
)
def test_the_schema_refuses_a_line_that_says_too_little_or_too_much(one):
    assert problems({"provenance": provenance()}) == problems(line(wall(1.0))) == []
    assert problems(one)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_recorded_results_are_measurements_that_can_be(path):
    lines = read_lines(path)
    assert [problem for one in lines for problem in problems(one)] == []
    runs = [one["provenance"] for one in lines if "provenance" in one]
    assert not any(run["rehearsal"] for run in runs), "a rehearsal on the CPU is not a result"
    assert len({run["device"] for run in runs}) == 1 and impossible(lines) == []


KEPT = sorted(FOLDER.glob("*/programs.jsonl.gz"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_the_parser_reads_what_a_gpus_own_compiler_wrote(path):
    for row in map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines()):
        module = parse_hlo_module(row["hlo"])
        assert module.entry.instructions and report_gemms(module) is not None, row["form"]


def test_an_impossible_time_is_found():
    made = {"made": {"flops": 2 * 8192**3, "gemms": ["cublasLt"]}}
    lines = [{"provenance": provenance()}, line(made), line(wall(1e-3)), line(device(1e-4))]
    assert impossible(lines) == ["8192: main: FP8"]
    assert impossible([*lines[:3], line(device(1e-3))]) == []


def test_a_forms_lines_are_one_row():
    lines = [{"provenance": provenance()}, line({"made": {"kernels": 2, "right": True}})]
    lines += [line(wall(seconds)) for seconds in (3.0, 1.0, 2.0)]
    key = "speed", "8192: main", "FP8"
    row = rows_of(lines)[key]
    assert (row["wall_seconds"], row["quartiles"], row["looks"]) == (2.0, [1.5, 2.5], 3)
    assert row["device_seconds"] is None and row["no_clock"]
    seen = rows_of([*lines, line(device(1.5, 2))])[key]
    assert seen["device_seconds"] == 1.5 and not seen["no_clock"]
    # A clock that saw one of two kernels has not seen the whole.
    few = rows_of([*lines, line(device(1.5, 1))])[key]
    assert few["device_seconds"] is None and few["no_clock"].startswith("CUPTI saw 1 of 2")
    refused = rows_of([*lines, line({"device": {"no_clock": "CUPTI: no"}})])[key]
    assert refused["no_clock"] == "CUPTI: no"
    # A later run counts, unless it has only failed.
    assert rows_of([*lines, line(wall(9.0), run=1)])[key]["wall_seconds"] == 9.0
    assert rows_of([*lines, line({"error": "no"}, run=1)])[key]["wall_seconds"] == 2.0


def test_times_of_a_case_are_all_by_one_clock():
    lines = [{"provenance": provenance()}]
    for form in ("bf16", "FP8"):
        lines += [line(wall(2.0), form), line(device(1.0), form)]
    lines.append(line({"error": "no"}, "refused"))

    def times(lines: list[dict]) -> dict:
        cases = {"8192: main": {key[2]: row for key, row in rows_of(lines).items()}}
        return Record("speed", (provenance(),), cases).times("8192: main")

    assert times(lines) == {"bf16": 1.0, "FP8": 1.0}
    assert times([*lines, line(wall(4.0), "other")]) == {"bf16": 2.0, "FP8": 2.0, "other": 4.0}


def test_what_is_recorded_is_loaded_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    for model in ("h100", "h200"):
        run = {"provenance": provenance(device=f"NVIDIA {model.upper()}")}
        write(tmp_path / model, [run, line(wall(1.0))])
    first, second = load("speed", tmp_path)
    assert first.provenance["device"] == "NVIDIA H100"
    assert second.cases["8192: main"]["FP8"]["wall_seconds"] == 1.0
    facts = "NVIDIA H200", "driver 580.1", "CUDA 13.0", "cuBLAS 13.1.0", "JAX 0.12.0", "0123456"
    assert all(fact in second.source for fact in (*facts, "`make gpu`"))
    assert (first.chip, second.chip) == (TARGETS["H100"], TARGETS["H200"])
    assert "with changes" not in first.source and "2026" not in first.source
    runs = tuple(provenance(**run) for run in ({"commit": "1" * 40}, {"changed": True}))
    mixed = Record("speed", runs, {}).source
    assert "0123456 with changes; some cases with driver 580.1" in mixed and "1111111" in mixed
    assert load("train", tmp_path) == ()
    monkeypatch.setenv("FP8_RESULTS", str(tmp_path))
    assert len(load("speed", "elsewhere")) == 2


def test_a_rehearsal_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    write(tmp_path / "h200", [{"provenance": provenance(rehearsal=True)}, line(wall(1.0))])
    (rehearsal,) = load("speed", tmp_path)
    assert "REHEARSAL" in rehearsal.source and rehearsal.chip is None


@pytest.mark.parametrize("text", ["{\n", "[]\n", "{}\n", '{"part": "speed"}\n', "1\n"])
def test_a_line_that_is_none_is_named(tmp_path, monkeypatch, text):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    path = write(tmp_path / "h200", [{"provenance": provenance()}])
    path.write_text(path.read_text() + text)
    with pytest.raises(ValueError, match=r"measured.jsonl, line 2, is not as `make gpu` writes"):
        load("speed", tmp_path)


def test_parts_are_known_by_name():
    with pytest.raises(ValueError, match="parts are speed, agreement"):
        load("agreements")


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
        return {"training step": rows}

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
        unlike["training step"][form]["attention"] = attention
    assert "of two kinds of attention" in step.verdict(Record("train", (provenance(),), unlike))
    elsewhere = step.verdict(Record("train", (provenance(device="cpu"),), cases(0.1)))
    assert elsewhere.endswith("0.100, on cpu")
    assert step.verdict(
        Record("train", (provenance(),), {"training step": {"bf16": {"error": "x"}}})
    ).endswith("not measured")
    faster, *_ = goals("speed", "8192: main", FOLDER)
    rows = {
        name: {"device_seconds": seconds, "wall_seconds": 1e-3}
        for name, seconds in ((faster.of, 5e-4), (faster.over, 1e-3))
    }

    def verdict() -> str:
        return faster.verdict(Record("speed", (provenance(),), {"8192: main": rows}))

    assert verdict().endswith("2.000, reached")
    rows[faster.of]["device_seconds"] = None
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
    assert "not measured" not in said and ("nothing yet" in said) == (not RECORDED)
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
    with pytest.raises(ValueError, match="not as it was written: tools/recorders/tensor"):
        load_sums(tmp_path)
