"""What the kernels around a matmul do that its call could have done, and what they must do in any
case.

A kernel that reads a matmul's result is followed from there, instruction by instruction, until
something is done that no call could do: another matrix comes in, rows are summed, a part is cut
out. A kernel that makes an operand is followed back from what it writes. What is not known here is
called unknown.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from fp8lens.hlo.dataflow import Flow
from fp8lens.hlo.ops import ELEMENTWISE, MOVES, ALWAYS_A_KERNEL, POINTWISE, SCALING, SOURCES, padded
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.program import executions, fused, fusion_kind, results
from fp8lens.hlo.values import is_zero, look_through, reducer
from fp8lens.matmul.kernels import launches, moved
from fp8lens.matmul.ptx import multiplied
from fp8lens.matmul.rows import GemmRow, matmuls

_SUPPLY = MOVES | SOURCES | {"convert"}
_SCALAR = _SUPPLY | SCALING | frozenset("add subtract negate power sqrt rsqrt".split())
DEQUANTIZES, QUANTIZES, MOVES_IT = (
    "dequantizes the result",
    "quantizes an operand",
    "moves an operand",
)
ADDS = "adds up the parts of K"
_FROM_FP8 = _SUPPLY | POINTWISE
_TO_AMAX = SOURCES | {"convert", "bitcast", "abs", "reduce"}
_KNOWN = _SUPPLY | ELEMENTWISE | ALWAYS_A_KERNEL | frozenset("reduce fusion".split())


@dataclasses.dataclass(frozen=True)
class UnfusedKernel:
    """A kernel on a matmul's way. `work`: what the call could have done in its place, of "fp8"
    (dequantizes an operand), "transpose", "pad", "scale", "bias", "epilogue" (an activation),
    "amax", "output" (clamps or converts the result). `own`: what it does besides, for which it must
    run; `unknown`: the opcode that nobody here knows. `after`: it reads the result, and else it
    makes an operand.
    """

    instruction: Instruction
    work: tuple[str, ...] = ()
    own: str = ""
    unknown: str = ""
    after: bool = False

    @property
    def avoidable(self) -> bool:
        """Whether the kernel would not have to run, had the call done its work."""
        return bool(self.work) and not self.own


def inside(i: Instruction) -> tuple[Instruction, ...]:
    """What a kernel computes, parameters included: the fused instructions, or the instruction
    alone.
    """
    computation = fused(i)
    return computation.instructions if computation else (i,)


def changes_layout(i: Instruction) -> bool:
    before = i.computation[i.operands[0]].shape
    return i.opcode == "transpose" or (i.opcode == "copy" and i.shape.layout != before.layout)


def moving(moves: Iterable[Instruction]) -> str | None:
    """ "transpose", or "pad" for what makes FP8 operands multiples of 16 long or undoes it; None for
    other moves.
    """
    moves = list(moves)
    for i in moves:
        if i.opcode in ("transpose", "copy") and changes_layout(i):
            return "transpose"
    for i in moves:
        if i.opcode in ("pad", "slice"):
            small, large = i.shape.dims, i.computation[i.operands[0]].shape.dims
            small, large = (large, small) if i.opcode == "pad" else (small, large)
            if all(b in (a, padded(a)) for a, b in zip(small, large)) and not re.search(
                r"\[[1-9]\d*:", i.attributes.get("slice", "")
            ):
                return "pad"
    return None


def is_plain(i: Instruction) -> bool:
    """A kernel that XLA generated for elementwise work, moves or reductions: no library call, no
    collective.
    """
    return i.opcode.removesuffix("-start") in ELEMENTWISE | MOVES | {"fusion", "reduce"}


# Kernels that make an operand ---------------------------------------------------------------------


def _slice(i: Instruction, element: int) -> list[Instruction]:
    """The instructions of a kernel from which one of its results is computed."""
    computation = fused(i)
    if not computation:
        return [i]
    root = computation.root
    todo = (
        [root.operands[element]]
        if root.opcode == "tuple" and element < len(root.operands)
        else [root.name]
    )
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += computation[name].operands
    return [j for j in computation if j.name in seen]


def _before(
    i: Instruction, element: int, role: str, from_fp8: Callable[[Instruction], bool]
) -> UnfusedKernel:
    """What a kernel does that makes an operand; `role` is "matrix", "scale" or "bias"."""
    part = _slice(i, element)
    opcodes = {j.opcode for j in part}
    if unknown := sorted(opcodes - _KNOWN):
        return UnfusedKernel(i, unknown=unknown[0])
    shapes = results(i)
    if not shapes:
        raise i.error("it makes an operand of a matmul, and its shape is a tuple of nothing")
    result = shapes[min(element, len(shapes) - 1)]
    besides = "writes something else too" if len(shapes) > 1 else ""
    work = [j for j in part if j.opcode not in SOURCES]
    if role == "scale":
        if opcodes & {"dynamic-slice", "slice", "gather"}:
            besides = besides or "takes a scale from a stack"
        if result.size == 1 and opcodes <= _SCALAR and opcodes & (SCALING | {"convert"}):
            return UnfusedKernel(i, ("scale",), besides)
        return UnfusedKernel(i, own="computes a scale")
    if role == "bias":
        if (
            i.opcode == "copy"
            and not changes_layout(i)
            and (given := look_through(i, ("bitcast", "copy"))).opcode == "parameter"
            and i.shape.size > max(given.shape.dims)
            and any(
                len(j.shape.dims) == 2 != len(given.shape.dims)
                for j in (i, *i.computation.users.get(i.name, ()))
            )
        ):
            return UnfusedKernel(i, ("bias",))  # an argument that is reshaped to one matrix
        given = opcodes <= _SUPPLY | SCALING and "parameter" in opcodes or not fused(i)
        if given and opcodes & (SCALING | {"convert", "broadcast"}):
            return UnfusedKernel(i, ("bias",), besides)
        return UnfusedKernel(i, own="computes what is added")
    only_moves = opcodes <= MOVES | SOURCES
    if only_moves and (moved := moving(work)):
        return UnfusedKernel(i, (moved,), besides)
    if opcodes <= _FROM_FP8 and not result.dtype.startswith("f8") and from_fp8(i):
        return UnfusedKernel(i, ("fp8",), besides)
    if only_moves:
        return UnfusedKernel(i, own=MOVES_IT)
    return UnfusedKernel(
        i, own=QUANTIZES if result.dtype.startswith("f8") else "computes an operand"
    )


# Kernels that read a result -----------------------------------------------------------------------


class _Reading:
    """What one kernel does with a matmul's result: `work`, and `own` for which it must run anyway.
    `made`: what each of the kernel's own results then is, "value", "abs" of it, its "amax", or None
    for what is no longer this result.
    """

    def __init__(
        self,
        i: Instruction,
        marks: Mapping[str, str],
        derived: set[str],
        size: int,
        parts: int,
        to_scalar: Callable[[], bool],
    ):
        self.work: list[str] = []
        self.moves: list[Instruction] = []
        self.own = self.unknown = ""
        self._is_relu = False
        self._size, self._parts, self._to_scalar = size, parts, to_scalar
        computation = fused(i)
        self._inside = inside(i)
        given = [p.name for p in computation.parameters] if computation else i.operands
        self._live = {
            name: marks[outer] for name, outer in zip(given, i.operands) if outer in marks
        }
        # Of the result too, but no longer it alone: what no call computes.
        self._derived = {name for name, outer in zip(given, i.operands) if outer in derived}
        self._small: set[str] = set()  # made of scalars and vectors alone, whatever the shape
        for j in self._inside:
            if any(name in self._live for name in j.operands) and j.opcode != "parameter":
                self._follow(j)
                if j.name not in self._live:
                    self._derived.add(j.name)
            elif j.name not in self._live:
                self._prepare(j)
                if not self._derived.isdisjoint(j.operands):
                    self._derived.add(j.name)
        if not self.work and self.moves and not self.own:
            moved = moving(self.moves)
            self.work, self.own = ([moved], "") if moved else ([], "moves the result")
        root = computation.root if computation else i
        made = root.operands if root.opcode == "tuple" else (root.name,)
        self.made = tuple(self._live.get(name) for name in made)

    def _prepare(self, j: Instruction) -> None:
        """What does not come from the result may prepare scales and biases; of a matrix's size, it
        is work of its own.
        """
        of_small = (
            j.opcode != "parameter" and bool(j.operands) and self._small.issuperset(j.operands)
        )
        small = 2 * j.shape.size <= self._size or self._size == 1
        if j.opcode == "iota" or small or of_small:
            self._small.add(j.name)
            if (
                small
                and j.opcode == "reduce"
                and not all(name in self._small for name in j.operands)
            ):
                self.own = self.own or "reduces another matrix"
        elif j.opcode not in _SUPPLY | {"tuple"}:
            if j.opcode not in _KNOWN:
                self.unknown = j.opcode
            self.own = self.own or "computes another matrix too"

    def _consume(self, what: str) -> None:
        self.own = self.own or what

    def _follow(self, j: Instruction) -> None:
        """One instruction that reads the result, or what was made of it."""
        sources = [self._live[name] for name in j.operands if name in self._live]
        state = "amax" if "amax" in sources else "abs" if "abs" in sources else "value"
        others = [j.computation[name] for name in j.operands if name not in self._live]
        if j.opcode == "tuple":
            return
        if j.opcode in ("slice", "dynamic-slice") and moving([j]) != "pad":
            return self._consume("takes a part of the result")
        if j.opcode in ("concatenate", "gather", "reverse"):
            return self._consume("joins or reorders the result")
        if (
            j.opcode == "broadcast"
            and state != "amax"
            and j.shape.size > j.computation[j.operands[0]].shape.size
        ):
            return self._consume("repeats the result")
        if j.opcode == "reduce":
            return self._reduce(j, state)
        if j.opcode in MOVES:
            self._live[j.name] = state
            self.moves.append(j)
        elif j.opcode == "convert":
            before = j.computation[j.operands[0]].shape
            opcodes = {k.opcode for k in self._inside}
            of_codes = (
                {"reduce"} <= opcodes <= _TO_AMAX
                or {"maximum"} <= opcodes <= _SUPPLY | {"maximum"}
                and (self._inside[-1].shape.dtype.startswith("f8"))
            )
            if before.dtype.startswith("f8") and before.size > 1 and not of_codes:
                return self._consume(DEQUANTIZES)  # for whoever reads it next
            self._live[j.name] = state
            narrower = j.shape.bits < before.bits
            alone = all(k.opcode in ("parameter", "convert", "bitcast") for k in self._inside)
            if state == "amax":
                self.work.append("amax")
            elif (narrower or alone) and not of_codes:
                self.work.append("output")
        elif state == "amax":
            if (
                j.shape.size == 1
                and j.opcode in ("negate", "maximum", "minimum", "abs")
                and all(other.name in self._derived for other in others)
            ):
                self.work.append("amax")
                self._live[j.name] = state
            else:
                self._consume("computes with the amax")
        elif j.opcode in POINTWISE:
            if j.opcode == "abs":
                self._live[j.name] = "abs"
            elif work := self._pointwise(j, others):
                self.work.append(work)
                self._live[j.name] = state
        elif j.opcode in ALWAYS_A_KERNEL | {"fusion"}:
            self._consume(
                {"dynamic-update-slice": "stores the result in a larger array"}.get(
                    j.opcode, f"does {j.opcode}"
                )
            )
        else:
            self.unknown = j.opcode

    def _reduce(self, j: Instruction, state: str) -> None:
        # Of all elements it is an amax however it is written; of some, softmax takes a maximum too.
        if (
            j.shape.size == self._size // self._parts < self._size
            and reducer(j) == "add"
            and state == "value"
        ):
            self._consume(ADDS)
            self._live[j.name] = state
            return
        positive = state != "value" or self._is_relu or j.shape.size == 1 or self._to_scalar()
        if reducer(j) in ("maximum", "minimum") and positive and len(j.operands) == 2:
            self.work.append("amax")
            self._live[j.name] = "amax"
        else:
            self._consume("reduces the result")

    def _pointwise(self, j: Instruction, others: list[Instruction]) -> str | None:
        """What one elementwise instruction on the result is part of; None where it needs another
        matrix's elements.
        """
        vector = constant = None
        for other in others:
            origin = other
            while (
                origin.opcode in ("convert", "bitcast", "reshape", "broadcast", "copy")
                and origin.operands
            ):
                if origin.opcode == "broadcast":
                    vector = origin.computation[origin.operands[0]].shape.size > 1 or vector
                origin = origin.computation[origin.operands[0]]
            constant = origin if origin.opcode == "constant" else constant
            small = other.name in self._small or 2 * origin.shape.size <= self._size
            if small and origin.shape.size > 1:
                vector = True
            if other.name in self._derived:
                return self._consume("combines the result with what was made of it")
            if not small and origin.opcode != "constant" and j.opcode not in ("add", "subtract"):
                return self._consume("combines the result with another matrix")
        if j.opcode == "select" and j.operands[0] not in self._live:
            return self._consume("masks the result")
        if j.opcode in ("clamp", "minimum"):
            return "output"
        if j.opcode == "maximum":
            self._is_relu = is_zero(constant)
            return "epilogue" if self._is_relu else "output"
        if j.opcode in SCALING and others:
            return (
                "epilogue"
                if j.opcode == "divide" and j.operands[0] in {o.name for o in others}
                else "scale"
            )
        if j.opcode in ("add", "subtract") and others and not (constant is not None and not vector):
            return "bias"
        return "epilogue"


def _before_in_turn(producer: Instruction, reader: Instruction) -> bool:
    """Whether what a kernel reads is made before it, and not by the turn before of the loop that
    both are in.
    """
    return producer.computation is not reader.computation or producer.index < reader.index


# Neighborhood all matmuls of a program ------------------------------------------------------------------


class Neighborhood:
    """Which kernels make the operands of a program's matmuls, and which read their results."""

    def __init__(self, module: HloModule, rows: Iterable[GemmRow]):
        rows = tuple(rows)
        self._multiply = {row.instruction for row in rows}
        self._fp8 = {row.instruction for row in rows if row.is_fp8}
        self._flow = Flow(module, launches)
        # Where matmuls are very many, what is far from one is not looked at: the time is to grow
        # with the text.
        each = len(module.text) // max(1, len(rows))
        self._far, self._most = max(100, 4 * each), max(40, each // 8)
        self._found: dict[Instruction, tuple[UnfusedKernel, ...]] = {}
        self._of_fp8: dict[tuple[Instruction, int], bool] = {}
        self._users: dict[int, list[tuple[Instruction, int]]] = collections.defaultdict(list)
        for kernel, inputs in self._flow.inputs.items():
            for index, numbers in enumerate(inputs):
                for number in numbers:
                    self._users[number].append((kernel, index))

    def producers(self, kernel: Instruction, index: int) -> list[tuple[Instruction, int]]:
        """Who made an operand: kernels, and which of their results; ENTRY's parameters are not
        among them.
        """
        return [
            (m.instruction, m.element)
            for m in self._flow.of(self._flow.inputs[kernel][index])
            if m.instruction is not None
        ]

    def users(
        self, kernel: Instruction, element: int | None = None
    ) -> list[tuple[Instruction, int]]:
        """Who reads a kernel's result, and as which operand; of one element of a tuple, or of all."""
        if kernel not in self._flow.inputs:
            return []
        numbers = self._flow.numbers(kernel)
        return list(
            dict.fromkeys(
                r
                for n in (numbers if element is None else numbers[element : element + 1])
                for r in self._users.get(n, ())
            )
        )

    def descendants(self, kernel: Instruction) -> set[Instruction]:
        """Kernels that compute with what this one has computed, directly or not, in the same turn
        of a loop.
        """
        seen: set[Instruction] = set()
        todo = [kernel]
        for at in todo:
            if len(todo) > self._far:
                break
            new = [
                reader
                for reader in self.next[at]
                if reader not in seen and _before_in_turn(at, reader)
            ]
            seen.update(new)
            todo += new
        return seen

    @cached_property
    def next(self) -> dict[Instruction, tuple[Instruction, ...]]:
        """The kernels that read each kernel's results."""
        return {
            kernel: tuple(dict.fromkeys(reader for reader, _ in self.users(kernel)))
            for kernel in self._flow.inputs
        }

    def outside(self, row: GemmRow) -> tuple[UnfusedKernel, ...]:
        """The kernels that make a matmul's operands or read its result, and what they do; those
        behind them too, as far as they do what the call could have done.
        """
        call = row.instruction
        if call not in self._found:
            found: dict[Instruction, UnfusedKernel] = {}
            self._look_before(call, found)
            self._look_after(row, found)
            self._found[call] = tuple(found.values())
        return self._found[call]

    def _look_before(self, call: Instruction, found: dict[Instruction, UnfusedKernel]) -> None:
        todo = []
        for index, name in enumerate(call.operands):
            scalar = call.computation[name].shape.size == 1
            matrix = index < 2 if call.opcode == "custom-call" else True
            role = "scale" if scalar else "matrix" if matrix else "bias"
            todo += [(producer, role) for producer in self.producers(call, index)]
        while todo and len(found) < self._most:
            (i, element), role = todo.pop(0)
            if i in found or i in self._multiply:
                continue
            if not is_plain(i):
                found[i] = UnfusedKernel(i, own="makes an operand")
                continue
            found[i] = _before(i, element, role, self._from_fp8)
            if found[i].work == ("scale",) and len(i.operands) == 1 and self.producers(i, 0):
                found[i] = UnfusedKernel(
                    i, own="computes a scale"
                )  # of one number that the program computes, as an amax
            if found[i].own in (QUANTIZES, MOVES_IT):  # joins several, where XLA has merged dots
                for producer, _ in (
                    m for index in range(len(i.operands)) for m in self.producers(i, index)
                ):
                    if self._transposes_for(producer, i):
                        found[producer] = UnfusedKernel(producer, ("transpose",))
            if found[i].work:
                todo += [
                    (producer, role)
                    for index in range(len(i.operands))
                    for producer in self.producers(i, index)
                ]

    def _transposes_for(self, i: Instruction, reader: Instruction) -> bool:
        """Whether a kernel only transposes, and converts, for another that then quantizes or joins."""
        return (
            is_plain(i)
            and {j.opcode for j in inside(i)} <= _SUPPLY
            and moving(j for j in inside(i) if j.opcode in MOVES) == "transpose"
            and i.shape.size > 1
            and ({kernel for kernel, _ in self.users(i)} == {reader})
        )

    def _from_fp8(self, i: Instruction, steps: int = 4) -> bool:
        """Whether a kernel reads FP8, or what a few kernels that only convert, scale and move made
        of it.
        """
        known = self._of_fp8.get((i, steps))
        if known is None:
            known = self._of_fp8[i, steps] = all(j.opcode in _FROM_FP8 for j in inside(i)) and any(
                (shape := i.computation[name].shape).dtype.startswith("f8")
                and shape.size > 1
                or steps
                and any(
                    is_plain(producer) and self._from_fp8(producer, steps - 1)
                    for producer, _ in self.producers(i, index)
                )
                for index, name in enumerate(i.operands)
            )
        return known

    def _look_after(self, row: GemmRow, found: dict[Instruction, UnfusedKernel]) -> None:
        call = row.instruction
        size = max(shape.size for shape in results(call))
        parts = max(1, size // max(1, row.batch * row.m * row.n)) if row.library == "triton" else 1
        marks: dict[tuple[Instruction, int], str] = {(call, 0): "value"}
        if row.amax:
            marks[call, 1] = "amax"
        todo = collections.deque(marks)
        made_of_it = self.descendants(call)
        while todo and len(found) < 2 * self._most:
            at = todo.popleft()
            for kernel in dict.fromkeys(kernel for kernel, _ in self.users(*at)):
                if kernel in found and (found[kernel].after or found[kernel].work):
                    continue
                if kernel in self._multiply:
                    if fused(kernel) and not fusion_kind(
                        kernel
                    ):  # its own code, which may do more than multiply
                        found[kernel] = UnfusedKernel(
                            kernel, own="multiplies the result", after=True
                        )
                    continue
                if not is_plain(kernel):
                    found[kernel] = UnfusedKernel(kernel, own="reads the result", after=True)
                    continue
                reading = self._read(kernel, marks, made_of_it, size, parts)
                # What another call's operand must be laid out like, is charged to that one.
                if reading.work == ["transpose"] and any(
                    r in self._fp8 for r, _ in self.users(kernel)
                ):
                    continue
                found[kernel] = UnfusedKernel(
                    kernel, tuple(dict.fromkeys(reading.work)), reading.own, reading.unknown, True
                )
                for number, mark in enumerate(reading.made):
                    if mark and reading.work:
                        marks[kernel, number] = mark
                        todo.append((kernel, number))

    def _read(
        self,
        kernel: Instruction,
        marks: Mapping[tuple[Instruction, int], str],
        made_of_it: set[Instruction],
        size: int,
        parts: int,
    ) -> _Reading:
        live, derived = {}, set()
        for index, name in enumerate(kernel.operands):
            producers = self.producers(kernel, index)
            known = [marks[producer] for producer in producers if producer in marks]
            if known:
                live[name] = known[0]
            elif any(
                producer in made_of_it and _before_in_turn(producer, kernel)
                for producer, _ in producers
            ):
                derived.add(name)

        def to_scalar() -> bool:
            """Whether other kernels reduce to one element what this one leaves."""
            return any(
                r.opcode != "tuple"
                and r.shape.size == 1
                and any(j.opcode == "reduce" for j in inside(r))
                for r, _ in self.users(kernel)
            )

        return _Reading(kernel, live, derived, size, parts, to_scalar)


def find_unfused(
    module: HloModule, ptx: Mapping[str, str] | None = None
) -> tuple[list[tuple[GemmRow, list[UnfusedKernel]]], Neighborhood]:
    """The rows of a module's report, each with the kernels around it and what they do. `ptx` of
    kernels by name.
    """
    rows, most = (
        [],
        10 * sum(1 for _ in module),
    )  # kernels may share a computation with dots, but not so many of both
    for name, times in executions(module).items():
        for i in module.computations[name]:
            rows += [dataclasses.replace(row, count=times) for row in matmuls(i)]
            if len(rows) > most:
                raise i.error(
                    f"the program has more than {most} matmuls, in {most // 10} instructions"
                )
    around, found = Neighborhood(module, rows), []
    for row in rows:
        near = around.outside(row)
        avoidable = sorted(
            (o.instruction for o in near if o.avoidable), key=lambda i: (-moved(i), i.index)
        )
        math_dtype = (
            multiplied(row, ptx) if ptx is not None and row.library == "triton" else row.math_dtype
        )
        found.append(
            (
                dataclasses.replace(
                    row,
                    outside=tuple(i.name for i in avoidable),
                    math_dtype=math_dtype,
                    outside_bytes=sum(map(moved, avoidable)),
                ),
                near,
            )
        )
    return found, around
