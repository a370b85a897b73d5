"""Formats in which each block of numbers has a scale of its own, as OCP's Microscaling (MX)
specification and NVIDIA's NVFP4 define them: quantize to them, and back. NumPy, with the types of
ml_dtypes: XLA's CPU compiler has no FP6.
"""

import re
from collections import Counter
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from fp8lens.formats import BLOCK_FORMATS as KNOWN
from fp8lens.formats import E8M0, BlockFormat, Format

f32 = np.float32
ROUNDING = ("up", "down", "nearest")


def _label(form: BlockFormat) -> str:
    """Its name, with its element's where several have one name: "MXFP8, E4M3"."""
    if Counter(known.name for known in KNOWN)[form.name] == 1:
        return form.name
    return f"{form.name}, {re.sub(r'^f[0-9]|fn$', '', form.element.name).upper()}"


BLOCK_FORMATS = {_label(form): form for form in KNOWN}


def dtype_of(form: Format) -> np.dtype:
    """NumPy's type of a format's numbers."""
    return np.dtype(getattr(ml_dtypes, form.jax))


class Blocks(NamedTuple):
    """[R, K] as codes [R, K], scales [R, K / block], and one scale for all."""

    codes: np.ndarray
    scales: np.ndarray
    of_tensor: f32

    def dequantized(self) -> np.ndarray:
        """f32[R, K]."""
        block = self.codes.shape[1] // self.scales.shape[1]
        wide = np.repeat(self.scales.astype(f32), block, axis=1)
        return self.codes.astype(f32) * wide * self.of_tensor


def to_blocks(x: ArrayLike, form: BlockFormat, rounding: str = "up") -> Blocks:
    """x [R, K], finite, in blocks along K.

    A block's scale is its amax over the format's largest number, rounded to the scale's type. To a
    power of two: "up", so that no number is above the largest; "down" to that of the largest power
    of two, as the MX specification has it, where numbers may saturate; or to the "nearest" one. An
    E4M3 scale is rounded to the nearest, whatever `rounding` says. Raises ValueError where blocks
    do not fill K.
    """
    x = np.asarray(x, f32)
    if x.shape[1] % form.block:
        raise ValueError(f"blocks of {form.block} do not fill {x.shape[1]}: pad K with zeros")
    largest, scale_type = form.element.largest, dtype_of(form.scale)
    amax = np.abs(x).reshape(len(x), -1, form.block).max(axis=2)
    of_tensor = f32(1)
    if form.per_tensor and amax.any():
        of_tensor = f32(amax.max() / (largest * form.scale.largest))
    if form.scale is E8M0:
        scales = np.exp2(_exponent(amax, largest, rounding)).astype(scale_type)
    else:
        scales = (amax / f32(largest) / of_tensor).astype(scale_type)
    wide = np.repeat(scales.astype(f32), form.block, axis=1) * of_tensor
    # A scale of E4M3 can be 0: then its block is zeros.
    scaled = np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)
    codes = np.clip(scaled, -largest, largest).astype(dtype_of(form.element))
    return Blocks(codes, scales, of_tensor)


def _exponent(amax: np.ndarray, largest: float, rounding: str) -> np.ndarray:
    """The exponent of each scale, from -127 to 127; 0 of a block of zeros."""
    if rounding == "down":
        # frexp's mantissa is from 0.5 to 1.
        found = np.frexp(amax)[1] - np.frexp(largest)[1]
    else:
        mantissa, exponent = np.frexp(amax / f32(largest))
        is_above = mantissa > (0.5 if rounding == "up" else 0.5**0.5)
        found = np.where(is_above, exponent, exponent - 1)
    return np.where(amax > 0, np.clip(found, -127, 127), 0).astype(f32)
