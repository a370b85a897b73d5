"""Vectors and matrices that are added outside of the call."""

from fp8lens.formats import CUBLASLT, FORMATS
from fp8lens.hlo.ops import DOTS
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import NAMES, broadcast_of, look_through, operand
from fp8lens.matmul.epilogue import along_columns
from fp8lens.matmul.roles import Role
from fp8lens.matmul.unfused import adds_a_vector, inside, numbers_columns
from fp8lens.rules.facts import Cause, InFront, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule
from fp8lens.rules.scales import in_front_of_codes, moved_in_front_of_codes

_BIASES = (Role.BIAS, Role.MATRIX_BIAS)


@rule(
    "bias-after-scale",
    lost=Lost.BIAS,
    reason=(
        "the result is scaled outside of the call, before the addition: there the "
        "call takes a scale only in place of the left operand's, if that operand has none and "
        "nothing else reads the result (scales in use: {scales}; epilogue {epilogue}; beta {beta})"
    ),
    fix=(
        "multiply the scale into an operand's, outside of the program; or, if the result is FP8, "
        "add before the scale; after an activation or another bias leave this kernel"
    ),
    source="F8ScaleD, and HandleAdd after it",
)
def bias_after_scale(cause: Cause) -> Found | None:
    """Something is added to a scaled result, and the scale stayed outside of the call.

    The call multiplies the product by the operands' scales, then adds. It multiplies by a scale of
    the result after that, and only if it writes FP8. XLA's rewriter can pass a factor of the result
    as the left operand's scale, if that operand has none. Here it has one, so the multiplication
    stays outside of the call, and the addition after it stays outside too.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, bias):
            return scaled_dot(a, b, a_scale, b_scale) * d_scale + bias.astype(f32)

    Keeps it:

        def layer(a, b, a_scale, bd_scale: "f32[]", bias):  # bd_scale is b_scale * d_scale
            return scaled_dot(a, b, a_scale, bd_scale) + bias.astype(f32)
    """
    is_first = cause.is_factor and not cause.is_another_scale
    return found_if(is_first and cause.following in _BIASES)


@rule(
    "bias-and-reader",
    lost=Lost.BIAS,
    reason="the dot's result is read by the addition and by something else as well",
    fix="read the sum instead: a call has one result",
    source="HandleAdd: WithOneUser",
)
def bias_and_reader(cause: Cause) -> Found | None:
    """The sum is not the only reader of the dot's result.

    A call that adds returns the sum. It does not return the product without the addition. If
    something else reads the product, the call has to return that. XLA's rewriter therefore takes an
    addition into the call only if the sum is the only reader of the call's result.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, bias):
            d = scaled_dot(a, b, a_scale, b_scale)
            return quantize(d + bias.astype(f32), d_scale), jnp.max(jnp.abs(d))

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale, bias):
            d = scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32)
            return quantize(d, d_scale), jnp.max(jnp.abs(d))
    """
    return found_if(cause.kind in _BIASES and cause.is_read_twice)


@rule(
    "scalar-added",
    lost=Lost.BIAS,
    reason="a scalar is added to every element, and the call's bias is a vector",
    fix="pass it as a bfloat16 vector with one element for each column",
    source="FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
)
def scalar_added(cause: Cause) -> Found | None:
    """One number is added to all elements.

    The bias in cuBLASLt's epilogue is a vector with one element for each column of the result.
    XLA's rewriter looks for a vector that is broadcast along the columns. A scalar is broadcast
    too, but it has no dimension, and the rewriter does not make a vector of it.

    Loses it:

        def layer(a, b, a_scale, b_scale, shift: "f32[]"):
            return scaled_dot(a, b, a_scale, b_scale) + shift

    Keeps it:

        def layer(a, b, a_scale, b_scale, shift: "bf16[128]"):
            return scaled_dot(a, b, a_scale, b_scale) + shift.astype(f32)
    """
    return found_if(_is_scalar_behind(cause) and cause.first.at.opcode == "add")


def _is_scalar_behind(cause: Cause) -> bool:
    """Whether one number is added to the result, or subtracted from it."""
    step = cause.first
    if cause.kind not in (Role.ACTIVATION, Role.BIAS) or step.at.opcode not in ("add", "subtract"):
        return False
    is_scalar = step.other is not None and step.other.shape.size == 1
    return is_scalar and step.value.name in step.at.operands


@rule(
    "subtracted",
    lost=Lost.BIAS,
    reason=(
        "a {what} is subtracted, or the result from it, and XLA takes only additions into the call"
    ),
    fix=(
        "add: pass the {what} negated, or, if the result is what is subtracted, an operand's scale "
        "negated; a scalar as a bfloat16 vector with one element for each column"
    ),
    source="HandleAdd",
)
def subtracted(cause: Cause) -> Found | None:
    """Something is subtracted from the result, or the result from something.

    A call can add a vector or a matrix. XLA's rewriter looks for additions only: a subtraction is
    another instruction of HLO, and the rewriter has no pattern for it. If the result is subtracted
    from something, negating one operand's scale negates the result.

    Loses it:

        def layer(a, b, a_scale, b_scale, mean: "bf16[128]"):
            return scaled_dot(a, b, a_scale, b_scale) - mean.astype(f32)

    Keeps it:

        def layer(a, b, a_scale, b_scale, minus_mean: "bf16[128]"):
            return scaled_dot(a, b, a_scale, b_scale) + minus_mean.astype(f32)
    """
    if cause.first.at.opcode != "subtract":
        return None
    if _is_scalar_behind(cause):
        return Found(what="scalar")
    what = "matrix" if cause.kind is Role.MATRIX_BIAS else "vector"
    # Behind an activation, or another matrix, an addition stays outside as well.
    is_last = cause.row.epilogue not in ("DEFAULT", "BIAS") or cause.row.beta != 0
    return found_if(cause.kind in _BIASES and not is_last, what=what)


@rule(
    "matrix-after-epilogue",
    lost=Lost.BIAS,
    reason="a matrix is added after another epilogue (epilogue {epilogue}, beta {beta})",
    fix=(
        "adding the matrix before the activation is another function: do so if the model allows "
        "it, else leave this kernel"
    ),
    source="FuseMatrixBiasAdd: epilogue DEFAULT or BIAS, and beta 0",
)
def matrix_after_epilogue(cause: Cause) -> Found | None:
    """A matrix is added after an activation.

    cuBLASLt adds a matrix to the product first; the bias and the activation are applied to that
    sum. An addition after the activation stays outside of the call.

    If the matrix is added before the activation, the program computes another function. If the
    model needs the addition after the activation, as in a residual connection, leave the kernel.

    Loses it:

        def layer(a, b, a_scale, b_scale, c):
            return relu(scaled_dot(a, b, a_scale, b_scale, bf16)) + c

    Keeps it:

        def layer(a, b, a_scale, b_scale, c):
            return relu(scaled_dot(a, b, a_scale, b_scale, bf16) + c)
    """
    activates = "RELU" in cause.row.epilogue or "GELU" in cause.row.epilogue
    return found_if(cause.kind is Role.MATRIX_BIAS and activates)


@rule(
    "matrix-after-a-sum",
    lost=Lost.BIAS,
    reason=(
        "two matmuls' results and a matrix are added: the second call adds the first one's result, "
        "and has no place for the matrix"
    ),
    fix="add the matrix to the first result, and then the second: d2 + (d1 + c)",
    source="FuseMatrixBiasAdd: a call adds one matrix",
)
def matrix_after_a_sum(cause: Cause) -> Found | None:
    """The program adds two results, and then a matrix.

    A call can add one matrix, and that matrix may be another call's result. In d1 + d2 + c, the
    second call adds the first one's result, and a kernel adds c. The first call adds nothing. If
    the program adds c to the first result, and then the second result, each call adds one matrix.
    The second result must stand first in that sum: see second-of-a-sum. The order of two additions
    changes the sum by rounding only.

    Loses it:

        def layer(a, b, x, w: "bf16[128,256]", a_scale, b_scale, c):
            d1 = scaled_dot(a, b, a_scale, b_scale, bf16)
            d2 = scaled_dot(x.astype(e4m3), w.astype(e4m3), a_scale, b_scale, bf16)
            return d1 + d2 + c

    Keeps it:

        def layer(a, b, x, w: "bf16[128,256]", a_scale, b_scale, c):
            d1 = scaled_dot(a, b, a_scale, b_scale, bf16)
            d2 = scaled_dot(x.astype(e4m3), w.astype(e4m3), a_scale, b_scale, bf16)
            return d2 + (d1 + c)
    """
    if cause.kind is not Role.MATRIX_BIAS or cause.row.epilogue != "DEFAULT":
        return None
    if cause.first.at.opcode != "add" or cause.is_read_twice:
        return None
    sums = [step for step in cause.ahead if step.kind is Role.MATRIX_BIAS]
    first = sums[0].other if len(sums) == 1 else None
    is_free = first is not None and sums[0].at.opcode == "add" and _is_dot(first, alone=True)
    return found_if(cause.row.beta != 0 and is_free)


@rule(
    "second-matrix",
    lost=Lost.BIAS,
    reason="a second matrix is added, and a call adds one (epilogue {epilogue}, beta {beta})",
    fix="leave this kernel",
    source="FuseMatrixBiasAdd: beta 0",
)
def second_matrix(cause: Cause) -> Found | None:
    """Two matrices are added to the result, and a call adds one.

    cuBLASLt adds at most one matrix: `beta` is 1 in a call that adds a matrix, else 0. A kernel
    adds the second one. If the program adds the two matrices to each other first, a kernel does
    that, and moves as many bytes. There is no fixed program: leave this kernel. Only if the sum of
    the two is known outside of the program, as for two weights, pass the sum.

    Loses it:

        def layer(a, b, a_scale, b_scale, c, residual: "bf16[64,128]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c + residual
    """
    return found_if(cause.kind is Role.MATRIX_BIAS and cause.row.beta)


@rule(
    "second-of-a-sum",
    lost=Lost.BIAS,
    reason=(
        "two matmuls' results are added, and XLA tries to take the sum into the call of the first "
        "one alone, which has an epilogue or a matrix already"
    ),
    fix="exchange the two: add the other result to the one that nothing was done with, d + other",
    source="HandleAdd: AddAnyOrder, which finds the first operand's call",
)
def second_of_a_sum(cause: Cause) -> Found | None:
    """The first of two results that are added has an epilogue, and the second has none.

    A call can add a matrix, and that matrix may be another call's result. XLA's rewriter looks at
    an addition once and picks one operand's call: the first operand's, if both are calls. If that
    call has an activation or a matrix already, the addition stays outside, although the other call
    could take it. Addition commutes: with the other result first, the rewriter picks its call.

    Loses it:

        def layer(a, b, x, w: "bf16[128,256]", a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            other = scaled_dot(x.astype(e4m3), w.astype(e4m3), a_scale, b_scale, bf16)
            return relu(d) + other

    Keeps it:

        def layer(a, b, x, w: "bf16[128,256]", a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            other = scaled_dot(x.astype(e4m3), w.astype(e4m3), a_scale, b_scale, bf16)
            return other + relu(d)
    """
    at = cause.first.at
    if cause.kind is not Role.MATRIX_BIAS or at.opcode != "add":
        return None
    has_epilogue = cause.row.epilogue != "DEFAULT" or cause.row.beta
    is_first = operand(at, 0) is cause.first.value
    return found_if(is_first == bool(has_epilogue) and _is_dot(operand(at, 1)))


def _is_dot(i: Instruction, alone: bool = False) -> bool:
    """Whether a matrix is a dot's result, or that times numbers; `alone`: and nothing else is done
    with it.
    """
    if alone and len(i.computation.users.get(i.name, ())) != 1:
        return False
    i = look_through(i, NAMES)
    while i.opcode == "multiply" and not alone:
        factors = [operand(i, 0), operand(i, 1)]
        large = [factor for factor in factors if broadcast_of(factor) is None]
        if len(large) != 1:
            return False
        i = look_through(large[0], NAMES)
    return i.opcode in DOTS


@rule(
    "bias-per-row",
    lost=Lost.BIAS,
    reason=(
        "the vector that is added has one element for each row, and the call's bias one for each "
        "column"
    ),
    fix=(
        "compute the transposed product (exchange the operands), where it is a bias for each column"
    ),
    source="FuseVectorBiasAdd: the bias runs along the minor dimension",
)
def for_each_row(cause: Cause) -> Found | None:
    """The vector has one element for each row of the result, and the call's bias has one for each
    column.

    The bias in cuBLASLt's epilogue has one element for each column of the result, and the call adds
    it to all rows. There is no epilogue for the other direction. The rows of a product are the
    columns of the transposed product, which the same call computes with its operands exchanged.

    Loses it:

        def layer(a, b, a_scale, b_scale, shift: "bf16[64]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + shift[:, None]

    Keeps it:

        def layer(a, b, a_scale, b_scale, shift: "bf16[64]"):  # returns the transposed result
            return scaled_dot(b, a, b_scale, a_scale, bf16) + shift
    """
    if cause.kind is not Role.BIAS:
        return None
    step = cause.first
    added = next(name for name in step.at.operands if name != step.value.name)
    return found_if(not along_columns(step.at.computation[added]))


def _vectors(cause: Cause | InFront) -> Instruction | None:
    """What is added, where that has more dimensions than a vector."""
    if isinstance(cause, InFront):
        is_spread = "broadcast" in cause.opcodes and "multiply" not in cause.opcodes
        if cause.work != "bias" or cause.kernel.opcode == "copy" or not is_spread:
            return None
        return next(operand(i, 0) for i in inside(cause.kernel) if i.opcode == "broadcast")
    other = cause.first.other
    is_several = cause.kind is Role.BIAS and other is not None and len(other.shape.dims) > 1
    return other if is_several else None


def is_bias_by_columns(cause: Cause | InFront) -> bool:
    """Whether vectors are added to a result that XLA has written by columns."""
    m = cause.matmul
    if _vectors(cause) is None or m.dot is None:
        return False
    return any(s.kind is Role.MOVE and s.at.opcode == "bitcast" for s in m.steps)


@rule(
    "several-biases",
    lost=Lost.BIAS,
    reason=(
        "a vector is added for each matrix of a batch or part of the rows, and the call's bias "
        "is one for all of them"
    ),
    fix=(
        "add one vector; or pass the biases broadcast to the shape of the dot's result, which the "
        "call adds as a matrix; or leave this kernel"
    ),
    source="FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
)
def several_biases(cause: Cause | InFront) -> Found | None:
    """There is a vector for each of several matrices.

    The call adds one vector to all rows of its result. If the rows belong to several groups or
    matrices, each with its own vector, the added array has more than one dimension. XLA's rewriter
    compares the number of dimensions, and takes only a vector. It can take the biases as a matrix.
    Then the call reads each element from memory. So broadcasting the biases in the program only
    moves the kernel to a place before the call.

    Loses it:

        def layer(a, b, a_scale, b_scale, biases: "f32[4,128]"):
            groups = scaled_dot(a, b, a_scale, b_scale).reshape(4, 16, 128)
            return groups + biases[:, None]

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias):
            groups = scaled_dot(a, b, a_scale, b_scale).reshape(4, 16, 128)
            return groups + bias.astype(f32)
    """
    vectors = _vectors(cause)
    if vectors is None or is_bias_by_columns(cause):
        return None
    return found_if(vectors.shape.dims[-1:] == (cause.matmul.row.n,))


@rule(
    "split-columns",
    lost=Lost.BIAS,
    reason=(
        "the result's columns were split before a bias of several dimensions was added; the "
        "call's is a vector"
    ),
    fix="add a vector, and split the columns after",
    source="FuseVectorBiasAdd: the bias has as many dimensions as there are of columns",
)
def split_columns(cause: Cause | InFront) -> Found | None:
    """The columns were split into several dimensions before the addition.

    The call writes a matrix, and its bias is a vector along the columns. XLA's rewriter looks
    through the reshape after the call, but it takes an added array only if that has one dimension.
    A bias for each head and depth has two. If you reshape it to a vector, and add it before the
    columns are split, the sum is the same.

    Loses it:

        def heads(a, b, a_scale, b_scale, bias: "bf16[4,32]"):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return d.reshape(64, 4, 32) + bias

    Keeps it:

        def heads(a, b, a_scale, b_scale, bias: "bf16[4,32]"):
            d = scaled_dot(a, b, a_scale, b_scale, bf16) + bias.reshape(128)
            return d.reshape(64, 4, 32)
    """
    vectors = _vectors(cause)
    if vectors is None or is_bias_by_columns(cause):
        return None
    # What the call takes as its bias is a vector, however a kernel has made it.
    is_taken = isinstance(cause, InFront) and "BIAS" in cause.matmul.row.epilogue
    return found_if(vectors.shape.dims[-1:] != (cause.matmul.row.n,) and not is_taken)


def _types(cause: Cause) -> dict[str, str]:
    """The bias's type, the dot's, and the one that the call takes beside it."""
    assert cause.matmul.dot is not None and cause.first.other is not None
    dtype = cause.matmul.dot.shape.dtype
    bias = cause.first.other.shape.dtype
    if bias == "f32":  # XLA looks behind a conversion to float32 only
        bias = look_through(cause.first.other).shape.dtype
    fits = "f16" if dtype == "f16" else "bf16"
    return {"bias": bias, "dtype": dtype, "fits": fits, "jax_fits": f"jnp.{FORMATS[fits].jax}"}


@rule(
    "late-bias",
    lost=Lost.BIAS,
    reason=(
        "the addition stands where the call cannot take it (its epilogue is {epilogue}, beta "
        "{beta})"
    ),
    fix=(
        "after a matrix or another bias, change the order: add the vectors to each other, then to "
        "the dot's result, then the matrix; after an activation, adding before it is another "
        "function: do so if the model allows it, else leave this kernel"
    ),
    source="FuseVectorBiasAdd: epilogue DEFAULT, one reader, no matrix added",
)
def late_bias(cause: Cause) -> Found | None:
    """The vector is added after an activation, a scale or a matrix.

    cuBLASLt adds the bias before it applies the activation, and XLA's rewriter gives a call a bias
    only while it has no other epilogue. A call can add a vector and a matrix. But the rewriter
    takes the vector only if it is added first: it gives no vector to a call that already adds a
    matrix. The order of two additions changes the sum by rounding only. Adding before an activation
    is another function.

    Loses it:

        def layer(a, b, a_scale, b_scale, c, bias):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c + bias

    Keeps it:

        def layer(a, b, a_scale, b_scale, c, bias):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + bias + c
    """
    if cause.kind is not Role.BIAS:
        return None
    types = _types(cause)
    return found_if(types["bias"] == types["fits"])


@rule(
    "bias-of-another-type",
    lost=Lost.BIAS,
    reason="the bias vector is {bias}, which FP8 calls do not take with a {dtype} dot",
    fix="pass it as {jax_fits}, and convert it in the program to add it",
    source="FuseVectorBiasAdd: of vectors that are converted to float32 it takes bfloat16 alone",
)
def bias_of_another_type(cause: Cause) -> Found | None:
    """The vector has another 16- or 8-bit type than the call takes beside a float32 dot.

    cuBLASLt takes the bias of an FP8 matmul in bfloat16 if the result is float32 or bfloat16, and
    in float16 if the result is float16. XLA's rewriter compares the types and leaves another vector
    outside.

    Loses it:

        def layer(a, b, a_scale, b_scale, bias: "f16[128]"):
            return scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32)

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias):
            return scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32)
    """
    if cause.kind is not Role.BIAS:
        return None
    types = _types(cause)
    return found_if(types["dtype"] == "f32" != types["bias"], **types)


@rule(
    "bias-in-f32",
    lost=Lost.BIAS,
    reason="the bias vector is {bias}, which FP8 calls do not take with a {dtype} dot",
    fix="pass it as {jax_fits}, and convert it in the program to add it",
    source="FuseVectorBiasAdd: a float32 bias must be a conversion of a 16-bit one",
)
def bias_in_f32(cause: Cause) -> Found | None:
    """The vector is float32, and XLA looks for a 16-bit one.

    cuBLASLt adds no float32 bias to an FP8 matmul, even if the result is float32. XLA could convert
    the vector to bfloat16, but that rounds it, so XLA leaves this to the program. If a bfloat16
    vector is converted to float32 for the addition, the rewriter drops the conversion and gives the
    call the bfloat16 vector. For the other types see bias-of-another-type.

    Loses it:

        def layer(a, b, a_scale, b_scale, bias: "f32[128]"):
            return scaled_dot(a, b, a_scale, b_scale) + bias

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias):
            return scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32)
    """
    return Found(_types(cause)) if cause.kind == "bias" else None


@rule(
    "copied-matrix",
    lost=Lost.BIAS,
    reason=(
        "the matrix that is added is an argument of another shape, {shape}, and a kernel copies "
        "it: of what is reshaped XLA believes that the call may write over it"
    ),
    fix=(
        "pass it in the shape of the dot's result, rows by columns; or donate it (jax.jit's "
        "donate_argnums), where nobody reads it later"
    ),
    source=(
        "FuseMatrixBiasAdd: the call writes over a matrix that has no other reader, and is not "
        "an argument itself"
    ),
)
def copied_matrix(kernel: InFront) -> Found | None:
    """The call writes over the matrix that it adds, so XLA first copies a matrix that must be kept.

    cuBLASLt can write the sum over the matrix that it adds, or into other memory. XLA writes over
    the matrix if nothing else reads it and it is not an argument of the program, since the caller
    keeps its arguments. XLA does not count a reshaped argument as an argument there, although it is
    the same memory. A later pass of XLA notices this, and copies the matrix first.

    Loses it:

        def layer(a, b, a_scale, b_scale, c: "bf16[2,32,128]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c.reshape(64, 128)

    Keeps it:

        def layer(a, b, a_scale, b_scale, c):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c
    """
    if kernel.work != "bias" or kernel.kernel.opcode != "copy":
        return None
    return Found(shape=look_through(kernel.kernel, ("bitcast", "copy")).shape.brief)


@rule(
    "transposed-matrix",
    lost=Lost.BIAS,
    reason="the matrix that is added is transposed by a kernel before the call reads it",
    fix=(
        "pass it as the dot's result lies in memory, rows by columns; or exchange the operands, "
        "which gives the transposed result, and add it as it is"
    ),
    source="FuseMatrixBiasAdd takes what is added as it is",
)
def transposed_matrix(kernel: InFront) -> Found | None:
    """A kernel transposes the matrix that is added.

    The call reads the matrix as it writes its result, row by row. If the program adds the transpose
    of a matrix, XLA writes that transpose first. A dot with its operands exchanged gives the
    transposed result, to which the matrix can be added as it is.

    Loses it:

        def layer(a, b, a_scale, b_scale, c: "bf16[128,64]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c.T

    Keeps it:

        def layer(a, b, a_scale, b_scale, c):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c
    """
    opcodes = kernel.opcodes
    return found_if(kernel.work == "bias" and "transpose" in opcodes and "add" not in opcodes)


@rule(
    "summed-first",
    lost=Lost.BIAS,
    reason=(
        "a number or a vector is added to the matrix by a kernel, and the call then adds their sum"
    ),
    fix="add the vector to the dot's result first, then the matrix: (d + v) + c",
    source="FuseVectorBiasAdd and FuseMatrixBiasAdd: the call adds one vector and one matrix",
)
def summed_first(kernel: InFront) -> Found | None:
    """The bias is added to the residual, and their sum to the dot's result.

    A call can add a vector and a matrix to its result, in this order. If the program adds the two
    to each other first, a kernel reads the matrix and writes it again, and the call adds what that
    kernel has written. XLA does not change the order, since that would change the rounding.

    Loses it:

        def layer(a, b, a_scale, b_scale, bias, c):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + (c + bias)

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias, c):
            return (scaled_dot(a, b, a_scale, b_scale, bf16) + bias) + c
    """
    is_a_matrix = kernel.kernel.shape.size > kernel.matmul.row.n
    adds = adds_a_vector(inside(kernel.kernel))
    return found_if(kernel.work == "bias" and is_a_matrix and adds)


@rule(
    "numbered-bias",
    lost=Lost.BIAS,
    reason=(
        "each row of the matrix that is added is the same, computed from the numbers of the "
        "columns (jnp.arange): XLA has made a matrix of a vector"
    ),
    fix=(
        "add jax.lax.optimization_barrier of the vector, in bfloat16, to the dot's result before "
        "its columns are split"
    ),
    source="FuseVectorBiasAdd takes a broadcast vector; XLA writes broadcast(iota) as one iota",
)
def numbered_bias(kernel: InFront) -> Found | None:
    """A vector that jnp.arange makes is added, and XLA adds a matrix.

    jnp.arange is an iota instruction. XLA replaces the broadcast of an iota by an iota of the
    larger shape, before its rewriter looks for a broadcast vector. So a kernel writes the whole
    matrix, and the call reads it. A barrier between the two keeps the vector.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + jnp.arange(128, dtype=bf16)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            columns = jax.lax.optimization_barrier(jnp.arange(128, dtype=bf16))
            return scaled_dot(a, b, a_scale, b_scale, bf16) + columns
    """
    return found_if(numbers_columns(kernel.kernel, inside(kernel.kernel)))


@rule(
    "prepared-bias",
    lost=Lost.BIAS,
    reason=(
        "the bias, or the matrix that is added, is computed by a kernel before the call reads it: "
        "converted, scaled, negated, or added to"
    ),
    fix=(
        "pass it in the type of the dequantization (a vector: bfloat16, or float16 under "
        "float16), as it is, without a factor, a sign or a second addend"
    ),
    source="FuseVectorBiasAdd and FuseMatrixBiasAdd take what is added as it is",
)
def prepared_bias(kernel: InFront) -> Found | None:
    """A kernel converts or scales what is added.

    The call reads a bias or a matrix from memory and adds it as it is. If the program computes what
    is added, a kernel does that before the call. One conversion needs no kernel: that of a vector
    from bfloat16 to float32, see bias-in-f32. A matrix is added in the type of the dot, which is
    the type in which the operands are dequantized.

    Loses it:

        def layer(a, b, a_scale, b_scale, c):
            return scaled_dot(a, b, a_scale, b_scale) + c.astype(f32)

    Keeps it:

        def layer(a, b, a_scale, b_scale, c):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + c
    """
    return found_if(kernel.work == "bias")


@rule(
    "merged-then-added",
    lost=Lost.BIAS,
    reason=(
        "XLA merged dots that share an operand, and a kernel adds their results, which the "
        "second call could do"
    ),
    fix="compile with compiler_options={{'xla_gpu_dot_merger_threshold_mb': 0}}",
    source=(
        "XLA's dot_merger.cc; FuseMatrixBiasAdd: one dot's result is the matrix that the other's "
        "call adds"
    ),
)
def merged_then_added(m: Matmul) -> Found | None:
    """XLA merged two dots whose results are added.

    If two dots share an operand, XLA can join the other operands and compute both dots in one. It
    does so for small dots, up to a limit in MB, which is an option. The two results are then parts
    of one matrix, and a kernel cuts them out and adds them. Without merging there are two calls,
    and the second call adds the result of the first as a matrix.

    If scales are applied to the operands before the dots, see merged-dots.

    Loses it:

        def layer(a, b, c: "f8e4m3fn[128,256]"):
            d = jax.lax.dot(a, b.T, preferred_element_type=bf16)
            return d + jax.lax.dot(a, c.T, preferred_element_type=bf16)

    Compiled with: compiler_options={"xla_gpu_dot_merger_threshold_mb": 0}
    Keeps it:

        def layer(a, b, c: "f8e4m3fn[128,256]"):
            d = jax.lax.dot(a, b.T, preferred_element_type=bf16)
            return d + jax.lax.dot(a, c.T, preferred_element_type=bf16)
    """
    if m.dot is None:
        return None
    users = m.dot.computation.users
    parts = users.get(m.dot.name, [])
    added = {user for part in parts for user in users.get(part.name, [m.dot])}
    are_parts = {i.opcode for i in parts} == {"slice"}
    return found_if(are_parts and [i.opcode for i in added] == ["add"] and not m.as_written)


# Wrong numbers, and what the GPU refuses ----------------------------------------------------------


@rule(
    "bias-of-codes",
    lost=Lost.BIAS,
    reason=(
        "wrong numbers, by an error of XLA's: it adds the vector before the result's scale, clamp "
        "and conversion to FP8, and the program adds it after them"
    ),
    fix=(
        "add a bfloat16 vector to the dot's result; or put jax.lax.optimization_barrier after "
        "the conversion"
    ),
    source="FuseVectorBiasAdd: the call may have an FP8 result",
    wrong=True,
)
def bias_of_codes(m: Matmul) -> list[Found]:
    """XLA adds a vector before the conversion to FP8, and the program adds it after that.

    The call adds its bias to the product, and scales, clamps and converts after that. XLA's
    rewriter takes the conversion into the call first. When it then finds an addition to the call's
    FP8 result, it takes that into the call as the bias, and does not check whether the call already
    converts. So the call scales the bias with the result, and clamps the sum. The compiled program
    returns other numbers than the program that was written.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, bias):
            return quantize(scaled_dot(a, b, a_scale, b_scale), d_scale) + bias.astype(e4m3)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale, bias):
            return quantize(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32), d_scale)
    """
    return [Found()] if _is_of_codes(m) else []


def _is_of_codes(m: Matmul) -> bool:
    is_moved = "output" in in_front_of_codes(m) and "bias" in moved_in_front_of_codes(m)
    return is_moved and "BIAS" in m.row.epilogue


@rule(
    "no-cublaslt-bias",
    lost=Lost.BIAS,
    reason=(
        "the call adds a vector of {bias}, for which cuBLASLt has no kernel: XLA's rewriter does "
        "not check that, so the program compiles, and by cuBLASLt's table it fails when it runs"
    ),
    fix=(
        "pass the vector as bfloat16, add it to a dot in float32 or bfloat16 "
        "(preferred_element_type), and clamp and convert to FP8 last"
    ),
    source=(
        "docs.nvidia.com/cuda/cublas/#cublasltmatmul, the table of FP8 types (not measured here)"
    ),
)
def no_such_bias(m: Matmul) -> list[Found]:
    """The call adds a vector of a type that cuBLASLt does not add.

    cuBLASLt's bias has 16 bits beside FP8 operands. XLA's rewriter checks the type of a bias only
    if that is float32. If a dot itself returns FP8, an FP8 vector can be added to it, and the
    rewriter gives the call that vector. XLA compiles the program, because it asks cuBLASLt for a
    kernel only on the GPU.

    Loses it:

        def layer(a, b, bias: "f8e4m3fn[128]"):
            return jax.lax.dot(a, b.T, preferred_element_type=e4m3) + bias

    Keeps it:

        def layer(a, b, bias):
            d = jax.lax.dot(a, b.T, preferred_element_type=f32) + bias.astype(f32)
            return jnp.clip(d, -448, 448).astype(e4m3)
    """
    if _is_of_codes(m) or "BIAS" not in m.row.epilogue:
        return []
    added = (m.row.instruction.computation[name].shape for name in m.row.instruction.operands[2:])
    return [Found(bias=v.dtype) for v in added if len(v.dims) == 1 and v.dtype in CUBLASLT]
