"""Keep the chapters' outputs true: `check` compares them with a fresh run, `refresh` rewrites
them.
"""

import argparse
import base64
import difflib
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from helpers.figures.plots import NARROW
from tools.outputs import prose
from tools.outputs.chapters import NOTEBOOKS, ROOT, Refused, find, with_contents
from tools.outputs.comparison import compare
from tools.outputs.notebook import code_cells, describe, said, text_of, written
from tools.outputs.run import AT_ONCE, failure, run, why_not_compared

SIDES = ("md", "ipynb")
README = ROOT / "README.md"
# One picture: drawn, for the README, in its wide and its narrow form, and in pixels, for where
# somebody shares a link.
DRAWN, PIXELS = ROOT / "img" / "one_call.svg", ROOT / "img" / "one_call.png"
DRAWN_NARROW = ROOT / "img" / "one_call_narrow.svg"
# What tells of the machine that an output was made on, or of the day.
OF_A_MACHINE = re.compile(
    r"(?<![\w.:/\\<-])/(?:home|root|tmp|usr|opt|var|mnt|srv|work|private|Users)/[\w.-]+"
    r"|\b[A-Z]:\\\w+"
    r"|\b20\d\d-[01]\d-[0-3]\d"
    r"|\b[0-2]\d:[0-5]\d:[0-5]\d\b"
    r"|\b0x[0-9a-f]{8,}\b"
)


# Checking -----------------------------------------------------------------------------------------


def check(paths: list[Path]) -> dict[str, list[str]]:
    """The problems of each chapter: of its files, and where a fresh run prints another output.

    Under other versions the chapters are run, and nothing is compared: those may write another
    text.
    """
    committed = {path.stem: nbformat.read(path, 4) for path in paths}
    fresh = run({path.stem: nbformat.read(path, 4) for path in paths})
    compared = why_not_compared() is None
    problems: dict[str, list[str]] = {}
    for path in paths:
        notebook, new = committed[path.stem], fresh[path.stem]
        found = prose.problems(notebook) + machine_problems(notebook)
        if failed := failure(new):
            found.append(failed)
        elif compared:
            found += pair_problems(path) + compare(notebook, new)
        problems[path.stem] = found
    return problems


def machine_problems(notebook: NotebookNode) -> list[str]:
    """Outputs that tell of the machine they were made on."""
    problems = []
    for number, cell in code_cells(notebook):
        for output in cell.outputs:
            pieces = [output.get("text", ""), *output.get("data", {}).values()]
            for found in OF_A_MACHINE.findall("\n".join(map(text_of, pieces))):
                problems.append(f"{describe(number, cell)}: its output holds {found}")
    return problems


def pair_problems(path: Path) -> list[str]:
    """Where a pair's files are not, to the byte, what `make refresh` writes from the .ipynb."""
    problems = []
    for end, text in written(nbformat.read(path, 4)).items():
        half = path.with_suffix(end)
        old = half.read_text(encoding="utf-8") if half.exists() else ""
        if old != text:
            lines = difflib.unified_diff(
                old.splitlines(), text.splitlines(), "committed", "wanted", n=1, lineterm=""
            )
            shown = "\n".join(itertools.islice(lines, 20))
            problems.append(f"{half.name} is not what `make refresh` writes:\n{shown}")
    return problems


# Refreshing ---------------------------------------------------------------------------------------


def edited_side(path: Path) -> str:
    """Return "md" or "ipynb", the half of a pair to take: the one there is; the one that differs
    from git's last commit; the one saved last, if both do or the pair is new.
    """
    halves = {side: path.with_suffix(f".{side}") for side in SIDES}
    present = {side: said(jupytext.read(half)) for side, half in halves.items() if half.exists()}
    if len(present) == 1:
        return next(iter(present))
    if present["md"] == present["ipynb"]:
        return "md"
    changed = [side for side in SIDES if present[side] != _committed(halves[side])]
    if not changed:
        raise Refused(
            f"{path.stem}: the committed .ipynb and .md differ: say which to take, FROM=md or "
            f"FROM=ipynb"
        )
    return max(changed, key=lambda side: halves[side].stat().st_mtime)


def _committed(path: Path) -> list[tuple] | None:
    """What the last commit has in a half; None without git, a repository, or the half in it."""
    show = ["git", "show", f"HEAD:./{path.name}"]
    try:
        shown = subprocess.run(show, cwd=path.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said(jupytext.reads(shown.stdout, fmt=path.suffix[1:]))


def refresh(paths: list[Path], side: str | None = None) -> None:
    """Run chapters and write both halves of their pairs, from the half named or edited.

    Raises Refused where one fails: its pair stays as it was, as do those of the chapters after it.
    """
    sides = {path: side or edited_side(path) for path in paths}
    # A few at a time, so that what was done before an interruption is kept.
    for batch in itertools.batched(paths, AT_ONCE):
        fresh = run(
            {path.stem: jupytext.read(path.with_suffix(f".{sides[path]}")) for path in batch}
        )
        for path in batch:
            if failed := failure(fresh[path.stem]):
                raise Refused(f"{path.stem} stays as it was: {failed}")
            print(f"{path.stem}: from the .{sides[path]}")
            keep_the_other(path, sides[path])
            for end, text in written(fresh[path.stem]).items():
                path.with_suffix(end).write_text(text, encoding="utf-8")


def keep_the_other(path: Path, side: str) -> None:
    """Copy the half that is not taken to _build/replaced/, where nobody else has what it says."""
    other = path.with_suffix({"md": ".ipynb", "ipynb": ".md"}[side])
    if not other.exists():
        return
    others = said(jupytext.read(other))
    if others not in (said(jupytext.read(path.with_suffix(f".{side}"))), _committed(other)):
        kept = ROOT / "_build" / "replaced" / other.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(other, kept)
        print(f"{other.name} says something else: it is kept in {kept.relative_to(ROOT)}")


# What the README has of the chapters --------------------------------------------------------------


def readme_wanted() -> dict[Path, bytes]:
    """The README with its tables of chapters, and its picture, an output of chapter 06, as they
    should be.
    """
    readme = with_contents(README.read_text(encoding="utf-8"))
    chapter = nbformat.read(NOTEBOOKS / "06_bias_matmul.ipynb", 4)
    shown = [output.get("data", {}) for _, cell in code_cells(chapter) for output in cell.outputs]
    (picture,) = (
        data for data in shown if text_of(data.get("text/plain", "")).startswith("Megabytes moved")
    )
    return {
        README: readme.encode(),
        DRAWN: f"{text_of(picture['image/svg+xml'])}\n".encode(),
        DRAWN_NARROW: f"{text_of(picture[NARROW])}\n".encode(),
        PIXELS: base64.b64decode(picture["image/png"]),
    }


# The command line ---------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Carry out `check` or `refresh`: 0 where all is well, 1 for problems, 2 where it cannot be
    carried out.
    """
    parser = argparse.ArgumentParser(prog="tools.outputs", description=__doc__)
    parser.add_argument("command", choices=["check", "refresh"])
    parser.add_argument("chapters", nargs="*", help="beginnings of names, such as 03; all without")
    parser.add_argument("--from", dest="side", choices=SIDES, help="the half to take")
    options = parser.parse_intermixed_args(arguments)
    try:
        paths = find(options.chapters)
        return (
            _check_all(paths) if options.command == "check" else _refresh_all(paths, options.side)
        )
    except Refused as reason:
        print(reason, file=sys.stderr)
        return 2


def _check_all(paths: list[Path]) -> int:
    problems = check(paths)
    for name, found in problems.items():
        print(f"{name}: {'no problems' if not found else ''}")
        print("".join(f"  {problem}\n" for problem in found), end="")
    if reason := why_not_compared():
        print(f"no outputs were compared: {reason}")
    return int(any(problems.values()))


def _refresh_all(paths: list[Path], side: str | None) -> int:
    if reason := why_not_compared():
        raise Refused(f"outputs refreshed here would differ from everybody else's: {reason}")
    refresh(paths, side)
    for path, content in readme_wanted().items():
        path.write_bytes(content)
    return 0
