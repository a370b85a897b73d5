"""Why a matmul is not one FP8 call, and what to change: XLA's own rules, checked on the program its
rewriter saw.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fp8lens.hlo.ops import (
    COLLECTIVES,
    COMMUTES,
    DOTS,
    ELEMENTWISE,
    FP8_MULTIPLE,
    MOVES,
    SOURCES,
    padded,
)
from fp8lens.hlo.origin import op_name, primitive
from fp8lens.hlo.parse import HloModule, Instruction, parse_hlo_module
from fp8lens.hlo.program import executions, fused, results, setting
from fp8lens.hlo.values import (
    broadcast_of,
    depends,
    is_transpose,
    is_zero,
    look_through,
    operand,
    reducer,
)
from fp8lens.matmul.collectives import Collective, why
from fp8lens.matmul.epilogue import Result, Step, along_columns, clamp_bounds, is_tanh_gelu
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.match import match, work
from fp8lens.matmul.operands import FAR, FP8_MAX, Operand
from fp8lens.matmul.ptx import instructions, of_kernel
from fp8lens.matmul.rows import GemmRow, matmuls
from fp8lens.matmul.unfused import ADDS, DEQUANTIZES, UnfusedKernel, inside
from fp8lens.rules.libraries import fix_there
from fp8lens.rules.reason import Reason, Reasons
from fp8lens.rules.texts import RULES
from fp8lens.targets import Target

_NUMPY = {
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
}
_LOST = {
    "alpha": "scale",
    "relu": "epilogue",
    "activation": "epilogue",
    "clamp": "output",
    "output": "output",
}
_OF_CONSTANTS = ELEMENTWISE | MOVES | {"constant", "iota"}
_NOUNS = {
    "output": "conversion",
    "alpha": "factor",
    "negate": "scale",
    "vector scale": "scale",
    "matrix bias": "bias",
}


def find_reasons(
    found: Sequence[tuple[GemmRow, Sequence[UnfusedKernel]]],
    stages: Sequence[Any],
    after: HloModule,
    chip: Target,
    sent: Sequence[Collective],
    opaque: Sequence[Line],
    ptx: Mapping[str, str],
) -> Reasons:
    """The reasons for a compiled module's rows, each with the kernels around it, for its
    collectives, and for kernels that HLO does not tell of, from the stages and the PTX of its
    compile.
    """
    seen = next(
        (s for s in stages if s.before in ("triton-gemm-rewriter", "cublas-gemm-rewriter")),
        stages[0],
    )
    before, written = parse_hlo_module(seen.text), parse_hlo_module(stages[0].text)
    rows = [row for row, _ in found]
    dots = [d for name in executions(before) for i in before.computations[name] for d in matmuls(i)]
    reasons, first, gathered_wide = Reasons(), {}, set()
    if not rows and not opaque:
        reasons.empty = "There is no matmul."
    for (row, near), dot in zip(found, match(after, rows, before, dots, _types)):
        matmul = _Matmul(row, dot and dot.instruction, written, chip)
        other = first.setdefault((_reads(row), id(dot)), row.name)
        if other != row.name and row.library in ("cublasLt", "cublas"):
            reasons.append(matmul.why("twice", other=other))
        if primitive(row.op_name).startswith("ragged_dot"):
            reasons.append(matmul.why("ragged", m=row.m, n=row.n, k=row.k))
        gathered = {
            kernel for c in sent if row.name in c.feeds for kernel in c.transposed_by
        }  # a reason of their own
        near = [o for o in near if o.instruction.name not in gathered]
        reasons += matmul.left_outside(near) if row.is_fp8 else [matmul.not_fp8()]
        gathered_wide |= {row.name} if "gathered" in matmul.rules else set()
    for c in sent:
        for problem, rule in zip(c.problems, why(c)):
            if problem != "dequantized, then gathered" or gathered_wide.isdisjoint(c.feeds):
                reasons.append(Reason(", ".join(c.feeds[:3]) or c.name, *rule, c.source))
    for line in opaque:
        reasons += _opaque(line, ptx)
    return reasons


def _opaque(line: Line, ptx: Mapping[str, str]) -> list[Reason]:
    """What is known of a kernel that is no instruction of HLO's: of Pallas's kernels, what they
    multiply.
    """
    i = line.kernel.instruction
    target = i.custom_call_target or i.opcode
    text = of_kernel(str(setting(i, "name")), ptx) if "triton" in target else ""
    # Mosaic GPU hands XLA MLIR's bytecode, which has each multiply instruction in words.
    types = instructions(
        i.attributes.get("backend_config", "") if target.startswith("mosaic_gpu") else text
    )
    rule, fields = "not looked into", {"target": target}
    products = re.search(
        r"\b(fma|mul)\.(\w{1,30}\.){0,20}b?f(16|32|64)", text
    )  # which a loop may sum, without an MMA
    if (
        types
        and all(name.startswith("f8") for name in types)
        or text
        and not types
        and not products
    ):
        return []
    if types:
        rule = "a Triton kernel's matmul" if text else "a Mosaic kernel's matmul"
        fields = {"types": " and ".join(n for n in types if not n.startswith("f8"))}
    elif (
        "convForward" in target or "convBackward" in target or i.opcode == "convolution"
    ) and not (dtype := operand(i, 0).shape.dtype).startswith("f8"):
        rule, fields = "convolution", {"dtype": dtype}
    layer = f" {line.layer}" * bool(line.layer)
    return [
        Reason(line.name + layer, *(part.format(**fields) for part in RULES[rule]), line.source)
    ]


def _reads(row: GemmRow) -> tuple:
    """What a call multiplies: two calls that multiply the same are one matmul, run twice."""
    i = row.instruction
    names = [look_through(i.computation[name], ("bitcast", "copy")).name for name in i.operands[:2]]
    return i.computation.name, *names, row.m, row.n, row.k


def _types(row: GemmRow) -> tuple[str, ...]:
    """The FP8 types that a call multiplies, or that XLA would find behind the operands of a dot."""
    i = row.instruction
    found = (
        [
            side.fp8.shape.dtype
            for n in (0, 1)
            if (side := Operand(operand(i, n), "")).fp8 is not None
        ]
        if (i.opcode == "dot")
        else [t for t in (row.lhs_dtype, row.rhs_dtype) if t.startswith("f8")]
    )
    return tuple(sorted(found))


def _anyway(reason: Reason) -> Reason:
    return dataclasses.replace(
        reason, reason=f"{reason.reason}; it is done in a kernel that runs anyway"
    )


def _could_be(step: Step) -> bool:
    """Whether some call could have done a step: no conversion between wide types, no activation but
    relu and gelu.
    """
    return (
        step.kind in ("scale", "bias", "matrix bias", "relu")
        or step.kind == "output"
        and (step.at.shape.dtype in FP8_MAX)
        or step.kind == "activation"
        and is_tanh_gelu(step)
    )


def _apart(step: Step, cut: str) -> str:
    """What a move does to a result beside laying it out anew: how the reason says it; "" where
    nothing.
    """
    if step.kind == "move" and step.at.opcode in ("slice", "dynamic-slice"):
        return (
            "cut into parts"
            if len(step.value.computation.users.get(step.value.name, ())) > 1
            else cut
        )
    how = {
        "concatenate": "joined with others",
        "reverse": "reversed",
        "select": "masked",
        "opt-barrier": "barrier",
    }
    return how.get(step.at.opcode, "") * (step.kind == "move")


def _is_negative(i: Instruction, depth: int = 6) -> bool:
    """Whether a number is negative if the arguments that it is computed of are not, as scales are."""
    i = look_through(i, ("bitcast", "reshape", "copy", "convert", "broadcast"))
    made = operand(i, 0) if i.opcode == "get-tuple-element" else i
    if computation := fused(made):
        root = computation.root
        i = look_through(computation[root.operands[i.element]] if root.opcode == "tuple" else root)
    if not depth or i.opcode not in ("negate", "subtract", "multiply", "divide"):
        return i.opcode == "constant" and (i.literal or "").startswith("-")
    signs = [_is_negative(operand(i, n), depth - 1) for n in range(len(i.operands))]
    if i.opcode == "subtract":
        return is_zero(operand(i, 0)) and not signs[1]
    return sum(signs) % 2 == 1 if i.opcode != "negate" else not signs[0]


def _of_a_gradient(op_name: str) -> bool:
    """Whether JAX made an operation for a gradient, and not to compute once more what the gradient
    needs.
    """
    _, transposed, rest = op_name.rpartition("transpose(jvp(")
    return bool(transposed) and "rematted_computation" not in rest


def _is_constant(i: Instruction) -> bool:
    """Whether a matrix is made of constants alone, but for scalars and vectors."""
    seen, todo = set(), [i]
    while todo:
        i = todo.pop()
        if i.opcode not in _OF_CONSTANTS or len(seen) > FAR:
            return False
        if i.name not in seen and not (
            i.opcode == "broadcast" and operand(i, 0).shape.size < i.shape.size
        ):
            seen.add(i.name)
            todo += [i.computation[name] for name in i.operands]
    return True


class _Matmul:
    """One matmul: its `row` in the compiled program, the `dot` XLA's rewriter saw, and the program
    as `written`.
    """

    def __init__(self, row: GemmRow, dot: Instruction | None, written: HloModule, chip: Target):
        self.row, self.dot, self.written, self.chip = row, dot, written, chip
        self.rules: list[str] = []  # the names of those that were given
        self.given = matmuls(dot)[0] if dot else row
        self.sides = (
            [Operand(operand(dot, n), side) for n, side in enumerate(("left", "right"))]
            if dot
            else []
        )

    def why(self, rule: str, **fields: Any) -> Reason:
        """A rule's Reason, its {names} filled in."""
        row = self.row
        self.rules.append(rule)
        known = {
            "chip": self.chip.name,
            "library": row.library,
            "math": row.math_dtype,
            "epilogue": row.epilogue,
            "beta": f"{row.beta:g}",
            "out": row.out_dtype,
            "scales": " and ".join(row.scales) or "none",
        }
        known |= {
            f"jax_{name}": f"jnp.{_NUMPY[dtype]}"
            for name, dtype in fields.items()
            if dtype in _NUMPY
        }
        texts = [text.format(**(known | fields)) for text in RULES[rule]]
        if re.match(r"[A-Z]\w+[a-z]", texts[3]) and ".cc" not in texts[3]:
            texts[3] += " (XLA's gemm_rewriter.cc)"
        texts[2] += fix_there(rule, self.given.instruction)
        name = row.title + f" {row.path}" * bool(row.path)
        return Reason(name, *texts, self.given.source or row.source)

    # Why it is not FP8 ----------------------------------------------------------------------------

    def not_fp8(self) -> Reason:
        row = self.row
        if not self.chip.has_fp8:
            return self.why("old chip", version=".".join(map(str, self.chip.compute_capability)))
        if self.dot is None:
            thin = [name for name in "MNK" if getattr(row, name.lower()) == 1]
            if row.library != "kernel" or not thin:
                return self.why("unknown, no dot", op_name=repr(row.op_name))
            wide = [d for d in (row.lhs_dtype, row.rhs_dtype) if not d.startswith("f8")]
            if wide and not any(
                all(Operand(operand(d.instruction, n), "").fp8 for n in (0, 1))
                for d in self._as_written
                if d.instruction.opcode == "dot"
            ):
                which = "both operands are" if len(wide) == 2 else "an operand is"
                return self.why(
                    "not quantized", which=which, dtypes=" and ".join(dict.fromkeys(wide))
                )
            return self._thin("spelled out", thin)
        if self._is_block_scaled():
            return self.why("block scales")
        if missing := [side for side in self.sides if side.fp8 is None]:
            return self._not_quantized(missing)
        if self.given.algorithm and self.given.algorithm != "ALG_DOT_ANY_F8_ANY_F8_F32":
            return self.why("algorithm", algorithm=self.given.algorithm.removeprefix("ALG_DOT_"))
        if row.library == "triton":
            says_fp8 = matmuls(row.instruction)[0].is_fp8
            return self.why("Triton, tile" if says_fp8 else "Triton, dequantized", tile=row.tile)
        for side in self.sides:
            if side.problem:
                fields = {"side": side.side, "allowed": ", ".join(sorted(COMMUTES))} | side.fields
                return self.why(side.problem, **fields)
        types = [side.fp8.shape.dtype for side in self.sides]
        if types == ["f8e5m2"] * 2:
            return self.why("both E5M2, bare" if self.sides[0].dtype == "f8e5m2" else "both E5M2")
        if types == ["f8e4m3fn"] * 2 and self.dot.shape.dtype == "f8e5m2":
            return self.why("E5M2 result")
        if other := [t for t in types if t not in FP8_MAX]:
            return self.why("other FP8 type", dtype=other[0])
        if (out := self.dot.shape.dtype) not in ("bf16", "f16", "f32", *FP8_MAX):
            return self.why("result type", dtype=out)
        thin = [name for name in "MN" if getattr(row, name.lower()) == 1]
        if thin and any(len(operand(self.dot, n).shape.dims) == 1 for n in (0, 1)):
            return self._thin("vector", thin)
        if row.library == "kernel" and row.m * row.n * row.k <= 1000:
            return self.why("too small")
        facts = (
            f"operands {' and '.join(types)}, result {out}, run by {row.library} in"
            f" {row.math_dtype}, "
        )
        return self.why(
            "unknown, not FP8", facts=facts + f"precision {row.algorithm or row.precision}"
        )

    def _thin(self, rule: str, thin: list[str]) -> Reason:
        give = {
            "M": "the left operand 16 rows",
            "N": "the right operand 16 columns",
            "K": "K 16 elements",
        }
        return self.why(
            rule,
            thin=" and ".join(thin) + (" are" if len(thin) > 1 else " is"),
            wide=" and ".join(give[name] for name in thin),
        )

    def _is_block_scaled(self) -> bool:
        """Whether it was one in the program as written: one of its size, and no plain dot of that
        size that it may be instead; where there are both, JAX's op_name tells them apart.
        """
        if self.dot.opcode == "scaled-dot":
            return True
        calls = [
            i
            for i in self.written
            if i.custom_call_target == "__op$block_scaled_dot"
            and work(matmuls(i)[0]) == work(self.given)
        ]
        return bool(calls) and (
            not self._as_written or any(self.row.op_name.endswith(op_name(i) or "-") for i in calls)
        )

    def _not_quantized(self, missing: list[Operand]) -> Reason:
        one = missing[0]
        if folded := next((side for side in missing if _is_constant(side.operand)), None):
            number = broadcast_of(folded.operand)
            if number is not None and number.shape.size == 1:
                return self.why("one number", side=folded.side)
            return self.why("folded", side=folded.side, dtype=folded.dtype)
        if one.blocked is None:
            which = "both operands are" if len(missing) == 2 else f"the {one.side} operand is"
            behind_it = [
                look_through(side.operand, ("bitcast", "transpose", "multiply", "convert"))
                for side in missing
            ]
            dtypes = [
                i.shape.dtype if re.match(r"f4|[su]\d", i.shape.dtype) else side.dtype
                for i, side in zip(behind_it, missing)
            ]
            return self.why(
                "not quantized", which=which, dtypes=" and ".join(dict.fromkeys(dtypes))
            )
        opcode = one.blocked.opcode
        rule = "gathered" if opcode.startswith(COLLECTIVES) else "operation between"
        if opcode == "concatenate" and not self._as_written:
            rule = "merged"
        elif opcode == "while":
            rule = "before the loop"
        return self.why(
            rule, side=one.side, opcode=opcode, dtype=one.dtype, allowed=", ".join(sorted(COMMUTES))
        )

    @functools.cached_property
    def _as_written(self) -> list[GemmRow]:
        """The program's own matmuls of this one's size: XLA may have made it of others."""
        return [
            row
            for i in self.written
            if i.opcode in DOTS
            for row in matmuls(i)
            if work(row) == work(self.given)
        ]

    def _odd(self, names: str) -> list[str]:
        """The sizes that an FP8 call does not take as they are."""
        # As the program has them: before the rewriter, XLA may have padded to multiples of 8
        # already.
        row = self._as_written[0] if self._as_written else self.given
        return [
            f"{name} = {size}"
            for name in names
            if padded(size := getattr(row, name.lower())) != size
        ]

    @functools.cached_property
    def _result(self) -> Result:
        return Result(self.dot)

    # What stayed outside of an FP8 call -----------------------------------------------------------

    def left_outside(self, near: Sequence[UnfusedKernel]) -> list[Reason]:
        avoidable = [o for o in near if o.avoidable]
        after = [o for o in avoidable if o.after]
        row = self.row
        found = [
            self._on_an_operand(o.instruction, work)
            for o in avoidable
            if not o.after
            for work in o.work
        ]
        if (row.lhs_dtype, row.rhs_dtype, row.out_dtype) == ("f8e4m3fn", "f8e4m3fn", "f8e5m2") and (
            row.library == "cublasLt"
        ):
            return [*dict.fromkeys(found), self.why("no such kernel")]
        if row.library == "cublasLt":
            found += [
                self.why("padded with a number", side=side.side)
                for side in self.sides
                if side.padded
            ]
        found += [
            *(self.why("sign lost", factor=step.other.literal or "-s") for step in self._early()),
            *self._behind_codes(),
        ]
        found += self._after(after) if after else []
        if {work for o in after for work in o.work} <= {"amax", "transpose", "pad"}:
            found += self._in_other_kernels(near)
        if (
            self.dot is not None
            and self.dot.shape.dtype in FP8_MAX
            and any(o.after and o.own == DEQUANTIZES for o in near)
        ):
            found.append(self.why("result in FP8", to=self.dot.shape.dtype))
        found += [
            self.why(
                "unknown kernel",
                kernel=o.instruction.name,
                opcode=o.unknown,
                does="reads the result" if o.after else "makes an operand",
            )
            for o in near
            if o.unknown
        ]
        return list(dict.fromkeys(found))

    def _early(self) -> list[Step]:
        """The negative factors behind a relu that XLA put in front of it."""
        row, steps = self.row, self._result.steps if self.dot is not None else []
        if (
            not row.is_fp8
            or row.epilogue != "RELU"
            or "relu" not in (kinds := [step.kind for step in steps])
        ):
            return []
        factors = [
            (n, step)
            for n, step in enumerate(steps)
            if step.kind in ("alpha", "scale") and _is_negative(step.other)
        ]
        behind_it = [step for n, step in factors if n > kinds.index("relu")]
        # The call's own factors in front of its relu, alpha and the operands' scales, and the
        # program's.
        given = [row.instruction.computation[name] for name in row.instruction.operands[2:]]
        scales = [i for i in given if i.shape.size == 1][:2] + [
            s.scale for s in self.sides if s.scale is not None
        ]
        ahead = (row.alpha < 0) + sum(map(_is_negative, scales))
        return behind_it if (ahead + len(factors) - len(behind_it)) % 2 else []

    def _behind_codes(self) -> Iterator[Reason]:
        """For what stands behind the conversion to FP8, and XLA took into the call, in front of its
        scale.
        """
        row, steps = self.row, self._result.steps if self.dot is not None else []
        ahead = {step.kind: step for step in steps if step.value.shape.dtype not in FP8_MAX}
        moved = {step.kind for step in steps if step.value.shape.dtype in FP8_MAX} - ahead.keys()
        if "output" in ahead and "bias" in moved and "BIAS" in row.epilogue:
            yield self.why("bias of codes")
        elif "BIAS" in row.epilogue:
            added = (
                row.instruction.computation[name].shape for name in row.instruction.operands[2:]
            )
            yield from (
                self.why("no such bias", bias=vector.dtype)
                for vector in added
                if (len(vector.dims) == 1 and vector.dtype in FP8_MAX)
            )
        codes = [
            s for s in steps if s.kind in ("scale", "alpha") and s.value.shape.dtype in FP8_MAX
        ]
        if codes and not set(codes) <= set(self._unfused(steps)):
            yield self.why("factor of codes")
        if (
            "d" in row.scales
            and "relu" in moved
            and "RELU" in row.epilogue
            and any(
                ahead[kind].other.opcode != "abs"
                and (ahead[kind].other.literal or "-").startswith("-")
                for kind in ("scale", "alpha")
                if kind in ahead
            )
        ):
            yield self.why("relu of scaled codes")

    def _in_other_kernels(self, near: Sequence[UnfusedKernel]) -> list[Reason]:
        """What the call could have taken and did not, where a kernel does it that must run anyway."""
        anyway = [o for o in near if o.after and o.own]
        if works := [work for o in anyway if o.own == ADDS for work in o.work]:
            reason = self.why(
                "outside of a kernel", lost=self._most(works), works=", ".join(dict.fromkeys(works))
            )
            return [_anyway(reason)]
        if (
            self.dot is None
            or self.row.library != "cublasLt"
            or not anyway
            or self.dot.shape.dtype in FP8_MAX
        ):
            return []
        result, users = self._result, self.dot.computation.users
        parts = users.get(self.dot.name, [])
        added = {user for part in parts for user in users.get(part.name, [self.dot])}
        if (
            {i.opcode for i in parts} == {"slice"}
            and [i.opcode for i in added] == ["add"]
            and not self._as_written
        ):
            return [_anyway(self.why("merged, then added"))]
        left = [step for step in self._unfused(result.steps) if step.kind != "amax"]
        if left and left[0].kind == "output" and self._is_cut(left[0].at.shape.dtype, near):
            return [_anyway(self._cause(left[:1], result))]
        if not any(map(_could_be, left)) and not (left and left[0].kind == "alpha"):
            return []
        return [_anyway(self._first_cause(left, result))]

    def _is_cut(self, to: str, near: Sequence[UnfusedKernel]) -> bool:
        """Whether a result is converted to 16 bits by the kernels that cut it into parts, and that
        is all they do.
        """
        alike = all((i.opcode, i.shape.dtype) == ("convert", to) for _, i in self._result.readers)
        return (
            to in ("bf16", "f16")
            and self.dot.shape.dtype == "f32"
            and alike
            and all(
                {j.opcode for j in inside(o.instruction)} <= MOVES | SOURCES | {"convert"}
                and ({s.dtype for s in results(o.instruction)} == {to})
                for o in near
                if o.after
            )
        )

    def _on_an_operand(self, kernel: Instruction, work: str) -> Reason:
        if work == "transpose":
            names = ("bitcast", "reshape", "copy", "get-tuple-element")
            left = look_through(
                operand(self.row.instruction, 0), names
            )  # or a kernel that quantizes what is transposed
            made_of = [
                look_through(operand(left, n), names).name for n in range(len(left.operands))
            ]
            side = "left" if kernel.name in (left.name, *made_of) else "right"
            origin = look_through(operand(kernel, 0), names)
            argument = (
                origin.metadata.op_name
                if origin.opcode == "parameter" and origin.metadata
                else None
            )
            moves = [
                i.attributes.get("dimensions", "")
                for i in inside(kernel)
                if i.opcode == "transpose"
            ]
            dims = re.findall(r"\d+", moves[0]) if moves else []
            if (
                self.row.batch > 1 and dims and dims[-1] == str(len(dims) - 1)
            ):  # what is last stays last
                return self.why(
                    "batch inside",
                    side=side,
                    name=f" ({argument})" * bool(argument),
                    shape=kernel.shape.brief,
                )
            return self.why(
                "operand's layout",
                side=side,
                name=f" ({argument})" * bool(argument),
                shape=kernel.shape.brief,
                stored="[M, K]" if side == "left" else "[N, K]",
            )
        if work == "pad":
            return self._padding()
        opcodes = {i.opcode for i in inside(kernel)}
        if work == "bias":
            if kernel.opcode == "copy":
                return self.why(
                    "copied matrix", shape=look_through(kernel, ("bitcast", "copy")).shape.brief
                )
            if "broadcast" in opcodes and "multiply" not in opcodes:
                return self._biases(
                    next(operand(i, 0) for i in inside(kernel) if i.opcode == "broadcast")
                )
            return self.why("prepared bias")
        if work != "scale":
            return self._unknown([work])
        return self.why(
            "division"
            if "divide" in opcodes
            else "product of scales"
            if "multiply" in opcodes
            else "scale not f32"
        )

    def _padding(self) -> Reason:
        if odd := self._odd("MNK"):
            return self.why("padding", sizes=" and ".join(odd))
        given = self._as_written[0] if self._as_written else self.given
        return self.why(
            "own padding, of few" if FP8_MULTIPLE in (given.m, given.n) else "own padding"
        )

    def _unknown(self, works: Collection[str]) -> Reason:
        return self.why(
            "unknown, outside", lost=self._most(works), works=", ".join(dict.fromkeys(works))
        )

    @staticmethod
    def _most(works: Collection[str]) -> str:
        return min(
            works,
            key=("output", "epilogue", "bias", "scale", "amax", "transpose", "pad", "fp8").index,
        )

    def _after(self, after: list[UnfusedKernel]) -> list[Reason]:
        works = [work for o in after for work in o.work]
        if set(works) == {"transpose"}:
            return [self.why("result's layout")]
        if set(works) == {"pad"}:
            return [self._padding()]
        if self.dot is None:
            return [self._unknown(works)]
        if self.row.library != "cublasLt":  # the rules below are of cuBLASLt's calls
            return [
                self.why(
                    "outside of a kernel",
                    lost=self._most(works),
                    works=", ".join(dict.fromkeys(works)),
                )
            ]
        result, found = self._result, []
        left = list(self._unfused(result.steps))
        main = [step for step in left if step.kind not in ("amax", "move")]
        if main and set(works) - {"amax", "transpose", "pad"}:
            found.append(self._first_cause(main, result))
        if amaxes := [step for step in left if step.kind == "amax"]:
            found.append(self._amax(amaxes[0], main, result.steps))
        elif "amax" in works:
            found.append(self.why("amax in 16 bits" if self.row.amax else "amax of another"))
        found += [self.why("result's layout")] * ("transpose" in works)
        if not found and "pad" in works:
            found.append(self._padding())
        return found or [self._unknown(works)]

    def _unfused(self, steps: list[Step]) -> Iterator[Step]:
        """The steps that the call did not take, in order. Once one stays outside, what follows it
        does too.
        """
        row, blocked = self.row, False
        taken = {
            "bias": "BIAS" in row.epilogue,
            "matrix bias": row.beta != 0,
            "relu": "RELU" in row.epilogue,
            "activation": "GELU" in row.epilogue,
            "alpha": row.alpha != 1,
        }
        to_fp8 = row.out_dtype.startswith("f8") and not self.dot.shape.dtype.startswith("f8")
        spare = [
            letter
            for letter, side in zip("ab", self.sides)
            if side.scale is None and letter in row.scales
        ]
        for step in steps:
            if step.kind == "amax":
                if not row.amax or step.value.shape.dtype.startswith("f8"):
                    yield step
                continue
            if step.kind == "move":
                continue
            if not blocked:
                if (
                    step.kind == "scale"
                    and to_fp8
                    and "d" in row.scales
                    and step.value.shape.dtype not in FP8_MAX
                ):
                    continue
                if spare and (
                    step.kind == "scale" or step.kind == "alpha" and not taken.get("alpha")
                ):
                    spare.pop()
                    continue
                if step.kind in ("clamp", "output") and (
                    to_fp8 or (step.kind == "output" and row.out_dtype == step.at.shape.dtype)
                ):
                    continue
                if taken.pop(step.kind, False):
                    continue
            blocked = True
            yield step

    def _first_cause(self, left: list[Step], result: Result) -> Reason:
        """Why the first of the steps that stayed outside did: the rest stays outside because of it."""
        to_fp8 = [
            n
            for n, step in enumerate(left)
            if step.kind == "output" and step.at.shape.dtype in FP8_MAX
        ]
        kinds = [step.kind for step in left[: to_fp8[0]]] if to_fp8 else ["none"]
        converts = {*kinds} <= {"scale", "alpha", "negate", "clamp", "output"} and kinds[:1] != [
            "output"
        ]
        ahead = result.steps[: result.steps.index(left[to_fp8[0] if converts else 0])]
        noun = "conversion" if converts else _NOUNS.get(left[0].kind, left[0].kind)
        lost = "output" if converts else _LOST.get(left[0].kind, noun)
        moved = next(
            (step.at for step in ahead if step.kind == "move" and is_transpose(step.at)), None
        )
        if moved and not (
            lost == "scale" and "a" in self.row.scales
        ):  # which no call would take as it is
            by_xla = not primitive(op_name(moved)).endswith(("transpose", "reshape")) and any(
                i.opcode.startswith(COLLECTIVES) and depends(i, moved) for i in moved.computation
            )
            rule = (
                "turned first"
                if by_xla
                else "by columns"
                if moved.opcode == "bitcast"
                else "moved first"
            )
            return self.why(rule, step=noun, lost=lost)
        cut = "cut" if converts and not self._odd("MN") else ""
        if how := next(filter(None, (_apart(step, cut) for step in ahead)), ""):
            return self.why(
                "barrier" if how == "barrier" else "joined first", step=noun, lost=lost, how=how
            )
        if converts:
            return self._conversion(left[: to_fp8[0] + 1], result)
        reason = self._cause(left, result)
        rest = list(dict.fromkeys(_NOUNS.get(step.kind, step.kind) for step in left[1:]))
        if not rest:
            return reason
        rest = " and ".join([", ".join(rest[:-1]), rest[-1]] if len(rest) > 1 else rest)
        return dataclasses.replace(
            reason, reason=f"{reason.reason}; what follows, {rest}, stays outside with it"
        )

    def _cause(self, left: list[Step], result: Result) -> Reason:
        first, row = left[0], self.row
        following = left[1].kind if len(left) > 1 else ""
        read_twice = any(value is first.value for value, _ in result.readers) or any(
            s.kind == "amax" and s.value is first.value for s in result.steps
        )
        dtype, to = first.value.shape.dtype, first.at.shape.dtype
        ahead, users = (
            result.steps[: result.steps.index(first)],
            first.value.computation.users[first.value.name],
        )
        match first.kind:
            case "scale" if "scale" in (step.kind for step in ahead):
                return self.why("scales one by one")
            case "scale" | "alpha" | "negate" if following == "activation" and not is_tanh_gelu(
                left[1]
            ):
                return self.why("other activation")
            case "scale" | "alpha" if following in ("relu", "activation"):
                return self.why("activation after scale", step=following)
            case "scale" | "alpha" if following in ("bias", "matrix bias"):
                return self.why("bias after scale")
            case "scale" | "alpha" if row.epilogue != "DEFAULT":
                return self.why("scale after epilogue")
            case "scale" | "alpha" if "scale" in (following, *(step.kind for step in ahead)):
                return self.why("scales one by one")
            case "scale" | "alpha":
                return self.why("scale too many")
            case "vector scale":
                return self.why("vector scale")
            case "relu" | "activation" | "negate" if read_twice:
                return self.why("activation and reader", step=first.kind)
            case "negate" | "activation" if (
                first.kind == "negate"
                or is_tanh_gelu(first)
                and ("negate" in (i.opcode for i in users))
            ):
                return self._negated(left, ahead)
            case "relu":
                return self.why(
                    "relu of codes" if dtype in FP8_MAX and row.epilogue != "GELU" else "late relu"
                )
            case "bias" | "matrix bias" if read_twice:
                return self.why("bias and reader")
            case "activation" | "bias" if (
                first.at.opcode in ("add", "subtract")
                and first.other
                and (first.other.shape.size == 1 and first.value.name in first.at.operands)
            ):
                return self.why(
                    "scalar added" if first.at.opcode == "add" else "subtracted", what="scalar"
                )
            case "activation" if {i.opcode for i in users} == {"compare"}:
                return self.why("compared")
            case "activation" if _of_a_gradient(op_name(first.at)):
                return self.why("derivative")
            case "activation":
                return self.why("other activation")
            case "bias" | "matrix bias" if first.at.opcode == "subtract":
                return self.why(
                    "subtracted", what="matrix" if first.kind == "matrix bias" else "vector"
                )
            case "matrix bias":
                after_epilogue = row.epilogue != "DEFAULT" or row.beta
                return (
                    self.why("matrix after epilogue") if after_epilogue else self._unknown(["bias"])
                )
            case "bias":
                return self._bias(first)
            case "output":
                wider = (
                    f"; or, where only what comes in behind it is {to}, as a bias, pass that in"
                    f" {dtype}"
                )
                return self.why(
                    "another type" if to in ("bf16", "f16", "f32") else "not a float",
                    dtype=dtype,
                    to=to,
                    wider=wider if to == "f32" else "",
                )
            case _:
                return self._clamp(first)

    def _negated(self, left: list[Step], ahead: list[Step]) -> Reason:
        """Why a negation stayed outside, and which scales can have its sign."""
        kinds, to_fp8 = [step.kind for step in left], left[-1].at.shape.dtype in FP8_MAX
        done, to = (
            next((s.kind for s in of if s.kind in ("relu", "activation")), "")
            for of in (ahead, left)
        )
        added, adds = (any("bias" in step.kind for step in of) for of in (ahead, left))
        if done and not to_fp8:
            return self.why("negated last", step=done)
        last = to_fp8 and (done or not to and not adds and (added or "scale" in kinds))
        scales = (
            []
            if last
            else ["an operand's scale (a_scale)", *["what is added in front of it"] * added]
        )
        scales += ["the result's scale (d_scale)"] * bool(
            last or to_fp8 and to and "negate" in kinds[1:]
        )
        return self.why(
            "negated",
            how=f" behind its {done}" * bool(done) or f" before its {to}" * bool(to),
            scales=" and ".join(scales),
            lost="epilogue" if to else "output" if to_fp8 else "scale",
        )

    def _clamp(self, step: Step) -> Reason:
        """Why a clamp that is no part of a conversion to FP8 stayed outside."""
        if (bounds := clamp_bounds(step.at)) and not float(bounds[0]):
            return self.why("bounded relu", bounds=" and ".join(bounds))
        if step.at.opcode == "minimum" and is_zero(step.other):
            return self.why("lower half")
        if step.at.opcode != "clamp":  # bounded on one side, or by arguments
            return self.why("other activation")
        return self.why("clamp alone", to=step.at.shape.dtype)

    def _bias(self, step: Step) -> Reason:
        dtype = self.dot.shape.dtype
        if not along_columns(
            step.at.computation[next(n for n in step.at.operands if n != step.value.name)]
        ):
            return self.why("for each row")
        if len(step.other.shape.dims) > 1:
            return self._biases(step.other)
        bias, fits = step.other.shape.dtype, {"f16": "f16"}.get(dtype, "bf16")
        if bias == "f32":  # XLA looks behind a conversion to float32 only
            bias = look_through(step.other).shape.dtype
        if bias == fits:
            return self.why("late bias")
        rule = "bias of another type" if dtype == "f32" != bias else "bias in f32"
        return self.why(rule, bias=bias, dtype=dtype, fits=fits)

    def _biases(self, vectors: Instruction) -> Reason:
        if self.dot is not None and any(
            s.at.opcode == "bitcast" for s in self._result.steps if s.kind == "move"
        ):
            return self.why("by columns", step="bias", lost="bias")
        return self.why(
            "several biases" if vectors.shape.dims[-1:] == (self.row.n,) else "split columns"
        )

    def _conversion(self, group: list[Step], result: Result) -> Reason:
        """Why scale, clamp and conversion to FP8 stayed outside."""
        to, kinds, base = group[-1].at.shape.dtype, [step.kind for step in group], group[0].value
        best = FP8_MAX[to]
        fields = {
            "to": to,
            "clip": f"jnp.clip(d * d_scale, -{best}, {best}).astype(jnp.{_NUMPY[to]})",
        }
        if "clamp" not in kinds:
            return self.why("no clamp", **fields)
        if wide := [step.at.shape.dtype for step in group[:-1] if step.kind == "output"]:
            return self.why(
                "clamp early", how=f"the result is converted to {wide[0]} on the way", **fields
            )
        if kinds[-2] != "clamp":
            return self.why("clamp early", how="the clamp comes before the scale", **fields)
        bounds = clamp_bounds(group[-2].at)
        if bounds and not float(bounds[0]) and self.row.epilogue in ("DEFAULT", "BIAS"):
            if bounds[1] != best:
                return self._clamp(group[-2])
            return self.why(
                "activation after scale" if kinds[2:] else "relu in clamp",
                step="relu",
                best=best,
                to=to,
            )
        if bounds != [f"-{best}", best]:
            return self.why(
                "clamp bounds",
                bounds=" and ".join(bounds) or "arguments, or one number alone",
                **fields,
            )
        if kinds.count("clamp") > 1:
            return self._clamp(group[kinds.index("clamp")])
        given, read, odd = self.dot.shape.dims, base.shape.dims, self._odd("MN")
        if given != read and not odd:
            return self.why(
                "reshaped first", before=",".join(map(str, given)), after=",".join(map(str, read))
            )
        if kinds.count("scale") + kinds.count("alpha") > 1:
            return self.why("scaled twice")
        if self.row.beta and operand(self.row.instruction, 2).shape.dtype == "f32":
            return self.why("matrix in f32")
        amaxes = [step for step in result.steps if step.kind == "amax"]
        way = [step.value for step in group]
        readers = [i for value, i in result.readers if value in way]
        if "negate" in kinds and not readers:
            return self._negated(group, result.steps[: result.steps.index(group[0])])
        names = ["the function's result" if i.opcode == "tuple" else i.opcode for i in readers]
        if len(amaxes) > 1 or any(step.value is not base for step in amaxes):
            names.append("an amax of another value" if len(amaxes) == 1 else "several maxima")
        if names:
            return self.why(
                "other readers", readers=", ".join(dict.fromkeys(names)), dtype=base.shape.dtype
            )
        if odd:
            return self.why("cut first", sizes=" and ".join(odd))
        return self.why("amax beside it") if amaxes else self._unknown(["output"])

    def _amax(self, step: Step, main: list[Step], steps: list[Step]) -> Reason:
        """Why the call does not compute an amax."""
        if self.dot.shape.dtype in FP8_MAX:
            return self.why("result in FP8", to=self.dot.shape.dtype)
        at = steps.index(step)
        later = [s for s in steps[at:] if s.kind in ("relu", "activation", "bias", "matrix bias")]
        if step.at.shape.size > 1:
            return self.why("amax along")
        if later:
            return self.why("amax before", step=_NOUNS.get(later[0].kind, later[0].kind))
        # A factor that became an operand's scale stands before all that the call computes.
        outside = steps if self.row.out_dtype.startswith("f8") else main
        if any(
            s.kind in ("scale", "alpha", "clamp", "output") and s in outside for s in steps[:at]
        ):
            return self.why("amax scaled")
        way = [operand(step.at, 0)]
        while way[-1].opcode in ("abs", "convert", "bitcast", "reshape", "opt-barrier"):
            way.append(operand(way[-1], 0))
        if any(i.opcode == "opt-barrier" for i in way):
            return self.why("amax behind barrier")
        positive = any(i.opcode == "abs" for i in way) or any(s.kind == "relu" for s in steps[:at])
        converted = next((i for i in way if i.opcode == "convert"), None)
        if converted is not None and converted.shape.dtype != step.value.shape.dtype:
            return self.why("amax converted", to=converted.shape.dtype)
        if reducer(step.at) == "minimum" or not positive:
            return self.why("amax otherwise")
        if not any(s.kind == "output" and s.at.shape.dtype in FP8_MAX for s in steps):
            return self.why("amax without FP8")
        return self.why("amax with it") if main else self._unknown(["amax"])
