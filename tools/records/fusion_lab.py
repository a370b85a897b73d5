"""What XLA makes of the programs of "Fusion lab": `make fusion-lab` compiles each for its chip and
records it, and goes on where it was stopped; `--check` compiles them again and compares.

The record is notebooks/results/fusion_lab.json.gz, which the explorer on the site reads too. It has
each text once: many programs become the same. `programs` has for each choice, in the order of
helpers.explorers.fusion_lab.choices, the numbers of its outcome, its code and its steps, which are
the kernels that do each line of the code.
"""

import argparse
import gzip
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.progress import track

from helpers.explorers import fusion_lab
from helpers.explorers.compiled import outcome
from helpers.explorers.fusion_lab import Choice
from helpers.records.results import digest
from tools.files import in_one_step
from tools.platforms import require_platform
from tools.records.data import ASSEMBLER, OF_JAX, ROOT, is_news, provenance, status

DATA = fusion_lab.RECORD
COMMAND = "make fusion-lab"
# a run that was stopped goes on with what is here
PARTS = ROOT / "_build" / f"fusion-lab-{jax.__version__}"
KEPT = 200  # programs after which JAX may forget what it traced
MOST_BYTES = 2_000_000  # a reader waits for the file
FIX = f"run `{COMMAND}`, look at what has changed, and commit {DATA.name}"


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


def packed(found: Iterable[tuple[Choice, dict[str, Any]]]) -> dict[str, Any]:
    """What became of choices, in their order, with each text once."""
    names = ("outcomes", "codes", "steps", "words", "reasons", "lines")
    table = {name: Table() for name in names}
    programs = []
    for choice, made in found:
        code = fusion_lab.program(choice).code.splitlines()
        words = [table["words"].number(line) for line in code]
        steps = made.pop("steps", [])
        if "error" not in made:
            made["reasons"] = [table["reasons"].number(reason) for reason in made["reasons"]]
            made["hlo"] = [table["lines"].number(line) for line in made["hlo"]]
        numbers = (("outcomes", made), ("codes", words), ("steps", steps))
        programs.append([table[name].number(value) for name, value in numbers])
    return {"programs": programs} | {name: table[name].values for name in names}


def kept_outcome(choice: Choice, folder: Path) -> dict[str, Any]:
    """What became of a choice: compiled, or as an earlier run that was stopped has kept it."""
    path = folder / f"{'_'.join(choice.values())}.json"
    if path.exists():
        return json.loads(path.read_text())
    made = outcome(choice)
    in_one_step(path, json.dumps(made))
    return made


def measured(folder: Path) -> dict[str, Any]:
    """All programs, compiled, with their provenance."""
    found = []
    for n, choice in enumerate(track([*fusion_lab.choices()], "Compiling programs")):
        found.append((choice, kept_outcome(choice, folder)))
        if n % KEPT == 0:
            jax.clear_caches()
    made = provenance(COMMAND, *OF_JAX, *ASSEMBLER) | packed(found)
    return made | {"digest": digest(made)}


def problems(choice: Choice, data: Mapping[str, Any]) -> list[str]:
    """Where what a choice compiles to is not what is recorded of it."""
    now = json.loads(json.dumps(outcome(choice)))
    then = fusion_lab.outcome(choice, data)
    label = ", ".join(choice.values())
    return [
        f"{label}: {field} was {then.get(field)}, is {now.get(field)}: {FIX}"
        for field in {**then, **now}
        if then.get(field) != now.get(field)
    ]


def written(data: Mapping[str, Any]) -> bytes:
    """The file's content: the same for the same data, whenever it is written."""
    return gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0)


def record() -> int:
    """Compile all, and write what is news."""
    require_platform()
    began = time.monotonic()
    now = measured(PARTS)
    content = written(now)
    programs, outcomes = len(now["programs"]), len(now["outcomes"])
    print(
        f"{programs} programs in {time.monotonic() - began:.0f} s, {outcomes} different, "
        f"{len(content) / 1e6:.2f} MB"
    )
    if len(content) > MOST_BYTES:
        print(f"a page may load {MOST_BYTES / 1e6:.0f} MB: record fewer programs", file=sys.stderr)
        return 1
    try:
        before: Mapping[str, Any] = fusion_lab.recorded(DATA)
    except ValueError:  # none yet, or it was altered
        before = {}
    if not before or is_news(before, now):
        in_one_step(DATA, content)
    shutil.rmtree(PARTS)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare, as the arguments say; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compile again, and compare")
    options = parser.parse_args(arguments)
    if not options.check:
        return record()
    try:
        data = fusion_lab.recorded()
    except ValueError as error:
        return status([str(error)], "")
    wrong = [one for choice in fusion_lab.choices() for one in problems(choice, data)]
    return status(wrong, f"what JAX {jax.__version__} compiles is what is recorded")


if __name__ == "__main__":
    sys.exit(main())
