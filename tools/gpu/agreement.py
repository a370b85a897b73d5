"""Does the compile without a GPU give what the attached GPU's own compile gives, and does the GPU
run it?

Every program twice: with cuBLASLt for the matmuls, and with XLA's default options, for which the
GPU times the candidates and a machine without one takes the first that compiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from programs import arguments, chip, own_compile, programs, runnable
from record import Case, sentence

from fp8lens import report_gemms
from helpers import aot_compile
from helpers.records.local import kernel_lines
from tools.records import releases

UNREAD = "compiled, and cannot be read: "
ASKED = ("library", "math_dtype", "epilogue", "amax", "out_dtype")


def gemms(compiled: jax.stages.Compiled) -> list[dict[str, Any]]:
    """A program's matmuls by the fields that are compared, in an order that is not the
    scheduler's."""
    rows = [
        {field: getattr(row, field) for field in ASKED}
        | {"outside": len(row.outside), "tile": row.tile}
        for row in report_gemms(compiled).rows
    ]
    return sorted(rows, key=str)


def side(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What one compiler made of a program; that it cannot be read is said, and costs nothing
    else."""
    try:
        return {"gemms": gemms(compiled), "kernels": list(kernel_lines(compiled))}
    except Exception as error:
        return {"error": f"{UNREAD}{sentence(error)}"}


def compare(program: releases.Program, gemm: str, rehearse: bool, case: Case) -> dict[str, Any]:
    """Compile one program both ways, run it, and compare. An error on either side is recorded as
    that side's: a program that runs has run, whether or not its text can be read."""
    options = {"gemm": gemm, "compiler_options": program.options}
    compiles = {
        "without_gpu": lambda: aot_compile(
            program.fn, *program.args, target=chip(rehearse), **options
        ),
        "on_gpu": lambda: own_compile(program.fn, *program.args, rehearse=rehearse, **options),
    }
    result: dict[str, Any] = {"gemm": gemm, "ran": False}
    for where, compile_it in compiles.items():
        try:
            compiled = compile_it()
        except Exception as error:
            result[where] = {"error": case.refused(error) if where == "on_gpu" else sentence(error)}
            continue
        if where == "on_gpu":
            result |= run(program, compiled, rehearse, case)
            case.keep("", compiled)
        result[where] = side(compiled)
    without, own = result["without_gpu"], result["on_gpu"]
    # Two compilers that refuse a program in the same words agree; of what cannot be read, nothing
    # is known.
    known = not any(one.get("error", "").startswith(UNREAD) for one in (own, without))
    for answer, field in (("agree", "gemms"), ("same_kernels", "kernels")):
        result[answer] = known and own.get(field, own.get("error")) == without.get(
            field, without.get("error")
        )
    if not result["ran"]:
        result.setdefault("refused", own.get("error"))
    return result


def run(
    program: releases.Program, compiled: jax.stages.Compiled, rehearse: bool, case: Case
) -> dict[str, Any]:
    """Whether a program runs once, and why it does not."""
    try:
        jax.block_until_ready(
            runnable(program.fn, compiled, rehearse)(*arguments(program.args, "random"))
        )
        return {"ran": True}
    except Exception as error:
        return {"ran": False, "refused": case.refused(error)}


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """A case a program and choice of libraries: cuBLASLt's first, which are quick."""
    found = programs(divide=16, every=5) if rehearse else programs()
    return {
        f"{name} [{gemm}]": functools.partial(compare, program, gemm, rehearse)
        for gemm in ("cublaslt", "auto")
        for name, program in found.items()
        if program.gemm == "cublaslt"
    }
