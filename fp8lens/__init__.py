"""Compile, read and judge FP8 matmuls in JAX: for Hopper and its relatives, on any machine.

The functions that read HLO need only the standard library. The functions that compile need JAX:
they load it when they are first used.
"""

import importlib

_PLACES = {
    "TARGETS": "targets",
    "HloModule": "hlo",
    "HloParseError": "hlo",
    "Inspection": "inspection",
    "Target": "targets",
    "aot_compile": "compile.api",
    "assert_fp8_collectives": "testing",
    "assert_fp8_gemms": "testing",
    "assert_no_worse": "testing",
    "compare": "bill.bill",
    "diff_hlo": "hlo",
    "format_hlo_module": "hlo",
    "gpu_available": "compile.process",
    "inspect": "inspection",
    "mesh": "compile.meshes",
    "parse_hlo_module": "hlo",
    "passes": "compile.stages",
    "print_hlo_module": "hlo",
    "report_gemms": "inspection",
    "run": "compile.api",
    "why_not_fp8": "inspection",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
