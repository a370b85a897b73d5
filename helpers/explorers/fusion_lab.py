"""The programs of "Fusion lab": what can be chosen, the code of a choice, and what is recorded of
it. `fusion_lab.mjs` shows it. Nothing is compiled here: `tools/recorders/lab_programs.py` did it,
and in JupyterLab `compiled.py` does it.
"""

import contextlib
import functools
import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8lens.targets import TARGETS

RECORD = Path(__file__).resolve().parents[2] / "notebooks" / "results" / "fusion_lab.json.gz"
RELEASES = ("0.10.2", "0.11.2", "0.12.0.1")  # of JAX: those of the rules' pages
#: M, N and K of what is recorded, by name.
SIZES: Mapping[str, tuple[int, int, int]] = {
    "4096": (4096, 4096, 4096),
    "few-rows": (16, 4096, 4096),
    "1000-columns": (4096, 1000, 4096),
    "1008-columns": (4096, 1008, 4096),
}
LARGEST = 1 << 17  # of a typed size: larger than any layer's
FILE = "layer.py"  # by this name XLA knows a program's lines

Choice = Mapping[str, str]
"""For each axis the name of a value."""


@dataclass(frozen=True)
class Axis:
    """Something to choose: its values by name, as they are labelled."""

    name: str
    label: str
    values: Mapping[str, str]


#: The parts of a layer, in the page and in a notebook.
LAYER = (
    Axis(
        "operands",
        "Operands",
        {
            "e4m3": "E4M3 × E4M3",
            "e5m2-e4m3": "E5M2 × E4M3",
            "e5m2": "E5M2 × E5M2",
            "bf16": "BF16 × BF16",
        },
    ),
    Axis("stored", "b is stored as", {"nk": "[N, K]", "kn": "[K, N]"}),
    Axis(
        "scales",
        "Scales",
        {
            "none": "none",
            "scalar": "one for each matrix",
            "row": "one for each row of a",
            "row-after": "of rows, after the dot",
        },
    ),
    Axis("dequantize", "Dequantize in", {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}),
    Axis(
        "bias",
        "Bias",
        {"none": "none", "bf16": "bfloat16", "f32": "float32", "f16": "float16"},
    ),
    Axis("activation", "Activation", {"none": "none", "relu": "relu", "gelu": "gelu"}),
    Axis("amax", "Amax", {"no": "no", "yes": "yes"}),
    Axis(
        "result",
        "Result",
        {
            "f32": "float32",
            "bf16": "bfloat16",
            "e4m3": "E4M3: scale, clamp, convert",
            "e4m3-clamp-first": "E4M3: clamp, scale, convert",
            "e4m3-no-clamp": "E4M3: scale, convert",
            "e5m2": "E5M2: scale, clamp, convert",
            "f16": "float16",
        },
    ),
    Axis("chip", "Chip", {"H100": "H100", "B200": "B200", "L40S": "L40S", "A100": "A100"}),
    Axis(
        "library",
        "Matmul by",
        {"cublaslt": "cuBLASLt", "triton": "Triton", "auto": "XLA's default, untimed"},
    ),
)
#: On the page besides. In a notebook sizes are typed, and JAX is the kernel's.
AXES = (
    *LAYER,
    Axis(
        "sizes",
        "M × N × K",
        {name: " × ".join(map(str, sizes)) for name, sizes in SIZES.items()},
    ),
    Axis("release", "JAX", {release: release for release in RELEASES}),
)
NAMES = tuple(axis.name for axis in AXES)

#: What the explorer begins with: chapter 06's layer.
FIRST: Choice = {
    "operands": "e4m3",
    "stored": "nk",
    "scales": "scalar",
    "dequantize": "f32",
    "bias": "bf16",
    "activation": "gelu",
    "amax": "yes",
    "result": "e4m3",
    "chip": "H100",
    "library": "cublaslt",
}
#: And on the page, which keeps it in its address.
STATE: Choice = {**FIRST, "sizes": "4096", "release": RELEASES[-1]}

# What is recorded of an axis where a grid does not say more.
_USUAL: Mapping[str, Sequence[str]] = {
    "operands": ("e4m3",),
    "stored": ("nk",),
    "scales": ("scalar",),
    "dequantize": ("f32", "bf16"),
    "bias": ("none", "bf16", "f32"),
    "activation": ("none", "relu", "gelu"),
    "amax": ("no", "yes"),
    "result": ("f32", "bf16", "e4m3"),
    "chip": ("H100",),
    "library": ("cublaslt",),
    "sizes": ("4096",),
    "release": RELEASES[-1:],
}
_OF_E4M3 = ("f32", "bf16", "e4m3", "e4m3-clamp-first", "e4m3-no-clamp")


def _grid(**more: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """What is usual of each axis, but of some these."""
    return {**_USUAL, **more}


#: What is recorded: every combination of a grid's values. No choice is in two grids.
GRIDS = (
    _grid(scales=("none", "scalar", "row", "row-after"), result=_OF_E4M3),
    _grid(stored=("kn",), result=_OF_E4M3),
    _grid(operands=("e5m2-e4m3", "e5m2")),
    _grid(operands=("bf16",), stored=("nk", "kn"), dequantize=("bf16",), scales=("none",)),
    _grid(stored=("nk", "kn"), chip=("B200", "L40S")),
    _grid(chip=("A100",)),
    _grid(library=("triton", "auto")),
    _grid(operands=("e4m3", "e5m2-e4m3", "e5m2"), result=("e5m2",)),
    _grid(dequantize=("f16",), bias=("none", "f16", "f32"), result=("f32", "f16", "e4m3")),
    _grid(sizes=("few-rows", "1000-columns", "1008-columns")),
    _grid(release=RELEASES[:-1], result=_OF_E4M3),
    _grid(release=RELEASES[:-1], library=("triton",)),
    _grid(release=RELEASES[:-1], stored=("kn",)),
)

#: Changes of the first choice that are worth a look, by what they are called.
TRIES: Mapping[str, Choice] = {
    "All in one call": {},
    "Bias in float32, b stored as [K, N]": {"bias": "f32", "stored": "kn"},
    "A float32 bias": {"bias": "f32"},
    "No clamp": {"result": "e4m3-no-clamp"},
    "Clamp first": {"result": "e4m3-clamp-first"},
    "A scale for each row": {"scales": "row"},
    "b as [K, N]": {"stored": "kn"},
    "By Triton": {"library": "triton"},
    "On an A100": {"chip": "A100"},
    "1000 columns": {"sizes": "1000-columns"},
}

#: For a rule that a program breaks, what to choose instead, where the fix is one of the choices:
#: the first of these that is a change.
FIXES: Mapping[str, Sequence[Choice]] = {
    "bias-in-f32": [{"bias": "bf16"}],
    "prepared-bias": [{"bias": "bf16"}],
    "no-clamp": [{"result": "e4m3"}],
    "clamp-early": [{"result": "e4m3"}],
    "another-type": [{"dequantize": "f32"}, {"dequantize": "bf16"}],
    "amax-without-fp8": [{"result": "e4m3"}],
    "array-of-scales": [{"scales": "row-after"}],
    "operand-layout": [{"stored": "nk"}],
    "both-e5m2": [{"operands": "e5m2-e4m3"}],
    "not-quantized": [{"operands": "e4m3"}],
    "triton-dequantized": [{"library": "cublaslt"}],
    "old-chip": [{"chip": "H100"}],
    "padded-operands": [{"sizes": "1008-columns"}],
    "cut-first": [{"sizes": "1008-columns"}],
    "no-cublaslt-kernel": [{"operands": "e5m2-e4m3"}],
}


def choices() -> Iterator[Choice]:
    """Every choice that is recorded, in the record's order."""
    for grid in GRIDS:
        for values in itertools.product(*(grid[name] for name in NAMES)):
            yield dict(zip(NAMES, values, strict=True))


def number(choice: Choice) -> int:
    """A choice's place in the record. KeyError for one that is not recorded."""
    before = 0
    for grid in GRIDS:
        places = 1
        inside = 0
        is_in = all(choice[name] in grid[name] for name in NAMES)
        for name in NAMES:
            values = grid[name]
            if is_in:
                inside = inside * len(values) + values.index(choice[name])
            places *= len(values)
        if is_in:
            return before + inside
        before += places
    raise KeyError(f"not recorded: {dict(choice)}")


# The program --------------------------------------------------------------------------------------


@dataclass
class Program:
    """The code of a choice, and the shapes and types of its arguments, by their names."""

    code: str
    arguments: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def _dequantized(matrix: str, dtype: str, scale: str) -> str:
    """The line that dequantizes one operand."""
    if not scale:
        return f"{matrix} = {matrix}.astype({dtype})"
    return f"{matrix} = {matrix}.astype({dtype}) * {_as(scale, dtype)}"


_LARGEST = {"e4m3": 448, "e5m2": 57344}  # the largest number of a format


def _as(name: str, dtype: str) -> str:
    return name if dtype == "f32" else f"{name}.astype({dtype})"


def program(choice: Choice, sizes: Sequence[int] = ()) -> Program:
    """What is compiled for a choice: one step a line, in the order of chapters 02 to 06. `sizes`
    are M, N and K, where the choice does not name them.
    """
    m, n, k = sizes or SIZES[choice["sizes"]]
    left, right = {
        "e4m3": ("e4m3", "e4m3"),
        "e5m2-e4m3": ("e5m2", "e4m3"),
        "e5m2": ("e5m2", "e5m2"),
        "bf16": ("bf16", "bf16"),
    }[choice["operands"]]
    wide, scales, bias = choice["dequantize"], choice["scales"], choice["bias"]
    is_turned = choice["stored"] == "nk"
    arguments: dict[str, tuple[str, tuple[int, ...]]] = {
        "a": (left, (m, k)),
        "b": (right, (n, k) if is_turned else (k, n)),
    }
    if scales != "none":
        by_row = scales != "scalar"
        arguments["a_scales" if by_row else "a_scale"] = ("f32", (m, 1) if by_row else ())
        arguments["b_scale"] = ("f32", ())
    lines = []
    if choice["operands"] != "bf16":
        a_scale = {"none": "", "scalar": "a_scale", "row": "a_scales", "row-after": ""}[scales]
        lines.append(_dequantized("a", wide, a_scale))
        lines.append(_dequantized("b", wide, "" if scales == "none" else "b_scale"))
    lines.append(f"d = jax.lax.dot(a, {'b.T' if is_turned else 'b'})")
    if scales == "row-after":
        lines.append(f"d = d * {_as('a_scales', wide)}")
    if bias != "none":
        arguments["bias"] = (bias, (n,))
        lines.append(f"d = d + {'bias' if bias == wide else f'bias.astype({wide})'}")
    if choice["activation"] != "none":
        lines.append(f"d = jax.nn.{choice['activation']}(d)")
    returned = "d"
    if choice["amax"] == "yes":
        found = "jnp.max(jnp.abs(d))"
        lines.append(f"amax = {found if wide == 'f32' else f'{found}.astype(f32)'}")
        returned = "d, amax"
    result = choice["result"]
    format_, _, how = result.partition("-")
    if bound := _LARGEST.get(format_):
        arguments["d_scale"] = ("f32", ())
        scale = f"d = d * {_as('d_scale', wide)}"
        clamp = f"d = jnp.clip(d, -{bound}, {bound})"
        steps = {"": (scale, clamp), "clamp-first": (clamp, scale), "no-clamp": (scale,)}
        lines += [*steps[how], f"d = d.astype({format_})"]
    elif result != wide:
        lines.append(f"d = d.astype({result})")
    lines.append(f"return {returned}")
    body = "\n".join(f"    {line}" for line in lines)
    return Program(f"def layer({', '.join(arguments)}):\n{body}\n", arguments)


# What became of it --------------------------------------------------------------------------------


@functools.cache
def recorded(path: Path = RECORD) -> Mapping[str, Any]:
    """What was recorded."""
    return json.loads(gzip.decompress(path.read_bytes()))


def outcome(choice: Choice, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What became of a choice, whole: the record has each text once. Of a choice that does not
    compile: "error". KeyError for one that is not recorded.
    """
    data = data or recorded()
    which, _, lines_by = data["programs"][number(choice)]
    found = dict(data["outcomes"][which])
    if "error" in found:
        return found
    found["reasons"] = [data["reasons"][n] for n in found["reasons"]]
    found["hlo"] = [data["lines"][n] for n in found["hlo"]]
    found["steps"] = data["steps"][lines_by]
    return found


def first_answer(choice: Choice, sizes: Sequence[int], release: str) -> dict[str, Any]:
    """What the explorer shows of a choice where no script runs: its code, and what became of it
    where that is recorded. `sizes` are M, N and K.
    """
    found: dict[str, Any] = {"code": program(choice, sizes).code.splitlines()}
    for name, known in SIZES.items():
        if known == tuple(sizes):
            with contextlib.suppress(KeyError):
                found |= outcome({**choice, "sizes": name, "release": release})
    return found


def data() -> dict[str, Any]:
    """What the explorer needs besides the record."""
    return {
        "axes": [_described(axis) for axis in AXES],
        "grids": [dict(grid) for grid in GRIDS],
        "tries": TRIES,
        "fixes": FIXES,
        "first": dict(STATE),
        "shapes": SIZES,
    }


def live(release: str) -> dict[str, Any]:
    """What it needs in a notebook, whose kernel compiles with this release of JAX: there every
    combination can be chosen, every chip of fp8lens, and M, N and K.
    """
    axes = [_described(axis) for axis in LAYER]
    for axis in axes:
        if axis["name"] == "chip":
            axis["values"] = {name: name for name in TARGETS}
    fixes = {rule: changes for rule, changes in FIXES.items() if _is_of_layer(*changes)}
    tries = {name: change for name, change in TRIES.items() if _is_of_layer(change)}
    return data() | {
        "axes": axes,
        "grids": [],
        "tries": tries,
        "fixes": fixes,
        "first": dict(FIRST),
        "installed": release,
    }


def _is_of_layer(*changes: Choice) -> bool:
    """Whether a notebook can make these changes."""
    return all(change.keys() <= FIRST.keys() for change in changes)


def _described(axis: Axis) -> dict[str, Any]:
    return {"name": axis.name, "label": axis.label, "values": dict(axis.values)}


def check(choice: Choice, sizes: Sequence[int]) -> None:
    """Raise ValueError, in a sentence, for what cannot be chosen in a notebook."""
    values = {axis.name: axis.values for axis in LAYER} | {"chip": TARGETS}
    for name in {**choice, **values}:
        if name not in values:
            raise ValueError(f"{name} cannot be chosen: choose {', '.join(values)}.")
        if (value := choice.get(name)) not in values[name]:
            raise ValueError(f"{name} is {value!r}: choose one of {', '.join(values[name])}.")
    for name, length in zip("MNK", sizes, strict=True):
        if not isinstance(length, int) or not 1 <= length <= LARGEST:
            raise ValueError(f"{name} is {length!r}: give a whole number from 1 to {LARGEST}.")
