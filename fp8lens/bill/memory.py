"""What of a program lies in the device's memory: XLA's plan of its buffers, and what is alive when
most is.

XLA writes the plan when it dumps a program: `...-buffer-assignment.txt` has every allocation,
`...-live-range.txt` from which instruction to which each value lives.
"""

import dataclasses
import enum
import re
from collections import Counter, defaultdict
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
# From which share of the peak on it is said that XLA's figure has more than its plan tells.
_UNTOLD = 0.001


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
    UNTOLD = "not told by XLA's plan"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value that is alive at the peak. `instruction` made it, `element` is its place in that
    instruction's tuple, as in "1", or "". `shape` is as HLO writes it; `layer` and `source` are the
    instruction's.
    """

    instruction: str
    element: str
    nbytes: int
    holds: Holds
    shape: str
    layer: str
    source: str


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
    def by_kind(self) -> Mapping[Holds, int]:
        """Bytes alive at the peak, by what they hold."""
        found: Counter[Holds] = Counter()
        for buffer in self.alive:
            found[buffer.holds] += buffer.nbytes
        return {kind: found[kind] for kind in Holds if kind in found}

    @property
    def by_line(self) -> Mapping[tuple[str, str], int]:
        """Bytes alive at the peak by the program's line and layer, the most first; those of
        arguments under ("", "").
        """
        found: Counter[tuple[str, str]] = Counter()
        for buffer in self.alive:
            found[buffer.source, buffer.layer] += buffer.nbytes
        return dict(found.most_common())

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
    sizes: Counter[str] = Counter()
    # Of each argument and result: its bytes, the values there, and what it is.
    kept: list[tuple[int, list[_Value], Holds]] = []
    passing: list[_Value] = []
    for about, nbytes, values in _allocations(plan.allocations):
        if "thread-local" in about:  # a kernel's own: a few numbers
            continue
        role = _roles(about)
        sizes.update(dict.fromkeys(role, nbytes))
        if "arguments" in role:
            kept.append((nbytes, values, Holds.ARGUMENT))
        elif "results" in role:
            kept.append((nbytes, values, Holds.RESULT))
        else:
            passing += values
    lives = _Lives(module, plan.ranges)
    time, found = _peak(passing, lives)
    alive = [lives.buffer(value) for value in found]
    for nbytes, values, holds in kept:
        if values:
            whole = [value for value in values if value.nbytes == nbytes]  # others pass through it
            there = lives.buffer(lives.alive_at(time, whole or values))
            if holds is Holds.ARGUMENT:  # a result that is written over it is no line's either
                there = dataclasses.replace(there, layer="", source="")
            alive.append(dataclasses.replace(there, holds=holds, nbytes=nbytes))
    told = sum(buffer.nbytes for buffer in alive)
    peak = _xlas_peak(compiled) or told
    if peak - told > _UNTOLD * peak:
        alive.append(Buffer("", "", peak - told, Holds.UNTOLD, "", "", ""))
    alive.sort(key=lambda buffer: -buffer.nbytes)
    return Memory(**{name: sizes[name] for name in _SIZES}, peak=peak, alive=tuple(alive))


def _xlas_peak(compiled: Any) -> int | None:
    """The bytes at the peak, as XLA says itself; None where JAX has not compiled the program
    here, and for a release that does not say it.
    """
    analysis = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return getattr(analysis, "peak_memory_in_bytes", None)


class _Value(NamedTuple):
    """A value, and the place that XLA has given it: the allocation, where in it, and how long."""

    name: str
    element: str
    nbytes: int
    place: tuple[int, int, int]


def _allocations(text: str) -> Iterator[tuple[str, int, list[_Value]]]:
    """Each allocation: what it is for, its bytes, and the values in it."""
    found: list[tuple[str, int, list[_Value]]] = []
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            found.append((allocation[2], int(allocation[1]), []))
        elif found and (value := _VALUE.match(line)):
            nbytes = int(value[3])
            place = (len(found), int(value[4]), nbytes)
            found[-1][2].append(_Value(value[1], value[2] or "", nbytes, place))
    yield from found


_SIZES = ("arguments", "results", "aliased", "temporaries", "total")


def _roles(about: str) -> list[str]:
    """The sizes that an allocation belongs to."""
    is_argument, is_result = "parameter " in about, "maybe-live-out" in about
    belongs = (
        is_argument,
        is_result,
        is_argument and is_result,
        "preallocated-temp" in about,
        True,
    )
    return [name for name, there in zip(_SIZES, belongs, strict=True) if there]


def _peak(values: Sequence[_Value], lives: "_Lives") -> tuple[int, list[_Value]]:
    """When most of some values is alive, and those that are: one for each place, as a loop's values
    share theirs.

    XLA's own line "(peak)" counts otherwise, and can be far too low.
    """
    born: dict[int, list[_Value]] = defaultdict(list)
    gone: dict[int, list[_Value]] = defaultdict(list)
    for value in values:
        start, end = lives.range_of(value)
        born[start].append(value)
        gone[end].append(value)
    there: Counter[tuple[int, int, int]] = Counter()  # how many values are in each place
    total = most = at = 0
    for time in sorted({*born, *gone}):
        for value in born[time]:
            total += 0 if there[value.place] else value.nbytes
            there[value.place] += 1
        if total > most:
            most, at = total, time
        for value in gone[time]:
            there[value.place] -= 1
            total -= 0 if there[value.place] else value.nbytes
    alive: dict[tuple[int, int, int], _Value] = {}
    for value in values:
        start, end = lives.range_of(value)
        if start <= at <= end:
            alive.setdefault(value.place, value)
    return at, [*alive.values()]


class _Lives:
    """From where to where each value lives, and what it is to the program."""

    def __init__(self, module: HloModule, ranges: str):
        self._instructions = {i.name: i for i in module}
        order = [(int(time), name) for time, name in _ORDER.findall(ranges)]
        self._last = max((time for time, _ in order), default=0)
        backward = [time for time, name in order if self._is_backward(name)]
        self._backward_from = min(backward, default=self._last + 1)
        self._ranges = {
            (name, index): (int(start), int(end))
            for name, index, start, end in _RANGE.findall(ranges)
        }

    def range_of(self, value: _Value) -> tuple[int, int]:
        """From which instruction to which a value lives; always, where the plan does not say."""
        return self._ranges.get((value.name, value.element), (0, self._last + 1))

    def alive_at(self, time: int, values: Sequence[_Value]) -> _Value:
        """Of values that share a place, the one that is alive; the last, if none is yet."""
        for value in values:
            start, end = self.range_of(value)
            if start <= time <= end:
                return value
        return values[-1]

    def _is_backward(self, name: str) -> bool:
        i = self._instructions.get(name)
        return i is not None and is_backward(op_name(i))

    def buffer(self, value: _Value) -> Buffer:
        """One buffer, with what is known of the instruction that made it."""
        name, element, nbytes, _ = value
        i = self._instructions.get(name)
        if i is None:
            return Buffer(name, element, nbytes, Holds.PASSING, "", "", "")
        shape = _part(i, element)
        return Buffer(
            instruction=name,
            element=element,
            nbytes=nbytes,
            holds=self._holds(i, element, shape),
            shape=shape.brief,
            layer="" if self._is_argument(i) else layer(op_name(i)),
            source="" if self._is_argument(i) else source_line(i),
        )

    def _is_argument(self, i: Instruction) -> bool:
        return i.opcode == "parameter" and i.computation.is_entry

    def _holds(self, i: Instruction, element: str, shape: Shape) -> Holds:
        if _is_workspace(i, element, shape):
            return Holds.WORKSPACE
        if is_fp8(shape.dtype):
            return Holds.TRANSPOSED if _is_transposed(i, element) else Holds.FP8
        if is_backward(op_name(i)):
            return Holds.GRADIENT
        _, end = self._ranges.get((i.name, element), (0, 0))
        return Holds.SAVED if end >= self._backward_from else Holds.PASSING


def _part(i: Instruction, element: str) -> Shape:
    """The shape of one value of an instruction's tuple."""
    shape = i.shape
    for n in element.split(",") if element else ():
        shape = shape.elements[int(n)]
    return shape


def _is_transposed(i: Instruction, element: str) -> bool:
    """Whether a kernel transposes what it writes there: the second layout that a backward pass
    reads.
    """
    return any(map(changes_layout, part_for(i, int(element.partition(",")[0] or 0))))


def _is_workspace(i: Instruction, element: str, shape: Shape) -> bool:
    """Whether a library's kernel writes there what nobody reads: the last result, of bytes."""
    is_last = element == str(len(i.shape.elements) - 1)
    return i.opcode == "custom-call" and is_last and shape.dtype in ("s8", "u8")
