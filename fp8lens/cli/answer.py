"""What the command prints of a program, and with which status."""

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

from fp8lens.bill.bill import Bill, Comparison, compare
from fp8lens.cli.functions import as_option, compiled
from fp8lens.cli.functions import named as function_in
from fp8lens.cli.mistakes import answered
from fp8lens.cli.options import check, is_record
from fp8lens.cli.saved import saved
from fp8lens.guard import MAY_GROW, changes
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import Ink, Style, in_ansi_colours, page, shows_colours, wrapped
from fp8lens.inspection import Inspection
from fp8lens.matmul.collectives import MOVES, of_kinds
from fp8lens.records import entry_of, name_in, recorded, write_record
from fp8lens.rules.find import sent_wide
from fp8lens.testing import fp8_failures


def answer(given: argparse.Namespace, out: TextIO) -> int:
    """Print the report to `out`; 1 where --require-fp8 does not hold, or something is worse than
    recorded, else 0. A Mistake where there is no report.
    """
    check(given)
    given.reasons = given.reasons or given.chain
    notes = sys.stderr if given.json else out  # standard output stays JSON
    if function_in(given.what):
        seen = compiled(given, given.what, given.gemm or "cublaslt")
        os.chdir(given.folder)  # the file may have gone to another
    else:
        seen = saved(given, notes)
    failures = required(seen, given.allow or ()) if given.require_fp8 else []
    shows_reasons = bool(seen.has_reasons and (given.reasons or failures))
    print(_text(given, seen, shows_reasons, out), file=out)
    _say(failures, notes)
    worse = _guard(given, seen, notes)
    return 1 if failures or worse else 0


def style(file: TextIO) -> Style:
    """How text is written there: in colours only on a terminal, and nowhere with what a terminal
    would obey.
    """
    return in_ansi_colours if shows_colours(file) else _readable


def _readable(part: str, ink: Ink | None) -> str:
    return visible(part)


def columns(file: TextIO) -> int:
    """How wide a file is: a terminal may be of any width, and a file has none."""
    return shutil.get_terminal_size().columns if file.isatty() else 0


def _say(lines: list[str], file: TextIO, ink: Ink | None = Ink.LOST) -> None:
    """Print lines behind what is printed already."""
    if lines:
        print("", *(style(file)(line, ink) for line in lines), sep="\n", file=file)


def _text(given: argparse.Namespace, seen: Inspection, reasons: bool, out: TextIO) -> str:
    """What was asked for, with the reasons or without."""
    costs: Bill | Comparison | None = None
    if given.against and not is_record(given):
        gemm = "cublaslt" if given.gemm in (None, "both") else given.gemm
        other = compiled(given, given.against, gemm)
        names = (given.against.rpartition(":")[2], given.what.rpartition(":")[2])
        costs = compare(other, seen, names)
    elif given.bill:
        costs = seen.bill
    if given.json:
        return costs.json() if costs else seen.json(reasons=reasons)
    to = style(out)
    with page(columns(out)):
        parts = [seen.report.text(to)]
        if seen.differences:
            parts.append(seen.differences.text(to))
        if given.ledger:
            parts.append(seen.ledger.text(to))
        if given.mesh or (seen.compiled and seen.devices > 1):
            parts += _sent(seen, to)
        if costs:
            parts.append(costs.text(to))
        if reasons:
            parts += _why(given, seen, to)
    return "\n\n".join(parts)


def _why(given: argparse.Namespace, seen: Inspection, to: Style) -> list[str]:
    """The reasons, of both compilers where both were asked for, and what stands around each
    matmul.
    """
    parts = [seen.reasons.text(to)] if seen.report.rows else []
    if given.chain:
        lines = [part for line in seen.chain().splitlines() for part in wrapped(line, 0, 8)]
        parts.append("\n".join(to(line, None) for line in lines))
    if seen.differences and seen.default:
        parts += [to("with XLA's default:", Ink.HEADING), seen.default.reasons.text(to)]
    return parts


def _sent(seen: Inspection, to: Style) -> list[str]:
    """For how many devices the program is, and what they send to each other."""
    parts = []
    if seen.devices > 1:
        mesh = f", mesh {as_option(seen.mesh)}" if seen.mesh else ""
        parts.append(to(f"compiled for {seen.devices:,} devices{mesh}", None))
    lines = str(seen.collectives).splitlines()
    return [*parts, "\n".join(to(line, None) for line in lines)]


# --require-fp8 ------------------------------------------------------------------------------------


def required(seen: Inspection, allowed: Collection[str]) -> list[str]:
    """What --require-fp8 does not find in order, in lines; without fault, none."""
    lines = [*fp8_failures(seen, allowed), *_on_the_wire(seen, allowed)]
    if seen.default:
        more = required(seen.default, allowed)
        lines += [f"with XLA's default: {line}" for line in more]
    return [part for line in lines for part in wrapped(visible(line), 0, 2)]


def _on_the_wire(seen: Inspection, allowed: Collection[str]) -> list[str]:
    """The collectives that send wide what an FP8 matmul reads, or what was FP8."""
    lines = []
    for c in of_kinds(seen.collectives, MOVES):
        for name in c.unknown if "opaque" not in allowed else ():
            lines.append(f"not known whether {name} quantizes what {c.name} sends")
        for reason in sent_wide(c, allowed):
            fix = "" if seen.has_reasons else f": {reason.fix}"  # else the reasons say it
            lines.append(f"not sent in FP8: {c.title}: {reason.rule}{fix}")
    return lines


# Records ------------------------------------------------------------------------------------------


def _guard(given: argparse.Namespace, seen: Inspection, notes: TextIO) -> bool:
    """Compare with the record, and write it: whether something is worse."""
    worse = False
    if is_record(given):
        name = _program(given, given.against)
        may_grow = MAY_GROW if given.may_grow is None else given.may_grow
        with answered((KeyError, ValueError), lambda error: f"--against: {error.args[0]}"):
            found = changes(recorded(given.against, name), seen, may_grow)
        said = f"{name}, against {given.against}: {found}"
        summarize(given, said)
        worse = bool(found.worse)
        _say(wrapped(visible(said), 0, 2), notes, Ink.LOST if worse else None)
    if given.save and worse and os.path.realpath(given.save) == os.path.realpath(given.against):
        kept = "the record is not renewed, because something is worse: to renew it, leave out"
        _say([f"{kept} --against {given.against}"], notes, None)
    elif given.save:
        _save(given, seen)
        _say([f"recorded in {given.save}"], notes, None)
    return worse


def _save(given: argparse.Namespace, seen: Inspection) -> None:
    """Write the program into the record of --save."""
    name = _program(given, given.save)
    with _written("--save", given.save), answered(ValueError, lambda error: f"--save: {error}"):
        write_record(given.save, name, entry_of(seen), anew=given.anew)


def _program(given: argparse.Namespace, record: str) -> str:
    """A program's name in a record."""
    if given.name:
        return given.name
    if function := function_in(given.what):
        return name_in(record, *function)
    return Path(given.what).name


def summarize(given: argparse.Namespace, said: str) -> None:
    """Append to the file of --summary what is said of the program."""
    if given.summary:
        with (
            _written("--summary", given.summary),
            open(given.summary, "a", encoding="utf-8") as file,
        ):
            file.write(f"{visible(said)}\n\n")


def _written(option: str, path: str) -> contextlib.AbstractContextManager:
    """A Mistake where a file cannot be written."""
    return answered(
        OSError, lambda error: f"{option}: {path} cannot be written ({error.strerror})."
    )
