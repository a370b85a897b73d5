"""Quantizing in JAX: to a small format with a scale, and back.

A scale is always the number to multiply by to dequantize: value ~ code * scale.
"""

import jax
import jax.numpy as jnp

from fp8lens.compile.process import choose_platform
from helpers.numerics.number_formats import describe

# Before a first array. `helpers` does it where JAX is imported before it.
choose_platform()


def quantize(x: jax.Array, scale: jax.Array | float, dtype=jnp.float8_e4m3fn) -> jax.Array:
    """x / scale in f32, clamped to the format's finite range, rounded to nearest even. Any shape,
    `scale` broadcasts; jittable. NaN stays NaN where the format has one; FP6 and FP4 have none, so
    do not pass it there. Raises ValueError for an unsigned format (E8M0), which holds scales and
    not values.
    """
    f = describe(dtype)
    if not f.signed:
        raise ValueError(
            f"quantize to {f.name}: it has no sign and no zero; it is made for scales. "
            "Use float8_e4m3fn"
        )
    return jnp.clip(jnp.asarray(x, jnp.float32) / scale, f.min, f.max).astype(dtype)


def dequantize(q: jax.Array, scale: jax.Array | float, dtype=jnp.float32) -> jax.Array:
    """q * scale, computed in `dtype`."""
    return q.astype(dtype) * jnp.asarray(scale, dtype)


def amax_scale(
    x: jax.Array, dtype=jnp.float8_e4m3fn, margin: int = 0, axis=None, power_of_two=False
) -> jax.Array:
    """The scale that maps the largest |x| to the format's largest value: f32[] (or x's shape with
    `axis` kept as 1).

    `margin` leaves that many binades free above it. `power_of_two` rounds the scale up to a power
    of two, so that scaling is exact. As in Transformer Engine's `compute_scale_from_amax`, an amax
    of 0, inf or NaN gives scale 1, and a scale too small for f32 becomes the smallest normal one.
    """
    amax = jnp.max(jnp.abs(jnp.asarray(x, jnp.float32)), axis=axis, keepdims=axis is not None)
    scale = jnp.maximum(amax / (describe(dtype).max * 2.0**-margin), jnp.finfo(jnp.float32).tiny)
    if power_of_two:
        mantissa, exponent = jnp.frexp(scale)  # mantissa in [0.5, 1)
        scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa > 0.5, exponent, exponent - 1))
    return jnp.where((amax > 0) & jnp.isfinite(amax), scale, 1.0)
