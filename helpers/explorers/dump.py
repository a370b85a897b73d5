"""What "Read my dump" shows of its example before any script runs."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.explorers.reader import Program

EXAMPLE = Path(__file__).with_name("example.txt")


def answer() -> str:
    """The example's report, as HTML, in the words and classes that dump.mjs has too."""
    summary = Program(EXAMPLE.name, EXAMPLE.read_text(encoding="utf-8")).summary()
    return "\n".join(
        [
            "<noscript><p>To read a dump of your own here, this page needs scripts. In a terminal, "
            "<code>fp8lens dump.txt</code> says the same.</p></noscript>",
            "<p>Of its example, a layer with a gate, the page says:</p>",
            f'<p class="verdict">{html.escape(summary["answer"])}</p>',
            '<div class="scrolls" tabindex="0" role="region" aria-label="Matmuls">',
            f"{_table(summary['report'])}</div>",
            f'<p class="quiet">{html.escape(summary["totals"])}</p>',
            f"<ul>{''.join(map(_lost, summary['lost']))}</ul>",
        ]
    )


def _table(table: dict[str, Any]) -> str:
    head, rows = _row(table["head"], "th"), "".join(_rows(table))
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _rows(table: dict[str, Any]) -> Iterator[str]:
    for row in table["rows"]:
        yield _row(row["cells"], "td", "" if row["isFp8"] else "lost")
        for below in row["below"]:
            kind = "below outside" if below["isOutside"] else "below"
            text = html.escape(below["text"])
            yield f'<tr class="{kind}"><td colspan="{len(row["cells"])}">{text}</td></tr>'


def _row(cells: list[str], tag: str, kind: str = "") -> str:
    shown = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{kind}">{shown}</tr>'


def _lost(lost: dict[str, Any]) -> str:
    said = [*lost["reasons"]]
    said += [f"{kernel['name']} {kernel['text']}" for kernel in lost["kernels"]]
    return f"<li><code>{html.escape(lost['title'])}</code> {html.escape(' '.join(said))}</li>"
