"""Run the project on the attached Hopper GPU and record what came out.

`make gpu` measures all parts, `make train-bench` the transformer layer alone.

Parts, each with a result file of its own, notebooks/results/<model>/<part>.json: agreement (does
the compile without a GPU give what the GPU's own gives, and does the GPU run it), numerics (are the
numbers right), speed, autotune (what XLA chose), notebooks (do the chapters run), train (a
transformer layer). Beside them hlo.jsonl.gz, the programs as the GPU's compiler wrote them.

What is worth knowing first comes first, whichever part it is of: see AGENDA. A run that is stopped,
at whatever second, or runs out of its minutes loses the case that was under way; the next one goes
on with it: what the same commit has measured on such a machine is not measured again (after an edit
that is not committed, give --fresh), what another has measured stays until it is. A case that takes
its process down, or the GPU, is tried once more in a process of its own; after that, what did it is
recorded as that, and the rest goes on.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import fnmatch
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for place in (ROOT, HERE):  # helpers and tools; the parts
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Cases of a part that come at the same time. `seconds` after the first has begun the next
    stage has its turn; what is left comes again when all have had theirs.

    `fresh` gives each case a process of its own: what has been recorded of a process before, or
    gone wrong in it, then changes no time.
    """

    part: str
    cases: str
    seconds: float
    fresh: bool = False
    case: float = (
        0  # what one case may take: with less time left, others that are shorter come before it
    )


AGENDA = (
    Stage(
        "speed", "2048: first call", 60, fresh=True
    ),  # does anything run, is it right, and can it be timed?
    Stage(
        "agreement", "* [[]cublaslt]", 120
    ),  # what is refused, and is it what was compiled without the GPU?
    Stage("numerics", "sums*", 60),
    Stage("speed", "8192: under load", 60, fresh=True),
    Stage("speed", "8192: main", 90, fresh=True),  # the goals are about these three,
    Stage("speed", "8192: what is fused", 90, fresh=True),
    Stage("train", "training step", 240, fresh=True, case=150),
    Stage("train", "ladder", 240, fresh=True, case=150),
    Stage("speed", "8192: details", 60, fresh=True),
    Stage("numerics", "*", 150),
    Stage("train", "forward", 120, fresh=True, case=80),
    Stage("speed", "7B down*: main", 90, fresh=True),  # points of chapter 11's pictures,
    Stage("speed", "N = *: main", 120, fresh=True),  # and of its inequality
    Stage("speed", "4096: blocks", 60, fresh=True),  # chapter 12's ladder
    Stage("speed", "1024: main", 40, fresh=True),
    Stage("autotune", "*", 90),
    Stage("notebooks", "*", 180),
    Stage("speed", "*: main", 400, fresh=True),
    Stage("speed", "*", 180, fresh=True),
    Stage("agreement", "*", 300),
    Stage("train", "*", 240, fresh=True, case=120),
)
PARTS = tuple(dict.fromkeys(stage.part for stage in AGENDA))
MINUTES = 9  # of a run: with its start, and what ends it, one of a batch system's ten
STARTS = 150  # seconds after which a child that has begun no case never will
# Seconds that a case may go on after its stage's time. None begins in the last ones of a run.
GRACE = 50
RESTART = 75  # exit status of a child whose next case wants a process of its own
CRASHES = 24  # failures of processes before a stage is given up
TOOLKITS = [Path("/usr/local/cuda"), Path("/opt/cuda")]  # where XLA looks by itself
# A working directory of memory for cuBLASLt and for torch beside JAX; and no traces of the machine
# in messages.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One part of one run: where its file is, what the measurements come from, and a folder for
    what passes between the processes."""

    part: str
    path: Path
    provenance: Mapping[str, Any]
    scratch: Path

    @property
    def marker(self) -> Path:
        """Says which case is in progress, and which form of it: what took a process down."""
        return self.scratch / "under way.json"

    @property
    def orders(self) -> Path:
        """What a child shall measure."""
        return self.scratch / "orders.json"

    @property
    def began(self) -> Path:
        """When the first case of a stage began."""
        return self.scratch / "began.json"


def cases(part: str, rehearse: bool) -> dict[str, Callable[..., dict[str, Any]]]:
    """A part's cases by name, each a function that measures it."""
    return importlib.import_module(part).cases(rehearse)


def recorded(run: Run) -> dict[str, Any]:
    """Cases that need not be measured again."""
    from record import read, same_run

    data = read(run.path)
    mine = [same_run(one, run.provenance) for one in data["runs"]]
    # A case that was stopped once may have found a cold machine: it has another try.
    return {
        name: case
        for name, case in data["cases"].items()
        if mine[case["run"]] and case.get("stops") != 1
    }


# In a child process -------------------------------------------------------------------------------


def measure(run: Run) -> int:
    """Measure what the orders name, and add each case to the file. The exit status."""
    from record import Case, GpuLost, add

    from tools.files import in_one_step

    if (
        sys.platform == "linux"
    ):  # a process that goes on after its supervisor shares the GPU with the next run's
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    orders = json.loads(run.orders.read_text())
    everything, parent = cases(run.part, run.provenance["rehearsal"]), os.getppid()
    deadline = min(time.time() + orders["seconds"], orders["end"])
    for number, name in enumerate(orders["cases"]):
        if (
            time.time() > deadline or os.getppid() != parent
        ):  # nobody waits: the GPU may be another run's now
            break
        if number and orders["fresh"]:
            return RESTART
        case = Case(run.path, run.part, name, run.marker, orders["avoid"].get(name, {}))
        case.note()
        if not run.began.exists():
            in_one_step(run.began, json.dumps(time.time()).encode())
        start = time.perf_counter()
        try:
            try:
                result = everything[name](case=case)
            except GpuLost:
                raise
            except Exception as error:
                result = {"error": case.refused(error, case.under_way)}
        except GpuLost as lost:
            case.note(*lost.args)
            return RESTART
        took = round(time.perf_counter() - start, 3)
        add(run.path, run.part, run.provenance, name, {**result, "took": took})
        run.marker.unlink()
        print(f"  {name}: {outcome(result)} ({took:.1f} s)", flush=True)
    return 0


def outcome(result: Mapping[str, Any]) -> str:
    """A case's result in a few words."""
    if "error" in result:
        return f"FAILED: {result['error']}"
    if result.get("refused") and isinstance(result["refused"], str):
        return f"refused: {result['refused']}"
    rows = {**result.get("forms", {}), **result.get("loads", {}), **result.get("precisions", {})}
    failed = {form: row["error"] for form, row in rows.items() if "error" in row}
    return "done" + "".join(f"\n    {form} FAILED: {error}" for form, error in failed.items())


# In the process that supervises -------------------------------------------------------------------


@contextlib.contextmanager
def child(run: Run) -> Iterator[tuple[subprocess.Popen, collections.deque[str]]]:
    """A process that measures, and the last lines it says. What it says is passed on."""
    # The chapters import helpers, installed or not.
    found = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(
        [sys.executable, HERE, run.part, "--measure", str(run.scratch)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | found,
        start_new_session=True,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    last: collections.deque[str] = collections.deque(maxlen=20)

    def pass_on() -> None:
        for line in process.stdout or ():
            last.append(line)
            print(line, end="", flush=True)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        yield process, last
    finally:
        with contextlib.suppress(
            ProcessLookupError
        ):  # its own children as well: kernels of notebooks
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        reader.join(timeout=10)


def spent(run: Run) -> float:
    """Seconds since the first case of a stage began."""
    return time.time() - json.loads(run.began.read_text()) if run.began.exists() else 0.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a child came to its end: its exit status (None for one that was stopped), when it was
    started, and the last lines it said."""

    status: int | None
    started: float
    last: collections.deque[str]

    @property
    def how(self) -> str:
        """The exit status in words."""
        if self.status == -signal.SIGKILL:
            return "signal SIGKILL, as the kernel sends it where memory runs out"
        if self.status is not None and self.status < 0:
            return f"signal {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


def run_child(run: Run, stage: Stage, end: float) -> Ended:
    """Have a child measure what is ordered, until it ends or its time is over."""
    with child(run) as (process, last):
        status, started = None, time.time()
        while (
            status is None
            and time.time() < end
            and spent(run) < stage.seconds + GRACE
            and (run.marker.exists() or run.began.exists() or time.time() < started + STARTS)
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.2)
    return Ended(status, started, last)


def say_if_nothing_began(run: Run, ended: Ended) -> None:
    """Say so where a child ended, or was stopped, before its first case."""
    if ended.status or not run.began.exists():
        waited = f"no case began in {time.time() - ended.started:.0f} s"
        how = ended.how if ended.status else waited
        print(f"{run.part} did not start: {how}, see above", flush=True)


def supervise(
    run: Run, names: list[str], stage: Stage, end: float, avoid: dict[str, dict[str, str]]
) -> None:
    """Measure cases of a part in child processes, for the stage's seconds and not beyond `end`.
    `avoid` says of forms that have taken their processes down, by case and name, how; it grows."""
    failures: collections.Counter[tuple[str, str]] = collections.Counter()
    run.began.unlink(missing_ok=True)
    while (
        failures.total() < CRASHES
        and (seconds := stage.seconds - spent(run)) > 0
        and time.time() < end - GRACE
    ):
        done = recorded(run)
        if not (todo := [name for name in names if name not in done]):
            break
        run.marker.unlink(missing_ok=True)
        orders = {
            "cases": todo,
            "fresh": stage.fresh,
            "seconds": seconds,
            "end": end - GRACE,
            "avoid": avoid,
        }
        run.orders.write_text(json.dumps(orders))
        ended = run_child(run, stage, end)
        if not run.marker.exists():
            if ended.status == RESTART:
                continue
            say_if_nothing_began(run, ended)
            break  # it is through, or out of time, or only its threads were left
        doing = json.loads(run.marker.read_text())
        if doing["case"] in recorded(run):
            continue  # it was recorded, and had just not been crossed out
        took = time.time() - doing["since"]
        # A case that began late and was stopped has all of the stage's time when it comes again.
        if ended.status is None and took < stage.seconds + GRACE - 2:
            print(f"  {doing['case']}: cut off after {took:.0f} s, comes again", flush=True)
            break
        failures[doing["case"], doing["form"]] += 1
        first = failures[doing["case"], doing["form"]] == 1
        note_failure(run, doing, ended, took, first, avoid)


def note_failure(
    run: Run,
    doing: Mapping[str, Any],
    ended: Ended,
    took: float,
    first: bool,
    avoid: dict[str, dict[str, str]],
) -> None:
    """Say what took a child down. The first time that is all; the second time it is recorded: of a
    form in `avoid`, of a case without forms as its result."""
    from record import add, clean, read

    if ended.status is None:
        why = doing["error"] or f"stopped after {took:.0f} s"
    else:
        said = f"the process ended with {ended.how}: {' '.join(ended.last)}".rstrip(": ")
        why = doing["error"] or clean(said)
    what = f"{doing['case']}, {doing['form']}" if doing["form"] else doing["case"]
    again = ended.status is not None and first
    print(f"  {what}: {'again in a process of its own' if again else 'FAILED'}: {why}", flush=True)
    if again:
        return
    if doing["form"]:
        avoid.setdefault(doing["case"], {})[doing["form"]] = why
        return
    old = read(run.path)["cases"].get(doing["case"], {})
    stops = {"stops": old.get("stops", 0) + 1} if ended.status is None else {}
    add(run.path, run.part, run.provenance, doing["case"], {"error": why, **stops})


def libdevice() -> dict[str, str]:
    """XLA's flag for where CUDA's device functions are, where it would not find them: beside the
    nvcc on PATH."""
    where, flags = "nvvm/libdevice/libdevice.10.bc", os.environ.get("XLA_FLAGS", "")
    at_hand = TOOLKITS + [
        Path(place, "nvidia", cuda) for place in sys.path for cuda in ("cu13", "cuda_nvcc")
    ]
    nvcc = shutil.which("nvcc")
    if (
        nvcc is None
        or "cuda_data_dir" in flags
        or any((place / where).exists() for place in at_hand)
    ):
        return {}
    toolkit = Path(nvcc).resolve().parent.parent
    return (
        {"XLA_FLAGS": f"{flags} --xla_gpu_cuda_data_dir={toolkit}".strip()}
        if (toolkit / where).exists()
        else {}
    )


def refusal(rehearse: bool) -> str | None:
    """Why this machine cannot be measured, or None."""
    from fp8lens.targets import attached_gpu
    from helpers import TARGETS, gpu_available

    if rehearse:
        return None
    instead = "With --rehearse it goes through all of it on the CPU, small."
    device = (attached_gpu() or ("",))[0]
    if not gpu_available():
        if "cpu" in os.environ.get("JAX_PLATFORMS", ""):
            why = "JAX_PLATFORMS keeps JAX from using one: unset it."
        elif not device:
            why = (
                "no NVIDIA GPU with a driver for CUDA 13 (580 or newer) answers here. On a "
                "cluster: is this the node with the GPU?"
            )
        else:
            why = f"this Python has no CUDA libraries for the {device}: pip install 'jax[cuda13]'."
        return f"This measures a GPU, and {why} {instead}"
    try:
        chip = TARGETS["local"]
    except KeyError as error:
        return f"{error} {instead}"
    if chip.compute_capability != (9, 0) or "MIG" in device:
        return (
            "This is for a whole H100 or H200 (SXM, capability 9.0); attached is "
            f"{device}. {instead}"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The stages with the names of their cases, each case once, and the parts that cannot start."""

    stages: list[tuple[Stage, list[str]]]
    broken: list[str]


def agenda(parts: list[str], rehearse: bool, only: list[str] | None = None) -> Plan:
    """What these parts measure. Of their cases only those that a pattern of `only` names."""
    names: dict[str, list[str]] = collections.defaultdict(list)
    broken = []
    for part in parts:
        try:
            found = cases(part, rehearse)
        except ImportError as error:  # the other parts may not need it
            print(f"{part}: cannot start: {error}", flush=True)
            broken.append(part)
        else:
            names[part] = [name for name in found if only is None or is_named(name, only)]
    stages = []
    for stage in AGENDA:
        mine = fnmatch.filter(names[stage.part], stage.cases)
        names[stage.part] = [name for name in names[stage.part] if name not in mine]
        stages.append((stage, mine))
    return Plan(stages, broken)


def is_named(name: str, patterns: list[str]) -> bool:
    """Whether one of the patterns is a case's name, or matches it as a shell's would."""
    return any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def go_through(runs: Mapping[str, Run], plan: Plan, end: float, after: Callable[[], None]) -> int:
    """Measure what is left, stage by stage, again and again until nothing is or the time is over;
    `after` each stage something may be done. How many cases are left."""
    from record import read

    avoid: dict[str, dict[str, dict[str, str]]] = collections.defaultdict(dict)

    def left(anybodys: bool = False) -> list[tuple[Stage, list[str]]]:
        """What nobody has measured, or what not this run has."""
        found = []
        for stage, names in plan.stages:
            done = read(runs[stage.part].path)["cases"] if anybodys else recorded(runs[stage.part])
            found.append((stage, [name for name in names if name not in done]))
        return [(stage, names) for stage, names in found if names]

    # First what nobody has measured, then what another commit or driver has.
    for anybodys in (True, False):
        before = None
        while (todo := left(anybodys)) and todo != before and time.time() < end - GRACE:
            before = todo
            for stage, names in todo:
                if time.time() < end - max(GRACE, stage.case if len(todo) > 1 else 0):
                    print(f"{stage.part} ({len(names)} cases):", flush=True)
                    supervise(runs[stage.part], names, stage, end, avoid[stage.part])
                    after()
    return sum(len(names) for _, names in left())


def carry_on(
    folder: Path, earlier: list[Path], about: Mapping[str, Mapping[str, Any]], parts: list[str]
) -> None:
    """Take into this chip's folder what others have of these parts: records that were carried here,
    or kept by a run before. What cannot be read stays where it is. Raises ValueError for what the
    folder itself has and is no record."""
    from record import HLO, merge, merge_hlo, read

    for cut_off in folder.glob("*.new"):
        cut_off.unlink()
    for part in parts:
        read(folder / f"{part}.json")
    for other in (one / folder.name for one in earlier):
        if other.is_dir() and other.resolve() != folder.resolve():
            for part in parts:
                try:
                    merge(folder / f"{part}.json", part, other / f"{part}.json", about[part])
                except (ValueError, OSError) as error:
                    print(f"left out: {error}", flush=True)
            merge_hlo(folder / HLO, other / HLO)


def keep_copy(folder: Path, to: Path) -> None:
    """Copy a folder's files; a machine that cannot take them costs nothing but the copy."""
    from tools.files import in_one_step

    try:
        for path in folder.glob("*.*"):
            in_one_step(to / path.name, path.read_bytes())
    except OSError as error:
        print(f"not kept in {to}: {error}", flush=True)


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    """The command line, and what is wrong with it as a sentence (SystemExit)."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu",
        description=f"{__doc__.splitlines()[0]} Exit status: 0 all is recorded, 1 some is left, "
        "2 it cannot run here, 3 all is recorded and a chapter failed.",
    )
    add = parser.add_argument
    add(
        "parts",
        nargs="*",
        help=f"of {', '.join(PARTS)}; without: all of them, what is worth knowing first coming "
        "first",
    )
    add(
        "--only",
        action="append",
        metavar="CASE",
        help="only cases of this name, or of names that match it (* is anything); may be repeated",
    )
    add(
        "--rehearse",
        action="store_true",
        help="on the CPU, small; into _build/rehearsal, or into the folder rehearsal of a carried "
        "folder",
    )
    add("--fresh", action="store_true", help="delete what is recorded of these parts")
    add(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"the whole run is over after so many ({MINUTES})",
    )
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the models' folders are, instead of notebooks/results",
    )
    add("--commit", help="the commit of a copy that has no .git")
    carried = parser.add_argument_group(
        "a carried folder", "what `make gpu-bundle` wrote gives these by itself"
    )
    carried.add_argument(
        "--bundle", type=Path, metavar="FOLDER", help="the folder: its commit, its results so far"
    )
    carried.add_argument(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="keep the results here as well, for the next run",
    )
    add("--measure", type=Path, help=argparse.SUPPRESS)  # a child's scratch folder
    options = parser.parse_args(words)
    options.parts = options.parts or list(PARTS)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if not options.minutes * 60 > GRACE:
        least = f"{GRACE / 60:.2g}"
        parser.error(
            f"--minutes must be above {least}, for a case to begin; got {options.minutes:g}"
        )
    return options


def set_environment(rehearse: bool) -> None:
    """What JAX reads when it starts; it starts when it is asked for the GPU's name."""
    os.environ.update(ENVIRONMENT | libdevice())
    if rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif "cuda" in os.environ.get("JAX_PLATFORMS", ""):
        # "cuda" alone would leave JAX no CPU, which the float64 reference runs on.
        del os.environ["JAX_PLATFORMS"]


def measure_as_child(options: argparse.Namespace) -> int:
    """What a child does: one part, as its supervisor's scratch folder says. The exit status."""
    about = json.loads((options.measure / "run.json").read_text())
    (part,) = options.parts
    path = Path(about["folder"], f"{part}.json")
    return measure(Run(part, path, about[part], options.measure))


def measure_all(
    options: argparse.Namespace,
    plan: Plan,
    place: Path,
    about: Mapping[str, Mapping[str, Any]],
    end: float,
) -> int | None:
    """Measure into a folder all that is planned, until `end`. How many cases are left; None where
    somebody stopped it. Raises ValueError for a file there that is no record."""
    kind = "rehearsal" if options.rehearse else "results"
    # What is carried, and what this machine still has of a run whose results have not come back.
    earlier = [where / kind for where in (options.bundle, options.work) if where]

    def keep() -> None:
        if options.work:
            keep_copy(place, options.work / kind / place.name)

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "run.json").write_text(json.dumps({**about, "folder": str(place.resolve())}))
        runs = {part: Run(part, place / f"{part}.json", about[part], scratch) for part in PARTS}
        try:
            if options.fresh:
                for part in options.parts:
                    runs[part].path.unlink(missing_ok=True)
            carry_on(place, earlier, about, [] if options.fresh else options.parts)
            return go_through(runs, plan, end, keep)
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
            return None


def last_words(place: Path, missing: int | None, broken: list[str], failed: list[str]) -> str:
    """What is left to do after a run, as a sentence. `missing` is None where it was stopped."""
    shown = place.resolve().relative_to(ROOT) if place.resolve().is_relative_to(ROOT) else place
    said = [f"results are in {shown}."]
    if missing is None:
        said.append("The same command goes on where this stopped.")
    elif missing:
        said.append(
            f"The same command goes on where this stopped: {missing} cases are left "
            "(exit status 1)."
        )
    elif broken:
        said.append(f"Nothing is left, but for {', '.join(broken)}: it cannot start, see above.")
    else:
        said.append("Nothing is left.")
    if failed:
        said.append(
            f"FAILED: {', '.join(failed)} (exit status 3 once nothing is left). Once that is "
            "fixed, run them again: --fresh notebooks."
        )
    return " ".join(said)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or rehearse, and say what came out. The exit status is what `--help` says."""
    options = arguments_of(arguments)
    start = time.time()
    set_environment(options.rehearse)
    if options.measure:
        return measure_as_child(options)
    if why := refusal(options.rehearse):
        print(why, file=sys.stderr)
        return 2

    from record import commit, failed_chapters, folder, provenance
    from summary import summary

    from helpers.records.results import COMMANDS

    tree = options.bundle / "tree" if options.bundle else None
    if options.rehearse and not (options.commit or tree):
        made_from: tuple[str, bool | None] = ("0" * 40, True)
    else:
        made_from = commit(options.commit, tree)
    here = provenance(made_from, options.rehearse)
    about = {part: here | {"command": COMMANDS[part]} for part in PARTS}
    carried = options.bundle / ("rehearsal" if options.rehearse else "results") if tree else None
    place = folder(here, options.results or carried)
    plan = agenda(options.parts, options.rehearse, options.only)
    if not plan.broken and not any(names for _, names in plan.stages):
        print(f"no case of {', '.join(options.parts)} is named {options.only}", file=sys.stderr)
        return 2
    try:
        missing = measure_all(options, plan, place, about, start + options.minutes * 60)
        failed = failed_chapters(place / "notebooks.json") if "notebooks" in options.parts else []
    except ValueError as error:  # a file that is no record
        print(error, file=sys.stderr)
        return 2
    print(summary(place, options.parts))
    words = last_words(place, missing, plan.broken, failed)
    print(f"{time.time() - start:.0f} s; {words}", flush=True)
    if missing != 0 or plan.broken:
        return 1
    return 3 if failed else 0


def stop(*signal_and_frame: object) -> None:
    """End as Ctrl-C does, on a signal that says that the time is up."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)  # as a batch system says that the time is up
    try:
        status = main()
    except KeyboardInterrupt:
        print("stopped before the first case: the same command begins again", file=sys.stderr)
        status = 1
    except MemoryError:
        print("Memory ran out: the same command goes on where this stopped.", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What is left to take down may hang where the GPU is lost, and nothing of it is wanted.
    os._exit(status)
