"""Whether JAX can start as JAX_PLATFORMS asks, said before hundreds of tests fail for it."""

import os

from fp8lens.targets import attached_gpu


def missing_gpu() -> str | None:
    """Why JAX cannot start here as JAX_PLATFORMS asks; None where it can."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" not in asked or attached_gpu() is not None:
        return None
    return f"JAX_PLATFORMS={asked}, and no NVIDIA GPU answers here: unset it"
