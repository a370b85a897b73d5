"""What chapter 13 writes, for those that measure it on a GPU: products of blocks with scales of
their own, and its kernel for them. A test compares them. The recipe fp8_blocks has the kernel with
two warpgroups to a tile, and the gradients.
"""

# ruff: noqa: D103  the chapter explains each
# Pallas's transforms are declared abstract, and are not.
# mypy: disable-error-code="abstract"

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

bf16, f32 = jnp.bfloat16, jnp.float32
B = 128
TILE_M, TILE_N = 64, 128


def blocks(x, rows, columns):
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def dequantized(a, b, a_scales, b_scales):
    """a_scales [K/128, M] and b_scales [N/128, K/128]: dequantize both to bf16, and multiply."""
    wide_a = blocks(a.astype(bf16), 1, B) * a_scales.T[:, None, :, None].astype(bf16)
    wide_b = blocks(b.astype(bf16), B, B) * b_scales[:, None, :, None].astype(bf16)
    return wide_a.reshape(a.shape) @ wide_b.reshape(b.shape).T


def batched(a, b, a_scales, b_scales):
    """A matmul for each 128 of K, as a batch; then the sum of the scaled results."""
    a, b = (codes.reshape(len(codes), -1, B) for codes in (a, b))
    parts = jnp.einsum("mkc,nkc->kmn", a, b, preferred_element_type=f32)
    columns = jnp.repeat(b_scales.T, B, axis=1)
    return jnp.sum(parts * a_scales[:, :, None] * columns[:, None, :], axis=0).astype(bf16)


def kernel(a, b, a_scales, b_scales, out, out_tile):
    m, n = lax.axis_index("m"), lax.axis_index("n")

    def step(index, a_tile, b_tile, a_scale, total):
        def multiply(sums):
            plgpu.wgmma(sums, a_tile, b_tile.T)  # 128 of K, on the tensor cores
            return sums[...]  # waits for them

        part = pl.run_scoped(multiply, plgpu.ACC((TILE_M, TILE_N), f32))  # new sums, from zero
        scale = plgpu.layout_cast(a_scale[0], plgpu.Layout.WGMMA.reduce(1)) * b_scales[n, index[0]]
        return total + part * lax.broadcast_in_dim(scale, part.shape, (0,))  # in float32 registers

    in_smem = plgpu.TilingTransform((8, B)), plgpu.SwizzleTransform(128)  # as wgmma reads it
    total = plgpu.emit_pipeline(
        step,
        grid=(a.shape[1] // B,),
        in_specs=[
            plgpu.BlockSpec((TILE_M, B), lambda k: (m, k), transforms=in_smem),
            plgpu.BlockSpec((TILE_N, B), lambda k: (n, k), transforms=in_smem),
            plgpu.BlockSpec((1, TILE_M), lambda k: (k, m)),
        ],
        max_concurrent_steps=4,
        init_carry=plgpu.layout_cast(jnp.zeros((TILE_M, TILE_N), f32), plgpu.Layout.WGMMA),
    )(a, b, a_scales)
    out_tile[...] = total.astype(bf16)
    plgpu.commit_smem()
    rows, columns = pl.ds(m * TILE_M, TILE_M), pl.ds(n * TILE_N, TILE_N)
    plgpu.copy_smem_to_gmem(out_tile, out.at[rows, columns])
    plgpu.wait_smem_to_gmem(0)


def by_block(a, b, a_scales, b_scales, **options):
    """a [M, K], b [N, K] in E4M3, a_scales [K/128, M], b_scales [N/128, K/128]: bf16[M, N]."""
    (m, k), n = a.shape, b.shape[0]
    assert m % TILE_M == n % TILE_N == k % B == 0, "M must be a multiple of 64, N and K of 128"
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), bf16),
        scratch_types=[plgpu.SMEM((TILE_M, TILE_N), bf16, transforms=swizzled)],
        grid=(m // TILE_M, n // TILE_N),
        grid_names=("m", "n"),
        **options,
    )(a, b, a_scales, b_scales)
