"""Programs with FP8 matmuls as the users of qwix, AQT, Keras, Flax and Haiku write them.

`PROGRAMS[name]()` is a function and its arguments, as shapes. Each library is imported where it is
used.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

from tools.recorders import census

os.environ["KERAS_BACKEND"] = "jax"
e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
ROWS, WIDTH, HIDDEN = 128, 256, 512
PROGRAMS: dict[str, Callable[[], tuple[Callable, tuple]]] = {}


def program(name: str, *args: Any, **kwargs: Any) -> Callable[[Callable], Callable]:
    """Adds what a function makes of `args` to PROGRAMS."""

    def add(make: Callable) -> Callable:
        PROGRAMS[name] = functools.partial(make, *args, **kwargs)
        return make

    return add


def S(*dims: int, dtype: Any = bf16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


X = S(ROWS, WIDTH)


def trained(apply: Callable, variables: Any, x: jax.ShapeDtypeStruct) -> tuple[Callable, tuple]:
    """A training step, and its arguments: the loss, and the parameters that follow from its
    gradient.
    """

    def loss(variables, x, y):
        return jnp.mean(jnp.square(apply(variables, x).astype(f32) - y))

    def step(variables, x, y):
        value, gradient = jax.value_and_grad(loss, allow_int=True)(variables, x, y)
        if not isinstance(variables, dict) or "params" not in variables:
            return value, gradient
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, variables["params"], gradient["params"])
        return value, gradient | {"params": params}

    return step, (variables, x, S(*x.shape, dtype=f32))


def linen(
    model: nn.Module, x: jax.ShapeDtypeStruct, train: bool = False, rngs: bool = False
) -> tuple[Callable, tuple]:
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    apply = (
        functools.partial(model.apply, rngs={"params": jax.random.key(1)}) if rngs else model.apply
    )
    return trained(apply, variables, x) if train else (apply, (variables, x))


class MLP(nn.Module):
    """Two dense layers; `general` is what multiplies."""

    general: Any = None
    dtype: Any = bf16
    activation: Callable = nn.relu
    bias: bool = True
    param_dtype: Any = f32

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense,
            dot_general_cls=self.general,
            dtype=self.dtype,
            use_bias=self.bias,
            param_dtype=self.param_dtype,
        )
        return dense(WIDTH, name="down")(self.activation(dense(HIDDEN, name="up")(x)))


class Project(nn.Module):
    """An einsum with a weight."""

    spec: str
    dims: tuple[int, ...]
    einsum: Any = None

    @nn.compact
    def __call__(self, x):
        weight = self.param("kernel", nn.initializers.lecun_normal(), self.dims, bf16)
        return (jnp.einsum if self.einsum is None else self.einsum())(self.spec, x, weight)


class Attention(nn.Module):
    """Projections and attention as einsums."""

    heads: int = 4
    einsum: Any = None

    @nn.compact
    def __call__(self, x):
        depth = WIDTH // self.heads
        q, k, v = (
            Project("bsd,dhk->bshk", (WIDTH, self.heads, depth), self.einsum, name=name)(x)
            for name in "qkv"
        )
        scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        mixed = jnp.einsum("bhqs,bshk->bqhk", scores, v)
        return Project("bshk,hkd->bsd", (self.heads, depth, WIDTH), self.einsum, name="out")(mixed)


# Flax -------------------------------------------------------------------------------------------

DIRECT, QDQ = fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8DotGeneralOp


EINSUM = fp8_ops.Fp8Einsum
WIDE = S(ROWS, WIDTH, dtype=f32)

program("flax: Dense", MLP(DIRECT), X)(linen)
program("flax: Dense, f32", MLP(DIRECT, dtype=f32), WIDE)(linen)
program("flax: Dense, bf16 parameters", MLP(DIRECT, param_dtype=bf16), X)(linen)
program("flax: Dense, f32, bf16 parameters", MLP(DIRECT, f32, param_dtype=bf16), WIDE)(linen)
program("flax: Dense, trained", MLP(DIRECT), X, train=True)(linen)
program("flax: quantize, dequantize, trained", MLP(QDQ), X, train=True)(linen)
program("flax: Fp8Einsum, by rows", Project("bk,nk->bn", (HIDDEN, WIDTH), EINSUM), X)(linen)
program("flax: Fp8Einsum, by columns", Project("bk,kn->bn", (WIDTH, HIDDEN), EINSUM), X)(linen)
program("flax: Fp8Einsum, trained", Attention(einsum=EINSUM), S(2, ROWS, WIDTH), train=True)(linen)


@program("flax: nnx.Linear, trained")
def nnx_trained():
    """With an FP8 product in the place of its dot_general."""
    from fp8_nnx import Fp8Dot, value_and_grad

    def make():
        return nnx.Linear(WIDTH, HIDDEN, dtype=bf16, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(jnp.square(model(x).astype(f32)))

    graph, state = nnx.split(nnx.eval_shape(make))
    step = value_and_grad(loss)
    return lambda state, x: step(nnx.merge(graph, state), x), (state, X)


# qwix -------------------------------------------------------------------------------------------


def ptq(model: nn.Module = MLP(), **rule: Any) -> tuple[Callable, tuple]:
    """Weights quantized ahead."""
    import qwix

    rule = {"weight_qtype": e4m3, "act_qtype": e4m3} | rule
    quantized = qwix.quantize_model(model, qwix.PtqProvider([qwix.QuantizationRule(**rule)]))
    apply, (abstract, x) = linen(quantized, X)
    if "act_static_scale" not in rule:  # of f32 weights; a static scale comes from training
        params = linen(model, x)[1][0]["params"]
        weights = jax.eval_shape(lambda p: qwix.quantize_params(p, abstract["params"]), params)
        return apply, ({"params": weights}, x)
    return apply, (abstract, x)


def qt(train: bool = False, **rule: Any) -> tuple[Callable, tuple]:
    """Quantized as it is trained."""
    import qwix

    rule = {"weight_qtype": e4m3, "act_qtype": e4m3} | rule
    quantized = qwix.quantize_model(MLP(), qwix.QtProvider([qwix.QtRule(**rule)]))
    variables = jax.eval_shape(quantized.init, jax.random.key(0), X)

    def apply(v, x):
        return quantized.apply(v, x, mutable=["quant_stats"])[0]

    return trained(apply, variables, X) if train else (apply, (variables, X))


FIXED = {"weight_calibration_method": "fixed,-1,1", "act_calibration_method": "fixed,-8,8"}
ONE = {"disable_channelwise_axes": True}
E5M2 = {"bwd_qtype": e5m2}

program("qwix: PTQ")(ptq)
program(
    "qwix: PTQ, by rows",
    nn.Einsum((HIDDEN, WIDTH), "...k,nk->...n", dtype=bf16, use_bias=False),
)(ptq)
program("qwix: PTQ, weights alone", act_qtype=None)(ptq)
program("qwix: PTQ, fixed", **FIXED)(ptq)
program("qwix: PTQ, tiles", tile_size=128)(ptq)
program("qwix: PTQ, small tiles", tile_size=32)(ptq)
program("qwix: QT")(qt)
program("qwix: QT, one scale", **ONE)(qt)
program("qwix: QT, fixed", **ONE, **FIXED)(qt)
program("qwix: QT, trained", train=True)(qt)
program("qwix: QT, E5M2 gradients", train=True, **E5M2)(qt)
program("qwix: QT, E5M2 gradients, one scale", train=True, **E5M2, **ONE)(qt)
program(
    "qwix: QT, all E5M2",
    train=True,
    weight_qtype=e5m2,
    act_qtype=e5m2,
    **E5M2,
)(qt)


@program("qwix: QArrays")
@program("qwix: QArrays, by channel", channelwise_axes=(1,))
def qarrays(**how):
    import qwix

    weights = jax.eval_shape(lambda w: qwix.quantize(w, e4m3, **how), S(WIDTH, HIDDEN))

    def forward(w, x):
        return jax.nn.gelu(qwix.dot(qwix.quantize(x, e4m3), w))

    return forward, (weights, X)


# AQT --------------------------------------------------------------------------------------------


def aqt(train: bool = False, **config: Any) -> tuple[Callable, tuple]:
    from aqt.jax.v2.flax import aqt_flax

    general = functools.partial(aqt_flax.AqtDotGeneral, census.aqt_config(**config))
    return linen(MLP(general), X, train, rngs=True)


program("aqt: forward", forward="e4m3")(aqt)
program("aqt: forward, bf16 dots", forward="e4m3", dots=bf16)(aqt)
program(
    "aqt: forward, bf16 dots, one scale",
    forward="e4m3",
    dots=bf16,
    tensor=True,
)(aqt)
program("aqt: forward, bf16 dots, constant", forward="e4m3", dots=bf16, bound=8.0)(aqt)
program("aqt: trained", train=True, forward="e4m3")(aqt)
program(
    "aqt: trained, E5M2 gradients",
    train=True,
    forward="e4m3",
    backward="e5m2",
)(aqt)
program("aqt: E5M2", forward="e5m2")(aqt)


# Keras ------------------------------------------------------------------------------------------


def keras_model(
    make: Callable, x: jax.ShapeDtypeStruct, train: bool = False
) -> tuple[Callable, tuple]:
    import keras

    model = keras.Sequential([keras.Input(x.shape[1:]), *make(keras.layers)])
    for layer in model.layers:
        layer.quantize("float8")
    variables = census.of_keras(model)

    def forward(variables, x):
        return model.stateless_call(*variables, x, training=train)[0]

    return trained(forward, variables, x) if train else (forward, (variables, x))


def keras_dense(layers, dtype="mixed_bfloat16"):
    mixed = {"dtype": dtype}
    return layers.Dense(HIDDEN, activation="relu", **mixed), layers.Dense(WIDTH, **mixed)


def keras_einsum(layers):
    mixed = {"dtype": "mixed_bfloat16"}
    return (
        layers.EinsumDense(
            "bsd,dh->bsh", (None, HIDDEN), bias_axes="h", activation="gelu", **mixed
        ),
        layers.EinsumDense("bsh,hd->bsd", (None, WIDTH), bias_axes="d", **mixed),
    )


def keras_rows(layers):
    """Kernels as [N, K]."""
    import keras

    bf16 = {"dtype": "bfloat16"}
    gelu = functools.partial(keras.activations.gelu, approximate=True)
    return (
        layers.EinsumDense("bsd,hd->bsh", (None, HIDDEN), bias_axes="h", activation=gelu, **bf16),
        layers.EinsumDense("bsh,dh->bsd", (None, WIDTH), bias_axes="d", **bf16),
    )


program("keras: Dense", keras_dense, X)(keras_model)
program("keras: Dense, trained", keras_dense, X, train=True)(keras_model)
program("keras: Dense, bf16", functools.partial(keras_dense, dtype="bfloat16"), X)(keras_model)
program("keras: EinsumDense, by rows", keras_rows, S(4, ROWS, WIDTH))(keras_model)
program("keras: EinsumDense", keras_einsum, S(4, ROWS, WIDTH))(keras_model)


# Haiku, with FP8 dots by hand -------------------------------------------------------------------


def quantize(x, scale, to=e4m3):
    bound = float(jnp.finfo(to).max)
    return jnp.clip(x / scale.astype(x.dtype), -bound, bound).astype(to)


def fp8_dot(a, b, a_scale, b_scale, contract):
    return lax.dot_general(
        a.astype(bf16) * a_scale.astype(bf16),
        b.astype(bf16) * b_scale.astype(bf16),
        (contract, ((), ())),
    )


@program("haiku: delayed scales")
def haiku_delayed():
    """Scales that follow the amax of earlier calls, kept in Haiku's state."""
    import haiku as hk

    def layer(x, name, to):
        w = hk.get_parameter(
            name, (to, x.shape[-1]), f32, hk.initializers.VarianceScaling()
        ).astype(bf16)
        scales = []
        for what, value in (("x", x), ("w", w)):
            amax = hk.get_state(f"{name}_{what}", (), f32, jnp.ones)
            hk.set_state(f"{name}_{what}", jnp.max(jnp.abs(value)).astype(f32))
            scales.append(amax / 448)
        return fp8_dot(quantize(x, scales[0]), quantize(w, scales[1]), *scales, ((1,), (1,)))

    model = hk.without_apply_rng(
        hk.transform_with_state(lambda x: layer(jax.nn.gelu(layer(x, "up", HIDDEN)), "down", WIDTH))
    )
    x = X
    return model.apply, (*jax.eval_shape(model.init, jax.random.key(0), x), x)
