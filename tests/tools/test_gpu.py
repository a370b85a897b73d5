"""What `make gpu` does, rehearsed with a GPU that is not there: `tools.gpu.rehearsal` answers like
an H200, and its clock works, crashes, hangs or is refused. NIGHTLY=1 rehearses all stages, from the
folder that is carried to a GPU machine, with only the packages that such a machine has."""

import gzip
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

from fp8lens import parse_hlo_module, report_gemms
from helpers.numerics import blocks
from helpers.records.results import LINES, load, read_lines, rows_of
from tests.weekly import NIGHTLY
from tools.files import of_project
from tools.gpu import agenda, bundle, errors, lines, matmuls, numerics, rehearsal, stage
from tools.gpu.lines import Key
from tools.recorders.form import problems

ROOT = Path(__file__).resolve().parent.parent.parent
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)
SAMPLE = ("fused", "agreement", "sums", "kernels", "load")  # quick stages


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tools.gpu", *map(str, words)]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*words),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def file_of(folder: Path) -> Path:
    return folder / "h200" / LINES


def timed(rows: dict) -> dict:
    return {key: row for key, row in rows.items() if "wall_seconds" in row}


# A run that goes well -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> Path:
    """What a rehearsal wrote: of some stages; with NIGHTLY=1 of all."""
    folder = tmp_path_factory.mktemp("rehearsed")
    done = run("--rehearse", "--minutes", "30", "--results", folder, *([] if NIGHTLY else SAMPLE))
    assert done.returncode == 0 and "wrong: none" in done.stdout, done.stdout
    assert "FAILED" not in done.stdout, done.stdout
    return folder


@needs_compiler
def test_every_line_is_as_the_schema_says(rehearsed):
    found = read_lines(file_of(rehearsed))
    assert [problem for line in found for problem in problems(line)] == []
    wanted = [one.name for one in agenda.STAGES if NIGHTLY or one.name in SAMPLE]
    in_file = [line["stage"] for line in found if "stage" in line]
    assert [*dict.fromkeys(in_file)] == ["clock", *wanted]


@needs_compiler
def test_every_form_is_right_and_timed_by_both_clocks(rehearsed):
    rows = rows_of(read_lines(file_of(rehearsed)))
    for key, row in rows.items():
        assert "error" not in row and row.get("right", True), (key, row)
        assert "right" in row or {"sums", "burst_seconds", "kernels_seen", "refused"} & row.keys()
    for row in timed(rows).values():  # the clock that is not there sees one kernel of each call
        assert row["device_seconds"] or row["no_clock"].startswith("CUPTI saw 1 of "), row
    assert any(row["device_seconds"] for row in timed(rows).values())
    assert {"one_pass", "by_block", "ragged_matmul"} <= {key[2] for key in rows}


@needs_compiler
def test_cupti_is_asked_after_the_hosts_clock(rehearsed):
    """In each stage, which is a process."""
    found = [line for line in read_lines(file_of(rehearsed)) if "stage" in line]
    for name in {line["stage"] for line in found}:
        kinds = ["device" in line for line in found if line["stage"] == name]
        assert kinds == sorted(kinds), name


@needs_compiler
def test_programs_are_kept_as_the_compiler_wrote_them(rehearsed):
    with gzip.open(file_of(rehearsed).with_name(lines.PROGRAMS), "rt") as kept:
        programs = [json.loads(line) for line in kept]
    assert len(programs) > 15 and not any(re.search(r'"/\w', one["hlo"]) for one in programs)
    fused = [one for one in programs if one["form"] == "+ bias + gelu + amax"]
    assert len(report_gemms(parse_hlo_module(fused[0]["hlo"])).fp8_rows) == 1


@needs_compiler
def test_chapters_read_what_was_written(rehearsed, monkeypatch):
    monkeypatch.delenv("FP8_RESULTS", raising=False)
    (record,) = load("speed", rehearsed)
    times = record.times("8192: what is fused")
    assert set(times) >= {"bf16", "+ relu", "unfused: + relu"} and min(times.values()) > 0
    assert "REHEARSAL" in record.source and record.chip is None


@needs_compiler
def test_what_is_known_is_not_measured_again(rehearsed, tmp_path):
    """A second call goes on from the results of the first, which lie elsewhere."""
    before = read_lines(file_of(rehearsed))
    more = ("--rehearse", "--results", tmp_path, "--earlier", rehearsed, "sums", "kernels")
    done = run(*more)
    assert done.returncode == 0, done.stdout
    after = read_lines(file_of(tmp_path))
    assert after[: len(before)] == before and set(after[len(before)]) == {"provenance"}
    assert len(after) == len(before) + 1


# What can go wrong --------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "how", ["crashes", "hangs", "refused", "crashes:2", "hangs:2", "refused:2"]
)
def test_a_clock_that_fails_costs_no_time_by_the_host(how, tmp_path):
    """From the probe on, or only in a stage's process."""
    if how.startswith("hangs") and not NIGHTLY:
        pytest.skip("waits for its limits: NIGHTLY=1 does")
    done = run("--rehearse", how, "--minutes", "4", "--results", tmp_path, "blocks")
    assert done.returncode == 0, done.stdout
    rows = timed(rows_of(read_lines(file_of(tmp_path))))
    assert len(rows) == 5 and not any("error" in row for row in rows.values())
    seen = [row for row in rows.values() if row["device_seconds"]]
    assert len(seen) == (1 if how.endswith(":2") else 0)
    if how == "crashes:2":
        assert any("SIGSEGV" in row["no_clock"] for row in rows.values())


@needs_compiler
def test_a_run_that_is_killed_keeps_all_that_was_measured(tmp_path):
    """At any second: here, after some lines; and the next run measures the rest alone."""
    path = file_of(tmp_path)
    words = command("--rehearse", "--minutes", "5", "--results", tmp_path, "sums", "blocks")
    for wanted in (4, 12):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.time() + 120
        while time.time() < deadline and (not path.exists() or len(read_lines(path)) < wanted):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)  # the stage's process dies with the one that waits for it
        kept = path.read_bytes()
        assert len(read_lines(path)) >= wanted
        time.sleep(1)
        assert path.read_bytes() == kept, "a stage went on without its run"
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and path.read_bytes().startswith(kept), done.stderr
    sums = [one for one in read_lines(path) if one.get("part") == "numerics"]
    assert len(sums) == 2  # each once


@needs_compiler
def test_a_cpu_is_never_measured(tmp_path):
    """The driver names a GPU, and JAX falls back to the CPU: its own error is printed."""
    done = run("--rehearse", "falls-back", "--results", tmp_path)
    assert done.returncode == 2 and not list(tmp_path.rglob("*.jsonl")), done.stdout
    assert "NVIDIA H200 answers, but JAX does not run on it" in done.stdout
    assert "Nothing was measured" in done.stdout


@pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="a GPU is attached")
def test_without_a_gpu_a_run_ends_in_a_sentence(tmp_path):
    done = run("--results", tmp_path)
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stdout, done.stdout
    assert "--rehearse" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["speed"], "stages are first, default"),
        (["--minutes", "0.5"], "above 0.5"),
        (["--commit", "abc"], "40 hexadecimal digits"),
    ],
)
def test_wrong_arguments_are_answered(wrong, said):
    done = run(*wrong)
    assert done.returncode == 2 and said in done.stdout


# The order, the clock and the lines ---------------------------------------------------------------


def test_the_agenda_fits_into_nine_minutes_and_its_first_call_into_four():
    assert agenda.STARTS + sum(one.seconds for one in agenda.STAGES) <= 9 * 60
    first = agenda.STAGES[:4]
    assert [one.name for one in first] == ["first", "default", "fused", "agreement"]
    assert agenda.STARTS + sum(one.seconds for one in first) <= 4 * 60
    assert all(one.seconds < one.limit for one in agenda.STAGES)
    readme = (ROOT / "tools" / "gpu" / "README.md").read_text()
    for one in agenda.STAGES:
        assert re.search(rf"^\| {one.name} \|.*\| {one.seconds:g} \|$", readme, re.M), one.name


def test_a_short_run_measures_first_what_is_missing(tmp_path):
    from tools.gpu.__main__ import in_order

    old = lines.begin(tmp_path, {"commit": "a", "date": "1"})
    for name in ("first", "sums"):
        old.stage = name
        old.add(Key("speed", name, "bf16"), made={})
    new = lines.begin(tmp_path, {"commit": "b", "date": "2"})
    new.stage = "first"
    new.add(Key("speed", "first", "bf16"), made={})
    order = in_order([*agenda.STAGES], read_lines(new.path), new)
    assert [one.name for one in order][-1] == "sums" and order[0].name == "first"
    same = lines.begin(tmp_path, {"commit": "b", "date": "3"})
    assert lines.known(read_lines(same.path), same.run) == {("speed", "first", "bf16"): {"run": 1}}


def test_a_torn_line_is_left_out_and_another_is_named(tmp_path):
    log = lines.begin(tmp_path, {"commit": "a"})
    log.add(Key("speed", "case", "form"), wall={"seconds": float("nan"), "calls": 1, "chip": {}})
    with log.path.open("a") as file:
        file.write('{"run": 0, "par')
    assert len(read_lines(log.path)) == 2
    lines.Log(tmp_path, 0, "first").add(Key("speed", "case", "form"), error="x")
    found = read_lines(log.path)
    assert len(found) == 3 and found[1]["wall"]["seconds"] is None
    log.path.write_text(log.path.read_text().replace('"error": "x"', '"error": x'))
    with pytest.raises(ValueError, match="line 3, is not as `make gpu` writes it"):
        read_lines(log.path)


class Fails(rehearsal.Fake):
    """A GPU that is gone after an error."""

    def answers(self) -> bool:
        return False


def measured(tmp_path, gpu, forms, **fields) -> stage.Stage:
    log = lines.begin(tmp_path, {"commit": "a"})
    log.stage = "first"
    marker = stage.Marker(tmp_path / "under way.json")
    one = stage.Stage(gpu, log, marker, time.time() + 60, **fields)
    one.measure([stage.Case("speed", "case", forms, looks=2, seconds=0.001)])
    assert not marker.path.exists()
    return one


def test_a_form_that_fails_costs_itself_alone(tmp_path):
    def fails():
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED in /some/where/x.cc")

    def works():
        return stage.Ready({"right": True}, lambda: None)

    forms = {"bf16": works, "refused": fails, "other": works}
    one = measured(tmp_path, rehearsal.Fake("works"), forms)
    rows = rows_of(read_lines(one.log.path))
    assert rows["speed", "case", "refused"]["error"].endswith("NOT_SUPPORTED in <path>")
    assert [rows["speed", "case", name]["looks"] for name in ("bf16", "other")] == [2, 2]


def test_a_gpu_that_is_lost_ends_the_process_and_the_next_goes_on(tmp_path, monkeypatch):
    ends, built = [], []

    def ended(status):
        ends.append(status)
        raise SystemExit

    def works():
        built.append("works")
        return stage.Ready({"right": True}, lambda: None)

    def fails():
        built.append("fails")
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(stage, "ended", ended)
    forms = {"bf16": works, "bad": fails, "other": works}
    with pytest.raises(SystemExit):
        measured(tmp_path, Fails("works"), forms)
    assert ends == [agenda.LOST] and built == ["works", "fails"]
    # The same run's next process times what was not timed, beside the first form.
    log = lines.Log(tmp_path, 0, "first")
    again = stage.Stage(
        rehearsal.Fake("works"), log, stage.Marker(tmp_path / "marker"), time.time() + 60
    )
    again.measure([stage.Case("speed", "case", forms, looks=2, seconds=0.001)])
    rows = rows_of(read_lines(log.path))
    assert built[2:] == ["works", "works"] and "error" in rows["speed", "case", "bad"]
    assert rows["speed", "case", "other"]["looks"] == 2


def test_a_clock_that_was_not_reached_is_read_later_without_new_looks(tmp_path):
    def works():
        return stage.Ready({"right": True}, lambda: None)

    one = measured(tmp_path, rehearsal.Fake("works"), {"bf16": works, "other": works})
    one.cupti = True
    one.measure([stage.Case("speed", "case", {"bf16": works, "other": works}, 2, 0.001)])
    for row in rows_of(read_lines(one.log.path)).values():
        assert row["looks"] == 2 and row["device_seconds"]


def test_a_form_that_was_only_slow_is_tried_by_the_next_run(tmp_path):
    key = Key("speed", "case", "bf16")
    log = lines.begin(tmp_path, {"commit": "a"})
    log.add(key, error="the process was stopped after 45 s", stopped=True)
    marker = stage.Marker(tmp_path / "marker")
    row = rows_of(read_lines(log.path))[key]
    gpu = rehearsal.Fake("works")
    assert stage.Stage(gpu, log, marker, 0).has_failed(row)
    later = lines.begin(tmp_path, {"commit": "a"})
    assert not stage.Stage(gpu, later, marker, 0).has_failed(row)
    assert stage.Stage(gpu, later, marker, 0).has_failed({"error": "RuntimeError: no", "run": 0})


# What is measured ---------------------------------------------------------------------------------


def test_the_bound_tells_a_right_result_from_a_wrong_one():
    operand = jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)
    args = numerics.arguments((operand, operand), "random")

    def scaled(a, b, factor=1.0):
        d = jax.lax.dot(a, b.T, preferred_element_type=jnp.float32) * factor
        return jnp.clip(d, -448, 448).astype(jnp.float8_e4m3fn)

    right = scaled(*args)
    assert errors.is_right(errors.errors(scaled(*args, 1.001), right))
    assert not errors.is_right(errors.errors(scaled(*args, 1.1), right))
    assert not errors.is_right(errors.errors(right.at[0, 0].set(jnp.nan), right))
    with pytest.raises(ValueError, match="its reference float32"):
        errors.errors(right, right.astype(jnp.float32))
    long = {"dtype": "float32", "relative": 2.0**-6, "other_kind": 0}
    assert not errors.is_right(long) and errors.is_right(long, 4096)
    assert not errors.is_right(long, 4096, fast=False)
    assert not errors.is_right(long | {"relative": 0.1}, 65536)


@pytest.mark.parametrize("k", [128, 8192])
def test_a_lost_bias_or_activation_is_seen_at_any_length_of_sums(k):
    m, n = 64, 96
    args = matmuls.operands(matmuls.Forms(m, n, k).biased, 1)[0]
    right, wrong = matmuls.fused(**matmuls.ALL), matmuls.fused(jax.nn.relu, amax="activated")
    assert matmuls.compare(jax.jit(right)(*args), right, args)["right"]
    assert not matmuls.compare(jax.jit(wrong)(*args), right, args)["right"]
    assert not matmuls.compare(jax.jit(right)(*args[:5]), right, args)["right"]


@pytest.mark.parametrize("kind", numerics.KINDS)
def test_inputs_are_of_their_kind(kind):
    holds = {
        "random": lambda x: np.isfinite(x).all() and x.std() > 0.5,
        "largest": lambda x: (np.abs(x) == np.abs(x).max()).all() and np.abs(x).max() > 400,
        "subnormal": lambda x: (x != 0).all() and np.abs(x).max() < 2.0**-6,
        "zero": lambda x: not x.any(),
        "not finite": lambda x: np.isnan(x).sum() == 1,
    }[kind]
    shapes = [jax.ShapeDtypeStruct((64, 96), dtype) for dtype in numerics.FP8]
    for array in numerics.arguments(tuple(shapes), kind):
        assert holds(array.astype(np.float64)), kind


@needs_compiler
def test_forms_are_what_their_names_say():
    forms = matmuls.Forms(256, 512, 384)
    found = forms.first() | forms.more() | forms.details() | forms.epilogues()
    gpu = rehearsal.Fake("works")
    rows = {name: report_gemms(form.compile(gpu).compiled).rows for name, form in found.items()}
    out = matmuls.OUT
    assert rows["accumulated in f32"][0].precision == "HIGHEST" != rows[out][0].precision
    assert rows[f"{out}, amax"][0].amax and not rows[out][0].amax
    assert "".join(rows["no scales"][0].scales) == "" and rows["B stored [K, N]"][0].outside
    assert {rows[name][0].out_dtype for name in ("bf16 out", "f32 out")} == {"bf16", "f32"}
    for name in rows:
        if name.startswith("unfused"):
            assert rows[name][0].epilogue == "DEFAULT" and rows[name][0].out_dtype == "bf16"
    everything = rows[f"+ {matmuls.EVERYTHING}"][0]
    assert everything.amax and everything.epilogue == "GELU_BIAS" or "GELU" in everything.epilogue


def test_no_call_finds_its_operands_in_the_cache():
    two = (jax.ShapeDtypeStruct((1024, 1024), jnp.float8_e4m3fn),) * 2
    assert matmuls.sets_of(two) * 2 * 1024**2 > 100e6  # twice the L2 of an H100
    (first, *_), (second, *_) = matmuls.operands((two[0],), 2)
    assert np.any(np.asarray(first != second)) and np.asarray(first, np.float32).std() > 0.5


def test_references_of_sums_are_the_cpus(monkeypatch):
    """Where JAX computes on a GPU by itself, the model is told to compute on the CPU."""
    places = []

    def model(a, b):
        places.append(jax.config.jax_default_device)
        return np.zeros((1, 64, 64), np.float32)

    monkeypatch.setattr(blocks, "hopper_sums", model)
    made = numerics.sums_of(rehearsal.Fake("works"), 32, 64).made
    assert places == [jax.devices("cpu")[0]] * 2 and made["same_as_model"]["positive"]["fast"] == 0


# The folder to carry ------------------------------------------------------------------------------

NEEDED = ("jax", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-nvjitlink", "nvidia-nvvm")
NEEDED += ("nvidia-cuda-runtime", "flax", "optax", "numpy")


def with_what_they_bring() -> dict[str, importlib.metadata.Distribution]:
    """What tools/gpu/README.md asks of a machine, and all that this requires."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = list(NEEDED)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for required in map(Requirement, found[name].requires or []):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                wanted.append(required.name)
    return found


@needs_compiler
def test_the_folder_runs_where_only_its_needs_are_installed(tmp_path, monkeypatch, needs_git):
    clone, place = tmp_path / "clone", tmp_path / "gpu-bundle"
    for path in of_project():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    git = ["git", "-C", clone, "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(bundle, "ROOT", clone)
    bundle.main(place)
    assert sum(path.stat().st_size for path in place.rglob("*")) < 5e6
    (clone / "new.txt").write_text("not committed")
    with pytest.raises(SystemExit, match="commit these, or `git stash -u`"):
        bundle.main(place)

    venv.create(tmp_path / "node", symlinks=True, with_pip=False)
    (site,) = (tmp_path / "node").glob("lib/python3*/site-packages")
    for distribution in with_what_they_bring().values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    done = subprocess.run(
        ["bash", place / "run", "--rehearse", "--results", tmp_path / "out", "kernels"]
        + ([] if not NIGHTLY else ["first", "training"]),
        env={"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "node/bin/python")},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    first, *_ = read_lines(file_of(tmp_path / "out"))
    assert first["provenance"]["rehearsal"] and "kernels: 5 forms, 0 failed" in done.stdout
    without = subprocess.run(
        ["bash", place / "run"],
        env={"PATH": os.environ["PATH"], "PYTHON": "false"},
        capture_output=True,
        text=True,
    )
    assert without.returncode == 2 and "needs JAX for CUDA 13" in without.stderr
