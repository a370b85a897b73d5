"""What "When is FP8 faster?" begins with, and the data that it needs: chips, what quantizing moves,
models' weights, and measurements, those that others published and those that `make gpu` records.
`speedup.mjs` computes what it shows.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8lens.formats import FORMATS
from fp8lens.matmul.kernels import QUANTIZED_BYTES
from fp8lens.targets import TARGETS
from helpers.records.results import Figure, Published, Record, load, load_published

_RESULTS = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
_FP8, _BF16 = "f8e4m3fn", "bf16"

#: How an operand arrives: in FP8, or in bfloat16, and then whose scale it is quantized by.
WAYS = {"fp8": "FP8 already", "given": "bf16, scale known", "amax": "bf16, by its amax"}
#: A result's type. The bf16 matmul that FP8 is compared with has a bf16 result, or one of f32.
OUT = {"bf16": "bf16", "f8e4m3fn": "FP8", "f32": "f32"}
# Widths of models: of the residual stream, of all queries, of all keys, and inside the feed-forward
# part. Touvron et al. 2023 (Llama 2), Grattafiori et al. 2024 (Llama 3), Gemma Team 2024 (Gemma 2).
_MODELS = {
    "Llama 2 7B": (4096, 4096, 4096, 11008),
    "Llama 3 8B": (4096, 4096, 1024, 14336),
    "Llama 2, 3 70B": (8192, 8192, 1024, 28672),
    "Llama 3 405B": (16384, 16384, 1024, 53248),
    "Gemma 2 9B": (3584, 4096, 2048, 14336),
}


def _weights() -> Iterator[tuple[str, tuple[int, int]]]:
    """N and K of each model's weights, gate and up in one matmul."""
    for name, (width, queries, keys, hidden) in _MODELS.items():
        yield f"{name} QKV", (queries + 2 * keys, width)
        yield f"{name} out", (width, queries)
        yield f"{name} gate and up", (2 * hidden, width)
        yield f"{name} down", (width, hidden)


WEIGHTS = dict(_weights())
MOST = 2**20  # the largest size that can be chosen

#: By the model's keys, which `speedup.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "m": 2048,
    "n": 4096,
    "k": 11008,
    "chip": "H100",
    "a": "given",
    "b": "given",
    "out": "bf16",
}


def chips() -> dict[str, dict[str, Any]]:
    """By the names of the chips that multiply FP8: bytes a second, and FLOP/s of both types."""
    return {
        name: {
            "bandwidth": chip.memory_bandwidth,
            "peak": {dtype: chip.peak_flops[dtype] for dtype in (_BF16, _FP8)},
        }
        for name, chip in TARGETS.items()
        if chip.has_fp8
    }


def data() -> dict[str, Any]:
    """What the explorer needs besides."""
    return {
        "first": dict(STATE),
        "chips": chips(),
        "bits": {name: FORMATS[name].bits for name in OUT},
        "moved": {"fp8": 0, **QUANTIZED_BYTES},
        "ways": WAYS,
        "outs": OUT,
        "weights": WEIGHTS,
        "most": MOST,
        "points": points(),
    }


# Measurements -------------------------------------------------------------------------------------

_OPERANDS = {"": "FP8 already", "A": "A quantized", "A and B": "both quantized"}
# Forms of a case of `make gpu`, and how their operands arrive.
_FORMS = {
    "FP8 scaled": ("fp8", "fp8", "FP8 already"),
    "FP8, A from bf16": ("given", "fp8", "A quantized, scale known"),
    "FP8 from bf16": ("given", "given", "both quantized, scales known"),
    "FP8 from bf16 by amax": ("amax", "amax", "both quantized by their amax"),
}


def points(folder: str | Path = _RESULTS) -> list[dict[str, Any]]:
    """All measurements of one FP8 matmul that are recorded here, our own first.

    Each has its `source`, `url` and `date`; the `hardware`, and the `chip` whose rates that has;
    the `shape` (M, N, K); `a` and `b`, how the operands arrive, and `what` is in the time;
    `seconds` in FP8, and `speedup`, times as fast as bf16, None where that is not said.
    """
    found: list[dict[str, Any]] = []
    for record in load("speed", folder):
        found += _measured(record)
    for one in load_published(folder):
        # A row of one FP8 matmul of a known shape, on a chip whose rates are known.
        of_fp8 = [row for row in one.rows if row.shape and row.dtype == _FP8 and one.chip]
        found += [_published(one, row) for row in of_fp8]
    return found


def _published(one: Published, row: Figure) -> dict[str, Any]:
    way = {0: "fp8", 3: "given", 5: "amax"}[row.bytes_moved]
    what = _OPERANDS[row.quantized]
    if row.per:
        what += f", a scale a {row.per}"
    if row.known:
        what += " of earlier steps"
    if row.of != "FP8":
        what += f"; {row.of.removeprefix('FP8, ')}"
    return {
        "source": one.name,
        "url": one.url,
        "date": one.date or "",
        "hardware": one.hardware.removeprefix("NVIDIA "),
        "chip": one.chip,
        "shape": row.shape,
        "a": way,
        "b": way if row.quantized == "A and B" else "fp8",
        "what": what,
        "speedup": row.speedup,
        "seconds": row.seconds,
    }


def _measured(record: Record) -> Iterator[dict[str, Any]]:
    """What `make gpu` timed of one matmul; nothing of a rehearsal."""
    if record.chip is None or record.provenance["rehearsal"]:
        return
    for rows in record.cases.values():
        times = _times(rows)
        for form, (a, b, what) in _FORMS.items():
            if form in times and "bf16" in times:
                yield {
                    "source": "this project",
                    "url": "",
                    "date": record.provenance["date"],
                    "hardware": record.provenance["device"].removeprefix("NVIDIA "),
                    "chip": record.chip.name,
                    "shape": rows[form]["shape"],
                    "a": a,
                    "b": b,
                    "what": what,
                    "speedup": times["bf16"] / times[form],
                    "seconds": times[form],
                }


def _times(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of the forms of a case that were timed, all by one clock: the GPU's where it looked
    at each more than once, else the host's. In a single look the chip's clock rate may be another
    than in the next form's.
    """
    timed = {form: row for form, row in rows.items() if "wall_seconds" in row}
    by_gpu = all(len(row.get("device_looks", ())) > 1 for row in timed.values())
    clock = "device_seconds" if by_gpu else "wall_seconds"
    return {form: row[clock] for form, row in timed.items()}
