"""Run the project on the attached Hopper GPU and record what came out: `make gpu`, `make
train-bench`.

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
    Stage("speed", "8192: details", 60, fresh=True),
    Stage("numerics", "*", 150),
    Stage("train", "forward", 120, fresh=True, case=80),
    Stage("speed", "7B down*: main", 90, fresh=True),  # points of chapter 09's pictures,
    Stage("speed", "N = *: main", 120, fresh=True),  # and of its inequality
    Stage("speed", "4096: blocks", 60, fresh=True),  # chapter 10's ladder
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
GRACE = 50  # seconds that a case may go on after its stage's time; none begins in the last ones of a run
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
        for line in process.stdout:
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


def supervise(
    run: Run, names: list[str], stage: Stage, end: float, avoid: dict[str, dict[str, str]]
) -> None:
    """Measure cases of a part in child processes, for the stage's seconds and not beyond `end`.
    `avoid` says of forms that have taken their processes down, by case and name, how; it grows."""
    from record import add, clean, read

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
        run.orders.write_text(
            json.dumps(
                {
                    "cases": todo,
                    "fresh": stage.fresh,
                    "seconds": seconds,
                    "end": end - GRACE,
                    "avoid": avoid,
                }
            )
        )
        with child(run) as (process, last):
            status, started = None, time.time()  # None while it runs
            while (
                status is None
                and time.time() < end
                and spent(run) < stage.seconds + GRACE
                and (run.marker.exists() or run.began.exists() or time.time() < started + STARTS)
            ):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(timeout=0.2)
        if not run.marker.exists():
            if status == RESTART:
                continue
            if status or not run.began.exists():
                how = (
                    f"exit status {status}"
                    if status
                    else f"no case began in {time.time() - started:.0f} s"
                )
                print(f"{run.part} did not start: {how}, see above", flush=True)
            break  # it is through, or out of time, or only its threads were left
        doing = json.loads(run.marker.read_text())
        if doing["case"] in recorded(run):
            continue  # it was recorded, and had just not been crossed out
        if status is None:
            took = time.time() - doing["since"]
            if (
                took < stage.seconds + GRACE - 2
            ):  # it began late: its next turn has all of the stage's time
                print(f"  {doing['case']}: cut off after {took:.0f} s, comes again", flush=True)
                break
            why = doing["error"] or f"stopped after {took:.0f} s"
        else:
            by = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            why = doing["error"] or clean(
                f"the process ended with {by}: {' '.join(last)}".rstrip(": ")
            )
        what = f"{doing['case']}, {doing['form']}" if doing["form"] else doing["case"]
        key = doing["case"], doing["form"]
        failures[key] += 1
        again = status is not None and failures[key] == 1
        print(
            f"  {what}: {'again in a process of its own' if again else 'FAILED'}: {why}", flush=True
        )
        if again:
            continue
        if doing["form"]:
            avoid.setdefault(doing["case"], {})[doing["form"]] = why
        else:
            old = read(run.path)["cases"].get(doing["case"], {})
            stops = {"stops": old.get("stops", 0) + 1} if status is None else {}
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
    if not gpu_available():
        if "cpu" in os.environ.get("JAX_PLATFORMS", ""):
            why = "JAX_PLATFORMS keeps JAX from using one: unset it."
        elif attached_gpu() is None:
            why = (
                "no NVIDIA GPU with a driver for CUDA 13 (580 or newer) answers here. On a cluster: is this the "
                "node with the GPU?"
            )
        else:
            why = f"this Python has no CUDA libraries for the {attached_gpu()[0]}: pip install 'jax[cuda13]'."
        return f"This measures a GPU, and {why} {instead}"
    try:
        chip = TARGETS["local"]
    except KeyError as error:
        return f"{error} {instead}"
    if chip.compute_capability != (9, 0) or "MIG" in attached_gpu()[0]:
        return f"This is for a whole H100 or H200 (SXM, capability 9.0); attached is {attached_gpu()[0]}. {instead}"
    return None


def agenda(parts: list[str], rehearse: bool) -> list[tuple[Stage, list[str]]]:
    """The stages of these parts with the names of their cases, each case once."""
    names: dict[str, list[str]] = collections.defaultdict(list)
    for part in parts:
        try:
            names[part] = list(cases(part, rehearse))
        except ImportError as error:  # the other parts may not need it
            print(f"{part}: cannot start: {error}", flush=True)
    stages = []
    for stage in AGENDA:
        mine = fnmatch.filter(names[stage.part], stage.cases)
        names[stage.part] = [name for name in names[stage.part] if name not in mine]
        stages.append((stage, mine))
    return stages


def go_through(
    runs: Mapping[str, Run], parts: list[str], rehearse: bool, end: float, after: Callable[[], None]
) -> tuple[int, int]:
    """Measure what is left, stage by stage, again and again until nothing is or the time is over;
    `after` each stage something may be done. How many cases are left, and how many parts cannot
    start."""
    from record import read

    stages = agenda(parts, rehearse)
    avoid: dict[str, dict[str, dict[str, str]]] = collections.defaultdict(dict)

    def left(anybodys: bool = False) -> list[tuple[Stage, list[str]]]:
        """What nobody has measured, or what not this run has."""
        found = []
        for stage, names in stages:
            done = read(runs[stage.part].path)["cases"] if anybodys else recorded(runs[stage.part])
            found.append((stage, [name for name in names if name not in done]))
        return [(stage, names) for stage, names in found if names]

    for anybodys in (
        True,
        False,
    ):  # first what nobody has measured, then what another commit or driver has
        before = None
        while (todo := left(anybodys)) and todo != before and time.time() < end - GRACE:
            before = todo
            for stage, names in todo:
                if time.time() < end - max(GRACE, stage.case if len(todo) > 1 else 0):
                    print(f"{stage.part} ({len(names)} cases):", flush=True)
                    supervise(runs[stage.part], names, stage, end, avoid[stage.part])
                    after()
    broken = set(parts) - {stage.part for stage, names in stages if names}
    return sum(len(names) for _, names in left()), len(broken)


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/gpu",
        description=f"{__doc__.splitlines()[0]} Exit status: 0 all is recorded, 1 some is left, 2 it "
        "cannot run here.",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"of {', '.join(PARTS)}; without: all of them, what is worth knowing "
        "first coming first",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="on the CPU, small; into _build/rehearsal, or into the "
        "folder rehearsal of a carried folder",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete what is recorded of these parts"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"the whole run is over after so many ({MINUTES})",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the models' folders are, instead of notebooks/results",
    )
    parser.add_argument("--commit", help="the commit of a copy that has no .git")
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
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # a child's scratch folder
    options = parser.parse_args(arguments)
    os.environ.update(
        ENVIRONMENT | libdevice()
    )  # before JAX starts, which asks the GPU for its name
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if not options.minutes * 60 > GRACE:
        parser.error(
            f"--minutes must be above {GRACE / 60:.2g}, for a case to begin; got {options.minutes:g}"
        )
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif "cuda" in os.environ.get("JAX_PLATFORMS", ""):
        del os.environ[
            "JAX_PLATFORMS"
        ]  # "cuda" alone would leave JAX no CPU, which the float64 reference runs on
    start = time.time()
    if options.measure:
        about = json.loads((options.measure / "run.json").read_text())
        return measure(
            Run(
                parts[0],
                Path(about["folder"], f"{parts[0]}.json"),
                about[parts[0]],
                options.measure,
            )
        )
    if why := refusal(options.rehearse):
        print(why, file=sys.stderr)
        return 2

    from record import commit, folder, provenance
    from summary import summary

    from helpers.results import COMMANDS

    tree = options.bundle / "tree" if options.bundle else None
    made_from = (
        ("0" * 40, True)
        if options.rehearse and not (options.commit or tree)
        else commit(options.commit, tree)
    )
    here = provenance(made_from, options.rehearse)
    about = {part: here | {"command": COMMANDS[part]} for part in PARTS}
    kind = "rehearsal" if options.rehearse else "results"
    # What is carried, and what this machine still has of a run whose results have not come back.
    earlier = [place / kind for place in (options.bundle, options.work) if place]
    place = folder(here, options.results or (earlier[0] if options.bundle else None))
    missing, broken = None, 0
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "run.json").write_text(json.dumps(about | {"folder": str(place.resolve())}))
        runs = {
            part: Run(part, place / f"{part}.json", about[part], Path(scratch)) for part in PARTS
        }

        def keep() -> None:
            if options.work:
                keep_copy(place, options.work / kind / place.name)

        try:
            if options.fresh:
                for part in parts:
                    runs[part].path.unlink(missing_ok=True)
            carry_on(
                place,
                earlier,
                about,
                [part for part in PARTS if part in parts and not options.fresh],
            )
            missing, broken = go_through(
                runs, parts, options.rehearse, start + options.minutes * 60, keep
            )
        except ValueError as error:  # a file that is no record
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
    print(summary(place, parts))
    shown = place.resolve().relative_to(ROOT) if place.resolve().is_relative_to(ROOT) else place
    print(
        f"{time.time() - start:.0f} s; results are in {shown}. "
        + (
            "Nothing is left"
            + (f", but for {broken} part that cannot start, see above." if broken else ".")
            if missing == 0
            else "The same command goes on where this stopped"
            + (f": {missing} cases are left (exit status 1)." if missing else ".")
        ),
        flush=True,
    )
    return int(missing != 0 or broken > 0)


def stop(*signal_and_frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)  # as a batch system says that the time is up
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        status
    )  # what is left to take down may hang where the GPU is lost, and nothing of it is wanted
