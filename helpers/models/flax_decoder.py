"""The decoder of helpers.models.decoder with Flax's layers: in Linen and in NNX.

What the decoder does is written once, in `decode`. Here are its layers alone: who owns the weights,
and who multiplies in FP8. That is this course's product (`Decoder.fp8`), or Flax's own.
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
    from flax import nnx
    from flax.linen import fp8_ops
except ImportError as error:
    raise ImportError(
        "helpers.models.flax_decoder needs Flax, of the group lab in pyproject.toml: "
        "pip install flax"
    ) from error

from helpers.models.decoder import STEPS_BACK, Decoder, decode, delayed
from helpers.models.nnx import Fp8Dot

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
    `Fp8Dot` of helpers.models.nnx, whose training step is `value_and_grad` and `update` there.
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
