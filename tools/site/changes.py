"""When the files of a project changed last, as git recorded it."""

import os
import subprocess
from pathlib import Path

_LOG = ["log", "--format=%x00%cs", "--name-only", "--no-renames"]


def dates(project: Path) -> dict[str, str]:
    """The date of the last commit of each file, by its path in the project, as 2026-01-31.

    Nothing where git does not know: in an unpacked archive, and in a clone without its history, in
    which every file seems to be as old as the newest commit.
    """
    if _answer(project, ["rev-parse", "--is-shallow-repository"]) != "false\n":
        return {}
    found: dict[str, str] = {}
    for commit in _answer(project, _LOG).split("\0"):  # the newest first
        date, _, files = commit.partition("\n")
        for file in files.split("\n"):
            found.setdefault(file, date)
    found.pop("", None)
    return found


def _answer(project: Path, arguments: list[str]) -> str:
    """What git says of the project; empty where it says nothing."""
    settings = {
        # An archive may be unpacked in a folder of another project.
        "GIT_CEILING_DIRECTORIES": str(project.parent),
    }
    command = ["git", "-c", "core.quotePath=false", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=os.environ | settings,
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
    except (OSError, subprocess.CalledProcessError, UnicodeDecodeError):
        return ""
    return done.stdout
