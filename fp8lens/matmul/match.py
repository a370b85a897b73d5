"""Which matmul of one stage of a program is which of another: by what its operands are made of, and
what reads it.
"""

import collections
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter

from fp8lens.hlo.dataflow import NOBODY, Flow
from fp8lens.hlo.ops import DOTS, padded
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.program import executions
from fp8lens.hlo.remember import remembered
from fp8lens.matmul.rows import GemmRow, is_sum_of_products, matmuls

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

    def _made_of(self, i: Instruction, index: int) -> tuple[frozenset[int], frozenset[int]]:
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
