"""In which order a program returns its results changes no reason, and a move behind a matmul hides
none: what the inspector says is of the program, not of how it was written down.
"""

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from helpers.numerics.recipes import scaled_dot, to_e4m3

M, N, K = 64, 128, 256
f32, bf16, e4m3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
relu, gelu = jax.nn.relu, jax.nn.gelu


def S(*dims, dtype=e4m3):
    return jax.ShapeDtypeStruct(dims, dtype)


A, B, s, MATRIX = S(M, K), S(N, K), S(dtype=f32), S(M, N, dtype=f32)
ROWS = S(32, dtype=jnp.int32)

# What is made of one result: several values, in any order.
RESULTS = {
    "relu and its mask": lambda d, z, g: (relu(d), jnp.where(d > 0, g, 0)),
    "FP8 and a silu gate": lambda d, z, g: (to_e4m3(d, z), jax.nn.silu(d) * g),
    "FP8 and the result": lambda d, z, g: (to_e4m3(d, z), d),
    "relu and a sum": lambda d, z, g: (relu(d), jnp.sum(d, -1)),
    "relu, FP8 and a square": lambda d, z, g: (relu(d), to_e4m3(d, z), d * d),
}


def said(fn, *args) -> list[tuple[str, str]]:
    return sorted((str(r.lost), r.rule) for r in inspect(fn, *args).reasons)


@pytest.mark.parametrize("name", RESULTS)
def test_the_order_of_results_changes_no_reason(name):
    def program(turn):
        def fn(a, b, x, y, z, g):
            made = RESULTS[name](scaled_dot(a, b, x, y), z, g)
            return made[turn:] + made[:turn]

        return fn

    first, *others = (said(program(n), A, B, s, s, s, MATRIX) for n in (0, 1))
    assert first and others == [first]


MOVES = {
    "gathered": lambda d, i: d[i],
    "cut": lambda d, i: jax.lax.dynamic_slice_in_dim(d, i[0], 16),
    "repeated": lambda d, i: jnp.repeat(d, 2, 0),
    "cut into parts": lambda d, i: jnp.roll(d, 2, 0),
    "reversed": lambda d, i: d[::-1],
}


@pytest.mark.parametrize("how", MOVES)
def test_a_move_behind_a_matmul_hides_no_activation(how):
    def fn(a, b, x, y, i):
        return gelu(MOVES[how](scaled_dot(a, b, x, y, bf16), i))

    (reason,) = inspect(fn, A, B, s, s, ROWS).reasons
    assert (reason.lost, reason.rule) == ("epilogue", "joined-first")
    assert f"the result is {how} before the activation" in reason.reason


def forward(reverse):
    """Layers over stacked weights that are stored [K, N]."""

    def fn(x, weights, scale):
        def layer(x, w):
            product = jax.lax.dot(x.astype(bf16) * scale, w.astype(bf16) * scale)
            return to_e4m3(product, scale), None

        return jax.lax.scan(layer, x, weights, reverse=reverse)[0]

    return fn, (A, S(4, K, K), S(dtype=bf16))


def chosen():
    """One of several weights that are stored [K, N]."""

    def fn(x, weights, scale, n):
        return jax.lax.dot(x.astype(bf16) * scale, weights[n].astype(bf16) * scale)

    return fn, (A, S(4, K, N), S(dtype=bf16), S(dtype=jnp.int32))


@pytest.mark.parametrize("fn, args", [forward(False), forward(True), chosen()])
def test_how_an_index_is_computed_hides_no_transpose(fn, args):
    assert ("transpose", "operand-layout") in said(fn, *args)
