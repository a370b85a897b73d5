"""The ledger: each kernel is of the class of what it does, and counted as often as it runs."""

import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from fp8lens.cli import parse_shapes
from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, f32, bf16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, s = S(64, 256), S(128, 256), S(dtype=f32)
X, X8, W, W8 = (S(4096, 1024, dtype=d) for d in (bf16, e4m3, bf16, e4m3))


FP8 = "f8e4m3fn[64,256] f8e4m3fn[128,256] f32[] f32[]"
QUANTIZED = "bf16[64,256] f8e4m3fn[128,256] f32[1024] f32[]"
# What a kernel does, in whose place, and the program.
DONE = [
    ("quantize", "", lambda a, b, h, y: scaled_dot(to_e4m3(a, y), b, y, y), QUANTIZED),
    ("scale", "", lambda a, b, x, y: scaled_dot(a, b, x * y, y), FP8),
    (
        "dequantize",
        "fp8",
        lambda a, b, x, y: jax.lax.dot(a.astype(f32) * x + 1, (b.astype(f32) * y).T),
        FP8,
    ),
    (
        "move",
        "transpose",
        lambda a, b, x, y: scaled_dot(a, b.T, x, y),
        FP8.replace("128,256", "256,128"),
    ),
    ("after", "epilogue", lambda a, b, x, y: jax.nn.silu(scaled_dot(a, b, x, y)), FP8),
    ("rest", "", lambda a, b, x, y: jax.nn.softmax(scaled_dot(a, b, x, y)), FP8),
    (
        "opaque",
        "",
        lambda a, b, x, y: jnp.linalg.cholesky(scaled_dot(a, b, x, y)),
        FP8.replace("128", "64"),
    ),
]


@pytest.mark.parametrize("what, work, fn, args", DONE)
def test_each_class_is_told_by_what_the_kernel_does(what, work, fn, args):
    ledger = inspect(fn, *parse_shapes(args)).ledger
    found = [line for line in ledger.of(what) if not work or work in line.work]
    assert found, str(ledger)
    if what not in ("rest", "opaque"):
        assert all(line.serves for line in found) and not ledger.of("rest"), str(ledger)


def twice(a, b, c, x):
    return scaled_dot(to_e4m3(scaled_dot(a, b, x, x), x).T, c, x, x)


def heads(a, b, c, x):
    return scaled_dot(a, b, x, x, bf16).reshape(64, 4, 32).transpose(1, 0, 2)


@pytest.mark.parametrize("fn, is_fp8s", [(twice, True), (heads, False)])
def test_a_transpose_is_fp8s_unless_the_results_reader_needs_it(fn, is_fp8s):
    ledger = inspect(fn, A, B, S(96, 64), s).ledger
    (moved,) = (line for line in ledger if line.work == ("transpose",))
    assert moved.moves_result is not is_fp8s and (moved in ledger.for_fp8) is is_fp8s


def by_amax(x, w):
    x_scale, w_scale = (jnp.max(jnp.abs(v)).astype(f32) / 448 for v in (x, w))
    return scaled_dot(to_e4m3(x, 1 / x_scale), to_e4m3(w, 1 / w_scale), x_scale, w_scale, bf16)


def by_rows(x, w):
    x_scale, w_scale = (jnp.max(jnp.abs(v), 1, keepdims=True).astype(f32) / 448 for v in (x, w))
    d = bare((x / x_scale).astype(e4m3), (w / w_scale).astype(e4m3))
    return (d * x_scale * w_scale.T).astype(bf16)


def bare(x, w):
    return jax.lax.dot(x, w.T, preferred_element_type=f32)


def block_scaled(mode):
    def multiply(x, w):
        configs = [jax.nn.get_scaled_dot_general_config(mode, jnp.float32(1)) for _ in range(3)]
        return jax.nn.scaled_dot_general(x, w, (((1,), (1,)), ((), ())), bf16, configs=configs)

    return multiply


@pytest.mark.parametrize(
    "multiply, target, after",
    [
        (by_amax, "H100", set()),
        (by_rows, "H100", set()),
        (block_scaled("mxfp8"), "B200", set()),
        (block_scaled("nvfp4"), "B200", {"after"}),  # which converts the result
    ],
)
def test_what_fp8_alone_needs_is_counted_as_its(multiply, target, after):
    """The same program in bf16 is one matmul: all else is for FP8."""
    args = S(512, 1024, dtype=bf16), S(2048, 1024, dtype=bf16)
    ledger = inspect(multiply, *args, target=target).ledger
    assert {line.what for line in ledger if line not in ledger.for_fp8} == {"matmul", *after}
    assert len(ledger.of("quantize")) >= 2


def rolled(x, w, histories, scales):
    """As Flax's FP8 operations do it: a history is moved on by one, then an amax is put in."""
    scales = [jnp.max(h) / 448 for h in histories]
    codes = [to_e4m3(v, 1 / scale) for v, scale in zip((x, w), scales, strict=True)]
    amaxes = [jnp.max(jnp.abs(v)).astype(f32) for v in (x, w)]
    kept = [jnp.roll(h, -1).at[0].set(m) for m, h in zip(amaxes, histories, strict=True)]
    return scaled_dot(*codes, *scales, bf16), kept


# Of large arrays XLA finds an amax by two kernels.
@pytest.mark.parametrize("size", [256, 4096])
def test_what_delayed_scaling_keeps_is_fp8_s(size):
    x = S(size, size, dtype=bf16)
    ledger = inspect(rolled, x, x, [S(1024, dtype=f32)] * 2, [s] * 2).ledger
    assert [line for line in ledger if line not in ledger.for_fp8] == [*ledger.of("matmul")]
    assert len(ledger.of("matmul")) == 1 and len(ledger.of("scale")) > 1


def test_a_norm_of_all_elements_is_not_fp8_s():
    def normalized_by_one(x, w, scale):
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(f32)))).astype(bf16)
        return scaled_dot(to_e4m3(x, scale), w, scale, scale, bf16)

    ledger = inspect(normalized_by_one, S(4096, 4096, dtype=bf16), S(4096, 4096), s).ledger
    assert not ledger.of("scale") and len(ledger.of("rest")) > 1, str(ledger)


# What is FP8's, by what is computed from what -----------------------------------------------------


@pytest.mark.parametrize(
    "fn, is_fp8s",
    [
        (lambda x, s, v, m: x * s, True),
        (lambda x, s, v, m: x * v.T[:, :1], True),  # a scale for each row
        (lambda x, s, v, m: -(x - 3) / s, True),  # with a zero point
        (lambda x, s, v, m: jax.nn.relu(x * s), True),
        (lambda x, s, v, m: jax.nn.silu(x * s), False),
        (lambda x, s, v, m: x * s * m, False),
        (lambda x, s, v, m: jnp.where(m > 0, x * s, 0), False),
        (lambda x, s, v, m: x * s * jnp.roll(x, 1, 1), False),
        (lambda x, s, v, m: s / x, False),
    ],
)
def test_fp8_is_widened_and_scaled_and_all_else_is_the_programs(fn, is_fp8s):
    def layer(x, w, s, v, m):
        return fn(x.astype(f32), s, v, m.astype(f32)).astype(bf16) @ w.T

    ledger = inspect(layer, X8, W, s, S(1024, 4096, dtype=f32), X).ledger
    assert bool(ledger.for_fp8) is is_fp8s and bool(ledger.of("rest")) is not is_fp8s, str(ledger)


def over_its_maximum(x):
    return x / jnp.max(jnp.abs(x))


NORMS = {
    "before a matmul in bf16": lambda x, w, w8, s: over_its_maximum(x) @ w.T,
}
# The same maxima as scales.
SCALES = {
    "undone by the call": lambda x, w, w8, s: by_amax(x, w),
    "undone behind the call": lambda x, w, w8, s: jax.nn.softmax(
        bare(to_e4m3(x, 448 / (m := jnp.max(jnp.abs(x)).astype(f32))), w8) * m
    ),
    "never undone": lambda x, w, w8, s: bare((over_its_maximum(x) * 448).astype(e4m3), w8),
    "returned with the codes": lambda x, w, w8, s: (
        to_e4m3(x, 448 / (m := jnp.max(jnp.abs(x)).astype(f32))),
        m,
        w @ w.T,
    ),
}


@pytest.mark.parametrize("name", [*NORMS, *SCALES])
def test_a_maximum_is_fp8_s_where_it_is_a_scale_and_not_where_it_is_a_norms(name):
    ledger = inspect((NORMS | SCALES)[name], X, W, W8, s).ledger
    maxima = [line for line in ledger if re.search("reduce", line.name)]
    assert maxima and {line.what for line in maxima} == {"rest" if name in NORMS else "scale"}
