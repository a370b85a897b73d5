"""What three records share, of JAX's releases, of its libraries and of the rules' programs: the
command line, how a release is measured in an environment of its own, and how the data is read,
compared and written.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from helpers.records.results import digest
from tools.environments import Environment, NotMadeError, variables
from tools.files import in_one_step

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = "3.12"  # the oldest that all releases run on: JAX 0.11 asks for it
# A release is these four, in one version.
OF_JAX = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
# These have the lock's versions with every release.
ASSEMBLER = ("nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-runtime")
# Pallas imports it for Mosaic GPU, and JAX does not ask for it.
OF_PALLAS = ("absl-py",)

# Command line -----------------------------------------------------------------------------------


def read_arguments(about: str, arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of one of the three commands: releases, check, only, measure."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("releases", nargs="*", help="JAX releases, such as 0.11.2; all without")
    parser.add_argument("--check", action="store_true", help="compare what is installed")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="measure the rows with this in their name; the other rows stay as recorded, if they "
        "are of the same packages",
    )
    # What runs in each environment.
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in options.releases:
        if not re.fullmatch(r"\d+([.]\d+)+", name):
            parser.error(f"{name!r} is no release of JAX: one looks like 0.11.2")
    if options.check and options.releases:
        parser.error("--check compares what is installed: it takes no release")
    return options


def status(problems: list[str], fine: str) -> int:
    """Print the problems, or `fine` where there is none; the exit status."""
    print("\n".join(problems) or fine)
    return 1 if problems else 0


def carry_out(
    options: argparse.Namespace,
    measured: Callable[[str], dict[str, Any]],
    problems: Callable[[str], list[str]],
    fine: str,
    record: Callable[[list[str], str], int],
) -> int:
    """Measure, compare or record, as the arguments say, each with --only; the exit status."""
    if options.measure:
        in_one_step(options.measure, json.dumps(measured(options.only)))
        return 0
    if options.check:
        try:
            return status(problems(options.only), fine)
        except ValueError as error:  # of a file that was altered
            return status([str(error)], fine)
    return record(options.releases, options.only)


# Measuring --------------------------------------------------------------------------------------


def pinned(version: str) -> tuple[str, ...]:
    """The packages of a JAX release, as uv takes them."""
    lock = locked()
    jax = [f"{name}=={version}" for name in OF_JAX]
    return (*jax, *(f"{name}=={lock[name]}" for name in (*ASSEMBLER, *OF_PALLAS)))


def environment(version: str) -> Path:
    """The Python of an environment with that JAX release alone; SystemExit where it cannot be
    made.
    """
    return made(Environment(f"release-{version}", PYTHON, install=pinned(version)))


def made(environment: Environment) -> Path:
    """The Python of an environment; SystemExit where it cannot be made."""
    try:
        return environment.make()
    except NotMadeError as error:
        raise SystemExit(str(error)) from error


def measure(version: str, python: Path, module: str, only: str, *more: str) -> dict[str, Any]:
    """What `module` measures with that release, in a process of that Python's, with `more`
    options.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        run_with(version, python, module, "--measure", str(out), *more, "--only", only)
        return json.loads(out.read_text())


def run_with(version: str, python: Path, module: str, *options: str) -> None:
    """Run `module` with that release, in a process of that Python's. SystemExit where it fails."""
    quiet = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run([str(python), "-m", module, *options], env=variables(**quiet), cwd=ROOT)
    if run.returncode:
        raise SystemExit(
            f"JAX {version} could not measure: exit status {run.returncode}, see above"
        )


def first_line(error: Exception) -> str:
    """An error as it stands in a row: its type and its first line, without the paths, lines and
    names that change.
    """
    said = (str(error).strip().splitlines() or [""])[0].rstrip(";:")
    said = re.sub(r" ?\((external/|/).*?\)| while visiting instruction .*", "", said)
    return f"{type(error).__name__}: {said}"


def version_of(package: str) -> str | None:
    """The version that is installed, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(command: str, *packages: str) -> dict[str, Any]:
    """When, where, by which command and with which packages a record is made."""
    return {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "command": command,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version_of(name) for name in packages},
    }


def with_provenance(rows: Mapping[str, Any], command: str, *packages: str) -> dict[str, Any]:
    """The rows, and where they are from."""
    made = provenance(command, *packages) | {"rows": rows}
    return made | {"digest": digest(json.loads(json.dumps(made)))}


def by_number(version: str) -> tuple[int, ...]:
    """The numbers of a version, to sort by."""
    return tuple(map(int, re.findall(r"\d+", version)))


def locked() -> dict[str, str]:
    """Versions in the lock, by package."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return {package["name"]: package["version"] for package in packages if "version" in package}


# The data ---------------------------------------------------------------------------------------


def read(path: Path, command: str) -> dict[str, Any]:
    """The releases in a file, for recording more: none where it is missing.

    A release that was altered is returned too, for `is_news` finds it, and helpers.records.results
    refuses it.
    """
    try:
        found = json.loads(path.read_text())["releases"] if path.exists() else {}
        return {version: entry for version, entry in found.items() if entry["rows"] is not None}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path.name} cannot be read ({error!r}): take it from git, or delete it and run "
            f"`{command}`"
        ) from error


def is_news(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether more than the date differs from what was recorded before, or that was altered."""
    as_dated = {**before, "date": now["date"], "digest": now["digest"]}
    return before.get("digest") != digest(before) or as_dated != now


def merged(before: Mapping[str, Any], now: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What was measured now, and the rest of these rows as they were recorded before, with the
    same packages.
    """
    same = (
        before
        and before["packages"].items() <= now["packages"].items()
        and before["python"] == now["python"]
    )
    if not same:
        raise SystemExit(
            "the recorded rows are not of these packages and this Python: measure all, without "
            "--only"
        )
    rows = before["rows"] | now["rows"]
    made = now | {"rows": {name: rows[name] for name in names if name in rows}}
    return made | {"digest": digest(made)}


def write(path: Path, about: str, releases: Mapping[str, Any]) -> None:
    """Write the releases to a file, with what it is about."""
    in_one_step(path, f'{{\n "about": {json.dumps(about)},\n {as_text(releases)}\n}}\n')


def as_text(releases: Mapping[str, Any]) -> str:
    """The releases as JSON, a line a row, so that a changed row is a changed line."""
    ordered = sorted(releases, key=by_number)
    text = [f"  {json.dumps(version)}: {_entry_as_text(releases[version])}" for version in ordered]
    return '"releases": {\n' + ",\n".join(text) + "\n }"


def _entry_as_text(entry: Mapping[str, Any]) -> str:
    rows = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in entry["rows"].items()]
    provenance = [
        f"   {json.dumps(key)}: {json.dumps(value)}"
        for key, value in entry.items()
        if key != "rows"
    ]
    lines = [*provenance, '   "rows": {\n' + ",\n".join(rows) + "\n   }"]
    return "{\n" + ",\n".join(lines) + "\n  }"
