"""The layer in NVFP4: its format is the plain quantizer's, its rounding has no bias, and a
Blackwell multiplies all three products in FP4."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.microscaling import BLOCK_FORMATS, to_blocks

from nvfp4 import nvfp4_linear, rounded_stochastically, to_nvfp4

bf16, f32 = jnp.bfloat16, jnp.float32


def tensors(m: int = 64, n: int = 48, k: int = 96) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    x, g = (
        jax.random.normal(key, dims, bf16)
        for key, dims in zip(keys[:2], ((m, k), (m, n)), strict=True)
    )
    return [x, jax.random.normal(keys[2], (n, k)), g * 1e-4]


def step(x, w, g, **options):
    y, pull = jax.vjp(functools.partial(nvfp4_linear, **options), x, w)
    return y, *pull(g)


def test_codes_are_those_of_the_plain_quantizer_and_of_16_x_16():
    w = tensors()[1].at[2, 16:32].set(0)
    found, expected = to_nvfp4(w), to_blocks(w, BLOCK_FORMATS["NVFP4"])
    assert np.array_equal(np.float32(found.codes), np.float32(expected.codes))
    assert np.array_equal(np.float32(found.scales), np.float32(expected.scales))
    assert found.of_tensor == expected.of_tensor
    square, other = to_nvfp4(w, rows=16), to_nvfp4(w.T, rows=16)
    for one, two in zip(square.transposed, other, strict=True):
        assert np.array_equal(np.float32(one), np.float32(two))


def test_stochastic_rounding_has_no_bias():
    x = jnp.linspace(-6, 6, 97)
    keys = jax.random.split(jax.random.key(0), 4000)
    rounded = jax.vmap(functools.partial(rounded_stochastically, x))(keys)
    assert np.array_equal(rounded, np.float32(rounded.astype(jnp.float4_e2m1fn)))
    # Steps are at most 2: a mean of 4000 is off by 1 / 63 of one.
    assert np.abs(np.mean(rounded, axis=0) - x).max() < 5 / 63


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("by", ["dequantized", "scaled_matmul"])
def test_all_three_products_are_near_those_of_float64(by, whole):
    x, w, g = tensors()
    found = step(x, w, g, hadamard=whole, stochastic=whole, by=by)
    wide = [np.float64(tensor) for tensor in (x, w, g)]
    expected = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    for one, exact in zip(found, expected, strict=True):
        assert 0.05 < np.linalg.norm(np.float64(one) - exact) / np.linalg.norm(exact) < 0.25
    assert [one.dtype for one in found] == [bf16, bf16, f32]


def test_a_blackwell_multiplies_all_three_in_fp4_and_stores_no_random_bits():
    given = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in tensors(512, 256, 384)]
    seen = inspect(step, *given, target="B200", gemm="auto")
    types = [row.math_dtype for row in seen.report.rows]
    assert types.count("f4e2m1fn") == 3  # beside the transforms
    # An array of them would be 32 bits for each number.
    assert not [
        kernel for line in seen.ledger if re.search(r"u32\[\d{2}", kernel := line.kernel.result)
    ]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiples of 16, not 64, 48 and 100: pad with zeros"):
        nvfp4_linear(jnp.zeros((64, 100)), jnp.zeros((48, 100)))
