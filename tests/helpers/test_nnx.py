"""FP8 for NNX layers: the numbers are those of chapter 08's layer, a step updates the state, and
wrong uses are refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp8lens import assert_fp8_gemms, inspect, report_gemms
from helpers.numerics.quantize import amax_scale, dequantize, quantize

from fp8_linear import Amaxes, fp8_linear
from fp8_nnx import Fp8Dot, Overwrite, name_scopes, update, value_and_grad

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


@pytest.mark.parametrize("kind", [BF16, F32])
def test_parameters_and_the_optimizers_state_keep_their_type(kind):
    model = nnx.Linear(64, 32, dtype=BF16, param_dtype=kind, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def state():
        return jax.tree.map(lambda leaf: leaf.dtype, (nnx.state(model), nnx.state(optimizer)))

    before, kernel = state(), model.kernel[...]
    update(model, optimizer, value_and_grad(loss)(model, x_for("linear", 8))[1])
    assert (
        state() == before
        and model.kernel[...].dtype == kind
        and not np.array_equal(model.kernel[...], kernel)
    )


def test_gradients_are_near_those_of_float32():
    model, x = LAYERS["to heads"](Fp8Dot()), x_for("to heads", 256)
    _, gradient = value_and_grad(loss)(model, x)
    nnx.update(
        model, nnx.split_state(gradient, Overwrite, ...)[0]
    )  # from here on the scales are those of x, kernel and g
    _, gradient = value_and_grad(loss)(model, x)
    kernel = model.kernel[...].astype(BF16)
    stored = [
        np.asarray(dequantize(quantize(t, amax_scale(t)), amax_scale(t)), np.float32)
        for t in (x, kernel)
    ]

    def y(kernel):
        return jnp.einsum("mk,khd->mhd", stored[0], kernel) + model.bias[...]

    exact = jax.grad(lambda kernel: jnp.mean(jnp.square(y(kernel))))(stored[1])
    assert np.linalg.norm(gradient["kernel"][...] - exact) < 0.05 * np.linalg.norm(exact)


def test_every_matmul_of_a_step_is_fp8():
    model = LAYERS["to heads"](Fp8Dot())
    graph, state = nnx.split(model)
    x = jax.ShapeDtypeStruct((64, 64), BF16)
    step = jax.grad(lambda state, x: loss(nnx.merge(graph, state), x), (0, 1), allow_int=True)
    assert_fp8_gemms(step, state, x, count=3)


def test_the_fix_of_a_transpose_is_for_who_uses_the_layer():
    model = nnx.Linear(256, 512, dtype=BF16, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    step, x = value_and_grad(loss), jax.ShapeDtypeStruct((128, 256), BF16)
    seen = inspect(lambda state, x: step(nnx.merge(graph, state), x), state, x)
    transposes = [reason for reason in seen.reasons if reason.lost == "transpose"]
    assert transposes
    for reason in transposes:
        assert "In Flax: no setting; nnx.Linear and nnx.LinearGeneral store [K, N]" in reason.fix
        assert "one byte for each element" in reason.fix


class Block(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(64, 128, dtype=BF16, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))
        self.down = nnx.Linear(128, 64, dtype=BF16, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Blocks(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(), Block()])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_in_scopes_are_named_in_the_report_and_compute_the_same():
    def paths(model):
        graph, state = nnx.split(model)
        step = value_and_grad(loss)
        report = report_gemms(lambda state, x: step(nnx.merge(graph, state), x), state, x)
        return {row.path for row in report.rows}

    x = x_for("linear", 64)
    plain, named = Blocks(), name_scopes(Blocks())
    layers = {f"blocks.{n}/{layer}" for n in range(2) for layer in ("up", "down")}
    assert paths(plain) == {""}
    assert paths(named) == layers | {f"{layer} backward" for layer in layers}
    assert np.array_equal(plain(x), named(x))
    assert isinstance(named.blocks[0].up, nnx.Linear)
    optimizer = nnx.Optimizer(named, optax.sgd(0.1), wrt=nnx.Param)
    _, gradient = nnx.jit(value_and_grad(loss))(named, x)
    update(named, optimizer, gradient)
    assert (named.blocks[0].up.dot_general.amaxes[...][:, 0] > 0).all()


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


def test_a_layer_that_a_step_leaves_out_keeps_its_amaxes():
    x = x_for("linear", 8)
    a, b = histories(lambda model, x, step: model.a(x) if step < 2 else model.b(x), 3, x)
    assert (a[:, :2] > 0).all() and (b[:, 0] > 0).all() and not b[:, 1:].any()


@pytest.mark.parametrize(
    "times, of",
    [
        (2, lambda model, x, step: model.a(x) + model.a(x)),
        (8, lambda model, x, step: jax.vmap(model.a)(x)),
    ],
)
def test_a_layer_used_n_times_sees_at_most_n_times_as_much(times, of):
    x = x_for("linear", 8)
    a, _ = histories(of, 6, x)
    largest = float(jnp.max(jnp.abs(x)))
    assert (largest <= a[0]).all() and (a[0] <= times * largest).all() and (a[0] == a[0, 0]).all()


@pytest.mark.parametrize(
    "of", [lambda model, x: model.a(x), lambda model, x: model.a(x) + model.a(2 * x)]
)
def test_steps_with_a_nan_leave_what_was_remembered(of):
    x, factors = x_for("linear", 8), [2, 8, 4, *[jnp.nan] * 6]
    before, _ = histories(lambda model, x, step: of(model, x * factors[step]), 3, x)
    after, _ = histories(lambda model, x, step: of(model, x * factors[step]), 9, x)
    assert before[0, 1] == 2 * before[0, 0] == 4 * before[0, 2] > 0
    assert (
        np.array_equal(before[0], after[0])
        and np.array_equal(before[2], after[2])
        and (after[1] > 0).all()
    )


def test_amaxes_of_steps_that_are_alike_are_remembered():
    x = x_for("linear", 8)
    a, _ = histories(lambda model, x, step: model.a(x), 9, x)
    assert (a[0] == float(jnp.max(jnp.abs(x)))).all()


def test_a_gradient_that_is_not_its_own_is_refused():
    model, x = LAYERS["linear"](Fp8Dot()), x_for("linear", 8)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match="without Overwrite: take it by fp8_nnx.value_and_grad"):
        update(model, optimizer, nnx.grad(loss)(model, x))
    (_, more), gradient = value_and_grad(lambda model, x: (loss(model, x), x), has_aux=True)(
        model, x
    )
    update(model, optimizer, gradient)
    assert more is x


@pytest.mark.parametrize(
    "made",
    [
        lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Any(nnx.Param, Overwrite)),
        lambda model: nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param),
    ],
)
def test_an_optimizer_that_is_not_of_the_parameters_alone_is_refused(made):
    model = LAYERS["linear"](Fp8Dot())
    optimizer, (_, gradient) = made(model), value_and_grad(loss)(model, x_for("linear", 8))
    with pytest.raises(
        ValueError,
        match=r"more than the parameters: make it by nnx.Optimizer\(model, tx, wrt=nnx.Param\)",
    ):
        update(model, optimizer, gradient)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_mesh_is_xlas_to_share_out(kind):
    model, x = LAYERS["linear"](Fp8Dot()), x_for("linear", 8)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(kind,))

    def step():
        return value_and_grad(loss)(
            model, jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
        )

    with jax.set_mesh(mesh):
        if kind == jax.sharding.AxisType.Auto:
            assert step()[0] > 0
        else:
            with pytest.raises(ValueError, match=r"axis_types=\(AxisType.Auto"):
                step()


@pytest.mark.parametrize("name", LAYERS)
def test_the_class_in_place_of_an_instance_is_refused_by_a_sentence(name):
    model = LAYERS[name](Fp8Dot)
    with pytest.raises(TypeError, match=r"it got the class: .* instance .* dot_general=Fp8Dot\(\)"):
        model(x_for(name, 8))
    for wrong in ({"length": "16"}, {"size": 16}):
        with pytest.raises(TypeError, match="takes one argument, length, an int"):
            Fp8Dot(**wrong)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="length is 0: at least one step"):
        Fp8Dot(0)
    with pytest.raises(ValueError, match="underflow in float16: give the layer dtype=jnp.bfloat16"):
        Fp8Dot()(
            jnp.ones((4, 8), jnp.float16), jnp.ones((8, 2), jnp.float16), (((1,), (0,)), ((), ()))
        )
    dot, x, kernel = Fp8Dot(), jnp.ones((4, 8)), jnp.ones((8, 2))
    for numbers in (
        (((0,), (0,)), ((), ())),
        (((1,), (1,)), ((), ())),
        (((1,), (0,)), ((0,), (1,))),
    ):
        with pytest.raises(ValueError, match="the input's last dimensions with the kernel's first"):
            dot(x, kernel, numbers)
    for option in (
        {"precision": "highest"},
        {"preferred_element_type": F32},
        {"out_sharding": "x"},
    ):
        with pytest.raises(ValueError, match="takes no precision"):
            dot(x, kernel, (((1,), (0,)), ((), ())), **option)
