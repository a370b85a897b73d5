"""Attention whose matmuls are FP8, by cuDNN: the forward pass, and two kinds of backward pass.

It needs JAX alone. `lean_step.py` uses it; chapter 15 says what it saves. The forward pass
multiplies codes of q, k and v, and writes codes of its result. One backward pass is in bf16: it
converts the codes back, and reads the statistics that the forward pass kept. The other is FP8, too.

- **Do not train with the FP8 backward pass on a Hopper.** On an H200, with the versions of chapter
  15's record, no setting of the scales gave three right gradients. It is here to be compiled.
- The FP8 forward pass was right on an H200, and so is cuDNN's backward pass in bf16. The two
  together, as here, only compile: that they agree about the statistics was not run.
- JAX's functions for this are not public: another JAX may have others.

What it leaves out: dropout, padding, a bias, several devices, and the amax of the softmax, which is
no help for its scale (chapter 08). With by="xla" the same is computed by plain operations, rounded
where cuDNN rounds: on a CPU, to see what it does to a loss.

Test that its matmuls are FP8, in one kernel:

    from fp8lens import inspect
    rows = inspect(forward, codes, scales, target="H100").report.fp8_rows
    assert len(rows) == 2 and all(row.library == "cudnn" for row in rows)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

f32, bf16, e4m3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
# The kernel rounds exponentials, of which the largest is 1, before it divides by their sum. Any
# power of two from 1 to 256 keeps them within E4M3.
OF_SOFTMAX = 256.0


class Codes(NamedTuple):
    """What is multiplied, each E4M3[batch, sequence, heads, size]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Scales(NamedTuple):
    """What codes are multiplied by to dequantize them, f32 scalars."""

    q: Any
    k: Any
    v: Any
    result: Any


class GradientScales(NamedTuple):
    """The same of the gradients: of the result, of the scores, and of q, k and v."""

    result: Any
    scores: Any
    q: Any
    k: Any
    v: Any


class Attended(NamedTuple):
    """What the forward pass gives."""

    codes: jax.Array  # of the result, E4M3[batch, sequence, heads, size]
    amax: jax.Array  # of the result, an f32 scalar
    statistics: jax.Array  # the logarithm of each query's sum, f32[batch, heads, sequence]


def forward(
    codes: Codes,
    scales: Scales,
    *,
    causal: bool = False,
    by: str = "cudnn",
) -> Attended:
    """softmax(q k^T) v. Scores are not scaled: put the factor into q's scale. `by` is "cudnn" or
    "xla". Raises ValueError for codes of another type; JAX raises for sizes that cuDNN does not
    take.
    """
    _check(by, *codes)
    if by == "cudnn":
        cudnn = _cudnn()
        options = 1.0, causal, _layout(cudnn), cudnn.check_cudnn_version()
        (result, _, amax), saved = cudnn._dot_product_attention_fp8_fwd_rule(
            *codes, _parameters(scales), *options
        )
        return Attended(result, amax.reshape(()), saved[3])
    scores, _ = _scores(codes, scales, causal)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    powers = jnp.exp(scores - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    rounded = (powers * OF_SOFTMAX).astype(e4m3).astype(f32) / OF_SOFTMAX
    result = jnp.einsum("bhqk,bkhd->bqhd", rounded / total, _wide(codes.v, scales.v))
    statistics = (largest + jnp.log(total))[..., 0]
    return Attended(to_codes(result, scales.result), jnp.max(jnp.abs(result)), statistics)


def backward(
    codes: Codes,
    seen: Attended,
    scales: Scales,
    g: jax.Array,
    *,
    causal: bool = False,
    by: str = "cudnn",
) -> tuple[jax.Array, ...]:
    """The gradients of q, k and v in bf16, for the result's gradient g in bf16."""
    _check(by, *codes)
    if by == "cudnn":
        cudnn = _cudnn()
        with jax.named_scope("dequantize"):
            given = zip((*codes, seen.codes), scales, strict=True)
            *operands, result = (_wide(*pair).astype(bf16) for pair in given)
        none = jnp.zeros(0, bf16)
        saved = *operands, *[none] * 7, (), seen.statistics, result
        mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        options: tuple[Any, ...] = 1.0, 42, 0.0, (False, False), mask, _layout(cudnn), None, None
        options += cudnn.check_cudnn_version(), False
        return cudnn._dot_product_attention_bwd_rule(*options, saved, g)[:3]

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(bf16).astype(f32)

    found, _ = _gradients(codes, seen, scales, g.astype(f32), causal, rounded, rounded)
    return tuple(one.astype(bf16) for one in found)


def backward_in_fp8(
    codes: Codes,
    seen: Attended,
    scales: Scales,
    g: jax.Array,
    of_gradients: GradientScales,
    *,
    causal: bool = False,
    by: str = "cudnn",
) -> tuple[tuple[jax.Array, ...], GradientScales]:
    """Codes of the gradients of q, k and v, E4M3, for codes of the result's gradient; and amaxes:
    `result` of them is 0, as whoever made g has measured it.
    """
    _check(by, *codes, g)
    if by == "cudnn":
        cudnn = _cudnn()
        parameters = _parameters(scales, of_gradients)
        read = cudnn.params_from_keys(parameters, cudnn.fp8_params_keys_bwd)
        saved = *codes, seen.statistics, seen.codes, read
        options = 1.0, causal, _layout(cudnn), cudnn.check_cudnn_version()
        *made, found = cudnn._dot_product_attention_fp8_bwd_rule(*options, saved, (g,))
        amaxes = [found[f"amax_{name}"].reshape(()) for name in ("dP", "dQ", "dK", "dV")]
        return tuple(made), GradientScales(jnp.zeros(()), *amaxes)

    def of_softmax(p: jax.Array) -> jax.Array:
        return (p * OF_SOFTMAX).astype(e4m3).astype(f32) / OF_SOFTMAX

    def of_scores(s: jax.Array) -> jax.Array:
        return _wide(to_codes(s, of_gradients.scores), of_gradients.scores)

    wide = _wide(g, of_gradients.result)
    found, scores = _gradients(codes, seen, scales, wide, causal, of_softmax, of_scores)
    amaxes = [jnp.max(jnp.abs(one)) for one in (scores, *found)]
    return tuple(map(to_codes, found, of_gradients[2:])), GradientScales(jnp.zeros(()), *amaxes)


def to_codes(x: jax.Array, scale: Any) -> jax.Array:
    """E4M3 codes. What is beyond the range is clamped: it would become NaN."""
    largest = float(jnp.finfo(e4m3).max)
    return jnp.clip(x / scale, -largest, largest).astype(e4m3)


def _wide(codes: jax.Array, scale: Any) -> jax.Array:
    return codes.astype(f32) * scale


def _scores(
    codes: Codes, scales: Scales, causal: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """f32[batch, heads, queries, keys], and what was multiplied."""
    wide = _wide(codes.q, scales.q), _wide(codes.k, scales.k)
    scores = jnp.einsum("bqhd,bkhd->bhqk", *wide)
    if causal:
        queries, keys = scores.shape[2:]
        scores = jnp.where(jnp.tri(queries, keys, dtype=bool), scores, -jnp.inf)
    return scores, wide


def _gradients(codes, seen, scales, g, causal, of_softmax, of_scores) -> tuple[Any, jax.Array]:
    """Those of q, k and v, and of the scores; both factors of the products are rounded."""
    scores, (q_wide, k_wide) = _scores(codes, scales, causal)
    softmax = jnp.exp(scores - seen.statistics[..., None])
    of_v = jnp.einsum("bhqk,bqhd->bkhd", of_softmax(softmax), g)
    of_softmax_itself = jnp.einsum("bqhd,bkhd->bhqk", g, _wide(codes.v, scales.v))
    of_both = jnp.sum(g * _wide(seen.codes, scales.result), axis=-1)  # each query's mean
    change = softmax * (of_softmax_itself - jnp.swapaxes(of_both, 1, 2)[..., None])
    rounded = of_scores(change)
    of_q = jnp.einsum("bhqk,bkhd->bqhd", rounded, k_wide)
    of_k = jnp.einsum("bhqk,bqhd->bkhd", rounded, q_wide)
    return (of_q, of_k, of_v), change


def _parameters(scales: Scales, of_gradients: GradientScales | None = None) -> dict[str, jax.Array]:
    """What cuDNN is told, each [1, 1, 1, 1]. JAX wants the gradients' scales in both passes. Its
    dP is the gradient of the scores.
    """
    gradient = of_gradients or GradientScales(*[1.0] * 5)
    told = {f"descale_{name}": getattr(scales, name) for name in "qkv"}
    told |= {"descale_s": 1 / OF_SOFTMAX, "scale_s": OF_SOFTMAX}
    told |= {"descale_o": scales.result, "scale_o": 1 / scales.result}
    told |= {"descale_dO": gradient.result}
    told |= {"descale_dP": gradient.scores, "scale_dP": 1 / gradient.scores}
    told |= {f"scale_d{name.upper()}": 1 / getattr(gradient, name) for name in "qkv"}
    told |= dict.fromkeys(("amax_dQ", "amax_dK", "amax_dV", "amax_dP"), 0.0)
    return {name: jnp.asarray(value, f32).reshape(1, 1, 1, 1) for name, value in told.items()}


def _cudnn() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _layout(cudnn: Any) -> int:
    return cudnn.AttentionLayout.BTNH.value


def _check(by: str, *codes: jax.Array) -> None:
    if by not in ("cudnn", "xla"):
        raise ValueError(f'attention runs by "cudnn" or "xla", not {by!r}')
    if wrong := [one.dtype for one in codes if one.dtype != e4m3]:
        raise ValueError(f"FP8 attention takes codes in E4M3, not {wrong[0]}: quantize them first")


def example() -> list[float]:
    """Errors of the result and of three gradients, relative to f32, on a CPU."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (2, 64, 2, 32)) for key in keys)
    q = q * 32**-0.5

    def exact(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, scale=1.0)

    wanted, pull = jax.vjp(exact, q, k, v)
    scales = Scales(*(jnp.float32(amax / 448) for amax in (1.0, 4.5, 4.5, 2.0)))
    codes = Codes(*map(to_codes, (q, k, v), scales[:3]))
    seen = forward(codes, scales, by="xla")
    gradients = backward(codes, seen, scales, g.astype(bf16), by="xla")
    found = _wide(seen.codes, scales.result), *gradients
    pairs = zip(found, (wanted, *pull(g)), strict=True)
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


if __name__ == "__main__":
    print("relative errors:", ", ".join(f"{error:.3f}" for error in example()))
