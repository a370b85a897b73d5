"""Which matmul of one stage of a program is which of another: by what its operands are made of, and
what reads it.
"""

import collections
from collections.abc import Callable, Hashable, Sequence

from fp8lens.hlo.dataflow import NOBODY, Flow
from fp8lens.hlo.ops import DOTS, padded
from fp8lens.hlo.parse import HloModule
from fp8lens.matmul.rows import GemmRow

ROUNDS = 3  # how many matmuls away what tells two apart may lie


def work(row: GemmRow) -> tuple[tuple[int, ...], int]:
    """M and N, and K*batch, padded to what FP8 calls need: the same before and after XLA pads,
    exchanges the operands, or splits K.
    """
    m, n, k = map(padded, (row.m, row.n, row.k))
    return tuple(sorted((m, n))), k * row.batch


class _Side:
    """The matmuls of one stage, and their neighbours."""

    def __init__(self, module: HloModule, rows: Sequence[GemmRow]):
        self.rows = rows
        at = {row.instruction for row in rows}
        # What a call reads beside its two matrices (a bias, an added matrix) goes around the dot it
        # was.
        flow = Flow(
            module,
            at.__contains__,
            lambda i: range(2, len(i.operands)) if i.opcode not in DOTS else range(0),
        )
        sizes = [p.shape.size for p in module.entry.parameters]
        number = {i: n for n, i in enumerate(dict.fromkeys(row.instruction for row in rows))}
        self.of_row = [number[row.instruction] for row in rows]
        self.made_of: list[
            list[tuple[frozenset[int], frozenset[int]]]
        ] = []  # (parameters, matmuls) of each operand
        self.read_by: list[set[int]] = [set() for _ in number]
        self.results: list[set[int]] = [set() for _ in number]
        for i, n in number.items():
            operands = []
            for index in range(min(2, len(i.operands))):
                size = i.computation[i.operands[index]].shape.size
                producers = list(flow.of(flow.inputs.get(i, [NOBODY, NOBODY])[index]))
                # A scale may be applied before the dot or after: only what may be the matrix itself
                # tells two apart.
                parameters = frozenset(
                    m.element
                    for m in producers
                    if m.instruction is None
                    and m.element < len(sizes)
                    and 16 * sizes[m.element] >= size
                )
                others = frozenset(
                    number[m.instruction] for m in producers if m.instruction is not None
                )
                operands.append((parameters, others))
                for other in others:
                    self.read_by[other].add(n)
            self.made_of.append(operands)
        for place, made in enumerate(flow.results):
            for producer in flow.of(made):
                if producer.instruction is not None:
                    self.results[number[producer.instruction]].add(place)

    def colours(self, own_of: Sequence[Hashable], rounds: int) -> list[Hashable]:
        """For each row what it is and, `rounds` matmuls far, what is around it (Weisfeiler and
        Leman's refinement).
        """
        own: dict[int, Hashable] = {}
        for of, n in zip(own_of, self.of_row):
            own.setdefault(n, of)
        colours: list[Hashable] = [own[n] for n in range(len(own))]
        for _ in range(rounds):
            colours = [
                hash(
                    (
                        colour,
                        tuple(
                            sorted(
                                hash((parameters, tuple(sorted(hash(colours[o]) for o in others))))
                                for parameters, others in self.made_of[n]
                            )
                        ),
                        tuple(sorted(hash(colours[o]) for o in self.read_by[n])),
                        frozenset(self.results[n]),
                    )
                )
                for n, colour in enumerate(colours)
            ]
        return [(of, colours[n]) for of, n in zip(own_of, self.of_row)]


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
    sides = [
        (_Side(module, some), [(row.op_name, row.source, work(row), types(row)) for row in some])
        for module, some in ((after, rows), (before, dots))
    ]
    ways: list[tuple[Callable[[tuple], Hashable], int]] = [
        (lambda known: known, ROUNDS),
        (lambda known: known[2:], ROUNDS),
        (lambda known: known[2], ROUNDS),
        (lambda known: known, 1),
        (lambda known: known[2:], 1),
        (lambda known: known[2], 1),
        (lambda known: known, 0),
        (lambda known: known[:3], 0),
        (lambda known: known[2:], 0),
        (lambda known: known[2], 0),
    ]
    pairs: list[GemmRow | None] = [None] * len(rows)
    left = dict.fromkeys(range(len(dots)))
    for of, rounds in ways:
        if None not in pairs or not left:
            break
        free: dict[Hashable, collections.deque[int]] = collections.defaultdict(collections.deque)
        (ours, known), (theirs, given) = sides
        for n, colour in enumerate(theirs.colours(list(map(of, given)), rounds)):
            if n in left:
                free[colour].append(n)
        for n, colour in enumerate(ours.colours(list(map(of, known)), rounds)):
            if pairs[n] is None and free[colour]:
                found = free[colour].popleft()
                del left[found]
                pairs[n] = dots[found]
    for n, row in enumerate(rows):  # what XLA doubled has one dot for two rows
        if pairs[n] is None:
            same = [d for d in dots if work(d) == work(row)]
            pairs[n] = next(
                (d for d in same if (d.op_name, d.source) == (row.op_name, row.source)),
                same[0] if same else None,
            )
    return pairs
