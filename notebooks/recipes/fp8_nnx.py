"""FP8 for the layers of Flax NNX, which has no FP8 of its own: a product for the `dot_general` of
a layer, and a training step that keeps its scales.

Copy `fp8_linear.py` beside it. It needs JAX, Flax and Optax. Chapter 10 shows how it works, in
section "NNX".

    model = Model(...)  # whose layers are nnx.Linear(..., dot_general=Fp8Dot())
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, target):
        loss, gradient = value_and_grad(loss_of)(model, x, target)
        update(model, optimizer, gradient)
        return loss

What it leaves out: attention's einsums, in which NNX takes no `dot_general`; careful sums in the
backward pass; float16, where scales underflow; meshes of AxisType.Explicit; and checks of what it
is given.

Test what XLA makes of the step. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts:
by XLA's default Triton may take these matmuls, and then they are not FP8. Without nnx.jit the step
loses its backward pass: what it writes into the model is no result of the compiled function, so
the compiler removes it.

    from fp8lens import assert_fp8_gemms
    assert_fp8_gemms(step, model, optimizer, x, target, count=3 * LAYERS - 1, target="H100")

The first layer's input needs no gradient, so one matmul is missing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax  # Flax installs it
from flax import nnx

from fp8_linear import Amaxes, fp8_linear


class Overwrite(nnx.Variable):
    """State whose gradient is its new value. The step overwrites the state with it. Do not give it
    to an optimizer.
    """


@jax.custom_vjp
def _seen(was: jax.Array) -> jax.Array:
    """The histories, with another gradient: the new amax first, then zeros. If a use added no amax,
    all of it is zero. So the sum over several uses is the sum of their new amaxes, and the old ones
    are not added.
    """
    return was


def _seen_forward(was: jax.Array) -> tuple[jax.Array, jax.Array]:
    return was, was


def _seen_backward(was: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    is_new = jnp.any(gradient != was, -1, keepdims=True)
    return (jnp.where(is_new, gradient, 0).at[:, 1:].set(0),)


_seen.defvjp(_seen_forward, _seen_backward)


class Fp8Dot(nnx.Module):
    """An FP8 matmul for `dot_general=` of nnx.Linear and nnx.LinearGeneral, with delayed scaling.
    It multiplies E4M3 by E4M3, and in the backward pass E5M2 gradients by E4M3.

    Pass each layer an instance of its own, `dot_general=Fp8Dot()`, not the class. Make a training
    step of `value_and_grad` and `update` of this file.

    `length` is the number of steps whose amaxes are remembered. A call raises ValueError if it is
    not a contraction of the input's last dimensions with the kernel's first. A NaN shows in the
    result. An infinite number does not show: it is clamped. Within jax.shard_map it needs
    check_vma=False.
    """

    def __init__(self, length: int = 16):
        # Three histories, the latest step first: of x, of w, and of the result's gradient.
        self.amaxes = Overwrite(jnp.zeros((3, length)))

    def __call__(
        self, x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **_: Any
    ) -> jax.Array:
        """The product of `x` and `kernel`, with the shape of jax.lax.dot_general's, in x's type."""
        n = len(dimension_numbers[0][0])
        axes = tuple(range(x.ndim - n, x.ndim)), tuple(range(n))
        if jax.tree.leaves(dimension_numbers) != jax.tree.leaves(axes):
            raise ValueError(
                "Fp8Dot multiplies the input's last dimensions with the kernel's first, "
                f"not {dimension_numbers} of {x.ndim} and {kernel.ndim}: "
                "transpose the operands before, or leave this layer in bf16"
            )
        w = jax.lax.collapse(kernel, 0, n)
        amaxes = Amaxes(*_seen(self.amaxes[...]))
        y = fp8_linear(x.reshape(-1, len(w)), w.reshape(len(w), -1).T, amaxes)
        return y.reshape(*x.shape[: x.ndim - n], *kernel.shape[n:])


def value_and_grad(loss: Any, wrt: Any = nnx.Param, **options: Any) -> Any:
    """nnx.value_and_grad of `loss(model, ...)`, with respect to the model's `wrt` and Overwrite."""
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Any(wrt, Overwrite)), **options)


def update(model: nnx.Module, optimizer: nnx.Optimizer, gradient: nnx.State) -> None:
    """One step. The optimizer, made with wrt=nnx.Param, gets the gradient of the parameters. Each
    history gets the amax of this step. If the loss did not use a layer, or if an amax is not
    finite, the history stays as it was.

    If a layer is used n times in a step, also by vmap, its amaxes are added: the scale can be n
    times too large. The Overwrite in `gradient` is not a gradient. Clip, unscale and average in the
    optimizer, or everything except the Overwrite. On a mesh of AxisType.Auto, XLA takes the maximum
    over devices. Within jax.shard_map, take it yourself.
    """
    seen, rest = nnx.split_state(gradient, Overwrite, ...)
    parameters = nnx.state(model, optimizer.wrt)
    by_parameter = nnx.state(rest, optimizer.wrt)
    optimizer.update(model, jax.tree.map(lambda g, p: g.astype(p.dtype), by_parameter, parameters))
    nnx.update(model, jax.tree.map(_pushed, nnx.state(model, Overwrite), seen))


def _pushed(was: jax.Array, new: jax.Array) -> jax.Array:
    """Histories with this step's amaxes first. A history without a new amax stays as it was."""
    latest = new[..., :1]
    is_seen = (latest > 0) & jnp.isfinite(latest)
    return jnp.where(is_seen, jnp.concatenate([latest, was[..., :-1]], -1), was)


def example(steps: int = 20) -> list[float]:
    """The losses of some steps of a small layer, on a CPU too."""
    model = nnx.Linear(64, 32, dtype=jnp.bfloat16, dot_general=Fp8Dot(), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-1), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (128, 64), jnp.bfloat16)
    target = x[:, :32].astype(jnp.float32)

    def loss_of(model: nnx.Module) -> jax.Array:
        return jnp.mean(jnp.square(model(x).astype(jnp.float32) - target))

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer) -> jax.Array:
        loss, gradient = value_and_grad(loss_of)(model)
        update(model, optimizer, gradient)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
