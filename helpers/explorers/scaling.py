"""What "Delayed scaling" begins with, and the data that it needs. `scaling.mjs` computes what it
shows.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.explorers import bits
from helpers.numerics.number_formats import describe
from helpers.records.results import load_tensors

_RESULTS = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
_RECORDED = {"x": "activations", "w": "weights", "g": "gradients"}

#: By the model's keys, which `scaling.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "trace": "spike",
    "drawn": "",
    "history": 16,
    "margin": 0,
    "depth": 14,
    "format": "float8_e4m3fn",
    "step": 50,
}


def traces() -> dict[str, list[float]]:
    """Amaxes by step: three that we make, and those recorded while a model was trained."""
    steps = np.arange(100)
    made = {
        "spike": np.where(steps == 50, 100.0, 1.0),
        "grows 1.5x a step": 1.5 ** np.minimum(steps, 50),
        "falls 1.5x a step": 1.5 ** -np.minimum(steps, 50.0),
    }
    found = {name: [float(f"{amax:.6g}") for amax in trace] for name, trace in made.items()}
    for name, amaxes in load_tensors(_RESULTS).amaxes.items():
        found[f"recorded: {_RECORDED[name]}"] = amaxes.tolist()
    return found


def data() -> dict[str, Any]:
    """What the explorer needs besides: the traces, and every format with a sign."""
    signed = [describe(name) for name in bits.NAMES if describe(name).signed]
    return {"traces": traces(), "formats": [dataclasses.asdict(f) for f in signed]}
