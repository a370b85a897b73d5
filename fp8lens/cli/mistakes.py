"""What cannot be used of what the user gave: a sentence that names the fix."""

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fp8lens.hlo.origin import left_out
from fp8lens.hlo.text import source_path

# Files of installed packages, and what is no file.
_NOT_THEIRS = re.compile(r"[/\\](site|dist)-packages[/\\]|^<")
_LIBRARY = str(Path(os.__file__).parent)  # Python's own


class Mistake(Exception):
    """The message is one sentence."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence: which names are like one that is not there."""
    known = sorted(names)
    found = difflib.get_close_matches(name, known, cutoff=0.5) or known[:5]
    return f"; nearest: {', '.join(found)}" if found else ""


@contextlib.contextmanager
def answered(kinds: Any, sentence: Callable[[Any], str]) -> Iterator[None]:
    """Errors of these kinds are the user's to fix."""
    try:
        yield
    except kinds as error:
        raise Mistake(sentence(error)) from error


def cannot_be_read(path: Any) -> contextlib.AbstractContextManager:
    """A Mistake where a file cannot be read."""
    return answered(OSError, lambda error: f"{str(path)!r} cannot be read ({error.strerror}).")


@contextlib.contextmanager
def theirs(
    what: str, fix: str, advice: Callable[[BaseException], str] = lambda error: ""
) -> Iterator[None]:
    """The user's code runs: what it raises, be it SystemExit, is a mistake; what it prints is no
    part of the answer. `advice` on an error, if there is any, is given in place of `fix`.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, Mistake):
        raise
    except BaseException as error:
        next_step = advice(error) or f"{fix}."
        raise Mistake(f"{what} ({told(error)}): {next_step}") from error


def told(error: BaseException) -> str:
    """An error in one sentence: its type, the user's line, and its message's first line."""
    # A KeyError shows its message's repr.
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    first = text.splitlines()[0] if text else "no message"
    where = _line(error)
    place = f" at {where}" if where else ""
    return f"{type(error).__name__}{place}: {first}".rstrip(".")


def _line(error: BaseException) -> str:
    """file:line of the innermost call that is neither in an installed package nor in Python's
    library or this one.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{source_path(error.filename)}:{error.lineno}"
    not_theirs = (_LIBRARY, *left_out())
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _NOT_THEIRS.search(file) and not file.startswith(not_theirs):
            place = f"{source_path(file)}:{number}"
    return place
