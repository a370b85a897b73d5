"""What a compiled program launches, and what that costs: kernels, bytes moved, FLOPs, and a roofline estimate.

All of it is read from optimized HLO. The count is simple: every kernel reads each operand once, whole, from memory and
writes its result once. A slice reads less, a cache serves some of it, kernels may overlap: estimates, not measurements.
"""

import dataclasses
import math
from typing import Any

from helpers.hlo import Computation, HloModule, Instruction, Shape, parse_hlo_module
from helpers.targets import TARGETS, Target

FP8_CALL = "__cublas$lt$matmul$f8"

# Instructions that launch nothing: names, views, and the ends of what has been launched before.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all add-dependency opt-barrier partition-id "
    "replica-id call while conditional".split()
)
_CONTROL = frozenset(("call", "while", "conditional"))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch. `kind` is a custom call's target, "triton", or an opcode ("fusion": a kernel XLA generated); `result`
    its shape (workspace left out); `bytes_moved` operands read plus results written; `flops` 2*M*N*K of the matmuls in
    it, and `math_dtype` the HLO dtype of their peak rate ("tf32" for f32 operands: right for DEFAULT precision only),
    None without a matmul."""

    name: str
    kind: str
    result: str
    bytes_moved: int
    flops: int
    math_dtype: str | None
    instruction: Instruction = dataclasses.field(repr=False, compare=False)

    def seconds(self, target: Target) -> float:
        """Roofline time on `target`: the longer of moving the bytes and doing the FLOPs. Raises KeyError where the
        chip has no peak for `math_dtype`."""
        compute = self.flops / target.peak_flops[self.math_dtype] if self.flops else 0.0
        return max(compute, self.bytes_moved / target.memory_bandwidth)


def _results(instruction: Instruction) -> tuple[Shape, ...]:
    """The shapes an instruction writes, without the scratch space that cuBLAS takes as a last result."""
    shape = instruction.shape
    shapes = shape.elements if shape.is_tuple else (shape,)
    if (instruction.custom_call_target or "").startswith("__cublas") and len(shapes) > 1 and shapes[-1].dtype == "s8":
        shapes = shapes[:-1]
    return shapes


def _kind(instruction: Instruction) -> str:
    config = instruction.backend_config if "fusion" in instruction.opcode else None
    triton = isinstance(config, dict) and "triton" in config.get("fusion_backend_config", {}).get("kind", "")
    return instruction.custom_call_target or ("triton" if triton else instruction.opcode.removesuffix("-start"))


def _contracting_dims(instruction: Instruction) -> list[int]:
    """The dimensions of the left operand that a matmul sums over."""
    if instruction.opcode == "dot":
        text = instruction.attributes.get("lhs_contracting_dims", "{}")
        return [int(d) for d in text.strip("{}").split(",") if d.strip()]
    return [int(d) for d in gemm_config(instruction)["dot_dimension_numbers"]["lhs_contracting_dimensions"]]


def _matmul(instruction: Instruction, computation: Computation) -> tuple[int, str] | None:
    """(FLOPs, dtype of the peak rate) if the instruction is a matrix multiplication, else None."""
    target = instruction.custom_call_target or ""
    if instruction.opcode != "dot" and not target.startswith(("__cublas$lt$matmul", "__cublas$gemm")):
        return None
    lhs = computation[instruction.operands[0]].shape
    contracted = math.prod(lhs.dims[d] for d in _contracting_dims(instruction))
    dtype = "tf32" if lhs.dtype == "f32" else lhs.dtype
    return 2 * contracted * _results(instruction)[0].size, dtype


def _matmuls(instruction: Instruction, computation: Computation, module: HloModule) -> list[tuple[int, str]]:
    found = _matmul(instruction, computation)
    if found:
        return [found]
    called = [module.computations[name] for name in instruction.called] if "fusion" in instruction.opcode else []
    return [m for inner in called for i in inner for m in _matmuls(i, inner, module)]


def kernels(x: Any) -> tuple[Kernel, ...]:
    """What the program launches, in order: each instruction of ENTRY, and of the bodies it loops over or calls (each
    body once, however often it runs), that is not free. `x` is anything `parse_hlo_module` takes.
    """
    module = parse_hlo_module(x)
    found = []

    def visit(computation: Computation) -> None:
        for i in computation:
            if i.opcode in _CONTROL:
                for name in i.called:
                    visit(module.computations[name])
            if i.opcode in _FREE or i.opcode.endswith("-done"):
                continue
            matmuls, written = _matmuls(i, computation, module), _results(i)
            moved = sum(computation[name].shape.nbytes for name in i.operands) + sum(s.nbytes for s in written)
            shapes = [f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in written]
            result = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
            flops, dtype = sum(f for f, _ in matmuls), matmuls[0][1] if matmuls else None
            found.append(Kernel(i.name, _kind(i), result, moved, flops, dtype, i))

    visit(module.entry)
    return tuple(found)


def bytes_moved(x: Any) -> int:
    """Bytes that `kernels(x)` read and write: each operand and result once, the body of a loop once."""
    return sum(k.bytes_moved for k in kernels(x))


def fp8_calls(x: Any) -> tuple[Instruction, ...]:
    """The program's `__cublas$lt$matmul$f8` calls. `gemm_config(call)` tells what each has fused."""
    return tuple(i for i in parse_hlo_module(x) if i.custom_call_target == FP8_CALL)


def gemm_config(call: Instruction) -> dict[str, Any]:
    """The part of a cuBLASLt call's `backend_config` that describes the matmul: epilogue, alpha, beta, amax, ..."""
    return call.backend_config["gemm_backend_config"]


def roofline_seconds(x: Any, target: str | Target = "H100") -> float:
    """Estimated time on `target` in seconds: `kernels(x)` one after the other, each as long as its bytes at full
    bandwidth or its FLOPs at dense peak take, whichever is longer. Launches cost nothing here."""
    chip = TARGETS[target] if isinstance(target, str) else target
    return sum(k.seconds(chip) for k in kernels(x))


def _size(n: int) -> str:
    return f"{n:,} B" if n < 1e6 else f"{n / 1e6:,.2f} MB"


def print_kernels(x: Any) -> None:
    """Print one line a kernel: what it is, what it writes, and the bytes it moves (1 MB is 1e6 bytes)."""
    launched = kernels(x)
    rows = [(k.kind, k.name, k.result, _size(k.bytes_moved)) for k in launched]
    total = _size(sum(k.bytes_moved for k in launched))
    rows.append((f"{len(launched)} kernel{'s' * (len(launched) != 1)}", "", "", total))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for kind, name, result, moved in rows:
        print(f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {result:<{widths[2]}}  {moved:>{widths[3]}}")
