"""Answers to the puzzles of chapter 04."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("04_relu_matmul")


@chapter.puzzle(lambda: chapter.one_call)
def one_call(answer):
    return chapter.check(answer, *chapter.operands, **chapter.wanted)


@one_call.right
def other_operand_negative(a, b, a_scale, b_scale, d_scale):
    d = scaled_dot(a=a, b=b, b_scale=-b_scale, a_scale=a_scale)
    return to_e4m3(d_scale=0 - d_scale, d=jnp.maximum(0.0, d))


@one_call.right
@jax.jit
def written_out(a, b, a_scale, b_scale, d_scale):
    left, right = a.astype(f32) * (a_scale * -1), b.astype(f32) * b_scale
    d = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())))
    d = jax.nn.relu(d) * jnp.negative(d_scale)
    return jnp.minimum(jnp.maximum(d, -448), 448).astype("float8_e4m3fn")


def signed(sign, a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, sign * a_scale, b_scale)), sign * d_scale)


one_call.right(functools.partial(signed, -1))
one_call.right(lambda *args: signed(np.float32(-1), *args))


@one_call.wrong("bytes moved outside the call (at most 100)")
def half_fixed(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(-jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)), d_scale)


@one_call.wrong("its numbers differ: they are -1 times the right ones")
def one_sign_is_missing(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)), d_scale)


@one_call.wrong("its numbers differ")
def the_upper_half(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, a_scale, b_scale)), d_scale)


@one_call.wrong("outside the call")
def without_clamp(a, b, a_scale, b_scale, d_scale):
    return (jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)) * -d_scale).astype(e4m3)


@one_call.wrong("it returns float32[64,128] (wanted float8_e4m3fn[64,128])")
def float32(a, b, a_scale, b_scale, d_scale):
    return jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)) * -d_scale


@one_call.wrong("times the right ones")
def divides_by_the_scale(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)), -1 / d_scale)


@one_call.wrong("with other scales its numbers differ")
def scales_of_the_sample(a, b, a_scale, b_scale, d_scale):
    return signed(-1, a, b, *(float(scale) for scale in chapter.operands[2:]))


@one_call.wrong("0 FP8 matmul calls (wanted 1)")
def a_constant(a, b, a_scale, b_scale, d_scale):
    return jnp.zeros((64, 128), e4m3)


@one_call.wrong("its numbers differ: nan")
def all_nan(a, b, a_scale, b_scale, d_scale):
    return (signed(-1, a, b, a_scale, b_scale, d_scale).astype(f32) * jnp.nan).astype(e4m3)


@one_call.wrong("it does not trace: NotImplementedError")
def raises(a, b, a_scale, b_scale, d_scale):
    raise NotImplementedError


@one_call.wrong("it does not trace: TracerArrayConversionError")
def in_numpy(a, b, a_scale, b_scale, d_scale):
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32).T


one_call.wrong("it does not trace: TypeError")(3.0)


@chapter.puzzle(lambda: (chapter.relu6_layer, chapter.its_scale))
def relu6(answer):
    return chapter.check_relu6(*answer)


def to_the_largest(a, b, a_scale, b_scale, bound=6):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, a_scale, b_scale)), jnp.float32(E4M3_MAX / bound))


def in_bfloat16(a, b, a_scale, b_scale):
    d = jnp.maximum(dequantize(a, a_scale, bf16) @ dequantize(b, b_scale, bf16).T, 0)
    return to_e4m3(d, 448 / 6)


def divided(a, b, a_scale, b_scale):
    d = jax.nn.relu(jnp.einsum("mk,nk->mn", a.astype(f32) * a_scale, b.astype(f32) * b_scale))
    return jnp.clip(d * np.float32(448 / 6), max=448, min=-448).astype(e4m3)


def relu6_outside(a, b, a_scale, b_scale):
    return to_e4m3(jax.nn.relu6(scaled_dot(a, b, a_scale, b_scale)), jnp.float32(E4M3_MAX / 6))


def with_amax(a, b, a_scale, b_scale):
    d = jax.nn.relu(scaled_dot(a, b, a_scale, b_scale))
    return to_e4m3(d, jnp.float32(E4M3_MAX / 6)), jnp.max(d)


def nothing(a, b, a_scale, b_scale): ...


relu6.right((to_the_largest, 6 / 448))
relu6.right((jax.jit(to_the_largest), jnp.float32(6) / 448))
relu6.right((lambda *args: to_the_largest(*args, bound=6.0), np.array(6 / 448)))
relu6.right((in_bfloat16, np.float32(6 / 448)))
relu6.right((divided, 6 / 448))
relu6.wrong("not 6: its_scale is what a result is multiplied by")((to_the_largest, 448 / 6))
relu6.wrong("its_scale must be a number")((to_the_largest, ...))
relu6.wrong("its_scale must be a number")((to_the_largest, None))
relu6.wrong("its_scale must be a number")((to_the_largest, "6 / 448"))
relu6.wrong("its_scale must be a number")((to_the_largest, [6 / 448]))
relu6.wrong("its_scale must be a number")((to_the_largest, float("nan")))
relu6.wrong("not 6")((functools.partial(to_the_largest, bound=8), 8 / 448))
relu6.wrong("where relu6 is")((functools.partial(to_the_largest, bound=8), 6 / 448))
relu6.wrong("it returns float8_e4m3fn[64,128], float32[], and must return float8_e4m3fn[64,128]")(
    (with_amax, 6 / 448)
)
relu6.wrong("the call's epilogue is DEFAULT (wanted RELU)")((relu6_outside, 6 / 448))
relu6.wrong("it returns nothing yet")((nothing, 6 / 448))
relu6.wrong("it does not trace")((6 / 448, to_the_largest))
