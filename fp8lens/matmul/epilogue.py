"""What becomes of a dot's result in the program that XLA's gemm rewriter is given."""

import copy
import dataclasses
import functools
import heapq
import re
from collections.abc import Callable, Iterator

from fp8lens.formats import is_fp8
from fp8lens.hlo.dataflow import Graph, Value, callers
from fp8lens.hlo.ops import CONTROL, CUTS, DOTS, ELEMENTWISE, LAYOUT
from fp8lens.hlo.parse import HloModule, Instruction
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import (
    broadcast_of,
    depends,
    is_square,
    is_transpose,
    look_through,
    reducer,
    since,
)
from fp8lens.matmul.roles import (
    Role,
    Step,
    could_be_fused,
    is_added_up,
    is_tanh_gelu,
    masks,
    step_of,
)

# What gives a result on, at other places, or some of it.
_MOVES_ON = LAYOUT | {"slice", "concatenate", "reverse", "opt-barrier"}
# The same, of their first operand.
_MOVES_FIRST = frozenset("dynamic-slice gather pad broadcast".split())
# The same, of the operand with this number: they store it in another array.
_STORES = {"dynamic-update-slice": 1, "scatter": 2}
# So many branches behind one another are looked into.
_DEEPEST = 4
# So many moved copies of a value are looked at.
_MOST_COPIES = 20
# What may stand between a value and the reduction that finds its amax.
_BEFORE_AMAX = frozenset("abs convert bitcast reshape negate opt-barrier".split())


# What hands a value on to another computation.
_HANDING = CONTROL | {"tuple"}
# What reads a value, and does nothing in whose kernel something else could be done.
_READ_AS_IT_IS = _HANDING | DOTS


class Result:
    """What the program does with a dot's result: `steps`, in order, up to where it is no longer
    this result alone; and `readers`, pairs of a value on the way and who reads it besides. It is
    followed through loops, branches and calls.
    """

    def __init__(self, dot: Instruction):
        self._dot = dot
        # What the values on the way are computed from, in the computation that the way is in.
        self._origin = dot
        self.steps: list[Step] = []
        self.readers: list[tuple[Instruction, Instruction]] = []
        self._seen: set[Instruction] = set()
        self._depth = 0
        self._follow(dot)

    def _follow(self, value: Instruction | None) -> None:
        """Add what is done with a value, and with what comes of it, up to the end; a loop's body
        once.
        """
        while value is not None and value not in self._seen:
            self._seen.add(value)
            value = self._advance(value)

    def _of(self, i: Instruction) -> list[Instruction]:
        """Who reads a value."""
        return i.computation.users.get(i.name, [])

    def _advance(self, value: Instruction) -> Instruction | None:
        """Add what is done with `value`; the value that comes of it, None at the end."""
        if any(step.how == SUMMED for step in self.steps):
            return self._behind_sum(value)
        follow = []
        for user in self._of(value):
            if amax := self._amax(user):
                self.steps.append(Step(Role.AMAX, amax, value))
            else:
                follow.append(user)
        leaves = value.is_root or any(user.opcode in _HANDING for user in follow)
        if leaves and (elsewhere := handed(value)):
            return self._elsewhere(value, follow, elsewhere)
        if not follow:
            return None
        at = follow[0]
        if len(follow) > 1 and all(user.opcode in CUTS for user in follow):
            # Parts that are treated alike: one stands for all. Else the one of which most is made.
            return self._along_the_best(
                [functools.partial(_move, at=u, value=value) for u in follow]
            )
        if len(follow) > 1 or at.operands.count(value.name) > 1:
            return self._branch(value, follow)
        return self._along(at, value)

    def _along(self, at: Instruction, value: Instruction) -> Instruction | None:
        """Advance along the one reader of a value."""
        if how := _sent(at):
            self.steps.append(Step(Role.MOVE, at, value, how=how))
            return at
        if _is_moved(at, value) or masks(at, value):
            in_name_alone = at.opcode in ("bitcast", "reshape") and not is_transpose(at)
            if not in_name_alone:
                self.steps.append(Step(Role.MOVE, at, value))
            return at
        return self._compute(at, value)

    def _behind_sum(self, value: Instruction) -> Instruction | None:
        """Advance behind a sum over devices: along factors and vectors that are added, where
        nothing else is done for which a kernel runs in any case. Each device may multiply its own
        part of the sum, and one device may add a vector to its part.
        """
        users = self._of(value)
        if not users or users[0].opcode not in ELEMENTWISE or not self._is_scaled_alone(value):
            return None
        return self._compute(users[0], value)

    def _is_scaled_alone(self, value: Instruction) -> bool:
        """Whether a sum is multiplied, or a vector added to it, and nothing else is done with it
        but to return it or to multiply it by a matrix.
        """
        users = self._of(value)
        if all(user.opcode in _READ_AS_IT_IS for user in users):
            return value.shape.size > 1
        if len(users) != 1 or users[0].opcode not in ELEMENTWISE:
            return False
        step = step_of(users[0], value)
        is_bias = step.kind is Role.BIAS and _adds_a_vector(step)
        is_one = is_bias or step.kind in (Role.SCALE, Role.ALPHA)
        return is_one and self._is_scaled_alone(users[0])

    def _elsewhere(
        self, value: Instruction, follow: list[Instruction], handed_on: list[tuple]
    ) -> Instruction | None:
        """Advance where `value` is handed on to other computations, and perhaps read in its own."""
        here = [user for user in follow if user.opcode not in _HANDING]
        beside = [(value, user) for user in here]
        ways: list[_Way] = [
            functools.partial(_hand_on, value=value, to=to, how=how, beside=beside)
            for to, how in handed_on
        ]
        if here:
            ways.append(functools.partial(_branch, value=value, follow=follow))
        return self._along_the_best(ways)

    def _branch(self, value: Instruction, follow: list[Instruction]) -> Instruction | None:
        """Advance where several read `value`, or one reads it twice: along an activation of several
        operations, or else along the one reader that does what the call could have done.
        """
        if chosen := self._chosen(value):
            self.steps.append(Step(Role.MOVE, chosen, value, how="joined with itself"))
            return chosen
        ways: list[_Way] = []
        of_an_activation: set[Instruction] = set()
        end = self._joined(value)
        if end and not self._is_maximum_of_some(end):
            beside = [(value, user) for user in self._beside(value, end)]
            ways.append(functools.partial(_activate, end=end, value=value, beside=beside))
            # What a reader computes for that activation alone is a part of it, as in softplus.
            parts = since(value, end)
            of_an_activation = {at for at in follow if parts.issuperset(self._of(at))} - {end}
        for at in follow:
            is_a_part = at in of_an_activation and step_of(at, value).kind in _OF_ACTIVATIONS
            if self._could_be_fused(at, value) and not is_a_part:
                beside = [(value, user) for user in follow if user is not at]
                ways.append(functools.partial(_compute, at=at, value=value, beside=beside))
        if not ways:
            self.readers += [(value, user) for user in follow]
            return None
        return self._along_the_best(ways)

    def _chosen(self, value: Instruction) -> Instruction | None:
        """The selection between copies of `value`, which moves have made and nothing else reads."""
        copies, ends, todo = {value.name}, set(), [value]
        while todo and len(copies) < _MOST_COPIES:
            at = todo.pop()
            for user in self._of(at):
                if user.opcode == "select" and user.operands[0] != at.name:
                    ends.add(user)
                elif _is_moved(user, at):
                    copies.add(user.name)
                    todo.append(user)
                else:
                    return None
        end = ends.pop() if len(ends) == 1 else None
        return end if end is not None and copies.issuperset(end.operands[1:]) else None

    def _along_the_best(self, ways: "list[_Way]") -> Instruction | None:
        """Follow the way along which most is done that a call could do: whatever the order in which
        a program returns its results.
        """
        if len(ways) == 1 or self._depth == _DEEPEST:
            return ways[0](self)
        trials = [self._tried(way) for way in ways]
        best = max(trials, key=lambda trial: trial._promise)
        self.steps, self.readers = best.steps, best.readers
        return None  # it is followed to its end

    def _tried(self, way: "_Way") -> "Result":
        trial = copy.copy(self)
        trial.steps, trial.readers = [*self.steps], [*self.readers]
        trial._seen = {*self._seen}
        trial._depth += 1
        trial._follow(way(trial))
        return trial

    @property
    def _promise(self) -> tuple[int, bool, int, tuple[Role, ...]]:
        """How many steps a call could do, whether the result becomes FP8, and how few others read
        it. The kinds of the steps decide between ways that are alike in all that.
        """
        fusable = [step for step in self.steps if could_be_fused(step)]
        kinds = tuple(step.kind for step in self.steps)
        to_fp8 = any(step.kind is Role.OUTPUT for step in fusable)
        return len(fusable), to_fp8, -len(self.readers), kinds

    def _is_maximum_of_some(self, i: Instruction) -> bool:
        """Whether elements are selected only for a reduction."""
        readers = self._of(i)
        is_reduced = bool(readers) and all(user.opcode == "reduce" for user in readers)
        return i.opcode == "select" and is_reduced

    def _could_be_fused(self, user: Instruction, value: Instruction) -> bool:
        """Whether a reader does something elementwise to a value that is not only reduced after."""
        if user.opcode not in ELEMENTWISE or step_of(user, value).kind is Role.OTHER:
            return False
        return not all(reader.opcode == "reduce" for reader in self._of(user))

    def _compute(self, at: Instruction, value: Instruction) -> Instruction | None:
        """Advance along one elementwise instruction."""
        step = step_of(at, value)
        if (
            step.other is not None
            and step.other.shape.size > 1
            and depends(step.other, self._origin)
        ):
            return None  # as softmax subtracts its maximum
        if self._is_the_same_sum(step):
            return None
        # What is FP8 already, and dequantized, is the next one's operand.
        dequantizes = step.kind is Role.OUTPUT and is_fp8(value.shape.dtype)
        if step.kind is Role.OTHER or dequantizes:
            return None
        if step.kind is Role.ACTIVATION:
            at = self._whole_activation(at)
        return self._add(dataclasses.replace(step, at=at))

    def _is_the_same_sum(self, step: Step) -> bool:
        """Whether a loop's next iteration adds the same dot's result to what it was handed."""
        added = step.other if step.kind is Role.MATRIX_BIAS else None
        if added is None or added.computation is not self._dot.computation:
            return False
        return step.value.index < self._dot.index and depends(added, self._dot)

    def _whole_activation(self, at: Instruction) -> Instruction:
        """The last of several unary functions that are one activation."""
        while len(self._of(at)) == 1:
            after = self._of(at)[0]
            if after.opcode not in ELEMENTWISE or step_of(after, at).kind is not Role.ACTIVATION:
                break
            at = after
        return at

    def _add(self, step: Step) -> Instruction | None:
        """One step more; not an activation of a masked value that no call has anyway."""
        masked = any(
            earlier.kind is Role.MOVE and earlier.at.opcode == "select" for earlier in self.steps
        )
        if masked and step.kind is Role.ACTIVATION and not is_tanh_gelu(step):
            return None
        self.steps.append(step)
        return step.at

    def _amax(self, i: Instruction) -> Instruction | None:
        """The reduction, where what reads a value only takes its largest (or smallest)
        magnitude.
        """
        way = []
        while (i.opcode in _BEFORE_AMAX or is_square(i)) and len(self._of(i)) == 1:
            way.append(i.opcode)
            i = self._of(i)[0]
        if i.opcode != "reduce" or reducer(i) not in ("maximum", "minimum"):
            return None
        # Along some dimensions softmax takes a maximum too: there it must be of magnitudes, or be
        # reduced further.
        is_behind_relu = bool(self.steps) and self.steps[-1].kind is Role.RELU
        is_positive = "abs" in way or "multiply" in way or is_behind_relu
        is_reduced = any(user.opcode == "reduce" for user in self._of(i))
        return i if i.shape.size == 1 or is_positive or is_reduced else None

    def _joined(self, value: Instruction) -> Instruction | None:
        """Where the elementwise instructions that read `value` come together again: the end of an
        activation written with several of them. Where some never do, because a gradient reads the
        value too: the first place where two come together from where a way leads on without the
        rest. None where there is none.
        """
        inside = {value.name: value}
        joins: set[str] = set()
        open_edges, foreign = len(self._of(value)), False
        for i in self._readers_in_order(value, inside):
            read = [name for name in dict.fromkeys(i.operands) if name in inside]
            others = [value.computation[name] for name in i.operands if name not in inside]
            if i.opcode not in ELEMENTWISE | LAYOUT or any(map(_is_matrix, others)):
                foreign = True  # another matrix comes in, or more than elements is read
                continue
            inside[i.name] = i
            if len(read) > 1:
                joins.add(i.name)
            open_edges += len(self._of(i)) - len(read)
            if open_edges == len(self._of(i)) and not foreign:
                return i
        # What is multiplied by another matrix may be a gradient's: it counts if nothing else does.
        for is_way_out in (_is_not_elementwise, lambda user: user.name not in inside):
            onward = joins & self._leading_on(inside, joins, is_way_out)
            if onward:
                return next(i for name, i in inside.items() if name in onward)
        return None

    def _readers_in_order(
        self, value: Instruction, inside: dict[str, Instruction]
    ) -> Iterator[Instruction]:
        """Who reads `value`, and what is put `inside` meanwhile, in the program's order."""
        seen = {user.index for user in self._of(value)}
        todo = sorted(seen)
        while todo:
            i = value.computation.instructions[heapq.heappop(todo)]
            yield i
            for user in self._of(i) if i.name in inside else ():
                if user.index not in seen:
                    seen.add(user.index)
                    heapq.heappush(todo, user.index)

    def _leading_on(
        self,
        inside: dict[str, Instruction],
        joins: set[str],
        is_way_out: Callable[[Instruction], bool],
    ) -> set[str]:
        """Those of some instructions from which a way leads out of them, and through no join."""
        found: set[str] = set()
        for i in reversed(inside.values()):
            onward = found - joins
            leaves = (is_way_out(user) or user.name in onward for user in self._of(i))
            if i.is_root or any(leaves):
                found.add(i.name)
        return found

    def _beside(self, value: Instruction, end: Instruction) -> list[Instruction]:
        """Who reads `value`, or what is between it and `end`, and is not on the way there."""
        way = {value.name: value}
        for i in sorted(since(value, end), key=lambda i: i.index):
            if not way.keys().isdisjoint(i.operands):
                way[i.name] = i
        between = [i for i in way.values() if i is not end]
        return [user for i in between for user in self._of(i) if user.name not in way]


def _is_not_elementwise(i: Instruction) -> bool:
    """Whether an instruction does more than to compute with each element, or to lay it out."""
    return i.opcode not in ELEMENTWISE | LAYOUT


#: One way to go on from a value: it adds a step to a result, and gives the value that comes of it.
_Way = Callable[[Result], Instruction | None]


def _hand_on(
    result: Result, value: Instruction, to: Instruction, how: str, beside: list[tuple]
) -> Instruction | None:
    result.readers += beside
    result.steps.append(Step(Role.MOVE, to, value, how=how))
    result._origin = to
    return to


def _branch(result: Result, value: Instruction, follow: list[Instruction]) -> Instruction | None:
    return result._branch(value, follow)


def _move(result: Result, at: Instruction, value: Instruction) -> Instruction | None:
    result.steps.append(Step(Role.MOVE, at, value))
    return at


def _activate(
    result: Result, end: Instruction, value: Instruction, beside: list[tuple]
) -> Instruction | None:
    result.readers += beside
    step = Step(Role.ACTIVATION, end, value)
    if is_added_up(step):  # d + d + d is 3 * d
        step = dataclasses.replace(step, kind=Role.ALPHA)
    return result._add(step)


def _compute(
    result: Result, at: Instruction, value: Instruction, beside: list[tuple]
) -> Instruction | None:
    result.readers += beside
    return result._compute(at, value)


_OF_ACTIVATIONS = (Role.RELU, Role.NEGATE, Role.ACTIVATION)

# Collectives that compute nothing.
_SENDS = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")


#: How a sum over devices passes a result on.
SUMMED = "summed over devices"


def _sent(at: Instruction) -> str:
    """How a collective passes on an array of each device; "" for any other instruction."""
    if at.shape.is_tuple:
        return ""
    if at.opcode.startswith(("all-reduce", "reduce-scatter")) and reducer(at) == "add":
        return SUMMED
    return "sent to other devices" if at.opcode.startswith(_SENDS) else ""


def _is_moved(at: Instruction, value: Instruction) -> bool:
    """Whether an instruction moves, repeats or leaves out elements of a value, and does no more."""
    if at.opcode in _MOVES_FIRST:
        return at.operands[0] == value.name
    if at.opcode in _STORES:
        return at.operands.index(value.name) == _STORES[at.opcode]
    return at.opcode in _MOVES_ON


def _is_matrix(i: Instruction) -> bool:
    """Whether an array is not a number or a vector that is broadcast."""
    return i.shape.size > 1 and broadcast_of(i) is None


def _adds_a_vector(step: Step) -> bool:
    """Whether a step adds a vector that is broadcast to all rows, as it is."""
    added = [step.at.computation[name] for name in step.at.operands if name != step.value.name]
    is_spread = [look_through(i).opcode for i in added] == ["broadcast"]
    is_vector = step.other is not None and len(step.other.shape.dims) == 1
    return step.at.opcode == "add" and is_spread and is_vector and along_columns(added[0])


def along_columns(added: Instruction) -> bool:
    """Whether a broadcast vector has an element for each column (of the minor dimension)."""
    i = look_through(added)
    dims = re.findall(r"\d+", i.attributes.get("dimensions", "")) if i.opcode == "broadcast" else []
    return not dims or str(len(i.shape.dims) - 1) in dims


# From one computation to another ------------------------------------------------------------------


@remembered
def _graph(module: HloModule) -> Graph:
    return Graph(module, lambda i: i.opcode in DOTS, len(module.text))


@remembered
def handed(value: Instruction) -> list[tuple[Instruction, str]]:
    """The values of other computations that are this one, and are read there, each with how it
    comes there: "handed to a loop", "returned from a branch", ...
    """
    graph = _graph(value.computation.module)
    found: list[tuple[Instruction, str]] = []
    start = Value(value, 0)
    seen, todo = {start}, [(start, "")]
    for at, how in todo:
        for following in graph.after(at):
            if following in seen or following.element is None:
                continue
            seen.add(following)
            i = following.instruction
            crossing = how or _crossing(at.instruction, i)
            names_it = i.opcode in ("get-tuple-element", "parameter", *_HANDING)
            if not names_it:
                continue
            is_read = any(
                user.opcode not in _HANDING for user in i.computation.users.get(i.name, ())
            )
            if crossing and not i.shape.is_tuple and is_read:
                found.append((i, crossing))
            todo.append((following, crossing))
    return found


def _crossing(value: Instruction, to: Instruction) -> str:
    """How a value comes from one computation to another; "" within one."""
    if to.opcode == "while":
        return "returned from a loop" if value.computation is not to.computation else ""
    if to.opcode == "conditional":
        return "returned from a branch"
    if to.opcode in CONTROL:
        return "returned from another computation"
    if to.opcode != "parameter":
        return ""
    if to.computation is value.computation:
        return "handed to the loop's next iteration"
    caller = next(iter(callers(to.computation.module).get(to.computation.name, ())), None)
    opcode = caller.opcode if caller else ""
    names = {"while": "a loop", "conditional": "a branch"}
    where = names.get(opcode, "another computation")
    return f"handed to {where}"
