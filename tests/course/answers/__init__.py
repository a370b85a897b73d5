"""Answers to the puzzles, right ones and wrong ones, to try the chapters' checkers with.

A module for each chapter has its puzzles in the chapter's order. A puzzle is a function that hands
an answer to the checker; `right` and `wrong` stand above its answers, or take them as values. A
name of the chapter is an attribute of `chapter`, and means what it means to a reader who has run
all cells up to the puzzle: use it in bodies only. The chapter's stub is a wrong answer of its own.
"""

import ast
import contextlib
import importlib
import inspect
import io
import linecache
import symtable
from collections.abc import Callable
from typing import Any

import jupytext
from jax.extend.backend import clear_backends

from tools.outputs.chapters import NOTEBOOKS, names

RIGHT, WRONG = 1, 3  # so many answers of each kind has a puzzle, at least


def code_cells(name: str) -> list[str]:
    """The code of a chapter, a text for each cell."""
    cells = jupytext.read(NOTEBOOKS / f"{name}.md").cells
    return [cell.source for cell in cells if cell.cell_type == "code"]


def solutions(name: str) -> list[int]:
    """Where the solutions of a chapter's puzzles are, among its code cells."""
    return [n for n, cell in enumerate(code_cells(name)) if cell.startswith("# Solution")]


def chapters() -> list[str]:
    """The chapters that have puzzles, and so a module here."""
    return [name for name in names() if solutions(name)]


class Chapter:
    """A chapter's puzzles; and, while one is tried, the chapter's names as attributes."""

    def __init__(self, name: str):
        self._name = name
        self._puzzles: list[Puzzle] = []
        self._values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no cell that was run defines {name}") from None

    def puzzle(self, stub: Callable[[], Any]) -> "Callable[[Callable], Puzzle]":
        """Make a puzzle of the function below, which asks the checker. `stub` returns the
        chapter's own, unfinished answer.
        """

        def made(check: Callable[[Any], bool]) -> Puzzle:
            self._puzzles.append(Puzzle(self, len(self._puzzles) + 1, check, stub))
            return self._puzzles[-1]

        return made


class Puzzle:
    """A puzzle with the answers that its checker must accept, and those that it must refuse."""

    def __init__(self, chapter: Chapter, number: int, check: Callable, stub: Callable):
        self.chapter, self.number, self.check, self.stub = chapter, number, check, stub
        self.right_answers: list[Any] = []
        self.wrong_answers: list[tuple[Any, str]] = []

    def right(self, answer: Any) -> Any:
        """Add an answer that the checker must accept."""
        self.right_answers.append(answer)
        return answer

    def wrong(self, says: str) -> Callable[[Any], Any]:
        """Add an answer that the checker must refuse, with a message that has these words."""

        def added(answer: Any) -> Any:
            self.wrong_answers.append((answer, says))
            return answer

        return added

    def prepare(self) -> None:
        """Run the chapter up to this puzzle: the cells that give its answers and its checker their
        names.
        """
        cells = code_cells(self.chapter._name)
        before = cells[: solutions(self.chapter._name)[self.number - 1]]
        values: dict[str, Any] = {"__name__": "__main__"}
        if any("jax_num_cpu_devices" in cell for cell in before):
            clear_backends()  # JAX takes another number of devices only before it has any
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(NOTEBOOKS):
            for number, cell in enumerate(needed(before, names_asked(self.chapter._name))):
                file = f"{self.chapter._name}[{number}]"
                # inspect.getsource, which a cell may call, finds the text here
                linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
                exec(compile(cell, file, "exec"), values)
        self.chapter._values = values

    def mistakes(self, check: Callable[[Any], bool] | None = None) -> list[str]:
        """What the checker does wrong, a sentence for each answer. `check` stands in for it."""
        check = check or self.check
        found = []
        for number, answer in enumerate(self.right_answers, 1):
            accepted, text = tried(check, answer)
            if accepted is not True:
                found.append(f"right answer {number}, {_name(answer)}, is refused:\n{text}")
        for number, (answer, says) in enumerate([*self.wrong_answers, (self.stub(), "")], 1):
            accepted, text = tried(check, answer)
            if accepted is not False:
                found.append(f"wrong answer {number}, {_name(answer)}, is not refused:\n{text}")
            elif not text or says not in text:
                found.append(f"wrong answer {number}, {_name(answer)}: no {says!r} in\n{text}")
        return found


def tried(check: Callable[[Any], bool], answer: Any) -> tuple[bool | None, str]:
    """Whether a checker accepts an answer, None if it fails with an error; and what it prints."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            accepted = bool(check(answer))
    except Exception as error:
        return None, f"{printed.getvalue()}the checker raises {type(error).__name__}: {error}"
    return accepted, printed.getvalue()


def _name(answer: Any) -> str:
    return getattr(answer, "__name__", repr(answer))


def answers(name: str) -> Chapter:
    """The answers to a chapter's puzzles."""
    return importlib.import_module(f"{__name__}.{name}").chapter


# Which cells are run -----------------------------------------------------------------------------


def names_asked(name: str) -> set[str]:
    """The chapter's names that its module of answers uses."""
    source = inspect.getsource(importlib.import_module(f"{__name__}.{name}"))
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "chapter"
    }


def needed(cells: list[str], wanted: set[str]) -> list[str]:
    """The cells that define the wanted names, and what those cells read; in their order.

    Cells that only draw, or only check what the chapter says, are left out so.
    """
    tables = [symtable.symtable(cell, "a cell", "exec") for cell in cells]
    wanted, before = set(wanted), set()
    while wanted != before:
        before = set(wanted)
        for table in tables:
            if _bound(table) & before:
                wanted |= _read(table)
    return [cell for cell, table in zip(cells, tables, strict=True) if _bound(table) & wanted]


def _bound(table: symtable.SymbolTable) -> set[str]:
    """The names that some code defines."""
    symbols = table.get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _read(table: symtable.SymbolTable) -> set[str]:
    """The global names that some code reads, also in its functions."""
    top = table.get_type() == "module"
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (top or symbol.is_global())
    }
    for inner in table.get_children():
        found |= _read(inner)
    return found
