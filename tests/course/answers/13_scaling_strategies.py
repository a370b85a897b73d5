"""Answers to the puzzles of chapter 13."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.recipes import scaled_dot
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("13_scaling_strategies")


@chapter.puzzle(lambda: chapter.row_scaled)
def row_scaled(answer):
    return chapter.check_rows(answer)


@row_scaled.wrong("0 FP8 matmul calls (wanted 1)")
def scaled_before_the_sum(a, b, a_scale, b_scale):
    return ((a.astype(f32) * a_scale) @ (b.astype(f32) * b_scale).T).astype(bf16)


@row_scaled.right
def widened(a, b, a_scale, b_scale):
    d = b_scale.T * (a.astype(f32) @ b.astype(f32).T)
    return jax.lax.convert_element_type(d * a_scale, bf16)


@row_scaled.wrong("its numbers differ")
def one_scale_for_all(a, b, a_scale, b_scale):
    return scaled_dot(a, b, jnp.max(a_scale), jnp.max(b_scale), bf16)


@row_scaled.wrong("it returns float32[64,128] (wanted bfloat16[64,128])")
def in_float32(a, b, a_scale, b_scale):
    return a.astype(f32) @ b.astype(f32).T * a_scale * b_scale.T


@chapter.puzzle(lambda: (chapter.a, chapter.b))
def lost(answer):
    return chapter.check_lost(*answer)


def rows(large, small, times=1):
    """Two rows: the two `large` numbers, whose products cancel, and then the two `small` ones."""
    a = [large[0], large[0]] * times + [small[0]] * (32 - 2 * times)
    b = [large[1], -large[1]] * times + [small[1]] * (32 - 2 * times)
    return a, b


a, b = rows((448, 448), (3.5, 2))
lost.right((np.array(a[::-1]), jnp.array(b[::-1])))
lost.wrong("not yet: exact 240 (wanted: above 100), by a Hopper 240 (wanted: 0)")(
    rows((448, 448), (4, 2))
)
lost.wrong("not yet: exact -210 (wanted: above 100), by a Hopper 0 (wanted: 0)")(
    rows((448, 448), (-3.5, 2))
)
lost.wrong("not yet: ValueError")((None, b))
