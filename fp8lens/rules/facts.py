"""What the rules ask of a matmul: the compiled row, the dot that it was, and what became of its
operands and its result.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from fp8lens.hlo.ops import COLLECTIVES, CUTS, DOTS, ELEMENTWISE, MOVES, SOURCES, padded
from fp8lens.hlo.origin import is_recomputed, op_name, primitive, source_line
from fp8lens.hlo.parse import Computation, HloModule, Instruction
from fp8lens.hlo.program import executions, fused, results
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.values import (
    depends,
    dimensions,
    is_transpose,
    is_zero,
    look_through,
    operand,
)
from fp8lens.hlo.walk import walk
from fp8lens.matmul.epilogue import Result
from fp8lens.matmul.kernels import launches
from fp8lens.matmul.match import work
from fp8lens.matmul.operands import FAR, Operand
from fp8lens.matmul.roles import Role, Step, clamp_bounds, is_tanh_gelu
from fp8lens.matmul.rows import BLOCK_SCALED_DOT, GemmRow, matmuls
from fp8lens.matmul.unfused import UnfusedKernel, inside
from fp8lens.rules.rule import Lost
from fp8lens.targets import Target

_SCALED_DOT = 'composite.name="xla.scaled_dot"'
_OF_CONSTANTS = ELEMENTWISE | MOVES | {"constant", "iota"}


class Matmul:
    """One matmul: its `row` in the compiled program, the `dot` that XLA's rewriter saw (None where
    there was none), the program as `written`, and the kernels `near` it. `given` is the dot's row,
    or else the compiled one; `sides` are the dot's operands, left and right.
    """

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

    def odd(self, names: str) -> list[str]:
        """The sizes that an FP8 call does not take as they are, as "N = 100"."""
        row = self.row_as_written
        sizes = [(name, getattr(row, name.lower())) for name in names]
        return [f"{name} = {size}" for name, size in sizes if padded(size) != size]

    @property
    def cut_for(self) -> list[str]:
        """The sizes for whose sake XLA puts a slice behind the call: M and N that the call pads,
        and a K that an earlier pass pads to a multiple of 8, which cuts nothing off the result.
        """
        return self.odd("MNK" if self.row_as_written.k % 8 else "MN")

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
        if self.operands_scales and self._may_be_operands_scale(step):
            self.operands_scales -= 1
            return True
        if self.free.pop(step.kind, False):
            return True
        # A vector that is copied into a matrix in front of the call is added as one.
        return step.kind is Role.BIAS and self.free.pop(Role.MATRIX_BIAS, False)

    def _is_results_scale(self, step: Step) -> bool:
        is_wide = step.value.shape.dtype not in CUBLASLT
        return self.to_fp8 and step.kind is Role.SCALE and "d" in self.row.scales and is_wide

    def _may_be_operands_scale(self, step: Step) -> bool:
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
        return {i.opcode for i in inside(self.kernel)}

    @cached_property
    def side(self) -> str:
        """The operand that it makes, "left" or "right"; of a kernel that quantizes what another has
        transposed, the other's.
        """
        left = operand(self.matmul.row.instruction, 0)
        graph = Graph(left.computation.module, launches, FAR)
        made = graph.walk([Value(left, 0)], graph.before, launches)
        makers = {value.instruction for value in made if launches(value.instruction)}
        read = [operand(maker, n) for maker in makers for n in range(len(maker.operands))]
        makers.update(look_through(i, _NAMED) for i in read)
        return "left" if self.kernel in makers else "right"

    @property
    def argument(self) -> str:
        """The name of the argument that it reads, as " (name)"; empty where it reads none."""
        if not self.kernel.operands:
            return ""
        origin = look_through(operand(self.kernel, 0), _NAMED)
        name = origin.metadata.op_name if origin.opcode == "parameter" and origin.metadata else None
        return f" ({name})" if name else ""

    @property
    def keeps_the_last(self) -> bool:
        """Whether it transposes, and what was the last dimension stays the last."""
        for i in inside(self.kernel):
            if i.opcode == "transpose":
                dims = re.findall(r"\d+", i.attributes.get("dimensions", ""))
                return bool(dims) and dims[-1] == str(len(dims) - 1)
        return False

    @property
    def permutes_k(self) -> bool:
        """Whether the array that it transposes has its rows first, and K's several dimensions
        behind them, in another order than the call needs them.
        """
        row = self.matmul.row
        if row.batch != 1 or len(self.kernel.operands) != 1:
            return False
        first, *behind = operand(self.kernel, 0).shape.dims or (0,)
        # Where the last dimension is as long, it may be the rows.
        has_rows_first = first in (row.m, row.n) and first not in behind[-1:]
        return has_rows_first and len(behind) > 1 and math.prod(behind) == row.k


_NAMED = ("bitcast", "reshape", "copy", "get-tuple-element")


# What stayed outside behind a matmul --------------------------------------------------------------

_CONVERTING = {Role.SCALE, Role.ALPHA, Role.NEGATE, Role.CLAMP, Role.OUTPUT}


class Cause:
    """The steps that stayed outside, the first of which is to blame: the others stay outside
    because of it. `ahead` are the steps in front of it.
    """

    def __init__(self, matmul: Matmul, left: list[Step]):
        self.matmul, self.left, self.result = matmul, left, matmul.result
        self.row = matmul.row
        to_fp8 = [
            n
            for n, step in enumerate(left)
            if step.kind is Role.OUTPUT and step.at.shape.dtype in CUBLASLT
        ]
        self.group: list[Step] = left[: to_fp8[0] + 1] if to_fp8 else []
        before = {step.kind for step in self.group[:-1]}
        #: Whether all there is in front of the conversion to FP8 belongs to it: scale and clamp.
        self.converts = bool(to_fp8) and before <= _CONVERTING
        if self.converts and self.group[:-1] and self.group[0].kind is Role.OUTPUT:
            self.converts = False
        self.first = left[0]
        self.noun = self.first.kind.noun
        self.lost = _lost(self.first.kind)
        blamed = self.first
        if self.converts:
            self.noun, self.lost, blamed = "conversion", Lost.OUTPUT, self.group[-1]
        self.in_front = self.result.steps[: self.result.steps.index(blamed)]
        self.ahead = self.result.steps[: self.result.steps.index(self.first)]

    @property
    def kind(self) -> Role:
        """The first step's kind."""
        return self.first.kind

    @property
    def following(self) -> str:
        """The kind of the step behind the first one that stayed outside, or ""."""
        return self.left[1].kind if len(self.left) > 1 else ""

    @property
    def is_factor(self) -> bool:
        """Whether the first is a factor: a scale, or a constant."""
        return self.kind in (Role.SCALE, Role.ALPHA)

    @property
    def kinds_ahead(self) -> list[str]:
        """The kinds of the steps in front of the first."""
        return [step.kind for step in self.ahead]

    @property
    def is_another_scale(self) -> bool:
        """Whether the first is a scale behind a scale."""
        return self.kind is Role.SCALE and Role.SCALE in self.kinds_ahead

    @property
    def activates_otherwise(self) -> bool:
        """Whether what follows the first is an activation that no call has."""
        return self.following == Role.ACTIVATION and not is_tanh_gelu(self.left[1])

    @property
    def is_read_twice(self) -> bool:
        """Whether something else reads what the first step reads."""
        value = self.first.value
        if any(read is value for read, _ in self.result.readers):
            return True
        return any(s.kind is Role.AMAX and s.value is value for s in self.result.steps)

    @property
    def is_widened_and_back(self) -> bool:
        """Whether the first converts to f32, and a later step back to the 16 bits from before."""
        types = [step.at.shape.dtype for step in self.left[1:] if step.kind is Role.OUTPUT]
        is_widened = self.kind is Role.OUTPUT and self.writes == "f32"
        return is_widened and len(self.left) > 2 and types[:1] == [self.reads]

    @property
    def users(self) -> list[Instruction]:
        """Who reads what the first step reads."""
        value = self.first.value
        return value.computation.users[value.name]

    @property
    def reads(self) -> str:
        """The type that the first step reads."""
        return self.first.value.shape.dtype

    @property
    def writes(self) -> str:
        """The type that the first step writes."""
        return self.first.at.shape.dtype

    @cached_property
    def transposed(self) -> Instruction | None:
        """What transposes the result in front of the step, where no call would take it as it is."""
        moves = (step.at for step in self.in_front if step.kind is Role.MOVE)
        found = next((move for move in moves if is_transpose(move)), None)
        return None if self.lost is Lost.SCALE and "a" in self.row.scales else found

    @property
    def is_xlas_transpose(self) -> bool:
        """Whether XLA transposed for a collective: the program has no such step."""
        move = self.transposed
        if move is None or primitive(op_name(move)).endswith(("transpose", "reshape")):
            return False
        return any(i.opcode.startswith(COLLECTIVES) and depends(i, move) for i in move.computation)

    @cached_property
    def apart(self) -> str:
        """What a move does to the result in front of the step beside laying it out anew: how the
        reason says it; "" where nothing.
        """
        cut = "cut" if self.converts and not self.matmul.cut_for else ""
        moves = self.in_front
        if self.is_read_twice:  # in another computation too: there it must be written as it is
            moves = [step for step in moves if not step.how]
        return next(filter(None, (_apart(step, cut) for step in moves)), "")

    @property
    def is_update(self) -> bool:
        """Whether the first is no conversion, and stands behind a gradient."""
        return self.kind is not Role.OUTPUT and is_behind_gradient(self.matmul, self.first)

    @property
    def rest(self) -> str:
        """What stays outside with the first step, as "bias and conversion"; or ""."""
        if self.is_update:
            return ""
        following = self.left[1:]
        if self.activates_otherwise:  # the sign behind -softplus(-d) is a part of the activation
            following = [step for step in following if step.kind is not Role.NEGATE]
        # The conversion to such a type is what is to blame for the clamp in front of it.
        following = [step for step in following if not _is_to_no_such_type(step)]
        behind = [is_behind_gradient(self.matmul, step) for step in following]
        nouns = [
            "update" if is_update else step.kind.noun
            for is_update, step in zip(behind, following, strict=True)
        ]
        nouns = list(dict.fromkeys(nouns))
        is_blamed = self.first.kind is Role.ACTIVATION or self.activates_otherwise
        if is_blamed and "activation" in nouns:
            nouns.remove("activation")  # more operations of the same one
        if len(nouns) > 1:
            nouns = [", ".join(nouns[:-1]), nouns[-1]]
        return " and ".join(nouns)


def _is_to_no_such_type(step: Step) -> bool:
    """Whether a step converts to an FP8 type that no call writes."""
    dtype = step.at.shape.dtype
    return step.kind is Role.OUTPUT and is_fp8(dtype) and dtype not in CUBLASLT


def _lost(role: Role) -> Lost:
    """What is lost with a step that stays outside."""
    scales = (Role.ALPHA, Role.NEGATE, Role.SCALE, Role.VECTOR_SCALE)
    if role in scales:
        return Lost.SCALE
    return Lost(role.work)


def _apart(step: Step, cut: str) -> str:
    if step.kind is not Role.MOVE:
        return ""
    if step.how:
        return step.how
    if step.at.opcode in CUTS:
        parts = step.value.computation.users.get(step.value.name, ())
        if len(parts) > 1:
            return "cut into parts"
        return "cut" if step.at.opcode == "dynamic-slice" else cut
    how = {
        "gather": "gathered",
        "broadcast": "repeated",
        "pad": "padded",
        "concatenate": "joined with others",
        "reverse": "reversed",
        "dynamic-update-slice": "stored in a larger array",
        "scatter": "scattered",
        "select": "masked",
        "opt-barrier": "barrier",
    }
    return how.get(step.at.opcode, "")


def cause_of(matmul: Matmul, left: list[Step]) -> "Cause":
    """What the first of the steps that stayed outside belongs to."""
    cause = Cause(matmul, left)
    return Conversion(matmul, left) if cause.converts else cause


class Conversion(Cause):
    """Scale, clamp and conversion to FP8, which stayed outside together: `left` is those alone."""

    def __init__(self, matmul: Matmul, left: list[Step]):
        super().__init__(matmul, left)
        self.left = self.group
        self.to = self.group[-1].at.shape.dtype
        self.kinds = [step.kind for step in self.group]
        self.base = self.group[0].value
        self.best = CUBLASLT[self.to].limit

    @property
    def fields(self) -> dict[str, str]:
        """What the texts of these rules name."""
        clip = (
            f"jnp.clip(d * d_scale, -{self.best}, {self.best}).astype(jnp.{FORMATS[self.to].jax})"
        )
        return {"to": self.to, "best": self.best, "clip": clip}

    @property
    def bounds(self) -> list[str]:
        """The bounds of the clamp in front of the conversion, where they are constants."""
        return clamp_bounds(self.group[-2].at) if self.kinds[-2:-1] == [Role.CLAMP] else []

    @property
    def is_whole_range(self) -> bool:
        """Whether the clamp is to the format's range."""
        return self.bounds == [f"-{self.best}", self.best]

    @property
    def is_relu_too(self) -> bool:
        """Whether the clamp is from 0 on, where the call could still take a relu."""
        from_zero = bool(self.bounds) and not float(self.bounds[0])
        return from_zero and self.row.epilogue in ("DEFAULT", "BIAS")

    @property
    def wide(self) -> str:
        """The wide type to which the result is converted on the way, or ""."""
        types = [step.at.shape.dtype for step in self.group[:-1] if step.kind is Role.OUTPUT]
        return types[0] if types else ""

    @property
    def readers(self) -> list[Instruction]:
        """Who else reads a value on the way."""
        way = [step.value for step in self.group]
        return [i for value, i in self.result.readers if value in way]

    @property
    def amaxes(self) -> list[Step]:
        """The maxima that are taken of the result."""
        return [step for step in self.result.steps if step.kind is Role.AMAX]


class Amax:
    """A maximum that the call did not take, and what else stayed outside."""

    def __init__(self, matmul: Matmul, step: Step):
        self.matmul, self.step, self.steps = matmul, step, matmul.steps
        self.main = matmul.main
        at = self.steps.index(step)
        self.ahead, self.later = self.steps[:at], self.steps[at:]
        self.way = [operand(step.at, 0)]
        while self.way[-1].opcode in (
            "abs",
            "convert",
            "bitcast",
            "reshape",
            "opt-barrier",
        ):
            self.way.append(operand(self.way[-1], 0))

    @property
    def behind(self) -> str:
        """The step behind it that the call does in front of its amax, or ""."""
        kinds = [s.kind for s in self.later if s.kind in _BEFORE_AMAX]
        return kinds[0].noun if kinds else ""

    @property
    def is_scaled(self) -> bool:
        """Whether it is of the result after a scale, clamp or conversion that the call does not do
        in front of its amax.
        """
        # A factor that became an operand's scale stands before all that the call computes.
        outside = self.steps if is_fp8(self.matmul.row.out_dtype) else self.main
        return any(
            s.kind in (Role.SCALE, Role.ALPHA, Role.CLAMP, Role.OUTPUT) and s in outside
            for s in self.ahead
        )

    @property
    def converted(self) -> str:
        """The type to which the result is converted in front of it, or ""."""
        convert = next((i for i in self.way if i.opcode == "convert"), None)
        if convert is None or convert.shape.dtype == self.step.value.shape.dtype:
            return ""
        return convert.shape.dtype

    @property
    def is_positive(self) -> bool:
        """Whether it is of numbers that are not negative."""
        return any(i.opcode == "abs" for i in self.way) or any(
            s.kind is Role.RELU for s in self.ahead
        )


_BEFORE_AMAX = (Role.RELU, Role.ACTIVATION, Role.BIAS, Role.MATRIX_BIAS)


# Predicates ---------------------------------------------------------------------------------------


def is_constant(i: Instruction) -> bool:
    """Whether a matrix is made of constants alone, but for numbers."""

    def made_of(j: Instruction) -> Iterable[Instruction]:
        is_spread = j.opcode == "broadcast" and operand(j, 0).shape.size == 1
        is_known = not is_spread and j.opcode in _OF_CONSTANTS
        return map(j.computation.__getitem__, j.operands) if is_known else ()

    reached = walk([i], made_of, FAR)
    return len(reached) <= FAR and all(j.opcode in _OF_CONSTANTS for j in reached)


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


def is_of_a_gradient(name: str) -> bool:
    """Whether JAX made an operation for a gradient, and not to compute once more what the gradient
    needs.
    """
    _, transposed, rest = name.rpartition("transpose(jvp(")
    return bool(transposed) and not is_recomputed(rest)


def is_behind_gradient(matmul: Matmul, step: Step) -> bool:
    """Whether a result is a gradient, and a step is computed outside of what is differentiated, as
    an optimizer's are.
    """
    if matmul.dot is None or not is_of_a_gradient(op_name(matmul.dot)):
        return False
    name = op_name(step.at)
    return bool(name) and "jvp(" not in name


def main_work(works: Collection[str]) -> str:
    """What of several kinds of work a reason says was lost."""
    order = ("output", "epilogue", "bias", "scale", "amax", "transpose", "pad", "copy", "fp8")
    return min(works, key=order.index)


def is_only_cut(matmul: Matmul, to: str) -> bool:
    """Whether the result is converted to 16 bits by the kernels that cut it into parts, and that is
    all they do.
    """
    assert matmul.dot is not None
    if to not in ("bf16", "f16") or matmul.dot.shape.dtype != "f32":
        return False
    if any((i.opcode, i.shape.dtype) != ("convert", to) for _, i in matmul.result.readers):
        return False
    allowed = MOVES | SOURCES | {"convert"}
    for o in matmul.near:
        if o.after and not {j.opcode for j in inside(o.instruction)} <= allowed:
            return False
        if o.after and {s.dtype for s in results(o.instruction)} != {to}:
            return False
    return True


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


class Ragged(NamedTuple):
    """A ragged_dot as written: what its groups divide ("rows" of the result, "sums" or the
    "batch"), how many groups there are, and the dense matmul that XLA makes of it: M and N in
    order, K, batch.
    """

    over: str
    groups: int
    dense: tuple[tuple[int, ...], int, int]

    @property
    def is_repeated(self) -> bool:
        """Whether the dense matmul does the work once for each group."""
        return self.over != "batch" and self.groups > 1


def ragged_of(m: Matmul) -> Ragged | None:
    """The ragged_dot of the program that a matmul was made of, by its sizes, and among those alike
    by its name and place. On several devices the sizes are of a part: then one of any size from the
    same line, if all there are of one kind. None where that is not known.
    """
    here = m.row.op_name, m.row.source
    written = [i for i in m.written if i.opcode == "ragged-dot"]
    written.sort(key=lambda i: (op_name(i), source_line(i)) != here)
    found = [_ragged(i) for i in written]
    sides = tuple(sorted((padded(m.row.m), padded(m.row.n))))
    of_size = [one for one in found if one.dense == (sides, padded(m.row.k), m.row.batch)]
    if of_size:
        return of_size[0]
    of_line = [_ragged(i) for i in written if source_line(i) == m.row.source]
    kinds = {(one.over, one.is_repeated) for one in of_line}
    return of_line[0] if len(kinds) == 1 else None


def _ragged(i: Instruction) -> Ragged:
    lhs, rhs, sizes = (operand(i, index).shape.dims for index in range(3))
    (divided,) = dimensions(i, "lhs_ragged_dims")
    batch, summed = (dimensions(i, f"lhs_{of}_dims") for of in ("batch", "contracting"))
    besides = {
        *dimensions(i, "rhs_batch_dims"),
        *dimensions(i, "rhs_contracting_dims"),
        *dimensions(i, "rhs_group_dims"),
    }
    m = math.prod(lhs[d] for d in range(len(lhs)) if d not in (*batch, *summed))
    n = math.prod(rhs[d] for d in range(len(rhs)) if d not in besides)
    k = math.prod(lhs[d] for d in summed)
    count = math.prod(lhs[d] for d in batch)
    groups = sizes[-1]
    over = "batch" if divided in batch else "sums" if divided in summed else "rows"
    if over == "rows":
        k *= groups
    if over == "sums":
        count *= groups
    return Ragged(over, groups, (tuple(sorted((padded(m), padded(n)))), padded(k), count))
