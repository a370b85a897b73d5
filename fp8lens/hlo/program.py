"""What a program runs: its computations, how often each does, what a fusion computes and writes."""

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from fp8lens.hlo.ops import CONTROL
from fp8lens.hlo.parse import Computation, HloModule, HloParseError, Instruction, Shape
from fp8lens.hlo.remember import remembered
from fp8lens.hlo.walk import walk


def setting(instruction: Instruction, *keys: str) -> Any:
    """What an instruction's backend_config has under the first key, in that under the second, and
    so on; None where it has nothing there.
    """
    found = instruction.backend_config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


@remembered
def results(instruction: Instruction) -> tuple[Shape, ...]:
    """The shapes an instruction writes, without the scratch space that cuBLAS, cuDNN and
    Transformer Engine take as a last result.
    """
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and shape.is_tuple and len(shape.elements) > 1:
        shape = shape.elements[1]  # (operands, results, context)
    shapes = shape.elements if shape.is_tuple else (shape,)
    if len(shapes) < 2 or shapes[-1].dtype not in ("s8", "u8"):
        return shapes
    target = instruction.custom_call_target or ""
    is_library_call = target.startswith(("__cublas", "__cudnn", "te_"))
    is_around_one = fusion_kind(instruction) == "__custom_fusion"
    return shapes[:-1] if is_library_call or is_around_one else shapes


def _trips(loop: Instruction) -> int | None:
    """How often a loop's body runs, as XLA found out; None where it did not."""
    trips = str(setting(loop, "known_trip_count", "n"))
    return int(trips) if re.fullmatch(r"[0-9]{1,18}", trips) else None


# A call of a computation: its name, and how often a run of the caller runs it; None where that is
# not known.
Call = tuple[str, int | None]


@remembered
def executions(module: HloModule) -> dict[str, int | None]:
    """How often each computation that ENTRY reaches by calls, loops and branches runs; None where
    that is not known.

    ENTRY comes first, a caller before what it calls. Raises HloParseError where a computation calls
    itself.
    """
    runs: dict[str, list[Call]] = {}
    inside: dict[str, list[str]] = {}

    def called(name: str) -> list[str]:
        runs[name], inside[name] = [], []
        for i in module.computations[name]:
            if i.opcode in _CALLING:
                found = callees(i)
                inside[name] += [other for other, _ in found]
                if not i.opcode.startswith("fusion"):  # which is launched as a whole
                    runs[name] += found
        return inside[name]

    walk([module.entry.name], called)
    try:
        order = [*TopologicalSorter(inside).static_order()]
    except CycleError as error:
        name = error.args[1][0]
        raise HloParseError(
            module.text, module.computations[name].start, f"computation {name} calls itself"
        ) from None
    counts: dict[str, int | None] = {module.entry.name: 1}
    for caller in reversed(order):
        if caller in counts:  # no fusion's computation, nor what one calls
            for name, times in runs[caller]:
                counts[name] = _count(counts.get(name, 0), counts[caller], times)
    return counts


def _count(so_far: int | None, caller: int | None, times: int | None) -> int | None:
    """The runs of a computation, with those of one more call in it. None where something is not
    known, and beyond 63 bits, which no program ends.
    """
    if so_far is None or caller is None or times is None:
        return None
    count = so_far + caller * times
    return count if count < 1 << 63 else None


_CALLING = {f"{opcode}{end}" for opcode in (*CONTROL, "fusion") for end in ("", "-start")}


def callees(i: Instruction) -> list[Call]:
    """The computations that a call, loop, branch or fusion runs, and how often."""
    if i.opcode.removesuffix("-start") not in CONTROL:
        return [(fusion_body(i).name, 1)]
    if i.opcode != "while":
        return [(name, 1) for name in i.called]
    trips = _trips(i)
    names = list(i.called)
    # If the trips are known, nobody asks the condition: xla/backends/gpu/runtime/while_thunk.cc.
    if trips is not None:
        names = [name for name in names if name != i.callee("condition")]
    return [(name, trips) for name in names]


def fused(instruction: Instruction) -> Computation | None:
    """What a fusion computes; None for any other instruction."""
    if not instruction.opcode.startswith("fusion") or instruction.opcode == "fusion-done":
        return None
    return fusion_body(instruction)


@remembered
def fusion_body(fusion: Instruction) -> Computation:
    """The computation that a fusion calls. HloParseError where the text has none."""
    computation = fusion.computation.module.computations.get(fusion.callee("calls"))
    if computation is None:
        raise fusion.error("this fusion calls no computation of the text")
    return computation


def fusion_kind(instruction: Instruction) -> str:
    """The backend's name of a fusion's kind, such as "__triton_gemm"; empty for kernels of XLA's
    own emitters.
    """
    if not instruction.opcode.startswith("fusion"):
        return ""
    return str(setting(instruction, "fusion_backend_config", "kind") or "")
