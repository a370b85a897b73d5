"""Activations that stay outside of the call."""

from fp8lens.formats import CUBLASLT, FORMATS
from fp8lens.hlo.origin import op_name
from fp8lens.hlo.values import is_zero
from fp8lens.matmul.roles import (
    Role,
    Step,
    clamp_bounds,
    computes_with_bits,
    is_selected_relu,
    is_tanh_gelu,
    is_transposed_inside,
    selected_bounds,
)
from fp8lens.rules.facts import (
    Cause,
    Conversion,
    InFront,
    is_behind_gradient,
    is_of_a_gradient,
)
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "activation-after-scale",
    lost=Lost.EPILOGUE,
    reason="the {step} is applied to a scaled result, and the call applies it before it scales",
    fix=(
        "multiply the factor into an operand's scale (a_scale), outside of the program; or scale "
        "after relu: relu(x * s) is relu(x) * s for s > 0"
    ),
    source="HandleMaximum and HandleMultiply: the activation must read the call itself",
)
def activation_after_scale(cause: Cause) -> Found | None:
    """The activation is applied to the scaled result, and the call scales last.

    The call multiplies the product by the operands' scales, adds, and applies the activation. It
    multiplies by a scale of the result after that, and only if it writes FP8. XLA's rewriter takes
    an activation that reads the call's result directly. Here a multiplication stands between them,
    and both operands already have scales.

    relu(d * s) is relu(d) * s if s is not negative, so a relu can be applied first. gelu cannot: to
    apply the factor before gelu, multiply it into an operand's scale.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, a_scale, b_scale) * d_scale)
            return jnp.clip(d, -448, 448).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, a_scale, b_scale))
            return jnp.clip(d * d_scale, -448, 448).astype(e4m3)
    """
    if isinstance(cause, Conversion):  # a clamp from 0 on is a relu
        is_relu = cause.is_relu_too and cause.bounds[1] == cause.best
        return found_if(is_relu and cause.kinds[2:], step=Role.RELU)
    if not cause.is_factor or cause.is_another_scale or cause.activates_otherwise:
        return None
    return found_if(cause.following in (Role.RELU, Role.ACTIVATION), step=cause.following)


@rule(
    "relu-in-clamp",
    lost=Lost.EPILOGUE,
    reason=(
        "the clamp's bounds are 0 and {best}, a relu and the conversion's clamp in one, and XLA "
        "recognizes only the two separately"
    ),
    fix=(
        "relu, then clamp to plus and minus jnp.finfo({jax_to}).max: jnp.clip(jax.nn.relu(d), "
        "-{best}, {best}).astype({jax_to})"
    ),
    source="HandleMaximum matches relu only; HandleConvert and F8ConvertD the whole range",
)
def relu_in_clamp(conversion: Conversion) -> Found | None:
    """One clamp, from 0 to the format's largest number, is relu and saturation in one.

    The call has a relu, and it saturates if it converts to FP8. XLA's rewriter looks for these two
    separately: a maximum with 0, and a clamp to plus and minus the format's largest number. Before
    that, XLA joins a maximum with 0 and a minimum with the largest number into one clamp. XLA does
    not join a relu and a clamp to the whole range.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return jnp.minimum(relu(d), 448).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return jnp.clip(relu(d), -448, 448).astype(e4m3)
    """
    is_relu = conversion.is_relu_too and conversion.bounds[1] == conversion.best
    fields = conversion.fields | {"jax_to": f"jnp.{FORMATS[conversion.to].jax}"}
    return found_if(is_relu and not conversion.kinds[2:], **fields)


@rule(
    "activation-and-reader",
    lost=Lost.EPILOGUE,
    reason=(
        "the input of the {step} is read by something else as well, as its gradient does, and a "
        "call has one result"
    ),
    fix=(
        "use relu, and read relu's result everywhere, also for an amax; for a gradient, write a "
        "jax.custom_vjp that reads relu's result through jax.lax.optimization_barrier; for gelu, "
        "leave this kernel: no FP8 call returns gelu's input beside its result"
    ),
    source="FuseReluActivation and FuseGeluActivation: the activation must be the only reader",
)
def activation_and_reader(cause: Cause) -> Found | None:
    """The activation's input is read by something else too, and a call has one result.

    A call with an activation returns the activation's result, and not its input. If something else
    reads the input, the call has to return that. A gradient reads it: JAX computes the gradients of
    relu, gelu and silu from the input. XLA's rewriter therefore takes a relu only if nothing else
    reads the call's result. For gelu it has a call that returns the input as well, but not with FP8
    operands: if a program returns gelu(d) and d, XLA's compiler ends in an error that names
    has_aux_output.

    The gradient of relu can be computed from relu's result. The barrier keeps XLA from replacing
    relu(d) > 0 by d > 0, which reads the input again. The input of gelu cannot be computed from its
    result, so the kernel stays.

    Loses it:

        def layer(a, b, a_scale, b_scale, g: "f32[64,128]"):  # and relu's gradient, for g
            y, pull = jax.vjp(relu, scaled_dot(a, b, a_scale, b_scale))
            return y, pull(g)[0]

    Keeps it:

        def layer(a, b, a_scale, b_scale, g: "f32[64,128]"):
            y = relu(scaled_dot(a, b, a_scale, b_scale))
            return y, jnp.where(jax.lax.optimization_barrier(y) > 0, g, 0)
    """
    negates = cause.kind is Role.NEGATE and not cause.activates_otherwise
    is_gelu = cause.kind is Role.ACTIVATION and is_tanh_gelu(cause.first)
    is_activation = negates or is_gelu or cause.kind is Role.RELU
    return found_if(is_activation and cause.is_read_twice, step=cause.kind)


@rule(
    "late-relu",
    lost=Lost.EPILOGUE,
    reason="relu stands where the call cannot take it (its epilogue is {epilogue})",
    fix="apply relu directly to the dot's result, or to that plus a bias vector",
    source="FuseReluActivation: epilogue DEFAULT or BIAS",
)
def late_relu(cause: Cause) -> Found | None:
    """The relu comes after something that the call does last.

    cuBLASLt has one activation in its epilogue, after the bias. XLA's rewriter takes a relu that
    reads such a call directly, if the call has no activation yet. Without the relu below, the
    layer is another function. If the model needs both activations, leave the relu's kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return relu(gelu(scaled_dot(a, b, a_scale, b_scale)))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale))
    """
    return found_if(cause.kind is Role.RELU and not _is_of_codes(cause))


def _is_of_codes(cause: Cause) -> bool:
    return cause.reads in CUBLASLT and cause.row.epilogue != "GELU"


@rule(
    "relu-of-codes",
    lost=Lost.EPILOGUE,
    reason=(
        "the relu is applied after the conversion to FP8, and there XLA takes it only into a call "
        "that has no relu and no amax"
    ),
    fix=(
        "apply relu once, to the dot's result or to that plus a bias vector, and take the amax "
        "of what it returns"
    ),
    source="FuseReluActivation: epilogue DEFAULT or BIAS",
)
def relu_of_codes(cause: Cause) -> Found | None:
    """The relu is applied to the FP8 codes, and the call already has a relu or an amax.

    The call applies relu before it converts to FP8. XLA's rewriter moves a relu of the codes into a
    call that has no relu and no amax yet. If the result's scale is negative, that gives wrong
    numbers: see relu-of-scaled-codes. If the call has a relu or an amax, this relu stays outside,
    in a kernel that reads and writes the codes.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return relu(quantize(d, d_scale)), jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, a_scale, b_scale))
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(cause.kind is Role.RELU and _is_of_codes(cause))


@rule(
    "compared-only",
    lost=Lost.EPILOGUE,
    reason=(
        "the result is only compared with a number, as in the gradient of a relu, and no call "
        "writes the outcome of a comparison"
    ),
    fix="leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def compared(cause: Cause) -> Found | None:
    """The result is compared with a number, and nothing else reads it.

    The gradient of a relu is 1 where the relu's input is positive, and 0 elsewhere. If a backward
    pass computes that input again, it needs only the comparison. A call writes numbers, so it
    writes the whole product, and a kernel compares it. There is no fixed program: leave this
    kernel.

    Loses it:

        def is_positive(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale) > 0
    """
    is_compared = {i.opcode for i in cause.users} == {"compare"}
    return found_if(cause.kind is Role.ACTIVATION and is_compared)


@rule(
    "activation-derivative",
    lost=Lost.EPILOGUE,
    reason="the result is put through the derivative of an activation, which no call computes",
    fix="leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def derivative(cause: Cause) -> Found | None:
    """An activation's derivative is applied to the result, as in a backward pass.

    A gradient of an activation is the derivative of the activation at its input. If a backward pass
    computes that input again with a matmul, the derivative follows the matmul. XLA's rewriter
    recognizes relu and gelu after a call, but no derivative. There is no fixed program: leave this
    kernel.

    Loses it:

        def derivative(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return jax.grad(lambda d: gelu(d).sum())(d)
    """
    is_derivative = is_of_a_gradient(op_name(cause.first.at))
    return found_if(cause.kind is Role.ACTIVATION and is_derivative)


@rule(
    "gradient-update",
    lost=Lost.EPILOGUE,
    reason=(
        "the result is a gradient, and the program computes with it outside of what it "
        "differentiates, as an optimizer does"
    ),
    fix=(
        "leave this kernel: an optimizer reads and writes its own arrays in any case; if it only "
        "adds the gradient, times a number, to an array, multiply that number into an operand's "
        "scale: then the call can add"
    ),
    source="HandleAdd and HandleMultiply: a call scales its operands and adds one matrix",
)
def gradient_update(cause: Cause | InFront) -> Found | None:
    """An optimizer reads a weight's gradient.

    A step of Adam computes with the gradient, its square, two moments and the weight. No call does
    that: the optimizer's kernels read the gradient and all these arrays, and write some of them.
    What they add is not a bias of the matmul. A step of plain SGD adds the gradient, times a
    number, to the weight. A call can do this if the number is part of an operand's scale.

    `fp8lens` recognizes a gradient by JAX's names. It cannot distinguish an optimizer from other
    code that follows jax.grad, such as code that clips gradients or adds them up.

    Loses it:

        def step(w: "f32[128,256]", a, g: "f8e5m2[64,128]", a_scale, g_scale: "f32[]"):
            _, pull = jax.vjp(lambda w: dequantize(a, a_scale) @ w.T, w)
            (gradient,) = pull(dequantize(g, g_scale))
            return w - 0.1 * gradient

    Keeps it:

        def step(w: "f32[128,256]", a, g: "f8e5m2[64,128]", a_scale, g_scale: "f32[]"):
            _, pull = jax.vjp(lambda w: dequantize(a, a_scale) @ w.T, w)
            (update,) = pull(dequantize(g, -0.1 * g_scale))
            return w + update
    """
    if isinstance(cause, InFront):
        m = cause.matmul
        added = [step for step in m.steps if step.kind in (Role.BIAS, Role.MATRIX_BIAS)]
        is_added = any(is_behind_gradient(m, step) for step in added)
        return found_if(cause.work == "bias" and is_added)
    return found_if(cause.is_update)


@rule(
    "negated-result",
    reason="the result is negated{how}, and a call can change the sign only by its scales",
    fix="negate {scales} instead; where there is no such scale, multiply by -1 in its place",
    source="HandleMaximum, HandleMultiply and HandleConvert match no negation",
)
def negated(cause: Cause) -> Found | None:
    """The result is negated, and a call can negate only by a negative scale.

    A negation is an instruction of its own in HLO, and XLA's rewriter does not look for it. The
    negation stays outside, and so does everything after it. A call multiplies by its scales, and a
    scale may be negative. An operand's scale negates the product before the bias and the
    activation. An FP8 result's scale negates the activation's result.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return relu(-scaled_dot(a, b, a_scale, b_scale))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return relu(scaled_dot(a, b, -a_scale, b_scale))
    """
    sign = _Sign(cause)
    if not _is_negated(cause) or sign.is_last:
        return None
    how = ""
    if sign.done:
        how = f" after its {sign.done}"
    elif sign.to_come:
        how = f" before its {sign.to_come}"
    lost = Lost.SCALE
    if sign.to_come:
        lost = Lost.EPILOGUE
    elif sign.to_fp8:
        lost = Lost.OUTPUT
    return Found(how=how, scales=sign.places, lost=lost)


@rule(
    "negated-last",
    lost=Lost.SCALE,
    reason=(
        "the result is negated after its {step}, and there a call can change the sign only by "
        "the scale of an FP8 result"
    ),
    fix="clamp and convert the result to FP8, with a negative scale; or leave this kernel",
    source="HandleMaximum, HandleMultiply and HandleConvert match no negation",
)
def negated_last(cause: Cause) -> Found | None:
    """The result is negated after its activation, and only an FP8 result has a scale there.

    The sign cannot be part of an operand's scale: -relu(d) is not relu(-d). After its activation, a
    call multiplies only by the scale of an FP8 result. A result in another type has no such scale,
    so the negation is a kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return -relu(scaled_dot(a, b, a_scale, b_scale))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(relu(scaled_dot(a, b, a_scale, b_scale)), -d_scale)
    """
    sign = _Sign(cause)
    return found_if(_is_negated(cause) and sign.is_last, step=sign.done)


def _is_negated(cause: Cause) -> bool:
    """Whether the step to blame is a negation: of the result, or inside what gelu is made of."""
    if isinstance(cause, Conversion):
        return Role.NEGATE in cause.kinds and not cause.readers
    if cause.kind is Role.NEGATE:
        return not cause.activates_otherwise
    is_gelu = cause.kind is Role.ACTIVATION and is_tanh_gelu(cause.first)
    return is_gelu and "negate" in {i.opcode for i in cause.users}


class _Sign:
    """A negation among the steps that stayed outside, and which scales can have its sign."""

    def __init__(self, cause: Cause):
        left, kinds = cause.left, [step.kind for step in cause.left]
        self.to_fp8 = left[-1].at.shape.dtype in CUBLASLT
        self.done, self.to_come = _activation(cause.ahead), _activation(left)
        added, adds = _adds(cause.ahead), _adds(left)
        self.is_last = bool(self.done) and not self.to_fp8
        after_all = not self.to_come and not adds and (added or Role.SCALE in kinds)
        behind = self.to_fp8 and (bool(self.done) or after_all)
        scales = []
        if not behind:
            scales.append("an operand's scale (a_scale)")
            if added:
                scales.append("what is added before it")
        if behind or self.to_fp8 and self.to_come and Role.NEGATE in kinds[1:]:
            scales.append("the result's scale (d_scale)")
        self.places = " and ".join(scales)


def _activation(steps: list[Step]) -> str:
    """The kind of the first activation among some steps, or ""."""
    return next((step.kind for step in steps if step.kind in (Role.RELU, Role.ACTIVATION)), "")


def _adds(steps: list[Step]) -> bool:
    return any(step.kind in (Role.BIAS, Role.MATRIX_BIAS) for step in steps)


def _clamped(cause: Cause) -> Step | None:
    """The clamp to blame: alone, a second one, or one whose upper bound is not the format's."""
    if not isinstance(cause, Conversion):
        return cause.first if cause.kind is Role.CLAMP else None
    clamps = [step for step in cause.group if step.kind is Role.CLAMP]
    if cause.kinds[-2:-1] != [Role.CLAMP]:
        return None
    if cause.is_relu_too and cause.bounds[1] != cause.best:
        return clamps[-1]
    return clamps[0] if cause.is_whole_range and len(clamps) > 1 else None


@rule(
    "bounded-relu",
    lost=Lost.EPILOGUE,
    reason=(
        "the result is clamped to {bounds}: a relu with an upper bound, and the call's relu has "
        "none"
    ),
    fix=(
        "use jax.nn.relu, or leave this kernel: the only upper bound a call has is the range of "
        "an FP8 result"
    ),
    source="HandleMaximum matches relu only",
)
def bounded_relu(cause: Cause) -> Found | None:
    """The activation is a relu with an upper bound, such as relu6, and the call's has none.

    cuBLASLt's relu is a maximum with 0. The call has no argument for an upper bound. It has a bound
    only if it writes FP8: then it saturates at the format's largest number. The fix changes the
    function. If the model needs the bound, leave the kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return jax.nn.relu6(scaled_dot(a, b, a_scale, b_scale))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return relu(scaled_dot(a, b, a_scale, b_scale))
    """
    step = _clamped(cause)
    bounds = clamp_bounds(step.at) if step else []
    return found_if(bounds and not float(bounds[0]), bounds=" and ".join(bounds))


@rule(
    "lower-half",
    lost=Lost.EPILOGUE,
    reason=(
        "the result is bounded by 0 from above: min(d, 0) is -relu(-d), and the call's relu "
        "bounds from below"
    ),
    fix=(
        "use jax.nn.relu, and negate an operand's scale (a_scale), the bias if there is one, and "
        "an FP8 result's scale (d_scale); or leave this kernel"
    ),
    source="HandleMaximum matches relu only",
)
def lower_half(cause: Cause) -> Found | None:
    """The result is bounded by 0 from above, and a relu bounds from below.

    XLA's rewriter recognizes a maximum with 0, but not a minimum. min(d, 0) is -relu(-d), and the
    call can change both signs by its scales: the inner sign by an operand's scale, the outer sign
    by the scale of an FP8 result.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = jnp.minimum(scaled_dot(a, b, a_scale, b_scale), 0)
            return quantize(d, d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, -a_scale, b_scale))
            return quantize(d, -d_scale)
    """
    step = _clamped(cause)
    return found_if(step and step.at.opcode == "minimum" and is_zero(step.other))


@rule(
    "clamp-alone",
    lost=Lost.EPILOGUE,
    reason="the result is clamped, and not converted to FP8 right after it (it is {to})",
    fix="convert to an FP8 type right after the clamp, or leave the clamp out",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def clamp_alone(cause: Cause) -> Found | None:
    """The result is clamped, but not converted to FP8 directly after that.

    cuBLASLt has no epilogue that clamps. A call saturates only as a part of its conversion to FP8.
    XLA's rewriter therefore takes a clamp only together with the conversion that reads it. If the
    result stays in another type, a clamp is a kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return jnp.clip(scaled_dot(a, b, a_scale, b_scale), -448, 448)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return jnp.clip(scaled_dot(a, b, a_scale, b_scale), -448, 448).astype(e4m3)
    """
    step = _clamped(cause)
    return found_if(step and step.at.opcode == "clamp", to=step and step.at.shape.dtype)


@rule(
    "rounded",
    lost=Lost.EPILOGUE,
    reason="the result is rounded (reduce_precision) before anything else is done with it",
    fix=(
        "leave the dot's result out of what jax.checkpoint's policy saves, which rounds it so; or "
        "leave out jax.lax.reduce_precision; or leave this kernel"
    ),
    source="HandleAdd, HandleMaximum and HandleMultiply look past no reduce-precision",
)
def rounded(cause: Cause) -> Found | None:
    """The result goes through reduce_precision, as does a value that jax.checkpoint saves.

    `jax.lax.reduce_precision` rounds to fewer digits and keeps the type. JAX also puts it after a
    value that a policy of `jax.checkpoint` saves, so that XLA cannot replace the saved value by a
    more exact one. XLA's rewriter looks for additions, maxima and conversions of the dot's result
    itself, and stops at the rounding.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return relu(jax.lax.reduce_precision(d, exponent_bits=8, mantissa_bits=6))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return relu(scaled_dot(a, b, a_scale, b_scale, bf16))
    """
    reads = {i.opcode for i in cause.users}
    return found_if(cause.kind is Role.ACTIVATION and "reduce-precision" in reads)


@rule(
    "selected-relu",
    lost=Lost.EPILOGUE,
    reason=(
        "the relu is written as a choice between the result and 0, and XLA's rewriter takes only a "
        "maximum of the two for a relu"
    ),
    fix="use jax.nn.relu or jnp.maximum(d, 0): the numbers are the same, but a NaN stays a NaN",
    source="HandleMaximum matches relu only",
)
def selected_relu(cause: Cause) -> Found | None:
    """The relu is written as a jnp.where, or as a product with a comparison.

    jnp.where(d > 0, d, 0) gives the same as a relu. So does d * (d > 0), which XLA turns into the
    same select. XLA's rewriter looks for a maximum of the call's result and 0. It does not turn a
    comparison and a select into a maximum. The two differ for a NaN: jnp.where may give 0, the
    maximum gives NaN.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return jnp.where(d > 0, d, 0)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return relu(scaled_dot(a, b, a_scale, b_scale))
    """
    return found_if(cause.kind is Role.ACTIVATION and is_selected_relu(cause.first))


@rule(
    "selected-clamp",
    lost=Lost.OUTPUT,
    reason=(
        "the clamp is written as choices between the result and its bounds, and XLA's rewriter "
        "takes only a clamp instruction, or a minimum and a maximum"
    ),
    fix="use jnp.clip: the numbers are the same, but for a NaN",
    source="F8ConvertD matches clamp only",
)
def selected_clamp(cause: Cause) -> Found | None:
    """The clamp to the format's range is written with jnp.where.

    Two choices, between the result and an upper and a lower bound, give the same numbers as a
    clamp. XLA's rewriter looks for a clamp instruction in front of the conversion to FP8. XLA makes
    one of a minimum and a maximum, as jnp.clip writes it, but not of comparisons and selects.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            d = jnp.where(d > 448, 448, jnp.where(d < -448, -448, d))
            return d.astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -448, 448).astype(e4m3)
    """
    if len(cause.group) < 2 or cause.group[-2].kind is not Role.ACTIVATION:
        return None
    clamp, conversion = cause.group[-2:]
    largest = CUBLASLT[conversion.at.shape.dtype].largest
    return found_if(selected_bounds(clamp) == (-largest, largest))


@rule(
    "gelu-and-transpose",
    lost=Lost.EPILOGUE,
    reason=(
        "XLA has moved a transpose that follows the gelu into it, between gelu's operations, and "
        "does not know these for a gelu any more"
    ),
    fix="apply gelu to the flat result, [rows, columns]; reshape and transpose what it returns",
    source="HandleMultiply matches tanh-gelu without a transpose between its operations",
)
def gelu_and_transpose(cause: Cause) -> Found | None:
    """XLA moves a transpose from after gelu to the beginning of gelu.

    XLA moves a transpose before elementwise operations if that saves work. gelu reads its input in
    several operations. If the transpose ends up between these, XLA's rewriter finds a tanh, but not
    the pattern of gelu. A reshape between gelu and the transpose keeps XLA from moving it.

    Loses it:

        def heads(a: "f8e4m3fn[2,64,256]", b: "f8e4m3fn[4,32,256]", a_scale, b_scale):
            x, w = dequantize(a, a_scale, bf16), dequantize(b, b_scale, bf16)
            return gelu(jnp.einsum("bsk,hdk->bshd", x, w)).transpose(0, 2, 1, 3)

    Keeps it:

        def heads(a: "f8e4m3fn[2,64,256]", b: "f8e4m3fn[4,32,256]", a_scale, b_scale):
            x, w = a.reshape(128, 256), b.reshape(128, 256)
            h = gelu(scaled_dot(x, w, a_scale, b_scale, bf16))
            return h.reshape(2, 64, 4, 32).transpose(0, 2, 1, 3)
    """
    is_gelu = cause.kind is Role.ACTIVATION and is_tanh_gelu(cause.first)
    return found_if(is_gelu and is_transposed_inside(cause.first))


@rule(
    "computed-with-bits",
    lost=Lost.KERNEL,
    reason=(
        "unknown: the program computes with the bits of the result, as jnp.ldexp does, and fp8lens "
        "does not know for what"
    ),
    fix=(
        "if it is jnp.ldexp(d, n), multiply in its place, d * 2.0**n: the call takes a constant "
        "factor; else leave this kernel"
    ),
    source="HandleMultiply takes a constant factor; no pass makes one of what is done with bits",
)
def with_bits(cause: Cause) -> Found | None:
    """The program takes the bits of the result apart, as jnp.ldexp does.

    JAX writes jnp.ldexp(d, n), which is d times 2 to the power of n, as shifts and masks of the
    bits of d. XLA's rewriter looks for a multiplication, and finds none. A multiplication by a
    constant costs nothing in a call. If n is not a constant, the factor is a scale like any other.
    The two ways may differ for numbers that are too large or too small for the type.

    Other programs compute with bits too, such as one that rounds. `fp8lens` does not distinguish
    them.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return jnp.ldexp(scaled_dot(a, b, a_scale, b_scale), 3)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale) * 2.0**3
    """
    return found_if(computes_with_bits(cause.first))


@rule(
    "other-activation",
    lost=Lost.EPILOGUE,
    reason=(
        "a call applies relu, or gelu in its tanh form, if the program writes it as jax.nn does; "
        "this activation is another one, or it is written in another way"
    ),
    fix="use jax.nn.relu or jax.nn.gelu(approximate=True), or leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def other_activation(cause: Cause) -> Found | None:
    """The activation is one that cuBLASLt does not have: it has relu, and gelu by tanh.

    XLA's rewriter recognizes an activation by its instructions: relu by a maximum with 0, gelu by
    the multiplications and additions around its tanh. The exact gelu has erf in place of tanh. No
    call has the exact gelu, silu or tanh. jax.nn.gelu is the tanh form by default. Another
    activation changes the model. If you do not want that, leave the kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale), approximate=False)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale))
    """
    if isinstance(cause, Conversion):
        return found_if(_clamped(cause))
    is_before = cause.is_factor or cause.kind is Role.NEGATE
    if is_before and not cause.is_another_scale and cause.activates_otherwise:
        return Found()
    return found_if(cause.kind in (Role.ACTIVATION, Role.CLAMP))
