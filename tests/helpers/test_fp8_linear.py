"""The layer of chapter 09: its gradients, its state, and what a Hopper makes of it."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import jupytext
import numpy as np
import pytest

from helpers import assert_fp8_gemms
from helpers.numerics.number_formats import assert_matches_reference, matmul_reference, tolerance
from helpers.numerics.quantize import quantize

import fp8_linear as recipe
from fp8_linear import Amaxes, fp8_current, fp8_linear, new_amaxes, scale_of

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32


def tensors(m=48, n=80, k=112, dtype=f32, size=1.0):
    keys = jax.random.split(jax.random.key(3), 3)
    x, w, g = (
        jax.random.normal(key, dims, dtype)
        for key, dims in zip(keys, ((m, k), (n, k), (m, n)), strict=True)
    )
    return x, w.astype(f32), (size * g).astype(dtype)


def step(x, w, amaxes, g):
    y, pull = jax.vjp(fp8_linear, x, w, amaxes)
    return y, *pull(g)


def code_of(text: str) -> dict[str, str]:
    """Functions and classes without their docstrings: the chapter's stand in its text."""
    nodes = [n for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    for node in nodes:
        if ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return {node.name: ast.unparse(node) for node in nodes}


def test_it_is_what_chapter_08_writes():
    chapter = Path(recipe.__file__).parents[1] / "09_train_a_layer.md"
    cells = [cell for cell in jupytext.read(chapter).cells if cell.cell_type == "code"]
    written = {}
    for cell in cells:
        if not cell.metadata.get("tags"):  # what is folded is tried, and not built on
            written |= code_of(cell.source)
    ours = code_of(Path(recipe.__file__).read_text())
    both = written.keys() & ours.keys()
    assert {"Amaxes", "scale_of", "remember", "fp8_linear", "forward", "backward"} <= both
    assert {name: ours[name] for name in both} == {name: written[name] for name in both}


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("size", [1.0, 1e-20])
@pytest.mark.parametrize("dims", [(48, 80, 112), (1, 16, 32)])
def test_results_and_gradients_are_those_of_the_quantized_operands(dims, size, dtype):
    x, w, g = tensors(*dims, dtype, size)
    amaxes = jax.jit(step)(x, w, new_amaxes(4), g)[3]
    assert all(
        h.shape == (4,) and h[0] == jnp.max(jnp.abs(t)).astype(f32) and not h[1:].any()
        for h, t in zip(amaxes, (x, w, g), strict=True)
    )
    scales = [
        scale_of(history, kind) for history, kind in zip(amaxes, (e4m3, e4m3, e5m2), strict=True)
    ]
    x_q, w_q, g_q = map(quantize, (x, w, g), scales, (e4m3, e4m3, e5m2))
    y, x_gradient, w_gradient, _ = jax.jit(step)(x, w, amaxes, g)
    assert (y.dtype, x_gradient.dtype, w_gradient.dtype) == (dtype, dtype, f32)
    for got, left, right, s, t in (
        (y, x_q, w_q, 0, 1),
        (x_gradient, g_q, w_q.T, 2, 1),
        (w_gradient, g_q.T, x_q.T, 2, 0),
    ):
        value, magnitude = matmul_reference(left, right, scales[s], scales[t])
        allowed = tolerance(value, magnitude, left.shape[1], got.dtype, compute_dtype=dtype)
        assert_matches_reference(got, value, allowed)


@pytest.mark.parametrize("size", [1.0, 1e-20, 0.0])
def test_current_scaling_is_delayed_scaling_that_knows_the_amaxes(size):
    x, w, g = tensors(dtype=bf16, size=size)
    known = Amaxes(*(jnp.max(jnp.abs(tensor)).astype(f32)[None] for tensor in (x, w, g)))
    y, pull = jax.vjp(fp8_current, x, w)
    for got, wanted in zip((y, *pull(g)), step(x, w, known, g)[:3], strict=True):
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)


def test_a_history_forgets_and_leaves_out_what_is_no_number():
    x, w, g = tensors()
    amaxes = new_amaxes(2)
    for factor in (4.0, 1.0, jnp.nan, jnp.inf, 0.5):
        amaxes = step(factor * x, w, amaxes, g)[3]
    largest = float(jnp.max(jnp.abs(x)))
    assert (
        np.allclose(amaxes.x, [0.5 * largest, largest])
        and jnp.isfinite(jnp.concatenate(amaxes)).all()
    )
    assert scale_of(jnp.zeros(3), e4m3) == 1 and scale_of(jnp.array([448.0, 0]), e4m3) == 1


@pytest.mark.parametrize("target", ["H100", "B200"])
def test_a_step_is_three_fp8_matmuls(target):
    def shape(*dims, dtype=bf16):
        return jax.ShapeDtypeStruct(dims, dtype)

    args = (
        shape(1024, 512),
        shape(2048, 512, dtype=f32),
        Amaxes(*[shape(16, dtype=f32)] * 3),
        shape(1024, 2048),
    )
    report = assert_fp8_gemms(step, *args, count=3, target=target)
    assert sorted((row.lhs_dtype, row.rhs_dtype) for row in report.rows) == [
        ("f8e4m3fn", "f8e4m3fn"),
        ("f8e5m2", "f8e4m3fn"),
        ("f8e5m2", "f8e4m3fn"),
    ]
