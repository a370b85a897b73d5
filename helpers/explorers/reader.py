"""What "Read my dump" asks of a dump, with fp8lens alone.

In a reader's browser this file runs in Pyodide, beside fp8lens and without the rest of `helpers`;
while the site is built, it runs here, for the answer that stands in the page. Everything that it
returns can be written as JSON. Texts of a dump are plain text in it, never markup: only
`listing_html` writes HTML, and escapes every text.

An instruction is addressed as "computation/instruction": two computations may use one name.
"""

import html
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from fp8lens.dumps import NoText, choose, files_beside, flags, not_of_a_gpu, text_of
from fp8lens.formats import is_narrow
from fp8lens.hlo.parse import (
    Computation,
    HloModule,
    HloParseError,
    Instruction,
    parse_hlo_module,
    visible,
)
from fp8lens.hlo.text import STYLES, counted, format_instruction, listed, metric, parts, size
from fp8lens.inspection import of_dump
from fp8lens.matmul import collectives, ledger
from fp8lens.matmul.rows import GemmRow
from fp8lens.matmul.unfused import UnfusedKernel
from fp8lens.report import gemms
from fp8lens.report.gemms import runs

MOST_TEXT = 64_000_000  # bytes of text that are read, also if they are zipped, or gzipped twice
MOST_BESIDE = 2 * MOST_TEXT  # of all that says what XLA's rewriter was given
MOST_FOUND = 200  # lines that a search lists
MOST_HLO = 6_000_000  # characters of HTML for the HLO that a notebook shows
_NAME = re.compile(r"%([A-Za-z0-9_.\-]+)")
_MAKES_FP8 = frozenset(("quantize", "scale", "dequantize"))
# What a kernel does of a matmul's work, in words.
WORK = {
    "fp8": "the dequantization of an operand",
    "transpose": "a transpose",
    "pad": "padding",
    "scale": "a scale",
    "bias": "the bias",
    "epilogue": "the activation",
    "amax": "the amax",
    "output": "the conversion of the result",  # and its clamp, if there is one
}
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
    """A dump of a program that was compiled for a GPU. `tell` is called with what is done next."""

    def __init__(
        self,
        name: str,
        module: HloModule,
        tell: Callable[[str], None] = lambda what: None,
        beside: Mapping[str, bytes] | None = None,
    ):
        self.name = name
        self.module = module
        self.seen, self.wrong = of_dump(module, name, beside or {}, most=MOST_BESIDE)
        tell("Finding the matmuls and what is around them")
        _ = self.seen.unfused
        tell("Accounting for every kernel")
        _ = self.seen.ledger, self.seen.collectives
        if self.seen.has_reasons:
            tell("Looking for the reasons")
            _ = self.seen.reasons

    def summary(self) -> dict[str, Any]:
        """What the page shows but for the HLO."""
        sent = self.seen.collectives
        return {
            "name": self.name,
            "module": self.module.name,
            "answer": self.answer(),
            "totals": "\n".join(filter(None, [self.seen.report.totals(), self.seen.report.note])),
            "instructions": len(self.module),
            "report": {"head": gemms.HEADER, "rows": [*map(_alike, self.seen.report.alike())]},
            "lost": [*self._lost()],
            "reasons": self._reasons(),
            "flags": flags(self.module),
            "kernels": {"head": ledger.HEADER, "rows": [*self._kernels()]},
            "classes": [*zip(self.seen.ledger.totals(), self._meanings(), strict=True)],
            "sent": {
                "head": collectives.HEADER,
                "rows": [
                    {"cells": cells, "at": self._at(one.name), "below": below}
                    for one, cells, below in sent.rows()
                ],
                "totals": sent.totals() if sent else "No collectives.",
            },
            "computations": [
                {"name": c.name, "title": heading(c), "length": len(c)}
                for c in in_order(self.module)
            ],
        }

    def _at(self, name: str) -> str:
        """The address of an instruction of ENTRY; "" if it has none of this name."""
        i = self.module.entry.get(name)
        return address(i) if i else ""

    def _meanings(self) -> list[str]:
        """Of each class that the ledger has, in its order, what it is."""
        return [text for what, text in ledger.CLASSES.items() if self.seen.ledger.of(what)]

    def answer(self) -> str:
        """In two sentences, what a reader wants to know first."""
        report = self.seen.report
        rows = report.rows
        if not rows:
            return "There is no matmul in this program."
        lost = [row for row in rows if not row.is_fp8]
        leaving = [row for row in rows if row.is_fp8 and row.outside]
        said = f"FP8: {len(rows) - len(lost)} of {counted(len(rows), 'matmul')}, "
        said += f"{_percent(report.fp8_flops_share)} of the FLOPs"
        if leaving:
            said += f"; {len(leaving)} with work left to other kernels"
        if report.kernels_for_fp8:
            moved = size(report.bytes_moved)
            said += (
                f". To make and undo {report.narrow}: {size(report.bytes_for_fp8)} of {moved} moved"
            )
        if self.wrong:
            said += f". {self.wrong}: it was left out"
        return f"{said}."

    def _kernels(self) -> Iterator[dict[str, Any]]:
        """The ledger, in the order in which the program runs them."""
        for line in self.seen.ledger:
            at = address(line.kernel.instruction)
            yield {"cells": ledger.cells(line), "at": at, "bytes": line.nbytes}

    # Why: as far as the compiled program alone tells ---------------------------------------------

    def _lost(self) -> Iterator[dict[str, Any]]:
        """Each matmul that is not FP8, or left work to other kernels, once for all that are alike:
        what its operands are, and which kernels work for it. First those that are not FP8; of
        these, and of the others, those with most FLOPs first.
        """
        serving: dict[str, list[str]] = {}
        for line in self.seen.ledger:
            if line.what in _MAKES_FP8:
                for name in line.serves:
                    serving.setdefault(name, []).append(line.name)
        around = {row.instruction: kernels for row, kernels in self.seen.unfused}
        whole = self.seen.report.flops or 1
        for flops, alike in sorted(map(_with_flops, self.seen.report.alike()), key=_later):
            row = alike.row
            kernels = [kernel for kernel in around[row.instruction] if kernel.work]
            if row.is_fp8 and not kernels:
                continue
            yield {
                "title": row.title,
                "at": address(row.instruction),
                "source": row.source,
                "isFp8": row.is_fp8,
                "runs": alike.cells[0],
                "flops": f"{metric(flops)}FLOP, {_percent(flops / whole)} of all",
                "why": "" if row.is_fp8 else why_not(row, serving.get(row.name, [])),
                "kernels": [self._left(kernel) for kernel in kernels],
            }

    def _left(self, kernel: UnfusedKernel) -> dict[str, Any]:
        """A kernel that does what a matmul's call could have done."""
        work = ", ".join(WORK.get(name, name) for name in kernel.work)
        moved = self._bytes.get(kernel.instruction, 0)
        text = f"does work for it: {work} ({size(moved)})."
        if not kernel.avoidable:
            text += " It has other work too, so it would run anyway."
        at = address(kernel.instruction)
        return {"name": kernel.instruction.name, "at": at, "text": text}

    def _reasons(self) -> list[dict[str, Any]] | None:
        """XLA's rules that the program breaks, each once for all matmuls of which it says the same,
        those with most FLOPs first; None where the dump does not have what XLA's rewriter was
        given.
        """
        if not self.seen.has_reasons:
            return None
        flops = {row.name: row.flops * runs(row) for row in self.seen.report.rows}
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for one in sorted(self.seen.reasons, key=lambda one: -flops.get(one.instruction, 0)):
            said = {
                "lost": one.lost,
                "blamed": one.blamed,
                "reason": one.reason,
                "fix": one.fix,
                "rule": one.rule,
                "chain": "\n".join(one.chain),
            }
            first = {
                **said,
                "matmul": one.matmul,
                "at": self._at(one.instruction),
                "source": one.source,
                "matmuls": 0,
            }
            found.setdefault((*said.values(),), first)["matmuls"] += 1
        return [*found.values()]

    # HLO ------------------------------------------------------------------------------------------

    @cached_property
    def _bytes(self) -> dict[Instruction, int]:
        return {line.kernel.instruction: line.nbytes for line in self.seen.ledger}

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
        return {"rows": rows, "count": len(computation), "start": start}

    def about(self, at: str) -> dict[str, Any]:
        """All that HLO says of one instruction: who makes its operands, who reads it."""
        name, _, instruction = at.partition("/")
        computation = self.module.computations[name]
        i = computation[instruction]
        makers = [found for name in dict.fromkeys(i.operands) if (found := computation.get(name))]
        # Only where a computation's name stands can it be called; not each line's calls are read.
        calls = (other for other in self.module if name in str(other) and name in _called(other))
        return {
            "makers": [*map(_near, makers)],
            "users": [*map(_near, computation.users.get(i.name, []))],
            "callers": [*map(_near, calls)],
            "called": [{"at": f"{called}/", "text": f"%{called}"} for called in _called(i)],
            "facts": [*_facts(i), ("as dumped", str(i))],
        }

    def find(self, words: str) -> dict[str, Any]:
        """The instructions that have these words, capital or not, and how many there are."""
        words = words.strip().lower()
        found = [i for i in self.module if words and words in str(i).lower()]
        rows = [{"at": address(i), "text": str(i)[:300]} for i in found[:MOST_FOUND]]
        return {"rows": rows, "count": len(found)}

    def json(self) -> str:
        """What `fp8lens --json` prints."""
        return self.seen.json()


def _with_flops(line: gemms.Alike) -> tuple[int, gemms.Alike]:
    """The FLOPs of all matmuls of a line; of one that runs unknown times, those of one run."""
    times = line.cells[0]
    return line.row.flops * (int(times) if times.isdecimal() else 1), line


def _later(line: tuple[int, gemms.Alike]) -> tuple[bool, int]:
    return line[1].row.is_fp8, -line[0]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _alike(line: gemms.Alike) -> dict[str, Any]:
    """A line of the report."""
    below = []
    for more in line.further:
        below.append({"text": more.text, "isOutside": more.is_outside})
    return {
        "cells": line.cells,
        "at": address(line.row.instruction),
        "isFp8": line.row.is_fp8,
        "below": below,
    }


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
        does = "makes or widens" if len(made) == 1 else "make or widen"
        return (
            f"Its operands are {row.lhs_dtype} and {row.rhs_dtype}, although "
            f"{listed(made, most=3)} {does} FP8 for it: the values are rounded to FP8 and "
            f"multiplied in {row.math_dtype}."
        )
    return (
        f"Its operands are {row.lhs_dtype} and {row.rhs_dtype}: nothing that reaches it is FP8. "
        "Either the program does not quantize them, or XLA rounded them inside another kernel."
    )


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
    return {"at": address(i), "text": f"%{i.name} = {i.shape_text} {i.opcode}"[:200]}


# What the page asks -------------------------------------------------------------------------------

_ADVICE = (
    "give the text that XLA dumps with --xla_dump_hlo_as_text, such as "
    'module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt. Without a GPU, use "Check my model".'
)


class Reader:
    """A dump, and what is asked of it. Every answer is JSON."""

    program: Program

    def __init__(self) -> None:
        self._beside: dict[str, bytes] = {}

    def choose(self, files: str) -> str:
        """Of files, JSON of names and bytes: which to read, and a sentence, and which to `lay`
        beside it before; null if none.
        """
        sizes = json.loads(files)
        choice = choose(sizes)
        if choice is None:
            return "null"
        beside = files_beside(choice.name, sizes)
        return _json({"name": choice.name, "said": str(choice), "beside": beside})

    def lay(self, name: str, data: bytes) -> None:
        """Have a file stand beside the dump that is read next."""
        self._beside[name] = data

    def read(self, name: str, data: bytes, tell: Callable[[str], None] = lambda what: None) -> str:
        """Read a dump. Returns its summary, or {"error": a sentence} of what is no dump of a
        program for a GPU.
        """
        beside, self._beside = self._beside, {}
        tell("Reading the HLO")
        try:
            module = parse_hlo_module(text_of(data, MOST_TEXT))
            wrong = not_of_a_gpu(name, module)
            if not wrong:
                program = Program(name, module, tell, beside)
                summary = _json(program.summary())
                self.program = program  # what cannot be read leaves the one before
                return summary
        except NoText as error:
            wrong = str(error)
        except HloParseError as error:
            wrong = f"not one whole HLO module ({error})"
        return _json({"error": f"{name} is {wrong}: {_ADVICE}"})

    def read_zip(
        self, name: str, data: bytes, tell: Callable[[str], None] = lambda what: None
    ) -> str:
        """Read a dump out of a zip: its largest compiled program, with what is beside that. Returns
        what `read` does; the summary says which it was.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                sizes = {one.filename: one.file_size for one in archive.infolist()}
                choice = choose(sizes)
                if choice is None:
                    return _json({"error": f"{name} has no text of a program: {_ADVICE}"})
                left = MOST_BESIDE
                for one in files_beside(choice.name, sizes):
                    self._beside[one] = _unpacked(archive, one, left)
                    left = max(0, left - len(self._beside[one]))
                text = _unpacked(archive, choice.name, MOST_TEXT)
        except (*_DAMAGED, RuntimeError):  # the last of what is encrypted
            self._beside = {}
            return _json({"error": f"{name} is zipped, and damaged or encrypted: {_ADVICE}"})
        answer = json.loads(self.read(choice.name, text, tell))
        return _json(answer if "error" in answer else answer | {"said": f"Read {choice}"})

    def ask(self, what: str, arguments: str = "{}") -> str:
        """Ask the dump something: a method of Program, and its arguments as JSON."""
        return _json(getattr(self.program, what)(**json.loads(arguments)))


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)


def _unpacked(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A file of a zip; of one with more than `most` bytes, one more, which is refused later."""
    with archive.open(name) as file:
        return file.read(most + 1)


def _json(value: Any) -> str:
    """As JSON, each text readable."""

    def readable_in(value: Any) -> Any:
        match value:
            case str():
                return readable(value)
            case dict():
                return {key: readable_in(one) for key, one in value.items()}
            case list() | tuple():
                return [readable_in(one) for one in value]
        return value

    return json.dumps(readable_in(value))
