"""Python compiled to WebAssembly, which one page of the site runs: fetched once, from npm.

    python -m tools.site.pyodide     `make site` does it; without a network it says so, and the site
                                     is built without what needs it

It is the package as it was published: its digest is pinned here. Nothing is added to it.
"""

import base64
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from helpers.explorers import program

# the last with Python 3.13; the digest is what `npm view pyodide@0.29.5 dist.integrity` prints
VERSION = "0.29.5"
SHA512 = "TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw=="
FOLDER = Path(__file__).resolve().parent.parent.parent / "_build" / f"pyodide-{VERSION}"
# What a browser loads of it.
FILES = (
    "pyodide.mjs",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)


class NotFetched(Exception):
    """npm could not fetch the package; the message says why."""


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack the package into `folder`. Raises ValueError if it is not the one that is pinned."""
    if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != SHA512:
        raise ValueError(f"{archive.name} is not the package that was pinned")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "package"


def fetched() -> Path:
    """The folder of the package, which is fetched if it is not there. Raises NotFetched."""
    if FOLDER.exists():
        return FOLDER
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="npm-") as scratch:
        command = [program("npm"), "pack", f"pyodide@{VERSION}", "--silent", "--fetch-retries=1"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        archive = Path(scratch, f"pyodide-{VERSION}.tgz")
        if not archive.exists():
            raise NotFetched(f"npm could not fetch pyodide@{VERSION}: {done.stderr.strip()[-300:]}")
        package = unpacked(archive, Path(scratch))
        if not FOLDER.exists():  # another process may have been sooner
            package.rename(FOLDER)
    return FOLDER


if __name__ == "__main__":
    try:
        fetched()
    except NotFetched as error:
        print(f"The site's page that reads dumps will only show its example: {error}")
