"""Two modules side by side, by what they compute: names, numbering, order and bookkeeping make no
difference.
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
    SPLIT_AXIS,
    coloured,
    format_instruction,
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
_MERGED = (
    "constant",
    "broadcast",
    "iota",
    "bitcast",
    "get-tuple-element",
)  # two alike are as good as one
_WORKSPACE = re.compile(
    r"s8\[\d+\]\{0\}(?=\)$)"
)  # scratch memory, last in a library call's results
_SEPARATOR, _SUFFIX = (
    re.compile(r"([._])"),
    re.compile(r"\d+|clone|remat\d*"),
)  # of names, as XLA numbers them
_CALL = re.compile(rf"(?<= )({'|'.join(CALLS)})=(\{{[^{{}}]*+\}}|[^,\s]+)")
_SIGNED_NAME, _NAME = re.compile(r"%([\w.\-]+)"), re.compile(r"%?([\w.\-]+)")
_BACKGROUND = {"-": "rgba(213,94,0,.18)", "+": "rgba(0,114,178,.18)", " ": "none"}
_LINE_BREAK = re.compile(r"\n\s*")
_HEADER_NOISE = {*MODULE_NOISE, "entry_computation_layout"}  # that ENTRY says too


def _leaves(config: Any) -> Iterator[tuple[str, Any]]:
    """A backend_config's leaves by their own name, without what says nothing of the result."""
    for key, value in (
        config.items() if isinstance(config, dict) else [("", config)] if config else ()
    ):
        if key not in _CONFIG_NOISE:
            yield from _leaves(value) if isinstance(value, dict) else [(key, value)]


def describe(i: Instruction) -> tuple[str, ...]:
    """All that an instruction says but for names (its own, its operands', its computations') and
    bookkeeping.
    """
    attributes = i.attributes
    kept = (
        f"{key}={value}"
        for key, value in attributes.items()
        if key not in _IGNORED and not (key == "sharding" and not SPLIT_AXIS.search(value))
    )
    # As text before they are sorted: two values of one key may be of types that cannot be compared.
    config = (
        "\n".join(sorted(json.dumps(leaf, default=str) for leaf in _leaves(i.backend_config)))
        if "backend_config" in attributes
        else ""
    )
    shape = _WORKSPACE.sub("s8[]", i.shape_text) if i.custom_call_target else i.shape_text
    return (i.opcode, without_default_layout(shape), i.argument, *sorted(kept), config)


class _Program:
    """A module's computations as graphs whose nodes are numbered alike, in both modules, where they
    say the same.
    """

    def __init__(self, module: HloModule, numbers: dict):
        self.module, self._numbers, self._graphs = module, numbers, {}

    def number(self, *key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    @property
    def digests(self) -> set[int]:
        return {graph.digest for graph in self._graphs.values() if graph}

    def graph(self, name: str) -> "_Graph":
        todo = [name] if name not in self._graphs else []
        while (
            todo
        ):  # what is called comes first; not by recursion: text may nest deeper than Python does
            last = todo[-1]
            if last not in self._graphs:
                self._graphs[last] = (
                    # a computation that calls itself, which HLO forbids, has no graph inside it
                    None
                )
                called = dict.fromkeys(c for i in self.module.computations[last] for c in i.called)
                todo += [c for c in called if c not in self._graphs]
            elif self._graphs[todo.pop()] is None:
                self._graphs[last] = _Graph(self, self.module.computations[last])
        return self._graphs[name]


class _Graph:
    """A computation's instructions by name, in an order that follows from the dataflow alone."""

    def __init__(self, program: _Program, computation: Computation):
        self.program, self.computation = program, computation
        self.own, self.label, self.up, self.same_as = {}, {}, {}, {}
        first = {}
        for i in self._post_order():
            self.own[i.name] = own = program.number(*describe(i))
            self.label[i.name] = label = program.number(
                own, *(g and g.digest for g in self.called(i))
            )
            # What the value is: with equal numbers two instructions compute the same from the same
            # parameters.
            self.up[i.name] = up = program.number(label, *(self.up.get(o) for o in i.operands))
            self.same_as[i.name] = first.setdefault(up, i.name) if i.opcode in _MERGED else i.name
        self.nodes = [name for name in self.label if self.same_as[name] == name]
        self.place = {name: at for at, name in enumerate(self.nodes)}

    def _post_order(self) -> Iterator[Instruction]:
        roots = [self.computation.root, *sorted(self.computation, key=lambda i: i.name)]
        seen, stack = set(), [(i, False) for i in reversed(roots)]
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
        return [self.program.graph(name) for name in i.called]

    def operands(self, name: str) -> list[str]:
        return [self.same_as[o] for o in self.computation[name].operands]

    @cached_property
    def users(self) -> dict[str, list[tuple[str, int]]]:
        users = defaultdict(list)
        for name in self.nodes:
            for at, operand in enumerate(self.operands(name)):
                users[operand].append((name, at))
        return users

    @cached_property
    def down(self) -> dict[str, int]:
        """What becomes of each value: with equal numbers two instructions go the same way to the
        root.
        """
        found = {}
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


def _pair(a: _Graph, b: _Graph) -> dict[str, str]:
    """The nodes of `b` that stand where nodes of `a` do: {name in a: name in b}.

    First those that compute the same or are used the same, then neighbours of pairs, then what is
    left by what it says.
    """
    pairs, taken = {}, set()

    def match(x: str, y: str) -> bool:
        if new := x not in pairs and y not in taken:
            pairs[x] = y
            taken.add(y)
        return new

    def alike(
        key_a: Callable[[str], Any], key_b: Callable[[str], Any], any_count: bool = False
    ) -> None:
        groups = defaultdict(lambda: ([], []))
        for side, (names, key) in enumerate(
            (
                ((x for x in a.nodes if x not in pairs), key_a),
                ((y for y in b.nodes if y not in taken), key_b),
            )
        ):
            for name in names:
                groups[key(name)][side].append(name)
        for xs, ys in groups.values():
            if any_count or len(xs) == len(ys):
                for x, y in zip(xs, ys):
                    match(x, y)

    def spread(key_a: Callable[[str], Any], key_b: Callable[[str], Any]) -> None:
        todo = list(pairs.items())
        while todo:
            x, y = todo.pop()
            near, uses = list(zip(a.operands(x), b.operands(y))), defaultdict(list)
            for user, at in b.users[y]:
                if user not in taken:
                    uses[key_b(user), at].append(user)
            near += [
                (user, found[0])
                for user, at in a.users[x]
                if user not in pairs and len(found := uses.get((key_a(user), at), ())) == 1
            ]
            todo += [(x, y) for x, y in near if key_a(x) == key_b(y) and match(x, y)]

    alike(a.up.get, b.up.get, any_count=True)
    alike(a.down.get, b.down.get)
    spread(a.label.get, b.label.get)
    alike(a.label.get, b.label.get)
    roots = a.same_as[a.computation.root.name], b.same_as[b.computation.root.name]
    if a.kind(roots[0]) == b.kind(roots[1]):
        match(*roots)
    spread(a.kind, b.kind)
    alike(a.kind, b.kind)
    return pairs


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
        return self.a != self.b


_LEFT_OUT = Row(None, None)


@dataclass(frozen=True)
class HloDiff:
    """Where two modules differ: the headings of computations, each with its rows.

    Truthy where the modules differ, as a list of differences would be; `same` is the opposite.
    `str` gives a unified text, "-" before a line of the first module and "+" before one of the
    second; Jupyter shows both side by side.
    """

    sections: tuple[tuple[str, tuple[Row, ...]], ...]

    @property
    def same(self) -> bool:
        return not self.sections

    def __bool__(self) -> bool:
        return bool(self.sections)

    def around(self, pattern: str) -> "HloDiff":
        """Only the places where a line that differs matches the regular expression."""
        found = re.compile(pattern).search
        sections = []
        for heading, rows in self.sections:
            runs = [tuple(run) for _, run in groupby(rows, lambda row: row == _LEFT_OUT)]
            kept = [
                (
                    run
                    if any(row.changed and found(f"{row.a}\n{row.b}") for row in run)
                    else (_LEFT_OUT,)
                )
                for run in runs
            ]
            merged = tuple(row for row, _ in groupby(row for run in kept for row in run))
            sections += [(heading, merged)] if any(row.changed for row in merged) else []
        return HloDiff(tuple(sections))

    def __str__(self) -> str:
        lines = []
        for heading, rows in self.sections:
            lines += [""] * bool(lines) + [heading]
            for changed, run in groupby(rows, lambda row: row.changed):
                run = list(run)
                for mark, texts in (
                    (("-", (r.a for r in run)), ("+", (r.b for r in run)))
                    if changed
                    else ((" ", (r.a or "  ..." for r in run)),)
                ):
                    lines += [_marked(mark, text) for text in texts if text]
        return visible("\n".join(lines), keep="\n\t") or "no difference"

    def _repr_html_(self) -> str:
        if self.same:
            return "<p>no difference</p>"
        style = (
            "width:50%;padding:1px 6px 1px 5ch;text-indent:-4ch;text-align:left;vertical-align:top;"
            "white-space:pre-wrap;overflow-wrap:anywhere;background:"
        )
        rows = []
        for heading, body in self.sections:
            rows.append(f'<tr><th colspan="2" style="{style}none">{html.escape(heading)}</th></tr>')
            for row in body:
                cells = (
                    (("-", row.a), ("+", row.b)) if row.changed else ((" ", row.a or "  ..."),) * 2
                )
                rows.append(
                    '<tr style="background:none">'
                    + "".join(
                        (
                            f'<td style="{style}{_BACKGROUND[mark]}">{coloured(mark + _LINE_BREAK.sub(" ", text)[1:])}</td>'
                            if text
                            else f'<td style="{style}none"></td>'
                        )
                        for mark, text in cells
                    )
                    + "</tr>"
                )
        return (
            '<table style="width:100%;table-layout:fixed;font-family:monospace;line-height:1.35">'
            f"{''.join(rows)}</table>"
        )


def _namer() -> Callable[[str], str]:
    """Gives each name without the numbers XLA puts after it, and counts anew where a name comes
    again.
    """
    counts = Counter()

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
    text = re.sub(
        r"s8\[\d+\](?=\)\s+custom-call\()", "s8[...]", format_instruction(i, False, False)
    )

    def rename(text: str, names: dict[str, str], name: re.Pattern = _SIGNED_NAME) -> str:
        return name.sub(lambda m: "%" + names.get(m[1], m[1]), text)

    head, opcode, tail = text.partition(f" {i.opcode}(")
    inside, close, tail = tail.partition(")")
    tail = _CALL.sub(lambda m: f"{m[1]}={rename(m[2], titles, _NAME)}", tail)
    line = (
        rename(head, names)
        + opcode
        + (inside if i.opcode == "constant" else rename(inside, names))
        + close
        + tail
    )
    return wrap(line + f", backend_config={json.dumps(config)}" * bool(config), INDENT)


class _Diff:
    def __init__(self, a: HloModule, b: HloModule, context: int):
        numbers = {}
        self.a, self.b, self.context = _Program(a, numbers), _Program(b, numbers), context
        self.titles, self.give = ({}, {}), _namer()

    def sections(self) -> Iterator[tuple[str, tuple[Row, ...]]]:
        a, b = (
            {k: v for k, v in p.module.attributes.items() if k not in _HEADER_NOISE}
            for p in (self.a, self.b)
        )
        header = (
            Row(*(f"  {key}={side[key]}" if key in side else None for side in (a, b)))
            for key in {**a, **b}
        )
        if rows := tuple(row for row in header if row.changed):
            yield "HloModule", rows
        todo, seen = (
            [(self.a.graph(self.a.module.entry.name), self.b.graph(self.b.module.entry.name))],
            set(),
        )
        for a, b in todo:
            known = tuple(graph and graph.computation.name for graph in (a, b))
            one_side = (
                (b or a).digest in (self.a if b else self.b).digests
                if None in known
                else a.digest == b.digest
            )
            if known in seen or one_side:
                continue
            seen.add(known)
            rows, called = self.compare(a, b)
            todo += called
            entry = "ENTRY " if (a or b).computation.is_entry else ""
            title = self.title(a, b)
            if any(row.changed for row in rows):
                yield f"{entry}%{title}", rows

    def title(self, a: _Graph | None, b: _Graph | None) -> str:
        """The name to show of a computation, or of two that stand for each other."""
        found = [
            t[g.computation.name]
            for g, t in zip((a, b), self.titles)
            if g and g.computation.name in t
        ]
        title = found[0] if found else self.give((a or b).computation.name)
        for graph, titles in zip((a, b), self.titles):
            if graph:
                titles.setdefault(graph.computation.name, title)
        return title

    def compare(self, a: _Graph | None, b: _Graph | None) -> tuple[tuple[Row, ...], list]:
        """Rows in the order of `a`, what only `b` has ahead of what uses it; and the computations
        called.
        """
        pairs = _pair(a, b) if a and b else {}
        back, give = {y: x for x, y in pairs.items()}, _namer()
        nodes_a, nodes_b = a.nodes if a else [], b.nodes if b else []
        names_a = {x: give(a.base(x)) for x in nodes_a}
        names_b = {y: names_a[back[y]] if y in back else give(b.base(y)) for y in nodes_b}
        place = {}
        for y in reversed(nodes_b):
            first_use = min((place[user][0] for user, _ in b.users[y]), default=len(nodes_a))
            place[y] = (a.place[back[y]], 1) if y in back else (first_use, 0)
        order = sorted(
            [((at, 1), x, pairs.get(x)) for at, x in enumerate(nodes_a)]
            + [(place[y], None, y) for y in nodes_b if y not in back],
            key=lambda entry: entry[0],
        )
        changed, called = [], []
        for _, x, y in order:
            one, two = (a.computation[x] if x else None), (b.computation[y] if y else None)
            calls = list(zip_longest(a.called(one) if x else (), b.called(two) if y else ()))
            called += calls
            for pair in calls:
                self.title(*pair)
            changed.append(
                not (x and y)
                or a.own[x] != b.own[y]
                or one.is_root != two.is_root
                or ([names_a[o] for o in a.operands(x)] != [names_b[o] for o in b.operands(y)])
            )
        for graph, names in ((a, names_a), (b, names_b)):
            names |= {name: names[node] for name, node in graph.same_as.items()} if graph else {}
        rows = []
        near = [
            any(changed[max(at - self.context, 0) : at + self.context + 1])
            for at in range(len(order))
        ]
        for (_, x, y), is_near, is_changed in zip(order, near, changed):
            if not is_near:
                rows += [_LEFT_OUT] if not rows or rows[-1] != _LEFT_OUT else []
                continue
            configs = [
                dict(_leaves(g.computation[n].backend_config)) if n else {}
                for g, n in ((a, x), (b, y))
            ]
            other = configs[::-1] if x and y else [_CONFIG_DEFAULTS] * 2
            shown = [
                {
                    k: v
                    for k, v in config.items()
                    if (x and y or k in _CONFIG_DEFAULTS) and v != than.get(k)
                }
                for config, than in zip(configs, other)
            ]
            texts = [
                _text(g, n, names, titles, config) if n else None
                for g, n, names, titles, config in zip(
                    (a, b), (x, y), (names_a, names_b), self.titles, shown
                )
            ]
            rows.append(Row(*texts) if is_changed else Row(texts[0], texts[0]))
        return tuple(rows), called


def diff_hlo(a: Any, b: Any, context: int = 1) -> HloDiff:
    """What tells two programs apart: anything `parse_hlo_module` takes, and the errors it raises.

    Each instruction of `a` is paired with the one of `b` in its place in the dataflow, and both get
    one name. So these make no difference: names and their numbers, the order of independent
    instructions, metadata, row-major layouts, channel ids, and of a backend_config the workspace,
    the algorithm's number and other bookkeeping. Changed operands, shapes, attributes, epilogues,
    alpha, beta, amax and tiles do; so does a fused computation's content. Neighborhood each difference
    stay `context` instructions that agree.
    """
    return HloDiff(tuple(_Diff(parse_hlo_module(a), parse_hlo_module(b), context).sections()))
