"""What XLA makes of the programs of "Fusion lab": `make fusion-lab` compiles each for its chip and
records it; `--check` compiles them again and compares. Each JAX release compiles its own, in an
environment of its own.

The record is notebooks/results/fusion_lab.json.gz, which the explorer on the site reads too. It has
each text once: many programs become the same. `programs` has for each choice, in the order of
helpers.explorers.fusion_lab.choices, the numbers of its outcome, its code and its steps, which are
the kernels that do each line of the code.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
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
    environment,
    is_news,
    provenance,
    run_with,
)

DATA = fusion_lab.RECORD
COMMAND = "make fusion-lab"
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


def compile_own(release: str, path: Path) -> None:
    """Compile the programs of a release, which is the installed JAX, and write what became of them,
    in their order, with the packages that compiled them.
    """
    made: list[Outcome] = []
    for choice in of_release(release):
        if len(made) % KEPT == 0:
            print(f"JAX {release}: {len(made)} programs", flush=True)
            jax.clear_caches()
        made.append(outcome(choice))
    packages = provenance(COMMAND, *OF_JAX, *ASSEMBLER)["packages"]
    path.write_text(json.dumps({"packages": packages, "outcomes": made}))


def of_release(release: str) -> list[Choice]:
    """The choices that a release of JAX compiles."""
    return [choice for choice in fusion_lab.choices() if choice["release"] == release]


def compiled_by(release: str) -> dict[str, Any]:
    """What a release makes of its programs, compiled in a process of its environment. SystemExit
    where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "made.json")
        if release == jax.__version__:
            compile_own(release, path)
        else:
            run_with(
                release, environment(release), "tools.recorders.lab_programs", "--into", str(path)
            )
        return json.loads(path.read_text())


def measured() -> dict[str, Any]:
    """All programs, compiled, with their provenance."""
    found: dict[tuple[str, ...], Outcome] = {}
    packages = {}
    for release in fusion_lab.RELEASES:
        made = compiled_by(release)
        packages[release] = made["packages"]
        choices = (tuple(choice.values()) for choice in of_release(release))
        found |= dict(zip(choices, made["outcomes"], strict=True))
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
    data = fusion_lab.recorded()
    found = []
    for release in releases:
        now = compiled_by(release)["outcomes"]
        for choice, one in zip(of_release(release), now, strict=True):
            found += problems(choice, data, one)
    return found


def record() -> int:
    """Compile all, and write what is news."""
    now = measured()
    content = written(now)
    if len(content) > MOST_BYTES:
        print(f"a page may load {MOST_BYTES / 1e6:.0f} MB: record fewer programs", file=sys.stderr)
        return 1
    if not DATA.exists() or is_news(fusion_lab.recorded(DATA), now):
        in_one_step(DATA, content)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Record, or compare, as the arguments say; the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compile again, and compare")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # in each environment
    options = parser.parse_args(arguments)
    if options.into:
        compile_own(jax.__version__, options.into)
        return 0
    if options.check:
        found = check()
        print("\n".join(found) or "what is compiled is what is recorded")
        return int(bool(found))
    return record()


if __name__ == "__main__":
    sys.exit(main())
