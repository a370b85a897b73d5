"""Which files are the project's, and how one is written: as a whole, or not at all."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def of_project(*patterns: str) -> list[Path]:
    """Files of the project: what git tracks, or would; ignored ones are somebody's own."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(listing, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    # git lists a file that was removed, too, until that is committed
    return [path for name in sorted(done.stdout.split("\0")) if (path := ROOT / name).is_file()]


def in_one_step(path: Path, content: bytes | str) -> None:
    """Write a file so that whoever reads it meanwhile, or after a kill, finds the whole of it or
    the one before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    new.replace(path)
