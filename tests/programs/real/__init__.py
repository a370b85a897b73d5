"""Real programs as XLA dumped them, and the whole answer of `fp8lens` on each.

NAME.tar.xz has the dump, which `make.py` beside this file records. NAME.txt has the answer, which
somebody has read line by line. After a change to `fp8lens`, look at what it changes there:

    .venv/bin/python -m tests.programs.real [NAME ...]    # writes the answers anew
    git diff tests/programs/real
"""

import contextlib
import io
import os
import tarfile
import tempfile
from pathlib import Path

from fp8lens import Inspection, inspect
from fp8lens.cli import main
from fp8lens.dumps import COMPILED

HERE = Path(__file__).parent
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))


def unpacked(name: str, folder: str | os.PathLike) -> Path:
    """The dump's folder, in `folder`."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / name


def inspected(dump: Path) -> Inspection:
    """The compiled program of an unpacked dump, by itself."""
    (path,) = dump.glob(f"*{COMPILED}")
    return inspect(path)


def answer(name: str) -> str:
    """What the command says of a program, and what the program costs."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        dump = unpacked(name, folder)
        bill = inspected(dump).bill
        asked = ["--reasons"] if any(dump.glob("*before_optimizations.txt")) else []
        with contextlib.chdir(folder), contextlib.redirect_stdout(said):
            status = main([name, *asked])
    assert status == 0, status
    return f"{said.getvalue()}\n{bill}\n"


def stored(name: str) -> Path:
    """The file of a program's answer."""
    return HERE / f"{name}.txt"
