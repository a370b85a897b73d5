"""The packages and the chapters on the oldest JAX that pyproject.toml allows, the packages on the other Python.

Each has an environment of its own, kept between runs: .venv-oldest, with the lowest version of everything that
pyproject.toml names, and .venv-py313, with the lock's. A part is tried in each run, all of it with NIGHTLY=1, as once a
week in CI: it would be half of `make test`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NIGHTLY = bool(os.environ.get("NIGHTLY"))
BIN = "Scripts" if os.name == "nt" else "bin"
UV = str(ROOT / ".tools" / BIN / "uv")
MODULES = {
    "properties",
    *(path.stem for path in (ROOT / "helpers").glob("*.py")),
    *(
        "_".join(path.relative_to(ROOT / "fp8lens").with_suffix("").parts)
        for path in (ROOT / "fp8lens").rglob("*.py")
    ),
}
# It compiles large programs for minutes, and what it holds the other files' tests try on the oldest JAX too.
MODULES -= {"autotune"}
# What draws, and the large model, is tried by the chapters, on the oldest JAX too.
MODULES -= {"fusion", "plots", "gpt"}
# Tried in each run: three of the chapters, and of the packages what calls JAX or reads what it prints.
CHAPTERS = ("02", "05", "11")
CALLS_JAX = ("compile", "hlo_parse", "nnx", "recipes", "report", "stages")
PACKAGE_TESTS = [
    str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if path.stem[5:] in MODULES
]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    dropped = ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST", "NIGHTLY")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=kept | {"UV_SYSTEM_CERTS": "1"} | environment,
    )


def environment(name: str, python: str, *commands: list[str]) -> str:
    """Program of an environment for Python version `python`, made anew when `commands`, pyproject.toml or uv.lock have
    changed."""
    if not shutil.which(UV):
        pytest.skip("needs .tools/bin/uv: run through make")
    wanted = hashlib.sha256(
        repr(commands).encode()
        + (ROOT / "pyproject.toml").read_bytes()
        + (ROOT / "uv.lock").read_bytes()
    ).hexdigest()
    stamp = ROOT / name / "made-from"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(ROOT / name, ignore_errors=True)
        for command in commands:
            # pyenv hides every other version than .python-version's
            made = run([UV, *command], UV_PROJECT_ENVIRONMENT=name, PYENV_VERSION=python)
            if made.returncode:
                signs = ("dns error", "Connect", "timed out", "No interpreter")
                unreachable = any(sign in made.stdout for sign in signs)
                if unreachable and not os.environ.get("CI"):
                    pytest.skip(f"{name} could not be made: {made.stdout.strip().splitlines()[-1]}")
                pytest.fail(f"uv {' '.join(command)}\n{made.stdout}")
        stamp.write_text(wanted)
    return str(ROOT / name / BIN / "python")


@pytest.fixture(scope="module")
def oldest() -> str:
    python = str(Path(".venv-oldest") / BIN / "python")
    return environment(
        ".venv-oldest",
        "3.12",
        ["venv", "--quiet", "--python", "3.12", ".venv-oldest"],
        [
            "pip",
            "install",
            "--quiet",
            "--python",
            python,
            "--resolution",
            "lowest-direct",
            "-e",
            ".[jax]",
            "--group",
            "course",
            "--group",
            "lab",
            "--group",
            "test",
        ],
    )


@pytest.fixture(scope="module")
def other_python() -> str:
    other = "3.13" if sys.version_info[:2] == (3, 12) else "3.12"
    return environment(
        f".venv-py{other.replace('.', '')}",
        other,
        ["sync", "--quiet", "--locked", "--python", other],
    )


def test_oldest_is_what_pyproject_names(oldest):
    result = run([oldest, "-c", "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)"])
    assert result.stdout.split() == ["0.10.2", "0.10.2"]
    assert "jax>=0.10.2" in (ROOT / "pyproject.toml").read_text()


def test_packages_on_the_oldest_jax(oldest):
    # What reads texts alone, or arguments, is the same with every JAX: the other Python tries it.
    texts = ("properties", "hlo_text", "cli")
    tests = [
        path
        for path in PACKAGE_TESTS
        if (Path(path).stem[5:] not in texts if NIGHTLY else Path(path).stem[5:] in CALLS_JAX)
    ]
    result = run([oldest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    assert result.returncode == 0, result.stdout[-6000:]


@pytest.mark.skipif(
    sys.platform != "linux", reason="the chapters compile for Hopper, which needs Linux"
)
def test_chapters_on_the_oldest_jax(oldest):
    result = run([oldest, "tools/outputs", "check", *(() if NIGHTLY else CHAPTERS)])
    assert result.returncode == 0, result.stdout[-6000:]
    assert "no outputs were compared: " in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only")
def test_recorded_rows_on_the_oldest_jax(oldest):
    result = run([oldest, "tools/records/releases.py", "--check"])
    assert result.returncode == 0, result.stdout[-6000:]


def test_packages_on_the_other_python(other_python):
    # These take long, and hold nothing of Python's own: the oldest JAX tries the most of them.
    long = (*CALLS_JAX, "reasons", "collectives", "ledger", "properties")
    tests = [path for path in PACKAGE_TESTS if NIGHTLY or Path(path).stem[5:] not in long]
    result = run([other_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    assert result.returncode == 0, result.stdout[-6000:]
