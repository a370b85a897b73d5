"""Answers to the puzzles of chapter 02."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.course.answers import Chapter

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
chapter = Chapter("02_simple_matmul")


@chapter.puzzle(lambda: chapter.project)
def project(answer):
    return chapter.check(answer, chapter.x, chapter.w, like=chapter.plain_projection)


@project.right
def by_dot_general(x, w):
    return jax.lax.dot_general(x, w, (((2,), (1,)), ((), ())), preferred_element_type="bfloat16")


@project.right
def flattened(x, w):
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.dot(rows, jnp.transpose(w), preferred_element_type=bf16)
    return jnp.reshape(y, (*x.shape[:2], -1))


project.right(functools.partial(jnp.einsum, "...k,nk->...n", preferred_element_type=bf16))
project.right(jax.jit(lambda x, w: x.astype(bf16) @ w.T.astype(bf16)))
project.right(jax.vmap(lambda x, w: jnp.matmul(x, w.T, preferred_element_type=bf16), (0, None)))


@project.wrong("2 kernels in all (at most 1); outside the call:")
def converts_afterwards(x, w):
    return chapter.plain_projection(x, w)


@project.wrong("it returns float32[2,16,128] (wanted bfloat16[2,16,128])")
def in_float32(x, w):
    return jnp.einsum("bsk,nk->bsn", x, w, preferred_element_type=f32)


@project.wrong("it returns float8_e4m3fn[2,16,128] (wanted bfloat16[2,16,128])")
def in_the_type_of_its_operands(x, w):
    return x @ w.T


@project.wrong("it returns bfloat16[32,128] (wanted bfloat16[2,16,128])")
def stays_flat(x, w):
    return jax.lax.dot(x.reshape(32, -1), w.T, preferred_element_type=bf16)


@project.wrong("its numbers differ")
def rounded_to_fp8(x, w):
    return (x @ w.T).astype(bf16)


@project.wrong("its numbers differ")
def in_another_order(x, w):
    return jnp.einsum("bsk,nk->bsn", x[:, ::-1], w, preferred_element_type=bf16)


@project.wrong("0 FP8 matmul calls (wanted 1)")
def a_product_and_a_sum(x, w):
    return jnp.sum(x[:, :, None].astype(bf16) * w.astype(bf16), axis=-1, dtype=f32).astype(bf16)


@project.wrong("it does not trace: ")
def without_a_transpose(x, w):
    return jnp.dot(x, w, preferred_element_type=bf16)


@project.wrong("it does not trace: TracerArrayConversionError")
def in_numpy(x, w):
    return np.asarray(x) @ np.asarray(w).T


project.wrong("it does not trace: TypeError")(None)


@chapter.puzzle(lambda: chapter.both_e5m2)
def both_e5m2(answer):
    gradients = chapter.g1, chapter.g2
    return chapter.check(answer, *gradients, like=chapter.matmul_f32, kernels_wanted=2)


@both_e5m2.right
def the_other_operand(g1, g2):
    return jnp.einsum("mk,nk->mn", g1.astype(e4m3), g2, preferred_element_type=f32)


@both_e5m2.right
def widened_first(g1, g2):
    left, right = g1.astype(f32), g2.astype(bf16).astype(e4m3).astype(f32)
    return left @ right.T


@both_e5m2.right
def with_a_scale(g1, g2):
    smaller = (g1.astype(f32) / 8).astype(e4m3)
    return 8 * jax.lax.dot(smaller, g2.T, preferred_element_type=f32)


both_e5m2.right(
    jax.jit(lambda g1, g2: jax.lax.dot(g1, g2.T.astype(e4m3), preferred_element_type=f32))
)


@both_e5m2.wrong("0 FP8 matmul calls (wanted 1)")
def as_it_is(g1, g2):
    return chapter.matmul_f32(g1, g2)


@both_e5m2.wrong("0 FP8 matmul calls (wanted 1)")
def in_bfloat16(g1, g2):
    return jax.lax.dot(g1.astype(bf16), g2.astype(bf16).T, preferred_element_type=f32)


@both_e5m2.wrong("3 kernels in all (at most 2)")
def both_converted(g1, g2):
    return jax.lax.dot(g1.astype(e4m3), g2.astype(e4m3).T, preferred_element_type=f32)


@both_e5m2.wrong("(wanted float32[32,128])")
def in_the_type_of_its_operands_too(g1, g2):
    return jax.lax.dot(g1, g2.astype(e4m3).T)


@both_e5m2.wrong("its numbers differ: they are 0.5 times the right ones")
def with_a_scale_that_is_lost(g1, g2):
    return jax.lax.dot((g1.astype(f32) / 2).astype(e4m3), g2.T, preferred_element_type=f32)


@both_e5m2.wrong("its numbers differ")
def beyond_the_range(g1, g2):
    larger = (g1.astype(f32) * 8).astype(e4m3)
    return jax.lax.dot(larger, g2.T, preferred_element_type=f32) / 8


@both_e5m2.wrong("its numbers differ")
def without_a_sign(g1, g2):
    return jax.lax.dot(g1, jnp.abs(g2.astype(f32)).astype(e4m3).T, preferred_element_type=f32)


@both_e5m2.wrong("it does not trace: ")
def of_two_types(g1, g2):
    return g1 @ g2.astype(e4m3).T


both_e5m2.wrong("it does not trace: TypeError")(448.0)
