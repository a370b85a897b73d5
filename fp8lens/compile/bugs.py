"""Which of XLA's errors and aborts are of its own making, and the way around each."""

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
    "has_aux_output": (
        "XLA's FP8 call cannot also return the input of a fused gelu. Put that input through "
        "jax.lax.optimization_barrier before gelu, and gelu stays outside."
    ),
}
# Options that end the process at other numbers: most tell one of XLA's names by its number, and it
# does not look.
FATAL_BUT = {
    "xla_gpu_command_buffer_update_mode": range(3),
    "xla_gpu_shape_checks": range(3),
    "xla_gpu_experimental_parallel_collective_overlap_limit": range(1, 2**31),
    "xla_gpu_force_compilation_parallelism": range(1025),
}
