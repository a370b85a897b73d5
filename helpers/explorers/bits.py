"""What "Bits" begins with, and the data that it needs. `bits.mjs` computes what it shows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.numerics.number_formats import FORMATS, describe

NAMES = (*FORMATS, "bfloat16", "float16")
_BLOCK = 32  # numbers with one scale, of the MX formats


def _others() -> str:
    """The numbers beside the value in its block: with heavy tails, as activations have them."""
    numbers = np.random.default_rng(8).standard_t(3, _BLOCK - 1)
    return " ".join(f"{number:.3g}" for number in numbers)


#: By the model's keys, which `bits.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "value": "465",
    "scale": "1",
    "format": "float8_e4m3fn",
    "beside": "float8_e5m2",
    "clamp": True,
    "code": -1,
    "beside_code": -1,
    "zoom": 1,
    "element": "float4_e2m1fn",
    "rounding": "up",
    "others": _others(),
}


def data() -> dict[str, Any]:
    """What the explorer needs besides: every format, as its codes show it."""
    return {"formats": [dataclasses.asdict(describe(name)) for name in NAMES]}
