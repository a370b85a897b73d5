"""Files that are written as a whole, or not at all."""
import os
from pathlib import Path


def in_one_step(path: Path, content: bytes | str) -> None:
    """Write a file so that whoever reads it meanwhile, or after a kill, finds the whole of it or the one before; so
    does whoever reads it after an OSError, as of a full disk."""
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
