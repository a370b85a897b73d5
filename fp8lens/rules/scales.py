"""Scales that cost a kernel: in front of a matmul, and behind it."""

from fp8lens.hlo.parse import Instruction
from fp8lens.matmul.epilogue import Step
from fp8lens.matmul.operands import FP8_MAX, Operand
from fp8lens.rules.facts import Cause, InFront, Matmul, is_negative
from fp8lens.rules.rule import Found, Lost, found_if, rule

# In front of the matmul ---------------------------------------------------------------------------


@rule(
    "divided-by-scale",
    lost=Lost.SCALE,
    reason=(
        "the program divides by a scale, and the call multiplies: a kernel computes the reciprocal"
    ),
    fix="pass the reciprocal as an argument, and multiply by it",
    source="CreateF8CustomCall and InvertAndConvertScalar",
)
def division(kernel: InFront) -> Found | None:
    """The program divides by a scale, where the call multiplies."""
    return found_if(kernel.work == "scale" and "divide" in kernel.opcodes)


@rule(
    "product-of-scales",
    lost=Lost.SCALE,
    reason="a scale of the call is a product of scalars, which a kernel computes",
    fix="dequantize each operand with its own scale, or pass the product as an argument",
    source="F8ScaleD: one scalar of the program becomes one scale of the call",
)
def product_of_scales(kernel: InFront) -> Found | None:
    """A kernel multiplies scalars to make one scale of them."""
    is_product = "multiply" in kernel.opcodes and "divide" not in kernel.opcodes
    return found_if(kernel.work == "scale" and is_product)


@rule(
    "scale-not-f32",
    lost=Lost.SCALE,
    reason="a scale is not float32, and a kernel converts it",
    fix=(
        "pass scales as float32; convert them to the dequantization's type in the program, not "
        "before"
    ),
    source="CreateF8CustomCall and InvertAndConvertScalar: scales are float32",
)
def scale_not_f32(kernel: InFront) -> Found | None:
    """A kernel converts a scale to float32, which the call reads."""
    computes = {"multiply", "divide"} & kernel.opcodes
    return found_if(kernel.work == "scale" and not computes)


# Behind the matmul --------------------------------------------------------------------------------


@rule(
    "vector-scale",
    lost=Lost.SCALE,
    reason=(
        "a scale for each row or column of the result is an operation of its own: the call's "
        "scales are scalars"
    ),
    fix=(
        "use one scale for the whole tensor, or leave this kernel: it costs one pass over the "
        "result"
    ),
    source="F8ScaleD and F8ConvertD: ShapeUtil::IsScalar",
)
def vector_scale(cause: Cause) -> Found | None:
    """The result has a scale for each row or column."""
    return found_if(cause.kind == "vector scale")


@rule(
    "scales-one-by-one",
    lost=Lost.SCALE,
    reason=(
        "the result is multiplied by several scalars, one after the other, and the call takes "
        "one of them"
    ),
    fix=(
        "multiply the scalars first, d * (s * t), outside of the program or in it (then a kernel "
        "of one number does it)"
    ),
    source="F8ScaleD: one scalar of the program becomes one scale of the call",
)
def scales_one_by_one(cause: Cause) -> Found | None:
    """The result is multiplied by one scalar after the other."""
    scales = "scale" in (cause.following, *cause.kinds_ahead)
    return found_if(cause.is_factor and scales)


@rule(
    "scale-after-epilogue",
    lost=Lost.SCALE,
    reason=(
        "the result is scaled after its epilogue ({epilogue}), which only an FP8 result's scale is"
    ),
    fix="clamp and convert the result to FP8, or leave this kernel",
    source="F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
)
def scale_after_epilogue(cause: Cause) -> Found | None:
    """The result is scaled behind the call's epilogue, and is not FP8."""
    return found_if(cause.is_factor and cause.row.epilogue != "DEFAULT")


@rule(
    "scale-too-many",
    lost=Lost.SCALE,
    reason=(
        "the result is scaled once more, and the call's scales are in use or do not fit "
        "({scales} in use, epilogue {epilogue}, result {out})"
    ),
    fix="multiply the factor into one operand's scale, outside of the program",
    source=(
        "F8ScaleD: a factor of a result that is not FP8 becomes an operand's scale, if that is free"
    ),
)
def scale_too_many(cause: Cause) -> Found | None:
    """The call has no scale left to take a factor of the result."""
    return found_if(cause.is_factor)


# Wrong numbers, by errors of XLA's ----------------------------------------------------------------


@rule(
    "sign-lost",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers, by an error of XLA's: of the factor {factor} behind the relu it makes "
        "one in front of it, and relu({factor} * d) is not {factor} * relu(d)"
    ),
    fix="put jax.lax.optimization_barrier between the relu and its negative factor",
    source="F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
)
def sign_lost(m: Matmul) -> list[Found]:
    """XLA puts a negative factor in front of a relu that it stands behind."""
    factors = (step.other for step in _moved_in_front(m))
    return [Found(factor=factor and factor.literal or "-s") for factor in factors]


def _moved_in_front(m: Matmul) -> list[Step]:
    """The negative factors behind a relu that XLA put in front of it."""
    kinds = [step.kind for step in m.steps]
    if not m.row.is_fp8 or m.row.epilogue != "RELU" or "relu" not in kinds:
        return []
    factors = [
        (n, step)
        for n, step in enumerate(m.steps)
        if step.kind in ("alpha", "scale") and step.other and is_negative(step.other)
    ]
    behind_it = [step for n, step in factors if n > kinds.index("relu")]
    # In front of its relu the call has alpha and the operands' scales; and the program's factors.
    given = [m.row.instruction.computation[name] for name in m.row.instruction.operands[2:]]
    scales = [i for i in given if i.shape.size == 1][:2]
    scales += [side.scale for side in m.sides if side.scale is not None]
    ahead = (m.row.alpha < 0) + sum(map(is_negative, scales))
    return behind_it if (ahead + len(factors) - len(behind_it)) % 2 else []


def of_codes(step: Step) -> bool:
    """Whether a step is done to an FP8 result, behind its conversion."""
    return step.value.shape.dtype in FP8_MAX


def in_front_of_codes(m: Matmul) -> dict[str, Step]:
    """The steps in front of the conversion to FP8, by kind; of several the last."""
    return {step.kind: step for step in m.steps if not of_codes(step)}


def moved_in_front_of_codes(m: Matmul) -> set[str]:
    """The kinds of the steps that stand behind the conversion to FP8 alone."""
    return {step.kind for step in m.steps if of_codes(step)} - in_front_of_codes(m).keys()


@rule(
    "factor-of-codes",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers where the result saturates, by an error of XLA's: of the factor behind "
        "the conversion to FP8 it makes one in front of it"
    ),
    fix=(
        "put jax.lax.optimization_barrier between the two; or, where the call's numbers are "
        "meant, multiply a float32 or bfloat16 result by the factor, and clamp and convert last"
    ),
    source="F8ScaleD: the call may have an FP8 result",
)
def factor_of_codes(m: Matmul) -> list[Found]:
    """XLA puts a factor in front of the conversion to FP8 that it stands behind."""
    codes = {step for step in m.steps if step.kind in ("scale", "alpha") and of_codes(step)}
    return [Found()] if codes - set(m.left) else []


@rule(
    "relu-of-scaled-codes",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers for a negative scale, by an error of XLA's: of the relu behind the "
        "conversion it makes one in front of the result's scale s, and relu(d * s) is relu(d) * "
        "s for s > 0 only"
    ),
    fix=(
        "apply relu to the dot's result, in front of its scale; where that is negative, negate "
        "it and an operand's too"
    ),
    source="FuseReluActivation: the call may have an FP8 result",
)
def relu_of_scaled_codes(m: Matmul) -> list[Found]:
    """XLA puts a relu in front of a result's scale, whatever that scale's sign."""
    ahead = in_front_of_codes(m)
    if "d" not in m.row.scales or "RELU" not in m.row.epilogue:
        return []
    factors = [ahead[kind].other for kind in ("scale", "alpha") if kind in ahead]
    may_be_negative = any(_may_be_negative(factor) for factor in factors if factor)
    return [Found()] if may_be_negative and "relu" in moved_in_front_of_codes(m) else []


def _may_be_negative(factor: Instruction) -> bool:
    return factor.opcode != "abs" and (factor.literal or "-").startswith("-")


@rule(
    "padded-with-a-number",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers, by an error of XLA's: the {side} operand is padded with something other "
        "than zero after its dequantization, and XLA pads the FP8 array with that number, which "
        "it converts to FP8 and does not divide by the scale"
    ),
    fix=(
        "pad with zeros, or pad the FP8 array, with (number / scale).astype(array.dtype), and "
        "dequantize then"
    ),
    source="MatchFp8Param: a pad is exchanged with the dequantization, whatever it pads with",
)
def padded_with_a_number(m: Matmul) -> list[Found]:
    """XLA pads the FP8 array with a number that was meant for the dequantized one."""
    sides: list[Operand] = m.sides if m.is_cublaslt else []
    return [Found(side=side.side) for side in sides if side.padded]
