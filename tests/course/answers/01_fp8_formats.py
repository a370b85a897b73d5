"""Answers to the puzzles of chapter 01."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.course.answers import Chapter

chapter = Chapter("01_fp8_formats")


@chapter.puzzle(lambda: chapter.decode)
def decode(answer):
    return chapter.check_decode(answer)


def by_ldexp(code):
    sign, exponent, mantissa = divmod(code, 128)[0], (code >> 3) % 16, code % 8
    if code % 128 == 127:
        return math.nan
    size = math.ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
    return math.copysign(size, -sign) if sign else size


@decode.right
def as_a_numpy_number(code):
    fraction = code & 7
    size = np.float32(2.0 ** ((code >> 3 & 15) - 7) * (1 + fraction / 8))
    if not code & 0x78:
        size = np.float32(fraction / 512)
    if code & 0x7F == 0x7F:
        size = np.float32("nan")
    return -size if code & 0x80 else size


@decode.wrong("decode(0x7F) gave 480")
def without_nan(code):
    size = math.ldexp(code % 8 + 8 * (code % 128 > 7), max((code >> 3) % 16, 1) - 10)
    return -size if code & 0x80 else size


@decode.wrong("decode(0x80) gave 0.0, expected -0.0")
def without_negative_zero(code):
    return by_ldexp(code) + 0.0


@decode.wrong("NotImplementedError")
def raises(code):
    raise NotImplementedError


@chapter.puzzle(lambda: chapter.lost_scale)
def lost_scale(answer):
    return chapter.check_lost_scale(answer)


def nothing_is_lost(x, scale):
    x = np.asarray(x)
    return np.array_equal((x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale, x)


def largest_number_first(x):
    amax = np.float32(abs(np.asarray(x)).max())
    for number in chapter.finite[::-1]:
        if number > 0 and nothing_is_lost(x, amax / np.float32(number)):
            return amax / np.float32(number)


@lost_scale.right
def as_a_python_number(x):
    return float(largest_number_first(x))


@lost_scale.wrong("checkpoint 1, scale")
def power_of_two(x):
    return 2.0 ** jnp.ceil(jnp.log2(jnp.max(jnp.abs(x)) / 448))


@lost_scale.wrong("return one positive scale")
def negative(x):
    return -largest_number_first(x)


@lost_scale.wrong("ValueError: could not convert string")
def as_text(x):
    return "2**-12"
