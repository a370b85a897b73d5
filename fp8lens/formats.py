"""The number formats that matmuls read and write, as data: what HLO and JAX call them, their range,
and, of block-scaled formats, which scale comes with how many elements.

Sources: OCP's "8-bit Floating Point Specification" (OFP8) and "Microscaling Formats (MX)
Specification", NVIDIA's documentation of cuBLAS for NVFP4, and for the formats with FNUZ
arXiv:2206.02915. A test compares all of it with ml_dtypes.
"""

import dataclasses
import enum


class Kind(enum.Enum):
    """What the codes of a format stand for."""

    FLOAT = enum.auto()
    INTEGER = enum.auto()
    SCALE = enum.auto()  # powers of two: no sign, no zero, no elements of a matrix


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of single elements. `name` is HLO's and `jax` that of jax.numpy; `largest` and
    `smallest` are the largest finite and the smallest positive number (a subnormal, where there are
    any), and `digits` the binary digits of a number, the leading one included. `cublaslt`: whether
    cuBLASLt multiplies it as FP8, on some chip.
    """

    name: str
    jax: str
    kind: Kind
    bits: int
    digits: int
    largest: float
    smallest: float
    cublaslt: bool = False

    @property
    def limit(self) -> str:
        """The largest number as HLO and Python print it."""
        return f"{self.largest:g}"

    @property
    def is_fp8(self) -> bool:
        """Whether it is a float of 8 bits that elements of a matrix may have."""
        return self.kind is Kind.FLOAT and self.bits == 8

    def holds(self, number: float) -> bool:
        """Whether a number is in the format as it is, with no rounding."""
        in_steps = abs(number) / self.smallest
        if abs(number) > self.largest or not in_steps.is_integer():
            return False
        numerator, _ = in_steps.as_integer_ratio()
        while numerator and numerator % 2 == 0:
            numerator //= 2
        return numerator.bit_length() <= self.digits


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


def _float(name: str, jax: str, digits: int, largest: float, smallest: float, **more) -> Format:
    bits = int("".join(filter(str.isdigit, name.partition("e")[0].removeprefix("b"))))
    return Format(name, jax, Kind.FLOAT, bits, digits, largest, smallest, **more)


def _integer(name: str, jax: str, bits: int, largest: int) -> Format:
    return Format(name, jax, Kind.INTEGER, bits, largest.bit_length(), largest, 1)


_ALL = (
    _float("f8e4m3fn", "float8_e4m3fn", 4, 448, 2**-9, cublaslt=True),
    _float("f8e5m2", "float8_e5m2", 3, 57344, 2**-16, cublaslt=True),
    _float("f8e4m3", "float8_e4m3", 4, 240, 2**-9),
    _float("f8e3m4", "float8_e3m4", 5, 15.5, 2**-6),
    _float("f8e4m3fnuz", "float8_e4m3fnuz", 4, 240, 2**-10),
    _float("f8e5m2fnuz", "float8_e5m2fnuz", 3, 57344, 2**-17),
    _float("f8e4m3b11fnuz", "float8_e4m3b11fnuz", 4, 30, 2**-13),
    # HLO has none of 6 bits yet: these are StableHLO's names.
    _float("f6e2m3fn", "float6_e2m3fn", 4, 7.5, 0.125),
    _float("f6e3m2fn", "float6_e3m2fn", 3, 28, 0.0625),
    _float("f4e2m1fn", "float4_e2m1fn", 2, 6, 0.5),
    _float("bf16", "bfloat16", 8, (2 - 2**-7) * 2.0**127, 2.0**-133),
    _float("f16", "float16", 11, 65504, 2**-24),
    _float("f32", "float32", 24, (2 - 2**-23) * 2.0**127, 2.0**-149),
    Format("f8e8m0fnu", "float8_e8m0fnu", Kind.SCALE, 8, 1, 2.0**127, 2.0**-127),
    _integer("s8", "int8", 8, 127),
    _integer("u8", "uint8", 8, 255),
    _integer("s4", "int4", 4, 7),
    _integer("u4", "uint4", 4, 15),
)
#: By HLO's name.
FORMATS = {format.name: format for format in _ALL}
E4M3, E5M2, E2M1, E8M0 = (FORMATS[n] for n in ("f8e4m3fn", "f8e5m2", "f4e2m1fn", "f8e8m0fnu"))
#: The FP8 formats of cuBLASLt's calls, which OCP's specification defines.
CUBLASLT = {format.name: format for format in _ALL if format.cublaslt}
BLOCK_FORMATS = (
    BlockFormat("MXFP8", E4M3, E8M0, 32),
    BlockFormat("MXFP8", E5M2, E8M0, 32),
    BlockFormat("MXFP6", FORMATS["f6e2m3fn"], E8M0, 32),
    BlockFormat("MXFP6", FORMATS["f6e3m2fn"], E8M0, 32),
    BlockFormat("MXFP4", E2M1, E8M0, 32),
    BlockFormat("NVFP4", E2M1, E4M3, 16, per_tensor=True),
)
# "f8" is what the PTX of a Blackwell kernel says, whose operands tell which it is.
_FP8 = frozenset(format.name for format in _ALL if format.is_fp8) | {"f8"}


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
