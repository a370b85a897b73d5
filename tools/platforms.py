"""Whether JAX can start as JAX_PLATFORMS asks, said before JAX fails to."""

import os

from fp8lens.targets import attached_gpu


def missing_gpu() -> str | None:
    """Why JAX cannot start here as JAX_PLATFORMS asks, and what to do; None where it can."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if not {"cuda", "gpu"} & set(asked.split(",")) or attached_gpu() is not None:
        return None
    return (
        f"JAX_PLATFORMS={asked} asks for a GPU, and no NVIDIA GPU with a driver for CUDA 13 (580 "
        "or newer) answers here. Unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu: to compile for "
        "Hopper needs no GPU."
    )


def require_platform() -> None:
    """End with that sentence (SystemExit) where JAX cannot start."""
    if why := missing_gpu():
        raise SystemExit(why)
