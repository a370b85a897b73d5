"""Measure one stage, in a process of its own: `python -m tools.gpu.stage`, which tools.gpu starts.

First all forms of all its cases are built, run, compared and timed by the host's clock, a line each
time. Only then is CUPTI asked for the GPU's own clock: what it breaks costs no time that is known.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fp8lens.matmul.kernels import bytes_moved, kernels, roofline_seconds
from helpers import report_gemms
from helpers.records import local
from helpers.records.results import read_lines
from tools.gpu.agenda import CLOCK, LOST, OTHER, STAGES
from tools.gpu.lines import Key, Log, known, sentence
from tools.gpu.machine import Gpu, about

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
    limit: float = 45

    def key(self, form: str) -> Key:
        """Of one of its forms."""
        return Key(self.part, self.name, form)


@dataclasses.dataclass
class Marker:
    """Says in a file which form is under way and until when, for the process that waits: what takes
    this one down is known then, and what hangs is ended."""

    path: Path

    def set(self, key: Key, limit: float, clock: str) -> None:
        """`clock` is "wall", or "cupti" where that is asked."""
        said = {"key": key, "until": time.time() + limit, "limit": limit, "clock": clock}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(said))
        new.replace(self.path)

    def clear(self) -> None:
        """Nothing is under way."""
        self.path.unlink(missing_ok=True)


@dataclasses.dataclass
class Stage:
    """What measures: the GPU, the file, what is under way, and until when."""

    gpu: Gpu
    log: Log
    marker: Marker
    until: float
    cupti: bool = False

    def measure(self, cases: list[Case]) -> None:
        """All cases by the host's clock, then all by the GPU's. A case of which something is known
        already begins with its first form all the same: what follows is compared with it."""
        rows = known(read_lines(self.log.path), self.log.run)
        to_call = [(case, self.by_host(case, rows)) for case in cases]
        if self.cupti:
            for case, calls in to_call:
                for name, call in calls.items():
                    self.by_gpu(case, name, call)

    def left(self, case: Case, rows: Mapping[Any, Any]) -> tuple[list[str], list[str]]:
        """Which forms are to be timed, the first one with them; and of which only the GPU's clock
        was not read."""
        of_form = {name: rows.get(case.key(name)) or {} for name in case.forms}
        tried = [name for name, row in of_form.items() if not self.has_failed(row)]
        missing = [name for name in tried if not timed(of_form[name], case)]
        first = next(iter(case.forms))
        if missing and case.looks and first in tried:
            missing = list(dict.fromkeys([first, *missing]))
        rest = [name for name in tried if name not in missing and self.cupti]
        return missing, [name for name in rest if of_form[name].get("clock_asked") is False]

    def by_host(self, case: Case, rows: Mapping[Any, Any]) -> dict[str, Callable[[], Any]]:
        """Build what of a case is not known, and time it. What is to be called, by form."""
        missing, unclocked = self.left(case, rows)
        ready: dict[str, Ready] = {}
        calls: dict[str, Callable[[], Any]] = {}
        times: dict[str, int] = {}
        for name in (*missing, *unclocked):
            if one := self.build(case, name):
                ready[name] = one
            if one and one.call:
                calls[name] = one.call
            if name in calls and name in missing:
                self.first_look(case, name, calls[name], times)
        for turn in local.turns(list(times), case.looks - 1):
            for name in turn:
                if name in times:
                    self.look(case, name, calls[name], times)
        for name, one in ready.items():
            if one.compiled is not None:
                self.describe(case, name, one.compiled)
        return {name: call for name, call in calls.items() if name in (*times, *unclocked)}

    def has_failed(self, row: Mapping[str, Any]) -> bool:
        """Whether a form is not tried again: it has failed, and was not only too slow in a run
        before, on a machine that had just started."""
        if "error" not in row:
            return False
        return row["run"] == self.log.run or not row.get("stopped")

    def build(self, case: Case, name: str) -> Ready | None:
        """A form that has run; None where it fails, or no time is left for it."""
        if time.time() > self.until - ENDING:
            return None
        with self.under_way(case, name, case.limit) as done:
            one = case.forms[name]()
            self.log.add(case.key(name), made=dict(one.made))
            done.append(one)
        return done[0] if done else None

    def first_look(
        self, case: Case, name: str, call: Callable[[], Any], times: dict[str, int]
    ) -> None:
        """Time a form once, and note how many calls a look takes."""
        with self.under_way(case, name, case.limit):
            times[name] = local.calls_for(call, case.seconds)
        if name in times:
            self.look(case, name, call, times)

    def look(self, case: Case, name: str, call: Callable[[], Any], times: dict[str, int]) -> None:
        """Time a form once; one that fails is not called again."""
        if time.time() > self.until:
            return
        with self.under_way(case, name, 20 + 5 * case.seconds) as done:
            seconds = local.wall_seconds(call, times[name])
            for _ in range(1 + times[name] // 4):
                result = call()
            chip = self.gpu.chip()  # while it works on these: they have only been sent
            local.wait(result)
            wall = {"seconds": seconds, "calls": times[name], "chip": chip}
            self.log.add(case.key(name), wall=wall)
            done.append(wall)
        if not done:
            del times[name]

    def by_gpu(self, case: Case, name: str, call: Callable[[], Any]) -> None:
        """What CUPTI sees of some calls."""
        if not self.cupti or time.time() > self.until:
            return
        key = case.key(name)
        self.marker.set(key, 15, "cupti")
        try:
            repeats = max(3, min(local.calls_for(call, case.seconds), 50))
            seen = self.gpu.kernel_times(call, repeats)
            self.log.add(key, device=device(seen, repeats))
        except local.NoClock as error:
            self.log.add(key, device={"no_clock": sentence(error)})
            self.cupti = False
        except Exception as error:
            self.log.add(key, device={"no_clock": sentence(error)})
            self.end_if_lost()
        self.marker.clear()

    def describe(self, case: Case, name: str, compiled: jax.stages.Compiled) -> None:
        """What the compiler made of a form, or why that cannot be read; and its text."""
        try:
            self.log.keep(case.key(name), compiled.as_text() or "")
            self.log.add(case.key(name), made=description(compiled, self.gpu))
        except Exception as error:
            self.log.add(case.key(name), made={"not_described": sentence(error)})

    @contextlib.contextmanager
    def under_way(self, case: Case, name: str, limit: float) -> Iterator[list[Any]]:
        """What is done within is a form's: an error is its line, and ends nothing else. The list is
        for what was done; it is empty where that failed."""
        key, done = case.key(name), list[Any]()
        self.marker.set(key, limit, "wall")
        try:
            yield done
        except Exception as error:
            done.clear()
            said = sentence(error)
            self.log.add(key, error=said)
            print(f"  {key.case}, {key.form}: FAILED: {said[:200]}", flush=True)
            self.end_if_lost()
        self.marker.clear()

    def end_if_lost(self) -> None:
        """End the process where the GPU is gone: what follows needs another."""
        if not self.gpu.answers():
            self.marker.clear()
            ended(LOST)


def timed(row: Mapping[str, Any], case: Case) -> bool:
    """Whether a form has been looked at as often as it should be, or is not timed."""
    return bool(row) and row.get("looks", 0) >= case.looks


def device(seen: list[tuple[str, float]], repeats: int) -> dict[str, Any]:
    """What CUPTI saw of so many calls, for one."""
    each = sorted(local.seconds_of_calls(seen, repeats))
    longest = local.kernels_of_a_call(seen, repeats)
    if not each or not seen:
        return {"no_clock": "CUPTI recorded no kernel"}
    return {
        "seconds": each[len(each) // 2],
        "launches": sum(count for *_, count in longest),
        "longest": [list(kernel) for kernel in longest[:5]],
    }


def description(compiled: jax.stages.Compiled, gpu: Gpu) -> dict[str, Any]:
    """What the compiler made of a form: kernels, bytes, matmuls, and the least time by roofline."""
    report = report_gemms(compiled)
    return {
        "kernels": len(kernels(compiled)),
        "bytes": bytes_moved(compiled),
        "gemms": [
            f"{row.library} {row.math_dtype} {row.epilogue} {row.tile} {row.precision}".strip()
            for row in report.rows
        ],
        "fp8_matmuls": len(report.fp8_rows),
        "roofline_seconds": roofline_seconds(compiled, gpu.target()),
    }


def probe(gpu: Gpu) -> Iterator[Case]:
    """Does CUPTI answer here? In a process of its own it can break nothing."""

    def ask() -> Ready:
        add = gpu.compile(lambda x: x + 1, jax.ShapeDtypeStruct((1024,), jax.numpy.float32))
        x = jax.numpy.ones(1024)
        local.wait(add.call(x))
        seen = gpu.kernel_times(lambda: add.call(x), 3)
        return Ready({"kernels_seen": len(seen)})

    yield Case("start", "clock", {"CUPTI": ask}, looks=0, limit=30)


def ended(status: int) -> None:
    """End this process at once: what is left to take down may hang where the GPU is lost."""
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """What a child does; its last act is to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage")
    for name in ("--scratch", "--folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--device")
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--until", type=float, default=0)
    parser.add_argument("--cupti", action="store_true")
    parser.add_argument("--rehearse")
    options = parser.parse_args()
    gpu = Gpu()
    if options.rehearse:
        from tools.gpu.rehearsal import Fake

        gpu = Fake(options.rehearse)
    try:
        gpu.require(options.device)
    except SystemExit as refused:
        print(refused, flush=True)
        ended(OTHER)
    if options.stage == "start":
        (options.scratch / "about.json").write_text(json.dumps(about(gpu, options.device)))
        ended(0)
    marker = Marker(options.scratch / "under way.json")
    log = Log(options.folder, options.run, options.stage)
    stage = Stage(gpu, log, marker, options.until, options.cupti)
    (mine,) = (one for one in (CLOCK, *STAGES) if one.name == options.stage)
    stage.measure(list(mine.cases(gpu)))
    ended(0)


if __name__ == "__main__":
    main()
