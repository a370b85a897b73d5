"""The chips we compile for, as facts: what XLA needs to know of a GPU to generate code for it, and
its peak rates; and who may run the matmuls.

XLA describes a GPU to itself in a text proto. One that lacks a field does not always give an error:
without a CUDA runtime version the FP8 rewrite never fires, and without a bandwidth or a clock XLA
divides by zero. So a `Target` checks itself before XLA sees it.
"""

import ctypes
import dataclasses
import math
from collections.abc import Mapping

# Who may run the matmuls, as options of XLA's: NVIDIA's library alone, XLA's own kernels alone, or
# as XLA chooses.
GEMM_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "cublaslt": {"xla_gpu_enable_triton_gemm": False},
    "triton": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False},
    "auto": {},
}
# Fields that XLA divides by.
_POSITIVE = (
    "memory_bandwidth",
    "clock_ghz",
    "sms",
    "memory_bytes",
    "l2_bytes",
    "shared_memory_per_sm",
    "shared_memory_optin",
    "threads_per_sm",
    "fpus_per_sm",
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU model.

    `memory_bandwidth` is in bytes/s, `peak_flops` in FLOP/s by HLO dtype: dense (no sparsity),
    multiply and add counted as two, float32 accumulation. If a dtype is missing, the chip's tensor
    cores do not multiply it. `shared_memory_per_sm`, `shared_memory_optin`, `l2_bytes` and
    `memory_bytes` are in bytes. `source` says where the peaks come from; the other figures are
    those of XLA's own description of the chip. `clock_ghz` is the highest clock. It is above the
    clock at which tensor-core peaks are quoted. XLA fuses gelu from `cuda_runtime` (12, 4) on.

    Raises ValueError when made with a value that XLA cannot compile with.

    Example:

        >>> from fp8lens import TARGETS
        >>> TARGETS["H100"].compute_capability, TARGETS["H100"].sms
        ((9, 0), 132)
        >>> "f8e4m3fn" in TARGETS["A100"].peak_flops
        False
    """

    name: str
    device: str
    compute_capability: tuple[int, int]
    sms: int
    memory_bandwidth: float
    clock_ghz: float
    memory_bytes: int
    l2_bytes: int
    shared_memory_per_sm: int
    shared_memory_optin: int
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    source: str
    threads_per_sm: int = 2048
    fpus_per_sm: int = 128
    cuda_runtime: tuple[int, int] = (12, 8)
    cudnn: tuple[int, int] = (9, 10)

    def __post_init__(self):
        for field in _POSITIVE:
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise self._wrong(
                    f"{field} must be a positive number, got {value!r}; XLA divides by it. Start "
                    f'from a known chip: dataclasses.replace(TARGETS["H100"], {field}=...).'
                )
        if self.compute_capability < (7, 5):
            raise self._wrong(
                f"compute_capability {self.compute_capability} is older than what XLA's CUDA 13 "
                "compiler can generate code for; the oldest it knows here is (7, 5), "
                "the oldest with FP8 (8, 9)."
            )
        if self.cuda_runtime < (12, 0):
            raise self._wrong(
                f"cuda_runtime must be at least (12, 0), got {self.cuda_runtime}; "
                "with an older one XLA leaves every FP8 matmul unrewritten and says nothing."
            )

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"Target {self.name!r}: {what}")

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores multiply FP8: compute capability 8.9 (Ada) or newer."""
        return self.compute_capability >= (8, 9)

    @property
    def has_block_scales(self) -> bool:
        """Whether the tensor cores multiply with block scales, and cuDNN has kernels for it:
        compute capability 10.0 (Blackwell) or newer.
        """
        return self.compute_capability >= (10, 0)

    def text_proto(self, cudnn_patch: int = 0) -> str:
        """The description XLA compiles for: the fields that every JAX release from 0.10 to 0.12 can
        read. It names cuDNN's version with this patch release, under which XLA keeps what
        autotuning chose.
        """
        major, minor = self.compute_capability
        # Without it XLA ends the process at a conversion to FP4. It adds what older chips have.
        extension = "feature_extension: ACCELERATED_FEATURES" if major >= 12 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {self.threads_per_sm}
  shared_memory_per_block: 49152  shared_memory_per_core: {self.shared_memory_per_sm}
  shared_memory_per_block_optin: {self.shared_memory_optin}
  core_count: {self.sms}  fpus_per_core: {self.fpus_per_sm}  clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.memory_bandwidth)}  l2_cache_size: {self.l2_bytes}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  dnn_version: "{self.cudnn[0]}.{self.cudnn[1]}.{cudnn_patch}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {self.cudnn[0]} minor: {self.cudnn[1]} patch: {cudnn_patch} }}
runtime_version {{ major: {self.cuda_runtime[0]} minor: {self.cuda_runtime[1]} patch: 0 }}
device_description_str: "{self.device}"
"""


def _peaks(**tflops: float) -> dict[str, float]:
    """{dtype: FLOP/s} from TFLOP/s; the two FP8 formats, and bf16 and f16, share a rate on every
    chip here.
    """
    same = {"f8": ("f8e4m3fn", "f8e5m2"), "bf16": ("bf16", "f16")}
    peaks: dict[str, float] = {}
    for name, rate in tflops.items():
        peaks |= dict.fromkeys(same.get(name, (name,)), rate * 1e12)
    return peaks


_H100_PEAKS = _peaks(f8=1978.9, bf16=989.4, tf32=494.7, f32=66.9)
_CHIPS = (
    Target(
        name="A100",
        device="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        sms=108,
        fpus_per_sm=64,
        memory_bandwidth=2.039e12,
        clock_ghz=1.41,
        memory_bytes=85100068864,
        l2_bytes=41943040,
        shared_memory_per_sm=167936,
        shared_memory_optin=166912,
        peak_flops=_peaks(bf16=312, tf32=156, f32=19.5),
        source="NVIDIA A100 80GB datasheet, SXM column, dense",
    ),
    Target(
        name="L40S",
        device="NVIDIA L40S",
        compute_capability=(8, 9),
        sms=142,
        threads_per_sm=1536,
        memory_bandwidth=8.64e11,
        clock_ghz=2.52,
        memory_bytes=47697362944,
        l2_bytes=100663296,
        shared_memory_per_sm=102400,
        shared_memory_optin=101376,
        peak_flops=_peaks(f8=733, bf16=362.05, tf32=183, f32=91.6),
        source="NVIDIA L40S datasheet, dense",
    ),
    Target(
        name="H100",
        device="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        sms=132,
        memory_bandwidth=3.35232e12,
        clock_ghz=1.98,
        memory_bytes=84942979072,
        l2_bytes=52428800,
        shared_memory_per_sm=233472,
        shared_memory_optin=232448,
        peak_flops=_H100_PEAKS,
        source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, SXM5 column, dense",
    ),
    Target(
        name="H200",
        device="NVIDIA H200 141GB HBM3e",
        compute_capability=(9, 0),
        sms=132,
        memory_bandwidth=4.8e12,
        clock_ghz=1.98,
        memory_bytes=151397597184,
        l2_bytes=52428800,
        shared_memory_per_sm=233472,
        shared_memory_optin=232448,
        peak_flops=_H100_PEAKS,
        source=(
            "NVIDIA H200 datasheet, SXM column, dense: the H100's tensor cores with faster memory"
        ),
    ),
    Target(
        name="B200",
        device="NVIDIA B200",
        compute_capability=(10, 0),
        sms=148,
        memory_bandwidth=7.67232e12,
        clock_ghz=1.965,
        memory_bytes=191514411008,
        l2_bytes=132644864,
        shared_memory_per_sm=233472,
        shared_memory_optin=232448,
        peak_flops=_peaks(f8=4500, bf16=2250, tf32=1125, f32=75, f4e2m1fn=9000),
        source=(
            "NVIDIA HGX B200 datasheet, per GPU (an eighth of the board), "
            "dense (half of the sparse figure)"
        ),
    ),
)


# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of CUDA's driver API.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def attached_gpu() -> tuple[str, tuple[int, int]] | None:
    """(device name, compute capability) of the first GPU that CUDA 13 can use here, or None. Asks
    the driver alone.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    name = ctypes.create_string_buffer(256)
    calls = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDriverGetVersion(ctypes.byref(version)),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDeviceGetName(name, 256, device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(call() != 0 for call in calls) or version.value < 13000:
        return None
    return name.value.decode(), (major.value, minor.value)


def check_platforms(platforms: str | None) -> None:
    """Refuse JAX_PLATFORMS that ask for a GPU where there is none: JAX would only say which library
    it lacks.
    """
    asked = {"cuda", "gpu"} & set((platforms or "").split(","))
    if asked and attached_gpu() is None:
        raise RuntimeError(
            f"JAX_PLATFORMS={platforms} asks for a GPU, and there is none here "
            "that CUDA 13 can use (it needs driver 580 or newer): unset it, or JAX_PLATFORMS=cpu. "
            "To compile for a named chip, such as H100, no GPU is needed."
        )


class UnknownTarget(KeyError):
    """No such chip, or no GPU attached for "local"."""

    def __str__(self):
        return self.args[0]  # KeyError would show the repr, quotes escaped


class _Targets(dict):
    """Chips by name. `TARGETS["local"]` is the attached GPU, looked up when asked for.

    Example:

        >>> from fp8lens import TARGETS
        >>> list(TARGETS)
        ['A100', 'L40S', 'H100', 'H200', 'B200']
        >>> TARGETS["H100"].peak_flops["f8e4m3fn"] / 1e12
        1978.9
    """

    def __missing__(self, name):
        if name != "local":
            raise UnknownTarget(f'unknown chip {name!r}; known are {", ".join(self)} and "local".')
        gpu = attached_gpu()
        if gpu is None:
            raise UnknownTarget(
                'target "local" needs an NVIDIA GPU and a driver for CUDA 13 (580 or newer), '
                f"and none was found; name a chip to compile for without it: {', '.join(self)}."
            )
        device, capability = gpu
        match = model(device)
        if match is None or match.compute_capability != capability:
            raise UnknownTarget(
                f"the attached GPU is {device!r} "
                f"(compute capability {capability[0]}.{capability[1]}), "
                f"whose peak rates are not recorded here; recorded are {', '.join(self)}."
            )
        return dataclasses.replace(match, name="local", device=device)


TARGETS: Mapping[str, Target] = _Targets({chip.name: chip for chip in _CHIPS})


def model(device: str) -> Target | None:
    """The chip that a driver calls `device`, as in "NVIDIA H100 80GB HBM3"; None for one with other
    rates than are recorded here, among them cards for PCIe.
    """
    words = device.upper().replace("-", " ").split()
    if {"PCIE", "NVL"} & set(words):
        return None
    return next((target for target in TARGETS.values() if target.name in words), None)


def resolve(target: str | Target) -> Target:
    """The Target of a name. Raises KeyError for an unknown chip, TypeError for anything that is
    neither a name nor a Target.
    """
    if isinstance(target, str):
        return TARGETS[target]
    if not isinstance(target, Target):
        raise TypeError(
            f"target must be a name or a Target, got {target!r}; "
            f"names are {', '.join(TARGETS)}, local."
        )
    return target
