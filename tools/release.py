"""Build a release of fp8lens and try it, as the workflow does before it publishes.

    python -m tools.release _build/dist --tag v0.1.0   # the version in pyproject.toml

The wheel and the sdist go to the folder. Each try installs the wheel into an empty environment: one
without JAX reads a saved program, and one with the extra `jax` compiles the README's layer.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.environments import ROOT, UV

DUMP = ROOT / "tests" / "fp8lens" / "hlo" / "jax_0_4_32_bf16_scaled.txt"


def check_tag(tag: str) -> None:
    """SystemExit, if the files do not all tell of the version that the tag names."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise SystemExit(
            f"the tag is {tag!r}, and pyproject.toml has version {version!r}: tag v{version}, "
            "or change the version."
        )
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(
            f"CHANGELOG.md has no section [{version}]: rename what is Unreleased, with the date."
        )


def build(folder: Path, *options: str) -> Path:
    """Build sdist and wheel into a folder, the wheel from the sdist. Returns the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: what is in it would be published too.")
    uv("build", "--out-dir", folder, "--python", sys.executable, *options)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, package: str, *options: str) -> Path:
    """Make an empty environment, and install a package into it. Returns its command `fp8lens`."""
    uv("venv", "--python", sys.executable, "--no-project", folder)
    uv("pip", "install", "--python", folder / "bin" / "python", *options, package)
    return folder / "bin" / "fp8lens"


def read_a_dump(command: Path) -> None:
    """Try a command without JAX: it reads a saved program."""
    with tempfile.TemporaryDirectory() as elsewhere:  # where no checkout can be imported
        python = command.with_name("python")
        has_jax = "import importlib.util; print(importlib.util.find_spec('jax') is not None)"
        if answer([python, "-I", "-c", has_jax], elsewhere) == "True\n":
            raise SystemExit(f"{command} has JAX beside it: give one that reads without it.")
        told = answer([command, DUMP], elsewhere)
    if "1 matmul, 0 in FP8" not in told:
        raise SystemExit(f"{DUMP.name} was read otherwise:\n{told}")


def compile_the_readmes_layer(command: Path) -> None:
    """Try a command with JAX: it finds the README's layer to be FP8."""
    readme = (ROOT / "fp8lens" / "README.md").read_text()
    (layer,) = re.findall(r"`layer.py` is\n\n```python\n(.*?)```", readme, re.S)
    (shapes,) = re.findall(r'fp8lens layer.py:layer --shapes "(.*?)"', readme)
    with tempfile.TemporaryDirectory() as elsewhere:
        Path(elsewhere, "layer.py").write_text(layer)
        answer([command, "layer.py:layer", "--shapes", shapes, "--require-fp8"], elsewhere)


def uv(*arguments: str | Path) -> None:
    """Run uv; SystemExit where it fails, which it says itself."""
    if subprocess.run([UV, *arguments], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"uv {arguments[0]} failed.")


def answer(command: list[str | Path], folder: str) -> str:
    """What a command prints, run in a folder; SystemExit with all it says where it fails."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}:\n{said}")
    return done.stdout


def main() -> None:
    """Check the tag, build, and try what was built."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="an empty folder for wheel and sdist")
    parser.add_argument("--tag", required=True, help="v and the version, as in v0.1.0")
    given = parser.parse_args()
    check_tag(given.tag)
    wheel = build(given.folder.resolve())
    with tempfile.TemporaryDirectory() as scratch:
        read_a_dump(install(Path(scratch, "alone"), str(wheel)))
        compile_the_readmes_layer(install(Path(scratch, "jax"), f"{wheel}[jax]"))
    print(f"{wheel.name} is built and tried.")


if __name__ == "__main__":
    main()
