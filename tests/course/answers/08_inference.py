"""Answers to the puzzles of chapter 09."""

import jax
import jax.numpy as jnp

from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot
from tests.course.answers import Chapter

bf16 = jnp.bfloat16
chapter = Chapter("08_inference")


@chapter.puzzle(lambda: chapter.decode_mlp)
def one_token(answer):
    return chapter.check_decode(answer)


def mlp(x, gate_up, down, scales, rows=16, up_scale=1.0):
    x_scale, gate_scale, given_scale, h_scale, down_scale = scales
    codes = jnp.pad(quantize(x, x_scale), ((0, rows - len(x)), (0, 0)))
    products = chapter.rows_by_rows(codes.astype(bf16) * x_scale.astype(bf16), gate_up.astype(bf16))
    gate, up = jnp.split(products, 2, axis=1)
    h = jax.nn.silu(gate * gate_scale.astype(bf16)) * (up * (up_scale * given_scale).astype(bf16))
    return scaled_dot(quantize(h, h_scale), down, h_scale, down_scale, bf16)


@one_token.right
def padded_once(x, gate_up, down, *scales):
    return mlp(x, gate_up, down, scales)[:1]


@one_token.wrong("not yet: 0 of 2 matmuls are FP8")
def not_padded(*arguments):
    return chapter.joined(*arguments)


@one_token.wrong("not yet: the result is bfloat16[16,64], and must be bfloat16[1,64]")
def all_rows(x, gate_up, down, *scales):
    return mlp(x, gate_up, down, scales)


@one_token.wrong("not yet: the numbers differ")
def another_scale(x, gate_up, down, *scales):
    return mlp(x, gate_up, down, scales, up_scale=2.0)[:1]


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
