"""What is made of what, across all computations of a program: through views, tuples, calls,
branches and loops.

`Flow` answers for all kernels, or all matmuls, at once whose results each one reads, whatever is
computed in between. `Graph` steps from one value to the next, and stops where it is no longer that
value alone.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fp8lens.hlo.ops import COLLECTIVES, CONTROL, ELEMENTWISE
from fp8lens.hlo.parse import Computation, HloModule, Instruction
from fp8lens.hlo.program import executions, fusion_body
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import operand
from fp8lens.hlo.walk import walk

_CALLERS = CONTROL | {"fusion"}
# What hands on the elements of its first operand, or of those that `_handed_on` names.
_HANDED_ON = frozenset(
    "bitcast bitcast-convert reshape copy transpose slice dynamic-slice dynamic-update-slice pad "
    "concatenate gather reverse broadcast scatter select".split()
)

# What a value is made of: the numbers of its producers; of a tuple, a set for each element, also of
# one that is a tuple.
Producers = frozenset[int]
Made = list[Producers]
NOBODY: Producers = frozenset()


class Producer(NamedTuple):
    """Who made a value: an instruction's result (`element` of its tuple), or, without one, ENTRY's
    parameter.
    """

    instruction: Instruction | None
    element: int


def _merged(a: Made, b: Made) -> Made:
    """What a value is made of that is sometimes the one and sometimes the other."""
    if len(a) != len(b):
        return [_flat([*a, *b])]
    return [x | y for x, y in zip(a, b, strict=True)]


def _flat(made: Made) -> Producers:
    """All producers of a value's elements together."""
    return NOBODY.union(*made)


class Flow:
    """The graph of a module's producers: those instructions that `is_producer` names, and ENTRY's
    parameters.

    `producers` are numbered; `inputs` has for each of them, by instruction, and for each operand
    who made it; `results` who made each of ENTRY's results. `passes_on` gives the operands of a
    producer, by index, whose producers count as the producers of its result too.
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
        # As far as it is known. A loop's body hands on what it returns, so more may come to be
        # known, and the computation is followed again.
        self._made: dict[Instruction, Made] = {}
        for number, parameter in enumerate(module.entry.parameters):
            self.producers.append(Producer(None, number))
            self._made[parameter] = [frozenset((number,))]
        order = [module.computations[name] for name in executions(module)]
        again = {c.name for c in order}
        while again:
            for computation in order:
                if computation.name in again:
                    again.discard(computation.name)
                    again.update(self._follow(computation))
            again.intersection_update(c.name for c in order)
        self.results = self._of(module.entry.root)

    def of(self, numbers: Producers) -> Iterator[Producer]:
        """The producers that have these numbers."""
        return (self.producers[number] for number in sorted(numbers))

    def numbers(self, i: Instruction) -> range:
        """The numbers of all results of a producer."""
        elements = range(max(1, len(i.shape.elements)))
        if i not in self._first:
            self._first[i] = len(self.producers)
            self.producers += [Producer(i, n) for n in elements]
        first = self._first[i]
        return range(first, first + len(elements))

    def _of(self, i: Instruction) -> Made:
        return self._made.get(i, [NOBODY])

    def _follow(self, computation: Computation) -> Iterator[str]:
        """Follow one computation; the names of those that must be followed again."""
        changed: set[str] = set()
        for i in computation:
            made = self._value(i)
            if made != self._made.get(i):
                self._made[i] = made
                changed.add(i.name)
            if i.opcode.removesuffix("-start") in CONTROL and not changed.isdisjoint(i.operands):
                yield from i.called
        if computation.root.name in changed:
            for caller in callers(computation.module).get(computation.name, ()):
                yield from (caller.computation.name, *caller.called)

    def _value(self, i: Instruction) -> Made:
        if i.opcode == "parameter":
            return self._made[i] if i.computation.is_entry else self._either(_given(i))
        operands = [self._of(i.computation[name]) for name in i.operands]
        if i.opcode == "tuple":
            return [_flat(made) for made in operands]
        if i.opcode == "get-tuple-element":
            of = operands[0]
            is_known = i.element < len(of) and not operand(i, 0).opcode.endswith("-start")
            return [of[i.element] if is_known else _flat(of)]
        if self._is_producer(i):
            return self._produced(i, [_flat(made) for made in operands])
        if i.opcode.endswith("-done"):
            return operands[0]
        if i.opcode.startswith(COLLECTIVES) and i.shape.is_tuple:  # each array by itself
            return [_flat(made) for made in operands]
        if i.opcode.removesuffix("-start") in CONTROL:
            returned = _same_as(i)
            if i.opcode == "while":  # whose body may not run at all
                returned.append(operand(i, 0))
            return self._either(returned)
        if i.opcode == "fusion" and i.shape.is_tuple:
            return self._inside(fusion_body(i), operands)
        return [_flat([_flat(made) for made in operands])]

    def _either(self, several: Iterable[Instruction]) -> Made:
        """What a value is made of that is one or another of these."""
        known = [self._made[i] for i in several if i in self._made]
        return functools.reduce(_merged, known) if known else [NOBODY]

    def _produced(self, i: Instruction, operands: list[Producers]) -> Made:
        """A producer's result, after noting who made its operands."""
        self.inputs[i] = operands
        more = _flat([operands[index] for index in self._passes_on(i)])
        return [more | {number} for number in self.numbers(i)]

    def _inside(self, computation: Computation, operands: list[Made]) -> Made:
        values: dict[str, Made] = {}
        for j in computation.instructions:
            made = [_flat(values[name]) for name in j.operands]
            if j.opcode == "parameter":
                number = j.parameter_number or 0
                values[j.name] = operands[number] if number < len(operands) else [NOBODY]
            else:
                values[j.name] = made if j.opcode == "tuple" else [_flat(made)]
        return values[computation.root.name]


# From one value to the next -----------------------------------------------------------------------


@remembered
def callers(module: HloModule) -> dict[str, list[Instruction]]:
    """The calls, loops, branches and fusions that run each computation, by its name."""
    found: dict[str, list[Instruction]] = collections.defaultdict(list)
    for i in module:
        if i.opcode.removesuffix("-start") in _CALLERS:
            for name in i.called:
                found[name].append(i)
    return dict(found)


class Value(NamedTuple):
    """What an instruction gives, or, where that is a tuple, an `element` of it; else the element
    is 0.

    Where a walk forwards arrives at a collective or at an end, `element` is the operand by which it
    arrived. It is None at a reader from which the value goes no further.
    """

    instruction: Instruction
    element: int | None


class _Large(NamedTuple):
    """The arrays that an instruction's elements are computed from elementwise, by their names, by
    what they are to it: `values`; `repeated`, with each element at several places, as a vector that
    is broadcast, or scales by index; `masks`, which are compared with something.
    """

    values: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    masks: frozenset[str] = frozenset()

    @property
    def own(self) -> frozenset[str]:
        """Those whose elements they are: beside values, what is repeated is a scale or a bias, and
        beside both a mask is no value.
        """
        return self.values or self.repeated or self.masks


def _together_large(several: Iterable[_Large]) -> _Large:
    """What is computed from all of these, elementwise."""
    several = [*several]
    return _Large(*(frozenset().union(*of_each) for of_each in zip(*several, strict=True)))


class Graph:
    """The users and the producers of a module's values, one step at a time, across all its
    computations: through tuples, fusions, loops, calls, branches, asynchronous pairs and
    collectives.

    A step goes from a value to those that are the same, moved, taken or put by index, converted, or
    computed elementwise from it and nothing else that is large; indices and masks are no values of
    what they choose. `is_end` names the instructions that are arrived at and not stepped through,
    as matmuls; a walk ends after `most` values. With `mixes` a step also goes to what is computed
    elementwise from several large arrays, and to no vector's copies.
    """

    def __init__(
        self,
        module: HloModule,
        is_end: Callable[[Instruction], bool],
        most: int,
        mixes: bool = False,
    ):
        self._callers = callers(module)
        self._is_end, self._most, self._mixes = is_end, most, mixes
        self._sources: dict[str, dict[str, _Large]] = {}
        # The steps taken so far: walks from different places cross.
        self._after: dict[Value, tuple[Value, ...]] = {}
        self._before: dict[Value, tuple[Value, ...]] = {}

    def after(self, value: Value) -> tuple[Value, ...]:
        """Who reads a value: the values that follow, and Value(reader, None) for a reader that
        does not hand it on, or for ENTRY's root.
        """
        if value not in self._after:
            self._after[value] = tuple(self._steps_after(value))
        return self._after[value]

    def before(self, value: Value) -> tuple[Value, ...]:
        """What a value is made of."""
        if value not in self._before:
            self._before[value] = tuple(self._steps_before(value))
        return self._before[value]

    def walk(
        self,
        start: Iterable[Value],
        step: Callable[[Value], Iterable[Value]],
        stop: Callable[[Instruction], bool],
    ) -> dict[Value, Value | None]:
        """Every value that is reached, nearest first, with the one before it; nothing beyond where
        `stop` is true. `step` is `after` or `before`.
        """

        def onward(value: Value) -> Iterable[Value]:
            ends = value.element is None or stop(value.instruction)
            return () if ends else step(value)

        return walk(start, onward, self._most)

    def launcher(self, i: Instruction) -> Instruction:
        """The instruction that launches what computes `i`: the outermost fusion around it, or
        itself.
        """
        for _ in self._callers:  # no more often: what ENTRY does not reach may call itself
            around = self._callers.get(i.computation.name)
            if not around or not around[0].opcode.startswith("fusion"):
                break
            i = around[0]
        return i

    def _steps_after(self, value: Value) -> Iterator[Value]:
        i = value.instruction
        for user in i.computation.users.get(i.name, ()):
            for n, name in enumerate(user.operands):
                if name == i.name:
                    yield from self._read_by(user, n, value.element)
        if i.is_root:
            yield from self._returned(value)

    def _read_by(self, user: Instruction, n: int, element: int | None) -> Iterator[Value]:
        """The values that follow where an instruction reads a value, or an element of it, as its
        operand n.
        """
        if user.opcode == "get-tuple-element":
            if user.element == element:
                yield Value(user, 0)
        elif user.opcode == "tuple":
            yield Value(user, n)
        elif _is_same(user):
            yield Value(user, element)
        elif user.opcode.removesuffix("-start") in _CALLERS:
            for parameter in _parameters(user, n):
                yield Value(parameter, element)
        elif user.opcode.startswith(COLLECTIVES) or self._is_end(user):
            yield Value(user, n)
        else:
            yield Value(user, 0 if self._hands_on(user, n) else None)

    def _returned(self, value: Value) -> Iterator[Value]:
        """The values that follow a computation's root."""
        computation = value.instruction.computation
        for caller in self._callers.get(computation.name, ()):
            if computation not in _returning(caller):
                continue
            yield Value(caller, value.element)
            if caller.opcode == "while":  # the next iteration gets it
                for parameter in _parameters(caller, 0):
                    yield Value(parameter, value.element)
        if computation.is_entry:
            yield Value(value.instruction, None)

    def _steps_before(self, value: Value) -> Iterator[Value]:
        i, k = value
        if same := _same_as(i):
            yield from (Value(other, k) for other in same)
        elif i.opcode == "get-tuple-element":
            yield Value(operand(i, 0), i.element)
        elif i.opcode == "tuple" or i.opcode.startswith(COLLECTIVES):
            yield Value(operand(i, min(k or 0, len(i.operands) - 1)), 0)
        elif not self._is_end(i):
            for n, name in enumerate(i.operands):
                if self._hands_on(i, n):
                    yield Value(i.computation[name], 0)

    def _hands_on(self, i: Instruction, n: int) -> bool:
        """Whether what an instruction gives is its operand n, moved or changed elementwise."""
        large = self._large(i.computation)
        of_operand = large[i.operands[n]].own
        if i.opcode == "select" and n == 0:
            chosen = _together_large(large[name] for name in i.operands[1:])
            return bool(of_operand) and of_operand <= chosen.own
        if i.opcode == "select":
            return bool(of_operand)
        if i.opcode in _HANDED_ON:
            is_value = n in _handed_on(i)
            return is_value and not (self._mixes and i.opcode == "broadcast" and _repeats(i))
        if self._mixes:
            return i.opcode in ELEMENTWISE and i.shape.dtype != "pred" and bool(of_operand)
        together = _together_large(large[name] for name in i.operands).own
        return i.opcode in ELEMENTWISE and len(together) == 1 and of_operand == together

    def _large(self, computation: Computation) -> dict[str, _Large]:
        """Of each instruction, the arrays that it is computed from elementwise, scalars not
        counted.
        """
        if computation.name in self._sources:
            return self._sources[computation.name]
        found: dict[str, _Large] = {}
        self._sources[computation.name] = found
        for i in computation:
            found[i.name] = _large_of(i, found)
        return found


def _large_of(i: Instruction, found: dict[str, _Large]) -> _Large:
    """The arrays that an instruction is computed from elementwise, from those of its operands."""
    if i.opcode not in ELEMENTWISE | _HANDED_ON or not (operands := _handed_on(i)):
        if i.opcode in ("iota", "constant") or i.shape.size <= 1:
            return _Large()
        own = frozenset((i.name,))
        return _Large(masks=own) if i.shape.dtype == "pred" else _Large(own)
    large = _together_large(found.get(i.operands[n], _Large()) for n in operands)
    if i.opcode in _HANDED_ON and len(large.values) > 1:  # each element is of one of them
        large = large._replace(values=frozenset((i.name,)))
    if i.opcode == "select" and not large.own:  # two numbers, chosen by a mask
        return _Large(masks=found.get(i.operands[0], _Large()).own)
    if i.shape.dtype == "pred":
        return _Large(masks=frozenset().union(*large))
    if _repeats(i):
        return large._replace(values=frozenset(), repeated=large.values | large.repeated)
    return large


def _handed_on(i: Instruction) -> Sequence[int]:
    """The operands whose elements are in what an instruction gives: no indices, and no mask."""
    everything = range(len(i.operands))
    if i.opcode == "select":
        return everything[1:]
    if i.opcode == "dynamic-update-slice":
        return everything[:2]
    if i.opcode == "scatter":
        return (0, 2) if len(i.operands) == 3 and _overwrites(i) else ()
    if i.opcode in ELEMENTWISE or i.opcode == "concatenate":
        return everything
    return everything[:1]


def _overwrites(scatter: Instruction) -> bool:
    """Whether a scatter puts its updates in the place of what was there; else it adds them, or the
    like.
    """
    combines = scatter.computation.module.computations.get(scatter.callee("to_apply"))
    return combines is not None and combines.root.parameter_number == 1


def _is_same(i: Instruction) -> bool:
    """Whether an instruction gives its operand, whole."""
    return i.opcode.endswith(("-done", "-update")) or i.opcode == "opt-barrier"


def _same_as(i: Instruction) -> list[Instruction]:
    """The instructions of which one gives what an instruction gives, whole."""
    if i.opcode == "parameter":
        return _given(i)
    if i.opcode.removesuffix("-start") in _CALLERS:
        return [computation.root for computation in _returning(i)]
    return [operand(i, 0)] if _is_same(i) else []


def _repeats(i: Instruction) -> bool:
    """Whether a broadcast, or a gather by indices, gives more elements than it got."""
    if i.opcode not in ("broadcast", "gather"):
        return False
    return i.computation[i.operands[0]].shape.size < i.shape.size


def _parameters(caller: Instruction, n: int) -> list[Instruction]:
    """The parameters that get operand n of a call, loop, branch or fusion."""
    computations = [caller.computation.module.computations[name] for name in caller.called]
    if caller.opcode == "conditional":  # operand 0 chooses the branch
        return [*computations[n - 1].parameters] if n else []
    return [c.parameters[n] for c in computations if n < len(c.parameters)]


@remembered
def _given(parameter: Instruction) -> list[Instruction]:
    """What the callers of a computation give for its parameter; in a loop also what the iteration
    before returned.
    """
    found = []
    own = parameter.computation.name
    for caller in callers(parameter.computation.module).get(own, ()):
        for n, name in enumerate(caller.called):
            if name == own:
                is_branch = caller.opcode == "conditional"  # whose operand 0 chooses the branch
                at = n + 1 if is_branch else parameter.parameter_number or 0
                found.append(operand(caller, at))
        if caller.opcode == "while":
            found += [computation.root for computation in _returning(caller)]
    return found


def _returning(caller: Instruction) -> list[Computation]:
    """The computations whose roots are what a call, loop, branch or fusion gives."""
    names = [caller.callee("body")] if caller.opcode == "while" else caller.called
    return [caller.computation.module.computations[name] for name in names if name in caller.called]
