"""A picture of what of a program became one kernel, for the chapters.

`program` makes the graph, `placing` says where its parts stand, and this module draws them.
"""

import itertools
from typing import Any

import matplotlib as mpl

from fp8lens import inspect
from fp8lens.hlo.program import results
from fp8lens.hlo.text import size
from helpers.figures.palette import INK
from helpers.figures.placing import (
    CAPTION,
    EDGE,
    FONT,
    HEAD,
    LINE,
    PAD,
    SMALL,
    Layout,
    height_of,
    layout,
)
from helpers.figures.plots import Picture, ink_on, text_width
from helpers.figures.program import Box, Graph, Node, program_graph

_CURVE = mpl.path.Path.CURVE4
Point = tuple[float, float]


def plot_fusion(x: Any, *args: Any, **options: Any) -> Picture:
    """The graph of a program around its matmuls, top to bottom: what became one call or kernel is
    in one box.

    Takes what `inspect` takes, or what it returned: `plot_fusion(inspect(fn, *args))`. Drawn is the
    program as XLA's gemm rewriter was given it, with scalars and vectors in the operation that
    reads them; what cannot be attributed to a kernel for sure is outside all boxes, dashed. Raises
    TypeError for a saved program; ValueError for one without a matmul, with a matmul in a loop, or
    with more than `program.MOST` nodes.
    """
    inspection = inspect(x, *args, **options)
    if not inspection.is_ours:
        raise TypeError(
            "a saved or compiled program says no more what XLA's rewriter was given: "
            "give plot_fusion the function and its arguments, or inspect(fn, *args)."
        )
    graph = program_graph(inspection)
    placed = layout(graph)
    note = "dashed: not attributed to a kernel" if graph.lost else ""
    width, height = _size(placed, note)
    figure = Picture(figsize=(width, height))
    figure.alt = _alt(graph)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for box, sides in placed.boxes.items():
        _draw_box(axes, box, sides)
    _draw_edges(axes, graph, placed, width)
    for node in graph.nodes:
        _draw_node(axes, node, placed.place[node], is_lost=node in graph.lost)
    _write(axes, 0.08, height - 0.15, note, SMALL, ha="left")
    return figure


def _size(placed: Layout, note: str) -> Point:
    """Width and height of the picture."""
    right = [x + wide / 2 for x, _, wide in placed.place.values()]
    right += [right for _, _, right, _ in placed.boxes.values()]
    right.append(text_width(note, SMALL))
    bottom = [y + height_of(node) / 2 for node, (_, y, _) in placed.place.items()]
    bottom += [bottom for *_, bottom in placed.boxes.values()]
    below = EDGE + LINE if note else EDGE
    return EDGE + max(right), below + max(bottom)


def _draw_box(axes: Any, box: Box, sides: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = sides
    _rounded(axes, left, top, right, bottom, facecolor=box.colour, alpha=0.14, linewidth=0)
    _rounded(axes, left, top, right, bottom, facecolor="none", edgecolor=box.colour, linewidth=1.5)
    for n, line in enumerate(box.caption):
        y = top + 0.07 + LINE * (n + 0.5)
        weight = "normal" if n else "bold"
        _write(axes, left + PAD, y, line, CAPTION, ha="left", weight=weight)


def _draw_node(axes: Any, node: Node, place: tuple[float, float, float], is_lost: bool) -> None:
    x, y, wide = place
    paper = node.box.colour if node.kind == "dot" and node.box else "none"
    if node.kind not in ("parameter", "result"):
        half = height_of(node) / 2
        _rounded(
            axes,
            x - wide / 2,
            y - half,
            x + wide / 2,
            y + half,
            facecolor=paper,
            linewidth=1,
            edgecolor=INK if paper == "none" else paper,
            linestyle="--" if is_lost else "-",
        )
    _write(
        axes,
        x,
        y - 0.1 if node.detail else y,
        node.label,
        FONT,
        color=INK if paper == "none" else ink_on(paper),
        weight="bold" if node.kind == "dot" else "normal",
        style="italic" if node.kind == "added" else "normal",
    )
    _write(axes, x, y + 0.1, node.detail, SMALL)


# Edges --------------------------------------------------------------------------------------------


def _draw_edges(axes: Any, graph: Graph, placed: Layout, width: float) -> None:
    """Edges, and beside the first one from a node to a box what goes through memory."""
    told = set()
    for a, b in graph.edges:
        points = _points(a, b, placed)
        if a.box and b.box and b.box is not a.box and (a, b.box) not in told:
            told.add((a, b.box))
            leaving = [to for of, to in graph.edges if of is a and to.box is not a.box]
            _tell(axes, a.box, b.box, points, placed, is_alone=len(leaving) == 1, width=width)
        if b.box and b.box is not a.box:  # no line goes through a caption
            top = placed.boxes[b.box][1]
            at = next(n for n, (_, y) in enumerate(points) if y > top + 0.01)
            _arrow(axes, points[:at])
            below_caption = top + HEAD - 0.17 + LINE * len(b.box.caption)
            points = [(points[at][0], below_caption), *points[at:]]
        _arrow(axes, points)


def _points(a: Node, b: Node, placed: Layout) -> list[Point]:
    """The way of an edge, from the lower side of a node to the upper side of another."""
    (start, above, _), (end, below, _) = placed.place[a], placed.place[b]
    return [
        (start, above + height_of(a) / 2),
        *placed.ways[a, b],
        (end, below - height_of(b) / 2),
    ]


def _tell(
    axes: Any,
    of: Box,
    to: Box,
    points: list[Point],
    placed: Layout,
    is_alone: bool,
    width: float,
) -> None:
    """Write what goes through memory beside an edge: where it leaves its box if it is the only one
    that does, else where it arrives.
    """
    bottom, top = placed.boxes[of][3], placed.boxes[to][1]
    x, y = [(x, bottom + 0.12) for x, y in points if y < bottom][-1]
    goes_left = points[-1][0] <= x + 0.01
    if not is_alone:
        x, y = next((x, top - 0.1) for x, y in points if y > top)
    text = _through_memory(of, to)
    has_room = x + text_width(text, SMALL) < width - 0.16
    if goes_left == is_alone and has_room:
        _write(axes, x + 0.08, y, text, SMALL, ha="left")
    else:
        _write(axes, x - 0.08, y, text, SMALL, ha="right")


def _through_memory(of: Box, to: Box) -> str:
    """What one kernel writes and another reads."""
    shapes = [results(of.kernel)[element] for element in sorted(to.reads.get(of, ()))]
    return " and ".join(
        f"{shape.dtype}, {size(shape.nbytes)}" for shape in shapes if shape.size > 1
    )


# Marks --------------------------------------------------------------------------------------------


def _rounded(axes: Any, left: float, top: float, right: float, bottom: float, **style: Any) -> None:
    """A rectangle with round corners."""
    axes.add_patch(
        mpl.patches.FancyBboxPatch(
            (left, top),
            right - left,
            bottom - top,
            boxstyle="round,pad=0,rounding_size=0.07",
            **style,
        )
    )


def _write(axes: Any, x: float, y: float, text: str, points: float, **style: Any) -> None:
    """A line of text, its middle at y, centred at x unless `ha` says otherwise."""
    style = {"ha": "center", "color": INK} | style
    if text:
        axes.text(x, y, text, va="center", fontsize=points, parse_math=False, **style)


def _arrow(axes: Any, points: list[Point]) -> None:
    """An arrow through points, upright at each."""
    path = points[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += [(x0, middle), (x1, middle), (x1, y1)]
    codes = [mpl.path.Path.MOVETO] + [_CURVE] * (len(path) - 1)
    axes.add_patch(
        mpl.patches.FancyArrowPatch(
            path=mpl.path.Path(path, codes),
            arrowstyle="-|>,head_length=3.2,head_width=1.7",
            shrinkA=0,
            shrinkB=0,
            mutation_scale=1,
            linewidth=1,
            color=INK,
        )
    )


def _alt(graph: Graph) -> str:
    """The picture in words."""
    said = []
    for box in graph.boxes:
        held = [node.label for node in graph.nodes if node.box is box]
        if held:
            said.append(f"{', '.join(box.caption)}, holds {', '.join(held)}")
    if graph.lost:
        lost = ", ".join(node.label for node in graph.lost)
        said.append(f"not attributed to a kernel: {lost}")
    return f"A program as a graph, and what became of it. {'; '.join(said)}."
