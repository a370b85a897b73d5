"""FP8 for the layers of Flax NNX, which has none: chapter 08's product, as what a layer takes for its `dot_general`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("helpers.nnx needs Flax, of the group lab in pyproject.toml: pip install flax") from error

from helpers.recipes import Amaxes, fp8_linear


class Overwrite(nnx.Variable):
    """State that comes back as its own gradient, and takes the place of the old: no optimizer may have it."""


class Fp8Dot(nnx.Module):
    """For `dot_general=` of nnx.Linear and nnx.LinearGeneral: E4M3 by E4M3, and E5M2 gradients, by delayed scaling.

    Each call in a step needs one of its own. `length` is how many steps are remembered. Raises ValueError for anything
    but a contraction of the input's last dimensions with the kernel's first.
    """

    def __init__(self, length: int = 16):
        self.amaxes = Overwrite(jnp.zeros((3, length)))  # of the latest steps: x, w, and the result's gradient

    def __call__(self, x: jax.Array, kernel: jax.Array, dimension_numbers: Any, precision: Any = None,
                 preferred_element_type: Any = None, out_sharding: Any = None) -> jax.Array:
        (x_axes, kernel_axes), batch = dimension_numbers
        n = len(x_axes)
        if any(batch) or tuple(x_axes) != tuple(range(x.ndim - n, x.ndim)) or tuple(kernel_axes) != tuple(range(n)):
            raise ValueError(f"Fp8Dot multiplies the input's last dimensions with the kernel's first, and is asked for "
                             f"{dimension_numbers} of {x.ndim} and {kernel.ndim}: transpose before, or leave it bf16")
        if not (precision is None and preferred_element_type is None and out_sharding is None):
            raise ValueError("Fp8Dot takes no precision, preferred_element_type or out_sharding: leave them out")
        k = math.prod(kernel.shape[:n])
        y = fp8_linear(x.reshape(-1, k), kernel.reshape(k, -1).T, Amaxes(*self.amaxes[...]))
        return y.reshape(*x.shape[:x.ndim - n], *kernel.shape[n:])


def value_and_grad(loss: Any) -> Any:
    """nnx.value_and_grad of `loss(model, ...)`, by the model's parameters and by its Overwrite."""
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Any(nnx.Param, Overwrite)))


def update(model: nnx.Module, optimizer: nnx.Optimizer, gradient: nnx.State) -> None:
    """One step: the optimizer, made with wrt=nnx.Param, gets the parameters' gradient; Overwrite is overwritten."""
    new, rest = nnx.split_state(gradient, Overwrite, ...)
    optimizer.update(model, rest)
    nnx.update(model, new)
