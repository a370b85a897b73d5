"""What is not judged is not green, in `assert_fp8_gemms` and `fp8lens --require-fp8`."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import pytest

from fp8lens import assert_fp8_gemms, inspect, report_gemms
from fp8lens.cli import main
from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot
from tests.programs.corpus import bf16, by_hand, e4m3, f32, shape

FP8 = shape(64, 64, dtype=e4m3)


def dot(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=f32)


@pytest.fixture(scope="module")
def text():
    return inspect(dot, FP8, FP8).module.text


def in_type(text, argument, dtype):
    """The program, where one of the arguments has another type."""
    changed, times = re.subn(rf"(%{argument}\.1 = )f8e4m3fn", rf"\1{dtype}", text)
    assert times == 1
    return changed


@pytest.mark.parametrize(
    "given, multiplied",
    [
        (("f8e4m3fn", "f8e5m2"), "f8e4m3fn"),
        (("f8e4m3fn", "bf16"), "bf16"),
        (("bf16", "f8e4m3fn"), "bf16"),
        (("f8e4m3fn", "s8"), "s8"),
        (("f16", "f32"), "tf32"),
    ],
)
def test_both_operands_are_asked(given, multiplied, text, tmp_path, capsys):
    for argument, dtype in zip("ab", given, strict=True):
        text = in_type(text, argument, dtype)
    (row,) = report_gemms(text).rows
    assert (row.lhs_dtype, row.rhs_dtype) == given and row.math_dtype == multiplied
    is_fp8 = multiplied.startswith("f8")
    assert row.is_fp8 == is_fp8 and report_gemms(text).fp8_flops_share == is_fp8
    file = tmp_path / "module_gpu_after_optimizations.txt"
    file.write_text(text)
    assert main([str(file), "--require-fp8"]) == (0 if is_fp8 else 1)
    capsys.readouterr()
    for asked in ({}, {"count": 1}, {"min_flops_share": 0.1}) if not is_fp8 else ():
        with pytest.raises(AssertionError):
            assert_fp8_gemms(text, **asked)


SCHEDULED = """HloModule jit_f, is_scheduled=true

{more}ENTRY %main (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> f32[64,64] {{
  %a = f8e4m3fn[64,64]{{1,0}} parameter(0)
  %b = f8e4m3fn[64,64]{{1,0}} parameter(1)
  ROOT %r = f32[64,64]{{1,0}} {what}
}}
"""
DIMENSIONS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_a_plain_kernel_multiplies_no_fp8():
    """Only tensor cores do; what XLA's own kernels make of FP8 arrays the text does not say."""
    given = SCHEDULED.format(more="", what=f"dot(%a, %b), {DIMENSIONS}")
    (row,) = report_gemms(given).rows
    assert (row.library, row.math_dtype, row.is_fp8) == ("kernel", "unknown", False)
    with pytest.raises(AssertionError, match="1 of 1 matmuls are not FP8"):
        assert_fp8_gemms(given)


def test_a_librarys_kernel_in_a_fusion_is_not_looked_into():
    inside = (
        "%wrapped (p: f8e4m3fn[64,64], q: f8e4m3fn[64,64]) -> f32[64,64] {\n"
        "  %p = f8e4m3fn[64,64]{1,0} parameter(0)\n  %q = f8e4m3fn[64,64]{1,0} parameter(1)\n"
        '  ROOT %c = f32[64,64]{1,0} custom-call(%p, %q), custom_call_target="somebodys"\n}\n\n'
    )
    what = "fusion(%a, %b), kind=kCustom, calls=%wrapped"
    seen = inspect(SCHEDULED.format(more=inside, what=what))
    assert seen.report.opaque == ("r",) and [line.what for line in seen.ledger] == ["opaque"]
    with pytest.raises(AssertionError, match="no matmul beside kernels that are not looked into"):
        assert_fp8_gemms(seen)


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
    assert beside.report.fp8_flops_share == 1  # of what HLO has
    with pytest.raises(AssertionError, match=rf'{name}.*multiplies bf16.*allow="opaque"'):
        assert_fp8_gemms(beside, **asked)
    assert_fp8_gemms(beside, **asked, allow="opaque")
    assert_fp8_gemms(beside, count=1)


def test_of_two_kernels_of_one_name_neither_passes_for_the_other():
    """XLA numbers them in the PTX, and does not say which is which."""
    small = shape(64, 64, dtype=e4m3)

    def fn(a, b):
        return by_hand(a, b, e4m3), by_hand(a, b, bf16)

    seen = inspect(fn, small, small, target="B200")
    with pytest.raises(AssertionError, match="multiplies f16"):
        assert_fp8_gemms(seen, min_flops_share=0.5)
    with pytest.raises(AssertionError, match="multiplies f16"):
        assert_fp8_gemms(inspect(lambda a, b: fn(a, b)[::-1], small, small, target="B200"))


@pytest.mark.parametrize("asked", [{}, {"min_flops_share": 0.0}, {"min_flops_share": 1.0}])
def test_a_program_without_a_matmul_is_not_fp8(asked):
    with pytest.raises(AssertionError, match="the program has no matmul"):
        assert_fp8_gemms(lambda a: a + 1, shape(8, 8), **asked)


def test_a_matmul_that_is_meant_to_be_wide_is_allowed_by_its_rule(tmp_path, capsys):
    """As a router is; but not if another rule made it wide."""
    code = """
    import jax, jax.numpy as jnp

    def layer(x, w, router):
        multiply = lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)
        return multiply(x, w), multiply(x.astype(jnp.bfloat16), router)

    def wide(x, w, router):
        return layer(x, w, router)[1]
    """
    names = {}
    path = tmp_path / "routed.py"
    path.write_text(textwrap.dedent(code))
    exec(path.read_text(), names)
    layer, wide, router = names["layer"], names["wide"], shape(64, 64, dtype=bf16)
    seen = inspect(layer, FP8, FP8, router)
    (row,) = seen.wide_rows()
    assert row.math_dtype == "bf16" and seen.wide_rows(["late-relu"]) == [row]
    assert seen.wide_rows(["not-quantized"]) == []
    with pytest.raises(AssertionError, match="1 of 2 matmuls are not FP8"):
        assert_fp8_gemms(seen, allow="operand-layout")
    assert_fp8_gemms(seen, allow="not-quantized")
    with pytest.raises(AssertionError, match="no matmul is FP8"):
        assert_fp8_gemms(wide, FP8, FP8, router, allow="not-quantized")
    asked = ["--shapes", "f8e4m3fn[64,64] f8e4m3fn[64,64] bf16[64,64]", "--require-fp8"]
    assert main([f"{path}:layer", *asked]) == 1
    assert main([f"{path}:layer", *asked, "--allow", "not-quantized"]) == 0
    capsys.readouterr()
    assert main([f"{path}:wide", *asked, "--allow", "not-quantized"]) == 1
    assert "no matmul is in FP8" in capsys.readouterr().out


def test_a_loop_of_unknown_length_has_no_share():
    def fn(a, b, c):
        later = jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, c)
        return dot(a, b), later

    args = shape(4096, 4096, dtype=e4m3), shape(4096, 4096, dtype=e4m3), shape(64, 64, dtype=bf16)
    seen = inspect(fn, *args)
    assert seen.report.fp8_flops_share > 0.99  # if the loop runs once
    with pytest.raises(AssertionError, match="how often its loop runs is not known"):
        assert_fp8_gemms(seen, min_flops_share=0.9)
    assert_fp8_gemms(seen, count=1)


# Errors in one sentence ---------------------------------------------------------------------------


def test_memory_that_ends_is_said(monkeypatch, tmp_path, text, capsys):
    def full(*_):
        raise MemoryError

    file = tmp_path / "module_gpu_after_optimizations.txt"
    file.write_text(text)
    monkeypatch.setattr("fp8lens.cli.parse_hlo_module", full)
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is not enough memory for") and "Traceback" not in error


def test_memory_that_ends_in_the_users_file_is_said(tmp_path, capsys):
    file = tmp_path / "big.py"
    file.write_text("raise MemoryError")
    assert main([f"{file}:f", "--shapes", "f32[8]"]) == 2
    assert "error: there is not enough memory for" in capsys.readouterr().err


def test_the_command_says_that_no_gpu_is_there(tmp_path):
    file = tmp_path / "layer.py"
    file.write_text("f = lambda x: x")
    hidden = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "fp8lens", f"{file}:f", "--shapes", "f32[8]"],
                          capture_output=True, text=True, env=hidden, timeout=300)  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert re.search("error: JAX_PLATFORMS=cuda asks for a GPU.*JAX_PLATFORMS=cpu", done.stderr)


def product(x, w, x_scale, w_scale):
    return scaled_dot(quantize(x, x_scale), quantize(w, w_scale), x_scale, w_scale, bf16)


def test_a_residual_is_no_bias():
    """A sum with another matrix, in a kernel that must run anyway, is not what a bias is."""

    def block(x, w, x_scale, w_scale, residual):
        y = residual + product(x, w, x_scale, w_scale).astype(f32)
        return y * jax.lax.rsqrt(jax.numpy.mean(y * y, axis=1, keepdims=True))

    def biased(x, w, x_scale, w_scale, bias):
        y = product(x, w, x_scale, w_scale).astype(f32) + bias
        return y * jax.lax.rsqrt(jax.numpy.mean(y * y, axis=1, keepdims=True))

    x, w = shape(64, 64, dtype=bf16), shape(64, 64, dtype=bf16)
    scale = shape(dtype=f32)
    with pytest.raises(AssertionError) as told:
        assert_fp8_gemms(block, x, w, scale, scale, shape(64, 64, dtype=f32), fused="bias")
    assert "left outside: bias" not in str(told.value)  # but no call has one
    assert "no FP8 call has fused: bias" in str(told.value)
    with pytest.raises(AssertionError, match="left outside: bias"):
        assert_fp8_gemms(biased, x, w, scale, scale, shape(64, dtype=f32), fused="bias")


def test_a_count_alone_is_told_by_what_is_not_fp8():
    def two(x, w, v, x_scale, w_scale):
        return (product(x, w, x_scale, w_scale).astype(f32) + 1, x @ v)

    x, scale = shape(64, 64, dtype=bf16), shape(dtype=f32)
    with pytest.raises(AssertionError) as told:
        assert_fp8_gemms(two, x, x, x, scale, scale, count=2)
    assert "lost fp8" in str(told.value) and "lost bias" not in str(told.value)
