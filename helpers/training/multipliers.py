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

from helpers.numerics.tensor_core import tensor_core_dot

from fp8_linear import e4m3, e5m2, f32, quantize, remember, scale_of
from nvfp4 import nvfp4_linear

BLOCK = 128
NVFP4 = "nvfp4", "nvfp4, plain"


class Recipe(NamedTuple):
    """How a matmul's operands become FP8, and how its products are summed.

    `scaling`: "delayed", by the amaxes of earlier steps; "current", by the tensor's own amax;
    "blocks", a scale for each 128 numbers of a row of x and of the gradient, and for each 128 x 128
    of w; "frozen", by the history as it is, which stays so; "nvfp4", the recipe nvfp4, and "nvfp4,
    plain", that without its transform and its rounding. `forward` is the format of x and w,
    `backward` that of the result's gradient. `tensor_core`: summed by chapter 13's model of a
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

    @property
    def transposed(self) -> "Codes":
        """The same codes [K, R], where the blocks are square."""
        scales = self.scales
        if scales.ndim:
            scales = jnp.repeat(scales[::BLOCK].T, BLOCK, axis=0)
        return Codes(self.codes.T, scales)


@functools.cache
def multiplier(recipe: Recipe) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(x [M, K], w [N, K], amaxes f32[3, H]) -> [M, N] in x's type; the gradient of `amaxes` is
    their new value. The same function for the same recipe. By blocks M, N and K are multiples of
    128.
    """
    if recipe.scaling in NVFP4:
        return _nvfp4(recipe.scaling == "nvfp4")
    quantized = functools.partial(_quantized, recipe.scaling)
    dot = functools.partial(_dot, tensor_core_dot if recipe.tensor_core else _exact_dot)

    @jax.custom_vjp
    def multiply(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> jax.Array:
        return forward(x, w, amaxes)[0]

    def forward(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> tuple[jax.Array, Any]:
        x_q = quantized(x, amaxes[0], recipe.forward)
        w_q = quantized(w, amaxes[1], recipe.forward, BLOCK)
        # Blocks lie along K. The weight's gradient sums over tokens: its blocks of x lie along
        # these, and need codes of their own.
        x_again = quantized(x.T, amaxes[0], recipe.forward)
        new = remember(amaxes[0], x), remember(amaxes[1], w)
        return dot(x_q, w_q).astype(x.dtype), (x_again, w_q, *new, amaxes)

    def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
        x_again, w_q, new_x, new_w, amaxes = saved
        x_gradient = dot(quantized(g, amaxes[2], recipe.backward), w_q.transposed)
        w_gradient = dot(quantized(g.T, amaxes[2], recipe.backward), x_again)
        if recipe.scaling != "frozen":
            amaxes = jnp.stack([new_x, new_w, remember(amaxes[2], g)])
        return x_gradient.astype(g.dtype), w_gradient, amaxes

    multiply.defvjp(forward, backward)
    return multiply


def _nvfp4(whole: bool) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The recipe nvfp4, summed in f32. It remembers no amaxes: theirs become 0."""

    def multiply(x: jax.Array, w: jax.Array, amaxes: jax.Array) -> jax.Array:
        return nvfp4_linear(x, w, whole, whole, "dequantized")

    return multiply


def _quantized(
    scaling: str, tensor: jax.Array, history: jax.Array, dtype: Any, rows: int = 1
) -> Codes:
    """The tensor [R, K] in FP8. By blocks each has 128 of K, and so many rows."""
    if scaling != "blocks":
        scale = scale_of(jnp.abs(tensor.astype(f32)) if scaling == "current" else history, dtype)
        return Codes(quantize(tensor, scale, dtype), scale)
    # [R / rows, K / 128, rows, 128]
    blocks = tensor.astype(f32).reshape(tensor.shape[0] // rows, rows, -1, BLOCK).swapaxes(1, 2)
    of_block = functools.partial(scale_of, dtype=dtype)
    scales = jnp.repeat(jax.vmap(jax.vmap(of_block))(jnp.abs(blocks)), rows, axis=0)
    return Codes(quantize(tensor, jnp.repeat(scales, BLOCK, axis=1), dtype), scales)


def _dot(dot: Callable, a: Codes, b: Codes) -> jax.Array:
    """f32[M, N] of a [M, K] and b [N, K]."""
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
