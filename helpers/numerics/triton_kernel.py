"""A scaled FP8 matmul in Triton, which chapter 17 shows. Nothing of this project imports it: `make
stacks` loads the file where Triton is.
"""

import triton
import triton.language as tl


@triton.jit
def scaled_matmul(
    a,  # pointer to E4M3 [M, K]
    b,  # pointer to E4M3 [N, K]
    a_scale,  # pointer to f32: one, or [M], or [K/128, M]
    b_scale,  # pointer to f32: one, or [N], or [N/128, K/128]
    d,  # pointer to the result [M, N], whose type is the pointer's
    M,
    N,
    K: tl.constexpr,
    SCALES: tl.constexpr,  # "tensor", "row" or "block"
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PROMOTE: tl.constexpr,  # the tensor core adds so many products; None: all of a tile's and more
):
    """d = (a * a_scale) (b * b_scale)^T, one tile of d for each program of the grid."""
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        depth = start + tl.arange(0, TILE_K)
        a_tile = tl.load(a + rows[:, None] * K + depth[None, :])
        b_tile = tl.load(b + columns[None, :] * K + depth[:, None])
        if SCALES == "block":
            # A tile is as deep as a block: its sums have one scale for each row and column.
            part = tl.dot(a_tile, b_tile, max_num_imprecise_acc=PROMOTE)
            block = start // 128
            row_scales = tl.load(a_scale + block * M + rows)
            column_scales = tl.load(b_scale + columns // 128 * (K // 128) + block)
            total += part * (row_scales[:, None] * column_scales[None, :])
        else:
            total = tl.dot(a_tile, b_tile, total, max_num_imprecise_acc=PROMOTE)
    if SCALES == "tensor":
        total *= tl.load(a_scale) * tl.load(b_scale)
    if SCALES == "row":
        total *= tl.load(a_scale + rows)[:, None] * tl.load(b_scale + columns)[None, :]
    tl.store(d + rows[:, None] * N + columns[None, :], total.to(d.dtype.element_ty))
