"""Products of blocks with scales of their own: the recipe `fp8_blocks` with arrays for operands, as
chapters and the measurements on a GPU compare it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fp8_blocks import BLOCK as B
from fp8_blocks import Blocks, product


def blocks(x: Any, rows: int, columns: int) -> Any:
    """x [R, K] in blocks: [R / rows, rows, K / columns, columns]."""
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def by_block(
    a: jax.Array, b: jax.Array, a_scales: jax.Array, b_scales: jax.Array, by: str = "mosaic"
) -> jax.Array:
    """a [M, K] and b [N, K] in E4M3, a_scales [K / 128, M] of pieces of rows, b_scales [N / 128,
    K / 128] of squares: bf16[M, N]. `by` is the recipe's.
    """
    of_b = Blocks(b, jnp.repeat(b_scales.T, B, axis=1), squares=True)
    return product(Blocks(a, a_scales), of_b, jnp.bfloat16, by)


batched, dequantized = (functools.partial(by_block, by=by) for by in ("batched", "dequantized"))
