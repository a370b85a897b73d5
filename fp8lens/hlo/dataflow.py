"""What is made of what: for each kernel, or each matmul, of a program, whose results it reads;
through views, tuples, calls, branches and loops.
"""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8lens.hlo.ops import CONTROL
from fp8lens.hlo.parse import Computation, HloModule, Instruction
from fp8lens.hlo.program import executions, fused

# What a value is made of: the numbers of its producers; of a tuple, a set for each element.
Producers = frozenset[int]
Made = Producers | tuple["Made", ...]
NOBODY: Producers = frozenset()


class Producer(NamedTuple):
    """Who made a value: an instruction's result (`element` of its tuple), or, without one, ENTRY's
    parameter.
    """

    instruction: Instruction | None
    element: int


def flat(made: Made) -> Producers:
    """All producers of a value's elements together."""
    if isinstance(made, frozenset):
        return made
    found: set[int] = set()
    todo = [made]
    while todo:
        value = todo.pop()
        if isinstance(value, frozenset):
            found |= value
        else:
            todo += value
    return frozenset(found)


def merged(a: Made, b: Made) -> Made:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(merged, a, b))
    return flat(a) | flat(b)


def element(made: Made, index: int) -> Made:
    return made[index] if isinstance(made, tuple) and index < len(made) else flat(made)


def _together(values: list[Made]) -> Producers:
    return NOBODY.union(*map(flat, values))


def _tuple(i: Instruction, values: list[Made]) -> Made:
    """What a tuple is made of, as deep as its shape is: else tuples of tuples that say to be arrays
    would double.
    """
    return tuple(v if e.is_tuple else flat(v) for v, e in zip(values, i.shape.elements))


class Flow:
    """The graph of a module's producers: those instructions that `is_producer` names, and ENTRY's
    parameters.

    `producers` are numbered; `inputs` has for each of them, by instruction, and for each operand who
    made it; `results` who made each of ENTRY's results. `passes_on` gives the operands of a producer,
    by index, whose producers count as the producers of its result too.
    """

    def __init__(
        self,
        module: HloModule,
        is_producer: Callable[[Instruction], bool],
        passes_on: Callable[[Instruction], range] = lambda i: range(0),
    ):
        self.producers: list[Producer] = []
        self.inputs: dict[Instruction, list[Producers]] = {}
        self._first: dict[Instruction, int] = {}  # the number of a producer's first result
        self._is_producer, self._passes_on = is_producer, passes_on
        self._given: dict[str, list[Made]] = {}  # to each computation, for its parameters
        self._returned: dict[str, Made] = {}
        entry = module.entry
        self._given[entry.name] = [
            self._add(None, number) for number in range(len(entry.parameters))
        ]
        order = [module.computations[name] for name in executions(module)]
        self._callers: dict[str, set[str]] = collections.defaultdict(set)
        for computation in order:
            for i in computation:
                for called in i.called if i.opcode.removesuffix("-start") in CONTROL else ():
                    self._callers[called].add(computation.name)
        run = {c.name for c in order}
        dirty = set(run)
        while dirty:
            for computation in order:
                if computation.name in dirty:
                    dirty.discard(computation.name)
                    dirty |= self._run(computation) & run
        returned = self._returned.get(entry.name, NOBODY)
        self.results = [flat(r) for r in returned] if isinstance(returned, tuple) else [returned]

    def _add(self, instruction: Instruction | None, element: int) -> Producers:
        self.producers.append(Producer(instruction, element))
        return frozenset((len(self.producers) - 1,))

    def of(self, numbers: Producers) -> Iterator[Producer]:
        """The producers that have these numbers."""
        return (self.producers[number] for number in sorted(numbers))

    def numbers(self, instruction: Instruction) -> range:
        """The numbers of all results of a producer."""
        first = self._first[instruction]
        return range(first, first + max(1, len(instruction.shape.elements)))

    def _own(self, i: Instruction) -> Made:
        if i not in self._first:
            self._first[i] = len(self.producers)
            for number in range(max(1, len(i.shape.elements))):
                self._add(i, number)
        own = [frozenset((number,)) for number in self.numbers(i)]
        return tuple(own) if i.shape.elements else own[0]

    def _run(self, computation: Computation) -> set[str]:
        """Follow one computation; the names of those that must be followed again."""
        given, again = self._given.get(computation.name, []), set()
        values: dict[str, Made] = {}
        for i in computation.instructions:
            values[i.name] = self._value(
                i, [values.get(name, NOBODY) for name in i.operands], given, again
            )
        known = self._returned.get(computation.name)
        result = (
            values[computation.root.name]
            if known is None
            else merged(known, values[computation.root.name])
        )
        if result != known:
            self._returned[computation.name] = result
            again |= self._callers[computation.name]
        return again

    def _value(
        self, i: Instruction, operands: list[Made], given: list[Made], again: set[str]
    ) -> Made:
        opcode = i.opcode
        if opcode == "parameter":
            number = i.parameter_number
            return given[number] if number < len(given) else NOBODY
        if opcode == "tuple":
            return _tuple(i, operands)
        if opcode == "get-tuple-element":
            return element(operands[0], i.element)
        if self._is_producer(i):
            made = list(map(flat, operands))
            known = self.inputs.get(i)
            self.inputs[i] = [a | b for a, b in zip(known, made)] if known else made
            own, more = self._own(i), _together([made[index] for index in self._passes_on(i)])
            return (
                own
                if not more
                else tuple(o | more for o in own)
                if isinstance(own, tuple)
                else own | more
            )
        if opcode.removesuffix("-start") in CONTROL:
            return self._call(i, operands, again)
        if i.opcode == "fusion" and i.shape.is_tuple:
            return self._inside(fused(i), operands)
        return _together(operands)

    def _inside(self, computation: Computation, operands: list[Made]) -> Made:
        values: dict[str, Made] = {}
        for j in computation.instructions:
            if j.opcode == "parameter":
                number = j.parameter_number
                values[j.name] = operands[number] if number < len(operands) else NOBODY
            elif j.opcode == "tuple":
                values[j.name] = _tuple(j, [values.get(name, NOBODY) for name in j.operands])
            else:
                values[j.name] = _together([values.get(name, NOBODY) for name in j.operands])
        return values[computation.root.name]

    def _call(self, i: Instruction, operands: list[Made], again: set[str]) -> Made:
        called = i.called
        if i.opcode == "while":  # what the body returns, it gets the next time
            body = self._returned.get(i.callee("body"))
            operands = [made if body is None else merged(made, body) for made in operands[:1]]
        given = dict.fromkeys(called, operands)
        if i.opcode == "conditional":
            given = {name: [made] for name, made in zip(called, operands[1:])}
        for name, made in given.items():
            before = self._given.get(name)
            after = list(map(merged, before, made)) if before and len(before) == len(made) else made
            if after != before:
                self._given[name] = after
                again.add(name)
        returned = (
            operands
            if i.opcode == "while"
            else [self._returned[n] for n in given if n in self._returned]
        )
        result = functools.reduce(merged, returned) if returned else NOBODY
        return flat(result) if i.opcode.endswith("-start") else result
