"""What is slow and rarely fails is tried once a week, with NIGHTLY=1, and in part in each run."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

NIGHTLY = os.environ.get("NIGHTLY") == "1"
weekly = pytest.mark.skipif(not NIGHTLY, reason="slow, and rarely fails: NIGHTLY=1 tries it")


def one_in(count: int, everything: Iterable[Any]) -> list[Any]:
    """Every so many; with NIGHTLY=1, all."""
    return [*everything][:: 1 if NIGHTLY else count]
