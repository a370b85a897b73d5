"""What has become worse since a record was made.

A program is compared with its record by what its matmuls multiply, and by what its kernels do.
Layers, instructions, lines and their order may change: they only help to say where.

Of a conditional one branch runs. Each figure is that of the branch where it is largest, so that a
program in which each branch is no worse is no worse. A matmul is looked for in all branches: it
lost FP8 if any branch multiplies it in a wider type. The same holds for TF32 and each other type
that tensor cores multiply faster than the next wider one.

Of some loops nobody knows how often they run. What is in them is compared twice: as a part of the
whole, where it counts as if each loop ran once, and alone, as what one iteration costs. A program
with neither figure larger costs no more, whatever number of iterations there are, from one on. So
work that moves into such a loop is worse, and so is a loop whose length was known and no longer is:
it may run any number of times. Work that moves out of such a loop is not.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8lens.bill.bill import shown
from fp8lens.formats import is_fp8, is_narrow
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import counted, size
from fp8lens.inspection import Inspection
from fp8lens.matmul.ledger import CLASSES
from fp8lens.records import Entry, Row, entry_of, taken
from fp8lens.rules.reason import Reason
from fp8lens.rules.rule import Lost

#: By how much bytes and memory may grow, as a share of what is recorded. In which order a program
#: names its parameters decides what XLA fuses and when it runs it: of seven training steps, of 40
#: to 230 kernels, under some 10 orders each, the bytes moved differed by up to 2.8%, and the memory
#: at the peak by as much.
MAY_GROW = 0.05
#: The same of kernels: in the same programs there was up to one kernel more, or 1%. It was never
#: one that does what a matmul's call could do.
KERNELS_MAY_GROW = 0.02
_MOST_PLACES = 3
_GROWING = {
    "bytes": "moved by kernels",
    "sent": "sent by each device",
    "peak": "in memory at the peak",
    "allocated": "memory allocated",
}
_MEMORY = ("peak", "allocated")
# Types by their rates on tensor cores, the slowest first. What is in none of these is slower.
_RATES = (("f32",), ("tf32",), ("bf16", "f16", "s8"))
_IN_FP8 = len(_RATES) + 1
_NAMES = {1: "f32", 2: "TF32", 3: "16 bits", _IN_FP8: "FP8", _IN_FP8 + 1: "FP4"}
# In which loops a figure is, by how many of unknown length are around; the last holds for more.
_IN_LOOPS = (
    "",
    " in each iteration of loops of unknown length",
    " in each iteration of nested loops of unknown length",
)
# From which share on growth of bytes and memory is said, where it is within the limits.
_WORTH_SAYING = 0.001


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


def changes(before: Entry, seen: Inspection, may_grow: float = MAY_GROW, note: str = "") -> Changes:
    """What has changed since an entry was recorded.

    Worse is a matmul that lost FP8, or any type for a slower one; a kernel more that does what a
    matmul's call could do, and more kernels of any kind beyond 2%; and bytes moved, bytes sent or
    memory, at the peak or allocated, that grew by more than `may_grow` of what they were. What grew
    by less is said in `about`, which begins with `note`. ValueError where the program was compiled
    for another chip, or by other rules: the two say nothing of each other.
    """
    if before["compiled"] != seen.note:
        raise ValueError(
            f"the record is of a program {visible(before['compiled']) or 'not compiled here'}, and "
            f"this one is {seen.note or 'not compiled here'}: compile it alike, or write the "
            "record anew."
        )
    after = entry_of(seen)
    worse = [_lost(row, rate, seen) for row, rate in _slower(before, after)]
    better = []
    for row, rate in _slower(after, before):
        better.append(f"{_where(row)} is in {_NAMES[rate]} now, and was in {row['type']}")
    within = []
    figures = [*_figures(before, after)]
    for figure in figures:
        if figure.is_worse(may_grow):
            worse.append(figure.said + _explained(figure, before, after, seen))
        elif figure.is_worth_saying:
            where = _explained(figure, before, after, seen) if figure.what == "kernels" else ""
            within.append(figure.said + where)
        elif figure.is_better(may_grow) and not _grows_elsewhere(figure, figures):
            better.append(figure.said)
    about = [visible(note)] if note else []
    if within:
        about.append(f"More, within the limits: {'; '.join(within)}.")
    return Changes(tuple(worse), tuple(better), (*about, *_about(before, after)))


# How much -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Figure:
    """What a program costs of something, and what it cost. `what` is one of `records.UNITS`, or
    "peak" or "allocated" of memory; `loops`: only what is in so many loops of unknown length.
    `needless`: how many kernels more do what a matmul's call could do.
    """

    what: str
    loops: int
    was: int
    now: int
    needless: int = 0

    @property
    def more(self) -> int:
        return self.now - self.was

    def is_worse(self, may_grow: float) -> bool:
        if self.what == "kernels":
            return self.more > 0 and (self.needless > 0 or self.more > KERNELS_MAY_GROW * self.was)
        return self.more > may_grow * self.was

    def is_better(self, may_grow: float) -> bool:
        return self.more < 0 and (self.what == "kernels" or -self.more > may_grow * self.was)

    @property
    def is_worth_saying(self) -> bool:
        return self.more > (0 if self.what == "kernels" else _WORTH_SAYING * self.was)

    @property
    def said(self) -> str:
        where = _IN_LOOPS[min(self.loops, len(_IN_LOOPS) - 1)]
        more = "more" if self.more > 0 else "fewer" if self.what == "kernels" else "less"
        if self.what == "kernels":
            recorded = f"({self.now}, recorded {self.was})"
            return f"{counted(abs(self.more), 'kernel')} {more}{where} {recorded}"
        grown = f"({self.more / self.was:+.1%})" if self.was else "(recorded none)"
        return f"{size(abs(self.more))} {more} {_GROWING[self.what]}{where} {grown}"


def _figures(before: Entry, after: Entry) -> Iterator[_Figure]:
    """All figures that are compared."""
    deepest = max((row["loops"] for entry in (before, after) for row in entry["work"]), default=0)
    for what in ("kernels", "bytes", "sent"):
        for loops in range(deepest + 1):
            was, now = (_cost(entry, what, loops) for entry in (before, after))
            needless = 0
            if what == "kernels":
                needless = _cost(after, "avoidable", loops) - _cost(before, "avoidable", loops)
            yield _Figure(what, loops, was, now, needless)
    for what in _MEMORY:
        if before[what] is not None and after[what] is not None:
            yield _Figure(what, 0, before[what], after[what])


def _cost(entry: Entry, unit: str, loops: int = 0) -> int:
    return sum(row[unit] for row in _run(entry, unit, loops))


def _run(entry: Entry, unit: str, loops: int = 0) -> list[Row]:
    """The work in so many loops of unknown length that runs, where each conditional takes the
    branch with the most of a unit.
    """
    rows = [row for row in entry["work"] if row["loops"] >= loops]
    return taken(rows, lambda row: row[unit])


def _grows_elsewhere(figure: _Figure, figures: Iterable[_Figure]) -> bool:
    """Whether there is less only because there is more in loops of unknown length; or of memory,
    whether less is alive at the peak, and XLA allocates more for it, or the reverse.
    """
    grown = [other for other in figures if other.more > 0]
    if figure.what in _MEMORY:
        return any(other.what in _MEMORY for other in grown)
    return any(other.what == figure.what and other.loops > figure.loops for other in grown)


def _about(before: Entry, after: Entry) -> Iterator[str]:
    flops = [sum(map(_flops, taken(entry["matmuls"], _flops))) for entry in (before, after)]
    if flops[0] != flops[1]:
        one, two = (shown(number, "FLOP") for number in flops)
        yield (
            f"The program multiplies {two}, recorded {one}: if it is meant to, write the record "
            "anew."
        )
    was, now = (_cost(entry, "kernels", loops=1) for entry in (before, after))
    if now:
        yield (
            f"How often loops run is not known for {counted(now, 'kernel')}: each counts as if it "
            "ran once, and more iterations are not seen."
        )
    elif was:
        yield (
            "The record counts loops of unknown length as if each ran once: if their length is "
            "known now, write the record anew."
        )
    branches, recorded = _in_branches(after), _in_branches(before)
    if branches != recorded:
        yield (
            "Of a conditional the branch counts that has most: all branches together have "
            f"{counted(branches, 'kernel')}, recorded {recorded}."
        )
    if before["jax"] != after["jax"]:
        yield f"Recorded with JAX {visible(before['jax'])}, compared with {after['jax']}."


def _flops(row: Row) -> int:
    return row["flops"] * row["runs"]


def _in_branches(entry: Entry) -> int:
    """How many kernels are in branches of conditionals, in all of them together."""
    return sum(row["kernels"] for row in entry["work"] if row["branch"])


# Which matmuls ------------------------------------------------------------------------------------


def _rate(row: Row) -> int:
    """How fast tensor cores multiply a matmul's type, as a place in an order."""
    if is_narrow(row["type"]):
        return _IN_FP8 if is_fp8(row["type"]) else _IN_FP8 + 1
    return next((n for n, types in enumerate(_RATES, 1) if row["type"] in types), 0)


def _slower(before: Entry, after: Entry) -> list[tuple[Row, int]]:
    """The matmuls that are multiplied in a slower type after, each with the rate that it lost, the
    fastest.
    """
    found: dict[int, tuple[Row, int]] = {}
    for rate in sorted(_NAMES, reverse=True):
        for row in _fewer_of(rate, before, after):
            found.setdefault(id(row), (row, rate))
    return [*found.values()]


def _fewer_of(rate: int, before: Entry, after: Entry) -> list[Row]:
    """The matmuls that are slower than a rate after, of sizes of which more were not before: as
    many as there are fewer. Of those that XLA gave other sizes, as many as there are fewer in all.
    """
    # In all branches, and in those with the fewest: a branch more may be in a wider type.
    fewer, fewer_in_all = Counter[tuple](), 0
    fast = [[row for row in of["matmuls"] if _rate(row) >= rate] for of in (before, after)]
    for runs in (_runs, _runs_at_least):
        was, is_now = map(runs, fast)
        fewer |= was - is_now
        fewer_in_all = max(fewer_in_all, was.total() - is_now.total())
    rows, slow = ([row for row in of["matmuls"] if _rate(row) < rate] for of in (after, before))
    wide = _runs(rows) - _runs(slow)
    # First those that were fast in the same layer.
    known = {(_key(row), row["layer"]) for row in fast[0]}
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


def _key(row: Row) -> tuple:
    return *row["size"], row["batch"], row["loops"]


def _runs(rows: Iterable[Row]) -> Counter[tuple]:
    """How often matmuls of each size run, in all branches together."""
    found: Counter[tuple] = Counter()
    for row in rows:
        found[_key(row)] += row["runs"]
    return found


def _runs_at_least(rows: Sequence[Row]) -> Counter[tuple]:
    """The same, whatever branches are taken."""
    found: Counter[tuple] = Counter()
    for key in _runs(rows):
        alike = [row for row in rows if _key(row) == key]
        found |= _runs(taken(alike, lambda row: -row["runs"]))
    return found


# Where and why ------------------------------------------------------------------------------------


def _reasons(seen: Inspection) -> Sequence[Reason]:
    """The program's reasons; a saved program has none."""
    return seen.reasons if seen.is_ours else ()


def _path(row: Row) -> str:
    """A matmul's layer, as GemmRow.path has it."""
    return f"{row['layer']} backward" if row["layer"] and row["backward"] else row["layer"]


def _where(row: Row) -> str:
    m, n, k = row["size"]
    name = _path(row) or f"the matmul {m} x {n} x {k}"
    times = f", {row['runs']} times" if row["runs"] > 1 else ""
    return visible(f"{name} ({row['source']}{times})" if row["source"] else f"{name}{times}")


def _lost(row: Row, rate: int, seen: Inspection) -> str:
    """That a matmul lost FP8 or another type, and why."""
    if rate < _IN_FP8:
        return f"{_where(row)} is multiplied in {row['type']}, and no longer in {_NAMES[rate]}"
    for reason in _reasons(seen):
        if reason.rule in row["rules"] and row["source"] in ("", reason.source):
            because = f"because {reason.reason} [{reason.rule}]"
            return f"{_where(row)} lost {_NAMES[rate]}, {because}"
    return f"{_where(row)} lost {_NAMES[rate]}"


def _place(row: Row) -> str:
    """Where something is: its layer, or else its line."""
    return row["layer"] or row["source"]


def _explained(figure: _Figure, before: Entry, after: Entry, seen: Inspection) -> str:
    """Of what there is more, where most of that is, and of kernels the reason."""
    unit = figure.what
    if unit in _MEMORY:
        return ""
    added = _added(before, after, unit, figure.loops)
    said = []
    for what in CLASSES:
        there = {place: more for (kind, place), more in added.items() if kind == what}
        total = sum(there.values())
        if total > 0:
            count = str(total) if unit == "kernels" else size(total)
            said.append(f"{count} {what}{_at(there, what, after)}")
    places = f": {', '.join(said[:_MOST_PLACES])}" if said else ""
    return places + (_because(added, before, seen) if unit == "kernels" else "")


def _added(before: Entry, after: Entry, unit: str, loops: int) -> Counter[tuple[str, str]]:
    """How much more there is of each kind of work, at each place."""
    added: Counter[tuple[str, str]] = Counter()
    for entry, sign in ((before, -1), (after, 1)):
        for row in _run(entry, unit, loops):
            added[row["what"], _place(row)] += sign * row[unit]
    return added


def _at(there: dict[str, int], what: str, after: Entry) -> str:
    """The place where most of what was added of a kind of work is."""
    most = max(there, key=lambda place: there[place])
    for row in after["work"]:
        if row["what"] == what and _place(row) == most:
            name = ", ".join(filter(None, (row["layer"], row["source"])))
            return visible(f" ({name})") if name else ""
    return ""


def _because(added: Counter[tuple[str, str]], before: Entry, seen: Inspection) -> str:
    """Why there are more kernels: the first rule that is broken more often than it was, at a
    matmul for which one of the added kernels does work. "" where none is. Why a matmul lost FP8 is
    said of the matmul.
    """
    beside = {
        name
        for line in seen.ledger
        if line.avoidable and added[line.what, line.layer or line.source] > 0
        for name in line.serves
    }
    was = Counter(rule for row in before["matmuls"] for rule in row["rules"])
    reasons = {(reason.instruction, reason.rule): reason for reason in reversed(_reasons(seen))}
    now = Counter(rule for _, rule in reasons)
    for reason in reversed(reasons.values()):
        is_new = now[reason.rule] > was[reason.rule]
        if is_new and reason.lost is not Lost.FP8 and reason.instruction in beside:
            return f", because {reason.reason} [{reason.rule}]"
    return ""
