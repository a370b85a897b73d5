"""What counts as a difference between two modules: what they compute does; names, numbering, order
and bookkeeping do not.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, zip_longest
from typing import Any

from fp8lens.hlo.parse import CALLS, Computation, HloModule, Instruction, parse_hlo_module, visible
from fp8lens.hlo.text import (
    INDENT,
    MODULE_NOISE,
    NOISE,
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
_NAME = re.compile(r"%([\w.\-]+)")
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


class _Graph:
    """A computation's instructions by name, in an order that follows from the dataflow alone. None
    of a computation that a module lacks.
    """

    def __init__(self, computation: Computation | None, graphs: "_Graphs"):
        self.computation = computation
        # With equal numbers of `own` two instructions say the same, of `label` what they call
        # computes the same too, and of `up` they compute the same value from the same parameters.
        # With an equal `kind` they do the same of something else.
        self.own: dict[str, int] = {}
        self.label: dict[str, int] = {}
        self.up: dict[str, int] = {}
        self.kind: dict[str, tuple[str, str]] = {}
        self.same_as: dict[str, str] = {}  # which of the instructions that are merged stands for it
        first: dict[int, str] = {}
        for i in self._post_order():
            called = (graphs[name].digest for name in i.called)
            own = graphs.numbers[describe(i)]
            label = graphs.numbers[(own, *called)]
            up = graphs.numbers[(label, *(self.up[o] for o in i.operands))]
            self.own[i.name], self.label[i.name], self.up[i.name] = own, label, up
            self.kind[i.name] = i.opcode, i.argument if i.opcode == "parameter" else ""
            self.same_as[i.name] = first.setdefault(up, i.name) if i.opcode in _MERGED else i.name
        self.nodes = [name for name in self.up if self.same_as[name] == name]
        root = [self.up[computation.root.name]] if computation else []
        every = sorted(self.up[name] for name in self.nodes)
        # Equal for computations that compute the same.
        self.digest: int = graphs.numbers[("computation", *root, *every)]

    def __getitem__(self, name: str) -> Instruction:
        assert self.computation is not None
        return self.computation[name]

    def _post_order(self) -> Iterator[Instruction]:
        if self.computation is None:
            return
        roots = [self.computation.root, *sorted(self.computation, key=lambda i: i.name)]
        seen: set[Instruction] = set()
        stack = [(i, False) for i in reversed(roots)]
        while stack:
            i, done = stack.pop()
            if done:
                yield i
            elif i not in seen:
                seen.add(i)
                stack += [(i, True), *((self[o], False) for o in reversed(i.operands))]

    @cached_property
    def near(self) -> dict[str, list[tuple[str, int]]]:
        """The operands and the users of each node: which of its operands the one is, and minus
        that and one, as which operand the other reads it.
        """
        found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for name in self.nodes:
            for at, operand in enumerate(self[name].operands):
                node = self.same_as[operand]
                found[name].append((node, at))
                found[node].append((name, -1 - at))
        return found


class _Graphs(dict[str, _Graph]):
    """A module's computations as graphs, an empty one of "". Two modules have the same `numbers`,
    so that nodes are numbered alike where they say the same. RecursionError for a computation that
    calls itself, which HLO forbids.
    """

    def __init__(self, module: HloModule, numbers: defaultdict[tuple, int]):
        self.module, self.numbers = module, numbers
        for name in module.computations:  # in the text, what is called comes first
            self[name]

    def __missing__(self, name: str) -> _Graph:
        self[name] = graph = _Graph(self.module.computations.get(name), self)
        return graph


class _Pairs:
    """The nodes of `b` that stand where nodes of `a` do: `of` is {name in a: name in b}.

    First those that compute the same, then neighbours of pairs, then what is left by what it says.
    """

    def __init__(self, a: _Graph, b: _Graph):
        self.of: dict[str, str] = {}
        self.back: dict[str, str] = {}
        whole = [(x, 0) for x in a.nodes], [(y, 0) for y in b.nodes]
        self._alike(*whole, a.up, b.up, any_count=True)
        for keys in ((a.label, b.label), (a.kind, b.kind)):
            todo = [*self.of.items()]
            while todo:
                x, y = todo.pop()
                todo += self._alike(a.near[x], b.near[y], *keys)
            self._alike(*whole, *keys)

    def _alike(
        self,
        xs: Iterable[tuple[str, int]],
        ys: Iterable[tuple[str, int]],
        key_a: Mapping[str, Any],
        key_b: Mapping[str, Any],
        any_count: bool = False,
    ) -> list[tuple[str, str]]:
        """Pair what is left of these nodes by key and place, in order; where there are as many in
        `a` as in `b`, or of `any_count`. The new pairs.
        """
        groups: defaultdict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for x, at in xs:
            groups[key_a[x], at][0].append(x)
        for y, at in ys:
            groups[key_b[y], at][1].append(y)
        new = []
        for group in groups.values():
            of_a = [x for x in group[0] if x not in self.of]
            of_b = [y for y in group[1] if y not in self.back]
            if any_count or len(of_a) == len(of_b):
                for x, y in zip(of_a, of_b, strict=False):
                    self.of[x], self.back[y] = y, x
                    new.append((x, y))
        return new


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
_CONTEXT = 1  # instructions that agree, shown before and after a difference


@dataclass(frozen=True, repr=False)
class HloDiff:
    """Where two modules differ: the headings of computations, each with its rows.

    It is true if the modules differ, like a list of differences; `same` is the opposite. `str`
    gives a unified text, "-" before a line of the first module and "+" before one of the second.
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
            kept: list[Row] = []
            for _, group in groupby(rows, _LEFT_OUT.__eq__):
                run = [*group]
                is_there = any(row.changed and found(f"{row.a}\n{row.b}") for row in run)
                kept += run if is_there else [_LEFT_OUT]
            if any(row.changed for row in kept):
                sections.append((heading, tuple(row for row, _ in groupby(kept))))
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

    __repr__ = __str__


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


class _Side:
    """One of two computations that are compared, the names to show of its instructions, and those
    of the computations that they call.
    """

    def __init__(self, graph: _Graph, names: dict[str, str], titles: dict[str, str]):
        self.graph, self.titles = graph, titles
        self.names = {name: names[node] for name, node in graph.same_as.items()}

    def says(self, name: str | None) -> tuple:
        """What is compared of an instruction: with equal tuples two of a pair say the same."""
        if name is None:
            return ()
        i = self.graph[name]
        return self.graph.own[name], i.is_root, [self.names[o] for o in i.operands]

    def called(self, name: str | None) -> tuple[str, ...]:
        """The computations that an instruction calls."""
        return () if name is None else self.graph[name].called

    def config(self, name: str | None) -> dict[str, Any] | None:
        """The leaves of an instruction's backend_config."""
        return None if name is None else dict(_leaves(self.graph[name].backend_config))

    def text(self, name: str | None, other: dict[str, Any] | None) -> str | None:
        """An instruction as `print_hlo_module` has it, under the names to show, with what its
        backend_config has otherwise than the `other`; where there is no other, than XLA's defaults.
        """
        if name is None:
            return None
        text = _SCRATCH.sub("s8[...]", format_instruction(self.graph[name], False, False))
        text = _NAME.sub(self._shown, text)
        config = {}
        for key, value in _leaves(self.graph[name].backend_config):
            usual = _CONFIG_DEFAULTS.get(key, value) if other is None else other.get(key)
            if value != usual:
                config[key] = value
        if config:
            text += f", backend_config={json.dumps(config)}"
        return wrap(text, INDENT)

    def _shown(self, signed: re.Match) -> str:
        name = signed[1]
        return f"%{self.names.get(name) or self.titles.get(name) or name}"


def _in_order(a: _Graph, b: _Graph, pairs: _Pairs) -> list[tuple[str | None, str | None]]:
    """All nodes, those of a pair together, in the order of `a`; what only `b` has ahead of what
    uses it.
    """
    place = {x: at for at, x in enumerate(a.nodes)}
    ahead: dict[str, int] = {}
    for y in reversed(b.nodes):
        users = (ahead[user] for user, at in b.near[y] if at < 0)
        ahead[y] = place[pairs.back[y]] if y in pairs.back else min(users, default=len(place))
    order = [((at, 1), x, pairs.of.get(x)) for x, at in place.items()]
    alone = [((ahead[y], 0), None, y) for y in b.nodes if y not in pairs.back]
    return [(x, y) for _, x, y in sorted([*order, *alone], key=lambda entry: entry[0])]


class _Diff:
    """Two programs, and which of their computations are to be compared: first their ENTRY, then
    what is called.
    """

    def __init__(self, a: HloModule, b: HloModule):
        numbers: defaultdict[tuple, int] = defaultdict(count().__next__)
        self.a, self.b = _Graphs(a, numbers), _Graphs(b, numbers)
        self.todo: list[tuple[str, str]] = [(a.entry.name, b.entry.name)]
        # Of computations of `b`, the names of those of `a` that they stand for.
        self.titles: dict[str, str] = {}

    def sections(self) -> Iterator[tuple[str, tuple[Row, ...]]]:
        """The headings of computations that differ, with their rows; first the module's header."""
        a, b = self.a.module.attributes, self.b.module.attributes
        header = []
        for key in {**a, **b}:
            if key not in _HEADER_NOISE and a.get(key) != b.get(key):
                said = [f"  {key}={of[key]}" if key in of else None for of in (a, b)]
                header.append(Row(*said))
        if header:
            yield "HloModule", tuple(header)
        seen: set[tuple[str, str]] = set()
        for x, y in self.todo:
            if (x, y) in seen or self._is_same(x, y):
                continue
            seen.add((x, y))
            rows = self.compare(self.a[x], self.b[y])
            if any(row.changed for row in rows):
                is_entry = x == self.a.module.entry.name
                yield f"ENTRY %{_namer()(x)}" if is_entry else f"%{x or y}", rows

    def _is_same(self, x: str, y: str) -> bool:
        """Whether both compute the same; of one alone, whether the other module has the same
        somewhere.
        """
        a, b = self.a[x].digest, self.b[y].digest
        if x and y:
            return a == b
        others, digest = (self.b, a) if x else (self.a, b)
        return any(graph.digest == digest for graph in others.values())

    def compare(self, a: _Graph, b: _Graph) -> tuple[Row, ...]:
        """The rows of two computations."""
        pairs, give = _Pairs(a, b), _namer()
        names = {x: give(x) for x in a.nodes}
        of_b = {y: names[pairs.back[y]] if y in pairs.back else give(y) for y in b.nodes}
        one, two = _Side(a, names, {}), _Side(b, of_b, self.titles)
        order = _in_order(a, b, pairs)
        for x, y in order:
            for called in zip_longest(one.called(x), two.called(y), fillvalue=""):
                self.todo.append(called)
                if called[0]:
                    self.titles[called[1]] = called[0]
        changed = [one.says(x) != two.says(y) for x, y in order]
        rows: list[Row] = []
        for at, (x, y) in enumerate(order):
            if any(changed[max(at - _CONTEXT, 0) : at + _CONTEXT + 1]):
                text = one.text(x, two.config(y))
                rows.append(Row(text, two.text(y, one.config(x)) if changed[at] else text))
            elif not rows or rows[-1] != _LEFT_OUT:
                rows.append(_LEFT_OUT)
        return tuple(rows)


def diff_hlo(a: Any, b: Any) -> HloDiff:
    """The differences between two programs. Takes, and raises, what `parse_hlo_module` does.

    Each instruction of `a` is paired with the instruction of `b` that has the same place in the
    dataflow, and both get one name. So these make no difference: names and their numbers, the order
    of independent instructions, metadata, row-major layouts, channel ids, and of a backend_config
    the workspace, the algorithm's number and other bookkeeping. Changed operands, shapes,
    attributes, epilogues, alpha, beta, amax and tiles are differences, and so is a changed content
    of a fused computation. Before and after each difference an instruction
    that agrees is shown.

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
    return HloDiff(tuple(_Diff(parse_hlo_module(a), parse_hlo_module(b)).sections()))
