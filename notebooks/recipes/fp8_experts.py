"""A layer of experts on several devices: FP8 matmuls, and tokens that travel in FP8.

Copy `fp8_linear.py` beside it. It needs JAX alone. Chapter 16 derives it. Each expert has a fixed
number of places; a token that finds none is dropped. Each device has some of the experts, and some
of the tokens. Tokens travel to their experts and results back, and in the backward pass gradients
do the same. What a matmul reads is quantized before it travels, not after: with one scale for the
whole tensor every number stays the same, to the bit. What no matmul reads travels in bf16.

    on_each = functools.partial(fp8_experts, axis="expert")
    tokens = P("expert")  # so are the experts' weights divided
    layer = jax.shard_map(
        on_each, in_specs=(tokens,) * 4 + (P(),), out_specs=tokens, check_vma=False
    )
    y = layer(x, expert, gate, w, scales)

What it leaves out: the router, which stays wide; histories of amaxes (`fp8_linear.py` has them);
scales for each expert; `jax.lax.ragged_dot`, which drops no token, and does the work of all experts
for each row on a Hopper.

Test what XLA makes of it, without the devices. Set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false
before JAX starts: by XLA's default Triton may take these matmuls, and then they are not FP8.

    from fp8lens import assert_fp8_collectives, assert_fp8_gemms, inspect, mesh
    seen = inspect(step, *arguments)  # divided over mesh("H100", {"expert": 8})
    assert_fp8_gemms(seen, count=3)
    assert_fp8_collectives(seen)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8_linear import e4m3, e5m2, f32, quantize

bf16 = jnp.bfloat16
ON_WIRE = ("nothing", "operands", "everything")  # what travels in FP8


class Scales(NamedTuple):
    """One scale for each tensor, f32[]: x, w, the results y, and the gradients of y and x."""

    x: jax.Array
    w: jax.Array
    y: jax.Array
    g: jax.Array
    x_gradient: jax.Array


# Places -------------------------------------------------------------------------------------------


def slots(expert: jax.Array, experts: int, spare: float = 1.25) -> tuple[jax.Array, int]:
    """Of each choice `expert` i32[T, TOP] its place among those of its expert; and how many places
    an expert has: `spare` times what it needs if all are chosen alike. Each expert is one of 0 to
    experts - 1, or beyond, which is dropped; a negative one would take another's place.
    """
    chosen = jax.nn.one_hot(expert.reshape(-1), experts, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, axis=0) * chosen).sum(axis=1) - 1
    return place.reshape(expert.shape), max(1, int(spare * expert.size / experts))


def put(x: jax.Array, expert: jax.Array, place: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Tokens x [T, K] at their places, [E, C, K], where `shape` is (E, C). Beyond C they are
    dropped.
    """
    empty = jnp.zeros((*shape, x.shape[1]), x.dtype)
    return empty.at[expert, place].set(x[:, None], mode="drop")


def take(y: jax.Array, expert: jax.Array, place: jax.Array, gate: jax.Array) -> jax.Array:
    """What each token's experts gave, y [E, C, N], summed by its gates [T, TOP]: [T, N]."""
    rows = y.at[expert, place].get(mode="fill", fill_value=0)
    return (rows * gate.astype(y.dtype)[..., None]).sum(axis=1)


# The wire -----------------------------------------------------------------------------------------


def _rounded(v: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    return quantize(v, scale, dtype).astype(bf16) * scale.astype(bf16)


def _leg(move: Callable, dtype: Any, first: bool) -> Callable:
    """A transfer (v, scale) -> v. It quantizes before it moves if `first`, and else after it; with
    no `dtype` never.
    """
    if dtype is None:
        return lambda v, scale: move(v)
    if not first:
        return lambda v, scale: _rounded(move(v), scale, dtype)
    return lambda v, scale: move(quantize(v, scale, dtype)).astype(bf16) * scale.astype(bf16)


def _with_gradient(forward: Callable, backward: Callable) -> Callable:
    """forward(v, scale); its gradient is backward(g, g_scale)."""
    made = jax.custom_vjp(lambda v, scale, g_scale: forward(v, scale))
    made.defvjp(
        lambda v, scale, g_scale: (forward(v, scale), g_scale),
        lambda g_scale, g: (backward(g, g_scale), None, None),
    )
    return made


def fp8_experts(
    x: jax.Array,
    expert: jax.Array,
    gate: jax.Array,
    w: jax.Array,
    scales: Scales,
    axis: str = "expert",
    on_wire: str = "operands",
    spare: float = 1.25,
) -> jax.Array:
    """What each device does, in `jax.shard_map` over `axis`: its tokens x bf16[T, K], the experts
    that each chose i32[T, TOP], its gates f32[T, TOP], and its own experts' weights [E, N, K]; it
    returns bf16[T, N]. Gradients reach x, gate and w. `on_wire` says which of four transfers are
    FP8: "operands", those that end in a matmul; "nothing" multiplies the same numbers;
    "everything" rounds results and gradients that nothing else would round. Raises ValueError for
    another word.
    """
    if on_wire not in ON_WIRE:
        raise ValueError(f"on_wire is {on_wire!r}, and must be one of {', '.join(ON_WIRE)}")
    first = on_wire != "nothing"
    y_type, x_gradient_type = (e4m3, e5m2) if on_wire == "everything" else (None, None)
    # [E, C, K], of all experts and this device's tokens, to its own experts and all tokens
    exchange = functools.partial(
        lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=1, tiled=True
    )
    back = functools.partial(
        lax.all_to_all, axis_name=axis, split_axis=1, concat_axis=0, tiled=True
    )
    dispatch = _with_gradient(_leg(exchange, e4m3, first), _leg(back, x_gradient_type, True))
    combine = _with_gradient(_leg(back, y_type, True), _leg(exchange, e5m2, first))
    rounded_weight = _with_gradient(lambda w, s: _rounded(w, s, e4m3), lambda g, _: g)

    experts = len(w) * lax.axis_size(axis)
    place, count = slots(expert, experts, spare)
    sent = dispatch(put(x, expert, place, (experts, count)), scales.x, scales.x_gradient)
    # The codes' own products: XLA makes FP8 matmuls of what is dequantized in front of them.
    y = jnp.einsum("eck,enk->ecn", sent, rounded_weight(w, scales.w, scales.g))
    return take(combine(y, scales.y, scales.g), expert, place, gate)


def forward_and_backward(mesh: jax.sharding.Mesh, on_wire: str = "operands") -> Callable:
    """(x, expert, gate, w, scales, g) -> the result, and the gradients of x and w for g, that of
    the result. All but the scales are divided over the mesh's axis, "expert".
    """
    tokens = P("expert")
    layer = jax.shard_map(
        functools.partial(fp8_experts, on_wire=on_wire),
        mesh=mesh,
        in_specs=(tokens,) * 4 + (P(),),
        out_specs=tokens,
        check_vma=False,
    )

    def step(x, expert, gate, w, scales, g):
        y, pull = jax.vjp(lambda x, w: layer(x, expert, gate, w, scales), x, w)
        return y, *pull(g)

    return step


def example(on_wire: str) -> tuple[jax.Array, ...]:
    """The result and the gradients of x and w, on all devices of the CPU."""
    devices = jax.devices("cpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=auto, devices=devices)
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (64 * len(devices), 128), bf16)
    w = jax.random.normal(keys[1], (len(devices), 32, 128), bf16)
    g = jax.random.normal(keys[2], (len(x), 32), bf16)
    gate, expert = lax.top_k(jax.random.normal(keys[3], (len(x), len(devices))), 2)
    scales = Scales(*(f32(amax / 448) for amax in (5, 5, 60, 5, 60)))
    return forward_and_backward(mesh, on_wire)(x, expert, gate, w, scales, g)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    wide = example("nothing")
    for way in ON_WIRE[1:]:
        same = [bool((a == b).all()) for a, b in zip(wide, example(way), strict=True)]
        said = ["the same" if one else "other numbers" for one in same]
        print(f"{way} in FP8: result {said[0]}; gradients of x {said[1]}, of w {said[2]}")
