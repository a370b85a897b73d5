"""What XLA's gemm rewriter sees around a dot: the FP8 array behind each operand, and what becomes
of the result.
"""

import dataclasses
import math
import re
from collections.abc import Collection

from fp8lens.hlo.parse import Instruction
from fp8lens.ops import COLLECTIVES, COMMUTES, ELEMENTWISE, LAYOUT

FP8_MAX = {
    "f8e4m3fn": "448",
    "f8e5m2": "57344",
}  # the OCP formats that cuBLASLt multiplies, and their largest numbers
_NAMES = ("bitcast", "reshape", "copy")
_DIGITS = {
    "f8e4m3fn": (4, 9),
    "f8e5m2": (3, 16),
}  # binary digits of a number; how many behind the point at most
FAR = 100  # operations: no search on the way of a matmul's operand goes on for more
_CUTS = ("slice", "dynamic-slice")
_FAR = (
    ELEMENTWISE
    | COMMUTES
    | frozenset("concatenate get-tuple-element opt-barrier gather reverse fusion".split())
)


def operand(i: Instruction, index: int) -> Instruction:
    if index >= len(i.operands):
        raise i.error("this has fewer operands than its opcode takes")
    return i.computation[i.operands[index]]


def behind(i: Instruction, skip: Collection[str] = (*_NAMES, "convert")) -> Instruction:
    """What an instruction names, moves or converts."""
    while i.opcode in skip and i.operands:
        i = operand(i, 0)
    return i


def broadcast_of(i: Instruction) -> Instruction | None:
    """What is broadcast, behind moves and conversions; of several, combined elementwise, the
    largest; None where something is not.
    """
    found, todo = {}, [i]
    while todo:
        i = behind(todo.pop())
        if i.opcode not in ("multiply", "add", "subtract", "divide", "broadcast"):
            return None
        if i not in found:
            found[i] = operand(i, 0)
            todo += [operand(i, n) for n in (1, 0) if i.opcode != "broadcast"]
    return max(
        (part for i, part in found.items() if i.opcode == "broadcast"),
        key=lambda part: part.shape.size,
    )


def is_transpose(i: Instruction) -> bool:
    """Whether dimensions change their order, by a kernel or in name alone: what is laid out by
    columns, called rows.
    """
    before = i.computation[i.operands[0]].shape
    rows = [",".join(map(str, reversed(range(len(s.dims))))) for s in (before, i.shape)]
    return (
        i.opcode == "transpose"
        or i.opcode == "bitcast"
        and ((before.layout or rows[0]) != rows[0]) != ((i.shape.layout or rows[1]) != rows[1])
    )


def is_zero(i: Instruction | None) -> bool:
    return (
        i is not None
        and i.opcode == "constant"
        and bool(re.fullmatch(r"-?0(\.0*)?", i.literal or ""))
    )


def is_mask(i: Instruction, value: Instruction) -> bool:
    """Whether an instruction puts zeros in the place of some elements of a value."""
    others = [i.computation[name] for name in i.operands[1:] if name != value.name]
    return (
        i.opcode == "select" and len(others) == 1 and is_zero(broadcast_of(others[0]) or others[0])
    )


def _fits(i: Instruction, dtype: str) -> bool:
    """Whether a constant is the same number in FP8."""
    if (
        i.opcode != "constant"
        or dtype not in _DIGITS
        or not re.fullmatch(r"-?\d[\d.]*(e[-+]?\d+)?", i.literal or "")
    ):
        return False
    (digits, finest), number = _DIGITS[dtype], abs(float(i.literal))
    whole = (number * 2**finest).is_integer() and (math.frexp(number)[0] * 2**digits).is_integer()
    return whole and number <= float(FP8_MAX[dtype])


class Operand:
    """An operand of a dot. `fp8` is the FP8 array that XLA finds behind it and `scale` what
    dequantizes it; `problem` names the rule of fp8lens.rules that it breaks, with `fields` for it.
    Where XLA finds no FP8 array and there is one further back, `blocked` is the operation at which
    XLA stopped looking. `padded`: with a number that XLA will not pad the FP8 array with.

    Follows FindF8SubgraphRecursive and MatchFp8Param in XLA's gemm_rewriter.cc.
    """

    def __init__(self, i: Instruction, side: str):
        self.side, self.dtype, self.operand = side, i.shape.dtype, i
        self.fp8 = self.scale = self.problem = None
        self.fields: dict[str, str] = {}
        self.padded = False
        if path := _path(i):
            self.fp8 = path[0]
            self._match(path)

    @property
    def blocked(self) -> Instruction | None:
        return _search(self.operand) if self.fp8 is None else None

    def _match(self, path: list[Instruction]) -> None:
        start = 2  # the FP8 array and its conversion
        if len(path) > 2 and path[2].opcode in ("multiply", "divide"):
            other = next((n for n in path[2].operands if n != path[1].name), path[2].operands[-1])
            factor = path[2].computation[other]
            if factor.opcode == "broadcast":
                self.scale, start = operand(factor, 0), 3
                if self.scale.shape.dims:
                    self.problem, self.fields = (
                        "array of scales",
                        {"scales": self.scale.shape.brief},
                    )
                    return
        for step, before in zip(path[start:], path[start - 1 :]):
            if step.opcode not in COMMUTES or (
                step.opcode == "bitcast" and step.shape.dtype != before.shape.dtype
            ):
                if step.opcode in ("multiply", "divide"):
                    ahead = path[start : path.index(step)]
                    if before.opcode in ("bitcast", "reshape", *_CUTS) and any(
                        earlier.opcode in _CUTS for earlier in (path[0], *ahead)
                    ):
                        self.problem = "stack converted"
                        return
                    number = next(
                        (
                            broadcast_of(step.computation[n])
                            for n in step.operands
                            if n != before.name
                        ),
                        None,
                    )
                    if (
                        number is not None
                        and number.shape.size == 1
                        and (self.scale is not None or ahead)
                    ):
                        self.problem = "scaled late"
                        another = self.scale is not None
                        self.fields = {
                            "between": (
                                "another multiplication" if another else f"a {ahead[-1].opcode}"
                            )
                        }
                        return
                gathered = "gathered" if step.opcode.startswith(COLLECTIVES) else "changed between"
                self.problem = "converted twice" if step.opcode == "convert" else gathered
                self.fields = {
                    "opcode": step.opcode,
                    "to": step.shape.dtype,
                    "dtype": step.shape.dtype,
                }
                return
            if step.opcode == "pad" and re.search(
                r"(?<![-\d])[1-9]", step.attributes.get("padding", "")
            ):
                number = behind(
                    operand(step, 1)
                )  # XLA converts it to FP8, and does not divide it by the scale
                self.padded |= not (
                    is_zero(number) or self.scale is None and _fits(number, self.fp8.shape.dtype)
                )
            if step.opcode == "select" and not is_mask(step, before):
                self.problem = "masked"
                return


def _path(i: Instruction) -> list[Instruction] | None:
    """From the FP8 array to the operand, through what XLA looks behind; None where that ends
    without one.
    """
    reader: dict[Instruction, Instruction | None] = {}
    todo: list[tuple[Instruction, Instruction | None]] = [(i, None)]
    while todo and len(reader) < FAR:
        i, by = todo.pop()
        if i in reader:
            continue
        reader[i], path = by, [i]
        if i.shape.dtype.startswith("f8"):
            while (i := reader[i]) is not None:
                path.append(i)
            return path
        ways = {"multiply": i.operands[:2], "select": i.operands[1:3]}
        one = len(i.operands) == 1 or i.opcode in ("divide", "dynamic-slice", "pad")
        todo += [
            (i.computation[name], i) for name in reversed(ways.get(i.opcode, i.operands[:one]))
        ]
    return None


def _search(i: Instruction) -> Instruction | None:
    """Where `i` is made of an FP8 array by moves, elementwise operations, collectives or a loop's
    constant inputs: the first operation on the way at which XLA's own search ends.
    """
    seen, todo = set(), [(i, None)]
    for i, stop in todo:
        if i in seen:
            continue
        seen.add(i)
        if len(seen) > FAR:
            break
        if i.shape.dtype.startswith("f8") and i.shape.size > 1:
            return stop
        if i.opcode == "get-tuple-element" and operand(i, 0).opcode == "parameter":
            if outer := _into_loop(i):
                todo.append((outer[1], stop or outer[0]))
        elif i.opcode in _FAR or i.opcode.startswith(COLLECTIVES):
            ends = len(i.operands) > 1 and i.opcode not in (
                "divide",
                "dynamic-slice",
                "pad",
                "multiply",
                "select",
            )
            ends |= i.opcode.startswith(COLLECTIVES)
            todo += [(i.computation[name], stop or (i if ends else None)) for name in i.operands]
    return None


def _into_loop(i: Instruction) -> tuple[Instruction, Instruction] | None:
    """The loop, and what it was given, for an element of the tuple that a loop's body gets."""
    for loop in i.computation.module:
        if loop.opcode == "while" and i.computation.name in loop.called:
            given = operand(loop, 0)
            if given.opcode == "tuple":
                return loop, operand(given, i.element)
    return None


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
        if len(follow) > 1 and all(user.opcode in _CUTS for user in follow):  # parts, treated alike
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
        for i in sorted(_since(value, end), key=lambda i: i.index):
            if not way.keys().isdisjoint(i.operands):
                way[i.name] = i
        return [u for i in way.values() if i is not end for u in self._of(i) if u.name not in way]


def _since(start: Instruction, end: Instruction) -> set[Instruction]:
    """`end`, and what it is computed from, as far as that stands behind `start`."""
    found, todo = set(), [end]
    while todo:
        i = todo.pop()
        if i.index > start.index and i not in found:
            found.add(i)
            todo += [i.computation[name] for name in i.operands]
    return found


def depends(i: Instruction, on: Instruction) -> bool:
    """Whether a value is, or is computed from, another of its computation."""
    return i is on or any(on.name in j.operands for j in _since(on, i))


def reducer(reduce: Instruction) -> str:
    """The opcode by which a reduction combines two elements; "" where the text has none."""
    by = reduce.computation.module.computations.get(reduce.callee("to_apply"))
    return by.root.opcode if by else ""


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
        behind(value.computation[name], (*_NAMES, "convert", "broadcast")).literal or ""
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
    i = behind(added)
    dims = re.findall(r"\d+", i.attributes.get("dimensions", "")) if i.opcode == "broadcast" else []
    return not dims or str(len(i.shape.dims) - 1) in dims
