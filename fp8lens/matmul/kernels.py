"""What a compiled program launches, and what that costs: kernels, bytes moved, FLOPs, and a
roofline estimate.

All of it is read from optimized HLO. The count is simple: every kernel reads each operand once from
memory and writes its result once; in a loop, as often as that runs. Of an operand that it only
takes slices of, it reads those, and of an array that it changes in place, it writes the change. A
cache serves some of it, kernels may overlap: estimates, not measurements.
"""

import dataclasses
import html
from typing import Any

from fp8lens.formats import FORMATS, is_narrow
from fp8lens.hlo.ops import CUTS, DOTS, LAUNCHES_NOTHING, VIEWS
from fp8lens.hlo.parse import HloModule, Instruction, Shape, parse_hlo_module, visible
from fp8lens.hlo.program import executions, fused, fusion_kind, results
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.text import columns, counted, notebook_display
from fp8lens.hlo.values import look_through, operand
from fp8lens.matmul.rows import ENGINE, ENGINE_MULTIPLIES, FP8_CALL, matmuls
from fp8lens.targets import Target, resolve

_OPAQUE = frozenset("custom-call convolution fft cholesky triangular-solve scan".split())


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
        memory = self.bytes_moved / target.memory_bandwidth
        if not self.flops or self.math_dtype is None:
            return memory
        return max(self.flops / target.peak_flops[self.math_dtype], memory)


def is_opaque(i: Instruction) -> bool:
    """Whether a kernel is not looked into, and may multiply matrices."""
    if i.opcode.removesuffix("-start") not in _OPAQUE:
        return False
    target = i.custom_call_target or ""
    if target.startswith("__cub$"):  # CUB sorts and sums
        return False
    if target.startswith(ENGINE):  # norms, activations and quantizers, too
        return target.startswith(ENGINE_MULTIPLIES)
    return not quantizes(i)


def quantizes(i: Instruction) -> bool:
    """Whether another library's call reads one matrix, and writes it as FP8: it has no second one
    to multiply it by. Transformer Engine's may read others, as the gradient and the input of an
    activation.
    """
    if i.opcode != "custom-call":
        return False
    target = i.custom_call_target or ""
    if target.startswith(ENGINE) and not target.startswith(ENGINE_MULTIPLIES):
        return bool(codes(i))
    given = [operand(i, n).shape for n in range(len(i.operands))]
    matrices = [shape for shape in given if sum(size > 1 for size in shape.dims) > 1]
    written = [shape.size for shape in results(i) if is_narrow(shape.dtype)]
    return len(matrices) == 1 and matrices[0].size in written


def codes(i: Instruction) -> list[Shape]:
    """The arrays of FP8 or FP4 that a kernel writes, without scales of blocks."""
    largest = max((shape.size for shape in results(i)), default=0)
    return [s for s in results(i) if is_narrow(s.dtype) and 1 < s.size == largest]


def _kind(instruction: Instruction) -> str:
    if instruction.custom_call_target:
        return instruction.custom_call_target
    if "triton" in fusion_kind(instruction):
        return "triton"
    return instruction.opcode.removesuffix("-start")


def launches(instruction: Instruction) -> bool:
    """Whether the instruction starts a kernel: the rest names, views, calls, or waits for the end
    of one.
    """
    ends = instruction.opcode.endswith(("-done", "-update"))
    if instruction.custom_call_target == "AllocateBuffer":  # jnp.empty's: memory alone
        return False
    return not ends and instruction.opcode.removesuffix("-start") not in LAUNCHES_NOTHING


@remembered
def moved(instruction: Instruction) -> int:
    """Bytes that the kernel an instruction launches reads and writes."""
    computation = fused(instruction)
    if computation is None:
        return _moved_alone(instruction)
    read = sum(
        _read_of(parameter, operand(instruction, n).shape.nbytes)
        for n, parameter in enumerate(computation.parameters[: len(instruction.operands)])
    )
    shapes = results(instruction)
    root = computation.root
    made = [root] * len(shapes)
    if root.opcode == "tuple" and len(root.operands) >= len(shapes):
        made = [computation[name] for name in root.operands]
    return read + sum(
        _written(look_through(part, VIEWS), shape)
        for part, shape in zip(made, shapes, strict=False)
    )


_TAKES = (*CUTS, "gather")
_PRODUCTS = DOTS | {"custom-call"}


def _moved_alone(i: Instruction) -> int:
    """Bytes that a kernel of one instruction reads and writes."""
    opcode = i.opcode.removesuffix("-start")
    written = sum(shape.nbytes for shape in results(i))
    put = _put(i)
    if put and opcode == "scatter":  # which may add to what is there
        return operand(i, 1).shape.nbytes + 3 * put.shape.nbytes
    if put:
        return 2 * put.shape.nbytes
    read = [i.computation[name].shape.nbytes for name in i.operands]
    if opcode in _PRODUCTS and i.operands[:1] == i.operands[1:2]:
        read = read[1:]  # an array that multiplies itself is read once
    if opcode in _TAKES and read:
        read[0] = min(read[0], written)
    return sum(read) + written


def _read_of(parameter: Instruction, whole: int) -> int:
    """Bytes that a fusion reads of an operand: all of it, or, where only parts are taken or
    changed, those.
    """
    users = parameter.computation.users
    read, todo = 0, [parameter]
    for at in todo:
        if at.is_root:
            return whole
        for user in users.get(at.name, ()):
            takes_first = user.operands[0] == at.name and user.operands.count(at.name) == 1
            if user.opcode in VIEWS:
                todo.append(user)
            elif user.opcode in _TAKES and takes_first:
                read += user.shape.nbytes
            elif not (takes_first and _put(user) and _is_only_a_result(user)):
                return whole
            elif user.opcode == "scatter":  # which may add to what is there
                read += operand(user, 2).shape.nbytes
    return min(read, whole)


def _put(i: Instruction) -> Instruction | None:
    """What an instruction puts into a part of its first operand; None where it does no such thing,
    or does it to several arrays.
    """
    opcode = i.opcode.removesuffix("-start")
    if opcode == "dynamic-update-slice":
        return operand(i, 1)
    return operand(i, 2) if opcode == "scatter" and len(i.operands) == 3 else None


def _is_only_a_result(i: Instruction) -> bool:
    """Whether a fusion returns an instruction's result, and nothing else in it reads that."""
    while not i.is_root:
        users = i.computation.users.get(i.name, ())
        if len(users) != 1 or users[0].opcode not in VIEWS | {"tuple"}:
            return False
        i = users[0]
    return True


def _written(part: Instruction, shape: Shape) -> int:
    """Bytes that a fusion writes of a result: all of it, or what it changes of an operand."""
    put = _put(part)
    if put is None or not _is_only_a_result(part):
        return shape.nbytes
    changed = look_through(operand(part, 0), VIEWS)
    in_place = changed.opcode == "parameter"
    return min(shape.nbytes, put.shape.nbytes) if in_place else shape.nbytes


def kernel(instruction: Instruction, count: int | None = 1) -> Kernel:
    """The kernel that an instruction launches."""
    gemms = matmuls(instruction)
    shapes = [shape.brief for shape in results(instruction)]
    return Kernel(
        name=instruction.name,
        kind=_kind(instruction),
        result=shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})",
        bytes_moved=moved(instruction),
        flops=sum(gemm.flops for gemm in gemms),
        math_dtype=gemms[0].math_dtype if gemms else None,
        count=count,
        instruction=instruction,
    )


def _module(x: Any) -> HloModule:
    """The module of an Inspection, or of anything that `parse_hlo_module` takes."""
    known = getattr(x, "module", None)
    return known if isinstance(known, HloModule) else parse_hlo_module(x)


def kernels(x: Any) -> tuple[Kernel, ...]:
    """What the program launches, in order: each instruction of ENTRY, then of the bodies it loops
    over or calls, that launches something. `x` is an Inspection, or anything `parse_hlo_module`
    takes.
    """
    module = _module(x)
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
    """The program's `__cublas$lt$matmul$f8` calls. `gemm_config(call)` tells what each has
    fused.
    """
    return tuple(i for i in _module(x) if i.custom_call_target == FP8_CALL)


def roofline_seconds(x: Any, target: str | Target = "H100") -> float:
    """Estimated time on `target` in seconds: `kernels(x)` one after the other, each as long as its
    bytes at full bandwidth or its FLOPs at dense peak take, whichever is longer, as often as it
    runs. Launches cost nothing here.
    """
    chip = resolve(target)
    return sum(k.seconds(chip) * k.runs for k in kernels(x))


#: Bytes that are moved for each value that is quantized, by where its scale comes from: two of bf16
#: are read, one of FP8 is written. To find the amax first, the bf16 is read once more.
QUANTIZED_BYTES = {"given": 3, "amax": 5}


def matmul_seconds(
    m: int, n: int, k: int, dtype: str, out_dtype: str, target: str | Target = "H100"
) -> float:
    """Roofline time in seconds of [m, k] times [n, k], operands of HLO type `dtype` and a result of
    `out_dtype`. Raises KeyError where the chip has no peak for `dtype`.
    """
    chip = resolve(target)
    bits = FORMATS[dtype].bits * (m + n) * k + FORMATS[out_dtype].bits * m * n
    return max(2 * m * n * k / chip.peak_flops[dtype], bits / 8 / chip.memory_bandwidth)


def quantize_seconds(values: int, scale: str, target: str | Target = "H100") -> float:
    """Roofline time in seconds to turn so many bf16 values into FP8: by a "given" scale, or by
    their own "amax"; any other word is a ValueError.
    """
    if scale not in QUANTIZED_BYTES:
        raise ValueError(f'the scale is "given", or made from the values\' "amax"; got {scale!r}')
    chip = resolve(target)
    return QUANTIZED_BYTES[scale] * values / chip.memory_bandwidth


def _size(n: int) -> str:
    return f"{n:,} B" if n < 1e6 else f"{n / 1e6:,.2f} MB"


# The colours of the bars: of a kernel, and of one that multiplies matrices.
_BAR = {False: "#E69F00", True: "#0072B2"}


class _Table(tuple[Kernel, ...]):
    """Kernels as text, a line each; in a notebook as a table, in which the bytes are bars."""

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """Bytes, kind, name and result of each kernel, and a last row with the totals."""
        rows = [(_times(k) + _size(k.bytes_moved), visible(k.kind), k.name, k.result) for k in self]
        total, count = sum(k.bytes_moved * k.runs for k in self), sum(k.runs for k in self)
        return [*rows, (_size(total), counted(count, "kernel"), "", "")]

    def __repr__(self) -> str:
        lines, _ = columns(self._rows(), range(4), (0,), ())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        most = max((k.bytes_moved * k.runs for k in self), default=0) or 1
        bars = [_bar(k, k.bytes_moved * k.runs / most) for k in self]
        head = '<th style="text-align:left">{}</th>'
        heads = "".join(map(head.format, ("bytes", "kernel", "name", "writes")))
        cell = '<td style="text-align:left;vertical-align:top;white-space:nowrap">{}</td>'
        lines = [f"<tr>{heads}</tr>"]
        for (size, *names), bar in zip(self._rows(), [*bars, ""], strict=True):
            cells = [html.escape(size) + bar, *map(_code, names)]
            lines.append(f"<tr>{''.join(map(cell.format, cells))}</tr>")
        return f"<table>\n{''.join(lines)}</table>"


def _times(k: Kernel) -> str:
    """How often a kernel runs, where that is not once."""
    return "" if k.count == 1 else f"{k.count or '?'} x "


def _bar(k: Kernel, share: float) -> str:
    """A bar as long as a kernel's share of the longest."""
    style = f"width:{8 * share:.2f}em;min-width:1px;height:.4em;background:{_BAR[k.flops > 0]}"
    return f'<div style="{style}"></div>'


def _code(text: str) -> str:
    """Text that a notebook shows as it is: it takes what is between two dollars for TeX."""
    return f"<code>{html.escape(text)}</code>" if text else ""


def print_kernels(x: Any) -> None:
    """Print one line a kernel: the bytes it moves at least (1 MB is 1e6 bytes; each operand read
    once, the result written once), what it is, its name, and what it writes. In a notebook it is a
    table, with the bytes as bars.
    """
    (notebook_display() or print)(_Table(kernels(x)))
