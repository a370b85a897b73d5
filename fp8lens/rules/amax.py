"""Maxima of an FP8 call's result that the call does not take.

Each rule takes an `Amax`. F8ConvertD in XLA's gemm_rewriter.cc takes reduce(max, abs(result))
beside the conversion to FP8.
"""

from fp8lens.formats import is_fp8
from fp8lens.rules.facts import Amax
from fp8lens.rules.rule import Found, Lost, found_if, rule


@rule("amax-without-fp8", lost=Lost.AMAX)
def amax_without_fp8(amax: Amax) -> Found | None:
    """The amax is beside a result that is not FP8, and only a call that writes FP8 has one."""
    return found_if(not amax.converted and not amax.matmul.result.readers)


@rule("amax-of-another", lost=Lost.AMAX)
def amax_of_another(amax: Amax) -> Found | None:
    """The maximum is not of the value that is scaled and converted to FP8."""
    return found_if(is_fp8(amax.matmul.row.out_dtype) or amax.is_scaled)
