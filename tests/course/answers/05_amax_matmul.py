"""Answers to the puzzles of chapter 05."""

import jax
import jax.numpy as jnp

from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
chapter = Chapter("05_amax_matmul")


@chapter.puzzle(lambda: chapter.one_call)
def one_call(answer):
    wanted = {"like": chapter.how_near, "kernels_wanted": 2, "amax": True}
    return chapter.check(answer, *chapter.further, **wanted)


def parts(a, b, a_scale, b_scale, d_scale):
    d = scaled_dot(a, b, a_scale, b_scale)
    return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))


@one_call.right
@jax.jit
def divided(a, b, a_scale, b_scale, d_scale):
    d = jnp.einsum("mk,nk->mn", a.astype(f32) * a_scale, b.astype(f32) * b_scale)
    codes = jnp.clip(d * d_scale, -E4M3_MAX, E4M3_MAX).astype(e4m3)
    return codes, jnp.abs(d).max() / (1 / d_scale)


@one_call.wrong("the numbers of result 2 differ")
def not_scaled(a, b, a_scale, b_scale, d_scale):
    return parts(a, b, a_scale, b_scale, d_scale)


@one_call.wrong("2 FP8 matmul calls (wanted 1)")
def the_first_version(a, b, a_scale, b_scale, d_scale):
    return chapter.how_near(a, b, a_scale, b_scale, d_scale)


@one_call.wrong("it does not trace: AssertionError")
def raises(a, b, a_scale, b_scale, d_scale):
    raise AssertionError


@chapter.puzzle(lambda: chapter.careful_update)
def update(answer):
    return chapter.check_update(answer)


@update.right
def by_cond(state, amax):
    good = jnp.logical_and(jnp.isfinite(amax), amax != 0)
    return jax.lax.cond(good, chapter.update, lambda state, amax: state, state, amax)


@update.wrong("after amax 3, then 0")
def as_in_the_chapter(state, amax):
    return chapter.update(state, amax)


@update.wrong("after amax 3, then inf")
def asks_for_zero_only(state, amax):
    new = chapter.update(state, amax)
    return jax.tree.map(lambda new, old: jnp.where(amax == 0, old, new), new, state)


@update.wrong("not yet: TypeError")
def for_a_history_of_four(state, amax):
    good = jnp.full(4, (amax > 0) & jnp.isfinite(amax))
    shifted = jnp.concatenate([amax[None], state.history[:-1]])
    history = jax.lax.select(good, shifted, state.history)
    scale = jnp.where(good[0], jnp.max(history) / E4M3_MAX, state.scale)
    return type(state)(history, scale, 1 / scale)
