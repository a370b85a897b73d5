"""Which matmuls of one function differ between two choices of who runs them: cuBLASLt alone, and
XLA's default.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

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

    def fields(self) -> list[dict[str, str]]:
        """For JSON: each matmul that differs, and how it is multiplied in both programs."""
        return [
            {"matmul": pair.title, "cublaslt": _how(pair.first), "auto": _how(pair.second)}
            for pair in self.pairs
        ]

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        kernels = " -> ".join(counted(one.kernels, "kernel") for one in (self.first, self.second))
        moved = " -> ".join(size(one.bytes_moved) for one in (self.first, self.second))
        heading = (
            f"XLA's default compiles {len(self.pairs)} of {counted(self.total, 'matmul')} in "
            f"another way; {kernels}, {moved} moved"
        )
        lines = []
        said = Counter(
            f"{one['matmul']}: {one['cublaslt']} -> {one['auto']}" for one in self.fields()
        )
        for line, times in said.items():
            many = f"{times} times " if times > 1 else ""
            lines += wrapped(f"{many}{line}", 2, 6)
        lines += wrapped(self.second.note, 2, 4)
        return "\n".join([style(heading, Ink.HEADING), *(style(line, None) for line in lines)])

    __repr__ = __str__


def differences(first: GemmReport, second: GemmReport) -> Differences:
    """The matmuls of two reports of one function that differ."""
    pairs: list[Pair] = []
    rows, others = list(first.rows), list(second.rows)
    for key in (_place_of, _work_of, _sizes_of):
        left = []
        for row in rows:
            other = next((other for other in others if key(other) == key(row)), None)
            if other is None:
                left.append(row)
            else:
                # Rows may be equal: this one itself goes.
                others = [one for one in others if one is not other]
                pairs.append(Pair(row, other))
        rows = left
    pairs += [Pair(row, None) for row in rows] + [Pair(None, other) for other in others]
    differ = tuple(pair for pair in pairs if _how(pair.first) != _how(pair.second))
    return Differences(differ, len(pairs), first, second)


def _sizes_of(row: GemmRow) -> tuple:
    """What is alike in both programs, whichever operand comes first."""
    return *sorted((row.m, row.n)), row.k, row.batch


def _place_of(row: GemmRow) -> tuple:
    return _sizes_of(row), row.op_name, row.source


def _work_of(row: GemmRow) -> tuple:
    """The same of a matmul that one program divides along K."""
    return row.flops, row.op_name, row.source
