"""The program of the dump that "Read my dump" opens as its example, example.zip.

    python -m helpers.explorers.example      compiles it anew, and writes it

A part of a transformer's block, in which four matmuls meet four fates: one is FP8, of one the bias
stays outside, one has scales that XLA's rewriter does not know, and the weights of one are not FP8.
"""

import re
import tempfile
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp

from fp8lens.dumps import choose, files_beside
from helpers import aot_compile

ROWS, WIDTH, HIDDEN = 2048, 1024, 4096
e4m3, bf16, f32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
FILE = Path(__file__).with_suffix(".zip")


def quantize(x: jax.Array, axis: int | None = None) -> tuple[jax.Array, jax.Array]:
    """E4M3 codes by the amax, of all of `x` or along an axis, and what to multiply them by."""
    amax = jnp.max(jnp.abs(x.astype(f32)), axis, keepdims=axis is not None)
    scale = amax / 448
    return jnp.clip(x.astype(f32) / scale, -448, 448).astype(e4m3), scale


def dequantize(codes: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike = bf16) -> jax.Array:
    """The values that FP8 codes stand for."""
    return codes.astype(dtype) * scale.astype(dtype)


def block(
    x: jax.Array,
    w_qkv: jax.Array,
    w_up: jax.Array,
    w_gate: jax.Array,
    w_down: jax.Array,
    w_scales: jax.Array,
    bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """x [ROWS, WIDTH] in bf16; w_qkv, w_up and w_gate in E4M3 with w_scales [3] in float32; w_down
    [HIDDEN, WIDTH] in bf16; bias [HIDDEN] in float32.
    """
    with jax.named_scope("quantize"):
        codes, scale = quantize(x)
    with jax.named_scope("qkv"):
        row_codes, row_scales = quantize(x, axis=1)
        qkv = dequantize(row_codes, row_scales) @ dequantize(w_qkv, w_scales[0]).T
    with jax.named_scope("up"):
        up = jax.nn.relu(dequantize(codes, scale) @ dequantize(w_up, w_scales[1]).T)
    with jax.named_scope("gate"):
        gate = dequantize(codes, scale, f32) @ dequantize(w_gate, w_scales[2], f32).T
        gate = (gate + bias).astype(bf16)
    with jax.named_scope("down"):
        return qkv, (up * gate) @ w_down


SHAPES = (
    jax.ShapeDtypeStruct((ROWS, WIDTH), bf16),
    jax.ShapeDtypeStruct((3 * WIDTH, WIDTH), e4m3),
    jax.ShapeDtypeStruct((HIDDEN, WIDTH), e4m3),
    jax.ShapeDtypeStruct((HIDDEN, WIDTH), e4m3),
    jax.ShapeDtypeStruct((HIDDEN, WIDTH), bf16),
    jax.ShapeDtypeStruct((3,), f32),
    jax.ShapeDtypeStruct((HIDDEN,), f32),
)
# As XLA_FLAGS of dump.COMMAND.
OPTIONS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "gemm-rewriter"}


def dumped() -> dict[str, str]:
    """What XLA dumps of the program for an H100, by the files' names, as far as fp8lens reads it,
    and without this machine's folders.
    """
    with tempfile.TemporaryDirectory() as folder:
        aot_compile(block, *SHAPES, compiler_options={**OPTIONS, "xla_dump_to": folder})
        texts = {path.name: path.read_text() for path in Path(folder).glob("*.txt")}
    choice = choose({name: len(text) for name, text in texts.items()})
    assert choice is not None
    names = [choice.name, *files_beside(choice.name, texts)]
    folders = re.compile(r'^(\d+ ")[^"]*/(?=[^"/]+/[^"/]+"$)', re.M)
    return {name: folders.sub(r"\1", texts[name]) for name in names}


def write() -> None:
    """Write the example. Its bytes depend on its texts alone."""
    with zipfile.ZipFile(FILE, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in dumped().items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)


if __name__ == "__main__":
    write()
