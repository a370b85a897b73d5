"""What XLA makes of the programs of "Fusion lab": `make fusion-lab` compiles each for its chip and
records it. Each JAX release compiles its own, in an environment of its own.

The record is notebooks/results/fusion_lab.json.gz, which the explorer on the site reads too. It has
each text once: many programs become the same. `programs` has for each choice, in the order of
helpers.explorers.fusion_lab.choices, the numbers of its outcome, its code and its steps, which are
the kernels that do each line of the code.
"""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from helpers.explorers import fusion_lab
from helpers.explorers.compiled import outcome
from helpers.explorers.fusion_lab import Choice
from tools.recorders.data import Record, is_news, provenance, signed

KEPT = 200  # programs after which JAX may forget what it traced
MOST_BYTES = 2_000_000  # a reader waits for the file

Outcome = dict[str, Any]


class Table:
    """Each value once, by its number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        """A value's number; it is added if it is new."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def packed(found: Iterable[tuple[Choice, Outcome]]) -> dict[str, Any]:
    """What became of choices, in their order, with each text once."""
    names = ("outcomes", "codes", "steps", "words", "reasons", "lines")
    table = {name: Table() for name in names}
    programs = []
    for choice, made in found:
        code = fusion_lab.program(choice).code.splitlines()
        words = [table["words"].number(line) for line in code]
        made = dict(made)
        steps = made.pop("steps", [])
        if "error" not in made:
            made["reasons"] = [table["reasons"].number(reason) for reason in made["reasons"]]
            made["hlo"] = [table["lines"].number(line) for line in made["hlo"]]
        numbers = (("outcomes", made), ("codes", words), ("steps", steps))
        programs.append([table[name].number(value) for name, value in numbers])
    return {"programs": programs} | {name: table[name].values for name in names}


# The record -------------------------------------------------------------------------------------


def named(choices: Iterable[Choice]) -> dict[str, Choice]:
    """Choices by the names of their rows."""
    return {" | ".join(choice.values()): choice for choice in choices}


def of_release(release: str) -> dict[str, Choice]:
    """The choices that a release of JAX compiles, by name."""
    return named(choice for choice in fusion_lab.choices() if choice["release"] == release)


def rows(names: Sequence[str]) -> dict[str, Outcome]:
    """What the installed JAX, which is the release of all of them, makes of these choices."""
    choices = of_release(jax.__version__)
    found: dict[str, Outcome] = {}
    for name in names:
        if len(found) % KEPT == 0:
            print(f"JAX {jax.__version__}: {len(found)} programs", flush=True)
            jax.clear_caches()
        found[name] = outcome(choices[name])
    return found


def written(data: Mapping[str, Any]) -> bytes:
    """The file's content: the same for the same data, whenever it is written."""
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0)


class LabRecord(Record):
    """A record of releases in the form that the explorer reads."""

    @property
    def path(self) -> Path:  # noqa: D102 - as that of every record
        return fusion_lab.RECORD

    def read(self) -> dict[str, Any]:  # noqa: D102
        data = fusion_lab.recorded(self.path)
        return {
            release: {
                "packages": packages,
                "rows": {
                    name: fusion_lab.outcome(choice, data)
                    for name, choice in of_release(release).items()
                },
            }
            for release, packages in data["releases"].items()
        }

    def write(self, releases: Mapping[str, Any]) -> None:
        """Write the file, if it is news. SystemExit for one that is too large for a page."""
        made = provenance("make fusion-lab")
        del made["packages"]  # each release has its own
        made["releases"] = {release: entry["packages"] for release, entry in releases.items()}
        outcomes = {name: row for entry in releases.values() for name, row in entry["rows"].items()}
        choices = named(fusion_lab.choices())
        made = signed(made | packed((choices[name], outcomes[name]) for name in choices))
        content = written(made)
        if len(content) > MOST_BYTES:
            raise SystemExit(f"a page may load {MOST_BYTES / 1e6:.0f} MB: record fewer programs")
        if is_news(fusion_lab.recorded(self.path), made):
            self.path.write_bytes(content)
            fusion_lab.recorded.cache_clear()  # the next release reads what was written


RECORD = LabRecord(
    name="fusion-lab",
    module="tools.recorders.lab_programs",
    about="What XLA makes of the programs of the fusion lab.",
    releases=fusion_lab.RELEASES,
    names=lambda release: [*of_release(release)],
    rows=rows,
)

if __name__ == "__main__":
    RECORD.main()
