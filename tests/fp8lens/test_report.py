"""report_gemms: one row for every matmul, wherever it is, and what stayed outside of it."""

import re
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest

from fp8lens import (
    assert_fp8_gemms,
    inspect,
    passes,
)
from fp8lens.matmul.kernels import kernels
from helpers import HloParseError, aot_compile, parse_hlo_module, report_gemms
from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import scaled_dot, to_e4m3
from tests.fp8lens.arrays import given
from tests.programs import real

e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
M, N, K = 64, 128, 256


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, s = S(M, K), S(N, K), S(dtype=f32)
OPERANDS = (A, B, s, s)


def only(*args, **options):
    report = report_gemms(*args, **options)
    (row,) = report.rows
    return row


def quantized(a, b, a_scale, b_scale, d_scale, bias):
    d = jax.nn.relu(scaled_dot(a, b, a_scale, b_scale) + bias.astype(f32))
    return to_e4m3(d, d_scale), jnp.max(jnp.abs(d))


# What a row says ----------------------------------------------------------------------------------


def test_the_fields_of_a_fused_call():
    row = only(quantized, A, B, s, s, s, S(N, dtype=bf16))
    assert (row.library, row.epilogue, row.out_dtype) == ("cublasLt", "BIAS_RELU", "f8e4m3fn")
    assert row.amax and row.scales == ("a", "b", "d") and not row.outside
    assert re.fullmatch(r"[\w/]+\.py:\d+", row.source) and row.op_name.startswith("jit(quantized)/")
    scaled = only(lambda a, b: 3 * jax.lax.dot(a, b.T, preferred_element_type=f32), A, B)
    added = only(lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c, *OPERANDS, S(M, N, dtype=f32))
    assert (scaled.alpha, scaled.scales, added.beta) == (3, (), 1)


def dot(a, b):
    return a @ b.T


def product(a, b):
    return a @ b


def einsum(equation):
    return lambda a, b: jnp.einsum(equation, a, b, preferred_element_type=f32)


TRITON, L40S, A100 = {"gemm": "triton"}, {"gemm": "auto", "target": "L40S"}, {"target": "A100"}
WIDE, FP8 = "f32[64,256] f32[128,256]", "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]"
MIXED = FP8.replace("f8e4m3fn", "f8e5m2", 1)
BF16 = WIDE.replace("f32", "bf16")
# What the row says: by whom it is run, in which type, batch, M, N, K.
ROWS = [
    (dot, WIDE, {}, "cublasLt tf32 1 64 128 256"),
    (lambda a, b: jnp.dot(a, b.T, precision="highest"), WIDE, {}, "cublasLt f32 1 64 128 256"),
    (
        lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=jnp.int32),
        "s8[64,256] s8[128,256]",
        {},
        "cublasLt s8 1 64 128 256",
    ),
    (dot, "c64[64,256] c64[128,256]", {}, "cublasLt tf32 1 64 128 256"),
    (scaled_dot, MIXED, {}, "cublasLt f8e5m2 1 64 128 256"),
    (scaled_dot, FP8, A100, "cublasLt tf32 1 64 128 256"),
    (scaled_dot, FP8, TRITON, "triton tf32 1 64 128 256"),
    # K is summed in the same kernel, in parts by two, or only by the kernel after it.
    (product, "bf16[64,256] bf16[256]", {}, "kernel bf16 1 64 1 256"),
    (dot, "bf16[1,65536] bf16[64,65536]", {}, "kernel bf16 1 1 64 65536"),
    (product, "bf16[1,512] bf16[512,256]", {}, "kernel bf16 1 1 256 512"),
    (einsum("hk,khd->hd"), "bf16[8,512] bf16[512,8,64]", {}, "kernel f32 8 1 64 512"),
    (product, "f32[256,4096] f32[4096,256]", TRITON, "triton tf32 1 256 256 4096"),
    (product, "bf16[4096,4096] bf16[4096]", TRITON, "triton bf16 1 4096 1 4096"),
    (einsum("mk,nk->mn"), "f8e4m3fn[128,128] " * 2, L40S, "cublasLt f8e4m3fn 1 128 128 128"),
    # The program's own sum of a batch.
    (
        lambda a, b: einsum("bmk,bnk->bmn")(a, b).sum(0),
        "f8e4m3fn[2,128,128] " * 2,
        L40S,
        "cublasLt f8e4m3fn 2 128 128 128",
    ),
    (lambda a, b: (3 * a[:, None] * b[None]).sum(-1), BF16, {}, "kernel bf16 1 64 128 256"),
    # Elementwise work.
    (product, "bf16[64,1] bf16[1,128]", {}, None),
    (einsum("bk,bk->bk"), "bf16[64,256] bf16[64,256]", {}, None),
    (lambda a, b: (a * a).sum(-1), BF16, {}, None),
]


@pytest.mark.parametrize("fn, args, options, expected", ROWS)
def test_rows_of_all_kinds(fn, args, options, expected):
    rows = report_gemms(fn, *given(args), **options).rows
    said = [f"{r.library} {r.math_dtype} {r.batch} {r.m} {r.n} {r.k}" for r in rows]
    assert said == ([expected] if expected else [])
    for row in rows:
        each = 8 if row.lhs_dtype == "c64" else 2
        assert row.flops == each * row.batch * row.m * row.n * row.k


def layer(a, b, x, y):
    return scaled_dot(a, b, x, y)


def test_the_source_is_the_line_outside_of_the_package():
    row, line = only(layer, *OPERANDS), layer.__code__.co_firstlineno + 1
    assert row.source == f"tests/fp8lens/test_report.py:{line}"
    assert row.instruction.frames[0][0].endswith("recipes.py")


# What stayed outside ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn, args, outside",
    [
        (lambda a, b, x, y: scaled_dot(a, b, x, y).astype(bf16), FP8, 1),
        (scaled_dot, "f8e4m3fn[50,200] f8e4m3fn[128,200] f32[] f32[]", 3),
    ],
)
def test_all_that_is_outside_of_one_matmul_is_named(fn, args, outside):
    program = aot_compile(fn, *given(args))
    row, launched = only(program), kernels(program)
    assert len(row.outside) == outside == len(launched) - 1
    assert {k.name for k in launched} == {row.name, *row.outside}
    assert row.outside_bytes == sum(k.bytes_moved for k in launched if k.name in row.outside)


# Totals and output --------------------------------------------------------------------------------


def both(a, b, c, x, y):
    return jax.lax.dot(dequantize(a, x, f32), dequantize(b, y, f32)), c @ c.T


BOTH = (A, S(K, N), S(M, K, dtype=bf16), s, s)


def test_text_and_html_show_every_column_and_what_is_outside():
    report = report_gemms(both, *BOTH)
    text, page = str(report), report._repr_html_()
    for part in ("64 x 128 x 256", "cublasLt", "DEFAULT", "scales ab", "test_report.py:"):
        assert part in text and part in page
    assert "2 matmuls, 1 in FP8 (66.7% of 6.29 MFLOP); 3 kernels" in text
    assert "runs" not in text and "outside: wrapped_transpose: 65.5 kB" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert page.count("<tr") == 6 and str(Path(__file__).parent) not in page + text
    named = report_gemms(aot_compile(both, *BOTH).as_text().replace("jit(both)", "jit(<b>)"))
    assert "<b>" not in named._repr_html_()
    assert "<p>0 matm" in report_gemms(lambda a: a.astype(f32), A)._repr_html_()


def foreign(target, lhs="f8e5m2[512,64]", rhs="f8e4m3fn[256,64]", out="bf16[512,256]"):
    """The report of a program that calls another library."""
    return report_gemms(f"""\
HloModule m, is_scheduled=true

ENTRY %main (a: {lhs}, b: {rhs}, s: f32[1]) -> {out} {{
  %a = {lhs}{{1,0}} parameter(0)
  %b = {rhs}{{1,0}} parameter(1)
  %s = f32[1]{{0}} parameter(2)
  ROOT %call.1 = {out}{{1,0}} custom-call(%a, %s, %b, %s), custom_call_target="{target}"
}}
""")


def test_a_call_of_another_library_is_a_row_and_its_inside_is_not_seen():
    """Transformer Engine's multiplies FP8; of a kernel of one's own nobody knows what it does."""
    for target, multiplied in (("te_gemm_v2_ffi", "f8e5m2"), ("my_kernel", "unknown")):
        (row,) = foreign(target).rows
        assert (row.m, row.n, row.k, row.batch) == (512, 256, 64, 1)
        assert (row.lhs_dtype, row.rhs_dtype, row.out_dtype) == ("f8e5m2", "f8e4m3fn", "bf16")
        assert (row.library, row.epilogue, row.math_dtype) == (target, "not seen", multiplied)
    assert foreign("my_kernel").opaque == ("call.1",)
    # Square matrices tell M, N and K too; other shapes, and wide arrays, tell of no matmul.
    square = ["f8e4m3fn[64,64]", "f8e4m3fn[64,64]", "bf16[64,64]"]
    assert foreign("te_gemm_v2_ffi", *square).rows[0].flops == 2 * 64**3
    for shapes in ({"out": "bf16[512,512]"}, {"rhs": "bf16[256,64]"}):
        report = foreign("te_gemm_v2_ffi", **shapes)
        assert not report.rows and "not looked into: call.1" in str(report)


def test_the_settings_of_transformer_engines_gemm_are_read(tmp_path):
    """Its sizes, whether its sums are careful, and that a bf16 one is a matmul that lost FP8."""
    (path,) = real.unpacked("te_delayed_step", tmp_path).iterdir()
    text = path.read_text()
    careful = text.replace("use_split_accumulator = false", "use_split_accumulator = true")
    for program, precision in ((text, "DEFAULT"), (careful, "HIGHEST")):
        rows = report_gemms(program).rows
        assert [(r.m, r.n, r.k) for r in rows] == [(4096, 2048, 4096), (2048, 4096, 4096)]
        assert {(r.precision, r.scales) for r in rows} == {(precision, ("a", "b"))}
    with pytest.raises(HloParseError, match="by .2048, 4096"):
        report_gemms(text.replace("rhs_transposed = true", "rhs_transposed = false"))
    path.write_text(re.sub("f8e5m2|f8e4m3fn", "bf16", text))
    wide = inspect(path)
    assert len(wide.wide_rows()) == 2 and not wide.report.opaque
    assert wide.bill.calibrated is not None


def test_fused_attention_is_two_matmuls_forward_and_five_backward():
    """q [256, 64], k and v [128, 64], 2 x 8 heads, which share keys and values, as JAX lowers
    cuDNN's attention and its gradient.
    """
    text = (Path(__file__).parent / "hlo" / "cudnn_attention.hlo").read_text()
    for shape in ("[2,128,8,64]", "[2,8,128,64]"):
        text = text.replace(f"bf16{shape}", f"bf16{shape}".replace(",8,", ",2,"))
    rows = report_gemms(text.replace("bf16[", "f8e4m3fn[")).rows
    scores, values, gradients = (256, 128, 64), (256, 64, 128), (128, 64, 256)
    five = [scores, gradients, scores, values, gradients]
    assert [(r.m, r.n, r.k) for r in rows] == [scores, values, *five]
    assert {(r.batch, r.library, r.math_dtype) for r in rows} == {(16, "cudnn", "f8e4m3fn")}


def test_cudnns_attention_compiles_where_there_is_no_cudnn():
    q = S(2, 256, 8, 64, dtype=bf16)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    rows = report_gemms(attend, q, q, q).rows
    assert [(row.library, row.batch, row.m, row.n, row.k) for row in rows] == [
        ("cudnn", 16, 256, 256, 64),
        ("cudnn", 16, 256, 64, 256),
    ]


def test_a_weight_that_is_fp8_in_memory_alone_is_said_with_its_bytes():
    def weights_only(x, w, scale):
        return jax.lax.dot(x, w.astype(bf16).T) * scale.astype(bf16)

    report = report_gemms(weights_only, S(16, K, dtype=bf16), B, s, gemm="triton")
    (row,) = report.rows
    assert row.fp8_in_memory == N * K and not row.is_fp8
    assert f"{N * K / 1e3:.1f} kB of operands are FP8 in memory alone, multiplied in bf16" in (
        report.totals()
    )
    assert "in memory alone" not in report_gemms(scaled_dot, *OPERANDS).totals()


def test_static_scales_may_be_constants_and_the_amax_bf16():
    """The call has the scale of the result and the amax: that amax is converted is no loss."""

    def layer(a, b):
        y = scaled_dot(a, b, f32(0.5), f32(0.25), bf16)
        return to_e4m3(y, f32(3)), jnp.max(jnp.abs(y))

    seen = inspect(layer, A, B)
    (row,) = seen.report.rows
    assert row.amax and "d" in row.scales and not row.outside
    assert_fp8_gemms(seen, count=1, fused=True)
    assert "(outside)" not in seen.chain() and "(in the call)" in seen.chain()


# Input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, message, call",
    [
        (
            TypeError,
            "further arguments: only with a function",
            lambda: report_gemms("HloModule m", A),
        ),
        (
            TypeError,
            "target: only with a function",
            lambda: report_gemms("HloModule m", target="H100"),
        ),
        (TypeError, "got int: pass HLO text", lambda: report_gemms(7)),
        (HloParseError, "starts with HloModule", lambda: report_gemms("nothing")),
        (FileNotFoundError, "no/such/file", lambda: report_gemms(Path("no/such/file"))),
        (KeyError, "H100", lambda: report_gemms(scaled_dot, *OPERANDS, target="H10")),
    ],
)
def test_bad_input(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_a_matmul_that_cannot_be_read_says_where():
    text = aot_compile(scaled_dot, *OPERANDS).as_text()
    for broken in (
        re.sub(
            r'"lhs_contracting_dimensions":\["\d"\]', '"lhs_contracting_dimensions":["7"]', text
        ),
        text.replace('"dot_dimension_numbers"', '"dimension_numbers"'),
    ):
        with pytest.raises(
            HloParseError, match=r"line \d+, column \d+: this says that it multiplies matrices"
        ):
            report_gemms(broken)


def test_an_inspection_is_compiled_once():
    seen = inspect(dot, A, B)
    assert inspect(seen) is seen and report_gemms(seen) is seen.report
    with pytest.raises(TypeError, match="compiled already"):
        inspect(seen, A)
    saved = inspect(seen.compiled)
    assert saved.report.rows and not saved.is_ours and '"reasons": null' in saved.json()
    for ask in (lambda: saved.reasons, lambda: saved.passes):
        with pytest.raises(TypeError, match="inspect the function and its arguments"):
            ask()


@pytest.mark.parametrize("ask", [inspect, assert_fp8_gemms, parse_hlo_module, passes])
def test_traced_and_exported_functions_name_the_fix(ask):
    jitted, x = jax.jit(lambda x: x @ x.T), jnp.ones((32, 64))
    with pytest.raises(TypeError, match=r"got Traced: .* what traced.lower\(\).compile\(\) return"):
        ask(jitted.trace(x))
    with pytest.raises(TypeError, match="got Exported.*(not for CUDA: export|give it to inspect)"):
        ask(jax.export.export(jitted, platforms=["cpu"])(x))
    with pytest.raises(TypeError, match="got bytes: the bytes of a serialized executable are"):
        ask(b"\x80\x04\x95")


def test_an_exported_function_is_inspected_as_the_function():
    def fn(x, *, w):
        return jax.lax.dot(x, w.T, preferred_element_type=bf16)

    (n,) = jax.export.symbolic_shape("n")
    jitted = jax.jit(fn)
    symbolic = jax.export.export(jitted, platforms=["cuda"])(S(n, K), w=B)
    with pytest.raises(TypeError, match="symbolic shapes: give its arguments"):
        inspect(symbolic)
    whole = jax.export.export(jitted, platforms=["cuda", "cpu"])(A, w=B)
    for seen in (inspect(symbolic, A, w=B), inspect(whole)):
        assert seen.report.rows[0].title == only(fn, A, w=B).title and not seen.reasons
