"""What `make gpu` does, rehearsed on the CPU from the folder that is carried to a GPU machine, with
only the packages that such a machine has. Each run rehearses a few cases of every part; NIGHTLY=1
rehearses all.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import agreement
import bundle
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import programs
import pytest
import record
import speed
import train
import watch
from packaging.requirements import Requirement

from fp8lens.matmul.kernels import kernels
from fp8lens.targets import attached_gpu
from helpers import parse_hlo_module
from helpers.numerics import blocks
from tests.helpers.test_results import problems
from tests.weekly import NIGHTLY
from tools import outputs
from tools.files import of_project

ROOT = Path(__file__).resolve().parent.parent.parent
GPU = ROOT / "tools" / "gpu"

spec = importlib.util.spec_from_file_location("gpu_runner", GPU / "__main__.py")
runner = sys.modules["gpu_runner"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

PARTS = ("agreement", "numerics", "speed", "autotune", "notebooks", "train")
# Cheap cases, of each part at least one.
SAMPLE = (
    "scaled in bf16 [cublaslt]",
    "clamp to 447 [auto]",
    "sums, K = 1024",
    "amax",
    "8192: under load",
    "scales after the dot",
    "01_fp8_formats",
    "forward",
)
needs_compiler = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)
waits = pytest.mark.skipif(not NIGHTLY, reason="waits for what takes too long: NIGHTLY=1 does")
nightly = pytest.mark.skipif(not NIGHTLY, reason="takes all cases: NIGHTLY=1 rehearses them")


def run(*arguments: str, script: Path = GPU, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def git(folder: Path, *words: str) -> None:
    somebody = ["-c", "user.name=n", "-c", "user.email=e", "-c", "core.autocrlf=false"]
    subprocess.run(["git", "-C", folder, *somebody, *words], check=True)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def case(tmp_path) -> record.Case:
    """A case under way, for what is called without the runner."""
    return record.Case(tmp_path / "part.json", "part", "case", tmp_path / "marker.json", {})


# The folder to carry, and a machine for it --------------------------------------------------------


@pytest.fixture(scope="module")
def carried(tmp_path_factory, needs_git) -> Path:
    """What `make gpu-bundle` writes of the files as they are here, for this Python and machine."""
    clone = tmp_path_factory.mktemp("clone")
    place = tmp_path_factory.mktemp("carried") / "gpu-bundle"
    for path in of_project():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        git(clone, *words)
    version = f"3.{sys.version_info.minor}"
    wanted = ["--to", str(place), "--python", version, "--machine", platform.machine()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "ROOT", clone)
        try:
            assert bundle.main(wanted) == 0
        except SystemExit as reason:
            if "needs a network" in str(reason) and not os.environ.get("CI"):
                pytest.skip(str(reason))
            raise
    return place


# What tools/gpu/README.md asks of a machine: JAX for CUDA 13, Flax and matplotlib.
DOCUMENTED = (
    "jax",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-nvjitlink",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "flax",
    "matplotlib",
)


def with_what_they_bring(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions of these names, and all that they require, as they are installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or []:
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                wanted.append(required.name)
    return found


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Path:
    """The Python of a GPU machine: it has the documented packages, and no other."""
    folder = tmp_path_factory.mktemp("node")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    for distribution in with_what_they_bring(DOCUMENTED).values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    return folder / "bin" / "python"


def from_folder(carried: Path, node: Path, work: Path, *words: str) -> subprocess.CompletedProcess:
    """What `bash gpu-bundle/run` does and says on that machine."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "TMPDIR": str(work),
        "PYTHON": str(node),
    }
    return subprocess.run(
        ["bash", carried / "run", *words],
        env=environment,
        cwd=work,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


def chosen() -> list[str]:
    """The options by which a run takes the sample alone; none with NIGHTLY=1."""
    return [] if NIGHTLY else [word for name in SAMPLE for word in ("--only", name)]


@pytest.fixture(scope="module")
def rehearsal(carried, node, tmp_path_factory) -> tuple[Path, str, Path]:
    """The folder with what a rehearsal of every part wrote, what it said, and what it worked in."""
    lacks = subprocess.run([node, "-c", "import pytest"], capture_output=True, text=True)
    assert "No module named 'pytest'" in lacks.stderr  # and none of what else is installed here
    work = tmp_path_factory.mktemp("work")
    made = from_folder(carried, node, work, "--rehearse", "--minutes", "30", *chosen())
    assert made.returncode == 0 and "Nothing is left." in made.stdout, made.stdout
    return carried / "rehearsal" / "cpu", made.stdout, work


@pytest.fixture(scope="module")
def rehearsed(rehearsal) -> Path:
    return rehearsal[0]


@needs_compiler
@pytest.mark.parametrize("part", PARTS)
def test_a_rehearsal_writes_what_the_schema_asks_for(rehearsed, carried, part):
    data = read(rehearsed / f"{part}.json")
    assert problems(data) == []
    (one,) = data["runs"]
    commit = (carried / "tree").read_text()[:40]
    assert (one["rehearsal"], one["commit"], one["changed"]) == (True, commit, False)
    everything = set(importlib.import_module(part).cases(True))
    assert set(data["cases"]) == (everything if NIGHTLY else everything & set(SAMPLE)) != set()


@needs_compiler
def test_chapters_run_with_what_the_folder_brings(rehearsed):
    """A folder without pytest-xdist had every chapter fail, and said that nothing was left."""
    chapters = read(rehearsed / "notebooks.json")["cases"]
    assert [(name, case["passed"]) for name, case in chapters.items()] == [("01_fp8_formats", True)]


@needs_compiler
def test_the_folder_is_small_and_its_run_says_what_came_out(carried, rehearsal):
    said = rehearsal[1]
    assert "## notebooks: 1 cases" in said and "01_fp8_formats: passed" in said
    assert "over bf16: bf16 1.000" in said and not (carried / "results" / "cpu").exists()
    packages = [path.stat().st_size for path in carried.glob("*.tar.gz")]
    assert len(packages) == 2 and sum(packages) < 25e6


@needs_compiler
def test_a_run_goes_on_from_what_the_machine_kept(carried, node, rehearsal, tmp_path):
    """Results that nobody brought back are in the machine's own folder, and are not lost."""
    place, _, work = rehearsal
    again = from_folder(
        carried, node, work, "autotune", "--rehearse", "--results", str(tmp_path), *chosen()
    )
    assert again.returncode == 0 and "done (" not in again.stdout, again.stdout
    assert read(tmp_path / "cpu" / "autotune.json") == read(place / "autotune.json")


def test_the_folder_says_what_it_is_made_for(carried, tmp_path):
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho 3.10 riscv64\n")
    other.chmod(0o755)
    made = subprocess.run(
        ["bash", carried / "run"],
        env=os.environ | {"PYTHON": str(other)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 2 and "is 3.10 riscv64" in made.stderr
    assert "--python 3.10 --machine riscv64" in made.stderr
    with pytest.raises(SystemExit):
        bundle.main(["--to", str(ROOT / "img")])


# What was measured --------------------------------------------------------------------------------


@needs_compiler
@nightly
def test_the_ladder_is_the_chapters_with_its_kernel_at_the_top(rehearsed):
    forms = read(rehearsed / "speed.json")["cases"]["4096: blocks"]["forms"]
    assert list(forms) == ["bf16", "FP8 scaled", "dequantized", "batched", "looped", "kernel"]
    assert all(row["wall_seconds"] > 0 and "error" not in row for row in forms.values())
    assert forms["kernel"]["kernels"] == 1 < forms["batched"]["kernels"]


@needs_compiler
def test_sums_are_compared_with_the_model_to_the_bit(case, monkeypatch, rehearsed):
    same = read(rehearsed / "numerics.json")["cases"]["sums, K = 1024"]["same_as_model"]
    assert same["positive"]["fast"] < 0.5  # the CPU's sums are float32's, and the model's are not

    def float32_sums(a, b):
        return (a.astype(np.float32) @ b.T.astype(np.float32))[None]

    monkeypatch.setattr(blocks, "hopper_sums", float32_sums)
    monkeypatch.setattr(blocks, "promoted_sums", lambda a, b: [np.zeros((16, 16))])
    same = numerics.sums(128, 16, True, case)["same_as_model"]
    assert same["either sign"]["careful"] > 0.9 and same["either sign"]["careful, promoted"] == 0


def in_order(rehearse: bool) -> list[str]:
    """All cases, as the agenda has their turns come."""
    plan = runner.agenda(list(PARTS), rehearse)
    return [name for _, names in plan.stages for name in names]


@needs_compiler
def test_cases_come_as_the_agenda_says(rehearsal):
    done = re.findall(r"^  (.*): done \(", rehearsal[1], re.M)
    assert done == [name for name in in_order(True) if name in done]
    assert len(done) == len(set(done)) >= len(SAMPLE)


def test_what_is_worth_knowing_first_comes_first():
    wanted = [
        "2048: first call",
        "scaled in bf16 [cublaslt]",
        "sums, K = 1024",
        "8192: under load",
        "8192: main",
        "8192: what is fused",
        "training step",
        "8192: details",
        "scaled in f32",
        "forward",
        "N = 512: main",
        "01_fp8_formats",
        "4096: main",
        "8192: libraries",
        "scaled in bf16 [auto]",
    ]
    names = in_order(False)
    places = [names.index(name) for name in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize("rehearse", [True, False])
def test_every_case_has_its_stage(rehearse):
    plan = runner.agenda(list(PARTS), rehearse)
    assert not plan.broken and all(names for _, names in plan.stages if not rehearse)
    for part in PARTS:
        listed = [name for stage, names in plan.stages if stage.part == part for name in names]
        assert sorted(listed) == sorted(importlib.import_module(part).cases(rehearse))
    # What is timed has a process of its own: nothing has recorded there before, and nothing has
    # gone wrong.
    assert all(stage.fresh == (stage.part in ("speed", "train")) for stage in runner.AGENDA)


def test_a_run_and_its_start_end_within_ten_minutes():
    assert runner.MINUTES * 60 + 30 <= 600
    assert max(stage.seconds for stage in runner.AGENDA) + runner.GRACE < runner.MINUTES * 60


@needs_compiler
def test_the_programs_are_kept_as_the_compiler_wrote_them(rehearsed):
    assert sorted(path.name for path in rehearsed.iterdir()) == sorted(
        [*(f"{part}.json" for part in PARTS), record.HLO]
    )
    kept = record.kept_hlo(rehearsed / record.HLO)
    wanted = set()
    for part in ("agreement", "autotune"):
        for name, one in read(rehearsed / f"{part}.json")["cases"].items():
            if one.get("ran", True):
                wanted.add(f"{part} / {name}")
    for name, one in read(rehearsed / "speed.json")["cases"].items():
        for form, row in one.get("forms", {}).items():
            if "kernels" in row:
                wanted.add(f"speed / {name} / {form}")
    layers = read(rehearsed / "train.json")["cases"]
    for name, one in layers.items():
        wanted |= {f"train / {name} / {form}" for form in one["precisions"]}
    assert set(kept) == wanted and len(kept) > (100 if NIGHTLY else 4)
    assert not any(re.search(r'"/\w', text) for text in kept.values())  # no path of this machine
    layer = parse_hlo_module(kept["train / forward / bf16+fp8"])
    assert len(kernels(layer)) == layers["forward"]["precisions"]["bf16+fp8"]["kernels"]


@needs_compiler
def test_two_compiles_without_a_gpu_agree_and_run(rehearsed):
    cases = read(rehearsed / "agreement.json")["cases"]
    assert {case["gemm"] for case in cases.values()} == {"cublaslt", "auto"}
    for name, case in cases.items():
        assert case["agree"] and case["same_kernels"], name
        assert case["ran"] != ("error" in case["on_gpu"]), name


@needs_compiler
def test_the_cpu_is_right_on_every_kind_of_input(rehearsed):
    cases = read(rehearsed / "numerics.json")["cases"]
    judged = {name: case for name, case in cases.items() if "inputs" in case}
    assert judged and all(case["right"] for case in judged.values() if not case["refused"])
    assert all(set(case["inputs"]) == set(programs.KINDS) for case in judged.values())
    sums = [case["sums"] for case in cases.values() if "sums" in case]
    errors = [error for one in sums for row in one.values() for error in row.values()]
    assert len(errors) == 4 * len(sums) > 0 and max(errors) < 1e-6
    assert not NIGHTLY or len(judged) > 15 and any(name.endswith("K = 4096") for name in judged)


@needs_compiler
def test_every_form_was_timed(rehearsed):
    cases = read(rehearsed / "speed.json")["cases"]
    for name, case in cases.items():
        for form, row in case.get("forms", {}).items():
            assert "error" not in row and row["wall_seconds"] > 0 and row["no_clock"], (name, form)
    assert not NIGHTLY or "2048: first call" in cases
    loads = cases["8192: under load"]["loads"]
    forms = {f"{form}, {what}" for form in speed.LOADED for what in ("random", "zeros")}
    assert {name for name in loads if "torch" not in name} == forms
    assert all(row["burst_seconds"] > 0 and row["sustained_seconds"] > 0 for row in loads.values())


@needs_compiler
@pytest.mark.parametrize("name", ["forward", pytest.param("training step", marks=nightly)])
def test_the_layer_was_timed_in_each_precision(rehearsed, name):
    case = read(rehearsed / "train.json")["cases"][name]
    training, rows = name == "training step", case["precisions"]
    assert set(train.cases(True)) < set(train.cases(False))
    assert {"bf16", "bf16+fp8"} <= set(rows) < set(train.TRAINING if training else train.FORWARD)
    for form, row in rows.items():
        assert row["wall_seconds"] > 0 and row["device_seconds"] is None, row.get("error")
        # Here cuDNN cannot be had, and the layer falls back to XLA's attention, which one row asks
        # for.
        no_cudnn = "cuDNN not found" in row.get("cudnn_refused", "")
        assert row["attention"] == "xla" and no_cudnn == ("XLA" not in form)
        assert row["compiled_flops"] == case["flops"] and row["matmuls"] == (18 if training else 6)
        assert row["fp8_matmuls"] == (12 if training else 4) * row["fp8"]
        if training:
            assert len(row["losses"]) == train.STEPS and row["losses"][-1] < 0.8 * row["losses"][0]
            assert row["losses"][-1] == pytest.approx(rows["bf16"]["losses"][-1], rel=0.02)
    assert not training or rows["bf16+fp8"]["losses"] != rows["bf16"]["losses"]


@needs_compiler
@nightly
def test_the_chapter_shows_what_is_recorded(rehearsed, monkeypatch):
    monkeypatch.setenv("FP8_RESULTS", str(rehearsed.parent))
    chapter = outputs.NOTEBOOKS / "11_performance.ipynb"
    run = outputs.fresh_run([chapter])[chapter.stem]
    assert run.failure is None, run.failure
    said = "".join(
        output.get("text", "") for cell in run.notebook.cells for output in cell.get("outputs", ())
    )
    assert "REHEARSAL" in said and "would record it" not in said
    assert re.search(r"^FP8 scaled, FP8 out, amax .* µs .* µs", said, re.M)
    assert re.search(
        r"training step in FP8, over bf16's: wanted at most 0.69 on an H100 .*; \d.*, on cpu", said
    )
    assert "bf16+fp8, XLA's attention, over bf16, XLA's attention: " in said
    assert re.search(r"K = 4096 +\d\d\.\d", said) and "FP8 scaled, FP8 out, amax, zeros" in said


# A run goes on ------------------------------------------------------------------------------------


def with_parts(
    folder: Path, grace: int = 2, seconds: int = 60, summary: bool = False, **sources: str
) -> Path:
    """A copy of the runner with other parts, in whose stages every case has its turn in the order
    it is given. What the parts return is no measurement, so the summary is left out, or not."""
    copy = folder / "copy" / "gpu"
    shutil.copytree(GPU, copy, ignore=shutil.ignore_patterns("__pycache__"))
    main = (copy / "__main__.py").read_text()
    stages = "".join(f"    Stage({part!r}, '*', {seconds}),\n" for part in sources)
    main = re.sub(r"^AGENDA = \(.*?^\)", f"AGENDA = (\n{stages})", main, flags=re.M | re.S)
    (copy / "__main__.py").write_text(re.sub(r"^GRACE = \d+", f"GRACE = {grace}", main, flags=re.M))
    if not summary:
        (copy / "summary.py").write_text("def summary(folder, parts):\n    return 'summary'\n")
    for part, source in sources.items():
        (copy / f"{part}.py").write_text(source)
    return copy


FOUND = {"PYTHONPATH": str(ROOT)}


def rehearse(copy: Path, *words: str) -> subprocess.CompletedProcess:
    """What such a copy does and says; its results are beside it, in `out`."""
    out = copy.parent.parent / "out"
    return run(*words, "--rehearse", "--results", out, script=copy, **FOUND)


def results(copy: Path, part: str) -> dict:
    """The cases that it has recorded of a part."""
    return read(copy.parent.parent / "out" / "cpu" / f"{part}.json")["cases"]


FOUR = "def cases(rehearse):\n    return {name: lambda case: {'n': 1} for name in 'abcd'}\n"


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    copy = with_parts(tmp_path, numerics=FOUR)
    path = tmp_path / "out" / "cpu" / "numerics.json"
    some = rehearse(copy, "numerics", "--only", "[ac]")
    assert some.returncode == 0 and list(read(path)["cases"]) == ["a", "c"], some.stdout
    before = read(path)
    again = rehearse(copy, "numerics")
    assert again.returncode == 0 and re.findall(r"(\w): done", again.stdout) == ["b", "d"]
    cases = read(path)["cases"]
    assert {name: cases[name] for name in "ac"} == before["cases"]
    # What another JAX has measured is measured again, and stays until then.
    data = read(path)
    data["runs"][0]["jax"] = "0.1"
    record.write(path, data["part"], data["runs"], data["cases"])
    out_of_time = rehearse(copy, "numerics", "--minutes", "0.034")  # GRACE, and no case more
    assert out_of_time.returncode == 1 and "4 cases are left" in out_of_time.stdout
    assert "goes on where this stopped" in out_of_time.stdout
    assert set(read(path)["cases"]) == set("abcd")


def test_a_run_goes_on_from_what_was_carried(tmp_path):
    copy = with_parts(tmp_path, numerics=FOUR)
    made = rehearse(copy, "numerics")
    assert made.returncode == 0, made.stdout
    data = read(tmp_path / "out" / "cpu" / "numerics.json")
    shutil.rmtree(tmp_path / "out")
    # On the machine are two that are newer, and one that is newer and of another commit.
    for folder, names, at in (
        ("carried", "abc", "2026-01-01"),
        ("kept", "ab", "2026-01-02"),
        ("kept of another", "c", "2026-01-03"),
    ):
        place = tmp_path / folder.split()[0] / "rehearsal"
        other = {"commit": "1" * 40} if "another" in folder else {}
        for chip in ("cpu", "h200"):  # another chip's stay where they are
            path = place / chip / "numerics.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            known = record.read(path)
            cases = dict(known["cases"])
            for name in names:
                moved = {"took": len(folder), "at": f"{at}T00:00:00+00:00"}
                cases[name] = data["cases"][name] | moved | {"run": len(known["runs"])}
            runs = known["runs"] + [one | other for one in data["runs"]]
            record.write(path, "numerics", runs, cases)
        # Of another part, and damaged: neither is asked for it.
        (place / "cpu" / "speed.json").write_text("{}")
    (tmp_path / "kept" / "rehearsal" / "cpu" / "hlo.jsonl.gz").write_bytes(b"no archive")
    # A commit without files, of which the copy differs by one.
    (tmp_path / "carried" / "tree").write_text("0" * 40 + "\n")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "new.md").touch()
    words = ["--bundle", tmp_path / "carried", "--work", tmp_path / "kept"]
    made = rehearse(copy, "numerics", *words)
    assert made.returncode == 0 and re.findall(r"(\w): done", made.stdout) == ["d"], made.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cpu"]
    cases = results(copy, "numerics")
    assert {name: cases[name]["took"] for name in "abc"} == {
        "a": len("kept"),
        "b": len("kept"),
        "c": len("carried"),
    }
    assert read(tmp_path / "kept" / "rehearsal" / "cpu" / "numerics.json")["cases"] == cases


# A part that fails --------------------------------------------------------------------------------


def test_a_chapter_that_fails_fails_the_run(tmp_path):
    copy = with_parts(
        tmp_path,
        summary=True,
        notebooks=(
            "def chapter(passed):\n"
            "    said = {} if passed else {'failure': 'No module named xdist'}\n"
            "    return {'passed': passed, 'code_cells': 3, 'seconds': 1.0, **said}\n"
            "def cases(rehearse):\n"
            "    return {'01_good': lambda case: chapter(True),\n"
            "            '02_bad': lambda case: chapter(False)}\n"
        ),
    )
    for again in (False, True):  # what is recorded as failed has failed the next time, too
        made = rehearse(copy, "notebooks")
        assert made.returncode == 3 and ("done (" in made.stdout) != again, made.stdout
        assert "## notebooks: 2 cases" in made.stdout and ", 1 failed;" in made.stdout
        assert "02_bad: FAILED No module named xdist" in made.stdout
        assert "Nothing is left. FAILED: 02_bad (exit status 3" in made.stdout
    one = rehearse(copy, "notebooks", "--only", "nothing")
    assert one.returncode == 2 and "no case of notebooks is named ['nothing']" in one.stdout


def test_a_case_that_ends_its_process_is_tried_again_and_recorded_and_the_rest_goes_on(tmp_path):
    copy = with_parts(
        tmp_path,
        speed=(
            "import os, sys\n"
            "def refused(case): raise RuntimeError('no algorithm in /somewhere/here/machine.cc')\n"
            "def aborts(case):\n"
            "    print('Check failed: the reason', file=sys.stderr, flush=True)\n"
            "    os.abort()\n"
            "def cases(rehearse):\n"
            "    return {'one': lambda case: {'n': 1}, 'aborts': aborts, 'refused': refused,\n"
            "            'last': lambda case: {'n': 2}}\n"
        ),
    )
    made = rehearse(copy, "speed")
    assert made.returncode == 0 and made.stdout.count("Check failed") >= 2, made.stdout
    cases = results(copy, "speed")
    assert cases["one"]["n"] == 1 and cases["last"]["n"] == 2
    assert re.fullmatch(
        "the process ended with signal SIGABRT: .*Check failed: the reason.*",
        cases["aborts"]["error"],
    )
    assert cases["refused"]["error"] == "RuntimeError: no algorithm in <path>"
    assert sorted(path.name for path in (tmp_path / "out" / "cpu").iterdir()) == ["speed.json"]


def test_a_child_that_the_kernel_killed_may_have_lacked_memory():
    killed = runner.Ended(-signal.SIGKILL, 0.0, runner.collections.deque())
    assert killed.how == "signal SIGKILL, as the kernel sends it where memory runs out"


def test_a_gpu_that_is_lost_once_costs_nothing_and_twice_the_form_that_did_it(tmp_path):
    copy = with_parts(
        tmp_path,
        speed=(
            "from pathlib import Path\n"
            "import record\n"
            f"once = Path({str(tmp_path / 'once')!r})\n"
            "def form(name):\n"
            "    if name == 'bad' or name == 'unlucky' and not once.exists():\n"
            "        once.touch()\n"
            "        record.answers = lambda: False\n"
            "        raise RuntimeError(f'CUDA_ERROR_ILLEGAL_ADDRESS in {name}')\n"
            "    return {'n': name}\n"
            "def measure(case):\n"
            "    rows = {}\n"
            "    for name in ('good', 'unlucky', 'bad', 'after it'):\n"
            "        rows[name] = {}\n"
            "        rows[name] = case.attempt(rows, name, lambda: form(name)) or rows[name]\n"
            "    return {'forms': rows}\n"
            "def cases(rehearse):\n"
            "    return {'all': measure, 'next': lambda case: {'n': 2}}\n"
        ),
    )
    made = rehearse(copy, "speed")
    assert made.returncode == 0 and made.stdout.count("again in a process of its own") == 2, (
        made.stdout
    )
    cases = results(copy, "speed")
    bad = "RuntimeError: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS in bad"
    assert cases["all"]["forms"] == {
        "good": {"n": "good"},
        "unlucky": {"n": "unlucky"},
        "bad": {"error": bad},
        "after it": {"n": "after it"},
    }
    assert cases["next"]["n"] == 2


@waits
def test_a_case_that_runs_out_of_time_is_left_for_the_next_run(tmp_path):
    copy = with_parts(
        tmp_path,
        speed=(
            "import time\n"
            "def cases(rehearse):\n"
            "    return {'one': lambda case: {'n': 1}, 'long': lambda case: time.sleep(600),\n"
            "            'last': lambda case: {'n': 2}}\n"
        ),
    )
    made = rehearse(copy, "speed", "--minutes", "0.4")
    assert made.returncode == 1 and "2 cases are left" in made.stdout, made.stdout
    assert list(results(copy, "speed")) == ["one"]


@waits
def test_a_case_that_had_all_of_its_stages_time_has_failed_and_the_next_one_comes(tmp_path):
    copy = with_parts(
        tmp_path,
        seconds=3,
        speed=(
            "import time\n"
            "def cases(rehearse):\n"
            "    return {'hangs': lambda case: time.sleep(600), 'last': lambda case: {'n': 2}}\n"
        ),
    )
    made = rehearse(copy, "speed", "--minutes", "5")
    assert made.returncode == 0, made.stdout
    cases = results(copy, "speed")
    assert re.fullmatch(r"stopped after \d+ s", cases["hangs"]["error"]) and cases["last"]["n"] == 2
    assert cases["hangs"]["stops"] == 2  # once more, after all others


@waits
def test_a_part_that_does_not_start_or_does_not_end_keeps_no_other(tmp_path):
    copy = with_parts(
        tmp_path,
        seconds=8,
        speed=(
            "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
            "def leaves_a_thread(case):\n"
            "    ThreadPoolExecutor(1).submit(time.sleep, 600)\n"
            "    return {'n': 1}\n"
            "def cases(rehearse):\n    return {'one': leaves_a_thread}\n"
        ),
        numerics="import a_package_that_is_not_here\n",
        autotune=(
            "import os, time\n"
            "def cases(rehearse):\n"
            "    'MEASURE' in os.environ and time.sleep(600)\n"
            "    return {'never': lambda case: {'n': 1}}\n"
        ),
        train=(
            "import atexit, time\natexit.register(time.sleep, 600)\n"
            "def cases(rehearse):\n    return {'one': lambda case: {'n': 2}}\n"
        ),
        agreement="def cases(rehearse):\n    return {'only': lambda case: {'n': 3}}\n",
    )
    main = (copy / "__main__.py").read_text().replace("STARTS = 150", "STARTS = 12")
    main = main.replace(
        "env=os.environ | ENVIRONMENT", "env=os.environ | {'MEASURE': '1'} | ENVIRONMENT"
    )
    (copy / "__main__.py").write_text(main)
    made = rehearse(copy, "speed", "numerics", "autotune", "train", "agreement")
    assert made.returncode == 1, made.stdout
    assert set(re.findall(r"(\w+) did not start", made.stdout)) == {"autotune"}, made.stdout
    assert "numerics: cannot start: No module named 'a_package_that_is_not_here'" in made.stdout
    assert "autotune did not start: no case began in" in made.stdout
    recorded = [list(results(copy, part)) for part in ("speed", "train", "agreement")]
    assert recorded == [["one"], ["one"], ["only"]]


def test_a_kill_at_any_second_loses_only_the_case_that_was_running(tmp_path):
    """Killed, with all its processes, after each of its cases but the last: nothing measured is
    measured again."""
    log = tmp_path / "measured"
    copy = with_parts(
        tmp_path,
        speed=(
            "import functools, time\n"
            "class Program:\n"
            "    def __init__(self, text): self.text = text\n"
            "    def as_text(self): return self.text\n"
            "def measure(name, case):\n"
            f"    with open({str(log)!r}, 'a') as log: log.write(name + '\\n')\n"
            "    case.keep('form', Program('HLO of ' + name))\n"
            "    return {'n': name}\n"
            "def cases(rehearse):\n"
            "    return {f'case {i}': functools.partial(measure, f'case {i}') for i in range(3)}\n"
        ),
    )
    place, arguments = tmp_path / "out" / "cpu", ["--rehearse", "--results", tmp_path / "out"]
    for kills in range(1, 3):
        process = subprocess.Popen(
            [sys.executable, copy, *map(str, arguments)],
            env=os.environ | FOUND,
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        deadline = time.time() + 300
        while f"case {kills - 1}" not in (log.read_text() if log.exists() else ""):
            assert time.time() < deadline and process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        # Its child sees that nobody waits, and begins no other case.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if (place / "speed.json").exists():
            assert all(
                case["n"] == name
                for name, case in record.read(place / "speed.json")["cases"].items()
            )
        record.kept_hlo(place / record.HLO)
    made = rehearse(copy)
    assert made.returncode == 0, made.stdout
    names = [f"case {i}" for i in range(3)]
    assert sorted(read(place / "speed.json")["cases"]) == names
    assert record.kept_hlo(place / record.HLO) == {
        f"speed / {name} / form": f"HLO of {name}" for name in names
    }
    measured = log.read_text().split("\n")[:-1]
    assert all(measured.count(name) <= 2 for name in names) and len(measured) <= 3 + 2


def test_a_run_that_is_told_to_stop_says_how_to_go_on(tmp_path):
    copy = with_parts(
        tmp_path,
        speed=(
            "import time\n"
            "def cases(rehearse):\n"
            "    return {'one': lambda case: {'n': 1}, 'long': lambda case: time.sleep(600)}\n"
        ),
    )
    process = subprocess.Popen(
        [sys.executable, copy, "speed", "--rehearse", "--results", tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | FOUND,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = [process.stdout.readline() for _ in range(2)]
    assert "one: done" in said[1], said
    process.terminate()
    said, _ = process.communicate(timeout=120)
    assert (
        process.returncode == 1 and "goes on where this stopped" in said and "Traceback" not in said
    ), said
    assert list(results(copy, "speed")) == ["one"]


def test_a_damaged_archive_gives_what_it_has(tmp_path):
    class Program:
        def as_text(self):
            return "HLO in /some/where"

    file = tmp_path / record.HLO
    for key in ("one", "two"):
        record.keep_hlo(tmp_path / "x.json", key, Program())
    whole = file.read_bytes()
    assert record.kept_hlo(file) == {"one": "HLO in <path>", "two": "HLO in <path>"}
    file.write_bytes(whole[:-9])
    assert record.kept_hlo(file) == {"one": "HLO in <path>"}
    file.write_bytes(b"no archive")
    assert record.kept_hlo(file) == record.kept_hlo(tmp_path / "nowhere") == {}


def test_xla_is_told_of_a_toolkit_that_it_would_not_find(tmp_path, monkeypatch):
    nvcc, functions = tmp_path / "bin" / "nvcc", tmp_path / "nvvm" / "libdevice" / "libdevice.10.bc"
    for path in (nvcc, functions):
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(runner, "TOOLKITS", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert runner.libdevice() == {"XLA_FLAGS": f"--xla_gpu_cuda_data_dir={tmp_path}"}
    monkeypatch.setattr(runner, "TOOLKITS", [tmp_path])  # one that XLA looks at by itself
    assert runner.libdevice() == {}


def test_a_file_that_is_no_record_is_refused_and_stays(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "speed.json").write_text('{"schema": 1}')
    made = run("speed", "--rehearse", "--results", tmp_path)
    assert (
        made.returncode == 2
        and "speed.json is no record" in made.stdout
        and "move it away" in made.stdout
    )
    assert (
        tmp_path / "cpu" / "speed.json"
    ).read_text() == '{"schema": 1}' and "Traceback" not in made.stdout


# What cannot be described, and what is refused ----------------------------------------------------


def unreadable(*args, **options):
    raise ValueError("a custom call nobody has seen")


@needs_compiler
@pytest.mark.parametrize("described", [True, False])
def test_the_first_call_is_timed_and_right_whether_or_not_it_is_read(case, monkeypatch, described):
    if not described:
        monkeypatch.setattr(speed, "report_gemms", unreadable)
    rows = speed.first_call((32, 32, 32), True, case)["forms"]
    assert rows["everything in one call"]["right"] and len(rows) == 2
    for row in rows.values():
        assert row["wall_seconds"] > 0 and row["no_clock"] and "error" not in row
        assert ("kernels" in row) == described == ("not_described" not in row)
        assert described or "a custom call nobody has seen" in row["not_described"]
    assert set(record.kept_hlo(case.path.parent / record.HLO)) == {
        f"part / case / {name}" for name in rows
    }


def test_what_torch_does_costs_no_form_of_ours(case, monkeypatch):
    def no_torch(*args):
        raise OSError("libcudart.so.13: cannot open shared object file")
        yield

    monkeypatch.setattr(speed, "torch_forms", no_torch)
    rows = {"bf16": {"wall_seconds": 1.0}}
    assert speed.torch_calls(rows, (32, 32, 32), True, case) == {}
    assert "libcudart" in rows.pop("torch")["error"] and rows == {"bf16": {"wall_seconds": 1.0}}


@needs_compiler
@pytest.mark.parametrize("after", [1, 7])  # as it is warmed up, and later
def test_a_form_that_fails_while_it_is_timed_costs_no_other(case, after):
    calls = {"good": lambda: None, "bad": lambda: next(left), "last": lambda: None}
    left, rows = iter(range(after)), {name: {} for name in calls}
    speed.timed(rows, calls, case, True)
    assert rows["bad"] == {"error": "StopIteration:"}
    assert rows["good"]["wall_seconds"] > 0 and rows["last"]["wall_seconds"] > 0


def test_a_time_of_too_few_kernels_is_not_the_gpus_time():
    row = {"device_seconds": 1e-3, "wall_seconds": 2e-3, "launches": 1, "kernels": 9}
    assert (
        speed.whole(row)["device_seconds"] is None
        and "saw 1 of 9 kernels" in speed.whole(row)["no_clock"]
    )
    assert speed.whole(row | {"launches": 9}) == row | {"launches": 9} and speed.whole(
        {"error": "x"}
    ) == {"error": "x"}


@needs_compiler
def test_a_gpu_that_is_lost_in_a_compile_is_said(case, monkeypatch):
    def lost(*args, **options):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(agreement, "own_compile", lost)
    program = programs.programs(16)["scaled in f32"]
    assert "ILLEGAL_ADDRESS" in agreement.compare(program, "cublaslt", True, case)["refused"]
    monkeypatch.setattr(record, "answers", lambda: False)
    with pytest.raises(record.GpuLost):
        agreement.compare(program, "cublaslt", True, case)


@needs_compiler
def test_a_program_that_runs_has_run_whether_or_not_it_can_be_read(case, monkeypatch):
    monkeypatch.setattr(agreement, "report_gemms", unreadable)
    program = programs.programs(16)["scaled in f32"]
    found = agreement.compare(program, "cublaslt", True, case)
    assert found["ran"] and "refused" not in found and "cannot be read" in found["on_gpu"]["error"]
    assert not found["agree"] and not found["same_kernels"]  # of what nobody could read
    assert runner.outcome(found) == "done"


def test_where_nothing_runs_the_reasons_are_said(case, monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(speed, "own_compile", refuses)
    monkeypatch.setattr(speed, "torch_forms", lambda *args: ())
    for made in (
        speed.time_forms((32, 32, 32), "main", True, case),
        speed.first_call((32, 32, 32), True, case),
    ):
        assert made["forms"] and all(
            "NOT_SUPPORTED" in row["error"] for row in made["forms"].values()
        )
        assert "everything in one call FAILED" in runner.outcome(
            made
        ) or "bf16 FAILED" in runner.outcome(made)
    assert all(
        "NOT_SUPPORTED" in row["error"]
        for row in speed.under_load((32,) * 3, True, case)["loads"].values()
    )


def test_cudnns_attention_that_takes_the_gpu_with_it_leaves_xlas(case, monkeypatch):
    def build(layer, *args):
        if layer.attention == "cudnn":
            raise RuntimeError("an illegal memory access")
        return "compiled", "call", []

    monkeypatch.setattr(train, "build", build)
    monkeypatch.setattr(record, "answers", lambda: False)
    arguments = "bf16", train.REHEARSAL, "cublaslt", True, True
    with pytest.raises(record.GpuLost) as lost:
        train.build_best(*arguments, case)
    assert lost.value.args[0] == "bf16, by cuDNN"
    case.avoid = {lost.value.args[0]: lost.value.args[1]}
    row, *_ = train.build_best(*arguments, case)
    assert row["attention"] == "xla" and "an illegal memory access" in row["cudnn_refused"]


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path):
    refused = run("--results", tmp_path)
    assert (
        refused.returncode == 2
        and "no NVIDIA GPU" in refused.stdout
        and "--rehearse" in refused.stdout
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["speeds"], "parts are speed, agreement"), (["--minutes", "0.5"], "above 0.83")],
)
def test_wrong_arguments_are_answered(wrong, said, capsys):
    with pytest.raises(SystemExit):
        runner.arguments_of(wrong)
    assert said in capsys.readouterr().err


def test_a_commit_is_named_and_a_copy_without_git_must_say_it(tmp_path, monkeypatch):
    given = "0123456789" * 4
    # Nobody has looked whether the files are that commit's.
    assert record.commit(given) == (given, None)
    with pytest.raises(SystemExit, match="40 hex"):
        record.commit("abc")
    copy = tmp_path / "copy"
    copy.mkdir()
    for inside_another in (False, True):  # whose commit says nothing of these files
        if inside_another and shutil.which("git"):
            git(tmp_path, "init", "-q")
            git(tmp_path, "commit", "-qm", "x", "--allow-empty")
        monkeypatch.setattr(record, "ROOT", copy)
        monkeypatch.setattr(bundle, "ROOT", copy)
        with pytest.raises(SystemExit, match="--commit"):
            record.commit(None)
        with pytest.raises(SystemExit, match="no git checkout"):
            bundle.tree()


def test_a_copy_is_compared_with_what_git_knows_of_its_commit(tmp_path, monkeypatch, needs_git):
    names = "helpers/one.py notebooks/two.md notebooks/two.ipynb tools/gpu/three.py README.md"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\r\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        git(tmp_path, *words)
    monkeypatch.setattr(bundle, "ROOT", tmp_path)
    tree = tmp_path / "tree"
    listed = bundle.tree()
    tree.write_text(listed)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit(None, tree) == (listed[:40], False)
    (tmp_path / "README.md").write_text("no result depends on it")
    (tmp_path / "notebooks/two.ipynb").write_text("nor on outputs")
    assert record.commit(None, tree)[1] is False
    for change in (
        lambda: (tmp_path / "helpers/one.py").write_text("changed"),
        lambda: (tmp_path / "helpers/one.py").unlink(),
        lambda: (tmp_path / "tools/gpu/new.py").write_text("new"),
    ):
        change()
        assert record.commit(None, tree)[1] is True
        git(tmp_path, "reset", "-q", "--hard")
        git(tmp_path, "clean", "-qfd", "-e", "tree")
        assert record.commit(None, tree)[1] is False
    with pytest.raises(SystemExit, match="commit these, or `git stash -u`"):
        bundle.tree()  # the file `tree` itself is new


def test_what_json_has_not_got_is_null(tmp_path):
    record.write(
        tmp_path / "x.json",
        "train",
        [{}],
        {"step": {"losses": [1.0, float("nan")], "n": float("inf"), "run": 0}},
    )
    assert read(tmp_path / "x.json")["cases"] == {
        "step": {"losses": [1.0, None], "n": None, "run": 0}
    }


def test_a_case_keeps_its_run(tmp_path, monkeypatch):
    path, newer = tmp_path / "x.json", tmp_path / "y.json"
    moments = iter(f"2026-01-01T00:00:{second:02}+00:00" for second in range(60))
    monkeypatch.setattr(record, "now", lambda: next(moments))
    record.add(path, "speed", {"commit": "a"}, "one", {"n": 1})
    record.add(path, "speed", {"commit": "a"}, "two", {"n": 1})
    record.add(path, "speed", {"commit": "b"}, "two", {"n": 2})
    assert read(path)["runs"] == [{"commit": "a"}, {"commit": "b"}]
    assert [(case["n"], case["run"]) for case in read(path)["cases"].values()] == [(1, 0), (2, 1)]
    record.add(newer, "speed", {"commit": "b"}, "three", {"n": 3})
    record.add(newer, "speed", {"commit": "c"}, "one", {"n": 3})
    record.merge(path, "speed", newer, {"commit": "b"})
    assert read(path)["runs"] == [{"commit": "b"}, {"commit": "c"}]  # nothing of the first is left
    assert {name: (case["n"], case["run"]) for name, case in read(path)["cases"].items()} == {
        "one": (3, 1),
        "two": (2, 0),
        "three": (3, 0),
    }
    before = path.read_text()
    record.add(
        newer, "speed", {"commit": "d"}, "two", {"n": 4}
    )  # newer, and not of the commit that goes on
    record.merge(path, "speed", newer, {"commit": "b"})
    assert path.read_text() == before


def test_messages_name_no_path_and_keep_the_reason_at_their_end():
    assert (
        record.clean("at /home/user/x.py:3, see https://x.org/a/b")
        == "at <path>:3, see https://x.org/a/b"
    )
    error = RuntimeError(
        "INTERNAL: while lowering\n" + "%fusion = f32[8] " * 200 + "\nCUBLAS_STATUS_NOT_SUPPORTED"
    )
    said = record.sentence(error)
    assert said.startswith("RuntimeError: INTERNAL: while lowering") and said.endswith(
        "CUBLAS_STATUS_NOT_SUPPORTED"
    )
    assert len(said) < 850 and "\n" not in said


# What the chip does meanwhile ---------------------------------------------------------------------


def test_samples_are_sorted_by_what_was_timed(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/usr/bin/env bash\n"
        "while :; do echo \"$(date '+%Y/%m/%d %H:%M:%S.%3N'), "
        '1755, 690.25, 61, 0x0000000000000004"; '
        "echo '2026/01/02 cut'; sleep 0.02; done\n"
    )
    smi.chmod(0o755)

    def lines(seen: watch.Watch) -> int:
        return os.pread(seen.file.fileno(), 1 << 20, 0).count(b"\n")

    with watch.Watch((str(smi),)) as seen:
        for name in ("one", "two"):
            with seen.during(name):
                before, deadline = lines(seen), time.time() + 60
                while lines(seen) < before + 4 and time.time() < deadline:
                    time.sleep(0.02)
    found = seen.summary("two")
    assert (
        found["samples"] >= 1
        and found["clock_mhz"] == [1755, 1755, 1755]
        and found["power_w"] == [690.25, 690.25]
    )
    assert found["temperature_c"] == 61 and found["held_back_by"] == ["power cap"]
    assert found["samples"] < len(seen.samples) and seen.summary("three") is None
    assert seen.process.returncode is not None


def test_without_nvidia_smi_there_is_no_summary():
    with watch.Watch(("/no/such/nvidia-smi",)) as seen, seen.during("one"):
        pass
    assert seen.summary("one") is None
    assert watch.sample("2026/11/21 21:17:17.123, 1755") is None
    assert watch.sample("2026/11/21 21:17:17.123, 1755, [N/A], 61, 0x4")[1:] == (1755, None, 61, 4)


# The float64 reference ----------------------------------------------------------------------------


def errors_of(fn, wrong, kind: str = "random") -> list[dict]:
    """What `numerics` says of `wrong`'s results where `fn` is asked for."""
    args = programs.arguments(programs.programs(16)["bias + relu + amax"].args, kind)
    results = jax.tree.leaves(wrong(*map(jnp.asarray, args)))
    return [
        numerics.errors(*pair) for pair in zip(results, numerics.reference(fn, args), strict=True)
    ]


def test_the_reference_is_the_function_in_float64():
    a, b = (
        np.random.default_rng(seed).normal(size=(24, 40)).astype(jnp.float8_e4m3fn)
        for seed in (0, 1)
    )

    def fn(a, b):
        return jax.nn.gelu(jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)) * 3

    d = a.astype(np.float64) @ b.astype(np.float64).T
    expected = 1.5 * d * (1 + np.tanh(np.sqrt(2 / np.pi) * (d + 0.044715 * d**3)))
    (value,) = numerics.reference(fn, [a, b])
    assert value.dtype == np.float64
    np.testing.assert_allclose(
        value, expected, rtol=1e-5, atol=1e-9
    )  # gelu's constants are float32's
    (rounded,) = numerics.reference(
        lambda x: x.astype(jnp.float8_e4m3fn), [np.float32([1.07, 464, 465, 1e-9])]
    )
    np.testing.assert_array_equal(
        rounded, [1.125, 448, np.nan, 0]
    )  # to nearest, and NaN beyond the range


@pytest.mark.parametrize("kind", programs.KINDS[:-1])
def test_a_right_program_is_right(kind):
    fn = programs.programs(16)["bias + relu + amax"].fn
    assert all(map(numerics.is_right, errors_of(fn, fn, kind)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, x, y, z, c: (a, b, x * 1.1, y, z, c),  # a scale
        lambda a, b, x, y, z, c: (a, b, x, y, z, c * 0),  # no bias
        lambda a, b, x, y, z, c: (a, b, x, y, -z, c),  # the wrong sign
        lambda a, b, x, y, z, c: (a.at[0, 0].set(jnp.nan), b, x, y, z, c),  # one NaN
    ],
)
def test_a_wrong_program_is_not(wrong):
    fn = programs.programs(16)["bias + relu + amax"].fn
    assert not all(map(numerics.is_right, errors_of(fn, lambda *args: fn(*wrong(*args)))))


def test_inputs_are_of_their_kind():
    program = programs.programs(16)["E5M2 times E4M3, E5M2 result"]
    for kind, holds in {
        "random": lambda x: np.isfinite(x).all() and x.std() > 0.5,
        "largest": lambda x: (
            (np.abs(x) == np.abs(x).max()).all() and np.abs(x).max() in (448, 57344)
        ),
        "subnormal": lambda x: (x != 0).all() and np.abs(x).max() < 2.0**-6,
        "zero": lambda x: not x.any(),
        "not finite": lambda x: np.isnan(x).sum() == 1,
    }.items():
        for array in programs.arguments(program.args, kind)[:2]:
            assert holds(array.astype(np.float64)), kind


# What is timed ------------------------------------------------------------------------------------


@needs_compiler
def test_fused_and_unfused_are_the_same_work_in_one_kernel_and_in_more():
    found = speed.forms(64, 96, 128)["what is fused"]
    for name in [name for name in found if name.startswith("+")] + ["FP8 scaled, FP8 out"]:
        other = found["unfused: " + ("FP8 out" if name == "FP8 scaled, FP8 out" else name)]
        args = speed.inputs(found[name].args, 0)
        for one, two in zip(
            jax.tree.leaves(found[name].fn(*args)), jax.tree.leaves(other.fn(*args)), strict=True
        ):
            first, second = (np.asarray(d).astype(np.float64) for d in (one, two))
            assert one.dtype == two.dtype
            assert np.linalg.norm(first - second) < 0.03 * np.linalg.norm(first), name
        one, more = (
            len(kernels(programs.own_compile(f.fn, *f.args, rehearse=True)))
            for f in (found[name], other)
        )
        assert one == 1 < more, name


@needs_compiler
def test_forms_are_what_their_names_say():
    groups = speed.forms(256, 512, 384)
    forms = speed.group_of((256, 512, 384), "main, untuned") | groups["details"]
    rows = {
        name: speed.report_gemms(programs.own_compile(form.fn, *form.args, rehearse=True)).rows
        for name, form in forms.items()
    }
    assert (
        rows["accumulated in f32"][0].precision
        == "HIGHEST"
        != rows["FP8 scaled, FP8 out"][0].precision
    )
    assert rows["FP8 scaled, FP8 out, amax"][0].amax and not rows["FP8 scaled, FP8 out"][0].amax
    assert "".join(rows["no scales"][0].scales) == "" and rows["B stored [K, N]"][0].outside
    assert {rows[name][0].out_dtype for name in ("bf16 out", "f32 out")} == {"bf16", "f32"}
    assert rows["FP8 from bf16 by amax"][0].is_fp8 and rows["quantize A"] == ()
    # torch's like has no amax, and no kernel that XLA has chosen by timing.
    like = forms["FP8 scaled, FP8 out, untuned"]
    assert (
        like.options == {"xla_gpu_autotune_level": 0}
        and not rows["FP8 scaled, FP8 out, untuned"][0].amax
    )
    assert {f"{name}, untuned" for name in speed.TORCH} <= forms.keys() and not forms[
        "bf16"
    ].options


def test_inputs_walk_through_more_than_the_cache():
    assert speed.sets_of(2 * 1024**2) * 2 * 1024**2 > 100e6  # twice the L2 of an H100
    assert speed.sets_of(2 * 16384**2) == 1
    call = speed.walked(
        lambda x: float(x[0, 0]), (jax.ShapeDtypeStruct((4, 4), jnp.float32),), True
    )
    first, second, third = call(), call(), call()
    assert first == third != second


def test_a_long_sum_may_lose_more_bits_where_it_is_fast():
    error = {"dtype": "float32", "relative": 2.0**-6, "other_kind": 0}
    assert (
        not numerics.is_right(error)
        and numerics.is_right(error, 4096)
        and not numerics.is_right(error, 4096, False)
    )
    assert not numerics.is_right(
        error | {"relative": 0.1}, 65536
    )  # a lost scale is wrong at any length


def test_the_chapter_names_the_shapes_that_are_timed():
    chapter = (ROOT / "notebooks" / "11_performance.md").read_text()
    listed = ast.literal_eval(re.search(r"^SHAPES = (\{.*?^\})", chapter, re.M | re.S)[1])
    assert listed == {
        name: sizes for name, sizes in speed.SHAPES.items() if not name.startswith("N = ")
    }
