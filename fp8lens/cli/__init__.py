"""What the command takes, what it answers, and with which exit status:
`fp8lens path/to/file.py:function --shapes "f8e4m3fn[256,512] f32[]"`.

Python alone reads a saved program: JAX, and what needs it, is imported where a function is given.
"""

import argparse
import contextlib
import io
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import TextIO

from fp8lens.apart import ended, python
from fp8lens.cli.answer import answer, columns, style, summarize
from fp8lens.cli.functions import named
from fp8lens.cli.mistakes import Mistake, told
from fp8lens.cli.options import parser
from fp8lens.cli.saved import shown
from fp8lens.cli.shapes import parse_shapes
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import Ink, page
from fp8lens.rules.find import every_name, explain

__all__ = ["main", "parse_shapes", "serve"]

# What `serve` adds to the exit status of an answer: whatever else ends its process gives another.
_ANSWERED = 100


def main(argv: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run the command line; without `argv` the process's own, in another process where it imports a
    file. The answer is written to `out`, or else to standard output.

    Exit status: 0 with a report; 1 where --require-fp8 does not hold; 2 for what cannot be used,
    and where this fails itself; 3 where that process ended without an answer; as of a shell's other
    commands, 130 when interrupted and 141 where nobody reads on.
    """
    out = out or sys.stdout
    streams = (out, sys.stderr)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            # A name may have what the terminal's encoding has not.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv, out)
        finally:
            for stream in streams:
                stream.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _unwritten(error, streams)


def _run(argv: Sequence[str] | None, out: TextIO) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["explain"]:
        return _explain(words[1:], out)
    if "--version" in words:
        print(f"fp8lens {_version()}", file=out)
        return 0
    given = parser().parse_args(words)
    given.folder = os.getcwd()
    if argv is None and named(given.what):
        return _apart(given, words)
    try:
        return answer(given, out)
    except (KeyboardInterrupt, OSError):
        raise
    except BaseException as error:
        if given.debug:
            print(visible(traceback.format_exc(), keep="\n"), file=sys.stderr)
        _fail(given, _said(given, error))
        return 2


def _said(given: argparse.Namespace, error: BaseException) -> str:
    """Why there is no answer, in a sentence."""
    if isinstance(error, MemoryError):
        return f"there is not enough memory for {shown(given.what)}."
    if isinstance(error, Mistake):
        return str(error)
    return f"fp8lens itself failed ({told(error)}): please report this with what --debug adds."


def _fail(given: argparse.Namespace, said: str) -> None:
    """Say why there is no answer, in the file of --summary too: whoever reads that, as a pull
    request's comment, is not to miss it.
    """
    print(_error(said), file=sys.stderr)
    with contextlib.suppress(Mistake):
        summarize(given, f"{shown(given.what)}: {said}")


def _error(said: str) -> str:
    """A sentence for standard error."""
    return f"{style(sys.stderr)('error:', Ink.LOST)} {visible(said)}"


def _version() -> str:
    import importlib.metadata  # slow to import

    try:
        return importlib.metadata.version("fp8lens")
    except importlib.metadata.PackageNotFoundError:
        return "of a folder that is not installed"


def _explain(names: Sequence[str], out: TextIO) -> int:
    """Print the pages of rules, or the names of all where none is given."""
    if not names:
        print("\n".join(every_name()), file=out)
        return 0
    try:
        with page(columns(out)):
            pages = [explain(name).text(style(out)) for name in names]
    except KeyError as error:
        print(_error(f"{error.args[0]} `fp8lens explain` lists all."), file=sys.stderr)
        return 2
    print("\n\n\n".join(pages), file=out)
    return 0


def _unwritten(error: OSError, streams: Iterable[TextIO]) -> int:
    """The exit status where reading or writing failed, and a sentence if somebody may read it."""
    unread = isinstance(error, BrokenPipeError)
    with contextlib.suppress(OSError):
        if not unread:
            said = f"reading or writing failed ({error.strerror})."
            print(_error(said), file=sys.stderr, flush=True)
    for stream in streams:  # else Python writes what is left when it ends, and fails again
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return 141 if unread else 2


def _apart(given: argparse.Namespace, words: Sequence[str]) -> int:
    """Run in a process of its own: whatever the file or XLA does, 0 is an answer's status alone."""
    status = subprocess.run(python("from fp8lens.cli import serve; serve()", *words)).returncode
    if status >= _ANSWERED:
        return status - _ANSWERED
    _fail(
        given,
        f"the file, or XLA's compiler, ended the process ({ended(status)}) "
        "before there was an answer: fix the file; report what XLA said above, "
        "or give the process more memory where that was short.",
    )
    return 3


def serve() -> None:
    """The process of its own.

    Only the answer reaches standard output: what the file prints in any way, or a process that it
    starts, goes to standard error.
    """
    out = open(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    os._exit(_ANSWERED + main(sys.argv[1:], out))  # what the file does at exit is not waited for
