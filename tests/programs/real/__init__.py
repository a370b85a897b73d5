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

from fp8lens import Inspection
from fp8lens.cli import main
from fp8lens.dumps import choose, files_beside
from fp8lens.hlo.parse import parse_hlo_module
from fp8lens.inspection import of_dump

HERE = Path(__file__).parent
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz"))


def unpacked(name: str, folder: str | os.PathLike) -> Path:
    """The dump's folder, in `folder`."""
    with tarfile.open(HERE / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / name


def inspected(dump: Path) -> Inspection:
    """The program of an unpacked dump."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in dump.iterdir()}
    chosen = choose({name: len(text) for name, text in texts.items()})
    assert chosen
    beside = {name: texts[name] for name in files_beside(chosen.name, texts)}
    return of_dump(parse_hlo_module(texts[chosen.name]), chosen.name, beside)


def answer(name: str) -> str:
    """What the command says of a program, and what the program costs."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        dump = unpacked(name, folder)
        seen = inspected(dump)
        asked = ["--reasons"] if seen.has_reasons else []
        with contextlib.chdir(folder), contextlib.redirect_stdout(said):
            status = main([name, *asked])
    assert status == 0, status
    return f"{said.getvalue()}\n{seen.bill}\n"


def stored(name: str) -> Path:
    """The file of a program's answer."""
    return HERE / f"{name}.txt"
