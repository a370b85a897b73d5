"""What programs cost, in a file: what a record keeps of a program, and how it is read and written.

A record keeps what kernels do for each layer, not each kernel: names of instructions and their
order may change. It counts as the ledger does: a loop as often as it runs, once where that is not
known, and all branches of a conditional.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8lens.bill.bill import Bill
from fp8lens.hlo.origin import layer
from fp8lens.hlo.parse import visible
from fp8lens.inspection import Inspection
from fp8lens.report.gemms import runs

_ABOUT = "What programs cost, written by fp8lens; compare with --against, renew with --save"
_VERSION = 4
_ANEW = "begin the record anew, with --save and --anew, or delete the file and write it again"
#: What is counted of work: kernels; those of them that do what a matmul's call could do; the bytes
#: that they move; the bytes that each device sends.
UNITS = ("kernels", "avoidable", "bytes", "sent")
#: The totals of a bill that are of memory.
MEMORY = ("memory at the peak", "memory allocated")

Entry = dict[str, Any]
Row = Mapping[str, Any]


def entry_of(seen: Inspection) -> Entry:
    """What a record keeps of a program, as JSON has it: its matmuls, what kernels do for which
    layer, and the bytes of memory, if they are known.

    `type` is what the hardware multiplies, as GemmRow.math_dtype has it, and `size` is batch, M, N
    and K, the smaller of M and N first. `in_loop`: in a loop of unknown length, which counts once.
    """
    totals = seen.bill.totals
    return {
        "compiled": compiled(seen),
        "jax": _jax(),
        "memory": {what: totals[what] for what in MEMORY if what in totals},
        "matmuls": _matmuls(seen),
        "work": _work(seen.bill),
    }


def compiled(seen: Inspection) -> str:
    """For what a program was compiled, and how: records that differ in it are not compared."""
    axes = ",".join(f"{name}={size}" for name, size in (seen.mesh or {}).items())
    return f"{seen.note}, mesh {axes}" if axes else seen.note


def _jax() -> str:
    import importlib.metadata  # slow to import

    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:  # a saved program needs none
        return ""


def _matmuls(seen: Inspection) -> list[Entry]:
    rules: dict[str, set[str]] = defaultdict(set)
    for reason in seen.reasons if seen.is_ours else ():
        rules[reason.instruction].add(reason.rule)
    return [
        {
            "size": [row.batch, *sorted((row.m, row.n)), row.k],
            "runs": runs(row),
            "in_loop": row.count is None,
            "type": row.math_dtype,
            "flops": row.flops,
            "layer": row.path,
            "source": row.source,
            "rules": sorted(rules[row.name]),
        }
        for row in seen.report.rows
    ]


def _work(bill: Bill) -> list[Entry]:
    done: dict[tuple, Counter[str]] = defaultdict(Counter)
    for line in bill.ledger:
        one = done[line.what, line.layer, line.source, line.kernel.count is None]
        one["kernels"] += line.runs
        one["avoidable"] += line.runs if line.avoidable else 0
        one["bytes"] += line.nbytes
    for c in bill.collectives:
        one = done["collective", layer(c.op_name), c.source, c.count is None]
        one["sent"] += c.bytes_sent * runs(c)
    return [
        {
            "what": what,
            "layer": in_layer,
            "source": source,
            "in_loop": in_loop,
            **{unit: one[unit] for unit in UNITS},
        }
        for (what, in_layer, source, in_loop), one in done.items()
    ]


# The file -----------------------------------------------------------------------------------------


def read_record(path: str | os.PathLike) -> dict[str, Entry]:
    """The programs of a record, by name. FileNotFoundError where there is no such file, ValueError
    where it is no record, is damaged, or is one that another release of fp8lens writes.
    """
    _check_regular(path)
    try:
        document = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("programs"), dict):
        raise ValueError(f"{_name(path)} is no record of fp8lens: {_ANEW}.")
    if document.get("version") != _VERSION:
        raise ValueError(
            f"{_name(path)} is a record of version {document.get('version')!r}, and this fp8lens "
            f"reads version {_VERSION}: {_ANEW}."
        )
    programs = document["programs"]
    for name, entry in programs.items():
        if not isinstance(entry, dict) or entry.pop("digest", "") != _digest(entry):
            raise ValueError(
                f"{_name(path)}: what it has of {visible(name)} is not as fp8lens wrote it: "
                f"{_ANEW}."
            )
    return programs


def recorded(path: str | os.PathLike, name: str) -> Entry:
    """The program of a record that has this name. KeyError where there is none."""
    programs = read_record(path)
    if name not in programs:
        there = ", ".join(map(visible, programs)) or "no program"
        raise KeyError(
            f"{_name(path)} has {there}, and not {visible(name)}: write it with --save, or give "
            "the name that it has there (--name; in a test, name=)."
        )
    return programs[name]


# The records and names that this process has written.
_written: set[tuple[Path, str]] = set()


def write_record(path: str | os.PathLike, name: str, entry: Entry, anew: bool = False) -> None:
    """Put a program into a record, which keeps its other programs, unless it begins `anew`. The
    file is whole at any time, and processes that write it at once wait for each other. A symbolic
    link stays one, and the file keeps its mode.

    OSError where it cannot be written. ValueError where there is a file that is no record, and
    where this process has recorded another program by this name.
    """
    path = Path(os.path.realpath(path))
    _check_regular(path)
    with _alone_in(path.parent):
        programs = read_record(path) if path.exists() and not anew else {}
        if (path, name) in _written and programs.get(name, entry) != entry:
            raise ValueError(
                f"{_name(path)}: this run has recorded another program as {visible(name)} already: "
                "give each a name of its own (--name; in a test, name=)."
            )
        programs[name] = entry
        document = {
            "about": _ABOUT,
            "version": _VERSION,
            "programs": {
                name: {"digest": _digest(entry), **entry}
                for name, entry in sorted(programs.items())
            },
        }
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            if path.exists():
                shutil.copymode(path, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    _written.add((path, name))


def _name(path: str | os.PathLike) -> str:
    return visible(os.fspath(path))


def _check_regular(path: str | os.PathLike) -> None:
    """ValueError where there is something that is no file with an end, such as a device."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{_name(path)} is no regular file: give another.")


def _digest(entry: Entry) -> str:
    """What tells an entry as fp8lens wrote it from one that has been merged or edited."""
    text = json.dumps(entry, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process writes a record in this folder meanwhile."""
    if not importlib.util.find_spec("fcntl"):  # on Windows, where nothing can be compiled
        yield
        return
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


# A program's name ---------------------------------------------------------------------------------


def name_in(record: str | os.PathLike, file: str | os.PathLike, function: str) -> str:
    """A function's name in a record: its file, from the record's folder, and its name. So it is the
    same on every machine, and in every folder that a command is called in.
    """
    folder = os.path.dirname(os.path.realpath(record))
    return f"{Path(os.path.relpath(os.path.realpath(file), folder)).as_posix()}:{function}"
