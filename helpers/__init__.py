"""Compile, read and judge FP8 matmuls in JAX: for Hopper and its relatives, on any machine."""

from helpers.aot import aot_compile, gpu_available, run
from helpers.diff import diff_hlo
from helpers.hlo import HloModule, HloParseError, parse_hlo_module
from helpers.printing import format_hlo_module, print_hlo_module
from helpers.passes import passes
from helpers.reasons import assert_fp8_gemms, why_not_fp8
from helpers.report import report_gemms
from helpers.targets import TARGETS, Target

__all__ = [
    "TARGETS",
    "HloModule",
    "HloParseError",
    "Target",
    "aot_compile",
    "assert_fp8_gemms",
    "diff_hlo",
    "format_hlo_module",
    "gpu_available",
    "parse_hlo_module",
    "passes",
    "print_hlo_module",
    "report_gemms",
    "run",
    "why_not_fp8",
]
