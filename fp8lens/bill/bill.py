"""What a program costs: memory, work, what is computed again, what FP8 alone needs, what is sent,
and the time that all of it takes at least; for one program, and for two beside each other.
"""

import dataclasses
import html
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from fp8lens.bill.memory import Memory
from fp8lens.bill.rates import Time, calibrated, launches
from fp8lens.formats import is_narrow
from fp8lens.hlo.origin import is_recomputed, op_name
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import (
    Ink,
    Style,
    columns,
    counted,
    html_table,
    metric,
    size,
    uncoloured,
    wrapped,
)
from fp8lens.matmul.collectives import Collectives
from fp8lens.matmul.ledger import CLASSES, Ledger, Line
from fp8lens.matmul.unfused import inside
from fp8lens.report.gemms import GemmReport, runs
from fp8lens.targets import Target

#: The totals of a bill and their units, in their order.
TOTALS = {
    "memory at the peak": "B",
    "memory allocated": "B",
    "kernels": "",
    "bytes moved": "B",
    "bytes moved to make FP8": "B",
    "bytes moved again": "B",
    "matmuls": "",
    "matmuls in FP8": "",
    "FLOPs": "FLOP",
    "FLOPs in FP8": "FLOP",
    "FLOPs again": "FLOP",
    "bytes sent": "B",
    "time at least": "s",
    "likely time": "s",
}
_LINES = ("line", "layer", "bytes moved", "for FP8", "again", "alive at the peak")
_TEXTS = (0, _LINES.index("layer"))  # of these columns; the others are numbers
_MOST_LINES = 12


@dataclasses.dataclass(frozen=True, repr=False)
class Bill:
    """What a program costs on each device.

    `memory` is None where XLA's plan of the buffers is not known, as of a saved program. "Again" is
    what runs once more in the backward pass because of `jax.checkpoint`. "Time at least" is the
    roofline of `chip`: the kernels one after the other, each as long as its bytes or its FLOPs
    take. "Likely time" is the same, at the share of the chip's peak or bandwidth that such kernels
    reached on an H200. Both are computed, not measured. `launches` comes on top of them.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> from fp8lens import inspect
        >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> bill = inspect(lambda x, w: jax.nn.relu(x @ w.T), x, x).bill
        >>> bill.totals["matmuls"], bill.memory.arguments
        (1, 4194304)
    """

    report: GemmReport
    ledger: Ledger
    collectives: Collectives
    chip: Target
    memory: Memory | None

    @cached_property
    def again(self) -> Ledger:
        """What runs once more for the backward pass because of `jax.checkpoint`: matmuls, if the
        first one runs too, and the kernels that quantize nothing but what it computes again.
        """
        matmuls = self.ledger.of("matmul")
        first = {_computes(line) for line in matmuls if not _is_recomputed(line)}
        return Ledger(
            line
            for line in self.ledger.of("matmul", "quantize")
            if _is_recomputed(line) and (line.what == "quantize" or _computes(line) in first)
        )

    @cached_property
    def sent(self) -> Mapping[tuple[str, str, str], int]:
        """The bytes that each device sends, by kind of collective, type and axis of the mesh."""
        found: dict[tuple[str, str, str], int] = defaultdict(int)
        for c in self.collectives:
            found[c.kind, c.dtype, c.axis] += c.bytes_sent * runs(c)
        return dict(found)

    @cached_property
    def seconds(self) -> float | None:
        """The time at least; None where the chip has no published rate for a type."""
        try:
            return sum(line.kernel.seconds(self.chip) * line.runs for line in self.ledger)
        except KeyError:
            return None

    @cached_property
    def calibrated(self) -> Time | None:
        """The time at the rates that each class of kernel reached on an H200 (`bill.rates`), with
        its range; None where a class or a type has none. It is computed, not measured.
        """
        return calibrated(self.ledger, self.chip)

    @cached_property
    def launches(self) -> Mapping[str, Time]:
        """How long the GPU waits for the kernels to start, by how they are launched: in CUDA
        graphs, or without. This comes on top of the other times. It is computed from published
        gaps, not measured.
        """
        return launches(self.ledger.kernels)

    @property
    def totals(self) -> dict[str, float]:
        """A number for each of TOTALS; those of memory are left out where it is not known."""
        found: dict[str, float] = {}
        if self.memory is not None:
            found["memory at the peak"] = self.memory.peak
            found["memory allocated"] = self.memory.total
        found |= {
            "kernels": self.ledger.kernels,
            "bytes moved": self.ledger.bytes_moved,
            "bytes moved to make FP8": self.ledger.for_fp8.bytes_moved,
            "bytes moved again": self.again.bytes_moved,
            "matmuls": sum(map(runs, self.report.rows)),
            "matmuls in FP8": sum(map(runs, self.report.fp8_rows)),
            "FLOPs": self.report.flops,
            "FLOPs in FP8": self.report.fp8_flops,
            "FLOPs again": sum(line.kernel.flops * line.runs for line in self.again),
            "bytes sent": sum(self.sent.values()),
        }
        if self.seconds is not None:
            found["time at least"] = self.seconds
        if self.calibrated is not None:
            found["likely time"] = self.calibrated.likely
        return found

    @property
    def by_line(self) -> dict[tuple[str, str], list[int]]:
        """Of each line and layer of the program: bytes moved, those that FP8 alone needs, those
        moved again, and what is alive at the peak; the most bytes first. Arguments are under
        ("", "").
        """
        found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for n, part in enumerate((self.ledger, self.ledger.for_fp8, self.again)):
            for line in part:
                found[line.source, line.layer][n] += line.nbytes
        for buffer in self.memory.alive if self.memory is not None else ():
            found[buffer.source, buffer.layer][3] += buffer.nbytes
        return dict(sorted(found.items(), key=lambda item: (-item[1][0], -item[1][3])))

    @property
    def summary(self) -> list[str]:
        """The totals, in sentences."""
        ledger, for_fp8, again = self.ledger, self.ledger.for_fp8, self.again
        said = [*(self.memory.summary if self.memory is not None else ())]
        if self.memory is not None and self.memory.peak > self.chip.memory_bytes:
            has = size(self.chip.memory_bytes)
            said.append(f"it does not fit into the memory of {self.chip.name}, {has}")
        kernels = counted(ledger.kernels, "kernel")
        move = "moves" if ledger.kernels == 1 else "move"
        said.append(
            f"work: {shown(self.report.flops, 'FLOP')} in matmuls, "
            f"{self.report.fp8_flops_share:.0%} of them in FP8; {kernels} {move} "
            f"{size(ledger.bytes_moved)}"
        )
        said.append(f"making {self.report.narrow}: {_part(for_fp8, ledger)}")
        if again:
            matmuls, quantized = (sum(x.runs for x in again.of(w)) for w in ("matmul", "quantize"))
            said.append(
                f"again for the backward pass: {counted(matmuls, 'matmul')}, "
                f"{counted(quantized, 'quantization')}: {_part(again, ledger)}"
            )
        for (kind, dtype, axis), nbytes in self.sent.items():
            what = visible(f"{size(nbytes)} of {dtype}, {kind} over {axis}")
            said.append(f"sent by each device: {what}")
        if self.seconds is not None:
            rates = ""
            if self.calibrated is not None:
                likely = _in_seconds(self.calibrated)
                rates = f"; {likely} at the rates that such kernels reached on an H200"
            said.append(
                f"time: at least {shown(self.seconds, 's')} on {self.chip.name}, by the roofline"
                f"{rates}; not measured"
            )
        waits = [f"{_in_seconds(time)} {how}" for how, time in self.launches.items()]
        said.append(
            f"launches: {counted(ledger.kernels, 'kernel')} at the gaps that others published for "
            f"H100 and B200: {', '.join(waits)}; on top of the times, not measured"
        )
        return said

    def _rows(self) -> Iterator[tuple[str, ...]]:
        lines = [*self.by_line.items()]
        for (source, layer), costs in lines[:_MOST_LINES]:
            name = source or ("" if layer else "arguments, and what has no line")
            yield (visible(name), visible(layer), *map(_size, costs))
        if rest := [costs for _, costs in lines[_MOST_LINES:]]:
            sums = map(sum, zip(*rest, strict=True))
            yield (counted(len(rest), "more line"), "", *map(_size, sums))

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, its heading in this style."""
        said = [style(line, None) for s in self.summary for line in wrapped(s, 0, 2)]
        return "\n".join([*said, "", *_table([_LINES, *self._rows()], _TEXTS, style)])

    __repr__ = __str__

    def json(self) -> str:
        """Totals, lines, memory, what is sent, and launches, as one JSON document."""
        memory = dataclasses.asdict(self.memory) if self.memory is not None else None
        names = ("bytes_moved", "for_fp8", "again", "alive_at_the_peak")
        lines = [
            {"source": source, "layer": layer, **dict(zip(names, costs, strict=True))}
            for (source, layer), costs in self.by_line.items()
        ]
        sent = [
            {"kind": kind, "dtype": dtype, "axis": axis, "bytes": nbytes}
            for (kind, dtype, axis), nbytes in self.sent.items()
        ]
        waits = {how: time._asdict() for how, time in self.launches.items()}
        document = {
            "totals": self.totals,
            "lines": lines,
            "memory": memory,
            "sent": sent,
            "launches": waits,
        }
        return json.dumps(document, indent=1)


def _is_recomputed(line: Line) -> bool:
    """Whether `jax.checkpoint` computes again what a kernel multiplies, or all that it converts to
    FP8.
    """
    made = [line.kernel.instruction]
    if line.what == "quantize":
        converts = [i for i in inside(made[0]) if i.opcode == "convert"]
        made = [i for i in converts if is_narrow(i.shape.dtype)] or made
    return all(is_recomputed(op_name(i)) for i in made)


def _computes(line: Line) -> tuple:
    """What a matmul computes: two that are alike in this do the same work of one line."""
    return line.source, line.layer, line.kernel.flops, line.kernel.math_dtype


def _part(part: Ledger, whole: Ledger) -> str:
    share = part.bytes_moved / whole.bytes_moved if whole.bytes_moved else 0
    return f"{counted(part.kernels, 'kernel')}, {size(part.bytes_moved)}, {share:.0%} of all bytes"


def _size(nbytes: float) -> str:
    return size(int(nbytes)) if nbytes else ""


def shown(number: float, unit: str) -> str:
    """A total as text: "1.2 GB", "3.4 TFLOP", "12", "1.5 ms"."""
    if unit != "s":
        return f"{metric(int(number))}{unit}" if unit else str(int(number))
    for factor, name in ((1, "s"), (1e3, "ms")):
        if number * factor >= 1:
            return f"{number * factor:.3g} {name}"
    return f"{number * 1e6:.3g} µs"


def _in_seconds(time: Time) -> str:
    """A time and its range: "2 ms (1 ms to 3 ms)"."""
    likely, *ends = (shown(seconds, "s") for seconds in time)
    return f"{likely} ({' to '.join(ends)})"


def _table(rows: list[tuple[str, ...]], texts: Collection[int], style: Style) -> list[str]:
    """Lines of a table, `rows[0]` its heading, without columns that are empty; those of `texts`
    begin at the left.
    """
    every = range(len(rows[0]))
    kept = [c for c in every if c == 0 or any(row[c] for row in rows[1:])]
    lines, _ = columns(rows, kept, {*every} - {*texts}, ())
    return [style(lines[0], Ink.HEADING), *(style(line, None) for line in lines[1:])]


# Two programs -------------------------------------------------------------------------------------


# Of something: its name, what the first program has of it and the second, and the unit.
_Figures = tuple[str, float, float, str]


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What two programs cost, and the second's cost as a multiple of the first's: mostly of one
    layer or step in bf16, then in FP8. Prints as text, shows as tables in a notebook.
    """

    first: Bill
    second: Bill
    names: tuple[str, str] = ("first", "second")

    @property
    def ratios(self) -> dict[str, float]:
        """The second's totals divided by the first's, where this has any."""
        one, two = self.first.totals, self.second.totals
        return {name: two[name] / one[name] for name in one if one[name] and name in two}

    def _tables(self) -> list[list[tuple[str, ...]]]:
        """The totals, and what they are made of: each table with its heading first."""
        tables = []
        for what, figures in (("total", self._totals()), ("part", self._parts())):
            rows: list[tuple[str, ...]] = [(what, *self.names, "ratio")]
            for name, one, two, unit in figures:
                if one or two:
                    ratio = f"{two / one:.2f}" if one else ""
                    rows.append((name, shown(one, unit), shown(two, unit), ratio))
            tables.append(rows)
        return tables

    def _totals(self) -> Iterator[_Figures]:
        one, two = self.first.totals, self.second.totals
        for name, unit in TOTALS.items():
            if name in one and name in two:
                yield name, one[name], two[name], unit

    @property
    def warning(self) -> str:
        """That the first program multiplies more in float32 than the second, which may make it
        slower than the baseline that was meant; "" if it does not.
        """
        wide = []
        for bill in (self.first, self.second):
            by_type = _by_type(bill)
            wide.append(sum(by_type[dtype] for dtype in _FLOAT32))
        if wide[0] <= wide[1]:
            return ""
        rows = [row for row in self.first.report.rows if row.math_dtype in _FLOAT32]
        types = " and ".join(sorted({row.math_dtype for row in rows}))
        given = {dtype for row in rows for dtype in (row.lhs_dtype, row.rhs_dtype)}
        operands = " and ".join(sorted(given))
        return (
            f"{self.names[0]} multiplies {shown(wide[0], 'FLOP')} in {types}, "
            f"{wide[0] / self.first.report.flops:.0%} of its FLOPs: the operands are {operands}. "
            "In bf16 it would be faster."
        )

    def _parts(self) -> Iterator[_Figures]:
        """FLOPs by the type multiplied in, bytes moved by class of kernel, and bytes alive at the
        peak by what they hold.
        """
        parts: list[tuple[str, str, Callable[[Bill], Mapping[str, int]]]] = [
            ("multiplied in", "FLOP", _by_type),
            ("moved by kernels:", "B", _by_class),
            ("alive at the peak:", "B", _by_kind),
        ]
        for title, unit, of in parts:
            one, two = of(self.first), of(self.second)
            for name in dict.fromkeys([*one, *two]):
                yield f"{title} {name}", one.get(name, 0), two.get(name, 0), unit

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, its headings in this style."""
        tables = ["\n".join(_table(table, (0,), style)) for table in self._tables()]
        warning = [style(line, Ink.LOST) for line in wrapped(visible(self.warning), 0, 2)]
        return "\n\n".join([*tables, *(["\n".join(warning)] if warning else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = [
            html_table(heading, ((row, "", ()) for row in rows))
            for heading, *rows in self._tables()
        ]
        warning = f"<p>{html.escape(self.warning)}</p>" if self.warning else ""
        return "".join([*tables, warning])

    def json(self) -> str:
        """Both bills and the ratios, as one JSON document."""
        bills = {
            name: json.loads(bill.json())
            for name, bill in zip(self.names, (self.first, self.second), strict=True)
        }
        return json.dumps(bills | {"ratios": self.ratios, "warning": self.warning}, indent=1)


_FLOAT32 = ("f32", "tf32")


def _by_type(bill: Bill) -> Counter[str]:
    """The FLOPs of the matmuls by the type that they are multiplied in."""
    found: Counter[str] = Counter()
    for row in bill.report.rows:
        found[row.math_dtype] += row.flops * runs(row)
    return found


def _by_class(bill: Bill) -> dict[str, int]:
    return {what: bill.ledger.of(what).bytes_moved for what in CLASSES}


def _by_kind(bill: Bill) -> Mapping[str, int]:
    return bill.memory.by_kind if bill.memory is not None else {}


def compare(first: Any, second: Any, names: tuple[str, str] = ("first", "second")) -> Comparison:
    """What two inspections cost, beside each other.

    `first` and `second` are what `fp8lens.inspect` returns; `names` are the columns' headings.

    Example:

        >>> import jax, jax.numpy as jnp
        >>> from fp8lens import compare, inspect
        >>> wide = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> narrow = jax.ShapeDtypeStruct((1024, 1024), jnp.float8_e4m3fn)
        >>> def product(x, w):
        ...     return jax.lax.dot(x, w.T, preferred_element_type=jnp.bfloat16)
        >>> both = compare(inspect(product, wide, wide), inspect(product, narrow, narrow))
        >>> round(both.ratios["bytes moved"], 2)
        0.67
    """
    return Comparison(first.bill, second.bill, names)
