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
def written_out(x, w, bias, x_scale, w_scale, y_scale):
    d = jnp.einsum("mk,nk->mn", x.astype(f32) * x_scale, w.astype(f32) * w_scale)
    d = jnp.maximum(0.0, bias.astype("float32") + d)
    return [jnp.minimum(jnp.maximum(y_scale * d, -448), 448).astype(e4m3), jnp.abs(d).max()]


@fast_layer.right
@jax.jit
def keywords(x, w, bias, x_scale, w_scale, y_scale):
    d = scaled_dot(b=w, b_scale=w_scale, a=x, a_scale=x_scale)
    return finished(bias=bias, y_scale=y_scale, d=d)


def with_activation(activation, x, w, bias, x_scale, w_scale, y_scale):
    return finished(scaled_dot(x, w, x_scale, w_scale), bias, y_scale, activation)


fast_layer.right(functools.partial(with_activation, jax.nn.relu))


@fast_layer.wrong("2 FP8 matmul calls (wanted 1)")
def slow_layer(x, w, bias, x_scale, w_scale, y_scale):
    y, amax = chapter.slow_layer(x, w, bias, x_scale, w_scale, y_scale)
    return y, amax / y_scale


@fast_layer.wrong("the numbers of result 2 differ")
def the_old_amax(x, w, bias, x_scale, w_scale, y_scale):
    y, amax = with_activation(jax.nn.relu, x, w, bias, x_scale, w_scale, y_scale)
    return y, amax * y_scale


@fast_layer.wrong("outside the call")
def scales_afterwards(x, w, bias, x_scale, w_scale, y_scale):
    d = jax.lax.dot(x, w.T, preferred_element_type=f32) * (x_scale * w_scale)
    return finished(d, bias, y_scale)


@fast_layer.wrong("the call's epilogue is BIAS (wanted BIAS_RELU)")
def without_relu(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(lambda d: d, x, w, bias, x_scale, w_scale, y_scale)


@fast_layer.wrong("the numbers of result 1 differ")
def without_bias(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(jax.nn.relu, x, w, 0 * bias, x_scale, w_scale, y_scale)


@fast_layer.wrong("it returns float8_e4m3fn[64,128] (wanted float8_e4m3fn[64,128], float32[])")
def without_amax(x, w, bias, x_scale, w_scale, y_scale):
    return with_activation(jax.nn.relu, x, w, bias, x_scale, w_scale, y_scale)[0]


@fast_layer.wrong("it does not trace: NotImplementedError")
def raises(x, w, bias, x_scale, w_scale, y_scale):
    raise NotImplementedError


fast_layer.wrong("it does not trace: TypeError")(None)


@chapter.puzzle(lambda: chapter.fp8_attention)
def fp8_attention(answer):
    return chapter.check_attention(answer())


Fp8, Fp8Einsum = nn.fp8_ops.Fp8DirectDotGeneralOp, nn.fp8_ops.Fp8Einsum
projections = {"qkv_dot_general_cls": Fp8, "out_dot_general_cls": Fp8}
einsums = {"qk_attn_weights_einsum_cls": Fp8Einsum, "attn_weights_value_einsum_cls": Fp8Einsum}
attention = functools.partial(nn.MultiHeadDotProductAttention, num_heads=4, dtype=bf16)


@fp8_attention.right
def as_a_subclass():
    class Attention(nn.MultiHeadDotProductAttention):
        """Queries, keys and values of one tensor."""

    return Attention(4, bf16, **projections, **einsums)


@fp8_attention.right
def of_the_same_name():
    return nn.MultiHeadAttention(num_heads=4, dtype="bfloat16", **einsums, **projections)


@fp8_attention.right
def by_makers_of_ops():
    def op():
        return Fp8()

    return attention(qkv_dot_general_cls=op, out_dot_general_cls=functools.partial(Fp8), **einsums)


@fp8_attention.right
def by_clone():
    return attention().clone(qkv_features=256, **projections, **einsums)


fp8_attention.wrong("not yet: 4 of 6 are FP8 (wanted 6 of 6)")(lambda: attention(**projections))
fp8_attention.wrong("not yet: 2 of 4 are FP8 (wanted 6 of 6)")(lambda: attention(**einsums))
fp8_attention.wrong("not yet: 0 of 4 are FP8 (wanted 6 of 6)")(lambda: attention())
fp8_attention.wrong("not yet: Flax or JAX refuses this layer: ")(
    lambda: attention(**projections, qk_attn_weights_einsum_cls=Fp8Einsum)
)
fp8_attention.wrong("not yet: its weights and its result are not those of attention with 4 heads")(
    lambda: nn.MultiHeadDotProductAttention(8, dtype=bf16, **projections, **einsums)
)
fp8_attention.wrong("not yet: its weights and its result are not those of attention with 4 heads")(
    lambda: nn.MultiHeadDotProductAttention(4, **projections, **einsums)
)
fp8_attention.wrong("not yet: its weights and its result are not those of attention with 4 heads")(
    lambda: nn.Sequential([nn.Dense(256, dtype=bf16, dot_general_cls=Fp8) for _ in range(6)])
)
fp8_attention.wrong("not yet: Flax or JAX refuses this layer: ")(
    lambda: nn.MultiHeadDotProductAttention
)
fp8_attention.wrong("not yet: Flax or JAX refuses this layer: AttributeError")(lambda: None)


@chapter.puzzle(lambda: chapter.guard)
def guard(answer):
    return chapter.check_guard(answer)


def fused(*work, **more):
    return lambda fn: chapter.assert_fp8_gemms(fn, *chapter.given, fused=work, **more)


@guard.right
def in_two_steps(fn):
    seen = chapter.inspect(fn, *chapter.given)
    chapter.assert_fp8_gemms(seen, fused=True)
    chapter.assert_fp8_gemms(seen, fused="BIAS_GELU")


@guard.right
def by_the_report(fn):
    (row,) = chapter.report_gemms(fn, *chapter.given).rows
    assert row.is_fp8 and row.epilogue == "BIAS_GELU" and row.amax, row
    assert not chapter.why_not_fp8(fn, *chapter.given)


@guard.right
def by_the_reasons(fn):
    assert not chapter.why_not_fp8(fn, *chapter.given)
    fused("amax", "BIAS_GELU")(fn)


guard.right(fused("amax", "BIAS_GELU"))
guard.right(fused("BIAS_GELU", "output", count=1))


guard.wrong("not yet: it must fail for careless, without_clamp, without_amax, relu_for_gelu")(
    fused()
)
guard.wrong("not yet: it must fail for careless, without_clamp")(fused(count=1))
guard.wrong("not yet: it must fail for without_clamp, without_amax")(fused("BIAS_GELU"))
guard.wrong("not yet: it must fail for relu_for_gelu")(fused("amax", "output", "scale"))
guard.wrong("not yet: it must pass for layer")(fused("BIAS_RELU"))
guard.wrong("not yet: it must pass for layer")(fused("amax", "BIAS_GELU", count=2))
guard.wrong("not yet: for layer, ValueError")(fused("Gelu!"))
guard.wrong("not yet: for layer, TypeError")(None)


@guard.wrong("not yet: it must pass for layer")
def by_its_name(fn):
    assert fn.__name__ == "layer"


@guard.wrong("not yet: it must pass for layer")
def by_itself(fn):
    assert fn is chapter.layer


@guard.wrong("not yet: it must pass for layer")
def always(fn):
    raise AssertionError


@guard.wrong("not yet: it must fail for")
def returns_its_opinion(fn):
    return chapter.why_not_fp8(fn, *chapter.given) == []
