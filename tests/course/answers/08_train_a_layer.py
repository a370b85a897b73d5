"""Answers to the puzzles of chapter 08."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import amax_scale, dequantize, quantize
from helpers.numerics.recipes import scaled_dot
from tests.course.answers import Chapter

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
chapter = Chapter("08_train_a_layer")


@chapter.puzzle(lambda: chapter.current_linear)
def current_linear(answer):
    return chapter.check_current(answer)


def forward(x, w):
    x_scale, w_scale = amax_scale(x), amax_scale(w)
    x_q, w_q = quantize(x, x_scale), quantize(w, w_scale)
    return scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype), (x_q, w_q, x_scale, w_scale)


def backward(saved, g, format=e5m2, factor=1.0):
    x_q, w_q, x_scale, w_scale = saved
    g_scale = factor * amax_scale(g, format)
    g_q = quantize(g, g_scale, format)
    x_gradient = scaled_dot(g_q, w_q.T, g_scale, w_scale, g.dtype)
    return x_gradient, scaled_dot(g_q.T, x_q.T, g_scale, x_scale)


def layer(forward, backward):
    made = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    made.defvjp(forward, backward)
    return made


@current_linear.right
def quantized_twice(x, w):  # the layer saves wide operands, and quantizes them again
    return layer(
        lambda x, w: (forward(x, w)[0], (x, w)), lambda xw, g: backward(forward(*xw)[1], g)
    )(x, w)


def turned_round(saved, g):
    x_q, w_q, x_scale, w_scale = saved
    g_scale = amax_scale(g, e5m2)
    g_q = quantize(g, g_scale, e5m2)
    x_gradient = scaled_dot(w_q.T, g_q, w_scale, g_scale, g.dtype).T
    return x_gradient, scaled_dot(x_q.T, g_q.T, x_scale, g_scale).T


def by_einsum(saved, g):
    x_q, w_q, x_scale, w_scale = saved
    g_scale = jnp.maximum(jnp.max(jnp.abs(g)) / 57344, jnp.finfo(f32).tiny).astype(f32)
    g_q = jnp.clip(g.astype(f32) / g_scale, -57344, 57344).astype(e5m2)
    wide = [dequantize(*pair, f32) for pair in ((g_q, g_scale), (w_q, w_scale), (x_q, x_scale))]
    x_gradient = jnp.einsum("mn,nk->mk", *wide[:2])
    return x_gradient.astype(g.dtype), jnp.einsum("mn,mk->nk", wide[0], wide[2])


class Layer:
    """A layer that is no function."""

    def __init__(self):
        self.linear = layer(forward, backward)

    def __call__(self, x, w):
        return self.linear(x, w)


current_linear.right(Layer())
current_linear.right(jax.jit(layer(forward, turned_round)))
current_linear.right(functools.partial(layer(forward, by_einsum)))


@current_linear.wrong("not yet: the values of the gradient of x differ, for g of about 1")
def jaxs_own_gradient(x, w):
    return forward(x, w)[0]


@current_linear.wrong("not yet: the result is bfloat16[64,128], and must be float32[64,128]")
def in_bfloat16(x, w):
    return layer(forward, backward)(x.astype(bf16), w).astype(bf16)


@current_linear.wrong("not yet: the values of the result differ")
def not_quantized(x, w):
    return x @ w.T


@current_linear.wrong(
    "not yet: for x in bfloat16 the result is float32[4096,8192], and must be bfloat16[4096,8192]"
)
def always_float32(x, w):
    return layer(forward, backward)(x.astype(f32), w.astype(f32))


@current_linear.wrong("not yet: JAX refuses it: NotImplementedError")
def raises(x, w):
    raise NotImplementedError


def transposed(x, w):
    return layer(forward, backward)(w, x)


def in_float16(saved, g):  # with the numbers of FP8
    g_scale = amax_scale(g, e5m2)
    wide = dequantize(quantize(g, g_scale, e5m2), g_scale, f32)
    x_q, w_q, x_scale, w_scale = saved
    x, w = (q.astype(bf16).astype(f32) * scale for q, scale in ((x_q, x_scale), (w_q, w_scale)))
    return (wide @ w).astype(g.dtype), wide.T @ x


def without_the_weights(saved, g):
    x_gradient, w_gradient = backward(saved, g)
    return x_gradient, jnp.zeros_like(w_gradient)


def without_the_scale_of_g(saved, g):
    return backward((*saved[:2], *saved[2:]), g, factor=0.01)


current_linear.wrong("not yet: the result is float32[128,64], and must be float32[64,128]")(
    transposed
)
current_linear.wrong("not yet: the values of the gradient of x differ")(
    layer(forward, functools.partial(backward, format=e4m3))
)
current_linear.wrong("not yet: the values of the gradient of x differ")(
    layer(forward, without_the_scale_of_g)
)
current_linear.wrong("not yet: the values of the gradient of w differ")(
    layer(forward, without_the_weights)
)
current_linear.wrong(
    "not yet: for x in bfloat16 the gradients are float32[4096,2048], float32[8192,2048]"
)(layer(forward, lambda saved, g: tuple(v.astype(f32) for v in backward(saved, g))))
current_linear.wrong("not yet: 3 matmuls, of which FP8: f8e4m3fn x f8e4m3fn")(
    layer(forward, in_float16)
)
current_linear.wrong("not yet: JAX refuses it: ")(
    layer(forward, lambda saved, g: backward(saved, g)[::-1])
)
current_linear.wrong("not yet: JAX refuses it: ")(jax.custom_vjp(lambda x, w: forward(x, w)[0]))
current_linear.wrong("not yet: JAX refuses it: TypeError")(None)


@chapter.puzzle(lambda: chapter.careful_step)
def careful_step(answer):
    return chapter.check_step(answer)


def is_finite(tree):
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


@careful_step.right
def by_cond(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return jax.lax.cond(is_finite((new, loss)), lambda: new, lambda: state), loss


@careful_step.right
def by_a_sum_of_zeros(state, linear, inputs, targets):
    after = chapter.train_step(state, linear, inputs, targets)
    bad = jnp.isnan(sum(jnp.sum(0 * leaf) for leaf in jax.tree.leaves(after)))
    kept = [
        jnp.where(bad, *pair) for pair in zip(*map(jax.tree.leaves, (state, after[0])), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), kept), after[1]


@careful_step.right
@functools.partial(jax.jit, static_argnames="linear")
def written_out(state, linear, inputs, targets):
    loss, gradients = jax.value_and_grad(chapter.error, argnums=(0, 1))(
        state.weights, state.amaxes, linear, inputs, targets
    )
    change, optimizer = chapter.optimizer.update(gradients[0], state.optimizer)
    weights = jax.tree.map(jnp.add, state.weights, change)
    new = state._replace(weights=weights, amaxes=gradients[1], optimizer=optimizer)
    return jax.tree.map(
        lambda n, old: jax.lax.select(is_finite((new, loss)), n, old), new, state
    ), loss


careful_step.right(functools.partial(by_cond))


@careful_step.wrong("not yet: after a NaN input the state is not the old one")
def trusts(state, linear, inputs, targets):
    return chapter.train_step(state, linear, inputs, targets)


@careful_step.wrong("not yet: after weights too large the state is not the old one")
def asks_the_loss(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return jax.tree.map(lambda n, old: jnp.where(jnp.isfinite(loss), n, old), new, state), loss


@careful_step.wrong("the state is not the old one")
def leaf_by_leaf(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return jax.tree.map(lambda n, old: jnp.where(jnp.isfinite(n).all(), n, old), new, state), loss


@careful_step.wrong("not yet: after a NaN input the state is not the old one")
def asks_for_nan_of_the_weights_only(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    weights = jax.tree.map(
        lambda n, old: jnp.where(is_finite(n), n, old), new.weights, state.weights
    )
    return new._replace(weights=weights), loss


@careful_step.wrong("not yet: after a good batch the state is not the next one")
def never_trains(state, linear, inputs, targets):
    return state, chapter.train_step(state, linear, inputs, targets)[1]


@careful_step.wrong("not yet: after a good batch the loss is 0.0, not ")
def without_its_loss(state, linear, inputs, targets):
    new, loss = by_cond(state, linear, inputs, targets)
    return new, 0 * loss


@careful_step.wrong("not yet: it must return a state and a loss")
def without_a_loss(state, linear, inputs, targets):
    return by_cond(state, linear, inputs, targets)[0]


@careful_step.wrong("not yet: it must return a state and a loss")
def a_part_of_the_state(state, linear, inputs, targets):
    new, loss = by_cond(state, linear, inputs, targets)
    return new.weights, loss


@careful_step.wrong("not yet: JAX refuses it: TracerBoolConversionError")
def by_if(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return (new, loss) if jnp.isfinite(loss) else (state, loss)


@careful_step.wrong("not yet: JAX refuses it: AssertionError")
def raises_too(state, linear, inputs, targets):
    raise AssertionError


careful_step.wrong("not yet: JAX refuses it: TypeError")(None)
careful_step.wrong("not yet: JAX refuses it: TypeError")(np.float32(3))
