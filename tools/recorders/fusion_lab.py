"""What XLA makes of the programs of "Fusion lab": `make fusion-lab` compiles each for its chip and
records it, and goes on where it was stopped; `--check` compiles them again and compares. Each JAX
release compiles its own, in an environment of its own.

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
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from helpers.explorers import fusion_lab
from helpers.explorers.compiled import outcome
from helpers.explorers.fusion_lab import Choice
from helpers.records.results import digest
from tools.files import in_one_step
from tools.recorders.data import (
    ASSEMBLER,
    OF_JAX,
    ROOT,
    environment,
    is_news,
    provenance,
    run_with,
)

DATA = fusion_lab.RECORD
COMMAND = "make fusion-lab"
# a run that was stopped goes on with what is here
PARTS = ROOT / "_build" / "fusion-lab"
KEPT = 200  # programs after which JAX may forget what it traced
MOST_BYTES = 2_000_000  # a reader waits for the file
FIX = f"run `{COMMAND}`, look at what has changed, and commit {DATA.name}"

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
        steps = made.pop("steps", [])
        if "error" not in made:
            made["reasons"] = [table["reasons"].number(reason) for reason in made["reasons"]]
            made["hlo"] = [table["lines"].number(line) for line in made["hlo"]]
        numbers = (("outcomes", made), ("codes", words), ("steps", steps))
        programs.append([table[name].number(value) for name, value in numbers])
    return {"programs": programs} | {name: table[name].values for name in names}


# Compiling ----------------------------------------------------------------------------------------


def part(choice: Choice, folder: Path) -> Path:
    """The file that keeps what became of a choice."""
    return folder / f"{'_'.join(choice.values())}.json"


def compile_own(folder: Path) -> None:
    """Compile the programs of the installed JAX, but for those that an earlier run has kept, and
    keep with them which packages compiled them.
    """
    release = jax.__version__
    missing = [
        choice
        for choice in fusion_lab.choices()
        if choice["release"] == release and not part(choice, folder).exists()
    ]
    for n, choice in enumerate(missing):
        in_one_step(part(choice, folder), json.dumps(outcome(choice)))
        if n % KEPT == 0:
            print(f"JAX {release}: {n} of {len(missing)} programs", flush=True)
            jax.clear_caches()
    packages = provenance(COMMAND, *OF_JAX, *ASSEMBLER)["packages"]
    in_one_step(folder / f"{release}.json", json.dumps(packages))


def compile_with(release: str, folder: Path) -> None:
    """Compile a release's programs in a process of its environment. SystemExit where it fails."""
    if release == jax.__version__:
        compile_own(folder)
        return
    run_with(release, environment(release), "tools.recorders.fusion_lab", "--into", str(folder))


def outcomes(release: str, folder: Path) -> Iterator[tuple[Choice, Outcome]]:
    """A release's choices, and what was kept of each."""
    for choice in fusion_lab.choices():
        if choice["release"] == release:
            yield choice, json.loads(part(choice, folder).read_text())


def measured(folder: Path) -> dict[str, Any]:
    """All programs, compiled, with their provenance."""
    found: dict[tuple[str, ...], Outcome] = {}
    packages = {}
    for release in fusion_lab.RELEASES:
        compile_with(release, folder)
        packages[release] = json.loads((folder / f"{release}.json").read_text())
        found |= {tuple(choice.values()): made for choice, made in outcomes(release, folder)}
    in_order = ((choice, found[tuple(choice.values())]) for choice in fusion_lab.choices())
    made = provenance(COMMAND)
    del made["packages"]  # each release has its own
    made |= {"releases": packages} | packed(in_order)
    return made | {"digest": digest(made)}


def problems(choice: Choice, data: Mapping[str, Any], now: Outcome) -> list[str]:
    """Where what a choice compiles to now is not what is recorded of it."""
    now = json.loads(json.dumps(now))
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


def check(releases: Iterable[str] = fusion_lab.RELEASES) -> list[str]:
    """Problems: where what these releases make of their programs is not what is recorded."""
    try:
        data = fusion_lab.recorded()
    except ValueError as error:
        return [str(error)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for release in releases:
            compile_with(release, Path(folder))
            for choice, now in outcomes(release, Path(folder)):
                found += problems(choice, data, now)
    return found


def record() -> int:
    """Compile all, and write what is news."""
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
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # in each environment
    options = parser.parse_args(arguments)
    if options.into:
        compile_own(options.into)
        return 0
    if options.check:
        found = check()
        print("\n".join(found) or "what is compiled is what is recorded")
        return int(bool(found))
    return record()


if __name__ == "__main__":
    sys.exit(main())
