"""How HLO text becomes a module: what XLA prints, optimized or not, with JAX 0.4 to 0.12, and
what `print_hlo_module` printed. Pure Python; imports no JAX.

XLA prints one instruction a line, so one regular expression reads a whole computation. Where an
instruction takes several lines, they are joined first. What few readers ask of most instructions
(shape, attributes, metadata, backend_config) stays text until it is read.
"""

import copyreg
import gc
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, count, repeat
from math import prod
from operator import getitem
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8lens.hlo.ops import FEWEST_OPERANDS

_NAME = r"[A-Za-z0-9_.\-]++"
_NEST = r"[^()\n]*+(?:\([^()\n]*+\)[^()\n]*+)*+"  # text with parentheses at most one deep
_DEEP = rf"[^()\n]*+(?:\({_NEST}\)[^()\n]*+)*+"  # at most two deep
_STRING = r'"(?:[^"\\\n]|\\.)*+"'
# ROOT, name, shape, opcode, parameter's or constant's argument, operands, attributes
_INSTRUCTIONS = re.compile(
    rf"\n[ \t]*+(ROOT )?+%?+({_NAME}) = ((?!\()\S++|\({_DEEP}\)) ([a-z0-9\-]++)"
    rf"\((?:(?:(?<=parameter\()(?=\d{{1,9}}\))|(?<=constant\())({_NEST})|(?<!parameter\()({_NEST}))\)"
    r"(,.*+|[ \t]*+)$",
    re.M,
)
# The end of a line that the next one goes on, where no instruction begins.
_CONTINUED = re.compile(rf"\n(?![ \t]*+(?:ROOT )?+%?+{_NAME} = (?:\(|[a-z]\w*+\[))[ \t]*+")
_OPERAND = re.compile(rf"\s*(?:\S.*\s)?%?({_NAME})\s*", re.S)
_COMPUTATION = re.compile(
    rf"(ENTRY\s+)?+%?+({_NAME})[ \t]*+(|\((?:.*+(?<=,)\n)*?.*)\{{[ \t]*$", re.M
)
_TABLE = re.compile(
    r"(FileNames|FunctionNames|FileLocations|StackFrames)[ \t]*"
    rf"((?:\n[ \t]*\d{{1,18}} (?:{_STRING}|\{{[^\n{{}}]*\}})[ \t]*)*+)$",
    re.M,
)
_TABLE_ROW = re.compile(rf"\n[ \t]*+(\d++) (?:({_STRING})|\{{([^\n{{}}]*+)\}})")
_TABLE_FIELD = re.compile(r"(?<!\w)(\w++)=(\d{1,18})\b")
_MODULE = re.compile(r"HloModule\s+([^\s,]+)")
_NOT_HLO = re.compile(r"\b(?:stablehlo|mhlo|func)\.|^\s*module\b|\{ lambda ")
_FIELD = re.compile(rf"(?<![\w.\-])([\w.\-]++)=({_STRING}?|[^\s,}}]+)")
_DIM = r"\s*(?:(?:<=)?\d{1,18}|\?)\s*"
_SHAPE = re.compile(rf"([a-z]\w{{0,31}})\[((?:{_DIM}(?:,{_DIM})*+)?\s*)\](?:\{{([^{{}}]*)\}})?")
# %x#0, and %x#0#1 of an element of one
_ELEMENT = re.compile(rf"%({_NAME})((?:#\d{{1,9}}(?!\d)){{1,8}}+)")
_CLOSING = re.compile(r"\s*\}(?:,.*+)?[ \t]*+$", re.M)
_BLANK = re.compile(r"(?:\s++|//.*+|/\*(?:[^*]|\*(?!/))*+\*/)*+")
# Strings and comments that do not end go on to the end of the line, or the text: else each would
# look for its end. The last group is there where they end.
_OPEN = rf'{_STRING.removesuffix('"')}(")?|/\*(?:[^*]|\*(?!/))*+(\*/)?'
_COMMENT = re.compile(_OPEN, re.S)
# The last alternative is MLIR's array<i64: 1, 2>, whose comma separates nothing here.
_TOKEN = re.compile(rf"{_OPEN}|[][(){{}},\n]|<(?!=)[^][(){{}}<>\"\n]*>", re.S)
_ESCAPE = re.compile(rb"\\(?:([0-7]{3})|(.))")
_CLOSE = {"(": ")", "[": "]", "{": "}"}
# An attribute as nearly all are: a word, a string, or braces with braces and brackets in them at
# most one deep, in none of which a comment could begin.
_ATOMS = rf'[^][(){{}}"/<>\n]++|{_STRING}'
_LIST = rf"\[(?:{_ATOMS})*+\]"
_BRACES = rf"\{{(?:{_ATOMS}|{_LIST}|\{{(?:{_ATOMS}|{_LIST})*+\}})*+\}}"
_ATTRIBUTE = re.compile(rf'[ ]*+({_NAME})=({_BRACES}|{_STRING}|[^][(){{}}"/<>,\s]++)(?:,|\Z)')
CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "called_computations",
    "true_computation",
    "false_computation",
    "select",
    "scatter",
)
_MAX_DEPTH = 200  # of brackets: below 20 in real text, and Python's recursion stops near 1000
_Row = tuple[str, str, str, str, str, str, str]  # the groups of _INSTRUCTIONS


def visible(text: str, keep: str = "") -> str:
    r"""`text` with what a terminal would obey, or a reader not see, spelled out as \x1b or \u202e:
    control characters, marks that turn the direction of writing, spaces of other widths; but not
    the characters in `keep`.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


class HloParseError(ValueError):
    """Text that is not HLO, or not all of it. `line` and `column` count from 1.

    Example:

        >>> from fp8lens import HloParseError, parse_hlo_module
        >>> try:
        ...     parse_hlo_module("HloModule m\\n\\n  nothing")
        ... except HloParseError as error:
        ...     print(error.line, error.column)
        3 3
    """

    def __init__(self, text: str, pos: int, message: str):
        found = text[pos : pos + 40].partition("\n")[0]
        self.message = visible(f'{message}, found "{found}"' if found else message)
        self.line, self.column = text.count("\n", 0, pos) + 1, pos - text.rfind("\n", 0, pos)
        super().__init__(f"line {self.line}, column {self.column}: {self.message}")

    def __reduce__(self):  # to a process that cannot make one anew: the text stays here
        # copyreg's function is public in fact: pickle's own protocol 2 names it.
        return copyreg.__newobj__, (HloParseError, *self.args), self.__dict__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where an instruction comes from; its file and line are its innermost frame's."""

    op_name: str | None = None
    source_file: str | None = None
    source_line: int | None = None


@dataclass(frozen=True)
class Shape:
    """An array's dtype (as HLO names it) and dims, or "tuple" and its `elements`.

    `layout` is the text between the braces after the dims ("1,0" is row-major), None where none is
    printed. The dim of a dynamic dimension is its bound, -1 if it has none.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: str | None = None
    elements: tuple["Shape", ...] = ()

    @cached_property
    def is_tuple(self) -> bool:
        """Whether it is a tuple, whose arrays are its `elements`."""
        return self.dtype == "tuple"

    @cached_property
    def size(self) -> int:
        """Number of array elements, over all elements of a tuple; a dimension without a bound
        counts as 1.
        """
        return sum(e.size for e in self.elements) if self.is_tuple else abs(prod(self.dims))

    @cached_property
    def bits(self) -> int:
        """Of an element; 0 for tokens and opaque values."""
        if self.dtype == "pred":
            return 8
        width = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn, s4, c64: the first number
        return int(width[0]) if width else 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes, types under 8 bits packed as XLA's GPU backend does; tokens and opaque values take
        none.
        """
        if self.is_tuple:
            return sum(e.nbytes for e in self.elements)
        return (self.size * self.bits + 7) // 8

    @property
    def brief(self) -> str:
        """An array's dtype and dims, without its layout: f8e4m3fn[256,512]."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({', '.join(map(str, self.elements))})"
        return self.brief if self.layout is None else f"{self.brief}{{{self.layout}}}"


def _uncommented(text: str) -> str:
    """Without the comments that are outside of strings and come to an end."""
    return _COMMENT.sub(lambda m: "" if m[2] else m[0], text) if "/*" in text else text


def _skip(text: str, pos: int, stop: str) -> int:
    """Index of the first of the `stop` characters outside strings, comments and brackets, or the
    end of the text.
    """
    opened: list[int] = []
    for m in _TOKEN.finditer(text, pos):
        token = m[0]
        if not opened and token in stop:
            return m.start()
        if token in _CLOSE:
            opened.append(m.start())
            if len(opened) > _MAX_DEPTH:
                raise HloParseError(
                    text, m.start(), f"brackets are nested more than {_MAX_DEPTH} deep"
                )
        elif token in ")]}" and (not opened or _CLOSE[text[opened.pop()]] != token):
            raise HloParseError(text, m.start(), f"unbalanced {token}")
        elif token[0] in '"/' and not m.lastindex:
            raise HloParseError(text, m.start(), "unterminated string or comment")
    if opened:
        raise HloParseError(text, opened[-1], "nothing closes this bracket")
    return len(text)


def _line_end(text: str, pos: int) -> int:
    """End of the line, or of the lines: one whose brackets are open, or that ends in a comma, goes
    on in the next.
    """
    while (end := _skip(text, pos, "\n")) < len(text) and text[pos:end].rstrip().endswith(","):
        pos = end + 1
    return end


def _split(text: str, pos: int = 0) -> Iterator[tuple[int, str]]:
    """Position and text of each part between the commas that are outside brackets and strings."""
    while pos < len(text):
        end = _skip(text, pos, ",")
        yield pos, text[pos:end]
        pos = end + 1


def _key_values(text: str, pos: int) -> Mapping[str, str]:
    """`key=value, key={...}` as a mapping to raw texts."""
    found = {}
    end = pos
    while plain := _ATTRIBUTE.match(text, end):
        found[plain[1]] = plain[2]
        end = plain.end()
    for at, part in _split(text, end):
        key, equals, value = _uncommented(part).strip().partition("=")
        if not equals or not re.fullmatch(_NAME, key):
            raise HloParseError(text, at, "expected key=value")
        found[key] = value
    return MappingProxyType(found)


def _unquoted(text: str) -> str:
    r"""What a value says, quoted or not. XLA writes a byte as three octal digits (\303)."""
    if text[:1] != '"':
        return text
    if "\\" not in text and text.isascii():  # as nearly all
        return text[1:-1]

    def byte(m: re.Match) -> bytes:
        if m[1]:
            return bytes([int(m[1], 8) & 255])
        return {b"n": b"\n", b"t": b"\t", b"r": b"\r"}.get(m[2], m[2])

    return _ESCAPE.sub(byte, text[1:-1].encode(errors="replace")).decode(errors="replace")


def _number(text: str) -> int | None:
    """A number's text as a number; None for any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


@lru_cache(maxsize=4096)
def parse_shape(text: str) -> Shape:
    """The Shape that `text` prints, such as `(f8e4m3fn[32,64]{1,0}, s8[4194304]{0})`; HloParseError
    if it is none.
    """
    clean = _uncommented(text).strip()
    if clean[:1] == "(" and _skip(clean, 1, ")") == len(clean) - 1:
        return Shape("tuple", elements=tuple(parse_shape(part) for _, part in _split(clean[1:-1])))
    if not (m := _SHAPE.fullmatch(clean)):
        raise HloParseError(text, 0, "expected a shape, such as f32[8,16]{1,0} or (f32[8], s32[])")
    dims = m[2].replace(" ", "").split(",") if m[2].strip() else []
    sizes = tuple(-1 if d == "?" else int(d.removeprefix("<=")) for d in dims)
    if prod(abs(d) or 1 for d in sizes) >> 63:
        raise HloParseError(text, 0, "expected as many elements as XLA can count, in 63 bits")
    return Shape(m[1], sizes, m[3])


class Instruction(NamedTuple):
    """One instruction. What is not needed to walk the module is parsed when it is asked for.

    A tuple, because C code makes those from columns several times faster than Python calls
    __init__.
    """

    name: str
    opcode: str  # as printed; an asynchronous x may be `x-start` and `x-done`
    operands: tuple[str, ...]
    shape_text: str
    argument: str  # of a parameter or a constant
    rest: str  # from the comma before the attributes on; blank where there are none
    computation: "Computation"
    index: int  # type: ignore[assignment]  # tuple.index, which is never called here

    # Each is itself alone, and a key of dictionaries: object's C functions are the fastest.
    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[misc]

    def __repr__(self) -> str:
        return self.cmd

    def __reduce__(self):
        return getitem, (self.computation, self.name)

    @property
    def cmd(self) -> str:
        """The whole instruction as printed."""
        return self.computation.lines[self.index].strip()

    @property
    def is_root(self) -> bool:
        """Whether its result is its computation's."""
        return self is self.computation.root

    def error(self, message: str) -> HloParseError:
        """An error that says where in the module's text this instruction stands."""
        text, start = self.computation.module.text, self.computation.start
        # What takes several lines is found by its first.
        at = re.compile(rf"(?:ROOT )?%?{re.escape(self.name)} = ").search(text, start)
        return HloParseError(text, at.start() if at else start, message)

    @property
    def shape(self) -> Shape:
        """Its result's shape; HloParseError where the text of it is none."""
        try:
            return parse_shape(self.shape_text)
        except HloParseError as e:
            raise self.error(e.message) from None

    @property
    def attributes(self) -> Mapping[str, str]:
        """What follows the operands, name to raw text; HloParseError where it is not a list of
        key=value.
        """
        read = self.computation._attributes
        if self.index not in read:
            try:
                read[self.index] = _key_values(self.rest, 1) if self.rest.strip() else {}
            except HloParseError as e:
                raise self.error(e.message) from None
        return read[self.index]

    @property
    def backend_config(self) -> dict | str | None:
        """A dict where it is JSON (quoted, as JAX 0.4 did, or not), else text, as an MLIR
        dictionary; None if absent.
        """
        raw = self.attributes.get("backend_config")
        text = raw and _unquoted(raw)
        if text and text[0] == "{":
            with suppress(ValueError, RecursionError):
                return json.loads(text)
        return text

    @property
    def metadata(self) -> Metadata | None:
        """Where it comes from, None where the text does not say."""
        if "metadata" not in self.attributes:
            return None
        file, line = self.frames[0] if self.frames else (None, None)
        return Metadata(self._origin.get("op_name"), file, line or None)

    @property
    def _origin(self) -> dict[str, str]:
        fields = _FIELD.findall(self.attributes.get("metadata", ""))
        return {key: _unquoted(value) for key, value in fields}

    @property
    def stack_frame(self) -> int | None:
        """The number in the module's table of stack frames; None where the metadata has none."""
        return _number(self._origin.get("stack_frame_id", ""))

    @property
    def frames(self) -> tuple[tuple[str, int], ...]:
        """(file, line) of the call stack that wrote the instruction, innermost first; as much of it
        as the text has.
        """
        if (frame := self.stack_frame) is not None:
            return self.computation.module._frames(frame)
        origin = self._origin
        file = origin.get("source_file")
        return ((file, _number(origin.get("source_line", "")) or 0),) if file else ()

    @property
    def custom_call_target(self) -> str | None:
        """What a custom call calls, such as "__cublas$lt$matmul$f8"; None for other opcodes."""
        if not self.opcode.startswith("custom-call"):
            return None
        raw = self.attributes.get("custom_call_target")
        return raw and _unquoted(raw)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this instruction calls; HloParseError if the text has no such
        computation.
        """
        attributes, computations = self.attributes, self.computation.module.computations
        names: list[str] = []
        for key in CALLS:
            if key in attributes:
                names += re.findall(_NAME, attributes[key])
        for name in names:
            if name not in computations:
                raise self.error(f"this calls {name}, and the text has no such computation")
        return tuple(names)

    def callee(self, key: str) -> str:
        """The name of the computation that it calls as its "body" or "to_apply"; "" where it calls
        none so.
        """
        return self.attributes.get(key, "").strip().removeprefix("%")

    @property
    def element(self) -> int:
        """Which element of its operand a get-tuple-element takes; HloParseError where the text does
        not say.
        """
        number = self.attributes.get("index", "")
        if not re.fullmatch(r"[0-9]{1,9}", number):
            raise self.error("this takes an element without a number")
        return int(number)

    @property
    def literal(self) -> str | None:
        """A constant's value as printed; XLA prints large ones as `{...}`."""
        return self.argument.strip() if self.opcode == "constant" else None

    @property
    def parameter_number(self) -> int | None:
        """Which of its computation's parameters it is, from 0; None for other opcodes."""
        return int(self.argument) if self.opcode == "parameter" else None


@dataclass(eq=False)
class Computation:
    """A computation. Its instructions are in text order: the schedule, where the module is
    scheduled.
    """

    name: str
    is_entry: bool
    signature: str = field(repr=False)  # "(parameters) -> shape", empty where XLA leaves it out
    module: "HloModule" = field(repr=False)
    start: int = field(repr=False)  # where it begins in the module's text
    _body: tuple[int, int] = field(repr=False)
    # Both are there once its lines are read: no half-made computation leaves this module.
    instructions: tuple[Instruction, ...] = field(default=(), repr=False)
    root: Instruction = field(init=False)
    # Of the instructions that were asked for them, by index.
    _attributes: dict[int, Mapping[str, str]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self):
        return _computation, (self.module, self.name)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __getitem__(self, name: str) -> Instruction:
        return self._by_name[name.removeprefix("%")]

    def get(self, name: str, default: Any = None) -> Instruction | None:
        """An instruction by name, with or without %; `default` where it has none of that name."""
        return self._by_name.get(name.removeprefix("%"), default)

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction, by its name and in text order; what nobody reads is not in
        it.
        """
        users: defaultdict[str, list[Instruction]] = defaultdict(list)
        for i in self.instructions:
            for name in dict.fromkeys(i.operands):
                users[name].append(i)
        return dict(users)

    @cached_property
    def lines(self) -> list[str]:
        """The text of each instruction."""
        return self.module.text[slice(*self._body)].split("\n")[1:]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """By parameter number."""
        found = [i for i in self if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.argument)))


@dataclass(eq=False)
class HloModule:
    """A parsed module. Iterating gives every instruction, computations and instructions in text
    order; `module[name]` is one, or a KeyError. `entry` is the computation that runs first,
    `computations` has all by name, `attributes` those of the text's first line.

    Example:

        >>> from fp8lens import parse_hlo_module
        >>> text = '''HloModule m
        ... ENTRY e {
        ...   x = f32[2,3]{1,0} parameter(0)
        ...   ROOT y = f32[2,3]{1,0} negate(x)
        ... }'''
        >>> module = parse_hlo_module(text)
        >>> [i.opcode for i in module], module["y"].operands
        (['parameter', 'negate'], ('x',))
    """

    text: str = field(repr=False)
    name: str = ""
    entry: Computation = field(init=False)  # a text without one is an HloParseError
    attributes: Mapping[str, str] = field(default_factory=dict, repr=False)  # of the HloModule line
    computations: dict[str, Computation] = field(default_factory=dict, repr=False)
    # Where a frame of JAX's call stack is: its file and line, and the number of its caller's frame.
    stack_frames: dict[int, tuple[str, int, int]] = field(default_factory=dict, repr=False)
    # What `fp8lens.hlo.remember` keeps: by function, its answer for each part of the module.
    notes: dict[Any, dict[Any, Any]] = field(
        default_factory=lambda: defaultdict(dict), init=False, repr=False
    )

    def __reduce__(self):  # the text says it all, and is read sooner than the objects
        return parse_hlo_module, (self.text,)

    def _frames(self, frame: int) -> tuple[tuple[str, int], ...]:
        """(file, line) of a row of `stack_frames` and of its callers."""
        known = self.notes["frames"]  # of a layer, many instructions have the same
        if frame not in known:
            known[frame] = tuple(self._follow_frames(frame))
        return known[frame]

    def _follow_frames(self, frame: int) -> Iterator[tuple[str, int]]:
        for _ in range(50):  # JAX writes ten frames; a text may name itself as its caller
            if frame not in self.stack_frames:
                return
            file, line, parent = self.stack_frames[frame]
            if file:
                yield file, line
            caller = parent - self._parents_count_from_one
            if caller == frame:
                return
            frame = caller

    @cached_property
    def _parents_count_from_one(self) -> bool:
        """Whether the number of a frame's caller is one too high, as JAX 0.10 to 0.12 print it:
        then the outermost frames name themselves.
        """
        return any(parent == frame for frame, (_, _, parent) in self.stack_frames.items())

    def __iter__(self) -> Iterator[Instruction]:
        return chain.from_iterable(self.computations.values())

    def __len__(self) -> int:
        return sum(map(len, self.computations.values()))

    def __getitem__(self, name: str) -> Instruction:
        """An instruction by name; where computations share a name, ENTRY's is preferred, then the
        first.
        """
        for computation in (self.entry, *self.computations.values()):
            if found := computation.get(name):
                return found
        raise KeyError(f"no instruction {name!r} in module {self.name}")


def _computation(module: HloModule, name: str) -> Computation:
    return module.computations[name]


def _blank_end(text: str, pos: int) -> int:
    """Index of what follows white space and comments."""
    m = _BLANK.match(text, pos)
    return m.end() if m else pos


def _bad_line(text: str, start: int, end: int) -> HloParseError:
    """What is wrong where a computation's text is not instructions alone."""
    for line in text[start:end].split("\n")[1:]:
        if not _INSTRUCTIONS.match(f"\n{line}"):
            message = 'expected an instruction, "%name = shape opcode(operands)"'
            return HloParseError(text, text.find(line.strip(), start), message)
    return HloParseError(text, start, "this computation has no instructions")


def _operands(text: str) -> tuple[str, ...]:
    """Names of operands printed in any style: shapes before them, comments between them, with or
    without %.
    """
    parts = [part for _, part in _split(_uncommented(text)) if part.strip()]
    return tuple(m[1] if (m := _OPERAND.fullmatch(part)) else part.strip() for part in parts)


def _fill(computation: Computation, rows: Sequence[_Row]) -> None:
    """Turn rows into instructions; each name once, each operand defined here, one root."""
    text, start = computation.module.text, computation.start
    if not rows:
        raise _bad_line(text, start, start)
    roots, names, shapes, opcodes, arguments, texts, rests = zip(*rows, strict=True)
    joined = _uncommented("\n".join(texts)).replace("%", "")
    operands = [tuple(t.split(", ")) if t else () for t in joined.split("\n")]
    known = frozenset(names)
    plain = len(operands) == len(names) and known.issuperset(chain.from_iterable(operands))
    if not plain:
        # Shapes stand before the names, or spaces where XLA prints none, or names are not there.
        operands = [_operands(t) for t in texts]
    # The last two columns have no end.
    columns = (names, opcodes, operands, shapes, arguments, rests, repeat(computation), count())
    values = zip(*columns, strict=False)
    computation.instructions = tuple(map(tuple.__new__, repeat(Instruction), values))
    _check_operands(computation)
    if len(known) < len(names) or roots.count("") < len(names) - 1:
        message = "this computation has two instructions of one name, or two ROOTs"
        raise HloParseError(text, start, message)
    at = -1 if roots[-1] or not any(roots) else roots.index(max(roots))
    computation.root = computation.instructions[at]


def _check_operands(computation: Computation) -> None:
    """Raise HloParseError where an instruction has too few operands, or one that does not stand
    before it.
    """
    before: set[str] = set()
    for i in computation.instructions:
        if len(i.operands) < FEWEST_OPERANDS.get(i.opcode, 0):
            raise i.error(f"{i.opcode} takes {FEWEST_OPERANDS[i.opcode]} operands or more")
        if not before.issuperset(i.operands):
            name = next(name for name in i.operands if name not in before)
            raise i.error(
                f"operand {name} is not an instruction of {computation.name} that stands before it"
            )
        before.add(i.name)


def _read_header(module: HloModule, text: str) -> int:
    """Read the HloModule line and the tables after it; the index after them."""
    pos = _blank_end(text, 0)
    m = _MODULE.match(text, pos)
    if not m:
        message = "expected HLO text, which starts with HloModule"
        if _NOT_HLO.search(text[pos : pos + 10_000]):
            message = (
                "this is StableHLO or a jaxpr, not HLO: "
                "pass jax.jit(f).lower(...) itself, or what it compiles to"
            )
        raise HloParseError(text, pos, message)
    module.name, end = m[1], _line_end(text, m.end())
    module.attributes = _key_values(text[:end].rstrip(), m.end() + 1)
    names: dict[int, str] = {}
    tables: defaultdict[str, dict[int, dict[str, int]]] = defaultdict(dict)
    while m := _TABLE.match(text, pos := _blank_end(text, end)):
        table = tables[m[1]]
        for number, string, row in _TABLE_ROW.findall(m[2]):
            if row:
                table[int(number)] = {key: int(value) for key, value in _TABLE_FIELD.findall(row)}
            elif m[1] == "FileNames":
                names[int(number)] = _unquoted(string)
        end = m.end()
    for frame, fields in tables["StackFrames"].items():
        at = tables["FileLocations"].get(fields.get("file_location_id", 0), {})
        file, parent = names.get(at.get("file_name_id", 0), ""), fields.get("parent_frame_id", 0)
        module.stack_frames[frame] = file, at.get("line", 0), parent
    return pos


def _spell_out(text: str) -> str:
    """A line for each element of a tuple that is used as `%x#0`, which dumps have for it since JAX
    0.12.
    """
    if "#" not in text or not _ELEMENT.search(text):
        return text
    return "".join(_spell_out_body(text, body) for body in re.split(r"(?<=\n\})", text))


def _spell_out_body(text: str, body: str) -> str:
    """The same for one computation of `text`."""
    used: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name, numbers in _ELEMENT.findall(body):
        path = tuple(map(int, numbers[1:].split("#")))
        used[name].update(path[: n + 1] for n in range(len(path)))
    lines = []
    for line in body.split("\n"):
        lines.append(line)
        if not (head := _INSTRUCTIONS.match(f"\n{line}")):
            continue
        for *outer, n in sorted(used[head[2]]):  # a tuple before its elements
            shape = parse_shape(head[3])
            for k in (*outer, n):
                if k >= len(shape.elements):
                    raise HloParseError(text, text.find(line), f"this has no element {k}")
                shape = shape.elements[k]
            of = ".element".join((head[2], *map(str, outer)))
            lines.append(f"  %{of}.element{n} = {shape} get-tuple-element(%{of}), index={n}")
    return _ELEMENT.sub(lambda m: f"%{m[1]}{m[2].replace('#', '.element')}", "\n".join(lines))


def _parse(text: str) -> HloModule:
    text = _spell_out(text)
    module = HloModule(text)
    pos = _read_header(module, text)
    while pos < len(text):
        pos = _blank_end(text, _read_computation(module, pos))
    if not hasattr(module, "entry"):
        raise HloParseError(text, pos, "no ENTRY computation: is the text truncated?")
    return module


def _read_computation(module: HloModule, pos: int) -> int:
    """Read a computation of the module's text; where it ends."""
    text = module.text
    head = _COMPUTATION.match(text, pos)
    if not head:
        message = 'expected a computation, "%name (parameters) -> shape {", with all its lines'
        raise HloParseError(text, pos, message)
    if head[2] in module.computations or (head[1] and hasattr(module, "entry")):
        raise HloParseError(text, pos, "a second computation of this name, or a second ENTRY")
    start = head.end()
    end = text.find("\n}", start)
    if end < 0:
        message = "the text ends inside a computation: is it truncated?"
        raise HloParseError(text, len(text), message)
    rows, lines = _INSTRUCTIONS.findall(text, start, end), None
    if text.count("\n", start, end) != len(rows):  # a line was passed over
        body = _CONTINUED.sub(" ", _uncommented(text[start:end]))
        rows, lines = _INSTRUCTIONS.findall(body), body.split("\n")[1:]
        if len(lines) != len(rows):
            raise _bad_line(text, start, end)
    computation = Computation(head[2], bool(head[1]), head[3].rstrip(), module, pos, (start, end))
    if lines is not None:
        computation.lines = lines
    _fill(computation, rows)
    module.computations[computation.name] = computation
    if head[1]:
        module.entry = computation
    close = _CLOSING.match(text, end)
    if not close:
        raise HloParseError(text, end, "expected the } of a computation on a line of its own")
    return close.end()


def parse_hlo_module(x: Any) -> HloModule:
    """Parse HLO text, as XLA or `print_hlo_module` prints it, a `jax.stages.Compiled` or a
    `jax.stages.Lowered`. A parsed module is returned as it is, and so is the module of an
    Inspection, or of whatever else has an HloModule as its `module`.

    Raises TypeError for anything else, HloParseError (with line and column) for text that is not
    one whole HLO module. An attribute's value that cannot be read raises HloParseError when it is
    asked for.

    Example:

        >>> from fp8lens import parse_hlo_module
        >>> text = '''HloModule m
        ... ENTRY e {
        ...   x = f32[2,3]{1,0} parameter(0)
        ...   ROOT y = f32[2,3]{1,0} negate(x)
        ... }'''
        >>> parse_hlo_module(text).entry.name
        'e'
    """
    if isinstance(x, HloModule):
        return x
    if isinstance(module := getattr(x, "module", None), HloModule):
        return module
    text = _text_of(x)
    with uncollected():
        return _parse(text.replace("\r\n", "\n") if "\r" in text else text)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for garbage: a module, and what is found out about it, is many small
    objects that stay. Looking among them took half of a parser's time, a quarter of a report's.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _text_of(x: Any) -> str:
    """HLO text, or what a program of JAX's prints as it; TypeError where there is none."""
    if fix := no_program_yet(x):
        raise TypeError(f"got {type(x).__name__}: {fix}")
    text = x
    if hasattr(x, "as_text") and not isinstance(x, type):
        try:
            text = x.as_text(dialect="hlo", debug_info=True)  # Lowered has dialects
        except TypeError:
            text = x.as_text()  # Compiled has one text
    if isinstance(text, str):
        return text
    got = f"got {type(x).__name__}"
    if text is not x:
        got += f", whose as_text() gives {text!r}"
    raise TypeError(f"{got}: pass HLO text, jax.jit(f).lower(...), or what its .compile() returns")


def no_program_yet(x: Any) -> str:
    """What to do with an object of JAX's that has no HLO to read, a `jax.stages.Traced` or a
    `jax.export.Exported`; "" for anything else. Their attributes tell them: nothing here imports
    JAX.
    """
    if isinstance(x, type):
        return ""
    if hasattr(x, "jaxpr") and hasattr(x, "lower") and not hasattr(x, "as_text"):
        return (
            "a traced function is not compiled yet: give the function and its arguments, or what "
            "traced.lower().compile() returns."
        )
    if is_exported(x):
        return (
            "an exported function is StableHLO and not compiled: "
            "give it to inspect, which compiles it."
        )
    if isinstance(x, bytes | bytearray) and not x.isascii():
        return (
            "the bytes of a serialized executable are packed by XLA, and only its own client reads "
            "them: give the function, or keep compiled.as_text() beside them. Those of an exported "
            "function: give jax.export.deserialize(bytes)."
        )
    return ""


def is_exported(x: Any) -> bool:
    """Whether an object is a `jax.export.Exported`."""
    return hasattr(x, "mlir_module_serialized") and hasattr(x, "call")
