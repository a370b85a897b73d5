"""Products of blocks with scales of their own: the recipe `fp8_blocks` with arrays for operands, as
chapters and the measurements on a GPU compare it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fp8_blocks import BLOCK as B
from fp8_blocks import Blocks, product


def blocks(x: Any, rows: int, columns: int) -> Any:
    """x [R, K] in blocks: [R / rows, rows, K / columns, columns]."""
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def by_block(a: Any, b: Any, a_scales: Any, b_scales: Any, interpret: Any = None) -> jax.Array:
    """a [M, K] and b [N, K] in E4M3, a_scales [K / 128, M] of pieces of rows, b_scales [N / 128,
    K / 128] of squares: bf16[M, N], by the recipe's kernel, compiled for a Hopper or interpreted.
    Its tiles have 128 rows: rows of zeros are added to fewer.
    """
    m, by = len(a), "interpret" if interpret else "mosaic"
    if more := -m % B:
        a, a_scales = jnp.pad(a, ((0, more), (0, 0))), jnp.pad(a_scales, ((0, 0), (0, more)))
    return _multiply(a, b, a_scales, b_scales, by)[:m]


def batched(a: Any, b: Any, a_scales: Any, b_scales: Any) -> jax.Array:
    """The same, by an FP8 matmul of XLA's for each 128 of K."""
    return _multiply(a, b, a_scales, b_scales, "batched")


def dequantized(a: Any, b: Any, a_scales: Any, b_scales: Any) -> jax.Array:
    """The same, by a matmul in bf16."""
    return _multiply(a, b, a_scales, b_scales, "dequantized")


def _multiply(a: Any, b: Any, a_scales: Any, b_scales: Any, by: str) -> jax.Array:
    of_b = Blocks(b, jnp.repeat(b_scales.T, B, axis=1), squares=True)
    return product(Blocks(a, a_scales), of_b, jnp.bfloat16, by)
