"""The attached GPU, where there is one: whether two compiles agree, and how calls are timed."""

import contextlib
import itertools
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8lens.matmul.kernels import kernels
from fp8lens.targets import attached_gpu
from helpers import aot_compile
from helpers.numerics.recipes import scaled_dot, to_e4m3
from helpers.records import local
from helpers.records.local import Comparison, Timing, compare_with_local, device_times, kernel_lines

M, N, K = 64, 128, 256


def shape(*dims, dtype=jnp.float8_e4m3fn):
    return jax.ShapeDtypeStruct(dims, dtype)


def to_f32(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)


def test_two_compiles_agree_or_the_difference_shows():
    args = shape(M, K), shape(N, K)
    one, same = (kernel_lines(aot_compile(to_f32, *args, target=t)) for t in ("H100", "H200"))
    other = kernel_lines(aot_compile(to_f32, *args, target="A100"))
    assert (
        one == same == ("__cublas$lt$matmul$f8 -> f32[64,128] epilogue=DEFAULT amax=False beta=0",)
    )
    assert Comparison("GPU", one, same).agree and "the same kernels" in str(
        Comparison("GPU", one, same)
    )
    differs = Comparison("GPU", one, other)
    assert not differs.agree and all(line in str(differs) for line in (*one, *other))


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_compare_with_local_needs_a_gpu():
    with pytest.raises(KeyError, match="needs an NVIDIA GPU"):
        compare_with_local(to_f32, shape(M, K), shape(N, K))


@pytest.mark.skipif(attached_gpu() is None, reason="no GPU is attached")
def test_the_attached_gpu_agrees():
    assert compare_with_local(to_f32, shape(M, K), shape(N, K)).agree


class Cupti:
    """Stands for JAX's binding of CUPTI: `launches` is what each recording finds."""

    def __init__(self, *launches):
        self.launches, self.recording = itertools.cycle(launches), False

    def _cupti_init(self):
        assert not self.recording
        self.recording = True

    def _cupti_get_timings(self, finalize):
        assert self.recording and not finalize
        self.recording = False
        return next(self.launches)


def without_clock():
    raise local.NoClock("no clock here")


def test_functions_are_called_in_turn_after_two_calls_that_do_not_count(monkeypatch):
    monkeypatch.setattr(local, "cupti", without_clock)
    called = []
    times = device_times(
        {name: lambda name=name: called.append(name) for name in "ab"}, repeats=3, rounds=2
    )
    assert "".join(called) == "aabb" + "aaabbb" + "bbbaaa"
    assert set(times) == {"a", "b"}
    for timing in times.values():
        assert timing.device is None and timing.kernels == () and timing.seconds == timing.wall > 0
        assert timing.low <= timing.high and timing.no_clock == "no clock here"


@pytest.mark.parametrize("count", range(1, 16))
def test_everybody_begins_and_nobody_keeps_its_predecessor(count):
    names = [f"form {i}" for i in range(count)]
    orders = local.turns(names, count)
    assert all(sorted(order) == sorted(names) for order in orders)
    assert sorted(order[0] for order in orders) == sorted(names)
    for few in range(2, min(count, 6) + 1):
        followed = {
            name: [
                order[order.index(name) - 1]
                for order in local.turns(names, few)
                if order.index(name)
            ]
            for name in names
        }
        for before in followed.values():
            assert count < 4 or max(map(before.count, before)) <= 2


def test_the_hosts_clock_is_read_before_cupti_records(monkeypatch):
    events = []

    class Recorder(Cupti):
        def _cupti_init(self):
            super()._cupti_init()
            events.append("record")

    monkeypatch.setattr(local, "cupti", lambda: Recorder([("gemm", 1.0), ("gemm", 1.0)]))
    device_times(
        {name: lambda name=name: events.append(name) for name in "ab"}, repeats=2, rounds=2
    )
    first = events.index("record")
    assert (
        events[:first].count("a") == events[:first].count("b") == 2 + 2 * 2
    )  # two to warm up, two rounds of two
    assert events[first:].count("record") == 4


def test_a_turn_lasts_as_long_as_is_asked(monkeypatch):
    """On a clock that goes on by a millisecond with every call: a tenth of a second is a hundred of
    them.
    """
    now, called = [0.0], []

    def call():
        now[0] += 1e-3
        called.append("call")

    monkeypatch.setattr(local, "cupti", without_clock)
    monkeypatch.setattr(local.time, "perf_counter", lambda: now[0])
    (timing,) = device_times({"a": call}, repeats=3, rounds=2, at_least=0.1).values()
    assert timing.wall == pytest.approx(1e-3) and len(called) == 1 + 5 + 2 * 100


def test_what_is_timed_is_said_while_it_is(monkeypatch):
    monkeypatch.setattr(local, "cupti", lambda: Cupti([("gemm", 1.0)]))
    said = []

    @contextlib.contextmanager
    def during(name):
        said.append(f"<{name}")
        yield
        said.append(f"{name}>")

    device_times(
        {name: lambda name=name: said.append(name) for name in "ab"},
        repeats=1,
        rounds=1,
        during=during,
    )
    assert (
        "".join(said) == "<aaaa><bbbb>" + "<aaa><bbb>" * 2
    )  # to warm up, the host's clock, CUPTI's


def test_device_time_is_the_median_over_calls_of_what_their_kernels_took_together(monkeypatch):
    # Two calls a recording, two kernels a call; milliseconds.
    cupti = Cupti(
        [("gemm", 3.0), ("relu", 1.0), ("gemm", 5.0), ("relu", 1.0)],
        [("gemm", 4.0), ("relu", 1.0), ("gemm", 90.0), ("relu", 1.0)],
    )
    monkeypatch.setattr(local, "cupti", lambda: cupti)
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=2).values()
    assert timing.device == timing.seconds == pytest.approx(5.5e-3)  # of 4, 6, 5 and 91 ms
    assert (timing.low, timing.high) == (pytest.approx(4.75e-3), pytest.approx(27.25e-3))
    assert timing.kernels == (
        ("gemm", pytest.approx(25.5e-3), 1.0),
        ("relu", pytest.approx(1e-3), 1.0),
    )


def test_a_kernel_now_and_then_leaves_the_mean(monkeypatch):
    monkeypatch.setattr(
        local, "cupti", lambda: Cupti([("gemm", 3.0), ("gemm", 3.0), ("now and then", 1.0)])
    )
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert timing.device == pytest.approx(3.5e-3)


def test_a_recording_without_a_kernel_costs_that_recording_alone(monkeypatch):
    monkeypatch.setattr(
        local, "cupti", lambda: Cupti([("gemm", 3.0)], None, [("gemm", 4.0)], [("gemm", 5.0)])
    )
    timings = device_times({"a": lambda: None, "b": lambda: None}, repeats=1, rounds=2)
    assert all(timing.device and not timing.no_clock for timing in timings.values())


def test_nothing_recorded_leaves_the_wall_clock_and_says_so(monkeypatch):
    monkeypatch.setattr(local, "cupti", lambda: Cupti(None))
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert (
        timing.device is None
        and timing.seconds == timing.wall
        and timing.no_clock == "CUPTI recorded no kernel"
    )


def test_a_recording_ends_when_a_call_fails(monkeypatch):
    cupti = Cupti([])
    monkeypatch.setattr(local, "cupti", lambda: cupti)
    calls = itertools.count()

    def fails():
        if next(calls) >= 4:  # after the warm-up and the wall clock's two
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        device_times({"layer": fails}, repeats=2, rounds=1)
    assert not cupti.recording


def test_a_profiler_that_cannot_be_had_leaves_the_wall_clock_and_says_why(monkeypatch):
    class Held(Cupti):
        def _cupti_init(self):
            raise RuntimeError("another subscriber is active")

    monkeypatch.setattr(local, "cupti", lambda: Held([]))
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert (
        timing.device is None
        and timing.wall > 0
        and timing.no_clock == "another subscriber is active"
    )


def test_a_jaxlib_without_the_binding_is_said(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    monkeypatch.setattr(local, "gpu_available", lambda: True)
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", None)
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert timing.no_clock == "this JAX has no binding of CUPTI"


@pytest.mark.skipif(sys.platform != "linux", reason="JAX's CUDA plugin comes for Linux only")
def test_this_jax_has_the_binding():
    from jax.experimental.mosaic.gpu import profiler

    assert hasattr(profiler.mosaic_gpu_lib._mosaic_gpu_ext, "_cupti_init")
    assert hasattr(profiler.mosaic_gpu_lib._mosaic_gpu_ext, "_cupti_get_timings")


@pytest.mark.parametrize("wrong", [{"calls": {}}, {"repeats": 0}, {"rounds": 0}])
def test_nothing_to_time_is_refused(wrong):
    with pytest.raises(ValueError, match="at least one repeat and round"):
        device_times(**{"calls": {"a": lambda: None}, **wrong})


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_without_a_gpu_there_is_no_device_clock():
    (timing,) = device_times(
        {"dot": lambda: jax.jit(to_f32)(jnp.ones((M, K)), jnp.ones((N, K)))}, rounds=1
    ).values()
    assert isinstance(timing, Timing) and timing.device is None and timing.wall > 0
    assert timing.no_clock == "JAX has no GPU here"


@pytest.mark.skipif(attached_gpu() is None, reason="no GPU is attached")
def test_a_gpu_has_a_clock_of_its_own():
    a, b = jnp.ones((2048, 2048), jnp.float8_e4m3fn), jnp.ones((2048, 2048), jnp.float8_e4m3fn)
    compiled = aot_compile(to_f32, a, b, target="local")
    (timing,) = device_times({"dot": lambda: compiled(a, b)}).values()
    assert timing.device and timing.kernels and timing.kernels[0][2] == 1


def in_a_row(a, b, scale):
    """Eight matmuls, of which XLA makes one CUDA graph."""
    for _ in range(8):
        a = to_e4m3(scaled_dot(a, b, scale, scale), scale)
    return a


def test_eight_matmuls_are_eight_kernels():
    args = shape(2048, 2048), shape(2048, 2048), shape(dtype=jnp.float32)
    assert len(kernels(aot_compile(in_a_row, *args))) == 8


@pytest.mark.skipif(attached_gpu() is None, reason="no GPU is attached")
def test_the_kernels_of_a_cuda_graph_are_all_seen_time_after_time():
    a, b, scale = (
        jnp.ones((2048, 2048), jnp.float8_e4m3fn),
        jnp.ones((2048, 2048), jnp.float8_e4m3fn),
        jnp.float32(0.1),
    )
    compiled = aot_compile(in_a_row, a, b, scale, target="local")
    seen = [device_times({"row": lambda: compiled(a, b, scale)})["row"] for _ in range(3)]
    assert all(sum(launches for *_, launches in timing.kernels) >= 8 for timing in seen)
