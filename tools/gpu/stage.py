"""Measure one stage, in a process of its own: tools.gpu starts it, with a Task as JSON.

First all forms of all its cases are built, run, compared and timed by the host's clock, a line each
time. Only then is CUPTI asked for the GPU's own clock: what it breaks costs no time that is known.
"""

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fp8lens.matmul.kernels import bytes_moved, kernels, roofline_seconds
from helpers import report_gemms
from helpers.records import local
from helpers.records.results import read_lines, rows_of
from tools.gpu.agenda import LOST, MISHAPS, OTHER, STAGES, Task
from tools.gpu.lines import Key, Log, of_runs_like, sentence
from tools.gpu.machine import Gpu, WrongDevice

LOOKS_BY_GPU = 3
ENDING = 8  # seconds before a stage's end in which no form is begun


@dataclasses.dataclass(frozen=True)
class Ready:
    """A form that has run: what was found of it, what to call where it is timed, and its
    program."""

    made: Mapping[str, Any]
    call: Callable[[], Any] | None = None
    compiled: jax.stages.Compiled | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """Forms that are timed side by side, in turn; the first is what the others are compared with.
    `looks` are how often each is timed, for `seconds`; with 0 none is, and each form is a result of
    its own. `limit` is what one form may take until it has run, in seconds."""

    part: str
    name: str
    forms: Mapping[str, Callable[[], Ready]]
    looks: int = 5
    seconds: float = 0.05
    limit: float = 60

    def key(self, form: str) -> Key:
        """Of one of its forms."""
        return Key(self.part, self.name, form)


class Measuring:
    """What measures cases: the GPU, the file, and until when."""

    def __init__(self, gpu: Gpu, log: Log, task: Task):
        self.gpu, self.log, self.until, self.cupti = gpu, log, task.until, task.cupti
        self.marker = Path(task.scratch, "under way.json")

    def measure(self, cases: list[Case]) -> None:
        """All cases by the host's clock, then all by the GPU's. The stage has finished if no form
        was left out for want of time."""
        rows = rows_of(of_runs_like(read_lines(self.log.path), self.log.run))
        ready = [(case, self.by_host(case, self.missing(case, rows))) for case in cases]
        for case, forms in ready:
            # In turns as well: a chip that has rested is faster, and one that has not, slower.
            for order in local.turns(list(forms), LOOKS_BY_GPU):
                for name in order:
                    one = forms[name]
                    if self.cupti and one.call and time.time() < self.until:
                        self.by_gpu(case, name, one.call)
        if time.time() < self.until - ENDING:
            self.log.add(None, finished=True)

    def missing(self, case: Case, rows: Mapping[Any, Mapping[str, Any]]) -> list[str]:
        """The forms that are still to be measured, and with them the first of a case that is timed,
        with which they are compared. What has failed in this run is not tried again."""
        found = []
        for name in case.forms:
            row = rows.get(case.key(name), {"looks": -1, "run": -1})
            if "error" in row:
                is_known = row["run"] == self.log.run
            else:
                is_known = row.get("looks", 0) >= case.looks
                if case.looks and self.cupti:
                    is_known = is_known and row["clock_asked"]
            if not is_known:
                found.append(name)
        first = next(iter(case.forms))
        if found and case.looks and "error" not in rows.get(case.key(first), {}):
            found = [first, *(name for name in found if name != first)]
        return found

    def by_host(self, case: Case, names: list[str]) -> dict[str, Ready]:
        """Build forms and time them. Returns those that did not fail."""
        ready: dict[str, Ready] = {}
        for name in names:
            if time.time() < self.until - ENDING:
                with self.under_way(case.key(name), case.limit):
                    one = case.forms[name]()
                    self.log.add(case.key(name), made=dict(one.made))
                    self.look(case, name, one)
                    ready[name] = one
        for order in local.turns(list(ready), case.looks - 1):
            for name in order:
                if name in ready and time.time() < self.until:
                    one = ready.pop(name)  # what fails is not called again
                    with self.under_way(case.key(name), case.limit):
                        self.look(case, name, one)
                        ready[name] = one
        for name, one in ready.items():
            if one.compiled is not None:
                self.describe(case.key(name), one.compiled)
        return ready

    def look(self, case: Case, name: str, one: Ready) -> None:
        """Time a form once by the host's clock; and see what the GPU does meanwhile."""
        if one.call is None:
            return
        calls = local.calls_for(one.call, case.seconds)  # which warms up, too
        seconds = local.wall_seconds(one.call, calls)
        for _ in range(1 + calls // 4):
            result = one.call()
        chip = self.gpu.chip()  # while it works on these: they have only been sent
        local.wait(result)
        wall = {"seconds": seconds, "calls": calls, "chip": chip}
        self.log.add(case.key(name), wall=wall)

    def by_gpu(self, case: Case, name: str, call: Callable[[], Any]) -> None:
        """What CUPTI sees of some calls."""
        with self.under_way(case.key(name), 15, "cupti"):
            repeats = max(3, min(local.calls_for(call, case.seconds), 50))
            seen = self.gpu.kernel_times(call, repeats)
            self.log.add(case.key(name), device=device(seen, repeats))

    def describe(self, key: Key, compiled: jax.stages.Compiled) -> None:
        """What the compiler made of a form, or why that cannot be read; and its text."""
        try:
            self.log.keep(key, compiled.as_text() or "")
            self.log.add(key, made=description(compiled, self.gpu))
        except Exception as error:
            self.log.add(key, made={"not_described": sentence(error)})

    @contextlib.contextmanager
    def under_way(self, key: Key, limit: float, clock: str = "wall") -> Iterator[None]:
        """What is done within is a form's: an error is its line, and ends nothing else. The marker
        says which form it is, for the process that waits. If the time is over, the process ends,
        even where it hangs in a library."""
        doing = {"key": key, "until": time.time() + limit, "limit": limit, "clock": clock}
        self.marker.write_text(json.dumps(doing))
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            yield
        except Exception as error:
            print(f"  {key.case}, {key.form}: {sentence(error)[:200]}", flush=True)
            if clock == "cupti":
                self.log.add(key, device={"no_clock": sentence(error)})
                self.cupti = not isinstance(error, local.NoClock)
            else:
                self.log.add(key, error=sentence(error))
            if not self.gpu.answers():  # what follows needs another process
                self.marker.unlink()
                ended(LOST)
        faulthandler.cancel_dump_traceback_later()
        self.marker.unlink()


def device(seen: list[tuple[str, float]], repeats: int) -> dict[str, Any]:
    """What CUPTI saw of so many calls, for one."""
    if not seen:
        raise local.NoClock("CUPTI recorded no kernel")
    total: dict[str, float] = collections.defaultdict(float)
    for name, seconds in seen:
        total[name] += seconds / repeats
    return {
        "seconds": statistics.median(local.seconds_of_calls(seen, repeats)),
        "launches": len(seen) / repeats,
        "longest": sorted(total.items(), key=lambda kernel: -kernel[1])[:5],
    }


def description(compiled: jax.stages.Compiled, gpu: Gpu) -> dict[str, Any]:
    """What the compiler made of a form: kernels, bytes, matmuls, and the least time by roofline."""
    asked = "library", "math_dtype", "epilogue", "amax", "out_dtype"
    matmuls = [
        {field: getattr(row, field) for field in asked} for row in report_gemms(compiled).rows
    ]
    return {
        "kernels": len(kernels(compiled)),
        "bytes": bytes_moved(compiled),
        "matmuls": sorted(matmuls, key=str),  # the scheduler's order may be another
        "roofline_seconds": roofline_seconds(compiled, gpu.target()),
    }


def start(gpu: Gpu, scratch: Path) -> None:
    """Say what the GPU is, and whether CUPTI sees a kernel: here it can break nothing."""
    (scratch / "about.json").write_text(json.dumps(gpu.about()))
    faulthandler.dump_traceback_later(30, exit=True)
    x = jax.numpy.ones(1024)
    add = gpu.compile(lambda x: x + 1, x).call
    local.wait(add(x))
    try:
        if gpu.kernel_times(lambda: add(x), 3):
            (scratch / "cupti").touch()
    except Exception as error:
        print(f"the GPU's own clock cannot be read: {sentence(error)}", flush=True)


def ended(status: int) -> None:
    """End this process at once: what is left to take down may hang where the GPU is lost."""
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """What a child does; its last act is to end."""
    task = Task(**json.loads(sys.argv[1]))
    if sys.platform == "linux":  # the GPU is not held after the process that waits for this one
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    gpu = Gpu()
    if task.rehearse:
        from tools.gpu.rehearsal import Fake

        gpu = Fake(task.rehearse)
    try:
        gpu.require(task.device)
    except WrongDevice as refused:
        print(refused, flush=True)
        ended(OTHER)
    if task.stage == "start":
        start(gpu, Path(task.scratch))
        ended(0)
    (mine,) = (stage for stage in (*STAGES, MISHAPS) if stage.name == task.stage)
    log = Log(Path(task.folder), task.run, task.stage)
    Measuring(gpu, log, task).measure(list(mine.cases(gpu)))
    ended(0)


if __name__ == "__main__":
    main()
