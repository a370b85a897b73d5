"""The decoder: one definition for three precisions, and with Flax's layers; that it learns; what
XLA makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8lens import assert_fp8_gemms, inspect
from tests.weekly import one_in

from flax_decoder import OVERWRITE, Linen
from fp8_decoder import Decoder, new_state, new_weights, scores, train_step

f32, bf16 = jnp.float32, jnp.bfloat16
SMALL = {"letters": 64, "width": 32, "heads": 2, "hidden": 48, "blocks": 2}
PRECISIONS = ("f32", "bf16", "fp8")
SGD = optax.sgd(0.1)


def tokens(texts: int = 4, length: int = 17) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (texts, length), 0, SMALL["letters"])


# What it computes ---------------------------------------------------------------------------------


def by_hand(weights, given):
    """The decoder in float64 NumPy."""
    weights = {name: np.float64(w) for name, w in weights.items()}
    width, heads = SMALL["width"], SMALL["heads"]

    def norm(x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def turned(h):
        """Each pair of numbers as a complex one, [heads, length, size]."""
        half = h.shape[2] // 2
        pairs = h[:, :, :half] + 1j * h[:, :, half:]
        angle = np.arange(h.shape[1])[:, None] / 100 ** (np.arange(half) / half)
        pairs = pairs * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], axis=2)

    def attention(h):
        """One text's, [length, 3 x width]."""
        q, k, v = h.reshape(len(h), 3, heads, width // heads).transpose(1, 2, 0, 3)
        q, k = turned(q), turned(k)
        logits = q @ k.swapaxes(1, 2) / np.sqrt(width // heads)
        logits[:, *np.triu_indices(len(h), 1)] = -np.inf
        share = np.exp(logits - logits.max(-1, keepdims=True))
        mixed = share / share.sum(-1, keepdims=True) @ v
        return mixed.transpose(1, 0, 2).reshape(len(h), width)

    every = []
    for text in np.asarray(given):
        x = weights["letters"][text] * width**0.5
        for n in range(SMALL["blocks"]):
            x = x + attention(norm(x) @ weights[f"{n}.qkv"].T) @ weights[f"{n}.out"].T
            gate = norm(x) @ weights[f"{n}.gate"].T
            hidden = gate / (1 + np.exp(-gate)) * (norm(x) @ weights[f"{n}.up"].T)
            x = x + hidden @ weights[f"{n}.down"].T
        every.append(norm(x) @ weights["letters"].T)
    return np.array(every)


@pytest.mark.parametrize(("precision", "bound"), [("f32", 1e-4), ("bf16", 0.03), ("fp8", 0.1)])
def test_scores_are_those_of_float64(precision, bound):
    decoder = Decoder(precision, **SMALL)
    weights = new_weights(decoder, jax.random.key(0))
    amaxes = new_state(decoder, SGD, jax.random.key(0)).amaxes
    given = tokens()[:, :-1]
    expected = by_hand(weights, given)
    error = np.linalg.norm(scores(decoder, weights, amaxes, given) - expected)
    assert error < bound * np.linalg.norm(expected)
    assert precision == "f32" or error > 1e-3 * np.linalg.norm(expected)  # it is not f32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_linen_computes_the_same_and_so_do_its_gradients(precision):
    """Of weights that bf16 has: Flax rounds kernels to it before it quantizes them."""
    decoder = Decoder(precision, **SMALL)
    weights = new_weights(decoder, jax.random.key(0))
    weights = {name: w.astype(bf16).astype(f32) for name, w in weights.items()}
    amaxes = new_state(decoder, SGD, jax.random.key(0)).amaxes
    model, given = Linen(decoder), tokens()[:, :-1]
    variables = model.init(jax.random.key(0), given)
    params = {name: {"kernel": w.T} for name, w in weights.items() if name != "letters"}
    variables = variables | {"params": params | {"letters": weights["letters"]}}

    def ours(weights, amaxes):
        return jnp.mean(jnp.square(scores(decoder, weights, amaxes, given)))

    def flaxs(variables):
        return jnp.mean(jnp.square(model.apply(variables, given)))

    (value, (of_weights, new)), (other, found) = (
        jax.value_and_grad(ours, (0, 1))(weights, amaxes),
        jax.value_and_grad(flaxs)(variables),
    )
    assert float(value) == pytest.approx(float(other), rel=1e-3)
    for name, exact in of_weights.items():
        made = found["params"][name]
        made = made if name == "letters" else made["kernel"].T
        assert np.linalg.norm(made - exact) < 0.03 * np.linalg.norm(exact), name
    for name, history in new.items():
        np.testing.assert_allclose(
            found[OVERWRITE][name]["Fp8DotGeneral_0"]["amaxes"], history, rtol=0.05
        )


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns(precision):
    decoder, every = Decoder(precision, **SMALL), tokens()
    state, losses = new_state(decoder, SGD, jax.random.key(0)), []
    for _ in range(12):
        state, value = train_step(decoder, SGD, state, every)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert set(state.amaxes) == set(decoder.in_fp8)
    for history in state.amaxes.values():
        assert np.all(history[:, :12] > 0) and not np.any(history[:, 12:])


@pytest.mark.parametrize("in_bf16, layers", one_in(2, [(("scores", "0.qkv"), 4), (("scores",), 5)]))
def test_every_matmul_that_should_be_is_fp8(in_bf16, layers):
    """Three for each layer: forward, and the gradients of input and weight."""
    decoder = Decoder("fp8", letters=512, width=256, hidden=768, blocks=1, in_bf16=in_bf16)
    every = jax.ShapeDtypeStruct((4, 257), jnp.int32)
    adam = optax.adamw(1e-3)
    state = jax.eval_shape(lambda key: new_state(decoder, adam, key), jax.random.key(0))
    found = inspect(lambda state, every: train_step(decoder, adam, state, every), state, every)
    assert_fp8_gemms(found, count=3 * layers)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"heads": 3}, "3 heads do not divide a width of 32 into even parts"),
        ({"in_bf16": ("2.up",)}, r"no layers \['2.up'\]; there are 0.qkv"),
    ],
)
def test_what_does_not_fit_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        Decoder(**(SMALL | changed))
