"""A GPU that is not there, and answers like an H200: what is compiled for it is real, and what runs
runs on the CPU, small. With it the whole run can be tried, and each way in which its clock can
fail."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fp8lens import TARGETS, Target, aot_compile
from helpers.records.local import NoClock, wall_seconds
from tools.gpu.machine import Gpu, Program

NAME = "NVIDIA H200"
# What it does: whether CUPTI answers; where a number follows, only from this use of it in a process
# on; or JAX has no GPU in the processes that measure, though the driver names one.
HOW = ("works", "crashes", "hangs", "refused", "falls-back")


class Fake(Gpu):
    """Answers like an H200."""

    rehearsal = True

    def __init__(self, how: str):
        self.how, _, first = how.partition(":")
        self.first, self.uses = int(first or 1), 0
        if self.how not in HOW:
            raise SystemExit(f"--rehearse takes one of {', '.join(HOW)}; got {how!r}")

    def require(self, name: str) -> None:
        """JAX computes on the CPU, and says so where it should not."""
        if self.how == "falls-back":
            jax.config.update("jax_platforms", None)  # as where a GPU is: JAX tries CUDA first
            super().require(name)

    def target(self) -> Target:
        """An H200."""
        return TARGETS["H200"]

    def compile(
        self,
        fn: Callable,
        *args: Any,
        gemm: str = "cublaslt",
        options: Mapping[str, Any] | None = None,
        rehearsed: Callable | None = None,
    ) -> Program:
        """The program for an H200, and the CPU's to call."""
        compiled: Any = aot_compile(fn, *args, target="H200", gemm=gemm, compiler_options=options)
        # Compiled ahead, as the GPU's is: it takes the same arguments and nothing else.
        on_cpu: Any = rehearsed or fn
        lower = getattr(on_cpu, "lower", None) or jax.jit(on_cpu).lower
        return Program(compiled, lower(*args).compile())

    def kernel_times(self, call: Callable[[], Any], repeats: int) -> list[tuple[str, float]]:
        """One kernel a call, or what goes wrong."""
        self.uses += 1
        if self.uses >= self.first:
            if self.how == "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.how == "hangs":
                time.sleep(3600)
            if self.how == "refused":
                raise NoClock("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        return [("kernel", wall_seconds(call, repeats))] * repeats

    def chip(self) -> dict[str, Any]:
        """A chip at work."""
        return {"clock_mhz": 1755, "power_w": 690.0, "temperature_c": 61, "held_back_by": []}

    def versions(self) -> dict[str, str]:
        """None of them."""
        return dict.fromkeys(("driver", "cuda", "cuda_runtime", "cublas"), "none")
