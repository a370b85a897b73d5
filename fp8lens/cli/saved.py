"""A program that XLA dumped: a file, a folder, or standard input."""

import argparse
import sys
from pathlib import Path
from typing import TextIO

from fp8lens.cli.functions import existing
from fp8lens.cli.mistakes import Mistake, answered, cannot_be_read
from fp8lens.cli.shapes import read_mesh
from fp8lens.dumps import (
    COMPILED,
    PTX,
    Kind,
    NoText,
    choose,
    files_beside,
    flags,
    not_of_a_gpu,
    text_of,
)
from fp8lens.hlo.parse import HloParseError, parse_hlo_module, visible
from fp8lens.inspection import Inspection, of_dump

_PIPED = "-"  # the program comes from standard input
_NEEDS_A_FUNCTION = ("shapes", "args", "target", "gemm", "bill", "against")


def shown(what: str) -> str:
    """What was given, in words."""
    return "standard input" if what == _PIPED else what


def saved(given: argparse.Namespace, notes: TextIO) -> Inspection:
    """A saved program. What there is to say of its file is printed to `notes`."""
    what = shown(given.what)
    for option in _NEEDS_A_FUNCTION:
        if getattr(given, option):
            raise Mistake(
                f"--{option} is for a function, and {what} is a saved program: leave it out, or "
                "give path/to/file.py:function."
            )
    name, data, beside = _read(given.what, notes)
    devices = read_mesh(given.mesh) if given.mesh is not None else None

    def not_usable(error: ValueError) -> str:
        if isinstance(error, NoText):
            return f"{what} is {error}: give the text that XLA dumps with --xla_dump_hlo_as_text."
        if isinstance(error, HloParseError):
            return (
                f"{what} is not one whole HLO module ({error}): "
                f"give the text that XLA dumps, such as module_0001.jit_f.sm_9.0a_{COMPILED}."
            )
        return f"--mesh: {error}"

    with answered(ValueError, not_usable):
        module = parse_hlo_module(text_of(data))
        asked = given.reasons or given.require_fp8
        seen, wrong = of_dump(module, name, beside, devices, reasons=asked)
        _ = seen.report, seen.collectives  # what cannot be read of them is said here
    if other := not_of_a_gpu(name, module):
        _of_no_gpu(given, f"{what} is {other}", notes)
    if given.reasons and not seen.has_reasons:
        missing = f"{what} does not say what XLA's rewriter was given, as with {flags(module)}"
        if beside:
            missing = f"{what} has no PTX of a Triton kernel that multiplies, as with {PTX} too"
        raise Mistake(
            f"--reasons: {wrong or missing}: dump the program again, leave --reasons out, or give "
            "path/to/file.py:function."
        )
    if wrong:
        print(visible(f"note: {wrong}: it is left out."), file=sys.stderr)
    return seen


def _of_no_gpu(given: argparse.Namespace, said: str, notes: TextIO) -> None:
    """Say what a program is that is not a GPU's; a Mistake where that matters."""
    fix = (
        f"take the file ending in {COMPILED}, which XLA writes where it compiles for a GPU, "
        "or give path/to/file.py:function with --shapes, which needs no GPU"
    )
    if given.require_fp8 or given.reasons:
        raise Mistake(f"{said}, and FP8 is judged on a GPU's kernels: {fix}.")
    print(visible(f"{said}; to judge FP8, {fix}."), end="\n\n", file=notes)


def _read(what: str, notes: TextIO) -> tuple[str, bytes, dict[str, bytes]]:
    """A program's file: its name, and its bytes, and those of the files that stand beside it. Of a
    folder, the file of the program that XLA compiled, which is said on `notes`.
    """
    if what == _PIPED:
        if sys.stdin.isatty():
            raise Mistake(f"no program comes from standard input: write fp8lens {_PIPED} < FILE.")
        return what, sys.stdin.buffer.read(), {}
    path = Path(what)
    with cannot_be_read(path):
        files = [file for file in path.glob("*") if file.is_file()]
        choice = choose({file.name: file.stat().st_size for file in files})
        if choice and choice.kind is not Kind.OTHER:
            print(visible(f"{path}: {choice}"), end="\n\n", file=notes)
            path /= choice.name
        data = existing(path).read_bytes()
        names = files_beside(path.name, (file.name for file in path.parent.iterdir()))
        return path.name, data, {name: (path.parent / name).read_bytes() for name in names}
