"""Which errors and aborts of JAX and XLA are not the program's, and the way around each."""

from collections.abc import Mapping

#: The packages that have NVIDIA's assembler.
ASSEMBLER = "nvidia-nvjitlink nvidia-nvvm nvidia-cuda-runtime"
_NO_ASSEMBLER = (
    "XLA made PTX for a kernel but found nothing to assemble it with: "
    f"pip install {ASSEMBLER}, or put a CUDA 13 toolkit's ptxas on PATH."
)
ODD_SCALED_DOT = (
    "XLA's Triton takes a scale for 16 or 32 elements of each operand of jax.lax.scaled_dot: give "
    "ones, one for each 32, in place of a scale that is left out; or turn Triton off with "
    "gemm='cublaslt'."
)
# A part of what XLA says, and what to do about it.
COMPILER_BUGS = {
    "algebraic_simplifier.cc": (
        "XLA took an amax of rows, columns or tiles for the whole result's, which the FP8 call "
        "gives. Put the result through jax.lax.optimization_barrier before taking its amax."
    ),
    "A cycle is detected": (
        "XLA fused an amax into the matmul whose own FP8 conversion waits for it. Put the result "
        "through jax.lax.optimization_barrier before taking its amax, or use an earlier step's."
    ),
    "Failed to serialize StableHLO": (
        "JAX 0.12 cannot hand a dot's ANY_F8 algorithm to XLA: leave the precision out."
    ),
    "No candidates could be compiled": (
        "XLA's autotuner hides why no kernel runs a matmul: compile once with the option "
        "xla_gpu_autotune_level=0 to see it."
    ),
    "Unexpected operand types for cublaslt matmul": (
        "cuBLASLt has no kernel for these types. For an E5M2 result make one of the operands "
        "float8_e5m2, or convert the result to float8_e4m3fn."
    ),
    "higher than default SM version assumed": (
        "A process that has compiled a Mosaic GPU kernel for an older chip cannot compile every "
        "program with one for a newer chip: compile for the newest chip first, or in a process of "
        "its own."
    ),
    "not implemented for opcode ragged-dot": (
        "With xla_gpu_experimental_use_ragged_dot_fusion XLA leaves a ragged dot to cuDNN, whose "
        "kernel it can choose only on a GPU: compile there, or leave the option out."
    ),
    # It lacks the assembler, or a library of the device's.
    "No PTX compilation provider": _NO_ASSEMBLER,
    "libdevice": _NO_ASSEMBLER,
    "nvvm": _NO_ASSEMBLER,
    "scale factor must be 16 or 32": ODD_SCALED_DOT,
    "Unsupported: scaled-dot": ODD_SCALED_DOT,  # XLA says so, or ends the process
    "Unable to convert MHLO to StableHLO": (
        "XLA does not divide jax.lax.scaled_dot among devices, if the program has that: call "
        "jax.nn.scaled_matmul in jax.shard_map."
    ),
    "Cannot select: intrinsic %llvm.nvvm.tcgen05": (
        "The kernel has tcgen05's instructions, which compute capability 10 alone has: compile for "
        "B200."
    ),
    "has_aux_output": (
        "XLA's FP8 call cannot also return the input of a fused gelu. Put that input through "
        "jax.lax.optimization_barrier before gelu, and gelu stays outside."
    ),
}
NEEDS_A_MESH = (
    'The function needs another mesh than it is compiled for. Give mesh_shape, as in {"data": 8}; '
    "a mesh of its own must be one of fp8lens.mesh."
)
# The same of what JAX says while it traces and lowers.
WITHOUT_A_GPU = {
    "Unknown backend: 'gpu'": (
        "The function calls Python back (jax.debug.print, jax.pure_callback, io_callback), for "
        "which JAX asks for a GPU: leave that out to compile without one."
    ),
}


def add_notes(error: BaseException, known: Mapping[str, str]) -> None:
    """Add to an error the notes of those signs that stand in it."""
    for sign, note in known.items():
        if sign in str(error):
            error.add_note(note)


def advice(error: BaseException) -> str:
    """The notes that `add_notes` has added to an error, as one text; "" for none."""
    known = {*COMPILER_BUGS.values(), *WITHOUT_A_GPU.values(), NEEDS_A_MESH}
    return " ".join(note for note in getattr(error, "__notes__", ()) if note in known)


# With this option XLA leaves ragged dots to cuDNN 9.22 or newer, and aborts where there is no GPU.
RAGGED_DOTS_TO_CUDNN = "xla_gpu_experimental_use_ragged_dot_fusion"
