"""Answers to the puzzles of chapter 05."""

import functools

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
def factor_first(a, b, a_scale, b_scale, d_scale):
    codes, amax = parts(a, b, a_scale, b_scale, d_scale)
    return [codes, d_scale * amax]


@one_call.right
@jax.jit
def divided(a, b, a_scale, b_scale, d_scale):
    d = jnp.einsum("mk,nk->mn", a.astype(f32) * a_scale, b.astype(f32) * b_scale)
    codes = jnp.clip(d * d_scale, -E4M3_MAX, E4M3_MAX).astype(e4m3)
    return codes, jnp.abs(d).max() / (1 / d_scale)


one_call.right(functools.partial(lambda *args: (parts(*args)[0], parts(*args)[1] * args[-1])))


@one_call.wrong("the numbers of result 2 differ")
def not_scaled(a, b, a_scale, b_scale, d_scale):
    return parts(a, b, a_scale, b_scale, d_scale)


@one_call.wrong("the numbers of result 2 differ")
def divides_by_the_scale(a, b, a_scale, b_scale, d_scale):
    codes, amax = parts(a, b, a_scale, b_scale, d_scale)
    return codes, amax / d_scale


@one_call.wrong("2 FP8 matmul calls (wanted 1)")
def the_first_version(a, b, a_scale, b_scale, d_scale):
    return chapter.how_near(a, b, a_scale, b_scale, d_scale)


@one_call.wrong("it returns float8_e4m3fn[64,128] (wanted ")
def without_amax(a, b, a_scale, b_scale, d_scale):
    return parts(a, b, a_scale, b_scale, d_scale)[0]


@one_call.wrong("it returns float32[], float8_e4m3fn[64,128] (wanted ")
def other_order(a, b, a_scale, b_scale, d_scale):
    codes, amax = parts(a, b, a_scale, b_scale, d_scale)
    return amax * d_scale, codes


@one_call.wrong("(wanted ")
def of_each_row(a, b, a_scale, b_scale, d_scale):
    d = scaled_dot(a, b, a_scale, b_scale)
    return to_e4m3(d, d_scale), jnp.max(jnp.abs(d), axis=1) * d_scale


@one_call.wrong("the numbers of result 2 differ")
def amax_of_the_codes(a, b, a_scale, b_scale, d_scale):
    codes = parts(a, b, a_scale, b_scale, d_scale)[0]
    return codes, jnp.max(jnp.abs(codes.astype(f32)))


@one_call.wrong("it does not trace: AssertionError")
def raises(a, b, a_scale, b_scale, d_scale):
    raise AssertionError


one_call.wrong("it does not trace: TypeError")(None)


@chapter.puzzle(lambda: chapter.careful_update)
def update(answer):
    return chapter.check_update(answer)


@update.right
def chosen_at_the_end(state, amax):
    good = jnp.isfinite(amax) & (amax > 0)
    history = jnp.roll(state.history, 1).at[0].set(amax)
    scale = jnp.max(history) / 448
    new = type(state)(history, scale, 1 / scale)
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, state)


@update.right
def by_cond(state, amax):
    good = jnp.logical_and(jnp.isfinite(amax), amax != 0)
    return jax.lax.cond(good, chapter.update, lambda state, amax: state, state, amax)


@update.right
def by_select(state, amax):
    new = chapter.update(state, amax)
    keep = jnp.logical_not((amax > 0) & (amax < jnp.inf))
    return new._replace(**{
        name: jax.lax.select(jnp.full(jnp.shape(old), keep), old, getattr(new, name))
        for name, old in state._asdict().items()
    })  # fmt: skip


@update.right
def in_place_of_the_last(state, amax):
    good = (amax > 0) & jnp.isfinite(amax)
    history = jnp.where(good, jnp.append(state.history[1:], amax), state.history)
    scale = jnp.where(good, history.max() / E4M3_MAX, state.scale)
    return type(state)(d_scale=1 / scale, scale=scale, history=history)


@update.wrong("after amax 3, then 0")
def as_in_the_chapter(state, amax):
    return chapter.update(state, amax)


@update.wrong("after amax 3, then inf")
def asks_for_zero_only(state, amax):
    new = chapter.update(state, amax)
    return jax.tree.map(lambda new, old: jnp.where(amax == 0, old, new), new, state)


@update.wrong("✗ after amax 3, then 0")
def asks_for_finite_only(state, amax):
    new = chapter.update(state, amax)
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(amax), new, old), new, state)


@update.wrong("✗ after amax 3")
def never_changes(state, amax):
    return state


@update.wrong("✗ after 6, 3, nan, with a history of 2")
def forgets_everything_else(state, amax):
    good = (amax > 0) & jnp.isfinite(amax)
    scale = jnp.where(good, amax / 448, state.scale)
    return type(state)(state.history, scale, 1 / scale)


@update.wrong("✗ after amax 3")
def scale_the_other_way(state, amax):
    new = chosen_at_the_end(state, amax)
    return type(state)(new.history, new.d_scale, new.scale)


@update.wrong("not yet: TypeError")
def for_a_history_of_four(state, amax):
    good = jnp.full(4, (amax > 0) & jnp.isfinite(amax))
    shifted = jnp.concatenate([amax[None], state.history[:-1]])
    history = jax.lax.select(good, shifted, state.history)
    scale = jnp.where(good[0], jnp.max(history) / E4M3_MAX, state.scale)
    return type(state)(history, scale, 1 / scale)


@update.wrong("it returns no Scaling")
def a_tuple(state, amax):
    return tuple(chosen_at_the_end(state, amax))


@update.wrong("not yet: TracerBoolConversionError")
def by_if(state, amax):
    return chapter.update(state, amax) if amax > 0 else state


@update.wrong("not yet: NotImplementedError")
def raises_too(state, amax):
    raise NotImplementedError


update.wrong("not yet: TypeError")(None)
update.wrong("not yet: TypeError")(448.0)
