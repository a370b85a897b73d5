"""What chapter 13 trains with: the fast model of the tensor core, the recipes, the runs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numerics.blocks import hopper_dot, promoted_sums
from helpers.training import runs, text
from helpers.training.scaling import SCALINGS, Recipe, multiplier
from helpers.training.sums import tensor_core_dot

from fp8_decoder import delayed, e4m3, e5m2, new_state, product, scale_of

f32, bf16 = jnp.float32, jnp.bfloat16

# The tensor core's sums ---------------------------------------------------------------------------


def codes(seed: int, rows: int, k: int, dtype) -> jax.Array:
    """Of all magnitudes: also subnormal, zero, and the largest."""
    keys = jax.random.split(jax.random.key(seed), 2)
    spread = jnp.exp2(jax.random.randint(keys[0], (rows, k), -14, 8).astype(f32))
    wide = jax.random.normal(keys[1], (rows, k)) * spread
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(wide, -largest, largest).astype(dtype).at[0, ::3].set(0)


@pytest.mark.parametrize("formats", [*itertools.product((e4m3, e5m2), repeat=2)])
@pytest.mark.parametrize("k", [32, 256])
def test_the_fast_model_has_the_bits_of_chapter_12s(formats, k):
    a, b = codes(0, 24, k, formats[0]), codes(1, 40, k, formats[1])
    np.testing.assert_array_equal(tensor_core_dot(a, b), hopper_dot(a, b))


def test_it_is_not_the_exact_sum():
    a, b = codes(0, 24, 256, e4m3), codes(1, 40, 256, e4m3)
    exact = np.float64(a.astype(f32)) @ np.float64(b.astype(f32)).T
    error = np.abs(tensor_core_dot(a, b) - exact) / np.abs(exact)
    assert np.median(error) > 2.0**-16


def test_parts_are_added_in_f32():
    a, b = codes(2, 8, 512, e4m3), codes(3, 8, 512, e5m2)
    np.testing.assert_array_equal(tensor_core_dot(a, b, every=128), promoted_sums(a, b)[-1])


def test_any_length_is_filled_up_with_zeros():
    a, b = codes(0, 8, 50, e4m3), codes(1, 8, 50, e4m3)
    filled = [jnp.pad(t.astype(f32), ((0, 0), (0, 14))).astype(e4m3) for t in (a, b)]
    np.testing.assert_array_equal(tensor_core_dot(a, b), hopper_dot(*filled))


def test_zeros_give_zero():
    zero = jnp.zeros((8, 64), e4m3)
    np.testing.assert_array_equal(tensor_core_dot(zero, codes(0, 8, 64, e5m2)), np.zeros((8, 8)))


# Recipes ------------------------------------------------------------------------------------------


def operands(m: int = 128, n: int = 256, k: int = 384) -> list[jax.Array]:
    """x, w, the result's gradient; x with a channel that is much larger."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), bf16).at[:, 5].multiply(300)
    return [x, jax.random.normal(keys[1], (n, k)), jax.random.normal(keys[2], (m, n), bf16) * 1e-5]


def both(recipe: Recipe, amaxes: jax.Array | None = None):
    x, w, g = operands()
    if amaxes is None:
        amaxes = jnp.stack([jnp.full(16, jnp.max(jnp.abs(t)).astype(f32)) for t in (x, w, g)])
    y, back = jax.vjp(multiplier(recipe), x, w, amaxes)
    return y, *back(g)


@pytest.mark.parametrize("tensor_core", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_recipe_is_near_the_product_of_float64(scaling, tensor_core):
    x, w, g = (np.float64(t) for t in operands())
    y, x_gradient, w_gradient, _ = both(Recipe(scaling, tensor_core=tensor_core))
    expected = x @ w.T, g @ w, g.T @ x
    for made, exact in zip((y, x_gradient, w_gradient), expected, strict=True):
        error = np.linalg.norm(np.float64(made) - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < 0.1
    assert (y.dtype, x_gradient.dtype, w_gradient.dtype) == (bf16, bf16, f32)


def test_delayed_scaling_is_the_decoders_but_for_roundings_of_bf16():
    x, w, g = operands()
    amaxes = jnp.stack([jnp.full(16, jnp.max(jnp.abs(t)).astype(f32)) for t in (x, w, g)])
    ours = both(Recipe())
    y, back = jax.vjp(delayed, x, w, amaxes)
    theirs = y, *back(g)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) < 0.02 * np.linalg.norm(np.float64(b))
    np.testing.assert_array_equal(ours[3], theirs[3])


def test_each_block_is_multiplied_with_its_scales():
    """By a loop over blocks in float64, which quantizes by the decoder's functions."""
    x, w, _ = operands()
    y = both(Recipe("blocks"))[0]
    expected = np.zeros(y.shape)
    for k in range(0, x.shape[1], 128):
        for n in range(0, w.shape[0], 128):
            w_block = w[n : n + 128, k : k + 128]
            w_scale = scale_of(jnp.abs(w_block), e4m3)
            for m in range(len(x)):
                row = x[m : m + 1, k : k + 128].astype(f32)
                x_scale = scale_of(jnp.abs(row), e4m3)
                codes_of = (row / x_scale).astype(e4m3), (w_block / w_scale).astype(e4m3)
                made = product(*codes_of, jnp.float32(1), jnp.float32(1), f32)
                expected[m, n : n + 128] += np.float64(made * x_scale * w_scale)[0]
    # y is rounded to bf16.
    assert np.linalg.norm(np.float64(y) - expected) < 2**-8 * np.linalg.norm(expected)


def test_blocks_keep_the_small_numbers_beside_a_large_channel():
    """Of the two other blocks of K, that is: a scale for each tensor loses them there too."""
    x, w, _ = operands()
    large = np.zeros(x.shape[1], bool)
    large[:128] = True
    x = jnp.asarray(np.where(large, np.asarray(x, np.float32), 1e-3), bf16)
    amaxes = jnp.stack([jnp.full(16, jnp.max(jnp.abs(t)).astype(f32)) for t in (x, w, w)])

    def gradient(scaling):
        return jax.vjp(lambda w: multiplier(Recipe(scaling))(x, w, amaxes), w)[1]

    rest = {}
    for scaling in ("delayed", "blocks"):
        (found,) = gradient(scaling)(jnp.ones((128, 256), bf16))
        rest[scaling] = np.abs(np.float64(found)[:, 128:]).max()
    assert rest["delayed"] == 0 and rest["blocks"] > 0.1


def test_frozen_histories_stay():
    before = jnp.full((3, 16), 2.0)
    np.testing.assert_array_equal(both(Recipe("frozen"), before)[3], before)
    after = both(Recipe("delayed"), before)[3]
    np.testing.assert_array_equal(after[:, 1:], before[:, :-1])
    assert np.all(after[:, 0] != before[:, 0])


def test_formats_are_those_of_the_recipe():
    """E5M2 has two bits of fraction, E4M3 three: the error doubles."""
    x, w, g = (np.float64(t) for t in operands())

    def error(of, exact, recipe):
        return np.linalg.norm(np.float64(both(recipe)[of]) - exact) / np.linalg.norm(exact)

    forward = [error(0, x @ w.T, Recipe(forward=dtype)) for dtype in (e4m3, e5m2)]
    backward = [error(1, g @ w, Recipe(backward=dtype)) for dtype in (e4m3, e5m2)]
    assert 1.5 < forward[1] / forward[0] < 2.5
    assert 1.2 < backward[1] / backward[0] < 2.5  # w stays in E4M3


def test_another_scaling_is_refused():
    with pytest.raises(ValueError, match="one of delayed, current, blocks, frozen"):
        multiplier(Recipe("delay"))


def test_sizes_that_blocks_do_not_fill_are_refused():
    x, w, g = operands(m=64)
    with pytest.raises(ValueError, match="must be multiples of 128"):
        multiplier(Recipe("blocks"))(x, w, jnp.zeros((3, 16)))


# Text and runs ------------------------------------------------------------------------------------


def test_the_text_is_ascii_and_the_unseen_part_is_not_trained_on():
    every = text.letters()
    assert 300_000 < len(every) < 500_000 and every.max() < runs.SIZES["letters"]
    random = np.random.default_rng(0)
    seen = every[: -text.UNSEEN].tobytes()
    for row in text.batch(random, 8, 64):
        assert row.astype(np.uint8).tobytes() in seen
    for row in text.unseen(8, 64):
        assert row.astype(np.uint8).tobytes() not in seen


def test_a_run_is_the_same_again_and_another_seed_is_not():
    way = runs.WAYS["bf16"]
    first, again, other = ([step.loss for step in runs.steps(way, seed, 3)] for seed in (0, 0, 1))
    assert first == again and first != other


def test_an_outlier_changes_the_range_and_not_the_function():
    """Of f32, whose products have no rounding that a power of two could change."""
    state = new_state(runs.WAYS["f32"].decoder, runs.OPTIMIZER, jax.random.key(0))
    changed = state
    for number in range(3 * 12 + 1):
        changed = runs.outlier("1", 0, 12)(number, changed)
    before, after = (
        runs.unseen_loss(runs.WAYS["f32"].decoder, s.weights, {}) for s in (state, changed)
    )
    assert before == after
    x = [runs.inputs(s.weights, runs.texts(0, 0))["1.down"] for s in (state, changed)]
    np.testing.assert_array_equal(x[1][:, 0], 16 * x[0][:, 0])
    np.testing.assert_array_equal(x[1][:, 1:], x[0][:, 1:])


def test_frozen_scales_stay_from_that_step_on():
    kept = [
        step.state.amaxes["0.qkv"] + 0 for step in runs.steps(runs.WAYS["delayed"], 0, 4, None, 2)
    ]
    assert np.any(kept[0] != kept[1])
    np.testing.assert_array_equal(kept[1], kept[3])


def test_noise_is_measured_against_f32():
    decoder = runs.WAYS["f32"].decoder
    state = new_state(decoder, runs.OPTIMIZER, jax.random.key(0))
    found = runs.signal_to_noise(decoder, state, runs.texts(0, 0))
    assert set(found) == set(state.weights) and set(found.values()) == {float("inf")}
    coarse = runs.WAYS["bf16"].decoder
    assert 20 < runs.signal_to_noise(coarse, state, runs.texts(0, 0))["0.up"] < 60


def test_flushed_counts_what_becomes_zero():
    x = np.array([1.0, 2.0**-9, 2.0**-11, 0.0])
    assert runs.flushed(x, 1.0) == 0.25  # half of the least subnormal number is 2**-10
    assert runs.flushed(x, 8.0) == 0.5


@pytest.mark.parametrize("name", ["embedding in FP8", "norms of FP8", "scores in FP8"])
def test_what_is_rounded_changes_the_loss(name):
    first, plain = (
        [step.loss for step in runs.steps(runs.WAYS[way], 0, 2)] for way in (name, "delayed")
    )
    assert first != plain and np.allclose(first, plain, rtol=0.1)


def test_the_gradient_passes_a_rounding():
    x = jnp.linspace(-3, 3, 50)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(runs.rounded(x) * x[0]))(x)[1:], x[0])
    assert np.any(runs.rounded(x) != x)
    assert len(np.unique(np.asarray(runs.rounded(x)))) < 50


def test_a_way_is_compiled_once_for_all_seeds():
    ways = [runs.WAYS["delayed"].decoder for _ in range(2)]
    assert ways[0] == ways[1] and hash(ways[0]) == hash(ways[1])
