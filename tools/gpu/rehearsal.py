"""A GPU that is not there, and answers like an H200: what is compiled for it is real, and what runs
runs on the CPU, small. With it the whole run can be tried, and what can go wrong in it."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from helpers.records.local import NoClock, wall_seconds
from tools.gpu.machine import Gpu
from tools.gpu.stage import Case, Ready


class Fake(Gpu):
    """Answers like an H200. `how` is what CUPTI does: it "works", or is "refused"; or it "crashes"
    or "hangs", but not yet when it is asked first."""

    rehearsal = True
    chip_name = "H200"
    name = "NVIDIA H200"

    def __init__(self, how: str):
        self.how = how

    def require(self, name: str) -> None:
        """JAX computes on the CPU."""

    def to_call(self, compiled: Any, fn: Any, args: tuple) -> Callable[..., Any]:
        """The CPU's program, compiled ahead as the GPU's is: it takes the same arguments and
        nothing else."""
        lower = getattr(fn, "lower", None) or jax.jit(fn).lower
        return lower(*args).compile()

    def kernel_times(self, call: Callable[[], Any], repeats: int) -> list[tuple[str, float]]:
        """One kernel a call, or what goes wrong."""
        if self.how == "refused":
            raise NoClock("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
        if repeats > 3 and self.how == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if repeats > 3 and self.how == "hangs":
            time.sleep(3600)
        return [("kernel", wall_seconds(call, repeats))] * repeats

    def chip(self) -> dict[str, Any]:
        """A chip at work."""
        return {"clock_mhz": 1755, "power_w": 690.0, "temperature_c": 61}

    def versions(self) -> dict[str, str]:
        """None of them."""
        return dict.fromkeys(("driver", "cuda", "cuda_runtime", "cublas"), "none")


def mishaps(gpu: Gpu) -> Iterator[Case]:
    """Forms that fail in every way, among some that do not."""

    def works() -> Ready:
        return Ready({"right": True}, lambda: time.sleep(1e-4))

    def fails() -> Ready:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED in /some/where/x.cc")

    def crashes() -> Ready:
        os.kill(os.getpid(), signal.SIGSEGV)
        return works()

    def hangs() -> Ready:
        time.sleep(3600)
        return works()

    forms = {"works": works, "fails": fails, "crashes": crashes, "hangs": hangs, "follows": works}
    yield Case("speed", "mishaps", forms, looks=2, seconds=0.001, limit=2)
