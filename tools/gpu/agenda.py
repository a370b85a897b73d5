"""What a run measures, in which order, and how long it takes: what is worth knowing first comes
first. Nothing here imports JAX, so that the process that waits for the stages needs none.
"""

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

LOST = 75  # exit status of a stage: the GPU answers nothing any more in its process
OTHER = 76  # exit status of a stage: its process does not have the GPU that the run is about


class Stage(NamedTuple):
    """Cases that one process measures: `function` of a module of tools.gpu yields them. `seconds`
    is what it took on an H200 beside 16 cores of a CPU, with the start of the process."""

    name: str
    seconds: float
    module: str
    function: str

    @property
    def limit(self) -> float:
        """How many seconds it may take."""
        return 1.5 * self.seconds + 20

    def cases(self, gpu: Any) -> Iterable[Any]:
        """What it measures."""
        return getattr(importlib.import_module(f"tools.gpu.{self.module}"), self.function)(gpu)


class Task(NamedTuple):
    """What a stage's process is told. "start" is the stage that finds out about the device."""

    stage: str
    until: float
    scratch: str
    rehearse: str | None = None
    device: str = ""
    folder: str = ""
    run: int = 0
    cupti: bool = False


STAGES = (
    Stage("first", 35, "matmuls", "first"),
    Stage("default", 65, "matmuls", "by_default"),
    Stage("fused", 25, "matmuls", "epilogues"),
    Stage("agreement", 40, "numerics", "agreement"),
    Stage("sums", 20, "numerics", "sums"),
    Stage("training", 35, "training", "steps"),
    Stage("kernels", 20, "course_kernels", "cases"),
    Stage("blocks", 15, "matmuls", "blocked"),
    Stage("inference", 130, "inference", "forms"),
    Stage("ladder", 215, "training", "rungs"),
    Stage("others", 25, "matmuls", "others"),
)
# Forms that crash and hang: a rehearsal has this stage too.
MISHAPS = Stage("mishaps", 90, "rehearsal", "mishaps")
