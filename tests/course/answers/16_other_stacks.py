"""Answers to the puzzles of chapter 16."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.course.answers import Chapter

chapter = Chapter("16_other_stacks")


@chapter.puzzle(lambda: chapter.moved)
def moved(answer):
    return chapter.check_moved(answer)


@moved.right
def reciprocals(codes, scale, history, margin):
    return jnp.reciprocal(scale), jnp.reciprocal(448 / history.max() / 2**margin)


@moved.right
def in_numpy(codes, scale, history, margin):
    return np.float32(1) / np.asarray(scale), np.asarray(history).max() * 2.0 ** (margin - 6) / 7


@moved.right
def by_the_format(codes, scale, history, margin):
    largest = float(jnp.finfo(codes.dtype).max)
    return [scale**-1, jnp.ldexp(jnp.max(jnp.abs(history)), margin) / largest]


moved.right(jax.jit(lambda c, s, h, m: jnp.stack([1 / s, jnp.sort(h)[-1] * jnp.exp2(m) / 448])))


@moved.wrong("not yet: with margin 0, codes times the first scale are not the values")
def not_inverted(codes, scale, history, margin):
    return scale, jnp.max(history) / 448 * 2**margin


@moved.wrong("not yet: with margin 1, the second scale is ")
def without_the_margin(codes, scale, history, margin):
    return 1 / scale, jnp.max(history) / 448


@moved.wrong("not yet: with margin 1, the second scale is ")
def margin_the_other_way(codes, scale, history, margin):
    return 1 / scale, jnp.max(history) / 448 / 2**margin


@moved.wrong("not yet: with margin 0, the second scale is ")
def the_newest_amax(codes, scale, history, margin):
    return 1 / scale, history[0] / 448 * 2**margin


@moved.wrong("not yet: with margin 0, the second scale is ")
def quantizes_next(codes, scale, history, margin):
    return 1 / scale, 448 / jnp.max(history) / 2**margin


@moved.wrong("not yet: with margin 0, the second scale is ")
def of_the_other_format(codes, scale, history, margin):
    return 1 / scale, jnp.max(history) / 57344 * 2**margin


@moved.wrong("not yet: ValueError")
def one_alone(codes, scale, history, margin):
    return (1 / scale,)


@moved.wrong("not yet: NotImplementedError")
def raises(codes, scale, history, margin):
    raise NotImplementedError


@moved.wrong("not yet: TypeError")
def nothing(codes, scale, history, margin): ...


moved.wrong("not yet: TypeError")(None)


@chapter.puzzle(lambda: chapter.apart)
def apart(answer):
    return chapter.check_apart(*answer)


def rows(one, other):
    """Rows of 32 that begin with these numbers and end with zeros."""
    a, b = np.zeros(32), np.zeros(32)
    a[: len(one)], b[: len(other)] = one, other
    return a, b


apart.right((*rows((15, 14), (14, -15)), 0.3, 0.7))
apart.right((*map(jnp.asarray, rows((13, 11), (11, -13))), jnp.float32(0.3), np.float64(0.7)))
apart.right((*map(list, rows((13, 13, 12, 12), (12, 12, -13, -13))), 0.1, 1.7))
apart.right((*rows((208, 192), (192, -208)), 3e-3, 7e5))
ones = np.ones(32)
apart.wrong("not yet: before the sum ")((ones, ones, 0.3, 0.7))
apart.wrong("not yet: before the sum 0, after the sum 0")((*rows((13, 12), (12, -13)), 0.5, 2.0))
apart.wrong("not yet: before the sum 0, after the sum 0")((np.zeros(32), ones, 0.3, 0.7))
apart.wrong("not yet: E4M3 does not represent all of these numbers")((ones / 3, ones, 0.3, 0.7))
apart.wrong("not yet: E4M3 does not represent all of these numbers")((ones, 500 * ones, 0.3, 0.7))
apart.wrong("not yet: give two rows of 32 numbers, and two numbers")((ones[:31], ones, 0.3, 0.7))
apart.wrong("not yet: give two rows of 32 numbers, and two numbers")((ones, ones, [0.3], 0.7))
apart.wrong("not yet: the results are ")((*rows((13, 12), (12, -13)), 0.3, 1e-40))
apart.wrong("not yet: the results are ")((ones, ones, 0.3, np.inf))
apart.wrong("not yet: the results are ")((ones, ones, 0.3, np.nan))
apart.wrong("not yet: ")((None, ones, 0.3, 0.7))
apart.wrong("not yet: ValueError")(("thirteen", ones, 0.3, 0.7))
