"""Maxima of the result that the call does not take."""

from fp8lens.formats import CUBLASLT
from fp8lens.hlo.values import reducer
from fp8lens.matmul.roles import Role
from fp8lens.rules.facts import Amax, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "amax-in-16-bits",
    lost=Lost.AMAX,
    reason=(
        "the call returns the amax in float32, and a kernel converts it to the type in which the "
        "operands are dequantized"
    ),
    fix="convert the number, jnp.max(jnp.abs(d)).astype(jnp.float32), or dequantize in float32",
    source="F8AddDAmax: the call's amax is float32",
)
def amax_in_16_bits(m: Matmul) -> Found | None:
    """The program takes the amax in 16 bits, and the call returns it in float32.

    The maximum of a bfloat16 array is a bfloat16 number in JAX. cuBLASLt writes the amax as
    float32. XLA's rewriter takes the amax into the call, and a small kernel converts the number to
    bfloat16. If the program converts the amax to float32, XLA removes both conversions, and so the
    kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d)).astype(f32)
    """
    return found_if(m.row.amax)


@rule(
    "amax-of-another",
    lost=Lost.AMAX,
    reason="an amax is taken of a value that the call neither writes nor computes on the way",
    fix="take jnp.max(jnp.abs(d)) of the same value d that is scaled and converted to FP8",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_of_another(m: Matmul) -> Found | None:
    """The amax is of a value that the call neither writes nor computes on the way.

    A call has one result, and its amax is of that result before the scale and the conversion. If
    the program takes the amax of something else that it computes from the dot, the unconverted
    result has one more reader. Then the call has to write the unconverted result, and both the amax
    and the conversion to FP8 stay outside.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(relu(d)))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, a_scale, b_scale))
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return Found()


@rule(
    "amax-along",
    lost=Lost.AMAX,
    reason="the maximum is taken along some dimensions, and the call's amax is of all elements",
    fix="take one amax of the whole result, and quantize with one scale",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_along(amax: Amax) -> Found | None:
    """There is a maximum for each row, column or tile, and the call has one for all elements.

    cuBLASLt returns one number for the whole result. A scale for each row needs an amax for each
    row, which a kernel computes from the unconverted result. The barrier is needed: without it XLA
    replaces the amax of the rows by the call's amax, finds that the shapes differ, and its compiler
    aborts.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            of_rows = jnp.max(jnp.abs(jax.lax.optimization_barrier(d)), axis=1)
            return quantize(d, d_scale), of_rows

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(amax.step.at.shape.size > 1)


@rule(
    "amax-before",
    lost=Lost.AMAX,
    reason="the amax is of the value before the {step}, and the call's is of the value after it",
    fix="take the amax after the {step}",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_before(amax: Amax) -> Found | None:
    """The amax is of the value before an activation or a bias.

    The call adds the bias and applies the activation first, and takes its amax of the result. If
    the program takes the amax before that, the dot's result has another reader beside the
    activation. Then the activation stays outside, and so does the conversion to FP8. With gelu in
    place of relu, XLA's compiler ends in an error that names has_aux_output.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(relu(d), d_scale), jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = relu(scaled_dot(a, b, a_scale, b_scale))
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(amax.behind, step=amax.behind)


@rule(
    "amax-scaled",
    lost=Lost.AMAX,
    reason=(
        "the amax is of the scaled or clamped result, and the call's is of the result before its "
        "scale"
    ),
    fix="take jnp.max(jnp.abs(d)) before multiplying by the scale",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_scaled(amax: Amax) -> Found | None:
    """The program takes the amax of the scaled or converted result. The call takes it before that.

    An amax is used to choose a scale, so the call takes it before it multiplies by the result's
    scale and saturates. The amax of the codes says less: the codes are at most 448, however large
    the result is. The amax of a scaled result is the amax of the unscaled result, times the scale's
    magnitude.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            q = quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
            return q, jnp.max(jnp.abs(q.astype(f32)))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(amax.is_scaled)


@rule(
    "amax-behind-barrier",
    lost=Lost.AMAX,
    reason="an optimization_barrier stands between the result and its amax",
    fix=(
        "scale with an amax of an earlier step, and leave the barrier out; an amax that scales "
        "the very result it is taken of must stay outside"
    ),
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_behind_barrier(amax: Amax) -> Found | None:
    """A barrier stands between the result and its amax.

    jax.lax.optimization_barrier keeps XLA from rewriting across it, so the rewriter does not see
    that the amax is of the call's result. A program that scales a result with the amax of the same
    result needs the barrier: no call knows the amax before it has computed the result. Without the
    barrier XLA's compiler also takes such an amax into the call, and ends in an error about a
    cycle. An amax of an earlier step is known in advance; the amax of this step then sets a later
    step's scale.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            amax = jnp.max(jnp.abs(jax.lax.optimization_barrier(d)))
            return quantize(d, 448 / amax), amax

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):  # d_scale is 448 / amax of an earlier step
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(any(i.opcode == "opt-barrier" for i in amax.way))


@rule(
    "amax-converted",
    lost=Lost.AMAX,
    reason=(
        "the result is converted to {to} before its amax is taken, and the call's amax is of the "
        "result as it is"
    ),
    fix="convert the number, not the matrix: jnp.max(jnp.abs(d)).astype(jnp.float32)",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_converted(amax: Amax) -> Found | None:
    """The result is converted to another type before its amax is taken.

    XLA's rewriter recognizes an amax by its instructions: the absolute value of the call's result,
    then a maximum of that. If a conversion stands between them, the unconverted result has one more
    reader. The largest magnitude is the same number before and after a conversion to a wider type.
    So convert that number instead of the matrix.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d.astype(f32)))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d)).astype(f32)
    """
    return found_if(amax.converted, to=amax.converted)


@rule(
    "amax-otherwise",
    lost=Lost.AMAX,
    reason="a maximum or minimum is not written as a maximum of absolute values",
    fix="where an amax is meant, write jnp.max(jnp.abs(d)); else leave this kernel",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_otherwise(amax: Amax) -> Found | None:
    """XLA's rewriter does not recognize the reduction as a maximum of absolute values.

    The rewriter looks for an absolute value and a maximum of that. The larger of two numbers, the
    largest element and the negative of the smallest element, is the same amax, but by other
    instructions. cuBLASLt computes no other maximum, and no minimum.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.maximum(jnp.max(d), -jnp.min(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(reducer(amax.step.at) == "minimum" or not amax.is_positive)


@rule(
    "amax-without-fp8",
    lost=Lost.AMAX,
    reason="the result is not converted to FP8, and the call has an amax only with an FP8 result",
    fix="clamp and convert the result to FP8, or leave this kernel",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_without_fp8(amax: Amax) -> Found | None:
    """The amax is beside a result that is not FP8, and only a call that writes FP8 has one.

    XLA's rewriter looks for an amax when it takes a conversion to FP8 into the call. If the result
    is not converted, it does not look, and a kernel reads the whole result to find the maximum.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return d, jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    conversions = (s for s in amax.steps if s.kind is Role.OUTPUT)
    return found_if(not any(s.at.shape.dtype in CUBLASLT for s in conversions))


@rule(
    "amax-with-it",
    lost=Lost.AMAX,
    reason="the conversion to FP8 stayed outside, and the amax with it",
    fix="fix the conversion first, by the reason that is given for it",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_with_it(amax: Amax) -> Found | None:
    """The conversion beside the amax stayed outside, and so did the amax.

    XLA's rewriter takes an amax into the call together with the conversion to FP8. If the
    conversion stays outside, as without a clamp, the amax does too. The conversion has its own
    reason, here no-clamp. The fix of that reason brings both into the call.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return (d * d_scale).astype(e4m3), jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(amax.main)


#: Tried in this order, where the dot's own result is not FP8.
AMAX = (
    amax_along,
    amax_before,
    amax_scaled,
    amax_behind_barrier,
    amax_converted,
    amax_otherwise,
    amax_without_fp8,
    amax_with_it,
)
