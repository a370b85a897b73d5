"""Measure this project on the attached Hopper GPU: `make gpu`.

Stage after stage, each in a process of its own with a limit of its own; tools/gpu/agenda.py has
their order. This process touches no GPU. It waits, writes down what a form did to its process, and
has another process go on with the next form.
"""

import argparse
import contextlib
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

from helpers.records.results import LINES, PARTS, Record, goals, load, read_lines
from tools.gpu.agenda import LOST, MISHAPS, OTHER, STAGES, Stage, Task
from tools.gpu.lines import Key, Log, begin, now, of_runs_like

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "notebooks" / "results"
GRACE = 12  # seconds after a stage's time in which its process may end by itself
LEAST = 12  # seconds below which no stage is begun: its process would only start
ATTEMPTS = 6  # times that a stage's process is begun


class CannotRun(Exception):
    """Why this machine cannot be measured: the run ends with it."""


# A stage's process --------------------------------------------------------------------------------


def environment(rehearse: str | None) -> dict[str, str]:
    """The environment of a stage's process."""
    outer = os.environ.get("PYTHONPATH", "")
    changed = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{outer}".rstrip(os.pathsep),
        # Memory for cuBLASLt and for torch beside JAX; and no traces of the machine in messages.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if not rehearse:
        changed["JAX_PLATFORMS"] = ""  # references are computed on the CPU
    # Where XLA finds CUDA's device functions, if no package of pip's brings them.
    nvcc = shutil.which("nvcc")
    if nvcc and "CUDA_ROOT" not in os.environ and not has_libdevice():
        changed["CUDA_ROOT"] = str(Path(nvcc).resolve().parent.parent)
    return os.environ | changed


def has_libdevice() -> bool:
    """Whether the package nvidia-nvvm is installed: JAX finds it by itself."""
    inside = "nvidia/cu13/nvvm/libdevice"
    return any(Path(place, inside).exists() for place in sys.path)


def attempt(task: Task) -> int | None:
    """Begin a stage's process and wait for it: its exit status, None where it had to be killed at
    the end of its time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.gpu.stage", json.dumps(task._asdict())],
        cwd=ROOT,
        env=environment(task.rehearse),
        stderr=subprocess.STDOUT,
    )
    try:
        return process.wait(max(0, task.until + GRACE - time.time()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


def under_way(task: Task) -> dict[str, Any] | None:
    """The form that the stage's process was at when it ended, as tools.gpu.stage marked it."""
    try:
        return json.loads(Path(task.scratch, "under way.json").read_text())
    except (OSError, ValueError):
        return None


def measure(task: Task, log: Log) -> bool:
    """One stage, by as many processes as it takes. Returns whether CUPTI may still be asked."""
    for _ in range(ATTEMPTS):
        if time.time() > task.until - LEAST:
            break
        Path(task.scratch, "under way.json").unlink(missing_ok=True)
        status = attempt(task)
        if status == 0:
            break
        doing = under_way(task)
        if doing is None:
            print(f"  {task.stage}: its process {said_of(status)}", flush=True)
            if status not in (LOST, OTHER):
                break
            time.sleep(3)  # the driver may still be taking down what was killed
            continue
        is_late = time.time() > doing["until"] - 0.5
        if status is None and not is_late:
            break  # the stage's time is over, not the form's
        how = f"did not end in {doing['limit']:.0f} s" if is_late else said_of(status)
        print(f"  {doing['key'][1:]}: its process {how} ({doing['clock']})", flush=True)
        if doing["clock"] == "cupti":
            log.add(Key(*doing["key"]), device={"no_clock": f"CUPTI: the process {how}"})
            return False  # all that remained of the stage was to ask CUPTI
        log.add(Key(*doing["key"]), error=f"the process {how}")
    return task.cupti


def said_of(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "did not end in its time"
    if status < 0:
        return f"ended with {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


# A run --------------------------------------------------------------------------------------------


def commit_of(options: argparse.Namespace) -> dict[str, Any]:
    """The commit that the files are of, and whether they differ from it. Raises CannotRun where
    nobody knows."""
    if options.rehearse:
        return {"commit": "0" * 40, "changed": True}
    if options.commit:
        return {"commit": options.commit, "changed": False}

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        raise CannotRun(
            "results name their commit, and git knows none here: give --commit"
        ) from None


def about_device(task: Task) -> dict[str, Any]:
    """What a process of its own says of the GPU and its software. Raises CannotRun where it has no
    GPU to measure: it has printed why."""
    attempt(task)
    try:
        return json.loads(Path(task.scratch, "about.json").read_text())
    except OSError:
        raise CannotRun(
            "Nothing was measured, see above. `make gpu ARGS=--rehearse` goes through all of it on "
            "the CPU, small."
        ) from None


def left_to_do(options: argparse.Namespace, log: Log) -> list[Stage]:
    """The stages that are named; without names all that no run like this one has finished."""
    if options.stages:
        return [stage for stage in (*STAGES, MISHAPS) if stage.name in options.stages]
    lines = of_runs_like(read_lines(log.path), log.run)
    finished = {line["stage"] for line in lines if "finished" in line}
    return [stage for stage in STAGES if stage.name not in finished]


def options_of(words: list[str] | None) -> argparse.Namespace:
    """The command line; SystemExit says what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Exit status: 0 it has ended, 2 it cannot run here."
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(names)}; without: all of them")
    parser.add_argument("--minutes", type=float, default=11.0, help="(11)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="in place of notebooks/results"
    )
    parser.add_argument("--earlier", type=Path, help="results to go on from, if --results has none")
    parser.add_argument("--commit", help="of a copy that has no .git: 40 hexadecimal digits")
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const="works",
        choices=("works", "crashes", "hangs", "refused"),
        help="on the CPU, small; what CUPTI does there",
    )
    options = parser.parse_args(words)
    known = [*names, MISHAPS.name] if options.rehearse else names
    if unknown := set(options.stages) - set(known):
        parser.error(f"no stage {', '.join(sorted(unknown))}; stages are {', '.join(known)}")
    if options.rehearse and options.results == RESULTS:
        options.results = ROOT / "_build" / "rehearsal"
    return options


def run(options: argparse.Namespace, scratch: str) -> Path:
    """Measure. Returns the folder with what was measured; raises CannotRun."""
    start = time.time()
    until = start + 60 * options.minutes
    commit = commit_of(options)
    first = Task("start", min(until, start + 120), scratch, options.rehearse)
    about = about_device(first)
    folder = options.results.resolve() / folder_of(about["device"])
    earlier = options.earlier and options.earlier / folder.name
    if earlier and is_alike(earlier / LINES, about) and not (folder / LINES).exists():
        shutil.copytree(earlier, folder, dirs_exist_ok=True)
    log = begin(folder, about | commit | {"date": now()[:10]})
    lines = of_runs_like(read_lines(log.path), log.run)
    has_failed = any("no_clock" in line.get("device", {}) for line in lines)  # in an earlier call
    cupti = Path(scratch, "cupti").exists() and not has_failed
    for stage in left_to_do(options, log):
        print(f"{time.time() - start:4.0f} s  {stage.name}", flush=True)
        log.stage = stage.name
        end = min(time.time() + stage.limit, until)
        task = first._replace(stage=stage.name, until=end, device=about["device"])
        cupti = measure(task._replace(folder=str(folder), run=log.run, cupti=cupti), log)
    return folder


def is_alike(path: Path, about: dict[str, Any]) -> bool:
    """Whether there are results, and they were measured if these are to be, or rehearsed alike."""
    if not path.exists():
        return False
    runs = [line["provenance"] for line in read_lines(path) if "provenance" in line]
    return bool(runs) and runs[0]["rehearsal"] == about["rehearsal"]


def folder_of(device: str) -> str:
    """The model's folder: "NVIDIA H200" is h200, "NVIDIA H100 80GB HBM3" h100-80gb-hbm3."""
    return "-".join(re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", "")))


def summary(folder: Path) -> Iterator[str]:
    """What the file says, in a screen: times over the first form's, what is wrong, and goals."""
    for part in PARTS:
        for record in load(part, folder.parent):
            if folder_of(record.provenance["device"]) == folder.name:
                yield from of_record(record)


def of_record(record: Record) -> Iterator[str]:
    """The lines of one part."""
    for case, rows in record.cases.items():
        times = record.times(case)
        base = next(iter(times.values()), 0)
        wrong = [form for form, row in rows.items() if row.get("right") is False]
        yield f"{case}: {len(rows)} forms; wrong: {', '.join(wrong) or 'none'}"
        for form, took in times.items():
            yield f"   {form:45}{took * 1e6:9.1f} us, x{base / took:.2f}"
        for form, row in rows.items():
            if "error" in row:
                yield f"   FAILED {form}: {row['error'][:160]}"
    for goal in goals(record.part, folder=RESULTS):
        yield f"   {goal.verdict(record)}"


def main(words: list[str] | None = None) -> int:
    """Measure, and say what came out. The exit status."""
    options = options_of(words)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = run(options, scratch)
        except CannotRun as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            return 1
    print("\n".join(summary(folder)))
    print(f"the lines are in {folder.name}/{LINES}", flush=True)
    return 0


if __name__ == "__main__":
    # A signal that says that the time is up ends it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
