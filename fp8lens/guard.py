"""A record of what programs cost, and what has become worse since it was made.

A program is compared with its record by what its matmuls multiply, and by what its kernels do.
Layers, instructions, lines and their order may change: they only help to say where.
"""

import dataclasses
import importlib.metadata
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8lens.bill.bill import shown
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import counted, size
from fp8lens.inspection import Inspection
from fp8lens.matmul.ledger import CLASSES
from fp8lens.rules.reason import Reason

#: By how much bytes and memory may grow, as a share of what is recorded: what a newer XLA changes
#: in small kernels is not worth a failure.
MAY_GROW = 0.02
_ABOUT = "What programs cost, written by fp8lens; compare with --against, renew with --save"
_VERSION = 1
_MOST_PLACES = 3
_GROWING = {
    "bytes moved": "moved by kernels",
    "memory at the peak": "in memory at the peak",
    "bytes sent": "sent by each device",
}

Entry = dict[str, Any]


def entry_of(seen: Inspection) -> Entry:
    """What a record keeps of a program: its totals, its matmuls, and what kernels do for which
    layer, as JSON has it.
    """
    rules: dict[str, list[str]] = defaultdict(list)
    for reason in _reasons(seen):
        rules[reason.instruction].append(reason.rule)
    matmuls = [
        {
            "size": [*sorted((row.m, row.n)), row.k],
            "batch": row.batch,
            "runs": row.count or 1,
            "fp8": row.is_fp8,
            "layer": row.path,
            "source": row.source,
            "rules": sorted(set(rules[row.name])),
        }
        for row in seen.report.rows
    ]
    work: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for line in seen.ledger:
        done = work[line.what, line.layer, line.source]
        done[0] += line.runs
        done[1] += line.nbytes
    return {
        "compiled": seen.note,
        "jax": _jax(),
        "totals": seen.bill.totals,
        "matmuls": matmuls,
        "work": [
            {"what": what, "layer": layer, "source": source, "kernels": kernels, "bytes": nbytes}
            for (what, layer, source), (kernels, nbytes) in work.items()
        ],
    }


def _reasons(seen: Inspection) -> Sequence[Reason]:
    """The program's reasons; a saved program has none."""
    return seen.reasons if seen.is_ours else ()


def _jax() -> str:
    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:  # a saved program needs none
        return ""


# The file -----------------------------------------------------------------------------------------


def read_record(path: str | os.PathLike) -> dict[str, Entry]:
    """The programs of a record, by name. FileNotFoundError where there is no such file, ValueError
    where it is no record, or one that another release of fp8lens writes.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = ""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("programs"), dict):
        raise ValueError(f"{_name(path)} is no record of fp8lens: write one with --save.")
    if document.get("version") != _VERSION:
        raise ValueError(
            f"{_name(path)} is a record of version {document.get('version')!r}, and this fp8lens "
            f"reads version {_VERSION}: write it anew with --save."
        )
    for name, entry in document["programs"].items():
        if not _is_entry(entry):
            raise ValueError(
                f"{_name(path)}: what it has of {visible(name)} is damaged: write it anew with "
                "--save."
            )
    return document["programs"]


def _name(path: str | os.PathLike) -> str:
    return visible(os.fspath(path))


_FIELDS: dict[str, dict[str, type]] = {
    "matmuls": {
        "size": list,
        "batch": int,
        "runs": int,
        "fp8": bool,
        "layer": str,
        "source": str,
        "rules": list,
    },
    "work": {"what": str, "layer": str, "source": str, "kernels": int, "bytes": int},
}


def _is_entry(entry: Any) -> bool:
    """Whether an entry has what `entry_of` writes."""
    if not isinstance(entry, dict) or not isinstance(entry.get("totals"), dict):
        return False
    if not all(isinstance(entry.get(key), str) for key in ("compiled", "jax")):
        return False
    if not all(isinstance(number, int | float) for number in entry["totals"].values()):
        return False
    for part, fields in _FIELDS.items():
        if not isinstance(entry.get(part), list):
            return False
        for one in entry[part]:
            if not isinstance(one, dict):
                return False
            if not all(isinstance(one.get(name), kind) for name, kind in fields.items()):
                return False
    return all(
        len(one["size"]) == 3 and all(isinstance(n, int) for n in one["size"])
        for one in entry["matmuls"]
    )


def write_record(path: str | os.PathLike, name: str, entry: Entry) -> None:
    """Put a program into a record, which keeps its other programs. The file is whole at any time.
    OSError where it cannot be written, ValueError where there is a file that is no record.
    """
    path = Path(path)
    programs = read_record(path) if path.exists() else {}
    programs[name] = entry
    document = {
        "about": _ABOUT,
        "version": _VERSION,
        "programs": dict(sorted(programs.items())),
    }
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def recorded(path: str | os.PathLike, name: str) -> Entry:
    """What a record has of a program; where it has one program alone, that one, whatever it is
    called. KeyError where it has others.
    """
    programs = read_record(path)
    if name in programs:
        return programs[name]
    if len(programs) == 1:
        return next(iter(programs.values()))
    there = ", ".join(map(visible, programs)) or "no program"
    raise KeyError(f"{_name(path)} has {there}, and not {visible(name)}: write it with --save.")


# What has changed ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Changes:
    """What has become worse since a record was made, and what better: a sentence for each. `about`
    says what is no better and no worse, and may explain both.
    """

    worse: tuple[str, ...]
    better: tuple[str, ...]
    about: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = "; ".join(self.worse) or "Nothing is worse than recorded"
        better = f"Better: {'; '.join(self.better)}." if self.better else ""
        return " ".join(filter(None, (f"{said}.", better, *self.about)))


def changes(before: Entry, seen: Inspection, may_grow: float = MAY_GROW) -> Changes:
    """What has changed since an entry was recorded.

    Worse is a matmul that lost FP8, a kernel more, and bytes moved, bytes sent or memory at the
    peak that grew by more than `may_grow` of what they were. ValueError where the program was
    compiled for another chip, or by other rules: the two say nothing of each other.
    """
    if before["compiled"] != seen.note:
        raise ValueError(
            f"the record is of a program {visible(before['compiled']) or 'not compiled here'}, and "
            f"this one is {seen.note or 'not compiled here'}: compile it alike, or write the "
            "record anew."
        )
    after = entry_of(seen)
    worse, better = [], []
    lost, gained = _fewer_in_fp8(before, after), _fewer_in_fp8(after, before)
    of_one = _more(before, after, "bytes moved") if len(lost) == 1 else 0
    worse += [_lost(row, seen, of_one) for row in lost]
    better += [f"{_where(row)} is in FP8 now" for row in gained]
    kernels = _more(before, after, "kernels")
    if kernels > 0:
        worse.append(
            f"{counted(kernels, 'kernel')} more ({after['totals']['kernels']}, recorded "
            f"{before['totals']['kernels']}){_places(before, after, 'kernels')}"
            f"{_because(before, seen) if not lost else ''}"
        )
    elif kernels < 0:
        better.append(f"{counted(-kernels, 'kernel')} fewer")
    for name, where in _GROWING.items():
        if name == "bytes moved" and of_one > 0:
            continue  # said of that matmul
        was, more = before["totals"].get(name, 0), _more(before, after, name)
        grown = f"({more / was:+.1%})" if was else "(recorded none)"
        if more > may_grow * was and name in before["totals"]:
            places = _places(before, after, "bytes") if name == "bytes moved" else ""
            worse.append(f"{size(int(more))} more {where} {grown}{places}")
        elif -more > may_grow * was:
            better.append(f"{size(int(-more))} less {where} {grown}")
    return Changes(tuple(worse), tuple(better), tuple(_about(before, after)))


def _more(before: Entry, after: Entry, total: str) -> int:
    """By how much a total has grown."""
    return after["totals"].get(total, 0) - before["totals"].get(total, 0)


def _about(before: Entry, after: Entry) -> Iterator[str]:
    flops = [entry["totals"].get("FLOPs", 0) for entry in (before, after)]
    if flops[0] != flops[1]:
        one, two = (shown(number, "FLOP") for number in flops)
        yield (
            f"The program multiplies {two}, recorded {one}: if it is meant to, write the record "
            "anew."
        )
    if before["jax"] != after["jax"]:
        yield f"Recorded with JAX {visible(before['jax'])}, compared with {after['jax']}."


def _fewer_in_fp8(before: Entry, after: Entry) -> list[Mapping[str, Any]]:
    """The matmuls that are not in FP8 after, of sizes of which more were before: as many as there
    are fewer. Of those that XLA gave other sizes, as many as there are fewer in all.
    """
    was, is_now = _runs(before, fp8=True), _runs(after, fp8=True)
    fewer, fewer_in_all = was - is_now, was.total() - is_now.total()
    wide = _runs(after, fp8=False) - _runs(before, fp8=False)
    known = {(_key(row), row["layer"]) for row in before["matmuls"] if row["fp8"]}
    # First those that were in FP8 in the same layer.
    rows = [row for row in after["matmuls"] if not row["fp8"]]
    rows.sort(key=lambda row: (_key(row), row["layer"]) not in known)
    lost, told = [], Counter[tuple]()
    for row in rows:
        key = _key(row)
        same_size = told[key] < min(fewer[key], wide[key])
        other_size = told[key] < wide[key] and told.total() < fewer_in_all
        if same_size or other_size:
            told[key] += row["runs"]
            lost.append(row)
    return lost


def _key(row: Mapping[str, Any]) -> tuple:
    return *row["size"], row["batch"]


def _runs(entry: Entry, fp8: bool) -> Counter[tuple]:
    """How often matmuls of each size run, in FP8 or not."""
    found: Counter[tuple] = Counter()
    for row in entry["matmuls"]:
        if row["fp8"] == fp8:
            found[_key(row)] += row["runs"]
    return found


def _where(row: Mapping[str, Any]) -> str:
    m, n, k = row["size"]
    name = row["layer"] or f"the matmul {m} x {n} x {k}"
    times = f", {row['runs']} times" if row["runs"] > 1 else ""
    return visible(f"{name} ({row['source']}{times})" if row["source"] else f"{name}{times}")


def _lost(row: Mapping[str, Any], seen: Inspection, more: float) -> str:
    why = next(
        (
            f"because {reason.reason} [{reason.rule}]"
            for reason in _reasons(seen)
            if reason.rule in row["rules"] and row["source"] in ("", reason.source)
        ),
        "",
    )
    grown = f"{size(int(more))} more" if more > 0 else ""
    said = ", ".join(filter(None, (grown, why)))
    return f"{_where(row)} lost FP8" + (f": {said}" if said else "")


def _because(before: Entry, seen: Inspection) -> str:
    """Why there is more to do: the first rule that is broken more often than it was."""
    was = Counter(rule for row in before["matmuls"] for rule in row["rules"])
    found = Counter[str]()
    for reason in _reasons(seen):
        found[reason.rule] += 1
        if found[reason.rule] > was[reason.rule]:
            return f", because {reason.reason} [{reason.rule}]"
    return ""


def _places(before: Entry, after: Entry, unit: str) -> str:
    """What kernels do more of, and where most of it is."""
    grown: Counter[str] = Counter()
    for entry, sign in ((after, 1), (before, -1)):
        for one in entry["work"]:
            grown[one["what"]] += sign * one[unit]
    said = []
    for what in CLASSES:
        if grown[what] > 0:
            count = size(grown[what]) if unit == "bytes" else str(grown[what])
            said.append(f"{count} {what}{_at(before, after, what, unit)}")
    return f": {', '.join(said[:_MOST_PLACES])}" if said else ""


def _at(before: Entry, after: Entry, what: str, unit: str) -> str:
    """Where most of what was added of a kind of work is: of a layer that the record knows, or else
    a line, only what is more than it had.
    """
    added: Counter[str] = Counter()
    names: dict[str, str] = {}
    for entry, sign in ((before, -1), (after, 1)):
        for one in entry["work"]:
            if one["what"] == what:
                place = one["layer"] or one["source"]
                added[place] += sign * one[unit]
                names[place] = ", ".join(filter(None, (one["layer"], one["source"])))
    (place, _), *_ = added.most_common(1) or [("", 0)]
    return visible(f" ({names[place]})") if names.get(place) else ""
