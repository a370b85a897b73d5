"""Why a matmul is not one FP8 call, and what to change: XLA's own rules, checked on the program its rewriter saw."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from helpers.aot import resolve
from helpers.gemms import GemmRow, executions, gemm_config, matmuls
from helpers.hlo import Computation, HloModule, Instruction, parse_hlo_module
from helpers.passes import dumped
from helpers.report import GemmReport, Outside, gemms_and_outside, report_gemms
from helpers.targets import Target

_REWRITER = "XLA's gemm_rewriter.cc"
_FAST = {"f8e4m3fn": "448", "f8e5m2": "57344"}
# What XLA's search for FP8 behind an operand of a dot passes: FindF8SubgraphRecursive and MatchFp8Param.
_COMMUTES = frozenset("bitcast broadcast copy dynamic-slice pad reshape select slice transpose".split())
_LAYOUT_ONLY = frozenset("bitcast reshape copy transpose".split())
_ELEMENTWISE = frozenset(
    "tanh exponential exponential-minus-one log log-plus-one logistic erf negate sqrt rsqrt cbrt sine cosine power abs "
    "compare select and or not maximum minimum clamp multiply divide add subtract sign floor ceil convert".split()
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """What one matmul lost, and why. `lost` is "fp8" (it does not run in FP8 at all), or what stayed outside of the FP8
    call: "epilogue" (an activation), "bias", "amax", "output" (a conversion of the result), "scale", "transpose", "pad",
    or "duplicate" (it runs twice). `rule` says whose rule it is: a function of XLA, with the sentence that XLA logs
    under TF_CPP_VMODULE=gemm_rewriter=1 in quotes where it logs one. `source` is the program's line."""

    matmul: str
    lost: str
    reason: str
    mend: str
    rule: str
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.matmul}{where} lost {self.lost}: {self.reason}\n    mend: {self.mend}\n    rule: {self.rule}"


class Reasons(list[Reason]):
    """A list that prints one paragraph a reason."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "Every matmul is FP8, and nothing was left outside."

    def _repr_pretty_(self, printer, cycle) -> None:
        printer.text(str(self))


def why_not_fp8(fn: Callable, *args: Any, target: str | Target = "H100", gemm: str = "cublaslt",
                compiler_options: Mapping[str, Any] | None = None) -> list[Reason]:
    """For every matmul that is not FP8, or whose FP8 call left work to other kernels: the reason and the mend.

    Compiles `fn(*args)` once, as `aot_compile` does (arguments and errors are its), and compares what XLA's rewriter
    was given with what became of it. An empty list: every matmul is FP8, and nothing was left outside. Where no known
    rule explains what is seen, `reason` starts with "unknown".
    """
    compiled, stages, ptx = dumped(fn, *args, pattern="gemm-rewriter", target=target, gemm=gemm,
                                   compiler_options=compiler_options)
    seen = next((s for s in stages if s.before in ("triton-gemm-rewriter", "cublas-gemm-rewriter")), stages[0])
    before, written = parse_hlo_module(seen.text), parse_hlo_module(stages[0].text)
    chip = resolve(target)
    rows = list(gemms_and_outside(parse_hlo_module(compiled), ptx))
    dots = _pair([row for row, _ in rows], before)
    found = Reasons()
    first: dict[tuple, str] = {}
    for (row, outside), dot in zip(rows, dots):
        program = _Program(before, written, row, dot, chip)
        key = _reads(row)
        if row.library in ("cublasLt", "cublas") and key in first:
            found.append(program.twice(first[key]))
        first.setdefault(key, row.name)
        found += [program.not_fp8()] if not row.is_fp8 else program.left_outside(outside)
    return found


def _reads(row: GemmRow) -> tuple:
    """What a call multiplies: two calls that multiply the same are one matmul, run twice."""
    names = []
    for name in row.instruction.operands[:2]:
        i = row.instruction.computation[name]
        while i.opcode in ("bitcast", "copy") and i.operands:
            i = i.computation[i.operands[0]]
        names.append(i.name)
    return row.instruction.computation.name, *names, row.m, row.n, row.k


def _work(row: GemmRow) -> int:
    """M*N*K*batch, each padded to what FP8 calls need: the same before and after XLA pads, or splits K."""
    return row.batch * math.prod(-(-d // 16) * 16 for d in (row.m, row.n, row.k))


def _pair(rows: list[GemmRow], before: HloModule) -> list[Instruction | None]:
    """For each row, the dot it was before XLA rewrote it. Rows that are alike are paired in their order."""
    dots = [d for name in executions(before) for i in before.computations[name] for d in matmuls(i)]
    pairs: list[Instruction | None] = [None] * len(rows)
    left = list(dots)
    alike = (lambda r, d: r.op_name == d.op_name and r.source == d.source and _work(r) == _work(d),
             lambda r, d: r.op_name == d.op_name and r.source == d.source,
             lambda r, d: _work(r) == _work(d))
    for same in alike:
        for n, row in enumerate(rows):
            match = next((d for d in left if pairs[n] is None and same(row, d)), None)
            if match:
                pairs[n] = match.instruction
                left.remove(match)
    for n, row in enumerate(rows):  # what XLA doubled has one dot for two rows
        if pairs[n] is None:
            pairs[n] = next((d.instruction for d in dots if _work(d) == _work(row)), None)
    return pairs


def _bits(dtype: str) -> int:
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8


def _operand(i: Instruction, index: int) -> Instruction:
    return i.computation[i.operands[index]]


def _behind(i: Instruction, skip: Collection[str] = ("bitcast", "reshape", "copy")) -> Instruction:
    while i.opcode in skip and i.operands:
        i = _operand(i, 0)
    return i


def _called(i: Instruction) -> str:
    """How to name a reader to the program's writer."""
    return "the function's result" if i.opcode == "tuple" else i.opcode


class _Users:
    """Who reads each instruction of a computation, in order."""

    def __init__(self, computation: Computation):
        self.of: dict[str, list[Instruction]] = {}
        for i in computation:
            for name in dict.fromkeys(i.operands):
                self.of.setdefault(name, []).append(i)

    def __call__(self, i: Instruction) -> list[Instruction]:
        return self.of.get(i.name, [])


@dataclasses.dataclass(frozen=True)
class _Step:
    """One thing the program does with a dot's result: `kind` is "alpha", "scale", "vector scale", "bias", "matrix bias",
    "relu", "activation", "clamp", "output", "amax", "move" or "other"; `at` does it to `value`; `other` is its second
    operand behind broadcasts and conversions."""

    kind: str
    at: Instruction
    value: Instruction
    other: Instruction | None = None


def _is_amax(i: Instruction, users: _Users) -> Instruction | None:
    """The reduction, where what reads a value only takes its maximum (or minimum) magnitude."""
    while i.opcode in ("abs", "convert", "bitcast", "reshape", "negate", "opt-barrier") and len(users(i)) == 1:
        i = users(i)[0]
    if i.opcode != "reduce" or not i.called:
        return None
    reducer = i.computation.module.computations[i.called[0]].root
    return i if reducer and reducer.opcode in ("maximum", "minimum") else None


def _broadcast_of(i: Instruction) -> Instruction | None:
    """What is broadcast, behind moves and conversions; None where nothing is."""
    i = _behind(i, ("bitcast", "reshape", "copy", "convert"))
    return _operand(i, 0) if i.opcode == "broadcast" else None


def _step(at: Instruction, value: Instruction) -> _Step:
    """What one elementwise instruction does to `value`."""
    others = [o for name, o in ((n, at.computation[n]) for n in at.operands) if name != value.name]
    small = [_broadcast_of(o) for o in others]
    if at.opcode == "convert":
        return _Step("output", at, value)
    if at.opcode == "clamp" or (at.opcode in ("minimum", "maximum") and small and small[0] is not None
                                and small[0].opcode == "constant"):
        zero = at.opcode == "maximum" and re.fullmatch(r"-?0(\.0*)?", small[0].literal or "")
        return _Step("relu" if zero else "clamp", at, value)
    if len(others) == 1 and at.opcode in ("multiply", "divide", "add", "subtract"):
        scaling = at.opcode in ("multiply", "divide")
        if at.opcode == "divide" and at.operands[0] != value.name:
            return _Step("activation", at, value)
        if small[0] is None:
            return _Step("other" if scaling else "matrix bias", at, value, others[0])
        constant = small[0].opcode == "constant" and small[0].shape.size == 1
        if scaling:
            kind = "scale" if small[0].shape.size == 1 else "vector scale"
            return _Step("alpha" if constant else kind, at, value, small[0])
        return _Step("activation" if constant else "bias", at, value, small[0])
    if at.opcode in _ELEMENTWISE and all(o is not None for o in small):
        return _Step("activation", at, value)
    return _Step("other", at, value)


def _region(value: Instruction, users: _Users) -> Instruction | None:
    """Where the elementwise instructions that read `value` come together again: the end of an activation that is written
    with several of them. None where they do not, or where another matrix comes in."""
    inside, open_edges, last = {value.name}, len(users(value)), value
    for i in value.computation.instructions[value.index + 1:]:
        read = [name for name in dict.fromkeys(i.operands) if name in inside]
        if not read:
            continue
        if i.opcode not in _ELEMENTWISE | _LAYOUT_ONLY:
            return None
        for name in i.operands:
            if name not in inside and _broadcast_of(value.computation[name]) is None and (
                    value.computation[name].shape.size > 1):
                return None
        inside.add(i.name)
        open_edges += len(users(i)) - len(read)
        last = i
        if open_edges == len(users(i)):
            return last
    return None


def _steps(dot: Instruction, users: _Users) -> tuple[list[_Step], list[Instruction]]:
    """What the program does with a dot's result, in order, up to where it is no longer only this result; and who reads
    the values on the way besides."""
    steps, readers, value = [], [], dot
    while True:
        follow = []
        for user in users(value):
            amax = _is_amax(user, users)
            if amax:
                steps.append(_Step("amax", amax, value))
            else:
                follow.append(user)
        if not follow:
            return steps, readers
        if len(follow) == 1 and len(set(follow[0].operands)) == len(follow[0].operands):
            at = follow[0]
            if at.opcode in _LAYOUT_ONLY | {"slice"}:
                steps += [_Step("move", at, value)] if at.opcode not in ("bitcast", "reshape") else []
                value = at
                continue
            step = _step(at, value)
            if step.kind == "other":
                return steps, readers
            end = at
            if step.kind == "activation" and (end := _end_of_activation(at, users)) is not at:
                step = dataclasses.replace(step, at=end)
            steps.append(step)
            value = end
            continue
        end = _region(value, users) if len(follow) > 1 or len(set(follow[0].operands)) < len(follow[0].operands) else None
        if end is None:
            # A conversion to FP8 is what a call could have written, whoever else reads the value.
            readers += follow
            best = next((u for u in follow if u.opcode in _ELEMENTWISE and _step(u, value).kind != "other"), None)
            if best is None:
                return steps, readers
            readers.remove(best)
            step = _step(best, value)
            steps.append(step)
            value = best
            continue
        steps.append(_Step("activation", end, value))
        value = end


def _end_of_activation(i: Instruction, users: _Users) -> Instruction:
    """The last of the steps that belong to one activation: unary functions and constants after it."""
    while len(users(i)) == 1:
        after = users(i)[0]
        if after.opcode not in _ELEMENTWISE or _step(after, i).kind not in ("activation",):
            break
        i = after
    return i


class _Program:
    """One matmul in the program that XLA's rewriter saw (`before`), and in the one that came out (`row`)."""

    def __init__(self, before: HloModule, written: HloModule, row: GemmRow, dot: Instruction | None, chip: Target):
        self.before, self.written, self.row, self.dot, self.chip = before, written, row, dot, chip
        self.name = f"{row.name} [{row.m} x {row.n} x {row.k}]"
        self.source = next((r.source for r in (matmuls(dot) if dot else ())), "") or row.source

    def _reason(self, lost: str, reason: str, mend: str, rule: str) -> Reason:
        return Reason(self.name, lost, reason, mend, rule, self.source)

    def twice(self, other: str) -> Reason:
        return self._reason(
            "duplicate", f"the same matrices are multiplied twice, here and in {other}: one result is read in two forms",
            "derive both from one form: take the amax of the unscaled float32 result and multiply the number by the scale",
            f"{_REWRITER}, HandleMultiply and HandleConvert: each rewrites its own copy of the call")

    # Why it is not FP8 -------------------------------------------------------------------------------------------------

    def not_fp8(self) -> Reason:
        row, chip = self.row, self.chip
        lost = lambda *texts: self._reason("fp8", *texts)
        if chip.compute_capability < (8, 9):
            version = ".".join(map(str, chip.compute_capability))
            return lost(f"{chip.name} has compute capability {version}, and FP8 tensor cores begin at 8.9",
                        "compile for Ada, Hopper or later, such as target='H100'",
                        f"{_REWRITER}, CreateF8CustomCall: \"FP8 Custom Calls require Ada, Hopper, or later architectures.\"")
        if self.dot is None:
            return self._spelled_out()
        if self.dot.opcode == "scaled-dot" or any(
                i.opcode == "custom-call" and i.custom_call_target == "__op$block_scaled_dot" and i.metadata
                and row.op_name.endswith(i.metadata.op_name or "-") for i in self.written):
            return lost(f"{chip.name} has no block-scaled matmul, and XLA writes one with {row.library} in {row.math_dtype}",
                        "compile for B200 or later, or use one scalar scale for each operand",
                        "XLA's block_scaling_rewriter.cc: cuDNN from compute capability 10.0 on")
        sides = [_Operand(_operand(self.dot, n), name) for n, name in enumerate(("left", "right"))]
        never = [side for side in sides if side.fp8 is None]
        if never:
            return self._never(never, sides)
        if row.library == "triton":
            return self._triton()
        for side in sides:
            if side.problem:
                return lost(*side.problem)
        types = [side.fp8.shape.dtype for side in sides]
        if types == ["f8e5m2"] * 2:
            return lost("both operands are E5M2, and cuBLASLt has no kernel for that",
                        "convert one of them to E4M3: E5M2 is for gradients, and a gradient meets activations or weights",
                        f"{_REWRITER}, " + ("TypesAreSupportedByCublasLt" if sides[0].dtype == "f8e5m2" else
                        "CreateF8CustomCall: \"The element type of one of the operands must be F8E4M3FN.\""))
        if bad := [t for t in types if t not in _FAST]:
            return lost(f"{bad[0]} is not a type that cuBLASLt multiplies on NVIDIA GPUs",
                        "store the operand as float8_e4m3fn, or float8_e5m2 for one of the two",
                        f"{_REWRITER}, CreateF8CustomCall: \"The input types must be F8E5M2 or F8E4M3FN\"")
        if (out := self.dot.shape.dtype) not in ("bf16", "f16", "f32", *_FAST):
            return lost(f"the dot's result is {out}", "ask for float32, bfloat16 or float16 as preferred_element_type",
                        f"{_REWRITER}, CreateF8CustomCall: \"Output type must be F8E4M3FN, F8E5M2, BF16, F16 or F32\"")
        if row.library == "kernel" and row.m * row.n * row.k <= 1000:
            return lost("the matmul is too small for XLA to call a library for it",
                        "compile with compiler_options={'xla_gpu_gemm_rewrite_size_threshold': 0}",
                        "XLA's matmul_utils.cc, IsMatrixMultiplicationTooSmallForRewriting")
        if row.algorithm or (row.precision != "DEFAULT" and row.library == "kernel"):
            return lost(f"the dot asks for precision {row.algorithm or row.precision}, which cuBLASLt does not take",
                        "leave out the precision argument of the dot",
                        f"{_REWRITER}, GemmIsSupportedByCublasLt")
        facts = f"operands {types[0]} and {types[1]}, result {self.dot.shape.dtype}, run by {row.library} in {row.math_dtype}"
        return lost(f"unknown: no rule known here keeps it from FP8 ({facts})",
                    "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and read XLA's log",
                    "none found")

    def _spelled_out(self) -> Reason:
        thin = [name for name, size in (("M", self.row.m), ("N", self.row.n), ("K", self.row.k)) if size == 1]
        if self.row.library == "kernel" and thin:
            wide = {"M": "give the left operand 16 rows", "N": "give the right operand 16 columns",
                    "K": "give K 16 elements"}[thin[0]]
            return self._reason(
                "fp8", f"{' and '.join(thin)} is 1, and XLA writes such a product as multiplications and a sum",
                f"{wide} (pad with zeros, slice the result): then it is a matmul",
                "XLA's dot_strength_reduction.cc and gemv_rewriter.cc")
        return self._reason(
            "fp8", f"unknown: no dot of the program before XLA's rewriter is this one (it runs by {self.row.library} in "
            f"{self.row.math_dtype}, op_name {self.row.op_name!r})",
            "look at the passes before it: print(helpers.passes.passes(fn, *args))", "none found")

    def _never(self, never: list["_Operand"], sides: list["_Operand"]) -> Reason:
        both, one = len(never) == len(sides), never[0]
        if one.blocked is not None:
            opcode, fp8 = one.blocked.opcode, one.far
            if opcode == "concatenate" and not any(i.opcode == "concatenate" for i in self.written):
                return self._reason(
                    "fp8", f"XLA merged dots that share an operand, and joined their {one.name} operands after dequantizing",
                    "compile with compiler_options={'xla_gpu_dot_merger_threshold_mb': 0}, or store the weights joined",
                    f"XLA's dot_merger.cc; {_REWRITER}, FindF8SubgraphRecursive does not look behind a concatenate")
            if opcode == "while":
                return self._reason(
                    "fp8", f"the {one.name} operand is dequantized before the loop, and comes into it as {one.dtype}",
                    "dequantize in the loop's body",
                    f"{_REWRITER}, FindF8SubgraphRecursive does not look outside of the loop's body")
            if opcode.startswith(("all-", "collective", "reduce-scatter")):
                return self._reason(
                    "fp8", f"the {one.name} operand is dequantized, then gathered over devices in {one.dtype} ({opcode})",
                    "replicate the quantized array with jax.lax.with_sharding_constraint before dequantizing it",
                    f"{_REWRITER}, FindF8SubgraphRecursive does not look behind a collective")
            return self._reason(
                "fp8", f"an operation stands between the {one.name} operand's dequantization and the dot: {opcode}",
                f"do it before quantizing, or to the dot's result; only {', '.join(sorted(_COMMUTES))} may stand there",
                f"{_REWRITER}, FindF8SubgraphRecursive: it looks behind operations of one operand, multiply, divide, "
                "select, pad and dynamic-slice only")
        what = f"both operands are {one.dtype}" if both and sides[0].dtype == sides[1].dtype else (
            "neither operand is" if both else f"the {one.name} operand is {one.dtype}, not")
        what += " in the program: nothing was quantized" if both and "both" in what else " FP8 in the program"
        return self._reason(
            "fp8", what, "quantize " + ("both operands" if both else f"the {one.name} operand") +
            " to float8_e4m3fn with a scalar scale, and dequantize in front of the dot",
            f"{_REWRITER}, MatchFp8Param: an FP8 array, converted, optionally times a scalar")

    def _triton(self) -> Reason:
        row = self.row
        if matmuls(row.instruction)[0].is_fp8:
            return self._reason(
                "fp8", f"the dot is of FP8 arrays, but with a tile of {row.tile} the kernel multiplies in {row.math_dtype}",
                "use gemm='cublaslt', or force a tile of whole FP8 instructions: compiler_options={'xla_gpu_override_gemm"
                "_autotuner': 'block_m: 128 block_n: 128 block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3'}",
                "the kernel's PTX: its mma instruction")
        return self._reason(
            "fp8", f"Triton multiplies what the dot multiplies, and the operands are dequantized to {row.math_dtype} first",
            "multiply the FP8 arrays and scale the result: jax.lax.dot(a, b, preferred_element_type=jnp.float32) * "
            "(a_scale * b_scale); or use gemm='cublaslt'",
            "XLA's Triton emitter keeps the dot's operand types; only the cuBLASLt rewriter moves a dequantization past it")

    # What stayed outside an FP8 call -----------------------------------------------------------------------------------

    def left_outside(self, outside: list[Outside]) -> list[Reason]:
        call, found = self.row.instruction, []
        ways = {o.instruction.name for o in outside}
        after = [o for o in outside if self._reads_result(o.instruction, ways)]
        before = [o for o in outside if o not in after]
        for kernel in before:
            found += [self._on_an_operand(kernel, work) for work in kernel.work]
        if after:
            found += self._after(after)
        return list(dict.fromkeys(found)) if call is not None else found

    def _reads_result(self, i: Instruction, ways: Collection[str]) -> bool:
        todo, seen = [i], set()
        while todo:
            i = todo.pop()
            if i.name == self.row.name:
                return True
            if i.name not in seen:
                seen.add(i.name)
                todo += [o for o in (i.computation[name] for name in i.operands)
                         if o.name in ways or o.name == self.row.name or o.opcode in ("bitcast", "get-tuple-element")]
        return False

    def _side(self, kernel: Instruction) -> tuple[str, Instruction]:
        """Which operand of the call a kernel makes, and the operand."""
        for n, name in enumerate(self.row.instruction.operands):
            i, seen = self.row.instruction.computation[name], 0
            while i.name != kernel.name and i.operands and seen < 20 and i.opcode != "parameter":
                i, seen = _operand(i, 0), seen + 1
            if i.name == kernel.name:
                return ("left", "right", "further")[min(n, 2)], self.row.instruction.computation[name]
        return "further", kernel

    def _on_an_operand(self, kernel: Outside, work: str) -> Reason:
        side, _ = self._side(kernel.instruction)
        shape = kernel.instruction.shape
        if work == "transpose":
            return self._reason(
                "transpose", f"the {side} operand's contracting dimension is not its last in memory, which FP8 calls on "
                f"{self.chip.name} need: a kernel transposes it to {shape.dtype}[{','.join(map(str, shape.dims))}]",
                f"store the {side} operand with K last ({'[M, K]' if side == 'left' else '[N, K]'}) and contract that "
                "dimension of it", f"{_REWRITER}, CreateF8CustomCall: A row-major and B column-major before Blackwell")
        if work == "pad":
            sizes = {} if self.dot is None else dict(zip("MNK", (matmuls(self.dot)[0].m, matmuls(self.dot)[0].n,
                                                                matmuls(self.dot)[0].k)))
            odd = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size % 16)
            if not odd:
                return self._reason("pad", "the program itself pads an operand, or slices the result",
                                    "keep the padded shape, or leave this kernel", "none: no call pads or slices")
            return self._reason(
                "pad", f"{odd} is not a multiple of 16, so kernels pad the operands",
                "choose, or pad once in advance to, dimensions that are multiples of 16",
                f"{_REWRITER}, PadOperandToMultipleOf16")
        if work == "scale":
            return self._scale_of_operand(kernel.instruction)
        if work == "bias":
            return self._reason(
                "bias", "the bias, or the matrix that is added, is converted or scaled by a kernel before the call reads it",
                "pass it in the type of the dequantization (a vector: bfloat16, or float16 under float16), as it is, and "
                "without a factor", f"{_REWRITER}, FuseVectorBiasAdd and FuseMatrixBiasAdd take what is added as it is")
        return self._reason(
            work, f"unknown: a kernel makes the {side} operand ({kernel.instruction.name}, {'+'.join(kernel.work)})",
            "look at the program: helpers.print_hlo_module(helpers.aot_compile(fn, *args), metadata=True)", "none found")

    def _scale_of_operand(self, kernel: Instruction) -> Reason:
        inside = {j.opcode for c in kernel.called for j in self.row.instruction.computation.module.computations[c]}
        inside |= {kernel.opcode}
        if "divide" in inside:
            return self._reason(
                "scale", "the program divides by a scale, and the call multiplies: a kernel computes the reciprocal",
                "pass the reciprocal as an argument, and multiply by it",
                f"{_REWRITER}, CreateF8CustomCall and InvertAndConvertScalar")
        if "multiply" in inside:
            return self._reason(
                "scale", "a scale of the call is a product of scalars, which a kernel computes",
                "dequantize each operand with its own scale, or pass the product as an argument",
                f"{_REWRITER}, F8ScaleD: one scalar of the program becomes one scale of the call")
        if "convert" in inside:
            return self._reason(
                "scale", "a scale is not float32, and a kernel converts it",
                "pass scales as float32; convert them to the dequantization's type in the program, not before",
                f"{_REWRITER}, CreateF8CustomCall and InvertAndConvertScalar: scales are float32")
        return self._reason(
            "scale", f"a scale is computed in the program ({', '.join(sorted(inside - {'parameter', 'fusion'}))})",
            "pass the scale as an argument", f"{_REWRITER}, CreateF8CustomCall")

    def _after(self, after: list[Outside]) -> list[Reason]:
        works = [w for o in after for w in o.work]
        found = []
        for move in ("pad", "transpose"):
            if all(o.work == (move,) for o in after):
                if move == "pad":
                    return [self._on_an_operand(after[0], "pad")]
                return [self._reason(
                    "transpose", "the result is written, then transposed by a kernel",
                    "write the matmul so that its result is the layout that is read (exchange the operands), or let the "
                    "reader take it as it is", f"{_REWRITER} writes the dot's own layout")]
        if self.dot is None:
            return [self._unknown_after(works)]
        steps, readers = _steps(self.dot, _Users(self.dot.computation))
        left = list(self._unfused(steps))
        main = [s for s in left if s.kind not in ("amax", "move")]
        if main and set(works) - {"amax"}:
            found.append(self._first_cause(main, steps, readers))
        if amaxes := [s for s in left if s.kind == "amax"]:
            found.append(self._amax(amaxes[0], main, steps))
        elif self.row.amax and "amax" in works:
            found.append(self._reason(
                "amax", "the call returns the amax in float32, and a kernel converts it to the dequantization's type",
                "convert to float32 after taking the maximum, or dequantize in float32",
                f"{_REWRITER}, F8AddDAmax: the call's amax is float32"))
        if not found and "pad" in works:
            found.append(self._on_an_operand(after[0], "pad"))
        return found or [self._unknown_after(works)]

    def _unknown_after(self, works: list[str]) -> Reason:
        lost = next((w for w in ("output", "epilogue", "bias", "scale", "amax", "transpose", "pad") if w in works), "output")
        return self._reason(
            lost, f"unknown: kernels after the call do {', '.join(dict.fromkeys(works))}, and no rule known here says why "
            f"(the call: epilogue {self.row.epilogue}, result {self.row.out_dtype})",
            "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and read XLA's log",
            "none found")

    def _unfused(self, steps: list[_Step]) -> Iterator[_Step]:
        """The steps that the call did not take, in order. Once one stays outside, what follows it does too."""
        row, blocked = self.row, False
        taken = {"bias": "BIAS" in row.epilogue, "matrix bias": row.beta != 0, "relu": "RELU" in row.epilogue,
                 "activation": "GELU" in row.epilogue, "alpha": row.alpha != 1, "amax": row.amax}
        to_fp8 = row.out_dtype.startswith("f8") and not self.dot.shape.dtype.startswith("f8")
        operands = [_Operand(_operand(self.dot, n), "") for n in (0, 1)]
        spare = [letter for letter, side in zip("ab", operands) if side.scale is None and letter in row.scales]
        for step in steps:
            if step.kind == "amax":
                if not taken["amax"]:
                    yield step
                continue
            if step.kind == "move":
                continue
            if not blocked and step.kind == "scale":
                if to_fp8 and "d" in row.scales:
                    continue
                if spare:
                    spare.pop()
                    continue
            elif not blocked and step.kind in ("clamp", "output"):
                if to_fp8 or (step.kind == "output" and row.out_dtype == step.at.shape.dtype):
                    continue
            elif not blocked and taken.get(step.kind):
                taken[step.kind] = False
                continue
            blocked = True
            yield step

    def _first_cause(self, left: list[_Step], steps: list[_Step], readers: list[Instruction]) -> Reason:
        """Why the first of the steps that stayed outside did: the rest stays outside because of it."""
        kinds = [s.kind for s in left]
        behind = ""
        first = left[0]
        if first.kind in ("scale", "alpha", "clamp", "output"):
            to_fp8 = next((s for s in left if s.kind == "output" and s.at.shape.dtype in _FAST), None)
            if to_fp8 is not None and set(kinds[:left.index(to_fp8)]) <= {"scale", "alpha", "clamp"}:
                return self._conversion(left[:left.index(to_fp8) + 1], steps, readers)
        if len(left) > 1:
            names = {"output": "conversion", "clamp": "clamp", "alpha": "factor", "vector scale": "scale"}
            behind = "; with it stays " + " and ".join(dict.fromkeys(names.get(k, k) for k in kinds[1:]))
        lost, *texts = self._cause(first, left, steps, readers)
        return self._reason(lost, texts[0] + behind, *texts[1:])

    def _cause(self, first: _Step, left: list[_Step], steps: list[_Step], readers: list[Instruction]) -> tuple:
        row, kind = self.row, first.kind
        following = left[1].kind if len(left) > 1 else ""
        read_twice = bool(readers) or any(s.kind == "amax" and s.value is first.value for s in steps)
        if kind in ("scale", "alpha"):
            if following in ("relu", "activation"):
                return ("epilogue", f"the {'relu' if following == 'relu' else 'activation'} is applied to a scaled result, and "
                        "the call applies it before it scales",
                        "apply it to the dot's result and scale after: relu(x) * s is relu(x * s) for s > 0",
                        f"{_REWRITER}, HandleMaximum and HandleMultiply: the activation must read the call itself")
            if following in ("bias", "matrix bias"):
                return ("bias", "what is added is added to a scaled result, and the call adds it before it scales",
                        "scale the operands, or add to the dot's result", f"{_REWRITER}, HandleAdd")
            return ("scale", "the result is scaled once more, and the call's scales are taken or do not fit there "
                    f"(epilogue {row.epilogue}, scales {' '.join(row.scales) or 'none'}, result {row.out_dtype})",
                    "multiply the factor into one operand's scale outside of the program",
                    f"{_REWRITER}, F8ScaleD: a factor of a result that is not FP8 becomes an operand's scale if that is free")
        if kind == "vector scale":
            return ("scale", "a scale for each row or column of the result is an operation of its own: the call's scales are "
                    "scalars", "use one scale for the whole tensor, or leave this kernel: it costs one pass over the result",
                    f"{_REWRITER}, F8ScaleD and F8ConvertD: ShapeUtil::IsScalar")
        if kind == "relu":
            return self._activation("relu", read_twice)
        if kind == "activation":
            return self._activation("activation", read_twice)
        if kind in ("bias", "matrix bias"):
            return self._bias(first, read_twice)
        source, to = first.value.shape.dtype, first.at.shape.dtype
        if kind == "output" and to not in ("bf16", "f16", "f32"):
            return ("output", f"the dot's result is {source}, and converted to {to}, which no FP8 call writes",
                    "leave this kernel, or convert to a floating-point type", f"{_REWRITER}, HandleConvert")
        if kind == "output":
            return ("output", f"the dot's result is {source}, which the call writes, and it is then converted to {to}",
                    f"dequantize in {_numpy(to)}: the call writes the type of the dot",
                    f"{_REWRITER}, HandleConvert: only conversions to FP8 are taken into the call")
        return ("epilogue", f"the result is clamped, and not converted to FP8 right after it (it is {to})",
                "convert to an FP8 type right after the clamp, or leave the clamp out",
                f"{_REWRITER}, HandleConvert takes convert(clamp(result)) only")

    def _activation(self, kind: str, read_twice: bool) -> tuple:
        if read_twice:
            return ("epilogue", f"the dot's result is read by the {kind} and by something else as well",
                    "let everything read the activation's result (an amax too), or put an optimization_barrier between",
                    f"{_REWRITER}, FuseReluActivation and FuseGeluActivation: the activation must be the only reader")
        if kind == "relu":
            return ("epilogue", f"relu stands where the call cannot take it (its epilogue is {self.row.epilogue})",
                    "apply relu to the dot's result, or to the result plus a bias vector, directly",
                    f"{_REWRITER}, FuseReluActivation: epilogue DEFAULT or BIAS")
        return ("epilogue", "cuBLASLt's epilogues are relu and gelu in its tanh form; this activation is another",
                "use jax.nn.relu or jax.nn.gelu(approximate=True), or leave this kernel",
                f"{_REWRITER}, HandleMaximum and HandleMultiply match relu and tanh-gelu only")

    def _bias(self, first: _Step, read_twice: bool) -> tuple:
        row, out = self.row, self.dot.shape.dtype
        if read_twice:
            return ("bias", "the dot's result is read by the addition and by something else as well",
                    "read the sum instead: a call has one result", f"{_REWRITER}, HandleAdd: WithOneUser")
        if first.kind == "matrix bias":
            if row.epilogue != "DEFAULT" or row.beta:
                return ("bias", f"a matrix is added after another epilogue (here {row.epilogue}, beta {row.beta:g})",
                        "add the matrix to the dot's result, before bias vectors' activation",
                        f"{_REWRITER}, FuseMatrixBiasAdd: epilogue DEFAULT or BIAS, and beta 0")
            return ("bias", f"the matrix that is added is not one the call takes under a {out} result",
                    "pass it in the type of the dequantization, as it is",
                    f"{_REWRITER}, FuseMatrixBiasAdd")
        added = _behind(first.at.computation[next(n for n in first.at.operands if n != first.value.name)],
                        ("bitcast", "reshape", "copy", "convert"))
        if first.at.opcode == "subtract":
            return ("bias", "a vector is subtracted, and XLA takes only additions into the call",
                    "pass the vector negated, and add it", f"{_REWRITER}, HandleAdd")
        dims = re.findall(r"\d+", added.attributes.get("dimensions", "")) if added.opcode == "broadcast" else []
        if first.other.shape.size == 1:
            return ("bias", "a scalar is added to every element, and the call's bias is a vector",
                    "pass it as a bfloat16 vector with one element for each column",
                    f"{_REWRITER}, FuseVectorBiasAdd: the bias has as many dimensions as the columns")
        last = str(len(first.at.shape.dims) - 1)
        if dims and last not in dims:
            return ("bias", "the vector that is added has one element for each row, and the call's bias one for each column",
                    "compute the transposed product (exchange the operands), where it is a bias for each column",
                    f"{_REWRITER}, FuseVectorBiasAdd: the bias runs along the minor dimension")
        dtype = _behind(first.other, ("bitcast", "reshape", "copy", "convert")).shape.dtype
        fits = {"f32": "bfloat16", "bf16": "bfloat16", "f16": "float16"}.get(out, "bfloat16")
        if dtype != {"bfloat16": "bf16", "float16": "f16"}[fits]:
            return ("bias", f"the bias vector is {dtype}, which FP8 calls do not take with a {out} dot",
                    f"pass it as {fits}, and convert it in the program to add it",
                    f"{_REWRITER}, FuseVectorBiasAdd" + (": \"Epilogue fusion of FP32 vector bias into FP8 GEMM is currently not "
                    "supported.\"" if out == "f32" != dtype else ": a float32 bias must be a conversion"))
        return ("bias", f"the addition stands where the call cannot take it (its epilogue is {row.epilogue}, beta {row.beta:g})",
                "add the bias to the dot's result directly, before activation and scale; a matrix or a vector, not both",
                f"{_REWRITER}, FuseVectorBiasAdd: epilogue DEFAULT, one reader, no matrix added")

    def _conversion(self, group: list[_Step], steps: list[_Step], readers: list[Instruction]) -> Reason:
        """Why scale, clamp and conversion to FP8 stayed outside."""
        to, kinds = group[-1].at.shape.dtype, [s.kind for s in group]
        rule = f"{_REWRITER}, F8ConvertD and HandleConvert: convert(clamp(result * scale))"
        best, lost = _FAST[to], lambda *texts: self._reason("output", *texts)
        clip = f"jnp.clip(d * d_scale, -{best}, {best}).astype({_numpy(to)})"
        if "clamp" not in kinds:
            return lost(f"the result is converted to {to} without a clamp", f"clamp to the format's range: {clip}", rule)
        if group[-2].kind != "clamp":
            return lost("the clamp comes before the scale, not between scale and conversion", f"clamp last: {clip}", rule)
        bounds = _bounds(group[-2].at)
        if bounds != [f"-{best}", best]:
            return lost(f"the clamp's bounds are {' and '.join(bounds) or 'not constants'}, not exactly the range of {to}",
                        f"clamp to plus and minus jnp.finfo({_numpy(to)}).max: {clip}", rule)
        if kinds.count("scale") + kinds.count("alpha") > 1:
            return lost("the result is scaled twice before the conversion", "multiply the two scales outside the program", rule)
        if self.row.beta and (c := self.row.instruction.computation[self.row.instruction.operands[2]]).shape.dtype == "f32":
            return lost("the matrix that is added is float32, and FP8 results need it in 16 bits",
                        f"dequantize in bfloat16 and add the matrix in bfloat16 ({c.name} is {c.shape.dtype})",
                        f"{_REWRITER}, F8ConvertD: \"conflicts with the existing fusion of the addition of a matrix bias with "
                        "element type other than BF16 or F16\"")
        base = group[0].value
        taken = [s for s in steps if s.kind == "amax"]
        if readers or len(taken) > 1 or any(s.value is not base for s in taken):
            names = ", ".join(dict.fromkeys(_called(r) for r in readers)) or "an amax of another value"
            return lost(f"the unconverted result is read elsewhere too ({names}): it has to be written as {base.shape.dtype}",
                        "read the converted result there, or keep the two apart with jax.lax.optimization_barrier",
                        f"{_REWRITER}, F8ConvertD: the only other reader may be one amax")
        if taken:
            return lost("the amax beside it is not one the call computes, and so both read an unconverted result",
                        "take jnp.max(jnp.abs(d)) of the dot's result after its activation, of all elements",
                        f"{_REWRITER}, F8ConvertD: the only other reader may be one amax")
        return self._unknown_after(["output"])

    def _amax(self, step: _Step, main: list[_Step], steps: list[_Step]) -> Reason:
        lost = lambda *texts: self._reason("amax", *texts)
        rule = f"{_REWRITER}, F8ConvertD: reduce(max, abs(result)), read beside the conversion to FP8"
        fused = [s for s in steps if s.kind != "amax" and s not in main]
        later = [s for s in steps[steps.index(step):] if s.kind in ("relu", "activation", "bias", "matrix bias")]
        dims = step.at.shape.size
        if dims > 1:
            return lost("the maximum is taken along some dimensions, and the call's amax is of all elements",
                        "take the amax of the whole tensor: one scale for it", rule)
        if any(s in fused or s in main for s in later):
            return lost(f"the amax is of the value before the {later[0].kind}; the call's is of what it writes",
                        f"take the amax after the {later[0].kind}", rule)
        if any(s.kind in ("scale", "alpha", "clamp", "output") for s in steps[:steps.index(step)]):
            return lost("the amax is of the scaled or clamped result, and the call's is of the result before its scale",
                        "take jnp.max(jnp.abs(d)) before multiplying by the scale", rule)
        source = _operand(step.at, 0)
        while source.opcode in ("abs", "convert", "bitcast", "reshape") or source.opcode == "opt-barrier":
            if source.opcode == "opt-barrier":
                return lost("an optimization_barrier stands between the result and its amax",
                            "scale with an amax of an earlier step, and leave the barrier out; where the amax scales the "
                            "very result it is taken of, it must stay outside", rule)
            source = _operand(source, 0)
        reducer = step.at.computation.module.computations[step.at.called[0]].root.opcode
        source = _operand(step.at, 0)
        if reducer == "minimum" or _behind(source, ("bitcast", "reshape", "copy", "convert")).opcode != "abs":
            return lost("the maximum is not written as one of absolute values", "write jnp.max(jnp.abs(d))", rule)
        if not any(s.kind == "output" and s.at.shape.dtype in _FAST for s in steps):
            return lost("the result is not converted to FP8, and the call has an amax only with an FP8 result",
                        "clamp and convert the result to FP8, or leave this kernel",
                        f"{_REWRITER}: the amax is taken into the call in F8ConvertD, with the conversion")
        if main:
            return lost("the conversion to FP8 stayed outside, and the amax with it", "mend the conversion first", rule)
        return self._unknown_after(["amax"])


def _numpy(dtype: str) -> str:
    names = {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    return f"jnp.{names.get(dtype, dtype)}"


def _bounds(clamp: Instruction) -> list[str]:
    """Lower and upper bound of a clamp between constants."""
    if clamp.opcode != "clamp":
        return []
    ends = [_broadcast_of(_operand(clamp, n)) or _operand(clamp, n) for n in (0, 2)]
    return [e.literal or "" for e in ends if e.opcode == "constant"]


class _Operand:
    """An operand of a dot: the FP8 array XLA finds behind it, if any, the scale, and the rule that it breaks.

    XLA's FindF8SubgraphRecursive and MatchFp8Param (gemm_rewriter.cc), step by step. Where they find nothing, `far` is
    an FP8 array further back and `blocked` the operation at which XLA stopped looking.
    """

    def __init__(self, i: Instruction, name: str):
        self.name, self.dtype = name, i.shape.dtype
        self.fp8 = self.scale = self.blocked = self.far = self.problem = None
        path = self._path(i, set())
        if path is None:
            self.far, self.blocked = _search(i)
            return
        self.fp8 = path[0]
        if len(path) > 1:
            self._match(path)

    def _path(self, i: Instruction, seen: set[str]) -> list[Instruction] | None:
        trail = []
        while i.name not in seen:
            seen.add(i.name)
            if i.shape.dtype.startswith("f8"):
                return [i, *reversed(trail)]
            trail.append(i)
            if i.opcode in ("multiply", "select"):
                for operand in i.operands[i.opcode == "select":][:2]:
                    if found := self._path(i.computation[operand], seen):
                        return [*found, *reversed(trail)]
                return None
            if len(i.operands) != 1 and i.opcode not in ("divide", "dynamic-slice", "pad"):
                return None
            i = _operand(i, 0)
        return None

    def _match(self, path: list[Instruction]) -> None:
        which = f"the {self.name} operand"
        logged = f"{_REWRITER}, MatchFp8Param: \"not rewritten into FP8 Custom Call\""
        start = 2
        if len(path) > 2 and path[2].opcode in ("multiply", "divide"):
            other = next((n for n in path[2].operands if n != path[1].name), path[2].operands[-1])
            factor = path[2].computation[other]
            if factor.opcode == "broadcast":
                self.scale, start = _operand(factor, 0), 3
                if self.scale.shape.size > 1 or self.scale.shape.dims:
                    dims = ",".join(map(str, self.scale.shape.dims))
                    self.problem = (
                        f"{which} is dequantized with the scales {self.scale.shape.dtype}[{dims}], and the call takes one "
                        "scalar", "dequantize with a scalar; scales along M or N, not K, can multiply the result instead "
                        "(one more kernel, and the matmul is FP8)",
                        f"{_REWRITER}, CreateF8CustomCall: \"The scaling factors must be scalars.\"")
                    return
        for step, before in zip(path[start:], path[start - 1:]):
            keeps = step.opcode != "bitcast" or step.shape.dtype == before.shape.dtype
            if step.opcode not in _COMMUTES or not keeps:
                what = {"convert": f"converted again, to {step.shape.dtype}", "multiply": "multiplied once more",
                        "divide": "divided once more"}.get(step.opcode, f"changed by {step.opcode}")
                mend = {"convert": f"dequantize in {_numpy(step.shape.dtype)} at once"}.get(
                    step.opcode, "do this before quantizing, or to the dot's result")
                self.problem = (f"{which} is {what} between its dequantization and the dot", mend, logged)
                return
            if step.opcode == "select":
                others = [step.computation[n] for n in step.operands[1:] if n != before.name]
                zero = others and (_broadcast_of(others[0]) or others[0])
                if not zero or zero.opcode != "constant" or not re.fullmatch(r"-?0(\.0*)?", zero.literal or ""):
                    self.problem = (
                        f"{which} is masked with something other than zero after its dequantization",
                        "mask with zeros, or mask before quantizing",
                        f"{_REWRITER}, MatchFp8Param: \"Select requires a zero operand to be exchanged with dequantization.\"")
                    return


def _search(i: Instruction) -> tuple[Instruction | None, Instruction | None]:
    """An FP8 array that `i` is made of by moves, elementwise operations, collectives or a loop's constant inputs; and
    the first operation on the way at which XLA's own search ends."""
    seen, todo = set(), [(i, None)]
    while todo:
        i, stop = todo.pop(0)
        if (i.computation.name, i.name) in seen:
            continue
        seen.add((i.computation.name, i.name))
        if i.shape.dtype.startswith("f8") and i.shape.size > 1:
            return i, stop
        through = len(i.operands) == 1 or i.opcode in ("divide", "dynamic-slice", "pad", "multiply", "select")
        if i.opcode == "get-tuple-element" and _operand(i, 0).opcode == "parameter":
            if outer := _into_loop(i):
                todo.append((outer[1], stop or outer[0]))
            continue
        moves = i.opcode in _ELEMENTWISE | _COMMUTES | {"concatenate", "get-tuple-element", "opt-barrier", "gather", "reverse"}
        if moves or i.opcode.startswith(("all-", "collective", "reduce-scatter", "fusion")):
            # A collective has one operand as well, but XLA's rules allow it nowhere between dequantization and dot.
            barrier = not through or i.opcode.startswith(("all-", "collective", "reduce-scatter"))
            todo += [(i.computation[name], stop or (i if barrier else None)) for name in i.operands]
    return None, None


def _into_loop(i: Instruction) -> tuple[Instruction, Instruction] | None:
    """The loop, and what it was given, for an element of the tuple that a loop's body gets."""
    index = re.search(r"\bindex=(\d+)", i.cmd)
    for loop in i.computation.module:
        if loop.opcode == "while" and index and i.computation.name in loop.called:
            given = _operand(loop, 0)
            if given.opcode == "tuple":
                return loop, _operand(given, int(index[1]))
    return None


# Assertions -----------------------------------------------------------------------------------------------------------

_WORK = ("scale", "bias", "epilogue", "amax", "output", "transpose", "pad")


def assert_fp8_gemms(fn: Callable, *args: Any, count: int | None = None, min_flops_share: float | None = None,
                     fused: bool | str | Collection[str] = (), target: str | Target = "H100", gemm: str = "cublaslt",
                     compiler_options: Mapping[str, Any] | None = None) -> GemmReport:
    """Assert that `fn(*args)` multiplies in FP8, compiled for `target` as by `aot_compile`; for your own tests.

    `count`: that many of its matmuls are FP8, each counted once however often it runs. `min_flops_share`: at least this
    part, 0 to 1, of its matmul FLOPs is. With neither, every matmul must be.
    `fused`: True, and nothing may be left outside any FP8 matmul; or names of work, of which none may: "scale", "bias",
    "epilogue", "amax", "output", "transpose", "pad" (and of the first four each must be there: some call has an amax);
    or cuBLASLt's names, such as "RELU" or "BIAS_GELU": every FP8 call has that epilogue.

    Returns the report. Raises AssertionError, whose message is the report and the reasons; ValueError for a name that
    `fused` does not know; and what `aot_compile` raises.
    """
    wanted = [fused] if isinstance(fused, str) else _WORK if fused is True else list(fused or ())
    epilogues = [name for name in wanted if name not in _WORK]
    for name in epilogues:
        if not re.fullmatch(r"(BIAS_)?(RELU|GELU)(_AUX)?|BIAS|DEFAULT", name.upper()):
            raise ValueError(f"fused has {name!r}; it takes {', '.join(_WORK)}, or an epilogue such as RELU, GELU, BIAS_RELU.")
    report = report_gemms(fn, *args, target=target, gemm=gemm, compiler_options=compiler_options)
    rows, failures = report.fp8_rows, []
    if count is not None and len(rows) != count:
        failures.append(f"{len(rows)} matmuls are FP8, not {count}")
    if min_flops_share is not None and report.fp8_flops_share < min_flops_share:
        failures.append(f"{report.fp8_flops_share:.1%} of the FLOPs are FP8, less than {min_flops_share:.1%}")
    if count is None and min_flops_share is None and len(rows) < max(1, len(report.rows)):
        failures.append(f"{len(report.rows) - len(rows)} of {len(report.rows)} matmuls are not FP8"
                        if report.rows else "the program has no matmul")
    for name in epilogues:
        if wrong := [row.epilogue for row in rows if row.epilogue != name.upper()]:
            failures.append(f"an FP8 call has the epilogue {wrong[0]}, not {name.upper()}")
    reasons: list[Reason] = []
    if failures or wanted:
        reasons = why_not_fp8(fn, *args, target=target, gemm=gemm, compiler_options=compiler_options)
    works = {w for w in wanted if w in _WORK}
    failures += [f"{r.matmul} left outside: {r.lost}" for r in reasons if r.lost in works or (
        fused is True and r.lost == "duplicate")]
    there = {"scale": lambda r: r.scales or r.alpha != 1, "bias": lambda r: "BIAS" in r.epilogue or r.beta,
             "epilogue": lambda r: r.epilogue != "DEFAULT", "amax": lambda r: r.amax}
    if fused is not True:
        failures += [f"no FP8 call has fused: {w}" for w in sorted(works) if w in there and not any(map(there[w], rows))]
    if failures:
        lines = [f"{getattr(fn, '__name__', 'the function')} compiled for {getattr(target, 'name', target)}:",
                 *(f"  {f}" for f in failures), str(report), str(Reasons(reasons))]
        raise AssertionError("\n".join(lines))
    return report
