"""A table of coloured cells for the chapters: HTML, so that it takes the page's own type, and its
labels wrap where a phone is narrow.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from helpers.figures.palette import PALETTE
from helpers.figures.plots import ink_on

BEST, GOOD, POOR, BROKEN = PALETTE[0], PALETTE[5], PALETTE[4], "#555555"
"""Colours of kinds of cells. A kind without a colour is None: its text stands on the page."""

# Where a long name may end a line: behind _ and before a capital letter.
_ENDS = re.compile(r"(?<=_)(?=\w)|(?<=[a-z0-9])(?=[A-Z][a-z])")
_CELL = "padding: .15em .2em; border: 1px solid gray; text-align: center; vertical-align: middle"
_LABEL = (
    "padding: .15em .5em .15em 0; text-align: left; font-weight: normal; vertical-align: middle"
)
_HEAD = "padding: .15em .2em; text-align: center; font-weight: normal; vertical-align: bottom"
_NEXT = "padding-left: .6em"  # of what stands beside another column
_WHOLE, _LONG = f"white-space: nowrap; {_NEXT}", f"min-width: 18em; {_NEXT}"
_NAME = "min-width: 7em"
_SHORT = 32  # letters: what is longer goes over several lines
_GROUP = "padding: .7em 0 .15em; text-align: left; font-weight: bold"


class Cell(NamedTuple):
    """What stands in a cell, of which kind it is, and whether it is told apart from the others."""

    kind: str
    text: str
    bold: bool = False


Rows = Sequence[tuple[str, Sequence[Cell] | None]]
"""Each row's name and its cells; None below a name that is a heading."""


class Grid:
    """A table of cells as HTML, and `alt` where there is no HTML: a sentence, or its text."""

    def __init__(self, html: str, alt: str):
        self.html, self.alt = html, alt

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.alt}


def grid(
    rows: Rows,
    columns: Sequence[tuple[str, str]],
    kinds: Mapping[str, str | None],
    alt: str,
    title: str = "",
) -> Grid:
    """A table. `columns` are labels, (group, label), of which neighbours of the same group have one
    heading. `kinds` are the kinds of cells and their colours; the kinds that have one are explained
    above the cells.
    """
    lines = ['<table style="font-size: .75rem">']
    if title:
        lines.append(_line(escape(title), _GROUP, columns))
    lines.append(_line(_legend(kinds, rows), _LABEL, columns))
    if any(group for group, _ in columns):
        lines.append(f"<tr><td></td>{_groups(columns)}</tr>")
    heads = "".join(_th(label, _HEAD) for _, label in columns)
    lines.append(f"<tr><td></td>{heads}</tr>")
    for name, cells in rows:
        if cells is None:
            lines.append(_line(escape(name), _GROUP, columns))
        else:
            drawn = "".join(_td(cell, kinds[cell.kind]) for cell in cells)
            lines.append(f"<tr>{_th(name, _LABEL)}{drawn}</tr>")
    return Grid("\n".join([*lines, "</table>"]), alt)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    kinds: Mapping[str, str | None] | None = None,
) -> Grid:
    """A table of texts, the first of a row its name. On the site a click on a column's head sorts
    it. A Cell has the colour of its kind, and `kinds` are those as in `grid`, explained below. As
    text it is in columns, a line for each row.
    """
    first, *others = (_lines(name) for name in columns)
    heads = f'<th scope="col">{first}</th>'
    heads += "".join(f'<th scope="col" style="{_NEXT}">{name}</th>' for name in others)
    lines = ['<table style="font-size: .8rem">']
    if kinds:
        named = [
            (str(name), [cell for cell in cells if isinstance(cell, Cell)]) for name, *cells in rows
        ]
        lines.append(f'<caption style="{_LABEL}">{_legend(kinds, named)}</caption>')
    lines += [f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    for name, *cells in rows:
        drawn = "".join(_plain_td(cell, kinds or {}) for cell in cells)
        lines.append(f'<tr><th scope="row" style="{_NAME}">{_lines(str(name))}</th>{drawn}</tr>')
    return Grid("\n".join([*lines, "</tbody></table>"]), _as_text([columns, *rows]))


def _as_text(rows: Sequence[Sequence[str | Cell]]) -> str:
    """Rows of texts in columns."""
    texts = [[_text_of(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)
    return "\n".join(lines)


def _text_of(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _plain_td(cell: str | Cell, kinds: Mapping[str, str | None]) -> str:
    if isinstance(cell, Cell):
        return _td(cell, kinds[cell.kind])
    style = _WHOLE if len(cell) <= _SHORT else _LONG
    return f'<td style="{style}">{_lines(cell)}</td>'


def counted(cells: Sequence[Cell], kinds: Mapping[str, str | None]) -> str:
    """How many cells there are of each kind, in words."""
    numbers = {kind: sum(cell.kind == kind for cell in cells) for kind in kinds}
    said = ", ".join(f"{number} {kind}" for kind, number in numbers.items() if number)
    return f"{len(cells)} programs: {said}"


def _legend(kinds: Mapping[str, str | None], rows: Rows) -> str:
    """A swatch and its name for each coloured kind that occurs."""
    present = {cell.kind for _, cells in rows for cell in cells or ()}
    swatches = []
    for kind, colour in kinds.items():
        if colour and kind in present:
            box = f"background: {colour}; border: 1px solid gray; padding: 0 .7em"
            swatches.append(f'<span style="{box}">&nbsp;</span>&nbsp;{escape(kind)}')
    return "<br>".join(swatches)


def _groups(columns: Sequence[tuple[str, str]]) -> str:
    """Headings over neighbours of the same group."""
    spans: list[tuple[str, int]] = []
    for group, _ in columns:
        if spans and spans[-1][0] == group:
            spans[-1] = (group, spans[-1][1] + 1)
        else:
            spans.append((group, 1))
    style = f"{_HEAD}; font-weight: bold"
    return "".join(
        f'<th colspan="{span}" style="{style}">{escape(group)}</th>' for group, span in spans
    )


def _line(html: str, style: str, columns: Sequence[tuple[str, str]]) -> str:
    """A row of one cell that is as wide as the table."""
    return f'<tr><th colspan="{len(columns) + 1}" style="{style}">{html}</th></tr>'


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _th(text: str, style: str) -> str:
    return f'<th style="{style}">{_ENDS.sub("<wbr>", _lines(text))}</th>'


def _td(cell: Cell, colour: str | None) -> str:
    style = _CELL
    if colour:
        style += f"; background: {colour}; color: {ink_on(colour)}"
    if cell.bold:
        style += "; font-weight: bold"
    return f'<td style="{style}">{_lines(cell.text)}</td>'
