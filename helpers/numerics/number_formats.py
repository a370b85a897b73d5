"""The small floating-point formats, counted from their codes; rounding to them; and how wrong a
matmul may be. NumPy with the types of ml_dtypes: nothing here needs JAX. `quantize` has what runs
in JAX.

A scale is always the number to multiply by to dequantize: value ~ code * scale.
"""

import math
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

F32_UNIT = 2.0**-24  # rounding to nearest with 24 bits: at most half a unit in the last place
# Hopper's FP8 tensor cores keep about 14 bits of an aligned product and truncate the rest, so err
# by up to one whole unit in the 14th place (DeepSeek-V3 report, arXiv:2412.19437, sections 3.3.2
# and 3.5.2).
HOPPER_FAST_UNIT = 2.0**-13


@dataclass(frozen=True)
class Format:
    """One floating-point format as its codes show it; values are exact Python floats."""

    name: str
    bits: int
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min: float  # most negative value, or the smallest positive one where there is no sign
    smallest_normal: float
    smallest_subnormal: float | None  # None: no subnormals (E8M0)
    inf_codes: int
    nan_codes: int
    negative_zero: bool
    finite_values: int  # distinct ones: +0 and -0 count once
    largest_code: int  # of `max`
    inf_code: int | None  # of the positive infinity; None: the format has none
    nan_code: int | None  # which a cast of NaN gives; None: the format has none

    @property
    def label(self) -> str:
        """The short name of the field: "E4M3FN", "F16", "BF16"."""
        return self.name.split("_")[-1].upper().replace("FLOAT", "F")

    @property
    def dtype(self) -> np.dtype:
        """As NumPy knows it."""
        return np.dtype(self.name)


def code_values(dtype) -> np.ndarray:
    """The value of every code of `dtype` (16 bits or fewer), in code order: float64[2**bits]."""
    dtype = np.dtype(dtype)
    if dtype.itemsize > 2 or np.issubdtype(dtype, np.integer) or dtype.kind not in "fV":
        raise ValueError(
            f"code_values({dtype}): expected a float of 16 bits or fewer, such as float8_e4m3fn"
        )
    codes = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        values = codes.view(dtype).astype(np.float64)
    # 6- and 4-bit formats lie in the low bits of a byte: bytes beyond their codes do not survive a
    # round trip.
    survives = np.isnan(values) | (values.astype(dtype).view(codes.dtype) == codes)
    return values[: int(survives.sum())]


@cache
def describe(dtype) -> Format:
    """Count a format's fields from its codes (nothing is looked up). Raises ValueError beyond 16
    bits.
    """
    dtype = np.dtype(dtype)
    values = code_values(dtype)
    finite = np.unique(values[np.isfinite(values)])
    positive = finite[finite > 0]
    bits = int(math.log2(len(values)))
    signed = bool(finite[0] < 0)
    in_a_binade = np.sum((1 <= finite) & (finite < 2))  # 2**mantissa_bits values
    mantissa_bits = int(math.log2(in_a_binade))
    bias = int(np.flatnonzero(values == 1.0)[0]) >> mantissa_bits  # the exponent field of 1.0
    has_subnormals = mantissa_bits > 0
    return Format(
        name=dtype.name,
        bits=bits,
        signed=signed,
        exponent_bits=bits - signed - mantissa_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        max=float(finite[-1]),
        min=float(finite[0]),
        smallest_normal=2.0 ** (1 - bias) if has_subnormals else float(positive[0]),
        smallest_subnormal=float(positive[0]) if has_subnormals else None,
        inf_codes=int(np.isinf(values).sum()),
        nan_codes=int(np.isnan(values).sum()),
        negative_zero=bool(np.any((values == 0) & np.signbit(values))),
        finite_values=len(finite),
        largest_code=int(np.flatnonzero(values == finite[-1])[0]),
        inf_code=int(np.flatnonzero(values == np.inf)[0]) if np.inf in values else None,
        nan_code=int(np.float32(np.nan).astype(dtype).view(f"u{dtype.itemsize}"))
        if np.isnan(values).any()
        else None,
    )


FORMATS: dict[str, Format] = {
    name: describe(getattr(ml_dtypes, name))
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e4m3b11fnuz",
        "float8_e4m3",
        "float8_e3m4",
        "float8_e8m0fnu",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float4_e2m1fn",
    )
}


def format_table(dtypes=tuple(FORMATS)) -> str:
    """A text table, one row a format: normal and subnormal are the smallest such, values the finite
    ones.
    """
    heads = (
        "format",
        "bits",
        "exp",
        "man",
        "bias",
        "max",
        "normal",
        "subnormal",
        "inf",
        "NaN",
        "-0",
        "values",
    )
    rows: list[tuple] = [heads]
    for f in map(describe, dtypes):
        rows.append(
            (
                f.name,
                f.bits,
                f.exponent_bits,
                f.mantissa_bits,
                f.bias,
                f"{f.max:.6g}" if f.max < 1e6 else f"{f.max:.2g}",
                f"{f.smallest_normal:.3g}",
                f"{f.smallest_subnormal:.3g}" if f.smallest_subnormal else "none",
                f.inf_codes,
                f.nan_codes,
                "yes" if f.negative_zero else "no",
                f.finite_values,
            )
        )
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(str(cell)) for cell in column))
    lines = []
    for row in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells))
    return "\n".join(lines)


def snr_db(x, x_hat) -> float:
    """Signal-to-noise ratio in dB, 10 log10(sum x^2 / sum (x - x_hat)^2): inf if equal, -inf if
    x_hat is not finite.
    """
    x, x_hat = (np.asarray(v).astype(np.float64) for v in (x, x_hat))
    if not np.all(np.isfinite(x_hat)):
        return -math.inf
    noise = np.sum((x - x_hat) ** 2)
    return math.inf if noise == 0 else float(10 * np.log10(np.sum(x**2) / noise))


def matmul_reference(a, b_t, a_scale=1.0, b_scale=1.0) -> tuple[np.ndarray, np.ndarray]:
    """(a * a_scale) @ (b_t * b_scale).T in float64, and the same with |a|, |b|: the size its errors
    are measured by.

    a [..., M, K] and b_t [..., N, K] of any float type; scales broadcast against the two results,
    [..., M, N].
    """
    a, b = np.asarray(a).astype(np.float64), np.swapaxes(np.asarray(b_t).astype(np.float64), -1, -2)
    scale = np.asarray(a_scale, np.float64) * np.asarray(b_scale, np.float64)
    return a @ b * scale, np.abs(a) @ np.abs(b) * np.abs(scale)


def tolerance(
    value, magnitude, k: int, out_dtype, compute_dtype=np.float32, unit: float | None = None
) -> np.ndarray:
    """A bound, not a guess: how far a correct matmul may lie from `value`, elementwise, float64 of
    value's shape.

    `value` and `magnitude` come from `matmul_reference` (add |bias| to the second, bias to the
    first); `k` is the contracting size; `out_dtype` the result's type; `compute_dtype` the type the
    function dequantizes and scales in. `unit` is the accumulator's unit roundoff. None is
    HOPPER_FAST_UNIT where JAX runs on a GPU, whose FP8 matmuls accumulate fast by default, and
    F32_UNIT on the CPU.

    - summing n terms in any order errs by at most gamma_n * sum|a b|, gamma_n = n u / (1 - n u)
      (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2); n = k plus one
      for each group of 32 products that the tensor core aligns before adding;
    - up to eight roundings in compute_dtype: of two scales, two dequantized operands, the dot, the
      sum with a bias, the output's scale, the product with it;
    - one rounding to out_dtype: half a unit in its last place, and never less than half its
      smallest subnormal.

    Relu and clamping never enlarge an error: apply them to `value` and keep the bound; for an amax
    take the largest bound. Holds while nothing over- or underflows on the way. ValueError where k
    is too large for a bound: n u >= 1.
    """
    if unit is None:
        import jax  # only who asks for no unit needs it: what computes decides

        unit = HOPPER_FAST_UNIT if jax.default_backend() == "gpu" else F32_UNIT
    n = k + math.ceil(k / 32)
    if n * unit >= 1:
        raise ValueError(
            f"tolerance: contracting size {k} with unit roundoff {unit:.3g} has no bound; split k"
        )
    value, magnitude = np.asarray(value, np.float64), np.asarray(magnitude, np.float64)
    sum_error = n * unit / (1 - n * unit)
    compute_error = (1 + float(ml_dtypes.finfo(compute_dtype).eps) / 2) ** 8 - 1
    error = magnitude * ((1 + sum_error) * (1 + compute_error) - 1)
    out = ml_dtypes.finfo(out_dtype)
    rounding_error = float(out.eps) / 2 * (np.abs(value) + error)
    return error + np.maximum(rounding_error, float(out.smallest_subnormal) / 2)


def assert_matches_reference(actual, value, allowed) -> None:
    """Raise AssertionError unless |actual - value| <= allowed everywhere (NaN must meet NaN); names
    the worst place.
    """
    got, value, allowed = (np.asarray(v).astype(np.float64) for v in (actual, value, allowed))
    if got.shape != value.shape:
        raise AssertionError(f"result has shape {got.shape}, the reference {value.shape}")
    with np.errstate(invalid="ignore"):
        same = (got == value) | (np.isnan(got) & np.isnan(value))
        excess = np.where(same, 0, np.abs(got - value) / allowed)
    excess = np.nan_to_num(excess, nan=np.inf)
    if wrong := int(np.sum(excess > 1)):
        at = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        far, most = abs(got[at] - value[at]), np.broadcast_to(allowed, value.shape)[at]
        hint = "" if np.isfinite(got[at]) else ". A value beyond the format's max needs a clamp"
        raise AssertionError(
            f"{wrong} of {got.size} elements of the {np.asarray(actual).dtype} result "
            f"are outside the tolerance; worst at {at}: got {got[at]:.9g}, "
            f"the float64 reference is {value[at]:.9g}, "
            f"{far:.3g} away where {most:.3g} is allowed{hint}"
        )
