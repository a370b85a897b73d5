"""The program of the dump that "Read my dump" opens as its example, example.txt.

    python -m helpers.explorers.example      compiles it anew, and writes it

A layer with a gate. One of its matmuls adds a bias in float32 that the call could not take, and the
weights of another are not FP8.
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from helpers import aot_compile

M, N, K = 512, 1024, 512
e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
FILE = Path(__file__).with_suffix(".txt")


def dequantize(codes: jax.Array, scale: jax.Array, dtype: Any = bf16) -> jax.Array:
    """The values that FP8 codes stand for."""
    return codes.astype(dtype) * scale.astype(dtype)


def gated(
    x: jax.Array,
    w_up: jax.Array,
    w_gate: jax.Array,
    w_down: jax.Array,
    x_scale: jax.Array,
    up_scale: jax.Array,
    gate_scale: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """x [M, K], w_up and w_gate [N, K] in E4M3, w_down [N, K] in bf16, bias [N] in float32."""
    with jax.named_scope("up"):
        up = dequantize(x, x_scale) @ dequantize(w_up, up_scale).T
        up = jax.nn.relu(up + bias.astype(bf16))
    with jax.named_scope("gate"):
        gate = dequantize(x, x_scale, f32) @ dequantize(w_gate, gate_scale, f32).T
        gate = (gate + bias).astype(bf16)
    with jax.named_scope("down"):
        return (up * gate) @ w_down


SCALE = jax.ShapeDtypeStruct((), f32)
SHAPES = (
    jax.ShapeDtypeStruct((M, K), e4m3),
    jax.ShapeDtypeStruct((N, K), e4m3),
    jax.ShapeDtypeStruct((N, K), e4m3),
    jax.ShapeDtypeStruct((N, K), bf16),
    SCALE,
    SCALE,
    SCALE,
    jax.ShapeDtypeStruct((N,), f32),
)


def compiled_text() -> str:
    """The program as XLA prints it for an H100, without this machine's folders."""
    text = aot_compile(gated, *SHAPES).as_text()
    return re.sub(r'^(\d+ ")[^"]*/(?=[^"/]+/[^"/]+"$)', r"\1", text, flags=re.M)


if __name__ == "__main__":
    FILE.write_text(compiled_text(), encoding="utf-8")
