"""Results recorded on real GPUs, for the chapters to read: `make gpu` and `make train-bench` write them.

One file a part and GPU model, notebooks/results/<model>/<part>.json; schema.json there says what is in one. Beside it
goals.json has what they are held against, for each chip.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8lens.targets import Target, model

COMMANDS = {"agreement": "make gpu", "numerics": "make gpu", "speed": "make gpu", "notebooks": "make gpu",
            "autotune": "make gpu", "train": "make train-bench"}


@dataclasses.dataclass(frozen=True)
class Record:
    """One part, measured on one model of GPU. `cases` has what was measured by the case's name, each with the number
    of its run; `runs` where and with what: device, driver, versions of CUDA, cuBLAS and JAX, date, commit, command."""

    part: str
    runs: tuple[Mapping[str, Any], ...]
    cases: Mapping[str, Mapping[str, Any]]

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Of the newest run."""
        return self.runs[-1]

    @property
    def source(self) -> str:
        """A line for under a table: the device, what ran on it, and the command that made the figures."""
        p = self.provenance
        if p["rehearsal"]:
            return f"REHEARSAL on {p['device']}, JAX {p['jax']}: these are not measurements of a GPU"
        changed = {True: " with changes", False: "", None: ", not compared"}
        lines = dict.fromkeys(
            f"driver {run['driver']}, CUDA {run['cuda']}, cuBLAS {run['cublas']}, JAX {run['jax']}, "
            f"commit {run['commit'][:7]}{changed[run['changed']]}" for run in reversed(self.runs))
        return f"{p['device']}, {'; some cases with '.join(lines)}: `{p['command']}`"

    @property
    def chip(self) -> Target | None:
        """The GPU's model with its peak rates, None where it is none of `TARGETS` (a rehearsal)."""
        return model(self.provenance["device"])

    @property
    def choices(self) -> str:
        """Of a record of "autotune": all that XLA chose, for `aot_compile(..., gemm="auto", autotune=...)`."""
        return "version: 3\n" + "".join(case.get("choices", "") for case in self.cases.values())


def load(part: str, folder: str | Path = "results") -> tuple[Record, ...]:
    """What has been recorded of a part ("agreement", "numerics", "speed", "notebooks", "autotune" or "train"), a
    Record for each GPU model; none where nothing has. `folder` is where the models' folders are; the environment
    variable FP8_RESULTS, where set, has precedence, so that a chapter can be read with other results.

    Raises ValueError for an unknown part and for a file that is not a record of it.
    """
    if part not in COMMANDS:
        raise ValueError(f"no part {part!r}; parts are {', '.join(COMMANDS)}")
    found = []
    for path in sorted(Path(os.environ.get("FP8_RESULTS") or folder).glob(f"*/{part}.json")):
        try:
            data = json.loads(path.read_text())
            record = Record(data["part"], tuple(data["runs"]), data["cases"])
            assert record.part == part and record.source
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            raise ValueError(f"{path} is no record of {part!r} ({error!r}): `{COMMANDS[part]}` writes one") from error
        found.append(record)
    return tuple(found)


def not_measured(part: str) -> str:
    """What a chapter prints in place of a table that nobody has measured yet."""
    return f"not measured yet (`{COMMANDS[part]}`)"


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a ratio of two times of one case should be: `over` divided by `of` at `least`, or `of` divided by `over` at
    `most`, for each chip by its name in `TARGETS`. `roofline` is the ratio of the two programs' rooflines."""

    name: str
    part: str
    case: str
    of: str
    over: str
    clock: str
    roofline: Mapping[str, float]
    least: Mapping[str, float] | None = None
    most: Mapping[str, float] | None = None

    def ratio(self, record: Record) -> tuple[float, str] | None:
        """Of the times recorded, and the clock: this goal's, or the host's where the other saw nothing. None where one
        of the times is not recorded."""
        case = record.cases.get(self.case, {})
        rows = case.get("forms") or case.get("precisions") or {}
        for clock in (self.clock, "wall_seconds"):
            of, over = (rows.get(form, {}).get(clock) for form in (self.of, self.over))
            if of and over:
                return (over / of if self.least else of / over), clock
        return None

    def verdict(self, record: Record | None) -> str:
        """The goal for a record's chip, and what was measured; without a record that of each chip."""
        wanted, chip = self.least or self.most, record and record.chip
        names = [chip.name] if chip and chip.name in wanted else list(wanted)
        said = ", ".join(f"{wanted[name]:g} on an {name} (roofline {self.roofline[name]:.3g})" for name in names)
        line = f"{self.name}: wanted at {'least' if self.least else 'most'} {said}; "
        if record is None or (found := self.ratio(record)) is None:
            return line + "not measured"
        ratio, clock = found
        line += f"{ratio:.3f}, "
        rows = record.cases[self.case].get("precisions", {})
        if len({rows[form].get("attention") for form in (self.of, self.over) if form in rows}) > 1:
            line += "of two kinds of attention, "
        if len(names) == 1:
            line += "reached" if (ratio >= wanted[names[0]] if self.least else ratio <= wanted[names[0]]) else "MISSED"
        else:
            line += f"on {record.provenance['device']}"
        return line + (", by the host's clock" if clock != self.clock else "")


def goals(part: str, case: str | None = None, folder: str | Path = "results") -> tuple[Goal, ...]:
    """The goals about a part, or about one case of it, from goals.json."""
    found = (Goal(**goal) for goal in json.loads(Path(folder, "goals.json").read_text())["goals"])
    return tuple(goal for goal in found if goal.part == part and case in (None, goal.case))
