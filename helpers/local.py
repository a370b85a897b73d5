"""Does the program compiled without a GPU agree with the one that the attached GPU's own compile gives?"""

import dataclasses
from collections.abc import Callable
from typing import Any

from helpers.aot import aot_compile
from helpers.cost import gemm_config, kernels
from helpers.targets import TARGETS


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two compiles of one function, a line a kernel: what it is, what it writes, and a matmul call's settings."""

    device: str
    without_gpu: tuple[str, ...]
    on_gpu: tuple[str, ...]

    @property
    def agree(self) -> bool:
        return self.without_gpu == self.on_gpu

    def __str__(self) -> str:
        if self.agree:
            return f"{self.device} compiles the same kernels:\n" + "\n".join(f"  {line}" for line in self.on_gpu)
        rows = [f"  without it: {line}" for line in self.without_gpu]
        rows += [f"  its own:    {line}" for line in self.on_gpu]
        return f"{self.device} compiles other kernels:\n" + "\n".join(rows)


def kernel_lines(x: Any) -> tuple[str, ...]:
    """A line for each kernel of a program, without names: those may differ between two compiles of one program."""
    lines = []
    for kernel in kernels(x):
        line = f"{kernel.kind} -> {kernel.result}"
        if kernel.kind.startswith("__cublas$lt$matmul"):
            config = gemm_config(kernel.instruction)
            line += f" epilogue={config['epilogue']} amax={config['damax_output']} beta={config['beta']:g}"
        lines.append(line)
    return tuple(lines)


def compare_with_local(fn: Callable, *args: Any, gemm: str = "cublaslt") -> Comparison:
    """Compile `fn(*args)` for the attached GPU's model without using it, and on it, and compare the kernels.

    Raises `helpers.targets.UnknownTarget` (a KeyError) where no GPU is attached, or one whose model is not recorded.
    """
    local = TARGETS["local"]
    chip = dataclasses.replace(local, name=local.device)  # any name but "local" is a compile without the GPU
    without, own = (aot_compile(fn, *args, target=t, gemm=gemm) for t in (chip, "local"))
    return Comparison(local.device, kernel_lines(without), kernel_lines(own))
