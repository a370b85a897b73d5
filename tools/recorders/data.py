"""What records share: where each is from, how it is written, and how one that has rows for several
JAX releases is made.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.records.results import digest
from tools.environments import ROOT, variables, with_packages

RESULTS = ROOT / "notebooks" / "results"
# A release is these four, in one version.
OF_JAX = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
# These have the lock's versions with every release.
ASSEMBLER = ("nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-runtime")
# Pallas imports it for Mosaic GPU, and JAX does not ask for it.
OF_PALLAS = ("absl-py",)

# Any record -------------------------------------------------------------------------------------


def provenance(command: str, *packages: str) -> dict[str, Any]:
    """When, where, by which command and with which packages a record is made."""
    return {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "command": command,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def signed(made: Mapping[str, Any]) -> dict[str, Any]:
    """What was made, with its digest, by which a loader knows that nobody has altered it."""
    return {**made, "digest": digest(made)}


def write(path: Path, made: Mapping[str, Any], levels: int = 9) -> None:
    """Write a record as JSON: in so many outer levels a line for each entry of an object."""
    path.write_text(as_text(made, levels) + "\n")


def as_text(value: Any, levels: int, indent: int = 1) -> str:
    """A value as JSON. A changed entry is a changed line, and a long list stays on one."""
    if levels == 0 or not isinstance(value, Mapping):
        return json.dumps(value)
    lines = [
        f"{' ' * indent}{json.dumps(key)}: {as_text(inner, levels - 1, indent + 1)}"
        for key, inner in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n" + " " * (indent - 1) + "}"


# JAX's releases -----------------------------------------------------------------------------------


def by_number(version: str) -> tuple[int, ...]:
    """The numbers of a version, to sort by."""
    return tuple(map(int, version.split(".")))


def locked() -> dict[str, str]:
    """Versions in the lock, by package."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return {package["name"]: package["version"] for package in packages if "version" in package}


def pinned(version: str) -> list[str]:
    """The packages of a JAX release, as uv takes them."""
    lock = locked()
    beside = [f"{name}=={lock[name]}" for name in (*ASSEMBLER, *OF_PALLAS)]
    return [f"{name}=={version}" for name in OF_JAX] + beside


def environment(version: str) -> list[str]:
    """The start of a command for a Python that has this JAX release alone."""
    return [*with_packages(*pinned(version)), "python"]


def measured_by(
    version: str, python: Sequence[str], module: str, names: Sequence[str]
) -> dict[str, Any]:
    """What `module` measures of the rows of these names, in a process of that Python's, which has
    that JAX. SystemExit where it fails.
    """
    quiet = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "names-then-rows.json")
        file.write_text(json.dumps(names))
        command = [*python, "-m", module, "--measure", str(file)]
        run = subprocess.run(command, env=variables(**quiet), cwd=ROOT)
        if run.returncode:
            raise SystemExit(f"JAX {version}: {module} ended with status {run.returncode}")
        return json.loads(file.read_text())


def first_line(error: Exception) -> str:
    """An error as it stands in a row: its type and its first line, without the paths, lines and
    names that change.
    """
    said = (str(error).strip().splitlines() or [""])[0].rstrip(";:")
    said = re.sub(r" ?\((external/|/).*?\)| while visiting instruction .*", "", said)
    return f"{type(error).__name__}: {said}"


def is_news(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether more than the date differs from what was recorded before."""
    as_dated = {**before, "date": now["date"], "digest": now["digest"]}
    return as_dated != now


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Each row that differs, as it was and as it is."""
    return [
        f"{name}: {json.dumps(old.get(name))}, now {json.dumps(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


@dataclasses.dataclass(frozen=True)
class Record:
    """A record with rows for several JAX releases, in notebooks/results/NAME.json.

    Each release measures its rows in an environment of its own: `names` are those of a release's
    rows, in their order, and `rows` measures the ones of these names with what is installed.
    `beside` is what the file has besides.
    """

    name: str
    module: str
    about: str
    releases: tuple[str, ...]  # beside the lock's
    names: Callable[[str], Sequence[str]]
    rows: Callable[[Sequence[str]], dict[str, Any]]
    libraries: tuple[str, ...] = ()
    environment: Callable[[str], list[str]] = environment
    beside: Callable[[], dict[str, Any]] = dict

    @property
    def path(self) -> Path:
        """The file."""
        return RESULTS / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """What is recorded: release to what was measured, oldest first."""
        return json.loads(self.path.read_text())["releases"]

    def write(self, releases: Mapping[str, Any]) -> None:
        """Write the file, a line a row."""
        ordered = {version: releases[version] for version in sorted(releases, key=by_number)}
        about = f"{self.about} Written by `make {self.name}`, not by hand."
        write(self.path, {"about": about, **self.beside(), "releases": ordered}, levels=4)

    def measured(self, names: Sequence[str]) -> dict[str, Any]:
        """The rows of these names with what is installed here, and their provenance."""
        packages = (*OF_JAX, *ASSEMBLER, *self.libraries)
        return provenance(f"make {self.name}", *packages) | {"rows": self.rows(names)}

    def record(self, version: str, only: str = "") -> None:
        """Measure the rows with `only` in their names with that release, print what changed, and
        write the file. The other rows stay.
        """
        releases = self.read()
        before = releases.get(version, {"rows": {}})
        names = self.names(version)
        chosen = [name for name in names if only in name]
        now = measured_by(version, self.environment(version), self.module, chosen)
        if only and before.get("packages") != now["packages"]:
            raise SystemExit("the other rows are of other packages: measure all, without --only")
        rows = before["rows"] | now["rows"]
        now = signed(now | {"rows": {name: rows[name] for name in names if name in rows}})
        found = changes(before["rows"], now["rows"])
        print(f"JAX {version}: {len(chosen)} rows measured, {len(found)} changes", flush=True)
        for line in found:
            print(f"  {line}")
        # The date stays that of the first time.
        self.write(releases | {version: now if is_news(before, now) else before})

    def main(self, arguments: list[str] | None = None) -> None:
        """Record what the command line asks for."""
        parser = argparse.ArgumentParser(description=self.about)
        parser.add_argument("releases", nargs="*", help="JAX releases, such as 0.11.2; or all")
        parser.add_argument("--only", default="", metavar="NAME", help="rows with this in the name")
        # What runs in each environment: the file has names of rows, and then the rows.
        parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
        options = parser.parse_args(arguments)
        if file := options.measure:
            file.write_text(json.dumps(self.measured(json.loads(file.read_text()))))
            return
        every = {*self.releases, locked()["jax"], *self.read()}
        for version in sorted(options.releases or every, key=by_number):
            self.record(version, options.only)
