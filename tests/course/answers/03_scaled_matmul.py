"""Answers to the puzzles of chapter 03."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
one = jnp.float32(1)
chapter = Chapter("03_scaled_matmul")


@chapter.puzzle(lambda: chapter.in_fp8)
def in_fp8(answer):
    return chapter.check(answer, *chapter.channels, like=chapter.by_channel, kernels_wanted=2)


@in_fp8.right
@jax.jit
def in_bfloat16(a, b, a_scale, b_scales):
    d = jnp.einsum("mk,nk->mn", dequantize(a, a_scale, bf16), b.astype(bf16))
    return (d.astype(f32) * b_scales.reshape(1, -1)).astype("bfloat16")


@in_fp8.wrong("0 FP8 matmul calls (wanted 1)")
def before_the_dot(a, b, a_scale, b_scales):
    return chapter.by_channel(a, b, a_scale, b_scales)


@in_fp8.wrong("it returns float32[64,128] (wanted bfloat16[64,128])")
def in_float32(a, b, a_scale, b_scales):
    return scaled_dot(a, b, a_scale, one) * b_scales


@in_fp8.wrong("it does not trace: NotImplementedError")
def raises(a, b, a_scale, b_scales):
    raise NotImplementedError


@chapter.puzzle(lambda: (chapter.loses_fp8, chapter.loses_scale))
def broken(answer):
    return chapter.check_broken(*answer)


def widened_twice(a, b, a_scale, b_scale, d_scale):
    d = jax.lax.dot(a.astype(f32) * a_scale, (b.astype(bf16).astype(f32) * b_scale).T)
    return to_e4m3(d, d_scale)


def through_float16(a, b, a_scale, b_scale, d_scale):
    a = a.astype(jnp.float16).astype(f32) * a_scale
    d = a @ (b.astype(f32) * b_scale).T
    return jnp.minimum(jnp.maximum(d * d_scale, -448), 448).astype(e4m3)


def on_one_side(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(scaled_dot(a, b, a_scale * b_scale, one), d_scale)


def on_the_result(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(scaled_dot(a, b, one, one), b_scale * d_scale * a_scale)


def rows_that_are_equal(a, b, a_scale, b_scale, d_scale):
    return chapter.scaled_matmul(a, b, jnp.full((a.shape[0], 1), a_scale), b_scale, d_scale)


def in_numpy(a, b, a_scale, b_scale, d_scale):
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32).T


broken.right((functools.partial(through_float16), functools.partial(on_the_result)))
broken.wrong("✗ on_one_side: its numbers are right, lost scale (wanted fp8)")(
    (on_one_side, widened_twice)
)
broken.wrong("✗ rows_that_are_equal: its numbers are right, lost nothing (wanted fp8)")(
    (rows_that_are_equal, on_one_side)
)
broken.wrong("✗ in_numpy: it does not run: TracerArrayConversionError")((in_numpy, on_one_side))
