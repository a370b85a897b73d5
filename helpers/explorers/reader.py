"""What "Read my dump" asks of a dump, with fp8lens alone.

In a reader's browser this file runs in Pyodide, beside fp8lens and without the rest of `helpers`;
while the site is built, it runs here, for the answer that stands in the page. Everything that it
returns can be written as JSON. Texts of a dump are plain text in it, never markup: only `page` and
`listing_html` write HTML, and escape every text.

An instruction is addressed as "computation/instruction": two computations may use one name.
"""

import bisect
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fp8lens.dumps import NoText, choose, files_beside, flags, not_of_a_gpu, text_of
from fp8lens.formats import is_narrow
from fp8lens.hlo.diff import HloDiff, diff_hlo
from fp8lens.hlo.parse import (
    Computation,
    HloModule,
    HloParseError,
    Instruction,
    parse_hlo_module,
    visible,
)
from fp8lens.hlo.text import STYLES, counted, format_instruction, parts, size
from fp8lens.inspection import of_dump
from fp8lens.matmul import collectives, ledger
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import UnfusedKernel
from fp8lens.report import gemms

MOST_FOUND = 200  # lines that a search lists
MOST_HLO = 6_000_000  # characters of HTML for the HLO of a page that is saved
_NAME = re.compile(r"%([A-Za-z0-9_.\-]+)")
_DEFINES = re.compile(r"\s*(?:ROOT )?%?([A-Za-z0-9_.\-]+) = ")
_MAKES_FP8 = frozenset(("quantize", "scale", "dequantize"))
# What a kernel does of a matmul's work, in words.
WORK = {
    "fp8": "the dequantization of an operand",
    "transpose": "a transpose",
    "pad": "padding",
    "copy": "a copy of an operand",
    "scale": "a scale",
    "bias": "the bias",
    "epilogue": "the activation",
    "amax": "the amax",
    "output": "the clamp and the conversion of the result",
}
# The columns of the report that only a program for a GPU settles.
_JUDGED = frozenset(("multiplied in", "by", "epilogue"))
_INSTEAD = (
    "Give the file whose name ends in gpu_after_optimizations.txt, from the same dump. Here are "
    "only the matmuls and the HLO of this program."
)
Piece = tuple[str, str, str]  # a text, its style in STYLES or "", and where it leads or ""


def address(i: Instruction) -> str:
    """Where an instruction stands."""
    return f"{i.computation.name}/{i.name}"


def readable(text: str) -> str:
    """A dump's text, with what a reader would not see spelled out."""
    return visible(text, keep="\n")


# HLO in pieces ------------------------------------------------------------------------------------


def pieces(i: Instruction) -> list[Piece]:
    """An instruction as `print_hlo_module` has it. Its own name leads to itself, an operand's to
    what makes it, a computation's to that.
    """
    found: list[Piece] = []
    for part, style in parts(readable(_text(i))):
        if style:
            found.append((part, style, ""))
            continue
        end = 0
        for name in _NAME.finditer(part):
            if target := _target(i, name[1]):
                found += [(part[end : name.start()], "", ""), (name[0], "", target)]
                end = name.end()
        found.append((part[end:], "", ""))
    return [piece for piece in found if piece[0]]


def _text(i: Instruction) -> str:
    """An instruction as it is printed; as it was dumped, where its attributes cannot be read."""
    try:
        return format_instruction(i, False, False)
    except HloParseError:
        return f"  {i}"


def _called(i: Instruction) -> tuple[str, ...]:
    """The computations that an instruction names, as far as it can be read."""
    try:
        return i.called
    except HloParseError:
        return ()


def _target(i: Instruction, name: str) -> str:
    """Where a name in an instruction leads; "" where it is none of the module's."""
    if name in i.computation.module.computations and name in _called(i):
        return f"{name}/"
    other = i.computation.get(name)
    return address(other) if other else ""


def listing_html(module: HloModule, most: int = MOST_HLO, prefix: str = "hlo") -> str:
    """HLO as HTML that needs no script: each computation a fold, ENTRY open; names lead to what
    they name. Computations beyond `most` characters of HTML are left out, and counted. Two listings
    on one page need two prefixes.
    """
    computations = in_order(module)
    written: list[str] = []
    length = 0
    for computation in computations:
        fold = _fold_html(computation, prefix)
        length += len(fold)
        if length > most and written:
            break
        written.append(fold)
    skipped = len(computations) - len(written)
    if skipped:
        written.append(f"<p>{counted(skipped, 'further computation')} left out.</p>")
    return "\n".join(written)


def _fold_html(computation: Computation, prefix: str) -> str:
    lines = []
    for i in computation:
        text = "".join(_piece_html(piece, address(i), prefix) for piece in pieces(i))
        lines.append(f'<span id="{_anchor(address(i), prefix)}">{text}</span>')
    title = html.escape(f"{heading(computation)} ({counted(len(computation), 'instruction')})")
    is_open = " open" if computation.is_entry else ""
    body = "\n".join(lines)
    own = _anchor(f"{computation.name}/", prefix)
    return (
        f'<details{is_open} id="{own}"><summary><code>{title}</code></summary>'
        f'<pre style="line-height:1.35;overflow-x:auto" tabindex="0">\n{body}</pre></details>'
    )


def _anchor(at: str, prefix: str) -> str:
    return html.escape(f"{prefix}-{at}", quote=True)


def _piece_html(piece: Piece, own: str, prefix: str) -> str:
    text, style, to = piece
    shown = html.escape(text)
    if style:
        return f'<span style="{STYLES[style][1]}">{shown}</span>'
    if to and to != own:
        return f'<a href="#{_anchor(to, prefix)}" style="color:inherit">{shown}</a>'
    return f"<b>{shown}</b>" if to else shown


def in_order(module: HloModule) -> list[Computation]:
    """ENTRY, and the others in the order of the text."""
    others = [c for c in module.computations.values() if c is not module.entry]
    return [module.entry, *others]


def heading(computation: Computation) -> str:
    """A computation's name, in HLO's own words."""
    return f"ENTRY %{computation.name}" if computation.is_entry else f"%{computation.name}"


# One dump -----------------------------------------------------------------------------------------


class Program:
    """A dump that was read. `tell` is called with what is done next."""

    def __init__(
        self,
        name: str,
        text: str,
        tell: Callable[[str], None] = lambda what: None,
        beside: Mapping[str, str] | None = None,
    ):
        self.name = name
        tell("Reading the HLO")
        self.module = parse_hlo_module(text)
        self.seen = of_dump(self.module, name, beside)
        tell("Finding the matmuls and what is around them")
        _ = self.seen.unfused
        tell("Accounting for every kernel")
        _ = self.seen.ledger
        tell("Finding what is sent between devices")
        _ = self.seen.collectives
        if self.seen.has_reasons:
            tell("Looking for the reasons")
            _ = self.seen.reasons
        self.note = not_of_a_gpu(name, self.module)
        #: Whether it says what a GPU runs: else no verdict, type or kernel is told.
        self.is_judged = not self.note

    def summary(self) -> dict[str, Any]:
        """What the page shows first."""
        return {
            "name": readable(self.name),
            "module": readable(self.module.name),
            "isJudged": self.is_judged,
            "note": "" if self.is_judged else _INSTEAD,
            "answer": self.answer(),
            "totals": self._totals(),
            "instructions": len(self.module),
            "computations": len(self.module.computations),
            "report": {"head": gemms.HEADER, "rows": [*self._report()]},
            "lost": [*self._lost()],
            "reasons": self._reasons(),
            "flags": flags(self.module),
            "classes": self.seen.ledger.totals() if self.is_judged else [],
            "kernels": len(self.ledger),
            "sent": self._sent(),
        }

    def _sent(self) -> dict[str, Any]:
        """What devices send each other, as a table."""
        if not self.is_judged:
            return {"head": collectives.HEADER, "rows": [], "totals": self.answer()}
        sent = self.seen.collectives
        rows = []
        for one, row, more in sent.rows():
            found = next((i for i in self.module.entry if i.name == one.name), None)
            at = address(found) if found else ""
            rows.append({"cells": row, "at": at, "below": list(map(readable, more))})
        totals = readable(sent.totals()) if sent else "No collectives."
        return {"head": collectives.HEADER, "rows": rows, "totals": totals}

    def _totals(self) -> str:
        """The matmuls, and what of them is in FP8, in one line."""
        if self.is_judged:
            return readable(self.seen.report.totals())
        return f"{counted(len(self.seen.report.rows), 'matmul')}, as far as this program tells."

    @property
    def ledger(self) -> Sequence[Line]:
        """Its kernels; none where it does not say what a GPU runs."""
        return self.seen.ledger if self.is_judged else ()

    def answer(self) -> str:
        """In one sentence, what a reader wants to know first."""
        if not self.is_judged:
            return f"Unknown: this is {self.note}. It does not say what a GPU runs."
        rows = self.seen.report.rows
        if not rows:
            return "There is no matmul in this program."
        lost = [row for row in rows if not row.is_fp8]
        with_work = [row for row in rows if row.is_fp8 and row.outside]
        if lost:
            verb = "is" if len(lost) == 1 else "are"
            said = f"{len(lost)} of {counted(len(rows), 'matmul')} {verb} not in FP8"
        else:
            said = (
                f"All {counted(len(rows), 'matmul')} are in FP8"
                if len(rows) > 1
                else ("The one matmul is in FP8")
            )
        if with_work:
            verb = "leaves" if len(with_work) == 1 else "leave"
            said += f"; {len(with_work)} in FP8 {verb} work to other kernels"
        return f"{said}."

    def _report(self) -> Iterator[dict[str, Any]]:
        for line in self.seen.report.alike():
            if not self.is_judged:
                yield self._unjudged(line)
                continue
            yield {
                "cells": line.cells,
                "at": address(line.row.instruction),
                "isFp8": line.row.is_fp8,
                "below": [
                    {"text": readable(more.text), "isOutside": more.kind is gemms.Below.OUTSIDE}
                    for more in line.further
                ],
            }

    def _unjudged(self, line: gemms.Alike) -> dict[str, Any]:
        """A matmul of which it is not known what a GPU makes of it."""
        known = zip(gemms.HEADER, line.cells, strict=True)
        cells = ["unknown" if name in _JUDGED else cell for name, cell in known]
        return {"cells": cells, "at": address(line.row.instruction), "isFp8": None, "below": []}

    # Why: as far as the compiled program alone tells ---------------------------------------------

    def _lost(self) -> Iterator[dict[str, Any]]:
        """Each matmul that is not FP8, or left work to other kernels, once for all that are alike:
        what its operands are, and which kernels work for it.
        """
        if not self.is_judged:
            return
        serving: dict[str, list[str]] = {}
        for line in self.seen.ledger:
            if line.what in _MAKES_FP8:
                for name in line.serves:
                    serving.setdefault(name, []).append(line.name)
        around = {row.instruction: kernels for row, kernels in self.seen.unfused}
        for alike in self.seen.report.alike():
            row = alike.row
            reasons = [] if row.is_fp8 else [why_not(row, serving.get(row.name, []))]
            kernels = [kernel for kernel in around[row.instruction] if kernel.work]
            if not reasons and not kernels:
                continue
            yield {
                "title": readable(row.title),
                "at": address(row.instruction),
                "source": readable(row.source),
                "isFp8": row.is_fp8,
                "runs": alike.cells[0],
                "reasons": reasons,
                "kernels": [self._left(kernel) for kernel in kernels],
            }

    def _reasons(self) -> list[dict[str, Any]] | None:
        """XLA's rules that the program breaks, each once for all matmuls of which it says the same;
        None where the dump does not have what XLA's rewriter was given.
        """
        if not self.seen.has_reasons or not self.is_judged:
            return None
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for one in self.seen.reasons:
            key = (one.rule, str(one.lost), one.reason, one.fix)
            if key in found:
                found[key]["matmuls"] += 1
                continue
            instruction = self.module.entry.get(one.instruction)
            found[key] = {
                "matmul": readable(one.matmul),
                "at": address(instruction) if instruction else "",
                "source": readable(one.source),
                "lost": str(one.lost),
                "reason": readable(one.reason),
                "fix": readable(one.fix),
                "rule": one.rule,
                "matmuls": 1,
            }
        return [*found.values()]

    def _left(self, kernel: UnfusedKernel) -> dict[str, Any]:
        """A kernel that does what a matmul's call could have done."""
        work = ", ".join(WORK.get(name, name) for name in kernel.work)
        moved = self._bytes.get(kernel.instruction, 0)
        text = f"does work for it: {work} ({size(moved)})."
        if not kernel.avoidable:
            text += " It has other work too, so it would run anyway."
        return {
            "name": readable(kernel.instruction.name),
            "at": address(kernel.instruction),
            "text": text,
        }

    # Kernels --------------------------------------------------------------------------------------

    @cached_property
    def _by_bytes(self) -> list[Line]:
        return sorted(self.ledger, key=lambda line: -line.nbytes)

    def kernels(self, start: int = 0, count: int = 100, order: str = "bytes") -> dict[str, Any]:
        """A part of the ledger, by bytes or as the program runs them."""
        lines: Sequence[Line] = self._by_bytes if order == "bytes" else self.ledger
        most = max((line.nbytes for line in self._by_bytes[:1]), default=0)
        rows = []
        for line in lines[start : start + count]:
            share = line.nbytes / most if most else 0
            at = address(line.kernel.instruction)
            cells = tuple(map(readable, ledger.cells(line)))
            rows.append({"cells": cells, "at": at, "share": share})
        return {"head": ledger.HEADER, "rows": rows, "count": len(lines), "start": start}

    # HLO ------------------------------------------------------------------------------------------

    @cached_property
    def _order(self) -> list[Computation]:
        return in_order(self.module)

    @cached_property
    def _bytes(self) -> dict[Instruction, int]:
        return {line.kernel.instruction: line.nbytes for line in self.ledger}

    def computations(self, start: int = 0, count: int = 100) -> dict[str, Any]:
        """A part of the list of computations."""
        rows = [
            {"name": c.name, "title": readable(heading(c)), "length": len(c)}
            for c in self._order[start : start + count]
        ]
        return {"rows": rows, "count": len(self._order), "start": start}

    def listing(self, name: str, start: int = 0, count: int = 100, around: str = "") -> dict:
        """A part of a computation's instructions; `around`: the part in which one stands."""
        computation = self.module.computations[name]
        found = computation.get(around) if around else None
        if found:
            start = max(0, found.index - count // 4)
        rows = []
        for i in computation.instructions[start : start + count]:
            moved = self._bytes.get(i)
            shown = size(moved) if moved is not None else ""
            rows.append({"at": address(i), "pieces": pieces(i), "bytes": shown})
        title = readable(heading(computation))
        return {"title": title, "rows": rows, "count": len(computation), "start": start}

    def about(self, at: str) -> dict[str, Any]:
        """All that HLO says of one instruction: who makes its operands, who reads it."""
        i = self._instruction(at)
        computation = i.computation
        makers = [found for name in dict.fromkeys(i.operands) if (found := computation.get(name))]
        users = computation.users.get(i.name, [])
        facts = [*_facts(i), ("as dumped", str(i))]
        return {
            "at": at,
            "name": readable(i.name),
            "makers": [_near(other) for other in makers],
            "users": [_near(other) for other in users[:100]],
            "userCount": len(users),
            "callers": [_near(other) for other in self._callers(computation.name)[:100]],
            "called": [{"at": f"{name}/", "text": readable(f"%{name}")} for name in _called(i)],
            "facts": [(name, readable(text)) for name, text in facts],
        }

    def _instruction(self, at: str) -> Instruction:
        computation, _, name = at.partition("/")
        return self.module.computations[computation][name]

    def _callers(self, name: str) -> list[Instruction]:
        """The instructions that run a computation: found in the text, which is sooner than asking
        each of many.
        """
        found = []
        for m in re.finditer(rf"[={{ ,]%?{re.escape(name)}(?![A-Za-z0-9_.\-])", self.module.text):
            i = self._at(m.start())
            if i and name in _called(i) and i not in found:
                found.append(i)
        return found

    @cached_property
    def _starts(self) -> list[int]:
        return [c.start for c in self.module.computations.values()]

    def _line(self, at: int) -> str:
        """The line of the text in which a place is."""
        end = self.module.text.find("\n", at)
        begin = self.module.text.rfind("\n", 0, at) + 1
        return self.module.text[begin:] if end < 0 else self.module.text[begin:end]

    def _computation(self, at: int) -> Computation | None:
        """The computation in which a place of the text is."""
        place = bisect.bisect_right(self._starts, at) - 1
        return [*self.module.computations.values()][place] if place >= 0 else None

    def _at(self, at: int) -> Instruction | None:
        """The instruction in whose line a place of the text is."""
        defines, computation = _DEFINES.match(self._line(at)), self._computation(at)
        return computation.get(defines[1]) if defines and computation else None

    def find(self, words: str) -> dict[str, Any]:
        """The lines that have these words, capital or not, and how many there are."""
        text, words = self.module.text, words.strip()
        if text.isascii():  # else a letter's other case may be longer
            text, words = text.lower(), words.lower()
        rows: list[dict[str, str]] = []
        count, at = 0, text.find(words) if words else -1
        while at >= 0:
            if at >= self._starts[0]:
                count += 1
                if len(rows) < MOST_FOUND:
                    rows.append(self._found(at))
            end = text.find("\n", at)
            at = text.find(words, end) if end >= 0 else -1
        return {"rows": rows, "count": count}

    def _found(self, at: int) -> dict[str, str]:
        """A line that a search lists, and where it leads."""
        line, computation = self._line(at), self._computation(at)
        defines = _DEFINES.match(line)
        name = defines[1] if defines else ""
        assert computation  # the place is behind the first one's start
        return {"at": f"{computation.name}/{name}", "text": readable(line.strip()[:300])}

    # To keep --------------------------------------------------------------------------------------

    def json(self) -> str:
        """What `fp8lens --json` prints, with what was lost. Of a program that does not say what a
        GPU runs: the answer, and its matmuls with the type that they are multiplied in "unknown".
        """
        if self.is_judged:
            seen = json.loads(self.seen.json())
            return json.dumps({"file": self.name, **seen, "lost": [*self._lost()]}, indent=1)
        rows = [dict(zip(gemms.HEADER, row["cells"], strict=True)) for row in self._report()]
        told = {"file": self.name, "answer": self.answer(), "rows": rows}
        return json.dumps(told, indent=1)

    def page(self) -> str:
        """One HTML file with everything, which loads nothing and runs nothing."""
        title = html.escape(readable(f"{self.name}: {self.answer()}"))
        note = self.summary()["note"]
        sections = [*self._sections(), ("HLO", listing_html(self.module))]
        body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n{_POLICY}\n'
            f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
            f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{html.escape(note)}</p>\n"
            f"{body}\n</body></html>\n"
        )

    def _sections(self) -> list[tuple[str, str]]:
        """Title and HTML of each part of the page, but for the HLO."""
        if not self.is_judged:
            rows = [_row_html(row["cells"], "td") for row in self._report()]
            table = "".join([_row_html(gemms.HEADER, "th"), *rows])
            return [("Matmuls", f"<table>{table}</table>")]
        lost = "".join(f"<li>{_lost_html(one)}</li>" for one in self._lost())
        why = "".join(f"<li>{_reason_html(one)}</li>" for one in self._reasons() or ())
        return [
            ("Matmuls", self.seen.report._repr_html_()),
            *([("XLA's rules", f"<ul>{why}</ul>")] if why else []),
            ("Not in FP8, or with work outside", f"<ul>{lost}</ul>" if lost else "<p>None.</p>"),
            ("Kernels", self.seen.ledger._repr_html_()),
            ("Between devices", self.seen.collectives._repr_html_()),
        ]


def why_not(row: GemmRow, made: Sequence[str]) -> str:
    """Why a matmul is not FP8, as far as the compiled program tells. `made`: the kernels that make
    or widen FP8 for it.
    """
    lhs, rhs = is_narrow(row.lhs_dtype), is_narrow(row.rhs_dtype)
    if row.math_dtype == "unknown":
        return "A kernel of XLA's own multiplies FP8 operands; in which type, HLO does not say."
    if lhs and rhs:
        return (
            f"Both operands are stored in FP8, and the kernel multiplies in {row.math_dtype}: it "
            "widens them first."
        )
    if lhs or rhs:
        narrow, wide = ("left", row.rhs_dtype) if lhs else ("right", row.lhs_dtype)
        return (
            f"Only the {narrow} operand is stored in FP8; the other is {wide}. Tensor cores "
            "multiply FP8 only if both operands are FP8."
        )
    if made:
        return (
            f"Its operands are {row.lhs_dtype} and {row.rhs_dtype}, although {', '.join(made[:3])} "
            "makes or widens FP8 for it: the values are rounded to FP8 and multiplied in "
            f"{row.math_dtype}."
        )
    return (
        f"Its operands are {row.lhs_dtype} and {row.rhs_dtype}: nothing that reaches it is FP8. "
        "Either the program does not quantize them, or XLA rounded them inside another kernel."
    )


def _row_html(cells: Sequence[str], tag: str) -> str:
    shown = "".join(f"<{tag}>{html.escape(readable(cell))}</{tag}>" for cell in cells)
    return f"<tr>{shown}</tr>"


def _reason_html(one: dict[str, Any]) -> str:
    said = f"{one['matmul']} lost {one['lost']}: {one['reason']}. Fix: {one['fix']}."
    return f"{html.escape(said)} Rule <code>{html.escape(one['rule'])}</code>"


def _lost_html(lost: dict[str, Any]) -> str:
    kernels = [f"{kernel['name']} {kernel['text']}" for kernel in lost["kernels"]]
    said = " ".join([*lost["reasons"], *kernels])
    return f"<code>{html.escape(lost['title'])}</code> {html.escape(said)}"


def _facts(i: Instruction) -> Iterator[tuple[str, str]]:
    """Where an instruction comes from, and how its kernel is set up, as far as it can be read."""
    try:
        metadata, config = i.metadata, i.backend_config
    except HloParseError:
        return
    if metadata and metadata.op_name:
        yield "op_name", metadata.op_name
    if metadata and metadata.source_file:
        yield "source", f"{metadata.source_file}:{metadata.source_line}"
    if isinstance(config, dict):
        config = json.dumps(config, indent=1, ensure_ascii=False)
    if config:
        yield "backend_config", config


def _near(i: Instruction) -> dict[str, str]:
    return {"at": address(i), "text": readable(f"%{i.name} = {i.shape_text} {i.opcode}")[:200]}


# A page that is saved may be opened anywhere: it loads and runs nothing.
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:75rem;margin:1rem auto;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;display:block;overflow-x:auto}"
    "td,th{padding:.2rem .6rem}h1{font-size:1.3rem;overflow-wrap:anywhere}"
    "pre,code{font-size:.8rem}:target{background:#fc06}"
)


# What the page asks -------------------------------------------------------------------------------

_ADVICE = (
    "give the text that XLA dumps with --xla_dump_hlo_as_text, such as "
    "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt."
)
_COMMAND = "read it with the command fp8lens in a terminal."


class Reader:
    """Up to two dumps, "a" and "b", and what is asked of them."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self._beside: dict[str, bytes] = {}
        self._diff: tuple[tuple[Program, Program], HloDiff] | None = None

    def choose(self, files: str) -> str:
        """Of files, JSON of names and bytes: which to read, and a sentence, and which to `lay`
        beside it before; null if none.
        """
        sizes = json.loads(files)
        choice = choose(sizes)
        if choice is None:
            return "null"
        said = readable(str(choice))
        further = files_beside(choice.name, sizes)
        return json.dumps({"name": choice.name, "said": said, "beside": further})

    def lay(self, name: str, data: Any) -> None:
        """Have a file stand beside the dump that is read next."""
        self._beside[name] = data if isinstance(data, bytes) else data.to_bytes()

    def read(
        self, slot: str, name: str, data: Any, tell: Callable[[str], None] = lambda what: None
    ) -> str:
        """Read a dump. Returns as JSON its summary, or {"error": a sentence}. `data` are bytes, or
        JavaScript's, which are copied.
        """
        self.programs.pop(slot, None)
        self._diff = None
        further, self._beside = self._beside, {}
        try:
            if not isinstance(data, bytes):
                data = data.to_bytes()
            texts = {name: text_of(one) for name, one in further.items()}
            program = Program(name, text_of(data), tell, texts)
            summary = program.summary()
        except NoText as error:
            return self._error(f"{name} is {error}: {_ADVICE}")
        except HloParseError as error:
            return self._error(f"{name} is not one whole HLO module ({error}): {_ADVICE}")
        except MemoryError:
            return self._error(f"There is not enough memory for {name} in a browser: {_COMMAND}")
        except Exception as error:  # whatever is wrong with this program, the page says so
            told = f"{type(error).__name__}: {error}"
            return self._error(f"fp8lens itself failed ({told}). Please report this.")
        self.programs[slot] = program
        return json.dumps(summary)

    def _error(self, sentence: str) -> str:
        return json.dumps({"error": readable(sentence)})

    def ask(self, slot: str, what: str, arguments: str) -> str:
        """Ask a dump something; `arguments` and the answer are JSON."""
        if what == "compare":
            return json.dumps(self.compare(**json.loads(arguments)))
        if what not in ("kernels", "computations", "listing", "about", "find", "json", "page"):
            raise ValueError(f"nothing is known of {what!r}")
        return json.dumps(getattr(self.programs[slot], what)(**json.loads(arguments)))

    def compare(self, start: int = 0, count: int = 100) -> dict[str, Any]:
        """The totals of both dumps, and a part of where their HLO differs."""
        a, b = self.programs["a"], self.programs["b"]
        if self._diff is None or self._diff[0] != (a, b):
            self._diff = (a, b), diff_hlo(a.module, b.module)
        rows = [*_diff_rows(self._diff[1])]
        return {
            "names": [readable(p.name) for p in (a, b)],
            "totals": [*_totals(a, b)],
            "rows": rows[start : start + count],
            "count": len(rows),
            "changed": sum(row["isChanged"] for row in rows),
            "start": start,
        }


def _totals(a: Program, b: Program) -> Iterator[tuple[str, str, str]]:
    yield "matmuls", str(len(a.seen.report.rows)), str(len(b.seen.report.rows))
    for name, of in _JUDGED_TOTALS.items():
        one, other = (of(p.seen.report) if p.is_judged else "unknown" for p in (a, b))
        yield name, one, other


# What a comparison tells of programs that say what a GPU runs.
_JUDGED_TOTALS: dict[str, Callable[[gemms.GemmReport], str]] = {
    "of them in FP8": lambda report: str(len(report.fp8_rows)),
    "FLOPs in FP8": lambda report: f"{100 * report.fp8_flops_share:.1f}%",
    "kernels": lambda report: str(report.kernels),
    "bytes moved": lambda report: size(report.bytes_moved),
}


def _diff_rows(diff: HloDiff) -> Iterator[dict[str, Any]]:
    for title, rows in diff.sections:
        yield {"title": readable(title), "isChanged": False}
        for row in rows:
            a, b = (_coloured(text) if text else None for text in (row.a, row.b))
            yield {"a": a, "b": b, "isChanged": row.changed}


def _coloured(text: str) -> list[Piece]:
    return [(part, style, "") for part, style in parts(readable(text))]
