"""What counts as a difference between two modules: what they compute does; names, numbering, order
and bookkeeping do not.
"""

import html
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Any

from fp8lens.hlo.parse import CALLS, Computation, HloModule, Instruction, parse_hlo_module, visible
from fp8lens.hlo.text import (
    INDENT,
    MODULE_NOISE,
    NOISE,
    coloured,
    format_instruction,
    says_something,
    without_default_layout,
    wrap,
)

# Attributes beside printing's that say when or as the how-many-th something runs, not what it
# computes.
_IGNORED = {
    *NOISE,
    *CALLS,
    "channel_id",
    "control-predecessors",
    "schedule",
    "custom_call_schedule",
}
_CONFIG_NOISE = {
    "operation_queue_id",
    "wait_on_operation_queues",
    "force_earliest_schedule",
    "reification_cost",
    "device_type",
    "autotune_workspace_size",
    "lhs_stride",
    "rhs_stride",
    "selected_algorithm",
    "grad_x",
    "grad_y",
    "native_emitter_backend_config",
}
_CONFIG_DEFAULTS = {"epilogue": "DEFAULT", "alpha_real": 1, "beta": 0, "damax_output": False}
# Two alike are as good as one.
_MERGED = ("constant", "broadcast", "iota", "bitcast", "get-tuple-element")
# Scratch memory, last in a library call's results.
_SCRATCH = re.compile(r"s8\[\d+\](?=\)\s+custom-call\()")  # the same, as it is printed
_WORKSPACE = re.compile(r"s8\[\d+\]\{0\}(?=\)$)")
# Of names, as XLA numbers them.
_SEPARATOR, _SUFFIX = re.compile(r"([._])"), re.compile(r"\d+|clone|remat\d*")
_CALL = re.compile(rf"(?<= )({'|'.join(CALLS)})=(\{{[^{{}}]*+\}}|[^,\s]+)")
_SIGNED_NAME, _NAME = re.compile(r"%([\w.\-]+)"), re.compile(r"%?([\w.\-]+)")
_BACKGROUND = {"-": "rgba(213,94,0,.18)", "+": "rgba(0,114,178,.18)", " ": "none"}
_CELL = (
    "width:50%;padding:1px 6px 1px 5ch;text-indent:-4ch;text-align:left;vertical-align:top;"
    "white-space:pre-wrap;overflow-wrap:anywhere;background:"
)
_LINE_BREAK = re.compile(r"\n\s*")
_HEADER_NOISE = {*MODULE_NOISE, "entry_computation_layout"}  # that ENTRY says too


def _leaves(config: Any) -> Iterator[tuple[str, Any]]:
    """A backend_config's leaves by their own name, without what says nothing of the result."""
    if not isinstance(config, dict):
        if config:
            yield "", config
        return
    for key, value in config.items():
        if key in _CONFIG_NOISE:
            continue
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key, value


def describe(i: Instruction) -> tuple[str, ...]:
    """All that an instruction says but for names (its own, its operands', its computations') and
    bookkeeping.
    """
    attributes = i.attributes
    kept = (
        f"{key}={value}"
        for key, value in attributes.items()
        if key not in _IGNORED and says_something(key, value)
    )
    config, shape = "", i.shape_text
    if "backend_config" in attributes:
        # As text before they are sorted: values of one key may be of types that do not compare.
        leaves = (json.dumps(leaf, default=str) for leaf in _leaves(i.backend_config))
        config = "\n".join(sorted(leaves))
    if i.custom_call_target:
        shape = _WORKSPACE.sub("s8[]", shape)
    return (i.opcode, without_default_layout(shape), i.argument, *sorted(kept), config)


_Key = Callable[[str], Any]  # of an instruction's name


class _Program:
    """A module's computations as graphs whose nodes are numbered alike, in both modules, where they
    say the same.
    """

    def __init__(self, module: HloModule, numbers: dict[tuple, int]):
        self.module, self._numbers = module, numbers
        self._graphs: dict[str, _Graph | None] = {}

    def number(self, *key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    @property
    def digests(self) -> set[int]:
        return {graph.digest for graph in self._graphs.values() if graph}

    def graph(self, name: str) -> "_Graph | None":
        """A computation's graph; None inside a computation that calls itself, which HLO forbids."""
        todo = [name] if name not in self._graphs else []
        # What is called comes first; not by recursion: text may nest deeper than Python does.
        while todo:
            last = todo[-1]
            if last not in self._graphs:
                self._graphs[last] = None
                called = dict.fromkeys(c for i in self.module.computations[last] for c in i.called)
                todo += [c for c in called if c not in self._graphs]
            elif self._graphs[todo.pop()] is None:
                self._graphs[last] = _Graph(self, self.module.computations[last])
        return self._graphs[name]


class _Graph:
    """A computation's instructions by name, in an order that follows from the dataflow alone."""

    def __init__(self, program: _Program, computation: Computation):
        self.program, self.computation = program, computation
        # Numbers, by instruction. With equal numbers of `own` two instructions say the same, of
        # `label` what they call computes the same too, and of `up` they compute the same value from
        # the same parameters.
        self.own: dict[str, int] = {}
        self.label: dict[str, int] = {}
        self.up: dict[str, int] = {}
        self.same_as: dict[str, str] = {}  # which of the instructions that are merged stands for it
        first: dict[int, str] = {}
        for i in self._post_order():
            own = program.number(*describe(i))
            label = program.number(own, *(g and g.digest for g in self.called(i)))
            up = program.number(label, *(self.up.get(o) for o in i.operands))
            self.own[i.name], self.label[i.name], self.up[i.name] = own, label, up
            self.same_as[i.name] = first.setdefault(up, i.name) if i.opcode in _MERGED else i.name
        self.nodes = [name for name in self.label if self.same_as[name] == name]
        self.place = {name: at for at, name in enumerate(self.nodes)}

    def _post_order(self) -> Iterator[Instruction]:
        roots = [self.computation.root, *sorted(self.computation, key=lambda i: i.name)]
        seen: set[str] = set()
        stack = [(i, False) for i in reversed(roots)]
        while stack:
            i, done = stack.pop()
            if done:
                yield i
            elif i.name not in seen:
                seen.add(i.name)
                stack += [(i, True), *((self.computation[o], False) for o in reversed(i.operands))]

    @cached_property
    def digest(self) -> int:
        """Equal for computations that compute the same."""
        return self.program.number(
            "computation",
            self.up[self.computation.root.name],
            *sorted(self.up[name] for name in self.nodes),
        )

    def called(self, i: Instruction) -> "list[_Graph | None]":
        """The graphs of what an instruction calls."""
        return [self.program.graph(name) for name in i.called]

    def operands(self, name: str) -> list[str]:
        """The nodes that stand for an instruction's operands."""
        return [self.same_as[o] for o in self.computation[name].operands]

    @cached_property
    def users(self) -> dict[str, list[tuple[str, int]]]:
        """(user, which of its operands) of each node."""
        users: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for name in self.nodes:
            for at, operand in enumerate(self.operands(name)):
                users[operand].append((name, at))
        return users

    @cached_property
    def down(self) -> dict[str, int]:
        """What becomes of each value: with equal numbers two instructions go the same way to the
        root.
        """
        found: dict[str, int] = {}
        for name in reversed(self.nodes):
            uses = sorted((found.get(user, -1), at) for user, at in self.users[name])
            root = name == self.same_as[self.computation.root.name]
            found[name] = self.program.number("down", self.label[name], root, *uses)
        return found

    def base(self, name: str) -> str:
        opcode = self.computation[name].opcode
        return opcode if opcode == "get-tuple-element" else name

    def kind(self, name: str) -> tuple:
        i = self.computation[name]
        return (i.opcode, i.argument if i.opcode == "parameter" else "")


class _Pairs:
    """The nodes of `b` that stand where nodes of `a` do: `of` is {name in a: name in b}.

    First those that compute the same or are used the same, then neighbours of pairs, then what is
    left by what it says.
    """

    def __init__(self, a: _Graph, b: _Graph):
        self.a, self.b = a, b
        self.of: dict[str, str] = {}
        self._taken: set[str] = set()
        self._alike(a.up.get, b.up.get, any_count=True)
        self._alike(a.down.get, b.down.get)
        self._spread(a.label.get, b.label.get)
        self._alike(a.label.get, b.label.get)
        roots = a.same_as[a.computation.root.name], b.same_as[b.computation.root.name]
        if a.kind(roots[0]) == b.kind(roots[1]):
            self._match(*roots)
        self._spread(a.kind, b.kind)
        self._alike(a.kind, b.kind)

    def _match(self, x: str, y: str) -> bool:
        """Make a pair of them; False where either has a partner."""
        if x in self.of or y in self._taken:
            return False
        self.of[x] = y
        self._taken.add(y)
        return True

    def _alike(self, key_a: _Key, key_b: _Key, any_count: bool = False) -> None:
        """Pair nodes of one key, in order; where there are as many in `a` as in `b`, or of
        `any_count`.
        """
        groups: defaultdict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for x in self.a.nodes:
            if x not in self.of:
                groups[key_a(x)][0].append(x)
        for y in self.b.nodes:
            if y not in self._taken:
                groups[key_b(y)][1].append(y)
        for xs, ys in groups.values():
            if any_count or len(xs) == len(ys):
                for x, y in zip(xs, ys, strict=False):
                    self._match(x, y)

    def _spread(self, key_a: _Key, key_b: _Key) -> None:
        """Pair the neighbours of pairs that have one key, and theirs, and so on."""
        todo = list(self.of.items())
        while todo:
            x, y = todo.pop()
            near = [*self._operands(x, y), *self._users(x, y, key_a, key_b)]
            todo += [(x, y) for x, y in near if key_a(x) == key_b(y) and self._match(x, y)]

    def _operands(self, x: str, y: str) -> Iterator[tuple[str, str]]:
        """Those that a pair reads; one may read more than the other."""
        return zip(self.a.operands(x), self.b.operands(y), strict=False)

    def _users(self, x: str, y: str, key_a: _Key, key_b: _Key) -> Iterator[tuple[str, str]]:
        """Those that read a pair as the same operand, where only one of `b` has that key."""
        uses: defaultdict[Any, list[str]] = defaultdict(list)
        for user, at in self.b.users[y]:
            if user not in self._taken:
                uses[key_b(user), at].append(user)
        for user, at in self.a.users[x]:
            found = uses.get((key_a(user), at), [])
            if user not in self.of and len(found) == 1:
                yield user, found[0]


def _marked(mark: str, text: str) -> str:
    return "\n".join(mark + line[1:] for line in text.split("\n"))


@dataclass(frozen=True)
class Row:
    """An instruction on either side: the same text where they agree, None where a side has none.
    Without a text on either, it stands for rows left out.
    """

    a: str | None
    b: str | None

    @property
    def changed(self) -> bool:
        """Whether the two sides differ."""
        return self.a != self.b


_LEFT_OUT = Row(None, None)


@dataclass(frozen=True)
class HloDiff:
    """Where two modules differ: the headings of computations, each with its rows.

    It is true if the modules differ, like a list of differences; `same` is the opposite. `str`
    gives a unified text, "-" before a line of the first module and "+" before one of the second;
    Jupyter shows both side by side.
    """

    sections: tuple[tuple[str, tuple[Row, ...]], ...]

    @property
    def same(self) -> bool:
        """Whether both modules compute the same."""
        return not self.sections

    def __bool__(self) -> bool:
        return bool(self.sections)

    def around(self, pattern: str) -> "HloDiff":
        """Only the places where a line that differs matches the regular expression."""
        found = re.compile(pattern).search
        sections = []
        for heading, rows in self.sections:
            runs = [tuple(run) for _, run in groupby(rows, lambda row: row == _LEFT_OUT)]
            kept: list[Row] = []
            for run in runs:
                if any(row.changed and found(f"{row.a}\n{row.b}") for row in run):
                    kept += run
                else:
                    kept.append(_LEFT_OUT)
            merged = tuple(row for row, _ in groupby(kept))
            if any(row.changed for row in merged):
                sections.append((heading, merged))
        return HloDiff(tuple(sections))

    def __str__(self) -> str:
        lines: list[str] = []
        for heading, rows in self.sections:
            if lines:
                lines.append("")
            lines.append(heading)
            for changed, group in groupby(rows, lambda row: row.changed):
                run = list(group)
                if changed:
                    lines += [_marked("-", row.a) for row in run if row.a]
                    lines += [_marked("+", row.b) for row in run if row.b]
                else:
                    lines += [_marked(" ", row.a or "  ...") for row in run]
        return visible("\n".join(lines), keep="\n\t") or "no difference"

    def _repr_html_(self) -> str:
        if self.same:
            return "<p>no difference</p>"
        rows = []
        for heading, body in self.sections:
            title = html.escape(heading)
            rows.append(f'<tr><th colspan="2" style="{_CELL}none">{title}</th></tr>')
            for row in body:
                if row.changed:
                    cells = _cell("-", row.a) + _cell("+", row.b)
                else:
                    cells = 2 * _cell(" ", row.a or "  ...")
                rows.append(f'<tr style="background:none">{cells}</tr>')
        return (
            '<table style="width:100%;table-layout:fixed;font-family:monospace;line-height:1.35">'
            f"{''.join(rows)}</table>"
        )


def _cell(mark: str, text: str | None) -> str:
    """One side of a row, in HTML; empty where that side has no instruction."""
    if not text:
        return f'<td style="{_CELL}none"></td>'
    line = mark + _LINE_BREAK.sub(" ", text)[1:]
    return f'<td style="{_CELL}{_BACKGROUND[mark]}">{coloured(line)}</td>'


def _namer() -> Callable[[str], str]:
    """Gives each name without the numbers XLA puts after it, and counts anew where a name comes
    again.
    """
    counts: Counter[str] = Counter()

    def give(name: str) -> str:
        parts = _SEPARATOR.split(name)
        while len(parts) > 2 and _SUFFIX.fullmatch(parts[-1]):
            del parts[-2:]
        base = "".join(parts) or name
        counts[base] += 1
        return f"{base}.{counts[base] - 1}" if counts[base] > 1 else base

    return give


def _text(
    graph: _Graph, name: str, names: dict[str, str], titles: dict[str, str], config: dict
) -> str:
    """The instruction as `print_hlo_module` has it, under other names, and of its backend_config
    only `config`.
    """
    i = graph.computation[name]
    text = _SCRATCH.sub("s8[...]", format_instruction(i, False, False))

    def rename(text: str, names: dict[str, str], name: re.Pattern = _SIGNED_NAME) -> str:
        return name.sub(lambda m: "%" + names.get(m[1], m[1]), text)

    head, opcode, tail = text.partition(f" {i.opcode}(")
    inside, close, tail = tail.partition(")")
    if i.opcode != "constant":
        inside = rename(inside, names)
    tail = _CALL.sub(lambda m: f"{m[1]}={rename(m[2], titles, _NAME)}", tail)
    line = rename(head, names) + opcode + inside + close + tail
    if config:
        line += f", backend_config={json.dumps(config)}"
    return wrap(line, INDENT)


class _Side:
    """One of two computations that are compared, and what is shown of it: a graph, the names of its
    nodes, the titles of computations. Without a graph, that of a computation that only the other
    module has.
    """

    def __init__(self, graph: _Graph | None, titles: dict[str, str]):
        self.graph, self.titles = graph, titles
        self.nodes = graph.nodes if graph else []
        self.names: dict[str, str] = {}

    def called(self, name: str | None) -> list[_Graph | None]:
        """What an instruction calls."""
        if not self.graph or name is None:
            return []
        return self.graph.called(self.graph.computation[name])

    def says(self, name: str) -> tuple:
        """What is compared of a paired instruction: with equal tuples both say the same."""
        if not self.graph:
            return ()
        operands = tuple(self.names[o] for o in self.graph.operands(name))
        return self.graph.own[name], self.graph.computation[name].is_root, operands

    def config(self, name: str | None) -> dict[str, Any]:
        """The leaves of an instruction's backend_config."""
        if not self.graph or name is None:
            return {}
        return dict(_leaves(self.graph.computation[name].backend_config))

    def text(self, name: str | None, config: dict[str, Any]) -> str | None:
        """An instruction as it is shown."""
        if not self.graph or name is None:
            return None
        return _text(self.graph, name, self.names, self.titles, config)


# A place in the order of `a`; the node of `a`, if it has one there, and that of `b`.
_Entry = tuple[tuple[int, int], str | None, str | None]


class _Diff:
    def __init__(self, a: HloModule, b: HloModule, context: int):
        numbers: dict[tuple, int] = {}
        self.a, self.b, self.context = _Program(a, numbers), _Program(b, numbers), context
        self.titles: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self.give = _namer()

    def sections(self) -> Iterator[tuple[str, tuple[Row, ...]]]:
        """The headings of computations that differ, with their rows; first the module's header."""
        if rows := self._header():
            yield "HloModule", rows
        todo = [(self._entry(self.a), self._entry(self.b))]
        seen: set[tuple] = set()
        for a, b in todo:
            known = tuple(graph and graph.computation.name for graph in (a, b))
            if known in seen or self._same(a, b):
                continue
            seen.add(known)
            rows, called = self.compare(a, b)
            todo += called
            either = a or b
            entry = "ENTRY " if either and either.computation.is_entry else ""
            title = self.title(a, b)
            if any(row.changed for row in rows):
                yield f"{entry}%{title}", rows

    def _header(self) -> tuple[Row, ...]:
        """What the HloModule lines say otherwise."""
        a, b = self.a.module.attributes, self.b.module.attributes
        rows = []
        for key in {**a, **b}:
            if key in _HEADER_NOISE:
                continue
            one, two = (f"  {key}={side[key]}" if key in side else None for side in (a, b))
            if one != two:
                rows.append(Row(one, two))
        return tuple(rows)

    def _entry(self, program: _Program) -> _Graph | None:
        return program.graph(program.module.entry.name)

    def _same(self, a: _Graph | None, b: _Graph | None) -> bool:
        """Whether both compute the same; of one alone, whether the other module has the same
        somewhere.
        """
        if a and b:
            return a.digest == b.digest
        if a:
            return a.digest in self.b.digests
        return b is None or b.digest in self.a.digests

    def title(self, a: _Graph | None, b: _Graph | None) -> str:
        """The name to show of a computation, or of two that stand for each other; "" of neither."""
        sides = [
            (graph.computation.name, titles)
            for graph, titles in zip((a, b), self.titles, strict=True)
            if graph
        ]
        found = [titles[name] for name, titles in sides if name in titles]
        if not sides:
            return ""
        title = found[0] if found else self.give(sides[0][0])
        for name, titles in sides:
            titles.setdefault(name, title)
        return title

    def compare(
        self, a: _Graph | None, b: _Graph | None
    ) -> tuple[tuple[Row, ...], list[tuple[_Graph | None, _Graph | None]]]:
        """Rows in the order of `a`, what only `b` has ahead of what uses it; and the computations
        called.
        """
        pairs = _Pairs(a, b).of if a and b else {}
        one, two = _Side(a, self.titles[0]), _Side(b, self.titles[1])
        self._name(one, two, pairs)
        order = _order(one, two, pairs)
        changed, called = [], []
        for _, x, y in order:
            calls = list(zip_longest(one.called(x), two.called(y)))
            called += calls
            for pair in calls:
                self.title(*pair)
            changed.append(x is None or y is None or one.says(x) != two.says(y))
        rows: list[Row] = []
        for at, (_, x, y) in enumerate(order):
            if any(changed[max(at - self.context, 0) : at + self.context + 1]):
                rows.append(_row(one, two, x, y, changed[at]))
            elif not rows or rows[-1] != _LEFT_OUT:
                rows.append(_LEFT_OUT)
        return tuple(rows), called

    def _name(self, one: _Side, two: _Side, pairs: dict[str, str]) -> None:
        """Give each node a name, and both of a pair the same."""
        back, give = {y: x for x, y in pairs.items()}, _namer()
        if one.graph:
            one.names = {x: give(one.graph.base(x)) for x in one.nodes}
        if two.graph:
            two.names = {
                y: one.names[back[y]] if y in back else give(two.graph.base(y)) for y in two.nodes
            }
        for side in (one, two):
            merged = side.graph.same_as if side.graph else {}
            side.names |= {name: side.names[node] for name, node in merged.items()}


def _order(one: _Side, two: _Side, pairs: dict[str, str]) -> list[_Entry]:
    """All nodes: pairs, and what only `one` has, in the order of `one`; and what only `two` has
    ahead of what uses it.
    """
    back = {y: x for x, y in pairs.items()}
    place: dict[str, tuple[int, int]] = {}
    for y in reversed(two.nodes):
        if y in back and one.graph:
            place[y] = one.graph.place[back[y]], 1
        else:
            users = two.graph.users[y] if two.graph else []
            place[y] = min((place[user][0] for user, _ in users), default=len(one.nodes)), 0
    order: list[_Entry] = [((at, 1), x, pairs.get(x)) for at, x in enumerate(one.nodes)]
    order += [(place[y], None, y) for y in two.nodes if y not in back]
    return sorted(order, key=lambda entry: entry[0])


def _row(one: _Side, two: _Side, x: str | None, y: str | None, changed: bool) -> Row:
    """A row, with what each side's backend_config has otherwise than the other's; of an instruction
    that one side alone has, what is otherwise than by default.
    """
    a, b = one.config(x), two.config(y)
    if x is not None and y is not None:
        a, b = _otherwise(a, b), _otherwise(b, a)
    else:
        a, b = _not_default(a), _not_default(b)
    text = one.text(x, a)
    return Row(text, two.text(y, b) if changed else text)


def _otherwise(config: dict[str, Any], than: dict[str, Any]) -> dict[str, Any]:
    """The leaves that have other values than in another config."""
    return {key: value for key, value in config.items() if value != than.get(key)}


def _not_default(config: dict[str, Any]) -> dict[str, Any]:
    """Of the leaves whose default is known, those that have another value."""
    known = {key: value for key, value in config.items() if key in _CONFIG_DEFAULTS}
    return _otherwise(known, _CONFIG_DEFAULTS)


def diff_hlo(a: Any, b: Any, context: int = 1) -> HloDiff:
    """The differences between two programs. Takes, and raises, what `parse_hlo_module` does.

    Each instruction of `a` is paired with the instruction of `b` that has the same place in the
    dataflow, and both get one name. So these make no difference: names and their numbers, the order
    of independent instructions, metadata, row-major layouts, channel ids, and of a backend_config
    the workspace, the algorithm's number and other bookkeeping. Changed operands, shapes,
    attributes, epilogues, alpha, beta, amax and tiles are differences, and so is a changed content
    of a fused computation. Around each difference, `context` instructions that agree are shown.

    Example:

        >>> from fp8lens import diff_hlo
        >>> text = '''HloModule m
        ... ENTRY e {
        ...   x = f32[2,3]{1,0} parameter(0)
        ...   ROOT y = f32[2,3]{1,0} negate(x)
        ... }'''
        >>> bool(diff_hlo(text, text.replace("y", "another")))
        False
        >>> bool(diff_hlo(text, text.replace("negate", "abs")))
        True
    """
    return HloDiff(tuple(_Diff(parse_hlo_module(a), parse_hlo_module(b), context).sections()))
