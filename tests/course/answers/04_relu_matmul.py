"""Answers to the puzzles of chapter 04."""

import functools

import jax
import jax.numpy as jnp

from helpers.numerics.recipes import E4M3_MAX, scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("04_relu_matmul")


@chapter.puzzle(lambda: chapter.one_call)
def one_call(answer):
    return chapter.check(answer, *chapter.operands, **chapter.wanted)


@one_call.right
@jax.jit
def written_out(a, b, a_scale, b_scale, d_scale):
    left, right = a.astype(f32) * (a_scale * -1), b.astype(f32) * b_scale
    d = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())))
    d = jax.nn.relu(d) * jnp.negative(d_scale)
    return jnp.minimum(jnp.maximum(d, -448), 448).astype("float8_e4m3fn")


@one_call.wrong("bytes moved outside the call (at most 100)")
def half_fixed(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(-jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)), d_scale)


@one_call.wrong("its numbers differ: they are -1 times the right ones")
def one_sign_is_missing(a, b, a_scale, b_scale, d_scale):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, -a_scale, b_scale)), d_scale)


@one_call.wrong("it does not trace: NotImplementedError")
def raises(a, b, a_scale, b_scale, d_scale):
    raise NotImplementedError


@chapter.puzzle(lambda: (chapter.relu6_layer, chapter.its_scale))
def relu6(answer):
    return chapter.check_relu6(*answer)


def to_the_largest(a, b, a_scale, b_scale, bound=6):
    return to_e4m3(jax.nn.relu(scaled_dot(a, b, a_scale, b_scale)), jnp.float32(E4M3_MAX / bound))


relu6.right((jax.jit(to_the_largest), jnp.float32(6) / 448))
relu6.wrong("not 6: its_scale is what a result is multiplied by")((to_the_largest, 448 / 6))
relu6.wrong("its_scale must be a number")((to_the_largest, ...))
relu6.wrong("not 6")((functools.partial(to_the_largest, bound=8), 8 / 448))
