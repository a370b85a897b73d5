"""The attached GPU, where there is one: how calls are timed."""

import itertools
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8lens.targets import attached_gpu
from helpers import aot_compile
from helpers.records import local
from helpers.records.local import device_times

with_gpu = pytest.mark.skipif(attached_gpu() is None, reason="no GPU is attached")


class Cupti:
    """Stands for JAX's binding of CUPTI: `launches` is what each recording finds."""

    def __init__(self, events, *launches):
        self.events, self.launches, self.recording = events, itertools.cycle(launches), False

    def _cupti_init(self):
        assert not self.recording
        self.recording = True
        self.events.append("record")

    def _cupti_get_timings(self, finalize):
        assert self.recording and not finalize
        self.recording = False
        return next(self.launches)


def test_the_hosts_clock_is_read_in_turn_before_cupti_records(monkeypatch):
    events = []
    monkeypatch.setattr(local, "cupti", lambda: Cupti(events, [("gemm", 1.0), ("gemm", 1.0)]))
    device_times(
        {name: lambda name=name: events.append(name) for name in "ab"}, repeats=2, rounds=2
    )
    first = events.index("record")
    assert events[:4] == [*"aabb"]  # to warm up
    assert events[:first].count("a") == events[:first].count("b") == 2 + 2 * 2
    assert events[first:].count("record") == 4


def test_device_time_is_the_median_over_calls_of_what_their_kernels_took_together(monkeypatch):
    # Two calls a recording, two kernels a call; milliseconds.
    cupti = Cupti(
        [],
        [("gemm", 3.0), ("relu", 1.0), ("gemm", 5.0), ("relu", 1.0)],
        [("gemm", 4.0), ("relu", 1.0), ("gemm", 90.0), ("relu", 1.0)],
    )
    monkeypatch.setattr(local, "cupti", lambda: cupti)
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=2).values()
    # of 4, 6, 5 and 91 ms
    assert timing[:3] == pytest.approx((5.5e-3, 4.75e-3, 27.25e-3)) and not timing.no_clock


@pytest.mark.parametrize("problem", ["no kernel", "another profiler", "no binding"])
def test_without_the_gpus_clock_the_hosts_remains_and_says_why(problem, monkeypatch):
    cupti = Cupti([], None)

    def refused():
        raise RuntimeError("another profiler is active")

    if problem == "another profiler":
        cupti._cupti_init = refused
    if problem == "no binding":
        from jax.experimental.mosaic.gpu import profiler

        monkeypatch.setattr(local, "gpu_available", lambda: True)
        monkeypatch.setattr(profiler, "mosaic_gpu_lib", None)
    else:
        monkeypatch.setattr(local, "cupti", lambda: cupti)
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert timing.seconds > 0 and problem in timing.no_clock


def test_a_recording_ends_when_a_call_fails():
    cupti = Cupti([], [])
    with pytest.raises(ZeroDivisionError):
        local.kernel_times(cupti, lambda: 1 // 0, 2)
    assert not cupti.recording


@pytest.mark.skipif(sys.platform != "linux", reason="JAX's CUDA plugin comes for Linux only")
def test_this_jax_has_the_binding():
    from jax.experimental.mosaic.gpu import profiler

    assert hasattr(profiler.mosaic_gpu_lib._mosaic_gpu_ext, "_cupti_init")
    assert hasattr(profiler.mosaic_gpu_lib._mosaic_gpu_ext, "_cupti_get_timings")


@with_gpu
def test_a_gpu_has_a_clock_of_its_own():
    a, b = jnp.ones((2048, 2048), jnp.float8_e4m3fn), jnp.ones((2048, 2048), jnp.float8_e4m3fn)
    compiled = aot_compile(jax.lax.dot, a, b, target="local")
    (timing,) = device_times({"dot": lambda: compiled(a, b)}).values()
    assert timing.seconds > 0 and not timing.no_clock
