"""A trained model's layers in FP8: weights alone, or both operands; a chain of layers; a gated MLP;
attention with a cache in FP8; a checkpoint in blocks.

Copy `fp8_linear.py` beside it. It needs JAX alone. Chapter 08 compares the ways, and says which is
for whom. Quantize the weights once, when the model is loaded, and calibrate the scales of the
activations on inputs like those in service:

    codes, w_scale = quantized(w)          # [N, K] each; join gate and up, or q, k and v, by hand
    x_scale = calibrated(recorded_inputs)
    y = linear(x, codes, x_scale, w_scale)

What it leaves out: reading a file, attention of a prompt in FP8 and a Hadamard rotation (chapter 08
has them), several devices (chapter 16), causal masks.

Make two programs, one for prompts and one that decodes. `linear`, `chain`, `gated` and `by_token`
need cuBLASLt: jax.jit(prompt, compiler_options={"xla_gpu_enable_triton_gemm": False}).
`weights_only` and `attend` need Triton, which is XLA's default: without it a kernel converts all
that is stored in FP8. So it does where the scale is on a weight or on the cache.

Test what XLA makes of them:

    from fp8lens import assert_fp8_gemms, inspect
    assert_fp8_gemms(gated, x, gate_up, down, *scales, count=2, fused=True, target="H100")
    moved = inspect(step, *arguments, gemm="triton", target="H100").bill.totals["bytes moved"]
"""

import jax
import jax.numpy as jnp

from fp8_linear import e4m3, f32, quantize, scale_of, scaled_dot

bf16 = jnp.bfloat16
ROWS = 16  # an FP8 call takes multiples of so many rows


def quantized(w):
    """Codes of w [N, K], and their scale."""
    scale = scale_of(jnp.abs(w).astype(f32), e4m3)
    return quantize(w, scale), scale


def calibrated(recorded, room=1.25):
    """A scale for activations, from recorded ones. FP8 needs no percentile: its steps are relative.
    The room is for inputs that were not recorded; beyond it they are clipped.
    """
    amaxes = jnp.stack([jnp.max(jnp.abs(x)).astype(f32) for x in recorded])
    return scale_of(room * amaxes, e4m3)


def padded(codes):
    """With rows of zeros, up to a multiple of 16: XLA makes no FP8 call of one row."""
    return jnp.pad(codes, ((0, -len(codes) % ROWS), (0, 0)))


def rows_by_rows(x, w):
    """x [M, K] times w [N, K]: K is last in both, as an FP8 call needs it."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def weights_only(x, codes, w_scale):
    """x [M, K] in bf16, times codes [N, K]. The scale is on the result: so one kernel converts the
    codes on the chip. It is for few rows: with 512, an H200 was faster in bf16.
    """
    return rows_by_rows(x, codes.astype(x.dtype)) * w_scale.astype(x.dtype)


def linear(x, codes, x_scale, w_scale):
    """x [M, K] in bf16, times codes [N, K], in FP8."""
    x_codes = padded(quantize(x, x_scale))
    return scaled_dot(x_codes, codes, x_scale, w_scale, bf16)[: len(x)]


def chain(x, x_scale, layers):
    """Layers with relu, and the amax of each result. `layers` are (codes, bias, w_scale, h_scale,
    h_inverse), the last two those of the result. Each layer is one call, whose FP8 result the next
    one reads: it multiplies by the inverse, in y's type, because no call divides.
    """
    h, scale, amaxes = padded(quantize(x, x_scale)), x_scale, []
    for codes, bias, w_scale, h_scale, h_inverse in layers:
        y = jax.nn.relu(scaled_dot(h, codes, scale, w_scale, bf16) + bias)
        amaxes.append(jnp.max(jnp.abs(y)))  # with the padding's, which is that of the bias alone
        h, scale = jnp.clip(y * h_inverse.astype(bf16), -448, 448).astype(e4m3), h_scale
    return h[: len(x)], jnp.stack(amaxes)


def by_token(x, codes, w_scales):
    """x [M, K] in bf16, times codes [N, K] with a scale for each row, f32[N]: no calibration. Two
    more kernels: one finds the amax of each row of x, one scales the result.
    """
    x_scales = jax.vmap(lambda row: scale_of(jnp.abs(row).astype(f32), e4m3))(x)[:, None]
    x_codes = padded(quantize(x, x_scales))
    d = rows_by_rows(x_codes.astype(bf16), codes.astype(bf16))[: len(x)]
    return (d * x_scales * w_scales).astype(bf16)


def of_blocks(codes, scales, size=128):
    """Codes with a scale for each row, and these scales f32[N], of codes [N, K] with a scale for
    each block of size by size, as in DeepSeek's checkpoints. For `by_token`, when they are loaded.
    """
    rows, columns = codes.shape  # the last blocks may be smaller
    by_element = jnp.repeat(jnp.repeat(scales, size, 0), size, 1)[:rows, :columns]
    w = codes.astype(f32) * by_element
    w_scales = jax.vmap(lambda row: scale_of(jnp.abs(row), e4m3))(w)
    return quantize(w, w_scales[:, None]), w_scales


def gated(x, gate_up, down, x_scale, gate_scale, up_scale, h_scale, down_scale):
    """silu(x gate) (x up) down. `gate_up` [2 H, K] has the codes of both, `down` [N, H].

    Joined by hand, because XLA would join them after dequantizing, and lose FP8. Their scales may
    differ: each is applied to its part, in the kernel that computes silu.
    """
    codes = padded(quantize(x, x_scale))
    products = rows_by_rows(codes.astype(bf16) * x_scale.astype(bf16), gate_up.astype(bf16))
    gate, up = jnp.split(products, 2, axis=1)
    h = jax.nn.silu(gate * gate_scale.astype(bf16)) * (up * up_scale.astype(bf16))
    return scaled_dot(quantize(h, h_scale), down, h_scale, down_scale, bf16)[: len(x)]


def attend(q, k, v, k_scale, v_scale):
    """Attention in bf16 to a cache in FP8: q [batch, heads, queries, size], k and v [batch, heads,
    length, size]. Calibrate the scales, and quantize each token's keys and values by them when they
    are written: quantize(k, k_scale). The scales are on the scores and on the result.
    """
    scores = jnp.einsum("bhqd,bhtd->bhqt", q, k.astype(bf16)).astype(f32)
    weights = jax.nn.softmax(scores * (k_scale * q.shape[-1] ** -0.5))
    d = jnp.einsum("bhqt,bhtd->bhqd", weights.astype(bf16), v.astype(bf16))
    return d * v_scale.astype(bf16)


def example() -> float:
    """The error of a gated MLP in FP8, relative to bf16, for one row; on a CPU too."""
    x, gate, up, down = (
        jax.random.normal(jax.random.key(n), dims, bf16) * dims[1] ** -0.5
        for n, dims in enumerate(((1, 256), (512, 256), (512, 256), (256, 512)))
    )
    h = jax.nn.silu(x @ gate.T) * (x @ up.T)
    wide = h @ down.T
    gate_codes, gate_scale = quantized(gate)
    up_codes, up_scale = quantized(up)
    down_codes, down_scale = quantized(down)
    joined = jnp.concatenate([gate_codes, up_codes])
    x_scale, h_scale = calibrated([x]), calibrated([h])
    found = gated(x, joined, down_codes, x_scale, gate_scale, up_scale, h_scale, down_scale)
    return float(jnp.linalg.norm((found - wide).astype(f32)) / jnp.linalg.norm(wide.astype(f32)))


if __name__ == "__main__":
    print(f"a gated MLP in FP8 differs from bf16 by {example():.1%}")
