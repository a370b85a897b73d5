"""Compute, measure and quantize in one pass over memory: FP8 codes in both layouts, and the amax.

It needs JAX alone. Chapter 13 uses it, and `lean_step.py` trains with it.

FP8 matmuls of a Hopper want the summed dimension last in both operands. So training needs the codes
of most tensors twice, as they are and transposed. XLA takes the amax and quantizes in one
kernel, or quantizes and transposes in one: it reads the tensor or its codes again for the third.
Here one kernel reads each tile once: it computes, takes the amax, quantizes, and writes both
layouts before the tile leaves the chip. It is written with Pallas's Mosaic GPU backend, which
compiles for a Hopper on any machine and can be interpreted on a CPU.

What it leaves out: a gradient (give the layer around it one), scales for blocks, tiles of other
sizes, chips other than a Hopper. Nobody has timed it on a GPU.

Test that it is one kernel, which moves each byte once:

    from fp8lens import inspect
    print(inspect(run, x, scale, target="H100").ledger)  # where run calls one_pass
"""

from collections.abc import Callable, Iterator, Sequence
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
HOW = ("mosaic", "interpret", "xla")


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
    by: str = "mosaic",
) -> Passed:
    """`function` of `tensors` [M, N], quantized to `dtype` by the scalar `scale` (multiply by it to
    dequantize), with all that training needs of it.

    `function(*tensors, *rows, *columns, *scalars)` is elementwise, in f32, and reads no other
    array. `rows` f32[M] come as [M, 1], and `columns` f32[N] as [1, N], or the part of them that
    belongs to a tile. `keep` are the types of what it keeps. With `overwrite` this replaces the
    first tensors, and has their types: a donated weight is updated where it lies.

    `by` "mosaic" is the kernel, M a multiple of 64 and N of 128; "interpret" the same on a CPU;
    "xla" what the compiler makes of the same function, for any M and N. Raises ValueError for what
    does not fit. A pass has no gradient: give the layer around it one. Mosaic has no erf and no
    log1p: take gelu by tanh.
    """
    _check(tensors, rows, columns, dtype, keep, overwrite, by)
    numbers = jnp.asarray(scale, f32).reshape(1), jnp.array([*scalars], f32)
    rows, columns = ([v.astype(f32) for v in vectors] for vectors in (rows, columns))
    made = _made(function, len(tensors) + len(rows) + len(columns), len(scalars))
    if len(made.kept) != len(keep):
        raise ValueError(
            f"the function keeps {len(made.kept)} arrays: `keep` has {len(keep)} types"
        )
    if by == "xla":
        return _by_xla(function, tensors, rows, columns, numbers, dtype, keep)
    if jax.__version_info__ < (0, 11):
        overwrite = False  # kernels take no references there: the new tensors lie elsewhere
    options = {"interpret": mosaic.InterpretGPUParams()} if by == "interpret" else {}
    sums = len(made.summed)
    return _by_mosaic(
        function, tensors, rows, columns, numbers, dtype, keep, sums, overwrite, options
    )


def check_codes(dtype: Any) -> None:
    """Raise ValueError for codes that no FP8 call multiplies."""
    if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)):
        raise ValueError(f"codes are float8_e4m3fn or float8_e5m2, not {jnp.dtype(dtype).name}")


def _check(tensors, rows, columns, dtype, keep, overwrite: bool, by: str) -> None:
    if by not in HOW:
        raise ValueError(f"by is one of {', '.join(HOW)}, not {by!r}")
    check_codes(dtype)
    if not tensors or 0 in tensors[0].shape:
        raise ValueError("there is nothing to quantize: give tensors [M, N]")
    shape = tensors[0].shape
    if len(shape) != 2 or any(tensor.shape != shape for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"tensors have one shape [M, N]: got {shapes}. Reshape them.")
    if any(row.shape != shape[:1] for row in rows) or any(c.shape != shape[1:] for c in columns):
        raise ValueError(f"rows have {shape[0]} numbers, and columns {shape[1]}")
    if overwrite and [*map(jnp.dtype, keep)] != [t.dtype for t in tensors[: len(keep)]]:
        raise ValueError("what overwrites tensors has their types: give them as `keep`")
    if by != "xla" and (shape[0] % TILE[0] or shape[1] % TILE[1]):
        raise ValueError(
            f"the kernel takes multiples of {TILE[0]} rows and {TILE[1]} columns, not "
            f'{list(shape)}: take other sizes, or give by="xla"'
        )
    if by == "interpret" and not hasattr(mosaic, "InterpretGPUParams"):
        raise ValueError('by "interpret" needs JAX 0.11: install it, or give by="xla"')


def _made(function: Callable[..., Made], count: int, scalars: int) -> Made:
    """What the function makes of so many tiles and scalars, in shapes. ValueError where it is no
    pass.
    """
    given = [jax.ShapeDtypeStruct(TILE, f32)] * count + [jax.ShapeDtypeStruct((), f32)] * scalars
    traced, made = jax.make_jaxpr(function, return_shape=True)(*given)
    if not isinstance(made, Made):
        raise ValueError(f"the function returns Made(...), not {type(made).__name__}")
    for name in _primitives(traced.jaxpr):
        if name.startswith(_NOT_ELEMENTWISE) and name != "reduce_precision":
            raise ValueError(
                f"the function is elementwise, and has {name}: a tile is all that it sees. "
                "Compute that before, and give it among `rows` or `columns`."
            )
    return made


def _primitives(jaxpr: Any) -> Iterator[str]:
    """The names of a function's primitives, and of those of the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


# How the names of JAX's primitives begin that read other elements than the one they write.
_NOT_ELEMENTWISE = ("reduce_", "cum", "arg", "dot_general", "sort", "rev", "gather", "scatter")


def _by_xla(function, tensors, rows, columns, numbers, dtype, keep) -> Passed:
    values = [tensor.astype(f32) for tensor in tensors]
    values += [*(row[:, None] for row in rows), *(c[None] for c in columns), *numbers[1]]
    made = function(*values)
    codes = scaled(made.quantized, numbers[0][0], dtype).astype(dtype)
    amaxes = jnp.max(jnp.abs(made.quantized), axis=1)
    # XLA makes codes and amaxes in one kernel, or codes and their transpose. The former reads less.
    codes, amaxes = jax.lax.optimization_barrier((codes, amaxes))
    kept = tuple(value.astype(k) for value, k in zip(made.kept, keep, strict=True))
    return Passed(codes, codes.T, amaxes, kept, tuple(jnp.sum(v, axis=0) for v in made.summed))


class _Space(NamedTuple):
    """Shared memory for one tile."""

    tensors: list
    rows: list
    columns: list
    codes: Any
    transposed: Any
    amaxes: Any
    kept: list
    sums: list


def _by_mosaic(
    function, tensors, rows, columns, numbers, dtype, keep, sums: int, overwrite, options
) -> Passed:
    tile_shape = TILE if len(tensors) <= 3 else NARROW
    (m, n), (height, width) = tensors[0].shape, tile_shape
    given = [*tensors, *rows, *columns]
    count = numbers[1].size
    numbers = numbers if count else numbers[:1]
    results = Passed(
        jax.ShapeDtypeStruct((m, n), dtype),
        jax.ShapeDtypeStruct((n, m), dtype),
        jax.ShapeDtypeStruct((n // width, m), f32),
        () if overwrite else tuple(jax.ShapeDtypeStruct((m, n), k) for k in keep),
        (jax.ShapeDtypeStruct((m // height, n), f32),) * sums,
    )
    space = _Space(
        [tiled(tile_shape, tensor.dtype) for tensor in tensors],
        [mosaic.SMEM((height,), f32) for _ in rows],
        [mosaic.SMEM((width,), f32) for _ in columns],
        tiled(tile_shape, dtype),
        tiled((width, height), dtype),
        mosaic.SMEM((height,), f32),
        # What overwrites a tensor also overwrites its tile: each thread writes what it has read.
        [] if overwrite else [tiled(tile_shape, k) for k in keep],
        [mosaic.SMEM((width,), f32) for _ in range(sums)],
    )

    def kernel(*refs: Any) -> None:
        inputs, others = refs[: len(given)], refs[len(given) :]
        scale_ref, scalar_ref, outputs = others[0], others[1], others[len(numbers) :]
        written = jax.tree.unflatten(jax.tree.structure(results), outputs)
        if overwrite:
            written = written._replace(kept=inputs[: len(keep)])
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        down, across = pl.ds(i * height, height), pl.ds(j * width, width)

        def tile(space: _Space, barrier: Any) -> None:
            _read(inputs, space, down, across, barrier)
            if overwrite:
                space = space._replace(kept=space.tensors[: len(keep)])
            scalars = [scalar_ref[n] for n in range(count)]
            made = function(*_in_registers(space, tile_shape), *scalars)
            _to_shared_memory(made, scale_ref[0], dtype, space)
            _write(written, space, i, j, down, across)

        pl.run_scoped(tile, space, mosaic.Barrier(num_arrivals=len(given)))

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


def _read(inputs, space: _Space, down, across, barrier) -> None:
    """The tile of each tensor, row and column into shared memory."""
    tensors, rows, columns = space.tensors, space.rows, space.columns
    places = [(down, across)] * len(tensors) + [down] * len(rows) + [across] * len(columns)
    for source, place, target in zip(inputs, places, tensors + rows + columns, strict=True):
        mosaic.copy_gmem_to_smem(source.at[place], target, barrier)
    mosaic.barrier_wait(barrier)


def _in_registers(space: _Space, tile: tuple[int, int]) -> list[jax.Array]:
    """The tile's values, f32. All have one layout, so that what is computed of them moves nothing
    between threads.
    """
    layout = mosaic.Layout.WGMMA
    row_layout, column_layout = layout.reduce(1), layout.reduce(0)
    tensors = [mosaic.layout_cast(ref[...], layout).astype(f32) for ref in space.tensors]
    rows = [mosaic.layout_cast(row[...], row_layout) for row in space.rows]
    columns = [mosaic.layout_cast(column[...], column_layout) for column in space.columns]
    spread = [jax.lax.broadcast_in_dim(row, tile, (0,)) for row in rows]
    return tensors + spread + [jax.lax.broadcast_in_dim(c, tile, (1,)) for c in columns]


def _to_shared_memory(made: Made, scale, dtype, space: _Space) -> None:
    for target, value in zip(space.kept, made.kept, strict=True):
        target[...] = value.astype(target.dtype)
    for target, value in zip(space.sums, made.summed, strict=True):
        target[...] = jnp.sum(value, axis=0)
    space.amaxes[...] = jnp.max(jnp.abs(made.quantized), axis=1)
    values = scaled(made.quantized, scale, dtype)
    space.codes[...] = values.astype(dtype)
    # A thread has neighbours of a row. For the transpose it needs neighbours of a column: shuffled
    # as f32, because there is no such shuffle of single bytes.
    turned = mosaic.layout_cast(values, mosaic.Layout.WGMMA_TRANSPOSED)
    space.transposed.T[...] = turned.astype(dtype)
    mosaic.commit_smem()


def _write(written: Passed, space: _Space, i, j, down, across) -> None:
    """The tile's results, from shared memory to where each belongs."""
    copy: Any = mosaic.copy_smem_to_gmem
    copy(space.codes, written.codes.at[down, across])
    copy(space.transposed, written.transposed.at[across, down])
    copy(space.amaxes, written.amaxes.at[j, down])
    for source, target in zip(space.kept, written.kept, strict=True):
        copy(source, target.at[down, across])
    for source, target in zip(space.sums, written.sums, strict=True):
        copy(source, target.at[i, across])
    mosaic.wait_smem_to_gmem(0)


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
