"""Where the nodes, edges and boxes of `plot_fusion` stand. All lengths are in inches, y downwards.

A band is a slice of the picture from left to right. In it stand columns: a box with rows of nodes,
a node without a box, or a long edge that passes by.
"""

import dataclasses
import graphlib
import itertools
from collections.abc import Iterable
from typing import NamedTuple, cast

from helpers.figures.layers import Column, arrange
from helpers.figures.plots import text_width
from helpers.figures.program import Box, Graph, Node

FONT, SMALL = 11, 9.5  # points
CAPTION = SMALL + 0.5  # points, of a box's caption
LINE = 0.2  # a line of a caption
PAD = 0.13  # around nodes in a box
GAP = 0.2  # between rows
HEAD = 0.25  # above the first row of a box, beside its caption
EDGE = 0.08  # around the picture


class Bend:
    """Where a long edge passes a row."""

    detail = ""


Chains = dict[tuple[Node, Node], list[Node | Bend]]
"""For each edge the places that it goes through, its ends included."""


class Layers(NamedTuple):
    """The bands of a graph from top to bottom, the columns of its boxes, the ways of its edges."""

    bands: list[list[Column]]
    columns: dict[Box, Column]
    chains: Chains


class Layout(NamedTuple):
    """`place`: for each node the x and y of its middle, and its width. `ways`: for each edge the
    points (x, y) that it goes through. `boxes`: for each box its left, top, right and bottom.
    """

    place: dict[Node, tuple[float, float, float]]
    ways: dict[tuple[Node, Node], list[tuple[float, float]]]
    boxes: dict[Box, tuple[float, float, float, float]]


def height_of(place: Node | Bend) -> float:
    """How tall a node is; one with a detail has two lines."""
    return 0.46 if place.detail else 0.3


def layout(graph: Graph) -> Layout:
    """Places all that is drawn of a graph."""
    layers = make_layers(graph)
    wide: dict[Node | Bend, float] = {}
    for column in _all_columns(layers):
        wide |= {place: _width_of(place) for place in _places(column)}
    x = _across(graph, layers, wide)
    down = _Downwards(x, wide)
    for band in layers.bands:
        here = {box: column for box, column in layers.columns.items() if column in band}
        down.add_band(band, here)

    ways = {}
    for (a, b), chain in layers.chains.items():
        start, end = down.y[a] + height_of(a) / 2, down.y[b] - height_of(b) / 2
        points = [(x[place], at) for place in chain for at in down.straight[place]]
        ways[a, b] = [(across, at) for across, at in points if start + 0.01 < at < end - 0.01]
    place = {node: (x[node], down.y[node], wide[node]) for node in graph.nodes}
    return Layout(place, ways, down.boxes)


# In which band, row and column things stand -------------------------------------------------------


def make_layers(graph: Graph) -> Layers:
    """The layers of a graph. The band that a box takes is its own, or shared with what stands
    beside it.
    """
    owner: dict[Node, Box | Node] = {node: node.box or node for node in graph.nodes}
    owners = list(dict.fromkeys(owner.values()))
    band = _ranks(owners, [(owner[a], owner[b]) for a, b in graph.edges])
    row: dict[Node, int] = {}
    height = [1] * (1 + max(band.values()))  # of each band, in rows
    for one in owners:
        nodes = [node for node in graph.nodes if owner[node] is one]
        inner = [(a, b) for a, b in graph.edges if owner[a] is one and owner[b] is one]
        row |= _ranks(nodes, inner)
        height[band[one]] = max(height[band[one]], *(row[node] + 1 for node in nodes))

    bands: list[list[Column]] = [[] for _ in height]
    columns: dict[Box, Column] = {}
    for one in owners:
        rows_of_band = height[band[one]]
        if isinstance(one, Box):
            columns[one] = _column(one, graph, row, rows_of_band)
            bands[band[one]].append(columns[one])
        else:
            bands[band[one]].append(Column([[one]] * rows_of_band))

    chains: Chains = {}
    for a, b in graph.edges:
        first, last = band[owner[a]], band[owner[b]]
        passed: list[list] = []  # rows in which the edge bends
        if a.box:
            end = row[b] if first == last else None
            passed += columns[a.box].rows[row[a] + 1 : end]
        for n in range(first + 1, last):
            beside: list = []  # stands in all rows of a band that the edge passes
            bands[n].append(Column([beside] * height[n]))
            passed.append(beside)
        if b.box and first != last:
            passed += columns[b.box].rows[: row[b]]
        bends = [Bend() for _ in passed]
        for places, bend in zip(passed, bends, strict=True):
            places.append(bend)
        chains[a, b] = [a, *bends, b]
    return Layers(bands, columns, chains)


def _column(box: Box, graph: Graph, row: dict[Node, int], rows: int) -> Column:
    """A box's nodes in their rows; at least as wide as its caption."""
    widths = []
    for n, line in enumerate(box.caption):
        widths.append(text_width(line, CAPTION, "normal" if n else "bold"))
    column = Column([[] for _ in range(rows)], PAD, max(widths))
    for node in graph.nodes:
        if node.box is box:
            column.rows[row[node]].append(node)
    return column


def _ranks(keys: list, edges: Iterable[tuple]) -> dict:
    """How far down each key of an acyclic graph stands: as far as the longest way to it. One
    without a way to it stands just above who reads it, where nothing else stands.
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


def _all_columns(layers: Layers) -> list[Column]:
    return [column for band in layers.bands for column in band]


def _places(column: Column) -> list[Node | Bend]:
    """A column of this module holds nodes and bends; the module `layers` takes anything."""
    return cast(list[Node | Bend], column.places)


# From left to right -------------------------------------------------------------------------------


def _width_of(place: Node | Bend) -> float:
    if isinstance(place, Bend):
        return 0.1
    weight = "bold" if place.kind == "dot" else "normal"
    return 0.22 + max(text_width(place.label, FONT, weight), text_width(place.detail, SMALL))


def _across(graph: Graph, layers: Layers, wide: dict) -> dict[Node | Bend, float]:
    """The x of each place's middle. What is multiplied from the left stands on the left, where most
    dots allow it.
    """
    steps: list[tuple[Node | Bend, Node | Bend]] = []
    for chain in layers.chains.values():
        steps += itertools.pairwise(chain)
    x = cast(dict[Node | Bend, float], arrange(layers.bands, steps, wide))

    dots = [node for node in graph.nodes if node.kind == "dot"]
    swapped = []
    for dot in dots:
        operands = [x[a] for a, b in graph.edges if b is dot]
        if len(operands) > 1 and operands[0] > operands[-1]:
            swapped.append(dot)
    if 2 * len(swapped) > len(dots):
        x = {place: -at for place, at in x.items()}

    left = min(column.extent(x, wide)[0] for column in _all_columns(layers))
    return {place: at - left + EDGE for place, at in x.items()}


# From top to bottom -------------------------------------------------------------------------------


@dataclasses.dataclass
class _Downwards:
    """Stacks bands, one below the other."""

    x: dict[Node | Bend, float]
    wide: dict[Node | Bend, float]
    y: dict[Node | Bend, float] = dataclasses.field(default_factory=dict)
    # From where to where edges through a place go straight.
    straight: dict[Node | Bend, tuple[float, float]] = dataclasses.field(default_factory=dict)
    boxes: dict[Box, tuple[float, float, float, float]] = dataclasses.field(default_factory=dict)
    down: float = EDGE  # as far as bands have been added

    def add_band(self, band: list[Column], here: dict[Box, Column]) -> None:
        """Adds a band below the others; `here` are the columns of its boxes."""
        head = max((LINE * len(box.caption) + HEAD for box in here), default=0.0)
        top = self.down
        self.down += head
        for rows in zip(*(column.rows for column in band), strict=True):
            self._add_row(cast(list[Node | Bend], list(itertools.chain.from_iterable(rows))))
        bottom = self.down - GAP + (PAD if here else 0.0)
        for column in band:
            if column not in here.values():  # beside a box
                self.straight |= dict.fromkeys(_places(column), (top, bottom))
        for box, column in here.items():
            self._add_box(box, column, top + head)
        if here:
            self.down += HEAD

    def _add_row(self, places: list[Node | Bend]) -> None:
        new = [height_of(place) for place in places if place not in self.y]
        tall = max(new, default=0.3)
        for place in places:
            self.y.setdefault(place, self.down + tall / 2)
            self.straight[place] = (self.down, self.down + tall)
        self.down += tall + GAP

    def _add_box(self, box: Box, column: Column, first_row: float) -> None:
        """Adds a box around its column, whose first row begins at `first_row`."""
        left, right = column.extent(self.x, self.wide)
        lowest = max(self.y[place] + height_of(place) / 2 for place in _places(column))
        top, bottom = first_row - LINE * len(box.caption) - HEAD, lowest + PAD
        self.boxes[box] = (left, top, right, bottom)
        # Edges enter and leave a box upright.
        for place in cast(list[Node | Bend], column.rows[0]):
            self.straight[place] = (top, self.straight[place][1])
        for place in cast(list[Node | Bend], column.rows[-1]):
            self.straight[place] = (self.straight[place][0], bottom)
