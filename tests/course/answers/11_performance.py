"""Answers to the puzzles of chapter 11."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize, quantize
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("11_performance")


@chapter.puzzle(lambda: lambda: chapter.answer)
def another_chip(answer):
    return chapter.verdict(answer() if callable(answer) else answer)


def turning_point(q=3, arithmetic=None, memory="A100"):
    """The N of a chip with the arithmetic of one chip, or of CHIP, and with another's memory."""
    peaks = (chapter.TARGETS[arithmetic] if arithmetic else chapter.CHIP).peak_flops
    bandwidth = chapter.TARGETS[memory].memory_bandwidth
    return q / (2 * bandwidth * (1 / peaks["bf16"] - 1 / peaks["f8e4m3fn"]))


another_chip.right(turning_point)
another_chip.right(lambda: np.float32(turning_point()))
another_chip.right(lambda: np.array(turning_point()))
another_chip.right(lambda: jnp.float32(turning_point()))
another_chip.right(lambda: round(turning_point()))
another_chip.right(lambda: Fraction(turning_point()))
another_chip.wrong("is not the turning point of this chip")(
    lambda: chapter.turning_point(3, chapter.CHIP)
)
another_chip.wrong("is not the turning point of this chip")(lambda: turning_point(q=5))
another_chip.wrong("is not the turning point of this chip")(lambda: turning_point(memory="B200"))
another_chip.wrong("is not the turning point of this chip")(
    lambda: turning_point(arithmetic="B200")
)
another_chip.wrong("is not the turning point of this chip")(lambda: -turning_point())
another_chip.wrong("not yet: 0 is not the turning point of this chip")(0)
another_chip.wrong("not yet: answer must be a number")(lambda: np.array([turning_point()]))
another_chip.wrong("not yet: answer must be a number")(lambda: str(turning_point()))
another_chip.wrong("not yet: answer must be a number")(lambda: (turning_point(),))
another_chip.wrong("not yet: answer must be a number")(float("nan"))
another_chip.wrong("not yet: answer must be a number")(1j)
another_chip.wrong("not yet: answer must be a number")(None)


@chapter.puzzle(lambda: chapter.quicker)
def quicker(answer):
    return chapter.check(answer)


@quicker.right
def written_out(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = (x.astype(f32) * x_scale) @ (w_up.astype(f32) * w_scale).T
    h = jnp.maximum(h, 0) / h_scale
    h = jnp.minimum(jnp.maximum(h, -448), 448).astype(e4m3)
    return jnp.einsum(
        "mk,nk->mn", h.astype(bf16) * h_scale.astype(bf16), dequantize(w_down, w_scale, bf16)
    )


def layers(x, w_up, w_down, x_scale, w_scale, h_scale, activation=jax.nn.relu):
    h = activation(scaled_dot(x, w_up, x_scale, w_scale))
    h = to_e4m3(h, jnp.reciprocal(h_scale))
    return scaled_dot(b=w_down, b_scale=w_scale, a=h, a_scale=h_scale, dtype=bf16)


@quicker.right
def in_bfloat16(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale, bf16))
    return scaled_dot(to_e4m3(h, (1 / h_scale).astype(bf16)), w_down, h_scale, w_scale, bf16)


@quicker.wrong("1.29 of the time: not yet")
def relu_of_the_scaled(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = scaled_dot(x, w_up, x_scale, w_scale) * (1 / h_scale)
    h = jnp.clip(jax.nn.relu(h), -E4M3_MAX, E4M3_MAX).astype(e4m3)
    return scaled_dot(h, w_down, h_scale, w_scale, bf16)


quicker.right(functools.partial(layers))
quicker.right(jax.jit(layers))


@quicker.wrong("1.00 of the time: not yet")
def as_it_is(x, w_up, w_down, x_scale, w_scale, h_scale):
    return chapter.mlp(x, w_up, w_down, x_scale, w_scale, h_scale)


@quicker.wrong("of the time: not yet")
def wide(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale, bf16))
    return h @ dequantize(w_down, w_scale, bf16).T


@quicker.right
def quantized_from_float32(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale))
    return scaled_dot(quantize(h, h_scale), w_down, h_scale, w_scale, bf16)


@quicker.wrong("not yet: its numbers differ from those of mlp")
def divides(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale))
    return scaled_dot(to_e4m3(h, h_scale), w_down, h_scale, w_scale, bf16)


@quicker.wrong("not yet: it returns float32[8192,1024], and must return bfloat16[8192,1024]")
def in_float32(x, w_up, w_down, x_scale, w_scale, h_scale):
    h = jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale))
    return scaled_dot(to_e4m3(h, 1 / h_scale), w_down, h_scale, w_scale)


@quicker.wrong("not yet: it returns bfloat16[8192,4096], and must return bfloat16[8192,1024]")
def the_first_layer(x, w_up, w_down, x_scale, w_scale, h_scale):
    return jax.nn.relu(scaled_dot(x, w_up, x_scale, w_scale, bf16))


@quicker.wrong("not yet: it returns nothing, and must return bfloat16[8192,1024]")
def nothing(x, w_up, w_down, x_scale, w_scale, h_scale): ...


@quicker.wrong("not yet: NotImplementedError")
def raises(x, w_up, w_down, x_scale, w_scale, h_scale):
    raise NotImplementedError


quicker.wrong("not yet: its numbers differ from those of mlp")(
    functools.partial(layers, activation=lambda d: d)
)
quicker.wrong("not yet: its numbers differ from those of mlp")(
    functools.partial(layers, activation=lambda d: jnp.nan * d)
)
quicker.wrong("not yet: TypeError")(None)
quicker.wrong("not yet: TypeError")(lambda x, w: x)
