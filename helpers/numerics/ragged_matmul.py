"""A ragged matmul in FP8, written by hand for a Hopper: each row meets its own expert's matrix.

XLA compiles `jax.lax.ragged_dot` for a Hopper as one dense matmul, in which each row meets every
expert's matrix. Here a block of threads computes a tile of the result, 64 rows by 128 columns. It
goes through the experts, and multiplies by those that have rows in its tile. Rows of other experts
are masked before anything is added. So each tile is written once and whole, and groups of rows
begin and end where they like.

The kernel is kept as short as it can be: one warpgroup computes a tile, and it does not multiply
while it scales. On an H200 its numbers are right; its speed was not measured. It is written with
Pallas's Mosaic GPU backend, which compiles for a Hopper on any machine and can be interpreted on a
CPU. That a kernel can find its rows from the group sizes at run time is learnt from JAX's own
`ragged_dot_mgpu.py` (Apache-2.0), which gives each expert tiles of its own, and stores parts of
them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from one_pass import options_of, tiled

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, COLUMNS = 64, 128  # of the result's tile: what one warpgroup's registers hold
DEPTH = 128  # of a step along K: what is swizzled in shared memory, 128 bytes of each row
_LAYOUT = mosaic.Layout.WGMMA


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
    M are cut off.

    Scales are f32; multiply by them to dequantize. `x_scale` is [M], one for each row, or
    [K / 128, M], one for each 128 of a row. `w_scale` is [E], one for each expert, or
    [E, N / 128, K / 128], one for each square of 128. The sum over each 128 of K is scaled and
    added in float32, outside the tensor core.

    M is a multiple of 64, N and K of 128. `by` "mosaic" is the kernel, and "interpret" the same on
    a CPU; both need JAX 0.11. Raises ValueError for other shapes. It has no gradient.
    """
    if x_scale.ndim == 1:
        x_scale = x_scale[None]
    if w_scale.ndim == 1:
        w_scale = w_scale[:, None, None]
    _check(x, w, group_sizes, x_scale, w_scale)
    (m, k), n = x.shape, w.shape[1]

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

            def step(index, x_tile, w_tile, row_scales, total):
                of_rows = mosaic.layout_cast(row_scales[0], _LAYOUT.reduce(1))
                spread = jax.lax.broadcast_in_dim(of_rows, total.shape, (0,))
                part = _product(x_tile, w_tile) * spread
                part *= scale[_within(j, scale.shape[0]), _within(index[0], scale.shape[1])]
                # A product with zero would let another expert's NaN through.
                return total + jnp.where(is_own, part, jnp.zeros_like(part))

            pipeline = mosaic.emit_pipeline(
                step,
                grid=(jnp.where(has_rows, k // DEPTH, 0),),
                in_specs=[
                    _tiles((ROWS, DEPTH), lambda s: (i, s)),
                    _tiles((COLUMNS, DEPTH), lambda s: (j, s)),
                    mosaic.BlockSpec((1, ROWS), lambda s: (_within(s, x_scale.shape[0]), i)),
                ],
                max_concurrent_steps=4,
                init_carry=total,
            )
            return end, pipeline(x, w.at[number], x_scale)

        zero = mosaic.layout_cast(jnp.zeros((ROWS, COLUMNS), f32), _LAYOUT)
        _, total = jax.lax.fori_loop(0, group_sizes.shape[0], expert, (jnp.int32(0), zero))
        out_tile[...] = total.astype(out_tile.dtype)
        mosaic.commit_smem()
        rows, columns = pl.ds(i * ROWS, ROWS), pl.ds(j * COLUMNS, COLUMNS)
        mosaic.copy_smem_to_gmem(out_tile, out.at[rows, columns])
        mosaic.wait_smem_to_gmem(0)

    call = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=[tiled((ROWS, COLUMNS), out_dtype)],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("i", "j"),
        kernel_name="ragged_matmul",
        **options_of(by),
    )
    return call(x, w, group_sizes, x_scale, w_scale)


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


def _within(index: Any, count: int) -> Any:
    """The index of a scale, where there may be one for all."""
    return index if count > 1 else 0


def _check(x, w, group_sizes, x_scale, w_scale) -> None:
    """The kernel would read beyond a smaller array."""
    (m, k), (experts, n, _) = x.shape, w.shape
    if m % ROWS or n % COLUMNS or k % DEPTH or w.shape[2] != k:
        raise ValueError(
            f"the kernel takes x [M, K] and w [E, N, K], in multiples of {ROWS} rows, {COLUMNS} "
            f"columns and {DEPTH} along K, not {list(x.shape)} and {list(w.shape)}: pad with zeros"
        )
    fit = (
        group_sizes.shape == (experts,)
        and x_scale.shape in ((1, m), (k // DEPTH, m))
        and w_scale.shape in ((experts, 1, 1), (experts, n // COLUMNS, k // DEPTH))
    )
    if not fit:
        raise ValueError(
            f"for {experts} experts there are as many group sizes; x_scale is [M] or [K / 128, M], "
            "w_scale [E] or [E, N / 128, K / 128]"
        )
