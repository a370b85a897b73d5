"""Kernels that move what a matmul reads or writes: transposes, paddings, cuts."""

import itertools
from collections.abc import Sequence

from fp8lens.hlo.ops import FP8_MULTIPLE
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import results
from fp8lens.hlo.text import size
from fp8lens.hlo.values import (
    NAMES,
    changes_layout,
    depends,
    dimensions,
    is_choice_by_flag,
    is_one_number,
    look_through,
    operand,
    reducer,
)
from fp8lens.hlo.walk import walk
from fp8lens.matmul.epilogue import SUMMED
from fp8lens.matmul.roles import Role, Step, could_be_fused
from fp8lens.matmul.unfused import UnfusedKernel, inside, is_copied_for_a_choice
from fp8lens.rules.bias import is_bias_by_columns
from fp8lens.rules.facts import Cause, InFront, Matmul
from fp8lens.rules.rule import Found, Lost, found_if, rule
from fp8lens.rules.scales import products_added


@rule(
    "operand-layout",
    lost=Lost.TRANSPOSE,
    reason=(
        "the {side} operand's{name} contracting dimension is not its last in memory, which FP8 "
        "calls on {chip} need: a kernel transposes it to {shape}"
    ),
    fix=(
        "store the {side} operand with K last ({stored}) and contract that dimension of it; if "
        "another matmul contracts its other dimension, as a gradient does, one of the two matmuls "
        "needs a transposed copy"
    ),
    source=(
        "CreateF8CustomCall: before Blackwell, A row-major and B column-major; cuDNN's "
        "block-scaled call on any chip"
    ),
)
def operand_layout(kernel: InFront) -> Found | None:
    """K is not an operand's last dimension in memory.

    On the GPUs before Blackwell, cuBLASLt's FP8 kernels need the contracting dimension of both
    operands contiguous in memory. In a JAX array that is the last dimension. If an operand has it
    elsewhere, XLA's rewriter makes a transposed copy of the FP8 codes before the call. A transpose
    in the program, as b.T, is not a kernel: it only tells the dot which dimension to contract.

    Loses it:

        def layer(a, b: "f8e4m3fn[256,128]", a_scale, b_scale):
            return jax.lax.dot(dequantize(a, a_scale), dequantize(b, b_scale))

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return jax.lax.dot(dequantize(a, a_scale), dequantize(b, b_scale).T)
    """
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
    """An operand's batch dimension stands between its rows and columns in memory.

    A batched call multiplies matrices that follow each other in memory: the distance from one to
    the next is always the same, and they are not interleaved. If the heads are between length and
    depth, the matrices of two heads are interleaved, and XLA transposes the operand before the
    call.

    Loses it:

        def scores(q: "f8e4m3fn[2,64,4,64]", k: "f8e4m3fn[2,64,4,64]"):
            return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=f32)

    Keeps it:

        def scores(q: "f8e4m3fn[2,4,64,64]", k: "f8e4m3fn[2,4,64,64]"):
            return jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=f32)
    """
    if kernel.work != "transpose" or kernel.matmul.row.batch == 1 or not kernel.keeps_the_last:
        return None
    return Found(side=kernel.side, name=kernel.argument, shape=kernel.kernel.shape.brief)


@rule(
    "rows-rearranged",
    lost=Lost.TRANSPOSE,
    reason=(
        "the {side} operand's{name} rows stand in another order in memory than the matmul takes "
        "them: a kernel rearranges them to {shape}"
    ),
    fix=(
        "store the operand with its rows in the order that the matmul takes; or multiply the rows "
        "as they are stored, and rearrange the result's, if that is smaller"
    ),
    source="a call reads the rows of an operand at one distance in memory (XLA's matmul_utils.cc)",
)
def rows_rearranged(kernel: InFront) -> Found | None:
    """The rows of an operand are transposed among themselves, and K stays last.

    A call reads an operand row by row, and each row is at the same distance from the one before it.
    If the program exchanges two dimensions that together are the rows, such as batch and length, no
    single distance leads from row to row. So XLA writes a rearranged operand before the call.

    Loses it:

        def layer(a: "f8e4m3fn[4,16,256]", b, a_scale, b_scale):
            rows = dequantize(a, a_scale).transpose(1, 0, 2).reshape(64, 256)
            return jax.lax.dot(rows, dequantize(b, b_scale).T)

    Keeps it:

        def layer(a: "f8e4m3fn[16,4,256]", b, a_scale, b_scale):
            rows = dequantize(a, a_scale).reshape(64, 256)
            return jax.lax.dot(rows, dequantize(b, b_scale).T)
    """
    if kernel.work != "transpose" or not kernel.keeps_the_last:
        return None
    return Found(side=kernel.side, name=kernel.argument, shape=kernel.kernel.shape.brief)


@rule(
    "order-within-k",
    lost=Lost.TRANSPOSE,
    reason=(
        "K is several dimensions, which the {side} operand{name} has in another order in memory "
        "than the other operand: a kernel transposes it to {shape}"
    ),
    fix="store both operands with the dimensions of K last, and in the same order",
    source="a call's K is one dimension: XLA joins several, in the order of one operand",
)
def order_within_k(kernel: InFront) -> Found | None:
    """Several dimensions are contracted, and the two operands have them in different orders.

    A dot may contract several dimensions, as an attention's output projection contracts heads and
    their depth. XLA joins these dimensions to one, K, which both operands must have in the same
    order. If one array is stored in another order, a kernel transposes it.

    Loses it:

        def layer(a: "f8e4m3fn[64,4,64]", b: "f8e4m3fn[128,64,4]", a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return jnp.einsum("mhk,nkh->mn", x, w)

    Keeps it:

        def layer(a: "f8e4m3fn[64,4,64]", b: "f8e4m3fn[128,4,64]", a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return jnp.einsum("mhk,nhk->mn", x, w)
    """
    if kernel.work != "transpose" or not kernel.permutes_k:
        return None
    return Found(side=kernel.side, name=kernel.argument, shape=kernel.kernel.shape.brief)


@rule(
    "repeated-operand",
    lost=Lost.COPY,
    reason="the {side} operand{name} is repeated in memory: a kernel copies it to {shape}",
    fix=(
        "multiply the array as it is: leave the repeated dimension out of it in the einsum; for "
        "heads that share keys, split the other operand's heads into [groups, heads in a group]"
    ),
    source="a call reads each matrix of a batch from memory of its own (XLA's matmul_utils.cc)",
)
def repeated_operand(kernel: InFront) -> Found | None:
    """An operand is broadcast to a batch, or to more rows, before the dot.

    A broadcast is not a copy in JAX, but a call reads its operands from memory, so XLA writes the
    repeated array. You can avoid the broadcast. If every matrix of a batch is multiplied by the
    same weights, write the batch as rows of one larger matmul. If groups of heads share keys, write
    the heads of a group as further rows.

    Loses it:

        def layer(a: "f8e4m3fn[4,64,256]", b, a_scale, b_scale):
            weights = jnp.broadcast_to(dequantize(b, b_scale), (4, 128, 256))
            return jnp.einsum("gmk,gnk->gmn", dequantize(a, a_scale), weights)

    Keeps it:

        def layer(a: "f8e4m3fn[4,64,256]", b, a_scale, b_scale):
            return jnp.einsum("gmk,nk->gmn", dequantize(a, a_scale), dequantize(b, b_scale))
    """
    if kernel.work != "copy":
        return None
    name = kernel.argument
    return Found(side=kernel.side, name=name, shape=kernel.kernel.shape.brief)


@rule(
    "joined-operand",
    lost=Lost.COPY,
    reason="a kernel joins FP8 arrays to make the {side} operand: it copies them to {shape}",
    fix=(
        "store the arrays joined; or multiply each of them by itself, and join or add the results, "
        "if these are smaller than the arrays; where XLA has joined them and not the program, "
        "compile with compiler_options={{'xla_gpu_dot_merger_threshold_mb': 0}}"
    ),
    source="a call reads each operand from one place in memory",
)
def joined_operand(kernel: InFront) -> Found | None:
    """Arrays are joined each time that the program runs, and the joined array is multiplied.

    A call reads each operand from one place in memory. If the program joins arrays, such as the
    weights for queries, keys and values, with jnp.concatenate or jnp.stack, a kernel copies all of
    them in each run. Arrays that are only multiplied together can be stored together: as one
    parameter of the model, or as one buffer of which other kernels write the parts.

    Loses it:

        def layer(a, b: "f8e4m3fn[64,256]", other: "f8e4m3fn[64,256]", a_scale, b_scale):
            return scaled_dot(a, jnp.concatenate([b, other]), a_scale, b_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale):  # both weights, stored as one array
            return scaled_dot(a, b, a_scale, b_scale)
    """
    joins = any(i.opcode == "concatenate" for i in inside(kernel.kernel))
    is_found = kernel.work == "copy" and joins
    return found_if(is_found, side=kernel.side, shape=kernel.kernel.shape.brief)


@rule(
    "copied-choice",
    lost=Lost.COPY,
    reason="a flag chooses the {side} operand from {choices}, and a kernel copies the chosen",
    fix=(
        "choose between matmuls: jax.lax.cond with a dot in each branch; of an operand of zeros, "
        "the branch returns zeros"
    ),
    source="a select, or a branch, writes its result to memory",
)
def copied_choice(kernel: InFront) -> Found | None:
    """One number decides which of two FP8 arrays is multiplied, and a kernel copies that array.

    jnp.where with two arrays is a select instruction. The call reads its operand from one place in
    memory, so a kernel copies the chosen array there. So does each branch of a jax.lax.cond that
    only returns an array. If the dots stand in the branches, one of them runs, and reads its array
    from where it is. A branch has a cost of its own, which fp8lens does not know: for small arrays,
    leave this kernel.

    Loses it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, flag: "pred[]"):
            return scaled_dot(jnp.where(flag, a, other), b, a_scale, b_scale)

    Keeps it:

        def layer(a, other: "f8e4m3fn[64,256]", b, a_scale, b_scale, flag: "pred[]"):
            return jax.lax.cond(
                flag,
                lambda: scaled_dot(a, b, a_scale, b_scale),
                lambda: scaled_dot(other, b, a_scale, b_scale),
            )
    """
    if kernel.work != "copy":
        return None
    by_flag = [i for i in inside(kernel.kernel) if is_choice_by_flag(i)]
    if not by_flag and not is_copied_for_a_choice(kernel.kernel):
        return None
    choices = _choices(by_flag[-1]) if by_flag else "the FP8 arrays of several branches"
    return Found(side=kernel.side, choices=choices)


def _choices(i: Instruction) -> str:
    """From what a choice by one number takes an array, in words."""

    def offered(j: Instruction) -> list[Instruction]:
        if is_choice_by_flag(j):
            return [operand(j, 1), operand(j, 2)]
        return [operand(j, 0)] if j.opcode in NAMES else []

    ends = [j for j in walk([i], offered) if not offered(j)]
    arrays = [j for j in ends if not is_one_number(j)]
    if len(arrays) < len(ends):
        return "an FP8 array and a number, repeated"
    return "two FP8 arrays" if len(arrays) == 2 else f"{len(arrays)} FP8 arrays"


@rule(
    "batch-summed",
    lost=Lost.SUM,
    reason=(
        "the products of a batch of {batch} are added up: the call writes each ({written}), and a "
        "kernel adds them"
    ),
    fix=(
        "contract the dimension in the dot itself: in einsum, leave its letter out of the result "
        "instead of summing over it"
    ),
    source="a call adds up over K, and over nothing else",
)
def batch_summed(m: Matmul) -> Found | None:
    """The result of a batched matmul is summed over the batch.

    A dot may contract several dimensions, which together are its K. If one of them is a batch
    dimension of the dot, and the program sums over it after the dot, the call writes a product for
    each matrix of the batch, and a kernel reads all of them.

    Loses it:

        def layer(a: "f8e4m3fn[64,4,64]", b: "f8e4m3fn[128,4,64]", a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return jnp.einsum("mhk,nhk->hmn", x, w).sum(0)

    Keeps it:

        def layer(a: "f8e4m3fn[64,4,64]", b: "f8e4m3fn[128,4,64]", a_scale, b_scale):
            x, w = dequantize(a, a_scale), dequantize(b, b_scale)
            return jnp.einsum("mhk,nhk->mn", x, w)
    """
    if m.dot is None or m.dot.opcode != "dot" or not m.is_cublaslt:
        return None
    conversions = itertools.takewhile(lambda step: step.kind is Role.OUTPUT, m.steps)
    *_, last = (m.dot, *(step.at for step in conversions))
    products = products_added(m.dot, last)
    written = sum(shape.nbytes for shape in results(m.row.instruction))
    return found_if(products > 1, batch=products, written=size(written))


@rule(
    "stacked-then-summed",
    lost=Lost.SUM,
    reason=(
        "a loop stores the result of each iteration, and a kernel adds them up after it: {written} "
        "are written and read again"
    ),
    fix=(
        "add in the loop: jax.lax.scan with the sum as its carry, total + d, which the call adds; "
        "or contract the loop's dimension in one dot"
    ),
    source="a call adds up over K, and one matrix to that: nothing after a loop",
)
def stacked_then_summed(m: Matmul) -> Found | None:
    """The results of a loop's iterations are stored, then summed.

    jax.lax.map and jax.lax.scan store the result of each iteration in one large array. If the
    program only sums over that array afterwards, a kernel reads all of it. With the sum as the
    loop's carry, each call adds its result to the matrix from the iteration before, and no kernel
    adds. In bfloat16 the carry would be rounded in each iteration: keep it in f32.

    Loses it:

        def layer(a: "f8e4m3fn[4,64,256]", b, a_scale, b_scale):
            return jax.lax.map(lambda one: scaled_dot(one, b, a_scale, b_scale), a).sum(0)

    Keeps it:

        def layer(a: "f8e4m3fn[4,64,256]", b, a_scale, b_scale):
            def add(total, one):
                return total + scaled_dot(one, b, a_scale, b_scale), None

            return jax.lax.scan(add, jnp.zeros((64, 128), f32), a)[0]
    """
    moves = [step for step in m.steps if not _widens(step)]
    if not m.is_cublaslt or [step.kind for step in moves[-2:]] != [Role.MOVE, Role.MOVE]:
        return None
    stored, returned = (step.at for step in moves[-2:])
    if stored.opcode != "dynamic-update-slice" or stored.computation is returned.computation:
        return None
    read = walk([returned], _converted)
    readers = [user for i in read for user in _users(i) if user not in read]
    is_summed = bool(readers) and all(map(_sums_the_stack, readers))
    return found_if(is_summed, written=size(stored.shape.nbytes))


def _widens(step: Step) -> bool:
    """Whether a step converts to a wider type, as a sum of bfloat16 does before it adds."""
    return step.kind is Role.OUTPUT and step.at.shape.bits > step.value.shape.bits


def _users(i: Instruction) -> Sequence[Instruction]:
    """Who reads a value in its computation."""
    return i.computation.users.get(i.name, ())


def _converted(i: Instruction) -> list[Instruction]:
    """The conversions of a value."""
    return [user for user in _users(i) if user.opcode == "convert"]


def _sums_the_stack(i: Instruction) -> bool:
    """Whether an instruction adds up along the first dimension, in which a loop stores."""
    return i.opcode == "reduce" and reducer(i) == "add" and 0 in dimensions(i)


@rule(
    "changed-in-part",
    lost=Lost.COPY,
    reason="a part of the result is changed, and the rest is not: {how}",
    fix=(
        "treat all of the result alike: add zeros to the rest of it (jnp.pad of the bias), or "
        "choose with jnp.where"
    ),
    source="copy_insertion.cc: what is changed in place must be a buffer of its own",
)
def changed_in_part(m: Matmul) -> Found | None:
    """A part of the result is changed in place.

    JAX's d.at[...].add and d.at[...].set become an update of a part of an array, and a call changes
    all of its result or nothing. A kernel can write only that part, if it may overwrite the array.
    Where it may not, as where the call has written the result in another layout, XLA copies all of
    it first. A bias for some columns is zero for the others, and a call adds that.

    Loses it:

        def layer(a, b, a_scale, b_scale, bias: "bf16[32]"):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return d.at[:, :32].add(bias)

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias: "bf16[32]"):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + jnp.pad(bias, (0, 96))
    """
    if not m.is_cublaslt:
        return None
    if any(map(_is_copied_to_change, m.near)):
        return Found(how="a kernel copies all of it, and another one changes the copy")
    adds_to_part = any(map(_adds_to_part, m.near))
    return found_if(adds_to_part, how="a kernel adds to the part what a call could add to all")


def _is_copied_to_change(o: UnfusedKernel) -> bool:
    """Whether a kernel only copies a result, for readers that store into a part of it."""
    copy = o.instruction
    if not o.after or copy.opcode != "copy" or changes_layout(copy):
        return False
    readers = _users(copy)
    return bool(readers) and all(
        any(j.opcode == "dynamic-update-slice" for j in inside(reader)) for reader in readers
    )


def _adds_to_part(o: UnfusedKernel) -> bool:
    """Whether a kernel adds a bias to a part of a result, and stores that part in place."""
    adds = Role.BIAS in o.fusable or Role.MATRIX_BIAS in o.fusable
    return o.after and adds and any(map(_changes_a_part, inside(o.instruction)))


def _changes_a_part(j: Instruction) -> bool:
    """Whether an instruction puts into an array what is computed from a part of the same array. A
    loop stores its results in another one.
    """
    if j.opcode != "dynamic-update-slice":
        return False
    return depends(operand(j, 1), look_through(operand(j, 0)))


@rule(
    "result-layout",
    lost=Lost.TRANSPOSE,
    reason="the result is written, then transposed by a kernel",
    fix="read the result in the order in which the call writes it, or leave this kernel",
    source="no call transposes its result",
)
def result_layout(m: Matmul) -> Found | None:
    """The result is transposed, and nothing else.

    The call writes its result as a matrix, by rows or by columns. A transpose that needs another
    order in memory, such as one that brings heads to the front, is a kernel that reads the result
    and writes it in that order. To avoid the kernel, let the next operation read the result in the
    order in which the call wrote it.

    Loses it:

        def heads(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale).reshape(64, 4, 32)
            return d.transpose(1, 0, 2)

    Keeps it:

        def heads(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale).reshape(64, 4, 32)
    """
    return Found()


@rule(
    "padded-operands",
    lost=Lost.PAD,
    reason="an FP8 call takes multiples of 16, not {sizes}, so kernels pad the operands",
    fix="choose, or pad once in advance to, dimensions that are multiples of 16",
    source="PadOperandToMultipleOf16",
)
def padding(m: Matmul) -> Found | None:
    """A size is not a multiple of 16, and kernels pad.

    cuBLASLt's FP8 kernels need sizes that are multiples of 16. If M, N or K is not such a multiple,
    XLA's rewriter pads an operand with zeros, and cuts the result out of the larger one. Both are
    kernels, which run each time. If you pad a weight once, when it is stored, they are not needed.

    Loses it:

        def layer(a, b: "f8e4m3fn[100,256]", a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
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
    """The program pads a few rows or columns to 16.

    An FP8 call has 16 rows at least: see padded-operands. If the program adds rows to reach that, a
    kernel of the program's own pads, and the result may be cut again. With 16 requests in a batch
    there is nothing to pad.

    Loses it:

        def layer(a: "f8e4m3fn[1,256]", b, a_scale, b_scale):
            rows = jnp.pad(a, ((0, 15), (0, 0)))
            return scaled_dot(rows, b, a_scale, b_scale)[:1]

    Keeps it:

        def layer(a: "f8e4m3fn[16,256]", b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    given = m.row_as_written
    return found_if(FP8_MULTIPLE in (given.m, given.n))


@rule(
    "own-padding",
    lost=Lost.PAD,
    reason="the program itself pads an operand, or slices the result",
    fix="keep the padded shape, or leave this kernel",
    source="no call pads or slices",
)
def own_padding(m: Matmul) -> Found | None:
    """The program pads, or cuts, in a kernel of its own.

    The call reads its operands and writes its result whole. If the program pads an operand or takes
    a part of the result, a kernel copies it. To avoid the kernel, keep the padded arrays in the
    program, and cut out the part only where the numbers are last read.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)[:50]

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return Found()


# What a move in front of a step costs ------------------------------------------------------------


@rule(
    "transposed-for-collective",
    reason=(
        "XLA transposes the result before the {step}, for a collective that splits or joins its "
        "last dimension: the program has no such transpose"
    ),
    fix="shard the result's first dimension, not its last; or leave this kernel",
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def turned_first(cause: Cause) -> Found | None:
    """XLA transposes the result for a collective, before a step that the call could have done.

    If a collective splits or joins the last dimension of an array, the parts that it sends or
    receives do not lie together in memory. XLA transposes the array so that they do, and can do so
    between the dot and what the call could have done to its result. If the collective splits or
    joins the first dimension, the parts lie together without a transpose.

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P(), P(), P(), P())
    Loses it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, d_scale):
            d = shard(scaled_dot(a, b, a_scale, b_scale), P(None, "x"))
            return shard(quantize(relu(d), d_scale), P())

    Compiled with: mesh_shape=(4,), in_specs=(P("x"), P(), P(), P(), P())
    Keeps it:

        from jax.lax import with_sharding_constraint as shard
        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, d_scale):
            d = shard(scaled_dot(a, b, a_scale, b_scale), P("x"))
            return shard(quantize(relu(d), d_scale), P())
    """
    return found_if(cause.transposed and cause.is_xlas_transpose, step=cause.noun, lost=cause.lost)


@rule(
    "by-columns",
    reason=(
        "the result is transposed before the {step}, here by XLA, which gives the product a "
        "column-major layout"
    ),
    fix=(
        "exchange the operands, to compute the transposed product: this is one call, unless a "
        "vector is added; or leave out the transpose, and let the reader take the result as it is"
    ),
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def by_columns(cause: Cause | InFront) -> Found | None:
    """XLA gives the product a column-major layout, which reads as a transpose.

    XLA chooses each array's layout. If the program transposes the product, XLA gives the product a
    column-major layout. This is the same memory as the transposed product has in a row-major
    layout, so no kernel has to transpose. But XLA writes this as a bitcast between the call and
    what follows. The rewriter does not look for a conversion after a bitcast, and leaves the
    conversion outside. With the operands exchanged the call computes the transposed product itself.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(scaled_dot(a, b, a_scale, b_scale), d_scale).T

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return quantize(scaled_dot(b, a, b_scale, a_scale), d_scale)
    """
    if isinstance(cause, InFront) or is_bias_by_columns(cause) and not cause.transposed:
        return found_if(is_bias_by_columns(cause), step="bias", lost=Lost.BIAS)
    is_named = cause.transposed is not None and cause.transposed.opcode == "bitcast"
    return found_if(is_named, step=cause.noun, lost=cause.lost)


@rule(
    "moved-first",
    reason=(
        "the result is transposed before the {step}, and the call takes only what reads it directly"
    ),
    fix=(
        "apply it to the dot's own result, and transpose that; or exchange the operands: then "
        "the dot's own result is the transposed one"
    ),
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def moved_first(cause: Cause) -> Found | None:
    """The result is transposed before a step that the call could have done.

    XLA's rewriter takes a step into the call if it reads the call's result directly, or through a
    reshape or a slice in some patterns. It does not look past a transpose, although the activation
    of a transposed matrix is the transposed activation. The transpose stays a kernel in both
    programs: see result-layout.

    Loses it:

        def heads(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale).reshape(64, 4, 32)
            return gelu(d.transpose(1, 0, 2))

    Keeps it:

        def heads(a, b, a_scale, b_scale):
            d = gelu(scaled_dot(a, b, a_scale, b_scale)).reshape(64, 4, 32)
            return d.transpose(1, 0, 2)
    """
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
    """A barrier stands before a step that the call could have done.

    jax.lax.optimization_barrier keeps XLA from rewriting across it. A step after the barrier reads
    the barrier's result, not the call's result. So the rewriter does not take the step into the
    call.

    Loses it:

        def layer(a, b, a_scale, b_scale):
            d = jax.lax.optimization_barrier(scaled_dot(a, b, a_scale, b_scale))
            return relu(d)

    Keeps it:

        def layer(a, b, a_scale, b_scale):
            d = scaled_dot(a, b, a_scale, b_scale)
            return relu(d)
    """
    return found_if(cause.apart == "barrier", step=cause.noun, lost=cause.lost)


@rule(
    "joined-first",
    reason="the result is {how} before the {step}, and the call takes only what reads it directly",
    fix="apply the {step} to the dot's own result, before that is {how}{or_else}",
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def joined_first(cause: Cause) -> Found | None:
    """The result is cut, joined, reversed or passed on before a step that the call could have done.

    XLA's rewriter looks for a step that reads the whole result of one call. If the result is cut
    into parts or joined with another first, the step reads something else, and stays outside. The
    same holds for a step in another computation, as in a loop's next iteration or in a branch. Most
    steps treat each element alone, so they can be applied to the call's own result before that.

    Loses it:

        def halves(a, b, a_scale, b_scale, d_scale):
            gate, up = jnp.split(scaled_dot(a, b, a_scale, b_scale), 2, axis=1)
            return quantize(gate, d_scale), quantize(up, d_scale)

    Keeps it:

        def halves(a, b, a_scale, b_scale, d_scale):
            q = quantize(scaled_dot(a, b, a_scale, b_scale), d_scale)
            return jnp.split(q, 2, axis=1)
    """
    or_else = (
        ", with jax.lax.optimization_barrier between the two if XLA changes the order again. If "
        "only a part of the result is treated so, leave this kernel."
    )
    if cause.lost is Lost.OUTPUT and "loop" in cause.apart:
        or_else = ". If a loop adds up results, leave the conversion: the sum needs its digits."
    return found_if(cause.apart, step=cause.noun, lost=cause.lost, how=cause.apart, or_else=or_else)


@rule(
    "joined-then-scaled",
    lost=Lost.SCALE,
    reason="the result is {how} before it is scaled, and the call scales only its own result",
    fix=(
        "multiply the factor into an operand's scale (a_scale), outside of the program. If only a "
        "part of the result is scaled, leave this kernel."
    ),
    source="HandleMultiply takes a factor that reads the call's result directly",
)
def joined_then_scaled(cause: Cause) -> Found | None:
    """The result is cut, joined, reversed or passed on before it is multiplied by a factor.

    XLA's rewriter takes a factor that multiplies the whole result of a call. If the result is cut
    into parts or joined with another first, a kernel multiplies. The order is no matter for a
    factor, and a call multiplies by its operands' scales anyway, so the factor can be a part of
    one.

    Loses it:

        def halves(a, b, a_scale, b_scale, d_scale):
            gate, up = jnp.split(scaled_dot(a, b, a_scale, b_scale), 2, axis=1)
            return gate * d_scale, up * d_scale

    Keeps it:

        def halves(a, b, a_scale, b_scale):  # a_scale is multiplied by d_scale already
            return jnp.split(scaled_dot(a, b, a_scale, b_scale), 2, axis=1)
    """
    is_scaled = (cause.is_factor or cause.kind is Role.NEGATE) and not cause.converts
    return found_if(is_scaled and cause.apart, how=cause.apart)


@rule(
    "factor-of-a-sum-over-devices",
    lost=Lost.SCALE,
    reason="the result is summed over devices before the {step} is multiplied in",
    fix=(
        "multiply the factor into an operand's scale (a_scale): each device then multiplies its "
        "own part of the sum"
    ),
    source="HandleMultiply takes a factor that reads the call's result directly",
)
def factor_of_a_sum(cause: Cause) -> Found | None:
    """Devices add up their parts of a result, and the sum is multiplied by a factor.

    If K is split over devices, each device computes a part of each sum, and an all-reduce adds the
    parts up. What the program does to the result comes after that, in a kernel. A factor can be
    multiplied into each part, and a call takes it as part of an operand's scale. If the kernel also
    does something else with the sum, such as a conversion to FP8, it runs in any case, and this
    rule says nothing. For a bias see bias-of-a-sum-over-devices.

    Compiled with: mesh_shape=(8,), in_specs=(P(None, "x"), P(None, "x"), P(), P(), P())

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale):
            return scaled_dot(a, b, a_scale, b_scale) * d_scale

    Compiled with: mesh_shape=(8,), in_specs=(P(None, "x"), P(None, "x"), P(), P())

    Keeps it:

        def layer(a, b, a_scale, b_scale):  # a_scale is multiplied by the factor already
            return scaled_dot(a, b, a_scale, b_scale)
    """
    return found_if(cause.apart == SUMMED and cause.is_factor, step=cause.noun)


@rule(
    "bias-of-a-sum-over-devices",
    lost=Lost.BIAS,
    reason="the result is summed over devices before the bias is added",
    fix=(
        "in jax.shard_map, add the bias before jax.lax.psum, and on one device alone: "
        "jnp.where(jax.lax.axis_index(axis) == 0, bias, 0); else leave this kernel"
    ),
    source="FuseVectorBiasAdd takes a vector that is added to the call's own result",
)
def bias_of_a_sum(cause: Cause) -> Found | None:
    """Devices add up their parts of a result, and a bias is added to the sum.

    If K is split over devices, an all-reduce adds up the parts of the result. A kernel then reads
    the sum, adds the bias, and writes it again. If each device added the bias to its own part, the
    sum would have it several times. In jax.shard_map one device can add the bias, and the others
    zeros: their calls take both as their bias. What remains is a kernel that chooses the vector.
    The sum is rounded in another order.

    Compiled with: mesh_shape={"x": 8}, in_specs=(P(None, "x"), P(None, "x"), P(), P(), P())

    Loses it:

        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, bias):
            def of_one_device(a, b, a_scale, b_scale, bias):
                d = scaled_dot(a, b, a_scale, b_scale, bf16)
                return jax.lax.psum(d, "x") + bias

            given = (P(None, "x"), P(None, "x"), P(), P(), P())
            layer = jax.shard_map(of_one_device, in_specs=given, out_specs=P())
            return layer(a, b, a_scale, b_scale, bias)

    Compiled with: mesh_shape={"x": 8}, in_specs=(P(None, "x"), P(None, "x"), P(), P(), P())

    Keeps it:

        from jax.sharding import PartitionSpec as P

        def layer(a, b, a_scale, b_scale, bias):
            def of_one_device(a, b, a_scale, b_scale, bias):
                bias = jnp.where(jax.lax.axis_index("x") == 0, bias, 0)
                d = scaled_dot(a, b, a_scale, b_scale, bf16)
                return jax.lax.psum(d + bias, "x")

            given = (P(None, "x"), P(None, "x"), P(), P(), P())
            layer = jax.shard_map(of_one_device, in_specs=given, out_specs=P())
            return layer(a, b, a_scale, b_scale, bias)
    """
    return found_if(cause.apart == SUMMED and cause.kind is Role.BIAS)


@rule(
    "masked-first",
    reason="the result is masked before the {step}, and the call takes only what reads it directly",
    fix=(
        "do it on both sides of the mask, to the dot's own result and to what the mask puts in: "
        "jnp.where(keep, f(d), f(0)) for f(jnp.where(keep, d, 0)); the mask's kernel remains"
    ),
    source=(
        "HandleAdd, HandleMaximum, HandleMultiply and HandleConvert look past a bitcast or a "
        "slice at most"
    ),
)
def masked_first(cause: Cause) -> Found | None:
    """The result is masked before a step that the call could have done.

    XLA's rewriter looks for a step that reads the whole result of one call. A mask (`jnp.where`, or
    the fill of `jnp.take`) is a select in HLO, and the rewriter does not look past a select after a
    dot. A step that treats each element alone can be done to both inputs of the select instead. The
    mask then reads what the call wrote: in FP8, a quarter of the bytes of f32.

    Loses it:

        def layer(a, b, a_scale, b_scale, d_scale, bias, keep: "pred[64]"):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return quantize(jnp.where(keep[:, None], d, 0) + bias, d_scale)

    Keeps it:

        def layer(a, b, a_scale, b_scale, d_scale, bias, keep: "pred[64]"):
            d = scaled_dot(a, b, a_scale, b_scale, bf16)
            return jnp.where(keep[:, None], quantize(d + bias, d_scale), quantize(bias, d_scale))
    """
    return found_if(cause.apart == "masked", step=cause.noun, lost=cause.lost)


@rule(
    "cut-twice",
    reason=(
        "an FP8 call takes multiples of 16, not {sizes}: it writes a padded result, and the {step} "
        "reads the part that is cut out of it"
    ),
    fix="choose, or pad once in advance to, dimensions that are multiples of 16{enough}",
    source="HandleAdd looks past one slice that cuts a single dimension",
)
def cut_twice(cause: Cause) -> Found | None:
    """Neither M nor N is a multiple of 16, or one of them is no multiple of 8.

    XLA pads the operands of an FP8 call to multiples of 16 and cuts the result. If one of M and N
    is padded, the rewriter looks past the slice and takes an addition or a relu into the call. If
    both are, the slice cuts two dimensions, and an addition stays outside. If one of them is no
    multiple of 8 and the dot is in 16 bits, a pass before the rewriter pads it to one. Then there
    are two slices, and both addition and relu stay outside.

    Loses it:

        def layer(
            a: "f8e4m3fn[63,256]",
            b: "f8e4m3fn[120,256]",
            a_scale,
            b_scale,
            bias: "bf16[120]",
        ):
            return scaled_dot(a, b, a_scale, b_scale, bf16) + bias

    Keeps it:

        def layer(a, b, a_scale, b_scale, bias):  # M is 64, and N is 128
            return scaled_dot(a, b, a_scale, b_scale, bf16) + bias
    """
    sizes, written = cause.matmul.odd("MN"), cause.matmul.row_as_written
    is_added = cause.kind in (Role.BIAS, Role.MATRIX_BIAS)
    is_cut_in_two = bool(written.m % 8 or written.n % 8)
    is_read = is_cut_in_two and could_be_fused(cause.first)
    enough = "" if is_cut_in_two else ": for the addition one of the two is enough"
    fields = {"sizes": " and ".join(sizes), "step": cause.noun, "enough": enough}
    return found_if(is_added and len(sizes) == 2 or is_read, lost=cause.lost, **fields)


#: Tried in this order, for a kernel that pads or cuts.
PADDING = (padding, own_padding_of_few, own_padding)
#: Tried in this order, before the rules of the step that stayed outside.
MOVED = (
    turned_first,
    by_columns,
    moved_first,
    barrier,
    masked_first,
    factor_of_a_sum,
    bias_of_a_sum,
    joined_then_scaled,
    joined_first,
)
