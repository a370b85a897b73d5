"""Conversions of the result that stay outside of the call."""

import itertools

from fp8lens.formats import CUBLASLT, FORMATS
from fp8lens.hlo.values import depends, operand
from fp8lens.matmul.roles import Role, could_be_fused
from fp8lens.matmul.unfused import DEQUANTIZES
from fp8lens.rules.facts import Cause, Conversion, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "no-clamp",
    lost=Lost.OUTPUT,
    reason="the result is converted to {to} without a clamp",
    fix="clamp to the format's range: {clip}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def no_clamp(conversion: Conversion) -> Found | None:
    """A conversion to FP8 without a clamp does not saturate, but the call's conversion does.

    A conversion to FP8 in JAX gives NaN for a number beyond E4M3's range, and infinity for one
    beyond E5M2's. The call gives the format's largest number instead. The two agree only if a clamp
    stands before the conversion, so XLA's rewriter takes a conversion into the call only with its
    clamp.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return (scaled_dot(a, b, a_scale, b_scale) * d_scale).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
    """
    return found_if(Role.CLAMP not in conversion.kinds, **conversion.fields)


@rule(
    "clamp-early",
    lost=Lost.OUTPUT,
    reason="{how}, and the call takes scale, clamp and conversion, one directly after the other",
    fix="scale, then clamp, then convert: {clip}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def clamp_early(conversion: Conversion) -> Found | None:
    """Something stands between the scale, the clamp and the conversion.

    The call does three things to its result at once: it multiplies by a scale, saturates, and
    converts to FP8. XLA's rewriter looks for these three instructions in this order, each reading
    the one before it. A clamp before the multiplication is another function: a clamped number can
    leave the range again when it is scaled.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = jnp.clip(scaled_dot(a, b, a_scale, b_scale), -448, 448)
            return (d * d_scale).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = jnp.clip(scaled_dot(a, b, a_scale, b_scale) * d_scale, -448, 448)
            return d.astype(e4m3)
    """
    how = ""
    if conversion.wide:
        how = f"the result is converted to {conversion.wide} on the way"
    elif conversion.kinds[-2] != Role.CLAMP:
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
    """The clamp's bounds are not those of the format, which are the only bounds that a call has.

    A call has no argument for bounds: it saturates at the largest numbers of the format it writes.
    XLA's rewriter therefore compares the clamp's bounds with these, and they have to be constants.
    E4M3 and E5M2 have different ones.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -400, 400).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            largest = float(jnp.finfo(e4m3).max)
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -largest, largest).astype(e4m3)
    """
    bounds = " and ".join(conversion.bounds) or "arguments, or one number alone"
    fields = conversion.fields | {"jax_to": f"jnp.{FORMATS[conversion.to].jax}"}
    return found_if(not conversion.is_whole_range, bounds=bounds, **fields)


@rule(
    "scaled-twice",
    lost=Lost.OUTPUT,
    reason="the result is scaled twice before the conversion",
    fix="multiply the two scales outside of the program{if_late}",
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def scaled_twice(conversion: Conversion) -> Found | None:
    """There are two factors before the clamp, and the call has one scale for its result.

    The call has one scale for an FP8 result. XLA's rewriter looks for one multiplication between
    the call and the clamp. It does not multiply two scales with each other. If the program does
    that, it costs a kernel, so do it outside of the program. A scale that is computed from the
    result itself, as from its amax, is not known before the call: take an earlier step's.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, loss_scale: "f32[]"):
            d = scaled_dot(a, b, a_scale, b_scale) * loss_scale
            return quantize(d, d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):  # d_scale has loss_scale in it
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale)
    """
    factors = [step for step in conversion.group if step.kind in (Role.SCALE, Role.ALPHA)]
    dot = conversion.matmul.dot
    of_the_result = [
        step
        for step in factors
        if step.other is not None
        and dot is not None
        and step.other.computation is dot.computation
        and depends(step.other, dot)
    ]
    if_late = ""
    if of_the_result:
        if_late = (
            ", with an amax of an earlier step in place of this result's own; or leave this kernel"
        )
    return found_if(len(factors) > 1, if_late=if_late)


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
    """The added matrix is float32, and no call that adds such a matrix writes FP8.

    If cuBLASLt writes FP8, the matrix that it adds is bfloat16 or float16. XLA's rewriter takes the
    addition into the call first, also of a float32 matrix. Then it cannot take the conversion. If
    the operands are dequantized in bfloat16, the dot is bfloat16, and so is the matrix.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, c: "f32[64,128]"):
            return quantize(scaled_dot(a, b, a_scale, b_scale) + c, d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale, c):
            return quantize(scaled_dot(a, b, a_scale, b_scale, bf16) + c, d_scale)
    """
    row = conversion.row
    return found_if(row.beta and operand(row.instruction, 2).shape.dtype == "f32")


@rule(
    "other-readers",
    lost=Lost.OUTPUT,
    reason=(
        "the unconverted result is read elsewhere too ({readers}): it has to be written as {dtype}"
    ),
    fix=(
        "let the others read the converted result; or give them a second matmul, of the same "
        "operands passed through jax.lax.optimization_barrier; where they need all digits, as the "
        "sum of a residual stream does, leave this kernel"
    ),
    source="F8ConvertD: the only other reader may be one amax",
)
def other_readers(conversion: Conversion) -> Found | None:
    """The unconverted result is needed too, so the call has to write that.

    A call that converts its result writes the FP8 codes alone. If something else reads the
    unconverted result, the call has to write that. The one exception is an amax, which the call
    returns beside the codes: see amax-beside-it.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d, d_scale), jnp.mean(d, 0)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            q = quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
            return q, jnp.mean(q.astype(f32), 0) / d_scale
    """
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
    """Beside the conversion there is a reduction that is not an amax of the call.

    Beside FP8 codes a call can return the amax of its result before the scale. XLA's rewriter
    recognizes it by its instructions: the absolute value of the call's result, then a maximum of
    that. If anything stands between them, such as a conversion, the unconverted result has one more
    reader. Then both the reduction and the conversion to FP8 stay outside.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d.astype(f32)))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(d, d_scale), jnp.max(jnp.abs(d)).astype(f32)
    """
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
        "[rows, K] before it"
    ),
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def reshaped_first(conversion: Conversion) -> Found | None:
    """The result changes its shape before the conversion.

    XLA computes a product with more than two dimensions as one of matrices, and reshapes its
    result. XLA's rewriter looks through a reshape for an addition or an activation, but not for a
    conversion, which has to read the call itself.

    Loses it:

        def layer(a: "f8e4m3fn[2,32,256]", b, a_scale, b_scale, d_scale):
            d = jnp.einsum("bsk,nk->bsn", dequantize(a, a_scale), dequantize(b, b_scale))
            return quantize(gelu(d), d_scale)

    Keeps it:

        def layer(a: "f8e4m3fn[2,32,256]", b, a_scale, b_scale, d_scale):
            d = scaled_dot(a.reshape(64, 256), b, a_scale, b_scale)
            return quantize(gelu(d), d_scale).reshape(2, 32, 128)
    """
    m = conversion.matmul
    assert m.dot is not None
    given, read = m.dot.shape.dims, conversion.base.shape.dims
    before, after = ",".join(map(str, given)), ",".join(map(str, read))
    return found_if(given != read and not m.cut_for, before=before, after=after)


@rule(
    "between-clamp-and-conversion",
    lost=Lost.OUTPUT,
    reason="{between} stands between the clamp and the conversion to {to}",
    fix=(
        "convert directly after the clamp, and do the rest before the scale: "
        "jnp.clip(f(d) * d_scale, ...).astype(...) for f(jnp.clip(d * d_scale, ...)).astype(...)"
    ),
    source="HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's",
)
def between(cause: Cause) -> Found | None:
    """Something is done to the clamped result before it is converted.

    XLA's rewriter looks for a scale, a clamp and a conversion to FP8, one directly after the other.
    If something else stands between two of them, such as jnp.nan_to_num or a relu, the conversion
    stays outside, and so do scale and clamp. If the same step stands before the scale, the call
    takes it, if it is a step that the call has.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            y = jnp.clip(scaled_dot(a, b, a_scale, b_scale) * d_scale, -448, 448)
            return relu(y).astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(relu(scaled_dot(a, b, a_scale, b_scale)), d_scale)
    """
    kinds = [step.kind for step in cause.group]
    if not cause.is_factor and cause.kind is not Role.CLAMP or Role.CLAMP not in kinds:
        return None
    behind = kinds[kinds.index(Role.CLAMP) + 1 : -1]
    others = [kind.noun for kind in behind if kind not in (Role.OUTPUT, Role.CLAMP)]
    if not others:
        return None
    name = "an activation" if others[0] == "activation" else f"a {others[0]}"
    return Found(between=name, to=cause.group[-1].at.shape.dtype)


@rule(
    "cut-first",
    lost=Lost.OUTPUT,
    reason=(
        "an FP8 call takes multiples of 16, not {sizes}: XLA pads, and puts a slice after the "
        "call, so a kernel after that slice does the conversion"
    ),
    fix="choose, or pad once in advance to, dimensions that are multiples of 16",
    source="PadOperandToMultipleOf16: a slice then stands between the call and its conversion",
)
def cut_first(conversion: Conversion) -> Found | None:
    """XLA pads, and puts a slice between the call and the conversion.

    If M or N is not a multiple of 16, XLA pads the operands, as in padded-operands, and cuts the
    result out of a larger one. If K is not a multiple of 8, a pass before the rewriter pads it and
    puts a slice after the dot as well, although that slice leaves nothing out. The slice stands
    between the call and the conversion, which has to read the call itself.

    Loses it:

        def layer(a, b: "f8e4m3fn[120,256]", a_scale, b_scale, d_scale):
            return quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
    """
    odd = conversion.matmul.cut_for
    return found_if(odd, sizes=" and ".join(odd))


@rule(
    "widened-and-back",
    lost=Lost.OUTPUT,
    reason=(
        "the result is converted from {dtype} to {wide} for the {step}, and back to {dtype} after "
        "it, and the call takes only what reads it directly"
    ),
    fix="leave out both conversions, and compute in {dtype} what stands between them",
    source="HandleAdd, HandleMaximum and HandleMultiply look past no conversion of the result",
)
def widened_and_back(cause: Cause) -> Found | None:
    """The result is widened for a step that the call could do, and narrowed after it.

    A program may compute an activation in float32, because bfloat16 has few digits. But a
    conversion between the call and its activation keeps XLA's rewriter from taking the activation,
    and both conversions with it. Without them the call applies the activation to the float32 sum of
    its products, before it rounds: that is what the program wants.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return gelu(d.astype(f32)).astype(bf16)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return gelu(scaled_dot(a, b, a_scale, b_scale, bf16))
    """
    if not cause.is_widened_and_back or not could_be_fused(cause.left[1]):
        return None
    return Found(dtype=cause.reads, wide=cause.writes, step=cause.left[1].kind.noun)


@rule(
    "another-type",
    lost=Lost.OUTPUT,
    reason="the call writes the dot's type, {dtype}, and a kernel converts it to {to}",
    fix="dequantize in {jax_to}: then the dot's type is {to}{wider}",
    source="HandleConvert takes only conversions to FP8",
)
def another_type(cause: Cause) -> Found | None:
    """The result is converted to a wider or another 16-bit type than the dot's.

    The call writes the type that the dot has. XLA's rewriter takes a conversion into the call only
    if it is to FP8. Another conversion stays after the call, which first writes its result in the
    dot's type. The dot has the type in which the operands are dequantized. That type does not
    change what is multiplied: the call reads the FP8 codes in both cases.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale).astype(bf16)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale, bf16)
    """
    if cause.kind is not Role.OUTPUT or cause.writes not in ("bf16", "f16", "f32"):
        return None
    wider = ""
    if cause.writes == "f32":
        wider = f"; if only what is added, such as a bias, is f32, pass that in {cause.reads}"
    jax_to = f"jnp.{FORMATS[cause.writes].jax}"
    return Found(dtype=cause.reads, to=cause.writes, wider=wider, jax_to=jax_to)


@rule(
    "no-such-type",
    lost=Lost.OUTPUT,
    reason=(
        "the call writes the dot's type, {dtype}, and a kernel converts it to {to}, which no FP8 "
        "call writes"
    ),
    fix=(
        "leave this kernel, or convert to float8_e4m3fn or float8_e5m2; float32, bfloat16 and "
        "float16 are the dot's own type"
    ),
    source="HandleConvert takes only conversions to FP8",
)
def no_such_type(cause: Cause) -> Found | None:
    """The result is converted to a type that no FP8 call writes.

    A call with FP8 operands writes float32, bfloat16, float16, E4M3FN or E5M2. A conversion to
    another type, as to integers or to one of the other 8-bit floats, needs a kernel that reads what
    the call has written.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale).astype(jnp.int32)
    """
    steps = itertools.dropwhile(lambda step: step.kind in (Role.SCALE, Role.CLAMP), cause.left)
    step = next(steps, cause.first)
    to = step.at.shape.dtype
    is_wide = to in ("bf16", "f16", "f32")
    is_conversion = step.kind is Role.OUTPUT and not is_wide and to not in CUBLASLT
    return found_if(is_conversion, dtype=cause.reads, to=to)


@rule(
    "result-in-fp8",
    lost=Lost.OUTPUT,
    reason="the dot's own result is {to}, and a kernel widens it to go on computing with it",
    fix="ask the dot for float32 or bfloat16 (preferred_element_type), and clamp and convert last",
    source="the call adds, activates and scales before it converts",
)
def result_in_fp8(m: Matmul) -> Found | None:
    """The dot itself returns FP8, and a kernel widens that to go on.

    jax.lax.dot of two E4M3 arrays returns E4M3 by default: the result is rounded to FP8 before
    anything is added or applied to it. What follows needs more digits, so a kernel widens the
    result and does the rest itself. The call can add and activate before it rounds, if the dot
    returns a wider type.

    Loses it:

        def layer(a, b, bias):
            return jax.lax.dot(a, b.T).astype(bf16) + bias

    Keeps it:

        def layer(a, b, bias):
            return jax.lax.dot(a, b.T, preferred_element_type=bf16) + bias
    """
    if m.dot is None or not m.result_is_fp8:
        return None
    is_widened = any(o.after and o.own == DEQUANTIZES for o in m.near)
    return found_if(is_widened, to=m.dot.shape.dtype)


@rule(
    "no-cublaslt-kernel",
    lost=Lost.OUTPUT,
    reason=(
        "the call multiplies two E4M3 operands and writes E5M2, for which cuBLASLt has no "
        "kernel: XLA's rewriter does not check that, so the program compiles, and by cuBLASLt's "
        "table it fails when it runs"
    ),
    fix="convert the result to float8_e4m3fn, or make one of the operands float8_e5m2",
    source=(
        "docs.nvidia.com/cuda/cublas/#cublasltmatmul, the table of FP8 types (not measured here)"
    ),
)
def no_such_kernel(m: Matmul) -> Found | None:
    """XLA makes a call for which cuBLASLt has no kernel.

    cuBLASLt's table of FP8 matmuls lists which types of operands go with which type of the result.
    It has E5M2 results only if one of the operands is E5M2. XLA's rewriter compares the types of
    the dot with this table (see e5m2-result), but not the type that a conversion after it writes.
    XLA compiles the program, because it asks cuBLASLt for a kernel only on the GPU.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -57344, 57344).astype(e5m2)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            d = scaled_dot(a, b, a_scale, b_scale) * d_scale
            return jnp.clip(d, -448, 448).astype(e4m3)
    """
    row = m.row
    types = (row.lhs_dtype, row.rhs_dtype, row.out_dtype)
    return found_if(m.is_cublaslt and types == ("f8e4m3fn", "f8e4m3fn", "f8e5m2"))
