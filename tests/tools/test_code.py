"""The code of tools and tests is formatted, linted and typed, by the rules in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMANDS = {
    "format": ["ruff", "format", "--check"],
    "lint": ["ruff", "check"],
    # What mypy has read of the packages is kept beside them: then a run takes less than a second.
    "types": ["mypy", "--cache-dir", str(Path(sys.prefix) / "mypy-cache")],
}


@pytest.mark.parametrize("what", COMMANDS)
def test_code_is_as_it_should_be(what):
    run = subprocess.run(
        [sys.executable, "-m", *COMMANDS[what]], cwd=ROOT, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
