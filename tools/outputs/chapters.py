"""The one list of chapters: myst.yml's table of contents.

The site, the checks of outputs and prose, the README's tables and the tests take their chapters
from it. A new chapter is a pair of files and one line there.
"""

import functools
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"


class Refused(Exception):
    """The command cannot be carried out; the message says why and what to do."""


@functools.cache
def parts() -> list[list[str]]:
    """The names of each part's chapters, such as "03_scaled_matmul", in the order of the
    contents.
    """
    contents = yaml.safe_load((ROOT / "myst.yml").read_text(encoding="utf-8"))["project"]["toc"]
    found = []
    for part in contents:
        pages = [Path(page["file"]) for page in part.get("children", [])]
        found.append([page.stem for page in pages if page.match("notebooks/*.ipynb")])
    return [chapters for chapters in found if chapters]


def names() -> list[str]:
    """The names of all chapters."""
    return [name for part in parts() for name in part]


def path_names() -> list[str]:
    """The names of the chapters of the path, which is the first part."""
    return parts()[0]


def find(beginnings: list[str]) -> list[Path]:
    """The .ipynb of each chapter whose name begins with one of these; of all chapters for none."""
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names()):
            raise Refused(f"no chapter in myst.yml begins with {beginning!r}: {', '.join(names())}")
    wanted = tuple(beginnings) or ("",)
    return [NOTEBOOKS / f"{name}.ipynb" for name in names() if name.startswith(wanted)]


# The README's tables ------------------------------------------------------------------------------

HEAD = "| chapter | minutes | with the puzzles | what you'll learn |\n|---|---|---|---|\n"
TIME = re.compile(r"^\| \*\*Time\*\* \| (\d+) minutes, (\d+) with the puzzles \|$", re.M)


def _row(name: str) -> str:
    """A chapter's row in a table, from its title and its opening table."""
    text = (NOTEBOOKS / f"{name}.md").read_text(encoding="utf-8")
    title = re.search(r"^# (\S+) · (.*)$", text, re.M)
    learn = re.search(r"^\| \*\*What you'll learn\*\* \| (.*?) \|$", text, re.M)
    if not title or not learn:
        raise Refused(
            f"{name}.md needs a title such as `# 14 · Train a model`, and below it a table with a "
            f"row What you'll learn"
        )
    time = TIME.search(text)
    minutes, with_puzzles = time.groups() if time else ("reference", "")
    learned = re.sub(r"\]\((?!http)", "](notebooks/", learn[1])
    link = f"[{title[1]} {title[2]}](notebooks/{name}.ipynb)"
    return f"| {link} | {minutes} | {with_puzzles} | {learned} |\n"


def with_contents(readme: str) -> str:
    """The README's text with its two tables of chapters made anew: the path, then all others."""
    pieces = re.split(rf"^{re.escape(HEAD)}(?:\|.*\n)*", readme, flags=re.M)
    path, *others = parts()
    tables = [path, [name for part in others for name in part]]
    text = pieces[0]
    for chapters, after in zip(tables, pieces[1:], strict=True):
        text += HEAD + "".join(map(_row, chapters)) + after
    return text
