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


def _seen_forward(was: jax.Array) -> tuple[jax.Array, jax.Array]:
    return was, was


def _seen_backward(was: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    is_new = jnp.any(gradient != was, -1, keepdims=True)
    return (jnp.where(is_new, gradient, 0).at[:, 1:].set(0),)


_seen.defvjp(_seen_forward, _seen_backward)


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
        # Of the latest steps: x, w, and the result's gradient.
        self.amaxes = Overwrite(jnp.zeros((3, length)))

    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product of `x` and `kernel`, in x's type, as jax.lax.dot_general gives it."""
        (x_axes, kernel_axes), batch = dimension_numbers
        n = len(x_axes)
        takes_last = tuple(x_axes) == tuple(range(x.ndim - n, x.ndim))
        takes_first = tuple(kernel_axes) == tuple(range(n))
        if any(batch) or not takes_last or not takes_first:
            raise ValueError(
                "Fp8Dot multiplies the input's last dimensions with the kernel's first, "
                f"not {dimension_numbers} of {x.ndim} and {kernel.ndim}: "
                "transpose before, or leave it bf16"
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
        amaxes = Amaxes(*_seen(self.amaxes[...]))
        y = fp8_linear(x.reshape(-1, len(w)), w.reshape(len(w), -1).T, amaxes)
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
    has_histories = bool(nnx.split_state(parameters, Overwrite, ...)[0])
    if has_histories or isinstance(optimizer, nnx.ModelAndOptimizer):
        raise ValueError(
            "an optimizer that has more than the parameters: "
            "nnx.Optimizer(model, tx, wrt=nnx.Param)"
        )
    seen, rest = nnx.split_state(gradient, Overwrite, ...)
    kept = nnx.state(model, Overwrite)
    structure: Any = jax.tree.structure(kept)  # Any: JAX's own hints do not let them be compared
    if structure != jax.tree.structure(seen):
        raise ValueError(
            "a gradient without Overwrite: take it by helpers.models.nnx.value_and_grad"
        )
    by_parameter = nnx.state(rest, optimizer.wrt)
    optimizer.update(model, jax.tree.map(lambda g, p: g.astype(p.dtype), by_parameter, parameters))
    nnx.update(model, jax.tree.map(_pushed, kept, seen))


def _pushed(was: jax.Array, new: jax.Array) -> jax.Array:
    """Histories with this step's amaxes in front: where there are none, as they were."""
    latest = new[..., :1]
    is_seen = (latest > 0) & jnp.isfinite(latest)
    return jnp.where(is_seen, jnp.concatenate([latest, was[..., :-1]], -1), was)
