"""Where in a model each matmul stands: its layer, or the argument that is its weight; and whether
it is of the forward pass, or makes the gradient of an input or of a weight.
"""

import dataclasses
import os
from collections import defaultdict
from collections.abc import Sequence

from fp8lens.hlo.origin import is_backward, is_recomputed, layer, op_name
from fp8lens.hlo.parse import HloModule
from fp8lens.matmul.match import Neighbours, is_index, neighbours
from fp8lens.matmul.rows import GemmRow

# What an operand is made of: the numbers of parameters and of matmuls.
_Made = tuple[frozenset[int], frozenset[int]]


@dataclasses.dataclass
class _Place:
    """What is known of one matmul: what its two matrices are made of; the arguments that are its
    weight, or, where that may be the one or the other, of both matrices.
    """

    row: GemmRow
    operands: list[_Made]
    weight: frozenset[int] = frozenset()
    makes: str = ""  # of a gradient's matmul, which gradient
    argument: str = ""  # the argument that it is the gradient of, if it may be the weight or not

    @property
    def is_recomputed(self) -> bool:
        """Whether jax.checkpoint runs a matmul of the forward pass again."""
        return is_recomputed(self.row.op_name)

    @property
    def is_backward(self) -> bool:
        """Whether JAX transposed it for a gradient."""
        return is_backward(self.row.op_name) and not self.is_recomputed

    @property
    def written(self) -> tuple[str, str]:
        """Its layer and its line."""
        return layer(self.row.op_name), self.row.source

    @property
    def sizes(self) -> tuple[int, ...]:
        """M, N and K in any order: a matmul and its gradients have the same."""
        return tuple(sorted((self.row.m, self.row.n, self.row.k)))

    def shares(self, other: "_Place") -> bool:
        """Whether both read a matrix that is made of the same."""
        return not set(other.operands).isdisjoint(self.operands)

    @property
    def what(self) -> str:
        """The pass, as a row names it."""
        if self.is_recomputed:
            return "recomputed"
        if not self.is_backward:
            return ""
        if self.argument:
            return f"backward (gradient of {self.argument})"
        return f"backward ({self.makes})" if self.makes else "backward"


def placed(module: HloModule, rows: Sequence[GemmRow]) -> list[GemmRow]:
    """The rows of a module, each with its `place`: the layer, or, where several weights have the
    same layer and line, the argument that is the weight; and the pass.
    """
    places = _places(module, rows)
    weights: dict[tuple[str, str], set[frozenset[int]]] = defaultdict(set)
    for place in places:
        if place.weight:
            weights[place.written].add(place.weight)
    names = _short({place.weight: _names(module, place.weight) for place in places})
    # JAX gives an operation that it transposes the place of the one that was transposed.
    in_fp8 = {_frame(place) for place in places if place.row.is_fp8 and not place.is_backward}
    found = []
    for place in places:
        name = place.written[0]
        if len(weights[place.written]) > 1 and not place.argument:
            name = names[place.weight] or name
        row = dataclasses.replace(
            place.row,
            place=f"{name} {place.what}".strip(),
            is_transposed_fp8=place.is_backward and _frame(place) in in_fp8 - {None},
        )
        found.append(row)
    return found


def _frame(place: _Place) -> int | None:
    """Where in the program a matmul stands, with its callers."""
    return place.row.instruction.stack_frame


def without_gradient(module: HloModule, rows: Sequence[GemmRow]) -> list[GemmRow]:
    """The matmuls of a training step's forward pass that no matmul of its backward pass has to do
    with: what they multiply gets no gradient.

    JAX makes none through `round`, through integers, and through `stop_gradient`. Of cuDNN's
    attention nothing is said.
    """
    places = _places(module, rows)
    later = [place for place in places if place.is_backward or place.is_recomputed]
    if not later and not neighbours(module).has_constant_results:  # else all gradients are zero
        return []
    written = {place.written for place in later}
    read = {made for place in later for made in place.operands}
    found = []
    for place in places:
        is_of_a_step = place not in later and "jvp(" in place.row.op_name
        if is_of_a_step and place.row.library != "cudnn" and place.operands:
            if place.written not in written and read.isdisjoint(place.operands):
                found.append(place.row)
    return found


def _places(module: HloModule, rows: Sequence[GemmRow]) -> list[_Place]:
    around = neighbours(module)
    places = [_Place(row, _operands(around, row)) for row in rows]
    forward: dict[tuple[int, ...], list[_Place]] = defaultdict(list)
    for place in places:
        if not place.is_backward:
            place.weight = _weight(module, place)
            forward[place.sizes].append(place)
    for place in places:
        if place.is_backward:
            _find_forward(module, place, forward[place.sizes])
    # What makes a weight's gradient reads the same result's gradient as what makes the input's.
    for place in places:
        if place.makes == "wgrad" and not place.weight:
            alike = [other for other in places if other.makes == "dgrad" and place.shares(other)]
            weights = {other.weight for other in alike if other.sizes == place.sizes}
            place.weight = weights.pop() if len(weights) == 1 else frozenset()
    return places


def _operands(around: Neighbours, row: GemmRow) -> list[_Made]:
    """What the two matrices are made of; nothing of products that the program has written out."""
    number = around.number.get(row.instruction)
    return [] if number is None else around.made_of[number]


def _names(module: HloModule, parameters: frozenset[int]) -> str:
    """The names of arguments, as JAX has them; the first three."""
    names = [op_name(module.entry.parameters[number]) for number in sorted(parameters)]
    return ", ".join(name.removesuffix(".value") for name in names[:3] if name)


def _short(names: dict[frozenset[int], str]) -> dict[frozenset[int], str]:
    """The names of weights without the path that all those in trees have in common."""
    in_trees = [name for name in names.values() if "[" in name]
    same = os.path.commonprefix(in_trees) if len(in_trees) > 1 else ""
    path = same[: max(same.rfind("["), 0)]
    return {weight: name.removeprefix(path) for weight, name in names.items()}


def _weight(module: HloModule, place: _Place) -> frozenset[int]:
    """The arguments that a matmul's weight is made of, and nothing else: no rows that others of
    the arguments choose. If both matrices are made so, those that are in a tree, as models have
    their weights.
    """
    arguments = module.entry.parameters
    found = []
    for parameters, made in place.operands:
        if not made and not any(is_index(arguments[number]) for number in parameters):
            # What is much smaller than the weight is a scale's history.
            most = max((arguments[number].shape.size for number in parameters), default=0)
            large = frozenset(n for n in parameters if 4 * arguments[n].shape.size >= most)
            if any(len(arguments[n].shape.dims) > 1 for n in large):
                found.append(large)
    in_trees = [parameters for parameters in found if "[" in _names(module, parameters)]
    return frozenset().union(*(in_trees if len(in_trees) == 1 else found))


def _find_forward(module: HloModule, place: _Place, forward: Sequence[_Place]) -> None:
    """Say of a gradient's matmul of which weight it is, and of what it makes the gradient, by the
    forward pass's matmul that it shares an operand with: it makes the gradient of the other one.
    """
    alike = [other for other in forward if place.shares(other)]
    alike = [other for other in alike if other.written == place.written] or alike
    if len({other.weight for other in alike}) == 1:
        place.weight = alike[0].weight
    found = {_made_by(module, place, other) for other in alike}
    if len(found) == 1:
        ((place.makes, place.argument),) = found


def _made_by(module: HloModule, place: _Place, other: _Place) -> tuple[str, str]:
    """Which gradient a matmul makes, of the forward pass's `other` that it shares an operand with,
    and of which argument, if that is not known to be the weight or the input.
    """
    made = [of for of in other.operands if of not in place.operands]
    if len(made) != 1 or not other.weight:
        return "", ""
    ((parameters, producers),) = made
    if producers or parameters.isdisjoint(other.weight):
        return "dgrad", ""
    if other.weight <= parameters:
        return "wgrad", ""
    return "", _names(module, parameters & other.weight)  # both may be the weight
