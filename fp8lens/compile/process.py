"""The process that compiles: whether it may, and on what."""

import ctypes.util
import functools
import importlib
import importlib.metadata
import os

import jax
from jax._src import xla_bridge

from fp8lens.targets import TARGETS, attached_gpu, check_platforms

# The number of the process that was the first to use JAX, as far as is known here: this one, or one
# that this was forked from.
USED_IN: list[int] = []


def _before_fork() -> None:
    if not USED_IN and xla_bridge.backends_are_initialized():
        USED_IN.append(os.getpid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def check_process() -> None:
    """Refuse what would hang, or fail obscurely, before anything is traced or lowered."""
    if USED_IN and USED_IN[0] != os.getpid():
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads it lacks: "
            "it would wait for them without end. "
            'Start it with multiprocessing.get_context("spawn").'
        )
    check_platforms(jax.config.jax_platforms)


def installed(distribution: str) -> bool:
    """Whether a package of this name is installed, without importing it."""
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def gpu_available() -> bool:
    """Whether functions can run on an attached GPU: a driver for CUDA 13, a GPU, and CUDA's
    libraries.

    Example:

        >>> from fp8lens import gpu_available
        >>> isinstance(gpu_available(), bool)
        True
    """
    platforms = os.environ.get("JAX_PLATFORMS", "") or (jax.config.jax_platforms or "")
    if platforms not in ("", "cuda", "gpu") or attached_gpu() is None:
        return False
    # Only asked where there is a GPU: to look for a library starts other programs.
    return installed("nvidia-cublas") or ctypes.util.find_library("cublasLt") is not None


def choose_platform() -> None:
    """Have JAX compute on the CPU if there is no GPU to use and the user has chosen no platform.

    Otherwise JAX's start-up of the CUDA plugin prints a traceback, and then the compile-only
    topology is lost. With a GPU, JAX is left alone.
    """
    if not jax.config.jax_platforms and not gpu_available():
        jax.config.update("jax_platforms", "cpu")


def require_gpu() -> None:
    """Raise KeyError where no GPU is attached, and RuntimeError where JAX does not run on it."""
    if gpu_available():
        return
    name = TARGETS["local"].device  # raises where no GPU is attached
    raise RuntimeError(
        f"a GPU is attached ({name}), but JAX runs on the CPU here. Install CUDA's libraries with "
        "pip install 'jax[cuda13]', unset JAX_PLATFORMS, and start Python again."
    )
