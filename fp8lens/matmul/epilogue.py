"""What XLA's gemm rewriter sees around a dot: the FP8 array behind each operand, and what becomes
of the result.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable

from fp8lens.hlo.ops import CUTS, ELEMENTWISE, LAYOUT, SCALING
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import (
    NAMES,
    broadcast_of,
    depends,
    is_mask,
    is_transpose,
    is_zero,
    look_through,
    operand,
    reducer,
    since,
)
from fp8lens.matmul.operands import FP8_MAX

# What gives a result on, at other places, or some of it.
_MOVES_ON = LAYOUT | {"slice", "concatenate", "reverse", "opt-barrier"}
# The same, of their first operand.
_MOVES_FIRST = frozenset("dynamic-slice gather pad broadcast".split())
# So many branches behind one another are looked into.
_DEEPEST = 4
# What may stand between a value and the reduction that finds its amax.
_BEFORE_AMAX = frozenset("abs convert bitcast reshape negate opt-barrier".split())


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing the program does with a dot's result: `kind` is "alpha" (a constant factor),
    "scale", "vector scale", "negate", "bias", "matrix bias", "relu", "activation", "clamp",
    "output" (a conversion), "amax", "move" or "other"; `at` does it to `value`; `other` is its
    second operand, behind broadcasts and conversions.
    """

    kind: str
    at: Instruction
    value: Instruction
    other: Instruction | None = None


class Result:
    """What the program does with a dot's result: `steps`, in order, up to where it is no longer
    this result alone; and `readers`, pairs of a value on the way and who reads it besides.
    """

    def __init__(self, dot: Instruction):
        self._users, self._dot = dot.computation.users, dot
        self.steps: list[Step] = []
        self.readers: list[tuple[Instruction, Instruction]] = []
        self._depth = 0
        self._follow(dot)

    def _follow(self, value: Instruction | None) -> None:
        """Add what is done with a value, and with what comes of it, up to the end."""
        while value is not None:
            value = self._advance(value)

    def _of(self, i: Instruction) -> list[Instruction]:
        """Who reads a value."""
        return self._users.get(i.name, [])

    def _advance(self, value: Instruction) -> Instruction | None:
        """Add what is done with `value`; the value that comes of it, None at the end."""
        follow = []
        for user in self._of(value):
            if amax := self._amax(user):
                self.steps.append(Step("amax", amax, value))
            else:
                follow.append(user)
        if not follow:
            return None
        at = follow[0]
        if len(follow) > 1 and all(user.opcode in CUTS for user in follow):
            # Parts that are treated alike: one stands for all. Else the one of which most is made.
            return self._along_the_best(
                [functools.partial(_move, at=u, value=value) for u in follow]
            )
        if len(follow) > 1 or len(set(at.operands)) < len(at.operands):
            return self._branch(value, follow)
        if _is_moved(at, value) or is_mask(at, value):
            in_name_alone = at.opcode in ("bitcast", "reshape") and not is_transpose(at)
            if not in_name_alone:
                self.steps.append(Step("move", at, value))
            return at
        return self._compute(at, value)

    def _branch(self, value: Instruction, follow: list[Instruction]) -> Instruction | None:
        """Advance where several read `value`, or one reads it twice: along an activation of several
        operations, or else along the one reader that does what the call could have done.
        """
        ways: list[_Way] = []
        end = self._joined(value)
        if end and not self._is_maximum_of_some(end):
            beside = [(value, user) for user in self._beside(value, end)]
            ways.append(functools.partial(_activate, end=end, value=value, beside=beside))
        for at in follow:
            if self._could_be_fused(at, value):
                beside = [(value, user) for user in follow if user is not at]
                ways.append(functools.partial(_compute, at=at, value=value, beside=beside))
        if not ways:
            self.readers += [(value, user) for user in follow]
            return None
        return self._along_the_best(ways)

    def _along_the_best(self, ways: "list[_Way]") -> Instruction | None:
        """Follow the way along which most is done that a call could do: whatever the order in which
        a program returns its results. Of ways alike in that, the first.
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
        trial._depth += 1
        trial._follow(way(trial))
        return trial

    @property
    def _promise(self) -> tuple[int, bool]:
        """How many steps a call could do, and whether the result becomes FP8."""
        fusable = [step for step in self.steps if could_be_fused(step)]
        return len(fusable), any(step.kind == "output" for step in fusable)

    def _is_maximum_of_some(self, i: Instruction) -> bool:
        """Whether elements are selected only for a reduction."""
        readers = self._of(i)
        is_reduced = bool(readers) and all(user.opcode == "reduce" for user in readers)
        return i.opcode == "select" and is_reduced

    def _could_be_fused(self, user: Instruction, value: Instruction) -> bool:
        """Whether a reader does something elementwise to a value that is not only reduced after."""
        if user.opcode not in ELEMENTWISE or _step(user, value).kind == "other":
            return False
        return not all(reader.opcode == "reduce" for reader in self._of(user))

    def _compute(self, at: Instruction, value: Instruction) -> Instruction | None:
        """Advance along one elementwise instruction."""
        step = _step(at, value)
        if step.other is not None and step.other.shape.size > 1 and depends(step.other, self._dot):
            return None  # as softmax subtracts its maximum
        # What is FP8 already, and dequantized, is the next one's operand.
        dequantizes = step.kind == "output" and value.shape.dtype.startswith("f8")
        if step.kind == "other" or dequantizes:
            return None
        if step.kind == "activation":
            at = self._whole_activation(at)
        return self._add(dataclasses.replace(step, at=at))

    def _whole_activation(self, at: Instruction) -> Instruction:
        """The last of several unary functions that are one activation."""
        while len(self._of(at)) == 1:
            after = self._of(at)[0]
            if after.opcode not in ELEMENTWISE or _step(after, at).kind != "activation":
                break
            at = after
        return at

    def _add(self, step: Step) -> Instruction | None:
        """One step more; not if it is done to a masked value, and would be another before the
        mask.
        """
        masked = any(
            earlier.kind == "move" and earlier.at.opcode == "select" for earlier in self.steps
        )
        if masked and "bias" in step.kind:
            return None
        if masked and step.kind == "activation" and not is_tanh_gelu(step):
            return None
        self.steps.append(step)
        return step.at

    def _amax(self, i: Instruction) -> Instruction | None:
        """The reduction, where what reads a value only takes its largest (or smallest)
        magnitude.
        """
        way = []
        while i.opcode in _BEFORE_AMAX and len(self._of(i)) == 1:
            way.append(i.opcode)
            i = self._of(i)[0]
        if i.opcode != "reduce" or reducer(i) not in ("maximum", "minimum"):
            return None
        # Along some dimensions softmax takes a maximum too: there it must be of magnitudes, or be
        # reduced further.
        is_positive = "abs" in way or (bool(self.steps) and self.steps[-1].kind == "relu")
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
        for i in value.computation.instructions[value.index + 1 :]:
            read = [name for name in dict.fromkeys(i.operands) if name in inside]
            if not read:
                continue
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
        onward = joins & self._leading_on(inside, joins)
        return next((i for name, i in inside.items() if name in onward), None)

    def _leading_on(self, inside: dict[str, Instruction], joins: set[str]) -> set[str]:
        """Those of some instructions from which a way leads out of them, and through no join."""
        found: set[str] = set()
        for i in reversed(inside.values()):
            onward = found - joins
            leaves = (
                user.opcode not in ELEMENTWISE | LAYOUT or user.name in onward
                for user in self._of(i)
            )
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


#: One way to go on from a value: it adds a step to a result, and gives the value that comes of it.
_Way = Callable[[Result], Instruction | None]


def _move(result: Result, at: Instruction, value: Instruction) -> Instruction | None:
    result.steps.append(Step("move", at, value))
    return at


def _activate(
    result: Result, end: Instruction, value: Instruction, beside: list[tuple]
) -> Instruction | None:
    result.readers += beside
    return result._add(Step("activation", end, value))


def _compute(
    result: Result, at: Instruction, value: Instruction, beside: list[tuple]
) -> Instruction | None:
    result.readers += beside
    return result._compute(at, value)


def _is_moved(at: Instruction, value: Instruction) -> bool:
    """Whether an instruction moves, repeats or leaves out elements of a value, and does no more."""
    if at.opcode in _MOVES_FIRST:
        return at.operands[0] == value.name
    return at.opcode in _MOVES_ON


def could_be_fused(step: Step) -> bool:
    """Whether some call could have done a step: no conversion between wide types, no activation but
    relu and gelu.
    """
    if step.kind == "output":
        return step.at.shape.dtype in FP8_MAX
    if step.kind == "activation":
        return is_tanh_gelu(step)
    return step.kind in ("scale", "bias", "matrix bias", "relu")


def _is_matrix(i: Instruction) -> bool:
    """Whether an array is not a number or a vector that is broadcast."""
    return i.shape.size > 1 and broadcast_of(i) is None


def _step(at: Instruction, value: Instruction) -> Step:
    """What one elementwise instruction does to `value`."""
    others = [at.computation[name] for name in at.operands if name != value.name]
    small = [broadcast_of(other) for other in others]
    first = small[0] if small else None
    is_number = first is not None and first.shape.size == 1
    if at.opcode == "convert":
        return Step("output", at, value)
    if at.opcode == "negate":
        return Step("negate", at, value)
    if at.opcode == "clamp" or (at.opcode in ("minimum", "maximum") and is_number):
        is_relu = at.opcode == "maximum" and is_zero(first)
        return Step("relu" if is_relu else "clamp", at, value, first)
    if len(others) == 1 and at.opcode in SCALING:
        return _scaling(at, value, others[0], first)
    if len(others) == 1 and at.opcode in ("add", "subtract"):
        if first is None:
            return Step("matrix bias", at, value, others[0])
        is_constant = is_number and first.opcode == "constant"
        return Step("activation" if is_constant else "bias", at, value, first)
    is_unary = at.opcode in ELEMENTWISE - {"select"} and None not in small
    return Step("activation" if is_unary else "other", at, value)


def _scaling(
    at: Instruction, value: Instruction, other: Instruction, factor: Instruction | None
) -> Step:
    """What a multiplication or division does to `value`; `factor` is what `other` is broadcast
    of.
    """
    if at.opcode == "divide" and at.operands[0] != value.name:
        return Step("activation", at, value)
    if factor is None:
        return Step("other", at, value, other)
    if factor.shape.size != 1:
        return Step("vector scale", at, value, factor)
    return Step("alpha" if factor.opcode == "constant" else "scale", at, value, factor)


def is_tanh_gelu(step: Step) -> bool:
    """Whether an activation is gelu in its tanh form: what is computed elementwise from there on
    has a tanh in it, and the factor of the third power.
    """
    value, users = step.value, step.value.computation.users
    seen, todo = {value.name}, [value]
    while todo and len(seen) < 60:
        for user in users.get(todo.pop(0).name, ()):
            if user.opcode in ELEMENTWISE | {"bitcast", "reshape"} and user.name not in seen:
                seen.add(user.name)
                todo.append(user)
    read = {name for of in seen for name in value.computation[of].operands}
    constants = [
        look_through(value.computation[name], (*NAMES, "convert", "broadcast")).literal or ""
        for name in read
    ]
    return any(value.computation[name].opcode == "tanh" for name in seen) and any(
        re.match(r"0\.044[67]", literal) for literal in constants
    )


def clamp_bounds(clamp: Instruction) -> list[str]:
    """Lower and upper bound of a clamp between constants."""
    if clamp.opcode != "clamp":
        return []
    ends = [broadcast_of(operand(clamp, n)) or operand(clamp, n) for n in (0, 2)]
    # XLA prints a bfloat16 with four digits.
    return [
        (end.literal or "").replace("5.734e+04", FP8_MAX["f8e5m2"])
        for end in ends
        if end.opcode == "constant"
    ]


def along_columns(added: Instruction) -> bool:
    """Whether a broadcast vector has an element for each column (of the minor dimension)."""
    i = look_through(added)
    dims = re.findall(r"\d+", i.attributes.get("dimensions", "")) if i.opcode == "broadcast" else []
    return not dims or str(len(i.shape.dims) - 1) in dims
