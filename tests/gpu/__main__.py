"""Run the project on the attached Hopper GPU and record what came out: `make gpu`, `make train-bench`.

Parts, each in processes of its own and with a result file of its own, notebooks/results/<model>/<part>.json:
agreement (does the compile without a GPU give what the GPU's own gives, and does the GPU run it), numerics (are the
numbers right), speed, autotune (what XLA chose), notebooks (do the chapters run), train (a transformer layer).

A run that is stopped, or runs out of its minutes, goes on where it stopped: cases recorded from the same commit on the
same machine are not measured again (after an edit that is not committed, give --fresh). A case that takes its process
down is recorded as that, and the rest goes on.
"""
import argparse
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
for place in (ROOT, HERE.parent, HERE):  # helpers; releases and outputs of the tests; the parts
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

# Of the run's minutes, how many each part may take. `make gpu` is the first five.
SHARES = {"agreement": 0.30, "numerics": 0.14, "speed": 0.32, "autotune": 0.06, "notebooks": 0.18, "train": 1.0}
GPU_PARTS = [part for part in SHARES if part != "train"]
GRACE = 60  # seconds that a case in progress at the end of its part's time may still take
HANGS = 150  # seconds after which a case that is stopped for that counts as one that fails; sooner, it is left
RESTART = 75  # exit status of a child whose GPU no longer answers after a case that failed
CRASHES = 8  # cases that may take down their process before a part is given up
# A working directory of memory for cuBLASLt and for torch beside JAX; and no traces of the machine in messages.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One part of one run: where its file is, and what the measurements come from."""

    part: str
    path: Path
    provenance: Mapping[str, Any]

    @property
    def marker(self) -> Path:
        """Holds the name of the case in progress: what took a process down."""
        return self.path.with_suffix(".running")


def cases(part: str, rehearse: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    return importlib.import_module(part).cases(rehearse)


def recorded(run: Run) -> dict[str, Any]:
    """Cases of before that may stay."""
    from record import read, same_run

    old = read(run.path)
    return dict(old["cases"]) if old and same_run(old["provenance"], run.provenance) else {}


def measure(run: Run, deadline: float) -> int:
    """Measure what is missing, and write the file after each case. Runs in a child process; the exit status."""
    from record import sentence, write

    done = recorded(run)
    everything = cases(run.part, run.provenance["rehearsal"])
    done, parent = {name: done[name] for name in everything if name in done}, os.getppid()
    for name, case in everything.items():
        if name in done:
            continue
        if time.time() > deadline or os.getppid() != parent:  # nobody waits: the GPU may be another run's by now
            break
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.marker.write_text(name)
        start = time.perf_counter()
        try:
            result = case()
        except Exception as error:  # what a GPU refuses is a result
            result = {"error": sentence(error)}
        done[name] = result | {"took": round(time.perf_counter() - start, 3)}
        write(run.path, run.part, run.provenance, done)
        run.marker.unlink()
        print(f"  {name}: {result.get('error') or 'done'} ({done[name]['took']:.1f} s)", flush=True)
        if "error" in result and not answers():
            return RESTART
    return 0


def answers() -> bool:
    """Whether the GPU still computes: after an illegal access, nothing does in this process."""
    import jax

    try:
        return bool(jax.block_until_ready(jax.numpy.ones(8).sum() == 8))
    except Exception:
        return False


def went_down(run: Run, status: int) -> None:
    """Record the case that took its process down."""
    from record import write

    name = run.marker.read_text()
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    print(f"  {name}: ended its process with {how}", flush=True)
    write(run.path, run.part, run.provenance, recorded(run) | {name: {"error": f"the process ended with {how}"}})
    run.marker.unlink()


def supervise(run: Run, arguments: list[str], seconds: float) -> tuple[int, int]:
    """Run a part in child processes until it is through, or out of time: (cases recorded, cases left)."""
    deadline = time.time() + seconds
    try:
        names = cases(run.part, run.provenance["rehearsal"])
    except ImportError as error:  # the other parts may not need it
        print(f"  cannot start: {error}", flush=True)
        return len(recorded(run)), 1
    run.marker.unlink(missing_ok=True)
    # The chapters import helpers, installed or not.
    found = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    for _ in range(CRASHES):
        child = subprocess.Popen([sys.executable, HERE, run.part, "--measure", str(deadline), *arguments], cwd=ROOT,
                                 env=os.environ | ENVIRONMENT | found, start_new_session=True)
        try:
            status = child.wait(timeout=max(1.0, deadline - time.time()) + GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if isinstance(stopped, KeyboardInterrupt):
                run.marker.unlink(missing_ok=True)  # the reader's doing, not the case's
                raise
            if not run.marker.exists() or time.time() - run.marker.stat().st_mtime < HANGS:
                run.marker.unlink(missing_ok=True)  # it began late, or only its threads were left: the next run's
                break
            status = -signal.SIGKILL
        if status == 0:
            break
        if status == RESTART:
            continue
        if not run.marker.exists():
            print(f"{run.part} did not start: exit status {status}, see above", flush=True)
            break
        went_down(run, status)
    done = recorded(run)
    return len(done), len(set(names) - set(done))


def refusal(rehearse: bool) -> str | None:
    """Why this machine cannot be measured, or None."""
    from helpers import TARGETS, gpu_available

    if rehearse:
        return None
    instead = "ARGS=--rehearse goes through all of it on the CPU, small, and records nothing."
    if not gpu_available():
        return f"This measures a GPU, and JAX finds none here that it can use. {instead}"
    try:
        chip = TARGETS["local"]
    except KeyError as error:
        return f"{error} {instead}"
    if chip.compute_capability != (9, 0):
        return f"This is for Hopper (H100, H200), compute capability 9.0; attached is {chip.device}. {instead}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(SHARES)}; without: {', '.join(GPU_PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small, into _build/rehearsal")
    parser.add_argument("--fresh", action="store_true", help="measure again what is recorded")
    parser.add_argument("--minutes", type=float, default=7.0,
                        help="how long to go on beginning cases (7); what is under way has one more")
    parser.add_argument("--commit", help="the commit of a copy that has no .git")
    parser.add_argument("--results", type=lambda name: Path(name).resolve(), help="a folder for the models' folders "
                        "instead of notebooks/results")
    parser.add_argument("--measure", type=float, help=argparse.SUPPRESS)  # the child's deadline
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)  # before JAX starts: this process uses the GPU too, to ask for its name
    parts = options.parts or GPU_PARTS
    if unknown := set(parts) - set(SHARES):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(SHARES)}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif "cuda" in os.environ.get("JAX_PLATFORMS", ""):
        del os.environ["JAX_PLATFORMS"]  # "cuda" alone would leave JAX no CPU, which the float64 reference runs on
    if why := refusal(options.rehearse):
        print(why, file=sys.stderr)
        return 2

    from record import folder, provenance

    from helpers.results import COMMANDS

    def run_of(part: str) -> Run:
        about = provenance(COMMANDS[part], options.commit, options.rehearse)
        return Run(part, folder(about, options.results) / f"{part}.json", about)

    if options.measure:
        return measure(run_of(parts[0]), options.measure)
    given = {"--rehearse": options.rehearse, f"--commit={options.commit}": options.commit,
             f"--results={options.results}": options.results}
    passed_on = [word for word, value in given.items() if value]
    start, left = time.time(), 0
    for number, part in enumerate(parts):
        run = run_of(part)
        if options.fresh:
            run.path.unlink(missing_ok=True)
        print(f"{part}:", flush=True)
        # What one part leaves of its time goes to those after it.
        rest = options.minutes * 60 - (time.time() - start)
        share = SHARES[part] / sum(SHARES[p] for p in parts[number:])
        done, missing = supervise(run, passed_on, max(rest, 0) * share)
        left += missing
        print(f"  {done} cases in {run.path.relative_to(ROOT) if run.path.is_relative_to(ROOT) else run.path}"
              + f", {missing} left" * bool(missing), flush=True)
    if left:
        print(f"{left} cases are left: the same command goes on with them.")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
