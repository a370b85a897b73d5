"""The attached GPU, as a child process has it: what compiles for it, its two clocks, and what it
does meanwhile. `tools.gpu.rehearsal` has one that only answers like it."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fp8lens import TARGETS, Target, aot_compile
from helpers.records import local
from tools.gpu.lines import without_paths

PACKAGES = "jaxlib jax-cuda13-plugin flax torch triton nvidia-cublas nvidia-cudnn-cu13".split()


class Program(NamedTuple):
    """A function compiled for the GPU, and what to call."""

    compiled: jax.stages.Compiled
    call: Callable[..., Any]


class WrongDevice(Exception):
    """Why this process does not measure."""


class Gpu:
    """The first GPU that JAX has."""

    rehearsal = False
    chip_name = "local"  # of TARGETS: what is compiled for

    @property
    def name(self) -> str:
        """As the driver says it."""
        return jax.devices("cuda")[0].device_kind

    def require(self, name: str) -> None:
        """Raises WrongDevice unless JAX computes on a Hopper GPU, the one of this name if there is
        a name: what falls back to the CPU is never measured."""
        try:
            found = jax.devices("cuda")[0]
        except RuntimeError as error:
            raise WrongDevice(f"This measures a GPU, and JAX runs on none here: {error}") from error
        if name and found.device_kind != name or jax.default_backend() != "gpu":
            raise WrongDevice(
                f"This measures the {name or found.device_kind}, but JAX computes on "
                f"{jax.devices()[0].device_kind}: unset JAX_PLATFORMS and CUDA_VISIBLE_DEVICES"
            )
        if found.compute_capability != "9.0" or "MIG" in found.device_kind:
            raise WrongDevice(f"This is for a whole H100 or H200; here is {found.device_kind}")

    def target(self) -> Target:
        """Its model, with its peak rates."""
        return TARGETS[self.chip_name]

    def compile(
        self,
        fn: Callable,
        *args: Any,
        gemm: str = "cublaslt",
        options: Mapping[str, Any] | None = None,
        rehearsed: Callable | None = None,
    ) -> Program:
        """The GPU's own compile of `fn(*args)`. `rehearsed` is what a CPU can run in its place."""
        compiled: Any = aot_compile(
            fn, *args, target=self.chip_name, gemm=gemm, compiler_options=options
        )
        return Program(compiled, self.to_call(compiled, rehearsed or fn, args))

    def to_call(self, compiled: Any, fn: Any, args: tuple) -> Callable[..., Any]:
        """What runs: here the GPU's program."""
        return compiled

    def kernel_times(self, call: Callable[[], Any], repeats: int) -> list[tuple[str, float]]:
        """(name, seconds) of each kernel of so many calls, by the GPU's own clock. Raises
        `helpers.records.local.NoClock`, or takes the process down with it."""
        return local.kernel_times(local.cupti(), call, repeats)

    def answers(self) -> bool:
        """Whether it still computes: after an illegal access, nothing does in this process."""
        try:
            return bool(jax.block_until_ready(jax.numpy.ones(8).sum() == 8))
        except Exception:
            return False

    def chip(self) -> dict[str, Any]:
        """What it does at this moment: clock, power and temperature. Empty where NVML, NVIDIA's
        management library, does not tell."""
        try:
            return _nvml()
        except (OSError, AttributeError, ValueError):
            return {}

    def versions(self) -> dict[str, str]:
        """What runs the kernels: the driver's CUDA, and the libraries that JAX has loaded."""
        from jax._src.lib import cuda_versions as found  # what jax.print_environment_info asks, too

        libraries: Any = found
        major, rest = divmod(libraries.cublas_get_version(), 10000)  # 130400 is 13.4.0
        return {
            "driver": _driver(),
            "cuda": _dotted(libraries.cuda_driver_get_version()),
            "cuda_runtime": _dotted(libraries.cuda_runtime_get_version()),
            "cublas": f"{major}.{rest // 100}.{rest % 100}",
        }

    def about(self) -> dict[str, Any]:
        """All that a reader needs to judge a figure, or to make it again, but for the commit: no
        path, host or user."""
        packages = {}
        for package in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                packages[package] = importlib.metadata.version(package)
        return {
            "device": self.name,
            "rehearsal": self.rehearsal,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "packages": packages,
            "xla_flags": without_paths(os.environ.get("XLA_FLAGS", "")),
            **self.versions(),
        }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"  # 13000 is 13.0


def _driver() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(text, 80)
        return text.value.decode() or "unknown"
    except (OSError, AttributeError):
        return "unknown"


def _nvml() -> dict[str, Any]:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device = ctypes.c_void_p()
    clock, power, heat = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    first = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or 0)
    calls = (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByIndex_v2(first, ctypes.byref(device)),
        nvml.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(clock)),  # 1: of the multiprocessors
        nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)),
        nvml.nvmlDeviceGetTemperature(device, 0, ctypes.byref(heat)),
    )
    if any(calls):
        return {}
    return {
        "clock_mhz": clock.value,
        "power_w": power.value / 1e3,
        "temperature_c": heat.value,
    }
