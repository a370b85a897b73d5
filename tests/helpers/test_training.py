"""What chapter 14 trains with: the fast model of the tensor core, the recipes, the runs."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numerics.tensor_core import tensor_core_dot
from helpers.training import runs, shakespeare
from helpers.training.multipliers import Recipe, multiplier
from tests.course.answers import code_cells, needed

from fp8_decoder import delayed, new_state
from fp8_linear import e4m3, e5m2

f32, bf16 = jnp.float32, jnp.bfloat16

# The tensor core's sums ---------------------------------------------------------------------------


def codes(seed: int, rows: int, k: int, dtype) -> jax.Array:
    """Of all magnitudes: also subnormal, zero, and the largest."""
    keys = jax.random.split(jax.random.key(seed), 2)
    spread = jnp.exp2(jax.random.randint(keys[0], (rows, k), -14, 8).astype(f32))
    wide = jax.random.normal(keys[1], (rows, k)) * spread
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(wide, -largest, largest).astype(dtype).at[0, ::3].set(0)


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    """The model as chapter 13 writes it."""
    space: dict[str, Any] = {}
    for cell in needed(code_cells("13_scaling_strategies"), {"hopper_dot", "promoted_sums"}):
        exec(cell, space)
    return space


@pytest.mark.parametrize("formats", [*itertools.product((e4m3, e5m2), repeat=2)])
def test_the_fast_model_has_the_bits_of_the_chapters(chapter, formats):
    a, b = codes(0, 24, 256, formats[0]), codes(1, 40, 256, formats[1])
    np.testing.assert_array_equal(tensor_core_dot(a, b), chapter["hopper_dot"](a, b))
    promoted = chapter["promoted_sums"](a, b)[-1]
    np.testing.assert_array_equal(tensor_core_dot(a, b, every=128), promoted)


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
@pytest.mark.parametrize("scaling", ["delayed", "current", "blocks", "frozen"])
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


def test_frozen_histories_stay():
    before = jnp.full((3, 16), 2.0)
    np.testing.assert_array_equal(both(Recipe("frozen"), before)[3], before)
    after = both(Recipe("delayed"), before)[3]
    np.testing.assert_array_equal(after[:, 1:], before[:, :-1])
    assert np.all(after[:, 0] != before[:, 0])


# Text and runs ------------------------------------------------------------------------------------


def test_the_text_is_ascii_and_the_unseen_part_is_not_trained_on():
    every = shakespeare.letters()
    assert 300_000 < len(every) < 500_000 and every.max() < runs.SIZES["letters"]
    random = np.random.default_rng(0)
    seen = every[: -shakespeare.UNSEEN].tobytes()
    for row in shakespeare.batch(random, 8, 64):
        assert row.astype(np.uint8).tobytes() in seen
    for row in shakespeare.unseen(8, 64):
        assert row.astype(np.uint8).tobytes() not in seen


def test_texts_of_the_task_keep_its_rule_and_the_least_loss_knows_its_odds():
    tokens = shakespeare.unseen_backcopy(64, 128)
    assert np.all(tokens[:, 0] == shakespeare.BEGIN) and np.all(tokens[:, 1:] != shakespeare.BEGIN)
    triggers = [*shakespeare.TRIGGERS]
    copied = np.isin(tokens[:, 2:-1], triggers) & ~np.isin(tokens[:, 1:-2], triggers)
    assert 0.1 < copied.mean() < 0.3
    np.testing.assert_array_equal(tokens[:, 3:][copied], tokens[:, 1:-2][copied])
    assert 1 < shakespeare.least_loss(tokens) < 3
    # A letter that breaks the rule is one that these odds exclude.
    row, place = np.argwhere(copied)[0]
    tokens[row, place + 3] = tokens[row, place + 2]
    with np.errstate(divide="ignore"):
        assert shakespeare.least_loss(tokens) == np.inf


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
