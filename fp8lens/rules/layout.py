"""Kernels that move what a matmul reads or writes: transposes, paddings, cuts."""

from fp8lens.hlo.ops import FP8_MULTIPLE
from fp8lens.rules.bias import is_bias_by_columns
from fp8lens.rules.facts import Cause, InFront, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule(
    "operand-layout",
    lost=Lost.TRANSPOSE,
    reason=(
        "the {side} operand's{name} contracting dimension is not its last in memory, which FP8 "
        "calls on {chip} need: a kernel transposes it to {shape}"
    ),
    fix=(
        "store the {side} operand with K last ({stored}) and contract that dimension of it; "
        "where another matmul reads it the other way round, as a gradient does, one of the two "
        "transposes"
    ),
    source="CreateF8CustomCall: before Blackwell, A row-major and B column-major",
)
def operand_layout(kernel: InFront) -> Found | None:
    """K is not an operand's last dimension in memory."""
    stored = "[M, K]" if kernel.side == "left" else "[N, K]"
    fields = {"name": kernel.argument, "shape": kernel.kernel.shape.brief, "stored": stored}
    return found_if(kernel.work == "transpose", side=kernel.side, **fields)


@rule(
    "batch-inside",
    lost=Lost.TRANSPOSE,
    reason=(
        "the {side} operand's{name} batch dimension is not in front of its rows in memory: a "
        "kernel transposes it to {shape}"
    ),
    fix="store it with the batch dimensions first, as [batch, heads, length, depth] for attention",
    source="a strided batch of the call is a row of whole matrices (XLA's matmul_utils.cc)",
)
def batch_inside(kernel: InFront) -> Found | None:
    """An operand's batch dimension stands between its rows and columns in memory."""
    if kernel.work != "transpose" or kernel.matmul.row.batch == 1 or not kernel.keeps_the_last:
        return None
    return Found(side=kernel.side, name=kernel.argument, shape=kernel.kernel.shape.brief)


@rule(
    "result-layout",
    lost=Lost.TRANSPOSE,
    reason="the result is written, then transposed by a kernel",
    fix="let the reader take it as it is, or leave this kernel",
    source="no call transposes its result",
)
def result_layout(m: Matmul) -> Found | None:
    """The result is transposed, and nothing else."""
    return Found()


@rule(
    "padded-operands",
    lost=Lost.PAD,
    reason="an FP8 call takes multiples of 16, not {sizes}, so kernels pad the operands",
    fix="choose, or pad once in advance to, dimensions that are multiples of 16",
    source="PadOperandToMultipleOf16",
)
def padding(m: Matmul) -> Found | None:
    """A size is no multiple of 16, and kernels pad."""
    odd = m.odd("MNK")
    return found_if(odd, sizes=" and ".join(odd))


@rule(
    "own-padding-of-few",
    lost=Lost.PAD,
    reason=(
        "the program pads few rows or columns to 16, or slices them off the result, in kernels "
        "of their own"
    ),
    fix=(
        "keep 16 rows together from the start, as a batch of requests is; else leave these "
        "kernels: they are small"
    ),
    source="no call pads or slices",
)
def own_padding_of_few(m: Matmul) -> Found | None:
    """The program pads a few rows or columns to 16."""
    given = m.as_written[0] if m.as_written else m.given
    return found_if(FP8_MULTIPLE in (given.m, given.n))


@rule(
    "own-padding",
    lost=Lost.PAD,
    reason="the program itself pads an operand, or slices the result",
    fix="keep the padded shape, or leave this kernel",
    source="no call pads or slices",
)
def own_padding(m: Matmul) -> Found | None:
    """The program pads, or cuts, in a kernel of its own."""
    return Found()


# What a move in front of a step costs ------------------------------------------------------------


@rule(
    "transposed-for-collective",
    reason=(
        "XLA turns the result around before the {step}, for a collective that sends it over its "
        "last dimension: the program has no such step"
    ),
    fix="send the result over its rows: shard the first dimension; or leave this kernel",
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def turned_first(cause: Cause) -> Found | None:
    """XLA transposes the result for a collective, in front of what the call could have done."""
    return found_if(cause.transposed and cause.is_xlas_transpose, step=cause.noun, lost=cause.lost)


@rule(
    "by-columns",
    reason=(
        "the result is transposed before the {step}, here by XLA, which has the product written "
        "by columns"
    ),
    fix=(
        "compute the transposed product, by exchanging the operands: one call, where no vector "
        "is added; or leave the transpose to the reader"
    ),
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def by_columns(cause: Cause | InFront) -> Found | None:
    """XLA has the product written by columns, and calls them rows."""
    if isinstance(cause, InFront) or is_bias_by_columns(cause) and not cause.transposed:
        return found_if(is_bias_by_columns(cause), step="bias", lost=Lost.BIAS)
    is_named = cause.transposed is not None and cause.transposed.opcode == "bitcast"
    return found_if(is_named, step=cause.noun, lost=cause.lost)


@rule(
    "moved-first",
    reason=(
        "the result is transposed before the {step}, and the call takes only what reads it directly"
    ),
    fix="do it before transposing; or exchange the operands, which gives the transposed product",
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def moved_first(cause: Cause) -> Found | None:
    """The result is transposed in front of what the call could have done."""
    return found_if(cause.transposed, step=cause.noun, lost=cause.lost)


@rule(
    "barrier-first",
    reason="an optimization_barrier stands between the result and the {step}",
    fix="leave the barrier out, or leave this kernel",
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def barrier(cause: Cause) -> Found | None:
    """A barrier stands in front of what the call could have done."""
    return found_if(cause.apart == "barrier", step=cause.noun, lost=cause.lost)


@rule(
    "joined-first",
    reason="the result is {how} before the {step}, and the call takes only what reads it directly",
    fix=(
        "do it to the dot's own result, before it is {how}; where the program does and XLA "
        "exchanges the two, put jax.lax.optimization_barrier between them"
    ),
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def joined_first(cause: Cause) -> Found | None:
    """The result is cut, joined, reversed or masked in front of what the call could have done."""
    return found_if(cause.apart, step=cause.noun, lost=cause.lost, how=cause.apart)


#: Tried in this order, for a kernel that pads or cuts.
PADDING = (padding, own_padding_of_few, own_padding)
#: Tried in this order, before the rules of the step that stayed outside.
MOVED = (turned_first, by_columns, moved_first, barrier, joined_first)
