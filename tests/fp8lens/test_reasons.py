"""why_not_fp8 on programs that lose something: the reason agrees with XLA's own log, and its fix
fixes it.
"""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8lens import inspect
from fp8lens.compile.stages import dumped
from fp8lens.inspection import Inspection
from fp8lens.matmul import unfused
from fp8lens.matmul.ptx import instructions
from fp8lens.rules import find
from fp8lens.rules.facts import Matmul
from fp8lens.rules.find import of_collective
from fp8lens.rules.reason import Reasons
from fp8lens.rules.rule import RULES, Lost
from helpers import (
    TARGETS,
    aot_compile,
    assert_fp8_gemms,
    parse_hlo_module,
    report_gemms,
    why_not_fp8,
)
from helpers.numerics.quantize import dequantize
from helpers.numerics.recipes import scaled_dot, to_e4m3
from helpers.records.results import load_rules
from tests.fp8lens import test_collectives as sharded
from tests.programs.corpus import by_hand, by_warpgroup
from tests.programs.renamed import figures, under_other_names
from tests.weekly import NIGHTLY
from tools.recorders import releases

e4m3, e5m2, f32, bf16, f16 = (
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
)
M, N, K = 64, 128, 256
BARRIER = jax.lax.optimization_barrier
RESULTS = Path(__file__).parents[2] / "notebooks" / "results"


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, s = S(M, K), S(N, K), S(dtype=f32)
C32, C16, VECTOR = S(M, N, dtype=f32), S(M, N, dtype=bf16), S(N, dtype=bf16)
OPERANDS = (A, B, s, s)
relu, gelu = jax.nn.relu, jax.nn.gelu
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


def clip(d, bound=448):
    return jnp.clip(d, -bound, bound)


def with_amax(d, scale, amax_of=None):
    return to_e4m3(d, scale), jnp.max(jnp.abs(d if amax_of is None else amax_of))


def delayed(x, history, scale):
    """Quantized as by flax.linen.fp8_ops: by the largest amax of earlier steps, where there is
    one.
    """
    amax = jnp.max(history)
    factor = jnp.where(jnp.isfinite(amax), jnp.where(amax > 0, 448 / amax, 1 / scale), 1 / scale)
    return clip(x / (1 / factor).astype(x.dtype)).astype(e4m3)


def padded(x, number=0.0, rows=0, columns=0, between=0):
    """Rows behind, columns behind, or rows between all rows."""
    return jax.lax.pad(x, jnp.asarray(number, x.dtype), ((0, rows, between), (0, columns, 0)))


def bare(a, b, dtype=f32):
    """The product of FP8 arrays without scales."""
    return jax.lax.dot(a, b.T, preferred_element_type=dtype)


def products_added(x, w):
    """A matmul without a dot."""
    return (x[:, None] * w[None]).sum(-1)


def outer_products_added(x, w):
    """A matmul without a dot, which a loop adds up column by column."""

    def one_more(i, total):
        return total + x[:, i][:, None] * w[:, i]

    return jax.lax.fori_loop(0, x.shape[1], one_more, jnp.zeros((len(x), len(w)), x.dtype))


def gradient_of_microbatches(w, xs, scale, quantized_before):
    """The sum of a weight's gradients; `quantized_before`: its codes are made before the loop."""

    @jax.custom_vjp
    def linear(x, w, codes):
        return forward(x, w, codes)[0]

    def forward(x, w, codes):
        a, b = to_e4m3(x, scale), codes if quantized_before else to_e4m3(w, scale)
        return scaled_dot(a, b, scale, scale), (a, b)

    def backward(saved, g):
        a, b = saved
        g = to_e4m3(g, scale)
        dx, dw = (scaled_dot(g_, v.T, scale, scale) for g_, v in ((g, b), (g.T, a)))
        return dx.astype(bf16), dw.astype(bf16), jnp.zeros_like(b)

    linear.defvjp(forward, backward)
    codes = jax.lax.stop_gradient(to_e4m3(w, scale))

    def add(total, x):
        dw = jax.grad(lambda w: jnp.sum(jnp.tanh(linear(x, w, codes))))(w)
        return total + dw.astype(f32), None

    return jax.lax.scan(add, jnp.zeros(w.shape, f32), xs)[0]


def state_read_in_each_iteration(x, w):
    """A linear attention without a dot: no matmul can do for its loop."""

    def one_more(state, both):
        key, value = both
        state = state + key[:, None] * value
        return state, state.max(1)

    return jax.lax.scan(one_more, jnp.zeros((x.shape[1], w.shape[1]), x.dtype), (x, w))


def update_by(optimizer, w, state, x, scale):
    """A step of an optimizer, on the gradient of a layer with FP8 matmuls."""

    @jax.custom_vjp
    def layer(x, w):
        return scaled_dot(to_e4m3(x, scale), to_e4m3(w, scale), scale, scale, bf16)

    def forward(x, w):
        return layer(x, w), x

    def backward(x, g):
        rows = to_e4m3(g.T, scale), to_e4m3(x.T, scale)
        return jnp.zeros_like(x), scaled_dot(*rows, scale, scale)

    layer.defvjp(forward, backward)
    gradient = jax.grad(lambda w: jnp.sum(jnp.square(layer(x, w).astype(f32))))(w)
    update, state = optimizer.update(gradient, state, w)
    return optax.apply_updates(w, update), state


def gradient_of(w, a, g, a_scale, g_scale):
    """The gradient of a weight, of FP8 arrays."""
    _, pull = jax.vjp(lambda w: jax.lax.dot(dequantize(a, a_scale), w.T), w)
    return pull(dequantize(g, g_scale))[0]


def RMS_NORM(h):
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)


def in_a_loop(after, weights, x, scale, dtype=bf16):
    """Layers over stacked weights, each quantizing what the one before has carried on."""

    def layer(x, w):
        return after(scaled_dot(to_e4m3(x, scale), w, scale, scale, dtype), x), None

    return jax.lax.scan(layer, x, weights)[0]


def with_gradient(act, d, w, scale):
    """An activation between two matmuls, and its gradient of the second one's result."""
    y, pull = jax.vjp(act, d)
    return pull(scaled_dot(to_e4m3(y, scale), w, scale, scale, y.dtype))


@jax.custom_vjp
def own_relu(x):
    """Its gradient reads its result; that of jax.nn.relu reads its input, and XLA makes one of the
    other.
    """
    return relu(x)


own_relu.defvjp(lambda x: (y := relu(x), BARRIER(y)), lambda y, g: (jnp.where(y > 0, g, 0),))


def along(x, *axes):
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*axes))


def replicated(x):
    return along(along(x, "x"))


def layers(x, w, scales, unroll):
    def layer(x, given):
        w, scale = given
        d = jax.lax.dot(dequantize(x, scale, bf16), dequantize(w, scale, bf16).T)
        return clip(d * scale.astype(bf16)).astype(e4m3), None

    return jax.lax.scan(layer, x, (w, scales), unroll=unroll)[0]


def by_heads(a, b, x, y):
    """Attention's first product, of [batch, heads, length, depth]."""
    return jnp.einsum("bhqd,bhkd->bhqk", dequantize(a, x, f32), dequantize(b, y, f32))


HEADS = (S(2, 4, 64, 128), S(2, 4, 64, 128), s, s)
P = jax.sharding.PartitionSpec
SHARDED = {"mesh_shape": (8,), "in_specs": (P("x"), P("x"), P(), P())}


UNMERGED = {"compiler_options": {"xla_gpu_dot_merger_threshold_mb": 0}}


def LAYER_NORM(h):
    return (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


TILED = {
    "compiler_options": {
        "xla_gpu_override_gemm_autotuner": "block_m: 128 block_n: 128 block_k: 64 num_warps: 4 "
        "num_ctas: 1 num_stages: 3"
    }
}
WEIGHTS = np.arange(N * K).reshape(N, K) % 7


def in_bf16(x, w, x_scale, w_scale):
    return jax.lax.dot(dequantize(x, x_scale, bf16), dequantize(w, w_scale, bf16).T)


def patches(x, w, x_scale, w_scale):
    """A 3 x 3 convolution of x [height, width, channels] as a matmul: w is [N, 9 * channels]."""
    rows, columns = x.shape[0] - 2, x.shape[1] - 2
    near = [x[i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
    return scaled_dot(jnp.concatenate(near, -1).reshape(rows * columns, -1), w, x_scale, w_scale)


def over_devices(after, dtype=bf16):
    """A matmul whose K is split over devices, in jax.shard_map; `after` sums its parts up."""

    def of_one(a, b, x, y, v):
        return after(scaled_dot(a, b, x, y, dtype), v)

    def fn(*args):
        specs = BY_FOUR["in_specs"]
        return jax.shard_map(of_one, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    return fn


def on_the_first(v):
    """A vector on one device, and zeros on the others."""
    return jnp.where(jax.lax.axis_index("x") == 0, v, 0)


BY_DEVICE = (S(M, 4 * K), S(N, 4 * K), s, s, VECTOR)
BY_FOUR = {"mesh_shape": {"x": 4}, "in_specs": (P(None, "x"), P(None, "x"), P(), P(), P())}


@dataclass(frozen=True)
class Case:
    """A program that loses `lost`, because of what `says` finds in the reason, and the program
    after the fix.
    """

    lost: str
    says: str
    broken: Callable
    args: tuple
    fixed: Callable | None = None  # None: the options alone fix it, or nothing does
    fixed_args: tuple | None = None
    options: dict = field(default_factory=dict)
    fixed_options: dict = field(default_factory=dict)
    leaves: tuple[str, ...] = ()  # what the fix does not bring in
    same_numbers: bool = False  # the fix keeps them, to the bit: the test runs both


# What the groups of a ragged dot divide: rows, or what is summed, or a batch.
K_LAST = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
ROWS = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
SUMS = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
BATCH = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [0], [])


def ragged(a, b, sizes, over):
    return jax.lax.ragged_dot_general(a, b, sizes, over, preferred_element_type=f32)


# Programs beside those of the rules' pages, which test_rules.py tries: other forms of what a rule
# finds, and what several rules decide together.
CASES = {
    # FP8 lost
    "outer products that a loop adds up": Case(
        "fp8",
        "multiplies 64 x 1 by 1 x 128 elements and adds up, one outer product in each iteration",
        lambda a, b, x, y: outer_products_added(dequantize(a, x), dequantize(b, y)),
        OPERANDS,
        scaled_dot,
    ),
    "a product and a sum beside a dot": Case(
        "fp8",
        "multiplies 64 x 256 by 256 x 128 elements and adds up: it has no dot",
        lambda a, b, c, d, x, y: (scaled_dot(a, b, x, y), products_added(c, d)),
        (A, B, S(M, K, dtype=bf16), S(N, K, dtype=bf16), s, s),
        lambda a, b, c, d, x, y: (scaled_dot(a, b, x, y), scaled_dot(c, d, x, y)),
        (A, B, A, B, s, s),
    ),
    **{
        f"multiplied again, {name}": Case(
            "duplicate",
            "multiplies the same matrices twice, here and in",
            broken,
            (*OPERANDS, s),
            lambda a, b, x, y, z: scaled_dot(a, b, x, y),
            options=UNMERGED,
        )
        for name, broken in (
            (
                "other scales",
                lambda a, b, x, y, z: (scaled_dot(a, b, x, y), scaled_dot(a, b, x, z)),
            ),
            ("added", lambda a, b, x, y, z: scaled_dot(a, b, x, y) + scaled_dot(a, b, x, z)),
            (
                "another type",
                lambda a, b, x, y, z: (scaled_dot(a, b, x, y), scaled_dot(a, b, x, y, bf16)),
            ),
            ("exchanged", lambda a, b, x, y, z: (scaled_dot(a, b, x, y), scaled_dot(b, a, y, z))),
        )
    },
    "never quantized": Case(
        "fp8",
        "both operands are bf16",
        lambda a, b: a @ b.T,
        (S(M, K, dtype=bf16), S(N, K, dtype=bf16)),
        lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=bf16),
        (A, B),
    ),
    "a vector of bf16": Case(
        "fp8",
        "an operand is bf16",
        lambda a, b, x: jax.lax.dot(dequantize(a, x, bf16), b),
        (A, S(K, dtype=bf16), s),
        scaled_dot,
        OPERANDS,
    ),
    "one operand": Case(
        "fp8",
        "right operand is bf16",
        lambda a, b, x: jax.lax.dot(dequantize(a, x, bf16), b.T),
        (A, S(N, K, dtype=bf16), s),
        lambda a, b, x, y: scaled_dot(a, b, x, y, bf16),
        OPERANDS,
    ),
    "E5M2 of two E4M3": Case(
        "output",
        "for which cuBLASLt has no kernel",
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z, 57344).astype(e5m2),
        (*OPERANDS, s),
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z, 57344).astype(e5m2),
        (S(M, K, dtype=e5m2), B, s, s, s),
    ),
    "both E5M2": Case(
        "fp8",
        "both operands are E5M2",
        scaled_dot,
        (S(M, K, dtype=e5m2), S(N, K, dtype=e5m2), s, s),
        scaled_dot,
        (S(M, K, dtype=e5m2), B, s, s),
    ),
    "AMD's type": Case(
        "fp8",
        "f8e4m3fnuz is not a type",
        scaled_dot,
        (S(M, K, dtype=jnp.float8_e4m3fnuz), S(N, K, dtype=jnp.float8_e4m3fnuz), s, s),
        scaled_dot,
        OPERANDS,
    ),
    "in float64": Case(
        "fp8",
        "the dot's result is f64",
        jax.enable_x64(True)(lambda a, b, x, y: scaled_dot(a, b, x, y, jnp.float64)),
        OPERANDS,
        scaled_dot,
    ),
    "scale per row": Case(
        "fp8",
        r"the scales f32\[64\]",
        lambda a, b, x, y: jax.lax.dot(a.astype(f32) * x, dequantize(b, y, f32).T),
        (A, B, S(M, 1, dtype=f32), s),
        lambda a, b, x, y: jax.lax.dot(a.astype(f32), dequantize(b, y, f32).T) * x,
        leaves=("scale",),
    ),
    "scale per column": Case(
        "fp8",
        r"the scales bf16\[128\]",
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, bf16), (b.astype(bf16) * y).T),
        (A, B, s, S(N, 1, dtype=bf16)),
        lambda a, b, x, y: scaled_dot(a, b, x, y, bf16),
        OPERANDS,
    ),
    "converted twice": Case(
        "fp8",
        "left operand is converted again, to bf16",
        lambda a, b, x, y: jax.lax.dot(
            dequantize(a, x, f32).astype(bf16), dequantize(b, y, bf16).T
        ),
        OPERANDS,
        lambda a, b, x, y: scaled_dot(a, b, x, y, bf16),
    ),
    "converted to integers": Case(
        "fp8",
        "left operand is converted again, to s8",
        lambda a, b, x, y: jax.lax.dot(
            dequantize(a, x, f32).astype(jnp.int8),
            dequantize(b, y, f32).astype(jnp.int8).T,
            preferred_element_type=jnp.int32,
        ),
        OPERANDS,
        scaled_dot,
    ),
    "layers unrolled": Case(
        "fp8",
        "are converted together, and each is cut out",
        functools.partial(layers, unroll=4),
        (S(K, K), S(4, K, K), S(4, dtype=f32)),
        functools.partial(layers, unroll=1),
    ),
    "experts": Case(
        "duplicate",
        "as one dense matmul, 64 x 128 x 2048: each row is multiplied by every group",
        lambda a, b, g, x, y: jax.lax.ragged_dot(dequantize(a, x, bf16), dequantize(b, y, bf16), g),
        (A, S(8, K, N), S(8, dtype=jnp.int32), s, s),
        jax.vmap(scaled_dot, (0, 0, None, None)),
        (S(8, 16, K), S(8, N, K), s, s),
    ),
    "the gradient of experts": Case(
        "duplicate",
        "as 8 dense matmuls, 256 x 128 x 64: each group's sums run over the rows of all groups",
        lambda a, b, g: ragged(a, b, g, SUMS),
        (A, S(M, N), S(8, dtype=jnp.int32)),
        lambda a, b, x, y: jax.vmap(scaled_dot, (0, 0, None, None))(a, b, x, y),
        (S(8, K, 16), S(8, N, 16), s, s),
    ),
    "several layers of experts": Case(
        "duplicate",
        "as 3 dense matmuls, 64 x 128 x 2048: each row is multiplied by every group",
        jax.vmap(lambda a, b, g: ragged(a, b, g, ROWS)),
        (S(3, M, K), S(3, 8, K, N), S(3, 8, dtype=jnp.int32)),
    ),
    "a closure's weights": Case(
        "fp8",
        "right operand is a constant of the program",
        lambda a, x, y: scaled_dot(a, jnp.asarray(WEIGHTS, e4m3), x, y),
        (A, s, s),
        scaled_dot,
        OPERANDS,
    ),
    "an algorithm": Case(
        "fp8",
        "asks for the algorithm BF16_BF16_F32",
        lambda a, b, x, y: jax.lax.dot(
            dequantize(a, x, bf16),
            dequantize(b, y, bf16).T,
            precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
            preferred_element_type=f32,
        ),
        OPERANDS,
        lambda a, b, x, y: scaled_dot(a, b, x, y, bf16),
    ),
    "masked with ones": Case(
        "fp8",
        "masked with something other than zero",
        lambda a, b, x, y, m: jax.lax.dot(
            jnp.where(m, dequantize(a, x, f32), 1), dequantize(b, y, f32).T
        ),
        (*OPERANDS, S(M, K, dtype=bool)),
        lambda a, b, x, y, m: jax.lax.dot(
            jnp.where(m, dequantize(a, x, f32), 0), dequantize(b, y, f32).T
        ),
        leaves=("transpose",),
    ),
    "elements of the right operand chosen by a mask": Case(
        "fp8",
        "each element of the right operand is chosen",
        lambda a, b, x, y, c: jax.lax.dot(
            dequantize(a, x, f32), jnp.where(c, dequantize(b, x, f32), dequantize(-b, y, f32)).T
        ),
        (*OPERANDS, S(N, K, dtype=bool)),
        lambda a, b, x, y, c: scaled_dot(a, jnp.where(c, b, -b), x, y),
    ),
    "one of two weights, by a flag": Case(
        "copy",
        "a flag chooses the right operand from two FP8 arrays",
        lambda a, b, x, y, c, w: scaled_dot(a, jnp.where(c, b, w), x, y),
        (*OPERANDS, S(dtype=bool), B),
        lambda a, b, x, y, c, w: jax.lax.cond(
            c, lambda: scaled_dot(a, b, x, y), lambda: scaled_dot(a, w, x, y)
        ),
        same_numbers=True,
    ),
    "a weight or zeros, by a flag": Case(
        "copy",
        "a flag chooses the right operand from an FP8 array and a number, repeated",
        lambda a, b, x, y, c: scaled_dot(a, jnp.where(c, b, jnp.zeros_like(b)), x, y),
        (*OPERANDS, S(dtype=bool)),
        lambda a, b, x, y, c: jax.lax.cond(
            c, lambda: scaled_dot(a, b, x, y), lambda: jnp.zeros((M, N), f32)
        ),
        same_numbers=True,
    ),
    "one of two activations, returned by branches": Case(
        "copy",
        "a flag chooses the left operand from the FP8 arrays of several branches",
        lambda a, b, x, y, c, e: scaled_dot(jax.lax.cond(c, lambda: a, lambda: e), b, x, y),
        (*OPERANDS, S(dtype=bool), A),
        lambda a, b, x, y, c, e: jax.lax.cond(
            c, lambda: scaled_dot(a, b, x, y), lambda: scaled_dot(e, b, x, y)
        ),
        same_numbers=True,
    ),
    "one of three activations, by a number": Case(
        "copy",
        "a flag chooses the left operand from 3 FP8 arrays",
        lambda a, b, x, y, c, e, n: scaled_dot(jax.lax.select_n(n, a, c, e), b, x, y),
        (*OPERANDS, A, A, S(dtype=jnp.int32)),
        lambda a, b, x, y, c, e, n: jax.lax.switch(
            n, [functools.partial(scaled_dot, v, b, x, y) for v in (a, c, e)]
        ),
        same_numbers=True,
    ),
    "weights of two kinds of layers, in turn": Case(
        "copy",
        "a flag chooses the right operand from two FP8 arrays",
        lambda a, bs, ws, x, y: jax.lax.map(
            lambda n: scaled_dot(a, jnp.where(n % 2 == 0, bs[n], ws[n]), x, y), jnp.arange(4)
        ),
        (A, S(4, N, K), S(4, N, K), s, s),
        lambda a, bs, ws, x, y: jax.lax.map(
            lambda both: [scaled_dot(a, v, x, y) for v in both], (bs[::2], ws[1::2])
        ),
        fixed_options=UNMERGED,
    ),
    "a weight of two scales": Case(
        "scale",
        "makes the right operand of codes",
        lambda a, b, x, y: scaled_dot(a, to_e4m3(dequantize(b, y, f32), 1 / x), x, x),
        OPERANDS,
        scaled_dot,
    ),
    "activations of each iteration quantized in a loop": Case(
        "duplicate",
        "a loop quantizes the left operand in each iteration",
        lambda w, ws, x, y: jax.lax.map(lambda b: scaled_dot(to_e4m3(w, x), b, x, y), ws),
        (S(M, K, dtype=bf16), S(4, N, K), s, s),
        lambda w, ws, x, y: (lambda a: jax.lax.map(lambda b: scaled_dot(a, b, x, y), ws))(
            to_e4m3(w, x)
        ),
        same_numbers=True,
    ),
    "a weight quantized in a loop over microbatches": Case(
        "duplicate",
        "a loop quantizes the right operand in each iteration",
        lambda w, xs, scale: gradient_of_microbatches(w, xs, scale, False),
        (S(N, K, dtype=bf16), S(4, M, K, dtype=bf16), s),
        lambda w, xs, scale: gradient_of_microbatches(w, xs, scale, True),
        leaves=("transpose", "output", "epilogue"),
        same_numbers=True,
    ),
    "results in bfloat16, summed behind a loop": Case(
        "sum",
        "65.5 kB are written and read again",
        lambda a, b, x, y: jax.lax.map(lambda v: scaled_dot(v, b, x, y, bf16), a).mean(0),
        (S(4, M, K), B, s, s),
        lambda a, b, x, y: jax.lax.scan(
            lambda total, v: (total + scaled_dot(v, b, x, y), None), jnp.zeros((M, N), f32), a
        )[0],
    ),
    "a bias for a part of the columns, in place": Case(
        "copy",
        "a kernel adds to the part",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16).at[:, :32].add(c),
        (S(128, 512), S(256, 512), s, s, S(32, dtype=bf16)),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + jnp.pad(c, (0, 224)),
    ),
    "a number for each head, made by arange": Case(
        "bias",
        "each row of the matrix that is added is the same",
        lambda a, b, x, y: (
            scaled_dot(a, b, x, y, bf16).reshape(M, 4, 32)
            + jnp.arange(4, dtype=bf16)[None, :, None]
        ),
        OPERANDS,
        lambda a, b, x, y: (
            scaled_dot(a, b, x, y, bf16) + BARRIER(jnp.repeat(jnp.arange(4, dtype=bf16), 32))
        ).reshape(M, 4, 32),
    ),
    "a scale that a flag makes zero": Case(
        "duplicate",
        "a flag decides whether the result is used",
        lambda a, b, x, y, c: scaled_dot(a, b, jnp.where(c, x, 0), y),
        (*OPERANDS, S(dtype=bool)),
        lambda a, b, x, y, c: jax.lax.cond(
            c, lambda: scaled_dot(a, b, x, y), lambda: jnp.zeros((M, N), f32)
        ),
    ),
    "activations joined along K": Case(
        "copy",
        "a kernel joins FP8 arrays to make the left operand",
        lambda a, c, b, x, y: scaled_dot(jnp.concatenate([a, c], 1), b, x, y),
        (S(M, 128), S(M, 128), B, s, s),
        lambda a, c, b, x, y: scaled_dot(a, b, x, y),
        fixed_args=(A, A, B, s, s),
    ),
    "what is out of range set to zero": Case(
        "epilogue",
        "this activation is another one",
        lambda a, b, x, y: jnp.where(
            (d := scaled_dot(a, b, x, y)) > 448, 0, jnp.where(d < -448, 0, d)
        ).astype(e4m3),
        OPERANDS,
    ),
    "a clamp by comparisons, to less than the range": Case(
        "epilogue",
        "this activation is another one",
        lambda a, b, x, y: jnp.where(
            (d := scaled_dot(a, b, x, y)) > 6, 6, jnp.where(d < -6, -6, d)
        ).astype(e4m3),
        OPERANDS,
    ),
    "dimensions of K in another order": Case(
        "transpose",
        "K is several dimensions, which the left operand",
        lambda a, b, x, y: jnp.einsum("mkh,nhk->mn", dequantize(a, x, f32), dequantize(b, y, f32)),
        (S(M, 64, 4), S(N, 4, 64), s, s),
        lambda a, b, x, y: scaled_dot(a.reshape(M, -1), b.reshape(N, -1), x, y),
    ),
    "right operand chosen by a condition": Case(
        "fp8",
        "a flag chooses the right operand from two arrays",
        lambda a, b, x, y, c: jax.lax.dot(
            dequantize(a, x, f32),
            jax.lax.cond(c, lambda: dequantize(b, x, f32), lambda: dequantize(b, y, f32)).T,
        ),
        (*OPERANDS, S(dtype=bool)),
        lambda a, b, x, y, c: scaled_dot(a, b, x, jnp.where(c, x, y)),
        same_numbers=True,
    ),
    "addition between": Case(
        "fp8",
        "dequantization and the dot: add",
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32) + 1, dequantize(b, y, f32).T),
        OPERANDS,
        lambda a, b, x, y: scaled_dot(a, b, x, y),
    ),
    "concatenation between": Case(
        "fp8",
        "dequantization and the dot: concatenate",
        lambda a, b, x, y: jax.lax.dot(
            jnp.concatenate([dequantize(a, x, f32), dequantize(a, y, f32)]), dequantize(b, y, f32).T
        ),
        OPERANDS,
        lambda a, b, x, y: jnp.concatenate(
            [scaled_dot(a, b, x, y), BARRIER(scaled_dot(*BARRIER((a, b)), y, y))]
        ),
        leaves=("output", "scale", "duplicate"),
    ),
    "dequantized before a loop": Case(
        "fp8",
        "dequantized before the loop",
        lambda x, w, s: (
            lambda wide: jax.lax.scan(
                lambda c, _: (to_e4m3(jax.lax.dot(dequantize(c, s, f32), wide.T), s), None),
                x,
                None,
                length=5,
            )[0]
        )(dequantize(w, s, f32)),
        (S(K, K), S(K, K), s),
        lambda x, w, s: jax.lax.scan(
            lambda c, _: (to_e4m3(scaled_dot(c, w, s, s), s), None), x, None, length=5
        )[0],
    ),
    "merged dots": Case(
        "fp8",
        "XLA merged dots",
        lambda a, b, c, x: (scaled_dot(a, b, x, x), scaled_dot(a, c, x, x)),
        (S(64, 64), S(64, 64), S(64, 64), s),
        lambda a, b, c, x: (scaled_dot(a, b, x, x), scaled_dot(a, c, x, x)),
        fixed_options={"compiler_options": {"xla_gpu_dot_merger_threshold_mb": 0}},
    ),
    "too small": Case(
        "fp8",
        r"too small: K \* \(M \+ N\) is 98, and below 100",
        scaled_dot,
        (S(24, 2), S(25, 2), s, s),
        scaled_dot,
        fixed_options={"compiler_options": {"xla_gpu_gemm_rewrite_size_threshold": 0}},
        leaves=("pad",),
    ),
    "a vector": Case(
        "fp8",
        "N is 1",
        lambda a, b, x, y: dequantize(a, x, f32) @ dequantize(b, y, f32),
        (A, S(K), s, s),
        lambda a, b, x, y: scaled_dot(a, jnp.zeros((16, K), e4m3).at[0].set(b), x, y)[:, 0],
        leaves=("pad",),
    ),
    "block scales": Case(
        "fp8",
        "H100 has no block-scaled matmul",
        lambda a, b, x, y: jax.nn.scaled_matmul(a, b, x, y, preferred_element_type=f32),
        (
            S(1, 256, 512),
            S(1, 128, 512),
            *(S(1, n, 16, dtype=jnp.float8_e8m0fnu) for n in (256, 128)),
        ),
        lambda a, b, x, y: jax.nn.scaled_matmul(a, b, x, y, preferred_element_type=f32),
        fixed_options={"target": "B200"},
    ),
    "rows picked after dequantizing": Case(
        "fp8",
        "dequantization and the dot: gather",
        lambda a, b, x, y, i: jax.lax.dot(dequantize(a, x, f32)[i], dequantize(b, y, f32).T),
        (S(512, K), B, s, s, S(M, dtype=jnp.int32)),
        lambda a, b, x, y, i: scaled_dot(a[i], b, x, y),
    ),
    "negated": Case(
        "fp8",
        "the dot: negate",
        lambda a, b, x, y: jax.lax.dot(-dequantize(a, x, f32), dequantize(b, y, f32).T),
        OPERANDS,
        lambda a, b, x, y: scaled_dot(a, b, -x, y),
        leaves=("scale",),
        same_numbers=True,
    ),
    "one row of a large B": Case(
        "fp8",
        "N is 1: XLA makes a vector",
        in_bf16,
        (S(4096, 4096), S(1, 4096), s, s),
        in_bf16,
        (S(4096, 4096), S(16, 4096), s, s),
    ),
    "two vectors": Case(
        "fp8",
        "M and N are 1",
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32), dequantize(b, y, f32)),
        (S(K), S(K), s, s),
        lambda a, b, x, y: scaled_dot(
            *(jnp.zeros((16, K), e4m3).at[0].set(v) for v in (a, b)), x, y
        )[0, 0],
        leaves=("pad",),
    ),
    "K of 1": Case(
        "fp8",
        "K is 1",
        scaled_dot,
        (S(M, 1), S(N, 1), s, s),
        scaled_dot,
        (S(M, 16), S(N, 16), s, s),
    ),
    "Triton's default tile": Case(
        "fp8",
        "the kernel multiplies in f16",
        lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=f32),
        (A, B),
        lambda a, b: jax.lax.dot(a, b.T, preferred_element_type=f32),
        (S(512, 512), S(512, 512)),
        options={"gemm": "triton"},
        fixed_options={
            "gemm": "triton",
            "compiler_options": {
                "xla_gpu_override_gemm_autotuner": "block_m: 128 block_n: 128 "
                "block_k: 64 num_warps: 4 num_ctas: 1 num_stages: 3"
            },
        },
    ),
    # The conversion of the result
    "no clamp": Case(
        "output",
        "without a clamp",
        lambda a, b, x, y, z: (scaled_dot(a, b, x, y) * z).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "other bounds": Case(
        "output",
        "-400 and 400",
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z, 400).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "bounds of the other format": Case(
        "output",
        "-448 and 448, not exactly the range of f8e5m2",
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z).astype(e5m2),
        (S(M, K, dtype=e5m2), B, s, s, s),
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z, 57344).astype(e5m2),
    ),
    "bounds that are arguments": Case(
        "output",
        "the clamp's bounds are arguments, or one number alone, not exactly",
        lambda a, b, x, y, z: jnp.clip(scaled_dot(a, b, x, y), -z, z).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "result summed beside its conversion": Case(
        "output",
        "read elsewhere too .reduce.*runs anyway",
        lambda a, b, x, y, z: (to_e4m3(d := scaled_dot(a, b, x, y), z), jnp.sum(d, 0)),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (q := to_e4m3(scaled_dot(a, b, x, y), z), jnp.sum(q.astype(f32), 0)),
    ),
    "result read twice": Case(
        "output",
        "read elsewhere too .the function's result.",
        lambda a, b, x, y, z: (to_e4m3(d := scaled_dot(a, b, x, y), z), d),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (
            to_e4m3(scaled_dot(a, b, x, y), z),
            scaled_dot(*BARRIER((a, b)), x, y),
        ),
        leaves=("duplicate", "transpose"),
    ),
    "scaled twice": Case(
        "output",
        "scaled twice",
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y) * x, z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "turned for a gather": Case(
        "output",
        "XLA transposes the result before the conversion",
        lambda a, b, x, y: along(to_e4m3(relu(along(scaled_dot(a, b, x, y), None, "x")), x)),
        OPERANDS,
        lambda a, b, x, y: along(to_e4m3(relu(along(scaled_dot(a, along(b), x, y), "x")), x)),
        options=SHARDED | {"mesh_shape": (4,)},
        fixed_options=SHARDED | {"mesh_shape": (4,)},
    ),
    "gelu of three dimensions": Case(
        "output",
        r"reshaped before it is converted, from \[64,128\] to \[2,32,128\]",
        lambda a, b, x, y, z: to_e4m3(
            gelu(jnp.einsum("bsk,nk->bsn", dequantize(a, x, f32), dequantize(b, y, f32))), z
        ),
        (S(2, M // 2, K), B, s, s, s),
        lambda a, b, x, y, z: to_e4m3(gelu(scaled_dot(a.reshape(M, K), b, x, y)), z).reshape(
            2, M // 2, N
        ),
    ),
    "transposed before the bias": Case(
        "bias",
        "transposed before the bias",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16).reshape(M, 4, 32).transpose(1, 0, 2) + c,
        (*OPERANDS, S(4, 1, 32, dtype=bf16)),
        lambda a, b, x, y, c: (scaled_dot(a, b, x, y, bf16) + c.reshape(N)).reshape(M, 4, 32),
    ),
    "columns split before the bias": Case(
        "bias",
        "columns were split",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16).reshape(M, 4, 32) + c,
        (*OPERANDS, S(4, 32, dtype=bf16)),
        lambda a, b, x, y, c: (scaled_dot(a, b, x, y, bf16) + c.reshape(N)).reshape(M, 4, 32),
    ),
    "a wider output type": Case(
        "output",
        "the dot.s type, bf16, and a kernel converts it to f32",
        lambda a, b, x, y: scaled_dot(a, b, x, y, bf16).astype(f32),
        OPERANDS,
        scaled_dot,
    ),
    "integers": Case(
        "output",
        "which no FP8 call writes",
        lambda a, b, x, y: scaled_dot(a, b, x, y).astype(jnp.int32),
        OPERANDS,
        scaled_dot,
    ),
    "matrix in f32 with FP8 output": Case(
        "output",
        "16 bits",
        lambda a, b, x, y, c, z: to_e4m3(scaled_dot(a, b, x, y) + c, z),
        (*OPERANDS, C32, s),
        lambda a, b, x, y, c, z: to_e4m3(scaled_dot(a, b, x, y, bf16) + c, z),
        (*OPERANDS, C16, s),
    ),
    "converted behind a padded result": Case(
        "output",
        "an FP8 call takes multiples of 16, not N = 120: XLA pads, and puts a slice after",
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
        (A, S(120, K), s, s, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
        (*OPERANDS, s),
    ),
    "rounded": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y: jnp.round(scaled_dot(a, b, x, y)),
        OPERANDS,
    ),
    "silu, read beside it": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y: (jax.nn.silu(d := scaled_dot(a, b, x, y)), d),
        OPERANDS,
    ),
    **{
        f"{name} and its gradient": Case(
            "epilogue",
            "a call has one result" if name == "gelu" else "this activation is another",
            lambda a, b, x, y, c, w, act=act: with_gradient(
                act, scaled_dot(a, b, x, y, bf16) + c, w, x
            ),
            (*OPERANDS, S(N, dtype=bf16), S(N, N)),
            lambda a, b, x, y, c, w: with_gradient(
                own_relu, scaled_dot(a, b, x, y, bf16) + c, w, x
            ),
            leaves=("output",),
        )
        for name, act in (
            ("gelu", gelu),
            ("exact gelu", lambda d: gelu(d, approximate=False)),
            ("silu", jax.nn.silu),
        )
    },
    # Activations
    "gelu after the scale": Case(
        "epilogue",
        "activation is applied to a scaled result",
        lambda a, b, x, y, z: to_e4m3(gelu(scaled_dot(a, b, x, y) * z), x),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(gelu(scaled_dot(a, b, x, z)), x),
    ),
    "exact gelu": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y, z: to_e4m3(gelu(scaled_dot(a, b, x, y), approximate=False), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(gelu(scaled_dot(a, b, x, y)), z),
    ),
    "silu": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y: jax.nn.silu(scaled_dot(a, b, x, y)),
        OPERANDS,
        lambda a, b, x, y: gelu(scaled_dot(a, b, x, y)),
    ),
    **{
        f"relu in {how}": Case(
            "epilogue",
            "written as a choice between the result and 0, and XLA",
            lambda a, b, x, y, z, act=act: to_e4m3(act(scaled_dot(a, b, x, y)), z),
            (*OPERANDS, s),
            lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, x, y)), z),
            same_numbers=True,
        )
        for how, act in (
            ("a choice", lambda d: jnp.where(d > 0, d, 0)),
            ("a choice, from below", lambda d: jnp.where(d < 0, 0, d)),
            ("a choice, exchanged", lambda d: jnp.where(0 >= d, 0, d)),
            ("a product with a comparison", lambda d: d * (d >= 0)),
        )
    },
    **{
        f"no relu: {how}": Case(
            "epilogue",
            "this activation is another",
            lambda a, b, x, y, act=act: act(scaled_dot(a, b, x, y)),
            OPERANDS,
        )
        for how, act in (
            ("the other half", lambda d: jnp.where(d < 0, d, 0)),
            ("another threshold", lambda d: jnp.where(d > 3, d, 0)),
        )
    },
    "relu and scale in a softmax": Case(
        "epilogue",
        "relu is applied to a scaled result.*runs anyway",
        lambda a, b, x, y, z: jax.nn.softmax(relu(scaled_dot(a, b, x, y) * z)),
        (*OPERANDS, s),
        lambda a, b, x, y: jax.nn.softmax(relu(scaled_dot(a, b, x, y))),
        OPERANDS,
    ),
    "relu6": Case(
        "epilogue",
        "clamped to 0 and 6: a relu with an upper bound",
        lambda a, b, x, y: jax.nn.relu6(scaled_dot(a, b, x, y)),
        OPERANDS,
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y)),
    ),
    "relu6 before the conversion": Case(
        "epilogue",
        "a relu with an upper bound",
        lambda a, b, x, y, z: to_e4m3(jax.nn.relu6(scaled_dot(a, b, x, y)), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, x, y)), z),
    ),
    "hard tanh": Case(
        "epilogue",
        "clamped, and not converted",
        lambda a, b, x, y: jnp.clip(scaled_dot(a, b, x, y), -1, 1),
        OPERANDS,
        scaled_dot,
    ),
    "relu read twice": Case(
        "epilogue",
        "input of the relu is read by something else",
        lambda a, b, x, y: (relu(d := scaled_dot(a, b, x, y)), d),
        OPERANDS,
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y)),
    ),
    # Biases
    "bias in a layer norm": Case(
        "bias",
        "bias vector is f32.*runs anyway",
        lambda a, b, x, y, c: LAYER_NORM(scaled_dot(a, b, x, y) + c),
        (*OPERANDS, S(N, dtype=f32)),
        lambda a, b, x, y, c: LAYER_NORM(scaled_dot(a, b, x, y) + c.astype(f32)),
        (*OPERANDS, VECTOR),
    ),
    "vector, then matrix": Case(
        "bias",
        "before activation, scale or an added matrix|stands where",
        lambda a, b, x, y, c, v: scaled_dot(a, b, x, y, bf16) + c + v,
        (*OPERANDS, C16, VECTOR),
        lambda a, b, x, y, c, v: (scaled_dot(a, b, x, y, bf16) + v) + c,
    ),
    "a constant": Case(
        "bias",
        "a scalar is added",
        lambda a, b, x, y: scaled_dot(a, b, x, y) + 1.0,
        OPERANDS,
        lambda a, b, x, y: scaled_dot(a, b, x, y),
    ),
    "bias for each row": Case(
        "bias",
        "one element for each row",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
        (*OPERANDS, S(M, 1, dtype=bf16)),
        lambda a, b, x, y, c: scaled_dot(b, a, y, x) + c.reshape(M).astype(f32),
    ),
    "matrix subtracted": Case(
        "bias",
        "a matrix is subtracted",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) - c,
        (*OPERANDS, C32),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
    ),
    "matrix in FP8": Case(
        "output",
        "the dot's own result is f8e4m3fn",
        lambda a, b, c: jax.lax.dot(a, b.T) + c,
        (A, B, S(M, N)),
        lambda a, b, c: jax.lax.dot(a, b.T, preferred_element_type=bf16) + c,
        (A, B, C16),
    ),
    "sum and result": Case(
        "bias",
        "by the addition and by something else",
        lambda a, b, x, y, c: ((d := scaled_dot(a, b, x, y)) + c, d),
        (*OPERANDS, C32),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
    ),
    "bias subtracted": Case(
        "bias",
        "a vector is subtracted",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) - c.astype(f32),
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c.astype(f32),
    ),
    "bias after relu": Case(
        "bias",
        "stands where the call cannot take it",
        lambda a, b, x, y, c: relu(scaled_dot(a, b, x, y)) + c.astype(f32),
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, c: relu(scaled_dot(a, b, x, y) + c.astype(f32)),
    ),
    "bias after a scale": Case(
        "bias",
        "scaled outside of the call, before the addition",
        lambda a, b, x, y, z, c: scaled_dot(a, b, x, y) * z + c.astype(f32),
        (*OPERANDS, s, VECTOR),
        lambda a, b, x, y, z, c: scaled_dot(a, b, x, z) + c.astype(f32),
    ),
    "matrix after relu": Case(
        "bias",
        "after another epilogue .epilogue RELU",
        lambda a, b, x, y, c: relu(scaled_dot(a, b, x, y)) + c,
        (*OPERANDS, C32),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
    ),
    "matrix of another type": Case(
        "bias",
        "computed by a kernel before",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c.astype(f32),
        (*OPERANDS, C16),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
    ),
    "matrix with a factor": Case(
        "bias",
        "computed by a kernel before",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + 0.5 * c,
        (*OPERANDS, C32),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c,
    ),
    # Amax
    "amax before relu": Case(
        "amax",
        "before the relu",
        lambda a, b, x, y, z: with_amax(relu(d := scaled_dot(a, b, x, y)), z, d),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(relu(scaled_dot(a, b, x, y)), z),
    ),
    "amax before silu": Case(
        "amax",
        "before the activation",
        lambda a, b, x, y, z: with_amax(jax.nn.silu(d := scaled_dot(a, b, x, y)), z, d),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(gelu(scaled_dot(a, b, x, y)), z),
    ),
    "amax before the bias": Case(
        "amax",
        "before the bias",
        lambda a, b, x, y, z, c: with_amax((d := scaled_dot(a, b, x, y)) + c.astype(f32), z, d),
        (*OPERANDS, s, VECTOR),
        lambda a, b, x, y, z, c: with_amax(scaled_dot(a, b, x, y) + c.astype(f32), z),
    ),
    "amax in bf16": Case(
        "amax",
        "returns the amax in float32",
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y, bf16), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "amax without clamp": Case(
        "amax",
        "and the amax with it",
        lambda a, b, x, y, z: ((d := scaled_dot(a, b, x, y)).astype(e4m3), jnp.max(jnp.abs(d))),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "amax of each row": Case(
        "amax",
        "along some dimensions",
        lambda a, b, x, y: (d := scaled_dot(a, b, x, y), jnp.max(jnp.abs(d), axis=1)),
        OPERANDS,
        lambda a, b, x, y: with_amax(scaled_dot(a, b, x, y), x),
    ),
    "amax of a conversion": Case(
        "amax",
        "converted to f32 before its amax",
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y, bf16), z),
            jnp.max(jnp.abs(d.astype(f32))),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y, bf16), z),
            jnp.max(jnp.abs(d)).astype(f32),
        ),
    ),
    "amax of a relu": Case(
        "amax",
        "not converted to FP8",
        lambda a, b, x, y: (r := relu(scaled_dot(a, b, x, y)), jnp.max(jnp.abs(r))),
        OPERANDS,
        lambda a, b, x, y: with_amax(relu(scaled_dot(a, b, x, y)), x),
    ),
    "amax of another value": Case(
        "amax",
        "that the call neither writes nor computes on the way",
        lambda a, b, x, y, z: (
            jnp.minimum(relu((d := scaled_dot(a, b, x, y)) * z), 448).astype(e4m3),
            jnp.max(jnp.abs(relu(d))),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(relu(scaled_dot(a, b, x, y)), z),
    ),
    "amax behind a barrier": Case(
        "amax",
        "optimization_barrier stands between",
        lambda a, b, x, y: to_e4m3(d := scaled_dot(a, b, x, y), 448 / jnp.max(jnp.abs(BARRIER(d)))),
        OPERANDS,
        lambda a, b, x, y: with_amax(scaled_dot(a, b, x, y), x),
    ),
    "amax of the scaled result": Case(
        "duplicate",
        "multiplied twice",
        lambda a, b, x, y, z: (
            clip(d := scaled_dot(a, b, x, y) * z).astype(e4m3),
            jnp.max(jnp.abs(d)),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (to_e4m3(d := scaled_dot(a, b, x, y), z), jnp.max(jnp.abs(d))),
    ),
    # Scales
    "product of scales": Case(
        "scale",
        "product of scalars",
        lambda a, b, x, y: jax.lax.dot(a, b.T, preferred_element_type=f32) * (x * y),
        OPERANDS,
        scaled_dot,
    ),
    "scales in bf16": Case(
        "scale",
        "not float32",
        lambda a, b, x, y: scaled_dot(a, b, x, y),
        (A, B, S(dtype=bf16), S(dtype=bf16)),
        scaled_dot,
        OPERANDS,
    ),
    "scale per channel": Case(
        "scale",
        "for each row or column",
        lambda a, b, x, y, z: scaled_dot(a, b, x, y) * z,
        (*OPERANDS, S(N, dtype=f32)),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
        (*OPERANDS, s),
    ),
    "scale per channel, times another": Case(
        "scale",
        "for each row or column",
        lambda a, b, x, y: jax.lax.dot(a, b.T, preferred_element_type=f32) * (x * y),
        (A, B, s, S(N, dtype=f32)),
        scaled_dot,
        OPERANDS,
    ),
    "guarded scale per row": Case(
        "scale",
        "for each row or column",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) * jnp.where(c == 0, 1, c),
        (*OPERANDS, S(M, 1, dtype=bf16)),
        scaled_dot,
        OPERANDS,
    ),
    "guarded scale per row, FP8 out": Case(
        "scale",
        "for each row or column.*clamp and conversion",
        lambda a, b, x, y, c: clip(scaled_dot(a, b, x, y) * jnp.maximum(c, 1e-6)).astype(e4m3),
        (*OPERANDS, S(M, 1, dtype=bf16)),
        lambda a, b, x, y: clip(scaled_dot(a, b, x, y)).astype(e4m3),
        OPERANDS,
    ),
    "amax of a scaled product, read elsewhere": Case(
        "amax",
        "conversion to FP8 stayed outside, and the amax with it",
        lambda a, b, x, z: (
            *with_amax(d := jax.lax.dot(a, b.T, preferred_element_type=f32) * x, z),
            d,
        ),
        (A, B, s, s),
        lambda a, b, x, z: with_amax(jax.lax.dot(a, b.T, preferred_element_type=f32) * x, z),
    ),
    "E5M2 in 16 bits, read elsewhere": Case(
        "output",
        "read elsewhere too",
        lambda a, b, x, y, z: (
            clip((d := scaled_dot(a, b, x, y, bf16)) * z.astype(bf16), 57344).astype(e5m2),
            d,
        ),
        (S(M, K, dtype=e5m2), B, s, s, s),
        lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y, bf16) * z.astype(bf16), 57344).astype(
            e5m2
        ),
    ),
    "two scalars, then gelu": Case(
        "scale",
        "several scalars, one after the other.*the activation after",
        lambda a, b, x, y: gelu(jax.lax.dot(a, b.T, preferred_element_type=f32) * x * y),
        OPERANDS,
        lambda a, b, x, y: gelu(jax.lax.dot(a, b.T, preferred_element_type=f32) * (x * y)),
        leaves=("scale",),
    ),
    "two scalars, then a bias": Case(
        "scale",
        "several scalars, one after the other.*the bias after",
        lambda a, b, x, y, c: (
            jax.lax.dot(a, b.T, preferred_element_type=f32) * x * y + c.astype(f32)
        ),
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y) + c.astype(f32),
    ),
    "a product by columns": Case(
        "scale",
        "transposed before the scale",
        jax.vmap(
            lambda b, a, x: (jax.lax.dot(b, a, preferred_element_type=f32) * x).astype(bf16),
            (None, 0, None),
        ),
        (B, A, s),
        jax.vmap(
            lambda b, a, x: jax.lax.dot(a, b.T, preferred_element_type=bf16) * x.astype(bf16),
            (None, 0, None),
        ),
    ),
    # Layout
    "transposed, then joined": Case(
        "transpose",
        r"operand's \(c\) contracting dimension is not its last",
        lambda a, b, c: [
            jnp.einsum("mk,khd->mhd", a, w, preferred_element_type=f32) for w in (b, c)
        ],
        (A, S(K, 4, 32), S(K, 4, 32)),
        lambda a, b, c: [
            jnp.einsum("mk,hdk->mhd", a, w, preferred_element_type=f32) for w in (b, c)
        ],
        (A, S(4, 32, K), S(4, 32, K)),
        leaves=("copy",),  # XLA merges the dots
    ),
    "transposed, then quantized": Case(
        "transpose",
        r"the left operand's \(a\) contracting dimension is not its last",
        lambda a, b, h, x: jax.lax.dot(
            delayed(a.astype(bf16), h, x).T, b.T, preferred_element_type=f32
        ),
        (S(K, M, dtype=f32), B, S(1024, dtype=f32), s),
        lambda a, b, h, x: jax.lax.dot(
            delayed(a.astype(bf16), h, x), b.T, preferred_element_type=f32
        ),
        (S(M, K, dtype=f32), B, S(1024, dtype=f32), s),
    ),
    "rows exchanged": Case(
        "transpose",
        r"the left operand's \(a\) rows stand in another order",
        lambda a, b, x, y: scaled_dot(a.transpose(1, 0, 2).reshape(M, K), b, x, y),
        (S(4, 16, K), B, s, s),
        lambda a, b, x, y: scaled_dot(a.reshape(M, K), b, x, y),
        (S(16, 4, K), B, s, s),
    ),
    "rows of weights exchanged": Case(
        "transpose",
        r"the right operand's \(b\) rows stand in another order",
        lambda a, b, x, y: scaled_dot(a, b.transpose(1, 0, 2).reshape(N, K), x, y),
        (A, S(4, 32, K), s, s),
        lambda a, b, x, y: scaled_dot(a, b.reshape(N, K), x, y),
        (A, S(32, 4, K), s, s),
    ),
    "weights repeated": Case(
        "copy",
        r"the right operand \(b\) is repeated in memory",
        lambda a, b, x, y: jnp.einsum(
            "gmk,gnk->gmn", dequantize(a, x), jnp.broadcast_to(dequantize(b, y), (4, N, K))
        ),
        (S(4, M, K), B, s, s),
        lambda a, b, x, y: jnp.einsum("gmk,nk->gmn", dequantize(a, x), dequantize(b, y)),
    ),
    "inputs repeated": Case(
        "copy",
        r"the left operand \(a\) is repeated in memory",
        lambda a, b, x, y: jnp.einsum(
            "gmk,gnk->gmn", jnp.broadcast_to(dequantize(a, x), (4, M, K)), dequantize(b, y)
        ),
        (A, S(4, N, K), s, s),
        lambda a, b, x, y: jnp.einsum("mk,gnk->mgn", dequantize(a, x), dequantize(b, y)),
    ),
    "weights negated": Case(
        "scale",
        r"negates the right operand's \(b\) FP8 array",
        lambda a, b, x, y: scaled_dot(a, -b, x, y),
        OPERANDS,
        scaled_dot,
    ),
    "inputs negated": Case(
        "scale",
        r"negates the left operand's \(a\) FP8 array",
        lambda a, b, x, y: scaled_dot(-a, b, x, y),
        OPERANDS,
        scaled_dot,
    ),
    "K padded by the program": Case(
        "pad",
        "the program itself pads",
        lambda a, b, x, y: scaled_dot(padded(a, columns=K), b, x, y),
        (A, S(N, 2 * K), s, s),
        lambda a, b, x, y: scaled_dot(a, b[:, :K], x, y),
        leaves=("pad",),
    ),
    "residual and bias added first, then relu": Case(
        "bias",
        "a number or a vector is added to the matrix by a kernel",
        lambda a, b, x, y, c, v: relu(scaled_dot(a, b, x, y, bf16) + (c + v)),
        (*OPERANDS, C16, VECTOR),
        lambda a, b, x, y, c, v: relu(scaled_dot(a, b, x, y, bf16) + v + c),
    ),
    "nan_to_num behind the clamp": Case(
        "output",
        "an activation stands between the clamp and the conversion",
        lambda a, b, x, y, z: jnp.nan_to_num(clip(scaled_dot(a, b, x, y) * z)).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "the dots of two branches, mapped": Case(
        "fp8",
        "XLA merged dots",
        lambda p, x, w, v, s, t: jax.vmap(
            lambda p, x: jax.lax.cond(
                p, lambda x: scaled_dot(x, w, s, t), lambda x: scaled_dot(x, v, s, t), x
            )
        )(p, x),
        (S(4, dtype=bool), S(4, M, K), B, B, s, s),
    ),
    "one row": Case(
        "pad",
        "pads few rows",
        lambda a, b, x, y: scaled_dot(jnp.zeros((16, K), e4m3).at[0].set(a), b, x, y)[0],
        (S(K), B, s, s),
        scaled_dot,
        (S(16, K), B, s, s),
    ),
    "left beside a Triton kernel": Case(
        "scale",
        "on what the triton kernel has written",
        lambda a, b, c: jax.lax.dot(a, b.T, preferred_element_type=f32) * jnp.cumsum(c)[:, None],
        (S(2048, 256), S(2048, 256), S(2048, dtype=f32)),
        lambda a, b, c: jax.lax.dot(a, b.T, preferred_element_type=f32) * jnp.cumsum(c)[:, None],
        options={"gemm": "triton"} | TILED,
        leaves=("scale",),
    ),
    "right operand [K, N]": Case(
        "transpose",
        r"the right operand's \(b\) contracting dimension is not its last",
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32), dequantize(b, y, f32)),
        (A, S(K, N), s, s),
        scaled_dot,
        OPERANDS,
    ),
    "left operand [K, M]": Case(
        "transpose",
        r"the left operand's \(a\) contracting dimension is not its last",
        lambda a, b, x, y: jax.lax.dot(dequantize(a, x, f32).T, dequantize(b, y, f32).T),
        (S(K, M), B, s, s),
        scaled_dot,
        OPERANDS,
    ),
    "a result, by its columns": Case(
        "transpose",
        "the left operand's contracting dimension is not its last",
        lambda a, b, c, x: scaled_dot(to_e4m3(scaled_dot(a, b, x, x), x).T, c, x, x),
        (S(64, 64), S(128, 64), S(96, 64), s),
        lambda a, b, c, x: scaled_dot(to_e4m3(scaled_dot(b, a, x, x), x), c, x, x),
    ),
    "M not a multiple of 16": Case(
        "pad", "multiples of 16, not M = 50", scaled_dot, (S(50, K), B, s, s), scaled_dot, OPERANDS
    ),
    "K not a multiple of 16": Case(
        "pad",
        "multiples of 16, not K = 200",
        scaled_dot,
        (S(M, 200), S(N, 200), s, s),
        scaled_dot,
        OPERANDS,
    ),
    # In loops, and in kernels that run anyway
    "residual in a loop": Case(
        "bias",
        r"a matrix is added after another epilogue \(epilogue RELU",
        lambda w, x, s: in_a_loop(lambda d, x: relu(d) + x, w, x, s),
        (S(4, K, K), S(M, K, dtype=bf16), s),
        lambda w, x, s: in_a_loop(lambda d, x: d + x, w, x, s),
        leaves=("output",),  # the sum is read in the next iteration, and added to as it is
    ),
    **{
        f"an update by {name}": Case(
            "epilogue",
            "the result is a gradient, and the program computes with it outside",
            functools.partial(update_by, optimizer),
            (
                S(N, K, dtype=f32),
                jax.eval_shape(optimizer.init, S(N, K, dtype=f32)),
                S(M, K, dtype=bf16),
                s,
            ),
        )
        for name, optimizer in (
            ("momentum", optax.sgd(0.1, momentum=0.9)),
            ("Adam", optax.adam(0.1)),
            ("Adam of clipped gradients", CLIPPED),
            ("Adam of several steps", optax.MultiSteps(optax.adam(0.1), 2)),
            *((("AdamW", optax.adamw(0.1)), ("Lion", optax.lion(0.1))) if NIGHTLY else ()),
        )
    },
    **{
        f"chunks, then {name}": Case(
            lost,
            f"stored in a larger array before the {step}.*a kernel further on does it",
            lambda a, b, x, y, then=then: then(
                jax.lax.map(lambda rows: scaled_dot(rows, b, x, y), a), x
            ),
            (S(4, M, K), B, s, s),
            lambda a, b, x, y, then=then: jax.lax.map(
                lambda rows: then(scaled_dot(rows, b, x, y), x), a
            ),
        )
        for name, lost, step, then in (
            ("quantized", "output", "conversion", to_e4m3),
            ("relu", "epilogue", "relu", lambda d, _: relu(d)),
        )
    },
    "silu and residual in a loop": Case(
        "epilogue",
        "this activation is another",
        lambda w, x, s: in_a_loop(lambda d, x: jax.nn.silu(d) + x, w, x, s),
        (S(4, K, K), S(M, K, dtype=bf16), s),
    ),
    "residual of another type in a loop": Case(
        "output",
        "the call writes the dot's type, bf16.*the bias, scale, clamp and",
        lambda w, x, s: in_a_loop(lambda d, x: d.astype(f32) + x, w, x, s),
        (S(4, K, K), S(M, K, dtype=f32), s),
        lambda w, x, s: in_a_loop(lambda d, x: d + x, w, x, s, f32),
        leaves=("output",),
    ),
    "relu of another type, gated": Case(
        "output",
        "the call writes the dot's type, bf16.*the relu after it stays.*runs anyway",
        lambda a, b, x, y, g: relu(scaled_dot(a, b, x, y, bf16).astype(f32)) * g,
        (*OPERANDS, S(M, N, dtype=f32)),
        lambda a, b, x, y, g: relu(scaled_dot(a, b, x, y)) * g,
    ),
    "residual of another type, normed": Case(
        "output",
        "the call writes the dot's type, bf16.*the bias after it stays.*runs anyway",
        lambda a, b, x, y, c: RMS_NORM(scaled_dot(a, b, x, y, bf16).astype(f32) + c),
        (*OPERANDS, S(M, N, dtype=f32)),
        lambda a, b, x, y, c: RMS_NORM(scaled_dot(a, b, x, y) + c),
    ),
    "relu, reversed": Case(
        "epilogue",
        "reversed before the relu",
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y))[::-1],
        OPERANDS,
        lambda a, b, x, y: BARRIER(relu(scaled_dot(a, b, x, y)))[::-1],
    ),
    "joined, then quantized": Case(
        "output",
        "joined with others before the conversion",
        lambda a, b, c, x, y: to_e4m3(
            jnp.concatenate([scaled_dot(a, w, x, y) for w in (b, c)], 1), x
        ),
        (A, B, B, s, s),
        lambda a, b, c, x, y: jnp.concatenate(
            [to_e4m3(scaled_dot(a, w, x, y), x) for w in (b, c)], 1
        ),
        options=UNMERGED,
        fixed_options=UNMERGED,
    ),
    "cut, then quantized": Case(
        "output",
        "cut into parts before the conversion",
        lambda a, b, x, y: [to_e4m3(d, x) for d in jnp.split(scaled_dot(a, b, x, y), 2, 1)],
        OPERANDS,
        lambda a, b, x, y: jnp.split(to_e4m3(scaled_dot(a, b, x, y), x), 2, 1),
    ),
    "bias in front of a product with a vector": Case(
        "bias",
        "the bias vector is f32.*runs anyway",
        lambda a, b, x, y, c, v: relu(scaled_dot(a, b, x, y) + c) @ v,
        (*OPERANDS, S(N, dtype=f32), S(N, dtype=f32)),
    ),
    "bounds beside an amax": Case(
        "output",
        "bounds are -400 and 400.*runs anyway",
        lambda a, b, x, y, d, i: (
            jax.lax.dynamic_update_slice(
                d, clip((r := scaled_dot(a, b, x, y)) * x, 400).astype(e4m3), (i, 0)
            ),
            jnp.max(jnp.abs(r)),
        ),
        (*OPERANDS, S(4 * M, N), S(dtype=jnp.int32)),
        lambda a, b, x, y, d, i: (
            jax.lax.dynamic_update_slice(d, to_e4m3((r := scaled_dot(a, b, x, y)), x), (i, 0)),
            jnp.max(jnp.abs(r)),
        ),
    ),
    "Triton's parts of K": Case(
        "output",
        "kernels do scale, bias, epilogue, output.*runs anyway",
        lambda a, b, x, c: to_e4m3(
            relu(jax.lax.dot(a, b.T, preferred_element_type=f32) * x + c.astype(f32)), x
        ),
        (S(256, 512), S(384, 512), s, S(384, dtype=bf16)),
        options=TILED | {"gemm": "triton"},
    ),
    "ones on the left": Case(
        "fp8",
        "all elements of the left operand are one number",
        lambda b, x, y: scaled_dot(jnp.ones((M, K), e4m3), b, x, y),
        (B, s, s),
        scaled_dot,
        OPERANDS,
    ),
    "ones on the right": Case(
        "fp8",
        "all elements of the right operand are one number",
        lambda a, x, y: scaled_dot(a, jnp.ones((N, K), e4m3), x, y),
        (A, s, s),
        scaled_dot,
        OPERANDS,
    ),
    # What an engineer's 300 programs found
    **{
        f"a factor, then a {name}, by heads": Case(
            "scale",
            "multiplied by a scale, and is not converted.*runs anyway",
            lambda a, b, x, y, then=then: then(by_heads(a, b, x, y) * 0.125),
            HEADS,
            lambda a, b, x, y, then=then: then(by_heads(a, b, x, y)),
        )
        for name, then in (
            ("mask", lambda d: jnp.where(jnp.tri(64, dtype=bool), d, -1e9)),
            ("softmax", jax.nn.softmax),
        )
    },
    "masked, then quantized": Case(
        "output",
        "masked before the conversion.*runs anyway",
        lambda a, b, x, y, z, m: to_e4m3(jnp.where(m, gelu(scaled_dot(a, b, x, y)), 0), z),
        (*OPERANDS, s, S(M, N, dtype=bool)),
        lambda a, b, x, y, z, m: jnp.where(
            m, to_e4m3(gelu(scaled_dot(a, b, x, y)), z), jnp.zeros((), e4m3)
        ),
    ),
    "scaled, masked, then quantized": Case(
        "output",
        "masked before the conversion.*runs anyway",
        lambda a, b, x, y, z, m: clip(jnp.where(m, scaled_dot(a, b, x, y) * z, 0)).astype(e4m3),
        (*OPERANDS, s, S(M, N, dtype=bool)),
        lambda a, b, x, y, z, m: jnp.where(
            m, to_e4m3(scaled_dot(a, b, x, y), z), jnp.zeros((), e4m3)
        ),
    ),
    "masked, then relu": Case(
        "epilogue",
        "masked before the relu.*runs anyway",
        lambda a, b, x, y, m: relu(jnp.where(m, scaled_dot(a, b, x, y), 0)),
        (*OPERANDS, S(M, N, dtype=bool)),
        lambda a, b, x, y, m: jnp.where(m, relu(scaled_dot(a, b, x, y)), 0),
    ),
    "amax of the codes": Case(
        "amax",
        "of the scaled or clamped result",
        lambda a, b, x, y, z: (
            q := to_e4m3(scaled_dot(a, b, x, y), z),
            jnp.max(jnp.abs(q.astype(f32))),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "amax, and amax of the codes": Case(
        "amax",
        "of the scaled or clamped result",
        lambda a, b, x, y, z: (
            *(q := with_amax(scaled_dot(a, b, x, y), z)),
            jnp.max(jnp.abs(q[0].astype(f32))),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "amax of a result in FP8": Case(
        "output",
        "the dot's own result is f8e4m3fn",
        lambda a, b: (d := jax.lax.dot(a, b.T), jnp.max(jnp.abs(d.astype(f32)))),
        (A, B),
        lambda a, b: with_amax(jax.lax.dot(a, b.T, preferred_element_type=f32), jnp.float32(1)),
    ),
    **{
        f"a negative factor behind relu, and {ahead} in front": Case(
            "scale",
            "wrong numbers, by an error of XLA's: it multiplies by the factor -2 before",
            lambda a, b, ahead=ahead: (
                relu(jax.lax.dot(a, b.T, preferred_element_type=f32) * ahead) * -2.0
            ),
            (A, B),
            lambda a, b, ahead=ahead: (
                BARRIER(relu(jax.lax.dot(a, b.T, preferred_element_type=f32) * ahead)) * -2.0
            ),
            leaves=("scale",),
        )
        for ahead in (1.0, 3.0)
    },
    **{
        f"{how} behind relu, {name}": Case(
            "scale",
            "wrong numbers, by an error of XLA's: it multiplies by the factor -s before",
            lambda a, b, z, to=to, last=last: last(to(relu(bare(a, b)), z)),
            (A, B, s),
            lambda a, b, z, to=to, last=last: last(to(BARRIER(relu(bare(a, b))), z)),
            leaves=("scale", "output"),
            same_numbers=True,
        )
        for how, to in (
            ("a negated scale", lambda d, z: d * -z),
            ("a scale taken from 0", lambda d, z: d * (0 - z)),
            ("a divisor negated", lambda d, z: d / -z),
        )
        for name, last in (("wide", lambda d: d), ("FP8", lambda d: clip(d).astype(e4m3)))
    },
    **{
        f"padded with {what}": Case(
            "scale",
            "wrong numbers, by an error of XLA's: the left operand is padded with something other "
            "than zero",
            lambda a, b, x, y, v, number=number, places=places: jax.lax.dot(
                padded(dequantize(a, x, f32), number(v), **places), dequantize(b, y, f32).T
            ),
            (left, B, s, s, s),
            lambda a, b, x, y, v, number=number, places=places: scaled_dot(
                padded(a, (number(v) / x).astype(e4m3), **places), b, x, y
            ),
            leaves=("pad",),
            same_numbers=True,
        )
        for what, number, left, places in (
            ("ones", lambda v: 1.0, S(M, K - 16), {"columns": 16}),
            ("an argument", lambda v: v, S(M, K - 16), {"columns": 16}),
            ("rows of ones", lambda v: 1.0, S(M - 16, K), {"rows": 16}),
            ("ones between its rows", lambda v: 1.0, S(M // 2, K), {"rows": 1, "between": 1}),
        )
    },
    "padded with ones on the right": Case(
        "scale",
        "the right operand is padded with something other than zero",
        lambda a, b, x, y: jax.lax.dot(
            dequantize(a, x, bf16), padded(dequantize(b, y, bf16), 1.0, columns=16).T
        ),
        (A, S(N, K - 16), s, s),
        lambda a, b, x, y: scaled_dot(a, padded(b, (1 / y).astype(e4m3), columns=16), x, y, bf16),
        same_numbers=True,
    ),
    **{
        f"without scales, padded with {what}": Case(
            "scale",
            "the left operand is padded with something other than zero",
            lambda a, b, v, number=number: jax.lax.dot(
                padded(a.astype(f32), number(v), columns=16), b.astype(f32).T
            ),
            (S(M, K - 16), B, s),
            lambda a, b, v: jax.lax.dot(padded(a.astype(f32), columns=16), b.astype(f32).T),
            leaves=("pad",),
        )
        for what, number in (
            ("0.3", lambda v: 0.3),
            ("1000", lambda v: 1000.0),
            ("2**-11", lambda v: 2.0**-11),
            ("an argument", lambda v: v),
        )
    },
    **{
        f"{what}, times a constant": Case(
            "scale",
            "wrong numbers where the result saturates, by an error of XLA's",
            lambda a, b, z, to=to: to(a, b, z) * jnp.asarray(0.5, e4m3),
            (A, B, s),
            fixed,
            leaves=leaves,
        )
        for what, to, fixed, leaves in (
            (
                "codes",
                lambda a, b, z: to_e4m3(bare(a, b), z),
                lambda a, b, z: BARRIER(to_e4m3(bare(a, b), z)) * jnp.asarray(0.5, e4m3),
                ("scale",),
            ),
            (
                "unscaled codes",
                lambda a, b, z: clip(bare(a, b)).astype(e4m3),
                lambda a, b, z: clip(bare(a, b) * 0.5).astype(e4m3),
                (),
            ),
            (
                "a result in FP8",
                lambda a, b, z: bare(a, b, e4m3),
                lambda a, b, z: clip(bare(a, b) * 0.5).astype(e4m3),
                (),
            ),
        )
    },
    "a result in FP8, times an argument": Case(
        "scale",
        "wrong numbers where the result saturates, by an error of XLA's",
        lambda a, b, z: bare(a, b, e4m3) * z,
        (A, B, S()),
        lambda a, b, z: to_e4m3(bare(a, b), z),
        (A, B, s),
    ),
    "scaled codes, times an argument": Case(
        "scale",
        "multiplied by several scalars, one after the other.*runs anyway",
        lambda a, b, x, y, z, t: to_e4m3(scaled_dot(a, b, x, y), z) * t,
        (*OPERANDS, s, S()),
        lambda a, b, x, y, z, t: to_e4m3(scaled_dot(a, b, x, y), z * t.astype(f32)),
        leaves=("scale",),
    ),
    **{
        f"{what}, in 16 bits": Case(
            "output",
            "writes the dot's type, f32, and a kernel converts it to bf16; it is done in a kernel "
            "that runs anyway",
            lambda a, b, x, y, cut=cut: cut(scaled_dot(a, b, x, y), bf16),
            OPERANDS,
            lambda a, b, x, y, cut=cut: cut(scaled_dot(a, b, x, y, bf16), bf16),
            leaves=leaves,
        )
        for what, cut, leaves in (
            ("split", lambda d, to: [part.astype(to) for part in jnp.split(d, 4, -1)], ()),
            ("a half", lambda d, to: d[: M // 2].astype(to), ()),
            (
                "heads of three parts",
                lambda d, to: [
                    part.astype(to).reshape(2, M // 2, 2, 16).swapaxes(1, 2)
                    for part in jnp.split(d, 4, -1)[:3]
                ],
                (),
            ),
        )
    },
    "residual of another shape": Case(
        "bias",
        r"an argument of another shape, bf16\[2,32,128\], and a kernel copies it",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c.reshape(M, N),
        (*OPERANDS, S(2, M // 2, N, dtype=bf16)),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
        (*OPERANDS, C16),
    ),
    "residual of three dimensions": Case(
        "bias",
        r"an argument of another shape, bf16\[2,32,128\], and a kernel copies it",
        lambda a, b, x, y, c: (
            jnp.einsum("tmk,nk->tmn", dequantize(a, x, bf16), dequantize(b, y, bf16)) + c
        ),
        (S(2, M // 2, K), B, s, s, S(2, M // 2, N, dtype=bf16)),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
        (*OPERANDS, C16),
    ),
    "heads inside, dequantized": Case(
        "fp8",
        "a transpose stands between the left operand's conversion and a scale",
        lambda a, b, x, y: by_heads(a.swapaxes(1, 2), b.swapaxes(1, 2), x, y),
        (S(2, 64, 4, 128), S(2, 64, 4, 128), s, s),
        lambda a, b, x, y: by_heads(BARRIER(a.swapaxes(1, 2)), BARRIER(b.swapaxes(1, 2)), x, y),
        leaves=("transpose",),
    ),
    "dequantized with two scalars": Case(
        "fp8",
        "another multiplication stands between the left operand's conversion and a scale",
        lambda a, b, x, y, z: jax.lax.dot(a.astype(f32) * x * z, dequantize(b, y, f32).T),
        (*OPERANDS, s),
        lambda a, b, x, y, z: jax.lax.dot(a.astype(f32) * (x * z), dequantize(b, y, f32).T),
        leaves=("scale",),
    ),
    **{
        f"converted to bfloat16 {where} the clamp": Case(
            "output",
            "converted to bf16 on the way",
            broken,
            (*OPERANDS, s),
            lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
        )
        for where, broken in (
            (
                "behind",
                lambda a, b, x, y, z: clip(scaled_dot(a, b, x, y) * z).astype(bf16).astype(e4m3),
            ),
            (
                "before",
                lambda a, b, x, y, z: clip((scaled_dot(a, b, x, y) * z).astype(bf16)).astype(e4m3),
            ),
        )
    },
    "half of the rows, quantized": Case(
        "output",
        "the result is cut before the conversion.*runs anyway",
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y)[: M // 2], z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z)[: M // 2],
    ),
    **{
        f"an amax behind a padded result, {jnp.dtype(dtype)}": Case(
            "output",
            "an FP8 call takes multiples of 16, not N = 100: XLA pads, and puts a slice after",
            lambda a, b, x, y, z, dtype=dtype: with_amax(scaled_dot(a, b, x, y, dtype), z),
            (A, S(100, K), s, s, s),
            lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
            (*OPERANDS, s),
        )
        for dtype in (f32, bf16)
    },
    "a bias for each matrix": Case(
        "bias",
        "a vector is added for each matrix of a batch",
        lambda a, b, x, y, c: by_heads(a, b, x, y) + c[:, None],
        (*HEADS, S(4, 64, dtype=f32)),
        lambda a, b, x, y, c: by_heads(a, b, x, y) + c,
        (*HEADS, S(2, 4, 64, 64, dtype=f32)),
    ),
    "a bias for each part of the rows": Case(
        "bias",
        "or part of the rows",
        lambda a, b, x, y, c: scaled_dot(a, b, x, y).reshape(4, M // 4, N) + c[:, None],
        (*OPERANDS, S(4, N, dtype=f32)),
        lambda a, b, x, y, c: scaled_dot(a, b, x, y).reshape(4, M // 4, N) + c.astype(f32),
        (*OPERANDS, VECTOR),
    ),
    "amax of some elements": Case(
        "output",
        r"read elsewhere too \(compare, abs\)",
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.max(jnp.abs(d), where=d > 0, initial=0.0),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "smallest magnitude": Case(
        "amax",
        "not written as a maximum of absolute values",
        lambda a, b, x, y, z: (to_e4m3(d := scaled_dot(a, b, x, y), z), jnp.min(jnp.abs(d))),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(scaled_dot(a, b, x, y), z),
    ),
    "added to its own tanh": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y: jnp.tanh(d := scaled_dot(a, b, x, y)) + d,
        OPERANDS,
    ),
    "bounded from below": Case(
        "epilogue",
        "this activation is another",
        lambda a, b, x, y: jnp.maximum(scaled_dot(a, b, x, y), 0.1),
        OPERANDS,
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y)),
    ),
    "in E4M3 and E5M2": Case(
        "duplicate",
        "multiplied twice",
        lambda a, b, x, y, z: (
            clip(d := scaled_dot(a, b, x, y) * z).astype(e4m3),
            clip(d, 57344).astype(e5m2),
        ),
        (S(M, K, dtype=e5m2), B, s, s, s),
        lambda a, b, x, y, z: (q := to_e4m3(scaled_dot(a, b, x, y), z), q.astype(e5m2)),
    ),
    "four bits": Case(
        "fp8",
        "both operands are f4e2m1fn",
        lambda a, b: jax.lax.dot(a.astype(bf16), b.astype(bf16).T),
        (S(M, K, dtype=jnp.float4_e2m1fn), S(N, K, dtype=jnp.float4_e2m1fn)),
        scaled_dot,
        OPERANDS,
    ),
    "bounded from above": Case(
        "output",
        "bounds are arguments, or one number alone",
        lambda a, b, x, y, z: jnp.minimum(scaled_dot(a, b, x, y) * z, 448).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    # What an engineer of XLA found
    "relu, scaled and bounded from both sides": Case(
        "output",
        "bounds are 0 and 448",
        lambda a, b, x, y, z: jnp.clip(relu(scaled_dot(a, b, x, y)) * z, 0, 448).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, x, y)), z),
        same_numbers=True,
    ),
    "relu of a scaled sum, in the clamp": Case(
        "epilogue",
        "relu is applied to a scaled result",
        lambda a, b, x, y, z, c: jnp.minimum(
            relu((scaled_dot(a, b, x, y) + c.astype(f32)) * z), 448
        ).astype(e4m3),
        (*OPERANDS, s, VECTOR),
        lambda a, b, x, y, z, c: to_e4m3(relu(scaled_dot(a, b, x, y) + c.astype(f32)), z),
        same_numbers=True,
    ),
    "relu in the clamp": Case(
        "epilogue",
        "a relu and the conversion's clamp in one",
        lambda a, b, x, y: jnp.minimum(relu(scaled_dot(a, b, x, y)), 448).astype(e4m3),
        OPERANDS,
        lambda a, b, x, y: clip(relu(scaled_dot(a, b, x, y))).astype(e4m3),
        same_numbers=True,
    ),
    **{
        f"{name}, {act.__name__}": Case(
            "epilogue",
            f"negated before its {'relu' if act is relu else 'activation'}",
            lambda a, b, x, y, z, act=act, sign=sign: to_e4m3(
                sign(act(-scaled_dot(a, b, x, y))), z
            ),
            (*OPERANDS, s),
            lambda a, b, x, y, z, act=act, sign=sign: to_e4m3(
                act(scaled_dot(a, b, -x, y)), sign(z)
            ),
            same_numbers=True,
        )
        for act in (relu, gelu)
        for name, sign in (("negated", lambda d: d), ("negated twice", jnp.negative))
    },
    "a negated sum, then relu": Case(
        "epilogue",
        "negated before its relu",
        lambda a, b, x, y, c: relu(-(scaled_dot(a, b, x, y) + c.astype(f32))),
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, c: relu(
            scaled_dot(a, b, -x, y) + c.astype(f32)
        ),  # the vector is passed negated
    ),
    "negated, then quantized": Case(
        "output",
        "the result is negated, and",
        lambda a, b, x, y, z: to_e4m3(-scaled_dot(a, b, x, y), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), -z),
        same_numbers=True,
    ),
    "negated, without scales": Case(
        "scale",
        "the result is negated, and",
        lambda a, b: -jax.lax.dot(a, b.T, preferred_element_type=f32),
        (A, B),
        lambda a, b: jax.lax.dot(a.astype(f32) * -1, b.astype(f32).T),
        same_numbers=True,
    ),
    "negated behind relu, then quantized": Case(
        "output",
        "negated after its relu",
        lambda a, b, x, y, z: clip(-relu(scaled_dot(a, b, x, y))).astype(e4m3),
        (*OPERANDS, s),
        lambda a, b, x, y, z: clip(relu(scaled_dot(a, b, x, y)) * -(z + z)).astype(
            e4m3
        ),  # z is a half
        same_numbers=True,
    ),
    "bounded by zero from above": Case(
        "epilogue",
        "bounded by 0 from above",
        lambda a, b, x, y, z: to_e4m3(jnp.minimum(scaled_dot(a, b, x, y), 0), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, -x, y)), -z),
        same_numbers=True,
    ),
    "relu's gradient": Case(
        "epilogue",
        "only compared with a number",
        jax.grad(lambda w, a, x, y: relu(scaled_dot(a, w.astype(e4m3), x, y)).sum()),
        (S(N, K, dtype=f32), A, s, s),
        scaled_dot,
        OPERANDS,
    ),
    **{
        f"{name}'s gradient": Case(
            "epilogue",
            says,
            jax.grad(lambda w, a, x, y, act=act: act(scaled_dot(a, w.astype(e4m3), x, y)).sum()),
            (S(N, K, dtype=f32), A, s, s),
            scaled_dot,
            OPERANDS,
        )
        for name, act, says in (
            ("gelu", gelu, "the derivative of an activation"),
            ("silu", jax.nn.silu, "the derivative of an activation"),
            ("squared relu", lambda d: relu(d) ** 2, "the derivative of an activation"),
        )
    },
    **{
        f"{act.__name__}, of several operations": Case(
            "epilogue",
            "this activation is another one(?!.*stays? outside too)",
            lambda a, b, x, y, act=act: act(scaled_dot(a, b, x, y)),
            OPERANDS,
            lambda a, b, x, y: relu(scaled_dot(a, b, x, y)),
        )
        for act in (jax.nn.softplus, jax.nn.mish, jax.nn.celu, jax.nn.log_sigmoid)
    },
    "a relu written as a choice, stored in a larger array": Case(
        "epilogue",
        "a choice between the result and 0.*runs anyway",
        lambda a, b, x, y, c, n: jax.lax.dynamic_update_slice(
            c, jnp.where((d := scaled_dot(a, b, x, y)) > 0, d, 0), (n, 0)
        ),
        (*OPERANDS, S(8 * M, N, dtype=f32), S(dtype=jnp.int32)),
        lambda a, b, x, y, c, n: jax.lax.dynamic_update_slice(
            c, relu(scaled_dot(a, b, x, y)), (n, 0)
        ),
        same_numbers=True,
    ),
    "widened for an activation that no call has": Case(
        "epilogue",
        "this activation is another one.*; the conversion after it stays outside too",
        lambda a, b, x, y: jax.nn.silu(scaled_dot(a, b, x, y, bf16).astype(f32)).astype(bf16),
        OPERANDS,
        lambda a, b, x, y: gelu(scaled_dot(a, b, x, y, bf16)),
    ),
    "a mean of gradients that a loop adds up": Case(
        "scale",
        "returned from a loop before it is scaled",
        lambda a, b, x, y: (
            jax.lax.scan(
                lambda c, ab: (c + scaled_dot(*ab, x, y), None), jnp.zeros((M, N)), (a, b)
            )[0]
            / 4
        ),
        (S(4, M, K), S(4, N, K), s, s),
        lambda a, b, x, y: jax.lax.scan(
            lambda c, ab: (c + scaled_dot(*ab, x, y), None), jnp.zeros((M, N)), (a, b)
        )[0],
    ),
    "a relu of a result that is cut twice": Case(
        "epilogue",
        "16, not N = 50: it writes a padded result, and the relu reads the part",
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y, bf16)),
        (A, S(50, K), s, s),
        lambda a, b, x, y: relu(scaled_dot(a, b, x, y, bf16)),
        OPERANDS,
    ),
    "a bias that a kernel adds a number to": Case(
        "bias",
        "computed by a kernel before the call reads it",
        lambda a, b, x, y, v: scaled_dot(a, b, x, y, bf16) + (v + 1),
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, v: scaled_dot(a, b, x, y, bf16) + v,
    ),
    "a factor behind a sum over devices": Case(
        "scale",
        "summed over devices before the scale.*a kernel further on does it",
        lambda a, b, x, y, z: scaled_dot(a, b, x, y) * z,
        (*OPERANDS, s),
        lambda a, b, x, y, z: scaled_dot(a, b, x, y),
        options={"mesh_shape": {"x": 4}, "in_specs": (P(None, "x"), P(None, "x"), *[None] * 3)},
        fixed_options={
            "mesh_shape": {"x": 4},
            "in_specs": (P(None, "x"), P(None, "x"), *[None] * 3),
        },
    ),
    **{
        f"added to itself {n} times": Case(
            "scale",
            f"added to itself, {n} times d",
            lambda a, b, x, y, after=after, n=n: after(sum([scaled_dot(a, b, x, y)] * n), x),
            OPERANDS,
            lambda a, b, x, y, after=after, n=n: after(n * scaled_dot(a, b, x, y), x),
        )
        for n, after in ((3, to_e4m3), (4, lambda d, x: relu(d)), (5, lambda d, x: d))
    },
    "added to itself after a relu": Case(
        "scale",
        "multiplied by a constant, or added to itself, after its relu",
        lambda a, b, x, y: (d := relu(scaled_dot(a, b, x, y, bf16))) + d + d,
        OPERANDS,
        lambda a, b, x, y: relu(3 * scaled_dot(a, b, x, y, bf16)),
    ),
    "divided after a relu with a bias": Case(
        "scale",
        "multiplied by a constant, or added to itself, after its relu",
        lambda a, b, x, y, v: relu(scaled_dot(a, b, x, y, bf16) + v) / 4,
        (*OPERANDS, VECTOR),
        lambda a, b, x, y, v: relu(scaled_dot(a, b, x, y, bf16) / 4 + v),
    ),
    "tripled after a matrix": Case(
        "scale",
        "multiplied by a constant, or added to itself, after its bias",
        lambda a, b, x, y, c: 3 * (scaled_dot(a, b, x, y, bf16) + c),
        (*OPERANDS, C16),
        lambda a, b, x, y, c: 3 * scaled_dot(a, b, x, y, bf16) + c,
    ),
    **{
        f"ldexp by {name}": Case(
            "kernel",
            "computes with the bits of the result, as jnp.ldexp does",
            lambda a, b, x, y, n, dtype=dtype: jnp.ldexp(scaled_dot(a, b, x, y, dtype), n),
            (*OPERANDS, S(*dims, dtype=jnp.int32)),
            lambda a, b, x, y, n, dtype=dtype: scaled_dot(a, b, x, y, dtype) * 2.0**3,
        )
        for name, dims, dtype in (
            ("an argument", (), f32),
            ("a number for each column", (N,), f32),
            ("an argument, in bf16", (), bf16),
        )
    },
    "ldexp in a loop": Case(
        "kernel",
        "computes with the bits of the result.*; it is done in a kernel that runs anyway",
        lambda a, b, x, y: jax.lax.map(lambda v: jnp.ldexp(scaled_dot(v, b, x, y), 2), a),
        (S(4, M, K), B, s, s),
        lambda a, b, x, y: jax.lax.map(lambda v: 4 * scaled_dot(v, b, x, y), a),
    ),
    "the low bits cut off, and a relu": Case(
        "kernel",
        "computes with the bits of the result.*; the relu after it stays outside too",
        lambda a, b, x, y: relu(
            jax.lax.bitcast_convert_type(
                jax.lax.bitcast_convert_type(scaled_dot(a, b, x, y), jnp.int32) & -65536, f32
            )
        ),
        OPERANDS,
    ),
    "scaled twice, once by its own amax": Case(
        "output",
        "scaled twice before the conversion",
        lambda a, b, x, y, z: to_e4m3((d := scaled_dot(a, b, x, y)) / jnp.max(jnp.abs(d)), z),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(scaled_dot(a, b, x, y), z),
    ),
    "two matrices, the second subtracted": Case(
        "bias",
        "a second matrix is added, and a call adds one",
        lambda a, b, x, y, c, e: scaled_dot(a, b, x, y, bf16) + c - e,
        (*OPERANDS, C16, C16),
        lambda a, b, x, y, c, e: scaled_dot(a, b, x, y, bf16) + c,
    ),
    "a matrix before a relu, and one after it": Case(
        "bias",
        r"a second matrix is added, and a call adds one \(epilogue RELU, beta 1\)",
        lambda a, b, x, y, c, e: relu(scaled_dot(a, b, x, y, bf16) + c) + e,
        (*OPERANDS, C16, C16),
    ),
    **{
        f"two products and a matrix, {name}": Case(
            "bias",
            "two matmuls' results and a matrix are added",
            lambda a, b, c, e, x, y, after=after, last=last: after(
                last(scaled_dot(a, b, x, y, bf16) + scaled_dot(c, b, x, y, bf16), e)
            ),
            (A, B, A, C16, s, s),
            lambda a, b, c, e, x, y, after=after: after(
                scaled_dot(c, b, x, y, bf16) + (scaled_dot(a, b, x, y, bf16) + e)
            ),
            options=UNMERGED,
            fixed_options=UNMERGED,
        )
        for name, after, last in (
            ("first", lambda d: d, lambda d, e: e + d),
            ("and a relu", relu, lambda d, e: d + e),
        )
    },
    **{
        f"a bias behind {name}": Case(
            "bias",
            "summed over devices before the bias is added",
            over_devices(lambda d, v, summed=summed: summed(d) + v.astype(d.dtype), dtype),
            BY_DEVICE,
            over_devices(
                lambda d, v, summed=summed: summed(d + on_the_first(v).astype(d.dtype)), dtype
            ),
            options=BY_FOUR,
            fixed_options=BY_FOUR,
        )
        for name, summed, dtype in (
            ("psum", lambda d: jax.lax.psum(d, "x"), bf16),
            ("psum, in f32", lambda d: jax.lax.psum(d, "x"), f32),
            ("psum_scatter", lambda d: jax.lax.psum_scatter(d, "x", tiled=True), bf16),
        )
    },
    "a factor and a bias behind a sum over devices": Case(
        "scale",
        "summed over devices before the factor.*; the bias after it stays outside too",
        over_devices(lambda d, v: jax.lax.psum(d, "x") * 0.3 + v),
        BY_DEVICE,
        over_devices(lambda d, v: jax.lax.psum(d * 0.3 + on_the_first(v), "x")),
        options=BY_FOUR,
        fixed_options=BY_FOUR,
    ),
    "parts of the columns, scaled": Case(
        "scale",
        "cut into parts before it is scaled, and the call scales only its own result",
        lambda a, b, x, y, z: [z * part for part in jnp.split(scaled_dot(a, b, x, y), 4, 1)],
        (*OPERANDS, s),
        lambda a, b, x, y, z: jnp.split(scaled_dot(a, b, x, y), 4, 1),
    ),
    "the larger of two maxima": Case(
        "output",
        r"\(several maxima\)",
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.maximum(jnp.max(d), -jnp.min(d)),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.max(jnp.abs(d)),
        ),
    ),
    "the root of the largest square": Case(
        "amax",
        "not written as a maximum of absolute values",
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.sqrt(jnp.max(d * d)),
        ),
        (*OPERANDS, s),
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.max(jnp.abs(d)),
        ),
    ),
    **{
        f"{name}quantized, then transposed": Case(
            "output",
            "before the conversion, here by XLA",
            lambda a, b, x, y, z, act=act, dtype=dtype: (
                BARRIER(to_e4m3(act(scaled_dot(a, b, x, y, dtype)), z)).T
            ),
            (*OPERANDS, s),
            lambda a, b, x, y, z, act=act, dtype=dtype: to_e4m3(
                act(scaled_dot(b, a, y, x, dtype)), z
            ),
            same_numbers=True,
        )
        for name, act, dtype in (("", lambda d: d, f32), ("relu, ", relu, bf16))
    },
    "a sum, transposed": Case(
        "bias",
        "before the bias, here by XLA",
        lambda a, b, x, y, c: (scaled_dot(a, b, x, y) + c.astype(f32)).T,
        (*OPERANDS, VECTOR),
        lambda a, b, x, y: scaled_dot(b, a, y, x),
        OPERANDS,
    ),
    "relu of the codes beside an amax": Case(
        "epilogue",
        "the relu is applied after the conversion to FP8, and there XLA takes it only into a call "
        "that has no relu and no amax$",
        lambda a, b, x, y, z: (relu(to_e4m3(d := scaled_dot(a, b, x, y), z)), jnp.max(jnp.abs(d))),
        (*OPERANDS, s),
        lambda a, b, x, y, z: with_amax(relu(scaled_dot(a, b, x, y)), z),
    ),
    "relu of the codes, behind a barrier": Case(
        "epilogue",
        "optimization_barrier stands between the result and the relu",
        lambda a, b, x, y, z: relu(BARRIER(to_e4m3(scaled_dot(a, b, x, y), z))),
        (*OPERANDS, s),
        lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, x, y)), z),
        same_numbers=True,
    ),
    **{
        f"relu of the codes, {name}": Case(
            "scale",
            "wrong numbers for a negative scale",
            lambda a, b, x, y, z, c, act=act, add=add: act(
                to_e4m3(add(scaled_dot(a, b, x, y), c), z)
            ),
            (*OPERANDS, s, VECTOR),
            lambda a, b, x, y, z, c, act=act, add=add: to_e4m3(
                act(add(scaled_dot(a, b, x, y), c)), z
            ),
            same_numbers=True,
        )
        for name, act, add in (
            ("jax.nn.relu", relu, lambda d, c: d),
            ("with a bias", relu, lambda d, c: d + c.astype(f32)),
            ("jnp.maximum", lambda d: jnp.maximum(d, 0), lambda d, c: d),
        )
    },
    "a bias of the codes": Case(
        "bias",
        "it adds the vector before the result's scale, clamp and conversion to FP8",
        lambda a, b, x, y, z, c: to_e4m3(scaled_dot(a, b, x, y), z) + c.astype(e4m3),
        (*OPERANDS, s, VECTOR),
        lambda a, b, x, y, z, c: to_e4m3(scaled_dot(a, b, x, y) + c.astype(f32), z),
    ),
    "subtracted from a scalar": Case(
        "bias",
        "a scalar is subtracted",
        lambda a, b, x, y, c: c - scaled_dot(a, b, x, y),
        (*OPERANDS, s),
        lambda a, b, x, y, c: scaled_dot(a, b, -x, y) + c.astype(f32),
        (*OPERANDS, VECTOR),
    ),
    "subtracted from one": Case(
        "bias",
        "a scalar is subtracted",
        lambda a, b, x, y: 1 - scaled_dot(a, b, x, y),
        OPERANDS,
        lambda a, b, x, y, c: scaled_dot(a, b, -x, y) + c.astype(f32),
        (*OPERANDS, VECTOR),
    ),
    # Kernels that are no instructions of HLO's
    "a kernel by hand": Case(
        "fp8",
        "multiplies bf16",
        lambda a, b: by_hand(a, b, bf16),
        (S(M, M, dtype=bf16),) * 2,
        scaled_dot,
        OPERANDS,
    ),
    # FP8 arrays, and Triton's compiler multiplies them in a wider type all the same.
    "a kernel of FP8 arrays by hand": Case(
        "fp8",
        "multiplies f16",
        lambda a, b: by_hand(a, b, e4m3),
        (S(M, M),) * 2,
        scaled_dot,
        OPERANDS,
    ),
    "a kernel by warpgroup": Case(
        "fp8",
        "in Mosaic GPU, and multiplies bf16",
        by_warpgroup,
        (S(M, 128, dtype=bf16), S(128, N, dtype=bf16)),
        scaled_dot,
        OPERANDS,
    ),
    "convolution": Case(
        "fp8",
        "a convolution runs in bf16",
        lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
        (S(1, 16, 32, 32, dtype=bf16), S(16, 16, 3, 3, dtype=bf16)),
        patches,
        (S(34, 34, 16), S(16, 144), s, s),
    ),
    "a library's kernel": Case(
        "kernel",
        "what this kernel multiplies",
        lambda a, b, x, y: jnp.linalg.cholesky(scaled_dot(a, b, x, y)),
        (S(N, K), B, s, s),
    ),
}


def on_eight(fn, args, in_specs=sharded.ROWS):
    return fn, args, {"mesh_shape": sharded.EIGHT, "in_specs": in_specs}


# Of test_collectives.py: the first of each rule, before and after.
SENT = {rule: (case, after) for rule, case, after in reversed(sharded.WIDE.values())} | {
    "gathered twice": (
        (sharded.step, *sharded.STEP),
        (functools.partial(sharded.step, once=True), *sharded.STEP),
    ),
    "summed wide": tuple(
        (functools.partial(sharded.mlp, scattered=after), *sharded.MLP) for after in (False, True)
    ),
    "transposed after gathering": (sharded.sides(1, P(None, "x")), sharded.sides(1, P("x"))),
}
for name, (case, after) in SENT.items():
    (fn, args, options), (fix, fix_args, fix_options) = on_eight(*case), on_eight(*after)
    beside = {
        "gathered twice": ("epilogue", "output", "scale", "transpose"),
        "summed wide": ("output",),
    }.get(name, ())
    CASES[name] = Case(
        "transpose" if name.startswith("transposed") else "wire",
        "",
        fn,
        args,
        fix,
        fix_args,
        options,
        fix_options,
        beside,
    )


def exchanged(fn):
    """A program whose dots have their operands exchanged, and transposed results."""

    def of_exchanged(*args):
        dot = jax.lax.dot
        with mock.patch.object(jax.lax, "dot", lambda a, b, **options: dot(b.T, a.T, **options)):
            return fn(*args)

    return of_exchanged


OTHER = {"left": "right", "right": "left"}
for name in (
    "one operand",
    "a closure's weights",
    "addition between",
    "negated",
    "converted twice",
    "masked with ones",
    "layers unrolled",
    "merged dots",
    "dequantized before a loop",
    "dequantized with two scalars",
):
    case = CASES[name]
    CASES[f"{name}, exchanged"] = dataclasses.replace(
        case,
        says=re.sub("left|right", lambda m: OTHER[m[0]], case.says),
        broken=exchanged(case.broken),
        fixed=exchanged(case.fixed),
        same_numbers=False,
    )


@functools.cache
def seen(name: str) -> Inspection:
    return inspect(CASES[name].broken, *CASES[name].args, **CASES[name].options)


@functools.cache
def fixed(name: str) -> Inspection:
    case = CASES[name]
    return inspect(
        case.fixed,
        *(case.args if case.fixed_args is None else case.fixed_args),
        **case.fixed_options,
    )


def reasons(name: str) -> Reasons:
    return seen(name).reasons


@pytest.mark.parametrize("name", CASES)
def test_the_reason_is_given_and_its_fix_fixes(name):
    case, found = CASES[name], reasons(name)
    right = [r for r in found if r.lost == case.lost and re.search(case.says, r.reason)]
    assert right or name in SENT, "\n".join(map(str, found)) or "no reason at all"
    for reason in found:
        assert reason.lost in Lost and reason.fix and reason.rule
        assert ("unknown" in reason.reason) == (reason.lost == "kernel")
        # JAX 0.10's XLA leaves a dot with an algorithm no metadata, and the partitioner a gather.
        unnamed = (name == "an algorithm" or reason.lost == "wire") and not reason.source
        assert (
            unnamed
            or re.fullmatch(r"[\w./]+\.py:\d+", reason.source)
            and not reason.source.startswith("/")
        )
        assert "\n" not in reason.reason
    if case.fixed is None:
        return
    left = fixed(name).reasons
    assert {r.lost for r in left} <= set(case.leaves), "\n".join(map(str, left))
    assert fixed(name).report.fp8_flops_share == 1


@pytest.mark.parametrize("name", CASES)
def test_no_reason_is_of_a_name(name):
    other, names = under_other_names(seen(name))
    assert figures(other, names) == figures(seen(name))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.same_numbers])
def test_the_fix_keeps_the_numbers(name):
    case, rng = CASES[name], np.random.default_rng(1)
    args = [
        jnp.asarray(rng.integers(-3, 4, a.shape) if a.shape else 0.5, a.dtype) for a in case.args
    ]
    broken, right = (np.asarray(jax.jit(fn)(*args), np.float32) for fn in (case.broken, case.fixed))
    np.testing.assert_array_equal(broken, right)
    assert len(np.unique(broken)) > 20


@functools.cache
def pattern(name: str) -> re.Pattern:
    """What a rule's texts are with its {names} filled in, and what may stand behind its reason."""

    class Blank(dict):
        def __missing__(self, name):
            return f"\0{name}\0"

    rule = RULES[name]
    fix, reason = (re.escape(text.format_map(Blank())) for text in (rule.fix, rule.reason))
    known: set[str] = set()

    def named(m):
        return ".*" if m[1] in known or known.add(m[1]) else f"(?P<{m[1]}>.*)"

    return re.compile(re.sub(r"\0(\w+)\0", named, rf"{fix}\n{reason}(; .*)?"))


def broken_rules(of: Inspection) -> dict[str, list[dict[str, str]]]:
    """The rules that a program breaks, and what their {names} are."""
    found = {}
    for r in [*of.reasons, *(rule for c in of.collectives for rule in of_collective(c))]:
        found.setdefault(r.rule, []).append(fields_of(r.rule, r.reason, r.fix))
    return found


def fields_of(rule: str, reason: str, fix: str) -> dict[str, str]:
    """What the {names} of a rule are in its texts."""
    match = pattern(rule).fullmatch(f"{fix}\n{reason}")
    assert match, (rule, reason, fix)
    return match.groupdict()


def recorded_pages() -> dict[str, dict]:
    """What is recorded of the programs on each rule's page, by which it is told what they lose;
    test_rules.py holds it to what is compiled.
    """
    releases = load_rules(RESULTS)
    release = releases.get(jax.__version__) or [*releases.values()][-1]
    return {name: next(iter(row["chips"].values())) for name, row in release["rows"].items()}


# What a sentence says in the place of a name that is no type, size or instruction of the program.
WORDS = {
    "side": {"left", "right"},
    "which": {"both operands are", "an operand is", "the left operand is", "the right operand is"},
    "what": {"matrix", "vector", "scalar"},
}
ONLY = {
    "quantized-twice": {"side": {"right"}},  # on its page a gradient is the left one
    "gathered-operand": {"side": {"right"}},  # of a left one XLA gathers the FP8 array
    "moved-first": {"step": {"activation", "bias"}},  # XLA moves the others in front of a transpose
    "activation-after-scale": {"step": {"relu", "activation"}},
    "activation-and-reader": {"step": {"relu", "activation"}},
    "amax-before": {"step": {"relu", "activation", "bias"}},
}
FORMS = (
    r"; the \w+ after it stays",
    r"; the \w+ and \w+ after it stay",
    r"; the \w+, \w+ and \w+ after it stay",
    "; it is done in a kernel that runs anyway",
    "; a kernel further on does it",
    r"\(the function's result\)",
    r"\(reduce\)",
    r"\(several maxima\)",
    r"\(an amax of another value\)",
    "bounds are -400 and 400",
    "bounds are arguments, or",
    "^N is 1",
    "^M is 1",
    "^M and N are 1",
    r"operand's \(b\) contracting",
    "operand's contracting",
)
# What no program can be had for is tried below, and attention, for which JAX wants cuDNN, by
# tests/helpers/test_gpt.py.
UNKNOWN = {name for name, rule in RULES.items() if rule.reason.startswith("unknown")} - {
    "opaque-kernel",
    "computed-with-bits",
} | {"fused-attention", "constant-moved"}


def test_every_rule_is_tried_in_each_of_its_forms_and_its_fix_applied():
    said, gone = collections.defaultdict(list), set()
    for name, case in CASES.items():
        broken = broken_rules(seen(name))
        for rule, fields in broken.items():
            said[rule] += fields
        if case.fixed is not None:
            gone |= broken.keys() - broken_rules(fixed(name))
    of_pages = recorded_pages()
    for rule, pair in of_pages.items():
        said[rule] += [fields_of(rule, **one) for one in pair["loses"]["says"]]
        gone |= set(pair["loses"]["rules"]) - set(pair.get("keeps", pair["loses"])["rules"])
    assert RULES.keys() - said.keys() == UNKNOWN
    assert RULES.keys() - gone == UNKNOWN | {"opaque-kernel"}  # whose fixes tell where to look
    for name, fields in said.items():
        words = WORDS | ONLY.get(name, {})
        for word in words.keys() & fields[0]:
            assert {field[word] for field in fields} == words[word], (name, word)
    texts = [reason.reason for name in CASES for reason in reasons(name)]
    texts += [one["reason"] for pair in of_pages.values() for one in pair["loses"]["says"]]
    assert not [form for form in FORMS if not any(re.search(form, text) for text in texts)]


# What is computed of codes, and is not only another scale.
OF_CODES = {
    "a product": lambda d, c, v: d * c,
    "squares": lambda d, c, v: d * d,
    "quotients": lambda d, c, v: 1 / d,
    "a relu that is cut off": lambda d, c, v: jnp.clip(d, 0, 6),
    "what is cut off above": lambda d, c, v: jnp.minimum(d, 3),
    "codes times their column's number": lambda d, c, v: d * jnp.arange(float(K)),
    "codes with a scale for each channel": lambda d, c, v: d * v.astype(f32),
}
FINE = {
    "a ragged batch": (
        lambda a, b, g: ragged(a, b, g, BATCH),
        (S(8, M, K), S(8, N, K), S(4, dtype=jnp.int32)),
    ),
    "one expert": (
        lambda a, b, g: ragged(a, b, g, K_LAST),
        (A, S(1, N, K), S(1, dtype=jnp.int32)),
    ),
    "softplus, whose input is read too": (
        lambda a, b, x, y, c: (d := scaled_dot(a, b, x, y, bf16), jax.nn.softplus(d) * c),
        (*OPERANDS, C16),
    ),
    "dropped if it is not finite": (
        lambda a, b, x, y, c: jnp.where(jnp.isfinite(d := scaled_dot(a, b, x, y)).all(), d, c),
        (*OPERANDS, C32),
    ),
    "kept if something else is finite": (
        lambda a, b, x, y, c: jnp.where(jnp.isfinite(y), scaled_dot(a, b, x, y), c),
        (*OPERANDS, C32),
    ),
    **{
        f"codes of {name}": (
            lambda a, b, c, v, x, of=of: scaled_dot(
                to_e4m3(of(dequantize(a, x, f32), dequantize(c, x, f32), v), x), b, x, x
            ),
            (A, B, A, S(K), s),
        )
        for name, of in OF_CODES.items()
    },
    "one of two functions of a result, by a flag": (
        lambda a, b, x, y, c: jnp.where(c, jnp.sin(d := scaled_dot(a, b, x, y)), jnp.cos(d)),
        (*OPERANDS, S(dtype=bool)),
    ),
    "a result for either flag": (
        lambda a, b, x, y, c, z: (
            jnp.where(c, d := scaled_dot(a, b, x, y), z),
            jnp.where(c, z, d),
        ),
        (*OPERANDS, S(dtype=bool), C32),
    ),
    "an argument of another type than the call takes": (
        lambda a, b, x, y: scaled_dot(a, to_e4m3(dequantize(b, y), 1 / x), x, x),
        (A, S(N, K, dtype=e5m2), s, s),
    ),
    "columns gathered": (
        lambda a, b, x, y, i: scaled_dot(a[:, i], b[:, i], x, y),
        (*OPERANDS, S(128, dtype=jnp.int32)),
    ),
    "amax with a floor": (
        lambda a, b, x, y, z: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.maximum(jnp.max(jnp.abs(d)), 1e-12),
        ),
        (*OPERANDS, s),
    ),
    "running amax": (
        lambda a, b, x, y, z, h: (
            to_e4m3(d := scaled_dot(a, b, x, y), z),
            jnp.maximum(h, jnp.max(jnp.abs(d))),
        ),
        (*OPERANDS, s, s),
    ),
    "softmax, which no call takes": (
        lambda a, b, x, y: jax.nn.softmax(scaled_dot(a, b, x, y)),
        OPERANDS,
    ),
    "quantized on the way in": (
        lambda a, b, x, y: scaled_dot(to_e4m3(a, x), b, y, y),
        (S(M, K, dtype=bf16), B, s, s),
    ),
    "a norm in 16 bits": (
        lambda a, b, x, y: LAYER_NORM(relu(scaled_dot(a, b, x, y, bf16))),
        OPERANDS,
    ),
    "scaled by its own amax": (
        lambda a, b, y: scaled_dot(
            to_e4m3(a, 448 / (m := jnp.max(jnp.abs(a)).astype(f32))), b, m / 448, y
        ),
        (S(M, K, dtype=bf16), B, s),
    ),
    "a mask, as an argument or made in place": (
        lambda a, b, c, x: jnp.where(
            c, jnp.where(jnp.tri(M, N, dtype=bool), scaled_dot(a, b, x, x), 0), -jnp.inf
        ),
        (A, B, S(M, N, dtype=jnp.bool_), s),
    ),
    "a factor that the call takes, and a mask": (
        lambda a, b, c: jnp.where(
            c, relu(jax.lax.dot(a, b.T, preferred_element_type=f32)) * 2.0, -1e9
        ),
        (A, B, S(M, N, dtype=jnp.bool_)),
    ),
    "codes, widened for others": (
        lambda a, b, x, y, z: (
            q := to_e4m3(scaled_dot(a, b, x, y), z),
            q.astype(f32),
            jnp.sum(q.astype(f32)),
        ),
        (*OPERANDS, s),
    ),
    "a negated scale of a relu's result in FP8": (
        lambda a, b, x, y, z: to_e4m3(relu(scaled_dot(a, b, x, y)), -z),
        (*OPERANDS, s),
    ),
    "a scale behind a relu": (lambda a, b, z: relu(bare(a, b)) * z, (A, B, s)),
    "a scale behind a relu, to FP8": (lambda a, b, z: to_e4m3(relu(bare(a, b)), z), (A, B, s)),
    "a negated operand, and a negated result": (
        lambda a, b, z: to_e4m3(relu(bare(a, b) * z), -z),
        (A, B, s),
    ),
    "parts, of which one is read as it is": (
        lambda a, b, x, y: [
            part.astype(f32 if n else bf16)
            for n, part in enumerate(jnp.split(scaled_dot(a, b, x, y), 4, -1))
        ],
        OPERANDS,
    ),
    "parts, of which one is computed with": (
        lambda a, b, x, y: [
            (part if n else jnp.cos(part)).astype(bf16)
            for n, part in enumerate(jnp.split(scaled_dot(a, b, x, y), 4, -1))
        ],
        OPERANDS,
    ),
    "parts of 16 bits, widened": (
        lambda a, b, x, y: [
            part.astype(f32) for part in jnp.split(scaled_dot(a, b, x, y, bf16), 4, -1)
        ],
        OPERANDS,
    ),
    "a matrix in the result's shape": (
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + c,
        (*OPERANDS, C16),
    ),
    "a matrix that is computed": (
        lambda a, b, x, y, c: scaled_dot(a, b, x, y, bf16) + jnp.cos(c).reshape(M, N),
        (*OPERANDS, S(2, M // 2, N, dtype=bf16)),
    ),
    "halves of one matmul, added": (
        lambda a, b, x, y: sum(jnp.split(scaled_dot(a, b, x, y, bf16), 2, -1)),
        OPERANDS,
    ),
    "squares, summed": (lambda a, b, x, y: RMS_NORM(scaled_dot(a, b, x, y)), OPERANDS),
    "no matmul": (lambda a: a.astype(f32) + 1, (A,)),
}
for name in (
    "unscaled, f32 result",
    "scaled in f32",
    "amax",
    "bias + relu + amax",
    "vmap over matrices",
    "8 layers in a loop",
):
    program = releases.programs()[name].of_size(M, N, K)
    FINE[name] = program.fn, program.args


@pytest.mark.parametrize("name", FINE)
def test_no_reason_where_nothing_is_lost(name):
    fn, args = FINE[name]
    inspected = inspect(fn, *args)
    found = inspected.reasons
    assert found == []
    assert (
        "There is no matmul" if name == "no matmul" else "no work that its call could do was left"
    ) in str(found)
    assert all(row.is_fp8 and not row.outside for row in inspected.report.rows)


# What a kernel does in any case, if it runs for something that only the sum can have.
BEHIND_A_SUM = {
    "converted to FP8": lambda d, v: to_e4m3(d, v[0].astype(f32)),
    "clamped and converted": lambda d, v: clip(d).astype(e4m3),
    "a scale and a relu": lambda d, v: relu(d * v[0]),
    "a bias and gelu": lambda d, v: gelu(d + v),
    "a bias and a conversion": lambda d, v: to_e4m3(d + v, v[0].astype(f32)),
    "a bias and a norm": lambda d, v: RMS_NORM(d + v),
    "a matrix": lambda d, v: d + jnp.outer(v[:M], v),
    "a relu": lambda d, v: relu(d),
}


@pytest.mark.parametrize("name", BEHIND_A_SUM)
def test_behind_a_sum_over_devices_only_what_saves_a_kernel_is_a_loss(name):
    summed = over_devices(lambda d, v: BEHIND_A_SUM[name](jax.lax.psum(d, "x"), v))
    asked = inspect(summed, *BY_DEVICE, **BY_FOUR)
    assert asked.reasons == [] and asked.report.kernels == 3


# Numbers that stay right, at the cost of a kernel.
PADDED = {
    "padded with zeros": (
        lambda a, b, x, y: jax.lax.dot(
            padded(dequantize(a, x, f32), columns=16), dequantize(b, y, f32).T
        ),
        (S(M, K - 32), S(N, K - 16), s, s),
    ),
    "padded with what FP8 holds": (
        lambda a, b: jax.lax.dot(padded(a.astype(f32), 1.75, columns=16), b.astype(f32).T),
        (S(M, K - 32), S(N, K - 16)),
    ),
    "codes, padded": (
        lambda a, b, x, y: scaled_dot(padded(a, 2.0, columns=16), b, x, y),
        (S(M, K - 32), S(N, K - 16), s, s),
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_of_a_padded_k_only_the_kernel_is_told(name):
    fn, args = PADDED[name]
    assert {reason.rule for reason in inspect(fn, *args).reasons} == {"own-padding"}


def test_a_fix_names_what_helps_and_says_where_nothing_does():
    def said_of(fn, *args):
        return {reason.rule: reason.fix for reason in inspect(fn, *args).reasons}

    halved = said_of(lambda a, b, x, y: relu(scaled_dot(a, b, x, y)) / 2, *OPERANDS)
    assert "before the relu: relu(0.5 * d) is 0.5 * relu(d)" in halved["late-factor"]
    biased = said_of(
        lambda a, b, x, y, v: 3 * (scaled_dot(a, b, x, y, bf16) + v), *OPERANDS, VECTOR
    )
    assert "multiply what is added by 3 too, outside" in biased["late-factor"]
    # A negative factor changes the sign behind the relu, and what is read twice is needed twice.
    for fn in (
        lambda a, b, x, y: -2 * relu(scaled_dot(a, b, x, y)),
        lambda a, b, x, y: (2 * (h := relu(scaled_dot(a, b, x, y))), h),
    ):
        (fix,) = (found := said_of(fn, *OPERANDS)).values()
        assert [*found] == ["scale-after-epilogue"] and "leave this kernel" in fix
    two = said_of(
        lambda a, b, x, y, c, e: scaled_dot(a, b, x, y, bf16) + c + e, *OPERANDS, C16, C16
    )
    assert two == {"second-matrix": "leave this kernel"}
    own = said_of(CASES["scaled twice, once by its own amax"].broken, *OPERANDS, s)
    assert "an amax of an earlier step in place of this result's own" in own["scaled-twice"]
    # Both products have a matrix already: no order saves the third addition.
    added = said_of(
        lambda a, b, c, e, x, y: (
            (scaled_dot(a, b, x, y, bf16) + e) + (scaled_dot(c, b, y, x, bf16) + c16(e))
        ),
        *(A, B, A, C16, s, s),
    )
    assert added == {"second-matrix": "leave this kernel"}


def c16(e):
    return jnp.cos(e)


MOVED = {
    "a bias": (lambda d, v: 3 * (d + v), lambda d, v: 3 * d + v, True),
    "gelu": (lambda d, v: 3 * gelu(d), lambda d, v: gelu(3 * d), True),
    "a bias and a relu": (lambda d, v: relu(d + v) * 3, lambda d, v: relu(3 * d + v), True),
    "a bias, as written": (lambda d, v: 3 * d + v, lambda d, v: 3 * d + v, False),
    "a relu": (lambda d, v: 3 * relu(d), lambda d, v: relu(3 * d), False),
    "a bias, and another factor": (lambda d, v: 5 * (3 * d + v), lambda d, v: 3 * d + v, False),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_constant_that_xla_moves_in_front_of_a_bias_is_wrong(name):
    """As the XLA of JAX 0.10 does: here what one program is written as, compiled as another."""
    written, compiled, is_wrong = MOVED[name]

    def asked(after):
        return inspect(
            lambda a, b, x, y, v: after(scaled_dot(a, b, x, y, bf16), v), *OPERANDS, VECTOR
        )

    def matmul(of):
        seen = next(s for s in of._stages if s.before == "cublas-gemm-rewriter")
        before = parse_hlo_module(seen.text)
        (dot,) = [i for i in before if i.opcode == "dot"]
        return Matmul(of.report.rows[0], dot, before, TARGETS["H100"])

    as_written, as_compiled = matmul(asked(written)), matmul(asked(compiled))
    moved = Matmul(as_compiled.row, as_written.dot, as_written.written, TARGETS["H100"])
    found = RULES["constant-moved"].found(moved)
    assert [one["factor"] for one in found] == (["3"] if is_wrong else [])
    assert not RULES["constant-moved"].found(as_written)


def test_a_fix_that_is_for_an_amax_says_so():
    """Of what is not an amax it would change the meaning, or talk of what is not there."""
    for name, lost in (
        ("smallest magnitude", "amax"),
        ("smallest magnitude", "output"),
        ("in E4M3 and E5M2", "duplicate"),
    ):
        (fix,) = [reason.fix for reason in reasons(name) if reason.lost == lost]
        assert re.search("where (one|an amax) is|^for an amax", fix), fix


# Their kernels have to run, as the program is written.
ASKED_FOR = {
    "requantized",
    "quantized-in-loop",
    "quantized-twice",
    "stacked-then-summed",
    "chosen-result",
    "changed-in-part",
}


def test_what_is_outside_and_the_reasons_agree():
    for name in CASES:
        report = seen(name).report
        clean = all(row.is_fp8 and not row.outside for row in report.rows) and len(report.rows) == 1
        said = " ".join(reason.reason for reason in reasons(name))
        elsewhere = any(
            words in said
            for words in (
                "in a kernel that runs anyway",
                "a kernel further on does it",
                "the dot's own result is",
                "for which cuBLASLt has no kernel",
                "by an error of XLA's",
            )
        )
        elsewhere |= any(reason.rule in ASKED_FOR for reason in reasons(name))
        elsewhere |= any(reason.lost in ("wire", "kernel", "duplicate") for reason in reasons(name))
        assert (clean and not elsewhere) == (not reasons(name)), name


LOG = """
import sys
from tests.fp8lens.test_reasons import CASES, aot_compile
for name in sys.argv[1:]:
    case = CASES[name]
    print(f"=== {name}", file=sys.stderr, flush=True)
    aot_compile(case.broken, *case.args, **case.options)
"""


def has_a_log(name):
    """Whether XLA's log may say something of a case: a reason quotes it, or FP8 was lost."""
    return (
        any('"' in reason.authority or reason.lost == "fp8" for reason in reasons(name))
        or not all(row.is_fp8 for row in seen(name).report.rows)
        or NIGHTLY
    )


def test_reasons_agree_with_xlas_own_log():
    """XLA logs why its rewriter left a matmul. Where a reason quotes the log, XLA must have logged
    that for the program; and where XLA logged that it failed to rewrite, the reasons must say that
    FP8 was lost, in XLA's words.
    """
    env = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "gemm_rewriter=1",
        "JAX_PLATFORMS": "cpu",
    }
    root = Path(__file__).parent.parent.parent
    # One compile more of each: XLA reads what to log once, when a process first compiles.
    asked = [name for name in CASES if has_a_log(name)]
    run = subprocess.run(
        [sys.executable, "-c", LOG, *asked], env=env, cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    logs = dict(part.split("\n", 1) for part in re.split(r"^=== ", run.stderr, flags=re.M)[1:])
    assert set(logs) == set(asked) and any("rewritten into FP8" in log for log in logs.values())
    quoted = set()
    for name, log in logs.items():
        log = " ".join(log.split())
        for reason in reasons(name):
            for sentence in re.findall(r'"([^"]+)"', reason.authority):
                quoted.add(sentence)
                assert sentence in log, f"{name}: XLA did not log {sentence!r}"
        if "not rewritten into FP8 Custom Call" in log:
            assert any(r.lost == "fp8" for r in reasons(name)), name
        for refusal in re.findall(r"Failed to rewrite .*? into FP8 Custom Call\. ([\w ]+)", log):
            lost = [r for r in reasons(name) if r.lost == "fp8"]
            assert lost and any(refusal[:20] in r.authority for r in lost), (
                f"{name}: XLA logged {refusal!r}"
            )
    assert len(quoted) >= 7


def test_what_no_rule_explains_is_said_to_be_unknown():
    """A program that breaks no rule, with a compiled row that pretends it did: no rule may be
    blamed for it.
    """
    args = (*OPERANDS, s)

    def fn(a, b, x, y, z):
        return to_e4m3(scaled_dot(a, b, x, y), z)

    compiled, stages, *_ = dumped(fn, *args, pattern="gemm-rewriter")
    before = parse_hlo_module(
        next(stage.text for stage in stages if stage.before == "cublas-gemm-rewriter")
    )
    (row,) = report_gemms(compiled).rows
    dot = next(i for i in before.entry if i.opcode == "dot")
    written = parse_hlo_module(stages[0].text)
    wide = dataclasses.replace(row, math_dtype="bf16")
    (lost,) = find.not_fp8(Matmul(wide, dot, written, TARGETS["H100"]))
    assert lost.lost == "fp8" and lost.reason.startswith("unknown: ")
    assert "operands f8e4m3fn and f8e4m3fn" in lost.reason
    matmul = Matmul(row, dot, written, TARGETS["H100"])
    (left,) = find.behind(matmul, ["epilogue"])
    assert left.lost == "epilogue"
    assert left.reason.startswith("unknown: ") and "result f8e4m3fn" in left.reason
    (gone,) = find.not_fp8(Matmul(wide, None, written, TARGETS["H100"]))
    assert gone.reason.startswith("unknown: no dot") and row.op_name in gone.reason


def test_each_operand_has_its_own_reason_and_what_is_hidden_is_said():
    def fn(a, b, x, y):
        return relu(jax.lax.dot(a.astype(bf16).astype(f32) * x, (b.astype(f32) * y).T))

    reasons = why_not_fp8(fn, A, B, s, S(N, 1, dtype=f32))
    assert [reason.rule for reason in reasons] == ["converted-twice", "array-of-scales"]
    assert len({reason.instruction for reason in reasons}) == 1
    assert "the left operand" in reasons[0].reason and "the right operand" in reasons[1].reason
    assert str(reasons).endswith("until XLA makes an FP8 call, what it leaves outside is hidden.")
    # Of two operands that are not quantized one reason tells, and of FP8 calls nothing is hidden.
    (both,) = why_not_fp8(lambda x, w: x @ w.T, S(M, K, dtype=bf16), S(N, K, dtype=bf16))
    assert both.reason.startswith("both operands are bf16")
    assert "hidden" not in str(why_not_fp8(lambda *o: jax.nn.silu(scaled_dot(*o)), *OPERANDS))


def test_reasons_are_frozen_and_print_in_a_hundred_columns():
    (reason,) = reasons("no clamp")
    with pytest.raises(AttributeError):
        reason.lost = "nothing"
    text = str(reasons("no clamp"))
    lines = text.splitlines()
    assert lines[0].startswith(reason.matmul) and max(map(len, lines)) <= 100
    assert (
        sum(line.startswith("  fix: ") for line in lines)
        == sum(line.startswith("  rule: ") for line in lines)
        == 1
    )
    assert repr(reasons("no clamp")) == text


def test_what_several_matmuls_share_is_said_once():
    def fn(a, bs, x, y):
        return [scaled_dot(a, b, x, y) for b in bs]

    found = why_not_fp8(
        fn, S(M, K, dtype=e5m2), [S(64 * n, K, dtype=e5m2) for n in range(1, 8)], s, s, **UNMERGED
    )
    assert len(found) == 7 and str(found).count("both operands are E5M2") == 1
    assert "7 matmuls lost fp8" in str(found) and "and 2 more" in str(found)


def test_a_transpose_is_charged_to_the_matmul_that_reads_it():
    def fn(a, b, c, x):
        return scaled_dot(to_e4m3(scaled_dot(a, b, x, x), x).T, c, x, x)

    first, second = report_gemms(fn, A, B, S(96, M), s).rows
    assert not first.outside and len(second.outside) == 1
    (reason,) = why_not_fp8(fn, A, B, S(96, M), s)
    assert (
        reason.matmul.startswith(second.name)
        and "the left operand's contracting dimension" in reason.reason
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("an update by")])
def test_what_an_optimizer_adds_is_no_bias(name):
    for reason in reasons(name):
        assert reason.lost != "bias" and "bias" not in reason.reason, reason


NOT_MATMULS = {
    "a norm": (lambda x: (x * x).mean(-1), (S(64, 256, dtype=f32),)),
    "a weighted sum": (lambda x, w: (x * w).sum(-1), (S(64, 256, dtype=f32), S(256, dtype=f32))),
    "experts' outputs": (
        lambda gate, y: (gate[:, :, None] * y).sum(1),
        (S(64, 4, dtype=f32), S(64, 4, 256, dtype=f32)),
    ),
    "distances": (
        lambda x, w: jnp.square(x[:, None] - w[None]).sum(-1),
        (S(64, 32, dtype=f32), S(48, 32, dtype=f32)),
    ),
    "a maximum of products": (
        lambda x, w: (x[:, None] * w[None]).max(-1),
        (S(64, 32, dtype=f32), S(48, 32, dtype=f32)),
    ),
    "an outer product": (lambda x, w: x[:, None] * w, (S(64, dtype=f32), S(48, dtype=f32))),
    "partial sums under the scales of tiles": (
        lambda d, a, b: (d * a.T[:, :, None] * b.T[:, None]).sum(0),
        (S(2, 64, 48, dtype=f32), S(64, 2, dtype=f32), S(48, 2, dtype=f32)),
    ),
    "the same outer product in each iteration": (
        lambda x, w: jax.lax.fori_loop(0, 9, lambda i, d: d + x[:, None] * w, jnp.zeros((64, 48))),
        (S(64, dtype=f32), S(48, dtype=f32)),
    ),
    "one factor for all iterations": (
        lambda x, w: jax.lax.scan(
            lambda d, row: (d + row[:, None] * w, None), jnp.zeros((64, 48)), x
        )[0],
        (S(32, 64, dtype=f32), S(48, dtype=f32)),
    ),
    "a state that each iteration reads": (
        state_read_in_each_iteration,
        (S(64, 32, dtype=f32), S(64, 48, dtype=f32)),
    ),
}


@pytest.mark.parametrize("name", NOT_MATMULS)
def test_other_products_and_sums_are_no_matmuls(name):
    fn, args = NOT_MATMULS[name]
    assert not report_gemms(fn, *args).rows


LOOPS = {
    "unrolled": (lambda d, both: (d + both[0][:, None] * both[1], None), {"unroll": 2}, 2),
    "subtracted": (lambda d, both: (d - both[0][:, None] * both[1], None), {}, 1),
    "of dots": (lambda d, both: (d + jnp.einsum("i,j->ij", *both), None), {}, 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_outer_products_that_a_loop_adds_are_counted_once(name):
    step, options, in_each = LOOPS[name]

    def fn(x, w):
        return jax.lax.scan(step, jnp.zeros((M, N), f32), (x, w), **options)[0]

    rows = report_gemms(fn, S(32, M, dtype=f32), S(32, N, dtype=f32)).rows
    assert [(row.m, row.n, row.k, row.count) for row in rows] == [
        (M, N, 1, 32 // in_each)
    ] * in_each


NOT_FOUND = {
    "a product that is stored": lambda x, w: BARRIER(x[:, None] * w[None]).sum(-1),
    "outer products without a loop": lambda x, w: sum(x[:, k, None] * w[:, k] for k in range(16)),
    "a quotient": lambda x, w: (x[:, None] / w[None]).sum(-1),
    "masked along K": lambda x, w: jnp.where(x[0] > 0, x[:, None] * w[None], 0).sum(-1),
    "row by row": lambda x, w: jax.lax.map(lambda row: (row * w).sum(-1), x),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_the_package_page_says_it_does_not_find(name):
    assert not report_gemms(NOT_FOUND[name], S(M, K, dtype=f32), S(N, K, dtype=f32)).rows


@pytest.mark.parametrize(
    "fn, dims, batch",
    [
        (products_added, (M, N, K), 1),
        (lambda x, w: -products_added(x, w) / 7 + 1, (M, N, K), 1),
        (lambda x, w: jnp.where(jnp.tri(M, N, dtype=bool), products_added(x, w), 0), (M, N, K), 1),
        (lambda x, w: (x[:, None] * w[None] * x[0]).mean(-1), (M, N, K), 1),
        (lambda x, w: (x[:, None] * w * (x[:, :1] + w[:, 0])[..., None]).sum(-1), (M, N, K), 1),
        (
            lambda x, w: jax.vmap(products_added)(x.reshape(4, 16, K), w.reshape(4, 32, K)),
            (16, 32, K),
            4,
        ),
        (
            lambda x, w: (x.reshape(M, 1, 16, 16) * w.reshape(1, N, 16, 16)).sum((-1, -2)),
            (M, N, K),
            1,
        ),
        (lambda x, w: jax.vmap(lambda r: jax.vmap(lambda c: jnp.sum(r * c))(w))(x), (M, N, K), 1),
    ],
)
def test_a_product_and_a_sum_have_the_sizes_of_the_matmul(fn, dims, batch):
    (row,) = report_gemms(fn, S(M, K, dtype=bf16), S(N, K, dtype=bf16)).rows
    m, n = sorted((row.m, row.n))
    assert (m, n, row.k, row.batch) == (*dims, batch) and row.library == "kernel"


def test_reasons_need_the_function():
    with pytest.raises(TypeError, match="inspect the function and its arguments"):
        why_not_fp8(aot_compile(scaled_dot, *OPERANDS))


# Kernels that are no instructions of HLO's --------------------------------------------------------


def test_a_kernel_by_hand_is_judged_by_its_instructions():
    def wide(a, b, c, x, y):
        return by_hand(scaled_dot(a, b, x, y, bf16), c, bf16)

    args = (S(128, 128), S(128, 128), S(128, 128, dtype=bf16), s, s)
    wide = inspect(wide, *args)
    (reason,) = wide.reasons
    assert (
        reason.lost == "fp8"
        and "multiplies bf16" in reason.reason
        and "pallas_call" in reason.matmul
    )
    with pytest.raises(AssertionError, match="multiplies bf16"):
        assert_fp8_gemms(wide)
    assert_fp8_gemms(wide, count=1)
    # On a B200 Triton's compiler multiplies FP8 arrays as they are.
    assert not why_not_fp8(
        CASES["a kernel of FP8 arrays by hand"].broken, S(M, M), S(M, M), target="B200"
    )
    # And Mosaic GPU multiplies them so on Hopper.
    assert not why_not_fp8(by_warpgroup, S(M, 128), S(N, 128))
    assert not why_not_fp8(by_warpgroup, S(M, 128, dtype=e5m2), S(N, 128, dtype=e5m2))


@pytest.mark.parametrize(
    "instruction, types",
    [
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2", ("f8e4m3fn",)),
        (
            "wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {%0}, %1;",
            ("f8e4m3fn",),
        ),  # a sum in float16
        ("wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16", ("f16",)),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32", ("tf32",)),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32", ("f8e5m2",)),
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", ("f16",)),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", ("s8",)),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4 [%0]", ("f8",)),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X", ("f8",)),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%0]", ("f4",)),
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X", ("f4",)),
        (
            "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3"
            ".e4m3.f32.ue8m0",
            ("f8e4m3fn",),
        ),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", ("f8",)),
        (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1"
            ".e2m1.f32.ue4m3",
            ("f4",),
        ),
        ("tcgen05.mma.cta_group::2.kind::f16 [%0]; wgmma.fence.sync.aligned", ("f16",)),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", ()),
    ],
)
def test_instructions_name_what_they_multiply(instruction, types):
    assert instructions(f"\t{instruction} ") == types


def test_what_is_not_looked_into_is_unknown():
    factor = seen("a library's kernel")
    (reason,) = (r for r in factor.reasons if r.lost == "kernel")
    assert "cholesky" in reason.matmul and reason.reason.startswith("unknown: ")
    with pytest.raises(AssertionError, match="unknown: what this kernel multiplies"):
        assert_fp8_gemms(factor)
    assert_fp8_gemms(factor, count=1)


@pytest.mark.parametrize(
    "does, fn",
    [
        ("reads the result", lambda a, b, c, x: scaled_dot(a, b, x, x) * jnp.cos(c)),
        ("makes an operand", lambda a, b, c, x: scaled_dot(a, to_e4m3(jnp.cos(c), x), x, x)),
    ],
)
def test_a_kernel_that_does_what_nobody_here_knows_is_unknown(does, fn, monkeypatch):
    monkeypatch.setattr(unfused, "_KNOWN", unfused._KNOWN - {"cosine"})
    (reason,) = why_not_fp8(fn, S(M, K), S(K, K), S(M, K, dtype=f32), s)
    assert reason.lost == "kernel" and re.fullmatch(
        rf"unknown: the kernel \S+ {does}, .*\(cosine\)", reason.reason
    )


# assert_fp8_gemms ---------------------------------------------------------------------------------


def mixed(a, b, c, x, y):
    return scaled_dot(a, b, x, y), c @ c.T


MIXED = (A, B, S(M, K, dtype=bf16), s, s)


def test_assertion_passes_and_returns_the_report():
    assert assert_fp8_gemms(scaled_dot, *OPERANDS).rows[0].is_fp8
    assert_fp8_gemms(scaled_dot, *OPERANDS, count=1, min_flops_share=1, fused=True)
    assert_fp8_gemms(mixed, *MIXED, count=1)
    assert_fp8_gemms(mixed, *MIXED, min_flops_share=0.5, fused="scale")
    fn, args = FINE["bias + relu + amax"]
    assert_fp8_gemms(fn, *args, fused=("bias", "epilogue", "amax", "output", "scale", "bias_relu"))
    assert_fp8_gemms(scaled_dot, *OPERANDS, target="B200")


@pytest.mark.parametrize(
    "message, fn, args, options",
    [
        ("1 of 2 matmuls are not FP8", mixed, MIXED, {}),
        ("1 matmuls are FP8, not 2", mixed, MIXED, {"count": 2}),
        ("of the FLOPs are FP8, less than 90.0%", mixed, MIXED, {"min_flops_share": 0.9}),
        (
            "left outside: transpose",
            *(lambda c: (c.broken, c.args))(CASES["right operand [K, N]"]),
            {"fused": True},
        ),
        (
            "left outside: output",
            *(lambda c: (c.broken, c.args))(CASES["no clamp"]),
            {"fused": ["output"]},
        ),
        (
            "left outside: duplicate",
            *(lambda c: (c.broken, c.args))(CASES["amax of the scaled result"]),
            {"fused": True},
        ),
        (
            "left outside: scale",
            *(lambda c: (c.broken, c.args))(CASES["relu of the codes, with a bias"]),
            {"fused": "scale"},
        ),
        ("no FP8 call has fused: amax", scaled_dot, OPERANDS, {"fused": "amax"}),
        ("an FP8 call has the epilogue DEFAULT, not RELU", scaled_dot, OPERANDS, {"fused": "RELU"}),
        ("not FP8", scaled_dot, OPERANDS, {"target": "A100"}),
        ("the program has no matmul", lambda a: a.astype(f32), (A,), {}),
    ],
)
def test_assertion_fails_with_report_and_reasons(message, fn, args, options):
    with pytest.raises(AssertionError, match=message) as error:
        assert_fp8_gemms(fn, *args, **options)
    text = str(error.value)
    assert re.search(r"\d+ matmuls?, \d+ in FP8", text)
    assert ("fix:" in text) == bool(why_not_fp8(fn, *args, target=options.get("target", "H100")))


@pytest.mark.parametrize("activation", [jax.nn.silu, lambda d: jnp.where(d > 3, 0, d)])
@pytest.mark.parametrize("fused", ["output", ("output", "scale"), ("DEFAULT", "output")])
def test_assertion_finds_work_that_stays_outside_behind_an_obstacle(activation, fused):
    def layer(a, b, a_scale, b_scale, d_scale):
        d = activation(jax.lax.dot(a.astype(f32) * a_scale, (b.astype(f32) * b_scale).T)) * d_scale
        return jnp.clip(d, -448, 448).astype(e4m3)

    with pytest.raises(AssertionError, match="left outside: output, to loop_"):
        assert_fp8_gemms(layer, A, B, s, s, s, fused=fused)


def test_assertion_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="fused has 'softmax'; it takes scale, bias"):
        assert_fp8_gemms(scaled_dot, *OPERANDS, fused="softmax")
    for share in ("0.9", 90, -0.1):
        with pytest.raises(ValueError, match="min_flops_share must be from 0 to 1"):
            assert_fp8_gemms(scaled_dot, *OPERANDS, min_flops_share=share)
    assert_fp8_gemms(scaled_dot, *OPERANDS, fused=None, allow=None)
