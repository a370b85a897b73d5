"""A GPU that is not there, and answers like an H200: what is compiled for it is real, and what runs
runs on the CPU, small. With it the whole run can be tried, and each way in which its clock can
fail."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax

from helpers.records.local import NoClock, wall_seconds
from tools.gpu.machine import Gpu

NAME = "NVIDIA H200"
# What it does: whether CUPTI answers; where a number follows, only from this use of it in a process
# on; or JAX has no GPU in the processes that measure, though the driver names one.
HOW = ("works", "crashes", "hangs", "refused", "falls-back")


class Fake(Gpu):
    """Answers like an H200."""

    rehearsal = True
    chip_name = "H200"

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

    def to_call(self, compiled: Any, fn: Any, args: tuple) -> Callable[..., Any]:
        """The CPU's program, compiled ahead as the GPU's is: it takes the same arguments and
        nothing else."""
        lower = getattr(fn, "lower", None) or jax.jit(fn).lower
        return lower(*args).compile()

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
