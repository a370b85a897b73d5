"""How HLO is printed: what the program computes, without what differs between runs and machines;
and how any table or sentence fits the width of a page.
"""

import contextlib
import contextvars
import enum
import functools
import html
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module, visible

INDENT = " " * 6  # of an instruction's second line
WIDTH = 100  # columns: what JupyterLab, the site and a narrow terminal show without scrolling
_wide = contextvars.ContextVar("_wide", default=WIDTH)
# Attributes that say how the module was made or repeat what the line says already.
MODULE_NOISE = {
    "is_scheduled",
    "frontend_attributes",
    "allow_spmd_sharding_propagation_to_parameters",
    "allow_spmd_sharding_propagation_to_output",
}
NOISE = {
    "metadata",
    "backend_config",
    "frontend_attributes",
    "operand_layout_constraints",
    "api_version",
    "statistics",
    "origin",
}
SPLIT_AXIS = re.compile(r"devices=\[|=(?:[2-9]|\d\d)")  # a sharding over more than one device
_LAYOUT = re.compile(r"(\b\w++\[([^\[\]]*+)\])\{([\d,]*+)\}")
# A string that does not end goes on to the end: else each quote would look for it.
_STRING = r'"(?:[^"\\]|\\[\s\S]?)*+"?'
_PLAIN_LIST = re.compile(r"\[\n[^][{}]*\n *\]")
_PIECE = re.compile(rf'(?: (?=source_file=))?(?:{_STRING}|(?!, | source_file=)[^"])++(?:, )?', re.S)
_PAINT = re.compile(
    rf"(?P<target>(?<=custom_call_target=){_STRING})"
    rf"|(?P<other>{_STRING})"
    r"|(?P<keyword>^HloModule|^ENTRY|\bROOT\b)"
    r"|(?P<fp8>\bf[48]e\w+)"
    r"|(?P<literal>(?<=\bconstant\()[^{}()]+)"
    r"|(?P<opcode>(?<= )[a-z][a-z\d-]*(?=\())",
    re.M,
)
# (ANSI code, CSS). A page may set --hlo-... to inks for its own ground; else colours of a middle
# luminance, at least 4.5:1 against white and 3.8:1 against a dark theme's #111.
STYLES = {
    "target": ("1;35", "color:var(--hlo-target,#b544b9);font-weight:bold"),
    "keyword": ("1", "font-weight:bold"),
    "fp8": ("32", "color:var(--hlo-fp8,#2e8540)"),
    "literal": ("33", "color:var(--hlo-literal,#ab5d00)"),
    "opcode": ("34", "color:var(--hlo-opcode,#3a72d0)"),
}


def without_default_layout(text: str) -> str:
    """Row-major goes without saying; any other layout stays, since a transpose may hide in it.
    Index comments go.
    """

    def keep(m: re.Match) -> str:
        rank = m[2].count(",") + 1 if m[2] else 0
        row_major = ",".join(map(str, reversed(range(rank))))
        return m[1] if m[3] == row_major else m[0]

    return _LAYOUT.sub(keep, re.sub(r"/\*index=\d+\*/", "", text))


def wrap(text: str, indent: str) -> str:
    """Break at the commas between operands, attributes or tuple elements, never in a string."""
    lines = [""]
    unwrapped = re.sub(r",\n\s*", ", ", text)  # what was printed wrapped is wrapped anew
    for piece in _PIECE.findall(unwrapped):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > WIDTH:
            lines.append(indent + piece.lstrip())
        else:
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _json(value: Any, indent: str) -> str:
    """JSON on several lines, a list of plain values on one."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return _PLAIN_LIST.sub(lambda m: re.sub(r"\n *", " ", m[0]), text).replace("\n", f"\n{indent}")


@functools.lru_cache(maxsize=1024)
def _below(file: str, folder: str) -> str:
    below = os.path.join(folder, "")  # no Path: its time grows with the square of a path's parts
    if file.startswith(below) or not os.path.isabs(file):
        return file.removeprefix(below)
    return os.path.basename(file)


def source_path(file: str) -> str:
    """From an installed package's name on; else relative to the working directory where it is below
    it; else the bare file name; "cell" of a notebook's.
    """
    if installed := re.search(r"[/\\](?:site|dist)-packages[/\\](.+)", file):
        return installed[1].replace("\\", "/")
    if "ipykernel_" in file and Path(file).parent.name.startswith("ipykernel_"):
        return "cell"  # a folder of the kernel's process, a name that is a hash
    return _below(file, os.getcwd())


def says_something(key: str, value: str) -> bool:
    """Whether an instruction's attribute is worth a reader's time: no bookkeeping, and no sharding
    over one device.
    """
    if key == "sharding":
        return bool(SPLIT_AXIS.search(value))
    return key not in NOISE


def format_instruction(i: Instruction, metadata: bool, backend_cfg: bool) -> str:
    """One instruction as `print_hlo_module` has it, with its options; several lines, where it is
    wide.
    """
    inside = i.argument
    if i.opcode not in ("constant", "parameter"):
        inside = ", ".join(f"%{o}" for o in i.operands)
    root = "ROOT " if i.is_root else ""
    parts = [f"{root}%{i.name} = {without_default_layout(i.shape_text)} {i.opcode}({inside})"]
    parts += [f"{key}={value}" for key, value in i.attributes.items() if says_something(key, value)]
    if metadata and (where := _metadata(i)):
        parts.append(f"metadata={{{where}}}")
    line = wrap("  " + ", ".join(parts), INDENT)
    if not backend_cfg or "backend_config" not in i.attributes:
        return line
    config = i.backend_config
    shown = _json(config, INDENT) if isinstance(config, dict) else i.attributes["backend_config"]
    return f"{line},\n{INDENT}backend_config={shown}"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _metadata(i: Instruction) -> str:
    """The op_name and the source line, as far as the text has them."""
    fields, m = [], i.metadata
    if m and m.op_name:
        fields.append(f"op_name={_string(m.op_name)}")
    if m and m.source_file:
        fields.append(f"source_file={_string(source_path(m.source_file))}")
        fields.append(f"source_line={m.source_line}")
    return " ".join(fields)


def _lines(module: HloModule, metadata: bool, backend_cfg: bool) -> Iterator[str]:
    header = [
        f"{key}={value}" for key, value in module.attributes.items() if key not in MODULE_NOISE
    ]
    yield wrap(without_default_layout(", ".join([f"HloModule {module.name}", *header])), " " * 4)
    for c in module.computations.values():
        signature = " " + without_default_layout(c.signature) if c.signature else ""
        entry = "ENTRY " if c.is_entry else ""
        yield "\n" + wrap(f"{entry}%{c.name}{signature} {{", " " * 4)
        for i in c:
            yield format_instruction(i, metadata, backend_cfg)
        yield "}"


def format_hlo_module(x: Any, metadata: bool = False, backend_cfg: bool = False) -> str:
    """What `print_hlo_module` prints, as plain text. `parse_hlo_module` reads it again.

    Takes, and raises, what `parse_hlo_module` does.

    Example:

        >>> from fp8lens import format_hlo_module, parse_hlo_module
        >>> text = '''HloModule m
        ... ENTRY e {
        ...   x = f32[2,3]{1,0} parameter(0)
        ...   ROOT y = f32[2,3]{1,0} negate(x)
        ... }'''
        >>> again = format_hlo_module(text)
        >>> parse_hlo_module(again).name
        'm'
    """
    return "\n".join(_lines(parse_hlo_module(x), metadata, backend_cfg)) + "\n"


def parts(text: str) -> Iterator[tuple[str, str]]:
    """HLO in parts, each with the name of its style in STYLES, or ""."""
    end = 0
    for m in _PAINT.finditer(text):
        if end < m.start():
            yield text[end : m.start()], ""
        name = m.lastgroup or ""
        yield m[0], name if name in STYLES else ""
        end = m.end()
    if end < len(text):
        yield text[end:], ""


def coloured(text: str) -> str:
    """HLO as HTML."""
    shown = []
    for part, name in parts(text):
        escaped = html.escape(part, quote=False)
        shown.append(f'<span style="{STYLES[name][1]}">{escaped}</span>' if name else escaped)
    return "".join(shown)


def _ansi(part: str, code: str | None) -> str:
    return f"\033[{code}m{part}\033[0m" if code else part


def print_hlo_module(
    x: Any, metadata: bool = False, backend_cfg: bool = False, file: Any = None
) -> None:
    """Print HLO in a readable form, of anything that `parse_hlo_module` takes: the same text in
    every run, on every machine. Left out: row-major layouts, shardings over one device,
    fingerprints, file tables.

    metadata: show each instruction's op_name and the source line it comes from (the path relative,
    or left out). backend_cfg: show backend_config, such as a cuBLASLt call's epilogue, as indented
    JSON. file: where to write, plain unless it is a terminal; by default standard output, or the
    notebook's cell.

    Example:

        >>> from fp8lens import print_hlo_module
        >>> text = '''HloModule m
        ... ENTRY e {
        ...   x = f32[2,3]{1,0} parameter(0)
        ...   ROOT y = f32[2,3]{1,0} negate(x)
        ... }'''
        >>> print_hlo_module(text)
        HloModule m
        <BLANKLINE>
        ENTRY %e {
          %x = f32[2,3] parameter(0)
          ROOT %y = f32[2,3] negate(%x)
        }
    """
    text = format_hlo_module(x, metadata, backend_cfg)
    out = file or sys.stdout
    if file is None and (display := notebook_display()):
        # Both forms: notebooks and the site show the colours, diffs and text readers see text
        # without escape codes.
        body = f'<pre style="line-height:1.35">\n{coloured(text)}</pre>'
        display({"text/plain": text, "text/html": body}, raw=True)
        return
    if out.isatty():
        text = visible(text, keep="\n\t")  # the text may be anybody's
        if shows_colours(out):
            text = "".join(_ansi(part, name and STYLES[name][0]) for part, name in parts(text))
    out.write(text)


def shows_colours(file: Any) -> bool:
    """Whether a file is a terminal that shows colours, of somebody who has not set NO_COLOR
    (https://no-color.org).
    """
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    return file.isatty() and not is_dumb and not os.environ.get("NO_COLOR")


class Ink(enum.Enum):
    """What a part of a text says, where colours tell it; the value is the ANSI code."""

    HEADING = "1"
    LOST = "31"
    OUTSIDE = "36"
    FIX = "32"


# How a part of a text is written: by what it says, None where it is as the rest.
Style = Callable[[str, Ink | None], str]


def uncoloured(part: str, ink: Ink | None) -> str:
    """The style of a text without colours."""
    return part


def in_ansi_colours(part: str, ink: Ink | None) -> str:
    """The style for a terminal that shows colours; of the part itself, the terminal obeys
    nothing.
    """
    return _ansi(visible(part), ink and ink.value)


def notebook_display() -> Callable | None:
    """IPython's `display` where standard output is a notebook's cell, else None."""
    if not type(sys.stdout).__module__.startswith("ipykernel"):
        return None
    from IPython.display import display

    return display


def metric(x: float) -> str:
    """A number in three digits, with a prefix for its unit."""
    if x >= 1e18:
        return f"{Decimal(x):.2e} "  # of nested loops: more than a float holds
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if x >= scale:
            return f"{x / scale:.3g} {prefix}"
    return f"{x:.3g} "


def size(n: int) -> str:
    """Bytes, readable: 1 kB is 1000."""
    return f"{metric(n)}B"


def listed(names: Iterable[str], most: int = 3) -> str:
    """Names as a list, of which only the first are named."""
    names = list(names)
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(count: int, noun: str) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def page_width() -> int:
    """How many columns a line of a table or of a sentence may have: 100, if not within `page`."""
    return _wide.get()


@contextlib.contextmanager
def page(columns: int) -> Generator[None]:
    """Within it, tables and sentences take so many columns, where that is more than 100. HLO does
    not: it is the same text everywhere.
    """
    token = _wide.set(max(WIDTH, columns))
    try:
        yield
    finally:
        _wide.reset(token)


def columns(
    rows: Sequence[Sequence[str]],
    shown: Iterable[int],
    right: Collection[int],
    may_go: Iterable[int],
) -> tuple[list[str], list[int]]:
    """Rows of cells as lines of text, each column as wide as its widest cell, those of `right`
    flush; and the columns that were left out of the `shown`: those of `may_go`, one after the
    other, while a line is too wide.
    """
    left, gone = list(shown), []
    widths = {}
    for c in left:
        widths[c] = max(len(row[c]) for row in rows)

    def line(row: Sequence[str]) -> str:
        cells = (row[c].rjust(widths[c]) if c in right else row[c].ljust(widths[c]) for c in left)
        return "  ".join(cells).rstrip()

    for c in may_go:
        if c in left and max(len(line(row)) for row in rows) > page_width():
            left.remove(c)
            gone.append(c)
    return [line(row) for row in rows], sorted(gone)


def wrapped(line: str, first: int = 0, later: int = 0) -> list[str]:
    """A sentence in lines that are not too wide, so far indented; no word is broken."""
    return textwrap.wrap(
        line,
        page_width(),
        initial_indent=" " * first,
        subsequent_indent=" " * later,
        break_long_words=False,
        break_on_hyphens=False,
    )


LOST, OUTSIDE = "rgba(213,94,0,.28)", "rgba(86,180,233,.22)"  # backgrounds, on white and on black


def html_table(
    header: Sequence[str], rows: Iterable[tuple[Sequence[str], str, Sequence[tuple[str, str]]]]
) -> str:
    """A table in HTML. Of each row: its cells, its background, and (line, background) for what
    stands below it.
    """
    style = "text-align:left;vertical-align:top"

    def shown(text: str) -> str:
        # Jupyter reads what stands between two dollars as TeX, but not in code.
        escaped = html.escape(text)
        return f"<code>{escaped}</code>" if "$" in text else escaped

    def cells(texts: Sequence[str], tag: str) -> str:
        return "".join(f'<{tag} style="{style}">{shown(text)}</{tag}>' for text in texts)

    lines = [f"<tr>{cells(header, 'th')}</tr>"]
    for texts, background, below in rows:
        tint = f' style="background:{background}"' if background else ""
        lines.append(f"<tr{tint}>{cells(texts, 'td')}</tr>")
        for line, background in below:
            tint = f";background:{background}" if background else ""
            cell = f'<td style="{style};padding-left:3em{tint}" colspan="{len(header)}">'
            lines.append(f"<tr>{cell}{shown(line)}</td></tr>")
    # folded, JupyterLab shows an output's first line: it says nothing
    return f"<table>\n{''.join(lines)}</table>"
