"""A layer of a GPT, written once with Flax's own layers: in f32, in bf16, and in bf16 with its
matmuls in FP8.

It is the layer of Transformer Engine's quickstart, which the readme of fp8layers times: layer norm,
one projection to queries, keys and values, attention, projection, layer norm, an MLP four times as
wide with gelu, two residuals. As in that readme nothing is dropped out and nothing is masked;
`causal` masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fused_attention import fused_attention

try:
    import flax.linen as nn
    import optax  # Flax's training state is built on it, and installs it
    from flax.training.train_state import TrainState
except ImportError as error:
    raise ImportError(
        "helpers.models.gpt needs Flax, of the group lab in pyproject.toml: pip install flax"
    ) from error


class GPTLayer(nn.Module):
    """[batch, sequence, hidden] to the same. Parameters are f32; `dtype` is what the layer computes
    in.

    `fp8` quantizes the operands of the four dense layers, forward and backward, by scales of
    earlier steps: delayed scaling. `product` is another `dot_general_cls` for these layers, such as
    Transformer Engine's, or `by_function(multiply)`. Attention stays in `dtype`. `attention` is who
    runs it, the `implementation` of dot_product_attention in jax.nn: "xla" anywhere, or "cudnn",
    one fused kernel, on a GPU in bf16; or "fused", JAX's own such kernel, compiled anywhere for a
    Hopper, in bf16 and not causal. Raises ValueError for sizes that do not fit.
    """

    hidden: int = 4096
    heads: int = 32
    dtype: Any = jnp.bfloat16
    fp8: bool = False
    causal: bool = False
    attention: str = "xla"
    product: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output for `x`."""
        if x.ndim != 3 or x.shape[2] != self.hidden or self.hidden % self.heads:
            raise ValueError(
                f"a layer of {self.hidden} in {self.heads} heads "
                f"takes [batch, sequence, {self.hidden}], "
                f"and its heads must divide {self.hidden}; got {list(x.shape)}. "
                "Give hidden= and heads=."
            )
        if self.attention == "fused" and self.causal:
            raise ValueError('fused attention masks nothing: give attention="xla" or causal=False')
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, dtype=self.dtype)
        dense = functools.partial(
            nn.Dense,
            dtype=self.dtype,
            dot_general_cls=nn.Fp8DirectDotGeneralOp if self.fp8 else self.product,
        )
        batch, sequence, _ = x.shape
        # A row a token: XLA makes no FP8 output of a result that is reshaped before it is
        # converted.
        x = x.astype(self.dtype).reshape(batch * sequence, self.hidden)

        h = dense(3 * self.hidden, name="qkv")(norm(name="norm_1")(x))
        q, k, v = jnp.split(h.reshape(batch, sequence, self.heads, -1), 3, axis=-1)
        implementation: Any = self.attention
        if self.attention == "fused":
            h = fused_attention(q * q.shape[-1] ** -0.5, k, v)
        else:
            h = jax.nn.dot_product_attention(
                q, k, v, is_causal=self.causal, implementation=implementation
            )
        x = x + dense(self.hidden, name="projection")(h.reshape(x.shape))

        h = nn.gelu(dense(4 * self.hidden, name="up")(norm(name="norm_2")(x)))
        x = x + dense(self.hidden, name="down")(h)
        return x.reshape(batch, sequence, self.hidden)


@functools.cache
def by_function(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable:
    """A `product` that multiplies x [M, K] by w [N, K], with a gradient of its own and without a
    state. A Dense layer has its kernel as [K, N].
    """

    def dot_general(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return multiply(x, kernel.T)

    return lambda: dot_general


_SGD = optax.sgd(0.1)


@functools.partial(jax.jit, static_argnames="layer")
def train_state(layer: GPTLayer, x: jax.Array) -> TrainState:
    """New parameters, and the optimizer's state. With FP8, `state.params` also holds the scale and
    the history of largest magnitudes of each dense layer's input, kernel and output's gradient:
    "_overwrite_with_gradient".
    """
    init = layer.clone(attention="xla").init  # cuDNN's attention has no parameters, but wants a GPU
    return TrainState.create(apply_fn=layer.apply, params=init(jax.random.key(0), x), tx=_SGD)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, x: jax.Array, target: jax.Array) -> tuple[TrainState, jax.Array]:
    """The state after one step down the gradient of the mean squared error, and that error before
    the step, in f32.

    The state given is used up: its memory becomes the new one's. What FP8 scales follow from, JAX
    returns as their gradient; Flax's state puts it in their place, and gives only the rest to the
    optimizer.
    """

    def loss(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(state.apply_fn(params, x).astype(jnp.float32) - target))

    error, gradient = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradient), error
