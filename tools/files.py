"""Which files are the project's, and how one is written: as a whole, or not at all."""

import errno
import os
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def of_project(*patterns: str) -> list[Path]:
    """Files of the project: what git tracks, or would; ignored ones are somebody's own. Where git
    cannot say, as of an unpacked archive, what .gitignore does not name.
    """
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    not_above = os.environ | {
        "GIT_CEILING_DIRECTORIES": str(ROOT.parent)
    }  # where an archive may be unpacked
    try:
        names = subprocess.run(
            listing, cwd=ROOT, env=not_above, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [
            name
            for name in _not_ignored()
            if not patterns
            or any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in patterns)
        ]
    return [path for name in sorted(set(names)) if (path := ROOT / name).is_file()]


def _not_ignored() -> list[str]:
    # A folder with a .gitignore of its own is one that a tool made, and says that it is to be
    # ignored.
    ignored = [
        ".git",
        *(line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()),
    ]
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if not any(fnmatch(name, pattern) for pattern in ignored)
            and not Path(folder, name, ".gitignore").exists()
        ]
        found += [
            Path(folder, name).relative_to(ROOT).as_posix() for name in names if name not in ignored
        ]
    return found


def fix(error: OSError) -> str:
    """What went wrong with a file, and what to do about it."""
    said = f"{error.strerror}: {error.filename or 'a file'}. What was not written is as it was"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{said}: make room, and run the command again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{said}: its folder is read-only, or another user's. Make it writable, and run the "
            f"command again."
        )
    return f"{said}."


def in_one_step(path: Path, content: bytes | str) -> None:
    """Write a file so that whoever reads it meanwhile, or after a kill, finds the whole of it or
    the one before; so does whoever reads it after an OSError, as of a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
