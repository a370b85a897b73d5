import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers.numerics.number_formats import (
    FORMATS,
    HOPPER_FAST_UNIT,
    assert_matches_reference,
    code_values,
    describe,
    format_table,
    matmul_reference,
    snr_db,
    tolerance,
)
from helpers.numerics.quantize import amax_scale, dequantize, quantize

# XLA of JAX 0.10 has no 6-bit floats.
SIGNED = [
    name
    for name, f in FORMATS.items()
    if f.signed and (f.bits != 6 or jax.__version_info__ >= (0, 11))
]


@pytest.mark.parametrize("name", [*FORMATS, "bfloat16", "float16"])
def test_counted_fields_agree_with_finfo(name):
    f, info = describe(name), ml_dtypes.finfo(np.dtype(name))
    assert (f.bits, f.exponent_bits, f.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    given = f.max, f.min, f.smallest_normal, f.smallest_subnormal or f.smallest_normal
    fields = "max", "min", "smallest_normal", "smallest_subnormal"
    assert given == tuple(float(getattr(info, field)) for field in fields)
    codes = f.finite_values + f.inf_codes + f.nan_codes + f.negative_zero
    assert codes == 2**f.bits == len(code_values(name))


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


def test_format_table_has_a_row_a_format():
    lines = format_table().splitlines()
    assert len(lines) == 1 + len(FORMATS) and len(set(map(len, lines))) == 1
    assert lines[1].split()[:6] == ["float8_e4m3fn", "8", "4", "3", "7", "448"]


@pytest.mark.parametrize("name", SIGNED)
def test_jitted_quantize_saturates_and_rounds_as_ml_dtypes_does(name):
    """Also ties between two codes, numbers beside them, and what is beyond the range."""
    f = FORMATS[name]
    values = np.unique(code_values(name)[np.isfinite(code_values(name))]).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middles, side) for side in (np.float32(np.inf), np.float32(-np.inf))]
    x = np.concatenate([values, middles, *beside, [2 * f.max, -2 * f.max, np.inf, -np.inf]])
    x = x.astype(np.float32)
    got = np.asarray(jax.jit(quantize, static_argnames="dtype")(x, 1.0, dtype=f.dtype))
    expected = np.clip(x, f.min, f.max).astype(f.dtype)
    assert np.array_equal(got.astype(np.float64), expected.astype(np.float64))


def test_scales_map_the_amax_to_the_largest_value():
    x = jnp.array([[0.5, -7.0], [1e-3, 2.0]])
    for name in SIGNED:
        assert abs(float(quantize(x, amax_scale(x, name), name)[0, 1])) == FORMATS[name].max
    assert float(dequantize(quantize(x, amax_scale(x)), amax_scale(x))[0, 1]) == pytest.approx(-7)
    assert amax_scale(x, axis=1).shape == (2, 1)
    assert float(amax_scale(x, margin=2)) == pytest.approx(4 * float(amax_scale(x)))
    assert float(amax_scale(jnp.array([449.0]), power_of_two=True)) == 2
    for bad in (0.0, jnp.inf, jnp.nan):
        assert float(amax_scale(jnp.array([bad, 0.0]))) == 1.0


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


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="float of 16 bits or fewer"):
        code_values("float32")
    with pytest.raises(ValueError, match="made for scales"):
        quantize(1.0, 1.0, jnp.float8_e8m0fnu)
    with pytest.raises(ValueError, match="split k"):
        tolerance(1.0, 1.0, 2**14, jnp.float32, unit=HOPPER_FAST_UNIT)
    with pytest.raises(AssertionError, match=r"1 of 4 elements .* worst at \(1, 0\): got nan"):
        assert_matches_reference(np.array([[1, 2], [np.nan, 4]]), np.array([[1, 2], [3, 4]]), 0.1)
    with pytest.raises(AssertionError, match=r"shape \(2,\), the reference \(3,\)"):
        assert_matches_reference(np.ones(2), np.ones(3), 0.1)
