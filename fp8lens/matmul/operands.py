"""What XLA's gemm rewriter sees in front of a dot: the FP8 array behind each operand."""

import enum
import re

from fp8lens.formats import is_fp8
from fp8lens.hlo.dataflow import callers
from fp8lens.hlo.ops import COLLECTIVES, COMMUTES, ELEMENTWISE, MOVES, SCALING
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import (
    broadcast_of,
    is_mask,
    is_zero,
    look_through,
    operand,
)
from fp8lens.hlo.walk import walk

FAR = 100  # operations: no search on the way of a matmul's operand goes on for more
# What a search for an FP8 array goes back through, further than XLA's own does.
_SEARCHED = (
    ELEMENTWISE
    | COMMUTES
    | frozenset("concatenate get-tuple-element opt-barrier gather reverse fusion".split())
)
# Of several operands the first is the array, or XLA looks behind both: its search goes on.
_XLA_GOES_ON = frozenset("divide dynamic-slice pad multiply select".split())


class Problem(enum.Enum):
    """What keeps XLA from taking the FP8 array behind an operand: of each, a rule tells."""

    ARRAY_OF_SCALES = enum.auto()
    GATHERED = enum.auto()
    CONVERTED_TWICE = enum.auto()
    CHANGED_BETWEEN = enum.auto()


class Operand:
    """An operand of a dot. `fp8` is the FP8 array that XLA finds behind it and `scale` what
    dequantizes it; `problem` is what keeps XLA from taking that array, with `fields` for its rule,
    and `at` the operation. `path` leads from that array to the dot.
    Where XLA finds no FP8 array and there is one further back, `blocked` is the operation at which
    XLA stopped looking. `padded`: with a number that XLA will not pad the FP8 array with.

    Follows FindF8SubgraphRecursive and MatchFp8Param in XLA's gemm_rewriter.cc.
    """

    def __init__(self, i: Instruction, side: str):
        self.side, self.dtype, self.operand = side, i.shape.dtype, i
        self.fp8: Instruction | None = None
        self.scale: Instruction | None = None
        self.problem: Problem | None = None
        self.fields: dict[str, str] = {}
        self.at: Instruction | None = None
        self.padded = False
        self.path = _path(i) or []
        if self.path:
            self.fp8 = self.path[0]
            self._match(self.path)

    @property
    def blocked(self) -> Instruction | None:
        """Where XLA stopped looking for an FP8 array that is further back; None where there is
        none.
        """
        return _search(self.operand) if self.fp8 is None else None

    def _breaks(self, problem: Problem, at: Instruction, **fields: str) -> None:
        self.problem, self.at, self.fields = problem, at, fields

    def _match(self, path: list[Instruction]) -> None:
        """Read the way from the FP8 array to the dot, up to the first problem."""
        start = 2  # behind the FP8 array and its conversion
        self.scale = _scales(path)
        if self.scale is not None:
            if self.scale.shape.dims:
                self._breaks(Problem.ARRAY_OF_SCALES, path[2], scales=self.scale.shape.brief)
                return
            start = 3
        for step, before in zip(path[start:], path[start - 1 :], strict=False):
            self._step(step, before)
            if self.problem:
                return

    def _step(self, step: Instruction, before: Instruction) -> None:
        """One operation between dequantization and dot."""
        changes_bits = step.opcode == "bitcast" and step.shape.dtype != before.shape.dtype
        if step.opcode.startswith(COLLECTIVES):
            self._breaks(Problem.GATHERED, step, opcode=step.opcode, dtype=step.shape.dtype)
        elif step.opcode == "convert":
            self._breaks(Problem.CONVERTED_TWICE, step, to=step.shape.dtype)
        elif step.opcode not in COMMUTES or changes_bits:
            moved = f" behind a {before.opcode}" if before.opcode in MOVES else ""
            self._breaks(Problem.CHANGED_BETWEEN, step, opcode=step.opcode + moved)
        elif step.opcode == "pad":
            self.padded |= self._pads_another(step)
        elif step.opcode == "select" and not is_mask(step, before):
            self._breaks(Problem.CHANGED_BETWEEN, step, opcode="select")

    def _pads_another(self, pad: Instruction) -> bool:
        """Whether XLA pads the FP8 array with a number that is meant for what is dequantized: it
        does not divide it by the scale. Without a scale it may be the same number in FP8.
        """
        pads = re.search(r"(?<![-\d])[1-9]", pad.attributes.get("padding", ""))
        is_scaled = self.scale is not None
        return bool(pads) and is_scaled and not is_zero(look_through(operand(pad, 1)))


def _scales(path: list[Instruction]) -> Instruction | None:
    """What the converted FP8 array is multiplied by, before it is broadcast: one number, or scales
    that are repeated along blocks of it. None for anything else.
    """
    if len(path) <= 2 or path[2].opcode not in SCALING:
        return None
    step, converted = path[2], path[1]
    others = [name for name in step.operands if name != converted.name]
    factor = step.computation[others[0] if others else step.operands[-1]]
    if factor.opcode == "broadcast":
        return operand(factor, 0)
    repeated = broadcast_of(factor)
    return repeated if repeated is not None and repeated.shape.dims else None


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
        reader[i] = by
        if is_fp8(i.shape.dtype):
            path = [i]
            while (following := reader[path[-1]]) is not None:
                path.append(following)
            return path
        todo += [(i.computation[name], i) for name in reversed(_looked_behind(i))]
    return None


def _looked_behind(i: Instruction) -> tuple[str, ...]:
    """The operands that XLA looks behind for an FP8 array, in its order."""
    if i.opcode == "multiply":
        return i.operands[:2]
    if i.opcode == "select":
        return i.operands[1:3]
    has_one_array = len(i.operands) == 1 or i.opcode in ("divide", "dynamic-slice", "pad")
    return i.operands[:1] if has_one_array else ()


@remembered
def _search(i: Instruction) -> Instruction | None:
    """Where `i` is made of an FP8 array by moves, elementwise operations, collectives or a loop's
    constant inputs: the first operation on the way at which XLA's own search ends.
    """
    reached = walk([i], _made_of, FAR)
    at = next((j for j in reached if is_fp8(j.shape.dtype) and j.shape.size > 1), None)
    end = None
    while at is not None:  # back to `i`, so that the first comes last
        if arguments := _from_outside(at):
            end = arguments[0][0]
        elif _xla_ends(at) and not is_fp8(at.shape.dtype):
            end = at
        at = reached[at]
    return end


def _made_of(i: Instruction) -> list[Instruction]:
    if arguments := _from_outside(i):
        return [given for _, given in arguments]
    is_known = i.opcode in _SEARCHED or i.opcode.startswith(COLLECTIVES)
    return [i.computation[name] for name in i.operands] if is_known else []


def _xla_ends(i: Instruction) -> bool:
    """Whether XLA's search for an FP8 array goes no further back than an operation."""
    if i.opcode.startswith(COLLECTIVES):
        return True
    return len(i.operands) > 1 and i.opcode not in _XLA_GOES_ON


def _from_outside(i: Instruction) -> list[tuple[Instruction, Instruction]]:
    """What a loop or a branch is given as one of its values, with the loop or the conditional."""
    at, element = i, 0
    if i.opcode == "get-tuple-element":
        at, element = operand(i, 0), i.element
    if at.opcode != "parameter":
        return []
    computation = at.computation
    found = []
    for caller in callers(computation.module).get(computation.name, ()):
        index = at.parameter_number or 0
        if caller.opcode == "conditional":  # whose operand 0 chooses the branch
            index = caller.called.index(computation.name) + 1
        elif caller.opcode != "while":
            continue
        given = operand(caller, index)
        if given.opcode == "tuple":
            given = operand(given, element)
        found.append((caller, given))
    return found
