"""Matmuls for which there is no FP8 call to make: of the chip, or of how they are written.

Each rule takes a `Matmul` that is not FP8, and is tried before those of `behind_operands`.
"""

from fp8lens.formats import E2M1, is_fp8
from fp8lens.hlo.values import dimensions, minor_to_major, operand
from fp8lens.matmul.operands import Operand
from fp8lens.matmul.rows import GemmRow, is_sum_of_products
from fp8lens.rules.facts import Matmul, scaled_dot_of
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("old-chip", lost=Lost.FP8)
def old_chip(m: Matmul) -> Found | None:
    """The program is compiled for a chip without FP8 tensor cores."""
    version = ".".join(map(str, m.chip.compute_capability))
    return found_if(not m.chip.has_fp8, version=version)


@rule("fused-attention", lost=Lost.FP8)
def fused_attention(m: Matmul) -> Found | None:
    """The matmul is a part of cuDNN's fused attention, which has 16-bit operands."""
    target = m.row.instruction.custom_call_target or ""
    return found_if(target.startswith("__cudnn$fmha"))


@rule("product-and-sum", lost=Lost.FP8)
def product_and_sum(m: Matmul) -> Found | None:
    """A matmul is written as a multiplication of broadcast arrays, and a sum."""
    row = m.row
    return found_if(m.dot is None and is_sum_of_products(row), m=row.m, n=row.n, k=row.k)


@rule("spelled-out", lost=Lost.FP8)
def spelled_out(m: Matmul) -> Found | None:
    """M or N is 1, and XLA replaces the dot by a multiplication and a sum."""
    is_spelled_out = m.dot is None and m.row.library == "kernel" and bool(m.thin("MN"))
    reads = [d for d in (m.row.lhs_dtype, m.row.rhs_dtype) if not is_fp8(d)]
    is_quantized = not reads or any(map(_reads_fp8, m.as_written))
    return thin(m.thin("MN"), is_quantized) if is_spelled_out else None


def _reads_fp8(row: GemmRow) -> bool:
    """Whether XLA would find an FP8 array behind both operands of a dot."""
    dot = row.instruction
    return dot.opcode == "dot" and all(Operand(operand(dot, n), "").fp8 for n in (0, 1))


def thin(names: list[str], is_quantized: bool = True) -> Found:
    """What the texts name of a matmul with a size of 1."""
    give = {"M": "the left operand 16 rows", "N": "the right operand 16 columns"}
    if len(names) > 1:
        return Found(thin="M and N are", advice="leave it: tensor cores multiply matrices")
    quantize = "" if is_quantized else "quantize both operands, and "
    advice = f"{quantize}give {give[names[0]]} (pad with zeros, slice the result)"
    return Found(thin=f"{names[0]} is", advice=advice)


@rule("block-scales", lost=Lost.FP8)
def block_scales(m: Matmul) -> Found | None:
    """The matmul has a scale for each block of elements, and the chip has no instruction for
    that."""
    if m.block_scaled is None or m.chip.has_block_scales:
        return None
    return Found(of=f" ({m.block_format.name})" if m.block_format else "")


@rule("scaled-dot-spelled-out", lost=Lost.FP8)
def scaled_dot_spelled_out(m: Matmul) -> Found | None:
    """The matmul is JAX's scaled_dot, which XLA computes by its definition."""
    is_composite = m.block_scaled is not None and m.block_scaled.opcode == "call"
    return found_if(is_composite and m.chip.has_block_scales)


@rule("block-format-not-multiplied", lost=Lost.FP8)
def block_format_not_multiplied(m: Matmul) -> Found | None:
    """The matmul has block scales, in a combination of formats that XLA has no call for."""
    call = m.block_scaled
    if call is None or call.opcode != "custom-call" or not m.chip.has_block_scales:
        return None
    lhs, rhs = (operand(call, index).shape.dtype for index in (0, 1))
    otherwise = ""
    given = scaled_dot_of(call)
    if given and given.has_instruction:
        otherwise = (
            "call jax.lax.scaled_dot and leave XLA's Triton on (gemm='auto'), from JAX 0.12 on; or "
        )
    return Found(lhs=lhs, rhs=rhs, otherwise=otherwise)


@rule("fp4-operand-not-k-last", lost=Lost.FP8)
def fp4_operand_not_k_last(m: Matmul) -> Found | None:
    """An FP4 operand of jax.lax.scaled_dot is not stored with K last, and the other is FP4
    too."""
    call = m.block_scaled
    if call is None or call.opcode != "scaled-dot" or not m.chip.has_block_scales:
        return None
    shapes = [operand(call, index).shape for index in (0, 1)]
    if {shape.dtype for shape in shapes} != {E2M1.name}:
        return None
    sides = zip(("left", "right"), ("lhs", "rhs"), shapes, strict=True)
    others = [
        side
        for side, of, shape in sides
        if minor_to_major(shape)[0] not in dimensions(call, f"{of}_contracting_dims")
    ]
    return found_if(others, sides=" and ".join(others) + " operand")
