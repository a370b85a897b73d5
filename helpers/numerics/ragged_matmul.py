"""A ragged matmul in FP8, written by hand for a Hopper: each row meets its own expert's matrix.

XLA compiles `jax.lax.ragged_dot` for a Hopper as one dense matmul, in which each row meets every
expert's matrix. Here a block of threads computes a tile of the result, 64 rows by 128 columns. It
goes through the experts, and multiplies by those that have rows in its tile. Rows of other experts
are masked before anything is added. So each tile is written once and whole, and groups of rows
begin and end where they like.

The kernel is kept as short as it can be: one warpgroup computes a tile, and it does not multiply
while it scales. Its speed was not measured. It is written with Pallas's Mosaic GPU backend, which
compiles for a Hopper on any machine and can be interpreted on a CPU. That a kernel can find its
rows from the group sizes at run time is learnt from JAX's own `ragged_dot_mgpu.py` (Apache-2.0),
which gives each expert tiles of its own, and stores parts of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from one_pass import check_codes, tiled

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, COLUMNS = 64, 128  # of the result's tile: what one warpgroup's registers hold
DEPTH = 128  # of a step along K: what is swizzled in shared memory, 128 bytes of each row
HOW = ("mosaic", "interpret")
_LAYOUT = mosaic.Layout.WGMMA
OUT_TYPES = ("bfloat16", "float16", "float32")
# What an operand that is no array is converted to. Codes have scales, and are FP8.
_CONVERTED_TO = {
    "group_sizes": "jnp.int32",
    "x_scale": "jnp.float32",
    "w_scale": "jnp.float32",
}


def ragged_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    out_dtype: Any = bf16,
    by: str = "mosaic",
) -> jax.Array:
    """x [M, K] times w [E, N, K], each row by its expert's matrix: [M, N].

    x and w are FP8, K last in both. Rows of x are sorted by expert: the first group_sizes[0] rows
    belong to expert 0, the next group_sizes[1] to expert 1. `group_sizes` int32[E] is known at run
    time only. Rows beyond its sum are zero in the result, as in `jax.lax.ragged_dot`; groups beyond
    M are cut off, and a negative size counts as 0.

    Scales are f32; multiply by them to dequantize. `x_scale` is [M], one for each row, or
    [K / 128, M], one for each 128 of a row. `w_scale` is [E], one for each expert, or [E, N], one
    for each of its output channels, or [E, N / 128, K / 128], one for each square of 128. The sum
    over each 128 of K is scaled and added in float32, outside the tensor core.

    M is a multiple of 64, N and K of 128. `by` "mosaic" is the kernel, and "interpret" the same on
    a CPU. Raises ValueError for what does not fit. It has no gradient: NotImplementedError where
    one is asked for.
    """
    _check(x, w, group_sizes, x_scale, w_scale, out_dtype, by)
    (m, k), n = x.shape, w.shape[1]
    by_channel = w_scale.ndim == 2
    if x_scale.ndim == 1:
        x_scale = x_scale[None]
    if w_scale.ndim == 1:
        w_scale = w_scale[:, None, None]

    def kernel(x, w, group_sizes, x_scale, w_scale, out, out_tile):
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        row = i * ROWS + mosaic.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_LAYOUT.reduce(1))

        def expert(number, carry):
            start, total = carry
            # Cut off at M before and after they are added: a sum in int32 cannot wrap.
            size = jnp.clip(group_sizes[number], 0, m)
            end = jnp.minimum(start + size, m)
            has_rows = (start < end) & (start < (i + 1) * ROWS) & (end > i * ROWS)
            is_own = jax.lax.broadcast_in_dim((start <= row) & (row < end), total.shape, (0,))
            scale = w_scale.at[number]

            def step(index, x_tile, w_tile, row_scales, *rest):
                *channel_scales, total = rest
                part = _product(x_tile, w_tile) * _spread(row_scales.at[0], 0)
                if channel_scales:
                    part = part * _spread(channel_scales[0], 1)
                else:  # one for the expert, or one for each square
                    part = (
                        part * scale[_within(j, scale.shape[0]), _within(index[0], scale.shape[1])]
                    )
                # A product with zero would let another expert's NaN through.
                return total + jnp.where(is_own, part, jnp.zeros_like(part))

            specs = [
                _tiles((ROWS, DEPTH), lambda s: (i, s)),
                _tiles((COLUMNS, DEPTH), lambda s: (j, s)),
                mosaic.BlockSpec((1, ROWS), lambda s: (_within(s, x_scale.shape[0]), i)),
            ]
            given = [x, w.at[number], x_scale]
            if by_channel:
                specs.append(mosaic.BlockSpec((COLUMNS,), lambda s: (j,)))
                given.append(scale)
            pipeline = mosaic.emit_pipeline(
                step,
                grid=(jnp.where(has_rows, k // DEPTH, 0),),
                in_specs=specs,
                max_concurrent_steps=4,
                init_carry=total,
            )
            return end, pipeline(*given)

        zero = mosaic.layout_cast(jnp.zeros((ROWS, COLUMNS), f32), _LAYOUT)
        _, total = jax.lax.fori_loop(0, group_sizes.shape[0], expert, (jnp.int32(0), zero))
        out_tile[...] = total.astype(out_tile.dtype)
        mosaic.commit_smem()
        rows, columns = pl.ds(i * ROWS, ROWS), pl.ds(j * COLUMNS, COLUMNS)
        mosaic.copy_smem_to_gmem(out_tile, out.at[rows, columns])
        mosaic.wait_smem_to_gmem(0)

    options: dict[str, Any] = (
        {"interpret": mosaic.InterpretGPUParams()} if by == "interpret" else {}
    )
    call = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[tiled((ROWS, COLUMNS), out_dtype)],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("i", "j"),
        kernel_name="ragged_matmul",
        **options,
    )
    without_gradient = jax.custom_jvp(call)
    without_gradient.defjvp(_refuse_gradient)
    return without_gradient(x, w, group_sizes, x_scale, w_scale)


def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "ragged_matmul has no gradient: give the layer around it one with jax.custom_vjp, or stop "
        "it with jax.lax.stop_gradient"
    )


def _tiles(shape: tuple[int, int], index_map: Any) -> Any:
    """Which tile of an operand a step takes, and how wgmma reads it in shared memory."""
    kinds: Any = mosaic  # JAX declares these two classes abstract
    transforms = kinds.TilingTransform((8, DEPTH)), kinds.SwizzleTransform(DEPTH)
    return mosaic.BlockSpec(shape, index_map, transforms=transforms)


def _product(x_tile: Any, w_tile: Any) -> Any:
    """f32[64, 128]: the sum over 128 of K, from zero."""

    def multiply(sums):
        mosaic.wgmma(sums, x_tile, w_tile.T)
        return sums[...]  # waits for them

    return pl.run_scoped(multiply, mosaic.ACC((ROWS, COLUMNS), f32))


def _spread(scales: Any, dimension: int) -> Any:
    """Scales along a dimension of a tile, for each of its elements: in the registers of the threads
    that hold the tile.
    """
    values = mosaic.layout_cast(scales[...], _LAYOUT.reduce(1 - dimension))
    return jax.lax.broadcast_in_dim(values, (ROWS, COLUMNS), (dimension,))


def _within(index: Any, count: int) -> Any:
    """The index of a scale, where there may be one for all."""
    return index if count > 1 else 0


def _check(x, w, group_sizes, x_scale, w_scale, out_dtype: Any, by: str) -> None:
    if by not in HOW:
        raise ValueError(f"by is one of {', '.join(HOW)}, not {by!r}")
    if jax.__version_info__ < (0, 11):
        raise ValueError("this kernel needs JAX 0.11: install it")
    _check_out_dtype(out_dtype)
    _check_arrays(x=x, w=w, group_sizes=group_sizes, x_scale=x_scale, w_scale=w_scale)
    check_codes(x.dtype)
    check_codes(w.dtype)
    _check_shapes(x, w)
    (m, k), (experts, n, _) = x.shape, w.shape
    if group_sizes.shape != (experts,) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is int32[{experts}], how many rows each expert has, not "
            f"{group_sizes.dtype.name}{list(group_sizes.shape)}: count the rows with "
            f"jnp.bincount(expert, length={experts}).astype(jnp.int32)"
        )
    _check_scale("x_scale", x_scale, [(m,), (k // DEPTH, m)])
    _check_scale(
        "w_scale", w_scale, [(experts,), (experts, n), (experts, n // COLUMNS, k // DEPTH)]
    )


def _check_out_dtype(out_dtype: Any) -> None:
    try:
        known = jnp.dtype(out_dtype).name in OUT_TYPES
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"out_dtype is one of {', '.join(OUT_TYPES)}, not {out_dtype}")


def _check_arrays(**operands: Any) -> None:
    for name, operand in operands.items():
        if not (hasattr(operand, "shape") and hasattr(operand, "dtype")):
            dtype = _CONVERTED_TO.get(name, "jnp.float8_e4m3fn")
            raise ValueError(
                f"{name} is an array, not a {type(operand).__name__}: give "
                f"jnp.asarray({name}, {dtype})"
            )


def _check_shapes(x, w) -> None:
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"x is [M, K] and w is [E, N, K], K last in both, not {list(x.shape)} and "
            f"{list(w.shape)}: store w with K last"
        )
    (m, k), n = x.shape, w.shape[1]
    if w.shape[0] == 0:
        raise ValueError("w is [E, N, K] and has no expert, E is 0: give at least one matrix")
    if 0 in (*x.shape, *w.shape) or m % ROWS or n % COLUMNS or k % DEPTH:
        raise ValueError(
            f"the kernel takes multiples of {ROWS} rows, {COLUMNS} columns and {DEPTH} along K, "
            f"not M {m}, N {n} and K {k}: pad with zeros; rows beyond the last group are padding"
        )


def _check_scale(name: str, scale, shapes: list[tuple[int, ...]]) -> None:
    if scale.dtype != f32 or scale.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{name} is float32 of {wanted}, not {scale.dtype.name}{list(scale.shape)}: convert "
            "it, or broadcast a scalar"
        )
