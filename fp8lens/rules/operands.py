"""Why a matmul does not run in FP8: what XLA finds, or does not find, behind its operands."""

import re

from fp8lens.hlo.ops import COLLECTIVES, COMMUTES
from fp8lens.hlo.origin import primitive
from fp8lens.hlo.values import broadcast_of, look_through, operand
from fp8lens.matmul.operands import FP8_MAX, Operand
from fp8lens.matmul.rows import matmuls
from fp8lens.rules.facts import Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule

_ALLOWED = ", ".join(sorted(COMMUTES))


@rule(
    "old-chip",
    lost=Lost.FP8,
    reason="{chip} has compute capability {version}, and FP8 tensor cores begin at 8.9",
    fix="compile for Ada, Hopper or later, such as target='H100'",
    source="CreateF8CustomCall",
    logs="FP8 Custom Calls require Ada, Hopper, or later architectures.",
)
def old_chip(m: Matmul) -> Found | None:
    """The chip has no FP8 tensor cores."""
    version = ".".join(map(str, m.chip.compute_capability))
    return found_if(not m.chip.has_fp8, version=version)


@rule(
    "not-quantized",
    lost=Lost.FP8,
    reason="{which} {dtypes} in the program, not FP8",
    fix="quantize to float8_e4m3fn with a scalar scale, and dequantize in front of the dot",
    source="MatchFp8Param: an FP8 array, converted, optionally times a scalar",
)
def not_quantized(m: Matmul) -> Found | None:
    """An operand is no FP8 array, and nothing that the program does to one makes it."""
    if m.dot is None:
        return _wide_vector(m)
    if not m.missing or m.folded or m.blocked is not None:
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
    """What a product that XLA spelled out multiplies, where that is not FP8."""
    wide = [d for d in (m.row.lhs_dtype, m.row.rhs_dtype) if not d.startswith("f8")]
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
    "unknown-no-dot",
    lost=Lost.FP8,
    reason=(
        "unknown: no dot that XLA's rewriter saw is this one (it runs by {library} in {math}, "
        "op_name {op_name})"
    ),
    fix="look at the passes before it: print(fp8lens.passes(fn, *args))",
    source="none found",
)
def unknown_no_dot(m: Matmul) -> Found | None:
    """No dot that XLA's rewriter saw is this one: nothing is known of it."""
    return found_if(m.dot is None and not _is_spelled_out(m), op_name=repr(m.row.op_name))


@rule(
    "spelled-out",
    lost=Lost.FP8,
    reason="{thin} 1, and XLA writes such a product as multiplications and a sum",
    fix="give {wide} (pad with zeros, slice the result): then it is a matmul",
    source="XLA's dot_strength_reduction.cc and gemv_rewriter.cc",
)
def spelled_out(m: Matmul) -> Found | None:
    """With one row, one column or K of 1, XLA makes no matmul of a dot."""
    return _thin(m.thin("MNK")) if _is_spelled_out(m) else None


def _thin(names: list[str]) -> Found:
    give = {
        "M": "the left operand 16 rows",
        "N": "the right operand 16 columns",
        "K": "K 16 elements",
    }
    verb = "are" if len(names) > 1 else "is"
    wide = " and ".join(give[name] for name in names)
    return Found(thin=f"{' and '.join(names)} {verb}", wide=wide)


@rule(
    "block-scales",
    lost=Lost.FP8,
    reason="{chip} has no block-scaled matmul, and XLA writes one with {library} in {math}",
    fix="compile for B200 or later, or use one scalar scale for each operand",
    source="XLA's block_scaling_rewriter.cc: cuDNN from compute capability 10.0 on",
)
def block_scales(m: Matmul) -> Found | None:
    """Block scales need Blackwell's tensor cores."""
    return found_if(m.is_block_scaled)


@rule(
    "one-number-operand",
    lost=Lost.FP8,
    reason=(
        "the {side} operand is one number in all places, as the incoming gradient of a plain sum "
        "is, and XLA computes its dequantization in advance"
    ),
    fix=(
        "multiply by what varies: of a loss such as jnp.sum(y * g) with g an argument, or by "
        "jax.vjp"
    ),
    source="XLA's constant folding: FindF8SubgraphRecursive finds no FP8 array behind the dot",
)
def one_number(m: Matmul) -> Found | None:
    """The operand is one number in all places, and XLA computes its dequantization in advance."""
    return found_if(m.folded and _is_one_number(m.folded), side=m.folded and m.folded.side)


def _is_one_number(side: Operand) -> bool:
    number = broadcast_of(side.operand)
    return number is not None and number.shape.size == 1


@rule(
    "constant-operand",
    lost=Lost.FP8,
    reason=(
        "the {side} operand is a constant of the program, such as an array that the function "
        "closes over, and what can be computed of it, its dequantization too, is computed in "
        "advance: it is {dtype}"
    ),
    fix="pass the array as an argument, in FP8",
    source="XLA's constant folding: FindF8SubgraphRecursive finds no FP8 array behind the dot",
)
def folded(m: Matmul) -> Found | None:
    """The operand is a constant of the program, and XLA computes its dequantization in advance."""
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
    """The operand is widened, then sent between devices: FP8 ends in front of the wire."""
    if (opcode := _blocked_by(m)).startswith(COLLECTIVES):
        return Found(side=m.missing[0].side, opcode=opcode, dtype=m.missing[0].dtype)
    return _changed(m, "gathered")


def _changed(m: Matmul, problem: str) -> Found | None:
    """The operand with an FP8 array that has this problem, and its fields."""
    if m.broken is None or m.broken.problem != problem:
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
    source="XLA's dot_merger.cc; FindF8SubgraphRecursive does not look behind a concatenate",
)
def merged(m: Matmul) -> Found | None:
    """XLA merged dots that share an operand, behind their dequantization."""
    is_merged = _blocked_by(m) == "concatenate" and not m.as_written
    return Found(side=m.missing[0].side) if is_merged else None


@rule(
    "before-the-loop",
    lost=Lost.FP8,
    reason="the {side} operand is dequantized before the loop, and comes into it as {dtype}",
    fix="dequantize in the loop's body",
    source="FindF8SubgraphRecursive does not look outside of the loop's body",
)
def before_the_loop(m: Matmul) -> Found | None:
    """The operand is dequantized outside of the loop that multiplies it."""
    if _blocked_by(m) != "while":
        return None
    return Found(side=m.missing[0].side, dtype=m.missing[0].dtype)


@rule(
    "operation-between",
    lost=Lost.FP8,
    reason="an operation stands between the {side} operand's dequantization and the dot: {opcode}",
    fix="do it before quantizing, or to the dot's result; only {allowed} may stand there",
    source="FindF8SubgraphRecursive and MatchFp8Param",
)
def operation_between(m: Matmul) -> Found | None:
    """An operation with several operands stands between the dequantization and the dot."""
    opcode = _blocked_by(m)
    return Found(side=m.missing[0].side, opcode=opcode, allowed=_ALLOWED) if opcode else None


@rule(
    "dot-algorithm",
    lost=Lost.FP8,
    reason="the dot asks for the algorithm {algorithm}, in whose types it is then multiplied",
    fix="leave the precision out, or ask for jax.lax.DotAlgorithmPreset.DEFAULT",
    source=(
        "XLA converts the operands to the algorithm's types, and its gemm_rewriter.cc finds no "
        "FP8 behind that"
    ),
)
def algorithm(m: Matmul) -> Found | None:
    """The dot names the types in which it is to be multiplied, and they are not FP8."""
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
    """Triton's kernel multiplies FP8 only with a tile of whole FP8 instructions."""
    return found_if(_is_tritons(m) and _says_fp8(m), tile=m.row.tile)


def _is_tritons(m: Matmul) -> bool:
    return m.is_quantized and m.row.library == "triton"


def _says_fp8(m: Matmul) -> bool:
    """Whether the dot in the kernel is of FP8 arrays."""
    return matmuls(m.row.instruction)[0].is_fp8


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
    """Triton multiplies what the dot multiplies, and that is dequantized."""
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
    """The operand is dequantized with more than one scale."""
    return _changed(m, "array of scales")


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
    """Several layers' weights are converted as one array, and each is cut out of it."""
    return _changed(m, "stack converted")


@rule(
    "scaled-late",
    lost=Lost.FP8,
    reason=(
        "{between} stands between the {side} operand's conversion and a scale, which has to "
        "follow the conversion"
    ),
    fix=(
        "multiply once, right behind the conversion: a.astype(jnp.float32) * (s * t); where a "
        "transpose stands there, also one that XLA put there, transpose the FP8 array, put "
        "jax.lax.optimization_barrier behind that, and dequantize then"
    ),
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def scaled_late(m: Matmul) -> Found | None:
    """A scale is multiplied later than right behind the conversion from FP8."""
    return _changed(m, "scaled late")


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
    """The dequantized operand is converted to another type again."""
    return _changed(m, "converted twice")


@rule(
    "masked-operand",
    lost=Lost.FP8,
    reason="the {side} operand is masked with something other than zero after its dequantization",
    fix="mask with zeros, or mask before quantizing",
    source="MatchFp8Param",
    logs="Select requires a zero operand to be exchanged with dequantization.",
)
def masked(m: Matmul) -> Found | None:
    """The dequantized operand is masked, and not with zero."""
    return _changed(m, "masked")


@rule(
    "changed-between",
    lost=Lost.FP8,
    reason="the {side} operand is changed between its dequantization and the dot: {opcode}",
    fix="do it before quantizing, or to the dot's result; only {allowed} may stand there",
    source="MatchFp8Param",
    logs="not rewritten into FP8 Custom Call",
)
def changed_between(m: Matmul) -> Found | None:
    """The dequantized operand is computed with before it is multiplied."""
    return _changed(m, "changed between")


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
    """Both operands are E5M2 arrays, without scales: no tensor-core kernel multiplies two."""
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
    """Both operands are E5M2: cuBLASLt multiplies E5M2 by E4M3 alone."""
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
    """Two E4M3 operands give E4M3, not E5M2."""
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
    """An operand is of an 8-bit type that NVIDIA's tensor cores do not have."""
    other = [dtype for dtype in m.types if dtype not in FP8_MAX] if m.is_quantized else []
    return Found(dtype=other[0]) if other else None


@rule(
    "result-type",
    lost=Lost.FP8,
    reason="the dot's result is {dtype}",
    fix="dequantize in float32, bfloat16 or float16",
    source="CreateF8CustomCall",
    logs="Output type must be F8E4M3FN, F8E5M2, BF16, F16 or F32",
)
def result_type(m: Matmul) -> Found | None:
    """The dot returns a type that the call does not write."""
    if not m.is_quantized or m.dot is None:
        return None
    dtype = m.dot.shape.dtype
    return found_if(dtype not in ("bf16", "f16", "f32", *FP8_MAX), dtype=dtype)


@rule(
    "vector-operand",
    lost=Lost.FP8,
    reason="{thin} 1: XLA makes a vector of that operand, and its FP8 call takes matrices",
    fix="give {wide} (pad with zeros, slice the result)",
    source="CreateF8CustomCall (XLA's gemm_rewriter.cc)",
    logs="Inputs must have exactly one contracting and one non-contracting dimension.",
)
def vector(m: Matmul) -> Found | None:
    """With one row or column, XLA makes a vector of that operand."""
    if not m.is_quantized or not m.thin("MN"):
        return None
    is_vector = any(len(side.operand.shape.dims) == 1 for side in m.sides)
    return _thin(m.thin("MN")) if is_vector else None


@rule(
    "too-small",
    lost=Lost.FP8,
    reason="the matmul is too small for XLA to call a library for it",
    fix="compile with compiler_options={{'xla_gpu_gemm_rewrite_size_threshold': 0}}",
    source="XLA's matmul_utils.cc, IsMatrixMultiplicationTooSmallForRewriting",
)
def too_small(m: Matmul) -> Found | None:
    """For a few hundred products XLA calls no library."""
    row = m.row
    is_small = row.library == "kernel" and row.m * row.n * row.k <= 1000
    return found_if(m.is_quantized and is_small)


@rule(
    "unknown-not-fp8",
    lost=Lost.FP8,
    reason="unknown: no rule known here keeps it from FP8 ({facts})",
    fix=(
        "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and "
        "read XLA's log"
    ),
    source="none found",
)
def unknown_not_fp8(m: Matmul) -> Found | None:
    """It is not FP8, and no rule known here says why."""
    out = m.dot.shape.dtype if m.dot is not None else m.row.out_dtype
    facts = (
        f"operands {' and '.join(m.types)}, result {out}, run by {m.row.library} in "
        f"{m.row.math_dtype}, precision {m.row.algorithm or m.row.precision}"
    )
    return Found(facts=facts)


@rule(
    "ragged-dot",
    lost=Lost.DUPLICATE,
    reason=(
        "ragged_dot is compiled dense: each row meets every group, {m} x {n} x {k}, and what is "
        "not its own is zero"
    ),
    fix="give each group as many rows (a capacity), and multiply batched; or leave it",
    source="XLA's ragged_dot_rewriter.cc",
)
def ragged(m: Matmul) -> Found | None:
    """On a GPU every row of a ragged_dot is multiplied by every group's matrix."""
    is_ragged = primitive(m.row.op_name).startswith("ragged_dot")
    return found_if(is_ragged, m=m.row.m, n=m.row.n, k=m.row.k)


#: Tried in this order: the first that holds is the reason.
NOT_FP8 = (
    old_chip,
    unknown_no_dot,
    not_quantized,
    spelled_out,
    block_scales,
    one_number,
    folded,
    gathered,
    merged,
    before_the_loop,
    operation_between,
    algorithm,
    triton_tile,
    triton_dequantized,
    array_of_scales,
    stack_converted,
    scaled_late,
    converted_twice,
    masked,
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
