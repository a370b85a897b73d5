"""report_gemms: one row for every matmul, wherever it is, and what stayed outside of it."""

import dataclasses
import io
import re
import textwrap
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest

from fp8lens import (
    assert_fp8_gemms,
    diff_hlo,
    format_hlo_module,
    inspect,
    passes,
    print_hlo_module,
    why_not_fp8,
)
from fp8lens.hlo import origin
from fp8lens.matmul.kernels import kernels
from helpers import HloParseError, aot_compile, parse_hlo_module, report_gemms
from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import scaled_dot, to_e4m3

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


def test_every_field_of_a_fused_call():
    row = only(quantized, A, B, s, s, s, S(N, dtype=bf16))
    expected = dict(
        m=M,
        n=N,
        k=K,
        batch=1,
        lhs_dtype="f8e4m3fn",
        rhs_dtype="f8e4m3fn",
        math_dtype="f8e4m3fn",
        library="cublasLt",
        epilogue="BIAS_RELU",
        amax=True,
        beta=0.0,
        out_dtype="f8e4m3fn",
        outside=(),
        count=1,
        scales=("a", "b", "d"),
        alpha=1.0,
    )
    assert {name: getattr(row, name) for name in expected} == expected
    assert re.fullmatch(r"[\w/]+\.py:\d+", row.source) and row.op_name.startswith("jit(quantized)/")
    assert row.flops == 2 * M * N * K and row.is_fp8
    names = [f.name for f in dataclasses.fields(row)][:16]
    assert (
        names
        == (
            "m n k batch lhs_dtype rhs_dtype math_dtype library epilogue amax beta out_dtype "
            "outside source "
            "op_name count"
        ).split()
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.m = 1


@pytest.mark.parametrize(
    "fn, args, options, expected",
    [
        (
            lambda a, b: a @ b.T,
            (S(M, K, dtype=f32), S(N, K, dtype=f32)),
            {},
            dict(math_dtype="tf32", lhs_dtype="f32", library="cublasLt"),
        ),
        (
            lambda a, b: jnp.dot(a, b.T, precision="highest"),
            (S(M, K, dtype=f32), S(N, K, dtype=f32)),
            {},
            dict(math_dtype="f32", precision="HIGHEST"),
        ),
        (
            lambda a, b: jax.lax.dot(a, b.T, precision="BF16_BF16_F32"),
            (S(M, K, dtype=f32), S(N, K, dtype=f32)),
            {},
            dict(math_dtype="bf16"),
        ),
        (
            lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=f32),
            (S(M, K, dtype=bf16), S(N, K, dtype=bf16)),
            {},
            dict(math_dtype="bf16", out_dtype="f32"),
        ),
        (
            lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=jnp.int32),
            (S(M, K, dtype=jnp.int8), S(N, K, dtype=jnp.int8)),
            {},
            dict(math_dtype="s8", out_dtype="s32", m=M, n=N, k=K),
        ),
        (
            lambda a, b: a @ b.T,
            (S(M, K, dtype=jnp.int32), S(N, K, dtype=jnp.int32)),
            {},
            dict(library="kernel", math_dtype="s32", m=M, n=N, k=K),
        ),
        (
            scaled_dot,
            (S(M, K, dtype=e5m2), B, s, s),
            {},
            dict(lhs_dtype="f8e5m2", rhs_dtype="f8e4m3fn", math_dtype="f8e5m2"),
        ),
        (
            scaled_dot,
            OPERANDS,
            {"target": "A100"},
            dict(lhs_dtype="f32", math_dtype="tf32", library="cublasLt"),
        ),
        (
            lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
            (*OPERANDS, S(M, N, dtype=f32)),
            {},
            dict(beta=1.0),
        ),
        (
            lambda a, b: 3 * jax.lax.dot(a, b.T, preferred_element_type=f32),
            (A, B),
            {},
            dict(alpha=3.0, scales=()),
        ),
        (
            lambda a, b: a @ b,
            (S(M, K, dtype=bf16), S(K, dtype=bf16)),
            {},
            dict(library="kernel", m=M, n=1, k=K, batch=1, lhs_dtype="bf16"),
        ),
        (
            lambda a, b: jnp.einsum("bmk,bk->bm", a, b),
            (S(3, M, K, dtype=bf16), S(3, K, dtype=bf16)),
            {},
            dict(library="kernel", m=M, n=1, k=K, batch=3),
        ),
        (lambda a, b: jnp.outer(a, b), (S(M, dtype=bf16), S(N, dtype=bf16)), {}, None),
        (
            lambda a, b: a @ b,
            (S(M, 1, dtype=bf16), S(1, N, dtype=bf16)),
            {},
            dict(library="kernel", m=M, n=N, k=1),
        ),
        (
            jax.vmap(scaled_dot, (0, 0, None, None)),
            (S(5, M, K), S(5, N, K), s, s),
            {},
            dict(batch=5, m=M, n=N, k=K),
        ),
        (
            lambda a, b: jnp.einsum("mbk,bnk->bmn", a, b),
            (S(M, 5, K, dtype=bf16), S(5, N, K, dtype=bf16)),
            {},
            dict(batch=5),
        ),
        (
            lambda a, b: jnp.einsum("mxy,nxy->mn", a, b),
            (S(M, 4, 64, dtype=bf16), S(N, 4, 64, dtype=bf16)),
            {},
            dict(m=M, n=N, k=K, batch=1),
        ),
        (
            scaled_dot,
            OPERANDS,
            {"gemm": "triton"},
            dict(
                library="triton",
                lhs_dtype="f8e4m3fn",
                rhs_dtype="f8e4m3fn",
                math_dtype="tf32",
                m=M,
                n=N,
                k=K,
            ),
        ),
        (
            lambda a, b, x, y: scaled_dot(a, b, x, y, bf16),
            OPERANDS,
            {"gemm": "triton"},
            dict(library="triton", lhs_dtype="bf16", math_dtype="bf16", m=M, n=N, k=K, batch=1),
        ),  # dequantized by a kernel
        (
            lambda a, b: jax.nn.relu(jax.lax.dot(a, b.T)),
            (S(4096, 4096, dtype=bf16),) * 2,
            {"gemm": "triton"},
            dict(library="triton", epilogue="maximum", k=4096),
        ),
    ],
)
def test_rows_of_all_kinds(fn, args, options, expected):
    if expected is None:  # a product without a sum, and not of a dot: no matmul
        assert not report_gemms(fn, *args, **options).rows
        return
    row = only(fn, *args, **options)
    assert {name: getattr(row, name) for name in expected} == expected


@pytest.mark.skipif(not hasattr(jax.nn, "scaled_matmul"), reason="this JAX has no block scaling")
def test_block_scaling_is_cudnns_on_blackwell_and_plain_kernels_on_hopper():
    def fn(a, b, x, y):
        return jax.nn.scaled_matmul(a, b, x, y, preferred_element_type=f32)

    args = (
        S(1, 256, 512),
        S(1, 128, 512),
        *(S(1, n, 16, dtype=jnp.float8_e8m0fnu) for n in (256, 128)),
    )
    hopper, blackwell = only(fn, *args), only(fn, *args, target="B200")
    assert (hopper.library, hopper.math_dtype) in (
        ("kernel", "f32"),
        ("cublasLt", "tf32"),
    )  # 0.12; 0.10.2
    assert len(hopper.outside) == report_gemms(fn, *args).kernels - 1
    assert (blackwell.library, blackwell.math_dtype) == ("cudnn", "f8e4m3fn")
    assert (
        (hopper.m, hopper.n, hopper.k) == (blackwell.m, blackwell.n, blackwell.k) == (256, 128, 512)
    )


def test_triton_split_over_k_is_one_matmul():
    fn, args = (lambda a, b: a @ b), (S(256, 4096, dtype=f32), S(4096, 256, dtype=f32))
    report = report_gemms(fn, *args, gemm="triton")
    (row,) = report.rows
    assert (row.m, row.n, row.k, row.batch) == (256, 256, 4096, 1)
    assert report.kernels == 2  # the second adds the parts up


TILE = {
    "xla_gpu_override_gemm_autotuner": "block_m: 128 block_n: 128 block_k: 64 num_warps: 4 "
    "num_ctas: 1 num_stages: 3"
}


def test_the_instruction_in_ptx_decides():
    def fn(a, b):
        return jax.lax.dot(a, b.T, preferred_element_type=f32)

    args = S(512, 512), S(512, 512)
    assert only(aot_compile(fn, *args, gemm="triton")).math_dtype == "f8e4m3fn"  # what the dot says
    assert only(fn, *args, gemm="triton").math_dtype == "f16"
    row = only(fn, *args, gemm="triton", compiler_options=TILE)
    assert row.math_dtype == "f8e4m3fn" and row.tile == "128x128x64"
    assert only(scaled_dot, *OPERANDS, gemm="triton").math_dtype == "tf32"
    assert only(scaled_dot, *OPERANDS).math_dtype == "f8e4m3fn"


def test_equal_kernels_share_their_ptx_and_blackwell_has_its_own_instruction():
    def fn(a, b, c, d):
        return jax.lax.dot(a, b.T, preferred_element_type=f32), jax.lax.dot(
            c, d.T, preferred_element_type=f32
        )

    args = (S(512, 512),) * 4
    rows = report_gemms(fn, *args, gemm="triton").rows
    assert [row.math_dtype for row in rows] == ["f16", "f16"]  # XLA emits one kernel for both
    options = {"gemm": "triton", "compiler_options": TILE, "target": "B200"}
    row = only(lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=f32), *args[:2], **options)
    assert row.math_dtype == "f8e4m3fn"


def layer(a, b, x, y):
    return scaled_dot(a, b, x, y)


def test_the_source_is_the_line_outside_of_the_package():
    line = layer.__code__.co_firstlineno + 1
    assert only(layer, *OPERANDS).source == f"tests/fp8lens/test_report.py:{line}"
    frames = only(layer, *OPERANDS).instruction.frames
    names = [file.rsplit("/", 1)[-1] for file, _ in frames]
    assert names[:2] == ["recipes.py", "test_report.py"] and (frames[1][1] == line)


# Where they are -----------------------------------------------------------------------------------


def step(c, w):
    return to_e4m3(scaled_dot(c, w, 1.0 * jnp.float32(2), jnp.float32(2)), jnp.float32(2)), None


def test_loops_count_as_often_as_they_run():
    def once(x, w):
        return jax.lax.scan(step, x, w)[0]

    def nested(x, w):
        return jax.lax.scan(lambda c, _: (once(c, w), None), x, None, length=3)[0]

    def until(x, w, n):
        return jax.lax.while_loop(
            lambda c: c[1] < n, lambda c: (step(c[0], w)[0], c[1] + 1), (x, 0)
        )[0]

    x, w = S(M, K), S(7, K, K)
    assert only(once, x, w).count == 7 and only(nested, x, w).count == 21
    report = report_gemms(once, x, w)
    assert report.flops == report.fp8_flops == 7 * 2 * M * K * K and "runs" in str(report)
    unknown = report_gemms(until, x, S(K, K), S(dtype=jnp.int32))
    assert (
        unknown.rows[0].count is None
        and unknown.flops == 2 * M * K * K
        and "unknown length" in str(unknown)
    )


def test_branches_calls_and_devices():
    def fn(p, a, b):
        return jax.lax.cond(p, lambda: a @ b.T, lambda: jax.nn.relu(a @ b.T))

    args = S(dtype=bool), S(M, K, dtype=bf16), S(N, K, dtype=bf16)
    assert [row.epilogue for row in report_gemms(fn, *args).rows] in (
        ["DEFAULT", "RELU"],
        ["RELU", "DEFAULT"],
    )
    sharded = aot_compile(
        lambda a, b: a @ b.T,
        S(M, K, dtype=bf16),
        S(N, K, dtype=bf16),
        mesh_shape=(4,),
        in_specs=(jax.sharding.PartitionSpec("x"), None),
    )
    assert only(sharded).m == M // 4  # of one device


def test_a_module_that_is_not_optimized_has_its_dots():
    lowered = jax.jit(lambda a, b, x, y: scaled_dot(a, b, x, y)).lower(*OPERANDS)
    row = only(lowered)
    assert (row.m, row.n, row.k, row.lhs_dtype, row.library) == (M, N, K, "f32", "kernel")


# What stayed outside ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn, args, outside",
    [
        (lambda a, b, x, y: scaled_dot(a, b, x, y).astype(bf16), OPERANDS, 1),
        (
            lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32).T, dequantize(b, y, f32)),
            (S(K, M), S(K, N), s, s),
            2,
        ),
        (scaled_dot, (S(50, 200), S(N, 200), s, s), 3),
        (lambda a, b, x, y: jax.lax.dot(a.astype(f32) / x, (b.astype(f32) / y).T), OPERANDS, 2),
        (lambda a, b, x, y: jax.nn.silu(scaled_dot(a, b, x, y)), OPERANDS, 1),
        (
            lambda a, b, x, y: jax.lax.dot(a.astype(f32) * x, dequantize(b, y, f32).T),
            (A, B, S(M, 1, dtype=f32), s),
            2,
        ),
        (
            lambda a, b, x, y: scaled_dot(a, b, x, y),
            (S(M, K, dtype=e5m2), S(N, K, dtype=e5m2), s, s),
            2,
        ),
        (
            lambda a, b, x, y, c: scaled_dot(a, b, x, y) + 0.5 * c,
            (*OPERANDS, S(M, N, dtype=f32)),
            1,
        ),
    ],
)
def test_all_that_is_outside_of_one_matmul_is_named(fn, args, outside):
    program = aot_compile(fn, *args)
    row, launched = only(program), kernels(program)
    assert len(row.outside) == outside == len(launched) - 1
    assert {k.name for k in launched} == {row.name, *row.outside}
    assert row.outside_bytes == sum(k.bytes_moved for k in launched if k.name in row.outside)


@pytest.mark.parametrize(
    "fn, args",
    [
        (lambda a, b, x, y: jax.nn.softmax(scaled_dot(a, b, x, y)), OPERANDS),
        (lambda a, b, x, y, c: scaled_dot(a, b, x, y) * c, (*OPERANDS, S(M, N, dtype=f32))),
        (lambda a, b, x, y: jnp.sum(scaled_dot(a, b, x, y), axis=0), OPERANDS),
        (lambda a, b, x, y: scaled_dot(to_e4m3(a, x), b, y, y), (S(M, K, dtype=bf16), B, s, s)),
    ],
)
def test_what_no_call_could_have_taken_is_not_outside(fn, args):
    report = report_gemms(fn, *args)
    assert report.kernels > 1 and report.rows[0].outside == ()


def test_kernels_between_two_matmuls_belong_to_the_one_they_serve():
    def mlp(x, up, down, s):
        h = jax.nn.silu(scaled_dot(x, up, s, s))
        return scaled_dot(to_e4m3(h, s), down, s, s)

    first, second = sorted(
        report_gemms(mlp, S(M, K), S(512, K), S(K, 512), s).rows, key=lambda row: -row.n
    )
    assert len(first.outside) == 1 and second.outside == ()


# Totals and output --------------------------------------------------------------------------------


def both(a, b, c, x, y):
    return scaled_dot(a, b, x, y), c @ c.T


BOTH = (A, B, S(M, K, dtype=bf16), s, s)


def test_totals():
    program = aot_compile(both, *BOTH)
    report = report_gemms(program)
    assert report.fp8_flops == 2 * M * N * K and report.flops == 2 * M * K * (N + M)
    assert report.fp8_flops_share == pytest.approx(N / (N + M))
    assert report.kernels == 2 and report.bytes_moved == sum(
        k.bytes_moved for k in kernels(program)
    )
    assert "2 matmuls, 1 in FP8 (66.7% of 6.29 MFLOP); 2 kernels" in str(report)
    none = report_gemms(lambda a: a.astype(f32), A)
    assert (
        none.fp8_flops_share == 0
        and none.totals().startswith("0 matmuls")
        and "<p>0 matm" in none._repr_html_()
    )


def test_text_and_html_show_every_column_and_what_is_outside():
    report = report_gemms(
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32), dequantize(b, y, f32)),
        A,
        S(K, N),
        s,
        s,
    )
    text, page = str(report), report._repr_html_()
    for part in (
        "64 x 128 x 256",
        "f8e4m3fn",
        "cublasLt",
        "DEFAULT",
        "scales ab",
        "wrapped_transpose",
        "test_report.py:",
    ):
        assert part in text and part in page
    assert "runs" not in text and "outside: wrapped_transpose: 65.5 kB" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert page.count("<tr") == 3 and "<script" not in page
    assert str(Path(__file__).parent) not in page + text


def test_alike_rows_are_shown_once_and_a_name_cannot_break_the_page():
    def layers(x, ws):
        for w in ws:
            x, _ = step(x, w)
        return x

    report = report_gemms(layers, S(M, K), [S(K, K)] * 6)
    assert (
        len(report.rows) == 6
        and "6 matmuls" in str(report)
        and str(report).count("64 x 256 x 256") < 6
    )
    text = aot_compile(both, *BOTH).as_text().replace("jit(both)", "jit(<b>)")
    assert "<b>" not in report_gemms(text)._repr_html_()


def test_custom_calls_that_hide_what_they_do_are_named():
    text = textwrap.dedent("""\
        HloModule m

        ENTRY %main (a: f32[8,8]) -> f32[8,8] {
          %a = f32[8,8]{1,0} parameter(0)
          ROOT %hand.1 = f32[8,8]{1,0} custom-call(%a), custom_call_target="my_kernel"
        }
        """)
    report = report_gemms(text)
    assert report.opaque == ("hand.1",) and "not looked into: hand.1" in str(report)


def test_fused_attention_is_two_matmuls_forward_and_five_backward():
    """q [256, 64], k and v [128, 64], 2 x 8 heads, as JAX lowers cuDNN's attention and its
    gradient.
    """
    rows = report_gemms((Path(__file__).parent / "hlo" / "cudnn_attention.hlo").read_text()).rows
    scores, values, gradients = (256, 128, 64), (256, 64, 128), (128, 64, 256)
    assert [(r.m, r.n, r.k) for r in rows] == [
        scores,
        values,
        scores,
        gradients,
        scores,
        values,
        gradients,
    ]
    assert {(r.batch, r.library, r.math_dtype) for r in rows} == {(16, "cudnn", "bf16")}


def test_attention_whose_heads_share_keys_and_values():
    text = (Path(__file__).parent / "hlo" / "cudnn_attention.hlo").read_text()
    text = text.replace("bf16[2,128,8,64]", "bf16[2,128,2,64]").replace(
        "bf16[2,8,128,64]", "bf16[2,2,128,64]"
    )
    rows = report_gemms(text).rows
    scores, values, gradients = (256, 128, 64), (256, 64, 128), (128, 64, 256)
    assert [(r.m, r.n, r.k) for r in rows] == [
        scores,
        values,
        scores,
        gradients,
        scores,
        values,
        gradients,
    ]
    assert {r.batch for r in rows} == {16}  # each of the 8 heads multiplies


# Input --------------------------------------------------------------------------------------------


def test_takes_whatever_holds_a_program():
    program = aot_compile(scaled_dot, *OPERANDS)
    rows = [only(x) for x in (program, program.as_text(), parse_hlo_module(program))]
    rows += [only(scaled_dot, *OPERANDS), only(jax.jit(scaled_dot), *OPERANDS)]
    assert len({dataclasses.replace(row, name="", source="", op_name="") for row in rows}) == 1


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
        (TypeError, "got int: give a function", lambda: report_gemms(7)),
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


def test_a_computation_that_calls_itself_is_refused():
    text = textwrap.dedent("""\
        HloModule m

        %f (p: f32[]) -> f32[] {
          %p = f32[] parameter(0)
          ROOT %c = f32[] call(%p), to_apply=%f
        }

        ENTRY %main (a: f32[]) -> f32[] {
          %a = f32[] parameter(0)
          ROOT %r = f32[] call(%a), to_apply=%f
        }
        """)
    with pytest.raises(HloParseError, match="calls itself"):
        report_gemms(text)


def test_allow_and_inspections_in_an_assertion():
    def fn(a, b, x, y):
        return scaled_dot(a, b.T, x, y)

    seen = inspect(fn, A, S(K, N), s, s)
    with pytest.raises(AssertionError, match="left outside: transpose"):
        assert_fp8_gemms(seen, fused=True)
    assert assert_fp8_gemms(seen, fused=True, allow="transpose") is seen.report
    with pytest.raises(ValueError, match="allow has 'transposed'"):
        assert_fp8_gemms(seen, allow=["transposed"])
    assert inspect(seen) is seen and report_gemms(seen) is seen.report
    with pytest.raises(TypeError, match="compiled already"):
        inspect(seen, A)
    saved = inspect(seen.compiled)
    assert saved.report.rows and not saved.is_ours and '"reasons": null' in saved.json()
    for ask in (lambda: saved.reasons, lambda: saved.passes):
        with pytest.raises(TypeError, match="inspect the function and its arguments"):
            ask()
    assert_fp8_gemms(saved)
    with pytest.raises(TypeError, match="inspect the function"):
        assert_fp8_gemms(saved, fused=True)


def test_functions_of_hlo_take_an_inspection():
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    seen = inspect(lambda x: x @ x.T, x)
    assert parse_hlo_module(seen) is seen.module
    assert format_hlo_module(seen) == format_hlo_module(seen.module) == seen.hlo
    assert diff_hlo(seen, seen.module).same
    print_hlo_module(seen, file=(printed := io.StringIO()))
    assert diff_hlo(printed.getvalue(), seen.hlo).same


@pytest.mark.parametrize(
    "ask", [inspect, report_gemms, why_not_fp8, assert_fp8_gemms, parse_hlo_module, passes]
)
def test_traced_and_exported_functions_name_the_fix(ask):
    jitted, x = jax.jit(lambda x: x @ x.T), jnp.ones((32, 64))
    with pytest.raises(
        TypeError, match=r"got Traced: .* what traced.lower\(\).compile\(\) returns"
    ):
        ask(jitted.trace(x))
    exported = (
        "not for CUDA: export it with" if ask is not parse_hlo_module else "give it to inspect"
    )
    with pytest.raises(TypeError, match=f"got Exported.*{exported}"):
        ask(jax.export.export(jitted, platforms=["cpu"])(x))
    with pytest.raises(
        TypeError, match="got bytes: the bytes of a serialized executable are packed"
    ):
        ask(b"\x80\x04\x95")


def test_an_exported_function_is_inspected_as_the_function():
    def fn(x, *, w):
        return jax.lax.dot(x, w.T, preferred_element_type=jnp.bfloat16)

    x = jax.ShapeDtypeStruct((64, 256), jnp.float8_e4m3fn)
    exported = jax.export.export(jax.jit(fn), platforms=["cuda", "cpu"])(x, w=x)
    (row,) = inspect(exported).report.rows
    (expected,) = inspect(fn, x, w=x).report.rows
    for field in ("m", "n", "k", "math_dtype", "epilogue", "out_dtype"):
        assert getattr(row, field) == getattr(expected, field)
    assert assert_fp8_gemms(exported, fused=True).kernels == 1
    (n,) = jax.export.symbolic_shape("n")
    open_shape = jax.ShapeDtypeStruct((n, 256), jnp.float8_e4m3fn)
    symbolic = jax.export.export(jax.jit(fn), platforms=["cuda"])(open_shape, w=x)
    with pytest.raises(TypeError, match="symbolic shapes: give its arguments"):
        inspect(symbolic)
    assert inspect(symbolic, x, w=x).report.rows[0].is_fp8


def test_whether_a_program_is_optimized_is_a_field():
    lowered = jax.jit(lambda x: x @ x.T).lower(jnp.ones((32, 64)))
    assert not report_gemms(lowered).optimized and report_gemms(lowered.compile()).optimized


def test_lines_of_a_folder_that_is_left_out_are_no_program_s(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "_left_out", origin.left_out())  # undone at the end
    recipe, program = str(tmp_path / "recipes" / "dot.py"), str(tmp_path / "model.py")
    text = f"""HloModule m

FileNames
1 "{recipe}"
2 "{program}"

FileLocations
1 {{file_name_id=1 line=3}}
2 {{file_name_id=2 line=5}}

StackFrames
1 {{file_location_id=2}}
2 {{file_location_id=1 parent_frame_id=1}}

ENTRY %e (p: f32[4]) -> f32[4] {{
  ROOT %p = f32[4]{{0}} parameter(0), metadata={{stack_frame_id=2}}
}}
"""
    instruction = parse_hlo_module(text)["p"]
    assert origin.source_line(instruction) == "dot.py:3"
    origin.leave_out(tmp_path / "recipes")
    assert origin.source_line(instruction) == "model.py:5"
