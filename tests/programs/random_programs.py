"""Random programs with FP8 matmuls, what each of their layers loses by how it is written, and what
a compiled module launches: both known without the inspector.

A layer is three choices: how its matmul gets its operands, what is done with the result that the
call takes, and how the layer ends. Each choice that loses something says what. `program(seed)`
draws layers and puts them together: in a row or side by side, in loops and branches, over eight
devices, in a gradient.
"""

import dataclasses
import functools
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fp8lens import aot_compile
from helpers.numerics.recipes import scaled_dot, to_e4m3

e4m3, e5m2, f32, bf16, f16 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
)
relu, gelu, silu = jax.nn.relu, jax.nn.gelu, jax.nn.silu
NAMES = {f32: "f32", bf16: "bf16", f16: "f16"}
AFTER = (
    "epilogue",
    "bias",
    "amax",
    "output",
    "scale",
)  # what stays outside with what stays outside before it


class Part(NamedTuple):
    """One choice for a layer. `fn` names what it takes (see `shapes`). `loses`: of each
    alternatives ("a|b") one must be named, of `also` any may be.
    """

    fn: Callable
    loses: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    dtypes: tuple = (f32, bf16, f16)
    alone: bool = False  # only with parts that do nothing
    matmuls: int = 1


def lossy(fn: Callable, loses: str, also: str = "", **fields: Any) -> Part:
    return Part(
        fn, tuple(loses.split()), tuple(also.split()) or fields.pop("all_after", ()), **fields
    )


def dequantized(q, scale, dt):
    return q.astype(dt) * scale.astype(dt)


def product(a, b, dt):
    """Of FP8 arrays as they are."""
    return lax.dot(a, b.T, preferred_element_type=dt)


def multiply(a, b):
    return lax.dot(a, b.T)


def guarded(scale):
    return jnp.where(scale == 0, 1, scale)


def clamped(d, bound=448, to=e4m3):
    return jnp.clip(d, -bound, bound).astype(to)


def amax(d):
    return jnp.max(jnp.abs(d)).astype(f32)


def rotated(d):
    """Rotary embedding: halves, turned."""
    left, right = jnp.split(d, 2, axis=-1)
    angle = jnp.arange(left.shape[-1], dtype=f32)
    cos, sin = jnp.cos(angle).astype(d.dtype), jnp.sin(angle).astype(d.dtype)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def normalized(d):
    return (d - d.mean(-1, keepdims=True)) * lax.rsqrt(d.var(-1, keepdims=True) + 1e-5)


# The parts --------------------------------------------------------------------------------------

FP8 = functools.partial(lossy, loses="fp8", all_after=AFTER)
OPERANDS = {
    "scaled": Part(lambda a, w, x, y, dt: scaled_dot(a, w, x, y, dt)),
    "no scales": Part(lambda a, w, dt: product(a, w, dt)),
    "one scale": Part(lambda a, w, x, dt: multiply(dequantized(a, x, dt), w.astype(dt))),
    "E5M2 left": Part(lambda a5, w, x, y, dt: scaled_dot(a5, w, x, y, dt)),
    "E5M2 right": Part(lambda a, w5, x, y, dt: scaled_dot(a, w5, x, y, dt)),
    "masked with zeros": Part(
        lambda a, w, x, y, drop, dt: scaled_dot(jnp.where(drop, a, 0).astype(a.dtype), w, x, y, dt)
    ),
    "quantized here": Part(lambda a16, w, x, y, dt: scaled_dot(to_e4m3(a16, x), w, x, y, dt)),
    "rotated, quantized here": Part(
        lambda a16, w, x, y, dt: scaled_dot(to_e4m3(rotated(a16), x), w, x, y, dt)
    ),
    "transposed weight": lossy(lambda a, wt, x, y, dt: scaled_dot(a, wt.T, x, y, dt), "transpose"),
    "transposed input": lossy(lambda at, w, x, y, dt: scaled_dot(at.T, w, x, y, dt), "transpose"),
    "both transposed": lossy(
        lambda at, wt, x, y, dt: scaled_dot(at.T, wt.T, x, y, dt), "transpose"
    ),
    "divided": lossy(  # in float16 XLA fails: "mixed precision is disallowed"
        lambda a, w, x, y, dt: multiply(a.astype(dt) / x.astype(dt), w.astype(dt) / y.astype(dt)),
        "scale",
        dtypes=(f32, bf16),
    ),
    "product of scales": lossy(
        lambda a, w, x, y, dt: product(a, w, dt) * (x * y).astype(dt), "scale"
    ),
    "bf16 scale": lossy(lambda a, w, s16, y, dt: scaled_dot(a, w, s16, y, dt), "scale"),
    "inverse scale": lossy(lambda a, w, x, y, dt: scaled_dot(a, w, 1 / x, y, dt), "scale"),
    "guarded scalar": Part(
        lambda a, w, x, y, dt: scaled_dot(a, w, guarded(x), y, dt), also=("scale",)
    ),
    "floored scalar": Part(
        lambda a, w, x, y, dt: scaled_dot(a, w, x, jnp.maximum(y, 1e-6), dt), also=("scale",)
    ),
    "not quantized": FP8(
        lambda a16, w16, dt: product(a16, w16, dt), dtypes=(f32, bf16)
    ),  # no f16 of bf16
    "weight not quantized": FP8(
        lambda a, w16, x, dt: multiply(dequantized(a, x, dt), w16.astype(dt))
    ),
    "both E5M2": FP8(lambda a5, w5, x, y, dt: scaled_dot(a5, w5, x, y, dt)),
    "scale per row": FP8(
        lambda a, w, row, y, dt: multiply(dequantized(a, row, dt), dequantized(w, y, dt))
    ),
    "guarded scale per row": FP8(
        lambda a, w, row16, y, dt: multiply(
            dequantized(a, guarded(row16), dt), dequantized(w, y, dt)
        )
    ),
    "scale per channel": FP8(
        lambda a, w, x, col, dt: multiply(dequantized(a, x, dt), dequantized(w, col, dt))
    ),
    "floored scale per channel": FP8(
        lambda a, w, x, col, dt: multiply(
            dequantized(a, x, dt), dequantized(w, jnp.maximum(col, 1e-6), dt)
        )
    ),
    "converted twice": FP8(
        lambda a, w, x, y, dt: multiply(
            dequantized(a, x, f32).astype(dt), dequantized(w, y, f32).astype(dt)
        ),
        dtypes=(bf16, f16),
    ),
    "added to": FP8(
        lambda a, w, x, y, dt: multiply(dequantized(a, x, dt) + 1, dequantized(w, y, dt))
    ),
    "relu in front": FP8(
        lambda a, w, x, y, dt: multiply(relu(dequantized(a, x, dt)), dequantized(w, y, dt))
    ),
    "rotated in front": FP8(
        lambda a, w, x, y, dt: multiply(rotated(dequantized(a, x, dt)), dequantized(w, y, dt))
    ),
    "negated": FP8(lambda a, w, x, y, dt: multiply(dequantized(a, x, dt), -dequantized(w, y, dt))),
    "masked with ones": FP8(
        lambda a, w, x, y, drop, dt: multiply(
            jnp.where(drop, dequantized(a, x, dt), 1), dequantized(w, y, dt)
        )
    ),
    "scaled twice": FP8(
        lambda a, w, x, y, dt: multiply(dequantized(a, x, dt) * y.astype(dt), w.astype(dt))
    ),
    "joined weights": FP8(
        lambda a, half, rest, x, y, dt: multiply(
            dequantized(a, x, dt),
            jnp.concatenate([dequantized(half, x, dt), dequantized(rest, y, dt)]),
        )
    ),
}

TAKEN = {
    "": Part(lambda h, dt: h),
    "relu": Part(lambda h, dt: relu(h)),
    "gelu": Part(lambda h, dt: gelu(h)),
    "bias": Part(lambda h, v, dt: h + v.astype(dt)),
    "bias, relu": Part(lambda h, v, dt: relu(h + v.astype(dt))),
    "bias, gelu": Part(lambda h, v, dt: gelu(h + v.astype(dt))),
    "matrix": Part(lambda h, c, dt: h + c),
    "bias, matrix": Part(lambda h, v, c, dt: h + v.astype(dt) + c),
    "matrix, relu": Part(lambda h, c, dt: relu(h + c)),
}

EPILOGUE = functools.partial(lossy, loses="epilogue", also="epilogue scale output")
SCALE = functools.partial(lossy, loses="scale", also="scale output")
OUTPUT = functools.partial(lossy, loses="output", also="scale output")
BIAS = functools.partial(lossy, loses="bias", also="bias scale output epilogue")
ENDS = {
    "": Part(lambda h, dt: h),
    "E4M3": Part(lambda h, z, dt: to_e4m3(h, z)),
    # Of two E4M3 operands, cuBLASLt has no such kernel.
    "E5M2": Part(lambda h, z, dt: clamped(h * z.astype(dt), 57344, e5m2), also=("output",)),
    "E4M3, amax": Part(lambda h, z, dt: (to_e4m3(h, z), amax(h))),
    "E4M3, running amax": Part(lambda h, z, dt: (to_e4m3(h, z), jnp.maximum(z, amax(h)))),
    "halves": Part(lambda h, dt: tuple(jnp.split(h, 2, axis=-1))),
    # An activation that no call has
    "silu": EPILOGUE(lambda h, dt: silu(h)),
    "silu, E4M3": EPILOGUE(lambda h, z, dt: to_e4m3(silu(h), z)),
    "exact gelu": EPILOGUE(lambda h, dt: gelu(h, approximate=False)),
    "exact gelu, E4M3": EPILOGUE(lambda h, z, dt: to_e4m3(gelu(h, approximate=False), z)),
    "relu6": EPILOGUE(lambda h, dt: jax.nn.relu6(h), loses="epilogue|output"),
    "relu6, E4M3": EPILOGUE(lambda h, z, dt: to_e4m3(jax.nn.relu6(h), z), loses="epilogue|output"),
    "round": EPILOGUE(lambda h, dt: jnp.round(h)),
    "scale, round, E4M3": lossy(
        lambda h, z, dt: clamped(jnp.round(h * z.astype(dt))),
        "epilogue|scale|output",
        "epilogue scale output",
    ),
    "sin": EPILOGUE(lambda h, dt: jnp.sin(h)),
    "sin, E4M3": EPILOGUE(lambda h, z, dt: to_e4m3(jnp.sin(h), z)),
    "square": EPILOGUE(lambda h, dt: h * h),
    "squared relu, E4M3": EPILOGUE(lambda h, z, dt: to_e4m3(jnp.square(relu(h)), z)),
    "leaky relu": EPILOGUE(lambda h, dt: jax.nn.leaky_relu(h)),
    "elu": EPILOGUE(lambda h, dt: jax.nn.elu(h)),
    "capped by tanh": EPILOGUE(lambda h, dt: 30 * jnp.tanh(h / 30)),
    "sign": lossy(
        lambda h, dt: jnp.where(h > 0.5, 1, 0).astype(dt), "epilogue|output", "epilogue output"
    ),
    "scale, relu": lossy(
        lambda h, z, dt: relu(h * z.astype(dt)), "epilogue|scale", "epilogue scale"
    ),
    "scale, relu, E4M3": lossy(
        lambda h, z, dt: clamped(relu(h * z.astype(dt))), "epilogue|scale", "epilogue scale output"
    ),
    # A scale that no call takes
    "scaled rows": SCALE(lambda h, row, dt: h * row.astype(dt)),
    "scaled rows, guarded": SCALE(lambda h, row16, dt: h * guarded(row16).astype(dt)),
    "scaled rows, guarded, E4M3": SCALE(
        lambda h, row16, dt: clamped(h * guarded(row16).astype(dt))
    ),
    "scaled rows, rounded to E4M3": SCALE(lambda h, row16, dt: h * clamped(row16).astype(dt)),
    "scaled rows, floored": SCALE(lambda h, row16, dt: h * jnp.maximum(row16, 1e-6).astype(dt)),
    "scaled rows, floored, E4M3": SCALE(
        lambda h, row16, dt: clamped(h * jnp.maximum(row16, 1e-6).astype(dt))
    ),
    "divided rows": SCALE(lambda h, row16, dt: h / guarded(row16).astype(dt)),
    "scaled by inverse rows": SCALE(
        lambda h, row16, dt: h * (1 / jnp.maximum(row16, 1e-6)).astype(dt)
    ),
    "scaled columns": SCALE(lambda h, line, dt: h * line.astype(dt)),
    "scaled columns, guarded, E4M3": SCALE(
        lambda h, line, dt: clamped(h * guarded(line).astype(dt))
    ),
    "scaled rows and columns": SCALE(lambda h, row, line, dt: h * (row * line).astype(dt)),
    "scaled rows, scaled columns": SCALE(
        lambda h, row, line, dt: h * row.astype(dt) * line.astype(dt)
    ),
    "scaled once more": SCALE(lambda h, z, dt: h * z.astype(dt)),
    "inverse scale, E4M3": SCALE(lambda h, z, dt: to_e4m3(h, 1 / z)),
    "divided, E4M3": SCALE(lambda h, z, dt: clamped(h / z.astype(dt))),
    "guarded scale, E4M3": Part(lambda h, z, dt: to_e4m3(h, guarded(z)), also=("scale",)),
    # A conversion that no call makes
    "no clamp": OUTPUT(lambda h, z, dt: (h * z.astype(dt)).astype(e4m3)),
    "other bounds": OUTPUT(lambda h, z, dt: clamped(h * z.astype(dt), 400)),
    "bounds of E4M3, E5M2": OUTPUT(lambda h, z, dt: clamped(h * z.astype(dt), 448, e5m2)),
    "clamped early": OUTPUT(lambda h, z, dt: (jnp.clip(h, -448, 448) * z.astype(dt)).astype(e4m3)),
    "two scales": OUTPUT(lambda h, x, z, dt: to_e4m3(h * x.astype(dt), z)),
    "other type": OUTPUT(lambda h, dt: h.astype(f32 if dt == bf16 else bf16)),
    "integers": lossy(
        lambda h, z, dt: clamped(h * z.astype(dt), 127, jnp.int8),
        "output|epilogue|scale",
        "scale output epilogue",
    ),
    "E4M3, and read": OUTPUT(lambda h, z, dt: (to_e4m3(h, z), h)),
    "E4M3, and summed": OUTPUT(lambda h, z, dt: (to_e4m3(h, z), jnp.sum(h, 0))),
    "E4M3 by columns": lossy(
        lambda h, z, dt: to_e4m3(h, z).T, "output|transpose", "output scale transpose"
    ),
    # Something added that no call adds
    "f32 bias": BIAS(lambda h, v32, dt: h + v32.astype(dt), dtypes=(f32, bf16)),
    "f32 bias, relu, E4M3": BIAS(
        lambda h, v32, z, dt: to_e4m3(relu(h + v32.astype(dt)), z), dtypes=(f32, bf16)
    ),
    "bias per row": BIAS(lambda h, row16, dt: h + row16.astype(dt)),
    "scale, bias": lossy(
        lambda h, z, v, dt: h * z.astype(dt) + v.astype(dt), "bias|scale", "bias scale"
    ),
    "scale, bias, E4M3": lossy(
        lambda h, z, v, dt: clamped(h * z.astype(dt) + v.astype(dt)),
        "bias|scale",
        "bias scale output",
    ),
    "relu, bias": BIAS(lambda h, v, dt: relu(h) + v.astype(dt), loses="bias|epilogue"),
    "bias subtracted": BIAS(lambda h, v, dt: h - v.astype(dt)),
    "one": BIAS(lambda h, dt: h + 1),
    "relu, matrix": BIAS(lambda h, c, dt: relu(h) + c, loses="bias|epilogue"),
    "matrix subtracted": BIAS(lambda h, c, dt: h - c),
    "matrix of another type": BIAS(lambda h, other, dt: h + other.astype(dt)),
    "half of a matrix": BIAS(lambda h, c, dt: h + c * 0.5, alone=True),
    "matrix, bias": BIAS(lambda h, c, v, dt: h + c + v.astype(dt), alone=True),
    "sum, and read": BIAS(lambda h, c, dt: (h + c, h), alone=True),
    # An amax that no call takes
    "amax alone": lossy(lambda h, dt: (h, amax(h)), "amax"),
    "amax of rows": lossy(lambda h, dt: (h, jnp.max(jnp.abs(h), axis=1)), "amax"),
    "E4M3, maximum": lossy(
        lambda h, z, dt: (to_e4m3(h, z), jnp.max(h)), "amax|output", "amax output scale"
    ),
    "relu, E4M3, amax before": lossy(
        lambda h, z, dt: (to_e4m3(relu(h), z), amax(h)),
        "amax|epilogue|output",
        "amax epilogue output scale",
    ),
    "scale, E4M3, amax": lossy(
        lambda h, z, dt: (clamped(d := h * z.astype(dt)), amax(d)),
        "duplicate|amax",
        "duplicate amax output scale",
        matmuls=2,
    ),
    "E4M3, amax in 16 bits": lossy(
        lambda h, z, dt: (to_e4m3(h, z), jnp.max(jnp.abs(h))), "amax", dtypes=(bf16, f16)
    ),
    "heads": lossy(lambda h, dt: h.reshape(h.shape[0], 2, -1).transpose(1, 0, 2), "transpose"),
    "heads, E4M3": lossy(
        lambda h, z, dt: to_e4m3(h, z).reshape(h.shape[0], 2, -1).transpose(1, 0, 2), "transpose"
    ),
}

TO_FP8 = (
    "E4M3",
    "E5M2",
    "E4M3, amax",
    "E4M3, running amax",
    "guarded scale, E4M3",
    "inverse scale, E4M3",
    "divided, E4M3",
    "E4M3, amax in 16 bits",
    "heads, E4M3",
)

# What is the program's own work: with the result of a layer, it costs no layer anything.
OWN = {
    "softmax": Part(lambda h, dt: jax.nn.softmax(h)),
    "layer norm": Part(lambda h, dt: normalized(h)),
    "gate": Part(lambda h, c, dt: h * c),
    "silu gate": Part(lambda h, c, dt: silu(h) * c, also=("epilogue",)),
    # Where another layer quantizes it, the call could have, in front of the mask.
    "dropout": Part(lambda h, kept, dt: jnp.where(kept, h, 0), also=("output",)),
    "rotary": Part(lambda h, dt: rotated(h)),
    "softmax, residual": Part(lambda h, c, dt: jax.nn.softmax(h) + c),
    "gate, residual": Part(lambda h, c, dt: h * jnp.tanh(c) + c),
    "column sums": Part(lambda h, dt: h.sum(0)),
}


# Layers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One matmul, M x N x K on each device, and how it is written. `source`: the layer whose FP8
    result it multiplies, None for an argument of the program. `inside`: where it stands, "" or one
    of `INSIDE`.
    """

    operands: str
    taken: str
    end: str
    dtype: Any
    m: int
    n: int
    k: int
    own: str = ""
    source: int | None = None
    inside: str = ""
    scope: str = ""
    returned: bool = True

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            OPERANDS[self.operands],
            TAKEN[self.taken],
            ENDS[self.end],
            *((OWN[self.own],) if self.own else ()),
        )

    @property
    def takes(self) -> dict[str, None]:
        """Names of what its parts take, in order."""
        names = [name for part in self.parts for name in inspect.signature(part.fn).parameters]
        return dict.fromkeys(name for name in names if name not in ("h", "dt"))

    def __call__(self, given: dict[str, jax.Array]) -> Any:
        h = None
        for part in self.parts:
            names = inspect.signature(part.fn).parameters
            h = part.fn(
                **{
                    name: h if name == "h" else self.dtype if name == "dt" else given[name]
                    for name in names
                }
            )
        return h

    @property
    def is_spoiled(self) -> bool:
        """Whether a conversion to FP8 stays outside: where the call adds a float32 matrix; or where
        XLA, for an input that is transposed, multiplies the other way round, and so gets the result
        transposed.
        """
        if "matrix" in self.taken:
            return self.dtype == f32
        return self.operands == "transposed input"

    @property
    def behind(self) -> tuple[str, ...]:
        """Of each loss behind the matmul, what may be named."""
        adds = "bias" in self.taken or "matrix" in self.taken
        if adds and self.end == "E4M3 by columns":
            # Such a vector is copied into a matrix first: and a matrix behind it stays outside. Or
            # XLA transposes the matrix, and the call gives the result by columns.
            return ("output|transpose|bias",)
        return ("output",) if self.is_spoiled and self.end in TO_FP8 else ENDS[self.end].loses

    @property
    def loses(self) -> tuple[str, ...]:
        """Of each, what must be named."""
        operands = self.parts[0]
        if "fp8" in operands.loses:
            return operands.loses
        odd = ("pad",) if any(d % 16 for d in (self.m, self.n, self.k)) else ()
        # A result that goes into a kernel of the program's own, or is copied to where a loop
        # collects it.
        elsewhere = self.own or self.inside == "map"
        return (*operands.loses, *(() if elsewhere else self.behind), *odd)

    @property
    def may_lose(self) -> set[str]:
        """What may be named."""
        found = {
            kind
            for part in self.parts
            for kinds in (*part.loses, *part.also)
            for kind in kinds.split("|")
        }
        found |= {kind for kinds in self.loses for kind in kinds.split("|")}
        # Where a loop collects the result, too.
        found |= {kind for kinds in self.behind for kind in kinds.split("|")}
        found |= {"amax", "scale"} if "output" in found else set()
        is_cut = self.m % 16 or self.n % 16 or self.k % 8  # XLA puts a slice behind the call
        return found | {"output", "scale"} if is_cut else found

    @property
    def gives_fp8(self) -> bool:
        return self.end.startswith(("E4M3", "silu, E", "exact gelu, E")) and not self.own

    def __str__(self) -> str:
        way = " | ".join(
            filter(None, (self.operands, self.taken, self.end, self.own and f"own {self.own}"))
        )
        text = f"[{self.m} x {self.n} x {self.k}] {NAMES[self.dtype]}: {way}"
        text += f" of layer {self.source}" * (
            self.source is not None
        ) + f", in {self.inside}" * bool(self.inside)
        text += f", scope {self.scope!r}" * bool(self.scope) + ", not returned" * (
            not self.returned
        )
        return text + f"  -> must name {', '.join(self.loses)}" * bool(self.loses)


def shapes(layer: Layer) -> dict[str, tuple]:
    """Dimensions and type of whatever a part may take; "m", "n" and "k" are the layer's."""
    dt, v = layer.dtype, f16 if layer.dtype == f16 else bf16
    return {
        "a": ("mk", e4m3),
        "at": ("km", e4m3),
        "a5": ("mk", e5m2),
        "a16": ("mk", bf16),
        "drop": ("mk", bool),
        "w": ("nk", e4m3),
        "wt": ("kn", e4m3),
        "w5": ("nk", e5m2),
        "w16": ("nk", bf16),
        "half": ("hk", e4m3),
        "rest": ("rk", e4m3),
        "x": ("", f32),
        "y": ("", f32),
        "z": ("", f32),
        "s16": ("", bf16),
        "row": ("m1", f32),
        "row16": ("m1", bf16),
        "col": ("n1", bf16),
        "line": ("n", f32),
        "v": ("n", v),
        "v32": ("n", f32),
        "c": ("mn", dt),
        "other": ("mn", f16 if dt == bf16 else bf16),
        "kept": ("mn", bool),
    }


INSIDE = ("jit", "checkpoint", "carry", "map", "repeat", "branch", "vmap")
APART = ("carry", "map", "repeat", "branch")  # in a compiled module, computations of their own
TIMES = {"carry": 3, "map": 2, "repeat": 4}  # how often what is inside runs
STACKED = {
    "carry": "w",
    "map": "aw",
    "vmap": "aw",
}  # the arguments that have an element for each run begin with these
WEIGHTS = ("w", "wt", "w5", "w16", "half", "rest")
SCOPES = (
    "head[1:]",
    "mlp.0",
    "layer/up",
    "a b",
    "q(k)",
    "x=1,y=2",
    "{z}",
    "50%",
    "l'ange",
    "while",
    "fusion.1",
    "jit(f)",
)
SCALE_FIRST = {name for name in ENDS if re.match("scale,|scaled once|two scales", name)}
RELU_FIRST = (
    "leaky relu",
    "E4M3, maximum",
    "relu, E4M3, amax before",
    "relu, matrix",
    "relu, bias",
    "amax of rows",
)
SPLIT = ("halves", "heads", "heads, E4M3")


@functools.cache
def results(layer: Layer) -> tuple:
    """Shapes and types of what a layer by itself returns."""
    own = dataclasses.replace(layer, inside="", source=None)
    return tuple(
        jax.tree.leaves(jax.eval_shape(own, {name: argument(own, name) for name in own.takes}))
    )


def argument(layer: Layer, name: str, mesh: str = "") -> jax.ShapeDtypeStruct:
    dims, dtype = shapes(layer)[name]
    m, n = layer.m * 8 ** (mesh == "rows"), layer.n * 8 ** (mesh == "columns")
    size = {"m": m, "n": n, "k": layer.k, "1": 1, "h": n // 2, "r": n - n // 2}
    stack = (TIMES.get(layer.inside, 2),) if name[0] in STACKED.get(layer.inside, ()) else ()
    return jax.ShapeDtypeStruct((*stack, *(size[d] for d in dims)), dtype)


def sharding(name: str, layer: Layer, mesh: str) -> P:
    dims = shapes(layer)[name][0]
    return P(*("x" if d == {"rows": "m", "columns": "n"}[mesh] else None for d in dims))


def fits(layer: Layer, mesh: str, gradient: bool) -> bool:
    """Whether it is known what becomes of a layer: what XLA rescues, or refuses to compile, is left
    out.
    """
    end = ENDS[layer.end]
    if not all(layer.dtype in part.dtypes for part in layer.parts) or (end.alone and layer.taken):
        return False
    first = results(layer)[0]
    if layer.end in SCALE_FIRST and layer.operands in (
        "no scales",
        "one scale",
        "product of scales",
    ):
        return False  # the scale takes the place of an operand's
    if layer.end in RELU_FIRST and "relu" in layer.taken:
        return False  # a relu of a relu
    if layer.own and (end.loses or layer.end or layer.operands == "joined weights"):
        return False
    if layer.inside in ("carry", "repeat") and (
        first.dtype != e4m3
        or len(results(layer)) > 1
        or layer.n != layer.k
        or "a" not in layer.takes
        or layer.end in ("E4M3 by columns", "heads, E4M3")
        or layer.own
    ):
        return False
    if layer.inside in ("carry", "map") and layer.operands == "joined weights":
        return False
    if layer.inside == "vmap" and (
        layer.operands != "scaled"
        or layer.taken not in ("", "relu", "gelu")
        or layer.own
        or layer.end not in ("", "E4M3", "silu", "silu, E4M3", "no clamp", "sin")
    ):
        return False
    if any(d % 16 for d in (layer.m, layer.n, layer.k)) and (
        layer.operands != "scaled"
        or layer.taken not in ("", "relu")
        or layer.end not in ("", "E4M3", "silu")
        or layer.inside
        or layer.own
        or mesh
        or gradient
    ):
        return False
    if mesh and (
        layer.inside
        or layer.own
        or layer.end in SPLIT
        or "16 bits" in layer.end
        or "joined" in layer.operands
        or layer.operands in ("rotated, quantized here", "rotated in front", "transposed input")
        or "by columns" in layer.end
        or ("amax" in layer.end and layer.dtype != f32)
    ):
        return False
    return not gradient or not (
        layer.end in ("integers", "sign")
        or layer.inside in APART
        or "quantized here" in layer.operands
    )


# Programs ---------------------------------------------------------------------------------------


def zeros_like(layer: Layer, given: dict[str, jax.Array]) -> Any:
    """Zeros in the place of a layer's results."""
    shapes = jax.eval_shape(layer, given)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@dataclass(frozen=True)
class Program:
    """`layers` in the order they are written, by number; `order`: numbers of those returned, in
    their order. `mesh`: "", or what is divided over eight devices, the "rows" of inputs or the
    "columns" of weights. `one_scale`: layers share their scalars. `gradient`: of all results, by
    scales and what is added.
    """

    seed: int
    layers: dict[int, Layer]
    order: tuple[int, ...]
    mesh: str = ""
    one_scale: bool = False
    gradient: bool = False
    pallas: bool = False

    def name(self, name: str, number: int) -> str:
        return name if self.one_scale and name in "xyz" else f"{name}_{number}"

    @functools.cached_property
    def _arguments(self) -> dict[str, tuple[jax.ShapeDtypeStruct, P]]:
        found = {}
        for number, layer in self.layers.items():
            for name in layer.takes:
                if not (name == "a" and layer.source in self.layers):
                    found[self.name(name, number)] = (
                        argument(layer, name, self.mesh),
                        sharding(name, layer, self.mesh) if self.mesh else None,
                    )
            if layer.source in self.layers and self.layers[layer.source].own:
                found[f"q_{number}"] = jax.ShapeDtypeStruct((), f32), P()
            if layer.inside == "branch":
                found[f"flag_{number}"] = jax.ShapeDtypeStruct((), bool), P()
        return found

    @property
    def args(self) -> tuple[dict[str, jax.ShapeDtypeStruct]]:
        return ({name: shape for name, (shape, _) in self._arguments.items()},)

    @property
    def options(self) -> dict[str, Any]:
        specs = {name: spec for name, (_, spec) in self._arguments.items()}
        return {"mesh_shape": {"x": 8}, "in_specs": (specs,)} if self.mesh else {}

    def fn(self, p: dict[str, jax.Array]) -> Any:
        if not self.gradient:
            return self._forward(p)
        by = {
            name: value
            for name, value in p.items()
            if value.dtype in (f32, bf16) and name[0] in "xvc"
        }

        def total(by):
            results = jax.tree.leaves(self._forward(p | by))
            return sum(jnp.sum(jnp.cos(leaf.astype(f32))) for leaf in results)

        return jax.value_and_grad(total)(by)

    def _forward(self, p: dict[str, jax.Array]) -> list:
        found = {}
        for number, layer in self.layers.items():
            given = {name: p[key] for name in layer.takes if (key := self.name(name, number)) in p}
            if layer.source in self.layers and "a" in layer.takes:
                result = jax.tree.leaves(found[layer.source])[0]
                given["a"] = to_e4m3(result, p[f"q_{number}"]) if f"q_{number}" in p else result
            with jax.named_scope(layer.scope) if layer.scope else jax.named_scope("layer"):
                found[number] = self._run(layer, given, p.get(f"flag_{number}"))
        if self.pallas:
            found[self.order[0]] = jax.tree.map(doubled, found[self.order[0]])
        return [found[number] for number in self.order]

    def _run(self, layer: Layer, given: dict[str, jax.Array], flag: jax.Array | None) -> Any:
        each = {
            name: value for name, value in given.items() if name[0] in STACKED.get(layer.inside, ())
        }
        match layer.inside:
            case "jit":
                return jax.jit(layer.__call__)(given)
            case "checkpoint":
                return jax.checkpoint(layer.__call__)(given)
            case "carry":
                return lax.scan(
                    lambda a, each: (layer(given | each | {"a": a}), None), given["a"], each
                )[0]
            case "map":
                return lax.scan(lambda _, each: (None, layer(given | each)), None, each)[1]
            case "repeat":
                return lax.fori_loop(
                    0, TIMES["repeat"], lambda _, a: layer(given | {"a": a}), given["a"]
                )
            case "branch":
                return lax.cond(flag, lambda: layer(given), lambda: zeros_like(layer, given))
            case "vmap":
                return jax.vmap(lambda each: layer(given | each))(each)
        return layer(given)

    @property
    def more_flops(self) -> int:
        """FLOPs beyond the program's as written: of padding, and of what XLA multiplies twice."""
        more = 0
        for layer in self.layers.values():
            size = layer.m * layer.n * layer.k
            padded = size if "fp8" in layer.loses else up(layer.m) * up(layer.n) * up(layer.k)
            runs = TIMES.get(layer.inside, 2 if layer.inside == "vmap" else 1)
            once = "fp8" in layer.loses or layer.is_spoiled  # then no call converts its result
            twice = 1 if once else ENDS[layer.end].matmuls
            more += 2 * (padded * twice - size) * runs
        return more

    def compile(self) -> str:
        return aot_compile(self.fn, *self.args, **self.options).as_text()

    def without(self, number: int) -> "Program":
        layers = {n: layer for n, layer in self.layers.items() if n != number}
        order = tuple(n for n in self.order if n != number)
        return dataclasses.replace(self, layers=layers, order=order or (next(iter(layers)),))

    def __str__(self) -> str:
        about = f"seed {self.seed}, returns {self.order}" + f", sharded by {self.mesh}" * bool(
            self.mesh
        )
        about += (
            ", shared scalars" * self.one_scale
            + ", gradient" * self.gradient
            + ", Pallas" * self.pallas
        )
        return "\n".join(
            [about, *(f"  {number}: {layer}" for number, layer in self.layers.items())]
        )


def up(size: int) -> int:
    """To the next multiple of 16."""
    return -(-size // 16) * 16


def doubled(x: jax.Array) -> jax.Array:
    """By a Triton kernel written in Pallas."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(x, out):
        out[...] = x[...] + x[...]

    if x.ndim != 2 or x.dtype != f32:
        return x
    block = pl.BlockSpec((16, 16), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[block],
        out_specs=block,
        grid=(x.shape[0] // 16, x.shape[1] // 16),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(x)


def _drawn(r: random.Random, broken: float, base: int) -> Layer:
    """A layer, of which a part `broken` loses something."""
    pick = {
        name: [
            [key for key, part in table.items() if bool(part.loses) == lost]
            for lost in (False, True)
        ]
        for name, table in (("operands", OPERANDS), ("end", ENDS))
    }
    lost = r.random() < broken
    where = r.choices(("end", "operands", "both"), (70, 25, 5))[0] if lost else ""
    operands = "scaled"
    if where or r.random() < 0.4:
        operands = r.choice(pick["operands"][where in ("operands", "both")])
    return Layer(
        operands,
        r.choice(list(TAKEN)),
        r.choice(pick["end"][where in ("end", "both")]),
        dtype=r.choices((f32, bf16, f16), (5, 4, 1))[0],
        m=base,
        n=r.choice((32, 64, 96, 128, 160)),
        k=r.choice((32, 64, 96, 128)),
        inside=r.choice(INSIDE) if r.random() < 0.25 else "",
        scope=r.choice(SCOPES) if r.random() < 0.3 else "",
    )


def _joined(
    r: random.Random, layer: Layer, layers: dict[int, Layer], mesh: str, alike: bool
) -> Layer:
    """The layer, which may multiply another's result, or be of odd sizes."""
    feeds = [
        n
        for n, before in layers.items()
        if _feeds(before) and all(other.source != n for other in layers.values())
    ]
    if feeds and r.random() < 0.6 and mesh != "columns":
        source = r.choice(feeds)
        return dataclasses.replace(layer, source=source, k=layers[source].n)
    if r.random() < 0.1 and not alike:
        odd = r.choice("mnk")
        return dataclasses.replace(
            layer,
            inside="",
            end=r.choice(("", "E4M3", "silu")),
            operands="scaled",
            taken="",
            own="",
            **{odd: r.choice((24, 50, 100, 120))},
        )
    return layer


def _consistent(layer: Layer, alike: bool) -> Layer:
    """The layer, without what cannot stand together in it."""
    if layer.inside in ("carry", "repeat"):
        layer = dataclasses.replace(layer, n=layer.k)
    if layer.source is not None and ("a" not in layer.takes or layer.inside in ("map", "vmap")):
        layer = dataclasses.replace(layer, source=None)
    # In a loop or a branch, its sizes tell whose a matmul is.
    if alike and layer.inside in APART:
        layer = dataclasses.replace(layer, inside="")
    return layer


def program(seed: int) -> Program:
    """A program, always the same for a seed."""
    r = random.Random(seed)
    mesh, gradient = r.choices(("", "rows", "columns"), (84, 10, 6))[0], r.random() < 0.08
    broken, alike, twins = r.choice((0, 0.3, 0.6, 0.9)), r.random() < 0.35, r.random() < 0.3
    square = r.choice((32, 64, 96, 128))
    base = r.choice((32, 64, 96, 128))
    layers: dict[int, Layer] = {}
    shared: Layer | None = None
    sizes = set()
    count = r.choice((1, 2, 2, 3, 3, 4, 5, 6))
    while len(layers) < count:
        number = len(layers)
        layer = _drawn(r, broken, base)
        if shared and twins:  # the same lines of the program, but for its end
            layer = dataclasses.replace(
                layer, operands=shared.operands, taken=shared.taken, dtype=shared.dtype
            )
        if alike:
            layer = dataclasses.replace(layer, n=square, k=square)
        if not layer.end and r.random() < 0.4:
            layer = dataclasses.replace(layer, own=r.choice(list(OWN)))
        layer = _consistent(_joined(r, layer, layers, mesh, alike), alike)
        size = (*sorted((up(layer.m), up(layer.n))), up(layer.k))
        # Layers of one size share the computation of jnp.clip, and so, when XLA assigns layouts,
        # the order of its dimensions: one that transposes behind it costs others their bias.
        if not fits(layer, mesh, gradient) or (
            layer.end == "E4M3 by columns" if alike else size in sizes
        ):
            base = r.choice((32, 64, 96, 128)) if not layers else base
            continue
        if (
            layer.source is not None
            and len(results(layers[layer.source])) == 1
            and r.random() < 0.5
        ):
            layers[layer.source] = dataclasses.replace(layers[layer.source], returned=False)
        layers[number] = layer
        sizes.add(size)
        shared = shared or layer
    order = [number for number, layer in layers.items() if layer.returned]
    r.shuffle(order)
    return Program(
        seed,
        layers,
        tuple(order),
        mesh,
        r.random() < 0.3,
        gradient,
        not mesh and not gradient and r.random() < 0.04,
    )


def _feeds(layer: Layer) -> bool:
    """Whether another layer can multiply its result."""
    first = results(layer)[0]
    right = (
        first.shape == (layer.m, layer.n)
        and layer.inside not in ("map", "vmap")
        and not layer.n % 16
    )
    return right and not layer.m % 16 and (first.dtype == e4m3 or bool(layer.own))


def smallest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program with as few layers as still fail."""
    for number in list(program.layers):
        if len(program.layers) > 1 and fails(smaller := program.without(number)):
            return smallest(smaller, fails)
    simple = (
        {"scope": ""},
        {"inside": ""},
        {"own": ""},
        {"taken": ""},
        {"operands": "scaled"},
        {"dtype": f32},
    )
    for number, layer in program.layers.items():
        for plain in simple:
            simpler = dataclasses.replace(layer, **plain)
            if simpler != layer and fits(simpler, program.mesh, program.gradient):
                smaller = dataclasses.replace(program, layers=program.layers | {number: simpler})
                if fails(smaller):
                    return smallest(smaller, fails)
    return program


# A compiled module, by a few regular expressions ------------------------------------------------

_LINE = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e8m0fnu": 1,
    "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
    "u64": 8,
}
_NOTHING = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier "
    "partition-id replica-id async-start async-done add-dependency".split()
)


class Line(NamedTuple):
    """An instruction of a module's text."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str

    def has(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        return found[1] if found else ""


class Module:
    """A module's computations: for each its instructions, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry = ""
        for line in text.splitlines():
            if head := re.match(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                here = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                operands = re.findall(r"%([\w.\-]+)", found[4].split(")")[0])
                here[found[1]] = Line(found[1], found[2], found[3], operands, found[4])

    def runs(self) -> Iterator[tuple[str, int]]:
        """Each computation that runs by itself, and how often. XLA's runtime does not compute the
        condition of a loop whose length it knows (xla/backends/gpu/runtime/while_thunk.cc).
        """
        todo = [(self.entry, 1)]
        while todo:
            name, times = todo.pop()
            yield name, times
            for line in self.computations[name].values():
                if line.opcode == "while":
                    trips = line.has(r'known_trip_count":\{"n":"(\d+)"')
                    todo.append((line.has(r"body=%([\w.\-]+)"), times * int(trips or 1)))
                    if not trips:
                        todo.append((line.has(r"condition=%([\w.\-]+)"), times))
                elif line.opcode == "conditional":
                    branches = re.findall(r"(?:true|false)_computation=%([\w.\-]+)", line.rest)
                    branches += re.findall(
                        r"%([\w.\-]+)", line.has(r"branch_computations=\{(.*?)\}")
                    )
                    todo += [(branch, times) for branch in branches]
                elif line.opcode in ("call", "async-start"):
                    todo.append((line.has(r"(?:to_apply|calls)=%([\w.\-]+)"), times))

    def kernels(self) -> Iterator[tuple[Line, int, int]]:
        """What is launched: the instruction, how often, and the bytes it reads and writes: each
        operand and each result once, whole, but for a library's scratch space.
        """
        for name, times in self.runs():
            lines = self.computations[name]
            for line in lines.values():
                if line.opcode in _NOTHING or line.opcode.endswith("-done"):
                    continue
                written = line.type
                if line.opcode.endswith("-start"):  # what its end gives
                    written = next(
                        other.type
                        for other in lines.values()
                        if line.name in other.operands and other.opcode.endswith("-done")
                    )
                elif "__cublas" in line.rest:
                    written = re.sub(r"(?:, )?[su]8\[\d+\]\{0\}\)$", ")", written)
                yield line, times, self._traffic(line, lines, written)

    def _traffic(self, line: Line, lines: dict[str, Line], written: str) -> int:
        """The bytes that a kernel reads and writes: of what it only cuts out of an operand, or puts
        into one, no more than that.
        """
        read = [size(lines[operand].type) for operand in line.operands]
        opcode = line.opcode.removesuffix("-start")
        if opcode == "dynamic-update-slice":
            return 2 * read[1]
        if opcode == "scatter" and len(read) == 3:
            return read[1] + 3 * read[2]
        if opcode in _CUTS:
            return min(read[0], size(written)) + sum(read[1:]) + size(written)
        body = self.computations.get(line.has(r"calls=%([\w.\-]+)"))
        if body is None or opcode != "fusion":
            return size(written) + sum(read)
        given = {
            int(inner.rest.split(")")[0]): inner.name
            for inner in body.values()
            if inner.opcode == "parameter"
        }
        root = [*body.values()][-1]
        results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
        total = 0
        for n, whole in enumerate(read):
            total += int(min(whole, _used(body, given[n], root))) if n in given else whole
        if not any(_put(body, result) for result in results):
            return total + size(written)
        for result in results:
            total += size((_put(body, result) or result).type)
        return total

    def find(self, name: str) -> tuple[str, Line]:
        """An instruction that runs by itself, and the computation that it is in."""
        for computation, _ in self.runs():
            if name in self.computations[computation]:
                return computation, self.computations[computation][name]
        raise LookupError(name)

    def weights(self, name: str) -> set[int]:
        """Numbers of the layers whose weights an instruction of ENTRY reads, other matmuls not
        looked behind.
        """
        lines, found, todo, seen = self.computations[self.entry], set(), [name], set()
        while todo:
            line = lines[todo.pop()]
            if line.name in seen or (
                line.name != name
                and ("__cublas" in line.rest or line.opcode in ("while", "conditional"))
            ):
                continue
            seen.add(line.name)
            todo += line.operands
            named = re.search(r"op_name=\"[^\"]*?p\[\\?'(\w+)_(\d+)\\?'\]", line.rest)
            if line.opcode == "parameter" and named and named[1] in WEIGHTS:
                found.add(int(named[2]))
        return found


_CUTS = ("slice", "dynamic-slice", "gather")
_NAMES = ("bitcast", "reshape", "get-tuple-element")


def _behind(body: dict[str, Line], line: Line) -> Line:
    """What a view shows."""
    while line.opcode in _NAMES:
        line = body[line.operands[0]]
    return line


def _put(body: dict[str, Line], result: Line) -> Line | None:
    """What is put into an argument, where that is the result."""
    update = _behind(body, result)
    root = [*body.values()][-1]
    if update not in _in_place(body, root):
        return None
    into = _behind(body, body[update.operands[0]])
    put = update.operands[1 if update.opcode == "dynamic-update-slice" else 2]
    return body[put] if into.opcode == "parameter" else None


def _in_place(body: dict[str, Line], root: Line) -> list[Line]:
    """The updates of a part of an array that a fusion writes, where no other line reads what is
    updated.
    """
    results = root.operands if root.opcode == "tuple" else [root.name]
    found = []
    for name in results:
        names, line = [name], body[name]
        while line.opcode in _NAMES:
            line = body[line.operands[0]]
            names.append(line.name)
        # Each name is read by the one before it in this list, and the first by a tuple at most.
        readers = [sum(n in other.operands for other in body.values()) for n in names]
        alone = max(readers) <= 1
        is_scatter = line.opcode == "scatter" and len(line.operands) == 3
        if alone and (is_scatter or line.opcode == "dynamic-update-slice"):
            found.append(line)
    return found


def _used(body: dict[str, Line], name: str, root: Line) -> float:
    """The bytes that a fusion's computation needs of a value: infinitely many where of all."""
    if name == root.name:
        return math.inf
    used = 0.0
    for line in body.values():
        for position, operand in enumerate(line.operands):
            if operand != name:
                continue
            if line.opcode in _NAMES:
                used += _used(body, line.name, root)
            elif line.opcode in _CUTS and position == 0:
                used += size(line.type)
            elif position > 0 or line not in _in_place(body, root):
                used += math.inf
            elif line.opcode == "scatter":
                used += size(body[line.operands[2]].type)
    return used


def size(type_: str) -> int:
    """Bytes of a type as HLO writes it, a tuple's elements together."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        count = 1
        for d in filter(None, dims.split(",")):
            count *= int(d)
        total += count * _BYTES[dtype]
    return total


def launched(text: str) -> tuple[int, int]:
    """Kernels that a module launches, and bytes that they move, loops as often as they run."""
    kernels = list(Module(text).kernels())
    return sum(times for _, times, _ in kernels), sum(times * moved for _, times, moved in kernels)


def call(line: Line) -> tuple[str, ...]:
    """What a library call of a module computes: whether in FP8, epilogue, alpha and beta, amax, the
    result's type.
    """
    fields = (
        r'target="__cublas\$(?:lt\$)?(\S*?)"',
        r'"epilogue":"(\w+)',
        r'alpha_real":([^,]+)',
        r'"beta":([^,]+)',
        r'damax_output":(\w+)',
    )
    return *(line.has(field) for field in fields), re.match(r"\(*(\w+)\[", line.type)[1]
