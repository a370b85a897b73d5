"""Quantize in blocks along both dimensions, in one pass over memory: codes and scales, twice.

Copy `one_pass.py` beside it. It needs JAX alone. Chapter 18 uses it for MXFP8, and `fp8_blocks.py`
for blocks of 128, chapter 13.

XLA finds the scales in one kernel and makes the codes in another, so it reads a tensor once more
for each of the copies that training needs. Here one kernel reads each tile once, and writes both
copies before the tile leaves the chip. Like `one_pass.py` it is written with Pallas's Mosaic GPU
backend; it compiles for a Hopper and for a Blackwell, and can be interpreted on a CPU.

What it leaves out: a gradient (give the layer around it one), blocks of other sizes, and anything
that is computed on the way. It was not timed.

Test that it is one kernel, which moves each byte once:

    from fp8lens import inspect
    print(inspect(block_pass, x, target="H100").ledger)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from one_pass import LAYOUT, TILE, check_sizes, options_of, tiled

f32, e8m0 = jnp.float32, jnp.float8_e8m0fnu
MX, WIDE = 32, 128  # numbers of a block: MXFP8's, and DeepSeek-V3's
HELD = TILE[0] * TILE[1]  # numbers that one warpgroup holds in registers


class InBlocks(NamedTuple):
    """A tensor [M, N] in FP8, twice. A block's scale stands with those of the same columns, or of
    the same rows: `scales[j]` are those of columns B j to B j + B - 1, for blocks of B.
    """

    codes: Any  # [M, N]
    scales: Any  # [N / B, M], of blocks along N
    transposed: Any  # [N, M]
    transposed_scales: Any  # [M / B, N], of blocks along M


def block_pass(
    x: jax.Array,
    dtype: Any = jnp.float8_e4m3fn,
    by: str = "mosaic",
    block: int = MX,
    squares: bool = False,
) -> InBlocks:
    """x [M, N] in bf16, f16 or f32, finite, in blocks along N and, transposed, along M.

    In blocks of 32 scales are E8M0, rounded up, so that nothing saturates; the smallest is 2**-126,
    that of a block of zeros. In blocks of 128 they are f32. The 128 rows of one of the `squares`
    have the same.

    `by` "mosaic" is the kernel, M a multiple of 64 (of 128 in blocks of 128) and N of 128;
    "interpret" the same on a CPU. Both need JAX 0.11. Raises ValueError for other sizes.
    """
    if block not in (MX, WIDE) or (squares and block != WIDE):
        raise ValueError(f"blocks are of {MX} or {WIDE}, and squares of {WIDE}, not of {block}")
    check_sizes(x.shape)
    (m, n), (height, width) = x.shape, (max(TILE[0], block), TILE[1])
    if m % height:
        raise ValueError(f"blocks of {block} take multiples of {height} rows, not {m}: pad them")
    scale = jnp.uint8 if block == MX else f32  # the byte of an E8M0

    def kernel(given, *written) -> None:
        i, j = jax.lax.axis_index("i"), jax.lax.axis_index("j")
        down, across = pl.ds(i * height, height), pl.ds(j * width, width)
        blocks_down = pl.ds(i * (height // block), height // block)
        blocks_across = pl.ds(j * (width // block), width // block)
        places = [(down, across), (blocks_across, down), (across, down), (blocks_down, across)]

        def tile(values, results, barrier) -> None:
            mosaic.copy_gmem_to_smem(given.at[down, across], values, barrier)
            mosaic.barrier_wait(barrier)
            of_square = _largest(values) if squares else None
            _to_blocks(values, dtype, block, of_square, *results[:2])
            _to_blocks(values.T, dtype, block, of_square, *results[2:])
            mosaic.commit_smem()
            copy: Any = mosaic.copy_smem_to_gmem
            for source, target, place in zip(results, written, places, strict=True):
                copy(source, target.at[place])
            mosaic.wait_smem_to_gmem(0)

        results = [
            tiled((height, width), dtype, block),
            mosaic.SMEM((width // block, height), scale),
            tiled((width, height), dtype, block),
            mosaic.SMEM((height // block, width), scale),
        ]
        pl.run_scoped(
            tile, tiled((height, width), x.dtype), results, mosaic.Barrier(num_arrivals=1)
        )

    call = mosaic.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((m, n), dtype),
            jax.ShapeDtypeStruct((n // block, m), scale),
            jax.ShapeDtypeStruct((n, m), dtype),
            jax.ShapeDtypeStruct((m // block, n), scale),
        ],
        grid=(m // height, n // width),
        grid_names=("i", "j"),
        kernel_name="block_pass",
        **options_of(by),
    )
    codes, scales, transposed, transposed_scales = call(x)
    if block == MX:
        scales, transposed_scales = (
            jax.lax.bitcast_convert_type(s, e8m0) for s in (scales, transposed_scales)
        )
    return InBlocks(codes, scales, transposed, transposed_scales)


def _pieces(values) -> list:
    """A tile's rows, as many at a time as registers hold."""
    height = min(values.shape[0], HELD // values.shape[1])
    return [pl.ds(start, height) for start in range(0, values.shape[0], height)]


def _read(values, rows) -> jax.Array:
    return mosaic.layout_cast(values.at[rows][...], LAYOUT).astype(f32)


def _largest(values) -> jax.Array:
    """The largest magnitude of a tile."""
    of_rows = [jnp.max(jnp.abs(_read(values, rows)), axis=1) for rows in _pieces(values)]
    return jnp.max(functools.reduce(jnp.maximum, of_rows))


def _to_blocks(values, dtype: Any, block: int, of_square: Any, codes, scales) -> None:
    """Codes and scales of the blocks along the second dimension, from shared memory to there."""
    largest = float(jnp.finfo(dtype).max)
    for rows in _pieces(values):
        wide = _read(values, rows)
        for number in range(wide.shape[1] // block):
            columns = slice(number * block, (number + 1) * block)
            numbers = wide[:, columns]
            wanted = jnp.max(jnp.abs(numbers), axis=1) / largest
            if of_square is not None:
                same = jnp.full(wanted.shape, of_square / largest)
                wanted = mosaic.layout_cast(same, LAYOUT.reduce(1))
            if block == MX:
                # The exponent's bits, one more where a bit of the mantissa is set.
                bits = jax.lax.bitcast_convert_type(wanted, jnp.int32)
                scale = jnp.clip((bits + 0x7FFFFF) >> 23, 1, 253)
                inverse = jax.lax.bitcast_convert_type((254 - scale) << 23, f32)
                scaled = numbers * jax.lax.broadcast_in_dim(inverse, numbers.shape, (0,))
            else:
                scale = jnp.maximum(wanted, jnp.finfo(f32).tiny)
                scaled = numbers / jax.lax.broadcast_in_dim(scale, numbers.shape, (0,))
                scaled = jnp.clip(scaled, -largest, largest)
            codes.at[rows][:, columns] = scaled.astype(dtype)
            scales[number, rows] = scale.astype(scales.dtype)


def example() -> InBlocks:
    """A tensor in MXFP8, by the interpreter."""
    x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    return block_pass(x, by="interpret")


if __name__ == "__main__":
    made = example()
    print(f"codes {made.codes.dtype}{list(made.codes.shape)}, scales {made.scales.dtype}")
