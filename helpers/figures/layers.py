"""A drawing of a graph in layers: in which order things stand side by side, so that few edges
cross, and at which x.

Bands lie one below the other. A band holds columns side by side, and a column holds rows of places.
An edge leads from a place to one in the next row, within a column or into the next band. Columns
are not mixed, so that a frame fits around each. What takes a column alone, as a long edge that
passes by, stands in all of its rows.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

SPACE = 0.16  # inches between what stands side by side
ROUNDS = 8  # down, up and both ways: no picture of the course or its tests gets better with more
BEND = 0.3  # inches that an edge may be longer to be straight
LOOSE = 0.01  # how much a place without neighbours on that side is held where it is
Place = Hashable
Links = dict[Place, list[Place]]  # what each place is connected with


@dataclasses.dataclass(eq=False)
class Column:
    """Rows of places from top to bottom, each from left to right. `pad` is how far a frame is from
    its places, `least` how wide it is inside at least.
    """

    rows: list[list[Place]]
    pad: float = 0.0
    least: float = 0.0

    @property
    def places(self) -> list[Place]:
        """All places from top to bottom, each once."""
        return list(dict.fromkeys(place for row in self.rows for place in row))

    def extent(self, x: Mapping[Any, float], wide: Mapping[Any, float]) -> tuple[float, float]:
        """From where to where it reaches, its frame included."""
        low = min(x[place] - wide[place] / 2 for place in self.places)
        high = max(x[place] + wide[place] / 2 for place in self.places)
        reach = max(high - low, self.least) / 2 + self.pad
        return (low + high) / 2 - reach, (low + high) / 2 + reach


Bands = list[list[Column]]
Edges = Sequence[tuple[Place, Place]]


def arrange(bands: Bands, edges: Edges, wide: Mapping[Place, float]) -> dict[Place, float]:
    """Order the columns of each band and the places of each row, in place, and return the x of each
    place's middle.

    Goes through the bands, down and up again, sorts what stands side by side by the mean x of its
    neighbours, after Sugiyama, Tagawa and Toda (1981), and exchanges what crosses less the other
    way round. Of all orders found, that with the fewest crossings stays. Then goes through the
    bands once more, to move everything towards its neighbours as far as there is room. Equals keep
    the order in which they are given, and nothing is random: the same graph is always drawn the
    same.
    """
    above, below = _links(edges)
    both = {place: above[place] + below[place] for place in wide}
    walk = [(above, False), (below, True), (both, False)] * ROUNDS
    wide = _along_chains(above, below, wide)
    x: dict[Place, float] = {}
    for row in _rows(bands):
        x |= _side_by_side(row, dict.fromkeys(row, 0.0), dict.fromkeys(row, 1.0), wide)

    orders = []
    for links, upwards in walk:
        for band in reversed(bands) if upwards else bands:
            _move(band, links, upwards, x, wide, sort=True)
        _exchange(bands, edges)
        order = [(some, list(some)) for some in _orderly(bands)]
        orders.append((crossings(bands, edges), order))
    for some, order in min(orders, key=lambda found: found[0])[1]:
        some[:] = order

    drawings = []
    for links, upwards in walk:
        for band in reversed(bands) if upwards else bands:
            _move(band, links, upwards, x, wide, sort=False)
        width = max(x[p] + wide[p] / 2 for p in x) - min(x[p] - wide[p] / 2 for p in x)
        aside = [abs(x[a] - x[b]) for a, b in edges]
        bent = [far for far in aside if far > 0.005]
        cost = width + sum(aside) + BEND * len(bent)
        drawings.append((round(cost, 6), dict(x)))
    return min(drawings, key=lambda found: found[0])[1]


def _orderly(bands: Bands) -> list[list]:
    """All that has an order: bands, and the rows of their columns."""
    rows = [row for band in bands for column in band for row in column.rows]
    return [*bands, *rows]


def _exchange(bands: Bands, edges: Edges) -> None:
    """Exchange neighbours as long as that saves crossings."""
    before = crossings(bands, edges)
    while before:
        for n, band in enumerate(bands):
            near = bands[max(n - 1, 0) : n + 2]
            now = crossings(near, edges)
            for some in _orderly([band]):
                for k in range(len(some) - 1):
                    some[k : k + 2] = reversed(some[k : k + 2])
                    then = crossings(near, edges)
                    if then < now:
                        now = then
                    else:
                        some[k : k + 2] = reversed(some[k : k + 2])
        after = crossings(bands, edges)
        if after == before:
            break
        before = after


def crossings(bands: Bands, edges: Edges) -> int:
    """How many pairs of edges cross."""
    found = 0
    for upper, lower in itertools.pairwise(_rows(bands)):
        start = {place: n for n, place in enumerate(upper)}
        end = {place: n for n, place in enumerate(lower)}
        between = [(start[a], end[b]) for a, b in edges if a in start and b in end]
        for (a, b), (c, d) in itertools.combinations(between, 2):
            if (a - c) * (b - d) < 0:
                found += 1
    return found


def _rows(bands: Bands) -> list[list[Place]]:
    """All rows from top to bottom, each through all columns of its band."""
    found = []
    for band in bands:
        for rows in zip(*(column.rows for column in band), strict=True):
            found.append(list(itertools.chain.from_iterable(rows)))
    return found


def _links(edges: Edges) -> tuple[Links, Links]:
    """What is connected with each place from above, and from below."""
    above, below = collections.defaultdict(list), collections.defaultdict(list)
    for a, b in edges:
        above[b].append(a)
        below[a].append(b)
    return above, below


def _along_chains(above: Links, below: Links, wide: Mapping[Place, float]) -> dict[Place, float]:
    """Each place as wide as the widest of its chain: chains side by side are then as far apart in
    every row.
    """
    following = {}
    for place in wide:
        if len(below[place]) == 1 and len(above[below[place][0]]) == 1:
            following[place] = below[place][0]
    found: dict[Place, float] = {}
    for first in set(wide) - set(following.values()):
        chain = [first]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        found |= dict.fromkeys(chain, max(wide[place] for place in chain))
    return found


def _move(
    band: list[Column], links: Links, upwards: bool, x: dict, wide: Mapping, sort: bool
) -> None:
    """Move a band's places and columns to where what they are linked to stands, sorted by that or
    in their order.
    """
    wish: dict[Any, float] = {}  # of places and columns
    weight: dict[Any, float] = {}
    for column in band:
        rows = column.rows[::-1] if upwards else column.rows
        for row in rows:
            for place in row:
                near = [x[other] for other in links[place]]
                wish[place] = sum(near) / len(near) if near else x[place]
                weight[place] = len(near) or LOOSE
            if sort:
                row.sort(key=wish.__getitem__)
            x |= _side_by_side(row, wish, weight, wide)
        first = next(row for row in rows if row)  # the next to what was moved before
        wish[column] = sum(wish[place] for place in first) / len(first)
        weight[column] = sum(weight[place] for place in first)
    if sort:
        band.sort(key=wish.__getitem__)

    middle, width, target = {}, {}, {}
    for column in band:
        low, high = column.extent(x, wide)
        middle[column], width[column] = (low + high) / 2, high - low
        # What hangs on nothing above it comes to the middle of the picture: nothing else holds
        # parts of it together.
        alone = weight[column] < 1 and not upwards
        target[column] = 0.0 if alone else middle[column]
    moved = _side_by_side(band, target, weight, width)
    for column in band:
        for place in column.places:
            x[place] += moved[column] - middle[column]


def _side_by_side(some: Sequence, wish: Mapping, weight: Mapping, wide: Mapping) -> dict:
    """Where things of a width stand, in this order and with space between, as near to their wishes
    as possible.

    This is a least squares fit with an order, solved by pooling adjacent violators: where one would
    have to stand further left than the one before it, the two move together from then on, to the
    mean of what they want.
    """
    offset = {}  # from the first one
    # What each member of a pool wants for the first one, and its weight.
    pools: list[list[tuple[float, float]]] = []
    right = 0.0
    for one in some:
        offset[one] = right + wide[one] / 2
        right += wide[one] + SPACE
        pools.append([(wish[one] - offset[one], weight[one])])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    starts = [_mean(pool) for pool in pools for _ in pool]
    return {one: start + offset[one] for one, start in zip(some, starts, strict=True)}


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
