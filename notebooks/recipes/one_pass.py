"""Compute, measure and quantize in one pass over memory: FP8 codes in both layouts, and the amax.

It needs JAX alone. Chapter 15 uses it, and `lean_step.py` trains with it.

FP8 matmuls of a Hopper want the summed dimension last in both operands. So training needs the codes
of most tensors twice, as they are and transposed. XLA takes the amax and quantizes in one
kernel, or quantizes and transposes in one: it reads the tensor or its codes again for the third.
Here one kernel reads each tile once: it computes, takes the amax, quantizes, and writes both
layouts before the tile leaves the chip. It is written with Pallas's Mosaic GPU backend, which
compiles for a Hopper on any machine and can be interpreted on a CPU.

What it leaves out: a gradient (give the layer around it one), scales for blocks, tiles of other
sizes, chips other than a Hopper, and a check that the function is elementwise. On a GPU it was only
timed within chapter 15's step.

Test that it is one kernel, which moves each byte once:

    from fp8lens import inspect
    print(inspect(run, x, scale, target="H100").ledger)  # where run calls one_pass
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

f32 = jnp.float32

# A tile is what one warpgroup, 128 threads, holds in registers: 64 f32 of each of its values for
# each thread. Its rows are what the layout of wgmma's results has at once. With more than three
# tensors, as an optimizer with moments has, the registers hold half of it.
TILE = 64, 128
NARROW = 64, 64
LAYOUT = mosaic.Layout.WGMMA


class Made(NamedTuple):
    """What the function of a pass makes of its tensors: f32, all of the tensors' shape."""

    quantized: jax.Array
    kept: tuple[jax.Array, ...] = ()  # to be written, too
    summed: tuple[jax.Array, ...] = ()  # to be summed over the rows


class Passed(NamedTuple):
    """What a pass over [M, N] returns."""

    codes: Any  # [M, N]
    transposed: Any  # [N, M], the same codes
    amaxes: Any  # f32[...]: of parts; their maximum is the tensor's amax
    kept: tuple[Any, ...]  # [M, N] each
    sums: tuple[Any, ...]  # f32[N] each


def scaled(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """What is converted to codes, f32. What is beyond the range is clamped: it would become NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(values / scale, -largest, largest)


def one_pass(
    function: Callable[..., Made],
    tensors: Sequence[jax.Array],
    rows: Sequence[jax.Array] = (),
    columns: Sequence[jax.Array] = (),
    scalars: Sequence[jax.Array | float] = (),
    *,
    scale: jax.Array | float = 1.0,
    dtype: Any,
    keep: Sequence[Any] = (),
    overwrite: bool = False,
    measure: bool = True,
    by: str = "mosaic",
) -> Passed:
    """`function` of `tensors` [M, N], quantized to `dtype` by the scalar `scale` (multiply by it to
    dequantize), with all that training needs of it.

    `function(*tensors, *rows, *columns, *scalars)` is elementwise, in f32, and reads no other
    array: a tile is all that it sees. `rows` f32[M] come as [M, 1], and `columns` f32[N] as
    [1, N], or the part of them that belongs to a tile. `keep` are the types of what it keeps. With
    `overwrite` this replaces the first tensors, and has their types: a donated weight is updated
    where it lies. Without `measure` there are no amaxes: for a scale that is known for good.

    `by` "mosaic" is the kernel, M a multiple of 64 and N of 128; "interpret" the same on a CPU,
    with JAX 0.11; "xla" what the compiler makes of the same function, for any M and N. Raises
    ValueError for shapes that do not fit. A pass has no gradient: give the layer around it one.
    Mosaic has no erf and no log1p: take gelu by tanh.
    """
    shape = tensors[0].shape
    wanted = [shape] * len(tensors) + [shape[:1]] * len(rows) + [shape[1:]] * len(columns)
    if [array.shape for array in (*tensors, *rows, *columns)] != wanted:
        raise ValueError("tensors are [M, N], all of one shape, rows [M] and columns [N]")
    one_scale, numbers = jnp.asarray(scale, f32).reshape(1), jnp.array([*scalars], f32)
    rows, columns = ([v.astype(f32) for v in vectors] for vectors in (rows, columns))
    if by == "xla":
        made = _by_xla(function, tensors, rows, columns, one_scale[0], numbers, dtype, keep)
        return made if measure else made._replace(amaxes=())
    check_sizes(shape)
    if jax.__version_info__ < (0, 11):
        overwrite = False  # kernels take no references there: the new tensors lie elsewhere
    options = options_of(by)
    return _by_mosaic(
        function,
        tensors,
        rows,
        columns,
        one_scale,
        numbers,
        dtype,
        keep,
        overwrite,
        measure,
        options,
    )


def check_sizes(shape: tuple[int, ...]) -> None:
    """Raise ValueError for what tiles do not fill: a kernel would read beyond it."""
    if len(shape) != 2 or shape[0] % TILE[0] or shape[1] % TILE[1]:
        raise ValueError(
            f"the kernel takes multiples of {TILE[0]} rows and {TILE[1]} columns, not "
            f"{list(shape)}: pad with zeros, or let XLA do it"
        )


def options_of(by: str) -> dict[str, Any]:
    """With what a kernel of Mosaic GPU's is compiled, or interpreted. Raises ValueError for another
    word.
    """
    if by not in ("mosaic", "interpret"):
        raise ValueError(f'the kernel runs by "mosaic" or "interpret", not {by!r}')
    return {"interpret": mosaic.InterpretGPUParams()} if by == "interpret" else {}


def _by_xla(function, tensors, rows, columns, scale, scalars, dtype, keep) -> Passed:
    values = [tensor.astype(f32) for tensor in tensors]
    values += [*(row[:, None] for row in rows), *(c[None] for c in columns), *scalars]
    made = function(*values)
    codes = scaled(made.quantized, scale, dtype).astype(dtype)
    amaxes = jnp.max(jnp.abs(made.quantized), axis=1)
    # XLA makes codes and amaxes in one kernel, or codes and their transpose. The former reads less.
    codes, amaxes = jax.lax.optimization_barrier((codes, amaxes))
    kept = tuple(value.astype(k) for value, k in zip(made.kept, keep, strict=True))
    return Passed(codes, codes.T, amaxes, kept, tuple(jnp.sum(v, axis=0) for v in made.summed))


def _by_mosaic(
    function, tensors, rows, columns, scale, scalars, dtype, keep, overwrite, measure, options
) -> Passed:
    tile_shape = TILE if len(tensors) <= 3 else NARROW
    (m, n), (height, width) = tensors[0].shape, tile_shape
    given = [*tensors, *rows, *columns]
    numbers = [scale, scalars] if scalars.size else [scale]
    of_tiles = [jax.ShapeDtypeStruct(tile_shape, f32)] * len(given)
    sums = len(jax.eval_shape(function, *of_tiles, *scalars).summed)
    # What overwrites a tensor also overwrites its tile: each thread writes what it has read.
    apart = () if overwrite else keep
    results = Passed(
        jax.ShapeDtypeStruct((m, n), dtype),
        jax.ShapeDtypeStruct((n, m), dtype),
        jax.ShapeDtypeStruct((n // width, m), f32) if measure else (),
        tuple(jax.ShapeDtypeStruct((m, n), k) for k in apart),
        (jax.ShapeDtypeStruct((m // height, n), f32),) * sums,
    )
    # Shared memory for a tile of each of them.
    row, column = mosaic.SMEM((height,), f32), mosaic.SMEM((width,), f32)
    tiles = [*(tiled(tile_shape, t.dtype) for t in tensors)]
    tiles += [row] * len(rows) + [column] * len(columns)
    buffers = Passed(
        tiled(tile_shape, dtype),
        tiled((width, height), dtype),
        row if measure else (),
        tuple(tiled(tile_shape, k) for k in apart),
        (column,) * sums,
    )

    def kernel(*refs: Any) -> None:
        inputs, others = refs[: len(given)], refs[len(given) :]
        of_numbers, outputs = others[: len(numbers)], others[len(numbers) :]
        written = jax.tree.unflatten(jax.tree.structure(results), outputs)
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        down, across = pl.ds(i * height, height), pl.ds(j * width, width)
        from_places = [(down, across)] * len(tensors) + [down] * len(rows) + [across] * len(columns)
        to_places = [(down, across), (across, down), *([(j, down)] if measure else [])]
        to_places += [(down, across)] * len(keep) + [(i, across)] * sums

        def tile(read: list, made_of: Passed, barrier: Any) -> None:
            for source, place, target in zip(inputs, from_places, read, strict=True):
                mosaic.copy_gmem_to_smem(source.at[place], target, barrier)
            mosaic.barrier_wait(barrier)
            values = [_in_registers(ref, tile_shape) for ref in read[: len(tensors)]]
            of_rows = read[len(tensors) : len(tensors) + len(rows)]
            values += [_in_registers(ref, tile_shape, 0) for ref in of_rows]
            of_columns = read[len(tensors) + len(rows) :]
            values += [_in_registers(ref, tile_shape, 1) for ref in of_columns]
            values += [of_numbers[1][number] for number in range(scalars.size)]
            targets: Any = written
            if overwrite:
                made_of = made_of._replace(kept=tuple(read[: len(keep)]))
                targets = written._replace(kept=inputs[: len(keep)])
            _to_shared_memory(function(*values), of_numbers[0][0], dtype, made_of)
            copy: Any = mosaic.copy_smem_to_gmem
            sources, targets = jax.tree.leaves(made_of), jax.tree.leaves(targets)
            for source, target, to_place in zip(sources, targets, to_places, strict=True):
                copy(source, target.at[to_place])
            mosaic.wait_smem_to_gmem(0)

        pl.run_scoped(tile, tiles, buffers, mosaic.Barrier(num_arrivals=len(given)))

    call = mosaic.kernel(
        kernel,
        out_type=jax.tree.leaves(results),
        grid=(m // height, n // width),
        grid_names=("i", "j"),
        kernel_name="one_pass",
        **options,
    )
    if overwrite:
        given[: len(keep)] = map(jax.new_ref, given[: len(keep)])
    done = jax.tree.unflatten(jax.tree.structure(results), call(*given, *numbers))
    if overwrite:
        done = done._replace(kept=tuple(map(jax.freeze, given[: len(keep)])))
    return done._replace(sums=tuple(part.sum(axis=0) for part in done.sums))


def tiled(shape: tuple[int, int], dtype: Any, most: int = 128) -> Any:
    """Shared memory whose rows, in pieces of at most so many bytes, are swizzled: so threads read
    and write rows and columns of it without waiting for one another.
    """
    size = jnp.dtype(dtype).itemsize
    nbytes = min(most, size * shape[1])
    kinds: Any = mosaic  # JAX declares these two classes abstract
    transforms = kinds.TilingTransform((8, nbytes // size)), kinds.SwizzleTransform(nbytes)
    return mosaic.SMEM(shape, dtype, transforms=transforms)


def _in_registers(ref: Any, tile: tuple[int, int], dimension: int | None = None) -> jax.Array:
    """A tile's values, f32; of a row or a column, each value where it belongs in the tile. All have
    one layout, so that what is computed of them moves nothing between threads.
    """
    if dimension is None:
        return mosaic.layout_cast(ref[...], LAYOUT).astype(f32)
    values = mosaic.layout_cast(ref[...], LAYOUT.reduce(1 - dimension))
    return jax.lax.broadcast_in_dim(values, tile, (dimension,))


def _to_shared_memory(made: Made, scale, dtype, target: Passed) -> None:
    for ref, value in zip(target.kept, made.kept, strict=True):
        ref[...] = value.astype(ref.dtype)
    for ref, value in zip(target.sums, made.summed, strict=True):
        ref[...] = jnp.sum(value, axis=0)
    if not isinstance(target.amaxes, tuple):
        target.amaxes[...] = jnp.max(jnp.abs(made.quantized), axis=1)
    values = scaled(made.quantized, scale, dtype)
    target.codes[...] = values.astype(dtype)
    # A thread has neighbours of a row. For the transpose it needs neighbours of a column: shuffled
    # as f32, because there is no such shuffle of single bytes.
    turned = mosaic.layout_cast(values, mosaic.Layout.WGMMA_TRANSPOSED)
    target.transposed.T[...] = turned.astype(dtype)
    mosaic.commit_smem()


def example() -> Passed:
    """Gelu of random numbers in one pass, on a CPU by what XLA makes of the function."""
    x = jax.random.normal(jax.random.key(0), (128, 256), jnp.bfloat16)
    # All scales are known before the pass: here this one, from an amax of an earlier step.
    scale = jnp.float32(4.0 / 448)
    return one_pass(
        lambda x: Made(jax.nn.gelu(x)), [x], scale=scale, dtype=jnp.float8_e4m3fn, by="xla"
    )


if __name__ == "__main__":
    made = example()
    print(f"codes {made.codes.dtype}{list(made.codes.shape)}, amax {jnp.max(made.amaxes):.3f}")
