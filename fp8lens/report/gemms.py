"""What the report shows: a row for every matrix multiplication of a program, with what stayed
outside of it, and the totals.
"""

import dataclasses
import html
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8lens.formats import E2M1, is_fp8
from fp8lens.hlo.origin import is_backward, source_line
from fp8lens.hlo.parse import HloModule, visible
from fp8lens.hlo.text import (
    LOST,
    OUTSIDE,
    Ink,
    Style,
    columns,
    counted,
    html_table,
    listed,
    metric,
    size,
    uncoloured,
    wrapped,
)
from fp8lens.matmul.collectives import Collective
from fp8lens.matmul.gradients import unscaled
from fp8lens.matmul.ledger import Ledger
from fp8lens.matmul.places import without_gradient
from fp8lens.matmul.rows import GemmRow

_FP8 = re.compile(r"\bf8e[345]m")  # not the scales of blocks, f8e8m0fnu
UNSCALED = "unscaled"  # the word that accepts a gradient in FP8 without a scale


class Further(NamedTuple):
    """A line below a row: the layers that the matmul is in, that a GPU refuses it, or the work that
    other kernels do."""

    text: str
    is_outside: bool = False


class Alike(NamedTuple):
    """A line of the table, for rows that are alike; `row` is the first of them. `cells` are those
    of HEADER.
    """

    row: GemmRow
    cells: tuple[str, ...]
    further: list[Further]


@dataclasses.dataclass(frozen=True, repr=False)
class GemmReport:
    """Every matrix multiplication of a program, ENTRY's first. Prints as text, shows as a table in
    a notebook.

    `kernels` and `bytes_moved` count what the whole program launches and moves. A loop counts as
    often as it runs, if that is known, else once. `kernels_for_fp8` and `bytes_for_fp8` count the
    kernels that make and undo FP8 for the FP8 matmuls; the ledger lists each. `opaque` names custom
    calls that HLO does not show as matmuls: convolutions, hand-written kernels, other libraries. If
    they multiply, that is not counted. `note` says what the program was compiled for, or why the
    rows are not those of a GPU. `optimized`: whether XLA has optimized the program; else the rows
    are the program's dots as written. `unscaled`: where a gradient becomes FP8 with neither a scale
    nor a clamp. `narrow`: what `kernels_for_fp8` make, "FP4" where the program has that and no FP8.
    `without_gradient`: the forward matmuls of a training step through which no
    gradient goes.
    """

    rows: tuple[GemmRow, ...]
    kernels: int = 0
    bytes_moved: int = 0
    kernels_for_fp8: int = 0
    bytes_for_fp8: int = 0
    opaque: tuple[str, ...] = ()
    note: str = ""
    optimized: bool = True
    unscaled: tuple[str, ...] = ()
    without_gradient: tuple[str, ...] = ()
    narrow: str = dataclasses.field(default="FP8", repr=False)

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
        """Those of `rows` that the hardware multiplies in an 8-bit float type."""
        return tuple(row for row in self.rows if row.is_fp8)

    def alike(self) -> list[Alike]:
        """Rows alike in all they show but their layer, taken together."""
        groups: dict[GemmRow, list[GemmRow]] = {}
        for row in self.rows:
            alike = dataclasses.replace(
                row,
                name="",
                outside=tuple(_bare(n) for n in row.outside),
                instruction=self.rows[0].instruction,  # is not compared
                op_name="",
                count=None if row.count is None else 1,
            )
            groups.setdefault(alike, []).append(row)
        return [_line(rows) for rows in groups.values()]

    def totals(self) -> str:
        """What the last lines say, as one sentence."""
        kinds = Counter("FP8" if is_fp8(row.math_dtype) else "FP4" for row in self.fp8_rows)
        found = sorted(kinds, reverse=True) or ["FP8"]
        narrow = " and ".join(f"{kinds[kind]} in {kind}" for kind in found)
        text = f"{counted(len(self.rows), 'matmul')}, {narrow}"
        if self.rows:
            share = f"{100 * self.fp8_flops_share:.1f}%".replace("100.0%", "100%")
            text += f" ({share if self.fp8_flops else 'none'} of {metric(self.flops)}FLOP)"
        text += f"; {counted(self.kernels, 'kernel')}, {size(self.bytes_moved)} moved"
        if self.kernels_for_fp8:
            served_runs = sum(map(runs, self.fp8_rows))
            whose = " of XLA's" if self.opaque else ""
            served = counted(served_runs, "matmul") if served_runs else f"no FP8 matmul{whose}"
            text += (
                f"; {size(self.bytes_for_fp8)} of it, in "
                f"{counted(self.kernels_for_fp8, 'kernel')}, to make and undo "
                f"{' and '.join(sorted(kinds, reverse=True)) or self.narrow}, for {served}"
            )
        stored = [row for row in self.rows if row.fp8_in_memory]
        if stored and self.optimized:
            saved = sum(row.fp8_in_memory * runs(row) for row in stored)
            types = " and ".join(dict.fromkeys(row.math_dtype for row in stored))
            text += f"; {size(saved)} of operands are FP8 in memory alone, multiplied in {types}"
        if any(row.count is None for row in self.rows):
            text += "; loops of unknown length counted once"
        if self.opaque:
            text += f"; not looked into: {', '.join(self.opaque)}"
        return text

    def of_gradients(self) -> list[str]:
        """What is said of gradients that may be lost: a sentence for each sign of it."""
        said = []
        if self.unscaled:
            said.append(
                f"the gradient of {listed(self.unscaled)} becomes FP8 without a scale: what is too "
                "small for FP8 becomes 0 (chapter 09)"
            )
        if self.without_gradient:
            said.append(
                f"no gradient goes through {listed(self.without_gradient)}: a frozen layer, or "
                "behind it round(), integers or stop_gradient"
            )
        return said

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        lines = [style(line, None) for line in wrapped(self.note, 0, 2)]
        if self.rows:
            lines += self._table(style)
        for said in (self.totals(), *self.of_gradients()):
            lines += [style(line, None) for line in wrapped(said, 0, 2)]
        return "\n".join(lines)

    def _table(self, style: Style) -> Iterator[str]:
        lines = self.alike()
        table = [HEADER, *(line.cells for line in lines)]
        all_run_once = all(line.cells[0] == "1" for line in lines)
        shown = range(1 if all_run_once else 0, len(HEADER))
        (header, *texts), left_out = columns(table, shown, (0, 1), [_SOURCE])
        yield style(header, Ink.HEADING)
        for text, line in zip(texts, lines, strict=True):
            yield style(text, None if line.row.is_fp8 else Ink.LOST)
            further = line.further
            if left_out and line.row.source:
                further = [Further(f"at {line.cells[_SOURCE]}"), *further]
            for one in further:
                ink = Ink.OUTSIDE if one.is_outside else None
                yield from (style(part, ink) for part in wrapped(one.text, 4, 6))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for line in self.alike():
            below = [(one.text, OUTSIDE if one.is_outside else "") for one in line.further]
            rows.append((line.cells, "" if line.row.is_fp8 else LOST, below))
        legend = ""
        if any(not row.is_fp8 for row in self.rows):
            legend += _legend(LOST, "not FP8")
        if any(row.outside for row in self.rows):
            legend += _legend(OUTSIDE, "work left outside")
        table = html_table(HEADER, rows) if rows else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        said = " ".join((self.totals(), *(f"{one}." for one in self.of_gradients())))
        return f"{note}{table}<p>{legend}{html.escape(said)}</p>"


def _legend(colour: str, text: str) -> str:
    return f'<span style="background:{colour}">&nbsp;{text}&nbsp;</span> '


HEADER = ("runs", "M x N x K", "operands", "multiplied in", "by", "epilogue", "result", "source")
_SOURCE = HEADER.index("source")


def _line(rows: list[GemmRow]) -> Alike:
    """The line of rows that are alike."""
    row = rows[0]
    counts = [row.count for row in rows]
    times = "?" if None in counts else str(sum(map(runs, rows)))
    further = []
    has_passes = any(is_backward(row.op_name) for row in rows)
    paths = [*filter(None, dict.fromkeys(_place(row, has_passes) for row in rows))]
    if paths:
        further.append(Further(f"in {listed(paths, most=4)}"))
    if row.is_refused:
        further.append(Further("a GPU refuses to run this call: rule no-cublaslt-kernel"))
    if row.outside:
        each = " in each" if len(rows) > 1 else ""
        outside = f"outside{each}: {', '.join(row.outside)}: {size(row.outside_bytes)}"
        further.append(Further(outside, is_outside=True))
    return Alike(row, (times, *_cells(row)), further)


def _place(row: GemmRow, has_passes: bool) -> str:
    """The layer and the pass; "forward" of a row that has neither, where others have a pass."""
    is_forward = has_passes and row.op_name and not row.path
    return "forward" if is_forward else row.path


def _cells(row: GemmRow) -> tuple[str, ...]:
    """What a row shows, as HEADER names it, but for how often it runs."""
    shape = f"{row.m} x {row.n} x {row.k}"
    if row.batch > 1:
        shape = f"{row.batch} of {shape}"
    operands = row.lhs_dtype
    if row.rhs_dtype != row.lhs_dtype:
        operands += f", {row.rhs_dtype}"
    by = f"{row.library} {row.tile}" if row.tile else row.library
    epilogue = " ".join([row.epilogue, *_extras(row)])
    cells = (shape, operands, row.math_dtype, by, epilogue, row.out_dtype, row.source)
    return tuple(map(visible, cells))


def _extras(row: GemmRow) -> list[str]:
    """What a call does beside its epilogue, as far as it is not the default."""
    extras = {
        f"scales {''.join(row.scales)}": bool(row.scales),
        f"alpha {row.alpha:g}": row.alpha != 1,
        f"beta {row.beta:g}": row.beta != 0,
        "amax": row.amax,
        f"precision {row.precision}": row.precision != "DEFAULT",
        row.algorithm: bool(row.algorithm),
    }
    return [extra for extra, is_there in extras.items() if is_there]


def _bare(name: str) -> str:
    return name.rstrip("." + string.digits)


def runs(of: GemmRow | Collective) -> int:
    """How often a matmul or a collective runs; 1 where that is not known."""
    return 1 if of.count is None else of.count


def _flops(rows: tuple[GemmRow, ...]) -> int:
    return sum(row.flops * runs(row) for row in rows)


def make_report(
    module: HloModule, rows: Sequence[GemmRow], ledger: Ledger, note: str, by_instructions: bool
) -> GemmReport:
    """The report of a module with these rows; `by_instructions`: its Triton kernels were judged by
    their PTX.
    """
    # The order of the kernels is the last that XLA settles.
    optimized = module.attributes.get("is_scheduled") == "true"
    notes = [note] if note else []
    if not note and not optimized:
        notes.append("not optimized: these are the program's dots as written, not what a GPU runs")
    if not by_instructions and any(row.library == "triton" and row.is_fp8 for row in rows):
        notes.append(
            "of Triton's kernels, what the dot says: only the function's compile has their PTX"
        )
    spent = ledger.for_fp8
    return GemmReport(
        tuple(rows),
        ledger.kernels,
        ledger.bytes_moved,
        spent.kernels,
        spent.bytes_moved,
        tuple(line.name for line in ledger.of("opaque")),
        "; ".join(notes),
        optimized,
        tuple(dict.fromkeys(source_line(i) or i.name for i in unscaled(module))),
        tuple(f"{row.title} ({row.source})" for row in without_gradient(module, rows)),
        "FP4" if E2M1.name in module.text and not _FP8.search(module.text) else "FP8",
    )
