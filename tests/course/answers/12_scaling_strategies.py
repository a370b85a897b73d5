"""Answers to the puzzles of chapter 12."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import scaled_dot
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
one = jnp.float32(1)
chapter = Chapter("12_scaling_strategies")


@chapter.puzzle(lambda: chapter.row_scaled)
def row_scaled(answer):
    return chapter.check_rows(answer)


def sums(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=f32)


@row_scaled.right
def scales_multiplied_first(a, b, a_scale, b_scale):
    d = jnp.einsum("mk,nk->mn", a, b, preferred_element_type=f32)
    return ((b_scale.T * a_scale) * d).astype("bfloat16")


@row_scaled.wrong("not yet: multiplied in f8e4m3fn, f32 (wanted: one FP8 matmul)")
def scales_multiplied_by_a_matmul(a, b, a_scale, b_scale):
    return (sums(a, b) * (a_scale @ b_scale.T)).astype(bf16)


@row_scaled.right
def widened(a, b, a_scale, b_scale):
    d = b_scale.T * (a.astype(f32) @ b.astype(f32).T)
    return jax.lax.convert_element_type(d * a_scale, bf16)


@row_scaled.right
def transposed(a, b, a_scale, b_scale):
    return (sums(b, a) * b_scale * a_scale.reshape(1, -1)).T.astype(bf16)


row_scaled.right(jax.jit(lambda a, b, s, t: (scaled_dot(a, b, one, one) * (s * t.T)).astype(bf16)))
row_scaled.right(functools.partial(lambda a, b, s, t: (sums(a, b) * s * t[:, 0]).astype(bf16)))


@row_scaled.wrong("not yet: multiplied in ")
def before_the_dot(a, b, a_scale, b_scale):
    return (dequantize(a, a_scale) @ dequantize(b, b_scale).T).astype(bf16)


@row_scaled.wrong("not yet: AssertionError: ")
def one_scale_for_all(a, b, a_scale, b_scale):
    return scaled_dot(a, b, jnp.max(a_scale), jnp.max(b_scale), bf16)


@row_scaled.wrong("not yet: AssertionError: ")
def without_the_scale_of_b(a, b, a_scale, b_scale):
    return (sums(a, b) * a_scale).astype(bf16)


@row_scaled.wrong("not yet: AssertionError: ")
def divided(a, b, a_scale, b_scale):
    return (sums(a, b) / a_scale / b_scale.T).astype(bf16)


@row_scaled.wrong("not yet: AssertionError: ")
def sums_in_fp8(a, b, a_scale, b_scale):
    return ((a @ b.T).astype(f32) * a_scale * b_scale.T).astype(bf16)


@row_scaled.wrong("not yet: it returns float32[64,128], and must return bfloat16[64,128]")
def in_float32(a, b, a_scale, b_scale):
    return sums(a, b) * a_scale * b_scale.T


@row_scaled.wrong("not yet: it returns bfloat16[128,64], and must return bfloat16[64,128]")
def not_transposed_back(a, b, a_scale, b_scale):
    return (sums(b, a) * b_scale * a_scale.T).astype(bf16)


@row_scaled.wrong("not yet: it returns nothing, and must return bfloat16[64,128]")
def nothing(a, b, a_scale, b_scale): ...


@row_scaled.wrong("not yet: TypeError: ")
def along_the_wrong_dimension(a, b, a_scale, b_scale):
    return (sums(a, b) * a_scale * b_scale).astype(bf16)


@row_scaled.wrong("not yet: multiplied in nothing")
def without_a_matmul(a, b, a_scale, b_scale):
    products = dequantize(a, a_scale)[:, None] * dequantize(b, b_scale)
    return jnp.cumsum(products, axis=-1)[:, :, -1].astype(bf16)


@row_scaled.wrong("not yet: NotImplementedError")
def raises(a, b, a_scale, b_scale):
    raise NotImplementedError


row_scaled.wrong("not yet: TypeError")(None)


@chapter.puzzle(lambda: (chapter.a, chapter.b))
def lost(answer):
    return chapter.check_lost(*answer)


def rows(large, small, times=1):
    """Two rows: the two `large` numbers, whose products cancel, and then the two `small` ones."""
    a = [large[0], large[0]] * times + [small[0]] * (32 - 2 * times)
    b = [large[1], -large[1]] * times + [small[1]] * (32 - 2 * times)
    return a, b


a, b = rows((448, 448), (3.5, 2))
lost.right((b, a))
lost.right((np.array(a[::-1]), jnp.array(b[::-1])))
lost.right((jnp.array(a, e4m3), np.array(b, np.float16)))
lost.right(rows((-256, 256), (1.875, 4)))
lost.right(tuple(map(tuple, rows((256, 448), (-14, -0.5), times=3))))
lost.wrong("not yet: exact 240 (wanted: above 100), by a Hopper 240 (wanted: 0)")(
    rows((448, 448), (4, 2))
)
lost.wrong("not yet: exact 224 (wanted: above 100), by a Hopper 224 (wanted: 0)")(
    (np.full(32, 3.5), np.full(32, 2.0))
)
lost.wrong("not yet: exact 60 (wanted: above 100), by a Hopper 0 (wanted: 0)")(
    rows((448, 448), (1, 2))
)
lost.wrong("not yet: exact -210 (wanted: above 100), by a Hopper 0 (wanted: 0)")(
    rows((448, 448), (-3.5, 2))
)
lost.wrong("by a Hopper 120 (wanted: 0)")(rows((128, 448), (3.5, 2)))
lost.wrong("by a Hopper 200704 (wanted: 0)")((a, [448, 0, *b[2:]]))
lost.wrong("not yet: give two rows of 32 numbers that are finite in E4M3")(
    rows((512, 512), (3.5, 2))
)
lost.wrong("not yet: give two rows of 32 numbers that are finite in E4M3")((a[:31], b[:31]))
lost.wrong("not yet: give two rows of 32 numbers that are finite in E4M3")(([a], [b]))
lost.wrong("not yet: give two rows of 32 numbers that are finite in E4M3")((a, 2.0))
lost.wrong("not yet: ValueError")((None, b))
lost.wrong("not yet: ")(("3.5 and 2", "448"))
