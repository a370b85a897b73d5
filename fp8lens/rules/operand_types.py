"""Why a matmul does not run in FP8: what XLA finds, or does not find, behind its operands."""

import re

from fp8lens.formats import CUBLASLT, E2M1, is_fp8
from fp8lens.hlo.ops import COLLECTIVES, COMMUTES
from fp8lens.hlo.origin import primitive
from fp8lens.hlo.values import broadcast_of, dimensions, look_through, minor_to_major, operand
from fp8lens.matmul.operands import Operand, Problem
from fp8lens.matmul.rows import is_sum_of_products, matmuls
from fp8lens.rules.facts import Matmul, ragged_of, scaled_dot_of
from fp8lens.rules.rule import Found, Lost, found_if, rule

_ALLOWED = ", ".join(sorted(COMMUTES))
#: K * (M + N) of the smallest matmul that XLA calls a library for: the default of its option
#: xla_gpu_gemm_rewrite_size_threshold.
_SMALLEST_CALL = 100


@rule(
    "old-chip",
    lost=Lost.FP8,
    reason="{chip} has compute capability {version}, and FP8 tensor cores begin at 8.9",
    fix="compile for Ada, Hopper or later, such as target='H100'",
    source="CreateF8CustomCall",
    logs="FP8 Custom Calls require Ada, Hopper, or later architectures.",
)
def old_chip(m: Matmul) -> Found | None:
    """The program is compiled for a chip without FP8 tensor cores.

    FP8 tensor cores came with Ada and Hopper, compute capabilities 8.9 and 9.0. For an older chip
    XLA's rewriter makes no FP8 call. XLA then converts the operands to a wider type in kernels and
    multiplies in that type. The result is right, but the matmul gains nothing from FP8.

    Compiled with: target="A100"
    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Compiled with: target="H100"
    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    version = ".".join(map(str, m.chip.compute_capability))
    return found_if(not m.chip.has_fp8, version=version)


@rule(
    "fused-attention",
    lost=Lost.FP8,
    reason=(
        "attention runs in one kernel of cuDNN, which multiplies {math}: "
        "jax.nn.dot_product_attention takes no FP8 operands"
    ),
    fix=(
        "leave it, and check the other matmuls with assert_fp8_gemms(..., "
        "allow='fused-attention'); attention written as two dots of FP8 arrays would bring the "
        "scores and the softmax into kernels of their own"
    ),
    source="jax.nn.dot_product_attention, implementation='cudnn': bfloat16 or float16",
)
def fused_attention(m: Matmul) -> Found | None:
    """The matmul is a part of cuDNN's fused attention, which has 16-bit operands.

    cuDNN computes both matmuls of attention and the softmax between them in one kernel, and the
    scores never reach memory. JAX's public function for it takes queries, keys and values in
    bfloat16 or float16. XLA's rewriter looks at dots, and this program has none.

    This page has no program, because JAX needs an installed cuDNN to trace one.
    """
    target = m.row.instruction.custom_call_target or ""
    return found_if(target.startswith("__cudnn$fmha"))


@rule(
    "not-quantized",
    lost=Lost.FP8,
    reason="{which} {dtypes} in the program, not FP8",
    fix="quantize to float8_e4m3fn with a scalar scale, and dequantize before the dot",
    source="MatchFp8Param: an FP8 array, converted, optionally times a scalar",
)
def not_quantized(m: Matmul) -> Found | None:
    """An operand is not FP8 anywhere in the program.

    A call multiplies in FP8 only if both operands are FP8 arrays. XLA does not quantize an operand:
    that changes the numbers, so the program has to ask for it. In weight-only quantization, for
    instance, the weights are FP8 and the activations are not. The FP8 weights take less memory, but
    they are multiplied in the type of the activations.

    Loses it:

        def layer(x, b, b_scale):
            return jax.lax.dot(x, dequantize(b, b_scale, bf16).T)

    Keeps it:

        def layer(x, b, x_scale: "f32[]", b_scale):
            return scaled_dot(quantize(x, 1 / x_scale), b, x_scale, b_scale, bf16)
    """
    if m.dot is None:
        return _wide_vector(m)
    if not m.missing or m.folded or m.blocked is not None or m.block_scaled is not None:
        return None
    which = "both operands are" if len(m.missing) == 2 else f"the {m.missing[0].side} operand is"
    return Found(which=which, dtypes=_listed(_stored_type(side) for side in m.missing))


def _listed(types) -> str:
    return " and ".join(dict.fromkeys(types))


def _stored_type(side: Operand) -> str:
    """The type of an operand in the program: of integers and 4-bit floats their own, whatever they
    are converted to in front of the dot.
    """
    stored = look_through(side.operand, ("bitcast", "transpose", "multiply", "convert"))
    return stored.shape.dtype if re.match(r"f4|[su]\d", stored.shape.dtype) else side.dtype


def _wide_vector(m: Matmul) -> Found | None:
    """What a product that XLA spelled out multiplies, where that is not FP8, and would be another
    matter with more rows in a batch.
    """
    if m.row.k == 1:
        return None
    wide = [d for d in (m.row.lhs_dtype, m.row.rhs_dtype) if not is_fp8(d)]
    if not _is_spelled_out(m) or not wide or any(map(_reads_fp8, m.as_written)):
        return None
    which = "both operands are" if len(wide) == 2 else "an operand is"
    return Found(which=which, dtypes=_listed(wide))


def _reads_fp8(row) -> bool:
    """Whether XLA would find an FP8 array behind both operands of a dot."""
    dot = row.instruction
    return dot.opcode == "dot" and all(Operand(operand(dot, n), "").fp8 for n in (0, 1))


def _is_spelled_out(m: Matmul) -> bool:
    """Whether XLA wrote it as multiplications and a sum: then there was no dot to rewrite."""
    return m.dot is None and m.row.library == "kernel" and bool(m.thin("MNK"))


@rule(
    "product-and-sum",
    lost=Lost.FP8,
    reason=(
        "the program multiplies {m} x {k} by {k} x {n} elements and adds up{how}: it has no dot "
        "here, and XLA makes a plain kernel, without tensor cores"
    ),
    fix="write it as jax.lax.dot or jnp.einsum, of arrays that are FP8",
    source="XLA's gemm_rewriter.cc takes dots: no pass makes a dot of a multiply and a reduce",
)
def product_and_sum(m: Matmul) -> Found | None:
    """A matmul is written as a multiplication of broadcast arrays, and a sum.

    x[:, None] * w[None], summed along the last dimension, gives the numbers of a matmul. But XLA
    sees a multiplication and a sum, which it fuses into one kernel. It does not look for matmuls in
    these, so the kernel runs without tensor cores, whatever the arrays' type. Only if both arrays
    are broadcast is the sum a matmul. The rule does not apply to the sum of an elementwise product,
    as in a norm or a dot of two vectors. A loop that adds one outer product in each iteration is a
    matmul too, if nothing else in it reads the sum.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return (x[:, None] * w[None]).sum(-1)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return jnp.einsum("mk,nk->mn", x, w)
    """
    row = m.row
    how = ", one outer product in each iteration of a loop" if row.k == 1 else ""
    return found_if(m.dot is None and is_sum_of_products(row), m=row.m, n=row.n, k=row.k, how=how)


@rule(
    "unknown-no-dot",
    lost=Lost.FP8,
    reason=(
        "unknown: no dot that XLA's rewriter was given can be matched with this matmul (it is run "
        "by {library} in {math}, op_name {op_name})"
    ),
    fix="look at the passes before it: print(fp8lens.passes(fn, *args))",
    source="none found",
)
def unknown_no_dot(m: Matmul) -> Found | None:
    """The matmul cannot be matched with any dot that XLA's rewriter was given.

    `fp8lens` compares each compiled matmul with the dots that XLA's rewriter was given. If an
    earlier pass replaced the dot by something that no rule here knows, there is nothing to compare.
    No program in the tests reaches this rule, so its page has none. `fp8lens.passes` prints what
    each pass of XLA changed at a matmul, and shows which pass replaced the dot.
    """
    return found_if(m.dot is None and not _is_spelled_out(m), op_name=repr(m.row.op_name))


@rule(
    "spelled-out",
    lost=Lost.FP8,
    reason="{thin} 1: XLA replaces such a dot by a multiplication and a sum",
    fix="{advice}",
    source="XLA's dot_strength_reduction.cc and gemv_rewriter.cc",
)
def spelled_out(m: Matmul) -> Found | None:
    """M, N or K is 1, and XLA replaces the dot by a multiplication and a sum.

    If one operand is a vector, the work is mostly reading the other one, and tensor cores do not
    help with that. XLA replaces a dot with M or N of 1 if K * (M + N) is below 10 million, and dots
    with K of 1. The rewriter then finds no dot that it could replace by a call. A larger dot with M
    or N of 1 does become a call, but not in FP8: see vector-operand.

    With more rows in a batch it is a matmul. Padding one row to 16 makes an FP8 call too, but the
    padding takes a kernel of its own: see own-padding-of-few.

    Loses it:

        def layer(a: "f8e4m3fn[1,256]", b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Keeps it:

        def layer(a: "f8e4m3fn[16,256]", b, a_scale, b_scale):  # 16 requests in a batch
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return _thin(m.thin("MNK")) if _is_spelled_out(m) else None


def _thin(names: list[str]) -> Found:
    give = {"M": "the left operand 16 rows", "N": "the right operand 16 columns"}
    verb = "are" if len(names) > 1 else "is"
    wide = " and ".join(give[name] for name in names if name in give)
    advice = f"give {wide} (pad with zeros, slice the result): then XLA makes a call of it"
    if "K" in names:
        advice = "leave it: a product without a sum over K has no work for tensor cores"
    return Found(thin=f"{' and '.join(names)} {verb}", wide=wide, advice=advice)


@rule(
    "block-scales",
    lost=Lost.FP8,
    reason=(
        "{chip} has no block-scaled matmul{of}: XLA dequantizes the operands, and multiplies in "
        "{math}"
    ),
    fix="compile for B200 or later, or use one scalar scale for each operand",
    source="XLA's block_scaling_rewriter.cc: cuDNN from compute capability 10.0 on",
)
def block_scales(m: Matmul) -> Found | None:
    """The matmul has a scale for each block of elements, and the chip has no instruction for that.

    Tensor cores multiply with block scales from Blackwell on, compute capability 10.0. For an older
    chip XLA expands the operation: it dequantizes both operands to a wider type, in kernels, and
    multiplies the results. The older chips have FP8 calls with one scale for each operand.

    Loses it:

        def layer(
            a: "f8e4m3fn[1,64,256]",
            b: "f8e4m3fn[1,128,256]",
            a_scales: "f8e8m0fnu[1,64,8]",
            b_scales: "f8e8m0fnu[1,128,8]",
        ):
            return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=f32)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    if m.block_scaled is None or m.chip.has_block_scales:
        return None
    return Found(of=f" ({m.block_format.name})" if m.block_format else "")


@rule(
    "block-format-not-multiplied",
    lost=Lost.FP8,
    reason=(
        "XLA hands no block-scaled matmul of {lhs} and {rhs} with these scales to cuDNN: it "
        "dequantizes the operands, and multiplies in {math}"
    ),
    fix="{otherwise}use MXFP8 with E4M3 for one operand at least, or NVFP4",
    source="XLA's block_scaling_rewriter.cc: MXFP8, and NVFP4 with scales in E4M3",
)
def block_format_not_multiplied(m: Matmul) -> Found | None:
    """The matmul has block scales, in a combination of formats that XLA has no call for.

    cuDNN multiplies E4M3 by E4M3 or E5M2 with a power of two for each 32 elements (MXFP8), and
    E2M1 with an E4M3 scale for each 16 (NVFP4). `jax.nn.scaled_matmul` becomes a call of these
    alone. MXFP4, two operands in E5M2, and other scales are dequantized in kernels and multiplied
    in a wide type. `jax.lax.scaled_dot` becomes a kernel of XLA's Triton instead, which multiplies
    these formats as they are: E5M2 in all releases here, FP4 from JAX 0.12 on.

    Compiled with: target="B200"

    Loses it:

        def layer(
            a: "f4e2m1fn[1,64,256]",
            b: "f4e2m1fn[1,128,256]",
            a_scales: "f8e8m0fnu[1,64,8]",
            b_scales: "f8e8m0fnu[1,128,8]",
        ):
            return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=bf16)

    Compiled with: target="B200"

    Keeps it:

        def layer(
            a: "f8e4m3fn[1,64,256]",
            b: "f8e4m3fn[1,128,256]",
            a_scales: "f8e8m0fnu[1,64,8]",
            b_scales: "f8e8m0fnu[1,128,8]",
        ):
            return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=bf16)
    """
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


@rule(
    "scaled-dot-spelled-out",
    lost=Lost.FP8,
    reason=(
        "XLA does not hand jax.lax.scaled_dot to cuDNN: without a kernel of Triton's for it, it "
        "dequantizes the operands, and multiplies in {math}"
    ),
    fix=(
        "leave XLA's Triton on (gemm='auto', XLA's own choice) with FP8 or FP4 for both operands "
        "and E8M0 for the scales; or call jax.nn.scaled_matmul in its place"
    ),
    source="XLA's block_scaling_rewriter.cc: the custom call __op$block_scaled_dot alone",
)
def scaled_dot_spelled_out(m: Matmul) -> Found | None:
    """The matmul is JAX's scaled_dot, which XLA computes by its definition.

    `jax.lax.scaled_dot` is a composite: an operation with a definition, which a compiler may
    replace. On a chip with block scales XLA's Triton multiplies it as it is, by one kernel. With
    Triton off, as here, or with wide operands or scales, XLA takes the definition: it dequantizes
    both operands in kernels and multiplies the results. `jax.nn.scaled_matmul` computes the same
    with [B, M, K], [B, N, K] and scales for blocks of 32, and cuDNN runs it on chips with compute
    capability 10.0 or higher.

    Compiled with: target="B200"

    Loses it:

        def layer(
            a: "f8e4m3fn[128,256]",
            b: "f8e4m3fn[256,128]",
            a_scales: "f8e8m0fnu[128,8]",
            b_scales: "f8e8m0fnu[8,128]",
        ):
            return jax.lax.scaled_dot(
                a, b, lhs_scale=a_scales, rhs_scale=b_scales, preferred_element_type=bf16
            )

    Compiled with: target="B200"

    Keeps it:

        def layer(
            a: "f8e4m3fn[1,128,256]",
            b: "f8e4m3fn[1,128,256]",
            a_scales: "f8e8m0fnu[1,128,8]",
            b_scales: "f8e8m0fnu[1,128,8]",
        ):
            return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=bf16)
    """
    is_composite = m.block_scaled is not None and m.block_scaled.opcode == "call"
    return found_if(is_composite and m.chip.has_block_scales)


@rule(
    "fp4-operand-not-k-last",
    lost=Lost.FP8,
    reason=(
        "XLA's Triton multiplies two FP4 operands only if K is the last dimension in memory of "
        "both. Of the {sides} it is not, so Triton converts both to {math}"
    ),
    fix=(
        "store the left operand as [M, K], and the right one as [N, K], to be transposed in the "
        "call of jax.lax.scaled_dot"
    ),
    source="the kernel's PTX: its mma instruction",
)
def fp4_operand_not_k_last(m: Matmul) -> Found | None:
    """An FP4 operand of jax.lax.scaled_dot is not stored with K last, and the other is FP4 too.

    Two FP4 numbers share a byte. The tensor core takes pairs along K, the dimension that is summed
    over. Where the pairs lie along another dimension, Triton unpacks the numbers, converts them to
    float16 or bfloat16, and multiplies these. An FP8 operand may be stored either way. Before JAX
    0.12 XLA made no such kernel of FP4 at all.

    Compiled with: target="B200", gemm="auto"

    Loses it:

        def layer(
            a: "f4e2m1fn[128,256]",
            b: "f4e2m1fn[256,128]",
            a_scales: "f8e4m3fn[128,16]",
            b_scales: "f8e4m3fn[16,128]",
        ):
            return jax.lax.scaled_dot(
                a, b, lhs_scale=a_scales, rhs_scale=b_scales, preferred_element_type=bf16
            )

    Compiled with: target="B200", gemm="auto"

    Keeps it:

        def layer(
            a: "f4e2m1fn[128,256]",
            b: "f4e2m1fn[128,256]",
            a_scales: "f8e4m3fn[128,16]",
            b_scales: "f8e4m3fn[16,128]",
        ):
            return jax.lax.scaled_dot(
                a, b.T, lhs_scale=a_scales, rhs_scale=b_scales, preferred_element_type=bf16
            )
    """
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


@rule(
    "one-number-operand",
    lost=Lost.FP8,
    reason=(
        "all elements of the {side} operand are one number, such as the ones that jax.grad passes "
        "back through jnp.sum: XLA computes with that number alone, broadcasts the result, and "
        "finds no FP8 array"
    ),
    fix=(
        "multiply by an array whose elements differ; in a test of a gradient, take it as an "
        "argument g: of jax.vjp, or of a loss such as jnp.sum(y * g)"
    ),
    source=(
        "XLA moves a broadcast after what is elementwise: FindF8SubgraphRecursive finds no FP8 "
        "array before the dot"
    ),
)
def one_number(m: Matmul) -> Found | None:
    """All elements of a dequantized operand are the same number.

    A broadcast of one number is not stored as an array. XLA does elementwise operations on the
    number before it broadcasts the result. Conversion and scale are such operations: after that the
    dot reads a broadcast of one wide number, and the rewriter finds no FP8 array behind it.

    A typical case is the gradient of jnp.sum(y): jax.grad passes an array of ones back to the
    matmul. In a real model the gradient varies, so this is often an artifact of a test. Let the
    test take the gradient as an argument.

    Loses it:

        def backward(b: "f8e4m3fn[256,128]", g_scale: "f32[]", b_scale):
            g = jnp.ones((64, 128))  # the gradient of jnp.sum
            return scaled_dot(quantize(g, 1 / g_scale), b, g_scale, b_scale)

    Keeps it:

        def backward(g: "f32[64,128]", b: "f8e4m3fn[256,128]", g_scale: "f32[]", b_scale):
            return scaled_dot(quantize(g, 1 / g_scale), b, g_scale, b_scale)
    """
    for side in m.sides:
        if (side.fp8 is None or side.problem) and _is_one_number(side):
            return Found(side=side.side)
    return None


def _is_one_number(side: Operand) -> bool:
    number = broadcast_of(side.operand)
    return number is not None and number.shape.size == 1


@rule(
    "constant-operand",
    lost=Lost.FP8,
    reason=(
        "the {side} operand is a constant of the program, such as an array that the function "
        "closes over: XLA converts it to {dtype} while it compiles, and finds no FP8 array"
    ),
    fix=(
        "pass the FP8 array as an argument of the function, or put jax.lax.optimization_barrier "
        "after it"
    ),
    source="XLA's constant folding: FindF8SubgraphRecursive finds no FP8 array before the dot",
)
def folded(m: Matmul) -> Found | None:
    """An operand is a constant, and XLA converts it from FP8 while it compiles.

    An array that a function closes over is part of the compiled program, as a constant. XLA
    computes what it can from constants in advance. That includes the conversion from FP8, and the
    multiplication by a scale if the scale is a constant too. What remains is a constant in a wide
    type: it takes more memory, and the rewriter finds no FP8 array behind it.

    An argument is not known in advance. If the array has to stay a constant, an
    optimization_barrier after it keeps XLA from computing with it.

    Loses it:

        import numpy as np

        weights = np.arange(128 * 256).reshape(128, 256) % 7

        def layer(a, a_scale, b_scale):
            return scaled_dot(a, jnp.asarray(weights, e4m3), a_scale, b_scale)

    Keeps it:

        def layer(a, weights: "f8e4m3fn[128,256]", a_scale, b_scale):
            return scaled_dot(a, weights, a_scale, b_scale)
    """
    side = m.folded
    if side is None or _is_one_number(side):
        return None
    return Found(side=side.side, dtype=side.dtype)


def _blocked_by(m: Matmul) -> str:
    """The opcode at which XLA's search for an FP8 array ends, or ""."""
    return m.blocked.opcode if m.blocked is not None and not m.folded else ""


@rule(
    "gathered-operand",
    lost=Lost.FP8,
    reason="the {side} operand is dequantized, then gathered over devices in {dtype} ({opcode})",
    fix="gather the quantized array (jax.lax.with_sharding_constraint on it), then dequantize",
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def gathered(m: Matmul) -> Found | None:
    """A sharded operand is dequantized first, and gathered from the devices after that.

    If each device needs all of an array that is sharded, XLA's partitioner inserts an all-gather.
    In the program below it does so directly before the dot, where the operand is already wide.
    XLA's rewriter does not look behind an all-gather, so it finds no FP8 array. The wide array is
    also more bytes to send. A sharding constraint on the FP8 array puts the all-gather before the
    dequantization.

    Compiled with: mesh_shape=(8,), in_specs=(P("x"), P("x"), P(), P())
    Loses it:

        def layer(a: "f8e4m3fn[512,256]", b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale, bf16)

    Compiled with: mesh_shape=(8,), in_specs=(P("x"), P("x"), P(), P())
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a: "f8e4m3fn[512,256]", b, a_scale, b_scale):
            b = shard(shard(b, P("x")), P())
            return scaled_dot(a, b, a_scale, b_scale, bf16)
    """
    if (opcode := _blocked_by(m)).startswith(COLLECTIVES):
        return Found(side=m.missing[0].side, opcode=opcode, dtype=m.missing[0].dtype)
    return _changed(m, Problem.GATHERED)


def _changed(m: Matmul, problem: Problem) -> Found | None:
    """The operand with an FP8 array that has this problem, and its fields."""
    if m.broken is None or m.broken.problem is not problem:
        return None
    return Found(side=m.broken.side, allowed=_ALLOWED, **m.broken.fields)


@rule(
    "merged-dots",
    lost=Lost.FP8,
    reason=(
        "XLA merged dots that share an operand, and joined their {side} operands after dequantizing"
    ),
    fix=(
        "compile with compiler_options={{'xla_gpu_dot_merger_threshold_mb': 0}}, or, where they "
        "share a scale, store the weights joined"
    ),
    source="XLA's dot_merger.cc; FindF8SubgraphRecursive does not look through a concatenate",
)
def merged(m: Matmul) -> Found | None:
    """XLA merges dots that read the same operand, and joins their other operands, dequantized.

    The projections to queries, keys and values read the same activations. XLA merges such dots if
    they are small: one larger matmul uses the GPU better. It joins the other operands with a
    concatenate, after their dequantization, and the rewriter does not look past a concatenate. So
    one matmul in a wide type takes the place of two in FP8.

    xla_gpu_dot_merger_threshold_mb is the size in megabytes up to which XLA merges, so 0 turns it
    off. If the weights share a scale, they can be stored as one array: then it is one matmul, in
    FP8.

    Loses it:

        def projections(a, b, c: "f8e4m3fn[128,256]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale), scaled_dot(a, c, a_scale, b_scale)

    Compiled with: compiler_options={"xla_gpu_dot_merger_threshold_mb": 0}
    Keeps it:

        def projections(a, b, c: "f8e4m3fn[128,256]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale), scaled_dot(a, c, a_scale, b_scale)
    """
    is_merged = _blocked_by(m) == "concatenate" and not m.as_written
    return Found(side=m.missing[0].side) if is_merged else None


@rule(
    "before-the-loop",
    lost=Lost.FP8,
    reason="the {side} operand is dequantized before the {where}, and comes into it as {dtype}",
    fix="dequantize in the {where}",
    source="FindF8SubgraphRecursive does not look outside of the dot's computation",
)
def before_the_loop(m: Matmul) -> Found | None:
    """An operand is dequantized before a loop or a branch that multiplies with it.

    The body of a loop is a computation of its own, which gets the arrays that it reads as inputs.
    So is each branch of a `jax.lax.cond`. XLA's rewriter searches for an FP8 array inside the
    computation that the dot is in. If the dequantization stands outside, the body gets the wide
    array. Dequantizing in the body does not repeat any work: the call reads the FP8 array and the
    scale.

    Loses it:

        def loop(a: "f8e4m3fn[64,64]", b: "f8e4m3fn[64,64]", a_scale, b_scale, d_scale):
            w = dequantize(b, b_scale)

            def layer(_, x):
                return quantize(jax.lax.dot(dequantize(x, a_scale), w.T), d_scale)

            return jax.lax.fori_loop(0, 4, layer, a)

    Keeps it:

        def loop(a: "f8e4m3fn[64,64]", b: "f8e4m3fn[64,64]", a_scale, b_scale, d_scale):
            def layer(_, x):
                return quantize(scaled_dot(x, b, a_scale, b_scale), d_scale)

            return jax.lax.fori_loop(0, 4, layer, a)
    """
    where = {"while": "loop", "conditional": "branch"}.get(_blocked_by(m))
    if where is None:
        return None
    return Found(side=m.missing[0].side, dtype=m.missing[0].dtype, where=where)


@rule(
    "operation-between",
    lost=Lost.FP8,
    reason="an operation stands between the {side} operand's dequantization and the dot: {opcode}",
    fix=(
        "gather or join the FP8 arrays, and compute before quantizing; only {allowed} may stand "
        "after the dequantization"
    ),
    source="FindF8SubgraphRecursive and MatchFp8Param",
)
def operation_between(m: Matmul) -> Found | None:
    """An operation with several inputs stands between the dequantization and the dot.

    The call multiplies the FP8 array itself, so the dequantization has to be the last thing that is
    computed for the operand. XLA's rewriter searches back from the dot for an FP8 array. It goes
    back through conversions, scales, masks and operations that move elements, and ends at others
    with several inputs, such as an addition, a gather or a concatenate.

    A gather or a concatenate can be done to the FP8 arrays. Do arithmetic before the quantization,
    or on the dot's result if that gives the same numbers.

    Loses it:

        def layer(table: "f8e4m3fn[512,256]", rows: "s32[64]", b, a_scale, b_scale):
            x = dequantize(table, a_scale)[rows]
            return jax.lax.dot(x, dequantize(b, b_scale).T)

    Keeps it:

        def layer(table: "f8e4m3fn[512,256]", rows: "s32[64]", b, a_scale, b_scale):
            return scaled_dot(table[rows], b, a_scale, b_scale)
    """
    opcode = _blocked_by(m)
    return Found(side=m.missing[0].side, opcode=opcode, allowed=_ALLOWED) if opcode else None


@rule(
    "dot-algorithm",
    lost=Lost.FP8,
    reason="the program asks for the algorithm {algorithm}, and XLA multiplies in its types",
    fix="leave the precision out, or ask for jax.lax.DotAlgorithmPreset.DEFAULT",
    source=(
        "XLA converts the operands to the algorithm's types, and its gemm_rewriter.cc finds no "
        "FP8 before that"
    ),
)
def algorithm(m: Matmul) -> Found | None:
    """The program asks for an algorithm, and with it for the types to multiply in.

    The precision argument of a dot can name an algorithm, such as BF16_BF16_F32: multiply in
    bfloat16, add in float32. If the operands are dequantized to bfloat16, XLA puts a conversion to
    the algorithm's type between them and the dot, and its rewriter finds no FP8 array behind this
    conversion.

    The loss depends on the type of the dequantization. With float32, XLA multiplies in FP8 although
    the program asks for BF16_BF16_F32 (or its forms X3 and X9), TF32_TF32_F32 or F32_F32_F32: the
    algorithm that a program names need not be the one that runs.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            x, w = dequantize(a, a_scale, bf16), dequantize(b, b_scale, bf16)
            return jax.lax.dot(x, w.T, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            x, w = dequantize(a, a_scale, bf16), dequantize(b, b_scale, bf16)
            return jax.lax.dot(x, w.T)
    """
    asked = m.given.algorithm
    is_asked = m.is_quantized and asked not in ("", "ALG_DOT_ANY_F8_ANY_F8_F32")
    return found_if(is_asked, algorithm=asked.removeprefix("ALG_DOT_"))


@rule(
    "triton-tile",
    lost=Lost.FP8,
    reason="the dot is of FP8 arrays, but with a tile of {tile} the kernel multiplies in {math}",
    fix=(
        "use gemm='cublaslt', or force a tile of whole FP8 instructions: "
        "compiler_options={{'xla_gpu_override_gemm_autotuner': 'block_m: 128 block_n: 128 "
        "block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3'}}"
    ),
    source="the kernel's PTX: its mma instruction",
)
def triton_tile(m: Matmul) -> Found | None:
    """The dot is of FP8 arrays, but Triton's kernel converts them to a wider type.

    Hopper's FP8 instruction is executed by four warps together, on 64 rows and 32 elements of K.
    The tile is the block of the result that one thread block computes, and the part of K that it
    reads at a time. Triton uses the FP8 instruction if the tile is at least that large and has four
    warps. Otherwise it converts the FP8 numbers to float16 and multiplies these.

    On a GPU, XLA times several tiles and takes the fastest. If it compiles without a GPU, it takes
    a small default tile, so the kernel on a GPU can be another one.

    Compiled with: gemm="triton"
    Loses it:

        def layer(a, b):
            return jax.lax.dot(a, b.T, preferred_element_type=f32)

    Compiled with: gemm="cublaslt"
    Keeps it:

        def layer(a, b):
            return jax.lax.dot(a, b.T, preferred_element_type=f32)
    """
    return found_if(_is_tritons(m) and _says_fp8(m), tile=m.row.tile)


def _is_tritons(m: Matmul) -> bool:
    return m.is_quantized and m.row.library == "triton"


def _says_fp8(m: Matmul) -> bool:
    """Whether the dot in the kernel is of FP8 arrays."""
    return matmuls(m.row.instruction)[0].is_fp8


@rule(
    "vector-in-triton",
    lost=Lost.FP8,
    reason=(
        "M or N is 1: XLA multiplies the matrix by a vector in a kernel of its own, which converts "
        "both to {math}"
    ),
    fix=(
        "give the operand that has that dimension 16 rows (pad with zeros, slice the result), and "
        "use gemm='cublaslt'"
    ),
    source="the kernel's PTX: it has no FP8 instruction",
)
def vector_in_triton(m: Matmul) -> Found | None:
    """M or N is 1, and XLA's own kernel multiplies a vector.

    XLA drops a dimension of size 1. What is left is a sum over K for each row of one matrix, which
    XLA's Triton computes in a wide type. cuBLASLt's FP8 call takes matrices of 16 rows or more.
    Triton's own FP8 needs 64 rows: see triton-tile.

    Compiled with: gemm="triton"

    Loses it:

        def layer(a: "f8e4m3fn[1,4096]", b: "f8e4m3fn[4096,4096]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Compiled with: gemm="cublaslt"

    Keeps it:

        def layer(a: "f8e4m3fn[16,4096]", b: "f8e4m3fn[4096,4096]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return found_if(_is_tritons(m) and m.thin("MN"))


@rule(
    "triton-dequantized",
    lost=Lost.FP8,
    reason=(
        "Triton multiplies what the dot multiplies, and the operands are dequantized to {math} "
        "first"
    ),
    fix=(
        "multiply the FP8 arrays and scale the result, jax.lax.dot(a, b, "
        "preferred_element_type=jnp.float32) * (a_scale * b_scale); or use gemm='cublaslt' "
        "(XLA_FLAGS=--xla_gpu_enable_triton_gemm=false)"
    ),
    source=(
        "XLA's Triton emitter keeps the dot's operand types; only the cuBLASLt rewriter moves a "
        "dequantization past it"
    ),
)
def triton_dequantized(m: Matmul) -> Found | None:
    """Triton's kernel dequantizes the operands, then multiplies in a wide type.

    XLA's rewriter moves a dequantization past the matmul, but only when it makes a call of
    cuBLASLt. XLA's own kernels, which Triton compiles, do what the program says: they convert and
    scale the operands, and multiply the results. A dot of the FP8 arrays, with the scales after it,
    is an FP8 dot for Triton too, if the tile is large enough: see triton-tile.

    Compiled with: gemm="triton"
    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Compiled with: gemm="cublaslt"
    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return found_if(_is_tritons(m) and not _says_fp8(m))


@rule(
    "array-of-scales",
    lost=Lost.FP8,
    reason=(
        "the {side} operand is dequantized with the scales {scales}, and the call takes one scalar"
    ),
    fix=(
        "dequantize with a scalar; scales along M or N, not K, can multiply the result instead "
        "(one more kernel, and the matmul is FP8)"
    ),
    source="CreateF8CustomCall",
    logs="The scaling factors must be scalars.",
)
def array_of_scales(m: Matmul) -> Found | None:
    """An operand is dequantized with an array of scales.

    XLA's rewriter passes the call one scalar as the scale of each operand. If the scale is an
    array, the rewriter makes no FP8 call, and XLA multiplies in a wide type.

    A scale for each row of the left operand is one for each row of the result, so it can multiply
    the result. Then the matmul is FP8, and a kernel after it applies the scales: see vector-scale.
    Scales along K cannot be moved there, because the matmul sums over K.

    Loses it:

        def layer(a, b, a_scales: "f32[64,1]", b_scale):
            return jax.lax.dot(a.astype(f32) * a_scales, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, b, a_scales: "f32[64,1]", b_scale):
            return jax.lax.dot(a.astype(f32), dequantize(b, b_scale).T) * a_scales
    """
    return _changed(m, Problem.ARRAY_OF_SCALES)


@rule(
    "stack-converted",
    lost=Lost.FP8,
    reason=(
        "the {side} operands of several layers are converted together, and each is cut out "
        "before it is scaled"
    ),
    fix=(
        "leave the loop over layers as it is (lax.scan's unroll=1), or pass each layer's array "
        "and scale by itself"
    ),
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def stack_converted(m: Matmul) -> Found | None:
    """The weights of several layers are one array, and XLA converts all of it at once.

    An unrolled lax.scan takes one layer after the other out of a stack, and each layer converts its
    slice from FP8. XLA replaces these conversions by one conversion of the whole stack, and slices
    the result. A slice then stands between each layer's conversion and its scale, but the rewriter
    looks for the scale directly after the conversion.

    A loop that is not unrolled contains one slice, which XLA leaves before the conversion. Weights
    that are passed as separate arrays need no slice.

    Loses it:

        def layers(a, stack: "f8e4m3fn[4,256,256]", scales: "f32[4]", a_scale):
            def layer(x, given):
                w, w_scale = given
                return quantize(scaled_dot(x, w, a_scale, w_scale, bf16), a_scale), None

            return jax.lax.scan(layer, a, (stack, scales), unroll=4)[0]

    Keeps it:

        def layers(a, stack: "f8e4m3fn[4,256,256]", scales: "f32[4]", a_scale):
            def layer(x, given):
                w, w_scale = given
                return quantize(scaled_dot(x, w, a_scale, w_scale, bf16), a_scale), None

            return jax.lax.scan(layer, a, (stack, scales))[0]
    """
    return _changed(m, Problem.STACK_CONVERTED)


@rule(
    "scaled-late",
    lost=Lost.FP8,
    reason=(
        "{between} stands between the {side} operand's conversion and a scale, which has to "
        "follow the conversion directly"
    ),
    fix=(
        "multiply once, directly after the conversion: a.astype(jnp.float32) * (s * t); if it is "
        "a transpose that stands there, which XLA may have moved there, transpose the FP8 array, "
        "put jax.lax.optimization_barrier after that, and dequantize last"
    ),
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def scaled_late(m: Matmul) -> Found | None:
    """The operand is scaled, but not directly after its conversion from FP8.

    XLA's rewriter looks for a pattern: a conversion from FP8, then at most one multiplication by a
    scalar. After these it accepts only operations that move elements or mask them with zeros. A
    second multiplication does not fit, and neither does a multiplication after a transpose that XLA
    has left there.

    XLA can put the transpose there itself: it moves a transpose of the FP8 array past the
    conversion. An optimization_barrier after the transpose prevents this.

    Loses it:

        def layer(a, b, a_scale, b_scale, loss_scale: "f32[]"):
            x = a.astype(f32) * a_scale * loss_scale
            return jax.lax.dot(x, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, b, a_scale, b_scale):  # a_scale has loss_scale in it
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return _changed(m, Problem.SCALED_LATE)


@rule(
    "converted-twice",
    lost=Lost.FP8,
    reason="the {side} operand is converted again, to {to}, between its dequantization and the dot",
    fix=(
        "dequantize each operand once, both to the type that the dot is to return: float32, "
        "bfloat16 or float16"
    ),
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def converted_twice(m: Matmul) -> Found | None:
    """The dequantized operand is converted to a second type before the dot.

    XLA's rewriter expects one conversion: from FP8 to the type that the dot multiplies. If the
    operand is dequantized in float32 and then converted to bfloat16, it was rounded once more,
    which the call would not do. If jnp.dot gets operands of two types, JAX adds such a conversion
    by itself.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            x = dequantize(a, a_scale).astype(bf16)
            return jax.lax.dot(x, dequantize(b, b_scale, bf16).T)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            x = dequantize(a, a_scale, bf16)
            return jax.lax.dot(x, dequantize(b, b_scale, bf16).T)
    """
    return _changed(m, Problem.CONVERTED_TWICE)


@rule(
    "masked-operand",
    lost=Lost.FP8,
    reason="the {side} operand is masked with something other than zero after its dequantization",
    fix="mask with zeros, or mask before quantizing",
    source="MatchFp8Param",
    logs="Select requires a zero operand to be exchanged with dequantization.",
)
def masked(m: Matmul) -> Found | None:
    """The dequantized operand is masked with a number other than zero.

    XLA's rewriter moves a mask from the dequantized operand to the FP8 array. Zero is zero there
    too, whatever the scale is. Another number would have to be divided by the scale and rounded to
    FP8, so the rewriter accepts zeros only. The program can do that division itself, or mask the
    array before it is quantized.

    Loses it:

        def layer(a, b, a_scale, b_scale, mask: "pred[64,256]"):
            x = jnp.where(mask, dequantize(a, a_scale), 1)
            return jax.lax.dot(x, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, b, a_scale, b_scale, mask: "pred[64,256]"):
            x = jnp.where(mask, dequantize(a, a_scale), 0)
            return jax.lax.dot(x, dequantize(b, b_scale).T)
    """
    return _changed(m, Problem.MASKED)


@rule(
    "chosen-operand",
    lost=Lost.FP8,
    reason="a flag chooses the {side} operand from two arrays, after dequantization",
    fix=(
        "choose between two matmuls, jax.lax.cond with a dot in each branch; where only the scales "
        "differ, choose between these"
    ),
    source="MatchFp8Param",
    logs="Select requires a zero operand to be exchanged with dequantization.",
)
def chosen(m: Matmul) -> Found | None:
    """The program dequantizes two arrays, and one number decides which of them it multiplies.

    jnp.where with two arrays is a select instruction. jax.lax.cond becomes one too, if both
    branches are cheap. XLA's rewriter exchanges a select with the dequantization only if it selects
    between the array and zeros, because each of two arrays has a scale of its own. A choice between
    the FP8 arrays, and another one between their scales, would keep FP8, but a kernel would copy
    the chosen array. If the dots stand in the branches of a jax.lax.cond, one of them runs, and
    reads its array from where it is.

    Loses it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, flag: "pred[]"):
            x = jnp.where(flag, dequantize(a, a_scale), dequantize(other, b_scale))
            return jax.lax.dot(x, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, flag: "pred[]"):
            return jax.lax.cond(
                flag,
                lambda: scaled_dot(a, b, a_scale, b_scale),
                lambda: scaled_dot(other, b, b_scale, b_scale),
            )
    """
    return _changed(m, Problem.CHOSEN)


@rule(
    "chosen-elements",
    lost=Lost.FP8,
    reason=(
        "each element of the {side} operand is chosen from two arrays by a mask, after "
        "dequantization"
    ),
    fix="quantize both arrays with one scale, choose between the FP8 arrays, then dequantize",
    source="MatchFp8Param",
    logs="Select requires a zero operand to be exchanged with dequantization.",
)
def chosen_elements(m: Matmul) -> Found | None:
    """The program dequantizes two arrays, then takes each element from one of them.

    jnp.where with two arrays is a select instruction. XLA's rewriter exchanges a select with the
    dequantization only if it selects between the array and zeros, because each of two arrays has a
    scale of its own. If both have the same scale, the elements can be chosen before the
    dequantization. A kernel writes what is chosen: a fourth of the bytes of f32.

    Loses it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, keep: "pred[64]"):
            x = jnp.where(keep[:, None], dequantize(a, a_scale), dequantize(other, b_scale))
            return jax.lax.dot(x, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, keep: "pred[64]"):
            x = jnp.where(keep[:, None], a, other)  # which have one scale
            return scaled_dot(x, b, a_scale, b_scale)
    """
    return _changed(m, Problem.CHOSEN_EACH)


@rule(
    "changed-between",
    lost=Lost.FP8,
    reason="the {side} operand is changed between its dequantization and the dot: {opcode}",
    fix=(
        "compute it before quantizing; make one factor, or a sign, a part of the scale; multiply "
        "the result by a factor of each row or column, but not by one that varies along K; only "
        "{allowed} may follow the dequantization"
    ),
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def changed_between(m: Matmul) -> Found | None:
    """The program computes with the dequantized operand before the dot.

    The call multiplies the FP8 array itself. XLA's rewriter finds that array, then checks each
    operation between its dequantization and the dot. Only operations that move elements or mask
    them with zeros may stand there, since they can be done to the FP8 array as well. Arithmetic
    changes the numbers: its result need not be a number of FP8.

    Some functions can be moved by hand. A sign or a factor can be part of the scale. Apply the
    others before the quantization. If the rewriter does not find the FP8 array at all, the rule is
    operation-between.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return jax.lax.dot(-dequantize(a, a_scale), dequantize(b, b_scale).T)

    Keeps it:

        def layer(a, b, minus_a_scale: "f32[]", b_scale):
            return scaled_dot(a, b, minus_a_scale, b_scale)
    """
    return _changed(m, Problem.CHANGED_BETWEEN)


@rule(
    "both-e5m2-bare",
    lost=Lost.FP8,
    reason="both operands are E5M2, and cuBLASLt has no kernel for that",
    fix=(
        "convert one of them to E4M3: E5M2 is for gradients, and a gradient meets activations or "
        "weights"
    ),
    source="TypesAreSupportedByCublasLt: its table of operand types",
)
def both_e5m2_bare(m: Matmul) -> Found | None:
    """The dot is of two E5M2 arrays, without scales.

    cuBLASLt multiplies E4M3 by E4M3, and E4M3 by E5M2, but not E5M2 by E5M2. XLA compares the types
    with cuBLASLt's table and converts both operands to float16 if their pair is not in it.

    E5M2 trades precision for range. It is meant for gradients, and in a backward pass a gradient is
    multiplied by activations or weights, which are E4M3. If dequantized operands are both E5M2, the
    rule is both-e5m2.

    Loses it:

        def layer(a: "f8e5m2[64,256]", b: "f8e5m2[128,256]"):
            return jax.lax.dot(a, b.T, preferred_element_type=f32)

    Keeps it:

        def layer(a: "f8e5m2[64,256]", b):
            return jax.lax.dot(a, b.T, preferred_element_type=f32)
    """
    is_both = m.is_quantized and m.types == ["f8e5m2"] * 2
    return found_if(is_both and m.sides[0].dtype == "f8e5m2")


@rule(
    "both-e5m2",
    lost=Lost.FP8,
    reason="both operands are E5M2, and cuBLASLt has no kernel for that",
    fix=(
        "convert one of them to E4M3: E5M2 is for gradients, and a gradient meets activations or "
        "weights"
    ),
    source="CreateF8CustomCall",
    logs="The element type of one of the operands must be F8E4M3FN.",
)
def both_e5m2(m: Matmul) -> Found | None:
    """Both operands are dequantized from E5M2.

    cuBLASLt multiplies E4M3 by E4M3, and E4M3 by E5M2, but not E5M2 by E5M2. XLA's rewriter makes
    no FP8 call of such operands, so kernels dequantize them and the matmul runs in a wide type.

    E5M2 trades precision for range. It is meant for gradients, and in a backward pass a gradient is
    multiplied by activations or weights, which are E4M3.

    Loses it:

        def layer(a: "f8e5m2[64,256]", b: "f8e5m2[128,256]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Keeps it:

        def layer(a: "f8e5m2[64,256]", b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    is_both = m.is_quantized and m.types == ["f8e5m2"] * 2
    return found_if(is_both and m.sides[0].dtype != "f8e5m2")


@rule(
    "e5m2-result",
    lost=Lost.FP8,
    reason="cuBLASLt has no kernel for two E4M3 operands and an E5M2 result",
    fix="ask for float8_e4m3fn, bfloat16 or float32 as preferred_element_type",
    source="TypesAreSupportedByCublasLt: its table of types",
)
def e5m2_result(m: Matmul) -> Found | None:
    """The dot multiplies two E4M3 arrays, and its result is to be E5M2.

    cuBLASLt has kernels for certain combinations of types only. Two E4M3 operands can give E4M3,
    but not E5M2; if one operand is E5M2, the result can be E5M2. XLA compares the types with
    cuBLASLt's table, and converts the operands to float16 for a combination that is not in it.

    Loses it:

        def layer(a, b):
            return jax.lax.dot(a, b.T, preferred_element_type=e5m2)

    Keeps it:

        def layer(a, b):
            return jax.lax.dot(a, b.T, preferred_element_type=e4m3)
    """
    if not m.is_quantized or m.dot is None:
        return None
    return found_if(m.types == ["f8e4m3fn"] * 2 and m.dot.shape.dtype == "f8e5m2")


@rule(
    "other-fp8-type",
    lost=Lost.FP8,
    reason="{dtype} is not a type that cuBLASLt multiplies on NVIDIA GPUs",
    fix="store the operand as float8_e4m3fn, or float8_e5m2 for one of the two",
    source="CreateF8CustomCall",
    logs="The input types must be F8E5M2 or F8E4M3FN",
)
def other_fp8_type(m: Matmul) -> Found | None:
    """An operand is of an 8-bit type that NVIDIA's tensor cores do not multiply.

    JAX has more 8-bit floating-point types than NVIDIA's hardware: float8_e4m3fnuz and
    float8_e5m2fnuz are AMD's, and float8_e3m4 and float8_e4m3 have other ranges. The call takes
    float8_e4m3fn and float8_e5m2. Operands of other types are dequantized in kernels and multiplied
    in a wide type.

    Loses it:

        def layer(a: "f8e4m3fnuz[64,256]", b: "f8e4m3fnuz[128,256]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    other = [dtype for dtype in m.types if dtype not in CUBLASLT] if m.is_quantized else []
    return Found(dtype=other[0]) if other else None


@rule(
    "result-type",
    lost=Lost.FP8,
    reason="the dot's result is {dtype}, and no FP8 call writes that",
    fix=(
        "dequantize in float32, bfloat16 or float16, or ask for one of these as "
        "preferred_element_type"
    ),
    source="CreateF8CustomCall",
    logs="Output type must be F8E4M3FN, F8E5M2, BF16, F16 or F32",
)
def result_type(m: Matmul) -> Found | None:
    """The dot returns a type that the FP8 call does not write.

    The FP8 call writes float32, bfloat16, float16, E4M3 or E5M2, and XLA's rewriter makes none for
    another type. The type of the dot's result is the type that the operands are dequantized to, if
    the program gives no other as preferred_element_type.

    Loses it:

        @jax.enable_x64(True)
        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale, jnp.float64)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    if not m.is_quantized or m.dot is None:
        return None
    dtype = m.dot.shape.dtype
    return found_if(dtype not in ("bf16", "f16", "f32", *CUBLASLT), dtype=dtype)


@rule(
    "vector-operand",
    lost=Lost.FP8,
    reason=(
        "{thin} 1: XLA makes a vector of the operand with that dimension, and its FP8 call takes "
        "matrices"
    ),
    fix="give {wide} (pad with zeros, slice the result)",
    source="CreateF8CustomCall (XLA's gemm_rewriter.cc)",
    logs="Inputs must have exactly one contracting and one non-contracting dimension.",
)
def vector(m: Matmul) -> Found | None:
    """M or N is 1, and XLA removes that dimension from the operand.

    An array of one row is a vector to XLA, which drops the dimension of size 1. XLA's rewriter
    makes FP8 calls for operands with one contracting dimension and one other. A vector has no other
    dimension, so the matmul becomes a call in a wide type.

    If the matrix is smaller, XLA does not call a library at all: see spelled-out.

    Loses it:

        def layer(a: "f8e4m3fn[1,4096]", b: "f8e4m3fn[4096,4096]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Keeps it:

        def layer(a: "f8e4m3fn[16,4096]", b: "f8e4m3fn[4096,4096]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    if not m.is_quantized or not m.thin("MN"):
        return None
    is_vector = any(len(side.operand.shape.dims) == 1 for side in m.sides)
    return _thin(m.thin("MN")) if is_vector else None


@rule(
    "too-small",
    lost=Lost.FP8,
    reason="the matmul is too small: K * (M + N) is {size}, and below {limit} XLA calls no library",
    fix="compile with compiler_options={{'xla_gpu_gemm_rewrite_size_threshold': 0}}",
    source="XLA's matmul_utils.cc, IsMatrixMultiplicationTooSmallForRewriting",
)
def too_small(m: Matmul) -> Found | None:
    """The operands have so few elements that XLA calls no library.

    XLA leaves a dot to its own code generator if K * (M + N), the number of elements of both
    operands, is below 100. The sizes are those of one matrix of a batch. XLA's own kernel
    multiplies in a wide type.

    The option xla_gpu_gemm_rewrite_size_threshold sets the limit. An FP8 call takes multiples of
    16, so kernels then pad the operands: see padded-operands. For matrices of this size that is not
    worth it, except in a test.

    Loses it:

        def layer(a: "f8e4m3fn[4,8]", b: "f8e4m3fn[8,8]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Compiled with: compiler_options={"xla_gpu_gemm_rewrite_size_threshold": 0}
    Keeps it:

        def layer(a: "f8e4m3fn[4,8]", b: "f8e4m3fn[8,8]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    size = m.given.k * (m.given.m + m.given.n)
    is_small = m.row.library == "kernel" and size < _SMALLEST_CALL
    return found_if(m.is_quantized and is_small, size=size, limit=_SMALLEST_CALL)


@rule(
    "unknown-not-fp8",
    lost=Lost.FP8,
    reason="unknown: no rule known here explains why it is not FP8 ({facts})",
    fix=(
        "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and "
        "read XLA's log"
    ),
    source="none found",
)
def unknown_not_fp8(m: Matmul) -> Found | None:
    """The matmul is not FP8, and none of the rules known here explains it.

    The rules describe the releases of XLA that they were tried with, and XLA changes. If none of
    them holds, `fp8lens` says so and gives the facts. It does not name the most similar rule
    instead. No program in the tests reaches this rule, so its page has none. If your program
    reaches it, please report it. XLA's own log, which the fix turns on, often names the reason.
    """
    out = m.dot.shape.dtype if m.dot is not None else m.row.out_dtype
    facts = (
        f"operands {' and '.join(m.types)}, result {out}, run by {m.row.library} in "
        f"{m.row.math_dtype}, precision {m.row.algorithm or m.row.precision}"
    )
    return Found(facts=facts)


@rule(
    "ragged-dot",
    lost=Lost.DUPLICATE,
    reason=("XLA compiles ragged_dot as {dense}, {m} x {n} x {k}: {each}"),
    fix=(
        "give every group the same number of rows (a capacity), and multiply in a batch; or leave "
        "it"
    ),
    source="XLA's ragged_dot_rewriter.cc",
)
def ragged(m: Matmul) -> Found | None:
    """Each row of a ragged_dot belongs to one group, and on a GPU it is multiplied by every group's
    matrix.

    jax.lax.ragged_dot multiplies rows by the matrix of their group, as in a mixture of experts. On
    a GPU XLA compiles it as one dense matmul: K is multiplied by the number of groups, and each row
    is extended to that length, with zeros where it meets the matrix of another group. The result is
    right and in FP8, but with 4 groups the call does 4 times the work.

    If each group gets the same number of rows, some of them padding, the matmul is batched, and
    each row is multiplied once. Which is faster depends on how evenly the rows are spread.

    The gradient of the groups' matrices is a ragged_dot too, whose sums run over a group's rows.
    XLA makes one dense matmul of it for each group, over all rows, with zeros for the rows of the
    others. That, too, is the work times the number of groups.

    A ragged_dot of a single group, or one whose groups divide a batch, does no more than it has to.

    Loses it:

        def experts(a, b: "f8e4m3fn[4,256,128]", sizes: "s32[4]", a_scale, b_scale):
            return jax.lax.ragged_dot(dequantize(a, a_scale), dequantize(b, b_scale), sizes)

    Keeps it:

        def experts(a: "f8e4m3fn[4,16,256]", b: "f8e4m3fn[4,128,256]", a_scale, b_scale):
            return jax.vmap(scaled_dot, (0, 0, None, None))(a, b, a_scale, b_scale)
    """
    if not primitive(m.row.op_name).startswith("ragged_dot"):
        return None
    found = ragged_of(m)
    if found is None or not found.is_repeated:
        return None
    dense = f"{m.row.batch} dense matmuls" if m.row.batch > 1 else "one dense matmul"
    return Found(m=m.row.m, n=m.row.n, k=m.row.k, dense=dense, each=_RAGGED[found.over])


# What each multiplies more than it has to, by what the groups divide.
_RAGGED = {
    "rows": (
        "each row is multiplied by every group's matrix, with zeros for the groups that are not "
        "its own"
    ),
    "sums": "each group's sums run over the rows of all groups, with zeros for the others' rows",
}


#: Tried in this order: the first that holds is the reason.
NOT_FP8 = (
    old_chip,
    fused_attention,
    product_and_sum,
    unknown_no_dot,
    not_quantized,
    spelled_out,
    block_scales,
    scaled_dot_spelled_out,
    block_format_not_multiplied,
    fp4_operand_not_k_last,
    one_number,
    folded,
    gathered,
    merged,
    before_the_loop,
    operation_between,
    algorithm,
    vector_in_triton,
    triton_tile,
    triton_dequantized,
    array_of_scales,
    stack_converted,
    scaled_late,
    converted_twice,
    masked,
    chosen,
    chosen_elements,
    changed_between,
    both_e5m2_bare,
    both_e5m2,
    e5m2_result,
    other_fp8_type,
    result_type,
    vector,
    too_small,
    unknown_not_fp8,
)
#: Those of NOT_FP8 that are about one operand: the other may break one of these as well.
OF_ONE_OPERAND = (
    not_quantized,
    one_number,
    folded,
    gathered,
    merged,
    before_the_loop,
    operation_between,
    array_of_scales,
    stack_converted,
    scaled_late,
    converted_twice,
    masked,
    chosen,
    chosen_elements,
    changed_between,
)
