"""What one operation does to a matmul's result: decided here alone, for the program that XLA's
rewriter was given, for the kernels that it became, and for pictures of both.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Sequence

from fp8lens.formats import CUBLASLT, E5M2
from fp8lens.hlo.ops import ELEMENTWISE, SCALING
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import NAMES, broadcast_of, is_square, is_zero, look_through, operand, since
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
    operand, behind broadcasts and conversions.
    """

    kind: Role
    at: Instruction
    value: Instruction
    other: Instruction | None = None


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
    if len(others) == 1 and at.opcode == "subtract" and not is_number:
        return Step(Role.OTHER, at, value, others[0])
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


def is_magnitude(i: Instruction) -> bool:
    """Whether a value has no sign, by its last operation that is no conversion: a magnitude, a
    square, or what a relu leaves.
    """
    i = look_through(i)
    if i.opcode == "maximum":
        numbers = (broadcast_of(operand(i, n)) or operand(i, n) for n in (0, 1))
        return any(map(is_zero, numbers))
    return i.opcode == "abs" or is_square(i)


def could_be_fused(step: Step) -> bool:
    """Whether some call could have done a step: no conversion between wide types, no activation but
    relu and gelu.
    """
    if step.kind is Role.OUTPUT:
        return step.at.shape.dtype in CUBLASLT
    if step.kind is Role.ACTIVATION:
        return is_tanh_gelu(step)
    return step.kind in (Role.SCALE, Role.BIAS, Role.MATRIX_BIAS, Role.RELU)


def number_of(constant: Instruction) -> float:
    """A constant's value; NaN for an array of several, and for what is no constant."""
    try:
        return float(_literal(constant))
    except ValueError:
        return math.nan


def _literal(constant: Instruction) -> str:
    """A constant as the text has it, but in full: XLA prints a bfloat16 with four digits."""
    return (constant.literal or "").replace("5.734e+04", E5M2.limit)


def is_tanh_gelu(step: Step) -> bool:
    """Whether an activation is gelu in its tanh form: what is computed elementwise from there on
    has a tanh in it, and the factor of the third power.
    """
    following, get = _following(step), step.value.computation.__getitem__
    read = {name for i in following for name in i.operands}
    constants = [look_through(get(name), (*NAMES, "convert", "broadcast")) for name in read]
    has_tanh = any(i.opcode == "tanh" for i in following)
    return has_tanh and any(re.match(r"0\.044[67]", i.literal or "") for i in constants)


def telling(step: Step) -> Instruction:
    """Of the operations of an activation the one that a reader knows it by."""
    made = [*since(step.value, step.at), step.at]
    return next((i for i in made if i.opcode in KNOWN_BY), step.at)


KNOWN_BY = frozenset("tanh erf logistic exponential log log-plus-one sqrt rsqrt power".split())


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
