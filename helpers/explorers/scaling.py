"""What "Delayed scaling" begins with, and what it shows of that before any script runs:
`scaling.mjs` shows the same, and answers when it is touched.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.explorers import bits
from helpers.numerics.formats import Format, describe
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


def losses(
    trace: Sequence[float], f: Format, history: int, margin: int, depth: int
) -> tuple[int, float, int]:
    """Of finite amaxes, above zero, in delayed scaling: in how many steps the amax is beyond the
    scale, how far at worst, and in how many amax / 2^depth becomes zero.
    """
    worst, saturates, underflows = 1.0, 0, 0
    assert f.smallest_subnormal is not None
    for number, amax in enumerate(trace):
        known = trace[max(0, number - history) : number]
        scale = max(known) / (f.max * 2.0**-margin) if known else 1.0
        beyond = amax / (max(known) * 2.0**margin if known else f.max)
        saturates += beyond > 1
        worst = max(worst, beyond)
        underflows += amax / 2.0**depth <= scale * f.smallest_subnormal / 2
    return saturates, worst, underflows


def answer() -> str:
    """What happens in the steps of the trace that is shown first, as HTML."""
    trace, history, margin, depth = (STATE[key] for key in ("trace", "history", "margin", "depth"))
    amaxes = traces()[trace]
    saturates, worst, underflows = losses(amaxes, describe(STATE["format"]), history, margin, depth)
    return (
        f"<p>With a history of {history} and a margin of {margin}, the largest number saturates in "
        f"{saturates} of {len(amaxes)} steps, at worst {worst:.3g} times beyond the scale; "
        f"numbers of amax / 2^{depth} become zero in {underflows} of {len(amaxes)} steps.</p>"
    )
