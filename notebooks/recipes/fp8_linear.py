"""A linear layer that trains in FP8 with delayed scaling: three FP8 matmuls, one file to copy.

It needs JAX alone. Chapter 09 derives each function.

What it leaves out: a bias, a margin on the scales, scales for blocks; float16, in
which scales underflow; careful sums in the backward
pass (`lean_step.py` has them). A layer that is used several times in a step needs `Amaxes` of its
own for each use: JAX adds up the gradients of shared ones, and a sum of amaxes is not an amax.

In a training step, take the gradient of weights and amaxes. Give the weights' gradient to the
optimizer. The gradient of the amaxes is their new value: put it in their place.

    loss, (of_w, amaxes) = jax.value_and_grad(loss_of, (0, 1))(w, amaxes)

Test what XLA makes of your step. A layer has three FP8 matmuls; if its input needs no gradient, as
in the line above, it has two. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts:
by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_gemms
    assert_fp8_gemms(step, w, amaxes, x, target, count=2, target="H100")
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

e4m3, e5m2, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32


class Amaxes(NamedTuple):
    """The amaxes of the last steps, f32[H] each, the latest first."""

    x: jax.Array
    w: jax.Array
    g: jax.Array


def new_amaxes(length=16):
    """Amaxes before the first step. Transformer Engine and Flax remember 1024 steps."""
    return Amaxes(*(jnp.zeros(length) for _ in range(3)))


def scale_of(history, dtype):
    """The scale that maps the largest amax to the format's largest number; 1 if all are 0."""
    amax = jnp.max(history)
    # A scale that is too small for f32 would be 0, and x / 0 is no number.
    scale = jnp.maximum(amax / float(jnp.finfo(dtype).max), jnp.finfo(f32).tiny)
    return jnp.where(amax > 0, scale, 1.0)


def remember(history, tensor):
    """The history after this step. An amax that is not finite is left out."""
    amax = jnp.max(jnp.abs(tensor)).astype(f32)
    kept = jnp.concatenate([amax[None], history[:-1]])
    return jnp.where(jnp.isfinite(amax), kept, history)


def quantize(tensor: jax.Array, scale: jax.Array, dtype: Any = e4m3) -> jax.Array:
    """Codes of `dtype`. Divided in f32: bf16 would round twice. Without the clamp a number beyond
    the range would become NaN.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(tensor.astype(f32) / scale, -largest, largest).astype(dtype)


def scaled_dot(
    a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, dtype: Any = f32
) -> jax.Array:
    """`dtype`[M, N] of codes a [M, K] and b [N, K]. XLA makes one FP8 matmul of these lines where
    they are compiled for a GPU that has one; elsewhere they are what they say.
    """
    a = a.astype(dtype) * a_scale.astype(dtype)
    b = b.astype(dtype) * b_scale.astype(dtype)
    return jax.lax.dot(a, b.T)


@jax.custom_vjp
def fp8_linear(x, w, amaxes):
    """x [M, K] times w [N, K], in x's type. The gradient of `amaxes` is their new value."""
    return forward(x, w, amaxes)[0]


def forward(x, w, amaxes):
    """The result, and what the backward pass needs: codes, not x and w."""
    x_scale, w_scale = scale_of(amaxes.x, e4m3), scale_of(amaxes.w, e4m3)
    x_q, w_q = quantize(x, x_scale), quantize(w, w_scale)
    y = scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype)
    new_x, new_w = remember(amaxes.x, x), remember(amaxes.w, w)
    return y, (x_q, w_q, x_scale, w_scale, new_x, new_w, amaxes.g)


def backward(saved, g):
    """The gradients of x, in g's type, and of w, in f32; and the new amaxes."""
    x_q, w_q, x_scale, w_scale, new_x, new_w, g_amaxes = saved
    g_scale = scale_of(g_amaxes, e5m2)
    g_q = quantize(g, g_scale, e5m2)
    x_gradient = scaled_dot(g_q, w_q.T, g_scale, w_scale, g.dtype)
    w_gradient = scaled_dot(g_q.T, x_q.T, g_scale, x_scale)
    return x_gradient, w_gradient, Amaxes(new_x, new_w, remember(g_amaxes, g))


fp8_linear.defvjp(forward, backward)


@jax.custom_vjp
def fp8_current(x, w):
    """The same with current scaling: each scale follows from the tensor itself. It keeps no state,
    and reads each tensor once more before it quantizes it. Gradients have the types of x and w.
    """
    return _current_forward(x, w)[0]


def _own_scale(tensor, dtype):
    return scale_of(jnp.max(jnp.abs(tensor)).astype(f32), dtype)


def _current_forward(x, w):
    x_scale, w_scale = _own_scale(x, e4m3), _own_scale(w, e4m3)
    x_q, w_q = quantize(x, x_scale), quantize(w, w_scale)
    y = scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype)
    return y, (x_q, w_q, x_scale, w_scale, jnp.empty(0, w.dtype))


def _current_backward(saved, g):
    x_q, w_q, x_scale, w_scale, like_w = saved
    g_scale = _own_scale(g, e5m2)
    g_q = quantize(g, g_scale, e5m2)
    x_gradient = scaled_dot(g_q, w_q.T, g_scale, w_scale, g.dtype)
    return x_gradient, scaled_dot(g_q.T, x_q.T, g_scale, x_scale, like_w.dtype)


fp8_current.defvjp(_current_forward, _current_backward)


def example() -> list[float]:
    """The losses of some steps of gradient descent, on a CPU too."""
    x = jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16)
    w, amaxes, losses = jnp.zeros((32, 128)), new_amaxes(), []

    @jax.jit
    @jax.value_and_grad
    def loss(given):
        # The layer learns to return a part of its input.
        return jnp.mean(jnp.square(fp8_linear(x, *given).astype(f32) - x[:, :32]))

    for _ in range(20):
        value, (of_w, amaxes) = loss((w, amaxes))
        w -= 4 * of_w
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
