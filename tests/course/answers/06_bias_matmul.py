"""Answers to the puzzles of chapter 06."""

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
def scaled_first(a, b, bias, a_scale, b_scale, d_scale):
    d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    bound = E4M3_MAX / d_scale
    return (jnp.clip(d, -bound, bound) * d_scale).astype(e4m3), jnp.abs(d).max()


@edit.wrong("the assertion passes, and should not")
def unchanged(a, b, bias, a_scale, b_scale, d_scale):
    return finished(scaled_dot(a, b, a_scale, b_scale), bias, d_scale)


@edit.wrong("numbers wrong (codes: nan")
def without_clamp(a, b, bias, a_scale, b_scale, d_scale):
    d = jax.nn.gelu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    return (d * d_scale).astype(e4m3), jnp.max(jnp.abs(d))


@edit.wrong("not yet: NotImplementedError")
def raises(a, b, bias, a_scale, b_scale, d_scale):
    raise NotImplementedError


@chapter.puzzle(lambda: chapter.fixed)
def fixed(answer):
    operands = chapter.a, chapter.b, chapter.bias, *chapter.scales
    return chapter.check(answer, *operands, like=chapter.plain, epilogue="BIAS_RELU", amax=True)


@fixed.right
@jax.jit
def written_out(x, w, bias, x_scale, w_scale, y_scale):
    d = jnp.einsum("mk,nk->mn", x.astype(f32) * x_scale, w.astype(f32) * w_scale)
    d = jax.nn.relu(d + bias.astype("float32"))
    return [jnp.minimum(jnp.maximum(y_scale * d, -448), 448).astype(e4m3), jnp.max(jnp.abs(d))]


def with_activation(activation, x, w, bias, x_scale, w_scale, y_scale):
    d = activation(scaled_dot(x, w, x_scale, w_scale) + bias.astype(f32))
    return to_e4m3(d, y_scale), jnp.max(jnp.abs(d))


@fixed.wrong("kernels in all")
def plain(x, w, bias, x_scale, w_scale, y_scale):
    return chapter.plain(x, w, bias, x_scale, w_scale, y_scale)


@fixed.wrong("the call's epilogue is BIAS (wanted BIAS_RELU)")
def without_relu(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(lambda d: d, x, w, bias, x_scale, w_scale, y_scale)


@fixed.wrong("it does not trace: NotImplementedError")
def raises_too(x, w, bias, x_scale, w_scale, y_scale):
    raise NotImplementedError
