"""Which pass and which weight a matmul is of, and the signs that a gradient is lost: training steps
as users write them, compiled.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fp8lens import assert_fp8_gemms, inspect

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32


def S(*dims, dtype=bf16):
    return jax.ShapeDtypeStruct(dims, dtype)


ARGS = (S(128, 256), S(256, 512), S(512, 256), S(128, 256, dtype=f32), S(dtype=f32))


def quantize(x, scale, dtype=e4m3):
    best = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(f32) * scale, -best, best).astype(dtype)


def layer_with(quantize_gradient):
    """A dense layer in FP8 with a gradient of its own."""

    def product(a, b, scale):
        return lax.dot(a, b, preferred_element_type=bf16) * scale.astype(bf16)

    @jax.custom_vjp
    def layer(x, w, s):
        return forward(x, w, s)[0]

    def forward(x, w, s):
        x, w = quantize(x, s), quantize(w, s)
        return product(x, w, s), (x, w, s)

    def backward(saved, g):
        x, w, s = saved
        g = quantize_gradient(g, s)
        return product(g, w.T, s), product(x.T, g, s), None

    layer.defvjp(forward, backward)
    return layer


dense = layer_with(lambda g, s: quantize(g, s, e5m2))
bare = layer_with(lambda g, s: g.astype(e5m2))
by_amax = layer_with(lambda g, s: (g * (57344 / jnp.max(jnp.abs(g)))).astype(e5m2))
by_a_number = layer_with(lambda g, s: (g * 1024).astype(e5m2))


def layers(one, between=jax.nn.relu):
    return lambda x, up, down, s: one(between(one(x, up, s)), down, s)


def by_division(x, up, down, s):
    """What converts to FP8 and what is FP8, without a gradient of its own."""
    hidden = (dense(x, up, s) / s).astype(e4m3)
    return lax.dot(hidden, (down / s).astype(e4m3)).astype(f32) * s * s


def capped(one):
    """A head with capped scores: the cap's factor and the gradient's scale have one line."""
    return lambda x, up, down, s: 15 * jnp.tanh(one(x, up[:, :256], s).astype(f32) / 15)


def step_of(model, lift=False):
    """The loss and the gradients of both weights; `lift`: of the loss times a given number."""

    def step(x, up, down, target, s):
        def loss(up, down):
            error = jnp.mean((model(x, up, down, s).astype(f32) - target) ** 2)
            return error * s if lift else error

        return jax.value_and_grad(loss, (0, 1))(up, down)

    return step


def seen(model, **options):
    return inspect(step_of(model, **options), *ARGS)


@pytest.mark.parametrize("model", [layers(bare), by_division, capped(bare)])
def test_a_gradient_that_becomes_fp8_without_a_scale_fails(model):
    told = seen(model)
    report = told.report
    (line,) = report.unscaled
    assert line.startswith("tests/fp8lens/test_gradients.py:") and not report.without_gradient
    assert f"the gradient of {line} becomes FP8 without a scale" in " ".join(str(report).split())
    with pytest.raises(AssertionError, match='becomes FP8 without a scale.*allow="unscaled"'):
        assert_fp8_gemms(told)
    assert_fp8_gemms(told, allow="unscaled")


@pytest.mark.parametrize(
    "model, rows",
    [
        (layers(dense, jnp.round), 1),
        (lambda x, up, down, s: layers(dense)(x, lax.stop_gradient(up), down, s), 1),
        (lambda x, up, down, s: jnp.round(layers(dense)(x, up, down, s)), 2),
    ],
)
def test_a_matmul_without_a_gradient_is_told(model, rows):
    told = seen(model)
    report = told.report
    lost = report.rows[:rows]
    assert report.without_gradient == tuple(f"{row.title} ({row.source})" for row in lost)
    assert not report.unscaled and "no gradient goes through" in str(report)
    assert_fp8_gemms(told)


@pytest.mark.parametrize(
    "model, lift",
    [
        (layers(dense), False),
        (layers(by_amax), False),
        (layers(by_a_number), False),
        (layers(bare), True),  # a loss that is scaled may lift its gradients as much
        (capped(by_a_number), False),
    ],
)
def test_a_right_step_is_not_suspected(model, lift):
    """Neither are the real programs: their answers are in `tests/programs/real`."""
    report = seen(model, lift=lift).report
    assert report.fp8_rows and not report.unscaled and not report.without_gradient


def test_rows_of_one_line_are_told_apart_by_argument_and_pass():
    def step(params, x, target, s):
        def loss(params):
            y = layers(dense)(x, params["up"]["kernel"], params["down"]["kernel"], s)
            return jnp.mean((y.astype(f32) - target) ** 2)

        return jax.value_and_grad(loss)(params)

    params = {"up": {"kernel": ARGS[1]}, "down": {"kernel": ARGS[2]}}
    up, down = "['up']['kernel']", "['down']['kernel']"
    told = inspect(step, params, ARGS[0], *ARGS[3:])
    assert sorted(row.path for row in told.report.rows) == sorted(
        [up, down, f"{down} backward (dgrad)", f"{down} backward (wgrad)", f"{up} backward (wgrad)"]
    )
    assert {reason.layer for reason in told.reasons} <= {row.path for row in told.report.rows}


def test_a_wide_gradient_that_jax_made_asks_for_a_gradient_of_ones_own():
    def head(x, w, down, s):
        wide = [quantize(a, s).astype(bf16) * s.astype(bf16) for a in (x, w)]
        return 15 * jnp.tanh(lax.dot(*wide)[:, :256].astype(f32) / 15)

    step = inspect(jax.grad(lambda *args: jnp.sum(head(*args)), (0, 1)), *ARGS[:3], ARGS[4])
    assert [row.is_fp8 for row in step.report.rows] == [True, False, False]
    lost = [reason for reason in step.reasons if reason.lost == "fp8"]
    assert len(lost) >= 2 and all("custom_vjp" in reason.fix for reason in lost)
