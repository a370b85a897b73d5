"""Conversions of an FP8 call's result to FP8 that stay outside of the call.

Each rule takes a `Conversion`: scale, clamp and conversion, as HandleConvert and F8ConvertD in
XLA's gemm_rewriter.cc look for them.
"""

from fp8lens.formats import FORMATS
from fp8lens.hlo.values import depends, operand
from fp8lens.matmul.roles import Role
from fp8lens.rules.facts import Conversion
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("scale-of-own-amax", lost=Lost.OUTPUT)
def scale_of_own_amax(conversion: Conversion) -> Found | None:
    """The result's scale is computed from the result: current scaling."""
    dot = conversion.matmul.dot
    assert dot is not None
    for step in conversion.left:
        if step.kind is Role.SCALE and step.other is not None and depends(step.other, dot):
            return Found(at=step.at)
    return None


@rule("no-clamp", lost=Lost.OUTPUT)
def no_clamp(conversion: Conversion) -> Found | None:
    """A conversion to FP8 without a clamp does not saturate, but the call's conversion does."""
    return found_if(Role.CLAMP not in conversion.kinds, **conversion.fields)


@rule("clamp-early", lost=Lost.OUTPUT)
def clamp_early(conversion: Conversion) -> Found | None:
    """Something stands between the scale, the clamp and the conversion."""
    how = narrow = ""
    if wide := conversion.wide:
        how = f"the result is converted to {wide} on the way"
        given = conversion.first.value.shape.dtype
        narrow = f"leave out the conversion to {wide}, and take the scale in {given}; "
    elif conversion.kinds[-2] != Role.CLAMP:
        how = "the clamp comes before the scale"
    return found_if(how, how=how, narrow=narrow, **conversion.fields)


@rule("clamp-bounds", lost=Lost.OUTPUT)
def clamp_bounds(conversion: Conversion) -> Found | None:
    """The clamp's bounds are not those of the format, which are the only bounds that a call has."""
    bounds = " and ".join(conversion.bounds) or "arguments, or one number alone"
    fields = conversion.fields | {"jax_to": f"jnp.{FORMATS[conversion.to].jax}"}
    return found_if(not conversion.is_whole_range, bounds=bounds, **fields)


@rule("cut-first", lost=Lost.OUTPUT)
def cut_first(conversion: Conversion) -> Found | None:
    """XLA pads, and puts a slice between the call and the conversion."""
    m = conversion.matmul
    # A K that an earlier pass pads to a multiple of 8 has a slice too, which cuts nothing off.
    odd = m.odd("MNK" if m.row_as_written.k % 8 else "MN")
    return found_if(odd, sizes=" and ".join(odd))


@rule("reshaped-first", lost=Lost.OUTPUT)
def reshaped_first(conversion: Conversion) -> Found | None:
    """The result changes its shape before the conversion."""
    dot = conversion.matmul.dot
    assert dot is not None
    given, read = dot.shape.dims, conversion.first.value.shape.dims
    before, after = ",".join(map(str, given)), ",".join(map(str, read))
    return found_if(given != read, before=before, after=after)


@rule("matrix-in-f32", lost=Lost.OUTPUT)
def matrix_in_f32(conversion: Conversion) -> Found | None:
    """The added matrix is float32, and no call that adds such a matrix writes FP8."""
    row = conversion.row
    return found_if(row.beta and operand(row.instruction, 2).shape.dtype == "f32")


@rule("other-readers", lost=Lost.OUTPUT)
def other_readers(conversion: Conversion) -> Found | None:
    """The unconverted result is needed too, so the call has to write that."""
    base = conversion.first.value
    readers = conversion.readers
    names = ["the function's result" if i.opcode == "tuple" else i.opcode for i in readers]
    others = [step for step in conversion.amaxes if step.value is not base]
    along = [step for step in conversion.amaxes if step.at.shape.size > 1]
    if along:
        names.append("a maximum along some dimensions")
    elif len(conversion.amaxes) > 1:
        names.append("several maxima")
    elif others:
        names.append("an amax of another value")
    listed = ", ".join(dict.fromkeys(names))
    at = (readers or [step.at for step in along + others])[:1]
    return found_if(names, readers=listed, dtype=base.shape.dtype, at=at[0] if at else None)
