"""What `make gpu` does, rehearsed with a GPU that is not there: `tools.gpu.rehearsal` answers like
an H200. NIGHTLY=1 rehearses all stages."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import report_gemms
from fp8lens.targets import attached_gpu
from helpers.numerics.recipes import scaled_dot, to_e4m3
from helpers.records.results import LINES, load, read_lines, rows_of
from tests.form import problems
from tests.weekly import NIGHTLY, weekly
from tools.gpu import agenda, bundle, errors, lines, matmuls, numerics, rehearsal
from tools.gpu.lines import Key

ROOT = Path(__file__).resolve().parent.parent.parent
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tools.gpu", *map(str, words)]


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*words), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> Path:
    """What a rehearsal wrote: of forms that fail in every way, and of a stage of the agenda; with
    NIGHTLY=1 of all stages."""
    folder = tmp_path_factory.mktemp("rehearsed")
    stages = [one.name for one in agenda.STAGES] if NIGHTLY else ["blocks"]
    done = run("--rehearse", "--minutes", "30", "--results", folder, "mishaps", *stages)
    assert done.returncode == 0, done.stdout
    return folder / "h200" / LINES


@needs_compiler
def test_every_line_is_as_the_schema_says(rehearsed):
    found = read_lines(rehearsed)
    assert [problem for line in found for problem in problems(line)] == []
    finished = {line["stage"] for line in found if "finished" in line}
    assert finished == {line["stage"] for line in found if "stage" in line} >= {"mishaps", "blocks"}


@needs_compiler
def test_a_form_that_fails_crashes_or_hangs_costs_itself_alone(rehearsed):
    rows = rows_of(read_lines(rehearsed))
    of = {form: row for (_, case, form), row in rows.items() if case == "mishaps"}
    assert of["fails"]["error"] == "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED in <path>"
    assert of["crashes"]["error"] == "the process ended with SIGSEGV"
    assert of["hangs"]["error"] == "the process did not end in 2 s"
    for form in ("works", "follows"):
        assert of[form]["looks"] >= 2 and of[form]["device_seconds"]


@needs_compiler
def test_every_other_form_is_right_and_timed(rehearsed):
    rows = rows_of(read_lines(rehearsed))
    rest = {key: row for key, row in rows.items() if key[1] != "mishaps"}
    assert len(rest) >= 5
    for key, row in rest.items():
        assert "error" not in row and row.get("right", True), (key, row)
    of_blocks = {form for _, case, form in rest if "blocks" in case}
    assert {"bf16", "kernel of pairs", "batched"} <= of_blocks
    (record,) = load("speed", rehearsed.parent.parent)
    times = record.times("4096: blocks")
    assert len(times) == 5 and min(times.values()) > 0 and "REHEARSAL" in record.source


@needs_compiler
def test_cupti_is_asked_after_the_hosts_clock(rehearsed):
    """In each stage's last process."""
    found = [line for line in read_lines(rehearsed) if line.get("stage") == "blocks"]
    kinds = ["device" in line for line in found if "form" in line]
    assert any(kinds) and kinds == sorted(kinds)


@needs_compiler
def test_a_second_call_goes_on(rehearsed, tmp_path):
    """From results that lie elsewhere."""
    before = [line for line in read_lines(rehearsed) if line.get("stage") != "mishaps"]
    earlier = tmp_path / "earlier" / "h200" / LINES
    earlier.parent.mkdir(parents=True)
    earlier.write_text("".join(json.dumps(line) + "\n" for line in before))
    words = ("--rehearse", "--results", tmp_path, "--earlier", earlier.parent.parent)
    done = run(*words, "blocks", "mishaps")
    assert done.returncode == 0, done.stdout
    after = read_lines(tmp_path / "h200" / LINES)
    assert after[: len(before)] == before
    new = after[len(before) :]
    assert not any(line.get("stage") == "blocks" and "form" in line for line in new)
    assert rows_of(new)["speed", "mishaps", "works"]["looks"] >= 2


@weekly
@needs_compiler
def test_a_run_that_is_killed_keeps_what_was_measured(tmp_path):
    path = tmp_path / "h200" / LINES
    words = command("--rehearse", "--minutes", "5", "--results", tmp_path, "mishaps")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and (not path.exists() or len(read_lines(path)) < 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # the stage's process dies with the one that waits for it
    kept = path.read_bytes()
    time.sleep(3)
    assert path.read_bytes() == kept, "a stage went on without its run"
    assert len(read_lines(path)) >= 3


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_a_cpu_is_never_measured(tmp_path):
    done = run("--results", tmp_path, "--commit", "0" * 40)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "This measures a GPU" in done.stdout and "--rehearse" in done.stdout


# The order and the lines --------------------------------------------------------------------------


def test_the_agenda_fits_into_eleven_minutes_and_its_first_call_into_four():
    seconds = [one.seconds for one in agenda.STAGES]
    assert sum(seconds) <= 10.6 * 60 and sum(seconds[:6]) <= 3.7 * 60
    readme = (ROOT / "tools" / "gpu" / "README.md").read_text()
    for one in agenda.STAGES:
        assert f"| {one.name} |" in readme and f"| {one.seconds:g} |\n" in readme


def test_only_runs_of_the_same_commit_and_versions_are_alike(tmp_path):
    for run, (commit, date) in enumerate([("a", "1"), ("b", "2"), ("b", "3")]):
        log = lines.begin(tmp_path, {"commit": commit, "date": date})
        log.add(Key("speed", "case", "form"), made={})
        assert log.run == run
    alike = lines.of_runs_like(read_lines(log.path), 2)
    assert [line["run"] for line in alike] == [1, 2]


def test_a_torn_line_is_left_out(tmp_path):
    log = lines.begin(tmp_path, {"commit": "a"})
    with log.path.open("a") as file:
        file.write('{"run": 0, "par')
    assert len(read_lines(log.path)) == 1
    lines.Log(tmp_path, 0, "first").add(Key("speed", "case", "form"), error="x")
    assert len(read_lines(log.path)) == 2
    with pytest.raises(ValueError, match="JSON"):
        log.add(Key("speed", "case", "form"), made={"losses": [float("nan")]})


# What is measured ---------------------------------------------------------------------------------


def test_an_error_is_that_of_numpy():
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=(64, 48)).astype(np.float32) for _ in range(2))
    found = errors.errors(one, other)
    norm = np.linalg.norm(one - other) / np.linalg.norm(other)
    assert found["relative"] == pytest.approx(norm, rel=1e-5)
    assert found["largest"] == pytest.approx(np.abs(one - other).max()) and not found["other_kind"]
    one[0, 0], one[1, 1], other[1, 1] = np.inf, np.nan, np.nan
    assert errors.errors(one, other)["other_kind"] == 1


@pytest.mark.parametrize("k", [128, 8192])
def test_a_lost_bias_or_activation_is_seen_at_any_length_of_sums(k):
    m, n = 64, 96
    form = matmuls.Form(matmuls.fused(), matmuls.Forms(m, n, k).biased)
    args = matmuls.operands(form.args, 1, form.factors)[0]
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
        "not finite": lambda x: np.isnan(x).sum() == 1,
    }[kind]
    shapes = [jax.ShapeDtypeStruct((64, 96), dtype) for dtype in numerics.FP8]
    for array in numerics.arguments(tuple(shapes), kind):
        assert holds(array.astype(np.float64)), kind


@pytest.fixture(scope="module")
def programs():
    gpu = rehearsal.Fake("works")
    gpu.rehearsal = False  # else it has some of them
    return numerics.programs(gpu)


@pytest.mark.parametrize("act, bits, is_right", [(jax.nn.relu, 14, True), (abs, 24, False)])
def test_in_the_loop_rounding_is_told_from_an_error(programs, act, bits, is_right):
    def layers(x, w, x_scale, w_scale, d_scale):
        for one in w:
            d = scaled_dot(x, one, x_scale, w_scale)
            x = to_e4m3(act(jax.lax.reduce_precision(d, 8, bits - 1)), d_scale)
        return x

    found = numerics.compared(programs[numerics.LOOP], jax.jit(layers))
    assert all(errors.is_right(found[kind][0]) for kind in ("random", "subnormal")) == is_right


def test_a_reference_needs_no_algorithm_and_keeps_nan(programs):
    names = ("algorithm ANY_F8_ANY_F8_F32", "unscaled, f32 result")
    wanted, plain = (programs[name] for name in names)
    found = numerics.compared(wanted, jax.jit(plain.fn))
    assert all(errors.is_right(one) for (one,) in found.values())

    def by_numpy(*args):
        codes, amax = jax.jit(programs["amax"].fn)(*args)
        return codes, np.where(jnp.isnan(codes).any(), jnp.nan, amax)

    codes, amax = numerics.compared(programs["amax"], by_numpy)["not finite"]
    assert codes["other_kind"] == amax["other_kind"] == 0


def test_a_program_keeps_the_names_of_its_layers_and_no_path():
    program = 'op_name="jit(f)/jvp(Model)/up/dense/dot_general", in "/home/ada/model/layer.py"'
    assert lines.without_paths(program) == program.replace("/home/ada/model/layer.py", "<path>")


@needs_compiler
def test_forms_are_what_their_names_say():
    forms = matmuls.Forms(256, 512, 384)
    found = forms.first() | forms.more() | forms.epilogues()
    gpu, out = rehearsal.Fake("works"), matmuls.OUT
    rows = {name: report_gemms(form.compile(gpu).compiled).rows[0] for name, form in found.items()}
    assert rows[f"{out}, careful sums"].precision == "HIGHEST" != rows[out].precision
    assert rows[f"{out}, amax"].amax and not rows[out].amax
    assert rows["+ relu"].epilogue == "RELU" and rows["+ bias"].epilogue == "BIAS"
    for name, row in rows.items():
        if name.startswith("unfused"):
            assert row.epilogue == "DEFAULT" and row.out_dtype == "bf16"


# The folder to carry ------------------------------------------------------------------------------


@needs_compiler
def test_the_folder_runs_by_itself(tmp_path, monkeypatch, needs_git):
    """A clone's folder, with this Python; its first line names the commit's results."""
    clone, place = tmp_path / "clone", tmp_path / "gpu-bundle"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{ROOT}", clone], check=True)
    monkeypatch.setattr(bundle, "ROOT", clone)
    bundle.main(place)
    (clone / "new.txt").write_text("not committed")
    with pytest.raises(SystemExit, match="commit these"):
        bundle.main(place)
    done = subprocess.run(
        ["bash", place / "run", "--rehearse", "refused", "--results", tmp_path / "out", "sums"],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0 and "sums: 2 forms" in done.stdout, done.stdout
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in done.stdout
    first, *_ = read_lines(tmp_path / "out" / "h200" / LINES)
    assert first["provenance"]["rehearsal"]
