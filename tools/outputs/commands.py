"""Keep the chapters' outputs true: `check` compares them with a fresh run, `refresh` rewrites
them.
"""

import argparse
import base64
import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat

from tools.files import in_one_step
from tools.outputs.chapters import NOTEBOOKS, ROOT, Refused, find, with_contents
from tools.outputs.comparison import compare
from tools.outputs.notebook import VOLATILE, cells_of, describe, normalise, tags, written
from tools.outputs.rules import standing_problems
from tools.outputs.run import AT_ONCE, Run, fresh_run, run, why_not_compared

ENDS = {"ipynb": ".ipynb", "md": ".md"}
README = ROOT / "README.md"
# One picture: drawn, for the README, and in pixels, for where somebody shares a link.
DRAWN, PIXELS = ROOT / "img" / "one_call.svg", ROOT / "img" / "one_call.png"


# Checking -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """What a check found: a line a chapter, the volatile cells, why nothing was compared, problems
    by chapter.
    """

    lines: list[str] = dataclasses.field(default_factory=list)
    volatile: list[str] = dataclasses.field(default_factory=list)
    not_compared: str | None = None
    problems: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [*self.lines]
        lines.append(f"volatile cells, run and not compared: {', '.join(self.volatile) or 'none'}")
        if self.not_compared:
            lines.append(f"no outputs were compared: {self.not_compared}")
        else:
            lines.append("outputs compared with a fresh run, character by character")
        for name, problems in self.problems.items():
            lines += [f"\n{name}: {problem}" for problem in problems]
        found = sum(map(len, self.problems.values()))
        lines.append(f"\n{found} problems" if found else "no problems")
        return "\n".join(lines)


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
    # XLA's CUDA compiler comes for Linux only: elsewhere the chapters that compile for Hopper
    # cannot run.
    runnable = [
        path for path in paths if sys.platform == "linux" or not _compiles(committed[path.stem])
    ]
    results = fresh_run(runnable) if runnable else {}
    for path in paths:
        report.problems[path.stem] = standing_problems(path, whole=not report.not_compared)
        _add(report, path.stem, committed[path.stem], results.get(path.stem))
    seconds = sum(result.seconds for result in results.values())
    report.lines.append(f"{'together':24}{'':11}{seconds:6.1f} s, {AT_ONCE} at a time")
    return report


def _compiles(notebook) -> bool:
    return any("aot_compile" in cell.source for cell in notebook.cells if cell.cell_type == "code")


def _add(report: Report, name: str, committed, fresh: Run | None) -> None:
    """Add to a report what the run of one chapter says; `fresh` is None where it was not run."""
    for number, cell in enumerate(committed.cells, 1):
        if VOLATILE in tags(cell):
            report.volatile.append(f"{name} {describe(number, cell)}")
    if fresh is None:
        report.lines.append(f"{name:24} not run: it compiles for Hopper, which needs Linux")
        return
    report.lines.append(f"{name:24}{len(committed.cells):4} cells {fresh.seconds:6.1f} s")
    problems = report.problems[name]
    problems += [f"when run: {problem}" for problem in fresh.problems]
    if fresh.failure:
        problems.append(f"fails when run:\n{fresh.failure}")
    elif not report.not_compared:
        problems += compare(committed, fresh.notebook)


# Refreshing ---------------------------------------------------------------------------------------


def edited_side(path: Path) -> str:
    """Return "md" or "ipynb": the half of a pair that its author edited. Raises Refused where git
    does not tell.
    """
    present = {}
    for side, end in ENDS.items():
        if path.with_suffix(end).exists():
            present[side] = cells_of(jupytext.read(path.with_suffix(end)))
    if len(present) == 1 or present["md"] == present["ipynb"]:
        return next(iter(present))
    committed = {side: _committed_cells(path.with_suffix(end)) for side, end in ENDS.items()}
    take = "say which to take, --from md or --from ipynb (make: FROM=md)"
    if not any(committed.values()):
        raise Refused(
            f"{path.stem}: the .ipynb and the .md differ, and git shows no commit here that tells "
            f"which was edited: {take}"
        )
    changed = [side for side in ENDS if present[side] != committed[side]]
    if len(changed) != 1:
        which = "both" if changed else "neither"
        raise Refused(
            f"{path.stem}: the .ipynb and the .md differ, and {which} changed since the last "
            f"commit: {take}"
        )
    return changed[0]


def _committed_cells(path: Path) -> list[tuple] | None:
    show = ["git", "show", f"HEAD:./{path.name}"]
    try:
        shown = subprocess.run(show, cwd=path.parent, capture_output=True, text=True, check=True)
    # no git, no repository, not in its last commit
    except (OSError, subprocess.CalledProcessError):
        return None
    return cells_of(jupytext.reads(shown.stdout, fmt=path.suffix[1:]))


def refresh(paths: list[Path], side: str | None = None) -> list[str]:
    """Run chapters and write both halves of their pairs. Returns what to tell of each.

    Raises Refused where one fails: its pair stays as it was, as do those of the chapters after it.
    """
    said = []
    sides = {path: side or edited_side(path) for path in paths}
    # A few at a time, so that what was done before an interruption is kept.
    for batch in itertools.batched(paths, AT_ONCE):
        sources = {path.stem: jupytext.read(path.with_suffix(ENDS[sides[path]])) for path in batch}
        results = run(sources, batch[0].parent)
        for path in batch:
            if failed := results[path.stem].failure:
                raise Refused(f"{path.stem} fails, and stays as it was:\n{failed}")
            changed = _write(path, written(normalise(results[path.stem].notebook)))
            said.append(f"{path.stem}: {'rewritten' if changed else 'unchanged'}")
    return said


def _write(path: Path, halves: dict[str, str]) -> bool:
    """Write the halves of a pair that differ. True where one did."""
    changed = False
    for end, text in halves.items():
        half = path.with_suffix(end)
        if not half.exists() or half.read_text() != text:
            in_one_step(half, text)
            changed = True
    return changed


# What the README has of the chapters --------------------------------------------------------------


def readme_wanted() -> dict[Path, bytes]:
    """The README with its tables of chapters, and its picture, an output of chapter 06, as they
    should be.
    """
    readme = with_contents(README.read_text(encoding="utf-8"))
    return {README: readme.encode(), **_picture_of_chapter()}


def _picture_of_chapter() -> dict[Path, bytes]:
    notebook = nbformat.read(NOTEBOOKS / "06_bias_matmul.ipynb", 4)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "".join(data.get("text/plain", "")).startswith("Megabytes moved"):
                drawn = f"{''.join(data['image/svg+xml'])}\n".encode()
                return {DRAWN: drawn, PIXELS: base64.b64decode(data["image/png"])}
    raise Refused("chapter 06 has lost the picture that the README shows: Megabytes moved")


# The command line ---------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Carry out `check` or `refresh`: 0 where all is well, 1 for problems, 2 where it cannot be
    carried out.
    """
    parser = argparse.ArgumentParser(prog="tools.outputs", description=__doc__)
    parser.add_argument("command", choices=["check", "refresh"])
    parser.add_argument("chapters", nargs="*", help="beginnings of names, such as 03; all without")
    parser.add_argument("--from", dest="side", choices=["md", "ipynb"], help="the half to take")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.command == "refresh":
            return _refresh_all(options)
        report = check(find(options.chapters, options.folder))
    except Refused as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. The chapter that ran is as it was.", file=sys.stderr)
        return 130
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return int(any(report.problems.values()))


def _refresh_all(options: argparse.Namespace) -> int:
    paths = find(options.chapters, options.folder)
    if reason := why_not_compared():
        raise Refused(f"outputs refreshed here would differ from everybody else's: {reason}")
    print("\n".join(refresh(paths, options.side)), flush=True)
    if options.folder == NOTEBOOKS:
        for path, content in readme_wanted().items():
            if not path.exists() or path.read_bytes() != content:
                in_one_step(path, content)
                print(f"{path.name}: rewritten")
    return 0
