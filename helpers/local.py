"""The attached GPU: does it compile the program that is compiled without it, and how long does a call take on it?"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from helpers.aot import aot_compile, gpu_available
from helpers.cost import gemm_config, kernels
from helpers.targets import TARGETS


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the calls of one function, in seconds.

    `device` is what its kernels took together by the GPU's own clock (CUPTI), gaps between them not counted; None
    where that cannot be read, as on a CPU. `wall` is the host's time for a call among others sent one after the other
    (with CUPTI attached, though not recording).
    `low` and `high` are the quartiles of the one of the two that `seconds` is. `kernels` are (name, seconds, launches)
    of a call, the longest first.
    """

    device: float | None
    wall: float
    low: float
    high: float
    kernels: tuple[tuple[str, float, float], ...] = ()

    @property
    def seconds(self) -> float:
        """`device`, or `wall` where that is all there is."""
        return self.wall if self.device is None else self.device


def _cupti() -> Any:
    """JAX's binding of CUPTI, NVIDIA's profiling library, or None: what `jax.experimental.mosaic.gpu.profiler.measure`
    stands on, which times functions of JAX alone."""
    if not gpu_available():
        return None
    from jax.experimental.mosaic.gpu import profiler

    return getattr(profiler.mosaic_gpu_lib, "_mosaic_gpu_ext", None)


def _wait(result: Any) -> None:
    for leaf in jax.tree.leaves(result):
        if type(leaf).__module__.startswith("torch"):
            import torch

            return torch.cuda.synchronize()
    jax.block_until_ready(result)


def _kernel_times(cupti: Any, call: Callable[[], Any], repeats: int) -> list[tuple[str, float]]:
    """(name, seconds) of each kernel that `repeats` calls launched, in order; none where CUPTI does not record."""
    try:
        cupti._cupti_init()
    except (AttributeError, RuntimeError):  # not in this jaxlib, no CUPTI here, or another profiler holds it
        return []
    try:
        for _ in range(repeats):
            result = call()
        _wait(result)
    finally:
        # CUPTI is left attached (False): detached once, it may record nothing in this process ever after.
        timings = cupti._cupti_get_timings(False)
    return [(name, milliseconds / 1e3) for name, milliseconds in timings or ()]


def device_times(calls: Mapping[str, Callable[[], Any]], repeats: int = 10, rounds: int = 3) -> dict[str, Timing]:
    """Time functions without arguments side by side: `rounds` times, each in turn is called `repeats` times.

    In turn, so that a clock that sinks as the chip warms up sinks for all alike. The functions are called twice before
    anything is timed. They may return arrays of JAX or tensors of torch. A call that keeps reading the same arrays
    measures the cache where they fit in it (50 MB on Hopper): let it walk through several sets. Raises ValueError for
    no calls, or fewer than one repeat or round.
    """
    if not calls or repeats < 1 or rounds < 1:
        raise ValueError(f"give calls, and at least one repeat and round; got {len(calls)}, {repeats=}, {rounds=}")
    cupti = _cupti()
    for call in calls.values():
        _wait(call())
        _wait(call())
    wall: dict[str, list[float]] = {name: [] for name in calls}
    device: dict[str, list[float]] = {name: [] for name in calls}
    seen: dict[str, list[tuple[str, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats):
                result = call()
            _wait(result)
            wall[name].append((time.perf_counter() - start) / repeats)
            del result
            if cupti is not None:
                times = _kernel_times(cupti, call, repeats)
                seen[name] += times
                each, rest = divmod(len(times), repeats)
                if rest:  # a kernel now and then: only the mean is known
                    device[name].append(sum(t for _, t in times) / repeats)
                else:
                    device[name] += [sum(t for _, t in times[i * each:(i + 1) * each]) for i in range(repeats) if each]
    return {name: _timing(wall[name], device[name], seen[name], repeats * rounds) for name in calls}


def _timing(wall: list[float], device: list[float], seen: list[tuple[str, float]], times: int) -> Timing:
    clock = device or wall
    low, _, high = statistics.quantiles(clock, n=4, method="inclusive") if len(clock) > 1 else clock * 3
    total: dict[str, list[float]] = {}
    for name, seconds in seen:
        total.setdefault(name, []).append(seconds)
    of_a_call = sorted(((name, sum(t) / times, len(t) / times) for name, t in total.items()), key=lambda k: -k[1])
    return Timing(statistics.median(device) if device else None, statistics.median(wall), low, high, tuple(of_a_call))


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
