"""Kernels that nobody fused, and kernels that nobody knows."""

import re
from collections.abc import Mapping

from fp8lens.hlo.program import setting
from fp8lens.hlo.values import operand
from fp8lens.matmul.ledger import Line
from fp8lens.matmul.ptx import instructions, of_kernel
from fp8lens.matmul.unfused import UnfusedKernel
from fp8lens.rules.facts import Matmul, main_work
from fp8lens.rules.rule import Found, Lost, found_if, rule


class Work:
    """What kernels do outside of a matmul's call: `works` as UnfusedKernel has it."""

    def __init__(self, matmul: Matmul, works: list[str]):
        self.matmul, self.works = matmul, works

    @property
    def fields(self) -> dict[str, str]:
        """What was lost, and all that the kernels do."""
        return {"lost": main_work(self.works), "works": ", ".join(dict.fromkeys(self.works))}


@rule(
    "outside-of-a-kernel",
    reason=(
        "kernels do {works} on what the {library} kernel has written, and XLA did not fuse it "
        "into that"
    ),
    fix=(
        "look at what stands between, print(inspect(fn, *args).hlo); in Triton's place take "
        "gemm='cublaslt', whose rules are known here"
    ),
    source=(
        "XLA fuses behind a dot what its Triton emitter can tile (gemm_fusion.cc), behind a "
        "library's kernel nothing"
    ),
)
def outside_of_a_kernel(work: Work) -> Found | None:
    """XLA fused nothing behind a kernel that is not cuBLASLt's."""
    return Found(work.fields)


@rule(
    "unknown-outside",
    reason=(
        "unknown: kernels do {works} outside of the call, and no rule known here says why (the "
        "call: epilogue {epilogue}, scales {scales}, result {out})"
    ),
    fix=(
        "set TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=gemm_rewriter=1 before Python starts, and "
        "read XLA's log"
    ),
    source="none found",
)
def unknown_outside(work: Work) -> Found | None:
    """Kernels do what the call could have done, and no rule known here says why."""
    return Found(work.fields)


@rule(
    "unknown-kernel",
    lost=Lost.KERNEL,
    reason=(
        "unknown: the kernel {kernel} {does}, and what it does there is not known here ({opcode})"
    ),
    fix="look at it: print_hlo_module(aot_compile(fn, *args))",
    source="none found",
)
def unknown_kernel(o: UnfusedKernel) -> Found | None:
    """A kernel around the matmul has an operation that is not known here."""
    does = "reads the result" if o.after else "makes an operand"
    return found_if(o.unknown, kernel=o.instruction.name, does=does, opcode=o.unknown)


@rule(
    "multiplied-twice",
    lost=Lost.DUPLICATE,
    reason=(
        "the same matrices are multiplied twice, here and in {other}: one result is read in two "
        "forms"
    ),
    fix=(
        "derive both from one form; where one is an amax, take it of the unscaled result, and "
        "multiply that number by the scale"
    ),
    source="HandleMultiply and HandleConvert: each rewrites its own copy of the call",
)
def twice(other: str) -> Found | None:
    """XLA made two calls of one dot, one for each form of its result."""
    return Found(other=other)


# Kernels that HLO does not tell of ----------------------------------------------------------------


class Opaque:
    """A kernel that is no instruction of HLO's, and what its code says that it multiplies."""

    def __init__(self, line: Line, ptx: Mapping[str, str]):
        i = line.kernel.instruction
        self.instruction, self.target = i, i.custom_call_target or i.opcode
        self.ptx = of_kernel(str(setting(i, "name")), ptx) if "triton" in self.target else ""
        code = self.ptx
        if self.target.startswith("mosaic_gpu"):
            # Mosaic GPU hands XLA MLIR's bytecode, which has each multiply instruction in words.
            code = i.attributes.get("backend_config", "")
        self.types = instructions(code)

    @property
    def wide(self) -> str:
        """The types that it multiplies and that are not FP8."""
        return " and ".join(name for name in self.types if not name.startswith("f8"))

    @property
    def is_known(self) -> bool:
        """Whether all that it multiplies is FP8, or nothing is."""
        if self.types:
            return not self.wide
        # Which a loop may sum, without an instruction for matrices
        products = re.search(r"\b(fma|mul)\.(\w{1,30}\.){0,20}b?f(16|32|64)", self.ptx)
        return bool(self.ptx) and not products


@rule(
    "triton-kernel",
    lost=Lost.FP8,
    reason="the kernel is somebody's own, written for Triton, and multiplies {types}",
    fix=(
        "leave it to XLA; or, for B200 and later, give its dots FP8 operands: for Hopper JAX "
        "multiplies those in f16"
    ),
    source="the kernel's PTX: its mma instruction",
)
def triton_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Triton, as by Pallas, multiplies a wide type."""
    return found_if(kernel.types and kernel.ptx, types=kernel.wide)


@rule(
    "mosaic-kernel",
    lost=Lost.FP8,
    reason="the kernel is somebody's own, written in Mosaic GPU, and multiplies {types}",
    fix=(
        "give its plgpu.wgmma FP8 arrays, the right one [N, K] and transposed in the call; or "
        "leave it to XLA"
    ),
    source="the kernel's MLIR: its wgmma, mma or tcgen05.mma instruction",
)
def mosaic_kernel(kernel: Opaque) -> Found | None:
    """A kernel written in Mosaic GPU, as by Pallas, multiplies a wide type."""
    return found_if(kernel.types and not kernel.ptx, types=kernel.wide)


@rule(
    "wide-convolution",
    lost=Lost.FP8,
    reason=(
        "a convolution runs in {dtype}, by cuDNN: XLA's FP8 rewriting of it is not looked into here"
    ),
    fix="leave it, or write it as a matmul of patches",
    source="XLA's conv_rewriter.cc",
)
def convolution(kernel: Opaque) -> Found | None:
    """A convolution of wide types."""
    named = ("convForward", "convBackward")
    if kernel.instruction.opcode != "convolution" and not any(n in kernel.target for n in named):
        return None
    dtype = operand(kernel.instruction, 0).shape.dtype
    return found_if(not dtype.startswith("f8"), dtype=dtype)


@rule(
    "opaque-kernel",
    lost=Lost.KERNEL,
    reason="unknown: what this kernel multiplies, if anything, HLO does not tell ({target})",
    fix="ask its author; assert_fp8_gemms(..., count=...) asks for the other matmuls alone",
    source="none found",
)
def opaque_kernel(kernel: Opaque) -> Found | None:
    """A library's kernel, or somebody's own: HLO does not tell what it multiplies."""
    return Found(target=kernel.target)


#: Tried in this order, for a kernel that is not known to multiply FP8 alone.
OPAQUE = (triton_kernel, mosaic_kernel, convolution, opaque_kernel)
