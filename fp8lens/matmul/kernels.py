"""What a compiled program launches, and what that costs: kernels, bytes moved, FLOPs, and a
roofline estimate.

All of it is read from optimized HLO. The count is simple: every kernel reads each operand once,
whole, from memory and writes its result once; in a loop, as often as that runs. A slice reads less,
a cache serves some of it, kernels may overlap: estimates, not measurements.
"""

import dataclasses
import html
from typing import Any

from fp8lens.hlo.ops import LAUNCHES_NOTHING
from fp8lens.hlo.parse import Instruction, parse_hlo_module, visible
from fp8lens.hlo.program import executions, fusion_kind, results
from fp8lens.hlo.text import columns, notebook_display
from fp8lens.matmul.rows import FP8_CALL, matmuls
from fp8lens.targets import Target, resolve


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch. `kind` is a custom call's target, "triton", or an opcode ("fusion": a kernel XLA
    generated); `result` its shape (workspace left out); `bytes_moved` operands read plus results
    written; `flops` 2*M*N*K of the matmuls in it, and `math_dtype` what the hardware multiplies
    there, None without a matmul. These are of one run; `count` is how often the program runs it,
    None where a loop's trips are not known.
    """

    name: str
    kind: str
    result: str
    bytes_moved: int
    flops: int
    math_dtype: str | None
    count: int | None
    instruction: Instruction = dataclasses.field(repr=False, compare=False)

    @property
    def runs(self) -> int:
        """`count`, and 1 where that is not known."""
        return 1 if self.count is None else self.count

    def seconds(self, target: Target) -> float:
        """Roofline time of one run on `target`: the longer of moving the bytes and doing the FLOPs.
        Raises KeyError where the chip has no peak for `math_dtype`.
        """
        compute = self.flops / target.peak_flops[self.math_dtype] if self.flops else 0.0
        return max(compute, self.bytes_moved / target.memory_bandwidth)


def _kind(instruction: Instruction) -> str:
    if instruction.custom_call_target:
        return instruction.custom_call_target
    return (
        "triton"
        if "triton" in fusion_kind(instruction)
        else instruction.opcode.removesuffix("-start")
    )


def launches(instruction: Instruction) -> bool:
    """Whether the instruction starts a kernel: the rest names, views, calls, or waits for the end
    of one.
    """
    return not (
        instruction.opcode.removesuffix("-start") in LAUNCHES_NOTHING
        or instruction.opcode.endswith(("-done", "-update"))
    )


def moved(instruction: Instruction) -> int:
    """Bytes that the kernel an instruction launches reads and writes."""
    read = sum(instruction.computation[name].shape.nbytes for name in instruction.operands)
    return read + sum(shape.nbytes for shape in results(instruction))


def kernel(instruction: Instruction, count: int | None = 1) -> Kernel:
    """The kernel that an instruction launches."""
    gemms, written = matmuls(instruction), results(instruction)
    shapes = [s.brief for s in written]
    result = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
    return Kernel(
        instruction.name,
        _kind(instruction),
        result,
        moved(instruction),
        sum(g.flops for g in gemms),
        gemms[0].math_dtype if gemms else None,
        count,
        instruction,
    )


def kernels(x: Any) -> tuple[Kernel, ...]:
    """What the program launches, in order: each instruction of ENTRY, then of the bodies it loops
    over or calls, that is not free. `x` is anything `parse_hlo_module` takes.
    """
    module = parse_hlo_module(x)
    return tuple(
        kernel(i, count)
        for name, count in executions(module).items()
        for i in module.computations[name]
        if launches(i)
    )


def bytes_moved(x: Any) -> int:
    """Bytes that `kernels(x)` read and write, each operand and result once a run; loops of unknown
    length once.
    """
    return sum(k.bytes_moved * k.runs for k in kernels(x))


def fp8_calls(x: Any) -> tuple[Instruction, ...]:
    """The program's `__cublas$lt$matmul$f8` calls. `gemm_config(call)` tells what each has fused."""
    return tuple(i for i in parse_hlo_module(x) if i.custom_call_target == FP8_CALL)


def roofline_seconds(x: Any, target: str | Target = "H100") -> float:
    """Estimated time on `target` in seconds: `kernels(x)` one after the other, each as long as its
    bytes at full bandwidth or its FLOPs at dense peak take, whichever is longer, as often as it
    runs. Launches cost nothing here.
    """
    chip = resolve(target)
    return sum(k.seconds(chip) * k.runs for k in kernels(x))


_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8e4m3fn": 1, "f8e5m2": 1}
_QUANTIZED = {
    "given": 3,
    "amax": 5,
}  # for each bf16 value read and written; by its own amax, read once more


def matmul_seconds(
    m: int, n: int, k: int, dtype: str, out_dtype: str, target: str | Target = "H100"
) -> float:
    """Roofline time in seconds of [m, k] times [n, k], operands of HLO type `dtype` and a result of
    `out_dtype`. Raises KeyError where the chip has no peak for `dtype`.
    """
    chip = resolve(target)
    traffic = _BYTES[dtype] * (m + n) * k + _BYTES[out_dtype] * m * n
    return max(2 * m * n * k / chip.peak_flops[dtype], traffic / chip.memory_bandwidth)


def quantize_seconds(values: int, scale: str, target: str | Target = "H100") -> float:
    """Roofline time in seconds to turn so many bf16 values into FP8: by a "given" scale, or by
    their own "amax"; any other word is a ValueError.
    """
    if scale not in _QUANTIZED:
        raise ValueError(f'the scale is "given", or made from the values\' "amax"; got {scale!r}')
    chip = resolve(target)
    return _QUANTIZED[scale] * values / chip.memory_bandwidth


def _size(n: int) -> str:
    return f"{n:,} B" if n < 1e6 else f"{n / 1e6:,.2f} MB"


class _Table(tuple):
    """Kernels as text, a line each; in a notebook as a table, in which the bytes are bars."""

    def _rows(self) -> list[tuple[str, str, str, str]]:
        times = lambda k: "" if k.count == 1 else f"{k.count or '?'} x "
        total, count = sum(k.bytes_moved * k.runs for k in self), sum(k.runs for k in self)
        return [
            *((times(k) + _size(k.bytes_moved), visible(k.kind), k.name, k.result) for k in self),
            (_size(total), f"{count} kernel{'s' * (count != 1)}", "", ""),
        ]

    def __repr__(self) -> str:
        return "\n".join(columns(self._rows(), range(4), (0,), ())[0])

    def _repr_html_(self) -> str:
        most = max((k.bytes_moved * k.runs for k in self), default=0) or 1
        bars = [
            "<div"
            f' style="width:{8 * k.bytes_moved * k.runs / most:.2f}em;min-width:1px;height:.4em;'
            f'background:{_BAR[k.flops > 0]}"></div>'
            for k in self
        ]
        cell = '<td style="text-align:left;vertical-align:top;white-space:nowrap">{}</td>'.format
        code = lambda text: (
            f"<code>{html.escape(text)}</code>" * bool(text)
        )  # no TeX between two dollars
        lines = [
            "".join(map(cell, (html.escape(size) + bar, *map(code, row))))
            for (size, *row), bar in zip(self._rows(), [*bars, ""])
        ]
        heads = "".join(
            map('<th style="text-align:left">{}</th>'.format, ("bytes", "kernel", "name", "writes"))
        )
        return "<table>\n" + "".join(f"<tr>{line}</tr>" for line in (heads, *lines)) + "</table>"


_BAR = ("#E69F00", "#0072B2")  # of a kernel, and of one that multiplies matrices


def print_kernels(x: Any) -> None:
    """Print one line a kernel: the bytes it moves at least (1 MB is 1e6 bytes; each operand read
    once, the result written once), what it is, its name, and what it writes. In a notebook it is a
    table, with the bytes as bars.
    """
    (notebook_display() or print)(_Table(kernels(x)))
