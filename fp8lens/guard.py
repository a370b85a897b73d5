"""What has become worse since a record was made.

A program is compared with its record by what its matmuls multiply, and by what its kernels do.
Layers, instructions, lines and their order may change: they only help to say where.

Of some loops nobody knows how often they run. What is in them is compared twice: as a part of the
whole, where it counts as if each loop ran once, and alone. So work that moves into such a loop is
worse, and so is a loop whose length was known and no longer is: it may run any number of times.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from fp8lens.bill.bill import shown
from fp8lens.formats import is_fp8, is_narrow
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import counted, size
from fp8lens.inspection import Inspection
from fp8lens.matmul.ledger import CLASSES
from fp8lens.records import MEMORY, Entry, Row, compiled, entry_of
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
    "memory at the peak": "in memory at the peak",
    "memory allocated": "memory allocated",
}
_IN_LOOPS = " in each iteration of loops of unknown length"
# Types by their rates on tensor cores, the slowest first. What is in none of these is slower.
_RATES = {"f32": 1, "tf32": 2, "bf16": 3, "f16": 3, "s8": 3}
_FP8, _FP4 = 4, 5
_NAMES = {1: "f32", 2: "TF32", 3: "16 bits", _FP8: "FP8", _FP4: "FP4"}
# From which share on a change is said, where it is within the limits.
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


def changes(before: Entry, seen: Inspection, may_grow: float = MAY_GROW) -> Changes:
    """What has changed since an entry was recorded.

    Worse is a matmul that lost FP8, or any type for a slower one; a kernel more that does what a
    matmul's call could do, and more kernels of any kind beyond 2%; and bytes moved, bytes sent or
    memory, at the peak or allocated, that grew by more than `may_grow` of what they were. What grew
    by less is said in `about`. ValueError where the program was compiled for another chip, or by
    other rules: the two say nothing of each other.
    """
    if before["compiled"] != (now := compiled(seen)):
        raise ValueError(
            f"the record is of a program {visible(before['compiled']) or 'not compiled here'}, and "
            f"this one is {now or 'not compiled here'}: compile it alike, or write the "
            "record anew."
        )
    after = entry_of(seen)
    worse = [_lost(row, rate, seen) for row, rate in _slower(before, after)]
    better = []
    for row, rate in _slower(after, before):
        better.append(f"{_where(row)} is in {_NAMES[rate]} now, and was in {row['type']}")
    figures = [*_figures(before, after)]
    # A loop of unknown length counts once: what moves into one is not less.
    moved_in = any(figure.in_loops and figure.more > 0 for figure in figures)
    within = []
    for figure in figures:
        limit = figure.limit(may_grow)
        if figure.more > limit:
            why = _new(figure, before, after, seen)
            worse.append(f"{figure}{_places(figure, before, after)}{why}")
        elif figure.more > _WORTH_SAYING * figure.was:
            within.append(f"{figure}{_places(figure, before, after)}")
        elif -figure.more > limit and not moved_in:
            better.append(str(figure))
    about = [*_about(before, after)]
    if within:
        about.insert(0, f"More, within the limits: {'; '.join(within)}.")
    return Changes(tuple(worse), tuple(better), tuple(about))


# How much -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Figure:
    """What a program costs of something, and what it cost. `what` is one of `records.UNITS` or
    `records.MEMORY`; `in_loops`: only what is in loops of unknown length. `needless`: how many
    kernels more do what a matmul's call could do.
    """

    what: str
    in_loops: bool
    was: int
    now: int
    needless: int = 0

    @property
    def more(self) -> int:
        return self.now - self.was

    def limit(self, may_grow: float) -> float:
        """From where on a change is worse or better."""
        if self.what != "kernels":
            return may_grow * self.was
        return 0 if self.needless * self.more > 0 else KERNELS_MAY_GROW * self.was

    def __str__(self) -> str:
        where = _IN_LOOPS if self.in_loops else ""
        if self.what == "kernels":
            more = "more" if self.more > 0 else "fewer"
            recorded = f"({self.now}, recorded {self.was})"
            return f"{counted(abs(self.more), 'kernel')} {more}{where} {recorded}"
        more = "more" if self.more > 0 else "less"
        grown = f"({self.more / self.was:+.1%})" if self.was else "(recorded none)"
        return f"{size(abs(self.more))} {more} {_GROWING[self.what]}{where} {grown}"


def _figures(before: Entry, after: Entry) -> Iterator[_Figure]:
    """All figures that are compared."""
    for what in ("kernels", "bytes", "sent"):
        for in_loops in (False, True):
            was, now = (_cost(entry, what, in_loops) for entry in (before, after))
            needless = 0
            if what == "kernels":
                avoidable = [_cost(entry, "avoidable", in_loops) for entry in (before, after)]
                needless = avoidable[1] - avoidable[0]
            yield _Figure(what, in_loops, was, now, needless)
    for what in MEMORY:
        if what in before["memory"] and what in after["memory"]:
            yield _Figure(what, False, before["memory"][what], after["memory"][what])


def _cost(entry: Entry, unit: str, in_loops: bool) -> int:
    return sum(row[unit] for row in _work(entry, in_loops))


def _work(entry: Entry, in_loops: bool) -> list[Row]:
    """All work, or what of it is in loops of unknown length."""
    return [row for row in entry["work"] if row["in_loop"] or not in_loops]


def _about(before: Entry, after: Entry) -> Iterator[str]:
    flops = [sum(row["flops"] * row["runs"] for row in of["matmuls"]) for of in (before, after)]
    if flops[0] != flops[1]:
        one, two = (shown(number, "FLOP") for number in flops)
        yield (
            f"The program multiplies {two}, recorded {one}: if it is meant to, write the record "
            "anew."
        )
    was, now = (_cost(entry, "kernels", in_loops=True) for entry in (before, after))
    if was or now:
        yield (
            f"How often loops run is not known for {counted(now, 'kernel')}, recorded {was}: each "
            "counts as if it ran once, and more iterations are not seen."
        )
    if before["jax"] != after["jax"]:
        yield f"Recorded with JAX {visible(before['jax'])}, compared with {after['jax']}."


# Which matmuls ------------------------------------------------------------------------------------


def _rate(row: Row) -> int:
    """How fast tensor cores multiply a matmul's type, as a place in an order."""
    if is_narrow(row["type"]):
        return _FP8 if is_fp8(row["type"]) else _FP4
    return _RATES.get(row["type"], 0)


def _slower(before: Entry, after: Entry) -> list[tuple[Row, int]]:
    """The matmuls that are multiplied in a slower type after, each with the rate that it lost, the
    fastest.
    """
    found: dict[int, tuple[Row, int]] = {}
    for rate in sorted(_NAMES, reverse=True):
        for row in _fewer_of(rate, before, after):
            found.setdefault(id(row), (row, rate))
    return [*found.values()]


def _fewer_of(rate: int, before: Entry, after: Entry) -> Iterator[Row]:
    """The matmuls that are slower than a rate after, of sizes of which more were not before: as
    many as there are fewer. Of those that XLA gave other sizes, as many as there are fewer in all.
    """
    (was_fast, was_slow), (fast, slow) = (_split(entry, rate) for entry in (before, after))
    fewer = _runs(was_fast) - _runs(fast)
    fewer_in_all = _runs(was_fast).total() - _runs(fast).total()
    new = _runs(slow) - _runs(was_slow)
    # First those that were fast in the same layer.
    known = {(_key(row), row["layer"]) for row in was_fast}
    for row in sorted(slow, key=lambda row: (_key(row), row["layer"]) not in known):
        key = _key(row)
        if new[key] > 0 and (fewer[key] > 0 or fewer_in_all > 0):
            new[key] -= row["runs"]
            fewer[key] -= row["runs"]
            fewer_in_all -= row["runs"]
            yield row


def _split(entry: Entry, rate: int) -> tuple[list[Row], list[Row]]:
    """The matmuls that are at least so fast, and the others."""
    fast: list[Row] = []
    slow: list[Row] = []
    for row in entry["matmuls"]:
        (fast if _rate(row) >= rate else slow).append(row)
    return fast, slow


def _key(row: Row) -> tuple:
    return *row["size"], row["in_loop"]


def _runs(rows: Iterable[Row]) -> Counter[tuple]:
    """How often matmuls of each size run."""
    found: Counter[tuple] = Counter()
    for row in rows:
        found[_key(row)] += row["runs"]
    return found


# Where and why ------------------------------------------------------------------------------------


def _reasons(seen: Inspection) -> Iterable[Reason]:
    """The program's reasons; a saved program has none."""
    return seen.reasons if seen.is_ours else ()


def _where(row: Row) -> str:
    _, m, n, k = row["size"]
    name = row["layer"] or f"the matmul {m} x {n} x {k}"
    times = f"{row['runs']} times" if row["runs"] > 1 else ""
    place = ", ".join(filter(None, (row["source"], times)))
    return visible(f"{name} ({place})" if place else name)


def _lost(row: Row, rate: int, seen: Inspection) -> str:
    """That a matmul lost FP8 or another type, and why."""
    if rate < _FP8:
        return f"{_where(row)} is multiplied in {row['type']}, and no longer in {_NAMES[rate]}"
    for reason in _reasons(seen):
        if reason.rule in row["rules"] and row["source"] in ("", reason.source):
            return f"{_where(row)} lost {_NAMES[rate]}, because {reason.reason} [{reason.rule}]"
    return f"{_where(row)} lost {_NAMES[rate]}"


def _places(figure: _Figure, before: Entry, after: Entry) -> str:
    """Of what there is more, what kernels do it, and where most of it is."""
    unit = figure.what
    if unit in MEMORY:
        return ""
    added: Counter[tuple[str, str]] = Counter()
    names: dict[tuple[str, str], str] = {}
    for entry, sign in ((before, -1), (after, 1)):
        for row in _work(entry, figure.in_loops):
            place = row["what"], row["layer"] or row["source"]
            added[place] += sign * row[unit]
            names[place] = ", ".join(filter(None, (row["layer"], row["source"])))
    said = []
    for what in CLASSES:
        there = [place for place in added if place[0] == what]
        total = sum(added[place] for place in there)
        if total > 0:
            count = str(total) if unit == "kernels" else size(total)
            name = names[max(there, key=lambda place: added[place])]
            said.append(f"{count} {what} ({name})" if name else f"{count} {what}")
    return visible(f": {', '.join(said[:_MOST_PLACES])}" if said else "")


def _new(figure: _Figure, before: Entry, after: Entry, seen: Inspection) -> str:
    """Of kernels, the first rule that is broken more often than it was. Why a matmul lost FP8 is
    said of the matmul.
    """
    if figure.what != "kernels":
        return ""
    was, now = (
        Counter(rule for row in entry["matmuls"] for rule in row["rules"])
        for entry in (before, after)
    )
    for reason in _reasons(seen):
        if now[reason.rule] > was[reason.rule] and reason.lost is not Lost.FP8:
            return f"; new is that {reason.reason} [{reason.rule}]"
    return ""
