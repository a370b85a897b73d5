"""Answers to the puzzles of chapter 07."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from helpers.numerics.recipes import scaled_dot, to_e4m3
from tests.course.answers import Chapter

e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
chapter = Chapter("07_fusion_lab")


@chapter.puzzle(lambda: chapter.fast_layer)
def fast_layer(answer):
    return chapter.check(
        answer, *chapter.sample, like=chapter.wanted, epilogue="BIAS_RELU", amax=True
    )


def finished(d, bias, y_scale, activation=jax.nn.relu):
    d = activation(d + bias.astype(f32))
    return to_e4m3(d, y_scale), jnp.max(jnp.abs(d))


@fast_layer.right
@jax.jit
def keywords(x, w, bias, x_scale, w_scale, y_scale):
    d = scaled_dot(b=w, b_scale=w_scale, a=x, a_scale=x_scale)
    return finished(bias=bias, y_scale=y_scale, d=d)


def with_activation(activation, x, w, bias, x_scale, w_scale, y_scale):
    return finished(scaled_dot(x, w, x_scale, w_scale), bias, y_scale, activation)


@fast_layer.wrong("2 FP8 matmul calls (wanted 1)")
def slow_layer(x, w, bias, x_scale, w_scale, y_scale):
    y, amax = chapter.slow_layer(x, w, bias, x_scale, w_scale, y_scale)
    return y, amax / y_scale


@fast_layer.wrong("the numbers of result 2 differ")
def the_old_amax(x, w, bias, x_scale, w_scale, y_scale):
    y, amax = with_activation(jax.nn.relu, x, w, bias, x_scale, w_scale, y_scale)
    return y, amax * y_scale


@fast_layer.wrong("it does not trace: NotImplementedError")
def raises(x, w, bias, x_scale, w_scale, y_scale):
    raise NotImplementedError


@chapter.puzzle(lambda: chapter.fp8_attention)
def fp8_attention(answer):
    return chapter.check_attention(answer())


Fp8, Fp8Einsum = nn.fp8_ops.Fp8DirectDotGeneralOp, nn.fp8_ops.Fp8Einsum
projections = {"qkv_dot_general_cls": Fp8, "out_dot_general_cls": Fp8}
einsums = {"qk_attn_weights_einsum_cls": Fp8Einsum, "attn_weights_value_einsum_cls": Fp8Einsum}
attention = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, dtype=bf16)


@fp8_attention.right
def of_the_same_name():
    return nn.MultiHeadAttention(num_heads=4, dtype="bfloat16", **einsums, **projections)


fp8_attention.wrong("not yet: 4 of 6 are FP8 (wanted 6 of 6)")(lambda: attention(**projections))
fp8_attention.wrong("not yet: Flax or JAX refuses this layer: ")(
    lambda: attention(**projections, qk_attn_weights_einsum_cls=Fp8Einsum)
)
fp8_attention.wrong("not yet: Flax or JAX refuses this layer: AttributeError")(lambda: None)


@chapter.puzzle(lambda: chapter.guard)
def guard(answer):
    return chapter.check_guard(answer)


def fused(*work, **more):
    return lambda fn: chapter.assert_fp8_gemms(fn, *chapter.given, fused=work, **more)


@guard.right
def by_the_report(fn):
    (row,) = chapter.report_gemms(fn, *chapter.given).rows
    assert row.is_fp8 and row.epilogue == "BIAS_GELU" and row.amax, row
    assert not chapter.why_not_fp8(fn, *chapter.given)


guard.wrong("not yet: it must fail for without_clamp, without_amax, relu_for_gelu")(fused())
guard.wrong("not yet: it must pass for layer")(fused("BIAS_RELU"))
guard.wrong("not yet: for layer, ValueError")(fused("Gelu!"))
