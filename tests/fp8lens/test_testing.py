"""What is not judged is not green, in `assert_fp8_gemms` and `fp8lens --require-fp8`."""

import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens import assert_fp8_gemms, inspect, report_gemms
from fp8lens.testing import fp8_failures
from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot
from tests.programs.corpus import bf16, by_hand, e4m3, e5m2, f32, shape

FP8, WIDE, SCALE = shape(64, 64, dtype=e4m3), shape(64, 64, dtype=bf16), shape(dtype=f32)


def dot(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=f32)


@pytest.mark.parametrize(
    "given, multiplied",
    [
        (("f8e4m3fn", "f8e5m2"), "f8e4m3fn"),
        (("bf16", "f8e4m3fn"), "bf16"),
        (("f8e4m3fn", "s8"), "s8"),
    ],
)
def test_both_operands_are_asked(given, multiplied):
    text = inspect(dot, FP8, FP8).module.text
    for argument, dtype in zip("ab", given, strict=True):
        text = re.sub(rf"(%{argument}\.1 = )f8e4m3fn", rf"\1{dtype}", text)
    (row,) = report_gemms(text).rows
    assert (row.lhs_dtype, row.rhs_dtype, row.math_dtype) == (*given, multiplied)
    assert row.is_fp8 == multiplied.startswith("f8") == (not fp8_failures(inspect(text)))


@pytest.mark.parametrize("asked", [{}, {"count": 1}, {"fused": True}])
def test_a_call_that_a_gpu_refuses_fails(asked):
    def to_e5m2(a, b, a_scale, b_scale):
        return jnp.clip(scaled_dot(a, b, a_scale, b_scale), -57344, 57344).astype(e5m2)

    seen = inspect(to_e5m2, FP8, FP8, SCALE, SCALE)
    assert "refuses to run" in str(seen.report) and "measured on an H200" in str(seen.reasons)
    with pytest.raises(AssertionError, match="measured on an H200.*fix: convert the result"):
        assert_fp8_gemms(seen, **asked)
    assert fp8_failures(inspect(seen.module.text))  # a saved program as well
    assert_fp8_gemms(seen, allow="no-cublaslt-kernel", **asked)
    runs = inspect(to_e5m2, shape(64, 64, dtype=e5m2), FP8, SCALE, SCALE)
    assert_fp8_gemms(runs, **asked)


def test_both_ways_to_compile_are_compared():
    def fn(a, b, c):
        return dot(a, b), dot(b, a), c @ c

    seen = inspect(fn, FP8, FP8, WIDE, gemm="both")
    for first, second in seen.differences.pairs:
        assert (first.library, second.library) == ("cublasLt", "triton")
        assert (first.source, first.flops) == (second.source, second.flops)
    # XLA joins the first two, and Triton divides their product along K.
    assert "XLA's default compiles 2 of 2 matmuls in another way" in str(seen)
    options = {"xla_gpu_enable_triton_gemm": False}  # then the default is the same
    same = inspect(fn, FP8, FP8, WIDE, gemm="both", compiler_options=options)
    assert "0 of 2" in str(same.differences)


SCHEDULED = """HloModule jit_f, is_scheduled=true

{more}ENTRY %main (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> f32[64,64] {{
  %a = f8e4m3fn[64,64]{{1,0}} parameter(0)
  %b = f8e4m3fn[64,64]{{1,0}} parameter(1)
  ROOT %r = f32[64,64]{{1,0}} {what}
}}
"""
IN_A_FUSION = """%wrapped (p: f8e4m3fn[64,64], q: f8e4m3fn[64,64]) -> f32[64,64] {
  %p = f8e4m3fn[64,64]{1,0} parameter(0)
  %q = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT %c = f32[64,64]{1,0} custom-call(%p, %q), custom_call_target="somebodys"
}

"""


@pytest.mark.parametrize(
    "more, what, words",
    [
        # Only tensor cores multiply FP8; what XLA's own kernels do the text does not say.
        (
            "",
            "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "1 of 1 matmuls are not FP8",
        ),
        (
            IN_A_FUSION,
            "fusion(%a, %b), kind=kCustom, calls=%wrapped",
            "no matmul is FP8",
        ),
    ],
)
def test_what_the_text_does_not_tell_is_not_fp8(more, what, words):
    with pytest.raises(AssertionError, match=words):
        assert_fp8_gemms(SCHEDULED.format(more=more, what=what))


def test_a_saved_triton_kernel_does_not_pass_by_its_dot():
    text = inspect(dot, FP8, FP8, gemm="triton").module.text
    assert report_gemms(text).rows[0].is_fp8
    with pytest.raises(AssertionError, match="only its PTX tells what a Triton kernel multiplies"):
        assert_fp8_gemms(text)


@pytest.fixture(scope="module")
def beside():
    """An FP8 matmul, and a kernel by hand that multiplies bf16."""

    def fn(a, b, c):
        return dot(a, b), by_hand(c, c, bf16)

    return inspect(fn, FP8, FP8, shape(128, 128, dtype=bf16))


@pytest.mark.parametrize(
    "asked", [{}, {"min_flops_share": 1.0}, {"count": 1, "min_flops_share": 0.5}]
)
def test_an_opaque_kernel_is_not_fp8(beside, asked):
    (name,) = beside.report.opaque
    with pytest.raises(AssertionError, match=rf'{name}.*multiplies bf16.*allowing "opaque"'):
        assert_fp8_gemms(beside, **asked)
    assert_fp8_gemms(beside, **asked, allow="opaque")
    assert_fp8_gemms(beside, count=1)


def test_of_two_kernels_of_one_name_neither_passes_for_the_other():
    """XLA numbers them in the PTX, and does not say which is which."""

    def fn(a, b):
        return by_hand(a, b, e4m3), by_hand(a, b, bf16)

    for one in (fn, lambda a, b: fn(a, b)[::-1]):
        with pytest.raises(AssertionError, match="multiplies f16"):
            assert_fp8_gemms(one, FP8, FP8, target="B200", min_flops_share=0.5)


@pytest.mark.parametrize("asked", [{}, {"min_flops_share": 0.5}])
def test_a_program_without_a_matmul_is_not_fp8(asked):
    with pytest.raises(AssertionError, match="the program has no matmul"):
        assert_fp8_gemms(lambda a: a + 1, shape(8, 8), **asked)


def test_a_matmul_that_is_meant_to_be_wide_is_allowed_by_its_rule():
    """As a router is; but not if another rule made it wide, nor if all are wide."""

    def wide(x, w, router):
        return dot(x.astype(bf16), router)

    def routed(x, w, router):
        return dot(x, w), wide(x, w, router)

    seen = inspect(routed, FP8, FP8, WIDE)
    for allowed in ((), ["operand-layout"]):
        assert "1 of 2 matmuls are not FP8" in fp8_failures(seen, allowed)
    assert_fp8_gemms(seen, allow="not-quantized")
    with pytest.raises(AssertionError, match="no matmul is FP8"):
        assert_fp8_gemms(wide, FP8, FP8, WIDE, allow="not-quantized")


def test_a_loop_of_unknown_length_has_no_share():
    def fn(a, b, c):
        later = jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, c)
        return dot(a, b), later

    large = shape(4096, 4096, dtype=e4m3)
    seen = inspect(fn, large, large, WIDE)
    assert seen.report.fp8_flops_share > 0.99  # if the loop runs once
    with pytest.raises(AssertionError, match="how often its loop runs is not known"):
        assert_fp8_gemms(seen, min_flops_share=0.9)
    assert_fp8_gemms(seen, count=1)


def product(x, w, x_scale, w_scale):
    return scaled_dot(quantize(x, x_scale), quantize(w, w_scale), x_scale, w_scale, bf16)


def test_a_residual_is_no_bias():
    """A sum with another matrix, in a kernel that must run anyway, is not what a bias is."""

    def block(x, w, x_scale, w_scale, added):
        y = product(x, w, x_scale, w_scale).astype(f32) + added
        return y * jax.lax.rsqrt(jax.numpy.mean(y * y, axis=1, keepdims=True))

    given = WIDE, WIDE, SCALE, SCALE
    with pytest.raises(AssertionError) as told:
        assert_fp8_gemms(block, *given, shape(64, 64, dtype=f32), fused="bias")
    assert "left outside: bias" not in str(told.value)  # but no call has one
    assert "no FP8 call has fused: bias" in str(told.value)
    with pytest.raises(AssertionError, match="left outside: bias"):
        assert_fp8_gemms(block, *given, shape(64, dtype=f32), fused="bias")
