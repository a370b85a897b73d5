"""Measure this project on the attached Hopper GPU: `make gpu`.

Stage after stage, each in a process of its own with a limit of its own; tools/gpu/agenda.py has
their order. This process touches no GPU. It waits, ends what hangs, says of a form that took its
process down how, and has the stage go on with the next one.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8lens.targets import attached_gpu
from helpers.records.results import LINES, PARTS, Record, goals, load, read_lines
from tools.gpu.agenda import CLOCK, LOST, OTHER, STAGES, Stage
from tools.gpu.lines import Key, Log, begin, is_like, known, now, sentence

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "notebooks" / "results"
MINUTES = 9.0
GRACE = 12  # seconds that a stage may go on after its time: it ends by itself, with what it has
LEAST = 12  # seconds below which no stage is begun: its process would only start
AGAIN = 6  # times that a stage's process is begun
# Memory for cuBLASLt and for torch beside JAX; and no traces of the machine in messages.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")  # where XLA looks by itself


def libdevice() -> dict[str, str]:
    """Where CUDA's device functions are, if XLA would not find them: beside the nvcc on PATH. JAX
    hands it on from CUDA_ROOT."""
    nvcc = shutil.which("nvcc")
    places = [Path(place) for place in TOOLKITS]
    places += [Path(place, "nvidia", cuda) for place in sys.path for cuda in ("cu13", "cuda_nvcc")]
    inside = "nvvm/libdevice/libdevice.10.bc"
    if not nvcc or "CUDA_ROOT" in os.environ or any((place / inside).exists() for place in places):
        return {}
    toolkit = Path(nvcc).resolve().parent.parent
    if not (toolkit / inside).exists():
        return {}
    return {"CUDA_ROOT": str(toolkit)}


class CannotRun(Exception):
    """Why this machine cannot be measured: the run ends with it."""


@dataclasses.dataclass
class Run:
    """One run: which GPU, where its lines go, until when, and whether CUPTI is asked."""

    device: str
    folder: Path
    scratch: Path
    until: float
    rehearse: str | None
    log: Log | None = None
    cupti: bool = False

    @property
    def marker(self) -> Path:
        """What is under way: tools.gpu.stage writes it."""
        return self.scratch / "under way.json"

    def command(self, stage: str, until: float) -> list[str]:
        """What starts a stage."""
        words = [sys.executable, "-m", "tools.gpu.stage", stage, "--device", self.device]
        words += ["--scratch", str(self.scratch), "--folder", str(self.folder)]
        words += ["--until", str(until)]
        words += ["--run", str(self.log.run)] if self.log else []
        words += ["--rehearse", self.rehearse] if self.rehearse else []
        return words + (["--cupti"] if self.cupti else [])


def die_with_parent() -> None:
    """A stage must not go on, and hold the GPU, after the process that waits for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def child(run: Run, stage: str, until: float) -> Iterator[subprocess.Popen]:
    """A stage's process, which is ended with all that it began."""
    outer = os.environ.get("PYTHONPATH", "")
    found = {"PYTHONPATH": f"{ROOT}{os.pathsep}{outer}".rstrip(os.pathsep)}
    platforms = {} if run.rehearse else {"JAX_PLATFORMS": ""}  # references are computed on the CPU
    process = subprocess.Popen(
        run.command(stage, until),
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | libdevice() | found | platforms,
        start_new_session=True,
        preexec_fn=die_with_parent,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def wait(
    run: Run, process: subprocess.Popen, end: float
) -> tuple[int | None, dict[str, Any] | None]:
    """Wait until a stage's process ends: its exit status, None where its time is over, or that of
    the form under way; and that form."""
    while (status := process.poll()) is None:
        doing = under_way(run)
        if time.time() > end or doing and time.time() > doing["until"]:
            return None, doing
        time.sleep(0.1)
    return status, under_way(run)


def under_way(run: Run) -> dict[str, Any] | None:
    """The form that the stage's process is at."""
    try:
        return json.loads(run.marker.read_text())
    except (OSError, ValueError):
        return None


def measure(run: Run, stage: Stage) -> None:
    """One stage, by as many processes as it takes."""
    assert run.log
    until, others = min(time.time() + stage.limit, run.until), 0
    for _ in range(AGAIN):
        if time.time() > until - LEAST:
            return
        run.marker.unlink(missing_ok=True)
        with child(run, stage.name, until) as process:
            status, doing = wait(run, process, until + GRACE)
        others = others + 1 if status == OTHER else 0
        if others == 2:
            raise CannotRun(f"{stage.name}: its process has not the {run.device}, see above")
        if others:
            time.sleep(3)  # the driver may still be taking down what was killed
            continue
        if status == 0:
            return
        if doing is None and status != LOST:
            how = "did not begin a form in its time" if status is None else said_of(status)
            print(f"  {stage.name}: its process {how}", flush=True)
            return
        if doing and not (status is None and time.time() > until):
            note(run, doing, status)
        if doing and doing["clock"] == "cupti":
            return  # all that remained was to ask CUPTI


def note(run: Run, doing: dict[str, Any], status: int | None) -> None:
    """Write down what a form did to its process, and ask CUPTI no more if that was under way."""
    assert run.log
    key = Key(*doing["key"])
    if status is None:
        why = f"the process was stopped after {doing['limit']:.0f} s"
    else:
        why = f"the process {said_of(status)}"
    print(f"  {key.case}, {key.form}: {why} ({doing['clock']})", flush=True)
    if doing["clock"] == "cupti":
        run.cupti = False
        run.log.add(key, device={"no_clock": f"CUPTI: {why}"})
    else:
        run.log.add(key, error=why, **({"stopped": True} if status is None else {}))


def said_of(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"ended with {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


# A run --------------------------------------------------------------------------------------------


def find_device(rehearse: str | None) -> str:
    """The GPU's name, as the driver says it. Raises CannotRun where there is none to measure."""
    if rehearse:
        from tools.gpu.rehearsal import NAME

        return NAME
    instead = "`make gpu ARGS=--rehearse` goes through all of it on the CPU, small."
    found = attached_gpu()
    if found is None:
        raise CannotRun(
            "This measures a GPU, and no NVIDIA GPU with a driver for CUDA 13 (580 or newer) "
            f"answers here. On a cluster: is this the node with the GPU? {instead}"
        )
    name, capability = found
    if capability != (9, 0) or "MIG" in name:
        raise CannotRun(f"This is for a whole H100 or H200; attached is {name}. {instead}")
    return name


def commit_of(given: str | None) -> tuple[str, bool]:
    """The commit that the files are of, and whether they differ from it. Raises CannotRun where
    nobody knows."""
    if given:
        return given, False

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        raise CannotRun(
            "Results name the commit they are of, and this is no git checkout: give --commit, 40 "
            "hexadecimal digits"
        ) from None


def begun(run: Run, commit: tuple[str, bool]) -> Log:
    """Ask a child what GPU it has, and write the run's first line. Raises CannotRun where it has
    none: the child has printed JAX's own error."""
    with child(run, "start", run.until) as process:
        status, _ = wait(run, process, min(run.until, time.time() + 90))
    if status != 0:
        how = "did not start in its time" if status is None else said_of(status)
        raise CannotRun(f"Nothing was measured: JAX {how}, see above.")
    about = json.loads((run.scratch / "about.json").read_text())
    made_from = {"commit": commit[0], "changed": commit[1], "date": now()[:10]}
    return begin(run.folder, about | made_from)


def ask_cupti(run: Run) -> bool:
    """Whether the GPU's own clock can be read: a process of its own has tried, in this run or in
    one like it."""
    assert run.log
    key = Key("start", "clock", "CUPTI")
    before = known(read_lines(run.log.path), run.log.run)
    if "kernels_seen" not in before.get(key, {}):
        measure(run, CLOCK)
    row = known(read_lines(run.log.path), run.log.run).get(key, {})
    return row.get("kernels_seen", 0) > 0 and "error" not in row


def in_order(stages: list[Stage], lines: list[dict[str, Any]], log: Log) -> list[Stage]:
    """What nobody has begun, or a run like this has, comes before what only another commit or
    driver has measured."""
    like = is_like(lines, log.run)
    mine = {line["stage"] for line in lines if "run" in line and like[line["run"]]}
    others = {line["stage"] for line in lines if "run" in line} - mine
    return sorted(stages, key=lambda stage: stage.name in others)


def options_of(words: list[str] | None) -> argparse.Namespace:
    """The command line; SystemExit says what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Exit status: 0 it has ended, 2 it cannot run here."
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(names)}; without: all of them")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"({MINUTES:g})")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="in place of notebooks/results"
    )
    parser.add_argument("--earlier", type=Path, help="results to go on from, if --results has none")
    parser.add_argument("--commit", help="of a copy that has no .git")
    parser.add_argument(
        "--rehearse", nargs="?", const="works", metavar="HOW", help="on the CPU, small"
    )
    options = parser.parse_args(words)
    if unknown := set(options.stages) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; stages are {', '.join(names)}")
    if not options.minutes > 0.5:
        parser.error(f"--minutes must be above 0.5, for a stage to begin; got {options.minutes:g}")
    if options.commit and not re.fullmatch(r"[0-9a-f]{40}", options.commit):
        parser.error(
            f"--commit takes the whole hash, 40 hexadecimal digits; got {options.commit!r}"
        )
    if options.rehearse and options.results == RESULTS:
        options.results = ROOT / "_build" / "rehearsal"
    return options


def go_on_from(earlier: Path | None, folder: Path) -> None:
    """Begin with what an earlier run has measured on such a GPU."""
    there = earlier / folder.name / LINES if earlier else None
    if there and there.exists() and not (folder / LINES).exists():
        shutil.copytree(there.parent, folder, dirs_exist_ok=True)


def main(words: list[str] | None = None) -> int:
    """Measure, and say what came out. The exit status."""
    start, options = time.time(), options_of(words)
    until = start + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        try:
            device = find_device(options.rehearse)
            commit = ("0" * 40, True) if options.rehearse else commit_of(options.commit)
            folder = options.results.resolve() / folder_of(device)
            go_on_from(options.earlier, folder)
            run = Run(device, folder, Path(scratch), until, options.rehearse)
            run.log = begun(run, commit)
            run.cupti = ask_cupti(run)
            for stage in in_order(wanted(options.stages), read_lines(run.log.path), run.log):
                if time.time() < until - LEAST:
                    print(f"{time.time() - start:4.0f} s  {stage.name}", flush=True)
                    measure(run, stage)
        except (CannotRun, ValueError) as error:
            print(sentence(str(error)), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            return 1
    print(summary(folder))
    print(f"{time.time() - start:.0f} s; the lines are in {folder.name}/{LINES}", flush=True)
    return 0


def wanted(names: list[str]) -> list[Stage]:
    """The stages of these names, all without any, in the agenda's order."""
    return [stage for stage in STAGES if not names or stage.name in names]


def folder_of(device: str) -> str:
    """The model's folder: "NVIDIA H200" is h200, "NVIDIA H100 80GB HBM3" h100-80gb-hbm3."""
    return "-".join(re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", "")))


# What came out ------------------------------------------------------------------------------------


def summary(folder: Path) -> str:
    """What the file says, in a screen: times over the first form's, what is wrong, and the
    goals."""
    lines: list[str] = []
    for part in PARTS:
        for record in load(part, folder.parent):
            if folder_of(record.provenance["device"]) == folder.name:
                lines += of_record(record)
    return "\n".join(lines)


def of_record(record: Record) -> Iterator[str]:
    """The lines of one part."""
    for case, rows in record.cases.items():
        times = record.times(case)
        if times:
            base = next(iter(times.values()))
            yield f"{case}: " + ", ".join(
                f"{form} {took * 1e6:.0f} us, x{base / took:.2f}" for form, took in times.items()
            )
        elif record.part != "agreement":
            yield f"{case}: " + "; ".join(f"{form} {brief(row)}" for form, row in rows.items())
        failed = {form: row for form, row in rows.items() if "error" in row}
        wrong = [form for form, row in rows.items() if row.get("right") is False]
        refused = [form for form, row in rows.items() if "refused" in row]
        said = f"{len(rows)} forms, {len(failed)} failed"
        yield f"   {case}: {said}; wrong: {', '.join(wrong) or 'none'}"
        yield from (f"   FAILED {form}: {row['error'][:160]}" for form, row in failed.items())
        if refused:
            yield f"   refused: {', '.join(refused)}"
    for goal in goals(record.part, folder=RESULTS):
        yield f"   {goal.verdict(record)}"


def brief(row: dict[str, Any]) -> str:
    """What was found of a form that is not timed."""
    kept = {"burst_seconds", "sustained_seconds", "same_as_model", "right"} & row.keys()
    return ", ".join(f"{name} {row[name]}" for name in sorted(kept)) or row.get("error", "")[:80]


def stop(*signal_and_frame: object) -> None:
    """End as Ctrl-C does, on a signal that says that the time is up."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
