"""FP8 for the layers of Flax NNX, which has none of its own: chapter 08's product, for a layer's
`dot_general`.
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "helpers.models.nnx needs Flax, of the group lab in pyproject.toml: pip install flax"
    ) from error

from helpers.numerics.recipes import Amaxes, fp8_linear


class Overwrite(nnx.Variable):
    """State that comes back as its own gradient, and takes the place of the old: no optimizer may
    have it.
    """


@jax.custom_vjp
def _seen(was: jax.Array) -> jax.Array:
    """Histories, whose gradient is the new amax in front and zeros, or zeros alone where none was
    pushed: what several uses add is then no more than their amaxes.
    """
    return was


_seen.defvjp(
    lambda was: (was, was),
    lambda was, g: (jnp.where(jnp.any(g != was, -1, keepdims=True), g, 0).at[:, 1:].set(0),),
)


class Fp8Dot(nnx.Module):
    """For `dot_general=` of nnx.Linear and nnx.LinearGeneral, an instance for each layer, not the
    class: E4M3 by E4M3, and E5M2 gradients, by delayed scaling. A step is `value_and_grad` and
    `update` of this file.

    `length` is how many steps are remembered. Raises ValueError for anything but a contraction of
    the input's last dimensions with the kernel's first, in float16, where scales underflow, and on
    a mesh of AxisType.Explicit. What is infinite is clamped, and does not show; a NaN does. Within
    jax.shard_map it needs check_vma=False.
    """

    def __init__(self, length: int = 16):
        if length < 1:
            raise ValueError(f"length is {length}: at least one step must be remembered")
        self.amaxes = Overwrite(
            jnp.zeros((3, length))
        )  # of the latest steps: x, w, and the result's gradient

    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        (x_axes, kernel_axes), batch = dimension_numbers
        n = len(x_axes)
        if (
            any(batch)
            or tuple(x_axes) != tuple(range(x.ndim - n, x.ndim))
            or tuple(kernel_axes) != tuple(range(n))
        ):
            raise ValueError(
                "Fp8Dot multiplies the input's last dimensions with the kernel's first, not"
                f" {dimension_numbers} of {x.ndim} and {kernel.ndim}: transpose before, or leave it"
                " bf16"
            )
        if x.dtype == jnp.float16:
            raise ValueError(
                "Fp8Dot's scales underflow in float16: give the layer dtype=jnp.bfloat16"
            )
        if jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
            raise ValueError(
                "Fp8Dot leaves shardings to XLA: make the mesh with axis_types=(AxisType.Auto, ...)"
            )
        if not (precision is None and preferred_element_type is None and out_sharding is None):
            raise ValueError(
                "Fp8Dot takes no precision, preferred_element_type or out_sharding: leave them out"
            )
        w = jax.lax.collapse(kernel, 0, n)
        y = fp8_linear(
            x.reshape(-1, len(w)), w.reshape(len(w), -1).T, Amaxes(*_seen(self.amaxes[...]))
        )
        return y.reshape(*x.shape[: x.ndim - n], *kernel.shape[n:])


def value_and_grad(loss: Any, wrt: Any = nnx.Param, **options: Any) -> Any:
    """nnx.value_and_grad of `loss(model, ...)`, by the model's `wrt` and by its Overwrite."""
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Any(wrt, Overwrite)), **options)


def update(model: nnx.Module, optimizer: nnx.Optimizer, gradient: nnx.State) -> None:
    """One step: the optimizer, made with wrt=nnx.Param, gets the parameters' gradient, and each
    history of amaxes what this step saw. Nothing is taken of a layer that the loss left out, or of
    what had a NaN. Of a layer used n times, also by vmap, the amaxes are added, which costs the
    scale up to a factor of n. Clip, unscale and average in the optimizer, or all but the Overwrite:
    those are no gradients. Over devices take their maximum. Raises ValueError for a gradient
    without Overwrite, and for an optimizer that has the model, or the Overwrite.
    """
    parameters = nnx.state(model, optimizer.wrt)
    if (
        isinstance(optimizer, nnx.ModelAndOptimizer)
        or nnx.split_state(parameters, Overwrite, ...)[0]
    ):
        raise ValueError(
            "an optimizer that has more than the parameters: nnx.Optimizer(model, tx,"
            " wrt=nnx.Param)"
        )
    seen, rest = nnx.split_state(gradient, Overwrite, ...)
    if jax.tree.structure(kept := nnx.state(model, Overwrite)) != jax.tree.structure(seen):
        raise ValueError(
            "a gradient without Overwrite: take it by helpers.models.nnx.value_and_grad"
        )
    optimizer.update(
        model,
        jax.tree.map(lambda g, p: g.astype(p.dtype), nnx.state(rest, optimizer.wrt), parameters),
    )

    push = lambda was, new: jnp.where(
        (new[..., :1] > 0) & jnp.isfinite(new[..., :1]),
        jnp.concatenate([new[..., :1], was[..., :-1]], -1),
        was,
    )
    nnx.update(model, jax.tree.map(push, kept, seen))
