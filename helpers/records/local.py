"""The attached GPU: how long does a call take on it?"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8lens.compile.process import gpu_available


class NoClock(RuntimeError):
    """Why the GPU's own clock cannot be read."""


def cupti() -> Any:
    """JAX's binding of CUPTI, NVIDIA's profiling library: what
    `jax.experimental.mosaic.gpu.profiler.measure` stands on, which times functions of JAX alone.
    """
    if not gpu_available():
        raise NoClock("JAX has no GPU here")
    from jax.experimental.mosaic.gpu import profiler

    extension = getattr(profiler.mosaic_gpu_lib, "_mosaic_gpu_ext", None)
    if not hasattr(extension, "_cupti_init"):
        raise NoClock("this JAX has no binding of CUPTI")
    return extension


def wait(result: Any) -> None:
    """Return when arrays of JAX, or tensors of torch, have been computed."""
    for leaf in jax.tree.leaves(result):
        if type(leaf).__module__.startswith("torch"):
            import torch

            if leaf.is_cuda:
                torch.cuda.synchronize()
            return
    jax.block_until_ready(result)


def kernel_times(clock: Any, call: Callable[[], Any], repeats: int) -> list[tuple[str, float]]:
    """(name, seconds) of each kernel that `repeats` calls launched, in order. `clock` is
    `cupti()`."""
    try:
        clock._cupti_init()
    except RuntimeError as error:  # another profiler holds it
        raise NoClock(str(error)) from error
    try:
        for _ in range(repeats):
            result = call()
        wait(result)
    finally:
        # CUPTI is left attached (False): detached once, it may record nothing in this process ever
        # after.
        timings = clock._cupti_get_timings(False)
    return [(name, milliseconds / 1e3) for name, milliseconds in timings or ()]


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """In which order functions are timed, in each round another: a kernel that leaves the chip
    warm, or its memory busy, favours or harms a different one each time.
    """
    return [random.Random(turn).sample(names, len(names)) for turn in range(rounds)]


def calls_for(call: Callable[[], Any], seconds: float) -> int:
    """How many calls of a function take so many seconds, of 1 to 2000."""
    return max(1, min(math.ceil(seconds / wall_seconds(call, 5)), 2000))


def wall_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of `repeats` calls sent one after the other, by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    wait(result)
    return max((time.perf_counter() - start) / repeats, 1e-9)


def seconds_of_calls(found: Sequence[tuple[str, float]], times: int) -> list[float]:
    """The seconds of each of so many calls, from (name, seconds) of all their kernels in order."""
    seconds = [second for _, second in found]
    each, rest = divmod(len(seconds), times)
    if rest:  # a kernel now and then: only the mean is known
        return [sum(seconds) / times]
    return [sum(seconds[i : i + each]) for i in range(0, len(seconds), each or 1)]


class Timing(NamedTuple):
    """Seconds of one call of a function: the median over its calls or rounds, and the quartiles.

    If `no_clock` is empty, they are the sum of its kernels' times by the GPU's own clock (CUPTI):
    gaps between kernels and copies by the memory engines are not in it, and kernels that run side
    by side are in it one by one. Otherwise they are the host's time for a call among others sent
    one after the other, and `no_clock` says why.
    """

    seconds: float
    low: float
    high: float
    no_clock: str


def device_times(
    calls: Mapping[str, Callable[[], Any]], repeats: int = 10, rounds: int = 3
) -> dict[str, Timing]:
    """Time functions without arguments side by side: `rounds` times, each in turn is called
    `repeats` times. First by the host's clock, all rounds of it; then by the GPU's own.

    In turn, so that a clock that sinks as the chip warms up sinks for all alike, and in another
    order each round (see `turns`). The functions are called twice before anything is timed. They
    may return arrays of JAX or tensors of torch. A call that keeps reading the same arrays measures
    the cache where they fit in it (50 MB on Hopper): let it walk through several sets.
    """
    for call in calls.values():
        wall_seconds(call, 2)
    in_turn = [name for order in turns(list(calls), rounds) for name in order]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in in_turn:
        times[name].append(wall_seconds(calls[name], repeats))
    no_clock = ""
    try:
        clock = cupti()
        device: dict[str, list[float]] = {name: [] for name in calls}
        for name in in_turn:
            seen = kernel_times(clock, calls[name], repeats)
            device[name] += seconds_of_calls(seen, repeats)
        if not all(device.values()):
            raise NoClock("CUPTI recorded no kernel")
        times = device
    except NoClock as error:
        no_clock = str(error)
    return {name: _timing(each, no_clock) for name, each in times.items()}


def _timing(seconds: Sequence[float], no_clock: str) -> Timing:
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timing(middle, low, high, no_clock)
