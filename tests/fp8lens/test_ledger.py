"""The ledger: each kernel is of the class of what it does, and counted as often as it runs."""

import json

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, f32, bf16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, s = S(64, 256), S(128, 256), S(dtype=f32)


@pytest.mark.parametrize(
    "what, work, fn, args",
    [
        (
            "quantize",
            (),
            lambda a, b, x, y: scaled_dot(to_e4m3(a, x), b, y, y),
            (S(64, 256, dtype=bf16), B, s, s),
        ),
        ("scale", (), lambda a, b, x, y: scaled_dot(a, b, x * y, y), (A, B, s, s)),
        (
            "scale",
            (),
            lambda a, b, history, y: scaled_dot(to_e4m3(a, 448 / jnp.max(history)), b, y, y),
            (S(64, 256, dtype=bf16), B, S(1024, dtype=f32), s),
        ),
        (
            "dequantize",
            ("fp8",),
            lambda a, b, x, y: jax.lax.dot(a.astype(f32) * x + 1, (b.astype(f32) * y).T),
            (A, B, s, s),
        ),
        (
            "move",
            ("transpose",),
            lambda a, b, x, y: scaled_dot(a, b.T, x, y),
            (A, S(256, 128), s, s),
        ),
        (
            "after",
            ("epilogue",),
            lambda a, b, x, y: jax.nn.silu(scaled_dot(a, b, x, y)),
            (A, B, s, s),
        ),
        ("rest", (), lambda a, b, x, y: jax.nn.softmax(scaled_dot(a, b, x, y)), (A, B, s, s)),
        (
            "opaque",
            (),
            lambda a, b, x, y: jnp.linalg.cholesky(scaled_dot(a, b, x, y)),
            (A, S(64, 256), s, s),
        ),
    ],
)
def test_each_class_is_told_by_what_the_kernel_does(what, work, fn, args):
    seen = inspect(fn, *args)
    found = [line for line in seen.ledger.of(what) if set(work) <= set(line.work)]
    assert found, str(seen.ledger)
    if what not in ("rest", "opaque"):
        assert all(line.serves for line in found) and not seen.ledger.of("rest"), str(seen.ledger)
    document = json.loads(seen.json())
    assert [line["what"] for line in document["ledger"]] == [line.what for line in seen.ledger]


def test_what_fp8_costs_is_in_the_report():
    seen = inspect(
        lambda a, b, x, y: scaled_dot(to_e4m3(a, x), b, y, y), S(64, 256, dtype=bf16), B, s, s
    )
    spent = seen.ledger.for_fp8
    assert (spent.kernels, spent.bytes_moved) == (
        seen.report.kernels_for_fp8,
        seen.report.bytes_for_fp8,
    )
    assert spent.kernels >= 1 and "to make and undo FP8, for 1 matmul" in " ".join(
        str(seen.report).split()
    )
    plain = inspect(lambda a, b: a @ b, S(64, 64, dtype=bf16), S(64, 64, dtype=bf16))
    assert plain.report.kernels_for_fp8 == 0 and "undo" not in str(plain.report)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_a_result_that_is_transposed_for_its_reader_costs_fp8_nothing(dtype):
    def heads(a, b, x, y):
        return scaled_dot(a, b, x, y, dtype).reshape(64, 4, 32).transpose(1, 0, 2)

    seen = inspect(heads, A, B, s, s)
    (moved,) = seen.ledger.of("move")
    assert moved.moves_result and moved.work == ("transpose",)
    assert not seen.ledger.for_fp8 and seen.report.bytes_for_fp8 == 0
    assert [reason.rule for reason in seen.reasons] == ["result-layout"]


def test_a_transpose_that_fp8_needs_is_charged_to_it():
    def by_columns(a, b, x, y):
        return scaled_dot(a, b.T, x, y).reshape(64, 4, 32).transpose(1, 0, 2)

    def twice(a, b, c, x):
        return scaled_dot(to_e4m3(scaled_dot(a, b, x, x), x).T, c, x, x)

    for fn, args in ((by_columns, (A, S(256, 128), s, s)), (twice, (A, B, S(96, 64), s))):
        (charged,) = inspect(fn, *args).ledger.for_fp8
        assert charged.work == ("transpose",) and not charged.moves_result


def test_a_loop_s_kernels_count_as_often_as_they_run():
    def step(x, w):
        return (
            to_e4m3(scaled_dot(x, w, jnp.float32(1), jnp.float32(1)), jnp.float32(1)),
            None,
        )

    seen = inspect(lambda x, w: jax.lax.scan(step, x, w)[0], S(64, 64), S(6, 64, 64))
    (matmul,) = seen.ledger.of("matmul")
    assert matmul.runs == 6 and matmul.nbytes == 6 * matmul.kernel.bytes_moved
