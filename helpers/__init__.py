"""The course's own tools and pictures; and, so that a chapter need name one package, what `fp8lens`
offers. What needs JAX is loaded when it is first used.
"""

import sys
from pathlib import Path

import fp8lens
from fp8lens.hlo.origin import leave_out
from helpers.explorers.listing import show_hlo

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
    "show_hlo",
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
# The recipes are files that a reader copies, and import one another by their bare names. So these
# names are found here, too: last, so that none of them hides a package.
RECIPES = Path(__file__).parent.parent / "notebooks" / "recipes"
sys.path.append(str(RECIPES))
# a matmul's source is the chapter's line, not the recipes'
for folder in (Path(__file__).parent, RECIPES):
    leave_out(folder)
