"""The transformer layer: what it computes, that it learns in each precision, and what it is
compiled to at its size."""

import contextlib
import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from flax.traverse_util import flatten_dict

from fp8lens import inspect
from fp8lens.matmul.kernels import roofline_seconds
from fp8lens.report.gemms import GemmReport
from helpers import aot_compile, report_gemms
from helpers.models.gpt import GPTLayer, train_state, train_step
from helpers.records.results import goals
from tests.weekly import NIGHTLY, weekly
from tools.gpu.training import fast_backward

f32, bf16 = jnp.float32, jnp.bfloat16
PRECISIONS = {
    "f32": {"dtype": f32},
    "bf16": {"dtype": bf16},
    "bf16+fp8": {"dtype": bf16, "fp8": True},
}
SMALL = functools.partial(GPTLayer, hidden=64, heads=4)
META = fp8_ops.OVERWRITE_WITH_GRADIENT
DENSE = {"qkv", "projection", "up", "down"}


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


def test_parameters_are_f32_and_the_result_has_the_types_of_the_layer():
    shapes = set()
    for fields in PRECISIONS.values():
        layer = SMALL(**fields)
        params = jax.eval_shape(functools.partial(train_state, layer), batch(layer.dtype)[0]).params
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(f32)}
        assert jax.eval_shape(layer.apply, params, batch(f32)[0]).dtype == layer.dtype
        shapes.add(str(jax.tree.map(lambda leaf: leaf.shape, params["params"])))
        assert set(params.get(META, ())) == (DENSE if layer.fp8 else set())
        assert sum(leaf.size for leaf in jax.tree.leaves(params["params"])) == 12 * 64**2 + 13 * 64
    assert len(shapes) == 1  # one layer: the same parameters in each precision


@pytest.mark.parametrize(
    "fields, shape", [({}, (2, 32, 48)), ({}, (32, 64)), ({"heads": 3}, (2, 32, 64))]
)
def test_sizes_that_do_not_fit_are_refused(fields, shape):
    layer = GPTLayer(**{"hidden": 64, "heads": 4} | fields)
    with pytest.raises(
        ValueError, match=r"takes \[batch, sequence, 64\].*got \[.*Give hidden= and heads="
    ):
        jax.eval_shape(layer.init, jax.random.key(0), jnp.ones(shape))


def test_without_flax_the_import_names_the_fix():
    code = "import sys; sys.modules['flax'] = None; import helpers.models.gpt"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert (
        run.returncode
        and "helpers.models.gpt needs Flax" in run.stderr
        and "pip install flax" in run.stderr
    )
    code = "import sys, helpers; assert not {'flax', 'optax'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent.parent, check=True
    )


# That it learns -----------------------------------------------------------------------------------


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
    assert (
        fallen["bf16+fp8"] == pytest.approx(fallen["bf16"], rel=0.05)
        and fallen["bf16+fp8"] != fallen["bf16"]
    )


def test_scales_follow_the_largest_magnitudes_a_step_later():
    layer = SMALL(fp8=True)
    x, y = batch(bf16)
    states = [train_state(layer, x)]
    for _ in range(3):  # a step uses up its state
        states.append(train_step(jax.tree.map(jnp.copy, states[-1]), x, y)[0])
    metas = [flatten_dict(state.params[META], sep="/") for state in states]
    kernels = {
        name: np.float32(bf16(jnp.abs(states[0].params["params"][name]["kernel"]).max()))
        for name in DENSE
    }
    for key, first in metas[0].items():
        one, two, three = (np.asarray(meta[key]) for meta in metas[1:])
        if key.endswith("_scale"):
            history = np.asarray(metas[1][key.removesuffix("_scale") + "_amax_history"])
            largest = jnp.finfo(jnp.float8_e5m2 if "output_grad" in key else jnp.float8_e4m3fn).max
            assert first == one == 1, key  # the first step knows no magnitude yet
            np.testing.assert_allclose(
                two, history.max() / np.float32(largest), rtol=1e-6, err_msg=key
            )
        else:
            assert not first.any() and one[0] > 0 and not one[1:].any(), key
            assert np.count_nonzero(two) == 2 and np.count_nonzero(three) == 3, key
            if "kernel" in key:
                assert one[0] == kernels[key.split("/")[0]]
    before, after = (state.params["params"]["up"]["kernel"] for state in states[1:3])
    assert (before != after).any()


def test_a_step_uses_up_its_state_and_is_traced_once():
    layer = SMALL(fp8=True, hidden=32)
    x, y = batch(bf16, shape=(1, 16, 32))
    state = first = train_state(layer, x)
    traced = train_step._cache_size()
    for _ in range(3):
        state, _ = train_step(state, x, y)
    assert train_step._cache_size() == traced + 1
    assert int(state.step) == 3
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


# What it is compiled to ---------------------------------------------------------------------------

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler has wheels for Linux only"
)


@pytest.fixture(scope="module")
def cudnn():
    """cudnn(version): as on a Hopper with this cuDNN, or with none. JAX asks the machine for it
    before it lowers; XLA needs none."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    @contextlib.contextmanager
    def installed(version: int | None = 91300):
        def found() -> int:
            if version is None:
                raise RuntimeError("cuDNN not found.")  # as JAX says it
            return version

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "check_cudnn_version", found)
            patch.setattr(attention, "check_compute_capability", lambda capability: True)
            patch.setattr(attention, "is_cuda_compute_capability_equal", lambda capability: False)
            yield

    return installed


@pytest.fixture(scope="module")
def compiled(cudnn):
    """compiled(precision, training): the layer at its size for an H200, attention by cuDNN where it
    is bf16."""

    @functools.cache
    def compile_layer(name: str, training: bool):
        layer = GPTLayer(**PRECISIONS[name], attention="xla" if name == "f32" else "cudnn")
        x = jax.ShapeDtypeStruct((4, 2048, 4096), layer.dtype)
        state = jax.eval_shape(functools.partial(train_state, layer), x)
        args = (train_step, state, x, x) if training else (layer.apply, state.params, x)
        with cudnn():
            return aot_compile(*args, target="H200")

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
    report = report_gemms(compiled(name, False))
    assert dense(report) == sorted((size, t) for size in SIZES for t in types)
    assert [r.library for r in report.rows].count("cudnn") == len(report.rows) - 4 == 2
    assert all("BIAS" in r.epilogue for r in report.rows if r.library == "cublasLt")
    (up,) = [r for r in report.rows if r.path.startswith("GPTLayer/up")]
    assert (
        up.epilogue == "BIAS_GELU" and up.out_dtype == types[0]
    )  # gelu, and with FP8 the next input's conversion


@linux
def test_attention_in_one_kernel_has_a_reason_of_its_own(cudnn):
    """JAX asks the machine for cuDNN, and where there is none the error says how to go on."""
    heads = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with cudnn(version=None), pytest.raises(RuntimeError) as missing:
        inspect(attention, heads, heads, heads)
    assert "implementation='xla'" in missing.value.__notes__[-1]
    with cudnn():
        reasons = inspect(attention, heads, heads, heads).reasons
    assert [reason.rule for reason in reasons] == ["fused-attention"] * 2
    assert "one kernel of cuDNN, which multiplies bf16" in reasons[0].reason


@linux
@weekly  # chapter 11 compiles that step with another attention
def test_training_step_is_twelve_fp8_matmuls_and_fused_attention(compiled):
    report = report_gemms(compiled("bf16+fp8", True))
    # Forward and both gradients of each: the result's gradient is E5M2, its other factor E4M3.
    fp8 = report.fp8_rows
    assert sorted(sorted((r.m, r.n, r.k)) for r in fp8) == sorted(
        size for size in SIZES for _ in range(3)
    )
    backward = [r for r in fp8 if r.path.endswith("backward")]
    assert len(backward) == 8 and all(
        {r.lhs_dtype, r.rhs_dtype} == {"f8e4m3fn", "f8e5m2"} for r in backward
    )
    assert all(r.lhs_dtype == r.rhs_dtype == "f8e4m3fn" for r in fp8 if r not in backward)
    # Flax asks for exact accumulation of gradients, which may cost speed on a Hopper:
    # tools/gpu/training.py measures it.
    assert {r.precision for r in backward} == {"HIGHEST"}
    assert {r.library for r in report.rows if r not in fp8} == {"cudnn"}
    assert len(report.rows) - len(fp8) == 7 and report.fp8_flops_share > 0.9


@linux
@pytest.mark.skipif(
    not NIGHTLY,
    reason="compiles the step in bf16 too, which only another XLA changes: NIGHTLY=1 does",
)
def test_the_least_time_of_a_step_says_what_fp8_can_save(compiled):
    """At full bandwidth and dense peak, with cuDNN's attention in both: no half, for attention
    stays as it is, and so does what moves bytes. XLA keeps FP8 operands in two orders, and moves
    about a tenth more of them than in bf16."""
    least = {}
    (goal,) = goals(
        "train", "training step", Path(__file__).parent.parent.parent / "notebooks" / "results"
    )
    for chip, share in goal.roofline.items():
        least = {
            name: roofline_seconds(compiled(name, True), chip) for name in ("bf16", "bf16+fp8")
        }
        assert least["bf16+fp8"] / least["bf16"] == pytest.approx(share, abs=6e-4)
        assert share < goal.most[chip] < 1.02 * share
    reports = {name: report_gemms(compiled(name, True)) for name in least}
    assert 1 < reports["bf16+fp8"].bytes_moved / reports["bf16"].bytes_moved < 1.15
    assert dense(reports["bf16"]) == sorted((size, "bf16") for size in SIZES for _ in range(3))


@linux
def test_f32_runs_on_the_tensor_cores(compiled):
    report = report_gemms(compiled("f32", False))
    assert {r.math_dtype for r in report.rows} == {"tf32"} and len(report.rows) == 6


# What times it ------------------------------------------------------------------------------------


def test_the_fast_backward_pass_differs_in_its_accumulation_alone():
    def precisions() -> list[str]:
        layer = SMALL(fp8=True)
        state = jax.eval_shape(functools.partial(train_state, layer), batch(bf16)[0])
        step = jax.make_jaxpr(lambda *args: train_step.__wrapped__(*args))(state, *batch(bf16))
        return re.findall(r"precision=(\w+|\(.*?\))", str(step))

    exact = precisions()
    with fast_backward():
        fast = precisions()
    assert sum("HIGHEST" in p for p in exact) == 8 and not any("HIGHEST" in p for p in fast)
    assert len(fast) == len(exact) and precisions() == exact
