"""What must hold of a chapter's files, without a run."""

import ast
import difflib
import getpass
import itertools
import json
import re
import socket
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from tools.outputs import prose
from tools.outputs.notebook import (
    TAGS,
    VOLATILE,
    cells_of,
    describe,
    lookup,
    normalise,
    tags,
    text_of,
    written,
)
from tools.site import sanitize

# How many cells of a chapter may be tagged volatile-output: trainings. Of another chapter none, or
# anybody could tag a cell and alter its output.
MAY_VARY = {"08_train_a_layer": 3, "12_scaling_strategies": 1, "13_transformer_training": 1}
# Ways to show something else than what is run, or to run something else than what is shown.
BEHIND = re.compile(
    r"\b(get_ipython|InteractiveShell|IPython\.core|input_transformers\w*|update_display|"
    r"nbformat|ipynb)\b"
)
PATH = r"(?<![\w.:/\\<-])/(?:home|root|tmp|usr|opt|var|mnt|srv|work|private|Users)/[\w.-]+"
MACHINE = [
    ("an absolute path", re.compile(PATH)),
    ("an absolute path", re.compile(r"\b[A-Z]:\\\w+")),
    ("a date", re.compile(r"\b20\d\d-[01]\d-[0-3]\dT?\b")),
    ("a memory address", re.compile(r"\b0x[0-9a-f]{8,}\b")),
    ("a time of day", re.compile(r"\b[0-2]\d:[0-5]\d:[0-5]\d\b")),
]
ANONYMOUS = ("localhost", "runner")  # names of hosts and users that tell nothing


def standing_problems(path: Path, whole: bool = True) -> list[str]:
    """Problems of a pair that show without a run.

    With `whole`, the text of both files must be what `make refresh` writes, to the byte: a reader
    may be shown what a parser skips. Another version of Jupytext or nbformat may write another
    text, and then this is not asked.
    """
    notebook = nbformat.read(path, 4)
    twin = jupytext.read(path.with_suffix(".md"))
    found = static_problems(notebook, path.stem) + pair_problems(notebook, twin)
    if not found and whole:
        found = file_problems(path, notebook)
    return found


def static_problems(notebook: NotebookNode, name: str) -> list[str]:
    """Problems of a committed .ipynb that show without a run; `name` is the chapter's."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        problems += [f"{describe(number, cell)}: {what}" for what in _cell_problems(cell)]
    volatile = sum(VOLATILE in tags(cell) for cell in notebook.cells)
    allowed = MAY_VARY.get(name, 0)
    if volatile > allowed:
        problems.append(f"{volatile} cells are tagged {VOLATILE}; {allowed} of this chapter may be")
    problems = problems or _not_normal(notebook)
    if problems:
        return [*problems, "run `make refresh`"]
    return [
        f"{describe(number, notebook.cells[number - 1])}: {what}"
        for number, what in prose.problems(notebook)
    ]


def _cell_problems(cell: NotebookNode) -> list[str]:
    problems = []
    if extra := set(tags(cell)) - TAGS:
        problems.append(f"is tagged {sorted(extra)}; a chapter's tags are {sorted(TAGS)}")
    if cell.cell_type == "markdown":
        return problems
    if cell.cell_type != "code":
        return [*problems, f"a {cell.cell_type} cell has no place in a chapter"]
    if cell.execution_count is None:
        problems.append("was not run")
    try:
        ast.parse(cell.source)
    except SyntaxError as error:
        problems.append(f"is not Python alone ({error.msg}): a magic can keep code from running")
    if found := BEHIND.search(cell.source):
        problems.append(f"has {found[0]!r}: what is shown need not be what is run")
    for output in cell.outputs:
        problems += _output_problems(output)
    return problems


def _output_problems(output: NotebookNode) -> list[str]:
    problems = []
    if output.output_type == "error":
        problems.append(f"ended in {output.ename}")
    if output.get("name") == "stderr":
        problems.append(f"writes to stderr: {text_of(output.text)[:200]}")
    problems += [f"its output holds {what}: {found}" for what, found in machine_traces(output)]
    data = output.get("data", {})
    wrong: list[str] = []
    for kind, write_anew in (("text/html", sanitize.html), ("image/svg+xml", sanitize.svg)):
        if kind in data:
            wrong += write_anew(text_of(data[kind]))[1]
    return problems + [f"no page may hold what it shows: {what}" for what in wrong]


def machine_traces(output: NotebookNode) -> list[tuple[str, str]]:
    """Places where an output tells of the machine it was made on, as (what, text found)."""
    pieces = [text_of(output.get("text", "")), *output.get("traceback", [])]
    for kind, content in output.get("data", {}).items():
        if not kind.startswith("image/"):
            is_text = isinstance(content, (str, list))
            pieces.append(text_of(content) if is_text else json.dumps(content))
    text = "\n".join(pieces)
    found = [(what, match[0]) for what, pattern in MACHINE if (match := pattern.search(text))]
    for what, name in (
        ("the host's name", socket.gethostname()),
        ("the user's name", getpass.getuser()),
    ):
        says_something = len(name) > 4 and name not in ANONYMOUS
        if says_something and re.search(rf"\b{re.escape(name)}\b", text):
            found.append((what, name))
    return found


def _not_normal(notebook: NotebookNode) -> list[str]:
    """The first lines in which a notebook is not as `make refresh` writes it: metadata, counts,
    ids, what is folded.
    """
    wanted = nbformat.writes(normalise(notebook)).splitlines()
    lines = difflib.unified_diff(
        nbformat.writes(notebook).splitlines(), wanted, "committed", "wanted", n=1, lineterm=""
    )
    shown = "\n".join(itertools.islice(lines, 20))
    return [f"it is not as `make refresh` writes it:\n{shown}"] if shown else []


def pair_problems(notebook: NotebookNode, twin: NotebookNode) -> list[str]:
    """Problems: every way in which the .ipynb and its .md differ."""
    problems = [
        f"the .ipynb and the .md disagree on {key}"
        for key in ("kernelspec", "jupytext.formats")
        if lookup(notebook.metadata, key) != lookup(twin.metadata, key)
    ]
    lines = difflib.unified_diff(_lines(notebook), _lines(twin), ".ipynb", ".md", n=0, lineterm="")
    if apart := "\n".join(lines):
        problems.append(f"the .ipynb and the .md differ:\n{apart}")
    return problems


def _lines(notebook: NotebookNode) -> list[str]:
    """Cells as lines of text, to show how two differ."""
    found = []
    for kind, source, *metadata in cells_of(notebook):
        found += [f"{kind} {metadata}", *source.splitlines()]
    return found


def file_problems(path: Path, notebook: NotebookNode) -> list[str]:
    """Problems of the pair's files that their content does not show."""
    problems = []
    for end, text in written(normalise(notebook)).items():
        half = path.with_suffix(end)
        if half.read_text() != text:
            problems.append(
                f"{half.name} is not as `make refresh` writes it, though it says the same: run that"
            )
    return problems
