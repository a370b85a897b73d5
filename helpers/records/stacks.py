"""The operands of chapter 17, which several stacks multiply, and what `make stacks` recorded of
those that have no place in this project's environment.
"""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from helpers.records.results import recorded

KERNEL = Path(__file__).resolve().parent.parent / "numerics" / "triton_kernel.py"
M, N, K, B = 64, 128, 256, 128  # a block is 1 x B of a, and B x B of b
KINDS = "whole", "normal"
SCALES = "tensor", "row", "block"


class Operands(NamedTuple):
    """a [M, K] and b [N, K] in E4M3, and by the name of a way to scale the f32 scales of both."""

    a: np.ndarray
    b: np.ndarray
    scales: Mapping[str, tuple[np.ndarray, np.ndarray]]


def operands(kind: str) -> Operands:
    """Always the same ones. "whole" are integers so small that float32 adds their products without
    rounding; "normal" are normally distributed. The scales are no powers of two. For "tensor" they
    are f32[1] each; for "row" f32[M] and f32[N]; for "block" f32[K/B, M] and f32[N/B, K/B].
    """
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    random = np.random.default_rng(16)
    if kind == "whole":
        values = [random.integers(-8, 9, (rows, K)) for rows in (M, N)]
    else:
        values = [64 * random.standard_normal((rows, K)) for rows in (M, N)]
    # Not drawn: a scale is the same for both kinds.
    shapes = {"tensor": ((1,), (1,)), "row": ((M,), (N,)), "block": ((K // B, M), (N // B, K // B))}
    scales = {}
    for name, (one, other) in shapes.items():
        scales[name] = _uneven(one, 0.011), _uneven(other, 0.017)
    a, b = (value.astype(np.float64).astype(ml_dtypes.float8_e4m3fn) for value in values)
    return Operands(a, b, scales)


def _uneven(shape: tuple[int, ...], start: float) -> np.ndarray:
    """Scales between start and twice that."""
    numbers = np.arange(int(np.prod(shape)))
    return (start * (1 + (numbers * 0.618) % 1)).astype(np.float32).reshape(shape)


def arrays() -> dict[str, np.ndarray]:
    """All operands by name, codes as bytes, for a process that knows no FP8 of NumPy's."""
    found: dict[str, np.ndarray] = {}
    for kind in KINDS:
        given = operands(kind)
        found |= {f"{kind}: {name}": getattr(given, name).view(np.uint8) for name in "ab"}
        for way, pair in given.scales.items():
            found |= {
                f"{kind}: {way} {name}": scale for name, scale in zip("ab", pair, strict=True)
            }
    return found


def digest_of(result: Any) -> str:
    """The SHA-256 of a result's bits in float32: equal for equal results."""
    return hashlib.sha256(np.ascontiguousarray(result, "<f4").tobytes()).hexdigest()


def load_stacks(folder: str | Path = "results") -> SimpleNamespace:
    """What `make stacks` found. Raises ValueError for a file that is not as it was written, and for
    one that is of other operands.

    `source` says in a line with which packages. By (stack, way to scale, kind of operands) there is
    a digest of each result, `digests`, and its first rows, `rows`, f32[rows, N]. `layouts` says
    which scales and layouts PyTorch takes; `result_scale` what its argument of that name does;
    `graphs` are those of torch.compile; `settings` torchao's, and `scale_of_amax_3` what it makes
    of that; `signature` is PyTorch's; `ptx` counts the instructions of Triton's kernels, and
    `cublaslt` has the names in its header.
    """
    data = recorded(folder, "stacks.json", "make stacks")
    if data["operands"] != operands_digest():
        raise ValueError("stacks.json is of other operands: `make stacks` records it again")
    found = SimpleNamespace(**data, digests={}, rows={})
    for name, kept in data["results"].items():
        key = tuple(name.split(", "))
        found.digests[key] = kept["digest"]
        found.rows[key] = np.frombuffer(base64.b64decode(kept["rows"]), "<f4").reshape(-1, N)
    versions = data["packages"]
    found.source = (
        f"PyTorch {versions['torch']}, torchao {versions['torchao']}, Triton {versions['triton']}, "
        f"on a CPU, by `{data['command']}`"
    )
    return found


def operands_digest() -> str:
    """The SHA-256 of all operands."""
    summed = hashlib.sha256()
    for name, array in sorted(arrays().items()):
        summed.update(name.encode() + array.tobytes())
    return summed.hexdigest()
