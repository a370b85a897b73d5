"""What chapters take apart, for those that build on it: the two ends of chapter 03's recipe, and
chapter 08's layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from helpers.numerics.quantize import dequantize, quantize

e4m3, e5m2, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32
E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


def scaled_dot(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, dtype=jnp.float32
) -> jax.Array:
    """Dequantize in `dtype` and multiply: a [M, K] and b [N, K] in FP8, scalar scales, result
    `dtype`[M, N].
    """
    return jax.lax.dot(dequantize(a, a_scale, dtype), dequantize(b, b_scale, dtype).T)


def to_e4m3(d: jax.Array, d_scale: jax.Array) -> jax.Array:
    """Quantize: multiply by `d_scale` (a scalar, the reciprocal of what dequantizes), clamp,
    convert. Any shape.
    """
    scaled = d * jnp.asarray(d_scale, d.dtype)
    return jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


# From here on as chapter 08 writes it, which explains each function: a test compares them.


class Amaxes(NamedTuple):
    """The amaxes of the last steps, f32[H] each, the latest first."""

    x: jax.Array
    w: jax.Array
    g: jax.Array


def new_amaxes(length=16):  # noqa: D103
    return Amaxes(*(jnp.zeros(length) for _ in range(3)))


def scale_of(history, dtype):
    """The scale that maps the largest amax to the format's largest number; 1 if all are 0."""
    amax = jnp.max(history)
    scale = jnp.maximum(amax / float(jnp.finfo(dtype).max), jnp.finfo(f32).tiny)
    return jnp.where(amax > 0, scale, 1.0)


def remember(history, tensor):
    """The history after this step. An amax that is not finite is left out."""
    amax = jnp.max(jnp.abs(tensor)).astype(f32)
    kept = jnp.concatenate([amax[None], history[:-1]])
    return jnp.where(jnp.isfinite(amax), kept, history)


@jax.custom_vjp
def fp8_linear(x, w, amaxes):
    """x [M, K] times w [N, K], in x's type. The gradient of `amaxes` is their new value."""
    return forward(x, w, amaxes)[0]


def forward(x, w, amaxes):  # noqa: D103
    x_scale, w_scale = scale_of(amaxes.x, e4m3), scale_of(amaxes.w, e4m3)
    x_q, w_q = quantize(x, x_scale), quantize(w, w_scale)
    y = scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype)
    new_x, new_w = remember(amaxes.x, x), remember(amaxes.w, w)
    return y, (x_q, w_q, x_scale, w_scale, new_x, new_w, amaxes.g)


def backward(saved, g):  # noqa: D103
    x_q, w_q, x_scale, w_scale, new_x, new_w, g_amaxes = saved
    g_scale = scale_of(g_amaxes, e5m2)
    g_q = quantize(g, g_scale, e5m2)
    x_gradient = scaled_dot(g_q, w_q.T, g_scale, w_scale, g.dtype)
    w_gradient = scaled_dot(g_q.T, x_q.T, g_scale, x_scale)
    return x_gradient, w_gradient, Amaxes(new_x, new_w, remember(g_amaxes, g))


fp8_linear.defvjp(forward, backward)
