"""Answers to the puzzles of chapter 03."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
one = jnp.float32(1)
chapter = Chapter("03_scaled_matmul")


@chapter.puzzle(lambda: chapter.in_fp8)
def in_fp8(answer):
    return chapter.check(answer, *chapter.channels, like=chapter.by_channel, kernels_wanted=2)


@in_fp8.right
def both_afterwards(a, b, a_scale, b_scales):
    d = jax.lax.dot(a, b.T, preferred_element_type=f32)
    return (d * (a_scale * b_scales)[None]).astype(bf16)


@in_fp8.right
@jax.jit
def in_bfloat16(a, b, a_scale, b_scales):
    d = jnp.einsum("mk,nk->mn", dequantize(a, a_scale, bf16), b.astype(bf16))
    return (d.astype(f32) * b_scales.reshape(1, -1)).astype("bfloat16")


@in_fp8.right
def transposed(a, b, a_scale, b_scales):
    return (scaled_dot(b, a, one, a_scale) * b_scales[:, None]).T.astype(bf16)


in_fp8.right(functools.partial(lambda a, b, x, y: (y * scaled_dot(a, b, x, one)).astype(bf16)))


@in_fp8.wrong("0 FP8 matmul calls (wanted 1)")
def before_the_dot(a, b, a_scale, b_scales):
    return chapter.by_channel(a, b, a_scale, b_scales)


@in_fp8.wrong("it returns float32[64,128] (wanted bfloat16[64,128])")
def in_float32(a, b, a_scale, b_scales):
    return scaled_dot(a, b, a_scale, one) * b_scales


@in_fp8.wrong("its numbers differ")
def one_scale_for_all(a, b, a_scale, b_scales):
    return scaled_dot(a, b, a_scale, jnp.max(b_scales)).astype(bf16)


@in_fp8.wrong("its numbers differ")
def without_the_activations_scale(a, b, a_scale, b_scales):
    return (scaled_dot(a, b, one, one) * b_scales).astype(bf16)


@in_fp8.wrong("its numbers differ")
def divided(a, b, a_scale, b_scales):
    return (scaled_dot(a, b, a_scale, one) / b_scales).astype(bf16)


@in_fp8.wrong("with other scales its numbers differ")
def a_scale_of_the_sample(a, b, a_scale, b_scales):
    return (scaled_dot(a, b, chapter.a_scale, one) * b_scales).astype(bf16)


@in_fp8.wrong("it does not trace: ")
def along_the_wrong_dimension(a, b, a_scale, b_scales):
    return (scaled_dot(a, b, a_scale, one) * b_scales[:, None]).astype(bf16)


@in_fp8.wrong("0 FP8 matmul calls (wanted 1)")
def requantized(a, b, a_scale, b_scales):
    b = (b.astype(f32) * b_scales[:, None]).astype(bf16)
    return jnp.matmul(a.astype(bf16), b.T, preferred_element_type=f32).astype(
        bf16
    ) * a_scale.astype(bf16)


@in_fp8.wrong("it does not trace: NotImplementedError")
def raises(a, b, a_scale, b_scales):
    raise NotImplementedError


in_fp8.wrong("it does not trace: TypeError")(None)


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


def of_two_types(a, b, a_scale, b_scale, d_scale):
    d = jax.lax.dot(a.astype(bf16), b.T, preferred_element_type=f32)
    return to_e4m3(d * a_scale * b_scale, d_scale)


def on_one_side(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(scaled_dot(a, b, a_scale * b_scale, one), d_scale)


def on_the_result(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(scaled_dot(a, b, one, one), b_scale * d_scale * a_scale)


def on_the_other_side(a, b, a_scale, b_scale, d_scale):
    a, b = a.astype(f32), (b_scale * a_scale) * b.astype(f32)
    return jnp.clip(jnp.einsum("mk,nk->mn", a, b) * d_scale, -E4M3_MAX, E4M3_MAX).astype(
        "float8_e4m3fn"
    )


def rows_that_are_equal(a, b, a_scale, b_scale, d_scale):
    return chapter.scaled_matmul(a, b, jnp.full((a.shape[0], 1), a_scale), b_scale, d_scale)


def without_clamp(a, b, a_scale, b_scale, d_scale):
    return chapter.unclamped(a, b, a_scale, b_scale, d_scale)


def without_a_scale(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.lax.dot(a, b.T, preferred_element_type=f32) * a_scale, d_scale)


def widened_and_bfloat16(a, b, a_scale, b_scale, d_scale):
    return widened_twice(a, b, a_scale, b_scale, d_scale).astype(bf16)


def scales_of_the_sample(a, b, a_scale, b_scale, d_scale):
    return widened_twice(a, b, *(float(scale) for scale in chapter.operands[2:]))


def sum_of_products(a, b, a_scale, b_scale, d_scale):  # which XLA makes a matmul
    a, b = dequantize(a, a_scale, f32), dequantize(b, b_scale, f32)
    return to_e4m3(jnp.sum(a[:, None] * b, axis=-1), d_scale)


def without_a_matmul(a, b, a_scale, b_scale, d_scale):
    a, b = dequantize(a, a_scale, f32), dequantize(b, b_scale, f32)
    return to_e4m3(jnp.cumsum(a[:, None] * b, axis=-1)[:, :, -1], d_scale)


def in_numpy(a, b, a_scale, b_scale, d_scale):
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32).T


def nothing(a, b, a_scale, b_scale, d_scale): ...


def raises_too(a, b, a_scale, b_scale, d_scale):
    raise AssertionError


broken.right((widened_twice, on_one_side))
broken.right((functools.partial(through_float16), functools.partial(on_the_result)))
broken.right((sum_of_products, on_one_side))
broken.right((jax.jit(of_two_types), jax.jit(on_the_other_side)))
broken.wrong("✗ on_one_side: its numbers are right, lost scale (wanted fp8)")(
    (on_one_side, widened_twice)
)
broken.wrong("✗ rows_that_are_equal: its numbers are right, lost nothing (wanted fp8)")(
    (rows_that_are_equal, on_one_side)
)
broken.wrong("✗ without_clamp: its numbers are right, lost output (wanted scale)")(
    (widened_twice, without_clamp)
)
broken.wrong("✗ without_a_scale: its numbers differ")((widened_twice, without_a_scale))
broken.wrong("✗ widened_and_bfloat16: it returns bfloat16[64,128] (wanted float8_e4m3fn[64,128])")(
    (widened_and_bfloat16, on_one_side)
)
broken.wrong("with other scales its numbers differ")((scales_of_the_sample, on_one_side))
broken.wrong("lost the matmul (wanted fp8)")((without_a_matmul, on_one_side))
broken.wrong("✗ in_numpy: it does not run: TracerArrayConversionError")((in_numpy, on_one_side))
broken.wrong("✗ nothing: it returns nothing yet")((nothing, on_one_side))
broken.wrong("✗ raises_too: it does not run: AssertionError")((raises_too, on_one_side))
broken.wrong("✗ your function: it does not run: TypeError")((None, 3.0))
