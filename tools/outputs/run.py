"""Run chapters, always by nbmake: what `make check` compares and what `make refresh` writes come
from the same run.
"""

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.outputs.chapters import NOTEBOOKS, ROOT
from tools.outputs.notebook import code_cells, describe

CELL_SECONDS = 300  # longest a cell may run
AT_ONCE = 2  # chapters: each has a kernel that compiles, and memory for more is not everywhere
# Variables that change outputs: settings of JAX, terminals, matplotlib.
DROPPED = ("JAX_", "XLA_", "TF_", "PYTEST_", "MPL", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
# The packages that outputs come from.
PACKAGES = """jax jaxlib jax-cuda13-plugin numpy ml-dtypes matplotlib flax optax scipy
    jupytext nbformat""".split()


@functools.cache
def _matplotlib_folder() -> str:
    """matplotlib's folder, kept between runs, with its cache of fonts.

    A cell in which that cache is built for longer than five seconds writes to stderr.
    """
    folder = str(Path(sys.prefix) / "matplotlib-config")
    build = [sys.executable, "-c", "import matplotlib.font_manager"]
    subprocess.run(
        build, capture_output=True, check=True, env=os.environ | {"MPLCONFIGDIR": folder}
    )
    return folder


def _environment(scratch: Path) -> dict[str, str]:
    """The caller's environment without what changes outputs. JAX runs on the CPU: the results of a
    GPU are its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | {
        "IPYTHONDIR": str(scratch / "ipython"),
        "JAX_PLATFORMS": "cpu",
        "JUPYTER_PREFER_ENV_PATH": "1",
        "MPLCONFIGDIR": _matplotlib_folder(),
    }


def run(notebooks: dict[str, NotebookNode]) -> dict[str, NotebookNode]:
    """Run notebooks by name under nbmake, in a copy of the chapters' folder. Returns them as they
    were left: `failure` says whether one failed. What nbmake reports goes to stdout.
    """
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        unread = shutil.ignore_patterns("*.ipynb", "__pycache__", ".*")
        shutil.copytree(NOTEBOOKS, scratch / "notebooks", ignore=unread)
        (scratch / "img").symlink_to(ROOT / "img")
        paths = {name: scratch / "notebooks" / f"{name}.ipynb" for name in notebooks}
        for name, path in paths.items():
            nbformat.write(_without_outputs(notebooks[name]), path)
        command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite"]
        command += [f"--nbmake-timeout={CELL_SECONDS}", "--nbmake-kernel=python3"]
        command += ["--durations=0", "--durations-min=1", "-p", "no:cacheprovider"]
        if len(paths) > 1:
            command += ["-n", str(AT_ONCE)]
        subprocess.run(
            [*command, *map(str, paths.values())], cwd=scratch, env=_environment(scratch)
        )
        return {name: nbformat.read(path, 4) for name, path in paths.items()}


def _without_outputs(notebook: NotebookNode) -> NotebookNode:
    for _, cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    return notebook


def failure(notebook: NotebookNode) -> str | None:
    """What went wrong in a run, at the first cell where it did, or None."""
    for number, cell in code_cells(notebook):
        where = describe(number, cell)
        for output in cell.outputs:
            if output.output_type == "error":
                traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output.traceback))
                return f"{where} fails:\n{traceback}"
            if output.get("name") == "stderr":
                return f"{where} writes to stderr: {output.text[:200]}"
        if cell.execution_count is None:
            return f"{where} did not run: nbmake's report, above, says why"
    return None


def why_not_compared() -> str | None:
    """Why fresh outputs may rightly differ here from the committed ones, or None where they must
    not.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"they were made on linux x86_64, this is {sys.platform} {platform.machine()}"
    lock = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package["version"] for package in lock if "version" in package}
    for name in PACKAGES:
        installed = importlib.metadata.version(name)
        if installed != locked[name]:
            return f"{name} {installed} is installed, uv.lock has {locked[name]}"
    return None
