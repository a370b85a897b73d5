"""The layers with scales for blocks: gradients, and what a chip makes of a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect

from fp8_blocks import block_linear
from mxfp8 import mx_linear

bf16, f32 = jnp.bfloat16, jnp.float32
# Each layer by kernels, and by XLA's of the same codes and sums; then otherwise.
WAYS = {
    block_linear: ["interpret", "batched", "dequantized"],
    mx_linear: ["interpret", "xla"],
}
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")


def tensors(m: int = 128, n: int = 128, k: int = 256) -> list[jax.Array]:
    """x with a large feature and a large token, w, and a small gradient with a large token."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), bf16).at[:, 5].multiply(300).at[7].multiply(300)
    g = jax.random.normal(keys[2], (m, n), bf16).at[3].multiply(300) * 1e-5
    return [x, jax.random.normal(keys[1], (n, k)), g]


def step(layer, by: str, x, w, g):
    y, pull = jax.vjp(functools.partial(layer, by=by), x, w)
    return y, *pull(g)


def error(found, expected) -> float:
    found, expected = np.float64(found), np.float64(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("layer", WAYS)
def test_all_three_products_are_near_those_of_float64(layer):
    x, w, g = tensors()
    wide = [np.float64(tensor) for tensor in (x, w, g)]
    expected = wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0]
    found = {by: step(layer, by, x, w, g) for by in WAYS[layer]}
    for made in found.values():
        assert all(0.01 < error(*pair) < 0.045 for pair in zip(made, expected, strict=True))
        assert [one.dtype for one in made] == [bf16, bf16, f32]
    by_hand, by_xla, *_ = found.values()
    assert all(error(*pair) < 1e-4 for pair in zip(by_hand, by_xla, strict=True))


@pytest.mark.parametrize(
    "layer, target, scales", [(block_linear, "H100", 4 / 128), (mx_linear, "B200", 1 / 32)]
)
def test_a_step_reads_each_tensor_once_and_multiplies_three_times_in_fp8(layer, target, scales):
    x, w, g = tensors(512, 256, 384)
    seen = inspect(functools.partial(step, layer, "mosaic"), x, w, g, target=target, gemm="auto")
    assert [row.math_dtype for row in seen.report.rows] == ["f8e4m3fn"] * 3
    passes = [line.nbytes for line in seen.ledger if line.what == "quantize"]
    assert len(passes) == 3
    assert {k.kernel.math_dtype for k in seen.ledger if k.what == "matmul"} == {"f8e4m3fn"}
    # It is read, and two codes are written for each number, with their part of a scale.
    assert sum(passes) == sum(t.nbytes + 2 * t.size * (1 + scales) for t in (x, w, g))


def test_sizes_that_do_not_fit_are_refused():
    for layer in WAYS:
        with pytest.raises(ValueError, match="not 100, 128 and 256: pad with zeros"):
            layer(jnp.zeros((100, 256)), jnp.zeros((128, 256)))
