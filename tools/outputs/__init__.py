"""The chapters' outputs: run, compared, rewritten.

`chapters` has the one list of chapters, `notebook` what a pair of files holds and how it is
written, `run` the one way to execute it, `comparison` and `rules` what must hold of it, `commands`
the command line.
"""

from tools.outputs.chapters import NOTEBOOKS, ROOT, Refused, find
from tools.outputs.commands import check, edited_side, main, refresh
from tools.outputs.comparison import compare
from tools.outputs.notebook import (
    METADATA,
    VOLATILE,
    describe,
    lookup,
    normalise,
    of_explorer,
    tags,
    text_of,
    twin_of,
)
from tools.outputs.rules import machine_traces, pair_problems, standing_problems, static_problems
from tools.outputs.run import Run, fresh_run, run_environment, why_not_compared

__all__ = [
    "METADATA",
    "NOTEBOOKS",
    "ROOT",
    "VOLATILE",
    "Refused",
    "Run",
    "check",
    "compare",
    "describe",
    "edited_side",
    "find",
    "fresh_run",
    "lookup",
    "machine_traces",
    "main",
    "normalise",
    "of_explorer",
    "pair_problems",
    "refresh",
    "run_environment",
    "standing_problems",
    "static_problems",
    "tags",
    "text_of",
    "twin_of",
    "why_not_compared",
]
