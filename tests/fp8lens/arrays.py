"""Arrays without values, from their shapes as HLO writes them."""

import re

import jax
import jax.numpy as jnp

TYPES = {
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f8e4m3fn": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2,
    "c64": jnp.complex64,
    "s8": jnp.int8,
    "s32": jnp.int32,
}


def given(text: str) -> list[jax.ShapeDtypeStruct]:
    """Such as "bf16[64,256] f32[]"."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    sizes = [tuple(map(int, filter(None, dims.split(",")))) for _, dims in found]
    types = [TYPES[name] for name, _ in found]
    return [jax.ShapeDtypeStruct(*one) for one in zip(sizes, types, strict=True)]
