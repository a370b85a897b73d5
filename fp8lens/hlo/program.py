"""What a program runs: its computations, how often each does, what a fusion computes and writes."""

import re
from collections.abc import Mapping
from typing import Any

from fp8lens.hlo.ops import CONTROL
from fp8lens.hlo.parse import Computation, HloModule, Instruction, Shape


def setting(instruction: Instruction, *keys: str) -> Any:
    """What an instruction's backend_config has under the first key, in that under the second, and
    so on; None where it has nothing there.
    """
    found = instruction.backend_config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def results(instruction: Instruction) -> tuple[Shape, ...]:
    """The shapes an instruction writes, without the scratch space that cuBLAS and cuDNN take as a
    last result.
    """
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and shape.is_tuple and len(shape.elements) > 1:
        shape = shape.elements[1]  # (operands, results, context)
    shapes = shape.elements if shape.is_tuple else (shape,)
    if len(shapes) < 2 or shapes[-1].dtype not in ("s8", "u8"):
        return shapes
    scratch = (instruction.custom_call_target or "").startswith(("__cublas", "__cudnn")) or (
        fusion_kind(instruction) == "__custom_fusion"
    )  # around a library's call
    return shapes[:-1] if scratch else shapes


def _trips(loop: Instruction) -> int | None:
    """How often a loop's body runs, as XLA found out; None where it did not."""
    trips = str(setting(loop, "known_trip_count", "n"))
    return int(trips) if re.fullmatch(r"[0-9]{1,18}", trips) else None


def executions(module: HloModule) -> dict[str, int | None]:
    """How often each computation that ENTRY reaches by calls, loops and branches runs; None where
    that is not known.

    ENTRY comes first, a caller before what it calls. Raises HloParseError where a computation calls
    itself.
    """
    calls: dict[str, list[tuple[str, int | None]]] = {}
    finished, stack = {}, [(module.entry, False)]
    while stack:  # not by recursion: text may nest deeper than Python does
        computation, done = stack.pop()
        if done:
            finished[computation.name] = True
        elif computation.name not in calls:
            calls[computation.name] = []
            stack.append((computation, True))
            for i in computation:
                opcode = i.opcode.removesuffix("-start")
                if opcode not in CONTROL | {"fusion"}:
                    continue
                called, times = i.called if opcode in CONTROL else (fused(i).name,), 1
                if opcode == "while":
                    times = _trips(i)
                    if (
                        times is not None
                    ):  # then nobody asks (xla/backends/gpu/runtime/while_thunk.cc)
                        called = tuple(name for name in called if name != i.callee("condition"))
                for name in called:
                    if name in calls and name not in finished:
                        raise i.error(f"computation {name} calls itself")
                    stack.append((module.computations[name], False))
                if opcode in CONTROL:  # a fusion is launched as a whole
                    calls[computation.name] += [(name, times) for name in called]
    counts: dict[str, int | None] = {module.entry.name: 1}
    for caller in reversed(finished):
        for name, times in calls[caller] if caller in counts else ():
            known = None not in (counts[caller], times, counts.get(name, 0))
            count = counts.get(name, 0) + counts[caller] * times if known else 0
            counts[name] = count if known and count < 1 << 63 else None  # else it would never end
    return counts


def fused(instruction: Instruction) -> Computation | None:
    """What a fusion computes; None for any other instruction."""
    if not instruction.opcode.startswith("fusion") or instruction.opcode == "fusion-done":
        return None
    computation = instruction.computation.module.computations.get(instruction.callee("calls"))
    if computation is None:
        raise instruction.error("this fusion calls no computation of the text")
    return computation


def fusion_kind(instruction: Instruction) -> str:
    """The backend's name of a fusion's kind, such as "__triton_gemm"; empty for kernels of XLA's
    own emitters.
    """
    if not instruction.opcode.startswith("fusion"):
        return ""
    return str(setting(instruction, "fusion_backend_config", "kind") or "")
