"""The course's own tools and pictures; and, so that a chapter need name one package, what `fp8lens`
offers. What needs JAX is loaded when it is first used.
"""

import sys
from pathlib import Path

import fp8lens
from fp8lens.hlo.origin import leave_out

__all__ = [
    "TARGETS",
    "HloModule",
    "HloParseError",
    "Target",
    "Inspection",
    "aot_compile",
    "assert_fp8_collectives",
    "assert_fp8_gemms",
    "diff_hlo",
    "format_hlo_module",
    "gpu_available",
    "inspect",
    "mesh",
    "parse_hlo_module",
    "passes",
    "print_hlo_module",
    "report_gemms",
    "run",
    "why_not_fp8",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(fp8lens, name)
    return value


if "jax" in sys.modules:
    from fp8lens.compile.process import choose_platform

    # before a chapter's first array: without a GPU, JAX's start-up of CUDA would print a traceback
    choose_platform()
# a matmul's source is the chapter's line, not the recipes'
leave_out(Path(__file__).parent)
