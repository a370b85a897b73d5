"""The decoder: one definition for three precisions and two frameworks; that its FP8 product is
chapter 08's; that it learns; and what XLA makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp8lens import assert_fp8_gemms, inspect
from fp8lens.rules.rule import Lost
from tests.weekly import weekly

import fp8_decoder as d
import fp8_nnx
from flax_decoder import NNX, OVERWRITE, Linen
from fp8_decoder import Decoder, new_state, new_weights, scores, train_step
from fp8_linear import Amaxes, fp8_linear

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


def test_a_letter_does_not_see_those_after_it():
    decoder = Decoder("f32", **SMALL)
    weights = new_weights(decoder, jax.random.key(0))
    given = tokens()[:, :-1]
    changed = given.at[:, 9].add(1)
    before, after = (scores(decoder, weights, {}, t) for t in (given, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.abs(before[:, 9:] - after[:, 9:]).max() > 0.1


@pytest.mark.parametrize("steps", [0, 3])
def test_the_fp8_product_is_chapter_08s(steps):
    """Bit for bit, with its gradients and its histories, over some steps."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (32, 64), bf16)
    w = jax.random.normal(keys[1], (48, 64))
    g = jax.random.normal(keys[2], (32, 48), bf16)
    amaxes = jnp.zeros((3, d.STEPS_BACK))
    for step in range(steps + 1):
        y, back = jax.vjp(d.delayed, x * 2**step, w, amaxes)
        other, other_back = jax.vjp(fp8_linear, x * 2**step, w, Amaxes(*amaxes))
        ours, theirs = back(g), other_back(g)
        np.testing.assert_array_equal(y, other)
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(ours[2], jnp.stack(theirs[2]))
        amaxes = ours[2]


# Frameworks ---------------------------------------------------------------------------------------


def as_linen(weights: dict) -> dict:
    table = {"letters": weights["letters"]}
    return table | {n: {"kernel": w.T} for n, w in weights.items() if n not in table}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_linen_computes_the_same(precision, own):
    """Of weights that bf16 has: Flax rounds kernels to it before it quantizes them."""
    decoder = Decoder(precision, **SMALL)
    weights = {
        n: w.astype(bf16).astype(f32) for n, w in new_weights(decoder, jax.random.key(0)).items()
    }
    model, given = Linen(decoder, own), tokens()[:, :-1]
    variables = model.init(jax.random.key(0), given)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(
        jnp.shape, as_linen(weights)
    )
    assert (OVERWRITE in variables) == (precision == "fp8")
    amaxes = new_state(decoder, SGD, jax.random.key(0)).amaxes
    out = model.apply(variables | {"params": as_linen(weights)}, given)
    expected = scores(decoder, weights, amaxes, given)
    np.testing.assert_allclose(out, expected, atol=1e-5 if precision == "f32" else 0.1)
    assert np.linalg.norm(out - expected) < 0.01 * np.linalg.norm(expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nnx_computes_the_same(precision):
    decoder = Decoder(precision, **SMALL)
    model, given = NNX(decoder, rngs=nnx.Rngs(0)), tokens()[:, :-1]
    for layer in model.layers.values():  # Flax rounds kernels to bf16 before it quantizes them
        layer.kernel[...] = layer.kernel[...].astype(bf16).astype(f32)
    weights = {"letters": model.letters[...]}
    weights |= {name: layer.kernel[...].T for name, layer in model.layers.items()}
    amaxes = new_state(decoder, SGD, jax.random.key(0)).amaxes
    out, expected = model(given), scores(decoder, weights, amaxes, given)
    assert np.linalg.norm(out - expected) < 0.02 * np.linalg.norm(expected)


def test_linen_learns_with_either_layer():
    decoder, every = Decoder("fp8", **SMALL), tokens()
    for own in (False, True):
        model = Linen(decoder, own)
        variables = model.init(jax.random.key(0), every[:, :-1])
        losses = []
        for _ in range(12):
            value, gradient = linen_loss(model, variables, every)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradient["params"])
            variables = {"params": params, OVERWRITE: gradient[OVERWRITE]}
            losses.append(float(value))
        assert losses[-1] < 0.7 * losses[0], own


@jax.jit(static_argnums=0)
def linen_loss(model, variables, every):
    def of(variables):
        out = model.apply(variables, every[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(out, every[:, 1:]).mean()

    return jax.value_and_grad(of, allow_int=True)(variables)


def test_nnx_learns():
    decoder, every = Decoder("fp8", **SMALL), tokens()
    model = NNX(decoder, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SGD, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def of(model):
            out = model(every[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(out, every[:, 1:]).mean()

        value, gradient = fp8_nnx.value_and_grad(of)(model)
        fp8_nnx.update(model, optimizer, gradient)
        return value

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]


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


def test_all_layers_but_the_scores_are_fp8_by_default():
    decoder = Decoder(**SMALL)
    assert set(decoder.layers) - set(decoder.in_fp8) == {"scores"}
    assert Decoder("bf16", **SMALL).in_fp8 == () and Decoder("f32", **SMALL).dtype == f32


def compiled(**changed):
    """A step of it, at a size that a Hopper has use for, for an H100."""
    decoder = Decoder("fp8", letters=512, width=256, hidden=768, blocks=1, **changed)
    every = jax.ShapeDtypeStruct((4, 257), jnp.int32)
    adam = optax.adamw(1e-3)
    state = jax.eval_shape(lambda key: new_state(decoder, adam, key), jax.random.key(0))
    return inspect(lambda state, every: train_step(decoder, adam, state, every), state, every)


def test_every_matmul_that_should_be_is_fp8():
    """Three for each layer: forward, and the gradients of input and weight."""
    found = compiled()
    assert_fp8_gemms(found, count=3 * 5)
    lost = {
        str(reason.layer).partition(" ")[0] for reason in found.reasons if reason.lost is Lost.FP8
    }
    assert "scores" in lost and not lost & {"0.qkv", "0.out", "0.gate", "0.up", "0.down"}


@weekly  # chapter 13 compiles such steps
def test_a_layer_that_stays_in_bf16_is_none():
    assert_fp8_gemms(compiled(in_bf16=("scores", "0.qkv")), count=3 * 4)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"precision": "fp16"}, 'precision is "f32", "bf16" or "fp8"'),
        ({"heads": 3}, "3 heads do not divide a width of 32 into even parts"),
        ({"hidden": 40}, "multiples of 16: width is 32, hidden 40"),
        ({"in_bf16": ("2.up",)}, r"no layers \['2.up'\]; there are 0.qkv"),
    ],
)
def test_what_does_not_fit_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        Decoder(**(SMALL | changed))


def test_flax_refuses_fp8_scores():
    decoder = Decoder(**SMALL, in_bf16=())
    with pytest.raises(ValueError, match='leave "scores" in in_bf16'):
        Linen(decoder).init(jax.random.key(0), tokens()[:, :-1])
