"""How two ways to train differ, seed by seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95  # of such intervals this part contains the true mean


class Difference(NamedTuple):
    """The mean of the differences, and its interval: NaN of fewer than three seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if self.seeds < 3:
            return f"{self.mean:+.4f} (too few seeds: {self.seeds})"
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f}, {self.seeds} seeds)"


def paired(one: Sequence[float], other: Sequence[float]) -> Difference:
    """`one` minus `other`, of the seeds that both have: the first ones."""
    seeds = min(len(one), len(other))
    differences = np.subtract(one[:seeds], other[:seeds])
    interval = np.nan, np.nan
    if seeds > 2:
        interval = stats.ttest_1samp(differences, 0).confidence_interval(CONFIDENCE)
    return Difference(differences.mean(), *interval, seeds)
