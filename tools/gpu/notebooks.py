"""Do the chapters run on the GPU? Each under nbmake, several at once: outputs are not compared,
assertions are."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import Case, clean

from tools import outputs

AT_ONCE = max(1, min(8, (os.cpu_count() or 2) // 2))


class Runs:
    """Chapters in threads: the first that is asked for starts itself and all after it."""

    def __init__(self, paths: list[Path]):
        self.paths, self.started = paths, dict[str, Future]()

    def result(self, path: Path, case: Case) -> dict[str, Any]:
        """Whether a chapter passed, and what was said where it did not."""
        if path.stem not in self.started:
            pool = ThreadPoolExecutor(AT_ONCE)
            for later in self.paths[self.paths.index(path) :]:
                self.started[later.stem] = pool.submit(outputs.fresh_run, [later])
        run = self.started[path.stem].result()[path.stem]
        cells = sum(cell.cell_type == "code" for cell in run.notebook.cells)
        said = {} if run.failure is None else {"failure": clean(run.failure)}
        return {
            "passed": run.failure is None,
            "code_cells": cells,
            "seconds": round(run.seconds, 1),
            **said,
        }


def cases(rehearse: bool) -> dict[str, Callable[[Case], dict[str, Any]]]:
    """A case a chapter; a rehearsal takes one."""
    paths = outputs.find(["01"] if rehearse else [], outputs.NOTEBOOKS)
    runs = Runs(paths)
    return {path.stem: functools.partial(runs.result, path) for path in paths}
