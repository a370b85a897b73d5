"""What the kernels around a matmul do that its call could have done, and whether they must run for
something else in any case.

A kernel that reads a matmul's result is followed from there, instruction by instruction, until
something is done that no call could do: another matrix comes in, rows are summed, a part is cut
out. A kernel that makes an operand is followed back from what it writes. What a call could do is
what GemmRewriterVisitor in XLA's gemm_rewriter.cc takes into one.
"""

import collections
import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from itertools import chain

from fp8lens.formats import E8M0, is_narrow
from fp8lens.hlo.dataflow import Flow
from fp8lens.hlo.ops import ELEMENTWISE, MOVES, POINTWISE, SCALING, SOURCES, padded
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import HloModule, Instruction, Shape
from fp8lens.hlo.program import executions, fused, fusion_kind, results
from fp8lens.hlo.values import changes_layout, is_one_number, look_through, operand, reducer
from fp8lens.hlo.walk import walk
from fp8lens.matmul.kernels import launches, moved
from fp8lens.matmul.ptx import multiplied
from fp8lens.matmul.roles import Role, Step, classify, is_magnitude, leaves_the_layer
from fp8lens.matmul.rows import GemmRow, matmuls

_PLAIN = ELEMENTWISE | MOVES | {"fusion", "reduce"}
_SUPPLY = MOVES | SOURCES | {"convert"}
_SCALAR = _SUPPLY | SCALING | frozenset("add subtract negate power sqrt rsqrt".split())
_FROM_FP8 = _SUPPLY | POINTWISE
_WIDENING = MOVES | SOURCES | frozenset("convert negate abs reduce-precision".split())
_TO_AMAX = SOURCES | frozenset("convert bitcast abs reduce".split())
_BY_A_NUMBER = frozenset("add subtract maximum minimum".split())
_PREPARING = SCALING | {"convert", "broadcast", "negate"}


class Makes(enum.Enum):
    """What a kernel in front of a call makes for it."""

    MATRIX = enum.auto()
    SCALE = enum.auto()
    BIAS = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class UnfusedKernel:
    """A kernel on a matmul's way. `work`: what the call could have done in its place, of "fp8"
    (dequantizes an operand), "transpose", "pad", "scale", "bias", "epilogue" (an activation),
    "amax", "output" (clamps or converts the result). `own`: whether it does something besides, for
    which it must run. `makes`: the operand that it makes; None where it reads the result, with
    `roles`, what its operations are to that.
    """

    instruction: Instruction
    work: tuple[str, ...] = ()
    own: bool = False
    makes: Makes | None = None
    roles: tuple[Role, ...] = ()

    @property
    def after(self) -> bool:
        """Whether it reads the result."""
        return self.makes is None

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


def operations(i: Instruction) -> list[Instruction]:
    """What a kernel computes with, and what the kernels inside it do: an asynchronous one wraps
    another.
    """
    found = []
    for j in inside(i):
        found += operations(j) if j is not i and fused(j) else [j]
    return found


def _given(i: Instruction) -> list[str]:
    """The operands of a kernel, by the names that they have inside of it."""
    computation = fused(i)
    if computation is None:
        return [*i.operands]
    return [parameter.name for parameter in computation.parameters[: len(i.operands)]]


def moving(moves: Iterable[Instruction]) -> str | None:
    """What a call could have done in the place of these moves: "transpose", or "pad" for what makes
    FP8 operands multiples of 16 long or undoes it; None for other moves.
    """
    moves = list(moves)
    if any(map(changes_layout, moves)):
        return "transpose"
    # A roll slices too: it cuts an array apart, and joins the parts the other way round.
    joins = any(i.opcode == "concatenate" for i in moves)
    return "pad" if any(map(_is_padding, moves)) and not joins else None


def _is_padding(i: Instruction) -> bool:
    """Whether dimensions are padded to multiples of 16, or a slice undoes that."""
    if i.opcode not in ("pad", "slice") or primitive(op_name(i)) in ("pad", "slice"):
        return False  # the program's own
    small, large = i.shape.dims, operand(i, 0).shape.dims
    if i.opcode == "pad":
        small, large = large, small
    from_zero = not re.search(r"\[[1-9]\d*:", i.attributes.get("slice", ""))
    return from_zero and all(
        after in (before, padded(before)) for before, after in zip(small, large, strict=False)
    )


def is_plain(i: Instruction) -> bool:
    """A kernel that XLA generated for elementwise work, moves or reductions: no library call, no
    collective.
    """
    return i.opcode.removesuffix("-start") in _PLAIN


def is_small(i: Instruction, most: int) -> bool:
    """Whether a kernel reads and writes arrays of so many elements at most."""
    shapes = [operand(i, n).shape for n in range(len(i.operands))]
    return all(shape.size <= most for shape in (*shapes, *results(i)))


def repeats(i: Instruction) -> bool:
    """Whether a kernel writes the elements of a smaller array several times."""
    read = sum(operand(i, n).shape.size for n in range(len(i.operands)))
    opcodes = {j.opcode for j in inside(i)}
    return "broadcast" in opcodes and 2 * read <= sum(shape.size for shape in results(i))


def part_for(i: Instruction, element: int) -> list[Instruction]:
    """The instructions of a kernel from which one of its results is computed."""
    computation = fused(i)
    if not computation:
        return [i]
    end = computation.root
    if end.opcode == "tuple" and element < len(end.operands):
        end = computation[end.operands[element]]
    made_of = walk([end], lambda j: map(computation.__getitem__, _data(j)))
    return [j for j in computation if j in made_of]


def _data(i: Instruction) -> tuple[str, ...]:
    """The operands that an instruction computes with, or moves: not where it finds them."""
    if i.opcode in ("dynamic-slice", "gather"):
        return i.operands[:1]
    return i.operands[:2] if i.opcode == "dynamic-update-slice" else i.operands


# Kernels that read a result -----------------------------------------------------------------------


class _Is(enum.Enum):
    """What a value still is of a matmul's result."""

    VALUE = enum.auto()
    AMAX = enum.auto()


@dataclasses.dataclass
class _Result:
    """A matmul's result, of `size` elements. `marks`: what each result of a kernel is of it;
    `computed`: the kernels that compute with it.
    """

    row: GemmRow
    computed: set[Instruction]
    marks: dict[tuple[Instruction, int], _Is]
    size: int


class _Reading:
    """What one kernel does with a matmul's result: `steps` that a call could do, and `own`, whether
    it must run anyway. `made`: what each of the kernel's own results then is, None for what is no
    longer this result.
    """

    def __init__(self, kernel: Instruction, result: _Result, around: "Neighborhood"):
        self.steps: list[Step] = []
        self.own = False
        self._kernel, self._result, self._around = kernel, result, around
        self._inside = inside(kernel)
        self._moves: list[Instruction] = []
        self._live: dict[str, _Is] = {}
        # Of the result too, but no longer it alone: what no call computes.
        self._derived: set[str] = set()
        self._small: set[str] = set()  # made of scalars and vectors alone, whatever the shape
        for index, name in enumerate(_given(kernel)):
            makers = around.producers(kernel, index)
            known = [result.marks[maker] for maker in makers if maker in result.marks]
            if known:
                self._live[name] = known[0]
            elif any(i in result.computed and _made_before(i, kernel) for i, _ in makers):
                self._derived.add(name)
        for j in self._inside:
            self._visit(j)
        self.work = tuple(dict.fromkeys(step.kind.work for step in self.steps))
        if self._moves and not self.work and not self.own:
            moved = moving(self._moves)
            self.work, self.own = ((moved,), False) if moved else ((), True)
        computation = fused(kernel)
        root = computation.root if computation else kernel
        names = root.operands if root.opcode == "tuple" else (root.name,)
        self.made = [self._live.get(name) for name in names]

    def _visit(self, j: Instruction) -> None:
        if j.opcode == "tuple" or j.name in self._live:
            return
        read = {self._live[name] for name in j.operands if name in self._live}
        if not read or j.opcode == "parameter":
            self._prepare(j)
            if not self._derived.isdisjoint(j.operands):
                self._derived.add(j.name)
        elif state := self._follow(j, _Is.AMAX if _Is.AMAX in read else _Is.VALUE):
            self._live[j.name] = state
        else:
            self.own = True
            self._derived.add(j.name)

    def _prepare(self, j: Instruction) -> None:
        """What does not come from the result may prepare scales and biases; of a matrix's size, it
        is work of its own.
        """
        of_small = self._small.issuperset(j.operands)
        made_of_small = j.opcode != "parameter" and bool(j.operands) and of_small
        small = 2 * j.shape.size <= self._result.size or self._result.size == 1
        if j.opcode == "iota" or small or made_of_small:
            self._small.add(j.name)
            self.own |= small and j.opcode == "reduce" and not of_small
        else:
            self.own |= j.opcode not in _SUPPLY

    def _follow(self, j: Instruction, state: _Is) -> _Is | None:
        """One instruction that reads the result: what of it comes out. None where a kernel must run
        for what it does.
        """
        if j.opcode == "reduce":
            return self._reduce(j, state)
        if j.opcode in MOVES:
            self._moves.append(j)
            return None if _rearranges(j, state) else state
        if j.opcode not in ELEMENTWISE or leaves_the_layer(self._result.row.op_name, j):
            return None
        if j.opcode == "convert":
            return self._convert(j, state)
        if state is _Is.AMAX or self._needs_another(j):
            return None
        if j.opcode != "abs" or all(k.opcode != "reduce" for k in self._inside):
            value = next(j.computation[name] for name in j.operands if name in self._live)
            self.steps.append(classify(j, value, self._others(j), self._repeated))
        return state

    def _others(self, j: Instruction) -> list[Instruction]:
        """The operands of an instruction that are not the result."""
        return [j.computation[name] for name in j.operands if name not in self._live]

    def _convert(self, j: Instruction, state: _Is) -> _Is | None:
        before = operand(j, 0).shape
        opcodes = {k.opcode for k in self._inside}
        if is_narrow(before.dtype) and before.size > 1:
            # Dequantized for whoever reads it next, unless the kernel only finds the codes' amax.
            return state if "reduce" in opcodes and opcodes <= _TO_AMAX else None
        alone = opcodes <= {"parameter", "convert", "bitcast"}
        if state is _Is.AMAX:
            # Alone it is of an amax that is found already: no call gives it another type.
            if "reduce" in opcodes:
                self.steps.append(Step(Role.AMAX, j, operand(j, 0)))
        elif j.shape.bits < before.bits or alone:
            self.steps.append(Step(Role.OUTPUT, j, operand(j, 0)))
        return state

    def _reduce(self, j: Instruction, state: _Is) -> _Is | None:
        by = reducer(j)
        # Of all elements it is an amax however it is written; of some, softmax takes a maximum too.
        positive = state is _Is.AMAX or is_magnitude(operand(j, 0)) or j.shape.size == 1
        if by not in ("maximum", "minimum") or len(j.operands) > 2:
            return None
        if not positive and not self._around.is_reduced_to_scalar(self._kernel):
            return None
        self.steps.append(Step(Role.AMAX, j, operand(j, 0)))
        return _Is.AMAX

    def _needs_another(self, j: Instruction) -> bool:
        """Whether an elementwise instruction needs another matrix's elements."""
        if j.opcode == "select" and j.operands[0] not in self._live:
            return True  # masks, or chooses
        others = self._others(j)
        if any(other.name in self._derived for other in others):
            return True
        return j.opcode != "add" and any(self._repeated(other) is None for other in others)

    def _repeated(self, other: Instruction) -> Instruction | None:
        """The number or vector that a second operand repeats; None for a matrix."""
        origin = look_through(other, ("convert", "bitcast", "reshape", "broadcast", "copy"))
        is_small = other.name in self._small or 2 * origin.shape.size <= self._result.size
        return origin if is_small or origin.opcode == "constant" else None


def _rearranges(j: Instruction, state: _Is) -> bool:
    """Whether a move does to the result what no call could do."""
    if j.opcode in ("slice", "dynamic-slice"):
        return moving([j]) != "pad"
    if j.opcode == "broadcast" and state is _Is.VALUE:
        return j.shape.size > operand(j, 0).shape.size
    return j.opcode in ("concatenate", "gather", "reverse")


def _made_before(producer: Instruction, reader: Instruction) -> bool:
    """Whether what a kernel reads is made before it, and not by the iteration before of the loop
    that both are in.
    """
    return producer.computation is not reader.computation or producer.index < reader.index


# The neighborhood of all matmuls of a program -----------------------------------------------------


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
        self._users: dict[int, list[Instruction]] = collections.defaultdict(list)
        for kernel, inputs in self._flow.inputs.items():
            for number in chain(*inputs):
                self._users[number].append(kernel)

    def producers(self, kernel: Instruction, index: int) -> list[tuple[Instruction, int]]:
        """Who made an operand: kernels, and which of their results; ENTRY's parameters are not
        among them.
        """
        return [
            (m.instruction, m.element)
            for m in self._flow.of(self._flow.inputs[kernel][index])
            if m.instruction is not None
        ]

    def all_producers(self, i: Instruction) -> list[tuple[Instruction, int]]:
        """Who made any of a kernel's operands."""
        return [made for index in range(len(i.operands)) for made in self.producers(i, index)]

    def readers(self, kernel: Instruction, element: int | None = None) -> list[Instruction]:
        """Who reads a kernel's result; of one element of a tuple, or of all."""
        if kernel not in self._flow.inputs:
            return []
        numbers = self._flow.numbers(kernel)
        if element is not None:
            numbers = numbers[element : element + 1]
        return list(dict.fromkeys(chain(*(self._users.get(number, ()) for number in numbers))))

    def _next(self, kernel: Instruction) -> list[Instruction]:
        """Who reads a kernel's results in the same iteration of a loop."""
        return [reader for reader in self.readers(kernel) if _made_before(kernel, reader)]

    def is_reduced_to_scalar(self, kernel: Instruction) -> bool:
        """Whether other kernels reduce to one element what this one leaves."""
        readers = [i for i in self.readers(kernel) if i.opcode != "tuple" and i.shape.size == 1]
        return any(j.opcode == "reduce" for i in readers for j in inside(i))

    def outside(self, row: GemmRow) -> tuple[UnfusedKernel, ...]:
        """The kernels that make a matmul's operands or read its result, and what they do; those
        behind them too, as far as they do what the call could have done.
        """
        found: dict[Instruction, UnfusedKernel] = {}
        self._look_before(row.instruction, found)
        self._look_after(row, found)
        return tuple(found.values())

    # In front of a matmul -------------------------------------------------------------------------

    def _look_before(self, call: Instruction, found: dict[Instruction, UnfusedKernel]) -> None:
        todo = []
        for index in range(len(call.operands)):
            makes = _made_for(call, index)
            todo += [(*producer, makes, False) for producer in self.producers(call, index)]
        while todo and len(found) < self._most:
            i, element, makes, is_transposed = todo.pop(0)
            if i in found or i in self._multiply:
                continue
            found[i] = self._maker(i, element, makes)
            # Where another matmul reads the codes as they are, what is transposed in front of the
            # quantizer is so for that one.
            is_anothers = is_transposed and not self._multiply.isdisjoint(self.readers(i))
            if makes is Makes.MATRIX and not found[i].work and not is_anothers:
                for producer in self._transposing_for(i, element):
                    found[producer] = UnfusedKernel(producer, ("transpose",), makes=makes)
            if found[i].work:
                is_transposed |= "transpose" in found[i].work
                todo += [(*maker, makes, is_transposed) for maker in self.all_producers(i)]

    def _maker(self, i: Instruction, element: int, makes: Makes) -> UnfusedKernel:
        """What a kernel does that makes an operand."""
        work, own = "", True
        if is_plain(i):
            part, result = part_for(i, element), _result(i, element)
            if makes is Makes.SCALE:
                work, own = self._makes_scale(i, part, result.size == 1)
            elif makes is Makes.BIAS:
                work, own = _makes_bias(i, part), False
            else:
                work, own = self._makes_matrix(i, part, result.dtype)
        own = own or not work or len(results(i)) > 1
        return UnfusedKernel(i, (work,) if work else (), own, makes)

    def _makes_matrix(
        self, i: Instruction, part: list[Instruction], dtype: str
    ) -> tuple[str, bool]:
        """What a kernel that makes a matrix does of a call's work, and whether that is not all."""
        opcodes = {j.opcode for j in part}
        only_moves = opcodes <= MOVES | SOURCES
        # The scales of blocks: no call moves them.
        if only_moves and dtype == E8M0.name and "broadcast" not in opcodes:
            return "", True
        if only_moves and (moved := moving(part)):
            return moved, "gather" in opcodes
        is_alone = None if is_narrow(dtype) else self._widens(i)
        return ("", True) if is_alone is None else ("fp8", not is_alone)

    def _makes_scale(
        self, i: Instruction, part: list[Instruction], is_scalar: bool
    ) -> tuple[str, bool]:
        opcodes = {j.opcode for j in part}
        is_of_arguments = len(i.operands) != 1 or not self.producers(i, 0)
        if is_scalar and opcodes <= _SCALAR and opcodes & (SCALING | {"convert"}):
            # Of one number that the program computes, as an amax, the scale is the program's work.
            takes_one = not opcodes.isdisjoint(("dynamic-slice", "slice", "gather"))
            return ("scale", takes_one) if is_of_arguments else ("", True)
        return "", True

    def _transposing_for(self, reader: Instruction, element: int) -> list[Instruction]:
        """The kernels that only transpose, and convert, for another that then quantizes or joins:
        it joins several where XLA has merged dots.
        """
        moves = {j.opcode for j in part_for(reader, element)} <= MOVES | SOURCES
        if not is_plain(reader) or not (moves or is_narrow(_result(reader, element).dtype)):
            return []
        return [i for i, _ in self.all_producers(reader) if self._transposes_for(i, reader)]

    def _transposes_for(self, i: Instruction, reader: Instruction) -> bool:
        if not is_plain(i) or i.shape.size <= 1 or self.readers(i) != [reader]:
            return False
        parts = inside(i)
        return {j.opcode for j in parts} <= _SUPPLY and moving(parts) == "transpose"

    def _widens(self, i: Instruction, steps: int = 3) -> bool | None:
        """Whether a kernel only widens FP8 arrays, or what so many kernels at most made of them
        that only widened them; None where it reads nothing of FP8.
        """
        if any(j.opcode not in _FROM_FP8 for j in inside(i)):
            return None
        size = max((shape.size for shape in results(i)), default=0)
        codes: set[str] = set()
        is_alone = True
        for index, name in enumerate(_given(i)):
            if self._is_of_fp8(i, index, steps):
                codes.add(name)
            elif 2 * operand(i, index).shape.size > size:
                # Scales are smaller, or repeated for each element.
                makers = self.producers(i, index)
                is_alone &= bool(makers) and all(repeats(maker) for maker, _ in makers)
        return (is_alone and _widens_alone(i, codes)) if codes else None

    def _is_of_fp8(self, i: Instruction, index: int, steps: int) -> bool:
        """Whether an operand of a kernel is FP8, or scales of blocks, or was widened from it."""
        shape = operand(i, index).shape
        if shape.size > 1 and (is_narrow(shape.dtype) or shape.dtype == E8M0.name):
            return True
        makers = [maker for maker, _ in self.producers(i, index) if steps and is_plain(maker)]
        return any(self._widens(maker, steps - 1) for maker in makers)

    # Behind a matmul ------------------------------------------------------------------------------

    def _look_after(self, row: GemmRow, found: dict[Instruction, UnfusedKernel]) -> None:
        call = row.instruction
        size = max((shape.size for shape in results(call)), default=0)
        marks = {(call, 0): _Is.VALUE} | ({(call, 1): _Is.AMAX} if row.amax else {})
        computed = walk([call], self._next, self._far).keys() - {call}
        result = _Result(row, computed, marks, size)
        todo = collections.deque(marks)
        while todo and len(found) < 2 * self._most:
            for kernel in self.readers(*todo.popleft()):
                if kernel in found and (found[kernel].after or found[kernel].work):
                    continue
                does, made = self._reader(kernel, result)
                if does is not None:
                    found[kernel] = does
                for number, mark in enumerate(made):
                    if mark is not None:
                        marks[kernel, number] = mark
                        todo.append((kernel, number))

    def _reader(
        self, kernel: Instruction, result: _Result
    ) -> tuple[UnfusedKernel | None, list[_Is | None]]:
        """What a kernel does that reads a result, None where nothing is charged to this matmul; and
        what its own results then are, as far as they are followed.
        """
        if kernel in self._multiply:
            # XLA's own code may do more than multiply.
            is_own_code = fused(kernel) is not None and not fusion_kind(kernel)
            return (UnfusedKernel(kernel, own=True) if is_own_code else None), []
        if not is_plain(kernel):
            return UnfusedKernel(kernel, own=True), []
        reading = _Reading(kernel, result, self)
        # What another call's operand must be laid out like, is charged to that one.
        if reading.work == ("transpose",) and not self._fp8.isdisjoint(self.readers(kernel)):
            return None, []
        roles = tuple(dict.fromkeys(step.kind for step in reading.steps))
        does = UnfusedKernel(kernel, reading.work, reading.own, roles=roles)
        return does, reading.made if does.work else []


def _result(i: Instruction, element: int) -> Shape:
    """The shape of one of a kernel's results."""
    shapes = results(i) or (i.shape,)
    return shapes[min(element, len(shapes) - 1)]


def _makes_bias(i: Instruction, part: list[Instruction]) -> str:
    opcodes = {j.opcode for j in part}
    of_an_array = opcodes <= _SUPPLY | _PREPARING and "parameter" in opcodes
    return "bias" if (of_an_array or not fused(i)) and opcodes & _PREPARING else ""


def _widens_alone(i: Instruction, codes: set[str]) -> bool:
    """Whether a kernel only converts, moves and scales FP8 arrays, `codes` by their names, and
    shifts or bounds them by a number: a rotation of a key cache, as an example, is the program's
    own work.
    """
    made = {*codes}
    for j in inside(i):
        read = [n for n, name in enumerate(j.operands) if name in made]
        if read:
            made.add(j.name)
        if j.opcode in SCALING:  # not by each other, nor a number by the codes
            is_known = len(read) < 2 and not (j.opcode == "divide" and read == [1])
        elif j.opcode in _BY_A_NUMBER:
            # A relu too: without FP8 before it, the call's epilogue would have it.
            is_known = any(is_one_number(operand(j, n)) for n in range(len(j.operands)))
        else:
            is_known = j.opcode in _WIDENING
        if not is_known:
            return False
    return True


def _made_for(call: Instruction, index: int) -> Makes:
    """What an operand is to a call."""
    if operand(call, index).shape.size == 1:
        return Makes.SCALE
    if call.opcode != "custom-call" or index < 2:
        return Makes.MATRIX
    # cuDNN's block-scaled call has its scales there.
    is_cublas = (call.custom_call_target or "").startswith("__cublas")
    return Makes.BIAS if is_cublas else Makes.SCALE


def find_unfused(
    module: HloModule, ptx: Mapping[str, str] | None = None
) -> tuple[list[tuple[GemmRow, tuple[UnfusedKernel, ...]]], Neighborhood]:
    """The rows of a module's report, each with the kernels around it and what they do. `ptx` of
    kernels by name.
    """
    rows = _rows(module)
    around = Neighborhood(module, rows)
    found = []
    for row in rows:
        # What a call that is not seen could have done, nobody knows.
        near = around.outside(row) if row.is_seen else ()
        avoidable = [kernel.instruction for kernel in near if kernel.avoidable]
        avoidable.sort(key=lambda i: (-moved(i), i.index))
        math_dtype = row.math_dtype
        if ptx is not None and (row.library == "triton" or not row.is_seen):
            math_dtype = multiplied(row, ptx)
        row = dataclasses.replace(
            row,
            outside=tuple(i.name for i in avoidable),
            math_dtype=math_dtype,
            outside_bytes=sum(map(moved, avoidable)),
        )
        found.append((row, near))
    return found, around


def _rows(module: HloModule) -> list[GemmRow]:
    """The matmuls of a program, each with how often it runs. HloParseError where they are absurdly
    many.
    """
    # Kernels may share a computation with dots, but not so many of both.
    most = 10 * sum(1 for _ in module)
    rows: list[GemmRow] = []
    for name, times in executions(module).items():
        for i in module.computations[name]:
            rows += [dataclasses.replace(row, count=times) for row in matmuls(i)]
            if len(rows) > most:
                raise i.error(f"the program has more than {most} matmuls, in {most // 10} lines")
    return rows
