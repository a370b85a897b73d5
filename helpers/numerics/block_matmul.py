"""A matmul of block-scaled operands, written by hand for a Blackwell.

XLA multiplies MXFP8 and NVFP4 as they are, by cuDNN, and dequantizes MXFP4 and whatever else a
Blackwell's tensor core could take. A kernel of Pallas's Mosaic GPU backend reaches the instruction
itself: `tcgen05.mma` with `block_scale`. This one is kept as short as it can be. It waits for each
step before it reads the next, so it shows what can be multiplied, not how fast.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

f32, bf16 = jnp.float32, jnp.bfloat16
TILE = 128  # rows and columns of the result that a block of threads computes
ROW_BYTES = 128  # of each operand, in a step along K: what is swizzled in shared memory


def in_tiles(scales: jax.Array) -> jax.Array:
    """Scales [M, K / block] in the tensor core's order: tiles of 128 rows and 4 blocks, in each of
    them 32 rows of 16 bytes, so that the rows r, r + 32, r + 64 and r + 96 stand side by side.

    Source: PTX ISA, "Scale factor A layout" of tcgen05.mma.
    """
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // TILE, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(rows // TILE, blocks // 4, 32, 16)


def block_matmul(a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array) -> jax.Array:
    """a [M, K] times b [N, K] with a scale for each block along K: bf16[M, N].

    FP8 or FP4 codes with an E8M0 scale for each 32, or E2M1 codes with an E4M3 scale for each 16:
    a_scales [M, K / block], b_scales [N, K / block]. NVFP4's scale for the whole tensor is left to
    the caller. Compiles for B200 and B300 with JAX 0.11, and cannot be interpreted. Raises
    ValueError if M or N is not a multiple of 128, or a row of K not one of 128 bytes.
    """
    (m, k), n = a.shape, len(b)
    block = k // a_scales.shape[1]
    depth = ROW_BYTES * 8 // jax.dtypes.itemsize_bits(a.dtype)
    if m % TILE or n % TILE or k % depth:
        raise ValueError(
            f"the kernel takes multiples of {TILE} rows, and of {depth} columns of "
            f"{a.dtype.name}, not {[m, k]} and {[n, k]}: pad with zeros"
        )
    tiles = depth // (4 * block)

    def kernel(a, b, a_scales, b_scales, result, memory, tensor_memory, total, arrived, done):
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        rows, columns = pl.ds(i * TILE, TILE), pl.ds(j * TILE, TILE)
        left, right, left_scales, right_scales, written = memory
        left_scaled, right_scaled = tensor_memory

        def step(number, _):
            along = pl.ds(number * depth, depth)
            scales = pl.ds(number * tiles, tiles)
            for source, target in (
                (a.at[rows, along], left),
                (b.at[columns, along], right),
                (a_scales.at[pl.ds(i, 1), scales], left_scales),
                (b_scales.at[pl.ds(j, 1), scales], right_scales),
            ):
                mosaic.copy_gmem_to_smem(source, target, arrived)
            mosaic.barrier_wait(arrived)
            mosaic.async_copy_scales_to_tmem(left_scales, left_scaled)
            mosaic.async_copy_scales_to_tmem(right_scales, right_scaled)
            mosaic.tcgen05_mma(
                total,
                left,
                right.T,
                done,
                a_scale=left_scaled,
                b_scale=right_scaled,
                accumulate=number > 0,
            )
            mosaic.barrier_wait(done)

        jax.lax.fori_loop(0, k // depth, step, None)
        written[...] = mosaic.async_load_tmem(total).astype(bf16)
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(written, result.at[rows, columns])
        mosaic.wait_smem_to_gmem(0)

    given = a, b, in_tiles(a_scales), in_tiles(b_scales)
    in_memory = [mosaic.SMEM((1, tiles, 32, 16), scales.dtype) for scales in given[2:]]
    in_tensor_memory = [
        mosaic.TMEM((TILE, depth // block), scales.dtype, layout=mosaic.TMEMLayout.SCALES_LAYOUT)
        for scales in given[2:]
    ]
    call = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), bf16),
        grid=(m // TILE, n // TILE),
        grid_names=("i", "j"),
        kernel_name="block_matmul",
        scratch_types=[
            [_rows(depth, a.dtype), _rows(depth, b.dtype), *in_memory, _rows(TILE, bf16)],
            in_tensor_memory,
            mosaic.TMEM((TILE, TILE), f32),
            mosaic.Barrier(num_arrivals=4),
            mosaic.Barrier(num_arrivals=1, orders_tensor_core=True),
        ],
    )
    return call(*given)


def _rows(columns: int, dtype: Any) -> Any:
    """A tile in shared memory, its rows of 128 bytes swizzled as the tensor core reads them."""
    size = ROW_BYTES * 8 // jax.dtypes.itemsize_bits(dtype)
    kinds: Any = mosaic  # JAX declares these two classes abstract
    transforms = kinds.TilingTransform((8, size)), kinds.SwizzleTransform(ROW_BYTES)
    return mosaic.SMEM((TILE, columns), dtype, transforms=transforms)
