"""FP8 calls with wrong numbers, or that the GPU refuses, and what runs more often than it has to.

Each rule takes a `Matmul` that runs as an FP8 call. Any of them may hold beside any other.
"""

import math

from fp8lens.formats import CUBLASLT
from fp8lens.hlo.origin import is_recomputed, op_name
from fp8lens.hlo.parse import Instruction
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.roles import Role, Step, number_of
from fp8lens.matmul.unfused import Makes, operations
from fp8lens.rules.facts import InFront, Matmul, is_negative, scaled_dot_of
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("no-cublaslt-kernel", lost=Lost.OUTPUT)
def no_such_kernel(m: Matmul) -> Found | None:
    """XLA makes a call for which cuBLASLt has no kernel."""
    return found_if(m.row.is_refused)


@rule("block-scales-misread", lost=Lost.SCALE, wrong=True)
def block_scales_misread(m: Matmul) -> list[Found]:
    """jax.lax.scaled_dot has scales that no instruction of the tensor core reads."""
    call = m.block_scaled
    if call is None or call.opcode != "scaled-dot" or not m.row.is_fp8:
        return []
    given = scaled_dot_of(call)
    if given is None or given.has_instruction:
        return []
    lhs, rhs = given.elements
    scales = " and ".join(sorted({*given.scales}))
    blocks = " and ".join(map(str, sorted({*given.blocks})))
    return [Found(lhs=lhs, rhs=rhs, scales=scales, blocks=blocks)]


@rule("padded-with-a-number", lost=Lost.SCALE, wrong=True)
def padded_with_a_number(m: Matmul) -> list[Found]:
    """XLA pads the FP8 array with a number that was meant for the dequantized one."""
    sides: list[Operand] = m.sides if m.is_cublaslt else []
    return [Found(side=side.side) for side in sides if side.padded]


@rule("sign-lost", lost=Lost.SCALE, wrong=True)
def sign_lost(m: Matmul) -> list[Found]:
    """XLA multiplies by a negative factor before a relu, and the program after it."""
    factors = (step.other for step in _moved_in_front(m))
    return [Found(factor=factor and factor.literal or "-s") for factor in factors]


def _moved_in_front(m: Matmul) -> list[Step]:
    """The negative factors behind a relu that XLA put in front of it."""
    kinds = [step.kind for step in m.steps]
    if not m.row.is_fp8 or m.row.epilogue != "RELU" or Role.RELU not in kinds:
        return []
    factors = [
        (n, step)
        for n, step in enumerate(m.steps)
        if step.kind in (Role.ALPHA, Role.SCALE) and step.other and is_negative(step.other)
    ]
    behind_it = [step for n, step in factors if n > kinds.index(Role.RELU)]
    # In front of its relu the call has alpha and the operands' scales; and the program's factors.
    given = [m.row.instruction.computation[name] for name in m.row.instruction.operands[2:]]
    scales = [i for i in given if i.shape.size == 1][:2]
    scales += [side.scale for side in m.sides if side.scale is not None]
    ahead = (m.row.alpha < 0) + sum(map(is_negative, scales))
    return behind_it if (ahead + len(factors) - len(behind_it)) % 2 else []


@rule("constant-moved", lost=Lost.SCALE, wrong=True)
def moved_constant(m: Matmul) -> list[Found]:
    """XLA multiplies by a constant before a bias or gelu, and the program after it."""
    kinds = [step.kind for step in m.steps]
    ends = {Role.BIAS: "BIAS" in m.row.epilogue, Role.ACTIVATION: "GELU" in m.row.epilogue}
    first = next((n for n, kind in enumerate(kinds) if ends.get(kind)), None)
    if not m.row.is_fp8 or m.row.alpha == 1 or first is None:
        return []
    ahead, behind = _constant_factors(m.steps[:first]), _constant_factors(m.steps[first + 1 :])
    if any(_is_about(number, m.row.alpha) for number in ahead):
        return []
    moved = [number for number in behind if _is_about(number, m.row.alpha)]
    return [Found(factor=f"{number:g}", step=kinds[first].noun) for number in moved[:1]]


def _constant_factors(steps: list[Step]) -> list[float]:
    return [_constant_factor(step) for step in steps if step.kind is Role.ALPHA]


def _constant_factor(step: Step) -> float:
    """The number by which a step multiplies; NaN where it is not one constant."""
    number = number_of(step.other) if step.other is not None else math.nan
    return 1 / number if step.at.opcode == "divide" and number else number


def _is_about(number: float, alpha: float) -> bool:
    """Whether a call's alpha may be a number of the program, which was rounded to its type."""
    return math.isclose(number, alpha, rel_tol=1e-2)


@rule("bias-of-codes", lost=Lost.BIAS, wrong=True)
def bias_of_codes(m: Matmul) -> list[Found]:
    """XLA adds a vector before the conversion to FP8, and the program adds it after that."""
    return [Found()] if _is_of_codes(m) else []


def _is_of_codes(m: Matmul) -> bool:
    is_moved = "output" in _in_front_of_codes(m) and "bias" in _moved_in_front_of_codes(m)
    return is_moved and "BIAS" in m.row.epilogue


@rule("no-cublaslt-bias", lost=Lost.BIAS)
def no_such_bias(m: Matmul) -> list[Found]:
    """The call adds a vector of a type that cuBLASLt does not add."""
    if _is_of_codes(m) or "BIAS" not in m.row.epilogue:
        return []
    added = (m.row.instruction.computation[name].shape for name in m.row.instruction.operands[2:])
    return [Found(bias=v.dtype) for v in added if len(v.dims) == 1 and v.dtype in CUBLASLT]


def _of_codes(step: Step) -> bool:
    """Whether a step is done to an FP8 result, behind its conversion."""
    return step.value.shape.dtype in CUBLASLT


def _in_front_of_codes(m: Matmul) -> dict[Role, Step]:
    """The steps in front of the conversion to FP8, by kind; of several the last."""
    return {step.kind: step for step in m.steps if not _of_codes(step)}


def _moved_in_front_of_codes(m: Matmul) -> set[Role]:
    """The kinds of the steps that stand behind the conversion to FP8 alone."""
    return {step.kind for step in m.steps if _of_codes(step)} - _in_front_of_codes(m).keys()


@rule("factor-of-codes", lost=Lost.SCALE)
def factor_of_codes(m: Matmul) -> list[Found]:
    """XLA multiplies by a factor before the conversion to FP8, and the program after it."""
    codes = {step for step in m.steps if step.kind in (Role.SCALE, Role.ALPHA) and _of_codes(step)}
    return [Found()] if codes - set(m.left) else []


@rule("relu-of-scaled-codes", lost=Lost.SCALE)
def relu_of_scaled_codes(m: Matmul) -> list[Found]:
    """XLA applies a relu before the result's scale, and the program after it."""
    ahead = _in_front_of_codes(m)
    if "d" not in m.row.scales or "RELU" not in m.row.epilogue:
        return []
    factors = [ahead[kind].other for kind in (Role.SCALE, Role.ALPHA) if kind in ahead]
    may_be_negative = any(_may_be_negative(factor) for factor in factors if factor)
    return [Found()] if may_be_negative and "relu" in _moved_in_front_of_codes(m) else []


def _may_be_negative(factor: Instruction) -> bool:
    return factor.opcode != "abs" and (factor.literal or "-").startswith("-")


@rule("multiplied-twice", lost=Lost.DUPLICATE)
def multiplied_twice(m: Matmul) -> Found | None:
    """XLA made two calls of one dot, one for each form of its result."""
    return Found(other=m.twin.row.name) if m.twin and m.twin.row.is_fp8 else None


@rule("quantized-twice", lost=Lost.DUPLICATE)
def quantized_twice(m: Matmul) -> list[Found]:
    """jax.checkpoint saves wide arrays, and quantizes them again for the gradients."""
    found = []
    for o in m.near:
        made = InFront(m, o.instruction, "")
        again = [i for i in operations(o.instruction) if _quantizes_again(i, _types_of(made))]
        if o.own and o.makes is Makes.MATRIX and again:
            found.append(Found(operand=made.operand, at=again[-1], kernel=o.instruction))
    return found


def _quantizes_again(i: Instruction, types: tuple[str, ...]) -> bool:
    """Whether an operation makes codes of these types, and runs once more for a gradient."""
    return i.opcode == "convert" and i.shape.dtype in types and is_recomputed(op_name(i))


def _types_of(made: InFront) -> tuple[str, ...]:
    """The types of the operand that a kernel makes; of both, where it is not known which."""
    row = made.matmul.row
    types = {"left": (row.lhs_dtype,), "right": (row.rhs_dtype,)}
    return types.get(made.side, (row.lhs_dtype, row.rhs_dtype))
