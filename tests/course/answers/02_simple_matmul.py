"""Answers to the puzzles of chapter 02."""

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
def flattened(x, w):
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.dot(rows, jnp.transpose(w), preferred_element_type=bf16)
    return jnp.reshape(y, (*x.shape[:2], -1))


@project.wrong("2 kernels in all (at most 1); outside the call:")
def converts_afterwards(x, w):
    return chapter.plain_projection(x, w)


@project.wrong("it returns float32[2,16,128] (wanted bfloat16[2,16,128])")
def in_float32(x, w):
    return jnp.einsum("bsk,nk->bsn", x, w, preferred_element_type=f32)


@project.wrong("it does not trace: TracerArrayConversionError")
def in_numpy(x, w):
    return np.asarray(x) @ np.asarray(w).T


@chapter.puzzle(lambda: chapter.both_e5m2)
def both_e5m2(answer):
    gradients = chapter.g1, chapter.g2
    return chapter.check(answer, *gradients, like=chapter.matmul_f32, kernels_wanted=2)


@both_e5m2.right
def widened_first(g1, g2):
    left, right = g1.astype(f32), g2.astype(bf16).astype(e4m3).astype(f32)
    return left @ right.T


@both_e5m2.wrong("0 FP8 matmul calls (wanted 1)")
def as_it_is(g1, g2):
    return chapter.matmul_f32(g1, g2)


@both_e5m2.wrong("3 kernels in all (at most 2)")
def both_converted(g1, g2):
    return jax.lax.dot(g1.astype(e4m3), g2.astype(e4m3).T, preferred_element_type=f32)


both_e5m2.wrong("it does not trace: TypeError")(448.0)
