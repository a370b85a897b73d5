"""What `make train` recorded of a small decoder's runs, for chapter 13 to read."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from helpers.records.results import digest

# Of an interval: so many of such experiments give one that contains the true mean.
CONFIDENCE = 0.95


class Difference(NamedTuple):
    """How two ways differ in one figure, seed by seed: the mean difference and the ends of its
    interval, in the figure's unit; and the number of seeds.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def is_resolved(self) -> bool:
        """Whether the interval leaves out 0: these seeds tell the two ways apart."""
        return not self.low <= 0 <= self.high

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f}, {self.seeds} seeds)"


def paired(a: ArrayLike, b: ArrayLike, confidence: float = CONFIDENCE) -> Difference:
    """a - b, where both have the same seeds in the same order; the longer one is cut. The interval
    is Student's, for the mean of few differences. Raises ValueError for fewer than two seeds.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    seeds = min(len(a), len(b))
    if seeds < 2:
        raise ValueError(f"an interval needs two seeds or more, and here are {seeds}")
    each = a[:seeds] - b[:seeds]
    half = stats.t.ppf((1 + confidence) / 2, seeds - 1) * each.std(ddof=1) / seeds**0.5
    mean = float(each.mean())
    return Difference(mean, mean - float(half), mean + float(half), seeds)


class Trained(NamedTuple):
    """Runs by the name of their way, one for each seed; and those that were harmed on purpose.

    A run has: `losses`, the mean of each `together` steps; `unseen`, the loss after the last step
    on text that no step read; `snr`, of each weight's last gradient, in decibels; with FP8
    `saturated`, for each layer in how many steps x, w and the result's gradient went beyond the
    range; and of seed 0 `amaxes` of few layers, for x, w and the gradient. A harmed run has the
    loss of each step, and `lost`: the share of the watched layer's input that FP8 makes 0.
    """

    source: str
    steps: int
    tokens: int
    together: int
    sizes: Mapping[str, int]
    ways: Mapping[str, Sequence[Mapping[str, Any]]]
    harmed: Mapping[str, Mapping[str, Any]]

    def unseen(self, way: str) -> np.ndarray:
        """The loss on unseen text of each seed, in nats a letter. Raises KeyError for no way."""
        return np.array([run["unseen"] for run in self.ways[way]])

    def difference(self, way: str, base: str = "bf16") -> Difference:
        """By how much the loss on unseen text is higher than the other way's, in nats a letter."""
        return paired(self.unseen(way), self.unseen(base))

    def losses(self, way: str) -> np.ndarray:
        """The training loss, the mean of all seeds, for each `together` steps."""
        return np.mean([run["losses"] for run in self.ways[way]], axis=0)


def load_trained(folder: str | Path = "results") -> Trained:
    """What `make train` recorded. Raises ValueError for a file that is not as it was written."""
    path = Path(folder, "trained.json")
    data = json.loads(path.read_text())
    if data.get("digest") != digest(data):
        raise ValueError(f"{path} is not as it was recorded: `make train` records it again")
    runs = sum(map(len, data["ways"].values())) + len(data["harmed"])
    return Trained(
        f"{runs} runs of {data['steps']} steps, on {data['text']}, {data['system']}",
        *(data[name] for name in ("steps", "tokens", "together", "sizes", "ways", "harmed")),
    )
