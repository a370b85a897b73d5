"""Does each kernel of the course compute on the GPU what it computes elsewhere? Each at a small
size, beside XLA or NumPy on the CPU."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.numerics.microscaling import BLOCK_FORMATS, to_blocks
from helpers.numerics.ragged_matmul import ragged_matmul
from tools.gpu.errors import errors_of_all, is_right
from tools.gpu.machine import Gpu, Program
from tools.gpu.numerics import cpu
from tools.gpu.stage import Case, Ready

from block_pass import block_pass
from fp8_blocks import block_linear
from fused_attention import fused_attention
from one_pass import Made, one_pass

bf16, f32, e4m3 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
M, N, K, EXPERTS = 256, 384, 512, 4


def cases(gpu: Gpu) -> Iterator[Case]:
    """Every kernel as a form."""
    forms = {
        "ragged_matmul": ragged,
        "one_pass": passed,
        "block_pass": in_blocks,
        "fp8_blocks": block_layer,
        "fused_attention": attention,
    }
    builds = {name: functools.partial(form, gpu) for name, form in forms.items()}
    yield Case("kernels", "kernels", builds, looks=0, limit=40)


def normal(*shape: int, dtype: Any = e4m3, seed: int = 0) -> np.ndarray:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def positive(*shape: int) -> np.ndarray:
    """Scales, in 0.5 to 1.5."""
    return np.random.default_rng(7).uniform(0.5, 1.5, shape).astype(np.float32)


def on_cpu(reference: Callable, *args: np.ndarray) -> Any:
    """What the CPU computes."""
    with jax.default_device(cpu()):
        return jax.tree.map(np.asarray, reference(*args))


def beside(program: Program, reference: Callable, *args: np.ndarray) -> Ready:
    """What a compiled kernel computes, beside what the CPU does."""
    return judged(program.call(*args), on_cpu(reference, *args), program)


def judged(got: Any, expected: Any, program: Program | None = None, most: float = 0.0) -> Ready:
    """The errors of results, and whether all are right: by rounding, or below `most`."""
    found = errors_of_all(jax.tree.map(np.asarray, got), expected)
    right = all(is_right(one) or one["relative"] < most for one in found)
    return Ready({"errors": found, "right": right}, compiled=program and program.compiled)


def ragged(gpu: Gpu) -> Ready:
    """The matmul of experts: one has no row, borders are within tiles, rows are left over."""
    x, w = normal(M, K), normal(EXPERTS, N, K, seed=1)
    sizes = np.array([70, 0, 101, 50], np.int32)
    x_scale, w_scale = positive(M), positive(EXPERTS)

    def expected(x, w, sizes, x_scale, w_scale):
        rows = np.repeat(np.arange(EXPERTS), sizes)
        wide = np.zeros((M, N), np.float32)
        for row, expert in enumerate(rows):
            product = w[expert].astype(np.float32) @ x[row].astype(np.float32)
            wide[row] = product * x_scale[row] * w_scale[expert]
        return wide.astype(bf16)

    args = x, w, sizes, x_scale, w_scale
    program = gpu.compile(ragged_matmul, *args, rehearsed=_interpreted(ragged_matmul))
    return beside(program, expected, *args)


def passed(gpu: Gpu) -> Ready:
    """Codes, transposed codes, the largest magnitudes, a kept tensor and its sums, in one pass."""
    x, rows, columns = normal(M, N, dtype=bf16), positive(M), positive(N)

    def function(x, row, column):
        value = x * row + column
        return Made(value, (value,), (value,))

    def quantized(x, rows, columns, by="mosaic"):
        made = one_pass(
            function,
            [x],
            [rows],
            [columns],
            scale=jnp.float32(0.01),
            dtype=e4m3,
            keep=[bf16],
            by=by,
        )
        # How the amax is divided into parts is each way's own.
        return made._replace(amaxes=jnp.max(made.amaxes))

    by_xla = functools.partial(quantized, by="xla")
    program = gpu.compile(quantized, x, rows, columns, rehearsed=by_xla)
    return beside(program, by_xla, x, rows, columns)


def in_blocks(gpu: Gpu) -> Ready:
    """MXFP8 along both dimensions, beside NumPy's: codes to the bit, and scales."""
    x = normal(M, N, dtype=bf16)

    def expected(x):
        wide, form = x.astype(np.float32), BLOCK_FORMATS["MXFP8, E4M3"]
        one, other = to_blocks(wide, form), to_blocks(wide.T, form)
        return one.codes, one.scales.T, other.codes, other.scales.T

    def values(x, by="mosaic"):
        return tuple(one.astype(f32) for one in block_pass(x, by=by))

    program = gpu.compile(values, x, rehearsed=_interpreted(values))
    return beside(program, lambda x: [one.astype(np.float32) for one in expected(x)], x)


def block_layer(gpu: Gpu) -> Ready:
    """A layer with scales for blocks and its gradients, beside XLA's sums of the same codes."""
    x, w, g = normal(M, K, dtype=bf16), normal(N, K, dtype=f32), normal(M, N, dtype=bf16)

    def layer(x, w, g, by="mosaic"):
        y, pull = jax.vjp(functools.partial(block_linear, by=by), x, w)
        return y, *pull(g)

    by_xla = functools.partial(layer, by="batched")
    return beside(gpu.compile(layer, x, w, g, rehearsed=by_xla), by_xla, x, w, g)


def attention(gpu: Gpu) -> Ready:
    """Attention that keeps its scores on the chip, forward and backward."""
    q, k, v, g = (normal(2, 256, 2, 64, dtype=bf16, seed=seed) for seed in range(4))
    q = (q.astype(np.float32) / 8).astype(bf16)

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, scale=1.0, implementation="xla")

    def both_ways(attend, q, k, v, g):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(g)

    by_xla = functools.partial(both_ways, plain)
    fused = functools.partial(both_ways, fused_attention)
    program = gpu.compile(fused, q, k, v, g, rehearsed=by_xla)
    wide = [one.astype(np.float32) for one in (q, k, v, g)]
    with jax.default_matmul_precision("highest"):
        expected = [one.astype(bf16) for one in on_cpu(by_xla, *wide)]
    # Scores and their gradients are rounded to bf16 between two products.
    return judged(program.call(q, k, v, g), expected, program, most=2.0**-5)


def _interpreted(fn: Callable) -> Callable:
    """The same kernel as a CPU runs it."""
    return functools.partial(fn, by="interpret")
