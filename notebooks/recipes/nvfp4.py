"""A linear layer that trains in NVFP4: three FP4 matmuls, and what a training needs beside them.

It needs JAX alone. Chapter 18 explains each step. It follows NVIDIA's report of a training with 12
billion parameters and 10 trillion tokens (arXiv 2509.25149, 2025):

- Two levels of scales: E4M3 for each 16 numbers along the summed dimension, f32 for the tensor.
- Weights have one scale for each 16 x 16, so the same codes serve forward and backward.
- The operands of the weight's gradient are mixed by a random Hadamard transform of 16 tokens. It
  spreads an outlier over its block, and cancels in the product.
- Gradients are rounded stochastically: their mean is not shifted. Weights and activations are
  rounded to the nearest.

    y = nvfp4_linear(x, w)  # x [M, K] and y [M, N] in bf16, w [N, K] in f32 or bf16

That report keeps 16 % of the linear layers in bf16, those of the first two blocks and of the last
eight, and embeddings, norms, attention and the layer of the logits. That is left to the model. So
is what the optimizer does in f32.

What it leaves out: a bias, several devices (the tensor's scale needs the amax of all of them), a
kernel that quantizes in one pass, and a key: the random bits follow from the gradient's own amaxes.
No time was measured. On a CPU a whole model takes minutes to compile, because the generator of the
random bits becomes a part of each kernel that rounds.

Test that all three matmuls are FP4. On a Blackwell XLA gives `jax.nn.scaled_matmul` to cuDNN. On
a CPU it multiplies what the codes stand for.

    from fp8lens import inspect
    rows = inspect(step, x, w, target="B200", gemm="auto").report.rows
    print(*(row.math_dtype for row in rows))  # f4e2m1fn for each; bf16 for the transforms
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

f32, bf16 = jnp.float32, jnp.bfloat16
e2m1, e4m3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn
BLOCK = 16
LARGEST, LARGEST_SCALE = 6.0, 448.0  # of E2M1 and of E4M3


class Blocks(NamedTuple):
    """A matrix [R, K] in NVFP4."""

    codes: Any  # E2M1 [R, K]
    scales: Any  # E4M3 [R, K / 16]
    of_tensor: Any  # f32 []

    @property
    def transposed(self) -> "Blocks":
        """The same numbers [K, R], where a scale belongs to 16 x 16 of them."""
        scales = jnp.repeat(self.scales[::BLOCK].T, BLOCK, axis=0)
        return Blocks(self.codes.T, scales, self.of_tensor)


def to_nvfp4(x: jax.Array, rows: int = 1, stochastic: bool = False) -> Blocks:
    """x [R, K] with a scale for each 16 of K and so many `rows`, rounded to the nearest or
    stochastically.
    """
    blocks = x.astype(f32).reshape(x.shape[0] // rows, rows, -1, BLOCK)
    amaxes = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    # Without the barriers XLA would read x once more for the largest amax, and would take away a
    # conversion to a narrow type and back, and with it the rounding.
    amaxes = jax.lax.optimization_barrier(amaxes)
    of_tensor = jnp.max(amaxes) / (LARGEST * LARGEST_SCALE)
    of_tensor = jnp.where(of_tensor > 0, of_tensor, 1.0)
    scales = jax.lax.optimization_barrier((amaxes / LARGEST / of_tensor).astype(e4m3))
    wide = scales.astype(f32) * of_tensor
    # A scale that is too small for E4M3 is 0, and so are its block's codes.
    scaled = jnp.where(wide > 0, blocks / wide, 0.0)
    # E4M3 may round a scale down. Then the block's largest number is beyond the range.
    scaled = jnp.clip(scaled, -LARGEST, LARGEST)
    if stochastic:
        scaled = rounded_stochastically(scaled, key_of(amaxes))
    codes = jax.lax.optimization_barrier(scaled.astype(e2m1))
    scales = jnp.repeat(scales[:, 0, :, 0], rows, axis=0)
    return Blocks(codes.reshape(x.shape), scales, of_tensor)


def rounded_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """x, at most 6, to one of E2M1's two numbers around it; the nearer, the more probable, so that
    the mean stays x.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.floor(x / step + jax.random.uniform(key, x.shape)) * step


def key_of(amaxes: jax.Array) -> jax.Array:
    """A key for each gradient: it follows from the sum of its blocks' amaxes."""
    return jax.random.key(jax.lax.bitcast_convert_type(jnp.sum(amaxes), jnp.uint32))


def signed_hadamard() -> np.ndarray:
    """f32[16, 16], orthogonal. One vector of random signs for all layers and all steps."""
    signs = np.random.default_rng(16).choice([-1.0, 1.0], BLOCK)
    bits = np.arange(BLOCK)
    odd = np.bitwise_count(bits[:, None] & bits) % 2
    return (np.where(odd, -1.0, 1.0) * signs / BLOCK**0.5).astype(np.float32)


def mixed(x: jax.Array) -> jax.Array:
    """x [M, K], each 16 of M transformed. Where both operands of a product are mixed along the
    dimension that it sums over, the product is the same: the matrix is orthogonal.
    """
    # Its entries are 1/4 and -1/4, exact in bf16.
    matrix = signed_hadamard().astype(x.dtype)
    blocks = x.reshape(-1, BLOCK, x.shape[1])
    return jnp.einsum("st,mtk->msk", matrix, blocks).reshape(x.shape)


def product(a: Blocks, b: Blocks, dtype: Any, by: str) -> jax.Array:
    """`dtype`[M, N] of a [M, K] and b [N, K]."""
    if by == "scaled_matmul":
        codes, scales = (a.codes[None], b.codes[None]), (a.scales[None], b.scales[None])
        sums = jax.nn.scaled_matmul(*codes, *scales, preferred_element_type=dtype)[0]
    elif by == "dequantized":
        wide = [
            one.codes.astype(f32) * jnp.repeat(one.scales.astype(f32), BLOCK, axis=1)
            for one in (a, b)
        ]
        sums = jax.lax.dot(wide[0], wide[1].T)
    else:
        raise ValueError(f'by is "scaled_matmul" or "dequantized", not {by!r}')
    return (sums.astype(f32) * (a.of_tensor * b.of_tensor)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def nvfp4_linear(
    x: jax.Array,
    w: jax.Array,
    hadamard: bool = True,
    stochastic: bool = True,
    by: str = "scaled_matmul",
) -> jax.Array:
    """x [M, K] times w [N, K], in x's type: M, N and K multiples of 16, all numbers finite.

    Without `hadamard` and `stochastic` the gradients are quantized like the rest, which a long
    training does not survive, by the report. `by` is who multiplies: "scaled_matmul" of JAX, or
    "dequantized", an f32 matmul of what the codes stand for. Raises ValueError for other sizes.
    """
    return _forward(x, w, hadamard, stochastic, by)[0]


def _forward(x, w, hadamard, stochastic, by):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"give x [M, K] and w [N, K], not {x.shape} and {w.shape}")
    if any(size % BLOCK for size in (*x.shape, *w.shape)):
        raise ValueError(
            f"M, N and K must be multiples of {BLOCK}, not {x.shape[0]}, {w.shape[0]} and "
            f"{x.shape[1]}: pad with zeros"
        )
    w_codes = to_nvfp4(w, rows=BLOCK)
    y = product(to_nvfp4(x), w_codes, x.dtype, by)
    # The weight's gradient sums over tokens, so x is quantized again, in blocks of tokens. What the
    # backward pass needs is saved in 4 bits, not x.
    x_again = to_nvfp4((mixed(x) if hadamard else x).T)
    return y, (x_again, w_codes, jnp.zeros((), w.dtype))


def _backward(hadamard, stochastic, by, saved, g):
    x_again, w_codes, of_w = saved
    of_x = product(to_nvfp4(g, stochastic=stochastic), w_codes.transposed, g.dtype, by)
    g_again = to_nvfp4((mixed(g) if hadamard else g).T, stochastic=stochastic)
    return of_x, product(g_again, x_again, of_w.dtype, by)


nvfp4_linear.defvjp(_forward, _backward)


def example() -> list[float]:
    """The losses of some steps of gradient descent, on a CPU too."""
    x = jax.random.normal(jax.random.key(0), (64, 128), bf16)
    w, losses = jnp.zeros((32, 128)), []

    @jax.jit
    @jax.value_and_grad
    def loss(w):
        # The layer learns to return a part of its input.
        y = nvfp4_linear(x, w, by="dequantized")
        return jnp.mean(jnp.square(y.astype(f32) - x[:, :32]))

    for _ in range(20):
        value, of_w = loss(w)
        w -= 4 * of_w
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
