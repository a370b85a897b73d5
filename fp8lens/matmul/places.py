"""Where in a model each matmul stands: its layer, or the argument that is its weight; and whether
it is of the forward pass, or makes the gradient of an input or of a weight.
"""

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Sequence

from fp8lens.hlo.origin import is_backward, is_recomputed, layer, op_name
from fp8lens.hlo.parse import HloModule
from fp8lens.matmul.match import Neighbours, neighbours
from fp8lens.matmul.rows import GemmRow


class Pass(enum.StrEnum):
    """Which pass of a training step a matmul is of, as a row says it."""

    FORWARD = ""
    AGAIN = "recomputed"  # of the forward pass, for jax.checkpoint
    BACKWARD = "backward"
    OF_INPUT = "backward (dgrad)"
    OF_WEIGHT = "backward (wgrad)"


# What an operand is made of: the numbers of parameters and of matmuls.
_Made = tuple[frozenset[int], frozenset[int]]


@dataclasses.dataclass
class _Place:
    """What is known of one matmul."""

    row: GemmRow
    operands: list[_Made]
    of: Pass
    weight: _Made | None = None

    @property
    def written(self) -> tuple[str, str]:
        """Its layer and its line."""
        return layer(self.row.op_name), self.row.source

    @property
    def sizes(self) -> list[int]:
        """M, N and K in any order: a matmul and its gradients have the same."""
        return sorted((self.row.m, self.row.n, self.row.k))


def placed(module: HloModule, rows: Sequence[GemmRow]) -> list[GemmRow]:
    """The rows of a module, each with its `place`: the layer, or, where rows of several weights
    have the same layer and line, the argument that is the weight; and the pass.
    """
    places = _places(module, rows)
    weights: dict[tuple[str, str], set[_Made]] = defaultdict(set)
    for place in places:
        if place.weight:
            weights[place.written].add(place.weight)
    found = []
    for place in places:
        name = place.written[0]
        if place.weight and len(weights[place.written]) > 1:
            (parameter,) = place.weight[0]
            name = op_name(module.entry.parameters[parameter]) or name
        found.append(dataclasses.replace(place.row, place=f"{name} {place.of}".strip()))
    return found


def without_gradient(module: HloModule, rows: Sequence[GemmRow]) -> list[GemmRow]:
    """The matmuls of a training step's forward pass that no matmul of its backward pass has to do
    with: what they multiply gets no gradient.

    JAX makes none through `round`, through integers, and through `stop_gradient`. Of cuDNN's
    attention nothing is said.
    """
    places = _places(module, rows)
    backward = [place for place in places if place.of is not Pass.FORWARD]
    if not backward:
        return []
    written = {place.written for place in backward}
    read = {made for place in backward for made in place.operands}
    found = []
    for place in places:
        is_of_a_step = place.of is Pass.FORWARD and "jvp(" in place.row.op_name
        if is_of_a_step and place.row.library != "cudnn" and place.operands:
            if place.written not in written and read.isdisjoint(place.operands):
                found.append(place.row)
    return found


def _places(module: HloModule, rows: Sequence[GemmRow]) -> list[_Place]:
    around = neighbours(module)
    places = [_Place(row, _operands(around, row), _pass(row)) for row in rows]
    forward: dict[tuple[int, ...], list[_Place]] = defaultdict(list)
    for place in places:
        if place.of in (Pass.FORWARD, Pass.AGAIN):
            place.weight = _weight(module, place.operands)
            forward[tuple(place.sizes)].append(place)
    for place in places:
        if place.of is Pass.BACKWARD:
            _find_weight(place, forward[tuple(place.sizes)])
    return places


def _operands(around: Neighbours, row: GemmRow) -> list[_Made]:
    """What the two matrices are made of; nothing of products that the program has written out."""
    number = around.number.get(row.instruction)
    return [] if number is None else around.made_of[number]


def _pass(row: GemmRow) -> Pass:
    if is_recomputed(row.op_name):
        return Pass.AGAIN
    return Pass.BACKWARD if is_backward(row.op_name) else Pass.FORWARD


def _weight(module: HloModule, operands: Sequence[_Made]) -> _Made | None:
    """The operand that is a weight: made of one argument alone. Of two such, the one in a tree of
    arguments, as models have their weights; else the second.
    """
    found = [made for made in operands if len(made[0]) == 1 and not made[1]]

    def is_in_a_tree(made: _Made) -> bool:
        (parameter,) = made[0]
        return "[" in op_name(module.entry.parameters[parameter])

    return max(reversed(found), key=is_in_a_tree, default=None)


def _find_weight(place: _Place, forward: Sequence[_Place]) -> None:
    """Say of a gradient's matmul of which weight it is, by the forward pass's that it shares an
    operand with: the weight, to make the gradient of the input, or the input.
    """
    alike = [other for other in forward if not set(other.operands).isdisjoint(place.operands)]
    alike = [other for other in alike if other.written == place.written] or alike
    known = [other for other in alike if other.weight]
    if not known:
        return
    reads_weights = {other.weight in place.operands for other in known}
    if len(reads_weights) == 1:
        place.of = Pass.OF_INPUT if True in reads_weights else Pass.OF_WEIGHT
    if len({other.weight for other in known}) == 1:
        place.weight = known[0].weight
