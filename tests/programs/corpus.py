"""Programs of odd shapes, types and operations, beside the real ones of tests/programs/real.

`corpus()` gives the text of each optimized module by name, compiled once a process. `PROGRAMS` has
the functions themselves, for tests that count their matmuls in another way.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8lens
from fp8lens import Inspection

e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32


def shape(*dims: int, dtype: Any = f32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# Loops and branches -------------------------------------------------------------------------------


def fp8_scan(x, weights, scales):
    """FP8 layers by scan, one scale each."""

    def layer(x, w_scale):
        w, scale = w_scale
        d = jax.nn.relu(
            lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=f32) * scale
        )
        return jnp.clip(d, -448, 448).astype(e4m3), jnp.max(d)

    return lax.scan(layer, x, (weights, scales))


def branches(x, weights, which):
    """Each branch another matmul, one of them with a branch of its own."""

    def inner(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ weights[2], lambda x: x @ weights[3].T, x)

    return lax.switch(
        which, [lambda x: x @ weights[0], lambda x: jnp.tanh(x @ weights[1]), inner], x
    )


# Matmuls of odd shapes and types ------------------------------------------------------------------


def odd_dots(a, b, v, w, tall):
    """Two contracting dimensions, batch dimensions anywhere, and every dimension that can be 1."""
    return (
        jnp.einsum("ibjk,kjlb->lib", a, b),
        jnp.einsum("ibjk,kjlb->bkl", a, b),
        jnp.einsum("ibjk,kjlb->", a, b),
        v @ w,
        tall.T @ tall,
        w @ v,
        jnp.einsum("i,ij,j->", v, jnp.sin(w), v),
        jnp.einsum("ij,ij->j", w, w),
        lax.dot_general(a, b, (((3, 2), (0, 1)), ((), ()))),
        jnp.zeros((0, 16)) @ w[:16],
        w[:, :0] @ w[:0],
    )


def odd_types(i8, c64, half, e5, e4, i4, i32, flag):
    """What else a matmul may multiply."""
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
    return (
        dot(i8, i8, preferred_element_type=jnp.int32),
        dot(half, half, preferred_element_type=f32),
        dot(e5, e4, preferred_element_type=bf16),
        dot(e5, e5, preferred_element_type=f32),
        dot(half, (i4.astype(jnp.float16) * 0.5)),
        dot(i32, i32),
        dot(c64.real, c64.imag, precision="highest"),
        dot(flag.astype(f32), half, preferred_element_type=f32),
        dot(half.astype(bf16), e4.astype(bf16) * bf16(2)),
    )


def algorithms(a, b):
    """Precisions by name: some are several matmuls in a narrower type."""
    names = (
        "F32_F32_F32",
        "TF32_TF32_F32",
        "TF32_TF32_F32_X3",
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
        "BF16_BF16_F32_X9",
    )
    return [
        lax.dot(a, b * n, precision=lax.DotAlgorithmPreset[name]) for n, name in enumerate(names, 1)
    ]


def by_hand(a, b, dtype):
    """A Triton kernel that multiplies [M, K] by [N, K]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(a, b, out):
        out[...] = jnp.dot(a[...].astype(dtype), b[...].astype(dtype).T, preferred_element_type=f32)

    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), f32),
        grid=(m // 64, n // 64),
        in_specs=[
            pl.BlockSpec((64, k), lambda i, j: (i, 0)),
            pl.BlockSpec((64, k), lambda i, j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, j)),
        compiler_params=triton.CompilerParams(num_warps=4),
    )(a, b)


def pallas_matmul(a, b):
    """A kernel by hand, between two matmuls of XLA's."""
    return by_hand(a @ b[:, : a.shape[1]], b.T, f32) @ b.T


# Several chips ------------------------------------------------------------------------------------


def sharded_mlp(x, up, down):
    """Data, and the weights, over the chips; XLA places the collectives."""

    def loss(up, down):
        gathered = lax.with_sharding_constraint(up.astype(bf16), P(None, "model"))
        return jnp.mean(
            (jax.nn.gelu(x.astype(bf16) @ gathered) @ down.astype(bf16)).astype(f32) ** 2
        )

    return jax.value_and_grad(loss, (0, 1))(up, down)


def ring_matmul(x, w):
    """Collectives by hand: the weights go round while their matmuls run."""

    @functools.partial(jax.shard_map, in_specs=(P("x"), P("x")), out_specs=P("x"))
    def ring(x, w):
        me, size = lax.axis_index("x"), lax.axis_size("x")
        rows = w.shape[0]

        def step(i, state):
            total, w = state
            part = lax.dynamic_slice_in_dim(x, (me + i) % size * rows, rows, 1)
            return total + part @ w, lax.ppermute(
                w, "x", [(j, (j - 1) % size) for j in range(size)]
            )

        start = lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), "x", to="varying")
        total, _ = lax.fori_loop(0, size, step, (start, w))
        return total / lax.psum(jnp.sum(total), "x")

    return ring(x, w)


# The corpus ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A function, its arguments' shapes, and how to compile it."""

    fn: Callable
    args: tuple
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mesh_shape(self) -> dict[str, int]:
        return self.options.get("mesh_shape", {"x": 1})


SQUARE = shape(128, 128), shape(128, 128)
ODD = shape(8, 3, 16, 32), shape(32, 16, 24, 3), shape(64), shape(64, 64), shape(512, 1)
TYPES = tuple(
    shape(64, 64, dtype=d)
    for d in (jnp.int8, jnp.complex64, jnp.float16, e5m2, e4m3, jnp.int4, jnp.int32, jnp.bool_)
)

PROGRAMS: dict[str, Program] = {
    "FP8 scan": Program(
        fp8_scan, (shape(64, 128, dtype=e4m3), shape(6, 128, 128, dtype=e4m3), shape(6))
    ),
    "branches": Program(branches, (shape(32, 64), shape(4, 64, 64), shape(dtype=jnp.int32))),
    "odd dots": Program(odd_dots, ODD),
    "odd dots, triton": Program(odd_dots, ODD, {"gemm": "triton"}),
    "odd types": Program(odd_types, TYPES),
    "odd types, triton": Program(odd_types, TYPES, {"gemm": "triton"}),
    "algorithms, auto": Program(algorithms, SQUARE, {"gemm": "auto"}),
    "pallas": Program(pallas_matmul, (shape(128, 128), shape(128, 256))),
    "sharded MLP": Program(
        sharded_mlp,
        (shape(64, 256), shape(256, 1024), shape(1024, 256)),
        {
            "mesh_shape": {"data": 2, "model": 4},
            "in_specs": (P("data"), P("data", "model"), P("model", "data")),
        },
    ),
    "ring matmul": Program(
        ring_matmul, (shape(128, 256), shape(256, 64)), {"mesh_shape": {"x": 8}}
    ),
}


@functools.cache
def inspection(name: str) -> Inspection:
    """The program, compiled when it is first asked for, once a process."""
    program = PROGRAMS[name]
    return fp8lens.inspect(program.fn, *program.args, **program.options)


def corpus() -> dict[str, Callable[[], str]]:
    """Name to what gives the text of the optimized module."""
    return {name: lambda name=name: inspection(name).module.text for name in PROGRAMS}
