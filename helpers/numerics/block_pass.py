"""MXFP8 for training in one pass over memory: codes and scales of blocks along both dimensions.

XLA finds the scales in one kernel and makes the codes in another, so it reads a tensor twice for
each of the two copies that training needs. Here one kernel reads each tile once, and writes both
copies before the tile leaves the chip. Like the recipe one_pass it is written with Pallas's
Mosaic GPU backend; it compiles for a Hopper and for a Blackwell, and can be interpreted on a CPU.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from one_pass import TILE, check_sizes, options_of, tiled

f32, e8m0 = jnp.float32, jnp.float8_e8m0fnu
BLOCK = 32


class InBlocks(NamedTuple):
    """A tensor [M, N] in MXFP8, twice. A block's scale stands with those of the same columns, or of
    the same rows: `scales[j]` are those of columns 32 j to 32 j + 31.
    """

    codes: Any  # [M, N]
    scales: Any  # e8m0[N / 32, M], of blocks along N
    transposed: Any  # [N, M]
    transposed_scales: Any  # e8m0[M / 32, N], of blocks along M


def block_pass(x: jax.Array, dtype: Any = jnp.float8_e4m3fn, by: str = "mosaic") -> InBlocks:
    """x [M, N] in bf16, f16 or f32, finite, in blocks of 32 along N and, transposed, along M.
    Scales are rounded up, so that nothing saturates; the smallest is 2**-126, that of a block of
    zeros.

    `by` "mosaic" is the kernel, M a multiple of 64 and N of 128; "interpret" the same on a CPU.
    Both need JAX 0.11. Raises ValueError for other sizes.
    """
    check_sizes(x.shape)
    (m, n), (height, width) = x.shape, TILE
    scale = jnp.uint8  # the byte of an E8M0

    def kernel(given, *written) -> None:
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        down, across = pl.ds(i * height, height), pl.ds(j * width, width)
        blocks_down = pl.ds(i * (height // BLOCK), height // BLOCK)
        blocks_across = pl.ds(j * (width // BLOCK), width // BLOCK)
        places = (down, across), (blocks_across, down), (across, down), (blocks_down, across)

        def tile(values, results, barrier) -> None:
            mosaic.copy_gmem_to_smem(given.at[down, across], values, barrier)
            mosaic.barrier_wait(barrier)
            _to_blocks(values, dtype, *results[:2])
            _to_blocks(values.T, dtype, *results[2:])
            mosaic.commit_smem()
            copy: Any = mosaic.copy_smem_to_gmem
            for source, target, place in zip(results, written, places, strict=True):
                copy(source, target.at[place])
            mosaic.wait_smem_to_gmem(0)

        results = [
            tiled(TILE, dtype, BLOCK),
            mosaic.SMEM((width // BLOCK, height), scale),
            tiled((width, height), dtype, BLOCK),
            mosaic.SMEM((height // BLOCK, width), scale),
        ]
        pl.run_scoped(tile, tiled(TILE, x.dtype), results, mosaic.Barrier(num_arrivals=1))

    call = mosaic.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((m, n), dtype),
            jax.ShapeDtypeStruct((n // BLOCK, m), scale),
            jax.ShapeDtypeStruct((n, m), dtype),
            jax.ShapeDtypeStruct((m // BLOCK, n), scale),
        ],
        grid=(m // height, n // width),
        grid_names=("i", "j"),
        kernel_name="block_pass",
        **options_of(by),
    )
    codes, scales, transposed, transposed_scales = call(x)
    scales, transposed_scales = (
        jax.lax.bitcast_convert_type(s, e8m0) for s in (scales, transposed_scales)
    )
    return InBlocks(codes, scales, transposed, transposed_scales)


def _to_blocks(values, dtype: Any, codes, scales) -> None:
    """Codes and scales of the blocks along the second dimension, from shared memory to there."""
    largest = float(jnp.finfo(dtype).max)
    wide = mosaic.layout_cast(values[...], mosaic.Layout.WGMMA).astype(f32)
    for number in range(wide.shape[1] // BLOCK):
        columns = slice(number * BLOCK, (number + 1) * BLOCK)
        block = wide[:, columns]
        wanted = jnp.max(jnp.abs(block), axis=1) / largest
        # The exponent's bits, one more where a bit of the mantissa is set.
        bits = jax.lax.bitcast_convert_type(wanted, jnp.int32)
        exponent = jnp.clip((bits + 0x7FFFFF) >> 23, 1, 253)
        inverse = jax.lax.bitcast_convert_type((254 - exponent) << 23, f32)
        scaled = block * jax.lax.broadcast_in_dim(inverse, block.shape, (0,))
        codes[:, columns] = scaled.astype(dtype)
        scales[number] = exponent.astype(scales.dtype)
