"""The pass that makes MXFP8 along both dimensions: its bits are those of the plain quantizer, and
it is one kernel that moves each byte once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.microscaling import BLOCK_FORMATS, to_blocks

from block_pass import WIDE, block_pass
from fp8_blocks import in_blocks

bf16, f32 = jnp.bfloat16, jnp.float32
FORMATS = {"MXFP8, E4M3": jnp.float8_e4m3fn, "MXFP8, E5M2": jnp.float8_e5m2}
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")


def some(*shape, dtype=bf16):
    """Heavy tails, numbers of many sizes, and blocks whose amax is the largest code's, or zero."""
    random = np.random.default_rng(0)
    x = random.standard_t(3, shape) * np.exp2(random.integers(-40, 40, (shape[0], 1)))
    x[5, :32], x[7, 3], x[9, 40] = 0, 448 * 2.0**60, 57344 * 2.0**60
    return jnp.asarray(x, dtype)


def is_alike(codes, scales, expected):
    has_scale = np.abs(expected.codes.astype(np.float32)).reshape(*expected.scales.shape, 32).any(2)
    assert np.array_equal(np.asarray(codes, np.float32), expected.codes.astype(np.float32))
    found = np.asarray(scales).T.view(np.uint8)
    assert np.array_equal(found[has_scale], expected.scales.view(np.uint8)[has_scale])
    assert has_scale.mean() > 0.9


@pytest.mark.parametrize("name", FORMATS)
def test_both_copies_are_those_of_the_plain_quantizer(name):
    x = some(128, 256)
    made = block_pass(x, FORMATS[name], by="interpret")
    wide = np.asarray(x, np.float32)
    is_alike(made.codes, made.scales, to_blocks(wide, BLOCK_FORMATS[name]))
    is_alike(made.transposed, made.transposed_scales, to_blocks(wide.T, BLOCK_FORMATS[name]))


@pytest.mark.parametrize("squares", [False, True])
def test_blocks_of_128_are_those_that_xla_makes(squares):
    x = some(128, 256, dtype=f32)
    made = block_pass(x, by="interpret", block=WIDE, squares=squares)
    for found, of in (made[:2], x), (made[2:], x.T):
        expected = in_blocks(of, squares)
        assert np.array_equal(np.float32(found[0]), np.float32(expected.codes))
        assert np.array_equal(found[1], expected.scales)


def test_zeros_stay_zeros():
    made = block_pass(jnp.zeros((64, 128), bf16), by="interpret")
    assert not np.asarray(made.codes, np.float32).any()
    assert not np.isnan(np.asarray(made.scales, np.float32)).any()


@pytest.mark.parametrize("target", ["H100", "B200"])
def test_it_is_one_kernel_that_moves_each_byte_once(target):
    m, n = 512, 1024
    seen = inspect(block_pass, jax.ShapeDtypeStruct((m, n), bf16), target=target)
    (line,) = seen.ledger
    assert line.nbytes == m * n * (2 + 2 * 1) + 2 * m * n // 32


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"multiples of 64 rows and 128 columns, not \[63, 128\]"):
        block_pass(jnp.zeros((63, 128)))
