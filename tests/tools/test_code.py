"""The code of tools and tests is formatted, linted and typed, by the rules in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "command", ["ruff format --check", "ruff check", "mypy --no-incremental"], ids=str
)
def test_code_is_as_it_should_be(command):
    run = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
