"""Did I get the fused FP8 kernel? One row for every matrix multiplication of a program, with what
stayed outside.
"""

import dataclasses
import html
import string
from collections.abc import Sequence

from fp8lens.hlo.parse import HloModule, visible
from fp8lens.hlo.text import LOST, OUTSIDE, columns, html_table, metric, size, wrapped
from fp8lens.matmul.ledger import Ledger
from fp8lens.matmul.rows import GemmRow


@dataclasses.dataclass(frozen=True, repr=False)
class GemmReport:
    """Every matrix multiplication of a program, ENTRY's first. Prints as text, shows as a table in
    a notebook.

    `kernels` and `bytes_moved` count what the whole program launches and moves, loops as often as
    they run where that is known and else once; `kernels_for_fp8` and `bytes_for_fp8` those that
    make FP8 and undo it around the FP8 matmuls: the ledger has each. `opaque` names custom calls
    that are no matmuls to HLO: convolutions, hand-written kernels, other libraries; what they
    multiply, if anything, is not counted. `note` says what the program was compiled for, or why the
    rows are not a GPU's.
    """

    rows: tuple[GemmRow, ...]
    kernels: int = 0
    bytes_moved: int = 0
    kernels_for_fp8: int = 0
    bytes_for_fp8: int = 0
    opaque: tuple[str, ...] = ()
    note: str = ""

    @property
    def flops(self) -> int:
        """2*M*N*K of all rows, as often as they run."""
        return _flops(self.rows)

    @property
    def fp8_flops(self) -> int:
        """Those of `flops` that the hardware multiplies in an 8-bit float type."""
        return _flops(self.fp8_rows)

    @property
    def fp8_flops_share(self) -> float:
        """fp8_flops / flops, from 0 to 1; 0 for a program without a matrix multiplication."""
        return self.fp8_flops / self.flops if self.flops else 0.0

    @property
    def fp8_rows(self) -> tuple[GemmRow, ...]:
        return tuple(row for row in self.rows if row.is_fp8)

    def _lines(self) -> list[tuple[GemmRow, tuple[str, ...], list[str]]]:
        """(row, cells, further lines), rows alike in all they show but their layer taken together."""
        groups: dict[tuple, list[GemmRow]] = {}
        for row in self.rows:
            alike = dataclasses.replace(
                row,
                name="",
                outside=tuple(_bare(n) for n in row.outside),
                instruction=None,
                op_name="",
                count=None if row.count is None else 1,
            )
            groups.setdefault(alike, []).append(row)
        lines = []
        for rows in groups.values():
            counts, paths = (
                [row.count for row in rows],
                list(dict.fromkeys(row.path for row in rows if row.path)),
            )
            further = [
                f"in {', '.join(paths[:4])}" + f" and {len(paths) - 4} more" * (len(paths) > 4)
            ] * bool(paths)
            if rows[0].outside:
                each = " in each" if len(rows) > 1 else ""
                further.append(
                    f"outside{each}: {', '.join(rows[0].outside)}: {size(rows[0].outside_bytes)}"
                )
            lines.append(
                (rows[0], ("?" if None in counts else str(sum(counts)), *_cells(rows[0])), further)
            )
        return lines

    def _totals(self) -> str:
        share = (
            f"{100 * self.fp8_flops_share:.1f}%".replace("100.0%", "100%")
            if self.fp8_flops
            else "none"
        )
        text = f"{len(self.rows)} matmul{'s' * (len(self.rows) != 1)}, {len(self.fp8_rows)} in FP8"
        if self.rows:
            text += f" ({share} of {metric(self.flops)}FLOP)"
        text += (
            f"; {self.kernels} kernel{'s' * (self.kernels != 1)}, {size(self.bytes_moved)} moved"
        )
        if self.kernels_for_fp8:
            count, runs = (
                self.kernels_for_fp8,
                sum(1 if r.count is None else r.count for r in self.fp8_rows),
            )
            text += (
                f"; {size(self.bytes_for_fp8)} of it, in {count} kernel{'s' * (count != 1)}, to"
                " make and undo FP8"
            )
            text += f", for {runs} matmul{'s' * (runs != 1)}" if runs else ", for no FP8 matmul"
        if any(row.count is None for row in self.rows):
            text += "; loops of unknown length counted once"
        text += f"; not looked into: {', '.join(self.opaque)}" if self.opaque else ""
        return text + (f"\n{self.note}" if self.note else "")

    def __str__(self) -> str:
        lines = self._lines()
        table = [_HEADER, *(cells for _, cells, _ in lines)]
        shown = [c for c in range(len(_HEADER)) if c or any(row[0] != "1" for row in table[1:])]
        texts, left_out = columns(table, shown, (0, 1), [_SOURCE])
        text = []
        for one, row, (_, _, further) in (
            zip(texts, table, [(None, (), []), *lines]) if lines else ()
        ):
            text.append(one)
            if row is not _HEADER and left_out and row[_SOURCE]:
                further = [f"at {row[_SOURCE]}", *further]
            for line in further:
                text += wrapped(line, 4, 6)
        for line in self._totals().split("\n"):
            text += wrapped(line, 0, 2)
        return "\n".join(text)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (
                cells,
                "" if row.is_fp8 else LOST,
                [(line, OUTSIDE if line.startswith("outside") else "") for line in further],
            )
            for row, cells, further in self._lines()
        ]
        legend = "".join(
            f'<span style="background:{colour}">&nbsp;{text}&nbsp;</span> '
            for colour, text, there in (
                (LOST, "not FP8", any(not row.is_fp8 for row in self.rows)),
                (OUTSIDE, "work left outside", any(row.outside for row in self.rows)),
            )
            if there
        )
        totals = html.escape(self._totals()).replace("\n", "<br>")
        return html_table(_HEADER, rows) * bool(rows) + f"<p>{legend}{totals}</p>"


_HEADER = ("runs", "M x N x K", "operands", "multiplied in", "by", "epilogue", "result", "source")
_SOURCE = _HEADER.index("source")


def _cells(row: GemmRow) -> tuple[str, ...]:
    shape = f"{row.m} x {row.n} x {row.k}"
    operands = (
        row.lhs_dtype if row.lhs_dtype == row.rhs_dtype else f"{row.lhs_dtype}, {row.rhs_dtype}"
    )
    extras = [f"scales {''.join(row.scales)}"] * bool(row.scales) + [f"alpha {row.alpha:g}"] * (
        row.alpha != 1
    )
    extras += [f"beta {row.beta:g}"] * (row.beta != 0) + ["amax"] * row.amax
    extras += [f"precision {row.precision}"] * (row.precision != "DEFAULT") + [
        row.algorithm
    ] * bool(row.algorithm)
    return tuple(
        map(
            visible,
            (
                f"{row.batch} of {shape}" if row.batch > 1 else shape,
                operands,
                row.math_dtype,
                row.library + f" {row.tile}" * bool(row.tile),
                " ".join([row.epilogue, *extras]),
                row.out_dtype,
                row.source,
            ),
        )
    )


def _bare(name: str) -> str:
    return name.rstrip("." + string.digits)


def _flops(rows: tuple[GemmRow, ...]) -> int:
    return sum(row.flops * (1 if row.count is None else row.count) for row in rows)


def make_report(
    module: HloModule, rows: Sequence[GemmRow], ledger: Ledger, note: str, by_instructions: bool
) -> GemmReport:
    """The report of a module with these rows; `by_instructions`: its Triton kernels were judged by
    their PTX.
    """
    if not note and module.attributes.get("is_scheduled") != "true":
        note = "not optimized: these are the program's dots as written, not what a GPU runs"
    if not by_instructions and any(row.library == "triton" and row.is_fp8 for row in rows):
        note += (
            "; " * bool(note)
            + "of Triton's kernels, what the dot says: only the function's compile has their PTX"
        )
    spent = ledger.for_fp8
    return GemmReport(
        tuple(rows),
        ledger.kernels,
        ledger.bytes_moved,
        spent.kernels,
        spent.bytes_moved,
        tuple(line.name for line in ledger.of("opaque")),
        note,
    )
