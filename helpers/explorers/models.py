"""What "What a model becomes" begins with, and the rows that it shows: those of the census."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from helpers.records.results import Census, load_census

_RESULTS = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
#: The compiled programs that "Read my dump" opens, by `program_name`.
PROGRAMS = _RESULTS / "programs"

#: What stands for the values of a row's fields.
LABELS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "decoder": "Decoder",
        "block": "Decoder block",
        "MLP": "MLP",
        "layer": "One layer",
        "routed": "Routed experts",
        "experts": "Batched experts",
        "ragged": "Ragged experts",
        "sharded": "MLP, 4 GPUs",
    },
    "of": {"training": "Training step", "forward": "Forward pass"},
    "chip": {"H100": "H100", "B200": "B200"},
    "gemm": {
        "cublaslt": "cuBLASLt",
        "triton": "Triton",
        "auto": "XLA's default",
    },
}
_PACKAGES = {
    "aqtp": "AQT",
    "dm-haiku": "Haiku",
    "equinox": "Equinox",
    "flax": "Flax",
    "haliax": "haliax",
    "keras": "Keras",
    "keras-hub": "KerasHub",
    "maxtext": "MaxText",
    "qwix": "qwix",
}
_NUMBERS = ("matmuls", "fp8", "flops", "fp8_flops", "kernels", "bytes", "peak")

#: By the model's keys, which `models.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "library": "",
    "model": "largest",
    "of": "training",
    "chip": "H100",
    "gemm": "cublaslt",
    "release": "newest",
    "find": "",
    "sort": "share",
    "row": "",
}


def program_name(row: str) -> str:
    """The name of the program of a row, such as "flax-nnx-chapter-10-block-training"."""
    way, model, of, *_ = row.split(" | ")
    return re.sub(r"[^a-z0-9]+", "-", f"{way} {model} {of}".lower())


@cache
def data() -> dict[str, Any]:
    """What the explorer needs besides: `labels`; `ways` by name; `texts`, to which rows refer by
    their place; and the `rows` of every release, newest first.
    """
    census = load_census(_RESULTS)
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = []
    releases: list[str] = [*census.releases]
    for release in reversed(releases):
        for name, row in census.releases[release]["rows"].items():
            lost = [[n, place(why), place(fix)] for n, why, fix in row.get("lost", ())]
            kept = "" if release != releases[-1] else program_name(" | ".join(name))
            error = row.get("error", "")
            rows.append(
                [
                    *map(place, (*name, release)),
                    [row.get(key) for key in _NUMBERS],
                    [row.get("for_fp8_kernels"), row.get("for_fp8_bytes")],
                    lost,
                    [[n, place(what)] for what, n in row.get("outside", {}).items()],
                    place(error) if error else None,
                    place(kept) if _is_kept(name, kept) else None,
                ]
            )
    ways = {name: _about(census, name) for name in census.ways}
    return {"labels": LABELS, "ways": ways, "texts": [*texts], "rows": rows}


def _is_kept(name: tuple[str, ...], program: str) -> bool:
    *_, chip, gemm = name
    is_of_dump = (chip, gemm) == ("H100", "cublaslt")
    return bool(program) and is_of_dump and (PROGRAMS / f"{program}.txt.gz").is_file()


def _about(census: Census, name: str) -> dict[str, str]:
    """What is said of a way: its library, and all that is set in it."""
    way = census.ways[name]
    settings: list[str] = []
    at = name
    while at:
        if one := census.ways[at]["setting"]:
            settings.insert(0, one)
        at = census.ways[at]["fixes"]
    return {
        "library": _PACKAGES[way["package"]],
        "setting": "; ".join(settings),
        "says": way["says"],
        "url": way["url"],
    }
