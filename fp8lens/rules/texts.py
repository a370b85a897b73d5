"""The rules that keep a matmul from being one FP8 call: what is lost, why, the fix, and whose rule
it is.

Read from XLA's source (commit 01631ca of github.com/openxla/xla) and held to what its compiler does
and logs by tests/test_reasons.py. Functions without a file are
xla/service/gpu/transforms/gemm_rewriter.cc's; a sentence in double quotes is one that XLA logs
there under TF_CPP_VMODULE=gemm_rewriter=1.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """`lost`, `reason`, `fix` and `rule` of a `fp8lens.reasons.Reason`; {names} are filled in from
    the program.
    """

    lost: str
    reason: str
    fix: str
    rule: str


_LOG = (
    "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and read"
    " XLA's log"
)
_TILE = "block_m: 128 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"
_CONVERT = "HandleConvert and F8ConvertD: convert(clamp(result * scale)) becomes the call's"
_AMAX = "F8ConvertD: reduce(max, abs(result)) beside the conversion to FP8 becomes the call's"

_EXCHANGED = (
    "CollectiveQuantizer exchanges the two only where the scale is a scalar and nothing but"
    " bitcast, copy, reshape or slice stands between: no transpose, no other conversion{} (XLA's"
    " collective_quantizer.cc)"
)

RULES: Mapping[str, Rule] = {
    # It is not FP8 --------------------------------------------------------------------------------
    "old chip": Rule(
        "fp8",
        "{chip} has compute capability {version}, and FP8 tensor cores begin at 8.9",
        "compile for Ada, Hopper or later, such as target='H100'",
        'CreateF8CustomCall: "FP8 Custom Calls require Ada, Hopper, or later architectures."',
    ),
    "not quantized": Rule(
        "fp8",
        "{which} {dtypes} in the program, not FP8",
        "quantize to float8_e4m3fn with a scalar scale, and dequantize in front of the dot",
        "MatchFp8Param: an FP8 array, converted, optionally times a scalar",
    ),
    "one number": Rule(
        "fp8",
        "the {side} operand is one number in all places, as the incoming gradient of a plain sum"
        " is, and XLA computes its dequantization in advance",
        "multiply by what varies: of a loss such as jnp.sum(y * g) with g an argument, or by"
        " jax.vjp",
        "XLA's constant folding: FindF8SubgraphRecursive finds no FP8 array behind the dot",
    ),
    "folded": Rule(
        "fp8",
        "the {side} operand is a constant of the program, such as an array that the function closes"
        " over, and what can be computed of it, its dequantization too, is computed in advance: it"
        " is {dtype}",
        "pass the array as an argument, in FP8",
        "XLA's constant folding: FindF8SubgraphRecursive finds no FP8 array behind the dot",
    ),
    "algorithm": Rule(
        "fp8",
        "the dot asks for the algorithm {algorithm}, in whose types it is then multiplied",
        "leave the precision out, or ask for jax.lax.DotAlgorithmPreset.DEFAULT",
        "XLA converts the operands to the algorithm's types, and its gemm_rewriter.cc finds no FP8"
        " behind that",
    ),
    "operation between": Rule(
        "fp8",
        "an operation stands between the {side} operand's dequantization and the dot: {opcode}",
        "do it before quantizing, or to the dot's result; only {allowed} may stand there",
        "FindF8SubgraphRecursive and MatchFp8Param",
    ),
    "changed between": Rule(
        "fp8",
        "the {side} operand is changed between its dequantization and the dot: {opcode}",
        "do it before quantizing, or to the dot's result; only {allowed} may stand there",
        'MatchFp8Param: "not rewritten into FP8 Custom Call"',
    ),
    "converted twice": Rule(
        "fp8",
        "the {side} operand is converted again, to {to}, between its dequantization and the dot",
        "dequantize each operand once, both to the type that the dot is to return: float32,"
        " bfloat16 or float16",
        'MatchFp8Param: "not rewritten into FP8 Custom Call"',
    ),
    "scaled late": Rule(
        "fp8",
        "{between} stands between the {side} operand's conversion and a scale, which has to follow"
        " the conversion",
        "multiply once, right behind the conversion: a.astype(jnp.float32) * (s * t); where a"
        " transpose stands there, also one that XLA put there, transpose the FP8 array, put"
        " jax.lax.optimization_barrier behind that, and dequantize then",
        'MatchFp8Param: "not rewritten into FP8 Custom Call"',
    ),
    "masked": Rule(
        "fp8",
        "the {side} operand is masked with something other than zero after its dequantization",
        "mask with zeros, or mask before quantizing",
        'MatchFp8Param: "Select requires a zero operand to be exchanged with dequantization."',
    ),
    "array of scales": Rule(
        "fp8",
        "the {side} operand is dequantized with the scales {scales}, and the call takes one scalar",
        "dequantize with a scalar; scales along M or N, not K, can multiply the result instead (one"
        " more kernel, and the matmul is FP8)",
        'CreateF8CustomCall: "The scaling factors must be scalars."',
    ),
    "stack converted": Rule(
        "fp8",
        "the {side} operands of several layers are converted together, and each is cut out before"
        " it is scaled",
        "leave the loop over layers as it is (lax.scan's unroll=1), or pass each layer's array and"
        " scale by itself",
        'MatchFp8Param: "not rewritten into FP8 Custom Call"',
    ),
    "ragged": Rule(
        "duplicate",
        "ragged_dot is compiled dense: each row meets every group, {m} x {n} x {k}, and what is not"
        " its own is zero",
        "give each group as many rows (a capacity), and multiply batched; or leave it",
        "XLA's ragged_dot_rewriter.cc",
    ),
    "merged": Rule(
        "fp8",
        "XLA merged dots that share an operand, and joined their {side} operands after"
        " dequantizing",
        "compile with compiler_options={{'xla_gpu_dot_merger_threshold_mb': 0}}, or, where they"
        " share a scale, store the weights joined",
        "XLA's dot_merger.cc; FindF8SubgraphRecursive does not look behind a concatenate",
    ),
    "before the loop": Rule(
        "fp8",
        "the {side} operand is dequantized before the loop, and comes into it as {dtype}",
        "dequantize in the loop's body",
        "FindF8SubgraphRecursive does not look outside of the loop's body",
    ),
    "gathered": Rule(
        "fp8",
        "the {side} operand is dequantized, then gathered over devices in {dtype} ({opcode})",
        "gather the quantized array (jax.lax.with_sharding_constraint on it), then dequantize",
        'MatchFp8Param: "not rewritten into FP8 Custom Call"',
    ),
    "both E5M2": Rule(
        "fp8",
        "both operands are E5M2, and cuBLASLt has no kernel for that",
        "convert one of them to E4M3: E5M2 is for gradients, and a gradient meets activations or"
        " weights",
        'CreateF8CustomCall: "The element type of one of the operands must be F8E4M3FN."',
    ),
    "both E5M2, bare": Rule(
        "fp8",
        "both operands are E5M2, and cuBLASLt has no kernel for that",
        "convert one of them to E4M3: E5M2 is for gradients, and a gradient meets activations or"
        " weights",
        "TypesAreSupportedByCublasLt: its table of operand types",
    ),
    "other FP8 type": Rule(
        "fp8",
        "{dtype} is not a type that cuBLASLt multiplies on NVIDIA GPUs",
        "store the operand as float8_e4m3fn, or float8_e5m2 for one of the two",
        'CreateF8CustomCall: "The input types must be F8E5M2 or F8E4M3FN"',
    ),
    "result type": Rule(
        "fp8",
        "the dot's result is {dtype}",
        "dequantize in float32, bfloat16 or float16",
        'CreateF8CustomCall: "Output type must be F8E4M3FN, F8E5M2, BF16, F16 or F32"',
    ),
    "E5M2 result": Rule(
        "fp8",
        "cuBLASLt has no kernel for two E4M3 operands and an E5M2 result",
        "ask for float8_e4m3fn, bfloat16 or float32 as preferred_element_type",
        "TypesAreSupportedByCublasLt: its table of types",
    ),
    "no such kernel": Rule(
        "output",
        "the call multiplies two E4M3 operands and writes E5M2, for which cuBLASLt has no kernel:"
        " XLA does not look, and the GPU will refuse it",
        "convert the result to float8_e4m3fn, or make one of the operands float8_e5m2",
        "docs.nvidia.com/cuda/cublas/#cublasltmatmul, the table of FP8 types (not measured here)",
    ),
    "no such bias": Rule(
        "bias",
        "the call adds a vector of {bias}, for which cuBLASLt has no kernel: XLA does not look, and"
        " the GPU will refuse it",
        "pass the vector as bfloat16, add it to a dot in float32 or bfloat16"
        " (preferred_element_type), and clamp and convert to FP8 last",
        "docs.nvidia.com/cuda/cublas/#cublasltmatmul, the table of FP8 types (not measured here)",
    ),
    "too small": Rule(
        "fp8",
        "the matmul is too small for XLA to call a library for it",
        "compile with compiler_options={{'xla_gpu_gemm_rewrite_size_threshold': 0}}",
        "XLA's matmul_utils.cc, IsMatrixMultiplicationTooSmallForRewriting",
    ),
    "spelled out": Rule(
        "fp8",
        "{thin} 1, and XLA writes such a product as multiplications and a sum",
        "give {wide} (pad with zeros, slice the result): then it is a matmul",
        "XLA's dot_strength_reduction.cc and gemv_rewriter.cc",
    ),
    "vector": Rule(
        "fp8",
        "{thin} 1: XLA makes a vector of that operand, and its FP8 call takes matrices",
        "give {wide} (pad with zeros, slice the result)",
        'CreateF8CustomCall: "Inputs must have exactly one contracting and one non-contracting'
        " dimension.\" (XLA's gemm_rewriter.cc)",
    ),
    "block scales": Rule(
        "fp8",
        "{chip} has no block-scaled matmul, and XLA writes one with {library} in {math}",
        "compile for B200 or later, or use one scalar scale for each operand",
        "XLA's block_scaling_rewriter.cc: cuDNN from compute capability 10.0 on",
    ),
    "Triton, dequantized": Rule(
        "fp8",
        "Triton multiplies what the dot multiplies, and the operands are dequantized to {math}"
        " first",
        "multiply the FP8 arrays and scale the result, jax.lax.dot(a, b,"
        " preferred_element_type=jnp.float32) * (a_scale * b_scale); or use gemm='cublaslt'"
        " (XLA_FLAGS=--xla_gpu_enable_triton_gemm=false)",
        "XLA's Triton emitter keeps the dot's operand types; only the cuBLASLt rewriter moves a"
        " dequantization past it",
    ),
    "Triton, tile": Rule(
        "fp8",
        "the dot is of FP8 arrays, but with a tile of {tile} the kernel multiplies in {math}",
        "use gemm='cublaslt', or force a tile of whole FP8 instructions: "
        f"compiler_options={{{{'xla_gpu_override_gemm_autotuner': '{_TILE}'}}}}",
        "the kernel's PTX: its mma instruction",
    ),
    "unknown, not FP8": Rule(
        "fp8", "unknown: no rule known here keeps it from FP8 ({facts})", _LOG, "none found"
    ),
    "unknown, no dot": Rule(
        "fp8",
        "unknown: no dot that XLA's rewriter saw is this one (it runs by {library} in {math},"
        " op_name {op_name})",
        "look at the passes before it: print(fp8lens.passes(fn, *args))",
        "none found",
    ),
    # It is FP8, and the conversion of its result stayed outside -----------------------------------
    "no clamp": Rule(
        "output",
        "the result is converted to {to} without a clamp",
        "clamp to the format's range: {clip}",
        _CONVERT,
    ),
    "clamp early": Rule(
        "output",
        "{how}, and the call takes scale, clamp and conversion, one directly after the other",
        "scale, then clamp, then convert: {clip}",
        _CONVERT,
    ),
    "clamp bounds": Rule(
        "output",
        "the clamp's bounds are {bounds}, not exactly the range of {to}",
        "clamp to plus and minus jnp.finfo({jax_to}).max: {clip}",
        _CONVERT,
    ),
    "scaled twice": Rule(
        "output",
        "the result is scaled twice before the conversion",
        "multiply the two scales outside of the program",
        _CONVERT,
    ),
    "matrix in f32": Rule(
        "output",
        "the matrix that is added is float32, and with an FP8 result it must have 16 bits",
        "dequantize in bfloat16, and add the matrix in bfloat16",
        'F8ConvertD: "conflicts with the existing fusion of the addition of a matrix bias with'
        ' element type other than BF16 or F16"',
    ),
    "other readers": Rule(
        "output",
        "the unconverted result is read elsewhere too ({readers}): it has to be written as {dtype}",
        "read the converted result there; to compute it twice, put the operands through"
        " jax.lax.optimization_barrier",
        "F8ConvertD: the only other reader may be one amax",
    ),
    "amax beside it": Rule(
        "output",
        "the amax, maximum or minimum beside the conversion is not one that the call computes, and"
        " so both read an unconverted result",
        "for an amax take jnp.max(jnp.abs(d)) of the dot's result after its activation, of all"
        " elements",
        "F8ConvertD: the only other reader may be one amax",
    ),
    "reshaped first": Rule(
        "output",
        "the result is reshaped before it is converted, from [{before}] to [{after}], and the"
        " call's conversion must read it directly",
        "keep the shape of the dot's result up to the conversion: flatten the activations to [rows,"
        " K] in front of it",
        _CONVERT,
    ),
    "cut first": Rule(
        "output",
        "an FP8 call takes multiples of 16, not {sizes}: it writes a padded result, and what is cut"
        " out of it is converted by the kernel that cuts",
        "choose, or pad once in advance to, dimensions that are multiples of 16",
        "PadOperandToMultipleOf16: a slice then stands between the call and its conversion",
    ),
    "turned first": Rule(
        "{lost}",
        "XLA turns the result around before the {step}, for a collective that sends it over its"
        " last dimension: the program has no such step",
        "send the result over its rows: shard the first dimension; or leave this kernel",
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a slice"
        " at most",
    ),
    "joined first": Rule(
        "{lost}",
        "the result is {how} before the {step}, and the call takes only what reads it directly",
        "do it to the dot's own result, before it is {how}; where the program does and XLA"
        " exchanges the two, put jax.lax.optimization_barrier between them",
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a slice"
        " at most",
    ),
    "barrier": Rule(
        "{lost}",
        "an optimization_barrier stands between the result and the {step}",
        "leave the barrier out, or leave this kernel",
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a slice"
        " at most",
    ),
    "moved first": Rule(
        "{lost}",
        "the result is transposed before the {step}, and the call takes only what reads it"
        " directly",
        "do it before transposing; or exchange the operands, which gives the transposed product",
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a slice"
        " at most",
    ),
    "by columns": Rule(
        "{lost}",
        "the result is transposed before the {step}, here by XLA, which has the product written by"
        " columns",
        "compute the transposed product, by exchanging the operands: one call, where no vector is"
        " added; or leave the transpose to the reader",
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a slice"
        " at most",
    ),
    "result in FP8": Rule(
        "output",
        "the dot's own result is {to}, and a kernel widens it to go on computing with it",
        "ask the dot for float32 or bfloat16 (preferred_element_type), and clamp and convert last",
        "the call adds, activates and scales before it converts",
    ),
    "another type": Rule(
        "output",
        "the call writes the dot's type, {dtype}, and a kernel converts it to {to}",
        "dequantize in {jax_to}: then the dot's type is {to}{wider}",
        "HandleConvert takes only conversions to FP8",
    ),
    "not a float": Rule(
        "output",
        "the call writes the dot's type, {dtype}, and a kernel converts it to {to}, which no FP8"
        " call writes",
        "leave this kernel, or convert to float32, bfloat16, float16 or FP8",
        "HandleConvert takes only conversions to FP8",
    ),
    # ... an activation ----------------------------------------------------------------------------
    "activation after scale": Rule(
        "epilogue",
        "the {step} is applied to a scaled result, and the call applies it before it scales",
        "multiply the scale into an operand's, outside of the program; or scale after relu: relu(x"
        " * s) is relu(x) * s for s > 0",
        "HandleMaximum and HandleMultiply: the activation must read the call itself",
    ),
    "relu in clamp": Rule(
        "epilogue",
        "the clamp's bounds are 0 and {best}, a relu and the conversion's clamp in one, and the"
        " call takes the two",
        "relu, then clamp to plus and minus jnp.finfo({jax_to}).max: "
        "jnp.clip(jax.nn.relu(d), -{best}, {best}).astype({jax_to})",
        "HandleMaximum matches relu only; HandleConvert and F8ConvertD the whole range",
    ),
    "activation and reader": Rule(
        "epilogue",
        "the input of the {step} is read by something else as well, as its gradient does, and a"
        " call has one result",
        "use relu and let everything read its result, an amax too, and a gradient of your own"
        " (jax.custom_vjp) through jax.lax.optimization_barrier; or leave this kernel: no FP8 call"
        " returns gelu's input beside its result",
        "FuseReluActivation and FuseGeluActivation: the activation must be the only reader",
    ),
    "late relu": Rule(
        "epilogue",
        "relu stands where the call cannot take it (its epilogue is {epilogue})",
        "apply relu directly to the dot's result, or to that plus a bias vector",
        "FuseReluActivation: epilogue DEFAULT or BIAS",
    ),
    "relu of codes": Rule(
        "epilogue",
        "the relu stands behind the conversion to FP8, where a call with a relu or an amax takes"
        " none",
        "apply relu once, to the dot's result or to that plus a bias vector, and take the amax of"
        " what it returns",
        "FuseReluActivation: epilogue DEFAULT or BIAS",
    ),
    "compared": Rule(
        "epilogue",
        "the result is only compared with a number, as in the gradient of a relu, and no call"
        " writes that",
        "leave this kernel",
        "HandleMaximum and HandleMultiply match relu and tanh-gelu only",
    ),
    "derivative": Rule(
        "epilogue",
        "the result is put through the derivative of an activation, which no call computes",
        "leave this kernel",
        "HandleMaximum and HandleMultiply match relu and tanh-gelu only",
    ),
    "negated": Rule(
        "{lost}",
        "the result is negated{how}, and the call has a sign only in its scales",
        "in its place negate {scales}; where there is none, take a factor of -1",
        "HandleMaximum, HandleMultiply and HandleConvert match no negation",
    ),
    "negated last": Rule(
        "scale",
        "the result is negated behind its {step}, and the call has a sign only in its scales, of"
        " which the last is an FP8 result's",
        "clamp and convert the result to FP8, with a negative scale; or leave this kernel",
        "HandleMaximum, HandleMultiply and HandleConvert match no negation",
    ),
    "lower half": Rule(
        "epilogue",
        "the result is bounded by 0 from above: min(d, 0) is -relu(-d), and the call's relu bounds"
        " from below",
        "use jax.nn.relu, and negate an operand's scale (a_scale), a bias in front of it, and an"
        " FP8 result's scale (d_scale); or leave this kernel",
        "HandleMaximum matches relu only",
    ),
    "other activation": Rule(
        "epilogue",
        "cuBLASLt's epilogues are relu and gelu in its tanh form; this activation is another",
        "use jax.nn.relu or jax.nn.gelu(approximate=True), or leave this kernel",
        "HandleMaximum and HandleMultiply match relu and tanh-gelu only",
    ),
    "bounded relu": Rule(
        "epilogue",
        "the result is clamped to {bounds}: a relu with an upper bound, and the call's relu has"
        " none",
        "use jax.nn.relu, or leave this kernel: the only upper bound a call has is the range of an"
        " FP8 result",
        "HandleMaximum matches relu only",
    ),
    "clamp alone": Rule(
        "epilogue",
        "the result is clamped, and not converted to FP8 right after it (it is {to})",
        "convert to an FP8 type right after the clamp, or leave the clamp out",
        _CONVERT,
    ),
    # ... something added --------------------------------------------------------------------------
    "bias after scale": Rule(
        "bias",
        "what is added is added to a scaled result, and the call adds it before it scales",
        "multiply the scale into an operand's, outside of the program, or add before it",
        "HandleAdd",
    ),
    "bias and reader": Rule(
        "bias",
        "the dot's result is read by the addition and by something else as well",
        "read the sum instead: a call has one result",
        "HandleAdd: WithOneUser",
    ),
    "matrix after epilogue": Rule(
        "bias",
        "a matrix is added after another epilogue ({epilogue}, beta {beta})",
        "add the matrix to the dot's result, before its activation",
        "FuseMatrixBiasAdd: epilogue DEFAULT or BIAS, and beta 0",
    ),
    "subtracted": Rule(
        "bias",
        "a {what} is subtracted, or the result from it, and XLA takes only additions into the call",
        "pass the {what}, or an operand's scale, negated, and add",
        "HandleAdd",
    ),
    "scalar added": Rule(
        "bias",
        "a scalar is added to every element, and the call's bias is a vector",
        "pass it as a bfloat16 vector with one element for each column",
        "FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
    ),
    "split columns": Rule(
        "bias",
        "the result's columns were split before a bias of several dimensions was added; the call's"
        " is a vector",
        "add a vector, and split the columns after",
        "FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
    ),
    "several biases": Rule(
        "bias",
        "a vector is added for each matrix of a batch or part of the rows, and the call's bias is"
        " one for all of them",
        "add one vector, or leave this kernel; what is passed as large as the result goes into the"
        " call",
        "FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
    ),
    "for each row": Rule(
        "bias",
        "the vector that is added has one element for each row, and the call's bias one for each"
        " column",
        "compute the transposed product (exchange the operands), where it is a bias for each"
        " column",
        "FuseVectorBiasAdd: the bias runs along the minor dimension",
    ),
    "bias in f32": Rule(
        "bias",
        "the bias vector is {bias}, which FP8 calls do not take with a {dtype} dot",
        "pass it as {jax_fits}, and convert it in the program to add it",
        "FuseVectorBiasAdd: a float32 bias must be a conversion of a 16-bit one",
    ),
    "bias of another type": Rule(
        "bias",
        "the bias vector is {bias}, which FP8 calls do not take with a {dtype} dot",
        "pass it as {jax_fits}, and convert it in the program to add it",
        "FuseVectorBiasAdd: of vectors that are converted to float32 it takes bfloat16 alone",
    ),
    "bias of codes": Rule(
        "bias",
        "wrong numbers, by an error of XLA's: what is added behind the conversion to FP8 it adds in"
        " front of the result's scale, clamp and conversion",
        "add a bfloat16 vector to the dot's result; or put jax.lax.optimization_barrier behind the"
        " conversion",
        "FuseVectorBiasAdd: the call may have an FP8 result",
    ),
    "late bias": Rule(
        "bias",
        "the addition stands where the call cannot take it (its epilogue is {epilogue}, beta"
        " {beta})",
        "add the bias directly to the dot's result, before activation, scale or an added matrix",
        "FuseVectorBiasAdd: epilogue DEFAULT, one reader, no matrix added",
    ),
    "prepared bias": Rule(
        "bias",
        "the bias, or the matrix that is added, is converted or scaled by a kernel before the call"
        " reads it",
        "pass it in the type of the dequantization (a vector: bfloat16, or float16 under float16),"
        " as it is, and without a factor",
        "FuseVectorBiasAdd and FuseMatrixBiasAdd take what is added as it is",
    ),
    "copied matrix": Rule(
        "bias",
        "the matrix that is added is an argument of another shape, {shape}, and a kernel copies it:"
        " of what is reshaped XLA believes that the call may write over it",
        "pass it in the shape of the dot's result, rows by columns; or donate it (jax.jit's"
        " donate_argnums), where nobody reads it later",
        "FuseMatrixBiasAdd: the call writes over a matrix that has no other reader, and is not an"
        " argument itself",
    ),
    "merged, then added": Rule(
        "bias",
        "XLA merged dots that share an operand, and a kernel adds their results, which the second"
        " call could do",
        "compile with compiler_options={{'xla_gpu_dot_merger_threshold_mb': 0}}",
        "XLA's dot_merger.cc; FuseMatrixBiasAdd: one dot's result is the matrix that the other's"
        " call adds",
    ),
    # ... an amax ----------------------------------------------------------------------------------
    "amax in 16 bits": Rule(
        "amax",
        "the call returns the amax in float32, and a kernel converts it to the dequantization's"
        " type",
        "convert the number, jnp.max(jnp.abs(d)).astype(jnp.float32), or dequantize in float32",
        "F8AddDAmax: the call's amax is float32",
    ),
    "amax converted": Rule(
        "amax",
        "the result is converted to {to} before its amax is taken, and the call's amax is of the"
        " result as it is",
        "convert the number, not the matrix: jnp.max(jnp.abs(d)).astype(jnp.float32)",
        _AMAX,
    ),
    "amax along": Rule(
        "amax",
        "the maximum is taken along some dimensions, and the call's amax is of all elements",
        "take the amax of the whole tensor: one scale for it",
        _AMAX,
    ),
    "amax before": Rule(
        "amax",
        "the amax is of the value before the {step}; the call's is of what it writes",
        "take the amax after the {step}",
        _AMAX,
    ),
    "amax scaled": Rule(
        "amax",
        "the amax is of the scaled or clamped result, and the call's is of the result before its"
        " scale",
        "take jnp.max(jnp.abs(d)) before multiplying by the scale",
        _AMAX,
    ),
    "amax behind barrier": Rule(
        "amax",
        "an optimization_barrier stands between the result and its amax",
        "scale with an amax of an earlier step, and leave the barrier out; an amax that scales the"
        " very result it is taken of must stay outside",
        _AMAX,
    ),
    "amax of another": Rule(
        "amax",
        "an amax is taken of a value that is neither the call's result nor written alone",
        "take jnp.max(jnp.abs(d)) of the very value that is scaled and converted",
        _AMAX,
    ),
    "amax otherwise": Rule(
        "amax",
        "what is taken is not written as a maximum of absolute values",
        "where an amax is meant, write jnp.max(jnp.abs(d)); else leave this kernel",
        _AMAX,
    ),
    "amax without FP8": Rule(
        "amax",
        "the result is not converted to FP8, and the call has an amax only with an FP8 result",
        "clamp and convert the result to FP8, or leave this kernel",
        _AMAX,
    ),
    "amax with it": Rule(
        "amax",
        "the conversion to FP8 stayed outside, and the amax with it",
        "fix the conversion first",
        _AMAX,
    ),
    # ... a scale ----------------------------------------------------------------------------------
    "vector scale": Rule(
        "scale",
        "a scale for each row or column of the result is an operation of its own: the call's scales"
        " are scalars",
        "use one scale for the whole tensor, or leave this kernel: it costs one pass over the"
        " result",
        "F8ScaleD and F8ConvertD: ShapeUtil::IsScalar",
    ),
    "scales one by one": Rule(
        "scale",
        "the result is multiplied by several scalars, one after the other, and the call takes one"
        " of them",
        "multiply the scalars first, d * (s * t), outside of the program or in it (then a kernel of"
        " one number does it)",
        "F8ScaleD: one scalar of the program becomes one scale of the call",
    ),
    "scale too many": Rule(
        "scale",
        "the result is scaled once more, and the call's scales are in use or do not fit ({scales}"
        " in use, epilogue {epilogue}, result {out})",
        "multiply the factor into one operand's scale, outside of the program",
        "F8ScaleD: a factor of a result that is not FP8 becomes an operand's scale, if that is"
        " free",
    ),
    "division": Rule(
        "scale",
        "the program divides by a scale, and the call multiplies: a kernel computes the reciprocal",
        "pass the reciprocal as an argument, and multiply by it",
        "CreateF8CustomCall and InvertAndConvertScalar",
    ),
    "scale after epilogue": Rule(
        "scale",
        "the result is scaled after its epilogue ({epilogue}), which only an FP8 result's scale is",
        "clamp and convert the result to FP8, or leave this kernel",
        "F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
    ),
    "sign lost": Rule(
        "scale",
        "wrong numbers, by an error of XLA's: of the factor {factor} behind the relu it makes one"
        " in front of it, and relu({factor} * d) is not {factor} * relu(d)",
        "put jax.lax.optimization_barrier between the relu and its negative factor",
        "F8ScaleD: epilogue DEFAULT, or RELU of unscaled operands",
    ),
    "relu of scaled codes": Rule(
        "scale",
        "wrong numbers for a negative scale, by an error of XLA's: of the relu behind the"
        " conversion it makes one in front of the result's scale s, and relu(d * s) is relu(d) * s"
        " for s > 0 only",
        "apply relu to the dot's result, in front of its scale; where that is negative, negate it"
        " and an operand's too",
        "FuseReluActivation: the call may have an FP8 result",
    ),
    "factor of codes": Rule(
        "scale",
        "wrong numbers where the result saturates, by an error of XLA's: of the factor behind the"
        " conversion to FP8 it makes one in front of it",
        "put jax.lax.optimization_barrier between the two; or, where the call's numbers are meant,"
        " multiply a float32 or bfloat16 result by the factor, and clamp and convert last",
        "F8ScaleD: the call may have an FP8 result",
    ),
    "padded with a number": Rule(
        "scale",
        "wrong numbers, by an error of XLA's: the {side} operand is padded with something other"
        " than zero after its dequantization, and XLA pads the FP8 array with that number, which it"
        " converts to FP8 and does not divide by the scale",
        "pad with zeros, or pad the FP8 array, with (number / scale).astype(array.dtype), and"
        " dequantize then",
        "MatchFp8Param: a pad is exchanged with the dequantization, whatever it pads with",
    ),
    "product of scales": Rule(
        "scale",
        "a scale of the call is a product of scalars, which a kernel computes",
        "dequantize each operand with its own scale, or pass the product as an argument",
        "F8ScaleD: one scalar of the program becomes one scale of the call",
    ),
    "scale not f32": Rule(
        "scale",
        "a scale is not float32, and a kernel converts it",
        "pass scales as float32; convert them to the dequantization's type in the program, not"
        " before",
        "CreateF8CustomCall and InvertAndConvertScalar: scales are float32",
    ),
    # ... a move -----------------------------------------------------------------------------------
    "operand's layout": Rule(
        "transpose",
        "the {side} operand's{name} contracting dimension is not its last in memory, which FP8"
        " calls on {chip} need: a kernel transposes it to {shape}",
        "store the {side} operand with K last ({stored}) and contract that dimension of it; where"
        " another matmul reads it the other way round, as a gradient does, one of the two"
        " transposes",
        "CreateF8CustomCall: before Blackwell, A row-major and B column-major",
    ),
    "batch inside": Rule(
        "transpose",
        "the {side} operand's{name} batch dimension is not in front of its rows in memory: a kernel"
        " transposes it to {shape}",
        "store it with the batch dimensions first, as [batch, heads, length, depth] for attention",
        "a strided batch of the call is a row of whole matrices (XLA's matmul_utils.cc)",
    ),
    "result's layout": Rule(
        "transpose",
        "the result is written, then transposed by a kernel",
        "let the reader take it as it is, or leave this kernel",
        "no call transposes its result",
    ),
    "padding": Rule(
        "pad",
        "an FP8 call takes multiples of 16, not {sizes}, so kernels pad the operands",
        "choose, or pad once in advance to, dimensions that are multiples of 16",
        "PadOperandToMultipleOf16",
    ),
    "own padding, of few": Rule(
        "pad",
        "the program pads few rows or columns to 16, or slices them off the result, in kernels of"
        " their own",
        "keep 16 rows together from the start, as a batch of requests is; else leave these kernels:"
        " they are small",
        "no call pads or slices",
    ),
    "own padding": Rule(
        "pad",
        "the program itself pads an operand, or slices the result",
        "keep the padded shape, or leave this kernel",
        "no call pads or slices",
    ),
    # ... a collective of a sharded program --------------------------------------------------------
    "gathered wide": Rule(
        "wire",
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after it: each device sends"
        " {sent}, and quantized {would}",
        "quantize each device's part and send that: jax.lax.with_sharding_constraint on the"
        " quantized array, first as the part is sharded, then as the matmul reads it; in"
        " jax.shard_map, quantize in front of the collective",
        _EXCHANGED.format("; and nothing else reads the wide array"),
    ),
    "dequantized, then gathered": Rule(
        "wire",
        "an FP8 array is dequantized, then sent as {dtype} ({kind} of {shapes}): each device sends"
        " {sent}, and before its dequantization {would}",
        "send the quantized array (jax.lax.with_sharding_constraint on it), then dequantize; and"
        " contract the dimension that it has (jax.lax.dot_general) in place of a transpose",
        _EXCHANGED.format(""),
    ),
    "gathered wide, read wide": Rule(
        "wire",
        "an array is sent as {dtype} ({kind} of {shapes}) and quantized after it for {feeds}, but"
        " {readers} read it as {dtype} too",
        "quantize each device's part and send that ({would} for {sent}), where the other readers"
        " can read it, or their own part as it was; else leave it",
        _EXCHANGED.format("; and nothing else reads the wide array"),
    ),
    "gathered twice": Rule(
        "wire",
        "the same array is gathered twice at once: {shapes} of each device",
        "gather it once, where it is made: jax.lax.with_sharding_constraint on it, first as it is"
        " sharded, then as the matmuls read it; a backward pass gets it saved",
        "the partitioner gathers for each dot on its own; CSE leaves two channels apart, and the"
        " combiner sends both (XLA's all_gather_combiner.cc)",
    ),
    "summed wide": Rule(
        "wire",
        "{kind} adds in {dtype}, and the sum is quantized after it, for {feeds}",
        "leave it where others read the sum too: sums need the digits. Else scatter the sum"
        " (jax.lax.with_sharding_constraint, jax.lax.psum_scatter), quantize the part, and gather"
        " that",
        "an all-reduce sends what a reduce-scatter and an all-gather do (nccl-tests,"
        " doc/PERFORMANCE.md)",
    ),
    "transposed after gathering": Rule(
        "transpose",
        "an FP8 array is gathered ({shapes} of each device), then each device transposes all of it"
        " in {kernels}, for {feeds}",
        "store it with the contracting dimension last and shard the other one: then the call reads"
        " what is gathered. Or shard a [K, N] array over N: then each device transposes its part."
        " Where another matmul reads it the other way round, as a gradient does, one transpose"
        " stays",
        "CreateF8CustomCall: before Blackwell, A row-major and B column-major (XLA's"
        " gemm_rewriter.cc)",
    ),
    # ... anything ---------------------------------------------------------------------------------
    "twice": Rule(
        "duplicate",
        "the same matrices are multiplied twice, here and in {other}: one result is read in two"
        " forms",
        "derive both from one form; where one is an amax, take it of the unscaled result, and"
        " multiply that number by the scale",
        "HandleMultiply and HandleConvert: each rewrites its own copy of the call",
    ),
    "outside of a kernel": Rule(
        "{lost}",
        "kernels do {works} on what the {library} kernel has written, and XLA did not fuse it into"
        " that",
        "look at what stands between, print(inspect(fn, *args).hlo); in Triton's place take"
        " gemm='cublaslt', whose rules are known here",
        "XLA fuses behind a dot what its Triton emitter can tile (gemm_fusion.cc), behind a"
        " library's kernel nothing",
    ),
    # A kernel that is no instruction of HLO's -----------------------------------------------------
    "a Mosaic kernel's matmul": Rule(
        "fp8",
        "the kernel is somebody's own, written in Mosaic GPU, and multiplies {types}",
        "give its plgpu.wgmma FP8 arrays, the right one [N, K] and transposed in the call; or leave"
        " it to XLA",
        "the kernel's MLIR: its wgmma, mma or tcgen05.mma instruction",
    ),
    "a Triton kernel's matmul": Rule(
        "fp8",
        "the kernel is somebody's own, written for Triton, and multiplies {types}",
        "leave it to XLA; or, for B200 and later, give its dots FP8 operands: for Hopper JAX"
        " multiplies those in f16",
        "the kernel's PTX: its mma instruction",
    ),
    "convolution": Rule(
        "fp8",
        "a convolution runs in {dtype}, by cuDNN: XLA's FP8 rewriting of it is not looked into"
        " here",
        "leave it, or write it as a matmul of patches",
        "XLA's conv_rewriter.cc",
    ),
    "not looked into": Rule(
        "kernel",
        "unknown: what this kernel multiplies, if anything, HLO does not tell ({target})",
        "ask its author; assert_fp8_gemms(..., count=...) asks for the other matmuls alone",
        "none found",
    ),
    "unknown kernel": Rule(
        "kernel",
        "unknown: the kernel {kernel} {does}, and what it does there is not known here ({opcode})",
        "look at it: print_hlo_module(aot_compile(fn, *args))",
        "none found",
    ),
    "unknown, outside": Rule(
        "{lost}",
        "unknown: kernels do {works} outside of the call, and no rule known here says why (the"
        " call: epilogue {epilogue}, scales {scales}, result {out})",
        _LOG,
        "none found",
    ),
}
