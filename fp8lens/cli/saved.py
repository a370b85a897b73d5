"""A program that XLA dumped: a file, a folder, or standard input."""

import argparse
import os
import sys
from pathlib import Path
from typing import TextIO

from fp8lens.cli.functions import existing
from fp8lens.cli.mistakes import Mistake, answered, cannot_be_read, nearest
from fp8lens.cli.shapes import read_mesh
from fp8lens.dumps import COMPILED, Kind, NoText, choose, files_beside, flags, not_of_a_gpu, text_of
from fp8lens.hlo.parse import HloParseError, parse_hlo_module, visible
from fp8lens.inspection import Inspection, of_dump

_PIPED = "-"  # the program comes from standard input
_NEEDS_A_FUNCTION = ("shapes", "args", "target", "gemm", "bill", "against")


def shown(what: str) -> str:
    """What was given, in words."""
    return "standard input" if what == _PIPED else what


def named(what: str) -> str:
    """The same, quoted where it is a name."""
    return shown(what) if what == _PIPED else repr(what)


def saved(given: argparse.Namespace, notes: TextIO) -> Inspection:
    """A saved program. What there is to say of its file is printed to `notes`."""
    _check(given)
    name, data, beside = _read(given.what, notes)

    def not_text(error: NoText) -> str:
        return (
            f"{named(given.what)} is {error}: "
            "give the text that XLA dumps with --xla_dump_hlo_as_text."
        )

    def not_a_module(error: HloParseError) -> str:
        return (
            f"{shown(given.what)} is not one whole HLO module ({error}): "
            f"give the text that XLA dumps, such as module_0001.jit_f.sm_9.0a_{COMPILED}."
        )

    devices = read_mesh(given.mesh) if given.mesh is not None else None
    with answered(NoText, not_text), answered(HloParseError, not_a_module):
        module = parse_hlo_module(text_of(data))
        asked = given.reasons or given.require_fp8
        seen, wrong = of_dump(module, name, beside, devices, reasons=asked)
        try:
            _ = seen.report, seen.collectives  # what cannot be read of them is said here
        except HloParseError:
            raise
        except ValueError as error:
            raise Mistake(f"--mesh: {error}") from error
    if wrong and given.reasons:
        raise Mistake(f"--reasons: {wrong}: dump the program again, or leave --reasons out.")
    if wrong:
        print(visible(f"note: {wrong}: it is left out."), file=sys.stderr)
    if given.reasons and not seen.has_reasons:
        raise Mistake(
            f"--reasons is for a function, and {named(given.what)} is a saved program, "
            "which says no more what XLA's rewriter was given: leave it out, or give "
            "path/to/file.py:function, or the folder of a dump that was made with "
            f"{flags(module)} too."
        )
    if other := not_of_a_gpu(name, module):
        fix = f"take the file ending in {COMPILED}, which XLA writes where it compiles for a GPU"
        if given.require_fp8:
            raise Mistake(
                f"{named(given.what)} is {other}, and FP8 is judged on a GPU's kernels: {fix}."
            )
        print(visible(f"{shown(given.what)} is {other}; to judge FP8, {fix}."), file=notes)
        print(file=notes)
    return seen


def _check(given: argparse.Namespace) -> None:
    """A Mistake where a function was meant, or an option is for a function."""
    file, _, name = given.what.rpartition(":")
    if file and name.isidentifier() and not os.path.lexists(given.what):
        beside = (p.name for p in Path(file).parent.glob("*.py"))
        raise Mistake(
            f"{file!r} is no .py file, which a function is in: give path/to/file.py:{name}"
            f"{nearest(Path(file).name, beside)}."
        )
    for option in _NEEDS_A_FUNCTION:
        if getattr(given, option):
            why = "is compiled already"
            if option in ("bill", "against"):
                why = "says no more how XLA planned its memory"
            raise Mistake(
                f"--{option} is for a function, and {named(given.what)} is a saved program, "
                f"which {why}: leave it out, or give path/to/file.py:function."
            )


def _read(what: str, notes: TextIO) -> tuple[str, bytes, dict[str, bytes]]:
    """A program's file: its name, and its bytes, and those of the files that stand beside it."""
    if what == _PIPED:
        if sys.stdin is None or sys.stdin.isatty():
            raise Mistake(
                f"no program comes from standard input: write fp8lens {_PIPED} < "
                f"module_0001.jit_f.sm_9.0a_{COMPILED}, or give the file's name."
            )
        return what, sys.stdin.buffer.read(), {}
    with cannot_be_read(what):
        path = _program_in(Path(what), notes)
        data = path.read_bytes()
        names = files_beside(path.name, (file.name for file in path.parent.iterdir()))
    beside = {}
    for name in names:
        with cannot_be_read(path.parent / name):
            beside[name] = (path.parent / name).read_bytes()
    return path.name, data, beside


def _program_in(path: Path, notes: TextIO) -> Path:
    """The file to read: of a folder, the program that XLA compiled, which is said on `notes`."""
    if not path.is_dir():
        return existing(path)
    choice = choose({file.name: file.stat().st_size for file in path.iterdir() if file.is_file()})
    if not choice or choice.kind is Kind.OTHER:
        return existing(path)  # raises, and names what may be meant
    print(visible(f"{path}: {choice}"), end="\n\n", file=notes)
    return path / choice.name
