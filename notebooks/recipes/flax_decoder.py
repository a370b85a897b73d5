"""The decoder of `fp8_decoder.py` with Flax's layers: in Linen and in NNX.

Copy `fp8_decoder.py`, `fp8_nnx.py` and `fp8_linear.py` beside it. It needs JAX, Optax and Flax.
Chapter 13 trains the decoder, chapter 09 explains FP8 in Flax's layers.

What the decoder does is written once, in `decode`. Here are its layers alone: who owns the weights,
and who multiplies in FP8. That is the course's product (`Decoder.fp8`), or Flax's own.

What it leaves out: careful sums in the backward pass, but for Flax's own product; a training step
for Linen. Flax's collection of histories must be overwritten
with its gradient, past the optimizer; `example` does that. For NNX, `fp8_nnx.py` has the step.

Test what XLA makes of your step, with the flag that `fp8_nnx.py` names:

    from fp8lens import assert_fp8_gemms
    assert_fp8_gemms(step, variables, tokens, count=3 * len(decoder.in_fp8), target="H100")
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
    import optax  # Flax installs it
    from flax import nnx
    from flax.linen import fp8_ops
except ImportError as error:
    raise ImportError("flax_decoder needs Flax: pip install flax") from error

from fp8_decoder import STEPS_BACK, Decoder, decode, delayed
from fp8_nnx import Fp8Dot

# Flax keeps there what the training step overwrites with its gradient, past the optimizer.
OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT


class Fp8DotGeneral(nn.Module):
    """For `dot_general_cls=` of nn.Dense: this course's product of x [M, K] and a kernel [K, N]."""

    fp8: Any = delayed

    @nn.compact
    def __call__(self, x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        """The product, in x's type."""
        amaxes = self.variable(OVERWRITE, "amaxes", jnp.zeros, (3, STEPS_BACK))
        return self.fp8(x, kernel.T, amaxes.value)


class Linen(nn.Module):
    """The decoder as a Linen module. `own` multiplies FP8 layers by Flax's own layer instead of
    `decoder.fp8`.
    """

    decoder: Decoder
    own: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores f32[batch, length, letters] of the next token, for each of `tokens`."""
        decoder = self.decoder
        letters = self.param("letters", _normal, (decoder.letters, decoder.width))

        def dense(name: str, x: jax.Array) -> jax.Array:
            if name == "scores":
                return _scores(decoder, x, letters)
            outputs, inputs = decoder.layers[name]
            return nn.Dense(
                outputs,
                use_bias=False,
                dtype=decoder.dtype,
                dot_general_cls=self._dot_general(name),
                kernel_init=_transposed,
                name=name,
            )(x)

        return decode(decoder, tokens, letters, dense)

    def _dot_general(self, name: str) -> Any:
        if name not in self.decoder.in_fp8:
            return None
        if self.own:
            return fp8_ops.Fp8DirectDotGeneralOp
        return lambda: Fp8DotGeneral(self.decoder.fp8)


class NNX(nnx.Module):
    """The decoder as an NNX module. NNX has no FP8 layer of its own: its FP8 layers multiply by
    `Fp8Dot` of fp8_nnx, whose training step is `value_and_grad` and `update` there.
    """

    def __init__(self, decoder: Decoder, *, rngs: nnx.Rngs):
        self.decoder = decoder
        self.letters = nnx.Param(_normal(rngs.params(), (decoder.letters, decoder.width)))
        layers = {}
        for name, (outputs, inputs) in decoder.layers.items():
            if name == "scores":
                continue
            general: Any = {"dot_general": Fp8Dot()} if name in decoder.in_fp8 else {}
            layers[name] = nnx.Linear(
                inputs,
                outputs,
                use_bias=False,
                dtype=decoder.dtype,
                kernel_init=_transposed,
                rngs=rngs,
                **general,
            )
        self.layers = nnx.Dict(layers)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores f32[batch, length, letters] of the next token, for each of `tokens`."""
        decoder, letters = self.decoder, self.letters[...]

        def dense(name: str, x: jax.Array) -> jax.Array:
            if name == "scores":
                return _scores(decoder, x, letters)
            with jax.named_scope(name):
                return self.layers[name](x)

        return decode(decoder, tokens, letters, dense)


def _scores(decoder: Decoder, x: jax.Array, letters: jax.Array) -> jax.Array:
    """The last layer, whose weight is the table of letters. Neither framework has an FP8 layer that
    shares its weight.
    """
    if "scores" in decoder.in_fp8:
        raise ValueError('with Flax the scores stay in bf16: leave "scores" in in_bf16')
    return jax.lax.dot(x, letters.astype(x.dtype).T)


def _normal(key: jax.Array, sizes: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """A matrix [outputs, inputs] before the first step, as new_weights makes it."""
    return jax.random.normal(key, sizes, dtype) * sizes[-1] ** -0.5


def _transposed(
    key: jax.Array, sizes: tuple[int, ...], dtype: Any = jnp.float32, **_: Any
) -> jax.Array:
    """The same as Flax stores a kernel: [inputs, outputs]."""
    return _normal(key, sizes[::-1], dtype).T


def example(steps: int = 20) -> list[float]:
    """The losses of some steps of the Linen decoder on one text, on a CPU too."""
    decoder = Decoder("fp8", letters=64, width=64, hidden=128, blocks=1)
    model, optimizer = Linen(decoder), optax.adamw(1e-2)
    tokens = jax.random.randint(jax.random.key(1), (1, 33), 0, decoder.letters)
    variables = model.init(jax.random.key(0), tokens[:, :-1])
    moments = optimizer.init(variables["params"])

    def loss_of(variables: Any) -> jax.Array:
        scores = model.apply(variables, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def step(variables: Any, moments: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(variables)
        change, moments = optimizer.update(gradient["params"], moments, variables["params"])
        params = optax.apply_updates(variables["params"], change)
        # The gradient of the histories is their new value.
        return {"params": params, OVERWRITE: gradient[OVERWRITE]}, moments, loss

    losses = []
    for _ in range(steps):
        variables, moments, loss = step(variables, moments)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")
