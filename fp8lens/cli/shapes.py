"""What --shapes and --mesh say, read without JAX, whose import takes seconds."""

import re
from typing import TYPE_CHECKING, NamedTuple

from fp8lens.cli.mistakes import Mistake, answered

if TYPE_CHECKING:
    import jax

EXAMPLE = '--shapes "f8e4m3fn[256,512] bf16[1024] f32[]"'
EXAMPLE_MESH = "--mesh data=8,model=4"
# A dimension, and the axes of the mesh that it is sharded over, as JAX writes them: 8@data.
_DIM = r"\d{1,15}(?:@(?:[A-Za-z]\w*|\([\w\s,]+\)))?"
_SHAPE = re.compile(rf"([A-Za-z]\w*)\[\s*((?:{_DIM}\s*(?:,\s*{_DIM}\s*)*+)?)\][\s;,]*")
# The names in HLO that numpy spells otherwise than by the rule in `_long_name`.
_LONG = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


class Shape(NamedTuple):
    """An argument as --shapes has it, its dtype as numpy names it, and for each dimension the axes
    that it is sharded over.
    """

    dtype: str
    dims: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]


def read_shapes(text: str) -> list[Shape]:
    """What --shapes says. A Mistake where it is not to be read."""
    if rest := _SHAPE.sub(" ", text).split():
        raise Mistake(f"--shapes: {rest[0][:60]!r} is no shape: write them as in {EXAMPLE}.")
    shapes = []
    for name, inside in _SHAPE.findall(text):
        dimensions = re.findall(r"(\d+)(?:@(\w+|\([\w\s,]+\)))?", inside)
        dims = tuple(int(size) for size, _ in dimensions)
        axes = tuple(tuple(re.findall(r"\w+", over)) for _, over in dimensions)
        shapes.append(Shape(_long_name(name), dims, axes))
    return shapes


def _long_name(name: str) -> str:
    """numpy's name of a dtype (float8_e4m3fn, int32, uint8, bool), which may be given as HLO has it
    (f8e4m3fn, s32, u8, pred).
    """
    if short := re.fullmatch(r"([fsu])(\d+)(e\w+)?", name):
        kind = {"f": "float", "s": "int", "u": "uint"}[short[1]]
        return f"{kind}{short[2]}_{short[3]}" if short[3] else f"{kind}{short[2]}"
    return _LONG.get(name, name)


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


def specs(shapes: list[Shape]) -> "tuple[jax.sharding.PartitionSpec, ...]":
    """Where the arguments of --shapes are."""
    from jax.sharding import PartitionSpec

    return tuple(PartitionSpec(*(names or None for names in shape.axes)) for shape in shapes)


def parse_shapes(text: str) -> "tuple[jax.ShapeDtypeStruct, ...]":
    """The arguments that "f8e4m3fn[256,512] bf16[1024] f32[]" stands for."""
    return arguments(read_shapes(text))


def arguments(shapes: list[Shape]) -> "tuple[jax.ShapeDtypeStruct, ...]":
    """The arguments of --shapes. A Mistake where a dtype is none of JAX's."""
    import jax
    import jax.numpy as jnp

    def no_dtype(error: TypeError) -> str:
        return f"--shapes: {error}: write it as HLO or numpy does, as in {EXAMPLE}."

    with answered(TypeError, no_dtype):
        args = tuple(jax.ShapeDtypeStruct(shape.dims, jnp.dtype(shape.dtype)) for shape in shapes)
    for arg in args:
        read = jax.dtypes.canonicalize_dtype(arg.dtype)
        if read != arg.dtype:
            raise Mistake(
                f"--shapes: JAX reads {arg.dtype} as {read}: write that, or set JAX_ENABLE_X64=1."
            )
    return args
