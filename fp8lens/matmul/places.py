"""Which matmul is which: of one stage of a program and another, by what its operands are made of,
and what reads it; and where in a model each stands: its layer, or the argument that is its weight,
and whether it is of the forward pass, or makes the gradient of an input or of a weight.
"""

import collections
import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter

from fp8lens.hlo.dataflow import NOBODY, Flow
from fp8lens.hlo.ops import DOTS, padded
from fp8lens.hlo.origin import is_backward, is_recomputed, layer, op_name
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.program import executions
from fp8lens.hlo.remember import remembered
from fp8lens.matmul.rows import GemmRow, is_sum_of_products, matmuls

# What an operand is made of: the numbers of parameters and of matmuls.
_Made = tuple[frozenset[int], frozenset[int]]
ROUNDS = 3  # how many matmuls away what tells two apart may lie


def work(row: GemmRow) -> tuple[tuple[int, ...], int]:
    """M and N, and K*batch, padded to what FP8 calls need: the same before and after XLA pads,
    exchanges the operands, or splits K.
    """
    m, n, k = map(padded, (row.m, row.n, row.k))
    return tuple(sorted((m, n))), k * row.batch


class Neighbours:
    """What the operands of a module's matmuls are made of, and what reads their results. Matmuls
    that the program writes as products and sums are not among them.

    Matmuls are numbered; `number` has those of their instructions. `made_of`: for each operand of
    each matmul, the numbers of the parameters and of the matmuls that it is made of. `read_by`: the
    matmuls that read each one's result. `results`: the results of the program that each one makes.
    `has_constant_results`: whether one is made of no parameter and of no matmul.
    """

    def __init__(self, module: HloModule):
        instructions = [
            i
            for name in executions(module)
            for i in module.computations[name]
            if any(not is_sum_of_products(row) for row in matmuls(i))
        ]
        self.number = {i: n for n, i in enumerate(instructions)}
        self.parameters = module.entry.parameters
        self._sizes = [parameter.shape.size for parameter in self.parameters]
        self._flow = Flow(module, self.number.__contains__, _around)
        self.made_of = []
        for i in instructions:
            indices = range(min(2, len(i.operands)))
            self.made_of.append([self._made_of(i, index) for index in indices])
        self.read_by: list[set[int]] = [set() for _ in instructions]
        self.results: list[set[int]] = [set() for _ in instructions]
        for reader, operands in enumerate(self.made_of):
            for _, producers in operands:
                for matmul in producers:
                    self.read_by[matmul].add(reader)
        for place, made in enumerate(self._flow.results):
            for producer in self._flow.of(made):
                if producer.instruction is not None:
                    self.results[self.number[producer.instruction]].add(place)
        self.has_constant_results = not all(self._flow.results)

    def _made_of(self, i: Instruction, index: int) -> _Made:
        size = i.computation[i.operands[index]].shape.size
        inputs = self._flow.inputs.get(i, [NOBODY, NOBODY])
        parameters, producers = set(), set()
        for instruction, element in self._flow.of(inputs[index]):
            if instruction is not None:
                producers.add(self.number[instruction])
            # A scale may be applied before the dot or after: only what may be the matrix itself
            # tells two apart, and what chooses its rows.
            elif element < len(self.parameters):
                if is_index(self.parameters[element]) or 16 * self._sizes[element] >= size:
                    parameters.add(element)
        return frozenset(parameters), frozenset(producers)

    def colours(self, own: Mapping[int, Hashable], rounds: int) -> list[Hashable]:
        """For each matmul what it is, its `own`, and, `rounds` matmuls far, what is around it
        (Weisfeiler and Leman's refinement).
        """
        colours = [own.get(n) for n in range(len(self.number))]
        for _ in range(rounds):
            colours = [self._refined(n, colours) for n in range(len(colours))]
        return colours

    def _refined(self, n: int, colours: list[Hashable]) -> Hashable:
        """A matmul's colour after one more round: its own, its operands', and its readers'."""

        def of(matmuls: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(hash(colours[matmul]) for matmul in matmuls))

        operands = sorted(
            hash((parameters, of(matmuls))) for parameters, matmuls in self.made_of[n]
        )
        around = (tuple(operands), of(self.read_by[n]), frozenset(self.results[n]))
        return hash((colours[n], *around))


neighbours = remembered(Neighbours)


def is_index(parameter: Instruction) -> bool:
    """Whether an argument has integers that choose among rows, as tokens do."""
    return parameter.shape.dtype in ("s32", "u32", "s64", "u64") and parameter.shape.size > 1


def _around(i: Instruction) -> range:
    """The operands that go around a matmul: what a call reads beside its two matrices, a bias or an
    added matrix, went around the dot that it was.
    """
    return range(0) if i.opcode in DOTS else range(2, len(i.operands))


# By what two matmuls are compared, of their op_name, source line, work and types; and how many
# matmuls away what is around them still counts. What tells most apart comes first.
_WAYS = (
    (itemgetter(0, 1, 2, 3), ROUNDS),
    (itemgetter(2, 3), ROUNDS),
    (itemgetter(2), ROUNDS),
    (itemgetter(2, 3), 1),
    (itemgetter(0, 1, 2, 3), 0),
    (itemgetter(0, 1, 2), 0),
    (itemgetter(2, 3), 0),
    (itemgetter(2), 0),
)


def match(
    after: HloModule,
    rows: Sequence[GemmRow],
    before: HloModule,
    dots: Sequence[GemmRow],
    types: Callable[[GemmRow], Hashable],
) -> list[GemmRow | None]:
    """For each of the `rows` of `after` the one of `dots`, of `before`, that it was; None where
    none is like it.

    Where several are alike in all that tells matmuls apart, they are paired in their order. `types`
    names the FP8 types that a row multiplies, or that XLA would find behind the operands of a dot.
    """
    known, known_dots = (
        [(row.op_name, row.source, work(row), types(row)) for row in of] for of in (rows, dots)
    )
    pairs: list[GemmRow | None] = [None] * len(rows)
    left = dict.fromkeys(range(len(dots)))
    for way, rounds in _WAYS:
        if None not in pairs or not left:
            break
        ours = _colours(after, rows, list(map(way, known)), rounds)
        theirs = _colours(before, dots, list(map(way, known_dots)), rounds)
        free: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
        for n in left:
            free[theirs[n]].append(n)
        for n, colour in enumerate(ours):
            if pairs[n] is None and free[colour]:
                found = free[colour].popleft()
                del left[found]
                pairs[n] = dots[found]
    # What XLA doubled has one dot for two rows.
    for n, pair in enumerate(pairs):
        if pair is None:
            alike = [dot for dot, of in zip(dots, known_dots, strict=True) if of[2] == known[n][2]]
            reads = _reads(after, rows[n])
            pairs[n] = max(alike, key=lambda dot: _reads(before, dot) == reads, default=None)
    return pairs


def _colours(
    module: HloModule, rows: Sequence[GemmRow], own: Sequence[Hashable], rounds: int
) -> list[Hashable]:
    """What each row is, and what is around it."""
    around = neighbours(module)
    number = [around.number[row.instruction] for row in rows]
    colours = around.colours(dict(zip(reversed(number), reversed(own), strict=True)), rounds)
    return [(of, colours[n]) for n, of in zip(number, own, strict=True)]


def _reads(module: HloModule, row: GemmRow) -> Counter[frozenset[int]]:
    """The parameters that each operand of a row is made of, in any order."""
    around = neighbours(module)
    return Counter(parameters for parameters, _ in around.made_of[around.number[row.instruction]])


# Where in a model a matmul stands -----------------------------------------------------------------


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
