"""The ragged matmul by hand: each row meets its own expert's matrix, whatever the group sizes are;
the instruction, the bytes and the registers of the compiled kernel; and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.numerics.ragged_matmul import ragged_matmul
from tests.helpers.test_one_pass import assembled

f32, bf16, e4m3, e5m2 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
SCALES = {
    "a row, an expert": lambda m, n, k, experts: [(m,), (experts,)],
    "128 of a row, an expert": lambda m, n, k, experts: [(k // 128, m), (experts,)],
    "128 of a row, a square": lambda m, n, k, experts: [
        (k // 128, m),
        (experts, n // 128, k // 128),
    ],
}


def some(seed, shape, dtype):
    """Numbers of several sizes; scales are positive, and no powers of two."""
    random = np.random.default_rng(seed)
    if dtype == f32:
        return jnp.asarray(random.uniform(0.01, 3, shape), f32)
    return jnp.asarray(random.normal(size=shape) * 2.0 ** random.integers(-3, 4, shape), dtype)


def operands(m, n, k, experts, scales="a row, an expert", x_dtype=e4m3, seed=0):
    x, w = some(seed, (m, k), x_dtype), some(seed + 1, (experts, n, k), e4m3)
    shapes = SCALES[scales](m, n, k, experts)
    return x, w, *(some(seed + 2 + i, shape, f32) for i, shape in enumerate(shapes))


def given_shapes(m, n, k, experts, scales="a row, an expert", x_dtype=e4m3):
    shapes = SCALES[scales](m, n, k, experts)
    return (
        jax.ShapeDtypeStruct((m, k), x_dtype),
        jax.ShapeDtypeStruct((experts, n, k), e4m3),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
        *(jax.ShapeDtypeStruct(shape, f32) for shape in shapes),
    )


def expected(x, w, sizes, x_scale, w_scale):
    """Row by row in float64, and the sum of the products' sizes, which bounds the error."""
    x, w, x_scale, w_scale = (np.asarray(a, np.float64) for a in (x, w, x_scale, w_scale))
    m, n = len(x), w.shape[1]
    result, bound = np.zeros((m, n)), np.zeros((m, n))
    kept = np.clip(np.asarray(sizes, np.int64), 0, m)  # a negative size counts as 0
    owners = np.repeat(np.arange(len(sizes)), kept)[:m]
    for row, owner in enumerate(owners):
        of_row = x_scale[row] if x_scale.ndim == 1 else np.repeat(x_scale[:, row], 128)
        of_expert = w_scale[owner]
        if of_expert.ndim == 2:
            of_expert = of_expert.repeat(128, 0).repeat(128, 1)
        products = (x[row] * of_row) * (w[owner] * of_expert)
        result[row], bound[row] = products.sum(1), np.abs(products).sum(1)
    return result, bound


def is_close(found, x, w, sizes, x_scale, w_scale):
    """To the roundings of a float32 sum of K products, and of the result's type."""
    exact, bound = expected(x, w, sizes, x_scale, w_scale)
    unit = float(jnp.finfo(found.dtype).eps) / 2
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert (error <= (x.shape[1] + 4) * 2.0**-24 * bound + unit * np.abs(exact) * 1.01).all()


def multiply(x, w, sizes, x_scale, w_scale, out_dtype=f32):
    sizes = jnp.asarray(sizes, jnp.int32)
    return ragged_matmul(x, w, sizes, x_scale, w_scale, out_dtype, by="interpret")


@pytest.mark.parametrize("out_dtype", [bf16, f32])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_each_kind(scales, out_dtype):
    x, w, x_scale, w_scale = operands(128, 256, 384, 3, scales)
    sizes = [50, 0, 70]
    found = multiply(x, w, sizes, x_scale, w_scale, out_dtype)
    assert found.dtype == out_dtype
    is_close(found, x, w, sizes, x_scale, w_scale)


def test_nan_stays_with_its_expert_and_its_row():
    """A NaN in an expert's matrix reaches that expert's rows, and no others of the same tile."""
    x, w, x_scale, w_scale = operands(64, 128, 128, 3)
    w = w.at[1].set(jnp.nan)
    x = x.at[55].set(jnp.nan)
    found = np.asarray(multiply(x, w, [20, 10, 20], x_scale, w_scale))
    rows = np.isnan(found).any(1)
    assert [*np.flatnonzero(rows)] == [*range(20, 30)] and not found[50:].any()


@given(st.lists(st.integers(-5, 200), min_size=1, max_size=6))
@example([2**31 - 1, 2**31 - 1, 5])  # a sum in int32 would wrap
@example([64, 0, 64])  # borders of tiles
@settings(max_examples=8, deadline=None)
def test_each_row_meets_its_own_expert(sizes):
    """Rows beyond the last group are zero, and groups beyond the rows are cut off."""
    x, w, x_scale, w_scale = operands(128, 128, 128, len(sizes), x_dtype=e5m2)
    found = multiply(x, w, sizes, x_scale, w_scale)
    is_close(found, x, w, sizes, x_scale, w_scale)
    assert not np.asarray(found)[sum(max(0, size) for size in sizes) :].any()


COMPILE = """
import jax
from fp8lens import inspect
from helpers.numerics.ragged_matmul import ragged_matmul
from tests.helpers.test_ragged_matmul import SCALES, given_shapes
for scales in SCALES:
    given = given_shapes(512, 256, 512, 8, scales)
    (line,) = inspect(ragged_matmul, *given, target="H100").ledger
    assert line.nbytes == sum(a.size * a.dtype.itemsize for a in given) + 2 * 512 * 256
"""


def test_it_is_one_kernel_that_multiplies_fp8_and_keeps_all_in_registers():
    """It moves each byte once, by what the assembler is given, and says of it. A step of 128 along
    K has 4 instructions.
    """
    said = assembled(COMPILE)
    assert re.findall(r"(\d+) stack.* (\d+) bytes lmem", said) == [("0", "0")] * len(SCALES)
    types = re.findall(r"wgmma\.mma_async\S*\.m64n128k32\.f32\.(\S+)", said)
    assert types == ["e4m3.e4m3"] * 4 * len(SCALES)
    assert "cvt.rn.f16x2.e4m3" not in said  # no dequantizing


@pytest.mark.parametrize(
    "wrong, why",
    [
        ({"m": 100}, "pad with zeros"),
        ({"sizes": 3}, "as many group sizes"),
        ({"x_scale": ()}, "x_scale is"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, why):
    x, w, sizes, x_scale, w_scale = given_shapes(wrong.get("m", 128), 128, 256, 4)
    sizes = jax.ShapeDtypeStruct((wrong.get("sizes", 4),), jnp.int32)
    x_scale = jax.ShapeDtypeStruct(wrong.get("x_scale", x_scale.shape), f32)
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(ragged_matmul, x, w, sizes, x_scale, w_scale)
