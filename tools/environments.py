"""Environments beside .venv: another Python, the oldest JAX, each JAX release, more libraries.

Each is a folder .venv-NAME of this checkout, filled by uv and kept between runs. It is made anew
when what is asked for, pyproject.toml or uv.lock has changed, or when making it was interrupted.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tools.setup import try_lock

ROOT = Path(__file__).resolve().parent.parent
BIN, EXE = ("Scripts", ".exe") if os.name == "nt" else ("bin", "")
UV = ROOT / ".tools" / BIN / f"uv{EXE}"
# How uv says that it cannot reach an index, or has no such Python and cannot reach one.
UNREACHABLE = ("dns error", "Connect", "timed out", "No interpreter")
# What a process of another environment must not take over from this one.
DROPPED = ("VIRTUAL_ENV", "PYTHON", "PYTEST", "JAX_", "XLA_", "TF_CPP_", "NIGHTLY")


class NotMadeError(Exception):
    """uv could not make an environment. `unreachable`: for want of a network."""

    def __init__(self, message: str, unreachable: bool = False):
        super().__init__(message)
        self.unreachable = unreachable


@dataclasses.dataclass(frozen=True)
class Environment:
    """One environment: the version of Python, and what is installed in it.

    `sync` holds arguments of `uv sync --locked`, which installs what uv.lock names. Where it is
    None, `install` holds arguments of `uv pip install`.
    """

    name: str
    python: str
    install: tuple[str, ...] = ()
    sync: tuple[str, ...] | None = None

    @property
    def folder(self) -> Path:
        """Where it is."""
        return ROOT / f".venv-{self.name}"

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.folder / BIN / "python"

    @property
    def stamp(self) -> Path:
        """The file that holds what the environment was made from; there when it is complete."""
        return self.folder / "made-from"

    def commands(self) -> list[list[str]]:
        """The arguments of the uv commands that make it."""
        version = ["--python", self.python]
        if self.sync is not None:
            return [["sync", "--quiet", "--locked", *version, *self.sync]]
        into = ["--python", str(self.interpreter)]
        return [
            ["venv", "--quiet", *version, str(self.folder)],
            ["pip", "install", "--quiet", *into, *self.install],
        ]

    def made_from(self) -> str:
        """A digest of the request, of pyproject.toml and of uv.lock."""
        request = repr(dataclasses.astuple(self)).encode()
        files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "uv.lock")]
        return hashlib.sha256(b"".join([request, *files])).hexdigest()

    def is_made(self) -> bool:
        """Whether it is complete and of this request, and its Python is still on the machine."""
        if not (self.stamp.exists() and self.interpreter.exists()):
            return False
        return self.stamp.read_text() == self.made_from()

    def make(self) -> Path:
        """Make it where it is not, and return the path of its Python.

        A second process waits for the first. Raises NotMadeError, with what uv says.
        """
        if not UV.exists():
            raise NotMadeError("there is no .tools/bin/uv: run `make setup` first", True)
        with only_one(self.name):
            if not self.is_made():
                # The stamp goes first and comes last: without it the folder is not complete.
                self.stamp.unlink(missing_ok=True)
                shutil.rmtree(self.folder, ignore_errors=True)
                for command in self.commands():
                    self._run(command)
                self.stamp.write_text(self.made_from())
        return self.interpreter

    def _run(self, command: list[str]) -> None:
        settings = {
            "UV_SYSTEM_CERTS": "1",
            "UV_PROJECT_ENVIRONMENT": str(self.folder),
            # pyenv hides every other version than .python-version's.
            "PYENV_VERSION": self.python,
        }
        done = subprocess.run(
            [UV, *command],
            cwd=ROOT,
            env=variables(**settings),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            unreachable = any(sign in done.stdout for sign in UNREACHABLE)
            said = f"uv {' '.join(command)}\n{done.stdout.strip()}"
            message = f"the environment {self.folder.name} could not be made: {said}"
            raise NotMadeError(message, unreachable)


def variables(**more: str) -> dict[str, str]:
    """The variables for a process of another environment: this process's, less what names this
    environment or sets JAX, and `more`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | more


@contextlib.contextmanager
def only_one(name: str) -> Iterator[None]:
    """Wait until no other process makes the environment of that name.

    The system gives the lock back when its holder ends, however it ends.
    """
    with (ROOT / ".tools" / f"{name}.lock").open("w") as file:
        while not try_lock(file):
            time.sleep(0.2)
        yield
