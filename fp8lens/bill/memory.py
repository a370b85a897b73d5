"""What of a program lies in the device's memory: XLA's plan of its buffers, and what is alive when
most is.

XLA writes the plan when it dumps a program: `...-buffer-assignment.txt` has every allocation,
`...-live-range.txt` from which instruction to which each value lives.
"""

import dataclasses
import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp8lens.formats import is_fp8
from fp8lens.hlo.origin import is_backward, layer, op_name, source_line
from fp8lens.hlo.parse import HloModule, Instruction, Shape
from fp8lens.hlo.text import size, wrapped
from fp8lens.hlo.values import changes_layout
from fp8lens.matmul.unfused import part_for

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
_RANGE = re.compile(r"^ {4}(\S+)\{([\d,]*)\}:(\d+)-(\d+)$", re.M)
_ORDER = re.compile(r"^ {4}(\d+):(\S+)$", re.M)


class Holds(enum.StrEnum):
    """What a buffer is to the program."""

    ARGUMENT = "argument"
    RESULT = "result"
    FP8 = "FP8 array"
    TRANSPOSED = "FP8 array, transposed"
    SAVED = "saved for the backward pass"
    GRADIENT = "of the backward pass"
    WORKSPACE = "workspace of a library's kernel"
    PASSING = "other"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value that is alive at the peak. `instruction` made it; `shape` is as HLO writes it;
    `layer` and `source` are the instruction's.
    """

    instruction: str
    nbytes: int
    holds: Holds
    shape: str = ""
    layer: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Memory:
    """A program's memory on one device, in bytes. `arguments` and `results` are its own; `aliased`
    of them are both, as a donated argument that a result overwrites. `temporaries` is the one
    allocation for everything else. `total` is what XLA allocates. `peak` is what is alive at once,
    when most is, with arguments and results, which have their places from the start to the end; the
    rest of `total` are gaps between buffers. It is `peak_memory_in_bytes` of JAX's
    `memory_analysis()`; of a program that another process compiled, it is read from XLA's plan.
    `alive` are the buffers of that moment by the plan, the largest first.
    """

    arguments: int
    results: int
    aliased: int
    temporaries: int
    total: int
    peak: int
    alive: tuple[Buffer, ...]

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes alive at the peak, by what they hold, as Holds names it."""
        found: Counter[str] = Counter()
        for buffer in self.alive:
            found[buffer.holds] += buffer.nbytes
        return {kind: found[kind] for kind in Holds if kind in found}

    @property
    def summary(self) -> list[str]:
        """The totals, in sentences."""
        own = f"{size(self.arguments)} of arguments, {size(self.results)} of results"
        if self.aliased:
            own += f", {size(self.aliased)} of them in the same place"
        kinds = sorted(self.by_kind.items(), key=lambda pair: -pair[1])
        return [
            f"memory: {size(self.peak)} at the peak, {size(self.total)} allocated: {own}, "
            f"and {size(self.temporaries)} for all else",
            "alive at the peak: " + ", ".join(f"{size(n)} {kind}" for kind, n in kinds),
        ]

    def __str__(self) -> str:
        return "\n".join(line for s in self.summary for line in wrapped(s, 0, 2))

    __repr__ = __str__


class Plan(NamedTuple):
    """XLA's plan of a program's buffers, the two texts in which XLA dumps it; empty where it
    wrote none.
    """

    allocations: str = ""
    ranges: str = ""


def memory_of(module: HloModule, plan: Plan, compiled: Any = None) -> Memory:
    """The memory of a compiled program. `compiled` is JAX's, of which XLA's own figure of the peak
    is taken; without one it is read from the plan.
    """
    allocations = [*_allocations(plan.allocations)]
    lives = _Lives(module, plan.ranges)
    own = [a for a in allocations if a.is_argument or a.is_result]
    passing = [
        value for a in allocations if not (a.is_argument or a.is_result) for value in a.values
    ]
    alive = [lives.buffer(value) for value in _at_the_peak(passing, lives)]
    alive += [_kept(a, lives) for a in own if a.values]
    return Memory(
        arguments=sum(a.nbytes for a in own if a.is_argument),
        results=sum(a.nbytes for a in own if a.is_result),
        aliased=sum(a.nbytes for a in own if a.is_argument and a.is_result),
        temporaries=sum(a.nbytes for a in allocations if "preallocated-temp" in a.about),
        total=sum(a.nbytes for a in allocations),
        peak=_xlas_peak(compiled) or sum(buffer.nbytes for buffer in alive),
        alive=tuple(sorted(alive, key=lambda buffer: -buffer.nbytes)),
    )


def alive_over_time(module: HloModule, plan: Plan) -> list[dict[Holds, int]]:
    """Bytes alive at each instruction of a compiled program, in the order in which XLA runs them,
    by what they hold. Arguments and results have their places from the start to the end.
    """
    lives = _Lives(module, plan.ranges)
    times = range(lives.end + 1)
    alive = [dict.fromkeys(Holds, 0) for _ in times]
    taken: set[tuple[tuple[int, int, int], int]] = set()  # which place has its value, and when
    for a in _allocations(plan.allocations):
        if a.is_argument or a.is_result:
            for time in times:
                alive[time][Holds.ARGUMENT if a.is_argument else Holds.RESULT] += a.nbytes
            continue
        for value in a.values:
            start, end = lives.range_of(value)
            holds = lives.buffer(value).holds
            for time in range(start, end + 1):
                if (value.place, time) not in taken:
                    taken.add((value.place, time))
                    alive[time][holds] += value.nbytes
    return alive


def _kept(a: "_Allocation", lives: "_Lives") -> Buffer:
    """An argument, or a result."""
    # Others pass through its place.
    whole = [value for value in a.values if value.nbytes == a.nbytes]
    there = lives.buffer((whole or a.values)[-1])
    if a.is_argument:  # a result that is written over it is no line's either
        return Buffer(there.instruction, a.nbytes, Holds.ARGUMENT, there.shape)
    return dataclasses.replace(there, holds=Holds.RESULT, nbytes=a.nbytes)


def _xlas_peak(compiled: Any) -> int | None:
    """The bytes at the peak, as XLA says itself; None where JAX has not compiled the program
    here, and for a release that does not say it.
    """
    analysis = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return getattr(analysis, "peak_memory_in_bytes", None)


class _Value(NamedTuple):
    """A value: the instruction that makes it, where in its tuple it is, as in "1", or ""; and the
    place that XLA has given it: the allocation, where in it, and how long.
    """

    name: str
    element: str
    nbytes: int
    place: tuple[int, int, int]


class _Allocation(NamedTuple):
    """An allocation: what it is for, its bytes, and the values in it."""

    about: str
    nbytes: int
    values: list[_Value]

    @property
    def is_argument(self) -> bool:
        return "parameter " in self.about

    @property
    def is_result(self) -> bool:
        return "maybe-live-out" in self.about


def _allocations(text: str) -> Iterator[_Allocation]:
    """XLA's allocations, without those of threads: a few numbers of a kernel's own."""
    found: list[_Allocation] = []
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            found.append(_Allocation(allocation[2], int(allocation[1]), []))
        elif found and (value := _VALUE.match(line)):
            nbytes = int(value[3])
            place = (len(found), int(value[4]), nbytes)
            found[-1].values.append(_Value(value[1], value[2] or "", nbytes, place))
    return (a for a in found if "thread-local" not in a.about)


def _at_the_peak(values: Sequence[_Value], lives: "_Lives") -> list[_Value]:
    """Those that are alive when most of them is: one for each place, as a loop's values share
    theirs.

    XLA's own line "(peak)" counts otherwise, and can be far too low.
    """
    events = []
    for value in values:
        start, end = lives.range_of(value)
        events += [(start, False, value), (end, True, value)]
    there: Counter[tuple[int, int, int]] = Counter()  # how many values are in each place
    total = most = peak = 0
    for time, is_gone, value in sorted(events):
        if is_gone:
            there[value.place] -= 1
        if not there[value.place]:
            total += -value.nbytes if is_gone else value.nbytes
        if not is_gone:
            there[value.place] += 1
        if total > most:
            most, peak = total, time
    alive: dict[tuple, _Value] = {}
    for value in values:
        start, end = lives.range_of(value)
        if start <= peak <= end:
            alive.setdefault(value.place, value)
    return [*alive.values()]


class _Lives:
    """From where to where each value lives, and what it is to the program."""

    def __init__(self, module: HloModule, ranges: str):
        self._instructions = {i.name: i for i in module}
        order = [(int(time), self._instructions.get(name)) for time, name in _ORDER.findall(ranges)]
        self.end = 1 + max((time for time, _ in order), default=0)
        backward = [time for time, i in order if i and is_backward(op_name(i))]
        self._backward_from = min(backward, default=self.end)
        self._ranges = {
            (name, index): (int(start), int(end))
            for name, index, start, end in _RANGE.findall(ranges)
        }

    def range_of(self, value: _Value) -> tuple[int, int]:
        """From which instruction to which a value lives; always, where the plan does not say."""
        return self._ranges.get((value.name, value.element), (0, self.end))

    def buffer(self, value: _Value) -> Buffer:
        """One buffer, with what is known of the instruction that made it."""
        i = self._instructions.get(value.name)
        if i is None:
            return Buffer(value.name, value.nbytes, Holds.PASSING)
        shape = i.shape
        for n in filter(None, value.element.split(",")):
            shape = shape.elements[int(n)]
        holds = self._holds(i, value, shape)
        where = layer(op_name(i)), source_line(i)
        return Buffer(i.name, value.nbytes, holds, shape.brief, *where)

    def _holds(self, i: Instruction, value: _Value, shape: Shape) -> Holds:
        is_last = value.element == str(len(i.shape.elements) - 1)
        if i.opcode == "custom-call" and is_last and shape.dtype in ("s8", "u8"):
            return Holds.WORKSPACE  # nobody reads it
        if is_fp8(shape.dtype):
            # A second layout that a backward pass reads.
            written = part_for(i, int(value.element.partition(",")[0] or 0))
            return Holds.TRANSPOSED if any(map(changes_layout, written)) else Holds.FP8
        if is_backward(op_name(i)):
            return Holds.GRADIENT
        _, end = self.range_of(value)
        return Holds.SAVED if end >= self._backward_from else Holds.PASSING
