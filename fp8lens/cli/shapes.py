"""What --shapes and --mesh say, read without JAX, whose import takes seconds."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fp8lens.cli.mistakes import Mistake, nearest

if TYPE_CHECKING:
    import jax

EXAMPLE = '--shapes "f8e4m3fn[256,512] bf16[1024] f32[]"'
EXAMPLE_MESH = "--mesh data=8,model=4"
# A dimension, and the axes of the mesh that it is sharded over, as JAX writes them: 8@data.
_DIM = r"\d{1,15}(?:@(?:[A-Za-z]\w*|\([\w\s,]+\)))?"
_SHAPE = re.compile(rf"([A-Za-z]\w*)\[\s*((?:{_DIM}\s*(?:,\s*{_DIM}\s*)*+)?)\][\s;,]*")
# The names in HLO that numpy spells otherwise than by the rule in `_long_name`.
_LONG = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
#: JAX's dtypes as numpy names them, to be known before JAX is loaded.
DTYPES = frozenset(
    "bool int1 int2 int4 int8 int16 int32 int64 uint1 uint2 uint4 uint8 uint16 uint32 uint64 "
    "float4_e2m1fn float6_e2m3fn float6_e3m2fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "bfloat16 float16 float32 float64 complex64 complex128".split()
)
_MULTIPLIED = ("float8_e4m3fn", "float8_e5m2")


class Shape(NamedTuple):
    """An argument as --shapes has it, its dtype as numpy names it, and for each dimension the axes
    that it is sharded over.
    """

    dtype: str
    dims: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]


def read_shapes(text: str) -> list[Shape]:
    """What --shapes says. A Mistake where it is not to be read, or names no dtype of JAX's."""
    shapes, text, pos = [], text.lstrip(), 0
    while pos < len(text):
        found = _SHAPE.match(text, pos)
        word = text[pos:].split()[0]
        if not found:
            raise Mistake(f"--shapes: {word[:60]!r} is no shape: write them as in {EXAMPLE}.")
        dtype = _long_name(found[1])
        if dtype not in DTYPES:
            raise Mistake(
                f"--shapes: {found[1]!r} is no dtype: write it as HLO or numpy does, such as "
                f"f8e4m3fn or float8_e4m3fn, bf16, f32, s32, pred, as in {EXAMPLE}."
            )
        dimensions = re.findall(r"(\d+)(?:@(\w+|\([\w\s,]+\)))?", found[2])
        dims = tuple(int(size) for size, _ in dimensions)
        axes = tuple(tuple(re.findall(r"\w+", over)) for _, over in dimensions)
        shapes.append(Shape(dtype, dims, axes))
        pos = found.end()
    return shapes


def _long_name(name: str) -> str:
    """numpy's name of a dtype (float8_e4m3fn, int32, uint8, bool), which may be given as HLO has it
    (f8e4m3fn, s32, u8, pred).
    """
    if short := re.fullmatch(r"([fsiu])(\d+)(e\w+)?", name):
        kind = {"f": "float", "s": "int", "i": "int", "u": "uint"}[short[1]]
        return f"{kind}{short[2]}_{short[3]}" if short[3] else f"{kind}{short[2]}"
    return _LONG.get(name, name)


def notes(shapes: list[Shape]) -> Iterator[str]:
    """What somebody who wrote these dtypes may not have meant."""
    for name in dict.fromkeys(shape.dtype for shape in shapes):
        # Not an error: what XLA makes of such a format can be asked. But whoever writes f8e4m3
        # mostly means f8e4m3fn.
        if re.match("float8_(e4m3|e5m2|e3m4)", name) and name not in _MULTIPLIED:
            meant = "float8_e5m2" if "e5m2" in name else "float8_e4m3fn"
            yield (
                f"{name} is taken as written: "
                f"it is another format than {meant}, which tensor cores multiply."
            )


def read_mesh(text: str) -> dict[str, int]:
    """What --mesh says: the devices of each axis."""
    found: dict[str, int] = {}
    for part in text.split(","):
        axis = re.fullmatch(r"\s*([A-Za-z]\w*)\s*=\s*([1-9][0-9]{0,8})\s*", part)
        if axis is None or axis[1] in found:
            raise Mistake(
                f"--mesh: {part.strip()!r} is not an axis with its devices, or is there twice: "
                f"write {EXAMPLE_MESH}, or leave --mesh out for one device."
            )
        found[axis[1]] = int(axis[2])
    return found


def check_axes(shapes: list[Shape], mesh: Mapping[str, int] | None) -> None:
    """A Mistake where an argument is sharded over what the mesh does not have."""
    for name in (name for shape in shapes for names in shape.axes for name in names):
        if name not in (mesh or {}):
            why = f"--mesh lacks it{nearest(name, mesh)}" if mesh else "there is no --mesh"
            raise Mistake(
                f"--shapes: an argument is sharded over {name!r}, and {why}: add the axis, as in "
                f"{EXAMPLE_MESH}."
            )


def specs(shapes: list[Shape]) -> "tuple[jax.sharding.PartitionSpec, ...]":
    """Where the arguments of --shapes are."""
    from jax.sharding import PartitionSpec

    return tuple(PartitionSpec(*(names or None for names in shape.axes)) for shape in shapes)


def parse_shapes(text: str) -> "tuple[jax.ShapeDtypeStruct, ...]":
    """The arguments that "f8e4m3fn[256,512] bf16[1024] f32[]" stands for."""
    read = read_shapes(text)
    import jax
    import jax.numpy as jnp

    return tuple(jax.ShapeDtypeStruct(shape.dims, jnp.dtype(shape.dtype)) for shape in read)
