"""The attached GPU: does it compile the program that is compiled without it, and how long does a
call take on it?
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fp8lens.compile.api import aot_compile
from fp8lens.compile.process import gpu_available
from fp8lens.matmul.kernels import kernels
from fp8lens.matmul.rows import gemm_config
from fp8lens.targets import TARGETS


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over the calls of one function, in seconds.

    `device` is the sum of its kernels' times by the GPU's own clock (CUPTI): gaps between kernels
    and copies by the memory engines are not in it, and kernels that run side by side are in it one
    by one. None where that clock cannot be read; `no_clock` says why. `wall` is the host's time for
    a call among others sent one after the other, taken before CUPTI records anything. `low` and
    `high` are the quartiles of the one of the two that `seconds` is. `kernels` are (name, seconds,
    launches) of a call, the longest first.
    """

    device: float | None
    wall: float
    low: float
    high: float
    kernels: tuple[tuple[str, float, float], ...] = ()
    no_clock: str = ""

    @property
    def seconds(self) -> float:
        """`device`, or `wall` where that is all there is."""
        return self.wall if self.device is None else self.device


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
    """(name, seconds) of each kernel that `repeats` calls launched, in order."""
    try:
        clock._cupti_init()
    except RuntimeError as error:  # CUPTI is not here, or another profiler holds it
        raise NoClock(str(error)) from error
    failed = None
    try:
        for _ in range(repeats):
            result = call()
        wait(result)
    except Exception as error:
        failed = error
    # CUPTI is left attached (False): detached once, it may record nothing in this process ever
    # after.
    try:
        timings = clock._cupti_get_timings(False)
    except RuntimeError as error:
        raise failed or NoClock(str(error)) from error
    if failed:
        raise failed
    return [(name, milliseconds / 1e3) for name, milliseconds in timings or ()]


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """In which order functions are timed, round by round: each round another begins, and none keeps
    its predecessor.

    Williams's design (Australian Journal of Scientific Research 2, 1949): a kernel that leaves the
    chip warm, or its memory busy, favours or harms a different one each time.
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    orders = []
    for turn in range(rounds):
        orders.append([names[(step + turn) % n] for step in zigzag])
    return orders


_MOST_CALLS = 2000  # of one function in a round, however short it is


def device_times(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int = 10,
    rounds: int = 3,
    at_least: float = 0.0,
    during: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[str, Timing]:
    """Time functions without arguments side by side: `rounds` times, each in turn is called
    `repeats` times, or so often that this takes `at_least` seconds. First by the host's clock, all
    rounds of it; then by the GPU's own.

    In turn, so that a clock that sinks as the chip warms up sinks for all alike, and in another
    order each round (see `turns`). The functions are called twice before anything is timed. They
    may return arrays of JAX or tensors of torch. A call that keeps reading the same arrays measures
    the cache where they fit in it (50 MB on Hopper): let it walk through several sets.
    `during(name)` is entered while a function is timed. Raises ValueError for no calls, or fewer
    than one repeat or round.
    """
    if not calls or repeats < 1 or rounds < 1:
        raise ValueError(
            "give calls, and at least one repeat and round; "
            f"got {len(calls)}, {repeats=}, {rounds=}"
        )
    times = {}
    for name, call in calls.items():
        with during(name):
            wait(call())
            times[name] = max(repeats, calls_for(call, at_least))
    wall: dict[str, list[float]] = {name: [] for name in calls}
    device: dict[str, list[float]] = {name: [] for name in calls}
    seen: dict[str, list[tuple[str, float]]] = {name: [] for name in calls}
    in_turn = list(itertools.chain.from_iterable(turns(list(calls), rounds)))
    no_clock = "CUPTI recorded no kernel"
    for name in in_turn:
        with during(name):
            wall[name].append(wall_seconds(calls[name], times[name]))
    try:
        clock = cupti()
        for name in in_turn:
            with during(name):
                found = kernel_times(clock, calls[name], times[name])
            seen[name] += found
            device[name] += seconds_of_calls(found, times[name])
    except NoClock as error:
        device, seen = dict.fromkeys(calls, []), dict.fromkeys(calls, [])
        no_clock = str(error)
    return {
        name: _timing(wall[name], device[name], seen[name], times[name] * rounds, no_clock)
        for name in calls
    }


def calls_for(call: Callable[[], Any], seconds: float) -> int:
    """How many calls of a function that has run before take so many seconds."""
    took = wall_seconds(call, 5 if seconds else 1)
    return max(1, min(math.ceil(seconds / took), _MOST_CALLS))


def seconds_of_calls(found: Sequence[tuple[str, float]], times: int) -> list[float]:
    """The seconds of each of so many calls, from (name, seconds) of all their kernels in order."""
    seconds = [second for _, second in found]
    each, rest = divmod(len(seconds), times)
    if rest:  # a kernel now and then: only the mean is known
        return [sum(seconds) / times]
    return [sum(seconds[i : i + each]) for i in range(0, len(seconds), each or 1)]


def wall_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of `repeats` calls, by the host's clock."""
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    wait(result)
    return max((time.perf_counter() - start) / repeats, 1e-9)


def kernels_of_a_call(
    seen: Sequence[tuple[str, float]], times: int
) -> list[tuple[str, float, float]]:
    """(name, seconds, launches) of one of `times` calls, the longest first, from (name, seconds) of
    all their kernels."""
    total: dict[str, list[float]] = {}
    for name, seconds in seen:
        total.setdefault(name, []).append(seconds)
    of_a_call = [(name, sum(each) / times, len(each) / times) for name, each in total.items()]
    return sorted(of_a_call, key=lambda kernel: -kernel[1])


def _timing(
    wall: list[float], device: list[float], seen: list[tuple], times: int, no_clock: str
) -> Timing:
    """The Timing of a function that was called `times` times, from the seconds of its calls by both
    clocks and the kernels `seen`, (name, seconds).
    """
    clock = device or wall
    low = high = clock[0]
    if len(clock) > 1:
        low, _, high = statistics.quantiles(clock, n=4, method="inclusive")
    return Timing(
        device=statistics.median(device) if device else None,
        wall=statistics.median(wall),
        low=low,
        high=high,
        kernels=tuple(kernels_of_a_call(seen, times)),
        no_clock="" if device else no_clock,
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two compiles of one function, a line a kernel: what it is, what it writes, and a matmul
    call's settings.
    """

    device: str
    without_gpu: tuple[str, ...]
    on_gpu: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether both compiles have the same kernels, in the same order."""
        return self.without_gpu == self.on_gpu

    def __str__(self) -> str:
        if self.agree:
            lines = [f"  {line}" for line in self.on_gpu]
            return f"{self.device} compiles the same kernels:\n" + "\n".join(lines)
        rows = [f"  without it: {line}" for line in self.without_gpu]
        rows += [f"  its own:    {line}" for line in self.on_gpu]
        return f"{self.device} compiles other kernels:\n" + "\n".join(rows)


def kernel_lines(x: Any) -> tuple[str, ...]:
    """A line for each kernel of a program, without names: those may differ between two compiles of
    one program.
    """
    lines = []
    for kernel in kernels(x):
        line = f"{kernel.kind} -> {kernel.result}"
        if kernel.kind.startswith("__cublas$lt$matmul"):
            config = gemm_config(kernel.instruction)
            line += f" epilogue={config['epilogue']} amax={config['damax_output']}"
            line += f" beta={config['beta']:g}"
        lines.append(line)
    return tuple(lines)


def compare_with_local(fn: Callable, *args: Any, gemm: str = "cublaslt") -> Comparison:
    """Compile `fn(*args)` for the attached GPU's model without using it, and on it, and compare the
    kernels.

    Raises `fp8lens.targets.UnknownTarget` (a KeyError) where no GPU is attached, or one whose model
    is not recorded.
    """
    local = TARGETS["local"]
    # Any name but "local" is a compile without the GPU.
    chip = dataclasses.replace(local, name=local.device)
    without, own = (aot_compile(fn, *args, target=t, gemm=gemm) for t in (chip, "local"))
    return Comparison(local.device, kernel_lines(without), kernel_lines(own))
