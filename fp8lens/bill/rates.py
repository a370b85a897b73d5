"""What part of a chip's peak and bandwidth kernels reach, and how long a launch takes: to estimate
a time that is nearer to what is measured than a roofline is.

The likely rates of kernels are those of this project's own run on an H200: JAX 0.11.2, cuBLAS 13.1,
in notebooks/results/h200, where the GPU's own clock tells the longest kernels of each program
apart. They are measured of other programs, at other sizes: each has a range, which contains what
others publish, and a time that is computed with them has one too. On another chip the shares can
differ. An H100 has the same multiprocessors and slower memory: a kernel that does not wait for
memory reaches a larger share of its bandwidth.
Whole training steps, which keep the chip at its power limit for long, took up to 12% longer than
likely by the host's clock, and up to 23% with kernels by hand.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from fp8lens.formats import is_narrow
from fp8lens.hlo.parse import Instruction
from fp8lens.hlo.program import results
from fp8lens.hlo.values import changes_layout, operand
from fp8lens.matmul.kernels import codes
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.rows import ENGINE, ENGINE_ATTENTION
from fp8lens.matmul.unfused import inside
from fp8lens.targets import Target


@dataclasses.dataclass(frozen=True)
class Rate:
    """The share of a chip's peak, or of its memory's bandwidth, that a class of kernels reaches:
    what is likely, the least, and the most that is measured or published. `source` says where, and
    how it is computed from that.
    """

    share: float
    least: float
    most: float
    source: str


#: By what the kernels do: of "matmul" and both kinds of attention a share of the peak, of the
#: others one of the bandwidth. A matmul's memory traffic is moved at the rate of "operands".
RATES = {
    "matmul": Rate(
        0.70,
        0.57,
        0.81,
        "measured on the H200: 0.64 to 0.76 at 8192^3, at the chip's power limit, 0.74 to 0.81 at "
        "4096^3, bf16 and FP8 alike; likely is the middle kernel. The least is FBGEMM's, pull 2546 "
        "(2024-04-29, an H100 at 500 W)",
    ),
    "attention": Rate(
        0.57,
        0.5,
        0.64,
        "cuDNN's in bf16, measured on the H200: forward 0.64, with the backward pass 0.57; "
        "the least is with the small kernels that cuDNN adds to a backward pass",
    ),
    "FP8 attention": Rate(
        0.38,
        0.36,
        0.41,
        "cuDNN's, measured on the H200: forward 0.41, with the backward pass 0.36, whose gradients "
        "were wrong there; likely is between",
    ),
    "operands": Rate(
        0.75,
        0.5,
        0.87,
        "measured on the H200, up to 64 rows: bf16 0.79 to 0.84, FP8 by cuBLASLt 0.71, FP8 weights "
        "by Triton 0.56 to 0.73; likely is between. Least and most are published: DeepGEMM "
        "(2025-02-26, an H800), vLLM's pull 49363 (an H100), in notebooks/results/published.json",
    ),
    "pointwise": Rate(
        0.70,
        0.62,
        0.92,
        "measured on the H200: 0.70 of 4.3 GB in bf16, 0.62 to 0.82 after a matmul; the most is "
        "what torchao's roofline_utils.py (2026-05-05) takes for an H100",
    ),
    "convert": Rate(
        0.49,
        0.24,
        0.76,
        "pointwise to or from FP8, measured on the H200: 0.53 of 3.2 GB, 0.44 to 0.52 of 67 "
        "million values, quantized or dequantized, as long as a kernel takes that moves 4 bytes a "
        "value; the least is with a gelu. The most is as many bytes a second on an H100",
    ),
    "reduction": Rate(
        0.75,
        0.32,
        0.96,
        "measured on the H200: amaxes 0.86 to 0.96, an amax that quantizes too 0.57 to 0.86, "
        "softmax 0.52 and 0.75. The least is XLA's quantizer of blocks on a GB200 (marin, issue "
        "7282, 2026-07-16): 0.346 ms for [65536, 2560] in bf16, of which XLA's kernels read and "
        "write 881 MB: 2.5 of 8 TB/s",
    ),
    "transpose": Rate(
        0.5,
        0.32,
        0.88,
        "FP8 transposes reach 0.64 on the H200, by the host's clock. Kernels that quantize and "
        "transpose were not seen alone: 0.37 is left for them in the FP8 training step with XLA's "
        "attention if all others have their rates; likely is between. The least is that of "
        "reductions, the most that of the driver's copy",
    ),
}


@dataclasses.dataclass(frozen=True)
class Gap:
    """How long a GPU does nothing between two kernels, in seconds: what is likely on a Hopper GPU,
    the least, and the most that is published.
    """

    likely: float
    least: float
    most: float
    source: str


#: By how kernels are launched. XLA's command buffers are CUDA graphs.
LAUNCHES = {
    "in CUDA graphs": Gap(
        1.3e-6,
        0.8e-6,
        1.3e-6,
        "likely and most: Hazy Research, Look Ma, No Bubbles (2025-05-27), kernels that do nothing "
        "on an H100; least: Mirage Persistent Kernel (arXiv 2512.22219, 2025-12-22), a decoding "
        "step of Qwen3-8B with 293 kernels on a B200",
    ),
    "without": Gap(
        2.1e-6,
        2.1e-6,
        3.8e-6,
        "likely and least: Hazy Research (2025-05-27), a CUDA stream on an H100; most: Mirage "
        "Persistent Kernel (2025-12-22), eager execution on a B200",
    ),
}


def kind_of(line: Line) -> str:
    """What rate is a kernel's: a name in RATES; "" where it has none, as a collective, or a kernel
    that is not looked into.
    """
    if line.what in ("collective", "opaque"):
        return ""
    kind, i = line.kernel.kind, line.kernel.instruction
    if line.what == "matmul":
        if not kind.startswith(("__cudnn$fmha", ENGINE_ATTENTION)):
            return "matmul"
        return "FP8 attention" if _touches_fp8(i) else "attention"
    if kind.startswith(ENGINE):
        return _kind_of_engines(i, kind)
    parts = inside(i)
    if any(i.opcode in ("reduce", "reduce-window") for i in parts):
        return "reduction"
    if any(map(changes_layout, parts)):
        return "transpose"
    return "convert" if _touches_fp8(i) else "pointwise"


def _kind_of_engines(i: Instruction, target: str) -> str:
    """The rate of a kernel of Transformer Engine's. None of them was measured here: it is that of
    XLA's kernels which do the same.
    """
    if len(codes(i)) > 1:
        return "transpose"
    if "norm" in target or all(shape.size == 1 for shape in results(i)):
        return "reduction"
    return "convert" if _touches_fp8(i) else "pointwise"


def _touches_fp8(i: Instruction) -> bool:
    """Whether a kernel reads or writes an array in FP8."""
    read = [operand(i, n).shape for n in range(len(i.operands))]
    return any(is_narrow(shape.dtype) for shape in [*read, *results(i)])


class Time(NamedTuple):
    """A time in seconds that is computed with such rates: likely, and if every kernel reached the
    most, or only the least, that is measured or published.
    """

    likely: float
    shortest: float
    longest: float


def launches(kernels: int) -> dict[str, Time]:
    """How long a GPU waits for so many kernels to start, at the gaps that are published for each
    of LAUNCHES. This is in neither of the other times, and nothing here is measured.
    """
    return {
        how: Time(kernels * gap.likely, kernels * gap.least, kernels * gap.most)
        for how, gap in LAUNCHES.items()
    }


def calibrated(lines: Iterable[Line], chip: Target) -> Time | None:
    """How long kernels take, one after the other, at the rates of their class; the launches cost
    nothing. None where a kernel's class has no rate (a collective, an opaque
    kernel), or the chip none for a type.
    """
    kernels = [(line.kernel, line.runs, kind_of(line)) for line in lines]

    def together(end: str) -> float:
        slowed = _slowed(chip, end)
        return sum(kernel.seconds(slowed[kind]) * runs for kernel, runs, kind in kernels)

    try:
        return Time(together("share"), together("most"), together("least"))
    except KeyError:
        return None


def _slowed(chip: Target, end: str) -> dict[str, Target]:
    """The chip as each kind of kernel sees it, at the likely share of its rates ("share"), or at
    the "most" or the "least".
    """
    share = {kind: getattr(rate, end) for kind, rate in RATES.items()}
    found = {}
    for kind in RATES:
        multiplies = kind in ("matmul", "attention", "FP8 attention")
        of_peak = share[kind] if multiplies else 1.0
        of_memory = share["operands" if multiplies else kind]
        found[kind] = dataclasses.replace(
            chip,
            memory_bandwidth=chip.memory_bandwidth * of_memory,
            peak_flops={dtype: flops * of_peak for dtype, flops in chip.peak_flops.items()},
        )
    return found
