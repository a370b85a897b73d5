"""The attached GPU, where there is one: whether two compiles agree, and how calls are timed."""
import itertools

import jax
import jax.numpy as jnp
import pytest

from helpers import aot_compile, local
from helpers.cost import kernels
from helpers.local import Comparison, Timing, compare_with_local, device_times, kernel_lines
from helpers.recipes import scaled_dot, to_e4m3
from helpers.targets import attached_gpu

M, N, K = 64, 128, 256


def shape(*dims, dtype=jnp.float8_e4m3fn):
    return jax.ShapeDtypeStruct(dims, dtype)


def to_f32(a, b):
    return jax.lax.dot(a, b.T, preferred_element_type=jnp.float32)


def test_two_compiles_agree_or_the_difference_shows():
    args = shape(M, K), shape(N, K)
    one, same = (kernel_lines(aot_compile(to_f32, *args, target=t)) for t in ("H100", "H200"))
    other = kernel_lines(aot_compile(to_f32, *args, target="A100"))
    assert one == same == ("__cublas$lt$matmul$f8 -> f32[64,128] epilogue=DEFAULT amax=False beta=0",)
    assert Comparison("GPU", one, same).agree and "the same kernels" in str(Comparison("GPU", one, same))
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


def test_functions_are_called_in_turn_after_two_calls_that_do_not_count(monkeypatch):
    monkeypatch.setattr(local, "_cupti", lambda: None)
    called = []
    times = device_times({name: lambda name=name: called.append(name) for name in "ab"}, repeats=3, rounds=2)
    assert "".join(called) == "aabb" + "aaabbb" * 2
    assert set(times) == {"a", "b"}
    for timing in times.values():
        assert timing.device is None and timing.kernels == () and timing.seconds == timing.wall > 0
        assert timing.low <= timing.high


def test_device_time_is_the_median_over_calls_of_what_their_kernels_took_together(monkeypatch):
    # Two calls a recording, two kernels a call; milliseconds.
    cupti = Cupti([("gemm", 3.0), ("relu", 1.0), ("gemm", 5.0), ("relu", 1.0)],
                  [("gemm", 4.0), ("relu", 1.0), ("gemm", 90.0), ("relu", 1.0)])
    monkeypatch.setattr(local, "_cupti", lambda: cupti)
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=2).values()
    assert timing.device == timing.seconds == pytest.approx(5.5e-3)  # of 4, 6, 5 and 91 ms
    assert (timing.low, timing.high) == (pytest.approx(4.75e-3), pytest.approx(27.25e-3))
    assert timing.kernels == (("gemm", pytest.approx(25.5e-3), 1.0), ("relu", pytest.approx(1e-3), 1.0))


def test_a_kernel_now_and_then_leaves_the_mean(monkeypatch):
    monkeypatch.setattr(local, "_cupti", lambda: Cupti([("gemm", 3.0), ("gemm", 3.0), ("now and then", 1.0)]))
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert timing.device == pytest.approx(3.5e-3)


def test_nothing_recorded_leaves_the_wall_clock(monkeypatch):
    monkeypatch.setattr(local, "_cupti", lambda: Cupti(None))
    (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
    assert timing.device is None and timing.seconds == timing.wall


def test_a_recording_ends_when_a_call_fails(monkeypatch):
    cupti = Cupti([])
    monkeypatch.setattr(local, "_cupti", lambda: cupti)
    calls = iter(range(5))

    def fails():
        if next(calls) == 4:  # after the warm-up and the wall clock's two
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        device_times({"layer": fails}, repeats=2, rounds=1)
    assert not cupti.recording


def test_a_profiler_that_cannot_be_had_leaves_the_wall_clock(monkeypatch):
    class Held(Cupti):
        def _cupti_init(self):
            raise RuntimeError("another subscriber is active")

    for cupti in (Held([]), object()):  # held by another profiler; a jaxlib without the binding
        monkeypatch.setattr(local, "_cupti", lambda cupti=cupti: cupti)
        (timing,) = device_times({"layer": lambda: None}, repeats=2, rounds=1).values()
        assert timing.device is None and timing.wall > 0


@pytest.mark.parametrize("wrong", [{"calls": {}}, {"repeats": 0}, {"rounds": 0}])
def test_nothing_to_time_is_refused(wrong):
    with pytest.raises(ValueError, match="at least one repeat and round"):
        device_times(**{"calls": {"a": lambda: None}, **wrong})


@pytest.mark.skipif(attached_gpu() is not None, reason="a GPU is attached")
def test_without_a_gpu_there_is_no_device_clock():
    (timing,) = device_times({"dot": lambda: jax.jit(to_f32)(jnp.ones((M, K)), jnp.ones((N, K)))}, rounds=1).values()
    assert isinstance(timing, Timing) and timing.device is None and timing.wall > 0


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
    a, b, scale = jnp.ones((2048, 2048), jnp.float8_e4m3fn), jnp.ones((2048, 2048), jnp.float8_e4m3fn), jnp.float32(0.1)
    compiled = aot_compile(in_a_row, a, b, scale, target="local")
    seen = [device_times({"row": lambda: compiled(a, b, scale)})["row"] for _ in range(3)]
    assert all(sum(launches for *_, launches in timing.kernels) >= 8 for timing in seen)
