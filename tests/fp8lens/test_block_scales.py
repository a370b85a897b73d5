"""Matmuls with a scale for each block of elements: those that a Blackwell multiplies as they are,
and what is said of the others.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens import TARGETS, assert_fp8_gemms, inspect, report_gemms
from fp8lens.compile.isolate import CompilerDied
from fp8lens.inspection import Inspection

M, N, K = 128, 256, 512  # XLA pads fewer rows to 128
bf16, f32 = jnp.bfloat16, jnp.float32
e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
e2m1, e8m0 = jnp.float4_e2m1fn, jnp.float8_e8m0fnu

CALL = "__cudnn$blockScaledDot"
WORKSTATION = dataclasses.replace(
    TARGETS["B200"],
    name="a workstation's",
    compute_capability=(12, 0),
    shared_memory_per_sm=102400,
    shared_memory_optin=101376,
)


def scaled_matmul(lhs, rhs, scale, block, target="B200") -> Inspection:
    arrays = [jax.ShapeDtypeStruct((1, rows, K), of) for rows, of in ((M, lhs), (N, rhs))]
    scales = [jax.ShapeDtypeStruct((1, rows, K // block), scale) for rows in (M, N)]

    def fn(a, b, a_scales, b_scales):
        return jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=bf16)

    return inspect(fn, *arrays, *scales, target=target)


FORMATS = {
    "MXFP8": (e4m3, e4m3, e8m0, 32),
    "MXFP8, mixed": (e4m3, e5m2, e8m0, 32),
    "MXFP8, both E5M2": (e5m2, e5m2, e8m0, 32),
    "MXFP4": (e2m1, e2m1, e8m0, 32),
    "NVFP4": (e2m1, e2m1, e4m3, 16),
    "E4M3 with scales in E4M3": (e4m3, e4m3, e4m3, 16),
    "E4M3 by E2M1": (e4m3, e2m1, e8m0, 32),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_xla_makes_no_call_of_is_a_reason(name):
    seen = scaled_matmul(*FORMATS[name])
    is_call = CALL in seen.compiled.as_text()
    (row,) = seen.report.rows
    assert row.is_fp8 == is_call
    rules = [reason.rule for reason in seen.reasons]
    assert rules == ([] if is_call else ["block-format-not-multiplied"])
    kind = "FP4" if "FP4" in name else "FP8"
    assert (f"1 matmul, 1 in {kind} (100%" in str(seen.report)) == is_call


def lax_scaled_dot(lhs, rhs, scale, block, k_last=False, **options) -> Inspection:
    shapes = [(M, K, lhs), (N, K, rhs), (M, K // block, scale), (N, K // block, scale)]

    def fn(a, b, a_scales, b_scales):
        if k_last:
            b, b_scales = b.T, b_scales.T
        return jax.lax.scaled_dot(
            a, b, lhs_scale=a_scales, rhs_scale=b_scales, preferred_element_type=bf16
        )

    if not k_last:
        shapes[1::2] = [(columns, rows, of) for rows, columns, of in shapes[1::2]]
    arrays = (jax.ShapeDtypeStruct((rows, columns), of) for rows, columns, of in shapes)
    return inspect(fn, *arrays, **options)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="needs JAX 0.12")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k_last", [False, True])
@pytest.mark.parametrize("chip", ["B200", WORKSTATION], ids=["B200", "workstation"])
def test_xlas_triton_multiplies_what_scaled_dot_is_given(name, k_last, chip):
    """The PTX says whether it does, and so does the row, with the type whose rate it has."""
    seen = lax_scaled_dot(*FORMATS[name], k_last, target=chip, gemm="auto")
    (row,) = seen.report.rows
    multiplied = re.findall(r"\w*mma\.\S*kind::(\w+)\.block_scale\S*", "".join(seen.ptx.values()))
    assert row.is_fp8 == bool(multiplied) and row.math_dtype != "unknown"
    if multiplied:
        assert row.math_dtype.startswith("f4") == multiplied[0].startswith("mxf4")
        expected = ["block-scales-misread"] if "in E4M3" in name else []
    elif "FP4" in name:
        expected = ["fp4-operand-not-k-last"]
    else:
        expected = ["unknown-not-fp8" if name == "E4M3 by E2M1" else "scaled-dot-spelled-out"]
    assert [reason.rule for reason in seen.reasons] == expected
    if k_last and "E4M3 " not in name:
        assert multiplied


# By the types of elements and scales, and the elements to a scale: what PTX has no instruction for.
MISREAD = [(e4m3, e4m3, e4m3, 32), (e4m3, e5m2, e5m2, 32), (e4m3, e4m3, e8m0, 16)]
MISREAD += [(e4m3, e2m1, e4m3, 16), (e2m1, e2m1, e4m3, 32)]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="needs JAX 0.12")
@pytest.mark.parametrize("formats", MISREAD)
def test_scales_that_no_instruction_reads_are_told(formats):
    seen = lax_scaled_dot(*formats, k_last=True, target="B200", gemm="auto")
    assert [reason.rule for reason in seen.reasons] == ["block-scales-misread"]
    with pytest.raises(AssertionError, match="wrong numbers, by an error of XLA's"):
        assert_fp8_gemms(seen)
    assert_fp8_gemms(seen, allow="block-scales-misread")


def test_what_ends_xlas_process_is_an_error_here():
    """With a scale for a whole row, as where one is left out, Triton ends the process."""
    shapes = [(M, K, e4m3), (K, N, e4m3), (M, K // 32, e8m0)]
    arrays = [jax.ShapeDtypeStruct((rows, columns), of) for rows, columns, of in shapes]
    with pytest.raises((CompilerDied, jax.errors.JaxRuntimeError)) as error:
        inspect(
            lambda a, b, x: jax.lax.scaled_dot(a, b, lhs_scale=x),
            *arrays,
            target="B200",
            gemm="auto",
        )
    said = [str(error.value), *getattr(error.value, "__notes__", ())]
    assert "give ones, one for each 32" in " ".join(said)


def test_without_triton_scaled_dot_is_spelled_out():
    seen = lax_scaled_dot(*FORMATS["MXFP8"], target="B200", gemm="cublaslt")
    assert [reason.rule for reason in seen.reasons] == ["scaled-dot-spelled-out"]


@pytest.mark.parametrize("name", [name for name in FORMATS if "E4M3 " not in name])
def test_a_hopper_has_none_of_them(name):
    seen = scaled_matmul(*FORMATS[name], target="H100")
    assert not seen.report.fp8_rows and CALL not in seen.compiled.as_text()
    assert [reason.rule for reason in seen.reasons] == ["block-scales"]


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "f4e2m1fn"])
def test_what_a_kernel_of_xlas_own_multiplies_is_not_known(dtype):
    text = f"""HloModule m, is_scheduled=true

fused {{
  p = {dtype}[64,64]{{1,0}} parameter(0)
  q = {dtype}[64,64]{{1,0}} parameter(1)
  ROOT d = f32[64,64]{{1,0}} dot(p, q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}

ENTRY e {{
  a = {dtype}[64,64]{{1,0}} parameter(0)
  b = {dtype}[64,64]{{1,0}} parameter(1)
  ROOT f = f32[64,64]{{1,0}} fusion(a, b), kind=kLoop, calls=fused
}}
"""
    (row,) = report_gemms(text).rows
    assert row.math_dtype == "unknown" and not row.is_fp8
