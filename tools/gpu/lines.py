"""The file that a run writes: a line of JSON for each thing that was measured, on the disk before
the next is begun. `helpers.records.results` reads it.

The first line of a run says where its figures come from. A line after it is of one form of one
case: that it was "made" and what was found of it, one look at the host's clock ("wall"), what the
GPU's own clock saw ("device"), or an "error". Or it says that a stage has "finished".
"""

import datetime
import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.records.results import LINES, PROGRAMS


class Key(NamedTuple):
    """One form of a case, which is one of a part."""

    part: str
    case: str
    form: str


class Log:
    """Adds lines to the file of one run in `folder`."""

    def __init__(self, folder: Path, run: int, stage: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.programs = folder / LINES, folder / PROGRAMS
        self.run, self.stage = run, stage
        _cut_torn_line(self.path)

    def add(self, key: Key | None, **what: Any) -> None:
        """Add one line, and wait until it is on the disk. Raises ValueError for a number that JSON
        does not have, as NaN."""
        line = {"run": self.run, "stage": self.stage, "at": now()}
        line |= (key._asdict() if key else {}) | what
        append(self.path, json.dumps(line, allow_nan=False).encode() + b"\n")

    def keep(self, key: Key, hlo: str) -> None:
        """Keep a program's text: what the parser makes of it can then be looked at anywhere."""
        line = json.dumps(key._asdict() | {"hlo": without_paths(hlo)}).encode() + b"\n"
        append(self.programs, gzip.compress(line, mtime=0))


def begin(folder: Path, provenance: dict[str, Any]) -> Log:
    """The log of a new run: its first line says where the figures come from."""
    path = folder / LINES
    runs = path.read_bytes().count(b'{"provenance"') if path.exists() else 0
    log = Log(folder, runs, "start")
    append(path, json.dumps({"provenance": provenance}).encode() + b"\n")
    return log


def of_runs_like(lines: Sequence[Mapping[str, Any]], run: int) -> list[Mapping[str, Any]]:
    """The lines of a run, and of those that measured the same: on the same device, of the same
    commit, with the same versions."""
    runs = [{**line["provenance"], "date": ""} for line in lines if "provenance" in line]
    return [line for line in lines if "run" in line and runs[line["run"]] == runs[run]]


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file in one write, and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_torn_line(path: Path) -> None:
    """Take off a line that a kill has cut: the next one would be written behind it."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def without_paths(text: str) -> str:
    """Text without the paths of the machine it was said on. What follows a bracket is no path, but
    the name of an operation, which tells its layer: jvp(Model)/up/dense/dot_general."""
    return re.sub(r"(?<![\w./:)])/[\w.-]+/[\w./-]+", "<path>", text)


def sentence(error: BaseException) -> str:
    """An error as one line without paths: its beginning, and its end, where cuBLAS and XLA give the
    reason."""
    text = " ".join(without_paths(f"{type(error).__name__}: {error}").split())
    return text if len(text) <= 800 else f"{text[:350]} [...] {text[-440:]}"
