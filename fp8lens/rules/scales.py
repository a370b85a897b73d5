"""Scales that cost a kernel: in front of a matmul, and behind it."""

import itertools
import math
import re

from fp8lens.formats import CUBLASLT
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import results
from fp8lens.hlo.text import size
from fp8lens.hlo.values import operand, reducer
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.roles import Role, Step, is_added_up, number_of, times_added
from fp8lens.rules.facts import Cause, InFront, Matmul, is_negative, scaled_dot_of
from fp8lens.rules.rule import Found, Lost, found_if, rule

# In front of the matmul ---------------------------------------------------------------------------


@rule(
    "negated-operand",
    lost=Lost.SCALE,
    reason="a kernel negates the {side} operand's{name} FP8 array",
    fix="negate the scale in its place: pass -scale as an argument",
    source="CreateF8CustomCall: a scale may be negative, and the array is read as it is",
)
def negated_operand(kernel: InFront) -> Found | None:
    """The FP8 array of an operand is negated before the call.

    The call reads the array as it is in memory, so a kernel writes the negated array first. If the
    scale has the sign instead, nothing is written. A negation of the scale in the program is a
    kernel for one number, so pass the negative scale.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(-a, b, a_scale, b_scale)

    Keeps it:

        def layer(a, b, minus_a_scale: "f32[]", b_scale):
            return scaled_dot(a, b, minus_a_scale, b_scale)
    """
    is_array = kernel.work == "scale" and kernel.kernel.shape.size > 1
    return found_if(is_array, side=kernel.side, name=kernel.argument)


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
    """The program divides by a scale, but the call multiplies.

    The call multiplies each operand by its scale. XLA's rewriter also takes a division by a scalar:
    it computes 1 / scale before the call, and passes that. This is a kernel that computes one
    number, and launching it costs more time than the division. To avoid the kernel, compute the
    reciprocal together with the scale, and pass it to the program as an argument.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            a, b = a.astype(f32) / a_scale, b.astype(f32) / b_scale
            return jax.lax.dot(a, b.T)

    Keeps it:

        def layer(a, b, a_inverse: "f32[]", b_inverse: "f32[]"):  # 1 / a_scale and 1 / b_scale
            a, b = a.astype(f32) * a_inverse, b.astype(f32) * b_inverse
            return jax.lax.dot(a, b.T)
    """
    return found_if(kernel.work == "scale" and "divide" in kernel.opcodes)


@rule(
    "product-of-scales",
    lost=Lost.SCALE,
    reason="a scale of the call is a product of scalars, which a kernel computes",
    fix="dequantize each operand with its own scale, or pass the product as an argument",
    source="F8ScaleD: one scalar of the program becomes one scale of the call",
)
def product_of_scales(kernel: InFront) -> Found | None:
    """A kernel multiplies scalars to make one scale of them.

    The call reads each of its scales as one number from memory. If the program multiplies the
    operands' scales with each other and scales the result by the product, a kernel has to compute
    that product first. The call has a scale for each operand, and multiplies by both itself: if
    each operand is dequantized with its own scale, there is no product to compute.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = jax.lax.dot(a, b.T, preferred_element_type=f32)
            return d * (a_scale * b_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    is_product = "multiply" in kernel.opcodes and "divide" not in kernel.opcodes
    return found_if(kernel.work == "scale" and is_product)


@rule(
    "scale-of-one-element",
    lost=Lost.SCALE,
    reason="a scale has the shape {shape}, and the call takes a scalar: a kernel makes one of it",
    fix="pass the scale with the shape f32[], or dequantize in float32",
    source="CreateF8CustomCall and InvertAndConvertScalar: scales are scalars",
)
def scale_of_one_element(kernel: InFront) -> Found | None:
    """A scale is an array of one element, not a scalar.

    The call reads a scale as a scalar. XLA gives an array of one element the shape of a scalar for
    free. If the program also converts it, in order to dequantize in bfloat16, the conversion stands
    between the array and the scalar and stays a kernel.

    Loses it:

        def layer(a, b, a_scale: "f32[1]", b_scale: "f32[1]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale, bf16)
    """
    shapes = [operand(kernel.kernel, n).shape for n in range(len(kernel.kernel.operands))]
    odd = [shape.brief for shape in shapes if shape.dtype == "f32" and shape.dims]
    is_alone = kernel.work == "scale" and len(shapes) == 1
    return found_if(is_alone and odd and shapes[0].size == 1, shape=", ".join(odd))


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
    """A kernel converts a scale to float32, which the call reads.

    cuBLASLt reads the scales of FP8 operands as float32. If a scale has another type, XLA converts
    it in a kernel before the call. If the program has a float32 scale and converts it to bfloat16
    in order to dequantize in bfloat16, XLA drops that conversion and passes the float32 scale.

    Loses it:

        def layer(a, b, a_scale: "bf16[]", b_scale: "bf16[]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16)

    Keeps it:

        def layer(a, b, a_scale, b_scale):  # scaled_dot converts them to bfloat16
            return scaled_dot(a, b, a_scale, b_scale, bf16)
    """
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
    """The result has a scale for each row or column.

    XLA's call has scalar scales only: one for each operand, and one for an FP8 result. XLA's
    rewriter checks the shape of a scale, and leaves a multiplication by a vector outside. A kernel
    then reads the whole result and writes it again. If the magnitudes of the rows or columns differ
    much, one scale for each keeps more accuracy, so the kernel can be worth its time.

    Loses it:

        def layer(a, b, b_scales: "f32[128]"):  # a scale for each column
            return jax.lax.dot(a, b.T, preferred_element_type=f32) * b_scales

    Keeps it:

        def layer(a, b, b_scale):
            return jax.lax.dot(a, b.T, preferred_element_type=f32) * b_scale
    """
    return found_if(cause.kind is Role.VECTOR_SCALE)


@rule(
    "scales-one-by-one",
    lost=Lost.SCALE,
    reason=(
        "the result is multiplied by several scalars, one after the other, and the call takes "
        "one at most"
    ),
    fix=(
        "multiply the scalars first, d * (s * t), outside of the program; in the program a kernel "
        "multiplies the two numbers, which is small"
    ),
    source="F8ScaleD: one scalar of the program becomes one scale of the call",
)
def scales_one_by_one(cause: Cause) -> Found | None:
    """The result is multiplied by one scalar after the other.

    If the left operand has no scale, XLA's rewriter passes a factor of the result in its place.
    Then the operand has a scale, so a second factor stays outside. XLA does not multiply the two
    factors with each other: d * s * t and d * (s * t) may be rounded differently.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return jax.lax.dot(a, b.T, preferred_element_type=f32) * a_scale * b_scale

    Keeps it:

        def layer(a, b, ab_scale: "f32[]"):  # ab_scale is a_scale * b_scale
            return jax.lax.dot(a, b.T, preferred_element_type=f32) * ab_scale
    """
    scales = Role.SCALE in (cause.following, *cause.kinds_ahead)
    return found_if(cause.is_factor and scales)


@rule(
    "added-several-times",
    lost=Lost.SCALE,
    reason="the result is added to itself, {times} times d, which XLA does not take for a factor",
    fix=(
        "if nothing else reads d, multiply by the number in its place, {times} * d: the call takes "
        "a constant factor; else leave this kernel"
    ),
    source="HandleMultiply takes a constant factor; no pass makes one of additions",
)
def added_several_times(cause: Cause) -> Found | None:
    """The program computes d + d + d.

    A call multiplies its result by a constant at no cost. XLA's rewriter finds a multiplication by
    a constant, and no sum of equal terms. In floating point three times d and d + d + d may differ
    in the last digit. The call multiplies before it adds anything or applies an activation: for a
    factor behind these see late-factor.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return d + d + d

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return 3 * scaled_dot(a, b, a_scale, b_scale)
    """
    is_sum = cause.kind is Role.ALPHA and is_added_up(cause.first)
    if not is_sum or _before_factor(cause):
        return None
    return Found(times=str(times_added(cause.first)))


def _before_factor(cause: Cause) -> set[str]:
    """What is done with the result before the factor."""
    return {*cause.kinds_ahead} - {Role.MOVE, Role.AMAX}


@rule(
    "late-factor",
    lost=Lost.SCALE,
    reason=(
        "the result is multiplied by a constant, or added to itself, after its {step}, and the "
        "call takes a constant factor only of the dot's own result"
    ),
    fix="multiply the dot's own result by {number} in its place{further}",
    source="HandleMultiply: epilogue DEFAULT, and beta 0",
)
def late_factor(cause: Cause) -> Found | None:
    """A constant factor stands behind a relu, a bias or a matrix.

    The call multiplies the product by its scales and by a constant, then adds, then applies the
    activation. XLA's rewriter takes a constant factor as long as the call does nothing else. 2 *
    relu(d) is relu(2 * d), because the factor is positive: in this order it costs no kernel. A bias
    or a matrix that is added in between must be multiplied too. To do that in the program is a
    kernel again, so pass it with the factor in it. The XLA of JAX 0.10 takes the factor behind a
    bias and an activation too, which is an error: see constant-moved.

    Loses it:

        def layer(a, b, a_scale, b_scale, c):
            return 2 * (scaled_dot(a, b, a_scale, b_scale, bf16) + c)

    Keeps it:

        def layer(a, b, a_scale, b_scale, c):  # c is multiplied by 2 already
            return 2 * scaled_dot(a, b, a_scale, b_scale, bf16) + c
    """
    ahead = _before_factor(cause)
    factor = _constant_factor(cause.first) if cause.kind is Role.ALPHA else math.nan
    is_possible = ahead and ahead <= {Role.RELU, Role.BIAS, Role.MATRIX_BIAS}
    if not is_possible or not 0 < factor < math.inf or cause.is_read_twice:
        return None
    number, further = f"{factor:g}", ""
    if Role.RELU in ahead:
        further = f", before the relu: relu({number} * d) is {number} * relu(d)"
    if ahead != {Role.RELU}:
        further += f"; and multiply what is added by {number} too, outside of the program"
    step = Role.RELU if Role.RELU in ahead else Role.BIAS
    return Found(step=step, number=number, further=further)


def _constant_factor(step: Step) -> float:
    """The number by which a step multiplies, where that is a constant; NaN where it is none."""
    if is_added_up(step):
        return times_added(step)
    number = number_of(step.other) if step.other is not None else math.nan
    return 1 / number if step.at.opcode == "divide" and number else number


@rule(
    "scale-after-epilogue",
    lost=Lost.SCALE,
    reason=(
        "the result is scaled after its epilogue ({epilogue}), and the call does that only to a "
        "result that it then writes as FP8"
    ),
    fix=(
        "if the epilogue is a bias, or a relu and the factor is positive, multiply the factor into "
        "an operand's scale, and into the bias, outside of the program; or clamp and convert the "
        "result to FP8; or leave this kernel, as where the result is read without the factor too"
    ),
    source="F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
)
def scale_after_epilogue(cause: Cause) -> Found | None:
    """The result is scaled after the call's epilogue, and is not FP8.

    The call multiplies the product by the operands' scales, then adds the bias and applies the
    activation. It has one more scale after these, but only if it writes FP8. XLA's rewriter passes
    other factors of the result in place of the left operand's scale. Such a factor multiplies
    before the bias and the activation, so the rewriter does this only in calls with no epilogue, or
    with a relu.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale)) * d_scale

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(gelu(scaled_dot(a, b, a_scale, b_scale)), d_scale)
    """
    return found_if(cause.is_factor and cause.row.epilogue != "DEFAULT")


@rule(
    "scale-too-many",
    lost=Lost.SCALE,
    reason=(
        "the result is multiplied by a scale, and is not converted to FP8 directly after it: the "
        "call takes such a scale only in place of the left operand's, if that operand has none, no "
        "matrix is added before, and nothing else reads the result (scales in use: {scales}; beta "
        "{beta})"
    ),
    fix=(
        "multiply the factor into one operand's scale, outside of the program, and into a matrix "
        "that is added before it; if something else reads the result without the factor, leave "
        "this kernel"
    ),
    source=(
        "F8ScaleD: a factor of a result that is not FP8 becomes the left operand's scale, if that "
        "is free"
    ),
)
def scale_too_many(cause: Cause) -> Found | None:
    """The result is multiplied by a scale, and the call has no place for it.

    If cuBLASLt does not write FP8, it multiplies the result by the operands' scales alone. A factor
    of that result can still be passed in place of an operand's scale. XLA's rewriter uses the left
    operand's scale for this, if the left operand has none of its own. It does not use the right
    operand's, and it does not multiply a factor with an existing scale.

    A factor that is a constant of the program, such as 0.5, is not a scale: the call takes it as
    alpha.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return scaled_dot(a, b, a_scale, b_scale) * d_scale

    Keeps it:

        def layer(a, b, a_scale, bd_scale: "f32[]"):  # bd_scale is b_scale * d_scale
            return scaled_dot(a, b, a_scale, bd_scale)
    """
    return found_if(cause.is_factor)


# Wrong numbers, by errors of XLA's ----------------------------------------------------------------


@rule(
    "sign-lost",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers, by an error of XLA's: it multiplies by the factor {factor} before the "
        "relu, not after it, and relu({factor} * d) is not {factor} * relu(d)"
    ),
    fix="put jax.lax.optimization_barrier between the relu and its negative factor",
    source="F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
    wrong=True,
)
def sign_lost(m: Matmul) -> list[Found]:
    """XLA multiplies by a negative factor before a relu, and the program after it.

    XLA's rewriter passes a factor of the result in place of the left operand's scale, if that
    operand has none. The call multiplies by that scale before it applies the relu. This is the same
    number only if the factor is not negative, which the rewriter does not check. With a negative
    factor the compiled program returns other numbers than the program that was written.

    A barrier keeps the factor outside of the call: a kernel multiplies, see barrier-first. If both
    operands have scales and the result is FP8, no kernel is needed: then the call has a scale after
    the relu.

    Loses it:

        def layer(a, b, d_scale):
            d = relu(jax.lax.dot(a, b.T, preferred_element_type=f32))
            return d * -d_scale

    Keeps it:

        def layer(a, b, d_scale):
            d = relu(jax.lax.dot(a, b.T, preferred_element_type=f32))
            return jax.lax.optimization_barrier(d) * -d_scale
    """
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


@rule(
    "constant-moved",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers, by an error of XLA's: it multiplies by the constant {factor} before the "
        "{step}, and the program multiplies after it"
    ),
    fix=(
        "put jax.lax.optimization_barrier between the {step} and the factor, or use JAX 0.11 or "
        "later"
    ),
    source="HandleMultiply in the XLA of JAX 0.10: it does not check the call's epilogue",
    wrong=True,
)
def moved_constant(m: Matmul) -> list[Found]:
    """XLA multiplies by a constant before a bias or gelu, and the program after it.

    A call multiplies by a constant, alpha, before it adds a bias and before it applies an
    activation. XLA's rewriter may make a constant factor of the result alpha only if the call does
    nothing else yet. The XLA of JAX 0.10 does so in any case: it computes 3 * d + bias for 3 * (d +
    bias), and gelu(2 * d) for 2 * gelu(d). A relu and a positive factor can change places, so there
    the numbers are right.

    Newer releases leave such a factor to a kernel, see late-factor. Therefore this page has no
    program that breaks the rule.
    """
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


def _is_about(number: float, alpha: float) -> bool:
    """Whether a call's alpha may be a number of the program, which was rounded to its type."""
    return math.isclose(number, alpha, rel_tol=1e-2)


def of_codes(step: Step) -> bool:
    """Whether a step is done to an FP8 result, behind its conversion."""
    return step.value.shape.dtype in CUBLASLT


def in_front_of_codes(m: Matmul) -> dict[Role, Step]:
    """The steps in front of the conversion to FP8, by kind; of several the last."""
    return {step.kind: step for step in m.steps if not of_codes(step)}


def moved_in_front_of_codes(m: Matmul) -> set[Role]:
    """The kinds of the steps that stand behind the conversion to FP8 alone."""
    return {step.kind for step in m.steps if of_codes(step)} - in_front_of_codes(m).keys()


@rule(
    "factor-of-codes",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers where the result saturates, by an error of XLA's: it multiplies by the "
        "factor before the conversion to FP8, not after it"
    ),
    fix=(
        "put jax.lax.optimization_barrier between the two; or, where the call's numbers are "
        "meant, multiply a float32 or bfloat16 result by the factor, and clamp and convert last"
    ),
    source="F8ScaleD: the call may have an FP8 result",
)
def factor_of_codes(m: Matmul) -> list[Found]:
    """XLA multiplies by a factor before the conversion to FP8, and the program after it.

    XLA's rewriter takes the conversion into the call first. When it then finds a multiplication of
    the call's FP8 result, it passes the factor as alpha or as a scale, and does not check whether
    the call already converts. The call multiplies before it saturates. If the scaled product is
    1000 and the factor 0.5, the program as written saturates at 448 and returns 224. The call
    halves 1000 first, saturates, and returns 448.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            q = quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
            return q * jnp.array(0.5, e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):  # if the call's numbers are meant
            return quantize(scaled_dot(a, b, a_scale, b_scale) * 0.5, d_scale)
    """
    codes = {step for step in m.steps if step.kind in (Role.SCALE, Role.ALPHA) and of_codes(step)}
    return [Found()] if codes - set(m.left) else []


@rule(
    "relu-of-scaled-codes",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers for a negative scale, by an error of XLA's: it applies the relu before the "
        "result's scale s, not after the conversion, and relu(d * s) is relu(d) * s for s >= 0 "
        "only"
    ),
    fix=(
        "apply relu to the dot's result, before its scale; if the scale is negative, negate "
        "it and one operand's scale"
    ),
    source="FuseReluActivation: the call may have an FP8 result",
)
def relu_of_scaled_codes(m: Matmul) -> list[Found]:
    """XLA applies a relu before the result's scale, and the program after it.

    XLA's rewriter takes the scale, the clamp and the conversion into the call first. When it then
    finds a relu of the call's FP8 result, it takes that into the call as the epilogue, and does not
    check whether the call already converts. The call applies its epilogue before the result's
    scale. This is the same number only if the scale is not negative. The compiler cannot know the
    sign of an argument. So fp8lens gives this reason unless the scale is an absolute value or a
    positive constant.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return relu(quantize(scaled_dot(a, b, a_scale, b_scale), d_scale))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(relu(scaled_dot(a, b, a_scale, b_scale)), d_scale)
    """
    ahead = in_front_of_codes(m)
    if "d" not in m.row.scales or "RELU" not in m.row.epilogue:
        return []
    factors = [ahead[kind].other for kind in (Role.SCALE, Role.ALPHA) if kind in ahead]
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
    wrong=True,
)
def padded_with_a_number(m: Matmul) -> list[Found]:
    """XLA pads the FP8 array with a number that was meant for the dequantized one.

    XLA's rewriter looks through a pad for the FP8 array behind an operand. It then pads that array
    in place of the dequantized one, and the call multiplies by the scale afterwards. Zero stays
    zero. Another number is converted to FP8, and then multiplied by the scale like the rest. So the
    compiled program computes with another number than the program that was written.

    Loses it:

        def layer(a: "f8e4m3fn[64,240]", b, a_scale, b_scale):
            a = jnp.pad(dequantize(a, a_scale), ((0, 0), (0, 16)), constant_values=1)
            return jax.lax.dot(a, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a: "f8e4m3fn[64,240]", b, a_scale, b_scale):
            one = (1 / a_scale).astype(e4m3)
            a = jnp.pad(a, ((0, 0), (0, 16)), constant_values=one)
            return scaled_dot(a, b, a_scale, b_scale)
    """
    sides: list[Operand] = m.sides if m.is_cublaslt else []
    return [Found(side=side.side) for side in sides if side.padded]


@rule(
    "tiles-of-k",
    lost=Lost.SCALE,
    reason=(
        "K is cut into {tiles} tiles with scales of their own: the call writes a product for each "
        "({written}), and a kernel scales and adds them"
    ),
    fix="use one scale for the whole of K, or leave this kernel: no call on {chip} adds tiles up",
    source="cuBLASLt: a call's scales are one number for each operand",
)
def tiles_of_k(m: Matmul) -> Found | None:
    """The products of several tiles of K are scaled one by one, and then added.

    A tile of K with a scale of its own follows large numbers more closely. cuBLASLt takes one scale
    for a whole operand, so the dot becomes a batch with one matmul for each tile. The call writes
    all products, usually in f32. A kernel reads them, multiplies each by its scales, and adds them
    up. So as many results as there are tiles are written and read once more.

    Loses it:

        def layer(a, b, a_scales: "f32[64,2]", b_scales: "f32[128,2]"):
            tiles_of_a, tiles_of_b = a.reshape(64, 2, 128), b.reshape(128, 2, 128)
            d = jnp.einsum("mtk,ntk->tmn", tiles_of_a, tiles_of_b, preferred_element_type=f32)
            return (d * a_scales.T[:, :, None] * b_scales.T[:, None, :]).sum(0)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    tiles = _tiles(m)
    written = sum(shape.nbytes for shape in results(m.row.instruction))
    return found_if(tiles > 1, tiles=tiles, written=size(written))


def _tiles(m: Matmul) -> int:
    """How many products of a batch are scaled by an array, and then added; 0 where they are not."""
    if m.dot is None or m.dot.opcode != "dot":
        return 0
    scales = [step for step in m.steps if step.kind is not Role.AMAX]
    factors = (Role.ALPHA, Role.SCALE, Role.VECTOR_SCALE)
    scales = list(itertools.takewhile(lambda step: step.kind in factors, scales))
    if not any(step.kind is Role.VECTOR_SCALE for step in scales):
        return 0
    return products_added(m.dot, scales[-1].at)


def products_added(dot: Instruction, value: Instruction) -> int:
    """How many products of a batch are added up, in a value that is made of a dot's result; 0 where
    they are not.
    """
    batch = re.findall(r"\d+", dot.attributes.get("lhs_batch_dims", ""))
    for reader in value.computation.users.get(value.name, ()):
        summed = re.findall(r"\d+", reader.attributes.get("dimensions", ""))
        is_sum = reader.opcode == "reduce" and reducer(reader) == "add"
        # A dot's result has its batch first.
        if is_sum and summed and {*map(int, summed)} <= {*range(len(batch))}:
            return math.prod(dot.shape.dims[int(d)] for d in summed)
    return 0


@rule(
    "block-scales-misread",
    lost=Lost.SCALE,
    reason=(
        "wrong numbers, by an error of XLA's: its Triton compiles {lhs} and {rhs}, with scales in "
        "{scales} for {blocks} elements, to an instruction that reads other scales"
    ),
    fix=(
        "use scales in E8M0 for each 32 elements, of FP4 also in E4M3 for each 16; or turn Triton "
        "off with gemm='cublaslt' (XLA_FLAGS=--xla_gpu_enable_triton_gemm=false), which dequantizes"
    ),
    source="the kernel's PTX: kind::mxf8f6f4 has one scale in E8M0 for 32 elements",
    wrong=True,
)
def block_scales_misread(m: Matmul) -> list[Found]:
    """jax.lax.scaled_dot has scales that no instruction of the tensor core reads.

    A Blackwell's tensor core multiplies FP8 with a power of two, in E8M0, for each 32 elements. For
    two FP4 operands it has two more forms: 16 elements share a scale in E8M0 or in E4M3. XLA's
    Triton does not check this. It compiles other scales to the same instruction without a
    conversion, so that a byte of E4M3 is read as an exponent, or a scale for 16 as one for 32. The
    program compiles to a fast kernel with wrong results. For a Hopper XLA converts the scales.

    Compiled with: target="B200", gemm="auto"

    Loses it:

        def layer(
            a: "f8e4m3fn[128,256]",
            b: "f8e4m3fn[128,256]",
            a_scales: "f8e4m3fn[128,8]",
            b_scales: "f8e4m3fn[128,8]",
        ):
            return jax.lax.scaled_dot(a, b.T, lhs_scale=a_scales, rhs_scale=b_scales.T)

    Compiled with: target="B200", gemm="auto"

    Keeps it:

        def layer(
            a: "f8e4m3fn[128,256]",
            b: "f8e4m3fn[128,256]",
            a_scales: "f8e8m0fnu[128,8]",
            b_scales: "f8e8m0fnu[128,8]",
        ):
            return jax.lax.scaled_dot(a, b.T, lhs_scale=a_scales, rhs_scale=b_scales.T)
    """
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
