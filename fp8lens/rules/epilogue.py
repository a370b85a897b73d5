"""Activations that stay outside of the call."""

from fp8lens.hlo.origin import op_name
from fp8lens.hlo.values import is_zero
from fp8lens.matmul.epilogue import Step, clamp_bounds, is_tanh_gelu
from fp8lens.matmul.operands import FP8_MAX
from fp8lens.rules.facts import NUMPY, Cause, Conversion, is_of_a_gradient
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "activation-after-scale",
    lost=Lost.EPILOGUE,
    reason="the {step} is applied to a scaled result, and the call applies it before it scales",
    fix=(
        "multiply the scale into an operand's, outside of the program; or scale after relu: "
        "relu(x * s) is relu(x) * s for s > 0"
    ),
    source="HandleMaximum and HandleMultiply: the activation must read the call itself",
)
def activation_after_scale(cause: Cause) -> Found | None:
    """The activation is of the scaled result, and the call scales last."""
    if isinstance(cause, Conversion):  # a clamp from 0 on is a relu
        is_relu = cause.is_relu_too and cause.bounds[1] == cause.best
        return found_if(is_relu and cause.kinds[2:], step="relu")
    if not cause.is_factor or cause.is_another_scale or cause.activates_otherwise:
        return None
    return found_if(cause.following in ("relu", "activation"), step=cause.following)


@rule(
    "relu-in-clamp",
    lost=Lost.EPILOGUE,
    reason=(
        "the clamp's bounds are 0 and {best}, a relu and the conversion's clamp in one, and the "
        "call takes the two"
    ),
    fix=(
        "relu, then clamp to plus and minus jnp.finfo({jax_to}).max: jnp.clip(jax.nn.relu(d), "
        "-{best}, {best}).astype({jax_to})"
    ),
    source="HandleMaximum matches relu only; HandleConvert and F8ConvertD the whole range",
)
def relu_in_clamp(conversion: Conversion) -> Found | None:
    """One clamp, from 0 to the format's largest number, is two things to the call."""
    is_relu = conversion.is_relu_too and conversion.bounds[1] == conversion.best
    fields = conversion.fields | {"jax_to": f"jnp.{NUMPY[conversion.to]}"}
    return found_if(is_relu and not conversion.kinds[2:], **fields)


@rule(
    "activation-and-reader",
    lost=Lost.EPILOGUE,
    reason=(
        "the input of the {step} is read by something else as well, as its gradient does, and a "
        "call has one result"
    ),
    fix=(
        "use relu and let everything read its result, an amax too, and a gradient of your own "
        "(jax.custom_vjp) through jax.lax.optimization_barrier; or leave this kernel: no FP8 "
        "call returns gelu's input beside its result"
    ),
    source="FuseReluActivation and FuseGeluActivation: the activation must be the only reader",
)
def activation_and_reader(cause: Cause) -> Found | None:
    """The activation's input is read by something else too, and a call has one result."""
    negates = cause.kind == "negate" and not cause.activates_otherwise
    is_activation = negates or cause.kind in ("relu", "activation")
    return found_if(is_activation and cause.is_read_twice, step=cause.kind)


@rule(
    "late-relu",
    lost=Lost.EPILOGUE,
    reason="relu stands where the call cannot take it (its epilogue is {epilogue})",
    fix="apply relu directly to the dot's result, or to that plus a bias vector",
    source="FuseReluActivation: epilogue DEFAULT or BIAS",
)
def late_relu(cause: Cause) -> Found | None:
    """The relu stands behind something that the call does last.

    cuBLASLt has one activation in its epilogue, behind the bias. XLA's rewriter takes a relu that
    reads such a call directly, where the call has no activation yet.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return relu(gelu(scaled_dot(a, b, a_scale, b_scale)))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale))
    """
    return found_if(cause.kind == "relu" and not _is_of_codes(cause))


def _is_of_codes(cause: Cause) -> bool:
    return cause.reads in FP8_MAX and cause.row.epilogue != "GELU"


@rule(
    "relu-of-codes",
    lost=Lost.EPILOGUE,
    reason=(
        "the relu stands behind the conversion to FP8, where a call with a relu or an amax takes "
        "none"
    ),
    fix=(
        "apply relu once, to the dot's result or to that plus a bias vector, and take the amax "
        "of what it returns"
    ),
    source="FuseReluActivation: epilogue DEFAULT or BIAS",
)
def relu_of_codes(cause: Cause) -> Found | None:
    """The relu is of an FP8 result, behind a relu or an amax of the call's."""
    return found_if(cause.kind == "relu" and _is_of_codes(cause))


@rule(
    "compared-only",
    lost=Lost.EPILOGUE,
    reason=(
        "the result is only compared with a number, as in the gradient of a relu, and no call "
        "writes that"
    ),
    fix="leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def compared(cause: Cause) -> Found | None:
    """The result is compared with a number, and never itself written."""
    is_compared = {i.opcode for i in cause.users} == {"compare"}
    return found_if(cause.kind == "activation" and is_compared)


@rule(
    "activation-derivative",
    lost=Lost.EPILOGUE,
    reason="the result is put through the derivative of an activation, which no call computes",
    fix="leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def derivative(cause: Cause) -> Found | None:
    """The backward pass multiplies by an activation's derivative."""
    is_derivative = is_of_a_gradient(op_name(cause.first.at))
    return found_if(cause.kind == "activation" and is_derivative)


@rule(
    "negated-result",
    reason="the result is negated{how}, and the call has a sign only in its scales",
    fix="in its place negate {scales}; where there is none, take a factor of -1",
    source="HandleMaximum, HandleMultiply and HandleConvert match no negation",
)
def negated(cause: Cause) -> Found | None:
    """The result is negated, and the call has no step for that but its scales."""
    sign = _Sign(cause)
    if not _is_negated(cause) or sign.is_last:
        return None
    how = ""
    if sign.done:
        how = f" behind its {sign.done}"
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
        "the result is negated behind its {step}, and the call has a sign only in its scales, of "
        "which the last is an FP8 result's"
    ),
    fix="clamp and convert the result to FP8, with a negative scale; or leave this kernel",
    source="HandleMaximum, HandleMultiply and HandleConvert match no negation",
)
def negated_last(cause: Cause) -> Found | None:
    """The result is negated behind its activation, and only an FP8 result has a scale there."""
    sign = _Sign(cause)
    return found_if(_is_negated(cause) and sign.is_last, step=sign.done)


def _is_negated(cause: Cause) -> bool:
    """Whether the step to blame is a negation: of the result, or inside what gelu is made of."""
    if isinstance(cause, Conversion):
        return "negate" in cause.kinds and not cause.readers
    if cause.kind == "negate":
        return not cause.activates_otherwise
    is_gelu = cause.kind == "activation" and is_tanh_gelu(cause.first)
    return is_gelu and "negate" in {i.opcode for i in cause.users}


class _Sign:
    """A negation among the steps that stayed outside, and which scales can have its sign."""

    def __init__(self, cause: Cause):
        left, kinds = cause.left, [step.kind for step in cause.left]
        self.to_fp8 = left[-1].at.shape.dtype in FP8_MAX
        self.done, self.to_come = _activation(cause.ahead), _activation(left)
        added, adds = _adds(cause.ahead), _adds(left)
        self.is_last = bool(self.done) and not self.to_fp8
        after_all = not self.to_come and not adds and (added or "scale" in kinds)
        behind = self.to_fp8 and (bool(self.done) or after_all)
        scales = []
        if not behind:
            scales.append("an operand's scale (a_scale)")
            if added:
                scales.append("what is added in front of it")
        if behind or self.to_fp8 and self.to_come and "negate" in kinds[1:]:
            scales.append("the result's scale (d_scale)")
        self.places = " and ".join(scales)


def _activation(steps: list[Step]) -> str:
    """The kind of the first activation among some steps, or ""."""
    return next((step.kind for step in steps if step.kind in ("relu", "activation")), "")


def _adds(steps: list[Step]) -> bool:
    return any("bias" in step.kind for step in steps)


def _clamped(cause: Cause) -> Step | None:
    """The clamp to blame: alone, a second one, or one whose upper bound is not the format's."""
    if not isinstance(cause, Conversion):
        return cause.first if cause.kind == "clamp" else None
    clamps = [step for step in cause.group if step.kind == "clamp"]
    if cause.kinds[-2:-1] != ["clamp"]:
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
    """A relu with an upper bound, such as relu6: the call's has none."""
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
        "use jax.nn.relu, and negate an operand's scale (a_scale), a bias in front of it, and an "
        "FP8 result's scale (d_scale); or leave this kernel"
    ),
    source="HandleMaximum matches relu only",
)
def lower_half(cause: Cause) -> Found | None:
    """The result is bounded by 0 from above: what a relu leaves out."""
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
    """The result is clamped, and not converted right behind that."""
    step = _clamped(cause)
    return found_if(step and step.at.opcode == "clamp", to=step and step.at.shape.dtype)


@rule(
    "other-activation",
    lost=Lost.EPILOGUE,
    reason="cuBLASLt's epilogues are relu and gelu in its tanh form; this activation is another",
    fix="use jax.nn.relu or jax.nn.gelu(approximate=True), or leave this kernel",
    source="HandleMaximum and HandleMultiply match relu and tanh-gelu only",
)
def other_activation(cause: Cause) -> Found | None:
    """cuBLASLt's epilogues are relu and gelu by tanh: this is another activation."""
    if isinstance(cause, Conversion):
        return found_if(_clamped(cause))
    is_before = cause.is_factor or cause.kind == "negate"
    if is_before and not cause.is_another_scale and cause.activates_otherwise:
        return Found()
    return found_if(cause.kind in ("activation", "clamp"))
