"""Compile, read and judge FP8 matmuls in JAX: for Hopper and its relatives, on any machine."""

from helpers.aot import aot_compile, gpu_available, run
from helpers.targets import TARGETS, Target

__all__ = ["TARGETS", "Target", "aot_compile", "gpu_available", "run"]
