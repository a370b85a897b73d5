"""XLA's HLO text: read it, print it so that people can, and compare two programs."""

from fp8lens.hlo.diff import HloDiff, diff_hlo
from fp8lens.hlo.parse import (
    Computation,
    HloModule,
    HloParseError,
    Instruction,
    Shape,
    parse_hlo_module,
    parse_shape,
)
from fp8lens.hlo.text import format_hlo_module, print_hlo_module

__all__ = [
    "Computation",
    "HloDiff",
    "HloModule",
    "HloParseError",
    "Instruction",
    "Shape",
    "diff_hlo",
    "format_hlo_module",
    "parse_hlo_module",
    "parse_shape",
    "print_hlo_module",
]
