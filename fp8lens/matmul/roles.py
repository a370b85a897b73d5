"""What becomes of a matmul's result: what one operation does to it, decided here alone, for the
program that XLA's rewriter was given, for the kernels that it became, and for pictures of both; and
in which order the program does it.

Like the rewriter (GemmRewriterVisitor in XLA's gemm_rewriter.cc), `Result` stays in the computation
of the dot: what a loop, a branch, a collective or another matmul is handed is no longer its result.
"""

import dataclasses
import enum
import math
import re
from collections.abc import Callable, Iterator, Sequence

from fp8lens.formats import CUBLASLT, E5M2, is_fp8
from fp8lens.hlo.ops import CUTS, ELEMENTWISE, LAYOUT, SCALING
from fp8lens.hlo.origin import is_of_a_gradient, layer, op_name
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import (
    NAMES,
    broadcast_of,
    depends,
    dimensions,
    is_one_number,
    is_square,
    is_transpose,
    is_zero,
    look_through,
    operand,
    reducer,
    since,
)
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


# What the program does with a result ------------------------------------------------------------

# What gives a result on, at other places, or some of it.
_MOVES_ON = LAYOUT | {"slice", "reverse", "opt-barrier"}
# The same, of their first operand.
_MOVES_FIRST = frozenset("dynamic-slice gather pad broadcast".split())
# What may stand between a value and the reduction that finds its amax.
_BEFORE_AMAX = frozenset("abs convert bitcast reshape negate opt-barrier".split())


class Result:
    """What the program does with a dot's result: `steps`, in order, up to where it is no longer
    this result alone; `readers`, pairs of a value on the way and who reads it besides; and `ends`,
    who reads the last value on the way.
    """

    def __init__(self, dot: Instruction):
        self._dot = dot
        self.steps: list[Step] = []
        self.readers: list[tuple[Instruction, Instruction]] = []
        self.ends: list[Instruction] = []
        self._follow(dot)
        self._leave_out_the_loss()

    def _leave_out_the_loss(self) -> None:
        """What is only summed, as the squares of a loss or of a norm, is no layer's result: of what
        is done for that sum alone, no call does anything.
        """
        if not self.ends or any(i.opcode != "reduce" for i in self.ends):
            return
        while self.steps and self.steps[-1].kind is not Role.AMAX:
            if could_be_fused(self.steps[-1]):
                break
            self.steps.pop()

    def _follow(self, value: Instruction | None) -> None:
        """Add what is done with a value, and with what comes of it, up to the end."""
        while value is not None:
            value = self._advance(value)

    def _advance(self, value: Instruction) -> Instruction | None:
        """Add what is done with `value`; the value that comes of it, None at the end."""
        follow = []
        for user in _users(value):
            if amax := _amax(user):
                self.steps.append(Step(Role.AMAX, amax, value))
            else:
                follow.append(user)
        self.ends = follow
        if value.is_root or not follow:
            return None
        if len(follow) > 1 and all(user.opcode in CUTS for user in follow):
            return None  # several parts
        if len(follow) > 1 or follow[0].operands.count(value.name) > 1:
            return self._branch(value, follow)
        return self._along(follow[0], value)

    def _along(self, at: Instruction, value: Instruction) -> Instruction | None:
        """Advance along one reader of a value."""
        if at.opcode in _MOVES_ON or (at.opcode in _MOVES_FIRST and at.operands[0] == value.name):
            in_name_alone = at.opcode in ("bitcast", "reshape") and not is_transpose(at)
            if not in_name_alone:
                self.steps.append(Step(Role.MOVE, at, value))
            return at
        if at.opcode not in ELEMENTWISE or leaves_the_layer(op_name(self._dot), at):
            return None
        step = step_of(at, value)
        # What is FP8 already, and dequantized, is the next one's operand.
        dequantizes = step.kind is Role.OUTPUT and is_fp8(value.shape.dtype)
        if step.kind is Role.OTHER or dequantizes:
            return None
        if step.other is not None and step.other.shape.size > 1 and depends(step.other, self._dot):
            return None  # as softmax subtracts its maximum
        self.steps.append(step)
        return at

    def _branch(self, value: Instruction, follow: list[Instruction]) -> Instruction | None:
        """Advance where several read `value`, or one reads it twice: along an activation of several
        operations, or along the one reader that does what a call could do.
        """
        if end := _joined(value):
            self.steps.append(Step(Role.ACTIVATION, end, value))
            return end
        activation = Step(Role.ACTIVATION, follow[0], value)
        if is_tanh_gelu(activation):  # and its gradient, or who else reads what goes into it
            self.steps.append(activation)
            self.readers += [(value, user) for user in follow]
            return None
        onward = [at for at in follow if _goes_on(at, value)]
        onward.sort(key=lambda at: not could_be_fused(step_of(at, value)))
        steps, readers = [*self.steps], [*self.readers]
        for at in onward[:1]:
            self.readers += [(value, user) for user in follow if user is not at]
            self._follow(self._along(at, value))
            if any(map(could_be_fused, self.steps[len(steps) :])):
                return None  # it is followed to its end
        self.steps, self.ends = steps, follow
        self.readers = [*readers, *((value, user) for user in follow)]
        if known := _transcendental(value):  # and its gradient, or who else reads it
            self.steps.append(Step(Role.ACTIVATION, known, value))
        return None


def _amax(i: Instruction) -> Instruction | None:
    """The reduction, where what reads a value only takes its largest (or smallest) magnitude."""
    while (i.opcode in _BEFORE_AMAX or is_square(i)) and len(_users(i)) == 1:
        i = _users(i)[0]
    if i.opcode != "reduce" or reducer(i) not in ("maximum", "minimum"):
        return None
    # Along some dimensions softmax takes a maximum too: there it must be of magnitudes, or be
    # reduced further.
    is_reduced = any(user.opcode == "reduce" for user in _users(i))
    is_positive = i.shape.size == 1 or is_magnitude(operand(i, 0))
    return i if is_positive or is_reduced else None


def _goes_on(at: Instruction, value: Instruction) -> bool:
    """Whether a reader does something that a call could do, or converts the value for that."""
    if at.opcode not in ELEMENTWISE or at.operands.count(value.name) > 1:
        return False
    step = step_of(at, value)
    return could_be_fused(step) or step.kind in (Role.OUTPUT, Role.CLAMP, Role.ALPHA)


def leaves_the_layer(dot: str, at: Instruction) -> bool:
    """Whether an operation is no part of the layer of a matmul with the op_name `dot`, by JAX's
    names: it is outside of what is differentiated, as an optimizer's arithmetic is behind a
    gradient; it makes a gradient of what the forward pass returns; or it is in a module of its own,
    as a norm beside the layer.
    """
    name = op_name(at)
    if not name:
        return False
    if is_of_a_gradient(dot) and "jvp(" not in name:
        return True
    if "transpose(jvp(" not in dot and "transpose(jvp(" in name:
        return True
    own, other = f"{layer(dot)}/", f"{layer(name)}/"
    return len(own) > 1 and len(other) > 1 and not (own.startswith(other) or other.startswith(own))


def _users(i: Instruction) -> list[Instruction]:
    """Who reads a value in its computation."""
    return i.computation.users.get(i.name, [])


def _transcendental(value: Instruction) -> Instruction | None:
    """What is computed with an exponential or the like of a value alone, and of numbers."""

    def onward(i: Instruction) -> Iterator[Instruction]:
        for user in _users(i):
            others = [user.computation[name] for name in user.operands if name != i.name]
            if user.opcode in ELEMENTWISE | LAYOUT and all(map(is_one_number, others)):
                yield user

    return next((i for i in walk([value], onward, 20) if i.opcode in KNOWN_BY), None)


def _joined(value: Instruction) -> Instruction | None:
    """Where the elementwise instructions that read `value` come together again: the end of an
    activation written with several of them. None where they do not, or another matrix comes in.
    """
    inside = {value.name}
    open_edges = len(_users(value))
    for i in value.computation.instructions[value.index + 1 :]:
        read = inside.intersection(i.operands)
        if not read:
            continue
        others = [i.computation[name] for name in i.operands if name not in inside]
        if i.opcode not in ELEMENTWISE | LAYOUT or any(_is_matrix(i, value) for i in others):
            return None
        inside.add(i.name)
        open_edges += len(_users(i)) - len(read)
        if open_edges == len(_users(i)):
            return i
    return None


def _is_matrix(i: Instruction, value: Instruction) -> bool:
    return i.shape.size == value.shape.size and i.opcode not in ("broadcast", "constant")


def along_columns(added: Instruction) -> bool:
    """Whether a broadcast vector has an element for each column (of the minor dimension)."""
    i = look_through(added)
    dims = dimensions(i) if i.opcode == "broadcast" else []
    return not dims or len(i.shape.dims) - 1 in dims
