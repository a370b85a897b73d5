"""An FP8 layer whose tensors are divided between devices: it gathers codes, half the bytes of bf16.

Copy `fp8_linear.py` beside it. It needs JAX alone. Chapter 16 derives it. Left to itself XLA often
gathers a tensor before it is quantized, or codes that it has dequantized. Here each operand has a
pair of shardings: the codes stay where the tensor is, and are then gathered.

    where = Where(w=(P("data"), P()))  # fully sharded: each device has a part of w, and needs all
    y = fp8_sharded(where, x, w, amaxes)

`LAYOUTS` has this pair for an MLP, divided in five ways, and `mlp` is that MLP.

Scales are delayed, as in `fp8_linear`: with `jit`, the amax of a divided tensor is one over all
devices. As `fp8_decoder.py`'s product: Decoder(fp8=functools.partial(fp8_sharded, where)).

What it leaves out: what `fp8_linear` leaves out; `shard_map`, in which you gather codes yourself,
and take an amax over every axis that divides the tensor (`jax.lax.pmax`).

Test what travels, without the devices. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX
starts: by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_collectives, assert_fp8_gemms, inspect
    seen = inspect(step, *arguments, target="H100", mesh_shape={"data": 8}, in_specs=specs)
    assert_fp8_gemms(seen, count=3)
    assert_fp8_collectives(seen)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as shard
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8_linear import e4m3, e5m2, quantize, remember, scale_of, scaled_dot

Pair = tuple[P | None, P]


class Where(NamedTuple):
    """For each operand where its codes are, and where they must be; None leaves both to XLA.

    w's first sharding is that of its gradient, too.
    """

    x: Pair | None = None
    w: Pair | None = None
    g: Pair | None = None


def placed(codes: jax.Array, pair: Pair | None) -> jax.Array:
    """Codes, gathered as codes. The first constraint stops XLA from gathering what they are made
    of; without the second it gathers what is made of them.
    """
    if pair is None:
        return codes
    stay, needed = pair
    codes = codes if stay is None else shard(codes, stay)
    return shard(codes, needed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_sharded(where: Where, x: jax.Array, w: jax.Array, amaxes: jax.Array) -> jax.Array:
    """x [M, K] times w [N, K], in x's type. `amaxes` f32[3, H] are those of x, w and the result's
    gradient, the latest first; their gradient is their new value. Shardings name the axes of the
    mesh that `jax.set_mesh` sets. Raises ValueError for amaxes of another shape.
    """
    return forward(where, x, w, amaxes)[0]


def forward(where, x, w, amaxes):
    """The result, and what the backward pass needs: codes, not x and w."""
    if amaxes.ndim != 2 or len(amaxes) != 3:
        raise ValueError(
            f"amaxes has the shape {amaxes.shape}, and must have [3, H]: a row for x, one for w "
            "and one for the gradient, as jnp.zeros((3, 16)) before the first step"
        )
    x_scale, w_scale = scale_of(amaxes[0], e4m3), scale_of(amaxes[1], e4m3)
    x_q, w_q = placed(quantize(x, x_scale), where.x), placed(quantize(w, w_scale), where.w)
    y = scaled_dot(x_q, w_q, x_scale, w_scale, x.dtype)
    new = remember(amaxes[0], x), remember(amaxes[1], w), amaxes[2]
    return y, (x_q, w_q, x_scale, w_scale, new)


def backward(where, saved, g):
    """The gradients of x, in g's type, and of w, in f32, where w is; and the new amaxes."""
    x_q, w_q, x_scale, w_scale, (new_x, new_w, g_amaxes) = saved
    g_scale = scale_of(g_amaxes, e5m2)
    g_q = placed(quantize(g, g_scale, e5m2), where.g)
    x_gradient = scaled_dot(g_q, w_q.T, g_scale, w_scale, g.dtype)
    w_gradient = scaled_dot(g_q.T, x_q.T, g_scale, x_scale)
    if where.w is not None and where.w[0] is not None:
        w_gradient = shard(w_gradient, where.w[0])
    return x_gradient, w_gradient, jnp.stack([new_x, new_w, remember(g_amaxes, g)])


fp8_sharded.defvjp(forward, backward)


class Layout(NamedTuple):
    """A mesh of eight devices; what lies where on it: tokens [T, width], weights [hidden, width]
    and [width, hidden], hidden values; and `Where` for the MLP's two layers.
    """

    mesh: dict[str, int]
    tokens: P
    up: P
    down: P
    hidden: P
    in_up: Where = Where()
    in_down: Where = Where()


D, M, B = "data", "model", ("data", "model")  # the axes of a mesh
LAYOUTS = {
    "data parallel": Layout({D: 8}, P(D), P(), P(), P(D)),
    "fully sharded": Layout(
        *({D: 8}, P(D), P(D), P(D), P(D)),
        in_up=Where(w=(P(D), P())),
        in_down=Where(w=(P(D), P())),
    ),
    "tensor parallel": Layout({M: 8}, P(), P(M), P(None, M), P(None, M)),
    "sequence parallel": Layout(
        *({M: 8}, P(M), P(M), P(None, M), P(None, M)),
        in_up=Where(x=(P(M), P())),
        in_down=Where(g=(P(M), P())),
    ),
    "both axes": Layout(
        *({D: 2, M: 4}, P(B), P(M, D), P(D, M), P(D, M)),
        in_up=Where(x=(P(B), P(D)), w=(P(M, D), P(M))),
        in_down=Where(g=(P(B), P(D)), w=(P(D, M), P(None, M))),
    ),
}


def mlp(layout: Layout, x: jax.Array, up: jax.Array, down: jax.Array, amaxes: jax.Array):
    """A transformer's MLP with its residual: x [T, width], up [hidden, width], down [width,
    hidden], and the amaxes of both layers, f32[2, 3, H].
    """
    h = jax.nn.relu(fp8_sharded(layout.in_up, x, up, amaxes[0]))
    y = fp8_sharded(layout.in_down, shard(h, layout.hidden), down, amaxes[1])
    return shard(x + y, layout.tokens)


def example() -> list[float]:
    """The losses of some steps of gradient descent, on eight devices of a CPU too."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = NamedSharding(mesh, P("data"))
    x = jax.random.normal(jax.random.key(0), (8 * len(devices), 128), jnp.bfloat16)
    x, w = jax.device_put((x, jnp.zeros((4 * len(devices), 128))), divided)
    layer = functools.partial(fp8_sharded, LAYOUTS["fully sharded"].in_up)

    @jax.jit
    @jax.value_and_grad
    def loss(given):
        # The layer learns to return a part of its input.
        return jnp.mean(jnp.square(layer(x, *given).astype(jnp.float32) - x[:, : len(w)]))

    amaxes, losses = jnp.zeros((3, 16)), []
    with jax.set_mesh(mesh):
        for _ in range(20):
            value, (of_w, amaxes) = loss((w, amaxes))
            w -= 4 * of_w
            losses.append(float(value))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    losses = example()
    print(f"{len(jax.devices())} devices: the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
