"""The process that compiles: whether it may, and on what."""

import contextlib
import contextvars
import ctypes.util
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Iterator

import jax
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as attention

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


# What answers for cuDNN in this thread, as a number: 9.10 is 91000.
_CUDNN: contextvars.ContextVar[int | None] = contextvars.ContextVar("cudnn", default=None)
_of_jax = attention.check_cudnn_version


def _version_of_cudnn() -> int:
    try:
        return _of_jax()
    except RuntimeError:
        if (version := _CUDNN.get()) is None:
            raise
        return version


attention.check_cudnn_version = _version_of_cudnn


@contextlib.contextmanager
def with_cudnn(version: tuple[int, int]) -> Iterator[None]:
    """Within it, attention with `implementation="cudnn"` can be traced and lowered where cuDNN is
    not installed: its version is all that JAX asks for, and XLA compiles without it.
    """
    token = _CUDNN.set(version[0] * 10000 + version[1] * 100)
    try:
        yield
    finally:
        _CUDNN.reset(token)
