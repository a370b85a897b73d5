"""What a run measures, in which order, and how long it takes: what is worth knowing first comes
first."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

STARTS = (
    20  # seconds that a run takes before its first stage: what GPU is it, and does CUPTI answer?
)


LOST = 75  # exit status of a stage: the GPU answers nothing any more in its process
OTHER = 76  # exit status of a stage: its process has not the GPU that the run is about


class Stage(NamedTuple):
    """Cases that one process measures: an estimate of its seconds, with its start, and how many it
    may take. None of them has been measured yet."""

    name: str
    seconds: float
    limit: float
    cases: Callable[..., Iterable[Any]]


def _cases(module: str, function: str, *args: Any) -> Callable[..., Iterable[Any]]:
    """Cases of a module that imports JAX, which the process that waits does not."""

    def made(gpu: Any) -> Iterable[Any]:
        import importlib

        return getattr(importlib.import_module(f"tools.gpu.{module}"), function)(gpu, *args)

    return made


STAGES = (
    Stage("first", 60, 110, _cases("matmuls", "first")),
    Stage("default", 60, 100, _cases("matmuls", "by_default")),
    Stage("fused", 40, 75, _cases("matmuls", "epilogues", 8192)),
    Stage("agreement", 60, 100, _cases("numerics", "agreement")),
    Stage("sums", 15, 45, _cases("numerics", "sums")),
    Stage("training", 65, 120, _cases("training", "steps")),
    Stage("kernels", 25, 70, _cases("kernels", "cases")),
    Stage("blocks", 15, 45, _cases("matmuls", "blocked")),
    Stage("load", 20, 50, _cases("matmuls", "under_load")),
    Stage("ladder", 105, 200, _cases("training", "rungs")),
    Stage("others", 40, 90, _cases("matmuls", "others")),
)
CLOCK = Stage("clock", 10, 60, _cases("stage", "probe"))
