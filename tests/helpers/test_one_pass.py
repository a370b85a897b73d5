"""The pass that computes, measures and quantizes: the kernel's numbers are those of the function,
bit for bit, and it is one kernel that reads and writes each byte once."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import inspect
from helpers.numerics.quantize import quantize

import lean_step
from one_pass import Made, one_pass

f32, bf16, e4m3, e5m2 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2


def some(seed, *shape, dtype=f32, size=1.0):
    return (size * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def several(a, b, row, column):
    """Something of everything that a pass takes and returns."""
    y = jnp.where(a > 0, a * row, b) + column
    return Made(y, (y, b * column), (a, y))


@pytest.mark.parametrize("dtype", [e4m3, e5m2])
@pytest.mark.parametrize("shape", [(64, 128), (192, 256)])
def test_the_kernel_computes_what_the_function_says(dtype, shape):
    m, n = shape
    tensors = some(0, m, n, dtype=bf16, size=100.0), some(1, m, n)
    rows, columns, scale = [some(2, m)], [some(3, n)], jnp.float32(0.37)
    done = one_pass(
        several, tensors, rows, columns, scale=scale, dtype=dtype, keep=[bf16, f32], by="interpret"
    )
    a, b, row, column = (np.asarray(t, np.float32) for t in (*tensors, *rows, *columns))
    y = np.where(a > 0, a * row[:, None], b) + column
    assert np.array_equal(done.codes, quantize(jnp.array(y), scale, dtype))
    assert np.array_equal(done.codes, done.transposed.T)
    assert jnp.max(done.amaxes) == np.abs(y).max()
    for kept, value in zip(done.kept, (jnp.array(y, bf16), b * column), strict=True):
        assert np.array_equal(kept, value)
    for found, summands in zip(done.sums, (a, y), strict=True):
        exact, sizes = summands.sum(0, dtype=np.float64), np.abs(summands).sum(0)
        assert (np.abs(found - exact) <= m * 2.0**-24 * sizes).all()


FUNCTIONS = {
    "norm": (lean_step.normed, 1, 2, 2, []),
    "norm's gradient": (lean_step.norm_gradient, 3, 4, 1, [bf16]),
    "gelu": (lean_step.gelu, 1, 0, 0, []),
    "gelu's gradient": (lean_step.gelu_gradient, 2, 0, 0, []),
}


def given(name, m, n, like=None):
    """The arguments of a pass, or their shapes."""
    function, tensors, rows, columns, keep = FUNCTIONS[name]
    shapes = [(m, n, bf16)] * tensors + [(m, f32)] * rows + [(n, f32)] * columns
    if like:
        arrays = [like(shape, dtype) for *shape, dtype in shapes]
    else:
        arrays = [some(i, *shape, dtype=dtype) for i, (*shape, dtype) in enumerate(shapes)]
    of = slice(tensors), slice(tensors, tensors + rows), slice(tensors + rows, None)
    return function, keep, [arrays[part] for part in of]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_of_the_layer_is_what_xla_makes_of_it(name):
    """XLA may compute exp otherwise, and fuse a multiplication with an addition: then a code may
    be its neighbour."""
    function, keep, arrays = given(name, 64, 128)
    options = {"scale": jnp.float32(0.01), "dtype": e4m3, "keep": keep}
    one, other = (one_pass(function, *arrays, **options, by=how) for how in ("interpret", "xla"))
    differ = np.asarray(one.codes) != np.asarray(other.codes)
    assert differ.mean() < 0.01
    np.testing.assert_allclose(jnp.max(one.amaxes), jnp.max(other.amaxes), rtol=1e-5)
    for a, b in zip((*one.sums, *one.kept), (*other.sums, *other.kept), strict=True):
        np.testing.assert_allclose(a.astype(f32), b.astype(f32), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_one_kernel_that_moves_each_byte_once(name):
    m, n = 1024, 2048
    function, keep, arrays = given(name, m, n, jax.ShapeDtypeStruct)

    def run(tensors, rows, columns, scale):
        return one_pass(function, tensors, rows, columns, scale=scale, dtype=e5m2, keep=keep)

    scale = jax.ShapeDtypeStruct((), f32)
    lines = [*inspect(run, *arrays, scale).ledger]
    (kernel,) = (line.kernel for line in lines if line.kernel.kind.startswith("mosaic"))
    summed = len(jax.eval_shape(run, *arrays, scale).sums)
    read = sum(a.size * a.dtype.itemsize for part in arrays for a in part)
    written = m * n * (2 + 2 * len(keep)) + 4 * (m * n // 128 + summed * m // 64 * n)
    assert kernel.bytes_moved == read + written + 4
    others = sum(line.kernel.bytes_moved for line in lines if line.kernel != kernel)
    assert others <= 0.06 * kernel.bytes_moved  # what adds up the sums of the tiles' rows


COMPILE = """
import jax
from fp8lens import aot_compile
import helpers
from one_pass import one_pass
from tests.helpers.test_one_pass import adamw, e5m2, f32, given
for name in "norm's gradient", "gelu's gradient":
    function, keep, arrays = given(name, 1024, 2048, jax.ShapeDtypeStruct)
    def run(tensors, rows, columns, scale):
        return one_pass(function, tensors, rows, columns, scale=scale, dtype=e5m2, keep=keep)
    aot_compile(run, *arrays, jax.ShapeDtypeStruct((), f32), target="H100")
function, tensors, scalars = adamw(1024, 2048, jax.ShapeDtypeStruct)
def update(tensors, scalars, scale):
    options = {"dtype": e5m2, "keep": [f32] * 3, "overwrite": True}
    return one_pass(function, tensors, scalars=scalars, scale=scale, **options)
aot_compile(update, tensors, scalars, jax.ShapeDtypeStruct((), f32), target="H100")
"""


def adamw(m, n, like):
    """The optimizer's pass: the function, what it reads and overwrites, and its scalars."""
    function = functools.partial(lean_step._update, lean_step.AdamW())
    return function, [like((m, n), f32)] * 3 + [like((m, n), bf16)], [like((), f32)] * 3


def assembled(program: str) -> str:
    """What the assembler is given, and says, while a program compiles kernels of Mosaic GPU's."""
    asked = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | asked,
        capture_output=True,
        check=True,
    )
    return (done.stdout + done.stderr).decode(errors="replace")


def test_the_largest_passes_keep_all_in_registers_and_convert_in_pairs():
    """By their instructions, and by what the assembler says of them."""
    said = assembled(COMPILE)
    assert re.findall(r"(\d+) stack.* (\d+) bytes lmem", said) == [("0", "0")] * 3
    # 64 values for each thread, of AdamW's 32, in both layouts; and no conversion of a single one.
    assert len(re.findall(r"cvt\.rn\.satfinite\.e5m2x2\.f32", said)) == 2 * (64 + 64 + 32) / 2
    assert not re.search(r"cvt\S*\.e5m2\b", said) and "ld.shared.v4.b32" in said


def test_what_overwrites_is_written_in_place():
    function = functools.partial(lean_step._update, lean_step.Descent())
    options = {"scalars": [0.5], "dtype": e4m3, "keep": [f32], "overwrite": True}

    def run(w, g):
        return one_pass(function, [w, g], **options)

    w, g = jax.ShapeDtypeStruct((1024, 2048), f32), jax.ShapeDtypeStruct((1024, 2048), bf16)
    seen = inspect(jax.jit(run, donate_argnums=0), w, g)
    assert not [line for line in seen.ledger if line.kernel.kind == "copy"]
    assert seen.memory.aliased >= 4 * w.size
    w, g = some(0, 64, 128), some(1, 64, 128, dtype=bf16)
    done = one_pass(function, [w, g], **options, by="interpret")
    assert np.array_equal(done.kept[0], w - 0.5 * g.astype(f32))


@pytest.mark.parametrize("how", ["interpret", "xla"])
def test_what_is_beyond_the_range_is_clamped_and_seen_in_the_amax(how):
    x = some(0, 64, 128).at[3, 5].set(1e6).at[60, 127].set(-jnp.inf)
    done = one_pass(lean_step.same, [x], dtype=e4m3, by=how)
    assert done.codes[3, 5] == done.transposed[5, 3] == 448
    assert done.codes[60, 127] == done.transposed[127, 60] == -448
    assert jnp.isinf(jnp.max(done.amaxes))  # a history leaves it out


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tensors": [jnp.zeros((64, 100))]}, "multiples of 64 rows and 128 columns"),
        ({"rows": [jnp.zeros(128)]}, "all of one shape, rows"),
        ({"by": "triton"}, 'by "mosaic" or "interpret", not'),
    ],
)
def test_what_does_not_fit_is_told(change, says):
    with pytest.raises(ValueError, match=says):
        one_pass(lean_step.same, **{"tensors": [jnp.zeros((64, 128))], "dtype": e4m3} | change)
