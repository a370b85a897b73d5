"""Conversions of the result that stay outside of the call."""

from fp8lens.hlo.values import operand
from fp8lens.matmul.unfused import DEQUANTIZES
from fp8lens.rules.facts import NUMPY, Cause, Conversion, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "no-clamp",
    lost=Lost.OUTPUT,
    reason="the result is converted to {to} without a clamp",
    fix="clamp to the format's range: {clip}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def no_clamp(conversion: Conversion) -> Found | None:
    """A conversion to FP8 without a clamp gives NaN where the call's saturates."""
    return found_if("clamp" not in conversion.kinds, **conversion.fields)


@rule(
    "clamp-early",
    lost=Lost.OUTPUT,
    reason="{how}, and the call takes scale, clamp and conversion, one directly after the other",
    fix="scale, then clamp, then convert: {clip}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def clamp_early(conversion: Conversion) -> Found | None:
    """Something stands between the scale, the clamp and the conversion."""
    how = ""
    if conversion.wide:
        how = f"the result is converted to {conversion.wide} on the way"
    elif conversion.kinds[-2] != "clamp":
        how = "the clamp comes before the scale"
    return found_if(how, how=how, **conversion.fields)


@rule(
    "clamp-bounds",
    lost=Lost.OUTPUT,
    reason="the clamp's bounds are {bounds}, not exactly the range of {to}",
    fix="clamp to plus and minus jnp.finfo({jax_to}).max: {clip}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def clamp_bounds(conversion: Conversion) -> Found | None:
    """The clamp is not to the format's range, which is the only one that a call has."""
    bounds = " and ".join(conversion.bounds) or "arguments, or one number alone"
    fields = conversion.fields | {"jax_to": f"jnp.{NUMPY[conversion.to]}"}
    return found_if(not conversion.is_whole_range, bounds=bounds, **fields)


@rule(
    "scaled-twice",
    lost=Lost.OUTPUT,
    reason="the result is scaled twice before the conversion",
    fix="multiply the two scales outside of the program",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def scaled_twice(conversion: Conversion) -> Found | None:
    """Two factors stand in front of the clamp, and the call has one scale for its result."""
    kinds = conversion.kinds
    return found_if(kinds.count("scale") + kinds.count("alpha") > 1)


@rule(
    "matrix-in-f32",
    lost=Lost.OUTPUT,
    reason="the matrix that is added is float32, and with an FP8 result it must have 16 bits",
    fix="dequantize in bfloat16, and add the matrix in bfloat16",
    source="F8ConvertD",
    logs=(
        "conflicts with the existing fusion of the addition of a matrix bias with element type "
        "other than BF16 or F16"
    ),
)
def matrix_in_f32(conversion: Conversion) -> Found | None:
    """The added matrix is float32, beside which no call writes FP8."""
    row = conversion.row
    return found_if(row.beta and operand(row.instruction, 2).shape.dtype == "f32")


@rule(
    "other-readers",
    lost=Lost.OUTPUT,
    reason=(
        "the unconverted result is read elsewhere too ({readers}): it has to be written as {dtype}"
    ),
    fix=(
        "read the converted result there; to compute it twice, put the operands through "
        "jax.lax.optimization_barrier"
    ),
    source="F8ConvertD: the only other reader may be one amax",
)
def other_readers(conversion: Conversion) -> Found | None:
    """The unconverted result is needed too, so the call has to write that."""
    names = [
        "the function's result" if i.opcode == "tuple" else i.opcode for i in conversion.readers
    ]
    others = [step for step in conversion.amaxes if step.value is not conversion.base]
    if len(conversion.amaxes) > 1:
        names.append("several maxima")
    elif others:
        names.append("an amax of another value")
    readers = ", ".join(dict.fromkeys(names))
    return found_if(names, readers=readers, dtype=conversion.base.shape.dtype)


@rule(
    "amax-beside-it",
    lost=Lost.OUTPUT,
    reason=(
        "the amax, maximum or minimum beside the conversion is not one that the call computes, "
        "and so both read an unconverted result"
    ),
    fix=(
        "for an amax take jnp.max(jnp.abs(d)) of the dot's result after its activation, of all "
        "elements"
    ),
    source="F8ConvertD: the only other reader may be one amax",
)
def amax_beside_it(conversion: Conversion) -> Found | None:
    """What is reduced beside the conversion is no amax that the call computes."""
    return found_if(conversion.amaxes)


@rule(
    "reshaped-first",
    lost=Lost.OUTPUT,
    reason=(
        "the result is reshaped before it is converted, from [{before}] to [{after}], and the "
        "call's conversion must read it directly"
    ),
    fix=(
        "keep the shape of the dot's result up to the conversion: flatten the activations to "
        "[rows, K] in front of it"
    ),
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def reshaped_first(conversion: Conversion) -> Found | None:
    """The result changes its shape in front of the conversion."""
    m = conversion.matmul
    assert m.dot is not None
    given, read = m.dot.shape.dims, conversion.base.shape.dims
    before, after = ",".join(map(str, given)), ",".join(map(str, read))
    return found_if(given != read and not m.odd("MN"), before=before, after=after)


@rule(
    "cut-first",
    lost=Lost.OUTPUT,
    reason=(
        "an FP8 call takes multiples of 16, not {sizes}: it writes a padded result, and what is "
        "cut out of it is converted by the kernel that cuts"
    ),
    fix="choose, or pad once in advance to, dimensions that are multiples of 16",
    source="PadOperandToMultipleOf16: a slice then stands between the call and its conversion",
)
def cut_first(conversion: Conversion) -> Found | None:
    """The call writes a padded result, and what cuts it out converts it too."""
    odd = conversion.matmul.odd("MN")
    return found_if(odd, sizes=" and ".join(odd))


@rule(
    "another-type",
    lost=Lost.OUTPUT,
    reason="the call writes the dot's type, {dtype}, and a kernel converts it to {to}",
    fix="dequantize in {jax_to}: then the dot's type is {to}{wider}",
    source="HandleConvert takes only conversions to FP8",
)
def another_type(cause: Cause) -> Found | None:
    """The result is converted to a wider or another 16-bit type than the dot's."""
    if cause.kind != "output" or cause.writes not in ("bf16", "f16", "f32"):
        return None
    wider = ""
    if cause.writes == "f32":
        where = "where only what comes in behind it is f32, as a bias"
        wider = f"; or, {where}, pass that in {cause.reads}"
    jax_to = f"jnp.{NUMPY[cause.writes]}"
    return Found(dtype=cause.reads, to=cause.writes, wider=wider, jax_to=jax_to)


@rule(
    "not-a-float",
    lost=Lost.OUTPUT,
    reason=(
        "the call writes the dot's type, {dtype}, and a kernel converts it to {to}, which no FP8 "
        "call writes"
    ),
    fix="leave this kernel, or convert to float32, bfloat16, float16 or FP8",
    source="HandleConvert takes only conversions to FP8",
)
def not_a_float(cause: Cause) -> Found | None:
    """The result is converted to a type that no FP8 call writes."""
    is_wide = cause.writes in ("bf16", "f16", "f32")
    is_conversion = cause.kind == "output" and not is_wide
    return found_if(is_conversion, dtype=cause.reads, to=cause.writes)


@rule(
    "result-in-fp8",
    lost=Lost.OUTPUT,
    reason="the dot's own result is {to}, and a kernel widens it to go on computing with it",
    fix="ask the dot for float32 or bfloat16 (preferred_element_type), and clamp and convert last",
    source="the call adds, activates and scales before it converts",
)
def result_in_fp8(m: Matmul) -> Found | None:
    """The dot itself returns FP8, and a kernel widens that to go on."""
    if m.dot is None or not m.result_is_fp8:
        return None
    is_widened = any(o.after and o.own == DEQUANTIZES for o in m.near)
    return found_if(is_widened, to=m.dot.shape.dtype)


@rule(
    "no-cublaslt-kernel",
    lost=Lost.OUTPUT,
    reason=(
        "the call multiplies two E4M3 operands and writes E5M2, for which cuBLASLt has no "
        "kernel: XLA does not look, and the GPU will refuse it"
    ),
    fix="convert the result to float8_e4m3fn, or make one of the operands float8_e5m2",
    source=(
        "docs.nvidia.com/cuda/cublas/#cublasltmatmul, the table of FP8 types (not measured here)"
    ),
)
def no_such_kernel(m: Matmul) -> Found | None:
    """XLA makes a call for which cuBLASLt has no kernel."""
    row = m.row
    types = (row.lhs_dtype, row.rhs_dtype, row.out_dtype)
    return found_if(m.is_cublaslt and types == ("f8e4m3fn", "f8e4m3fn", "f8e5m2"))
