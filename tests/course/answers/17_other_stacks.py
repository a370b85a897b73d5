"""Answers to the puzzles of chapter 17."""

import jax.numpy as jnp
import numpy as np

from tests.course.answers import Chapter

chapter = Chapter("17_other_stacks")


@chapter.puzzle(lambda: chapter.moved)
def moved(answer):
    return chapter.check_moved(answer)


@moved.right
def in_numpy(codes, scale, history, margin):
    return np.float32(1) / np.asarray(scale), np.asarray(history).max() * 2.0 ** (margin - 6) / 7


@moved.wrong("not yet: with margin 0, codes times the first scale are not the values")
def not_inverted(codes, scale, history, margin):
    return scale, jnp.max(history) / 448 * 2**margin


@moved.wrong("not yet: with margin 1, the second scale is ")
def without_the_margin(codes, scale, history, margin):
    return 1 / scale, jnp.max(history) / 448


@moved.wrong("not yet: ValueError")
def one_alone(codes, scale, history, margin):
    return (1 / scale,)


@chapter.puzzle(lambda: chapter.apart)
def apart(answer):
    return chapter.check_apart(*answer)


def rows(one, other):
    """Rows of 32 that begin with these numbers and end with zeros."""
    a, b = np.zeros(32), np.zeros(32)
    a[: len(one)], b[: len(other)] = one, other
    return a, b


apart.right((*map(jnp.asarray, rows((13, 11), (11, -13))), jnp.float32(0.3), np.float64(0.7)))
ones = np.ones(32)
apart.wrong("not yet: before the sum ")((ones, ones, 0.3, 0.7))
apart.wrong("not yet: E4M3 does not represent all of these numbers")((ones / 3, ones, 0.3, 0.7))
apart.wrong("not yet: ValueError")(("thirteen", ones, 0.3, 0.7))
