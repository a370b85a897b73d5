import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers.numerics.formats import (
    FORMATS,
    HOPPER_FAST_UNIT,
    assert_matches_reference,
    code_values,
    describe,
    format_table,
    matmul_reference,
    rounding,
    snr_db,
    tolerance,
)
from helpers.numerics.quantize import amax_scale, dequantize, quantize

ROOT = Path(__file__).resolve().parent.parent.parent


def xla_has(name: str) -> bool:
    try:
        return bool(jnp.zeros((), name).dtype)
    except jax.errors.JaxRuntimeError:
        return False


# XLA of JAX 0.10 has no 6-bit floats; everything else, and every newer release, must have them all.
SIGNED = [
    name
    for name, f in FORMATS.items()
    if f.signed and (f.bits != 6 or jax.__version_info__ >= (0, 11) or xla_has(name))
]


@pytest.mark.parametrize("name", [*FORMATS, "bfloat16"])
def test_counted_fields_agree_with_finfo(name):
    f, info = describe(name), ml_dtypes.finfo(np.dtype(name))
    assert (f.bits, f.exponent_bits, f.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert (f.max, f.min, f.smallest_normal) == (
        float(info.max),
        float(info.min),
        float(info.smallest_normal),
    )
    assert (f.smallest_subnormal or f.smallest_normal) == float(info.smallest_subnormal)
    assert f.exponent_bits + f.mantissa_bits + f.signed == f.bits


def test_float16_agrees_with_numpy():
    f, info = describe(np.float16), np.finfo(np.float16)
    assert (f.max, f.smallest_normal, f.smallest_subnormal) == (
        info.max,
        info.smallest_normal,
        info.smallest_subnormal,
    )
    assert (f.bias, f.inf_codes, f.nan_codes, f.label) == (15, 2, 2 * (2**10 - 1), "F16")


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_a_value_nan_or_inf(name):
    f = FORMATS[name]
    assert (
        f.finite_values + f.inf_codes + f.nan_codes + f.negative_zero
        == 2**f.bits
        == len(code_values(name))
    )


def test_special_values_are_those_of_table_1_of_the_fp8_paper():
    e4m3, e5m2 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]
    assert (e4m3.bias, e4m3.max, e4m3.smallest_normal, e4m3.smallest_subnormal) == (
        7,
        448,
        2**-6,
        2**-9,
    )
    assert (e5m2.bias, e5m2.max, e5m2.smallest_normal, e5m2.smallest_subnormal) == (
        15,
        57344,
        2**-14,
        2**-16,
    )
    assert (e4m3.inf_codes, e4m3.nan_codes, e5m2.inf_codes, e5m2.nan_codes) == (0, 2, 2, 6)
    assert np.flatnonzero(np.isnan(code_values("float8_e4m3fn"))).tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_follow_sign_exponent_mantissa(name):
    f = FORMATS[name]
    for code, value in enumerate(code_values(name)):
        exponent = code >> f.mantissa_bits & (2**f.exponent_bits - 1)
        fraction = code % 2**f.mantissa_bits / 2**f.mantissa_bits
        subnormal = exponent == 0 and f.mantissa_bits > 0
        magnitude = (
            2.0 ** (1 - f.bias) * fraction
            if subnormal
            else 2.0 ** (exponent - f.bias) * (1 + fraction)
        )
        if math.isfinite(value):
            assert abs(value) == magnitude and np.signbit(value) == (
                f.signed and code >> f.bits - 1
            ), hex(code)


@pytest.mark.parametrize("given", ["float32", "int8", "object"])
def test_code_values_refuses_what_has_no_small_table(given):
    with pytest.raises(ValueError, match="float of 16 bits or fewer"):
        code_values(given)


def test_format_table_has_a_row_a_format():
    lines = format_table().splitlines()
    assert len(lines) == 1 + len(FORMATS) and len(set(map(len, lines))) == 1
    assert lines[1].split()[:6] == ["float8_e4m3fn", "8", "4", "3", "7", "448"]


@pytest.mark.parametrize("name", SIGNED)
def test_quantize_saturates_and_rounds_to_the_nearest_value(name):
    f = FORMATS[name]
    values = np.unique(code_values(name)[np.isfinite(code_values(name))])
    x = np.random.default_rng(0).normal(size=4000).astype(np.float32) * f.max
    x = np.concatenate([x, x * 1e-3, [f.max * 2, -f.max * 2, np.inf, -np.inf, 0.0]]).astype(
        np.float32
    )
    got = np.asarray(jax.jit(quantize, static_argnames="dtype")(x, 1.0, dtype=f.dtype)).astype(
        np.float64
    )
    clipped = np.clip(x.astype(np.float64), f.min, f.max)
    assert np.array_equal(np.abs(got - clipped), np.min(np.abs(values - clipped[:, None]), axis=1))


@pytest.mark.parametrize("name", SIGNED)
def test_jitted_quantize_rounds_ties_to_even_codes_like_ml_dtypes(name):
    f = FORMATS[name]
    values = np.unique(code_values(name)[np.isfinite(code_values(name))])
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate(
        [
            middles,
            np.nextafter(middles, np.inf, dtype=np.float32),
            np.nextafter(middles, -np.inf, dtype=np.float32),
        ]
    ).astype(np.float32)
    got = np.asarray(jax.jit(quantize, static_argnames="dtype")(x, 1.0, dtype=f.dtype))
    assert np.array_equal(got.astype(np.float64), x.astype(f.dtype).astype(np.float64))
    ties = np.asarray(middles.astype(np.float32).astype(f.dtype)).view(np.uint8)
    assert not np.any(ties[middles != 0] & 1)


def test_cast_without_clamp_is_nan_above_464():
    cast = jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))
    for value, expected in (
        (464.0, 448.0),
        (464.01, math.nan),
        (465.0, math.nan),
        (-465.0, math.nan),
    ):
        for got in (
            float(cast(jnp.float32(value))),
            float(np.float32(value).astype(ml_dtypes.float8_e4m3fn)),
        ):
            assert got == expected or (math.isnan(got) and math.isnan(expected))


def test_quantize_keeps_nan_and_refuses_e8m0():
    assert math.isnan(float(quantize(jnp.nan, 1.0)))
    with pytest.raises(ValueError, match="made for scales"):
        quantize(1.0, 1.0, jnp.float8_e8m0fnu)


def test_dequantize_multiplies_in_the_type_asked_for():
    q = quantize(jnp.array([1.0, 3.0, -448.0]), 1.0)
    assert dequantize(q, 0.5).tolist() == [0.5, 1.5, -224.0]
    assert dequantize(q, 0.5, jnp.bfloat16).dtype == jnp.bfloat16


def test_amax_scale_maps_amax_to_the_largest_value():
    x = jnp.array([[0.5, -7.0], [1e-3, 2.0]])
    for name in SIGNED:
        assert abs(float(quantize(x, amax_scale(x, name), name)[0, 1])) == FORMATS[name].max
    assert amax_scale(x, axis=1).shape == (2, 1)
    assert float(amax_scale(x, margin=2)) == pytest.approx(4 * float(amax_scale(x)))


def test_amax_scale_of_zero_inf_nan_is_one_and_never_zero():
    for bad in (0.0, jnp.inf, -jnp.inf, jnp.nan):
        assert float(amax_scale(jnp.array([bad, 0.0]))) == 1.0
    assert float(amax_scale(jnp.array([2e-38]))) == float(jnp.finfo(jnp.float32).tiny)


@pytest.mark.parametrize(
    "amax, expected", [(448.0, 1.0), (449.0, 2.0), (895.0, 2.0), (896.0, 2.0), (3.5, 2.0**-7)]
)
def test_power_of_two_scale_is_rounded_up(amax, expected):
    assert float(amax_scale(jnp.array([amax]), power_of_two=True)) == expected


def test_snr_db():
    assert snr_db([3.0, 4.0], [3.0, 4.0]) == math.inf
    assert snr_db([10.0], [9.0]) == pytest.approx(20)
    assert snr_db([1.0], [math.nan]) == -math.inf


@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "out", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float16, jnp.float32]
)
def test_tolerance_holds_for_a_correct_matmul_and_is_tight_enough_to_catch_a_wrong_one(
    compute, out
):
    k = 512
    keys = jax.random.split(jax.random.key(0))
    a, b = (quantize(jax.random.normal(key, (32, k)), 0.01) for key in keys)
    a_scale, b_scale = jnp.float32(0.013), jnp.float32(0.0071)

    @jax.jit
    def scaled(a, b, a_scale, b_scale):
        d = jax.lax.dot(dequantize(a, a_scale, compute), dequantize(b, b_scale, compute).T)
        return jnp.clip(d, -float(jnp.finfo(out).max), float(jnp.finfo(out).max)).astype(out)

    value, magnitude = matmul_reference(a, b, a_scale, b_scale)
    allowed = tolerance(value, magnitude, k, out, compute)
    result = scaled(a, b, a_scale, b_scale)
    assert_matches_reference(result, value, allowed)
    for wrong in (scaled(a, b, a_scale * 1.5, b_scale), scaled(a, b[::-1], a_scale, b_scale)):
        with pytest.raises(AssertionError, match="outside the tolerance"):
            assert_matches_reference(wrong, value, allowed)


def test_tolerance_covers_truncating_accumulation_to_14_bits():
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(8, 256)).astype(ml_dtypes.float8_e4m3fn) for _ in range(2))
    value, magnitude = matmul_reference(a, b)
    total = np.zeros_like(value)
    for start in range(
        0, 256, 32
    ):  # align 32 products and the sum so far to the largest, keep 14 bits, add
        terms = [
            a[:, None, i].astype(float) * b[None, :, i].astype(float)
            for i in range(start, start + 32)
        ] + [total]
        unit = 2.0 ** (np.floor(np.log2(np.max(np.abs(terms), axis=0))) - 13)
        total = np.sum([np.trunc(t / unit) * unit for t in terms], axis=0)
    assert_matches_reference(
        total, value, tolerance(value, magnitude, 256, np.float32, unit=HOPPER_FAST_UNIT)
    )
    with pytest.raises(AssertionError):
        assert_matches_reference(total, value, tolerance(value, magnitude, 256, np.float32))


def test_tolerance_refuses_a_bound_that_says_nothing():
    with pytest.raises(ValueError, match="split k"):
        tolerance(1.0, 1.0, 2**14, jnp.float32, unit=HOPPER_FAST_UNIT)


def test_assert_matches_reference_names_the_place_nan_and_shape():
    with pytest.raises(
        AssertionError, match=r"1 of 4 elements .* worst at \(1, 0\): got nan.* needs a clamp"
    ):
        assert_matches_reference(np.array([[1, 2], [np.nan, 4]]), np.array([[1, 2], [3, 4]]), 0.1)
    with pytest.raises(AssertionError, match=r"shape \(2,\), the reference \(3,\)"):
        assert_matches_reference(np.ones(2), np.ones(3), 0.1)
    assert_matches_reference(np.array([np.nan, np.inf, 1]), np.array([np.nan, np.inf, 1.05]), 0.1)


def test_rounding_of_465_saturates_and_says_so():
    r = rounding(465)
    assert (r.code, r.bits, r.decoded, r.error) == (0x7E, "0 1111 110", 448, 17)
    assert math.isnan(r.unclamped) and "a bare cast gives nan" in r.notes[0]


@pytest.mark.parametrize(
    "value, decoded, note",
    [
        (464.0, 448, "clamped"),
        (-3.3, -3.25, None),
        (0.0, 0, None),
        (2.0**-9, 2.0**-9, "subnormal"),
        (2.0**-10, 0, "flushed to zero"),
        (2.0**-10 * 1.01, 2.0**-9, "subnormal"),
        (1.0625, 1.0, None),
    ],
)
def test_rounding_notes(value, decoded, note):
    r = rounding(value)
    assert r.decoded == decoded and r.below <= max(min(value, 448), -448) <= r.above
    assert (note in r.notes[0]) if note else not r.notes


def test_rounding_agrees_with_quantize_for_every_format():
    for name in SIGNED:
        for value in (0.3, -1.7, 5.0, 1e6, -1e-9):
            r = rounding(value, 0.25, name)
            assert (
                r.decoded == float(quantize(value, 0.25, name))
                and r.dequantized == r.decoded * 0.25
            )
            assert len(r.bits.replace(" ", "")) == r.format.bits


def test_rounding_of_typed_text_and_of_what_is_no_number():
    assert rounding(" 465 ", "2", "float8_e4m3fn").target == 232.5
    for value, scale, message in (
        ("abc", 1, "value 'abc' is not a finite"),
        ("nan", 1, "value 'nan'"),
        ("", 1, "value ''"),
        (1, "0", "scale 0 is not above zero"),
        (1, -2, "scale -2"),
        (1, "inf", "scale 'inf'"),
        (1e300, 1e-300, "quotient value / scale = inf"),
    ):
        with pytest.raises(ValueError, match=message):
            rounding(value, scale)


def test_formats_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["float8_e4m3fn"].max = 1.0


def test_the_arithmetic_of_formats_needs_no_jax():
    program = "import sys, helpers.numerics.formats; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0
