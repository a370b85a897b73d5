"""Matmuls of two FP8 arrays that XLA makes no FP8 call of all the same.

Each rule takes a `Matmul` that is not FP8, where XLA finds an FP8 array behind both operands.
"""

from fp8lens.formats import CUBLASLT
from fp8lens.matmul.rows import matmuls
from fp8lens.rules.facts import Matmul
from fp8lens.rules.no_fp8_call import thin
from fp8lens.rules.rule import Found, Lost, found_if, rule

#: K * (M + N) of the smallest matmul that XLA calls a library for: the default of its option
#: xla_gpu_gemm_rewrite_size_threshold.
_SMALLEST_CALL = 100


@rule("dot-algorithm", lost=Lost.FP8)
def dot_algorithm(m: Matmul) -> Found | None:
    """The program asks for an algorithm, and with it for the types to multiply in."""
    asked = m.given.algorithm
    is_asked = asked not in ("", "ALG_DOT_ANY_F8_ANY_F8_F32")
    return found_if(is_asked, algorithm=asked.removeprefix("ALG_DOT_"))


@rule("triton-tile", lost=Lost.FP8)
def triton_tile(m: Matmul) -> Found | None:
    """The dot is of FP8 arrays, but Triton's kernel converts them to a wider type."""
    is_tritons = m.row.library == "triton" and _says_fp8(m)
    return found_if(is_tritons and not m.is_thin, tile=m.row.tile)


def _says_fp8(m: Matmul) -> bool:
    """Whether the dot in the kernel is of FP8 arrays."""
    return matmuls(m.row.instruction)[0].is_fp8


@rule("triton-dequantized", lost=Lost.FP8)
def triton_dequantized(m: Matmul) -> Found | None:
    """Triton's kernel dequantizes the operands, then multiplies in a wide type."""
    is_tritons = m.row.library == "triton" and not _says_fp8(m)
    return found_if(is_tritons and not m.is_thin)


@rule("both-e5m2", lost=Lost.FP8)
def both_e5m2(m: Matmul) -> Found | None:
    """Both operands are E5M2."""
    return found_if(m.types == ["f8e5m2"] * 2)


@rule("other-fp8-type", lost=Lost.FP8)
def other_fp8_type(m: Matmul) -> Found | None:
    """An operand is of an 8-bit type that NVIDIA's tensor cores do not multiply."""
    other = [dtype for dtype in m.types if dtype not in CUBLASLT]
    return Found(dtype=other[0]) if other else None


@rule("result-type", lost=Lost.FP8)
def result_type(m: Matmul) -> Found | None:
    """The dot returns a type that the FP8 call does not write."""
    assert m.dot is not None
    dtype = m.dot.shape.dtype
    return found_if(dtype not in ("bf16", "f16", "f32", *CUBLASLT), dtype=dtype)


@rule("vector-operand", lost=Lost.FP8)
def vector_operand(m: Matmul) -> Found | None:
    """M or N is 1, and XLA removes that dimension from the operand."""
    return thin(m.thin("MN")) if m.is_thin else None


@rule("too-small", lost=Lost.FP8)
def too_small(m: Matmul) -> Found | None:
    """The operands have so few elements that XLA calls no library."""
    size = m.given.k * (m.given.m + m.given.n)
    is_small = m.row.library == "kernel" and size < _SMALLEST_CALL
    return found_if(is_small, size=size, limit=_SMALLEST_CALL)
