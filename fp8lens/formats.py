"""The number formats that matmuls read and write, as data: what HLO and JAX call them, their range,
and, of block-scaled formats, which scale comes with how many elements.

Sources: OCP's "8-bit Floating Point Specification" (OFP8) and "Microscaling Formats (MX)
Specification", NVIDIA's documentation of cuBLAS for NVFP4, and for the formats with FNUZ
arXiv:2206.02915. A test compares all of it with ml_dtypes.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of single elements. `name` is HLO's and `jax` that of jax.numpy; `largest` is the
    largest finite number. Of cuBLASLt's FP8, `digits` has the binary digits of a number, the
    leading one included, and `smallest` the smallest positive number, a subnormal.
    """

    name: str
    jax: str
    bits: int
    largest: float
    digits: int = 0
    smallest: float = 0

    @property
    def limit(self) -> str:
        """The largest number as HLO and Python print it."""
        return f"{self.largest:g}"

    def holds(self, number: float) -> bool:
        """Whether a number is in a format of cuBLASLt's as it is, with no rounding."""
        mantissa, _ = math.frexp(number)
        has_few_digits = (mantissa * 2**self.digits).is_integer()
        is_in_steps = (number / self.smallest).is_integer()
        return has_few_digits and is_in_steps and abs(number) <= self.largest


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format in which `block` elements along K share a scale of format `scale`. `per_tensor`:
    whether one more scale, in f32, is for the whole array. Scales are [..., K / block], as
    `jax.nn.scaled_matmul` takes them.
    """

    name: str
    element: Format
    scale: Format
    block: int
    per_tensor: bool = False

    @property
    def bits(self) -> float:
        """Bits for an element, its part of the block's scale included."""
        return self.element.bits + self.scale.bits / self.block


#: The FP8 formats of cuBLASLt's calls, which OCP's specification defines.
CUBLASLT = {
    "f8e4m3fn": Format("f8e4m3fn", "float8_e4m3fn", 8, 448, 4, 2**-9),
    "f8e5m2": Format("f8e5m2", "float8_e5m2", 8, 57344, 3, 2**-16),
}
_FP8_ELSEWHERE = (
    Format("f8e4m3", "float8_e4m3", 8, 240),
    Format("f8e3m4", "float8_e3m4", 8, 15.5),
    Format("f8e4m3fnuz", "float8_e4m3fnuz", 8, 240),
    Format("f8e5m2fnuz", "float8_e5m2fnuz", 8, 57344),
    Format("f8e4m3b11fnuz", "float8_e4m3b11fnuz", 8, 30),
)
_OTHERS = (
    # HLO has none of 6 bits yet: these are StableHLO's names.
    Format("f6e2m3fn", "float6_e2m3fn", 6, 7.5),
    Format("f6e3m2fn", "float6_e3m2fn", 6, 28),
    Format("f4e2m1fn", "float4_e2m1fn", 4, 6),
    Format("bf16", "bfloat16", 16, (2 - 2**-7) * 2.0**127),
    Format("f16", "float16", 16, 65504),
    Format("f32", "float32", 32, (2 - 2**-23) * 2.0**127),
    # Powers of two: no sign, no zero, no elements of a matrix.
    Format("f8e8m0fnu", "float8_e8m0fnu", 8, 2.0**127),
    Format("s8", "int8", 8, 127),
    Format("u8", "uint8", 8, 255),
    Format("s4", "int4", 4, 7),
    Format("u4", "uint4", 4, 15),
)
#: By HLO's name.
FORMATS = {format.name: format for format in (*CUBLASLT.values(), *_FP8_ELSEWHERE, *_OTHERS)}
E4M3, E5M2, E2M1, E8M0 = (FORMATS[n] for n in ("f8e4m3fn", "f8e5m2", "f4e2m1fn", "f8e8m0fnu"))
BLOCK_FORMATS = (
    BlockFormat("MXFP8", E4M3, E8M0, 32),
    BlockFormat("MXFP8", E5M2, E8M0, 32),
    BlockFormat("MXFP6", FORMATS["f6e2m3fn"], E8M0, 32),
    BlockFormat("MXFP6", FORMATS["f6e3m2fn"], E8M0, 32),
    BlockFormat("MXFP4", E2M1, E8M0, 32),
    BlockFormat("NVFP4", E2M1, E4M3, 16, per_tensor=True),
)
# "f8" is what the PTX of a Blackwell kernel says, whose operands tell which it is.
_FP8 = {*CUBLASLT, *(format.name for format in _FP8_ELSEWHERE), "f8"}


def is_fp8(dtype: str) -> bool:
    """Whether HLO's type of this name is a float of 8 bits that elements of a matrix may have."""
    return dtype in _FP8


def is_narrow(dtype: str) -> bool:
    """Whether it is such a float of 8 bits, or of 4; "f4" is PTX's, as "f8"."""
    return is_fp8(dtype) or dtype in (E2M1.name, "f4")


def block_format(element: str, scale: str, block: int) -> BlockFormat | None:
    """The block-scaled format with these types of HLO's, and so many elements to a scale; None for
    one that is not known here.
    """
    for known in BLOCK_FORMATS:
        if (known.element.name, known.scale.name, known.block) == (element, scale, block):
            return known
    return None
