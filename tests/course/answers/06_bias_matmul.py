"""Answers to the puzzles of chapter 06."""

import functools

import jax
import jax.numpy as jnp

from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("06_bias_matmul")


@chapter.puzzle(lambda: chapter.edited)
def edit(answer):
    return chapter.check_edits(answer)


def finished(d, bias, d_scale):
    d = jax.nn.gelu(d + bias.astype(f32))
    return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))


@edit.right
def scales_afterwards(a, b, bias, a_scale, b_scale, d_scale):
    sums = jax.lax.dot(a, b.T, preferred_element_type=f32)
    return finished(b_scale * a_scale * sums, bias, d_scale)


@edit.right
def scaled_first(a, b, bias, a_scale, b_scale, d_scale):
    d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    bound = E4M3_MAX / d_scale
    return (jnp.clip(d, -bound, bound) * d_scale).astype(e4m3), jnp.abs(d).max()


edit.right(jax.jit(scales_afterwards))
edit.right(functools.partial(scaled_first))


@edit.wrong("the assertion passes, and should not")
def unchanged(a, b, bias, a_scale, b_scale, d_scale):
    return finished(scaled_dot(a, b, a_scale, b_scale), bias, d_scale)


@edit.wrong("numbers wrong (codes: nan")
def without_clamp(a, b, bias, a_scale, b_scale, d_scale):
    d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    return (d * d_scale).astype(e4m3), jnp.max(jnp.abs(d))


@edit.wrong("the edit must keep it FP8")
def not_in_fp8(a, b, bias, a_scale, b_scale, d_scale):
    left = a.astype(bf16).astype(f32) * a_scale
    return finished(jax.lax.dot(left, (b.astype(f32) * b_scale).T), bias, d_scale)


@edit.wrong("numbers wrong")
def relu_for_gelu(a, b, bias, a_scale, b_scale, d_scale):
    d = jax.nn.relu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))


@edit.wrong("it returns float8_e4m3fn[64,128] (wanted float8_e4m3fn[64,128], float32[])")
def without_amax(a, b, bias, a_scale, b_scale, d_scale):
    return unchanged(a, b, bias, a_scale, b_scale, d_scale)[0]


@edit.wrong("numbers wrong (amax")
def amax_of_the_scaled(a, b, bias, a_scale, b_scale, d_scale):
    codes, amax = unchanged(a, b, bias, a_scale, b_scale, d_scale)
    return codes, amax * d_scale


@edit.wrong("not yet: NotImplementedError")
def raises(a, b, bias, a_scale, b_scale, d_scale):
    raise NotImplementedError


edit.wrong("not yet: TypeError")(None)
edit.wrong("not yet: TypeError")(lambda a, b: a)


@chapter.puzzle(lambda: chapter.fixed)
def fixed(answer):
    operands = chapter.a, chapter.b, chapter.bias, *chapter.scales
    return chapter.check(answer, *operands, like=chapter.plain, epilogue="BIAS_RELU", amax=True)


@fixed.right
def keywords(x, w, bias, x_scale, w_scale, y_scale):
    d = jnp.maximum(0, bias.astype(f32) + scaled_dot(b=w, a=x, b_scale=w_scale, a_scale=x_scale))
    return to_e4m3(d_scale=y_scale, d=d), jnp.abs(d).max()


@fixed.right
@jax.jit
def written_out(x, w, bias, x_scale, w_scale, y_scale):
    d = jnp.einsum("mk,nk->mn", x.astype(f32) * x_scale, w.astype(f32) * w_scale)
    d = jax.nn.relu(d + bias.astype("float32"))
    return [jnp.minimum(jnp.maximum(y_scale * d, -448), 448).astype(e4m3), jnp.max(jnp.abs(d))]


def with_activation(activation, x, w, bias, x_scale, w_scale, y_scale):
    d = activation(scaled_dot(x, w, x_scale, w_scale) + bias.astype(f32))
    return to_e4m3(d, y_scale), jnp.max(jnp.abs(d))


fixed.right(functools.partial(with_activation, jax.nn.relu))


@fixed.wrong("kernels in all")
def plain(x, w, bias, x_scale, w_scale, y_scale):
    return chapter.plain(x, w, bias, x_scale, w_scale, y_scale)


@fixed.wrong("the call's epilogue is BIAS (wanted BIAS_RELU)")
def without_relu(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(lambda d: d, x, w, bias, x_scale, w_scale, y_scale)


@fixed.wrong("the numbers of result 1 differ")
def without_bias(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(jax.nn.relu, x, w, 0 * bias, x_scale, w_scale, y_scale)


@fixed.wrong("it returns float32[64,128], float32[] (wanted ")
def without_conversion(x, w, bias, x_scale, w_scale, y_scale):
    codes, amax = with_activation(jax.nn.relu, x, w, bias, x_scale, w_scale, y_scale)
    return codes.astype(f32), amax


@fixed.wrong("the numbers of result 2 differ")
def amax_of_the_scaled_too(x, w, bias, x_scale, w_scale, y_scale):
    codes, amax = with_activation(jax.nn.relu, x, w, bias, x_scale, w_scale, y_scale)
    return codes, amax * y_scale


@fixed.wrong("the numbers of result 1 differ")
def gelu(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(jax.nn.gelu, x, w, bias, x_scale, w_scale, y_scale)


@fixed.wrong("it does not trace: NotImplementedError")
def raises_too(x, w, bias, x_scale, w_scale, y_scale):
    raise NotImplementedError


fixed.wrong("it does not trace: TypeError")(None)
