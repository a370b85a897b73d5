"""Keep the chapters' outputs true: `check` compares them with a fresh run, `refresh` rewrites them.

A chapter is a Jupytext pair: the .ipynb holds the outputs, the .md (MyST) the same cells without them.
Rules that need no run are in `static_problems`, what must agree between two runs in `compare`.
"""

import argparse
import ast
import base64
import copy
import dataclasses
import difflib
import functools
import getpass
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jupytext
import nbformat
import numpy as np
from matplotlib.image import imread
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools.files import in_one_step, mend
from tools.outputs import prose
from tools.site import refused

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "notebooks"
VOLATILE = "volatile-output"  # tag of a cell whose output may differ from run to run
# How many cells of a chapter may be tagged so: trainings, whose last digits differ from one kind of CPU to the next.
MAY_VARY = {"08_train_a_layer": 3, "10_scaling_strategies": 1}
# All that a cell may be tagged: what folds, and the above. Not what would keep a cell from running, or from failing.
TAGS = {"hide-input", "hide-output", "hide-cell", VOLATILE}
CELL = {
    "code": {"cell_type", "id", "metadata", "source", "outputs", "execution_count"},
    "markdown": {"cell_type", "id", "metadata", "source"},
}  # no raw cell, nothing attached
BEHIND = re.compile(
    r"\b(get_ipython|InteractiveShell|IPython\.core|input_transformers\w*|update_display|"
    r"nbformat|ipynb)\b"
)
CHUNKS = {
    b"IHDR",
    b"IDAT",
    b"IEND",
    b"pHYs",
    b"tEXt",
}  # of a PNG that is one picture, and nothing besides
CELL_SECONDS = 300  # longest a cell may run
AT_ONCE = 2  # chapters: each has a kernel that compiles, and memory for more is not everywhere
PIXEL_TOLERANCE = (
    8 / 255
)  # last-bit differences of plotted numbers move antialiased pixels by less than this
METADATA = {  # all that a notebook records of where it was made: nothing of the machine
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
    "jupytext": {"formats": "ipynb,md:myst"},
}
CELL_METADATA = {"tags", "jupyter"}  # "jupyter" folds away what the tags say, in JupyterLab
FOLDS = {
    "outputs_hidden": {"hide-output", "hide-cell"},
    "source_hidden": {"hide-input", "hide-cell"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"  # of a panel, the HTML is kept: its model is gone with the kernel
MACHINE = [
    (
        "an absolute path",
        re.compile(
            r"(?<![\w.:/\\<-])/(?:home|root|tmp|usr|opt|var|mnt|srv|work|private|Users)/[\w.-]+"
        ),
    ),
    ("an absolute path", re.compile(r"\b[A-Z]:\\\w+")),
    ("a date", re.compile(r"\b20\d\d-[01]\d-[0-3]\dT?\b")),
    ("a memory address", re.compile(r"\b0x[0-9a-f]{8,}\b")),
    ("a time of day", re.compile(r"\b[0-2]\d:[0-5]\d:[0-5]\d\b")),
]


class Refused(Exception):
    """The command cannot be carried out; the message says why and what to do."""


@dataclasses.dataclass
class Report:
    """What a check found: a line a chapter, the volatile cells, why no outputs were compared, the problems."""

    lines: list[str] = dataclasses.field(default_factory=list)
    volatile: list[str] = dataclasses.field(default_factory=list)
    not_compared: str | None = None
    problems: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.volatile)
        found = sum(map(len, self.problems.values()))
        return "\n".join(
            [
                *self.lines,
                f"{count} volatile cell{'s' * (count != 1)} (run, not compared): {', '.join(self.volatile) or 'none'}",
                f"no outputs were compared: {self.not_compared}"
                if self.not_compared
                else "outputs compared with a fresh run, character by character",
                *(
                    f"\n{name}: {problem}"
                    for name, problems in self.problems.items()
                    for problem in problems
                ),
                f"\n{found} problems" if found else "no problems",
            ]
        )


# What a notebook holds -----------------------------------------------------------------------------------------------


def text_of(value) -> str:
    return "".join(value) if isinstance(value, list) else value  # nbformat allows both


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def describe(number: int, cell) -> str:
    first = cell.source.strip().splitlines()[:1]
    return f"cell {number} ({first[0][:60] if first else 'empty'})"


def cells_of(notebook) -> list[tuple]:
    """What both halves of a pair must agree on."""
    return [
        (c.cell_type, c.source.rstrip(), tags(c), c.metadata.get("jupyter", {}))
        for c in notebook.cells
    ]


def joined(outputs) -> list:
    """Outputs with neighbouring pieces of one stream as one: where a stream is cut depends on timing."""
    result = []
    for output in outputs:
        last = result[-1] if result else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text = text_of(last.text) + text_of(output.text)
        else:
            result.append(copy.deepcopy(output))
    return result


def normal_outputs(outputs) -> list[tuple[str, object]]:
    """Outputs as (what, content): streams joined, pictures as pixels and what else is in their file."""
    result = []
    for output in joined(outputs):
        rest = {**output}
        kind = rest.pop("output_type")
        if kind == "stream":
            result.append((rest.pop("name"), text_of(rest.pop("text"))))
        elif kind == "error":
            result += [(key, str(rest.pop(key))) for key in ("ename", "evalue", "traceback")]
        else:
            rest.pop("execution_count", None)
            for mime, content in sorted(rest.pop("data").items()):
                if mime == "image/png":
                    result += zip(
                        (f"{kind} {mime}", f"{kind} {mime}'s file"), picture(text_of(content))
                    )
                elif mime != WIDGET:
                    whole = (
                        json.dumps(content, indent=1, sort_keys=True)
                        if mime.endswith("json")
                        else text_of(content)
                    )
                    result.append((f"{kind} {mime}", whole))
        if any(rest.values()):  # metadata, such as a picture's description
            result.append((f"{kind}'s metadata", json.dumps(rest, indent=1, sort_keys=True)))
    return result


def picture(encoded: str) -> tuple[np.ndarray | str, str]:
    """A PNG's pixels, and what else its file holds; of what is no single PNG alone the bytes themselves."""
    try:
        content = base64.b64decode("".join(encoded.split()), validate=True)
        chunks, at = [], 8
        while at < len(content):
            size, kind = struct.unpack_from(">I4s", content, at)
            chunks.append((kind, content[at + 8 : at + 8 + size]))
            at += 12 + size
        alone = (
            at == len(content)
            and chunks[-1] == (b"IEND", b"")
            and {kind for kind, _ in chunks} <= CHUNKS
        )
        if alone:
            return imread(io.BytesIO(content), "png"), str(
                [chunk for chunk in chunks if chunk[0] != b"IDAT"]
            )
    except (
        ValueError,
        struct.error,
        SyntaxError,
        OSError,
    ):  # as base64, as chunks, as Pillow says it
        pass
    return encoded, "not one PNG, and nothing besides"


# What must hold -------------------------------------------------------------------------------------------------------


def difference(committed: list[tuple], fresh: list[tuple]) -> str | None:
    """How two cells' normal outputs differ, or None."""
    if [what for what, _ in committed] != [what for what, _ in fresh]:
        return f"committed {[what for what, _ in committed]}, fresh {[what for what, _ in fresh]}"
    for (what, old), (_, new) in zip(committed, fresh):
        if isinstance(old, str) or isinstance(new, str):
            if type(old) is not type(new):
                return f"{what}: no single picture, or more than that in its file"
            if old != new:
                lines = difflib.unified_diff(
                    old.splitlines(), new.splitlines(), "committed", "fresh", n=1, lineterm=""
                )
                return f"{what}\n" + (
                    "\n".join(line for line, _ in zip(lines, range(40))) or "line ends differ"
                )
        elif old.shape != new.shape:
            return f"{what}: size {old.shape} committed, {new.shape} fresh"
        elif (apart := np.abs(old.astype(float) - new).max()) > PIXEL_TOLERANCE:
            changed = (np.abs(old.astype(float) - new) > PIXEL_TOLERANCE).any(axis=-1).mean()
            return f"{what}: {changed:.2%} of the pixels differ, by up to {apart:.0%}"
    return None


def compare(committed, fresh) -> list[str]:
    """Problems: every way in which the outputs of a committed notebook differ from those of a fresh run."""
    problems = []
    if len(committed.cells) != len(fresh.cells):
        return [f"{len(committed.cells)} cells committed, {len(fresh.cells)} in the fresh run"]
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells), 1):
        if old.cell_type == "code" and new.execution_count is None:
            problems.append(f"{describe(number, old)}: did not run")
        elif old.cell_type == "code" and VOLATILE not in tags(old):
            apart = difference(normal_outputs(old.outputs), normal_outputs(new.outputs))
            if apart:
                problems.append(
                    f"{describe(number, old)}: the output differs from a fresh run: {apart}"
                )
    return problems


def pair_problems(notebook, twin) -> list[str]:
    """Problems: every way in which the .ipynb and its .md differ."""
    problems = [
        f"the .ipynb and the .md disagree on {key}"
        for key in ("kernelspec", "jupytext.formats")
        if lookup(notebook.metadata, key) != lookup(twin.metadata, key)
    ]
    old, new = cells_of(notebook), cells_of(twin)
    for kind, i, j, k, m in difflib.SequenceMatcher(
        None, [*map(repr, old)], [*map(repr, new)], False
    ).get_opcodes():
        if kind != "equal":
            lines = difflib.unified_diff(
                written(old[i:j]), written(new[k:m]), ".ipynb", ".md", n=0, lineterm=""
            )
            problems.append(f"the .ipynb and the .md differ at cell {i + 1}:\n" + "\n".join(lines))
    return problems


def written(cells: list[tuple]) -> list[str]:
    """Cells as lines of text, to show how two differ."""
    return [
        line
        for kind, source, *metadata in cells
        for line in (f"{kind} {metadata}", *source.splitlines())
    ]


def lookup(metadata, dotted: str):
    for key in dotted.split("."):
        metadata = metadata.get(key, {})
    return metadata


def static_problems(notebook, name: str = "") -> list[str]:
    """Problems of a committed .ipynb that show without a run. `name` is the chapter's."""
    problems = []
    for key, value in METADATA.items():
        if {
            k: v for k, v in notebook.metadata.get(key, {}).items() if k != "text_representation"
        } != value:
            problems.append(f"metadata {key} is not {value}")
    if extra := set(notebook.metadata) - {*METADATA}:
        problems.append(f"metadata {sorted(extra)} does not belong in a notebook")
    code = [
        (number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"
    ]
    for count, (number, cell) in enumerate(code, 1):
        where = describe(number, cell)
        if cell.execution_count != count:
            problems.append(
                f"{where}: execution count {cell.execution_count}, expected {count}: run top to bottom"
            )
        for output in cell.outputs:
            if output.get("execution_count", count) != count:
                problems.append(
                    f"{where}: its output counts {output.execution_count}, expected {count}"
                )
            if output.output_type == "error":
                problems.append(f"{where}: ended in {output.ename}")
            if output.get("name") == "stderr":
                problems.append(f"{where}: writes to stderr: {text_of(output.text)[:200]}")
            problems += [
                f"{where}: its output holds {what}: {found}"
                for what, found in machine_traces(output)
            ]
            for mime, read in (("text/html", refused.in_html), ("image/svg+xml", refused.in_svg)):
                wrong = read(text_of(output.data[mime])) if mime in output.get("data", {}) else []
                if (
                    mime == "text/html"
                    and "<style" in text_of(output.get("data", {}).get(mime, "")).lower()
                ):
                    wrong.append("<style>, which could hide what another cell shows")
                problems += [f"{where}: no page may hold what it shows: {what}" for what in wrong]
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            problems.append(
                f"{where}: is not Python alone ({error.msg}): a magic can keep code from running"
            )
        if found := BEHIND.search(cell.source):
            problems.append(
                f"{where}: has {found[0]!r}, by which what is shown need not be what is run"
            )
    for number, cell in enumerate(notebook.cells, 1):
        where = describe(number, cell)
        if extra := set(cell.metadata) - CELL_METADATA:
            problems.append(f"{where}: metadata {sorted(extra)} does not belong in a cell")
        if extra := set(tags(cell)) - TAGS:
            problems.append(
                f"{where}: is tagged {sorted(extra)}; a chapter's tags are {sorted(TAGS)}"
            )
        if extra := set(cell) - CELL.get(cell.cell_type, set()):
            problems.append(
                f"{where}: a {cell.cell_type} cell with {sorted(extra)} has no place in a chapter"
            )
    if not problems:
        problems += [
            f"{describe(number, notebook.cells[number - 1])}: {what}"
            for number, what in prose.problems(notebook)
        ]
    if not problems and nbformat.writes(normalise(notebook)) != nbformat.writes(notebook):
        problems.append(
            "it is not as `make refresh` writes it, or JupyterLab would save it: a cell is folded that its "
            "tags do not fold, or the other way round, or a cell has another id"
        )
    volatile = sum(VOLATILE in tags(cell) for _, cell in code)
    if volatile > MAY_VARY.get(name, 0):
        problems.append(
            f"{volatile} cells are tagged {VOLATILE}; in tools/outputs {MAY_VARY.get(name, 0)} may be"
        )
    return [*problems, *("run `make refresh`" for _ in problems[:1])]


def file_problems(path: Path, notebook) -> list[str]:
    """Problems of the pair's files that their content does not show: a reader may be shown what another skips."""
    normal = normalise(notebook)
    wanted = {path: nbformat.writes(normal) + "\n", path.with_suffix(".md"): twin_of(normal)}
    return [
        f"{half.name} is not as `make refresh` writes it, though it says the same: run that"
        for half, text in wanted.items()
        if half.read_text() != text
    ]


def machine_traces(output) -> list[tuple[str, str]]:
    """Places where an output tells of the machine it was made on, as (what, text found)."""
    data = {
        key: value for key, value in output.get("data", {}).items() if not key.startswith("image/")
    }
    text = "\n".join(
        [
            text_of(output.get("text", "")),
            *output.get("traceback", []),
            *(text_of(v) if isinstance(v, (str, list)) else json.dumps(v) for v in data.values()),
        ]
    )
    found = [(what, match[0]) for what, pattern in MACHINE if (match := pattern.search(text))]
    names = [("the host's name", socket.gethostname()), ("the user's name", getpass.getuser())]
    return found + [
        (what, name)
        for what, name in names
        if len(name) > 4
        and name not in ("localhost", "runner")
        and re.search(rf"\b{re.escape(name)}\b", text)
    ]


# Running --------------------------------------------------------------------------------------------------------------


@functools.cache
def matplotlib_folder() -> str:
    """matplotlib's folder, kept between runs, with its cache of fonts. A cell in which that is built, and takes longer
    than five seconds, writes to stderr that it does."""
    folder = str(Path(sys.prefix) / "matplotlib-config")
    subprocess.run(
        [sys.executable, "-c", "import matplotlib.font_manager"],
        capture_output=True,
        check=True,
        env=os.environ | {"MPLCONFIGDIR": folder},
    )
    return folder


def run_environment(scratch: Path) -> dict[str, str]:
    """The caller's environment without what changes outputs: settings of JAX, Python, terminals, matplotlib."""
    drop = (
        "JAX_",
        "XLA_",
        "TF_",
        "PYTEST_",
        "PYTHON",
        "MPL",
        "NO_COLOR",
        "FORCE_COLOR",
        "COLUMNS",
        "LINES",
    )
    # Where it runs, how much of a GPU's memory it takes at once, where packages are (`make` unsets it).
    stay = ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop) or k.startswith(stay)}
    return kept | {
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "MPLCONFIGDIR": matplotlib_folder(),
    }


def fresh_run(paths: list[Path]) -> dict[str, tuple[object, float, str | None]]:
    """Each chapter run once under nbmake, in a copy of its folder: name to (notebook, seconds, failure)."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        copied = {
            *(path.name for path in paths),
            "results",
            "glossary.md",
        }  # and nothing that could have a say
        shutil.copytree(
            paths[0].parent,
            scratch / "notebooks",
            ignore=lambda folder, names: [
                name for name in names if Path(folder) == paths[0].parent and name not in copied
            ],
        )
        (scratch / "img").symlink_to(ROOT / "img")
        copies = [scratch / "notebooks" / path.name for path in paths]
        for copied in copies:  # without outputs: those of a cell that is not run would stay
            nbformat.write(without_outputs(nbformat.read(copied, 4)), copied)
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "--nbmake",
                "--overwrite",
                f"--nbmake-timeout={CELL_SECONDS}",
                "--nbmake-kernel=python3",
                "--junitxml=result.xml",
                f"--rootdir={scratch}",
                "-p",
                "no:cacheprovider",
                "-q",
                "--noconftest",
                "-c",
                os.devnull,
                "--disable-plugin-autoload",
                "-p",
                "nbmake.pytest_plugin",  # whatever else the machine's pytest has
                "-p",
                "xdist.plugin",
                "-n",
                str(min(AT_ONCE, len(copies))),
                *map(str, copies),
            ],
            cwd=scratch,
            env=run_environment(scratch),
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if not (scratch / "result.xml").exists():
            raise Refused(f"nbmake did not start:\n{run.stdout}")
        cases = {
            case.get("name"): case
            for case in ElementTree.parse(scratch / "result.xml").iter("testcase")
        }
        if missing := {path.name for path in copies} - set(cases):
            raise Refused(f"nbmake did not run {sorted(missing)}:\n{run.stdout}")
        return {
            path.stem: (
                nbformat.read(path, 4),
                float(cases[path.name].get("time")),
                failure(cases[path.name]),
            )
            for path in copies
        }


def failure(case: ElementTree.Element) -> str | None:
    """What nbmake said of a chapter that failed, without the colours (which XML spells out)."""
    for bad in case:
        if bad.tag in ("failure", "error"):
            return re.sub(r"(#x1B|\x1b)\[[0-9;]*m", "", bad.text or bad.get("message") or "failed")
    return None


def why_not_compared() -> str | None:
    """Why fresh outputs may rightly differ here from the committed ones, or None where they must not."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"they were made on linux x86_64, this is {sys.platform} {platform.machine()}"
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], set()).add(package.get("version", ""))
    for name, versions in sorted(
        locked.items(), key=lambda entry: (entry[0] not in ("jax", "jaxlib"), entry[0])
    ):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or of the extra for GPUs
        if installed not in versions:
            return f"{name} {installed} is installed, uv.lock has {' and '.join(sorted(versions))}"
    backend = subprocess.run(
        [sys.executable, "-c", "import helpers, jax; print(jax.default_backend())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if backend.returncode:
        raise Refused(f"JAX does not start:\n{backend.stderr}")
    return (
        None
        if backend.stdout.split()[-1] == "cpu"
        else "a GPU is attached, and its results are its own"
    )


def needs_hopper_compile(notebook) -> bool:
    return any("aot_compile" in cell.source for cell in notebook.cells if cell.cell_type == "code")


def standing_problems(path: Path, whole: bool = True) -> list[str]:
    """Problems of a pair that show without a run; with `whole` those of its files as well, by the locked versions."""
    notebook = nbformat.read(path, 4)
    found = static_problems(notebook, path.stem) + pair_problems(
        notebook, jupytext.read(path.with_suffix(".md"))
    )
    return found or (file_problems(path, notebook) if whole else [])


def check(paths: list[Path]) -> Report:
    """Run the chapters and hold their committed outputs and pairs against what came out."""
    for path in paths:
        for half in (path, path.with_suffix(".md")):
            if not half.exists():
                raise Refused(
                    f"{half.name} is missing: `make refresh` writes both halves of a pair"
                )
    report = Report(not_compared=why_not_compared())
    committed = {path.stem: nbformat.read(path, 4) for path in paths}
    for path in paths:
        report.problems[path.stem] = standing_problems(path, whole=not report.not_compared)
    # XLA's CUDA compiler comes for Linux only: elsewhere the chapters that compile for Hopper cannot run.
    runnable = [
        p for p in paths if sys.platform == "linux" or not needs_hopper_compile(committed[p.stem])
    ]
    results = fresh_run(runnable) if runnable else {}
    for name, notebook in committed.items():
        report.volatile += [
            f"{name} {describe(number, cell)}"
            for number, cell in enumerate(notebook.cells, 1)
            if cell.cell_type == "code" and VOLATILE in tags(cell)
        ]
        if name not in results:
            report.lines.append(f"{name:24} not run: it compiles for Hopper, which needs Linux")
            continue
        fresh, seconds, failed = results[name]
        report.lines.append(f"{name:24}{len(notebook.cells):4} cells {seconds:6.1f} s")
        report.problems[name] += [f"when run: {problem}" for problem in run_problems(fresh)]
        if failed:
            report.problems[name].append(f"fails when run:\n{failed}")
        elif not report.not_compared:
            report.problems[name] += compare(notebook, fresh)
    report.lines.append(
        f"{'together':24}{'':11}{sum(seconds for _, seconds, _ in results.values()):6.1f} s, "
        f"{AT_ONCE} at a time"
    )
    return report


def run_problems(fresh) -> list[str]:
    """Problems of a run that its outputs show: what went to stderr, a panel that is nothing without a kernel."""
    problems = []
    for number, cell in enumerate(fresh.cells, 1):
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                problems.append(
                    f"{describe(number, cell)} writes to stderr: {text_of(output.text)[:200]}"
                )
            if WIDGET in output.get("data", {}) and "text/html" not in output.data:
                problems.append(
                    f"{describe(number, cell)} shows a widget: where no kernel runs it needs text/html, as "
                    f"helpers.widgets.Panel gives it"
                )
    return problems


# Refreshing -----------------------------------------------------------------------------------------------------------


def edited_side(path: Path) -> str:
    """ "md" or "ipynb": the half of a pair that its author edited."""
    halves = {"ipynb": path, "md": path.with_suffix(".md")}
    present = {
        side: cells_of(jupytext.read(half)) for side, half in halves.items() if half.exists()
    }
    if len(present) == 1 or present["md"] == present["ipynb"]:
        return next(iter(present))
    committed = {side: committed_cells(half) for side, half in halves.items()}
    if not any(committed.values()):
        raise Refused(
            f"{path.stem}: the .ipynb and the .md differ, and git shows no commit here that tells which was "
            f"edited: say which to take, --from md or --from ipynb (make: FROM=md)"
        )
    changed = [side for side in halves if present[side] != committed[side]]
    if len(changed) != 1:
        raise Refused(
            f"{path.stem}: the .ipynb and the .md differ, and {'both' if changed else 'neither'} changed "
            f"since the last commit: say which to take, --from md or --from ipynb (make: FROM=md)"
        )
    return changed[0]


def committed_cells(path: Path) -> list[tuple] | None:
    show = ["git", "show", f"HEAD:./{path.name}"]
    try:
        shown = subprocess.run(
            show, cwd=path.parent, capture_output=True, text=True, check=True
        ).stdout
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # no git, no repository, not in its last commit
        return None
    return cells_of(jupytext.reads(shown, fmt=path.suffix[1:]))


def without_outputs(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def normalise(notebook):
    """A copy with nothing in it that a second run, another machine or JupyterLab would write differently. What is
    folded away is what the tags say: JupyterLab unfolds what it runs."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    title = notebook.cells[0].source.partition("\n")[0] if notebook.cells else ""
    seen: dict[str, int] = {}
    count = 0
    for cell in notebook.cells:
        said = set(tags(cell))
        folded = {key: True for key, by in FOLDS.items() if cell.cell_type == "code" and said & by}
        cell.metadata = nbformat.from_dict(
            {**({"jupyter": folded} if folded else {}), **({"tags": tags(cell)} if said else {})}
        )
        cell.source = cell.source.rstrip()
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = cell.execution_count and count
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
                if "execution_count" in output:
                    output.execution_count = count
        seen[cell.source] = seen.get(cell.source, 0) + 1
        cell.id = hashlib.sha256(f"{title} {seen[cell.source]} {cell.source}".encode()).hexdigest()[
            :8
        ]
    return notebook


def twin_of(notebook) -> str:
    """The .md of a normal notebook. It names no Jupytext version, so that an update of Jupytext changes no file."""
    return re.sub(
        r"\n +jupytext_version: .*", "", jupytext.writes(notebook, fmt="md:myst"), count=1
    )


def refresh(path: Path, side: str | None = None) -> bool:
    """Run a chapter and write both halves of its pair. True where something changed; a failing run writes nothing."""
    notebook = without_outputs(jupytext.read(path.with_suffix("." + (side or edited_side(path)))))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=[
                "--IPKernelApp.log_level=ERROR"
            ],  # nothing about how it talks to this process
            resources={"metadata": {"path": str(path.parent)}},
        ).execute(env=run_environment(Path(folder)))
    notebook = normalise(notebook)
    changed = False
    for half, text in (
        (path, nbformat.writes(notebook) + "\n"),
        (path.with_suffix(".md"), twin_of(notebook)),
    ):
        if not half.exists() or half.read_text() != text:
            in_one_step(half, text)
            changed = True
    return changed


# The command line -----------------------------------------------------------------------------------------------------


def find(names: list[str], folder: Path) -> list[Path]:
    """The chapters whose names begin with one of `names`; all of them for none."""
    halves = (path for end in ("ipynb", "md") for path in folder.glob(f"[0-9A-Z]*_*.{end}"))
    chapters = sorted({path.with_suffix(".ipynb") for path in halves})
    for name in names:
        if not any(path.stem.startswith(name) for path in chapters):
            raise Refused(
                f"no chapter begins with {name!r}; there are {', '.join(path.stem for path in chapters)}"
            )
    return [path for path in chapters if not names or path.stem.startswith(tuple(names))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["check", "refresh"])
    parser.add_argument("chapters", nargs="*", help="beginnings of names, such as 03; all without")
    parser.add_argument(
        "--from", dest="side", choices=["md", "ipynb"], help="the half to refresh from"
    )
    parser.add_argument(
        "--folder", type=Path, default=NOTEBOOKS, help=argparse.SUPPRESS
    )  # for the tests
    options = parser.parse_intermixed_args(arguments)
    try:
        paths = find(options.chapters, options.folder)
        if options.command == "refresh":
            if reason := why_not_compared():
                raise Refused(
                    f"outputs refreshed here would differ from everybody else's: {reason}"
                )
            for path in paths:
                print(
                    f"{path.stem}: {'rewritten' if refresh(path, options.side) else 'unchanged'}",
                    flush=True,
                )
            return 0
        report = check(paths)
    except (Refused, CellExecutionError, CellTimeoutError) as reason:
        print(reason, file=sys.stderr)
        return 2
    except DeadKernelError:
        print(
            "The kernel died: mostly for want of memory, or in the compiler. The chapter is as it was; run it in "
            "JupyterLab to see where.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("Stopped. The chapter that ran is as it was.", file=sys.stderr)
        return 130
    except OSError as error:
        print(mend(error), file=sys.stderr)
        return 2
    print(report)
    return int(any(report.problems.values()))


if __name__ == "__main__":
    sys.exit(main())
