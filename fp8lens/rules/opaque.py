"""Kernels that HLO does not tell of: what their code says that they multiply.

Each rule takes an `Opaque`.
"""

import re
from collections.abc import Mapping

from fp8lens.formats import is_narrow
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import fused
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.ptx import instructions, own_code
from fp8lens.rules.rule import Found, Lost, found_if, rule


def _call_inside(i: Instruction) -> Instruction:
    """The one call of a fusion that gives it slices of its operands, as in a loop; else `i`."""
    computation = fused(i)
    calls = [j for j in computation or () if j.opcode == "custom-call"]
    return calls[0] if len(calls) == 1 else i


class Opaque:
    """A kernel that is no instruction of HLO's, and what its code says that it multiplies."""

    def __init__(self, line: Line, ptx: Mapping[str, str]):
        i = _call_inside(line.kernel.instruction)
        self.instruction, self.target = i, i.custom_call_target or i.opcode
        self.is_triton = "triton" in self.target
        self._code = own_code(i, ptx)
        self.types = instructions(self._code)

    @property
    def wide(self) -> str:
        """The types that it multiplies and that are neither FP8 nor FP4."""
        return " and ".join(name for name in self.types if not is_narrow(name))

    @property
    def is_known(self) -> bool:
        """Whether all that it multiplies is FP8 or FP4, or nothing is."""
        if self.types:
            return not self.wide
        # Which a loop may sum, without an instruction for matrices
        products = re.search(r"\b(fma|mul)\.(\w{1,30}\.){0,20}b?f(16|32|64)", self._code)
        return self.is_triton and bool(self._code) and not products


@rule("triton-kernel", lost=Lost.FP8)
def triton_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Triton, as by Pallas, multiplies a wide type."""
    return found_if(kernel.types and kernel.is_triton, types=kernel.wide)


@rule("mosaic-kernel", lost=Lost.FP8)
def mosaic_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Mosaic GPU, as by Pallas, multiplies a wide type."""
    return found_if(kernel.types and not kernel.is_triton, types=kernel.wide)


@rule("opaque-kernel", lost=Lost.KERNEL)
def opaque_kernel(kernel: Opaque) -> Found | None:
    """HLO does not show what a kernel of a library, or of the program itself, multiplies."""
    return Found(target=kernel.target)
