"""Answers to the puzzles of chapter 12."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("12_performance")


@chapter.puzzle(lambda: lambda: chapter.answer)
def another_chip(answer):
    return chapter.verdict(answer() if callable(answer) else answer)


def turning_point(q=3, arithmetic=None, memory="A100"):
    """The N of a chip with the arithmetic of one chip, or of CHIP, and with another's memory."""
    peaks = (chapter.TARGETS[arithmetic] if arithmetic else chapter.CHIP).peak_flops
    bandwidth = chapter.TARGETS[memory].memory_bandwidth
    return q / (2 * bandwidth * (1 / peaks["bf16"] - 1 / peaks["f8e4m3fn"]))


another_chip.right(lambda: np.float32(turning_point()))
another_chip.wrong("is not the turning point of this chip")(
    lambda: chapter.turning_point(3, chapter.CHIP)
)
another_chip.wrong("not yet: 0 is not the turning point of this chip")(0)
another_chip.wrong("not yet: answer must be a number")(lambda: np.array([turning_point()]))


@chapter.puzzle(lambda: chapter.quicker)
def quicker(answer):
    return chapter.check(answer)


@quicker.right
def in_bfloat16(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale, bf16))
    return scaled_dot(to_e4m3(h, (1 / h_scale).astype(bf16)), w_down, h_scale, w_scale, bf16)


@quicker.wrong("of the time")
def relu_of_the_scaled(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = scaled_dot(x, w_up, x_scale, w_scale) * (1 / h_scale)
    h = jnp.clip(jax.nn.relu(h), -E4M3_MAX, E4M3_MAX).astype(e4m3)
    return scaled_dot(h, w_down, h_scale, w_scale, bf16)


@quicker.wrong("of the time")
def wide(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale, bf16))
    return h @ dequantize(w_down, w_scale, bf16).T


@quicker.wrong("not yet: NotImplementedError")
def raises(x, w_up, w_down, x_scale, w_scale, h_scale):
    raise NotImplementedError
