"""The transformer layer: what it computes, that it learns in each precision, and what it is
compiled to at its size."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from fp8lens.report.gemms import GemmReport
from helpers import aot_compile, report_gemms
from helpers.models.gpt import GPTLayer, by_function, train_state, train_step
from tests.weekly import weekly

from fp8_linear import fp8_current

f32, bf16 = jnp.float32, jnp.bfloat16
PRECISIONS = {
    "f32": {"dtype": f32},
    "bf16": {"dtype": bf16},
    "bf16+fp8": {"dtype": bf16, "fp8": True},
    "by a function": {"dtype": bf16, "product": by_function(fp8_current)},
}
SMALL = functools.partial(GPTLayer, hidden=64, heads=4)
META = fp8_ops.OVERWRITE_WITH_GRADIENT


def batch(dtype=f32, seed=0, shape=(2, 32, 64)):
    return [
        jax.random.normal(key, shape, bf16).astype(dtype)
        for key in jax.random.split(jax.random.key(seed))
    ]


# What it computes ---------------------------------------------------------------------------------


def by_hand(params, x, heads, causal):
    """The layer in float64 NumPy. Biases and norms are those of `params`."""

    def dense(name, x):
        return x @ np.float64(params[name]["kernel"]) + np.float64(params[name]["bias"])

    def norm(name, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * np.float64(params[name]["scale"]) + np.float64(params[name]["bias"])

    x = np.float64(x)
    b, s, h = x.shape
    q, k, v = np.split(dense("qkv", norm("norm_1", x)).reshape(b, s, heads, 3 * h // heads), 3, -1)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(h // heads)
    if causal:
        scores = np.where(np.tri(s, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + dense("projection", np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, s, h))
    m = dense("up", norm("norm_2", x))
    return x + dense("down", 0.5 * m * (1 + np.tanh(np.sqrt(2 / np.pi) * (m + 0.044715 * m**3))))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_layer_of_the_quickstart(causal):
    """Two layer norms, one projection to q, k and v, attention, an MLP of four times the width with
    gelu, residuals."""
    layer, (x, y) = SMALL(dtype=f32, causal=causal), batch()
    state, _ = train_step(
        train_state(layer, x), x, y
    )  # after a step no bias is zero and no norm's scale one
    expected = by_hand(state.params["params"], x, 4, causal)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(
            jax.jit(layer.apply)(state.params, x), expected, rtol=0, atol=2e-5
        )
    for dtype, fp8, tolerance in ((bf16, False, 0.02), (bf16, True, 0.1)):
        other = SMALL(dtype=dtype, fp8=fp8, causal=causal)
        meta = {META: train_state(other, x).params[META]} if fp8 else {}
        error = np.abs(np.float64(jax.jit(other.apply)(state.params | meta, x)) - expected)
        assert 1e-3 < error.max() and error.mean() < tolerance * np.abs(expected).mean()


# That it learns -----------------------------------------------------------------------------------


@weekly
def test_the_loss_falls_alike_in_each_precision():
    losses = {}
    for name, fields in PRECISIONS.items():
        layer = SMALL(**fields)
        x, y = batch(layer.dtype)
        state, losses[name] = train_state(layer, x), []
        for _ in range(20):
            state, loss = train_step(state, x, y)
            assert loss.dtype == f32
            losses[name].append(float(loss))
        assert all(after < before for before, after in itertools.pairwise(losses[name])), (
            name,
            losses[name],
        )
        assert losses[name][-1] < 0.75 * losses[name][0]
    fallen = {name: row[0] - row[-1] for name, row in losses.items()}
    assert fallen["bf16"] == pytest.approx(fallen["f32"], rel=0.01)
    for name in ("bf16+fp8", "by a function"):
        assert fallen[name] == pytest.approx(fallen["bf16"], rel=0.05)
        assert fallen[name] != fallen["bf16"]


def test_what_does_not_fit_is_refused():
    x = jnp.ones((2, 32, 48))
    for layer, says in (
        (SMALL(), r"takes \[batch, sequence, 64\].*got \[2, 32, 48\]"),
        (GPTLayer(48, 4, attention="fused", causal=True), "masks nothing"),
    ):
        with pytest.raises(ValueError, match=says):
            jax.eval_shape(layer.init, jax.random.key(0), x)


# What it is compiled to ---------------------------------------------------------------------------

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler has wheels for Linux only"
)


@pytest.fixture
def compiled(monkeypatch):
    """compiled(precision): the layer at its size for an H200, attention by cuDNN. JAX
    asks the machine for that before it lowers; XLA needs none.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(attention, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(attention, "is_cuda_compute_capability_equal", lambda capability: False)

    def compile_layer(name: str):
        layer = GPTLayer(**PRECISIONS[name], attention="cudnn")
        x = jax.ShapeDtypeStruct((4, 2048, 4096), layer.dtype)
        state = jax.eval_shape(functools.partial(train_state, layer), x)
        return aot_compile(layer.apply, state.params, x, target="H200")

    return compile_layer


def dense(report: GemmReport) -> list[tuple]:
    """Sizes and types of what is no attention."""
    return sorted(
        (sorted((r.m, r.n, r.k)), r.math_dtype) for r in report.rows if r.library == "cublasLt"
    )


SIZES = [[4096, 4096, 8192], [4096, 8192, 12288], *[[4096, 8192, 16384]] * 2]


@linux
@pytest.mark.parametrize("name, types", [("bf16", ("bf16",)), ("bf16+fp8", ("f8e4m3fn",))])
def test_forward_is_four_matmuls_and_fused_attention(compiled, name, types):
    report = report_gemms(compiled(name))
    assert dense(report) == sorted((size, t) for size in SIZES for t in types)
    assert [r.library for r in report.rows].count("cudnn") == len(report.rows) - 4 == 2
    assert all("BIAS" in r.epilogue for r in report.rows if r.library == "cublasLt")
    (up,) = [r for r in report.rows if r.path.startswith("GPTLayer/up")]
    assert (
        up.epilogue == "BIAS_GELU" and up.out_dtype == types[0]
    )  # gelu, and with FP8 the next input's conversion
