"""The decoder of `fp8_decoder.py` with Flax's Linen layers.

Copy `fp8_decoder.py` and `fp8_linear.py` beside it. It needs JAX, Optax and Flax. Chapter 14 trains
the decoder, chapter 10 explains FP8 in Flax's layers.

What the decoder does is written once, in `decode`. Here are its layers alone: who owns the weights.

What it leaves out: careful sums in the backward pass, Flax's own FP8 layer (chapter 10), NNX
(`fp8_nnx.py` has its layer and its step), and a training step. Flax's collection of histories must
be overwritten with its gradient, past the optimizer; `example` does that.

Test what XLA makes of your step, with the flag that `fp8_linear.py` names:

    from fp8lens import assert_fp8_gemms
    assert_fp8_gemms(step, variables, tokens, count=3 * len(decoder.in_fp8), target="H100")
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

from fp8_decoder import STEPS_BACK, Decoder, decode

# Flax keeps there what the training step overwrites with its gradient, past the optimizer.
OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT


class Fp8DotGeneral(nn.Module):
    """For `dot_general_cls=` of nn.Dense: `fp8`'s product of x [M, K] and a kernel [K, N]."""

    fp8: Any

    @nn.compact
    def __call__(self, x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        """The product, in x's type."""
        amaxes = self.variable(OVERWRITE, "amaxes", jnp.zeros, (3, STEPS_BACK))
        return self.fp8(x, kernel.T, amaxes.value)


class Linen(nn.Module):
    """The decoder as a Linen module. Its scores stay in bf16: they share the embedding's table."""

    decoder: Decoder

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores f32[batch, length, letters] of the next token, for each of `tokens`."""
        decoder = self.decoder
        letters = self.param("letters", _normal, (decoder.letters, decoder.width))

        def dense(name: str, x: jax.Array) -> jax.Array:
            if name == "scores":
                return jax.lax.dot(x, letters.astype(x.dtype).T)
            general = (lambda: Fp8DotGeneral(decoder.fp8)) if name in decoder.in_fp8 else None
            layer = nn.Dense(
                decoder.layers[name][0],
                use_bias=False,
                dtype=decoder.dtype,
                dot_general_cls=general,
                # As new_weights makes it; Flax stores the kernel as [inputs, outputs].
                kernel_init=lambda key, sizes, dtype: _normal(key, sizes[::-1], dtype).T,
                name=name,
            )
            return layer(x)

        return decode(decoder, tokens, letters, dense)


def _normal(key: jax.Array, sizes: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """A matrix [outputs, inputs] before the first step, as new_weights makes it."""
    return jax.random.normal(key, sizes, dtype) * sizes[-1] ** -0.5


def example(steps: int = 20) -> list[float]:
    """The losses of some steps on one text, on a CPU too."""
    decoder = Decoder("fp8", letters=64, width=64, hidden=128, blocks=1)
    model, optimizer = Linen(decoder), optax.adamw(1e-2)
    tokens = jax.random.randint(jax.random.key(1), (1, 33), 0, decoder.letters)
    variables = model.init(jax.random.key(0), tokens[:, :-1])
    moments, losses = optimizer.init(variables["params"]), []

    @jax.jit
    @jax.value_and_grad
    def loss(variables: Any) -> jax.Array:
        scores = model.apply(variables, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()

    for _ in range(steps):
        value, gradient = loss(variables)
        change, moments = optimizer.update(gradient["params"], moments, variables["params"])
        # The gradient of the histories is their new value.
        variables = gradient | {"params": optax.apply_updates(variables["params"], change)}
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
