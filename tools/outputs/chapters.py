"""The one list of chapters: myst.yml's table of contents.

The site, the checks of outputs and prose, the README's table and the tests take their chapters from
it. A new chapter is a pair of files and one line there.
"""

import dataclasses
import functools
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"
CONTENTS = ROOT / "myst.yml"


class Refused(Exception):
    """The command cannot be carried out; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the course: its title and the names of its chapters, such as "03_scaled_matmul"."""

    title: str
    chapters: tuple[str, ...]


@functools.cache
def parts() -> tuple[Part, ...]:
    """The parts that have chapters, in the order of the contents."""
    entries = yaml.safe_load(CONTENTS.read_text(encoding="utf-8"))["project"]["toc"]
    found = []
    for entry in entries:
        pages = [Path(page["file"]) for page in entry.get("children", [])]
        chapters = (page for page in pages if page.match("notebooks/*.ipynb"))
        names = tuple(page.stem for page in chapters)
        if names:
            found.append(Part(entry["title"], names))
    return tuple(found)


def names() -> list[str]:
    """The names of all chapters, in the order of the contents."""
    return [name for part in parts() for name in part.chapters]


def path_names() -> tuple[str, ...]:
    """The names of the chapters of the path, which is the first part."""
    return parts()[0].chapters


def find(beginnings: list[str], folder: Path = NOTEBOOKS) -> list[Path]:
    """The chapters in a folder whose names begin with one of `beginnings`; all of them for none.

    Each is given by its .ipynb, which need not be there yet. Raises Refused where no chapter begins
    so, and where one is not in the contents.
    """
    halves = [*folder.glob("[0-9A-Z]*_*.ipynb"), *folder.glob("[0-9A-Z]*_*.md")]
    chapters = sorted({half.with_suffix(".ipynb") for half in halves})
    for beginning in beginnings:
        if not any(path.stem.startswith(beginning) for path in chapters):
            known = ", ".join(path.stem for path in chapters)
            raise Refused(f"no chapter begins with {beginning!r}; there are {known}")
    if folder == NOTEBOOKS:
        for path in chapters:
            if path.stem not in names():
                line = f"- file: notebooks/{path.name}"
                raise Refused(f"{path.stem} is not in the contents: add `{line}` to myst.yml")
    return [path for path in chapters if not beginnings or path.stem.startswith(tuple(beginnings))]


# The README's tables ------------------------------------------------------------------------------

HEAD = "| chapter | minutes | with the puzzles | what you'll learn |\n|---|---|---|---|\n"


def _opening(name: str) -> tuple[str, str, str, str]:
    """A chapter's title, its minutes ("reference" where it states none), its minutes with the
    puzzles, and what is learnt, from its opening table.
    """
    text = (NOTEBOOKS / f"{name}.md").read_text(encoding="utf-8")

    def cell(row: str) -> str:
        found = re.search(rf"^\| \*\*{row}\*\* \| (.*?) \|$", text, re.M)
        return found[1] if found else ""

    title = re.search(r"^# (\S+) · (.*)$", text, re.M)
    learn = cell("What you'll learn")
    if not title or not learn:
        raise Refused(
            f"{name}.md does not open as a chapter does: it needs a title such as "
            f"`# 13 · Train a model` and a table with the rows What you'll do, What you'll learn, "
            f"What you'll need, and Time or Kind"
        )
    time = re.fullmatch(r"(\d+) minutes, (\d+) with the puzzles", cell("Time"))
    if cell("Time") and not time:
        raise Refused(
            f"{name}.md states its Time as {cell('Time')!r}: "
            f"write it as `<N> minutes, <M> with the puzzles`, as "
            f"`python tools/outputs/minutes.py` counts them"
        )
    minutes, with_puzzles = time.groups() if time else ("reference", "")
    learned = re.sub(r"\]\((?!http)", "](notebooks/", learn)
    return f"{title[1]} {title[2]}", minutes, with_puzzles, learned


def with_contents(readme: str) -> str:
    """The README's text with its two tables of chapters made anew: the path, then all other
    chapters.

    Raises Refused where the text has not two such tables.
    """
    pieces = re.split(rf"^{re.escape(HEAD)}(?:\|.*\n)*", readme, flags=re.M)
    if len(pieces) != 3:
        raise Refused(f"README.md needs two tables that begin with `{HEAD.splitlines()[0]}`")
    later = [name for part in parts()[1:] for name in part.chapters]
    return pieces[0] + _table(path_names()) + pieces[1] + _table(later) + pieces[2]


def _table(chapters) -> str:
    rows = []
    for name in chapters:
        title, minutes, with_puzzles, learned = _opening(name)
        link = f"[{title}](notebooks/{name}.ipynb)"
        rows.append(f"| {link} | {minutes} | {with_puzzles} | {learned} |\n")
    return HEAD + "".join(rows)
