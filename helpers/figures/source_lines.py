"""Which kernel does which line of a program: for chapters, and for the fusion lab.

XLA keeps the lines of the operations that it puts into kernels of its own. Of a library's call it
is known which operations around the dot are in it: see `fp8lens.rules.chain`.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from inspect import getsourcelines
from textwrap import dedent
from typing import Any

from fp8lens import Inspection, inspect
from fp8lens.hlo.ops import SCALING, VIEWS
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.text import counted, size
from fp8lens.hlo.values import since
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import operations
from fp8lens.rules.facts import Matmul
from helpers.explorers.reader import WORK
from helpers.figures.palette import PALETTE

UNKNOWN = -1
_NO_WORK = VIEWS | frozenset("parameter constant tuple iota broadcast copy".split())
_CLASSES = {
    "rest": "other work",
    "move": "moves data",
    "scale": "makes a scale or an amax",
    "quantize": "quantizes",
    "dequantize": "dequantizes",
    "after": "works on the result",
}
_LIBRARIES = {"cublasLt": "cuBLASLt", "triton": "Triton"}

# Of matmuls in FP8 and in a wider type, and of XLA's own kernels, which take turns.
_MATMULS = {"fp8": PALETTE[0], "wide": PALETTE[1]}
_OTHERS = (PALETTE[4], PALETTE[3], PALETTE[2], PALETTE[5])
_CELL = "text-align: left; vertical-align: top; padding: .15em .6em"


# What became of a program -------------------------------------------------------------------------


def kernels_of_lines(seen: Inspection, file: str, within: range) -> dict[int, set[int]]:
    """For each of a file's lines `within` a range that has work to do, the numbers of the kernels
    that do it, from 0, in the order of the ledger; and UNKNOWN, where that is not known of a part.
    """
    calls = {m.row.instruction: m for m in seen.matmuls}
    found: dict[int, set[int]] = defaultdict(set)
    done: set[tuple[int, str]] = set()
    for number, kernel in enumerate(seen.ledger):
        i = kernel.kernel.instruction
        does = _in_call(calls[i]) if i.opcode == "custom-call" and i in calls else operations(i)
        for at in filter(_is_work, does):
            line = _line(at, file, within)
            found[line].add(number)
            done.add((line, at.opcode))
    for i in filter(_is_work, seen.given.entry):
        line = _line(i, file, within)
        if (line, i.opcode) not in done:
            found[line].add(UNKNOWN)
    found.pop(0, None)
    return dict(found)


def _in_call(m: Matmul) -> list[Instruction]:
    """The operations of the given program that a library's call does: the dot, what dequantizes its
    operands, and what it does with the result.
    """
    if m.dot is None:
        return [m.row.instruction]
    steps = [step for step in m.steps if step not in m.left]
    behind = [i for step in steps for i in (*since(step.value, step.at), step.at)]
    paths = [side.path[1:] for side in m.sides] if m.row.is_fp8 else []
    in_front = [i for path in paths for i in path if i.opcode in SCALING | {"convert"}]
    return [m.dot, *in_front, *behind]


def _is_work(i: Instruction) -> bool:
    """Whether an operation is more than a name, or a conversion of a scale."""
    return i.opcode not in _NO_WORK and not (i.opcode == "convert" and i.shape.size == 1)


def _line(i: Instruction, file: str, within: range) -> int:
    """The innermost of these lines that an instruction comes from; 0 where it is of none."""
    return next((line for name, line in i.frames if name == file and line in within), 0)


def outcome(seen: Inspection) -> dict[str, Any]:
    """What became of a program: whether its matmuls are FP8, and what each of its kernels is."""
    rows = {row.instruction: row for row in seen.report.rows}
    return {
        "fp8": all(row.is_fp8 for row in rows.values()),
        "math": ", ".join(sorted({row.math_dtype for row in rows.values()})),
        "bytes": seen.report.bytes_moved,
        "kernels": [_kernel(line, rows.get(line.kernel.instruction)) for line in seen.ledger],
    }


def _kernel(line: Line, row: GemmRow | None) -> dict[str, Any]:
    """A kernel as it is shown; `row` is the matmul that it is."""
    made: dict[str, Any] = {"name": line.name, "bytes": line.nbytes, "runs": line.runs}
    if row is None:
        work = ", ".join(WORK.get(name, name) for name in line.work)
        detail = _CLASSES.get(line.what, line.what)
        if line.work:
            detail = f"{work}; the call could do it" if line.avoidable else work
        return made | {"title": "XLA's own kernel", "detail": detail, "kind": "other"}
    library = _LIBRARIES.get(row.library, row.library)
    details = [f"epilogue {row.epilogue}"] if row.epilogue else []
    if row.amax:
        details.append("amax")
    title = f"{library}, multiplies {'FP8' if row.is_fp8 else row.math_dtype}"
    kind = "fp8" if row.is_fp8 else "wide"
    return made | {"title": title, "detail": ", ".join(details), "kind": kind}


def verdict(found: Mapping[str, Any]) -> tuple[str, str]:
    """The answer: whether it is FP8, and what it costs."""
    if "error" in found:
        return "It does not compile", found["error"]
    count = len(found["kernels"])
    kernels = "one kernel" if count == 1 else counted(count, "kernel")
    head = "FP8" if found["fp8"] else f"Not FP8: {found['math']}"
    return head, f"{kernels}, {size(found['bytes'])} moved"


# Shown --------------------------------------------------------------------------------------------


class Lines:
    """A program's code, each line with the numbers of the kernels that do it, from 1, and what each
    kernel is and moves: as HTML without classes and scripts, and as text. "?" is on a line of which
    it is not known which kernel does it. `inspection` is what else can be asked of the program.
    """

    def __init__(
        self,
        code: Sequence[str],
        steps: Sequence[Iterable[int]],
        found: Mapping[str, Any],
        inspection: Inspection | None = None,
    ):
        self.code, self.inspection = code, inspection
        self.marks = []
        for _, does in itertools.zip_longest(code, steps, fillvalue=()):
            self.marks.append(["?" if n == UNKNOWN else str(n + 1) for n in sorted(does)])
        self.head, self.rest = verdict(found)
        self.kernels = found.get("kernels", ())
        self.names = [": ".join(filter(None, (k["title"], k["detail"]))) for k in self.kernels]
        shown = set(itertools.chain.from_iterable(self.marks))
        for n in range(len(self.names)):
            if shown.isdisjoint((str(n + 1), "?")):
                self.names[n] += " (of no line above)"

    def __repr__(self) -> str:
        marks = [" ".join(some) for some in self.marks]
        width = max(map(len, marks))
        lines = [f"{self.head}: {self.rest}"]
        for mark, line in zip(marks, self.code, strict=True):
            lines.append(f"{mark:>{width}}  {line}".rstrip())
        for n, kernel in enumerate(self.kernels):
            lines.append(f"kernel {n + 1}, {size(kernel['bytes'])}: {self.names[n]}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        colours = _colours(self.kernels)
        lines = [_row("th", ("kernel", ""), ("line", ""))]
        for marks, line in zip(self.marks, self.code, strict=True):
            tags = "&nbsp;".join(_tag(mark, colours) for mark in marks)
            # No-break spaces: GitHub knows no style, and on a phone the line is to wrap.
            code = line.lstrip()
            indent = "&nbsp;" * (len(line) - len(code))
            text = f"<samp>{indent}{escape(code)}</samp>"
            lines.append(_row("td", (tags, ""), (text, _tint(marks, colours))))
        kernels = [_row("th", ("kernel", ""), ("moves", ""), ("is", ""))]
        for n, kernel in enumerate(self.kernels):
            tag, moved = _tag(str(n + 1), colours), size(kernel["bytes"])
            kernels.append(_row("td", (tag, ""), (moved, ""), (escape(self.names[n]), "")))
        head = f"<p><b>{escape(self.head)}</b>: {escape(self.rest)}</p>"
        return head + _table(lines) + (_table(kernels) if self.kernels else "")


def show_lines(fn: Callable, *args: Any, **options: Any) -> Lines:
    """The lines of a function, each with the kernels that do it; it is compiled as `inspect`
    compiles it. What a line's calls do is the line's.

    Raises what `inspect` raises, and OSError or TypeError for a function whose source is not known.
    """
    seen = inspect(fn, *args, **options)
    source, first = getsourcelines(fn)
    within = range(first, first + len(source))
    does = kernels_of_lines(seen, fn.__code__.co_filename, within)
    steps = [does.get(line, ()) for line in within]
    return Lines(dedent("".join(source)).splitlines(), steps, outcome(seen), seen)


def _colours(kernels: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A colour for each number of a kernel."""
    others = itertools.cycle(_OTHERS)
    return {
        str(number): _MATMULS.get(kernel["kind"]) or next(others)
        for number, kernel in enumerate(kernels, 1)
    }


def _tag(mark: str, colours: Mapping[str, str]) -> str:
    if mark not in colours:
        return f"<b>{mark}</b>"
    from helpers.figures.plots import ink_on  # what is recorded needs no matplotlib

    colour = colours[mark]
    style = f"background: {colour}; color: {ink_on(colour)}; padding: 0 .4em"
    return f'<b style="{style}">{mark}</b>'


def _tint(marks: Sequence[str], colours: Mapping[str, str]) -> str:
    """The ground of a line, in the colour of the last kernel that does it."""
    if not marks or marks[-1] not in colours:
        return ""
    red, green, blue = bytes.fromhex(colours[marks[-1]].removeprefix("#"))
    return f"; background: rgba({red}, {green}, {blue}, .12)"


def _row(tag: str, *cells: tuple[str, str]) -> str:
    """A row of a table; each cell's HTML, and its style besides the usual."""
    drawn = (f'<{tag} style="{_CELL}{style}">{html}</{tag}>' for html, style in cells)
    return f"<tr>{''.join(drawn)}</tr>"


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["<table>", *rows, "</table>"])
