"""What XLA's gemm rewriter sees in front of a dot: the FP8 array behind each operand."""

import math
import re

from fp8lens.hlo.ops import COLLECTIVES, COMMUTES, CUTS, ELEMENTWISE
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.values import broadcast_of, is_mask, is_zero, look_through, operand

FP8_MAX = {
    "f8e4m3fn": "448",
    "f8e5m2": "57344",
}  # the OCP formats that cuBLASLt multiplies, and their largest numbers
_DIGITS = {
    "f8e4m3fn": (4, 9),
    "f8e5m2": (3, 16),
}  # binary digits of a number; how many behind the point at most
FAR = 100  # operations: no search on the way of a matmul's operand goes on for more
_FAR = (
    ELEMENTWISE
    | COMMUTES
    | frozenset("concatenate get-tuple-element opt-barrier gather reverse fusion".split())
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
                    if before.opcode in ("bitcast", "reshape", *CUTS) and any(
                        earlier.opcode in CUTS for earlier in (path[0], *ahead)
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
                number = look_through(
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
