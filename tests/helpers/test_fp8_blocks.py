"""The layer with scales for blocks: its gradients, and what a Hopper makes of a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect

from fp8_blocks import block_linear

bf16, f32 = jnp.bfloat16, jnp.float32
WAYS = ["interpret", "batched", "dequantized"]
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")


def tensors(m: int = 128, n: int = 128, k: int = 256) -> list[jax.Array]:
    """x with a large feature and a large token, w, and a small gradient with a large token."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), bf16).at[:, 5].multiply(300).at[7].multiply(300)
    g = jax.random.normal(keys[2], (m, n), bf16).at[3].multiply(300) * 1e-5
    return [x, jax.random.normal(keys[1], (n, k)), g]


def step(by: str, x, w, g):
    y, pull = jax.vjp(functools.partial(block_linear, by=by), x, w)
    return y, *pull(g)


def error(found, expected) -> float:
    found, expected = np.float64(found), np.float64(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("by", WAYS)
def test_all_three_products_are_near_those_of_float64(by):
    x, w, g = tensors()
    found = step(by, x, w, g)
    wide = [np.float64(tensor) for tensor in (x, w, g)]
    expected = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    assert all(0.01 < error(*pair) < 0.045 for pair in zip(found, expected, strict=True))
    assert [one.dtype for one in found] == [bf16, bf16, f32]
    if by == "interpret":  # the kernels' codes and sums are XLA's
        batched = step("batched", x, w, g)
        assert all(error(*pair) < 1e-4 for pair in zip(found, batched, strict=True))


def test_a_step_reads_each_tensor_once_and_multiplies_three_times_in_fp8():
    x, w, g = tensors(512, 256, 384)
    seen = inspect(functools.partial(step, "mosaic"), x, w, g, target="H100")
    assert [row.math_dtype for row in seen.report.rows] == ["f8e4m3fn"] * 3
    passes = [line.nbytes for line in seen.ledger if line.what == "quantize"]
    assert len(passes) == 3
    # It is read, two codes are written for each number, and of 1 x 128 two scales in f32.
    read = sum(tensor.nbytes + tensor.size * (2 + 2 * 4 / 128) for tensor in (x, w, g))
    assert sum(passes) == read


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiples of 128, not 100, 128 and 256: pad with zeros"):
        block_linear(jnp.zeros((100, 256)), jnp.zeros((128, 256)))
