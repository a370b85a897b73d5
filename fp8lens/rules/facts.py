"""What the rules ask of a matmul: the compiled row, the dot that it was, and what became of its
operands and its result.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from fp8lens.formats import (
    CUBLASLT,
    E2M1,
    E4M3,
    E8M0,
    FORMATS,
    BlockFormat,
    block_format,
    is_fp8,
    is_narrow,
)
from fp8lens.hlo.dataflow import Graph, Value
from fp8lens.hlo.ops import DOTS, ELEMENTWISE, MOVES, SCALING, padded
from fp8lens.hlo.origin import op_name
from fp8lens.hlo.parse import Computation, HloModule, Instruction
from fp8lens.hlo.program import executions, fused
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import (
    changes_layout,
    dimensions,
    is_transpose,
    is_zero,
    look_through,
    minor_to_major,
    operand,
)
from fp8lens.hlo.walk import walk
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.operands import FAR, Operand
from fp8lens.matmul.places import work
from fp8lens.matmul.roles import Result, Role, Step, clamp_bounds, could_be_fused
from fp8lens.matmul.rows import BLOCK_SCALED_DOT, GemmRow, matmuls
from fp8lens.matmul.unfused import UnfusedKernel, operations
from fp8lens.rules.rule import Lost
from fp8lens.targets import Target

_SCALED_DOT = 'composite.name="xla.scaled_dot"'
_OF_CONSTANTS = ELEMENTWISE | MOVES | {"constant", "iota"}


class Matmul:
    """One matmul: its `row` in the compiled program, the `dot` that XLA's rewriter saw (None where
    there was none), the program as `written`, and the kernels `near` it. `given` is the dot's row,
    or else the compiled one; `sides` are the dot's operands, left and right. `twin` is another
    call before this one that XLA made of the same dot.
    """

    twin: "Matmul | None" = None

    def __init__(
        self,
        row: GemmRow,
        dot: Instruction | None,
        written: HloModule,
        chip: Target,
        near: Sequence[UnfusedKernel] = (),
        sides: Sequence[Operand] | None = None,
    ):
        self.row, self.dot, self.written, self.chip, self.near = row, dot, written, chip, near
        self.given: GemmRow = matmuls(dot)[0] if dot else row
        if sides is None and dot:
            sides = [Operand(operand(dot, 0), "left"), Operand(operand(dot, 1), "right")]
        self.sides = list(sides or ())

    def of_one(self, side: Operand) -> "Matmul":
        """The same matmul, as if nothing were wrong with its other operand."""
        return Matmul(self.row, self.dot, self.written, self.chip, self.near, [side])

    @cached_property
    def as_written(self) -> list[GemmRow]:
        """The program's own matmuls of this one's size: XLA may have made it of others."""
        return _plain_by_work(self.written).get(work(self.given), [])

    @cached_property
    def row_as_written(self) -> GemmRow:
        """Its sizes as the program has them: XLA may have padded to multiples of 8 before the
        rewriter. Another matmul, which an FP8 call would pad to the same sizes, is not this one.
        """
        alike = [row for row in self.as_written if _in_eights(row) == _in_eights(self.given)]
        here = self.given.op_name, self.given.source
        alike.sort(key=lambda row: (row.op_name, row.source) != here)
        return next(iter(alike or self.as_written), self.given)

    @cached_property
    def result(self) -> Result:
        """What the program does with the dot's result. There must be a dot."""
        assert self.dot is not None
        return Result(self.dot)

    @property
    def steps(self) -> list[Step]:
        """What the program does with the dot's result, in order."""
        return self.result.steps if self.dot is not None else []

    @property
    def is_cublaslt(self) -> bool:
        """Whether cuBLASLt runs it: the rules of XLA's rewriter are about its calls."""
        return self.row.library == "cublasLt"

    @property
    def result_is_fp8(self) -> bool:
        """Whether the dot's own result is FP8, before anything is done with it."""
        return self.dot is not None and self.dot.shape.dtype in CUBLASLT

    # Operands -------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[Operand]:
        """The operands behind which XLA finds no FP8 array."""
        return [side for side in self.sides if side.fp8 is None]

    @property
    def blocked(self) -> Instruction | None:
        """Where XLA's search for the first missing operand's FP8 array ends, if there is one."""
        return self.missing[0].blocked if self.missing else None

    @property
    def is_quantized(self) -> bool:
        """Whether XLA finds an FP8 array behind both operands of the dot."""
        return self.dot is not None and not self.missing

    @property
    def types(self) -> list[str]:
        """The FP8 types behind the operands, left and right."""
        return [side.fp8.shape.dtype for side in self.sides if side.fp8 is not None]

    @property
    def broken(self) -> Operand | None:
        """The first operand with an FP8 array that something keeps XLA from taking."""
        return next((side for side in self.sides if side.problem), None)

    @cached_property
    def folded(self) -> Operand | None:
        """The first missing operand that is made of constants alone."""
        return next((side for side in self.missing if is_constant(side.operand)), None)

    def thin(self, names: str) -> list[str]:
        """Those of M, N and K that are 1."""
        return [name for name in names if getattr(self.row, name.lower()) == 1]

    @property
    def is_thin(self) -> bool:
        """Whether M or N is 1, and an operand is a vector for it."""
        return bool(self.thin("MN")) and any(len(s.operand.shape.dims) == 1 for s in self.sides)

    def odd(self, names: str) -> list[str]:
        """The sizes that an FP8 call does not take as they are, as "N = 100"."""
        row = self.row_as_written
        sizes = [(name, getattr(row, name.lower())) for name in names]
        return [f"{name} = {size}" for name, size in sizes if padded(size) != size]

    @cached_property
    def block_scaled(self) -> Instruction | None:
        """The block-scaled dot that it was in the program as written: one of its size, and no plain
        dot of that size that it may be instead; where there are both, JAX's op_name tells them
        apart. None for any other matmul.
        """
        if self.dot is None or self.dot.opcode == "scaled-dot":
            return self.dot
        given = work(self.given)
        calls = [i for i, rows in _block_scaled(self.written) if given in map(work, rows)]
        if self.as_written:
            calls = [i for i in calls if self.row.op_name.endswith(op_name(i) or "-")]
        return calls[0] if calls else None

    @property
    def block_format(self) -> BlockFormat | None:
        """The format of the block-scaled dot; None for one that is not known here."""
        i = self.block_scaled
        if i is None or len(i.operands) < 4:
            return None
        array, scales = operand(i, 0).shape, operand(i, 2).shape
        return block_format(array.dtype, scales.dtype, array.size // max(1, scales.size))

    # What the call did not take -------------------------------------------------------------------

    def unfused(self, steps: list[Step]) -> Iterator[Step]:
        """The steps that the call did not take, in order. Once one stays outside, what follows it
        does too.
        """
        call, blocked = _Taking(self), False
        for step in steps:
            if step.kind is Role.AMAX:
                if not self.row.amax or is_fp8(step.value.shape.dtype):
                    yield step
            elif step.kind is not Role.MOVE:
                blocked = blocked or not call.takes(step)
                if blocked:
                    yield step

    @cached_property
    def left(self) -> list[Step]:
        """The steps that the call did not take."""
        return list(self.unfused(self.steps))

    @property
    def main(self) -> list[Step]:
        """Those of `left` that are no amax."""
        return [step for step in self.left if step.kind not in (Role.AMAX, Role.MOVE)]


def _in_eights(row: GemmRow) -> tuple[list[int], int]:
    """M and N in any order, and K, rounded up to multiples of 8."""
    m, n, k = (-(-size // 8) for size in (row.m, row.n, row.k))
    return sorted((m, n)), k


@remembered
def _block_scaled(module: HloModule) -> list[tuple[Instruction, Sequence[GemmRow]]]:
    """The block-scaled dots as JAX writes them, each with its matmuls: a custom call of its own, or
    the call of a composite, whose computation spells it out.
    """
    found: list[tuple[Instruction, Sequence[GemmRow]]] = []
    for i in module:
        if i.custom_call_target == BLOCK_SCALED_DOT:
            found.append((i, matmuls(i)))
        elif computation := _spelled_out(i):
            found.append((i, [row for j in computation for row in matmuls(j)]))
    return found


def _spelled_out(i: Instruction) -> Computation | None:
    """The computation that spells out a block-scaled dot, of the call of its composite."""
    if i.opcode != "call" or _SCALED_DOT not in i.attributes.get("frontend_attributes", ""):
        return None
    return i.computation.module.computations[i.callee("to_apply")]


@remembered
def _plain(module: HloModule) -> list[GemmRow]:
    """The plain dots of a program as written."""
    spelled_out = {_spelled_out(i) for i in module}
    run = [module.computations[name] for name in executions(module)]
    of_dots = (computation for computation in run if computation not in spelled_out)
    return [
        row
        for computation in of_dots
        for i in computation
        if i.opcode in DOTS
        for row in matmuls(i)
    ]


@remembered
def _plain_by_work(module: HloModule) -> dict[tuple, list[GemmRow]]:
    """The same, by the work that they do."""
    found: dict[tuple, list[GemmRow]] = {}
    for row in _plain(module):
        found.setdefault(work(row), []).append(row)
    return found


class _Taking:
    """A call, by its configuration, that is handed what the program does with its dot's result: of
    each kind it takes so many steps.
    """

    def __init__(self, matmul: Matmul):
        row = self.row = matmul.row
        self.to_fp8 = is_fp8(row.out_dtype) and not matmul.result_is_fp8
        self.free = {
            Role.BIAS: "BIAS" in row.epilogue,
            Role.MATRIX_BIAS: row.beta != 0,
            Role.RELU: "RELU" in row.epilogue,
            Role.ACTIVATION: "GELU" in row.epilogue,
            Role.ALPHA: row.alpha != 1,
        }
        self.operands_scales = sum(
            side.scale is None and letter in row.scales
            for letter, side in zip("ab", matmul.sides, strict=False)
        )

    def takes(self, step: Step) -> bool:
        """Whether it takes this step: then one of its kind less can follow."""
        if self._is_results_scale(step) or self._is_results_type(step):
            return True
        if self.operands_scales and self._is_scale(step):
            self.operands_scales -= 1
            return True
        if self.free.pop(step.kind, False):
            return True
        # A vector that is copied into a matrix in front of the call is added as one.
        return step.kind is Role.BIAS and self.free.pop(Role.MATRIX_BIAS, False)

    def _is_results_scale(self, step: Step) -> bool:
        is_wide = step.value.shape.dtype not in CUBLASLT
        return self.to_fp8 and self._is_scale(step) and "d" in self.row.scales and is_wide

    def _is_scale(self, step: Step) -> bool:
        return step.kind is Role.SCALE or step.kind is Role.ALPHA and not self.free.get(Role.ALPHA)

    def _is_results_type(self, step: Step) -> bool:
        """Whether the call does a step by writing what it writes."""
        if step.kind is Role.OUTPUT and self.row.out_dtype == step.at.shape.dtype:
            return True
        return self.to_fp8 and step.kind in (Role.CLAMP, Role.OUTPUT)


# A kernel in front of a matmul --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InFront:
    """A kernel that makes an operand, a scale or a bias, and one piece of work of it ("transpose",
    "pad", "scale", "bias", ...) that the call could do.
    """

    matmul: Matmul
    kernel: Instruction
    work: str

    @cached_property
    def opcodes(self) -> set[str]:
        """What the kernel computes with."""
        return {i.opcode for i in operations(self.kernel)}

    @property
    def at(self) -> Instruction:
        """What of it does the work: its last operation that is no name of another."""
        does = {"scale": SCALING, "transpose": {"transpose", "copy"}, "pad": {"pad"}}
        named = does.get(self.work, ELEMENTWISE)
        found = [i for i in operations(self.kernel) if i.opcode in named]
        return found[-1] if found else self.kernel

    @cached_property
    def side(self) -> str:
        """The operand that it makes, "left" or "right"; "" where it makes neither, or both."""
        row = self.matmul.row.instruction
        graph = Graph(row.computation.module, _is_matmul, 4 * FAR, mixes=True)
        sides = []
        for index, side in enumerate(("left", "right")):
            made = graph.walk([Value(operand(row, index), 0)], graph.before, _is_matmul)
            if any(graph.launcher(value.instruction) is self.kernel for value in made):
                sides.append(side)
        return sides[0] if len(sides) == 1 else ""

    @property
    def operand(self) -> str:
        """The operand that it makes, in words, with the name of the argument that it reads."""
        side = f"the {self.side} operand" if self.side else "an operand"
        if not self.kernel.operands:
            return side
        origin = look_through(operand(self.kernel, 0), _NAMED)
        name = origin.metadata.op_name if origin.opcode == "parameter" and origin.metadata else None
        return f"{side} ({name})" if name else side

    @property
    def last_becomes(self) -> str:
        """What becomes of the last dimension in memory where the kernel transposes: one of the
        "rows" of an operand, so that K was not the last; it stays the "last"; or another dimension
        of "k". "" where the kernel does not transpose.
        """
        move = next((i for i in operations(self.kernel) if changes_layout(i)), None)
        if move is None or move.shape.is_tuple:
            return ""
        row, read = self.matmul.row, operand(self.kernel, 0).shape
        first, *behind = (read.dims[d] for d in reversed(minor_to_major(read)))
        # Where the last dimension is as long, it may be the rows.
        has_rows_first = first in (row.m, row.n) and first not in behind[-1:]
        if row.batch == 1 and has_rows_first and len(behind) > 1 and math.prod(behind) == row.k:
            return "k"
        was = dimensions(move) if move.opcode == "transpose" else [*range(len(move.shape.dims))]
        last = minor_to_major(operand(move, 0).shape)[0]
        order = [*reversed(minor_to_major(move.shape))]
        place = next(n for n, d in enumerate(order) if was[d] == last)
        return "last" if place == len(order) - 1 else "rows"


_NAMED = ("bitcast", "reshape", "copy", "get-tuple-element")


def _is_matmul(i: Instruction) -> bool:
    return bool(launches(i) and matmuls(i))


# What stayed outside behind a matmul --------------------------------------------------------------

_CONVERTING = {Role.SCALE, Role.ALPHA, Role.NEGATE, Role.CLAMP, Role.OUTPUT}


class Cause:
    """The steps that stayed outside, `left`, the first of which is to blame: the others stay
    outside because of it.
    """

    def __init__(self, matmul: Matmul, left: list[Step]):
        self.matmul, self.left, self.row = matmul, left, matmul.row
        self.first = left[0]
        self.in_front = matmul.steps[: matmul.steps.index(self.first)]

    @property
    def at(self) -> Instruction:
        """The operation to blame."""
        return self.first.at

    @property
    def kind(self) -> Role:
        """The first step's kind."""
        return self.first.kind

    @property
    def noun(self) -> str:
        """What a sentence calls the first step."""
        return self.kind.noun

    @property
    def lost(self) -> Lost:
        """What is lost with the first step."""
        if self.kind in (Role.ALPHA, Role.NEGATE, Role.SCALE, Role.VECTOR_SCALE):
            return Lost.SCALE
        return Lost(self.kind.work)

    @property
    def is_read_twice(self) -> bool:
        """Whether something else reads what the first step reads."""
        value = self.first.value
        if any(read is value for read, _ in self.matmul.result.readers):
            return True
        return any(s.kind is Role.AMAX and s.value is value for s in self.matmul.steps)

    @property
    def reads(self) -> str:
        """The type that the first step reads."""
        return self.first.value.shape.dtype

    @property
    def writes(self) -> str:
        """The type that the first step writes."""
        return self.first.at.shape.dtype

    @property
    def transposed(self) -> Instruction | None:
        """What transposes the result in front of the step."""
        moves = (step.at for step in self.in_front if step.kind is Role.MOVE)
        return next((move for move in moves if is_transpose(move)), None)

    @property
    def rest(self) -> str:
        """What stays outside with the first step, as "bias and conversion"; or ""."""
        nouns = list(dict.fromkeys(step.kind.noun for step in self.left[1:]))
        nouns = [noun for noun in nouns if noun != self.noun]
        if len(nouns) > 1:
            nouns = [", ".join(nouns[:-1]), nouns[-1]]
        return " and ".join(nouns)


class Conversion(Cause):
    """Scale, clamp and conversion to FP8, which stayed outside together: `left` is those alone."""

    def __init__(self, matmul: Matmul, left: list[Step]):
        super().__init__(matmul, left)
        self.to = left[-1].at.shape.dtype
        self.kinds = [step.kind for step in left]
        self.best = CUBLASLT[self.to].limit

    @property
    def at(self) -> Instruction:
        """The conversion."""
        return self.left[-1].at

    @property
    def noun(self) -> str:
        """What a sentence calls it."""
        return Role.OUTPUT.noun

    @property
    def lost(self) -> Lost:
        """What is lost."""
        return Lost.OUTPUT

    @property
    def rest(self) -> str:
        """Nothing: `left` is the conversion."""
        return ""

    @property
    def bounds(self) -> list[str]:
        """The bounds of the clamp in front of the conversion, where they are constants."""
        return clamp_bounds(self.left[-2].at) if self.kinds[-2:-1] == [Role.CLAMP] else []

    @property
    def fields(self) -> dict[str, str]:
        """What the texts of these rules name. A clamp from 0 on is a relu, too."""
        is_relu = bool(self.bounds) and not float(self.bounds[0])
        d = "jax.nn.relu(d)" if is_relu else "d"
        jax_to = f"jnp.{FORMATS[self.to].jax}"
        clip = f"jnp.clip({d} * d_scale, -{self.best}, {self.best}).astype({jax_to})"
        return {"to": self.to, "clip": clip}

    @property
    def is_whole_range(self) -> bool:
        """Whether the clamp is to the format's range."""
        return self.bounds == [f"-{self.best}", self.best]

    @property
    def wide(self) -> str:
        """The wide type to which the result is converted on the way, or ""."""
        types = [step.at.shape.dtype for step in self.left[:-1] if step.kind is Role.OUTPUT]
        return types[0] if types else ""

    @property
    def readers(self) -> list[Instruction]:
        """Who else reads a value on the way."""
        way = [step.value for step in self.left]
        return [i for value, i in self.matmul.result.readers if value in way]

    @property
    def amaxes(self) -> list[Step]:
        """The maxima that are taken of the result."""
        return [step for step in self.matmul.steps if step.kind is Role.AMAX]


def cause_of(matmul: Matmul, left: list[Step]) -> Cause:
    """What the first of the steps that stayed outside belongs to: a conversion to FP8, or itself
    alone.
    """
    for n, step in enumerate(left):
        if step.kind is Role.OUTPUT and step.at.shape.dtype in CUBLASLT:
            return Conversion(matmul, left[: n + 1])
        if step.kind is Role.ACTIVATION and not could_be_fused(step):
            return Cause(matmul, left[n:])  # whose kernel does what stands in front of it, too
        if step.kind not in _CONVERTING:
            break
    return Cause(matmul, left)


@dataclasses.dataclass(frozen=True)
class Amax:
    """A maximum that the call did not take."""

    matmul: Matmul
    step: Step

    @property
    def at(self) -> Instruction:
        """The reduction."""
        return self.step.at

    @property
    def converted(self) -> bool:
        """Whether the result becomes FP8."""
        outputs = (step.at for step in self.matmul.steps if step.kind is Role.OUTPUT)
        return any(i.shape.dtype in CUBLASLT for i in outputs)

    @property
    def is_scaled(self) -> bool:
        """Whether the result becomes FP8, and it is of a value behind a scale or a clamp that the
        call did not take.
        """
        if not self.converted:
            return False
        ahead = self.matmul.steps[: self.matmul.steps.index(self.step)]
        kinds = (Role.SCALE, Role.ALPHA, Role.CLAMP)
        return any(step.kind in kinds and step in self.matmul.left for step in ahead)


# Predicates ---------------------------------------------------------------------------------------


def is_constant(i: Instruction) -> bool:
    """Whether a matrix is made of constants alone, but for numbers."""

    def made_of(j: Instruction) -> Iterable[Instruction]:
        is_spread = j.opcode == "broadcast" and operand(j, 0).shape.size == 1
        is_known = not is_spread and j.opcode in _OF_CONSTANTS
        return map(j.computation.__getitem__, j.operands) if is_known else ()

    reached = walk([i], made_of, FAR)
    has_array = any(j.opcode in ("constant", "iota") and j.shape.size > 1 for j in reached)
    return has_array and len(reached) <= FAR and all(j.opcode in _OF_CONSTANTS for j in reached)


def is_negative(i: Instruction, depth: int = 6) -> bool:
    """Whether a number is negative where the arguments that it is computed of, scales, are not."""
    i = look_through(i, ("bitcast", "reshape", "copy", "convert", "broadcast"))
    made = operand(i, 0) if i.opcode == "get-tuple-element" else i
    if computation := fused(made):
        root = computation.root
        i = look_through(computation[root.operands[i.element]] if root.opcode == "tuple" else root)
    if not depth or i.opcode not in ("negate", "subtract", "multiply", "divide"):
        return i.opcode == "constant" and (i.literal or "").startswith("-")
    signs = [is_negative(operand(i, n), depth - 1) for n in range(len(i.operands))]
    if i.opcode == "subtract":
        return is_zero(operand(i, 0)) and not signs[1]
    return sum(signs) % 2 == 1 if i.opcode != "negate" else not signs[0]


@dataclasses.dataclass(frozen=True)
class Work:
    """What kernels do outside of a matmul's call: `works` as UnfusedKernel has it."""

    works: list[str]

    @property
    def listed(self) -> str:
        """All that they do, in words."""
        return ", ".join(dict.fromkeys(self.works))

    @property
    def lost(self) -> str:
        """What of it a reason says was lost."""
        order = ("output", "epilogue", "bias", "scale", "amax", "transpose", "pad", "fp8")
        return min(self.works, key=order.index)


class ScaledDot(NamedTuple):
    """What a scaled dot multiplies: HLO's types of both operands and of both scales, and how many
    elements share a scale.
    """

    elements: tuple[str, str]
    scales: tuple[str, str]
    blocks: tuple[int, int]

    @property
    def has_instruction(self) -> bool:
        """Whether a Blackwell's tensor core takes these: two scales of one type, E8M0 for 32
        elements; or for two FP4 operands that, E8M0 for 16, or E4M3 for 16.

        Source: NVIDIA's table for cuda.tile.mma_scaled, docs.nvidia.com/cuda/cutile-python.
        """
        (scale, other_scale), (block, other_block) = self.scales, self.blocks
        is_narrow_alone = all(map(is_narrow, self.elements))
        if not is_narrow_alone or scale != other_scale or block != other_block:
            return False
        forms = [(E8M0.name, 32)]
        if {*self.elements} == {E2M1.name}:
            forms += [(E8M0.name, 16), (E4M3.name, 16)]
        return (scale, block) in forms


def scaled_dot_of(call: Instruction) -> ScaledDot | None:
    """What a scaled dot, or JAX's call of one, multiplies; None where it has not both scales."""
    if len(call.operands) < 4:
        return None
    lhs, rhs, lhs_scales, rhs_scales = (operand(call, index).shape for index in range(4))
    return ScaledDot(
        (lhs.dtype, rhs.dtype),
        (lhs_scales.dtype, rhs_scales.dtype),
        (lhs.size // max(1, lhs_scales.size), rhs.size // max(1, rhs_scales.size)),
    )
