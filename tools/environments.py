"""Commands in other environments than .venv: another Python, another JAX, more libraries.

uv makes such an environment for one command, of what is in its cache, and removes it afterwards.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools" / "bin" / "uv"
# What a process of another environment must not take over from this one.
DROPPED = ("VIRTUAL_ENV", "PYTHON", "PYTEST", "JAX_", "XLA_", "TF_CPP_", "NIGHTLY")


def run(*options: str, python: str = "3.12") -> list[str]:
    """The start of a command: `uv run` with these options, and that version of Python."""
    uv = [str(UV), "run", "--quiet", "--system-certs", "--isolated"]
    return [*uv, "--python", python, *options]


def with_packages(*packages: str) -> list[str]:
    """The start of a command in an environment that has these packages alone, and what they ask
    for.
    """
    return run("--no-project", *(f"--with={package}" for package in packages))


def variables(**more: str) -> dict[str, str]:
    """The variables for a process of another environment: this process's, less what names this
    environment or sets JAX, and `more`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | more
