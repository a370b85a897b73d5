"""The ragged matmul by hand: each row meets its own expert's matrix, whatever the group sizes are;
the instruction, the bytes and the registers of the compiled kernel; and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.ragged_matmul import ragged_matmul
from tests.helpers.test_one_pass import assembled

f32, bf16, e4m3, e5m2 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs JAX 0.11")
SCALES = {
    "a row, an expert": lambda m, n, k, experts: [(m,), (experts,)],
    "a row, a channel": lambda m, n, k, experts: [(m,), (experts, n)],
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
        if of_expert.ndim == 1:
            of_expert = of_expert[:, None]
        if of_expert.ndim == 2 and of_expert.shape[1] > 1:
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


GROUPS = {
    "one expert has all": [0, 0, 192, 0, 0],
    "the last has all": [0, 0, 0, 0, 192],
    "none has any": [0, 0, 0, 0, 0],
    "borders of tiles": [64, 0, 64, 64, 0],
    "one beside a border": [63, 1, 1, 127, 0],
    "several in a tile": [3, 5, 0, 7, 11],
    "a sum below M": [40, 0, 50, 0, 10],
    "a sum beyond M": [100, 0, 60, 90, 80],
    "a sum beyond int32": [50, 2**31 - 1, 2**31 - 1, 5, 2**31 - 1],
    "a sum that wraps to 3": [2**31 - 1, 2**31 - 1, 5, 0, 0],
    "a negative size": [70, -10, 68, 0, 5],
    "the least size first": [-(2**31), 30, -1, 100, -(2**31)],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_each_row_meets_its_own_expert(groups):
    x, w, x_scale, w_scale = operands(192, 128, 256, 5)
    found = multiply(x, w, GROUPS[groups], x_scale, w_scale)
    is_close(found, x, w, GROUPS[groups], x_scale, w_scale)
    assert not np.asarray(found)[sum(max(0, size) for size in GROUPS[groups]) :].any()


@pytest.mark.parametrize("seed", range(6))
def test_random_groups(seed):
    """Many experts with few rows, and few with many; most sums are below M."""
    random = np.random.default_rng(seed)
    experts = int(random.integers(1, 10))
    shares = random.dirichlet(np.full(experts, random.choice([0.2, 5.0])))
    sizes = random.multinomial(random.integers(0, 129), shares)
    given = operands(128, 128, 128, experts, seed=10 * seed)
    x, w, x_scale, w_scale = given
    is_close(multiply(x, w, sizes, x_scale, w_scale), x, w, sizes, x_scale, w_scale)


@pytest.mark.parametrize("out_dtype", [bf16, f32])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_each_kind(scales, out_dtype):
    x, w, x_scale, w_scale = operands(128, 256, 384, 3, scales)
    sizes = [50, 0, 70]
    found = multiply(x, w, sizes, x_scale, w_scale, out_dtype)
    assert found.dtype == out_dtype
    is_close(found, x, w, sizes, x_scale, w_scale)


def test_a_gradient_in_e5m2_meets_weights_in_e4m3():
    x, w, x_scale, w_scale = operands(64, 128, 128, 2, x_dtype=e5m2)
    is_close(multiply(x, w, [20, 30], x_scale, w_scale), x, w, [20, 30], x_scale, w_scale)


def test_it_is_what_jax_computes():
    x, w, x_scale, w_scale = operands(128, 128, 256, 4)
    sizes = jnp.array([30, 0, 60, 20], jnp.int32)
    wide = x.astype(f32) * x_scale[:, None], w.astype(f32) * w_scale[:, None, None]
    found = jax.lax.ragged_dot(wide[0], wide[1].swapaxes(1, 2), sizes, precision="highest")
    ours = multiply(x, w, sizes, x_scale, w_scale)
    np.testing.assert_allclose(ours, found, rtol=1e-4, atol=1e-3)


def test_nan_stays_with_its_expert_and_its_row():
    """A NaN in an expert's matrix reaches that expert's rows, and no others of the same tile."""
    x, w, x_scale, w_scale = operands(64, 128, 128, 3)
    w = w.at[1].set(jnp.nan)
    x = x.at[55].set(jnp.nan)
    found = np.asarray(multiply(x, w, [20, 10, 20], x_scale, w_scale))
    rows = np.isnan(found).any(1)
    assert [*np.flatnonzero(rows)] == [*range(20, 30)] and not found[50:].any()


@pytest.mark.parametrize("scales", SCALES)
def test_it_is_one_kernel_that_multiplies_fp8_and_moves_each_byte_once(scales):
    m, n, k, experts = 512, 256, 512, 8
    given = given_shapes(m, n, k, experts, scales)
    seen = inspect(ragged_matmul, *given, target="H100", isolate=True)  # fp8lens.compile.bugs
    (line,) = seen.ledger
    assert line.kernel.kind.startswith("mosaic_gpu")
    assert line.nbytes == sum(a.size * a.dtype.itemsize for a in given) + 2 * m * n
    (call,) = (i for i in seen.module if (i.custom_call_target or "").startswith("mosaic_gpu"))
    found = {*re.findall(r"wgmma\.mma_async[\w.]*", call.attributes["backend_config"])}
    assert found == {"wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"}
    assert not seen.reasons  # its types are known: FP8


COMPILE = """
import jax
from fp8lens import aot_compile
from helpers.numerics.ragged_matmul import ragged_matmul
from tests.helpers.test_ragged_matmul import SCALES, e5m2, given_shapes
for scales in SCALES:
    aot_compile(ragged_matmul, *given_shapes(512, 256, 512, 8, scales), target="H100")
aot_compile(ragged_matmul, *given_shapes(512, 256, 512, 256, x_dtype=e5m2), target="H100")
"""


def test_its_instructions_and_that_all_stays_in_registers():
    """By what the assembler is given, and says of it. A step of 128 along K has 4 instructions."""
    said = assembled(COMPILE)
    assert re.findall(r"(\d+) stack.* (\d+) bytes lmem", said) == [("0", "0")] * 5
    types = re.findall(r"wgmma\.mma_async\S*\.m64n128k32\.f32\.(\S+)", said)
    assert types == ["e4m3.e4m3"] * 4 * len(SCALES) + ["e5m2.e4m3"] * 4
    assert "cvt.rn.f16x2.e4m3" not in said and "cvt.rn.f16x2.e5m2" not in said  # no dequantizing


def change(**changes):
    names = "x", "w", "group_sizes", "x_scale", "w_scale"
    return dict(zip(names, given_shapes(128, 128, 256, 4), strict=True)) | changes


def array(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"x": array(128, 256, dtype=bf16)}, "float8_e4m3fn or float8_e5m2, not bfloat16"),
        ({"w": array(4, 128, 256)}, "float8_e4m3fn or float8_e5m2, not float32"),
        ({"w": array(4, 256, 128, dtype=e4m3)}, "K last in both.*store w with K last"),
        ({"x": array(100, 256, dtype=e4m3)}, "not M 100, N 128 and K 256: pad with zeros"),
        ({"w": array(4, 0, 256, dtype=e4m3)}, "multiples of 64 rows"),
        ({"group_sizes": array(3, dtype=jnp.int32)}, r"int32\[4\].*not int32\[3\]: count"),
        ({"group_sizes": array(4)}, r"not float32\[4\]: count the rows with jnp.bincount"),
        ({"w": array(0, 128, 256, dtype=e4m3)}, "has no expert, E is 0: give at least one"),
        ({"group_sizes": [1, 2, 3, 4]}, r"not a list: give jnp.asarray\(group_sizes, jnp.int32\)"),
        ({"x_scale": 0.5}, r"not a float: give jnp.asarray\(x_scale, jnp.float32\)"),
        ({"x": [[1.0]]}, r"not a list: give jnp.asarray\(x, jnp.float8_e4m3fn\)"),
        ({"x_scale": array()}, r"x_scale is float32 of \[128\] or \[2, 128\].*broadcast a scalar"),
        ({"w_scale": array(4, dtype=bf16)}, r"w_scale .* not bfloat16\[4\]: convert"),
        ({"w_scale": array(128, 4)}, r"of \[4\] or \[4, 128\] or \[4, 1, 2\], not float32\[128"),
    ],
)
def test_what_does_not_fit_is_refused(changes, why):
    arrays = change(**changes)
    others = {name: a for name, a in arrays.items() if not isinstance(a, jax.ShapeDtypeStruct)}
    given = {name: a for name, a in arrays.items() if name not in others}
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(lambda given: ragged_matmul(**given, **others), given)


def test_another_result_or_another_way_is_refused():
    for options, why in (
        ({"out_dtype": e4m3}, "out_dtype is one of bfloat16"),
        ({"out_dtype": "junk"}, "out_dtype is one of bfloat16, float16, float32, not junk"),
        ({"by": "xla"}, "by is one of mosaic, interpret, not 'xla'"),
    ):
        with pytest.raises(ValueError, match=why):
            jax.eval_shape(lambda a, o=options: ragged_matmul(**a, **o), change())


def test_a_gradient_is_refused():
    """In words, also where another argument's gradient is asked for."""

    def total(scales, given):
        return ragged_matmul(*given, *scales, f32).sum()

    *given, x_scale, w_scale = given_shapes(128, 128, 256, 4)
    for gradient in (jax.grad(total), jax.jacfwd(total)):
        with pytest.raises(NotImplementedError, match="no gradient: give the layer around it one"):
            jax.eval_shape(gradient, (x_scale, w_scale), given)
