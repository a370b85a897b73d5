"""A linear layer that trains in MXFP8: three FP8 matmuls with a power of two for each 32 numbers.

Copy `block_pass.py` and `one_pass.py` beside it. It needs JAX alone, 0.12 for the matmuls. Chapter
13 compares what it costs. As in NVIDIA's report (arXiv 2506.08027, 2025) all numbers are E4M3,
gradients too, scales are rounded up, and the copies that the backward pass needs are made of the
original numbers.

    y = mx_linear(x, w)  # x [M, K] and y [M, N] in bf16, w [N, K] in f32 or bf16

`by` is who quantizes: "mosaic" is `block_pass`, one kernel for both copies of a tensor, for a GPU;
"interpret" is the same on a CPU; "xla" is what the compiler makes of plain JAX. XLA's Triton
multiplies. A Hopper has no block scales: there it multiplies in bf16.

What it leaves out: a bias and several devices (`jax.lax.scaled_dot` is not divided among them). It
was compiled for a Blackwell, and was not run on one.

Test that all three matmuls are FP8. Triton must be allowed to take them:

    from fp8lens import inspect
    rows = inspect(step, x, w, target="B200", gemm="auto").report.rows
    print(*(row.math_dtype for row in rows))  # f8e4m3fn, three times
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from block_pass import MX, InBlocks, block_pass

f32, bf16, e4m3, e8m0 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e8m0fnu
SIZES = 64, 128  # tokens, and features of x and of the result, are multiples of


def quantized(x: jax.Array, by: str) -> InBlocks:
    """x [R, K], finite, in blocks along K and, transposed, along R."""
    if by == "xla":
        return InBlocks(*_along(x), *_along(x.T))
    return block_pass(x, e4m3, by)


def _along(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes [R, K] and scales [K / 32, R]. The scale of a block of zeros is the smallest."""
    blocks = x.astype(f32).reshape(len(x), -1, MX)
    wanted = jnp.max(jnp.abs(blocks), axis=2) / 448
    # A float's exponent, one more where a bit of its mantissa is set: the scale's byte.
    bits = jax.lax.bitcast_convert_type(wanted, jnp.int32)
    exponent = jnp.clip((bits + 0x7FFFFF) >> 23, 1, 253)
    scale = jax.lax.bitcast_convert_type(exponent << 23, f32)
    codes = (blocks / scale[:, :, None]).astype(e4m3).reshape(x.shape)
    return codes, jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), e8m0).T


def product(a: Any, b: Any, a_scales: Any, b_scales: Any, dtype: Any) -> jax.Array:
    """`dtype`[M, N] of codes a [M, K] and b [N, K], and scales [K / 32, M] and [K / 32, N]."""
    return jax.lax.scaled_dot(
        a, b.T, lhs_scale=a_scales.T, rhs_scale=b_scales, preferred_element_type=dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def mx_linear(x: jax.Array, w: jax.Array, by: str = "mosaic") -> jax.Array:
    """x [M, K] times w [N, K], in x's type: M a multiple of 64, N and K of 128, all numbers finite.
    The gradients have the types of x and w. Raises ValueError for other sizes.
    """
    return _forward(x, w, by)[0]


def _forward(x, w, by):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"give x [M, K] and w [N, K], not {x.shape} and {w.shape}")
    (m, k), n = x.shape, len(w)
    if m % SIZES[0] or n % SIZES[1] or k % SIZES[1]:
        raise ValueError(
            f"M must be a multiple of {SIZES[0]}, N and K of {SIZES[1]}, not {m}, {n} and {k}: "
            "pad with zeros"
        )
    of_x, of_w = quantized(x, by), quantized(w, by)
    y = product(of_x.codes, of_w.codes, of_x.scales, of_w.scales, x.dtype)
    return y, (*of_x[2:], *of_w[2:], jnp.zeros((), w.dtype))


def _backward(by, saved, g):
    x_again, x_scales, w_again, w_scales, like_w = saved
    of_g = quantized(g, by)
    of_x = product(of_g.codes, w_again, of_g.scales, w_scales, g.dtype)
    of_w = product(of_g.transposed, x_again, of_g.transposed_scales, x_scales, like_w.dtype)
    return of_x, of_w


mx_linear.defvjp(_forward, _backward)


def example() -> list[float]:
    """The losses of some steps of gradient descent, on a CPU too."""
    x = jax.random.normal(jax.random.key(0), (128, 256), bf16)
    w, losses = jnp.zeros((128, 256)), []

    @jax.jit
    @jax.value_and_grad
    def loss(w):
        # The layer learns to return a part of its input.
        y = mx_linear(x, w, by="xla")
        return jnp.mean(jnp.square(y.astype(f32) - x[:, :128]))

    for _ in range(20):
        value, of_w = loss(w)
        w -= 16 * of_w
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
