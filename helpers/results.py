"""Results recorded on real GPUs, for the chapters to read: `make gpu` and `make train-bench` write them.

One file a part and GPU model, notebooks/results/<model>/<part>.json; schema.json there says what is in one.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.targets import Target, model

COMMANDS = {"agreement": "make gpu", "numerics": "make gpu", "speed": "make gpu", "notebooks": "make gpu",
            "autotune": "make gpu", "train": "make train-bench"}


@dataclasses.dataclass(frozen=True)
class Record:
    """One part, measured on one GPU. `cases` has what was measured by the case's name; `provenance` where and with
    what: device, driver, versions of CUDA, cuBLAS and JAX, date, commit, command."""

    part: str
    provenance: Mapping[str, Any]
    cases: Mapping[str, Mapping[str, Any]]

    @property
    def source(self) -> str:
        """A line for under a table: the device, what ran on it, and the command that made the figures."""
        p = self.provenance
        if p["rehearsal"]:
            return f"REHEARSAL on {p['device']}, JAX {p['jax']}: these are not measurements of a GPU"
        commit = p["commit"][:7] + " with changes" * p["changed"]
        return (f"{p['device']}, driver {p['driver']}, CUDA {p['cuda']}, cuBLAS {p['cublas']}, JAX {p['jax']}, "
                f"commit {commit}: `{p['command']}`")

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
            record = Record(data["part"], data["provenance"], data["cases"])
            assert record.part == part and record.source
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"{path} is no record of {part!r} ({error!r}): `{COMMANDS[part]}` writes one") from error
        found.append(record)
    return tuple(found)


def not_measured(part: str) -> str:
    """What a chapter prints in place of a table that nobody has measured yet."""
    return f"not measured yet (`{COMMANDS[part]}`)"
