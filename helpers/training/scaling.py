"""FP8 matmuls to train with and to compare: by how a scale is chosen, by format, and by how the
products are summed.

`multiplier(recipe)` is one for `Decoder.fp8` of the recipe fp8_decoder. Unlike the product there,
which XLA has to recognize, these compute what the tensor core computes also on a CPU: codes are
multiplied as they are, the sum is in f32 or as `tensor_core_dot` says, and the scales multiply the
sum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from helpers.training.sums import tensor_core_dot

from fp8_decoder import e4m3, e5m2, f32, remember, scale_of

BLOCK = 128
SCALINGS = ("delayed", "current", "blocks", "frozen")


class Recipe(NamedTuple):
    """How a matmul's operands become FP8, and how its products are summed.

    `scaling`: "delayed", by the amaxes of earlier steps; "current", by the tensor's own amax;
    "blocks", a scale for each 128 numbers of a row of x and of the gradient, and for each 128 x 128
    of w; "frozen", by the history as it is, which stays so. `forward` is the format of x and w,
    `backward` that of the result's gradient. `tensor_core`: summed by chapter 12's model of a
    Hopper; by blocks, each block's sum is then added in f32.
    """

    scaling: str = "delayed"
    forward: Any = e4m3
    backward: Any = e5m2
    tensor_core: bool = False


class Codes(NamedTuple):
    """FP8 codes [R, K], and their scales: one, or those of blocks, f32[R, K / 128]."""

    codes: jax.Array
    scales: jax.Array


@functools.cache
def multiplier(recipe: Recipe) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(x [M, K], w [N, K], amaxes f32[3, H]) -> [M, N] in x's type; the gradient of `amaxes` is
    their new value. The same function for the same recipe. By blocks M, N and K are multiples of
    128. Raises ValueError for another scaling.
    """
    if recipe.scaling not in SCALINGS:
        raise ValueError(f"scaling is one of {', '.join(SCALINGS)}, not {recipe.scaling!r}")

    @jax.custom_vjp
    def multiply(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> jax.Array:
        return forward(x, w, amaxes)[0]

    def forward(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> tuple[jax.Array, Any]:
        x_q = _quantized(recipe, x, amaxes[0], recipe.forward)
        w_q = _quantized(recipe, w, amaxes[1], recipe.forward, square=True)
        # Blocks lie along K. The weight's gradient sums over tokens: its blocks of x lie along
        # these, and need codes of their own.
        x_again = _quantized(recipe, x.T, amaxes[0], recipe.forward)
        y = _dot(recipe, x_q, w_q).astype(x.dtype)
        return y, (x_again, w_q, remember(amaxes[0], x), remember(amaxes[1], w), amaxes)

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
        x_again, w_q, new_x, new_w, amaxes = saved
        g_q = _quantized(recipe, g, amaxes[2], recipe.backward)
        g_again = _quantized(recipe, g.T, amaxes[2], recipe.backward)
        x_gradient = _dot(recipe, g_q, _transposed(w_q)).astype(g.dtype)
        w_gradient = _dot(recipe, g_again, x_again)
        new = jnp.stack([new_x, new_w, remember(amaxes[2], g)])
        return x_gradient, w_gradient, amaxes if recipe.scaling == "frozen" else new

    multiply.defvjp(forward, backward)
    return multiply


def _quantized(
    recipe: Recipe, tensor: jax.Array, history: jax.Array, dtype: Any, square: bool = False
) -> Codes:
    """The tensor [R, K] in FP8. By blocks each has 128 of K, and 128 rows too if it is square."""
    tensor = tensor.astype(f32)
    if recipe.scaling == "blocks":
        scales = _block_scales(tensor, dtype, BLOCK if square else 1)
        wide = jnp.repeat(scales, BLOCK, axis=1)
    else:
        is_current = recipe.scaling == "current"
        wide = scales = scale_of(jnp.abs(tensor) if is_current else history, dtype)
    largest = float(jnp.finfo(dtype).max)
    return Codes(jnp.clip(tensor / wide, -largest, largest).astype(dtype), scales)


def _block_scales(tensor: jax.Array, dtype: Any, rows: int) -> jax.Array:
    """f32[R, K / 128]: each block's scale, repeated for each of its rows."""
    if tensor.shape[0] % rows or tensor.shape[1] % BLOCK:
        raise ValueError(
            f"blocks of {rows} x {BLOCK} do not fill {list(tensor.shape)}: "
            "batch times length, width and hidden must be multiples of 128"
        )
    blocks = jnp.abs(tensor).reshape(tensor.shape[0] // rows, rows, -1, BLOCK)
    of_block = functools.partial(scale_of, dtype=dtype)
    scales = jax.vmap(jax.vmap(of_block))(blocks.swapaxes(1, 2))
    return jnp.repeat(scales, rows, axis=0)


def _transposed(q: Codes) -> Codes:
    """The same codes [K, R], where the blocks are square."""
    scales = jnp.repeat(q.scales[::BLOCK].T, BLOCK, axis=0) if q.scales.ndim else q.scales
    return Codes(q.codes.T, scales)


def _dot(recipe: Recipe, a: Codes, b: Codes) -> jax.Array:
    """f32[M, N] of a [M, K] and b [N, K]."""
    dot = tensor_core_dot if recipe.tensor_core else _exact_dot
    if not a.scales.ndim:
        return dot(a.codes, b.codes) * (a.scales * b.scales)
    total = jnp.zeros((len(a.codes), len(b.codes)), f32)
    for n in range(a.scales.shape[1]):
        part = slice(n * BLOCK, (n + 1) * BLOCK)
        sums = dot(a.codes[:, part], b.codes[:, part])
        total += sums * a.scales[:, n, None] * b.scales[:, n]
    return total


def _exact_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Summed in f32."""
    return jax.lax.dot(a.astype(f32), b.astype(f32).T)
