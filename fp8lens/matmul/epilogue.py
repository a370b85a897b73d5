"""What XLA's gemm rewriter sees around a dot: the FP8 array behind each operand, and what becomes
of the result.
"""

import dataclasses
import re

from fp8lens.hlo.ops import CUTS, ELEMENTWISE, LAYOUT
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
        value: Instruction | None = dot
        while value is not None:
            value = self._advance(value)

    def _of(self, i: Instruction) -> list[Instruction]:
        return self._users.get(i.name, [])

    def _advance(self, value: Instruction) -> Instruction | None:
        """Add what is done with `value`; the value that comes of it, None at the end."""
        follow = []
        for user in self._of(value):
            amax = self._amax(user)
            if amax:
                self.steps.append(Step("amax", amax, value))
            else:
                follow.append(user)
        if not follow:
            return None
        at = follow[0]
        if len(follow) > 1 and all(user.opcode in CUTS for user in follow):  # parts, treated alike
            self.steps.append(Step("move", at, value))
            return at
        if len(follow) > 1 or len(set(at.operands)) < len(at.operands):
            end = self._joined(value)
            if end and not (
                end.opcode == "select"
                and self._of(end)
                and all(  # the maximum of some elements
                    user.opcode == "reduce" for user in self._of(end)
                )
            ):
                self.readers += [(value, u) for u in self._beside(value, end)]
                return self._add(Step("activation", end, value))
            # A result that has several readers: of them, one may still do what the call could have
            # done.
            at = next(
                (
                    u
                    for u in follow
                    if u.opcode in ELEMENTWISE
                    and _step(u, value).kind != "other"
                    and not all(reader.opcode == "reduce" for reader in self._of(u))
                ),
                None,
            )
            self.readers += [(value, u) for u in follow if u is not at]
            if at is None:
                return None
        elif at.opcode in LAYOUT | {"slice", "concatenate", "reverse", "opt-barrier"} or is_mask(
            at, value
        ):
            named = at.opcode in ("bitcast", "reshape") and not is_transpose(at)
            self.steps += [] if named else [Step("move", at, value)]
            return at
        step = _step(at, value)
        if step.other is not None and step.other.shape.size > 1 and depends(step.other, self._dot):
            return None  # as softmax subtracts its maximum
        if step.kind == "other" or step.kind == "output" and value.shape.dtype.startswith("f8"):
            return None  # what is FP8 already, and dequantized, is the next one's operand
        while (
            step.kind == "activation" and len(self._of(at)) == 1
        ):  # one activation may be several unary functions
            after = self._of(at)[0]
            if after.opcode not in ELEMENTWISE or _step(after, at).kind != "activation":
                break
            at = after
        return self._add(dataclasses.replace(step, at=at))

    def _add(self, step: Step) -> Instruction | None:
        """One step more; not if it is done to a masked value, and would be another before the mask."""
        if any(
            (earlier.kind, earlier.at.opcode) == ("move", "select") for earlier in self.steps
        ) and ("bias" in step.kind or step.kind == "activation" and not is_tanh_gelu(step)):
            return None
        self.steps.append(step)
        return step.at

    def _amax(self, i: Instruction) -> Instruction | None:
        """The reduction, where what reads a value only takes its largest (or smallest) magnitude."""
        way = []
        while (
            i.opcode in ("abs", "convert", "bitcast", "reshape", "negate", "opt-barrier")
            and len(self._of(i)) == 1
        ):
            way.append(i.opcode)
            i = self._of(i)[0]
        if i.opcode != "reduce" or reducer(i) not in ("maximum", "minimum"):
            return None
        # Along some dimensions softmax takes a maximum too.
        return (
            i
            if i.shape.size == 1
            or "abs" in way
            or self.steps
            and self.steps[-1].kind == "relu"
            or any(user.opcode == "reduce" for user in self._of(i))
            else None
        )

    def _joined(self, value: Instruction) -> Instruction | None:
        """Where the elementwise instructions that read `value` come together again: the end of an
        activation written with several of them. Where some never do, because a gradient reads the
        value too: the first place where two come together from where a way leads on without the
        rest. None where there is none.
        """
        inside, open_edges, joins, foreign = {value.name: value}, len(self._of(value)), set(), False
        for i in value.computation.instructions[value.index + 1 :]:
            read = [name for name in dict.fromkeys(i.operands) if name in inside]
            if not read:
                continue
            others = [value.computation[name] for name in i.operands if name not in inside]
            if i.opcode not in ELEMENTWISE | LAYOUT or any(
                o.shape.size > 1 and broadcast_of(o) is None for o in others
            ):
                foreign = True  # another matrix comes in, or more than elements is read
                continue
            inside[i.name] = i
            joins |= {i.name} if len(read) > 1 else set()
            open_edges += len(self._of(i)) - len(read)
            if open_edges == len(self._of(i)) and not foreign:
                return i
        leads_on: set[str] = set()
        for i in reversed(inside.values()):
            if i.is_root or any(
                user.opcode not in ELEMENTWISE | LAYOUT or user.name in leads_on - joins
                for user in self._of(i)
            ):
                leads_on.add(i.name)
        return next((i for name, i in inside.items() if name in joins & leads_on), None)

    def _beside(self, value: Instruction, end: Instruction) -> list[Instruction]:
        """Who reads `value`, or what is between it and `end`, and is not on the way there."""
        way = {value.name: value}
        for i in sorted(since(value, end), key=lambda i: i.index):
            if not way.keys().isdisjoint(i.operands):
                way[i.name] = i
        return [u for i in way.values() if i is not end for u in self._of(i) if u.name not in way]


def _step(at: Instruction, value: Instruction) -> Step:
    """What one elementwise instruction does to `value`."""
    others = [at.computation[name] for name in at.operands if name != value.name]
    small = [broadcast_of(o) for o in others]
    scalar = bool(small) and small[0] is not None and small[0].shape.size == 1
    constant = scalar and small[0].opcode == "constant"
    if at.opcode in ("convert", "negate"):
        return Step("output" if at.opcode == "convert" else "negate", at, value)
    if at.opcode == "clamp" or (at.opcode in ("minimum", "maximum") and scalar):
        return Step(
            "relu" if at.opcode == "maximum" and is_zero(small[0]) else "clamp", at, value, small[0]
        )
    if len(others) == 1 and at.opcode in ("multiply", "divide", "add", "subtract"):
        scaling = at.opcode in ("multiply", "divide")
        if at.opcode == "divide" and at.operands[0] != value.name:
            return Step("activation", at, value)
        if small[0] is None:
            return Step("other" if scaling else "matrix bias", at, value, others[0])
        if scaling:
            kind = "alpha" if constant else "scale" if small[0].shape.size == 1 else "vector scale"
            return Step(kind, at, value, small[0])
        return Step("activation" if constant else "bias", at, value, small[0])
    unary = at.opcode in ELEMENTWISE - {"select"} and all(o is not None for o in small)
    return Step("activation" if unary else "other", at, value)


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
