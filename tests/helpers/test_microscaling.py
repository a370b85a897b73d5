"""Block formats: what is dequantized is near, powers of two are rounded as they should, and JAX's
own quantizer agrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.numerics.microscaling import BLOCK_FORMATS, ROUNDING, to_blocks
from helpers.numerics.number_formats import code_values

MX = [name for name, form in BLOCK_FORMATS.items() if not form.per_tensor]


def some(seed=0, rows=64, columns=256):
    return np.random.default_rng(seed).standard_t(3, (rows, columns)).astype(np.float32)


def reach(form, blocks):
    """The largest number that each block can hold."""
    return form.element.largest * blocks.scales.astype(np.float64)


def amaxes(x, form):
    return np.abs(x).reshape(len(x), -1, form.block).max(axis=2).astype(np.float64)


@pytest.mark.parametrize("name", MX)
def test_rounded_up_a_scale_is_the_least_power_of_two_that_holds_the_block(name):
    form, x = BLOCK_FORMATS[name], some()
    x[0, :32], x[1, 5] = 0, 448 * 2.0**-9  # a block of zeros, and an exact power of two
    up = to_blocks(x, form, "up")
    held = reach(form, up)
    assert (amaxes(x, form) <= held).all()
    tight = amaxes(x, form) > held / 2
    assert tight[amaxes(x, form) > 0].all()


@pytest.mark.parametrize("name", MX)
def test_rounded_down_the_largest_power_of_two_is_kept(name):
    """As the specification says: 2**(floor(log2 amax) - that of the largest number)."""
    form, x = BLOCK_FORMATS[name], some(1)
    exponent = np.floor(np.log2(amaxes(x, form))) - np.floor(np.log2(form.element.largest))
    assert np.array_equal(to_blocks(x, form, "down").scales.astype(np.float64), np.exp2(exponent))


@pytest.mark.parametrize("rounding", ROUNDING)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_number_that_fits_is_rounded_to_the_nearest_code(name, rounding):
    form, x = BLOCK_FORMATS[name], some(2)
    blocks = to_blocks(x, form, rounding)
    wide = np.repeat(blocks.scales.astype(np.float64), form.block, axis=1) * float(blocks.of_tensor)
    values = code_values(form.element.jax)
    values = np.unique(values[np.isfinite(values)])
    scaled = np.clip(x / wide, values[0], values[-1])
    nearest = np.abs(scaled[..., None] - values).min(axis=-1)
    error = np.abs(blocks.codes.astype(np.float64) - scaled)
    assert np.allclose(error, nearest, rtol=1e-4, atol=1e-6)


def test_zeros_stay_zeros():
    for form in BLOCK_FORMATS.values():
        assert not to_blocks(np.zeros((2, 64)), form).dequantized().any()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has it for GPUs alone")
@pytest.mark.parametrize("mode, name", [("mxfp8", "MXFP8, E4M3"), ("mxfp4", "MXFP4")])
def test_jax_rounds_up(mode, name):
    x, w = (jnp.asarray(some(seed), jnp.bfloat16) for seed in (3, 4))
    configs = [jax.nn.get_scaled_dot_general_config(mode) for _ in range(3)]
    found = jax.nn.scaled_dot_general(x, w, (((1,), (1,)), ((), ())), jnp.float32, configs=configs)
    a, b = (to_blocks(v, BLOCK_FORMATS[name]).dequantized().astype(np.float64) for v in (x, w))
    bound = x.shape[1] * 2.0**-23 * (np.abs(a) @ np.abs(b).T)
    assert (np.abs(found - a @ b.T) <= bound).all()


def test_what_cannot_be_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of 32 do not fill 48: pad K"):
        to_blocks(np.ones((2, 48)), BLOCK_FORMATS["MXFP4"])
