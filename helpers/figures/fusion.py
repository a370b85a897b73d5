"""The graph a program is, and what of it became one kernel: a picture for the chapters.

Drawn is the program that XLA's gemm rewriter was given: the reader's operations, by the names that
JAX gave them. What became of each is not guessed. XLA keeps an instruction's name and metadata
where it moves it into a kernel of its own. What the rewriter took away around a dot is in that
dot's call as far as the call's configuration accounts for it, if the call then reads and writes
what this part of the graph reads and writes. All else is drawn outside every box.
"""

import collections
import dataclasses
import graphlib
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import matplotlib as mpl

from fp8lens import inspect
from fp8lens.hlo.dataflow import Flow
from fp8lens.hlo.ops import DOTS, ELEMENTWISE, MOVES
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module
from fp8lens.hlo.program import results
from fp8lens.hlo.text import size
from fp8lens.inspection import Inspection
from fp8lens.matmul.attribution import VIEWS, Where, attribute, converts_scale, written_at
from fp8lens.matmul.epilogue import clamp_bounds
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.unfused import inside
from helpers.figures.layers import Column, arrange
from helpers.figures.plots import INK, PALETTE, Picture, ink_on, text_width

MOST = 40  # nodes that a picture can hold
_UNDRAWN = frozenset("parameter constant tuple iota".split())
_ARITHMETIC = ("multiply", "divide", "add", "subtract")
# What jax.nn.gelu is made of: it leaves its name in no operation, other functions do.
_GELU = {"integer_pow": 2, "mul": 4, "add": 2, "tanh": 1}


# The graph that is drawn --------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Box:
    """What became one call or kernel."""

    kernel: Instruction
    caption: tuple[str, ...]
    colour: str
    reads: dict[Any, set[int]] = dataclasses.field(
        default_factory=dict
    )  # numbers of parameters, results of boxes


@dataclasses.dataclass(eq=False)
class Node:
    """`kind`: "parameter", "result", "dot", "operation", or "added", which is XLA's own. `box` is
    None where it is not known which kernel does it, and for parameters and results.
    """

    label: str
    kind: str
    box: Box | None = None
    detail: str = ""
    parts: tuple[Instruction, ...] = ()
    reads: tuple[Instruction, ...] = ()  # scalars and vectors in its label


@dataclasses.dataclass
class Graph:
    """Nodes, in the program's order; edges between them; boxes."""

    nodes: list[Node]
    edges: dict[tuple[Node, Node], None]
    boxes: list[Box]

    @property
    def lost(self) -> list[Node]:
        """What is not attributed to a kernel."""
        return [n for n in self.nodes if n.box is None and n.kind in ("operation", "dot")]


def _op(i: Instruction) -> str:
    """What JAX calls an operation; of one that XLA put there, which has the name of what it was put
    there for, the opcode.
    """
    name = (i.metadata and i.metadata.op_name or "").rpartition("/")[2]
    return name if name and i.opcode not in MOVES | {"convert"} else i.opcode


def _groups(
    shown: list[Instruction], sources: Callable, where: Where
) -> list[tuple[str, list[Instruction]]]:
    """Operations, with a name: one each, or together those of one function, as clip, that the same
    kernels do.
    """
    scopes = {
        i: re.findall(r"(jit\(([^()]*)\))/", i.metadata.op_name or "")[1:] if i.metadata else []
        for i in shown
    }
    own = {name for i in shown if i.opcode in DOTS for _, name in scopes[i]}
    function = {
        i: next(
            (
                name
                for _, name in scopes[i]
                if name not in own and (hasattr(jax.nn, name) or hasattr(jax.numpy, name))
            ),
            "",
        )
        for i in shown
    }
    group: dict[Instruction, list[Instruction]] = {i: [i] for i in shown}
    for i in shown:
        for j in sources(i):
            if (
                j in group
                and group[j] is not group[i]
                and ELEMENTWISE >= {i.opcode, j.opcode}
                and (written_at(i), function[i], where.get(i))
                == (written_at(j), function[j], where.get(j))
            ):
                joined = sorted(group[j] + group[i], key=lambda k: k.index)
                group |= dict.fromkeys(joined, joined)
    named = []
    for some in {id(some): some for some in group.values()}.values():
        parts = [(function[some[0]], some)]
        if not function[some[0]]:
            windows = (some[n : n + sum(_GELU.values())] for n in range(len(some)))
            gelu = next((w for w in windows if collections.Counter(map(_op, w)) == _GELU), [])
            parts = [("gelu", gelu)] * bool(gelu)
            for i in some:  # a function that XLA writes out, as erf, has one name and many opcodes
                whole = [j for j in some if _op(j) == _op(i) and j not in gelu]
                whole = whole if len({j.opcode for j in whole}) > 1 else [i]
                parts += [(_op(i), whole)] * (i not in gelu and whole[0] is i)
        for name, part in parts:
            beside = (
                set()
            )  # what is computed from the part, and is not in it: then nothing in it may be of that
            for j in shown:
                beside |= (
                    {j}
                    if j not in part and any(k in beside or k in part for k in sources(j))
                    else set()
                )
            whole = not any(k in beside for j in part for k in sources(j))
            named += [(name, part)] if whole else [(_op(j), [j]) for j in part]
    return sorted(named, key=lambda item: item[1][0].index)


def _graph(inspection: Inspection) -> Graph:
    stages = inspection._stages
    first = next(
        (s for s in stages if s.before in ("triton-gemm-rewriter", "cublas-gemm-rewriter")),
        stages[0],
    )
    given = parse_hlo_module(first.text)
    _check(given)
    where = attribute(
        given, parse_hlo_module(stages[-1].text), inspection.module, inspection.report.rows
    )
    box_of = {line.kernel.instruction: _box(inspection, line) for line in inspection.ledger}
    flow = Flow(inspection.module, launches)
    for kernel, inputs in flow.inputs.items():
        for producer in flow.of(frozenset().union(*inputs)):
            box_of[kernel].reads.setdefault(
                box_of.get(producer.instruction, producer.element), set()
            ).add(producer.element)
    through = lambda i: i.opcode in VIEWS or converts_scale(i)

    def sources(i: Instruction) -> list[Instruction]:
        return [
            j
            for k in map(i.computation.get, i.operands)
            for j in (sources(k) if through(k) else [k])
        ]

    graph = Graph([], {}, list(box_of.values()))
    nodes_of: dict[Instruction, list[Node]] = {}  # one for each kernel that does it
    for p in given.entry.parameters:
        if len(p.shape.dims) > 1:
            nodes_of[p] = [Node(_name(p), "parameter", detail=p.shape.brief)]
            graph.nodes += nodes_of[p]
    shown = [i for i in given.entry if not through(i) and i.opcode not in _UNDRAWN]
    _fits_a_picture(len(shown) / 10)  # a function such as gelu is ten operations, and one node
    for name, group in _groups(shown, sources, where):
        read = dict.fromkeys(
            j for i in group for j in sources(i) if j.opcode in ("parameter", "constant")
        )
        label = [
            _name(j)
            for j in read
            if j not in nodes_of
            and (
                j.opcode == "parameter"
                or group == [i for i in group if i.opcode in _ARITHMETIC][:1]
            )
        ]
        label += [_number(bound) for i in group if name == "clip" for bound in clamp_bounds(i)]
        name = f"convert to {group[-1].shape.dtype}" if name == "convert" else name
        kind = "dot" if group[0].opcode in DOTS else "operation"
        for box in [box_of[kernel] for kernel in where.get(group[0], ())] or [None]:
            graph.nodes.append(
                Node(f"{name} {', '.join(label)}".strip(), kind, box, "", tuple(group), tuple(read))
            )
            for i in group:
                nodes_of.setdefault(i, []).append(graph.nodes[-1])
    for node in graph.nodes:
        # A reduction may be done by two kernels, one after the other.
        steps = (
            [n for n in nodes_of[node.parts[0]] if n.box in node.box.reads]
            if node.box and node.parts
            else []
        )
        read = [steps] if steps else [nodes_of.get(j, []) for i in node.parts for j in sources(i)]
        graph.edges |= {(found, node): None for some in read if (found := _nearest(some, node))}
    root = given.entry.root
    for i in [given.entry[name] for name in root.operands] if root.opcode == "tuple" else [root]:
        for j in [i] if not through(i) else sources(i):
            if j in nodes_of:
                graph.nodes.append(Node("result", "result", detail=i.shape.brief))
                graph.edges[nodes_of[j][-1], graph.nodes[-1]] = None
    given_as = {nodes_of[p][0]: p.parameter_number for p in nodes_of if p.opcode == "parameter"}
    _add_kernels(graph, flow, given_as)
    _dissolve(graph)
    _fits_a_picture(len(graph.nodes))
    return graph


def _fits_a_picture(nodes: float) -> None:
    if nodes > MOST:
        raise ValueError(
            f"plot_fusion draws up to {MOST} nodes, and this program has more: inspect a part of"
            " it, a function of its own."
        )


def _nearest(some: list[Node], reader: Node) -> Node | None:
    """Of the nodes of one value, each in another kernel, the one that is read."""
    if reader in some or not some:
        return None
    near = [n for n in some if n.box is reader.box] or [
        n for n in some if reader.box and n.box in reader.box.reads
    ]
    return (near or some)[0]


def _name(i: Instruction) -> str:
    if i.opcode == "constant":
        return _number(i.literal or "")
    return (i.metadata and i.metadata.op_name or i.name) + (
        f"[{i.shape.dims[0]}]" if len(i.shape.dims) == 1 else ""
    )


def _number(literal: str) -> str:
    return f"{float(literal):g}" if re.fullmatch(r"[-+]?[.\d]+(e[-+]?\d+)?", literal) else literal


def _check(given: HloModule) -> None:
    inner = [i for i in given if i.opcode in DOTS and i.computation is not given.entry]
    if inner:
        raise ValueError(
            f"plot_fusion draws a program without loops and branches, and {inner[0].name} is in"
            " one: inspect the loop's body, a function of its own."
        )
    if not any(i.opcode in DOTS for i in given.entry):
        raise ValueError(
            "plot_fusion draws what became of a matmul, and this program has none: give it a"
            " function with a dot."
        )


def _box(inspection: Inspection, line: Line) -> Box:
    kernel, moved = line.kernel.instruction, size(line.nbytes)
    row = next((row for row in inspection.report.rows if row.instruction is kernel), None)
    if row is None:
        return Box(kernel, (f"a kernel of XLA's: {moved}",), PALETTE[4])
    moved = (
        f"multiplies {row.math_dtype}, " * (not row.is_fp8)
        + f"epilogue {row.epilogue}, "
        + ("amax, " * row.amax)
        + moved
    )
    caption = (
        f"one call: {kernel.custom_call_target}"
        if kernel.custom_call_target
        else (f"a kernel of {row.library.title() if row.library == 'triton' else 'XLA'}'s")
    )
    return Box(kernel, (caption, moved), PALETTE[0 if row.is_fp8 else 1])


def _dissolve(graph: Graph) -> None:
    """No kernel reads what is made of its results: where boxes say so, they are wrong, and go."""
    readers: dict[Any, set] = collections.defaultdict(set)
    for a, b in graph.edges:
        if a.box is None or a.box is not b.box:
            readers[a.box or a].add(b.box or b)
    wrong = set()
    for box in graph.boxes:
        reached: set = set()
        todo = [box]
        while todo:
            some = readers[todo.pop()] - reached
            reached |= some
            todo += some
        if box in reached:
            wrong.add(box)
    for node in graph.nodes:
        if node.box in wrong:
            node.box = None


def _add_kernels(graph: Graph, flow: Flow, parameters: dict[Node, int]) -> None:
    """Kernels that do nothing the program asked for, on the way of what they work on."""
    drawn = {node.box for node in graph.nodes}
    results = [node for node in graph.nodes if node.kind == "result"]
    added = [box for box in graph.boxes if box not in drawn]
    reads = {box: set(box.reads) for box in graph.boxes}
    for box in added:  # through others of their kind
        for other in [other for other in reads[box] if other in added]:
            reads[box] |= reads[other]
    for box in reversed(added):
        work = [j.opcode for j in inside(box.kernel) if j.opcode not in VIEWS | _UNDRAWN]
        node = Node(", ".join(dict.fromkeys(work)) or "copy", "added", box)
        readers = {other for other in graph.boxes if box in other.reads}
        returned = [
            result
            for result, producers in zip(results, flow.results)
            if any(producer.instruction is box.kernel for producer in flow.of(producers))
        ]
        for a, b in list(graph.edges):
            if (parameters.get(a) in reads[box] or a.box in reads[box]) and (
                b.box in readers or b in returned
            ):
                del graph.edges[a, b]
                graph.edges[a, node] = graph.edges[node, b] = None
        for other in graph.nodes:
            if other.box in readers and any(
                p.opcode == "parameter" and p.parameter_number in reads[box] for p in other.reads
            ):
                graph.edges[node, other] = None
        graph.nodes.insert(0, node)


# Layout and drawing -------------------------------------------------------------------------------

FONT, SMALL = 11, 9.5  # points
LINE, PAD, GAP, HEAD = (
    0.2,
    0.13,
    0.2,
    0.25,
)  # inches: a line of a caption; around nodes, between rows, above the first


def _tall(node: Any) -> float:
    return 0.46 if getattr(node, "detail", "") else 0.3


def _ranks(keys: list, edges: Iterable[tuple]) -> dict:
    """How far down each key of an acyclic graph stands: as far as the longest way to it; one
    without a way to it, just above who reads it, where nothing else stands.
    """
    above: dict = {key: [] for key in keys}
    below: dict = {key: [] for key in keys}
    for a, b in edges:
        if a is not b:
            above[b].append(a)
            below[a].append(b)
    rank: dict = {}
    for key in graphlib.TopologicalSorter(above).static_order():
        rank[key] = max((rank[other] + 2 for other in above[key]), default=0)
    for key in keys:
        if below[key] and not above[key]:
            rank[key] = min(rank[other] for other in below[key]) - 1
    levels = sorted(set(rank.values()))
    return {key: levels.index(rank[key]) for key in keys}


class _Bend:
    """Where a long edge passes a row."""

    detail = ""


Chains = dict[
    tuple[Node, Node], list[Node | _Bend]
]  # the places that each edge goes through, its ends included


def _layers(graph: Graph) -> tuple[list[list[Column]], dict[Box, Column], Chains]:
    """The bands of a graph, the columns of its boxes, and the ways of its edges. The band that a
    box takes is its own, or shared with what stands beside it.
    """
    owner = {node: node.box or node for node in graph.nodes}
    owners = list(dict.fromkeys(owner.values()))
    band = _ranks(owners, [(owner[a], owner[b]) for a, b in graph.edges])
    row: dict[Node, int] = {}
    height = [1] * (1 + max(band.values()))
    for one in owners:
        nodes = [node for node in graph.nodes if owner[node] is one]
        row |= _ranks(nodes, [(a, b) for a, b in graph.edges if owner[a] is one is owner[b]])
        height[band[one]] = max(height[band[one]], *(row[node] + 1 for node in nodes))

    bands: list[list[Column]] = [[] for _ in height]
    boxes: dict[Box, Column] = {}
    for one in owners:
        if isinstance(one, Box):
            lines = [
                text_width(line, SMALL + 0.5, "normal" if n else "bold")
                for n, line in enumerate(one.caption)
            ]
            column = boxes[one] = Column([[] for _ in range(height[band[one]])], PAD, max(lines))
            for node in graph.nodes:
                if node.box is one:
                    column.rows[row[node]].append(node)
        else:
            column = Column([[one]] * height[band[one]])
        bands[band[one]].append(column)

    chains: Chains = {}
    for a, b in graph.edges:
        first, last = band[owner[a]], band[owner[b]]
        passed = []  # rows in which the edge bends
        if a.box:
            passed += boxes[a.box].rows[row[a] + 1 : row[b] if first == last else None]
        for n in range(first + 1, last):
            bands[n].append(Column([[]]))
            passed += bands[n][-1].rows
            bands[n][-1].rows *= height[n]
        if b.box and first != last:
            passed += boxes[b.box].rows[: row[b]]
        chains[a, b] = [a, *(_Bend() for _ in passed), b]
        for places, bend in zip(passed, chains[a, b][1:]):
            places.append(bend)
    return bands, boxes, chains


def _wide(place: Node | _Bend) -> float:
    if isinstance(place, _Bend):
        return 0.1
    weight = "bold" if place.kind == "dot" else "normal"
    return 0.22 + max(text_width(place.label, FONT, weight), text_width(place.detail, SMALL))


def _layout(graph: Graph) -> tuple[dict, dict, dict]:
    """(x, y, width) of nodes in inches, y downwards; for each edge the points that it goes through;
    for each box its left, top, right and bottom.
    """
    bands, columns, chains = _layers(graph)
    wide = {place: _wide(place) for band in bands for column in band for place in column.places}
    x = arrange(
        bands, [step for chain in chains.values() for step in itertools.pairwise(chain)], wide
    )
    operands = [
        [x[a] for a, b in graph.edges if b is node] for node in graph.nodes if node.kind == "dot"
    ]
    swapped = [some for some in operands if len(some) > 1 and some[0] > some[-1]]
    if 2 * len(swapped) > len(operands):
        x = {
            place: -at for place, at in x.items()
        }  # what is multiplied from the left stands on the left
    left = min(column.extent(x, wide)[0] for band in bands for column in band)
    x = {place: at - left + 0.08 for place, at in x.items()}

    y: dict[Node | _Bend, float] = {}
    straight: dict[
        Node | _Bend, tuple[float, float]
    ] = {}  # from where to where edges through a place go straight
    boxes: dict[Box, tuple[float, float, float, float]] = {}
    down = 0.08
    for band in bands:
        here = {box: column for box, column in columns.items() if column in band}
        head = max((LINE * len(box.caption) + HEAD for box in here), default=0.0)
        top, down = down, down + head
        for rows in zip(*(column.rows for column in band)):
            places = list(itertools.chain.from_iterable(rows))
            tall = max((_tall(place) for place in places if place not in y), default=0.3)
            for place in places:
                y.setdefault(place, down + tall / 2)
                straight[place] = (down, down + tall)
            down += tall + GAP
        bottom = down - GAP + (PAD if here else 0.0)
        for column in band:
            if column not in here.values():  # beside a box
                straight |= dict.fromkeys(column.places, (top, bottom))
        for box, column in here.items():
            low, high = column.extent(x, wide)
            lowest = max(y[place] + _tall(place) / 2 for place in column.places)
            boxes[box] = (low, top + head - LINE * len(box.caption) - HEAD, high, lowest + PAD)
            for place in column.rows[0]:  # edges enter and leave a box upright
                straight[place] = (boxes[box][1], straight[place][1])
            for place in column.rows[-1]:
                straight[place] = (straight[place][0], boxes[box][3])
        down += HEAD if here else 0.0
    ways: dict[tuple[Node, Node], list[tuple[float, float]]] = {}
    for (a, b), chain in chains.items():
        start, end = y[a] + _tall(a) / 2, y[b] - _tall(b) / 2
        points = [(x[place], at) for place in chain for at in straight[place]]
        ways[a, b] = [(across, at) for across, at in points if start + 0.01 < at < end - 0.01]
    return {node: (x[node], y[node], wide[node]) for node in graph.nodes}, ways, boxes


def plot_fusion(x: Any, *args: Any, **options: Any) -> Picture:
    """The graph of a program around its matmuls, top to bottom: what became one call or kernel is
    in one box.

    Takes what `inspect` takes, or what it returned: `plot_fusion(inspect(fn, *args))`. Drawn is the
    program as XLA's gemm rewriter was given it, with scalars and vectors in the operation that
    reads them; what cannot be attributed to a kernel for sure is outside all boxes, dashed. Raises
    TypeError for a saved program; ValueError for one without a matmul, with a matmul in a loop, or
    with more than MOST nodes.
    """
    inspection = inspect(x, *args, **options)
    if not inspection.is_ours:
        raise TypeError(
            "a saved or compiled program says no more what XLA's rewriter was given: give"
            " plot_fusion the function and its arguments, or inspect(fn, *args)."
        )
    graph = _graph(inspection)
    place, ways, boxes = _layout(graph)
    note = "dashed: not attributed to a kernel" if graph.lost else ""
    width = 0.08 + max(
        [x + w / 2 for x, _, w in place.values()]
        + [right for _, _, right, _ in boxes.values()]
        + [text_width(note, SMALL)]
    )
    height = (
        0.08
        + LINE * bool(note)
        + max(
            [place[n][1] + _tall(n) / 2 for n in graph.nodes]
            + [bottom for *_, bottom in boxes.values()]
        )
    )
    figure = Picture(figsize=(width, height))
    figure.alt = _alt(graph)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for box, (left, top, right, bottom) in boxes.items():
        _rounded(axes, left, top, right, bottom, facecolor=box.colour, alpha=0.14, linewidth=0)
        _rounded(
            axes, left, top, right, bottom, facecolor="none", edgecolor=box.colour, linewidth=1.5
        )
        for n, line in enumerate(box.caption):
            _write(
                axes,
                left + PAD,
                top + 0.07 + LINE * (n + 0.5),
                line,
                SMALL + 0.5,
                ha="left",
                weight="normal" if n else "bold",
            )
    told = set()
    for a, b in graph.edges:
        points = [
            (place[a][0], place[a][1] + _tall(a) / 2),
            *ways[a, b],
            (place[b][0], place[b][1] - _tall(b) / 2),
        ]
        if (
            a.box and b.box and b.box is not a.box and (a, b.box) not in told
        ):  # what goes through memory
            told.add((a, b.box))
            alone = sum(of is a and to.box is not a.box for of, to in graph.edges) == 1
            x, y = [(x, boxes[a.box][3] + 0.12) for x, y in points if y < boxes[a.box][3]][-1]
            leftwards = points[-1][0] <= x + 0.01
            if not alone:  # where it arrives
                x, y = next((x, boxes[b.box][1] - 0.1) for x, y in points if y > boxes[b.box][1])
            text, right = _through_memory(a.box, b.box), leftwards == alone
            right = right and x + text_width(text, SMALL) < width - 0.16
            _write(
                axes,
                x + 0.08 if right else x - 0.08,
                y,
                text,
                SMALL,
                ha="left" if right else "right",
            )
        if b.box and b.box is not a.box:  # no line goes through a caption
            top = boxes[b.box][1]
            at = next(n for n, (_, y) in enumerate(points) if y > top + 0.01)
            _edge(axes, points[:at])
            points = [(points[at][0], top + HEAD - 0.17 + LINE * len(b.box.caption)), *points[at:]]
        _edge(axes, points)
    for node in graph.nodes:
        x, y, w = place[node]
        paper = node.box.colour if node.kind == "dot" and node.box else "none"
        if node.kind not in ("parameter", "result"):
            _rounded(
                axes,
                x - w / 2,
                y - _tall(node) / 2,
                x + w / 2,
                y + _tall(node) / 2,
                facecolor=paper,
                linewidth=1,
                edgecolor=INK if paper == "none" else paper,
                linestyle="--" if node in graph.lost else "-",
            )
        _write(
            axes,
            x,
            y - 0.1 * bool(node.detail),
            node.label,
            FONT,
            color=INK if paper == "none" else ink_on(paper),
            weight="bold" if node.kind == "dot" else "normal",
            style="italic" if node.kind == "added" else "normal",
        )
        _write(axes, x, y + 0.1, node.detail, SMALL)
    _write(axes, 0.08, height - 0.15, note, SMALL, ha="left")
    return figure


def _rounded(axes: Any, left: float, top: float, right: float, bottom: float, **style: Any) -> None:
    axes.add_patch(
        mpl.patches.FancyBboxPatch(
            (left, top),
            right - left,
            bottom - top,
            **style,
            boxstyle="round,pad=0,rounding_size=0.07",
        )
    )


def _write(axes: Any, x: float, y: float, text: str, points: float, **style: Any) -> None:
    if text:
        axes.text(
            x,
            y,
            text,
            **{"ha": "center", "color": INK} | style,
            va="center",
            fontsize=points,
            parse_math=False,
        )


def _edge(axes: Any, points: list[tuple[float, float]]) -> None:
    """An arrow through points, upright at each."""
    path = points[:1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        path += [(x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), (x1, y1)]
    curve = mpl.path.Path(path, [1] + [4] * (len(path) - 1))
    axes.add_patch(
        mpl.patches.FancyArrowPatch(
            path=curve,
            arrowstyle="-|>,head_length=3.2,head_width=1.7",
            shrinkA=0,
            mutation_scale=1,
            linewidth=1,
            color=INK,
            shrinkB=0,
        )
    )


def _through_memory(of: Box, to: Box) -> str:
    """What one kernel writes and another reads."""
    shapes = [results(of.kernel)[element] for element in sorted(to.reads.get(of, ()))]
    return " and ".join(
        f"{shape.dtype}, {size(shape.nbytes)}" for shape in shapes if shape.size > 1
    )


def _alt(graph: Graph) -> str:
    held = [
        f"{', '.join(box.caption)}, holds {', '.join(n.label for n in graph.nodes if n.box is box)}"
        for box in graph.boxes
        if any(n.box is box for n in graph.nodes)
    ]
    lost = (
        [f"not attributed to a kernel: {', '.join(n.label for n in graph.lost)}"]
        if graph.lost
        else []
    )
    return f"A program as a graph, and what became of it. {'; '.join(held + lost)}."
