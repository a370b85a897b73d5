"""Maxima of the result that the call does not take."""

from fp8lens.hlo.values import reducer
from fp8lens.matmul.operands import FP8_MAX
from fp8lens.rules.facts import Amax, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "amax-in-16-bits",
    lost=Lost.AMAX,
    reason=(
        "the call returns the amax in float32, and a kernel converts it to the dequantization's "
        "type"
    ),
    fix="convert the number, jnp.max(jnp.abs(d)).astype(jnp.float32), or dequantize in float32",
    source="F8AddDAmax: the call's amax is float32",
)
def amax_in_16_bits(m: Matmul) -> Found | None:
    """The call returns its amax in float32, and a kernel rounds the number."""
    return found_if(m.row.amax)


@rule(
    "amax-of-another",
    lost=Lost.AMAX,
    reason="an amax is taken of a value that is neither the call's result nor written alone",
    fix="take jnp.max(jnp.abs(d)) of the very value that is scaled and converted",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_of_another(m: Matmul) -> Found | None:
    """The amax is of a value that the call neither writes nor computes on the way."""
    return Found()


@rule(
    "amax-along",
    lost=Lost.AMAX,
    reason="the maximum is taken along some dimensions, and the call's amax is of all elements",
    fix="take the amax of the whole tensor: one scale for it",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_along(amax: Amax) -> Found | None:
    """There is a maximum for each row, column or tile."""
    return found_if(amax.step.at.shape.size > 1)


@rule(
    "amax-before",
    lost=Lost.AMAX,
    reason="the amax is of the value before the {step}; the call's is of what it writes",
    fix="take the amax after the {step}",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_before(amax: Amax) -> Found | None:
    """The amax is of what stands in front of an activation or a bias."""
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
    """The amax is of the scaled result, and the call's is of the unscaled one."""
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
    """A barrier keeps the amax out of the call."""
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
    """The result is converted in front of its amax."""
    return found_if(amax.converted, to=amax.converted)


@rule(
    "amax-otherwise",
    lost=Lost.AMAX,
    reason="what is taken is not written as a maximum of absolute values",
    fix="where an amax is meant, write jnp.max(jnp.abs(d)); else leave this kernel",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_otherwise(amax: Amax) -> Found | None:
    """It is no maximum of absolute values."""
    return found_if(reducer(amax.step.at) == "minimum" or not amax.is_positive)


@rule(
    "amax-without-fp8",
    lost=Lost.AMAX,
    reason="the result is not converted to FP8, and the call has an amax only with an FP8 result",
    fix="clamp and convert the result to FP8, or leave this kernel",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_without_fp8(amax: Amax) -> Found | None:
    """A call gives an amax beside an FP8 result alone."""
    conversions = (s for s in amax.steps if s.kind == "output")
    return found_if(not any(s.at.shape.dtype in FP8_MAX for s in conversions))


@rule(
    "amax-with-it",
    lost=Lost.AMAX,
    reason="the conversion to FP8 stayed outside, and the amax with it",
    fix="fix the conversion first",
    source="F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's",
)
def amax_with_it(amax: Amax) -> Found | None:
    """The conversion beside it stayed outside, and so did the amax."""
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
