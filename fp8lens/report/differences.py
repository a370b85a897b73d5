"""Which matmuls of one function differ between two choices of who runs them: cuBLASLt alone, and
XLA's default.
"""

import dataclasses
import html
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any, NamedTuple

from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import Ink, Style, counted, size, uncoloured, wrapped
from fp8lens.matmul.rows import GemmRow
from fp8lens.report.gemms import GemmReport


class Pair(NamedTuple):
    """One matmul in both programs; None where a program has no matmul like it."""

    first: GemmRow | None
    second: GemmRow | None

    @property
    def title(self) -> str:
        """The sizes and the line of the program."""
        row = self.first or self.second
        assert row  # one of them is there
        many = f"{row.batch} of " if row.batch > 1 else ""
        where = f" at {row.source}" if row.source else ""
        return visible(f"{many}{row.m} x {row.n} x {row.k}{where}")

    @property
    def is_difference(self) -> bool:
        """Whether another kernel multiplies, or in another type."""
        return _how(self.first) != _how(self.second)

    def __str__(self) -> str:
        return f"{self.title}: {_how(self.first)} -> {_how(self.second)}"


def _how(row: GemmRow | None) -> str:
    """In which type a matmul is multiplied, by what."""
    if row is None:
        return "no such matmul"
    epilogue = "" if row.epilogue == "DEFAULT" else f" {row.epilogue}"
    outside = f", outside: {', '.join(sorted({*row.outside}))}" if row.outside else ""
    return visible(f"{row.math_dtype} by {row.library}{epilogue}{outside}")


@dataclasses.dataclass(frozen=True, repr=False)
class Differences:
    """The matmuls that differ, of how many, and the two reports, of cuBLASLt alone and of XLA's
    default. Prints as one line for each matmul; those that are alike share a line.
    """

    pairs: tuple[Pair, ...]
    total: int
    first: GemmReport
    second: GemmReport

    def fields(self) -> list[dict[str, Any]]:
        """For JSON: each matmul that differs, and how it is multiplied in both programs."""
        return [
            {"matmul": pair.title, "cublaslt": _how(pair.first), "auto": _how(pair.second)}
            for pair in self.pairs
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        total = counted(self.total, "matmul")
        kernels = [counted(report.kernels, "kernel") for report in (self.first, self.second)]
        moved = [size(report.bytes_moved) for report in (self.first, self.second)]
        heading = (
            f"XLA's default compiles {len(self.pairs)} of {total} in another way; "
            f"{kernels[0]} -> {kernels[1]}, {moved[0]} -> {moved[1]} moved"
        )
        lines: list[tuple[str, Ink | None]] = [(heading, Ink.HEADING)]
        for said, times in Counter(map(str, self.pairs)).items():
            many = f"{times} times " if times > 1 else ""
            lines += [(line, None) for line in wrapped(f"{many}{said}", 2, 6)]
        lines += [(line, None) for line in wrapped(self.second.note, 2, 4)]
        return "\n".join(style(line, ink) for line, ink in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def differences(first: GemmReport, second: GemmReport) -> Differences:
    """The matmuls of two reports of one function that differ."""
    pairs: list[Pair] = []
    rows, others = list(first.rows), list(second.rows)
    for key in (_place_of, _work_of, _sizes_of):
        candidates: dict[Hashable, list[GemmRow]] = defaultdict(list)
        for other in others:
            candidates[key(other)].append(other)
        left = []
        for row in rows:
            if candidates[key(row)]:
                pairs.append(Pair(row, candidates[key(row)].pop(0)))
            else:
                left.append(row)
        rows, others = left, [other for one in candidates.values() for other in one]
    pairs += [Pair(row, None) for row in rows] + [Pair(None, other) for other in others]
    differ = tuple(pair for pair in pairs if pair.is_difference)
    return Differences(differ, len(pairs), first, second)


def _sizes_of(row: GemmRow) -> Hashable:
    """What is alike in both programs, whichever operand comes first."""
    return *sorted((row.m, row.n)), row.k, row.batch


def _place_of(row: GemmRow) -> Hashable:
    return _sizes_of(row), row.op_name, row.source


def _work_of(row: GemmRow) -> Hashable:
    """The same of a matmul that one program divides along K."""
    return row.flops, row.op_name, row.source
