"""FP8 for NNX layers: the numbers are those of chapter 09's layer, a step updates the state, and
wrong uses are refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp8lens import assert_fp8_gemms

from fp8_linear import Amaxes, fp8_linear
from fp8_nnx import Fp8Dot, Overwrite, update, value_and_grad

E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
LAYERS = {
    "linear": lambda dot: nnx.Linear(64, 32, dtype=BF16, dot_general=dot, rngs=nnx.Rngs(0)),
    "to heads": lambda dot: nnx.LinearGeneral(
        64, (4, 8), dtype=BF16, dot_general=dot, rngs=nnx.Rngs(0)
    ),
    "from heads": lambda dot: nnx.LinearGeneral(
        (4, 16), 32, axis=(-2, -1), dtype=BF16, dot_general=dot, rngs=nnx.Rngs(0)
    ),
}


def x_for(name: str, *leading: int) -> jax.Array:
    return jax.random.normal(
        jax.random.key(1), (*leading, *((4, 16) if name == "from heads" else (64,))), BF16
    )


def loss(model, x):
    return jnp.mean(jnp.square(model(x).astype(F32)))


@pytest.mark.parametrize("leading", [(8,), (2, 3, 4), ()])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_product_of_chapter_08_gives(name, leading):
    model, wide = LAYERS[name](Fp8Dot()), LAYERS[name](jax.lax.dot_general)
    x = x_for(name, *leading)
    amaxes = Amaxes(*model.dot_general.amaxes[...])
    kernel = model.kernel[...].astype(BF16).reshape(64, -1)
    expected = fp8_linear(x.reshape(-1, 64), kernel.T, amaxes).reshape(wide(x).shape)
    assert (
        np.array_equal(model(x), expected + model.bias[...].astype(BF16)) and model(x).dtype == BF16
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_updates_weights_by_the_optimizer_and_amaxes_by_what_was_seen(name):
    model, x = LAYERS[name](Fp8Dot(length=4)), x_for(name, 8)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    kernel = model.kernel[...]
    for step in range(1, 4):
        error, gradient = value_and_grad(loss)(model, x)
        update(model, optimizer, gradient)
        seen = model.dot_general.amaxes[...]
        assert seen.shape == (3, 4) and (seen[:, :step] > 0).all() and not seen[:, step:].any()
        assert float(seen[0, 0]) == float(jnp.max(jnp.abs(x)))
    assert model.kernel[...].dtype == F32 and not np.array_equal(model.kernel[...], kernel)
    assert len(jax.tree.leaves(nnx.state(model, Overwrite))) == 1


def test_every_matmul_of_a_step_is_fp8():
    model = LAYERS["to heads"](Fp8Dot())
    graph, state = nnx.split(model)
    x = jax.ShapeDtypeStruct((64, 64), BF16)
    step = jax.grad(lambda state, x: loss(nnx.merge(graph, state), x), (0, 1), allow_int=True)
    assert_fp8_gemms(step, state, x, count=3)


class Heads(nnx.Module):
    """Two layers. A step may use one of them, or one of them twice."""

    def __init__(self):
        self.a, self.b = (LAYERS["linear"](Fp8Dot(length=4)) for _ in range(2))


def histories(of, steps: int, x) -> list[np.ndarray]:
    model = Heads()
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    for step in range(steps):
        _, gradient = value_and_grad(
            lambda model, x, step=step: jnp.mean(jnp.square(of(model, x, step).astype(F32)))
        )(model, x)
        update(model, optimizer, gradient)
    return [np.asarray(layer.dot_general.amaxes[...]) for layer in (model.a, model.b)]


def test_histories_keep_what_a_step_leaves_out_and_what_is_not_finite():
    """A layer that is not used, or meets a NaN, keeps its histories; one that is used twice sees
    at most twice as much.
    """
    x = x_for("linear", 8)
    largest = float(jnp.max(jnp.abs(x)))
    a, b = histories(lambda model, x, step: model.a(x) if step < 2 else model.b(x), 3, x)
    assert (a[:, :2] > 0).all() and (b[:, 0] > 0).all() and not b[:, 1:].any()
    a, _ = histories(lambda model, x, step: model.a(x) + model.a(x), 3, x)
    assert (largest <= a[0, :3]).all() and (a[0, :3] <= 2 * largest).all()
    factors = [2, 8, jnp.nan, jnp.nan]
    before, _ = histories(lambda model, x, step: model.a(x * factors[step]), 2, x)
    after, _ = histories(lambda model, x, step: model.a(x * factors[step]), 4, x)
    assert before[0, 0] == 4 * before[0, 1] > 0
    assert np.array_equal(before[0], after[0])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="the input's last dimensions with the kernel's first"):
        Fp8Dot()(jnp.ones((4, 8)), jnp.ones((8, 2)), (((0,), (0,)), ((), ())))
    model, x = LAYERS["linear"](Fp8Dot()), x_for("linear", 8)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError):  # a gradient without histories
        update(model, optimizer, nnx.grad(loss)(model, x))
