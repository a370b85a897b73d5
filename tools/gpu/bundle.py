"""Write one folder to carry to a GPU machine that has no network: `make gpu-bundle`.

In it: the project as committed, what git knows of each of its files (so that a result can say
whether they were changed), the Python packages that such a machine lacks beside JAX, installed, and
the results so far. There `bash gpu-bundle/run` does what `make gpu` does here, and leaves its
results in the folder.
"""

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
UV = ROOT / ".tools" / "bin" / "uv"
PLACE = ROOT / "_build" / "gpu-bundle"
# A machine that runs JAX on a GPU has these and what comes with them; nobody there opens
# JupyterLab.
THERE = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "ml-dtypes",
    "numpy",
    "matplotlib",
    "flax",
    "optax",  # this and the next three come with JAX and Flax
    "orbax-checkpoint",
    "scipy",
    "rich",
    "nvidia-nvjitlink",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "jupyterlab",
    "jupyterlab-widgets",
    "widgetsnbextension",
    "debugpy",
    "jedi",
)
# What runs a chapter besides, by dependency group: several chapters at once; a look at what one
# shows.
CARRIED_TOO = {"test": ("pytest-xdist", "execnet"), "site": ("nh3",)}
RUN = """\
#!/usr/bin/env bash
[ -n "${{BASH_VERSION:-}}" ] || exec bash "$0" "$@"  # called as `sh run`
# Measures the attached Hopper GPU: what `make gpu` does, without a network and without installing
# anything. Give it the same options. Results go into the folder beside this file, or where
# --results says; the next run goes on there.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
python=${{PYTHON:-python3}}
stop() {{ echo "$*" >&2; exit 2; }}
ask='import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'
have=$("$python" -c "$ask") ||
    stop "no python3 runs here: name one, as in PYTHON=/path/to/python{python} bash $0"
[ "$have" = "{python} {machine}" ] || stop "the packages in this folder are for Python {python}" \\
    "on {machine}, and $python is $have: name another, as in PYTHON=/path/to/python3, or make" \\
    "the folder again with make gpu-bundle ARGS=\\"--python ${{have% *}} --machine ${{have#* }}\\""
needs='import jax, flax, matplotlib'
"$python" -c "$needs" 2>/dev/null || stop "$python needs JAX for CUDA 13 (0.10.2 or newer), Flax" \\
    "(0.12.8) and matplotlib, which this folder does not bring:" \\
    "$("$python" -c "$needs" 2>&1 | tail -n 1)"
work=${{TMPDIR:-/tmp}}/fp8-gpu-$(id -u)
unpacked=$work/$(cat "$here/packages.tar.gz" "$here/project.tar.gz" | cksum | tr ' ' -)
if [ ! -d "$unpacked" ]; then  # in one step: a run that is cut off here leaves nothing half done
    new=$unpacked.$$
    mkdir -p "$new/packages" "$new/project"
    tar -C "$new/packages" -xzf "$here/packages.tar.gz"
    tar -C "$new/project" -xzf "$here/project.tar.gz"
    mv "$new" "$unpacked" 2>/dev/null || rm -rf "$new"
fi
export PYTHONUNBUFFERED=1 PYTHONPATH=$unpacked/packages${{PYTHONPATH:+:$PYTHONPATH}}
# The home folder may be read-only.
export MPLCONFIGDIR=$work/matplotlib IPYTHONDIR=$work/ipython JUPYTER_RUNTIME_DIR=$work/jupyter
exec "$python" "$unpacked/project/tools/gpu" --bundle "$here" --work "$work" "$@"
"""


def git(*words: str) -> str:
    """What git says of this checkout; of none above it, where an archive may be unpacked."""
    not_above = os.environ | {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    return subprocess.run(
        ["git", *words], cwd=ROOT, env=not_above, check=True, capture_output=True, text=True
    ).stdout


def tree() -> str:
    """The commit, and git's line for each file of it. SystemExit where the files differ from it."""
    try:
        if changed := git("status", "--porcelain"):
            raise SystemExit(
                f"{changed}Results name the commit they were made from: commit these, or "
                "`git stash -u`."
            )
        return git("rev-parse", "HEAD") + git("ls-tree", "-r", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"results name the commit they were made from, and this is no git checkout: {error}"
        ) from None


def exported(*choice: str) -> list[str]:
    """The locked packages of some dependency groups, one a line, as `uv export` writes them.
    SystemExit where uv fails, which has said why."""
    command = [str(UV), "export", "--quiet", "--locked", "--no-default-groups", *choice]
    command += ["--no-emit-project", "--no-hashes", "--no-annotate"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise SystemExit(f"uv could not list the locked packages{why(made.returncode)}")
    return made.stdout.splitlines()


def why(status: int) -> str:
    """Whether a failed command may have lacked memory: the kernel ends it with SIGKILL then."""
    return ": memory ran out" if status in (-signal.SIGKILL, 128 + signal.SIGKILL) else ""


def requirements() -> str:
    """The locked packages that a GPU machine lacks: what runs and checks a notebook."""
    prune = [word for name in THERE for word in ("--prune", name)]
    found = exported("--group", "course", "--group", "lab", *prune)
    for group, names in CARRIED_TOO.items():
        of_group = exported("--group", group)
        found += [line for line in of_group if line.partition("==")[0] in names]
    return "\n".join(found)


def packages(python: str, machine: str) -> bytes:
    """Those packages, installed for another machine than this one, as a compressed archive."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, site = Path(folder, "requirements.txt"), Path(folder, "site")
        wanted.write_text(requirements())
        install = [
            str(UV),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--link-mode",
            "copy",
            "--python-version",
            python,
            "--python-platform",
            f"{machine}-manylinux_2_28",
            "--target",
            str(site),
            "--requirement",
            str(wanted),
        ]
        if status := subprocess.run(install).returncode:
            raise SystemExit(
                f"the packages could not be had{why(status)}: making the folder needs a network, "
                "using it does not"
            )
        for unwanted in [*site.rglob("__pycache__"), *map(site.joinpath, ("bin", "share", "etc"))]:
            shutil.rmtree(unwanted, ignore_errors=True)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=9) as archive:
            for path in sorted(site.glob("[!.]*")):
                archive.add(path, arcname=path.name)
        return packed.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Write the folder. The exit status."""
    parser = argparse.ArgumentParser(prog="make gpu-bundle", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--to", type=Path, default=PLACE, help="the folder to write (_build/gpu-bundle)"
    )
    parser.add_argument(
        "--python", default="3.12", choices=("3.12", "3.13"), help="the Python there (3.12)"
    )
    parser.add_argument(
        "--machine",
        default="x86_64",
        choices=("x86_64", "aarch64"),
        help="what `uname -m` prints there (x86_64)",
    )
    options = parser.parse_args(arguments)
    known = tree()
    place = options.to.resolve()
    print("collecting the packages", flush=True)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "run").exists() and any(place.iterdir()):
        parser.error(f"{place} has other things in it: name a new folder")
    (place / "packages.tar.gz").write_bytes(packages(options.python, options.machine))
    subprocess.run(
        ["git", "archive", "--format=tar.gz", f"--output={place / 'project.tar.gz'}", "HEAD"],
        cwd=ROOT,
        check=True,
    )
    (place / "tree").write_text(known)
    (place / ".gitignore").write_text("*\n")  # wherever in a checkout it is, it is no change to it
    (place / "run").write_text(RUN.format(python=options.python, machine=options.machine))
    for recorded in (ROOT / "notebooks" / "results").glob("*/*.*"):
        carried = place / "results" / recorded.parent.name / recorded.name
        if not carried.exists():  # what came back from a run before is newer
            carried.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(recorded, carried)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    results = sorted(path.relative_to(place).as_posix() for path in place.glob("results/*/*.json"))
    shown = place.relative_to(ROOT) if place.is_relative_to(ROOT) else place
    print(
        f"{shown}: {size / 1e6:.1f} MB, commit {known[:12]}, for Python {options.python} on "
        f"{options.machine}; results so far: {', '.join(results) or 'none'}\n"
        f"Carry the folder to the machine, and there: bash {shown.name}/run"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MemoryError:
        sys.exit("Memory ran out: close other programs, and run the same command again.")
