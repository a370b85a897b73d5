"""The layer of chapter 08: its gradients, its state, and what a Hopper makes of it."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import aot_compile, assert_fp8_gemms
from helpers.numerics.formats import assert_matches_reference, matmul_reference, tolerance
from helpers.numerics.quantize import quantize

import fp8_linear as recipe
from fp8_linear import Amaxes, fp8_linear, new_amaxes, scale_of

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
ROOT = Path(__file__).resolve().parent.parent.parent


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


def test_it_is_what_the_chapter_writes():
    """All that the two have in common is alike."""

    def functions(text):
        """Their code, without docstrings: the chapter's stand in its text."""
        nodes = [n for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        for node in nodes:
            if ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        return {node.name: ast.unparse(node) for node in nodes}

    cells = (
        (ROOT / "notebooks" / "08_train_a_layer.md")
        .read_text()
        .split("```{code-cell} ipython3\n")[1:]
    )
    written = {}
    for cell in (cell.partition("```")[0] for cell in cells):
        if not cell.startswith("---"):  # what is folded
            written |= functions(cell)
    ours = functions(Path(recipe.__file__).read_text())
    assert {
        "Amaxes",
        "new_amaxes",
        "scale_of",
        "remember",
        "fp8_linear",
        "forward",
        "backward",
    } <= {*written} & {*ours}
    assert {name: ours[name] for name in {*written} & {*ours}} == {
        name: written[name] for name in {*written} & {*ours}
    }


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("size", [1.0, 1e-7, 1e-20])
@pytest.mark.parametrize("dims", [(48, 80, 112), (1, 16, 32), (16, 1, 16)])
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


def test_what_is_wrong_shows():
    x, w, g = tensors()
    amaxes = step(x, w, new_amaxes(), g)[3]
    y, x_gradient, w_gradient, _ = step(x.at[7].set(jnp.nan), w, amaxes, g)
    assert (
        jnp.isnan(y[7]).all()
        and jnp.isfinite(jnp.delete(y, 7, 0)).all()
        and jnp.isnan(w_gradient).all()
    )
    _, x_gradient, w_gradient, _ = step(x, w, amaxes, g.at[5, 3].set(jnp.nan))
    assert jnp.isnan(x_gradient[5]).all() and jnp.isnan(w_gradient[3]).all()
    assert jnp.isfinite(jnp.delete(x_gradient, 5, 0)).all()


def test_a_gradient_as_small_as_float32_has_is_no_zero_and_none_is_made_up():
    x, w, g = tensors(size=1e-35)
    amaxes = step(x, w, new_amaxes(), g)[3]
    assert step(x, w, amaxes, g)[2].any()
    assert not step(x, w, amaxes, 0 * g)[2].any()


def test_in_loops_and_rematerialized():
    x, w, g = tensors(64, 112, 112)

    def loss(w, amaxes, layer):
        def turn(h, _):
            return jnp.tanh(layer(h, w, amaxes)), None

        return jnp.sum(jax.lax.scan(turn, x, length=3)[0] * g)

    w = 0.05 * w
    amaxes = step(x, w, new_amaxes(), g)[3]
    plain = jax.jit(jax.grad(lambda w: loss(w, amaxes, fp8_linear)))(w)
    again = jax.jit(jax.grad(lambda w: loss(w, amaxes, jax.checkpoint(fp8_linear))))(w)
    exact = jax.grad(lambda w: loss(w, amaxes, lambda h, w, _: h @ w.T))(w)
    assert np.allclose(plain, again, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(plain))))
    assert jnp.vdot(plain, exact) / (jnp.linalg.norm(plain) * jnp.linalg.norm(exact)) > 0.95


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
    assert aot_compile(step, *args, target=target).as_text().count("= bf16[1024,2048]") > 0
