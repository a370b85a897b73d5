"""What the kernels around a matmul do that its call could have done, and what they must do in any
case.

A kernel that reads a matmul's result is followed from there, instruction by instruction, until
something is done that no call could do: another matrix comes in, rows are summed, a part is cut
out. A kernel that makes an operand is followed back from what it writes. What is not known here is
called unknown.
"""

import collections
import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from fp8lens.formats import E8M0, is_narrow
from fp8lens.hlo.dataflow import NOBODY, Flow, Producers
from fp8lens.hlo.ops import ALWAYS_A_KERNEL, ELEMENTWISE, MOVES, POINTWISE, SCALING, SOURCES, padded
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.program import executions, fused, fusion_kind, results
from fp8lens.hlo.values import (
    changes_layout,
    is_one_number,
    look_through,
    operand,
    reducer,
)
from fp8lens.hlo.walk import walk
from fp8lens.matmul.epilogue import leaves_the_layer
from fp8lens.matmul.kernels import launches, moved
from fp8lens.matmul.ptx import multiplied
from fp8lens.matmul.roles import Role, Step, classify, could_be_fused, masks
from fp8lens.matmul.rows import GemmRow, matmuls

_PLAIN = ELEMENTWISE | MOVES | {"fusion", "reduce"}
_SUPPLY = MOVES | SOURCES | {"convert"}
_SCALAR = _SUPPLY | SCALING | frozenset("add subtract negate power sqrt rsqrt".split())
_FROM_FP8 = _SUPPLY | POINTWISE
_WIDENING = MOVES | frozenset("convert negate abs reduce-precision".split())
_TO_AMAX = SOURCES | {"convert", "bitcast", "abs", "reduce"}
_KNOWN = _SUPPLY | ELEMENTWISE | ALWAYS_A_KERNEL | frozenset("reduce fusion".split())


class OwnWork(enum.StrEnum):
    """What a kernel on a matmul's way does that the call could not do in its place, and for which
    it must run. NOTHING is "", and false.
    """

    NOTHING = ""
    # Of kernels that make an operand.
    WRITES_MORE = "writes something else too"
    TAKES_SCALE = "takes a scale from a stack"
    COMPUTES_SCALE = "computes a scale"
    COMPUTES_BIAS = "computes what is added"
    COMPUTES_OPERAND = "computes an operand"
    QUANTIZES = "quantizes an operand"
    MOVES_OPERAND = "moves an operand"
    MAKES_OPERAND = "makes an operand"
    # Of kernels that read a result.
    READS = "reads the result"
    MULTIPLIES = "multiplies the result"
    MOVES_RESULT = "moves the result"
    TAKES_PART = "takes a part of the result"
    REORDERS = "joins or reorders the result"
    REPEATS = "repeats the result"
    REDUCES = "reduces the result"
    STORES = "stores the result in a larger array"
    MASKS = "masks the result"
    DEQUANTIZES = "dequantizes the result"
    ADDS_PARTS = "adds up the parts of K"
    COMBINES_WITH_ITSELF = "combines the result with what was made of it"
    COMBINES_WITH_ANOTHER = "combines the result with another matrix"
    COMPUTES_WITH_AMAX = "computes with the amax"
    REDUCES_ANOTHER = "reduces another matrix"
    COMPUTES_ANOTHER = "computes another matrix too"
    ANOTHER_OPERATION = "does what no call does"


DEQUANTIZES, ADDS = OwnWork.DEQUANTIZES, OwnWork.ADDS_PARTS


@dataclasses.dataclass(frozen=True, slots=True)
class UnfusedKernel:
    """A kernel on a matmul's way. `work`: what the call could have done in its place, of "fp8"
    (dequantizes an operand), "transpose", "pad", "scale", "bias", "epilogue" (an activation),
    "amax", "output" (clamps or converts the result).
    `own`: what it does besides, for which it must run; `unknown`: the opcode that nobody here
    knows. `after`: it reads the result, and else it makes an operand; then `fusable` are the steps
    of `work` that some call could do.
    """

    instruction: Instruction
    work: tuple[str, ...] = ()
    own: OwnWork = OwnWork.NOTHING
    unknown: str = ""
    after: bool = False
    fusable: tuple[Role, ...] = ()

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


# Kernels that make an operand ---------------------------------------------------------------------


class _Role(enum.Enum):
    """What an operand is to a call."""

    MATRIX = enum.auto()
    SCALE = enum.auto()
    BIAS = enum.auto()


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


def _before(
    i: Instruction,
    element: int,
    role: _Role,
    widens: Callable[[Instruction], bool | None],
) -> UnfusedKernel:
    """What a kernel does that makes an operand."""
    part = part_for(i, element)
    if unknown := sorted({j.opcode for j in part} - _KNOWN):
        return UnfusedKernel(i, unknown=unknown[0])
    shapes = results(i)
    if not shapes:
        raise i.error("it makes an operand of a matmul, and its shape is a tuple of nothing")
    besides = OwnWork.WRITES_MORE if len(shapes) > 1 else OwnWork.NOTHING
    result = shapes[min(element, len(shapes) - 1)]
    if role is _Role.SCALE:
        return _makes_scale(i, part, result.size == 1, besides)
    if role is _Role.BIAS:
        return _makes_bias(i, part, besides)
    opcodes = {j.opcode for j in part}
    only_moves = opcodes <= MOVES | SOURCES
    quantizes = is_narrow(result.dtype)
    # At places that the program computes, or the scales of blocks: no call does.
    is_of_scales = result.dtype == E8M0.name and "broadcast" not in opcodes
    if only_moves and ("gather" in opcodes or is_of_scales):
        return UnfusedKernel(i, own=OwnWork.MOVES_OPERAND)
    if only_moves and (moved := moving(part)):
        return UnfusedKernel(i, (moved,), besides)
    if not quantizes and (is_alone := widens(i)) is not None:
        besides = besides or (OwnWork.NOTHING if is_alone else OwnWork.COMPUTES_OPERAND)
        return UnfusedKernel(i, ("fp8",), besides)
    if only_moves:
        return UnfusedKernel(i, own=OwnWork.MOVES_OPERAND)
    return UnfusedKernel(i, own=OwnWork.QUANTIZES if quantizes else OwnWork.COMPUTES_OPERAND)


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
        if j.opcode in SCALING and (len(read) > 1 or j.opcode == "divide" and read == [1]):
            return False  # by each other, or a number by the codes
        if j.opcode in _WIDENING | SCALING | SOURCES:
            continue
        # A relu too: without FP8 before it, the call's epilogue would have it.
        is_by_a_number = any(is_one_number(operand(j, n)) for n in range(len(j.operands)))
        if j.opcode not in ("add", "subtract", "maximum", "minimum") or not is_by_a_number:
            return False
    return True


def is_small(i: Instruction, most: int) -> bool:
    """Whether a kernel reads and writes arrays of so many elements at most."""
    shapes = [operand(i, n).shape for n in range(len(i.operands))]
    return all(shape.size <= most for shape in (*shapes, *results(i)))


def repeats(i: Instruction) -> bool:
    """Whether a kernel writes the elements of a smaller array several times."""
    read = sum(operand(i, n).shape.size for n in range(len(i.operands)))
    opcodes = {j.opcode for j in inside(i)}
    return "broadcast" in opcodes and 2 * read <= sum(shape.size for shape in results(i))


def _makes_scale(
    i: Instruction, part: list[Instruction], is_scalar: bool, besides: OwnWork
) -> UnfusedKernel:
    opcodes = {j.opcode for j in part}
    if opcodes & {"dynamic-slice", "slice", "gather"}:
        besides = besides or OwnWork.TAKES_SCALE
    if is_scalar and opcodes <= _SCALAR and opcodes & (SCALING | {"convert"}):
        return UnfusedKernel(i, ("scale",), besides)
    return UnfusedKernel(i, own=OwnWork.COMPUTES_SCALE)


def _makes_bias(i: Instruction, part: list[Instruction], besides: OwnWork) -> UnfusedKernel:
    opcodes = {j.opcode for j in part}
    made_of = [look_through(operand(i, n), ("bitcast", "copy")) for n in range(len(i.operands))]
    is_argument = [j.opcode for j in made_of] == ["parameter"]
    if is_argument and opcodes <= MOVES | SOURCES and moving(part) == "transpose":
        return UnfusedKernel(i, ("bias",), besides)
    prepares = SCALING | {"convert", "broadcast", "negate"}
    of_an_array = opcodes <= _SUPPLY | prepares and "parameter" in opcodes
    if (of_an_array or not fused(i)) and opcodes & prepares:
        return UnfusedKernel(i, ("bias",), besides)
    return UnfusedKernel(i, own=OwnWork.COMPUTES_BIAS)


# Kernels that read a result -----------------------------------------------------------------------


class _Is(enum.Enum):
    """What a value still is of a matmul's result."""

    VALUE = enum.auto()
    MAGNITUDES = enum.auto()
    AMAX = enum.auto()


class _Reading:
    """What one kernel does with a matmul's result: `work`, and `own` for which it must run anyway.
    `made`: what each of the kernel's own results then is, None for what is no longer this result.

    `marks`: what each operand of the kernel is of the result; `derived`: operands that were made of
    the result otherwise; `size`: the result's; `parts`: in how many parts it sums K; `to_scalar`:
    whether other kernels reduce to one element what this one leaves; `op_name`: the matmul's.
    """

    def __init__(
        self,
        i: Instruction,
        marks: Mapping[str, _Is],
        derived: set[str],
        size: int,
        parts: int,
        to_scalar: Callable[[], bool],
        op_name: str,
    ):
        self.steps: list[Step] = []
        self.own = OwnWork.NOTHING
        self.unknown = ""
        self._moves: list[Instruction] = []
        self._is_relu = False
        self._size, self._parts, self._to_scalar = size, parts, to_scalar
        self._op_name = op_name
        self._inside = inside(i)
        computation = fused(i)
        given = [p.name for p in computation.parameters] if computation else i.operands
        inner_to_outer = list(zip(given, i.operands, strict=False))
        self._live = {inner: marks[outer] for inner, outer in inner_to_outer if outer in marks}
        # Of the result too, but no longer it alone: what no call computes.
        self._derived = {inner for inner, outer in inner_to_outer if outer in derived}
        # The result, masked or at other places: what a call does, it does before that.
        self._apart: set[str] = set()
        self._small: set[str] = set()  # made of scalars and vectors alone, whatever the shape
        for j in self._inside:
            self._visit(j)
        self.work = tuple(dict.fromkeys(step.kind.work for step in self.steps))
        if self._moves and not self.work and not self.own:
            if moved := moving(self._moves):
                self.work = (moved,)
            else:
                self.own = OwnWork.MOVES_RESULT
        root = computation.root if computation else i
        made = root.operands if root.opcode == "tuple" else (root.name,)
        live = self._live.keys() - self._apart
        self.made = tuple(self._live[name] if name in live else None for name in made)

    @property
    def fusable(self) -> tuple[Role, ...]:
        """Which of its steps some call could have done."""
        fusable = (step.kind for step in self.steps if could_be_fused(step))
        return tuple(dict.fromkeys(fusable))

    def _visit(self, j: Instruction) -> None:
        reads_it = any(name in self._live for name in j.operands)
        if reads_it and j.opcode != "parameter":
            self._follow(j)
            if j.name not in self._live:
                self._derived.add(j.name)
            elif not self._apart.isdisjoint(j.operands):
                self._apart.add(j.name)
        elif j.name not in self._live:
            self._prepare(j)
            if not self._derived.isdisjoint(j.operands):
                self._derived.add(j.name)

    def _prepare(self, j: Instruction) -> None:
        """What does not come from the result may prepare scales and biases; of a matrix's size, it
        is work of its own.
        """
        of_small = self._small.issuperset(j.operands)
        made_of_small = j.opcode != "parameter" and bool(j.operands) and of_small
        small = 2 * j.shape.size <= self._size or self._size == 1
        if j.opcode == "iota" or small or made_of_small:
            self._small.add(j.name)
            if small and j.opcode == "reduce" and not of_small:
                self._consume(OwnWork.REDUCES_ANOTHER)
        elif j.opcode != "tuple" and j.opcode not in _SUPPLY:
            if j.opcode not in _KNOWN:
                self.unknown = j.opcode
            self._consume(OwnWork.COMPUTES_ANOTHER)

    def _consume(self, what: OwnWork) -> None:
        """Note what the kernel must run for: the first such thing."""
        self.own = self.own or what

    def _follow(self, j: Instruction) -> None:
        """One instruction that reads the result, or what was made of it."""
        if j.opcode == "tuple":
            return
        state = self._state(j)
        if own := _rearranges(j, state):
            self._consume(own)
            self._set_apart(j, state)
        elif j.opcode == "reduce":
            self._reduce(j, state)
        elif j.opcode in MOVES:
            self._live[j.name] = state
            self._moves.append(j)
        elif leaves_the_layer(self._op_name, j):
            self._consume(OwnWork.ANOTHER_OPERATION)
        elif j.opcode in ELEMENTWISE:
            self._follow_elements(j, state)
        elif j.opcode == "dynamic-update-slice":
            self._consume(OwnWork.STORES)
        elif j.opcode == "fusion" or j.opcode in ALWAYS_A_KERNEL:
            self._consume(OwnWork.ANOTHER_OPERATION)
        else:
            self.unknown = j.opcode

    def _follow_elements(self, j: Instruction, state: _Is) -> None:
        """One elementwise instruction that reads the result."""
        if j.opcode == "convert":
            self._convert(j, state)
        elif state is _Is.AMAX:
            self._compute_with_amax(j)
        else:
            self._compute(j, state)

    def _set_apart(self, j: Instruction, state: _Is) -> None:
        """Follow what no call could have moved or masked, for what is done with it after that."""
        if state is _Is.VALUE:
            self._live[j.name] = state
            self._apart.add(j.name)

    def _state(self, j: Instruction) -> _Is:
        """What of the result an instruction reads: of several things, what is furthest from it."""
        read = {self._live[name] for name in j.operands if name in self._live}
        if _Is.AMAX in read:
            return _Is.AMAX
        return _Is.MAGNITUDES if _Is.MAGNITUDES in read else _Is.VALUE

    def _read(self, j: Instruction) -> list[int]:
        """The operands of an instruction, by index, that are the result."""
        return [n for n, name in enumerate(j.operands) if name in self._live]

    def _others(self, j: Instruction) -> list[Instruction]:
        """The operands of an instruction that are not the result."""
        return [j.computation[name] for name in j.operands if name not in self._live]

    def _convert(self, j: Instruction, state: _Is) -> None:
        before = operand(j, 0).shape
        if is_narrow(before.dtype) and before.size > 1 and not self._is_amax_of_codes:
            self._consume(OwnWork.DEQUANTIZES)  # for whoever reads it next
            return
        self._live[j.name] = state
        narrower = j.shape.bits < before.bits
        alone = all(k.opcode in ("parameter", "convert", "bitcast") for k in self._inside)
        if state is _Is.AMAX:
            self.steps.append(Step(Role.AMAX, j, operand(j, 0)))
        elif (narrower or alone) and not self._is_amax_of_codes:
            self.steps.append(Step(Role.OUTPUT, j, operand(j, 0)))

    @cached_property
    def _is_amax_of_codes(self) -> bool:
        """Whether the kernel only finds the amax, or the relu, of FP8 values."""
        opcodes = {k.opcode for k in self._inside}
        amax = {"reduce"} <= opcodes <= _TO_AMAX
        relu = {"maximum"} <= opcodes <= _SUPPLY | {"maximum"}
        return amax or (relu and is_narrow(self._inside[-1].shape.dtype))

    def _compute_with_amax(self, j: Instruction) -> None:
        # The root of the largest square is an amax too.
        joins = j.opcode in ("negate", "maximum", "minimum", "abs", "sqrt")
        of_the_result = all(other.name in self._derived for other in self._others(j))
        if j.shape.size == 1 and joins and of_the_result:
            self.steps.append(Step(Role.AMAX, j, operand(j, 0)))
            self._live[j.name] = _Is.AMAX
        else:
            self._consume(OwnWork.COMPUTES_WITH_AMAX)

    def _reduce(self, j: Instruction, state: _Is) -> None:
        by = reducer(j)
        if not self._apart.isdisjoint(j.operands):
            self._consume(OwnWork.REDUCES)
            return
        one_part = self._size // self._parts
        is_sum_of_parts = j.shape.size == one_part < self._size
        if is_sum_of_parts and by == "add" and state is _Is.VALUE:
            self._consume(OwnWork.ADDS_PARTS)
            self._live[j.name] = state
            return
        # Of all elements it is an amax however it is written; of some, softmax takes a maximum too.
        positive = state is not _Is.VALUE or self._is_relu
        positive = positive or j.shape.size == 1 or self._to_scalar()
        if by in ("maximum", "minimum") and positive and len(j.operands) == 2:
            self.steps.append(Step(Role.AMAX, j, operand(j, 0)))
            self._live[j.name] = _Is.AMAX
        else:
            self._consume(OwnWork.REDUCES)

    def _compute(self, j: Instruction, state: _Is) -> None:
        """One elementwise instruction."""
        if j.opcode == "abs" and any(k.opcode == "reduce" for k in self._inside):
            self._live[j.name] = _Is.MAGNITUDES
        elif own := self._combines(j):
            self._consume(own)
            if own is OwnWork.MASKS:
                self._set_apart(j, state)
        else:
            self._note(j)
            self._live[j.name] = state

    def _note(self, j: Instruction) -> None:
        """Note what a call could have done in the place of one elementwise instruction."""
        value = operand(j, self._read(j)[0])
        step = classify(j, value, self._others(j), self._repeated)
        if j.opcode == "maximum":
            self._is_relu = step.kind is Role.RELU
        self.steps.append(step)

    def _combines(self, j: Instruction) -> OwnWork:
        """What one elementwise instruction does with the result that no call could: it needs
        another matrix's elements.
        """
        read = {j.operands[n] for n in self._read(j)}
        if len(read) > 1 and not self._apart.isdisjoint(read):
            return OwnWork.COMBINES_WITH_ITSELF
        is_choice = j.opcode == "select" and j.operands[0] not in self._live
        if is_choice and any(masks(j, operand(j, n)) for n in self._read(j)):
            return OwnWork.MASKS
        for other in self._others(j):
            if other.name in self._derived:
                return OwnWork.COMBINES_WITH_ITSELF
            origin, _ = _origin(other)
            known = origin.opcode == "constant" or self._is_small(other, origin)
            if not known and j.opcode != "add":
                return OwnWork.COMBINES_WITH_ANOTHER
        return OwnWork.MASKS if is_choice else OwnWork.NOTHING

    def _is_small(self, other: Instruction, origin: Instruction) -> bool:
        return other.name in self._small or 2 * origin.shape.size <= self._size

    def _repeated(self, other: Instruction) -> Instruction | None:
        """The number or vector that a second operand repeats; None for a matrix."""
        origin, repeats_a_vector = _origin(other)
        if origin.opcode != "constant" and not self._is_small(other, origin):
            return None
        return other if repeats_a_vector else origin


def _origin(i: Instruction) -> tuple[Instruction, bool]:
    """What stands behind a second operand, and whether a vector or more was broadcast on the
    way.
    """
    vector = False
    while i.opcode in ("convert", "bitcast", "reshape", "broadcast", "copy") and i.operands:
        before = operand(i, 0)
        vector = vector or (i.opcode == "broadcast" and before.shape.size > 1)
        i = before
    return i, vector


def _rearranges(j: Instruction, state: _Is) -> OwnWork:
    """What a move does to the result that no call could do; NOTHING for other moves and opcodes."""
    if j.opcode in ("slice", "dynamic-slice") and moving([j]) != "pad":
        return OwnWork.TAKES_PART
    if j.opcode in ("concatenate", "gather", "reverse"):
        return OwnWork.REORDERS
    if j.opcode == "broadcast" and state is not _Is.AMAX:
        return OwnWork.REPEATS if j.shape.size > operand(j, 0).shape.size else OwnWork.NOTHING
    return OwnWork.NOTHING


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
        self.module = module
        self._multiply = {row.instruction for row in rows}
        self._fp8 = {row.instruction for row in rows if row.is_fp8}
        self._flow = Flow(module, launches)
        # Where matmuls are very many, what is far from one is not looked at: the time is to grow
        # with the text.
        each = len(module.text) // max(1, len(rows))
        self._far, self._most = max(100, 4 * each), max(40, each // 8)
        self._found: dict[Instruction, tuple[UnfusedKernel, ...]] = {}
        self._same: dict[UnfusedKernel, UnfusedKernel] = {}
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

    def makers(self, kernel: Instruction, index: int) -> Producers:
        """The numbers of who made an operand, ENTRY's parameters among them: to compare them."""
        return self._flow.inputs[kernel][index]

    def numbers(self, kernel: Instruction) -> range:
        """The numbers of a kernel's results."""
        return self._flow.numbers(kernel)

    @cached_property
    def returned(self) -> Producers:
        """The numbers of who made ENTRY's results."""
        return NOBODY.union(*self._flow.results)

    def users(
        self, kernel: Instruction, element: int | None = None
    ) -> list[tuple[Instruction, int]]:
        """Who reads a kernel's result, and as which operand; of one element of a tuple, or of
        all.
        """
        if kernel not in self._flow.inputs:
            return []
        numbers = self._flow.numbers(kernel)
        if element is not None:
            numbers = numbers[element : element + 1]
        readers = (reader for number in numbers for reader in self._users.get(number, ()))
        return list(dict.fromkeys(readers))

    def readers_of_parameter(self, parameter: Instruction) -> list[tuple[Instruction, int]]:
        """Who reads one of ENTRY's parameters, and as which operand."""
        # The parameters are the first producers, by their numbers.
        number = parameter.parameter_number
        return [] if number is None else list(dict.fromkeys(self._users.get(number, ())))

    def descendants(self, kernel: Instruction) -> set[Instruction]:
        """Kernels that compute with what this one has computed, directly or not, in the same
        iteration of a loop.
        """
        return walk([kernel], self._next_in_iteration.__getitem__, self._far).keys() - {kernel}

    @cached_property
    def _next_in_iteration(self) -> dict[Instruction, list[Instruction]]:
        """Of `next` those that read in the same iteration of a loop."""
        return {
            at: [reader for reader in readers if _made_before(at, reader)]
            for at, readers in self.next.items()
        }

    @cached_property
    def next(self) -> dict[Instruction, tuple[Instruction, ...]]:
        """The kernels that read each kernel's results."""
        found = {}
        for kernel in self._flow.inputs:
            # Each once, though it may read a kernel's results as several operands.
            readers = dict.fromkeys(reader for reader, _ in self.users(kernel))
            found[kernel] = tuple(readers)
        return found

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
        todo: list[tuple[tuple[Instruction, int], _Role]] = []
        for index in range(len(call.operands)):
            role = _role(call, index)
            todo += [(producer, role) for producer in self.producers(call, index)]
        while todo and len(found) < self._most:
            (i, element), role = todo.pop(0)
            if i in found or i in self._multiply:
                continue
            found[i] = self._maker(i, element, role)
            if found[i].own in (OwnWork.QUANTIZES, OwnWork.MOVES_OPERAND):
                for producer in self._transposing_for(i):
                    found[producer] = UnfusedKernel(producer, ("transpose",))
            if found[i].work:
                todo += [(producer, role) for producer in self.all_producers(i)]

    def _maker(self, i: Instruction, element: int, role: _Role) -> UnfusedKernel:
        """What a kernel does that makes an operand."""
        if not is_plain(i):
            return UnfusedKernel(i, own=OwnWork.MAKES_OPERAND)
        does = _before(i, element, role, self._widens)
        if does.work == ("scale",) and len(i.operands) == 1 and self.producers(i, 0):
            # Of one number that the program computes, as an amax.
            return UnfusedKernel(i, own=OwnWork.COMPUTES_SCALE)
        return does

    def all_producers(self, i: Instruction) -> list[tuple[Instruction, int]]:
        """Who made any of a kernel's operands."""
        return [made for index in range(len(i.operands)) for made in self.producers(i, index)]

    def _transposing_for(self, reader: Instruction) -> list[Instruction]:
        """The kernels that only transpose, and convert, for another that then quantizes or joins:
        it joins several where XLA has merged dots.
        """
        return [i for i, _ in self.all_producers(reader) if self._transposes_for(i, reader)]

    def _transposes_for(self, i: Instruction, reader: Instruction) -> bool:
        if not is_plain(i) or i.shape.size <= 1:
            return False
        parts = inside(i)
        if not {j.opcode for j in parts} <= _SUPPLY or moving(parts) != "transpose":
            return False
        return {kernel for kernel, _ in self.users(i)} == {reader}

    def _widens(self, i: Instruction, steps: int = 3) -> bool | None:
        """Whether a kernel only widens FP8 arrays, or what so many kernels at most made of them
        that only widened them; None where it reads nothing of FP8.
        """
        if any(j.opcode not in _FROM_FP8 for j in inside(i)):
            return None
        size = max((shape.size for shape in results(i)), default=0)
        reads, others = [], []
        for index in range(len(i.operands)):
            reads.append(self._is_of_fp8(i, index, steps))
            # Scales are smaller, or repeated for each element.
            large = 2 * operand(i, index).shape.size > size
            makers = self.producers(i, index)
            others.append(large and not (makers and all(repeats(maker) for maker, _ in makers)))
        if not any(reads):
            return None
        is_alone = not any(large and not read for read, large in zip(reads, others, strict=True))
        computation = fused(i)
        given = [p.name for p in computation.parameters] if computation else i.operands
        codes = {name for name, read in zip(given, reads, strict=False) if read}
        return is_alone and _widens_alone(i, codes)

    def _is_of_fp8(self, i: Instruction, index: int, steps: int) -> bool:
        """Whether an operand of a kernel is FP8, or scales of blocks, or was widened from it."""
        shape = operand(i, index).shape
        if shape.size > 1 and (is_narrow(shape.dtype) or shape.dtype == E8M0.name):
            return True
        makers = [maker for maker, _ in self.producers(i, index) if steps and is_plain(maker)]
        return any(self._widens(maker, steps - 1) for maker in makers)

    def _look_after(self, row: GemmRow, found: dict[Instruction, UnfusedKernel]) -> None:
        call = row.instruction
        size, parts = max((shape.size for shape in results(call)), default=0), 1
        if row.library != "cudnn":
            parts = max(1, size // max(1, row.batch * row.m * row.n))
        marks: dict[tuple[Instruction, int], _Is] = {(call, 0): _Is.VALUE}
        if row.amax:
            marks[call, 1] = _Is.AMAX
        todo = collections.deque(marks)
        made_of_it = self.descendants(call)
        while todo and len(found) < 2 * self._most:
            at = todo.popleft()
            for kernel in dict.fromkeys(kernel for kernel, _ in self.users(*at)):
                if kernel in found and (found[kernel].after or found[kernel].work):
                    continue
                does, made = self._reader(kernel, row.op_name, marks, made_of_it, size, parts)
                if does is None:
                    continue
                found[kernel] = does
                for number, mark in enumerate(made):
                    if mark is not None:
                        marks[kernel, number] = mark
                        todo.append((kernel, number))

    def _reader(
        self,
        kernel: Instruction,
        op_name: str,
        marks: Mapping[tuple[Instruction, int], _Is],
        made_of_it: set[Instruction],
        size: int,
        parts: int,
    ) -> tuple[UnfusedKernel | None, Sequence[_Is | None]]:
        """What a kernel does that reads a result, None where nothing is charged to this matmul; and
        what its own results then are, as far as they are followed.
        """
        if kernel in self._multiply:
            # XLA's own code may do more than multiply.
            is_own_code = fused(kernel) is not None and not fusion_kind(kernel)
            does = UnfusedKernel(kernel, own=OwnWork.MULTIPLIES, after=True)
            return (does if is_own_code else None), ()
        if not is_plain(kernel):
            return UnfusedKernel(kernel, own=OwnWork.READS, after=True), ()
        reading = self._read(kernel, op_name, marks, made_of_it, size, parts)
        # What another call's operand must be laid out like, is charged to that one.
        feeds_fp8 = any(reader in self._fp8 for reader, _ in self.users(kernel))
        if reading.work == ("transpose",) and feeds_fp8:
            return None, ()
        does = UnfusedKernel(
            kernel, reading.work, reading.own, reading.unknown, after=True, fusable=reading.fusable
        )
        # A long sum is the same kernels for each of its matmuls: they are kept once.
        return self._same.setdefault(does, does), reading.made if does.work else ()

    def _read(
        self,
        kernel: Instruction,
        op_name: str,
        marks: Mapping[tuple[Instruction, int], _Is],
        made_of_it: set[Instruction],
        size: int,
        parts: int,
    ) -> _Reading:
        live: dict[str, _Is] = {}
        derived: set[str] = set()
        for index, name in enumerate(kernel.operands):
            producers = self.producers(kernel, index)
            known = [marks[producer] for producer in producers if producer in marks]
            if known:
                live[name] = known[0]
            elif any(i in made_of_it and _made_before(i, kernel) for i, _ in producers):
                derived.add(name)

        def to_scalar() -> bool:
            return self._is_reduced_to_scalar(kernel)

        return _Reading(kernel, live, derived, size, parts, to_scalar, op_name)

    def _is_reduced_to_scalar(self, kernel: Instruction) -> bool:
        """Whether other kernels reduce to one element what this one leaves."""
        readers = [i for i, _ in self.users(kernel) if i.opcode != "tuple" and i.shape.size == 1]
        return any(j.opcode == "reduce" for i in readers for j in inside(i))


def _role(call: Instruction, index: int) -> _Role:
    """What an operand is to a call."""
    if operand(call, index).shape.size == 1:
        return _Role.SCALE
    if call.opcode != "custom-call" or index < 2:
        return _Role.MATRIX
    # cuDNN's block-scaled call has its scales there.
    return _Role.BIAS if _is_cublas(call) else _Role.SCALE


def _is_cublas(call: Instruction) -> bool:
    return (call.custom_call_target or "").startswith("__cublas")


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
    instructions = sum(1 for _ in module)
    rows: list[GemmRow] = []
    for name, times in executions(module).items():
        for i in module.computations[name]:
            rows += [dataclasses.replace(row, count=times) for row in matmuls(i)]
            if len(rows) > 10 * instructions:
                raise i.error(
                    f"the program has more than {10 * instructions} matmuls, in {instructions} "
                    "instructions"
                )
    return rows
