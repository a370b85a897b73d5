"""What programs cost, in a file: what a record keeps of a program, and how it is read and written.

A record keeps what kernels do for each layer, not each kernel: names of instructions and their
order may change. It keeps where the kernels stand, too, because a loop may run more often than
once, and of a conditional's branches one runs.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8lens.bill.bill import Bill
from fp8lens.hlo.ops import CONTROL
from fp8lens.hlo.origin import is_backward, layer
from fp8lens.hlo.parse import HloModule, visible
from fp8lens.hlo.program import callees, executions
from fp8lens.inspection import Inspection
from fp8lens.matmul.rows import GemmRow

_ABOUT = "What programs cost, written by fp8lens; compare with --against, renew with --save"
_VERSION = 3
_ANEW = "begin the record anew, with --save and --anew, or delete the file and write it again"
#: What is counted of work: kernels; those of them that do what a matmul's call could do; the bytes
#: that they move; the bytes that each device sends.
UNITS = ("kernels", "avoidable", "bytes", "sent")

Entry = dict[str, Any]
Row = Mapping[str, Any]


class _Place(NamedTuple):
    """Where a computation stands. `runs`: how often it runs, in one iteration of each loop around
    it whose length is not known; `loops`: how many such loops there are. `branch`: the branches of
    conditionals that it is in, the outermost first: of which conditional, which branch, of how
    many.
    """

    runs: int = 1
    loops: int = 0
    branch: tuple[tuple[int, int, int], ...] = ()


def _places(module: HloModule) -> dict[str, _Place]:
    """Where each computation stands that ENTRY reaches by calls, loops and branches."""
    places = {module.entry.name: _Place()}
    conditionals = 0
    for name in executions(module):  # a caller before what it calls
        at = places[name]
        for i in module.computations[name]:
            if i.opcode.removesuffix("-start") not in (*CONTROL, "fusion"):
                continue
            called = callees(i)
            if i.opcode == "conditional":
                conditionals += 1
            for n, (callee, times) in enumerate(called):
                branch = at.branch
                if i.opcode == "conditional":
                    branch = (*branch, (conditionals, n, len(called)))
                if times is None:
                    there = _Place(at.runs, at.loops + 1, branch)
                else:
                    there = _Place(at.runs * times, at.loops, branch)
                places[callee] = _joined(places.get(callee), there)
    return places


def _joined(one: _Place | None, other: _Place) -> _Place:
    """The place of a computation that is called from several: where all of it counts."""
    if one is None:
        return other
    common = os.path.commonprefix([one.branch, other.branch])
    return _Place(one.runs + other.runs, max(one.loops, other.loops), tuple(common))


def entry_of(seen: Inspection) -> Entry:
    """What a record keeps of a program, as JSON has it: its matmuls, what kernels do for which
    layer, and the bytes of memory at the peak and allocated, None where these are not known.

    `type` is what the hardware multiplies, as GemmRow.math_dtype has it, and `flops` are of one
    run. `runs`, and all numbers of work, are those in one iteration of each loop whose length is
    not known; `loops` is the number of such loops around. `branch` has, for each conditional
    around, its number, which branch it is, and how many there are.
    """
    places = _places(seen.module)
    return {
        "compiled": seen.note,
        "jax": _jax(),
        "peak": seen.bill.totals.get("memory at the peak"),
        "allocated": seen.bill.totals.get("memory allocated"),
        "matmuls": _matmuls(seen, places),
        "work": _work(seen.bill, places),
    }


def _matmuls(seen: Inspection, places: Mapping[str, _Place]) -> list[Entry]:
    rules: dict[str, set[str]] = defaultdict(set)
    for reason in seen.reasons if seen.is_ours else ():
        rules[reason.instruction].add(reason.rule)
    found = []
    for row in seen.report.rows:
        runs, loops, branch = _place_of(row, places)
        found.append(
            {
                "size": [*sorted((row.m, row.n)), row.k],
                "batch": row.batch,
                "runs": runs,
                "loops": loops,
                "branch": branch,
                "type": row.math_dtype,
                "flops": row.flops,
                "layer": layer(row.op_name),
                "backward": is_backward(row.op_name),
                "source": row.source,
                "rules": sorted(rules[row.name]),
            }
        )
    return found


def _place_of(row: GemmRow, places: Mapping[str, _Place]) -> tuple[int, int, list]:
    """A matmul's place, as JSON has it. A loop may be a matmul as a whole."""
    at = places[row.instruction.computation.name]
    branch = [[*one] for one in at.branch]
    if row.count is not None:
        return row.count, 0, branch
    return at.runs, max(at.loops, 1), branch


def _work(bill: Bill, places: Mapping[str, _Place]) -> list[Entry]:
    done: dict[tuple, Counter[str]] = defaultdict(Counter)
    for line in bill.ledger:
        at = places[line.kernel.instruction.computation.name]
        one = done[line.what, line.layer, line.source, at.loops, at.branch]
        one["kernels"] += at.runs
        one["avoidable"] += at.runs if line.avoidable else 0
        one["bytes"] += at.runs * line.kernel.bytes_moved
    for c in bill.collectives:
        if c.instruction is None:
            continue
        at = places[c.instruction.computation.name]
        one = done["collective", layer(c.op_name), c.source, at.loops, at.branch]
        one["sent"] += at.runs * c.bytes_sent
    return [
        {
            "what": what,
            "layer": in_layer,
            "source": source,
            "loops": loops,
            "branch": [[*of] for of in branch],
            **{unit: one[unit] for unit in UNITS},
        }
        for (what, in_layer, source, loops, branch), one in done.items()
    ]


def _jax() -> str:
    import importlib.metadata  # slow to import

    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:  # a saved program needs none
        return ""


def taken(rows: Sequence[Row], weight: Callable[[Row], int], level: int = 0) -> list[Row]:
    """The rows that run if each conditional takes the branch that weighs most."""
    run = [row for row in rows if len(row["branch"]) == level]
    conditionals: dict[int, list[list[Row]]] = {}
    for row in rows:
        if len(row["branch"]) > level:
            number, n, of = row["branch"][level]
            conditionals.setdefault(number, [[] for _ in range(of)])[n].append(row)
    for branches in conditionals.values():
        ways = [taken(branch, weight, level + 1) for branch in branches]
        run += max(ways, key=lambda way: sum(map(weight, way)))
    return run


# The file -----------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """A program of a record. `note` says which one it is, where it has another name than the
    program that is compared with it.
    """

    entry: Entry
    note: str = ""


def read_record(path: str | os.PathLike) -> dict[str, Entry]:
    """The programs of a record, by name. FileNotFoundError where there is no such file, ValueError
    where it is no record, is damaged, or is one that another release of fp8lens writes.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device may have no end
        raise ValueError(f"{_name(path)} is no regular file: give another.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("programs"), dict):
        raise ValueError(f"{_name(path)} is no record of fp8lens: {_ANEW}.")
    if document.get("version") != _VERSION:
        raise ValueError(
            f"{_name(path)} is a record of version {document.get('version')!r}, and this fp8lens "
            f"reads version {_VERSION}: {_ANEW}."
        )
    for name, entry in document["programs"].items():
        wrong = _wrong(entry)
        if wrong:
            raise ValueError(
                f"{_name(path)}: what it has of {visible(name)} is damaged ({wrong}): {_ANEW}."
            )
    return document["programs"]


def _name(path: str | os.PathLike) -> str:
    return visible(os.fspath(path))


def recorded(path: str | os.PathLike, name: str, entry: Entry) -> Recorded:
    """The program of a record that a program is to be compared with: the one of its name. Where
    there is none, the program may have another name now: then the only one with the same matmuls,
    or the record's only program. KeyError where neither is there.
    """
    programs = read_record(path)
    if name in programs:
        return Recorded(programs[name])
    same = [other for other in programs if _multiplied(programs[other]) == _multiplied(entry)]
    if len(programs) == 1:
        (other,) = programs
        return Recorded(programs[other], f"Compared with {other}, the record's only program.")
    if len(same) == 1 and entry["matmuls"]:
        (other,) = same
        note = f"Compared with {other}, the only program of the record with the same matmuls."
        return Recorded(programs[other], note)
    there = ", ".join(map(visible, programs)) or "no program"
    raise KeyError(
        f"{_name(path)} has {there}, and not {visible(name)}: write it with --save, or give the "
        "name that it has there (--name; in a test, name=)."
    )


def _multiplied(entry: Entry) -> Counter[tuple]:
    """How often a program multiplies which sizes."""
    found: Counter[tuple] = Counter()
    for row in entry["matmuls"]:
        found[*row["size"], row["batch"], row["loops"]] += row["runs"]
    return found


# This process, or all those of one run of pytest-xdist.
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


def write_record(path: str | os.PathLike, name: str, entry: Entry, anew: bool = False) -> None:
    """Put a program into a record, which keeps its other programs, unless it begins `anew`. The
    file is whole at any time, and processes that write it at once wait for each other. A symbolic
    link stays one, and the file keeps its mode.

    OSError where it cannot be written. ValueError where there is a file that is no record, and
    where this run, of a process or of pytest, has recorded another program by this name.
    """
    path = Path(os.path.realpath(path))
    if anew and path.exists() and not path.is_file():
        raise ValueError(f"{_name(path)} is no regular file: give another.")
    with _alone_with(path) as written:
        programs = read_record(path) if path.exists() and not anew else {}
        if name in written and programs.get(name, entry) != entry:
            raise ValueError(
                f"{_name(path)}: this run has recorded another program as {visible(name)} already: "
                "give each a name of its own (--name; in a test, name=)."
            )
        programs[name] = entry
        document = {
            "about": _ABOUT,
            "version": _VERSION,
            "programs": dict(sorted(programs.items())),
        }
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            if path.exists():
                shutil.copymode(path, new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        written.append(name)


@contextlib.contextmanager
def _alone_with(path: Path) -> Iterator[list[str]]:
    """No other process writes the record meanwhile. Gives the names that this run has written
    there, to be added to.

    A file for each record, in the folder for temporary files, is the lock, and has these names:
    the processes of one run of pytest-xdist share nothing else.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    of_path = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    journal = Path(tempfile.gettempdir(), f"fp8lens-{user}-{of_path}.json")
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(journal, flags, 0o600), "r+", encoding="utf-8") as file:
        try:
            import fcntl
        except ImportError:  # not on Windows, where nothing can be compiled
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        written = _written(file.read())
        yield written
        file.seek(0)
        file.truncate()
        json.dump({"run": _RUN, "names": written}, file)


def _written(journal: str) -> list[str]:
    """The names that this run has written, by its journal; none where that is of another run."""
    try:
        document = json.loads(journal)
    except ValueError:
        return []
    if not isinstance(document, dict) or document.get("run") != _RUN:
        return []
    return list(document.get("names", ()))


# What an entry must be ----------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    """Whether it is a whole number that a program may cost. JSON has true and NaN as well."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_triple(value: Any) -> bool:
    """Whether it is a list of three counts."""
    return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _is_branch(value: Any) -> bool:
    """Whether it is a list of (conditional, branch, how many branches)."""
    if not isinstance(value, list) or len(value) > 100:
        return False
    return all(_is_triple(one) and one[1] < one[2] < 1 << 16 for one in value)


def _is_rules(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "matmuls": {
        "size": _is_triple,
        "batch": _is_count,
        "runs": _is_count,
        "loops": _is_count,
        "branch": _is_branch,
        "type": _is_text,
        "flops": _is_count,
        "layer": _is_text,
        "backward": _is_flag,
        "source": _is_text,
        "rules": _is_rules,
    },
    "work": {
        "what": _is_text,
        "layer": _is_text,
        "source": _is_text,
        "loops": _is_count,
        "branch": _is_branch,
        **dict.fromkeys(UNITS, _is_count),
    },
}


def _wrong(entry: Any) -> str:
    """What of an entry is not as `entry_of` writes it; "" where all is."""
    if not isinstance(entry, dict):
        return "it is no object"
    for key in ("compiled", "jax"):
        if not isinstance(entry.get(key), str):
            return f"{key} is no text"
    for key in ("peak", "allocated"):
        nbytes = entry.get(key, "")
        if nbytes is not None and not _is_count(nbytes):
            return f"{key} is no number of bytes"
    for part, fields in _FIELDS.items():
        rows = entry.get(part)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return f"{part} is no list of objects"
        for field, is_right in fields.items():
            if not all(is_right(row.get(field)) for row in rows):
                return f"{part}: {field} is missing, or of another kind"
    return ""


# A program's name ---------------------------------------------------------------------------------


def name_in(record: str | os.PathLike, file: str | os.PathLike, function: str) -> str:
    """A function's name in a record: its file, from the record's folder, and its name. So it is the
    same on every machine, and in every folder that a command is called in.
    """
    folder = os.path.dirname(os.path.realpath(record))
    return f"{Path(os.path.relpath(os.path.realpath(file), folder)).as_posix()}:{function}"
