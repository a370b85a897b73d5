"""Random programs with FP8 matmuls, of which it is known without the inspector what is FP8.

A layer is a choice of operands, of what is done with the result, and of where it stands: in a loop,
in a branch, under vmap. `program(seed)` draws layers and puts them in a row, over eight devices or
in a gradient.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, e5m2, f32, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16


# Layers -----------------------------------------------------------------------------------------


def wide(q, scale):
    return q.astype(bf16) * scale.astype(bf16)


# Of a layer's arguments, the product; XLA multiplies in FP8 ...
IN_FP8 = {
    "scaled": lambda g: scaled_dot(g.a, g.w, g.x, g.y),
    "E5M2 left": lambda g: scaled_dot(g.a5, g.w, g.x, g.y, bf16),
    "no scales": lambda g: lax.dot(g.a, g.w.T, preferred_element_type=f32),
    "one scale": lambda g: lax.dot(wide(g.a, g.x), g.w.astype(bf16).T),
    "quantized here": lambda g: scaled_dot(to_e4m3(g.a16, g.x), g.w, g.x, g.y, bf16),
    "masked": lambda g: scaled_dot(jnp.where(g.a16 > 0, g.a, 0).astype(e4m3), g.w, g.x, g.y),
    "transposed": lambda g: scaled_dot(g.a, g.wt.T, g.x, g.y, bf16),
}
# ... and does not.
IN_MORE = {
    "not quantized": lambda g: lax.dot(g.a16, g.w16.T),
    "weight not quantized": lambda g: lax.dot(wide(g.a, g.x), g.w16.T),
    "both E5M2": lambda g: scaled_dot(g.a5, g.w5, g.x, g.y, bf16),
    "scale per row": lambda g: lax.dot(wide(g.a, g.rows), wide(g.w, g.y).T),
    "negated": lambda g: lax.dot(wide(g.a, g.x), -wide(g.w, g.y).T),
    "joined": lambda g: lax.dot(
        wide(g.a, g.x), jnp.concatenate([wide(g.w[:32], g.x), wide(g.w[32:], g.y)]).T
    ),
}
# Of the product and the layer's arguments, what the layer returns.
ENDS = {
    "": lambda h, g: h,
    "relu": lambda h, g: jax.nn.relu(h),
    "bias, gelu": lambda h, g: jax.nn.gelu(h + g.bias.astype(h.dtype)),
    "matrix": lambda h, g: h + g.matrix.astype(h.dtype),
    "silu": lambda h, g: jax.nn.silu(h),
    "rows": lambda h, g: h * g.rows.astype(h.dtype),
    "heads": lambda h, g: h.reshape(h.shape[0], 2, -1).transpose(1, 0, 2),
    "softmax": lambda h, g: jax.nn.softmax(h),
    "sums": lambda h, g: (h, h.sum(0)),
    "E4M3": lambda h, g: to_e4m3(h, g.z),
    "E4M3, amax": lambda h, g: (to_e4m3(h, g.z), jnp.max(jnp.abs(h)).astype(f32)),
    "relu, E4M3": lambda h, g: to_e4m3(jax.nn.relu(h), g.z),
    "no clamp": lambda h, g: (h * g.z.astype(h.dtype)).astype(e4m3),
}
# How often what stands there runs, and in which arguments each run has an element of its own.
INSIDE = {
    "": (1, ()),
    "jit": (1, ()),
    "checkpoint": (1, ()),
    "branch": (1, ()),
    "vmap": (2, ("a", "w")),
    "map": (2, ("a", "w")),
    "carry": (3, ("w",)),
}


@dataclass(frozen=True)
class Layer:
    """One matmul, M x N x K on each device, and how it is written."""

    operands: str
    end: str
    inside: str
    m: int
    n: int
    k: int

    @property
    def runs(self) -> int:
        return INSIDE[self.inside][0]

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.runs

    def arguments(self, devices: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of all that a layer may take; rows are divided over devices."""
        m, n, k = self.m * devices, self.n, self.k
        sizes = {
            "a": (e4m3, m, k),
            "a5": (e5m2, m, k),
            "a16": (bf16, m, k),
            "w": (e4m3, n, k),
            "w5": (e5m2, n, k),
            "w16": (bf16, n, k),
            "wt": (e4m3, k, n),
            "x": (f32,),
            "y": (f32,),
            "z": (f32,),
            "rows": (f32, m, 1),
            "bias": (bf16, n),
            "matrix": (bf16, m, n),
        }
        runs, each = INSIDE[self.inside]
        return {
            name: jax.ShapeDtypeStruct((runs, *dims) if name in each else dims, dtype)
            for name, (dtype, *dims) in sizes.items()
        }

    def once(self, given: dict[str, jax.Array]) -> Any:
        g = SimpleNamespace(**given)
        return ENDS[self.end]((IN_FP8 | IN_MORE)[self.operands](g), g)

    def __call__(self, given: dict[str, jax.Array]) -> Any:
        each = {name: given[name] for name in INSIDE[self.inside][1]}
        match self.inside:
            case "jit":
                return jax.jit(self.once)(given)
            case "checkpoint":
                return jax.checkpoint(self.once)(given)
            case "branch":
                zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(self.once, given))
                return lax.cond(given["x"] > 0, lambda: self.once(given), lambda: zeros)
            case "vmap":
                return jax.vmap(lambda each: self.once(given | each))(each)
            case "map":
                return lax.scan(lambda _, each: (None, self.once(given | each)), None, each)[1]
            case "carry":
                return lax.scan(
                    lambda a, each: (self.once(given | each | {"a": a}), None), given["a"], each
                )[0]
        return self.once(given)


# Programs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Layers, side by side or each multiplying the FP8 result of the one before; over eight
    devices; the gradient of all results by what is not FP8.
    """

    seed: int
    layers: tuple[Layer, ...]
    devices: int
    gradient: bool

    @property
    def args(self) -> tuple:
        return ([layer.arguments(self.devices) for layer in self.layers],)

    @property
    def options(self) -> dict[str, Any]:
        if self.devices == 1:
            return {}
        divided = ("a", "a5", "a16", "rows", "matrix")
        specs = [
            {name: P("x") if name in divided else P() for name in given} for given in self.args[0]
        ]
        return {"mesh_shape": {"x": self.devices}, "in_specs": (specs,)}

    def fn(self, given: list[dict[str, jax.Array]]) -> Any:
        if not self.gradient:
            return self.results(given)
        learnt = [{name: of[name] for name in ("x", "bias", "matrix", "a16")} for of in given]

        def total(learnt):
            whole = [of | new for of, new in zip(given, learnt, strict=True)]
            leaves = jax.tree.leaves(self.results(whole))
            return sum(jnp.sum(jnp.cos(leaf.astype(f32))) for leaf in leaves)

        return jax.value_and_grad(total)(learnt)

    def results(self, given: list[dict[str, jax.Array]]) -> list:
        found: list[Any] = []
        before = None
        for layer, its in zip(self.layers, given, strict=True):
            if before is not None and before.shape == its["a"].shape and before.dtype == e4m3:
                its = its | {"a": before}
            found.append(layer(its))
            before = jax.tree.leaves(found[-1])[0]
        return found


def program(seed: int) -> Program:
    """A program, always the same for a seed."""
    r = random.Random(seed)
    gradient = r.random() < 0.2
    devices = 8 if not gradient and r.random() < 0.2 else 1
    m = r.choice((32, 64, 96))
    layers = []
    k = r.choice((32, 64, 128))
    for _ in range(r.choice((1, 2, 3, 4))):
        operands = r.choice([*IN_FP8] * 2 + [*IN_MORE])
        inside = "" if gradient or devices > 1 or r.random() < 0.5 else r.choice([*INSIDE])
        n, end = r.choice((64, 96, 128)), r.choice([*ENDS])
        if inside == "carry":
            n, operands, end = k, r.choice(("scaled", "no scales", "one scale")), "relu, E4M3"
        layers.append(Layer(operands, end, inside, m, n, k))
        k = n
    return Program(seed, tuple(layers), devices, gradient)
