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


# In another computation, and under a mask ---------------------------------------------------------

ROW_MASK, BIAS = S(M, dtype=jnp.bool_), S(K, dtype=bf16)
LAYERS = (S(M, K, dtype=bf16), S(4, K, K), s, BIAS, ROW_MASK)


def in_a_loop(before=lambda d, *_: d, after=lambda d, *_: d):
    """A scan whose iterations begin with `before`, and end with `after`, the matmul between."""

    def fn(x, weights, scale, bias, keep):
        def layer(x, w):
            codes = to_e4m3(before(x, bias, keep), scale)
            return after(scaled_dot(codes, w, scale, scale, bf16), bias, keep), None

        return jax.lax.scan(layer, x, weights)[0]

    return fn


def masked(x, keep):
    return jnp.where(keep[:, None], x, 0)


def finished(x, bias, keep):
    return relu(masked(x, keep) + bias)


def test_work_at_the_head_of_the_next_iteration_is_found_and_its_fix_takes_it_in():
    (reason,) = inspect(in_a_loop(before=lambda d, b, _: relu(d + b)), *LAYERS).reasons
    assert (reason.lost, reason.rule) == ("bias", "joined-first")
    assert "handed to the loop's next iteration before the bias" in reason.reason
    fixed = inspect(in_a_loop(after=lambda d, b, _: relu(d + b)), *LAYERS)
    assert [row.epilogue for row in fixed.report.rows] == ["BIAS_RELU"]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_mask_in_a_loop_hides_nothing(where):
    (reason, *_) = inspect(in_a_loop(**{where: finished}), *LAYERS).reasons
    assert reason.lost == "bias" and reason.rule in ("joined-first", "masked-first")


def test_a_mask_in_front_of_a_branch_hides_nothing():
    def fn(a, b, x, y, bias, keep, choice):
        d = masked(scaled_dot(a, b, x, y, bf16), keep)
        return jax.lax.cond(choice, lambda d: relu(d + bias), jnp.sin, d)

    args = (A, B, s, s, S(N, dtype=bf16), ROW_MASK, S(dtype=jnp.bool_))
    (reason,) = inspect(fn, *args).reasons
    assert (reason.lost, reason.rule) == ("bias", "masked-first")


def test_rows_that_are_taken_with_a_fill_hide_no_conversion():
    def fn(a, b, x, y, z, i):
        return to_e4m3(jnp.take(scaled_dot(a, b, x, y, bf16), i, axis=0), z)

    (reason,) = inspect(fn, A, B, s, s, s, ROWS).reasons
    assert (reason.lost, reason.rule) == ("output", "joined-first")


def test_what_kernels_do_and_no_rule_explains_is_unknown(monkeypatch):
    """The ledger and the reasons are two analyses; here the second one sees nothing."""
    monkeypatch.setattr("fp8lens.rules.find.in_other_kernels", lambda m: [])

    def fn(a, b, x, y, bias, keep):
        return masked(relu(masked(scaled_dot(a, b, x, y, bf16), keep) + bias), keep)

    asked = inspect(fn, A, B, s, s, S(N, dtype=bf16), ROW_MASK)
    (reason,) = asked.reasons
    assert reason.rule == "unknown-outside" and "can do (bias, epilogue)" in reason.reason
