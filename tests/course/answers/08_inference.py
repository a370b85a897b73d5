"""Answers to the puzzles of chapter 08."""

import jax.numpy as jnp

from helpers.puzzles import check
from tests.course.answers import Chapter

chapter = Chapter("08_inference")


@chapter.puzzle(lambda: chapter.decode_mlp)
def one_token(answer):
    return check(answer, *chapter.given, **chapter.wanted)


def padded(x):
    return jnp.pad(x, ((0, 15), (0, 0)))


@one_token.right
def padded_once(x, *weights_and_scales):
    return chapter.joined(padded(x), *weights_and_scales)[:1]


@one_token.wrong("0 FP8 matmul calls (wanted 2)")
def not_padded(*arguments):
    return chapter.joined(*arguments)


@one_token.wrong("it returns bfloat16[16,64] (wanted bfloat16[1,64])")
def all_rows(x, *weights_and_scales):
    return chapter.joined(padded(x), *weights_and_scales)


@one_token.wrong("its numbers differ")
def another_scale(x, gate_up, down, x_scale, gate_scale, up_scale, *others):
    scales = x_scale, gate_scale, 2 * up_scale, *others
    return chapter.joined(padded(x), gate_up, down, *scales)[:1]


@chapter.puzzle(lambda: chapter.smooth)
def smoothing(answer):
    return chapter.check_smooth(answer)


def factor(down, largest):
    return largest / jnp.max(jnp.abs(down), 0)


@smoothing.right
def by_the_root(up, down, largest):
    s = factor(down, largest) ** 0.5
    return up / s[:, None], down * s


@smoothing.wrong("not yet: the ratios are from")
def unchanged(up, down, largest):
    return up, down


@smoothing.wrong("not yet: the ratios are from")
def by_the_ratio(up, down, largest):
    s = factor(down, largest)
    return up / s[:, None], down * s


@smoothing.wrong("not yet: the MLP computes something else")
def one_of_the_two(up, down, largest):
    return up / factor(down, largest)[:, None] ** 0.5, down
