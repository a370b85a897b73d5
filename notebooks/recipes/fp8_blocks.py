"""A linear layer that trains in FP8 with scales for blocks, as DeepSeek-V3 was trained.

Copy `block_pass.py` and `one_pass.py` beside it. It needs JAX alone. Chapter 13 compares what it
costs. All numbers are E4M3, gradients too:

- x and the result's gradient have a scale for each 1 x 128, w one for each 128 x 128.
- Blocks lie along the dimension that a matmul sums over. The weight's gradient sums over tokens. So
  x and the gradient are quantized twice, along features and along tokens. The squares of w serve
  both ways, transposed.

    y = block_linear(x, w)  # x [M, K] and y [M, N] in bf16, w [N, K] in f32 or bf16

A scale that changes along the sum has no place in XLA's FP8 call for a Hopper. So `by` chooses:
"mosaic" is a kernel for a Hopper that scales within the sum, written with Pallas's Mosaic GPU
backend, and `block_pass` to quantize; "interpret" is the same on a CPU, with JAX 0.11; "batched" is
an FP8 matmul of XLA's for each 128 of the sum, which moves many times the bytes; "dequantized"
multiplies in bf16 what the codes stand for.

What it leaves out: a bias, several devices, tuning. The kernels were compiled for a Hopper and run
in the interpreter, and were not timed.

Test what XLA and the kernels make of your step:

    from fp8lens import inspect
    print(inspect(step, x, w, target="H100").report)  # three matmuls in FP8
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from block_pass import WIDE as BLOCK
from block_pass import block_pass
from one_pass import options_of, tiled

f32, bf16, e4m3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
LARGEST = 448.0  # of E4M3
BY_HAND = "mosaic", "interpret"


class Blocks(NamedTuple):
    """A matrix [R, K] in E4M3. Each 128 of a row have a scale; of `squares`, 128 rows have the
    same.
    """

    codes: Any  # [R, K]
    scales: Any  # f32[K / 128, R]
    squares: bool = False


def twice(x: jax.Array, by: str, squares: bool = False) -> tuple[Blocks, Blocks]:
    """x [R, K], finite, in blocks along K; and x.T in blocks along R."""
    if by in BY_HAND:
        made = block_pass(x, e4m3, by, BLOCK, squares)
        return (
            Blocks(made.codes, made.scales, squares),
            Blocks(made.transposed, made.transposed_scales, squares),
        )
    return in_blocks(x, squares), in_blocks(x.T, squares)


def in_blocks(x: jax.Array, squares: bool = False) -> Blocks:
    """x [R, K] in blocks along K, by XLA. The scale of a block of zeros is the smallest."""
    rows = BLOCK if squares else 1
    blocks = x.astype(f32).reshape(x.shape[0] // rows, rows, -1, BLOCK)
    amaxes = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    scales = jnp.maximum(amaxes / LARGEST, jnp.finfo(f32).tiny)
    # The quotient may be above 448 by a rounding, and E4M3 has no infinity.
    codes = jnp.clip(blocks / scales, -LARGEST, LARGEST).astype(e4m3).reshape(x.shape)
    return Blocks(codes, jnp.repeat(scales[:, 0, :, 0].T, rows, axis=1), squares)


def product(a: Blocks, b: Blocks, dtype: Any, by: str) -> jax.Array:
    """`dtype`[M, N] of a [M, K] and b [N, K]. ValueError where the kernel has no whole tile."""
    if by in BY_HAND:
        if len(a.codes) % TILE_M or len(b.codes) % TILE_N:
            sizes = f"not {len(a.codes)} and {len(b.codes)}: pad with zeros"
            raise ValueError(f"M and N must be multiples of {BLOCK}, {sizes}")
        return _by_kernel(a, b, dtype, by)
    if by == "dequantized":
        wide = [
            one.codes.astype(bf16) * jnp.repeat(one.scales.T.astype(bf16), BLOCK, axis=1)
            for one in (a, b)
        ]
        return jax.lax.dot(wide[0], wide[1].T, preferred_element_type=dtype)
    if by == "batched":
        of_a, of_b = (one.codes.reshape(len(one.codes), -1, BLOCK) for one in (a, b))
        sums = jnp.einsum("mkc,nkc->kmn", of_a, of_b, preferred_element_type=f32)
        return jnp.sum(sums * a.scales[:, :, None] * b.scales[:, None, :], axis=0).astype(dtype)
    known = '"mosaic", "interpret", "batched" or "dequantized"'
    raise ValueError(f"by is {known}, not {by!r}")


# The kernel ---------------------------------------------------------------------------------------

# Two warpgroups, 128 threads each, share a tile of b: one may multiply while the other scales. A
# third copies. Each has 64 rows of the result's tile, what one wgmma instruction has.
GROUPS, ROWS = 2, 64
TILE_M, TILE_N = GROUPS * ROWS, BLOCK
SUMS = mosaic.Layout.WGMMA


def _by_kernel(a: Blocks, b: Blocks, dtype: Any, by: str) -> jax.Array:
    (m, k), n = a.codes.shape, len(b.codes)
    in_smem: Any = tiled((TILE_M, BLOCK), e4m3).transforms
    specs = [
        mosaic.BlockSpec((TILE_M, BLOCK), lambda k: (0, k), transforms=in_smem),
        mosaic.BlockSpec((TILE_N, BLOCK), lambda k: (0, k), transforms=in_smem),
        mosaic.BlockSpec((1, TILE_M), lambda k: (k, 0)),
    ]
    if not b.squares:
        specs.append(mosaic.BlockSpec((1, TILE_N), lambda k: (k, 0)))

    def kernel(a_codes, b_codes, a_scales, b_scales, out, out_tile) -> None:
        i, j, group = (jax.lax.axis_index(name) for name in ("m", "n", "group"))
        own = pl.ds(group * ROWS, ROWS)
        down, across = pl.ds(i * TILE_M, TILE_M), pl.ds(j * TILE_N, TILE_N)

        def step(index, a_tile, b_tile, a_scale, *others):
            *b_scale, total = others  # a tile of b's scales only where they are of rows

            def multiply(sums):
                mosaic.wgmma(sums, a_tile.at[own], b_tile.T)  # 128 of K, from zero
                return sums[...]  # waits for them

            part = pl.run_scoped(multiply, mosaic.ACC((ROWS, TILE_N), f32))
            of_rows = mosaic.layout_cast(a_scale[0, own], SUMS.reduce(1))
            if b.squares:
                of_rows = of_rows * b_scales[index[0], j]
            part = part * jax.lax.broadcast_in_dim(of_rows, part.shape, (0,))
            if not b.squares:
                of_columns = mosaic.layout_cast(b_scale[0][0], SUMS.reduce(0))
                part = part * jax.lax.broadcast_in_dim(of_columns, part.shape, (1,))
            return total + part

        def compute(pipeline) -> None:
            zeros = mosaic.layout_cast(jnp.zeros((ROWS, TILE_N), f32), SUMS)
            out_tile[own] = pipeline(zeros).astype(dtype)
            mosaic.commit_smem()
            rows = pl.ds(i * TILE_M + group * ROWS, ROWS)
            mosaic.copy_smem_to_gmem(out_tile.at[own], out.at[rows, across])
            mosaic.wait_smem_to_gmem(0)

        given = [a_codes.at[down], b_codes.at[across], a_scales.at[:, down]]
        if not b.squares:
            given.append(b_scales.at[:, across])
        mosaic.emit_pipeline_warp_specialized(
            step,
            grid=(k // BLOCK,),
            in_specs=specs,
            max_concurrent_steps=4,
            memory_registers=40,
            num_compute_wgs=GROUPS,
            wg_axis="group",
            memory_thread_idx=GROUPS,
            compute_context=compute,
        )(*given)

    call: Any = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=[tiled((TILE_M, TILE_N), dtype)],
        grid=(m // TILE_M, n // TILE_N),
        grid_names=("m", "n"),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="block_product",
        **options_of(by),
    )
    # A tile is as wide as a square: it needs one scale of b in a step.
    of_b = b.scales[:, ::BLOCK] if b.squares else b.scales
    return call(a.codes, b.codes, a.scales, of_b)


# The layer ----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def block_linear(x: jax.Array, w: jax.Array, by: str = "mosaic") -> jax.Array:
    """x [M, K] times w [N, K], in x's type: M, N and K multiples of 128, all numbers finite. The
    gradients have the types of x and w. Raises ValueError for other sizes.
    """
    return _forward(x, w, by)[0]


def _forward(x, w, by):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"give x [M, K] and w [N, K], not {x.shape} and {w.shape}")
    if any(size % BLOCK for size in (*x.shape, *w.shape)):
        raise ValueError(
            f"M, N and K must be multiples of {BLOCK}, not {x.shape[0]}, {w.shape[0]} and "
            f"{x.shape[1]}: pad with zeros"
        )
    # The backward pass needs x in blocks of tokens: these codes are saved, not x.
    (of_x, x_again), (of_w, w_again) = twice(x, by), twice(w, by, squares=True)
    return product(of_x, of_w, x.dtype, by), (x_again, w_again, jnp.zeros((), w.dtype))


def _backward(by, saved, g):
    x_again, w_again, like_w = saved
    of_g, g_again = twice(g, by)
    return product(of_g, w_again, g.dtype, by), product(g_again, x_again, like_w.dtype, by)


block_linear.defvjp(_forward, _backward)


def example() -> list[float]:
    """The losses of some steps of gradient descent, on a CPU too."""
    x = jax.random.normal(jax.random.key(0), (128, 256), bf16)
    w, losses = jnp.zeros((128, 256)), []

    @jax.jit
    @jax.value_and_grad
    def loss(w):
        # The layer learns to return a part of its input.
        y = block_linear(x, w, by="dequantized")
        return jnp.mean(jnp.square(y.astype(f32) - x[:, :128]))

    for _ in range(20):
        value, of_w = loss(w)
        w -= 16 * of_w
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = example()
    print(f"the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}")
