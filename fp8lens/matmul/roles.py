"""What one operation does to a matmul's result: decided here alone, for the program that XLA's
rewriter was given, for the kernels that it became, and for pictures of both.
"""

import dataclasses
import enum
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence

from fp8lens.formats import CUBLASLT, E5M2
from fp8lens.hlo.ops import ELEMENTWISE, SCALING
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import NAMES, broadcast_of, depends, is_zero, look_through, operand
from fp8lens.hlo.walk import walk


class Role(enum.StrEnum):
    """What an operation is to a matmul whose result it reads."""

    ALPHA = "alpha"  # a constant factor
    SCALE = "scale"  # a factor that is one number, computed or an argument
    VECTOR_SCALE = "vector scale"
    NEGATE = "negate"
    BIAS = "bias"  # a number or vector is added
    MATRIX_BIAS = "matrix bias"
    RELU = "relu"
    ACTIVATION = "activation"  # any other function of each element
    CLAMP = "clamp"
    OUTPUT = "output"  # a conversion
    AMAX = "amax"
    MOVE = "move"
    OTHER = "other"

    @property
    def work(self) -> str:
        """What `UnfusedKernel.work` calls it."""
        return _WORK.get(self, "epilogue")

    @property
    def noun(self) -> str:
        """What a sentence calls it."""
        return _NOUNS.get(self, self.value)


_WORK = {
    Role.ALPHA: "scale",
    Role.SCALE: "scale",
    Role.VECTOR_SCALE: "scale",
    Role.BIAS: "bias",
    Role.MATRIX_BIAS: "bias",
    Role.CLAMP: "output",
    Role.OUTPUT: "output",
    Role.AMAX: "amax",
}
_NOUNS = {
    Role.OUTPUT: "conversion",
    Role.ALPHA: "factor",
    Role.NEGATE: "scale",
    Role.VECTOR_SCALE: "scale",
    Role.MATRIX_BIAS: "bias",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that is done with a dot's result: `at` does it to `value`; `other` is its second
    operand, behind broadcasts and conversions. `how` says of a move that is no single operation
    what it does.
    """

    kind: Role
    at: Instruction
    value: Instruction
    other: Instruction | None = None
    how: str = ""


# An activation has fewer operations.
_LONGEST = 60

#: What a second operand repeats, a number or a vector; None for a matrix.
Origin = Callable[[Instruction], Instruction | None]


def classify(
    at: Instruction, value: Instruction, others: Sequence[Instruction], origin: Origin
) -> Step:
    """What an elementwise operation does to `value`, of which `others` are the other operands."""
    if at.opcode == "convert":
        return Step(Role.OUTPUT, at, value)
    if at.opcode == "negate":
        return Step(Role.NEGATE, at, value)
    if at.opcode == "add" and not others:  # to itself: a factor of 2
        return Step(Role.ALPHA, at, value)
    small = [origin(other) for other in others]
    first = small[0] if small else None
    is_number = first is not None and first.shape.size == 1
    if at.opcode == "clamp" or (at.opcode in ("minimum", "maximum") and is_number):
        is_relu = at.opcode == "maximum" and is_zero(first)
        return Step(Role.RELU if is_relu else Role.CLAMP, at, value, first)
    if len(others) == 1 and at.opcode in SCALING:
        return _scaling(at, value, others[0], first)
    if len(others) == 1 and at.opcode in ("add", "subtract"):
        if first is None:
            return Step(Role.MATRIX_BIAS, at, value, others[0])
        is_constant = is_number and first.opcode == "constant"
        return Step(Role.ACTIVATION if is_constant else Role.BIAS, at, value, first)
    is_unary = at.opcode in ELEMENTWISE - {"select"} and None not in small
    return Step(Role.ACTIVATION if is_unary else Role.OTHER, at, value)


def _scaling(
    at: Instruction, value: Instruction, other: Instruction, factor: Instruction | None
) -> Step:
    """What a multiplication or division does to `value`; `factor` is what `other` repeats."""
    if at.opcode == "divide" and at.computation[at.operands[0]] is other:
        return Step(Role.ACTIVATION, at, value)
    if factor is None:
        return Step(Role.OTHER, at, value, other)
    if factor.shape.size != 1:
        return Step(Role.VECTOR_SCALE, at, value, factor)
    return Step(Role.ALPHA if factor.opcode == "constant" else Role.SCALE, at, value, factor)


def step_of(at: Instruction, value: Instruction) -> Step:
    """What an elementwise operation does to `value`, in a program that is not yet of kernels."""
    others = [at.computation[name] for name in at.operands if name != value.name]
    return classify(at, value, others, broadcast_of)


def masks(at: Instruction, value: Instruction) -> bool:
    """Whether an operation puts one number in the place of some elements of a value."""
    if at.opcode != "select" or at.operands[0] == value.name:
        return False
    fills = [at.computation[name] for name in at.operands[1:] if name != value.name]
    if len(fills) != 1:
        return False
    fill = broadcast_of(fills[0]) or look_through(fills[0])
    return fill.shape.size == 1


def could_be_fused(step: Step) -> bool:
    """Whether some call could have done a step: no conversion between wide types, no activation but
    relu, also one that is written as a choice, and gelu.
    """
    if step.kind is Role.OUTPUT:
        return step.at.shape.dtype in CUBLASLT
    if step.kind is Role.ACTIVATION:
        return is_tanh_gelu(step) or is_selected_relu(step)
    return step.kind in (Role.SCALE, Role.BIAS, Role.MATRIX_BIAS, Role.RELU)


def is_selected_relu(step: Step) -> bool:
    """Whether an activation is a relu written as a choice between the result and 0."""
    return selected_bounds(step) == (0, math.inf)


def selected_bounds(step: Step) -> tuple[float, float] | None:
    """The bounds between which a step keeps a number by comparisons with constants and choices,
    infinite where it has none; None for a step that is made, or does, otherwise.
    """
    made = sorted(_made_of(step), key=lambda i: i.index)
    if step.at.opcode != "select" or not {i.opcode for i in made} <= _CHOICES:
        return None
    constants = [number_of(i) for i in made if i.opcode == "constant"]
    if not all(map(math.isfinite, constants)):
        return None
    # Between two neighbouring constants it is the number, or it is one of the constants.
    ends = sorted({-math.inf, *constants, math.inf})
    between = [(a + b) / 2 for a, b in itertools.pairwise(ends[1:-1])]
    low, high = _chosen(made, step, -math.inf), _chosen(made, step, math.inf)
    beyond = [ends[1] - 1, ends[-2] + 1]
    is_kept = all(
        _chosen(made, step, number) == min(max(number, low), high)
        for number in (*constants, *between, *beyond)
    )
    return (low, high) if is_kept else None


def _chosen(made: Iterable[Instruction], step: Step, number: float) -> float:
    """What a step that compares and chooses makes of a number; `made` in the order of the text."""
    values: dict[str, float] = {step.value.name: number}
    for i in made:
        given = [values[name] for name in i.operands]
        if i.opcode == "constant":
            values[i.name] = number_of(i)
        elif i.opcode == "compare":
            values[i.name] = _DIRECTIONS[i.attributes["direction"]](*given)
        elif i.opcode == "select":
            values[i.name] = given[1] if given[0] else given[2]
        else:
            values[i.name] = given[0]
    return values[step.at.name]


_DIRECTIONS = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
_CHOICES = frozenset("select compare constant broadcast convert".split()) | {*NAMES}


def number_of(constant: Instruction) -> float:
    """A constant's value; NaN for an array of several, and for what is no constant."""
    try:
        return float(_literal(constant))
    except ValueError:
        return math.nan


def _literal(constant: Instruction) -> str:
    """A constant as the text has it, but in full: XLA prints a bfloat16 with four digits."""
    return (constant.literal or "").replace("5.734e+04", E5M2.limit)


def is_added_up(step: Step) -> bool:
    """Whether a step only adds a value to itself, several times."""
    return {i.opcode for i in _made_of(step)} == {"add"}


def times_added(step: Step) -> int:
    """How often the value stands in a sum of nothing else, as 3 times in d + d + d."""
    times = {step.value.name: 1}
    for i in sorted(_made_of(step), key=lambda i: i.index):
        times[i.name] = sum(times[name] for name in i.operands)
    return times[step.at.name]


def computes_with_bits(step: Step) -> bool:
    """Whether a step is a function that takes the bits of the result apart, as jnp.ldexp does."""
    if step.kind is not Role.ACTIVATION:
        return False
    made = [i for i in _made_of(step) if i.opcode in _OF_BITS and i.shape.dtype != "pred"]
    return any(depends(i, step.value) for i in made)


_OF_BITS = frozenset(
    "and or xor not shift-left shift-right-logical shift-right-arithmetic popcnt clz".split()
)


def is_tanh_gelu(step: Step) -> bool:
    """Whether an activation is gelu in its tanh form: what is computed elementwise from there on
    has a tanh in it, and the factor of the third power.
    """
    following, get = _following(step), step.value.computation.__getitem__
    read = {name for i in following for name in i.operands}
    constants = [look_through(get(name), (*NAMES, "convert", "broadcast")) for name in read]
    has_tanh = any(i.opcode == "tanh" for i in following)
    return has_tanh and any(re.match(r"0\.044[67]", i.literal or "") for i in constants)


def _made_of(step: Step) -> list[Instruction]:
    """The operations by which a step's result is made of what it reads, of anything else that goes
    in too, and without what it reads.
    """

    def made_of(i: Instruction) -> list[Instruction]:
        return [] if i is step.value else [i.computation[name] for name in i.operands]

    made = walk([step.at], made_of, _LONGEST)
    return [i for i in made if i is not step.value]


def is_transcendental(step: Step) -> bool:
    """Whether an activation that no call has is made of an exponential or a logarithm."""
    opcodes = {i.opcode for i in _made_of(step)}
    return not could_be_fused(step) and not opcodes.isdisjoint(_TRANSCENDENTAL)


_TRANSCENDENTAL = frozenset("exponential exponential-minus-one log log-plus-one logistic".split())


def is_transposed_inside(step: Step) -> bool:
    """Whether XLA has moved a transpose between the operations of an activation."""
    return any(i.opcode == "transpose" for i in _following(step))


def _following(step: Step) -> list[Instruction]:
    """What is computed elementwise from what a step reads."""
    users = step.value.computation.users

    def onward(i: Instruction) -> list[Instruction]:
        elementwise = ELEMENTWISE | {"bitcast", "reshape", "transpose"}
        return [user for user in users.get(i.name, ()) if user.opcode in elementwise]

    return list(walk([step.value], onward, _LONGEST))


def clamp_bounds(clamp: Instruction) -> list[str]:
    """Lower and upper bound of a clamp between constants."""
    if clamp.opcode != "clamp":
        return []
    ends = [broadcast_of(operand(clamp, n)) or operand(clamp, n) for n in (0, 2)]
    return [_literal(end) for end in ends if end.opcode == "constant"]
