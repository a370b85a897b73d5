"""Run chapters, always by nbmake: what `make check` compares and what `make refresh` writes come
from the same run.
"""

import dataclasses
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
from xml.etree import ElementTree

import nbformat
from nbformat import NotebookNode

from tools.outputs.chapters import ROOT, Refused
from tools.outputs.notebook import WIDGET, describe, text_of, without_outputs
from tools.platforms import missing_gpu

CELL_SECONDS = 300  # longest a cell may run
AT_ONCE = 2  # chapters: each has a kernel that compiles, and memory for more is not everywhere
# Variables that change outputs: settings of JAX, Python, terminals, matplotlib. Kept are where JAX
# runs, how much of a GPU's memory it takes at once, and where packages are (`make` unsets it).
DROPPED = ("JAX_", "XLA_", "TF_", "PYTEST_", "PYTHON", "MPL", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
KEPT = ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_", "PYTHONPATH")
BESIDE = ("results", "glossary.md")  # what chapters read


@dataclasses.dataclass(frozen=True)
class Run:
    """A chapter after a run: the notebook as nbmake left it, the seconds, and what failed, or
    None.
    """

    notebook: NotebookNode
    seconds: float
    failure: str | None

    @property
    def problems(self) -> list[str]:
        """What the outputs show to be wrong: text on stderr, a widget that is nothing without a
        kernel.
        """
        problems = []
        for number, cell in enumerate(self.notebook.cells, 1):
            for output in cell.get("outputs", []):
                if output.get("name") == "stderr":
                    said = text_of(output.text)[:200]
                    problems.append(f"{describe(number, cell)} writes to stderr: {said}")
                if WIDGET in output.get("data", {}) and "text/html" not in output.data:
                    problems.append(
                        f"{describe(number, cell)} shows a widget: where no kernel runs it needs "
                        f"text/html, as helpers.explorers.widgets gives it"
                    )
        return problems


@functools.cache
def matplotlib_folder() -> str:
    """matplotlib's folder, kept between runs, with its cache of fonts.

    A cell in which that cache is built for longer than five seconds writes to stderr.
    """
    folder = str(Path(sys.prefix) / "matplotlib-config")
    subprocess.run(
        [sys.executable, "-c", "import matplotlib.font_manager"],
        capture_output=True,
        check=True,
        env=os.environ | {"MPLCONFIGDIR": folder},
    )
    return folder


def run_environment(scratch: Path) -> dict[str, str]:
    """The caller's environment without what changes outputs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*DROPPED, "LINES")) or name.startswith(KEPT)
    }
    return kept | {
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "MPLCONFIGDIR": matplotlib_folder(),
    }


def run(notebooks: dict[str, NotebookNode], folder: Path) -> dict[str, Run]:
    """Run notebooks by name under nbmake, in a folder of their own with what stands beside them in
    `folder`.

    They start without outputs, as the output of a cell that is not run would stay. Nothing else of
    `folder` goes with them, so that nothing else can change what they show. Raises Refused where
    nbmake does not run them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        (scratch / "notebooks").mkdir()
        (scratch / "img").symlink_to(ROOT / "img")
        for name in BESIDE:
            _copy(folder / name, scratch / "notebooks" / name)
        paths = {name: scratch / "notebooks" / f"{name}.ipynb" for name in notebooks}
        for name, path in paths.items():
            nbformat.write(without_outputs(notebooks[name]), path)
        cases = _nbmake(list(paths.values()), scratch)
        return {
            name: Run(
                nbformat.read(path, 4),
                float(cases[path.name].get("time", 0)),
                failure(cases[path.name]),
            )
            for name, path in paths.items()
        }


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.exists():
        shutil.copyfile(source, target)


def _nbmake(paths: list[Path], scratch: Path) -> dict[str | None, ElementTree.Element]:
    """What pytest reports of each notebook, by the file's name."""
    command = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite"]
    command += [f"--nbmake-timeout={CELL_SECONDS}", "--nbmake-kernel=python3"]
    # None of the settings, and no other plugin that the machine's pytest may have.
    command += ["-c", os.devnull, "--noconftest", f"--rootdir={scratch}", "-p", "no:cacheprovider"]
    command += ["--disable-plugin-autoload", "-p", "nbmake.pytest_plugin"]
    if len(paths) > 1:  # a machine with a GPU may lack xdist, and runs one chapter a process
        command += ["-p", "xdist.plugin", "-n", str(min(AT_ONCE, len(paths)))]
    result = scratch / "result.xml"
    done = subprocess.run(
        [*command, f"--junitxml={result}", *map(str, paths)],
        cwd=scratch,
        env=run_environment(scratch),
        stdin=subprocess.DEVNULL,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if not result.exists():
        raise Refused(f"nbmake did not start:\n{done.stdout}")
    cases = {case.get("name"): case for case in ElementTree.parse(result).iter("testcase")}
    if missing := {path.name for path in paths} - set(cases):
        raise Refused(f"nbmake did not run {sorted(missing)}:\n{done.stdout}")
    return cases


def failure(case: ElementTree.Element) -> str | None:
    """What nbmake said of a notebook that failed, without the colours (which XML spells out)."""
    for bad in case:
        if bad.tag in ("failure", "error"):
            said = bad.text or bad.get("message") or "failed"
            return _explained(re.sub(r"(#x1B|\x1b)\[[0-9;]*m", "", said))
    return None


def _explained(said: str) -> str:
    if "DeadKernelError" not in said:
        return said
    return (
        "The kernel died: mostly for want of memory, or in the compiler. Run the chapter in "
        "JupyterLab to see in which cell."
    )


def fresh_run(paths: list[Path]) -> dict[str, Run]:
    """Run committed chapters, by their .ipynb."""
    notebooks = {path.stem: nbformat.read(path, 4) for path in paths}
    return run(notebooks, paths[0].parent)


def why_not_compared() -> str | None:
    """Why fresh outputs may rightly differ here from the committed ones, or None where they must
    not.
    """
    if why := missing_gpu():
        raise Refused(why)
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"they were made on linux x86_64, this is {sys.platform} {platform.machine()}"
    if other := _other_version():
        return other
    ask = [sys.executable, "-c", "import helpers, jax; print(jax.default_backend())"]
    backend = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True)
    if backend.returncode:
        raise Refused(f"JAX does not start:\n{backend.stderr}")
    if backend.stdout.split()[-1] == "cpu":
        return None
    return "a GPU is attached, and its results are its own"


def _other_version() -> str | None:
    """The first package that is not of the version in the lock, JAX before all others."""
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], set()).add(package.get("version", ""))
    for name in sorted(locked, key=lambda name: (name not in ("jax", "jaxlib"), name)):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or of the extra for GPUs
        if installed not in locked[name]:
            versions = " and ".join(sorted(locked[name]))
            return f"{name} {installed} is installed, uv.lock has {versions}"
    return None
