"""Answers to the puzzles of chapter 09."""

import jax
import jax.numpy as jnp

from helpers.numerics.quantize import amax_scale, quantize
from helpers.numerics.recipes import scaled_dot
from tests.course.answers import Chapter

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
chapter = Chapter("09_train_a_layer")


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


@current_linear.wrong("the numbers of result 2 differ")
def jaxs_own_gradient(x, w):
    return forward(x, w)[0]


@current_linear.wrong("but expected bfloat16[64,128]")
def in_bfloat16(x, w):
    return layer(forward, backward)(x.astype(bf16), w).astype(bf16)


@current_linear.wrong("it does not trace: NotImplementedError")
def raises(x, w):
    raise NotImplementedError


@chapter.puzzle(lambda: chapter.careful_step)
def careful_step(answer):
    return chapter.check_step(answer)


@careful_step.right
def by_a_sum_of_zeros(state, linear, inputs, targets):
    after = chapter.train_step(state, linear, inputs, targets)
    bad = jnp.isnan(sum(jnp.sum(0 * leaf) for leaf in jax.tree.leaves(after)))
    kept = [
        jnp.where(bad, *pair) for pair in zip(*map(jax.tree.leaves, (state, after[0])), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), kept), after[1]


@careful_step.wrong("not yet: after a NaN input, the numbers of result")
def trusts(state, linear, inputs, targets):
    return chapter.train_step(state, linear, inputs, targets)


@careful_step.wrong("not yet: after weights too large, the numbers of result")
def asks_the_loss(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return jax.tree.map(lambda n, old: jnp.where(jnp.isfinite(loss), n, old), new, state), loss


@careful_step.wrong("not yet: after a good batch, TracerBoolConversionError")
def by_if(state, linear, inputs, targets):
    new, loss = chapter.train_step(state, linear, inputs, targets)
    return (new, loss) if jnp.isfinite(loss) else (state, loss)
