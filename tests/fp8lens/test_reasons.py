"""The reasons on programs that are no rule's page: what they blame, and what they leave alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect, why_not_fp8
from fp8lens.rules.rule import Lost

bf16, f32, e4m3, e5m2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
M, N, K = 64, 128, 256


def array(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


SCALAR = array(dtype=f32)
A, B = array(M, K), array(N, K)
VECTOR = np.linspace(1, 2, N, dtype=np.float32)


def dequantize(q, scale, dtype=f32):
    return q.astype(dtype) * scale.astype(dtype)


def scaled_dot(a, b, a_scale, b_scale, dtype=f32):
    return jax.lax.dot(dequantize(a, a_scale, dtype), dequantize(b, b_scale, dtype).T)


def quantize(x, scale):
    return jnp.clip(x * scale.astype(x.dtype), -448, 448).astype(e4m3)


def of(fn, *arguments):
    return [(str(reason.lost), reason.rule) for reason in why_not_fp8(fn, *arguments)]


# What is blamed -----------------------------------------------------------------------------------


def test_a_reason_names_the_operation_that_breaks_the_rule_and_its_line():
    def layer(a, b, a_scale, b_scale):
        d = scaled_dot(a, b, a_scale, b_scale)
        return jnp.tanh(d)

    (reason,) = why_not_fp8(layer, A, B, SCALAR, SCALAR)
    line = layer.__code__.co_firstlineno + 2
    assert reason.rule == "other-activation"
    assert re.fullmatch(rf"tanh \(\S*test_reasons\.py:{line}\)", reason.at)
    assert f"lost epilogue at {reason.at}: a call applies" in " ".join(str(reason).split())


def test_each_operand_has_a_reason_of_its_own():
    def layer(a, b, row_scales, b_scale):
        x = a.astype(f32) * row_scales
        w = jnp.sqrt(dequantize(b, b_scale))
        return jax.lax.dot(x, w.T)

    reasons = why_not_fp8(layer, A, B, array(M, 1, dtype=f32), SCALAR)
    assert [reason.rule for reason in reasons] == ["array-of-scales", "changed-between"]
    assert "left operand" in reasons[0].reason and "right operand" in reasons[1].reason
    assert "sqrt" in reasons[1].at


def test_of_operands_in_a_loop_no_side_is_guessed():
    """x is the left one, [M, K], by blocks of K; a loop, and copies in flight, are in between."""

    def by_blocks(x, w):
        blocks = x.reshape(M, 2, K // 2).swapaxes(0, 1)

        def body(total, block):
            one, other = block
            dot = jax.lax.dot_general(
                one, other, (((1,), (1,)), ((), ())), preferred_element_type=f32
            )
            return total + dot, None

        return jax.lax.scan(body, jnp.zeros((M, N), f32), (blocks, w))[0]

    seen = inspect(by_blocks, A, array(2, N, K // 2))
    assert all("right operand" not in reason.reason for reason in seen.reasons)
    assert seen.chain().count("left: ") == seen.chain().count("right: ") == 1


def test_reasons_of_one_rule_are_said_once_with_a_line_for_each_matmul():
    def two(a, b, c, d, a_scale, b_scale):
        first = jnp.tanh(scaled_dot(a, b, a_scale, b_scale))
        return first, jnp.tanh(scaled_dot(c, d, a_scale, b_scale))

    reasons = why_not_fp8(two, A, B, array(2 * M, K), B, SCALAR, SCALAR)
    text = str(reasons)
    assert len(reasons) == 2 and text.startswith("2 times lost epilogue: ")
    assert text.count("rule: other-activation") == text.count("fix: ") == 1
    larger, smaller = (text.index(f"[{m} x {N} x {K}]") for m in (2 * M, M))
    assert larger < smaller  # what costs most stands first


# What is no part of the layer ---------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["squares", "mean"])
def test_a_loss_is_neither_a_bias_nor_an_activation(loss):
    def of_layer(a, b, a_scale, b_scale, target):
        y = scaled_dot(a, b, a_scale, b_scale, bf16).astype(f32)
        return jnp.mean(jnp.square(y - target)) if loss == "squares" else jnp.mean(jnp.square(y))

    assert of(of_layer, A, B, SCALAR, SCALAR, array(M, N, dtype=f32)) == []


def test_a_norm_is_no_scale_of_the_result():
    def normed(a, b, a_scale, b_scale):
        y = scaled_dot(a, b, a_scale, b_scale, bf16).astype(f32)
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True))

    assert of(normed, A, B, SCALAR, SCALAR) == []


def test_an_optimizers_arithmetic_is_left_alone():
    def step(w, a, g, a_scale, g_scale):
        _, pull = jax.vjp(lambda w: dequantize(a, a_scale) @ w.T, w)
        (gradient,) = pull(dequantize(g, g_scale))
        return w - 0.1 * gradient

    arguments = array(N, K, dtype=f32), A, array(M, N, dtype=e5m2), SCALAR, SCALAR
    assert {lost for lost, _ in of(step, *arguments)} == {Lost.TRANSPOSE}


def test_a_module_ends_at_its_name():
    def model(a, b, a_scale, b_scale, weight):
        with jax.named_scope("dense"):
            y = scaled_dot(a, b, a_scale, b_scale)
        with jax.named_scope("norm"):
            return y * weight

    weight = array(N, dtype=f32)
    assert of(model, A, B, SCALAR, SCALAR, weight) == []
    scaled = lambda a, b, s, t, weight: scaled_dot(a, b, s, t) * weight  # noqa: E731
    assert of(scaled, A, B, SCALAR, SCALAR, weight) == [("scale", "vector-scale")]


# Current scaling ----------------------------------------------------------------------------------


def own_amax(y):
    scale = 448 / jnp.max(jnp.abs(y)).astype(f32)
    return quantize(y.astype(f32), scale), 1 / scale


@pytest.mark.parametrize("dtype", [bf16, f32])
def test_a_scale_of_the_results_own_amax_costs_a_pass_whatever_one_does(dtype):
    """With dtype f32 and no barrier XLA's compiler stops: "A cycle is detected"."""

    def layer(a, b, a_scale, b_scale):
        y = scaled_dot(a, b, a_scale, b_scale, dtype)
        return own_amax(jax.lax.optimization_barrier(y))

    reasons = why_not_fp8(layer, A, B, SCALAR, SCALAR)
    assert [reason.rule for reason in reasons] == ["scale-of-own-amax"]
    assert "earlier step" in reasons[0].fix and "one pass more" in " ".join(reasons[0].fix.split())


# What no rule explains, and the chain -------------------------------------------------------------


def test_what_no_rule_explains_is_listed_with_what_stands_around_the_matmul():
    def layer(a, b, a_scale, b_scale):
        return jax.nn.relu(-scaled_dot(a, b, a_scale, b_scale))

    (reason,) = why_not_fp8(layer, A, B, SCALAR, SCALAR)
    assert reason.rule == "unknown-outside" and reason.reason.startswith("not explained")
    line = layer.__code__.co_firstlineno + 1
    after, kernel = reason.chain
    assert re.fullmatch(
        rf"after: negate \(\S+:{line}\), maximum by 0 \(\S+:{line}\) \(outside\)", after
    )
    assert re.fullmatch(rf"kernel \S+ after it, 65\.5 kB: negate, maximum \(\S+:{line}\)", kernel)


def test_the_chain_has_every_operation_and_what_is_in_the_call():
    def layer(a, b, row_scales, b_scale, bias, d_scale):
        x = a.astype(bf16) * row_scales
        y = jax.lax.dot(x, dequantize(b, b_scale, bf16).T)
        return quantize(jax.nn.relu(y + bias), d_scale)

    arguments = A, B, array(M, 1, dtype=bf16), SCALAR, array(N, dtype=bf16), SCALAR
    chain = inspect(layer, *arguments).chain()
    for said in (
        rf"left: f8e4m3fn\[{M},{K}\] a -> convert to bf16 \(.*?\) -> multiply by bf16\[{M},1\]"
        r" \(.*?\)  <- XLA stops here",
        rf"right: f8e4m3fn\[{N},{K}\] b -> convert to bf16 .*multiply by f32\[\]",
        rf"after: add by bf16\[{N}\].*maximum by 0.*convert to f8e4m3fn",
    ):
        assert re.search(said, chain), said

    fused = inspect(
        lambda a, b, s, t, bias: jax.nn.relu(scaled_dot(a, b, s, t, bf16) + bias),
        A, B, SCALAR, SCALAR, array(N, dtype=bf16),
    )  # fmt: skip
    assert fused.reasons == [] and fused.chain().endswith("(in the call)")


def test_a_saved_program_has_no_reasons_and_no_chain():
    saved = inspect(inspect(lambda a, b: jax.lax.dot(a, b.T), A, B).module)
    for asked in (lambda: saved.reasons, saved.chain):
        with pytest.raises(TypeError, match="inspect the function and its arguments"):
            asked()


# Experiment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blamed", "rule"),
    [
        (jnp.tanh, "other-activation"),
        (lambda d: d * VECTOR, "vector-scale"),
        (lambda d: d + VECTOR, "bias-in-f32"),
        (lambda d: jnp.clip(d, -1, 1), "other-activation"),
    ],
)
def test_without_the_operation_that_is_blamed_the_next_one_is_in_the_call(blamed, rule):
    """The oracle is XLA: a relu behind the operation stays outside with it, and is taken
    without it.
    """

    def layer(step):
        return lambda a, b, s, t: jax.nn.relu(step(scaled_dot(a, b, s, t)))

    with_it, without = (
        inspect(layer(step), A, B, SCALAR, SCALAR) for step in (blamed, lambda d: d)
    )
    assert [reason.rule for reason in with_it.reasons] == [rule]
    assert "relu" in with_it.reasons[0].reason or rule == "other-activation"
    assert with_it.report.rows[0].epilogue == "DEFAULT"
    assert without.report.rows[0].epilogue == "RELU" and without.reasons == []
