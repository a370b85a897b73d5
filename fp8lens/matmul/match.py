"""Which matmul of one stage of a program is which of another: by what its operands are made of, and
what reads it.
"""

import collections
import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from fp8lens.hlo.dataflow import NOBODY, Flow
from fp8lens.hlo.ops import DOTS, padded
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.matmul.rows import GemmRow

ROUNDS = 3  # how many matmuls away what tells two apart may lie


def work(row: GemmRow) -> tuple[tuple[int, ...], int]:
    """M and N, and K*batch, padded to what FP8 calls need: the same before and after XLA pads,
    exchanges the operands, or splits K.
    """
    m, n, k = map(padded, (row.m, row.n, row.k))
    return tuple(sorted((m, n))), k * row.batch


class _Side:
    """The matmuls of one stage, and their neighbours.

    Matmuls are numbered by instruction; `of_row` has the number of each row's.
    """

    def __init__(self, module: HloModule, rows: Sequence[GemmRow]):
        self.rows = rows
        # Each once, though several rows may be of one instruction.
        instructions = dict.fromkeys(row.instruction for row in rows)
        self._number = {i: n for n, i in enumerate(instructions)}
        self.of_row = [self._number[row.instruction] for row in rows]
        self._sizes = [p.shape.size for p in module.entry.parameters]
        self._flow = Flow(module, self._number.__contains__, _around)
        # For each operand of each matmul, the parameters and the matmuls that it is made of.
        self.made_of = []
        for i in self._number:
            indices = range(min(2, len(i.operands)))
            self.made_of.append([self._made_of(i, index) for index in indices])
        # For each matmul, the matmuls that read it, and the results of the program that it makes.
        self.read_by: list[set[int]] = [set() for _ in self._number]
        self.results: list[set[int]] = [set() for _ in self._number]
        for reader, operands in enumerate(self.made_of):
            for _, matmuls in operands:
                for matmul in matmuls:
                    self.read_by[matmul].add(reader)
        for place, made in enumerate(self._flow.results):
            for producer in self._flow.of(made):
                if producer.instruction is not None:
                    self.results[self._number[producer.instruction]].add(place)

    def _made_of(self, i: Instruction, index: int) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of the parameters and of the matmuls that an operand is made of."""
        size = i.computation[i.operands[index]].shape.size
        inputs = self._flow.inputs.get(i, [NOBODY, NOBODY])
        parameters, matmuls = set(), set()
        for instruction, element in self._flow.of(inputs[index]):
            if instruction is not None:
                matmuls.add(self._number[instruction])
            # A scale may be applied before the dot or after: only what may be the matrix itself
            # tells two apart.
            elif element < len(self._sizes) and 16 * self._sizes[element] >= size:
                parameters.add(element)
        return frozenset(parameters), frozenset(matmuls)

    def reads(self, row: int) -> Counter[frozenset[int]]:
        """The parameters that each operand of a row is made of, in any order."""
        return Counter(parameters for parameters, _ in self.made_of[self.of_row[row]])

    def colours(self, own_of: Sequence[Hashable], rounds: int) -> list[Hashable]:
        """For each row what it is and, `rounds` matmuls far, what is around it (Weisfeiler and
        Leman's refinement).
        """
        own: dict[int, Hashable] = {}
        for of, n in zip(own_of, self.of_row, strict=True):
            own.setdefault(n, of)
        colours: list[Hashable] = [own[n] for n in range(len(own))]
        for _ in range(rounds):
            colours = [self._refined(n, colours) for n in range(len(colours))]
        return [(of, colours[n]) for of, n in zip(own_of, self.of_row, strict=True)]

    def _refined(self, n: int, colours: list[Hashable]) -> Hashable:
        """A matmul's colour after one more round: its own, its operands', and its readers'."""

        def of(matmuls: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(hash(colours[matmul]) for matmul in matmuls))

        operands = sorted(
            hash((parameters, of(matmuls))) for parameters, matmuls in self.made_of[n]
        )
        around = (tuple(operands), of(self.read_by[n]), frozenset(self.results[n]))
        return hash((colours[n], *around))


def _around(i: Instruction) -> range:
    """The operands that go around a matmul: what a call reads beside its two matrices, a bias or an
    added matrix, went around the dot that it was.
    """
    return range(0) if i.opcode in DOTS else range(2, len(i.operands))


# What is known of a matmul: its op_name, its source line, its work, and its types.
_Known = tuple[str, str, tuple[tuple[int, ...], int], Hashable]


def _all(known: _Known) -> Hashable:
    return known


def _all_but_types(known: _Known) -> Hashable:
    return known[:3]


def _work_and_types(known: _Known) -> Hashable:
    return known[2:]


def _work_alone(known: _Known) -> Hashable:
    return known[2]


# By what two matmuls are compared, and how many matmuls away what is around them still counts: what
# tells most apart comes first.
_WAYS: list[tuple[Callable[[_Known], Hashable], int]] = [
    (_all, ROUNDS),
    (_work_and_types, ROUNDS),
    (_work_alone, ROUNDS),
    (_all, 1),
    (_work_and_types, 1),
    (_work_alone, 1),
    (_all, 0),
    (_all_but_types, 0),
    (_work_and_types, 0),
    (_work_alone, 0),
]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is known of a matmul, and the parameters that its operands are made of."""

    known: _Known
    reads: Counter[frozenset[int]]

    def likeness(self, other: "_Kind") -> tuple[bool, bool, bool]:
        """How much tells that two are the same: what they read, their types, their place."""
        (*here, _, types), (*there, _, other_types) = self.known, other.known
        return self.reads == other.reads, types == other_types, here == there


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

    def known(row: GemmRow) -> _Known:
        return row.op_name, row.source, work(row), types(row)

    ours, theirs = _Side(after, rows), _Side(before, dots)
    known_of_ours, known_of_theirs = [known(row) for row in rows], [known(dot) for dot in dots]
    pairs: list[GemmRow | None] = [None] * len(rows)
    left = set(range(len(dots)))
    for of, rounds in _WAYS:
        if None not in pairs or not left:
            break
        free: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
        for n, colour in enumerate(theirs.colours(list(map(of, known_of_theirs)), rounds)):
            if n in left:
                free[colour].append(n)
        for n, colour in enumerate(ours.colours(list(map(of, known_of_ours)), rounds)):
            if pairs[n] is None and free[colour]:
                found = free[colour].popleft()
                left.remove(found)
                pairs[n] = dots[found]

    kinds = [_Kind(of, theirs.reads(m)) for m, of in enumerate(known_of_theirs)]
    in_doubt = [n for n, pair in enumerate(pairs) if pair is None]
    for n in in_doubt:
        pairs[n] = _doubled(_Kind(known_of_ours[n], ours.reads(n)), dots, kinds)
    return pairs


def _doubled(row: _Kind, dots: Sequence[GemmRow], kinds: Sequence[_Kind]) -> GemmRow | None:
    """The dot of a row that has none to itself: what XLA doubled has one dot for two rows. Of those
    with the same work, the one that reads the same, then of the same types, then of the same place.
    """
    same = [m for m, kind in enumerate(kinds) if kind.known[2] == row.known[2]]
    best = max(same, key=lambda m: row.likeness(kinds[m]), default=None)
    return None if best is None else dots[best]
