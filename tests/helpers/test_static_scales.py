"""Scales that are never measured: unit scaling keeps sizes and gradients, propagated programs
compute what they did. What XLA makes of them: chapter 13."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.training import runs, shakespeare

import fp8_decoder
import scale_propagation
from fp8_decoder import Decoder, new_state, new_weights
from scale_propagation import Pair, PropagatedDecoder, pair, propagated, value
from unit_scaling import Casts, UnitDecoder, static_linear

SMALL = runs.SIZES | {"width": 32, "heads": 2, "hidden": 64, "blocks": 1}

# Propagated programs ------------------------------------------------------------------------------

STEPS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: 0.7 * x - y,
    "mul": lambda x, y: x * y / 3,
    "div": lambda x, y: x / (jnp.abs(y) + 0.1),
    "max": lambda x, y: jnp.maximum(x, y),
    "mask": lambda x, y: jnp.max(jnp.where(x > y, x, -1e30), axis=1, keepdims=True) + y,
    "softmax": lambda x, y: jax.nn.softmax(x, axis=-1) * y,
    "norm": lambda x, y: x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-3) + y,
    "root": lambda x, y: jnp.sqrt(jnp.abs(x) + jnp.square(y)),
    "silu": lambda x, y: jax.nn.silu(jnp.tanh(x)) + jnp.log1p(jnp.exp(-jnp.abs(y))),
    "product": lambda x, y: jnp.tanh(x) @ jnp.tanh(y).T @ y,
    "places": lambda x, y: jnp.concatenate([x[:, 3:], y[:, :3]], axis=1)[jnp.array([1, 0, 3, 2])],
    "scatter": lambda x, y: x.at[jnp.array([0, 2, 0])].add(y[:3]),
    "held": lambda x, y: sum(jax.lax.optimization_barrier((x, y))),
    "measured": lambda x, y: scale_propagation.rescale(x) - y,
}


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.tuples(st.integers(-20, 20), st.integers(-20, 20)),
    st.booleans(),
)
def test_a_propagated_program_computes_the_same(names, exponents, backward):
    """Also its gradient, and whatever the scales are."""
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 8))

    def program(x, y):
        for name in names:
            x, y = STEPS[name](x, y), x
        return jnp.sum(x * y)

    f = jax.value_and_grad(program, (0, 1)) if backward else program
    pairs = [pair(one, 2.0**exponent) for one, exponent in zip((x, y), exponents, strict=True)]
    made = propagated(f)(*pairs)
    made = jax.tree.map(value, made, is_leaf=lambda one: isinstance(one, Pair))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(f(x, y)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * (1e-3 + np.abs(other).max()))


@functools.cache
def tokens() -> jax.Array:
    return jnp.asarray(shakespeare.unseen(2, 32))


def test_the_decoders_gradients_are_the_same():
    decoders = [kind("f32", **SMALL) for kind in (PropagatedDecoder, Decoder)]
    weights = new_weights(decoders[1], jax.random.key(0))
    run = jax.jit(fp8_decoder.gradients, static_argnums=0)
    made, expected = (run(one, weights, {}, tokens()) for one in decoders)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, made, expected)


def test_what_no_rule_is_written_for_is_named():
    x = pair(jnp.ones(4), 2.0)
    with pytest.raises(NotImplementedError, match="'sort': write one with @rule"):
        propagated(jnp.sort)(x)
    with pytest.raises(ValueError, match="3 is no power of two: give 4"):
        pair(jnp.ones(4), 3)


# Unit scaling -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="give x .* and w"):
        static_linear(Casts(), jnp.ones((2, 16)), jnp.ones((16, 8)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        UnitDecoder(branch=1.0)


@pytest.mark.parametrize("name", ["unit scaled", "munit scaled", "propagated"])
def test_before_training_almost_nothing_saturates_or_vanishes(name):
    """Of what is cast to FP8, in both passes."""
    way = runs.WAYS[name]._replace(changed=tuple(SMALL.items()))
    optimizer = runs.optimizer(runs.SHORT, way.static != "propagated")
    state = new_state(way.decoder, optimizer, jax.random.key(0))
    assert state.amaxes == {}
    for cast in runs.casts(way.decoder, state, shakespeare.unseen(2, 32)):
        assert 0.02 < cast.size < 5 and cast.saturated == 0 and cast.lost < 0.02, cast
