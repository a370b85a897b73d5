"""Results recorded on GPUs: those in notebooks/results are possible, and bad files are refused."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from fp8lens.targets import model
from helpers import TARGETS, parse_hlo_module, report_gemms
from helpers.models import ladder
from helpers.records.results import (
    LINES,
    Figure,
    Record,
    goals,
    kernel_on_gpus,
    load,
    load_published,
    load_scale,
    load_sums,
    load_tensors,
    read_lines,
    rows_of,
)
from tests.form import problems

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
    peak = model(lines[0]["provenance"]["device"]).peak_flops["f8e4m3fn"]
    return [
        f"{case}: {form}"
        for (part, case, form), row in rows_of(lines).items()
        for seconds in (row.get("device_seconds"), row.get("wall_seconds"))
        if seconds and row.get("flops") and seconds < 0.95 * row["flops"] / peak
    ]


@pytest.mark.parametrize(
    "one",
    [
        {"provenance": provenance(device="cpu")},
        {"provenance": provenance(commit="abc")},
        {"provenance": provenance(host="mine")},
        line({}),
        line({"error": "FileNotFoundError: /home/user/file"}),
        line({"made": {}} | wall(1.0)),
        line(wall(0.0)),
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


def test_a_forms_lines_are_one_row():
    lines = [{"provenance": provenance()}, line({"made": {"kernels": 2, "right": True}})]
    lines += [line(wall(seconds)) for seconds in (3.0, 1.0, 2.0)]

    def row(*more: dict) -> dict:
        return rows_of([*lines, *more])["speed", "8192: main", "FP8"]

    assert (row()["wall_seconds"], row()["looks"], row()["device_seconds"]) == (2.0, 3, None)
    # A clock that saw one of two kernels has not seen the whole.
    assert row(line(device(1.5, 1)))["no_clock"].startswith("CUPTI saw 1 of 2")
    # A later run counts, unless it has failed.
    assert row(line(wall(9.0), run=1))["wall_seconds"] == 9.0
    assert row(line({"error": "no"}, run=1))["wall_seconds"] == 2.0


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
    for name in ("h100", "h200"):
        run = {"provenance": provenance(device=f"NVIDIA {name.upper()}")}
        write(tmp_path / name, [run, line(wall(1.0))])
    first, second = load("speed", tmp_path)
    assert second.cases["8192: main"]["FP8"]["wall_seconds"] == 1.0
    assert "NVIDIA H200" in second.source and "driver 580.1" in second.source
    assert (first.chip, second.chip) == (TARGETS["H100"], TARGETS["H200"])
    rehearsal = Record("speed", (provenance(rehearsal=True),), {})
    assert "REHEARSAL" in rehearsal.source and rehearsal.chip is None
    monkeypatch.setenv("FP8_RESULTS", str(tmp_path))
    assert len(load("speed", "elsewhere")) == 2
    write(tmp_path / "h100", [run]).write_text("{\n")
    with pytest.raises(ValueError, match=r"measured.jsonl, line 1"):
        load("speed", tmp_path)


def test_a_kernel_that_ran_on_a_gpu_is_right_or_wrong(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    assert "not measured" in kernel_on_gpus("one_pass", tmp_path)
    begun = {"provenance": provenance(device="NVIDIA H200")}
    key = {"run": 0, "part": "kernels", "case": "kernels", "form": "one_pass"}
    made = {"errors": [{"relative": 0.0}, {"relative": 0.25}], "right": False}
    write(tmp_path / "h200", [begun, key | {"made": made}])
    said = kernel_on_gpus("one_pass", tmp_path)
    assert said == "one_pass on an NVIDIA H200: WRONG, largest relative error of a result 2.5e-01"
    assert "not measured" in kernel_on_gpus("block_pass", tmp_path)


def test_a_step_whose_loss_jumps_has_not_trained(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    assert ladder.timed(tmp_path) == {}
    lines = [{"provenance": provenance(device="NVIDIA H200")}]
    steps = ("ladder", "AdamW", [2.0, 30.0, 1.9]), ("training step", "bf16", [2.0, 2.02, 1.9])
    for case, form, losses in steps:
        key = {"run": 0, "part": "train", "case": case, "form": form}
        chip = {"clock_mhz": 1500, "power_w": 690.0}
        lines += [key | {"made": {"losses": losses}}]
        lines += [key | {"wall": {"seconds": 0.5, "calls": 1, "chip": chip}}]
    write(tmp_path / "h200", lines)
    timed = ladder.timed(tmp_path)["H200"]
    assert {name: step.is_trained for name, step in timed.items()} == {
        "AdamW": False,
        "bf16, cudnn": True,
    }


# Goals --------------------------------------------------------------------------------------------


def test_a_goal_is_reached_or_missed_on_its_chip_by_its_own_clock():
    step = goals("train", "training step", FOLDER)[0]
    faster, *_ = goals("speed", "8192: main", FOLDER)

    def said(goal, one: dict, other: dict, name: str = "NVIDIA H200") -> str:
        cases = {goal.case: {goal.of: one, goal.over: other}}
        return goal.verdict(Record(goal.part, (provenance(device=name),), cases))

    for name, most in (("NVIDIA H200", 0.65), ("NVIDIA H100 80GB HBM3", 0.69)):
        for fp8, word in ((most - 0.001, "reached"), (most + 0.001, "MISSED")):
            verdict = said(step, {"wall_seconds": fp8}, {"wall_seconds": 1.0}, name)
            assert f"wanted at most {most} on an" in verdict and verdict.endswith(word)
    assert said(step, {"error": "x"}, {"wall_seconds": 1.0}).endswith("not measured")
    one, other = ({"device_seconds": time, "wall_seconds": 1.0} for time in (0.5, 1.0))
    assert "2.000; wanted at least" in said(faster, one, other)
    assert "1.000, by the host's clock" in said(faster, one | {"device_seconds": None}, other)


# Published ----------------------------------------------------------------------------------------

SANE = 0.8  # of the dense peak: what claims more needs a remark that says why to believe it


def numbers(text: str) -> set[float]:
    whole = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # 6,667 is one number
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?", whole)}


@pytest.mark.parametrize(
    "one", load_published(FOLDER) + load_scale(FOLDER), ids=lambda one: one.name
)
def test_each_published_number_is_in_its_quotes_and_can_be(one):
    said = [numbers(quote) for quote in one.quotes]
    for row in one.rows:
        figures = {row.value, row.over} - {None}
        shape = set(row.shape or ())
        assert figures | shape <= set().union(*said), row
        assert one.share(row) <= (1 if one.remark else SANE), row


def test_the_sources_of_what_others_published_stand_in_the_chapter():
    of_many_gpus = [url for one in load_scale(FOLDER) for url in (one.url, *one.beside)]
    urls = {
        "12_performance.md": [one.url for one in load_published(FOLDER)],
        "16_many_gpus.md": of_many_gpus,
    }
    for name, wanted in urls.items():
        chapter = (FOLDER.parent / name).read_text()
        assert [url for url in wanted if url not in chapter] == []


def test_no_published_kernel_is_faster_than_its_roofline():
    for one in load_published(FOLDER):
        for row in one.rows:
            if one.chip and row.shape and row.seconds:
                assert 0.2 < row.estimate(TARGETS[one.chip]) / row.seconds < 1, (one.name, row)


def test_a_figure_says_how_long_it_took_how_much_faster_that_is_and_what_the_roofline_says():
    by_rate = Figure("FP8", 100.0, "TFLOP/s", (64, 32, 16), over=50.0)
    by_time = Figure("FP8", 2.0, "ms", (8192, 8192, 8192), over=3.0, quantized="A", per="row")
    assert by_rate.seconds == pytest.approx(2 * 64 * 32 * 16 / 1e14) and by_rate.speedup == 2
    assert by_time.seconds == 2e-3 and by_time.speedup == 1.5 and by_time.flops == 2 * 8192**3
    chip = TARGETS["H100"]
    alone = Figure("FP8", 2.0, "ms", (8192, 8192, 8192)).estimate(chip)
    assert alone == pytest.approx(2 * 8192**3 / chip.peak_flops["f8e4m3fn"])
    assert by_time.estimate(chip) - alone == pytest.approx(3 * 8192**2 / chip.memory_bandwidth)
    assert Figure("a training run", 1.25, "times bf16").speedup == 1.25


# A training's tensors -----------------------------------------------------------------------------


def test_a_training_is_read_as_it_was_written(tmp_path):
    recorded = load_tensors(FOLDER)
    steps = len(recorded.losses)
    assert set(recorded.amaxes) == set(recorded.tensors) == set("xwg") and steps >= 500
    assert all(len(trace) == steps for trace in recorded.amaxes.values())
    assert np.mean(recorded.losses[-50:]) < 0.6 * recorded.losses[0]
    text = (FOLDER / "tensors.json").read_text()
    (tmp_path / "tensors.json").write_text(text.replace('"parameters": 5', '"parameters": 6'))
    with pytest.raises(ValueError, match="not as it was recorded: `make tensors`"):
        load_tensors(tmp_path)


# Sums on a tensor core, as others measured them ---------------------------------------------------


def test_sums_are_those_of_a_tensor_core():
    source, found = load_sums(FOLDER)
    assert source.startswith("NVIDIA H100") and set(found) == {"float8_e4m3fn", "float8_e5m2"}
    for name, (a, b, sums) in found.items():
        assert a.dtype == b.dtype == name
        products = a.astype(np.float64) * b.astype(np.float64)
        exact, largest = np.sum(products, axis=1), np.max(np.abs(products), axis=1)
        # Each of 32 products loses less than a unit 13 bits below the largest exponent, and so
        # does the sum.
        assert np.all(np.abs(sums - exact) <= 33 * 2.0**-12 * np.maximum(largest, np.abs(exact)))
        assert np.any(sums != exact)
