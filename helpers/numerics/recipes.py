"""What chapters take apart, for those that build on it: the two ends of chapter 03's recipe."""

import jax
import jax.numpy as jnp

from helpers.numerics.quantize import dequantize

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
