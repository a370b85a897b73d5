"""The packages and the chapters on the oldest JAX that pyproject.toml allows, the packages on the
other Python.

A chapter is tried in each run, on the oldest JAX. NIGHTLY=1, as in CI
once a week, tries all of it, and the other Python.
"""

import os
import subprocess
import sys
import tomllib

import pytest

from tests.weekly import NIGHTLY
from tools.environments import ROOT, run, variables
from tools.outputs import chapters

NEEDS_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
LOWEST = [
    f"--with={requirement}"
    for group in ("course", "lab", "site", "test")
    for requirement in GROUPS[group]
    if not requirement.startswith("fp8lens")  # it is the checkout's own
]
OLDEST = run("--no-project", "--resolution=lowest-direct", "--with-editable=.[jax]", *LOWEST)
OTHER_PYTHON = run("--locked", python="3.13" if sys.version_info[:2] == (3, 12) else "3.12")

# These hold what is said of one compiler, the lock's: its log, its rules, its output for many
# programs.
OF_THE_LOCK = {"corpus", "libraries", "toolkit", "pyodide"}
# These take minutes, and the chapters try the same code on the oldest JAX.
LONG = {"autotune", "fusion", "plots", "gpt", "decoder", "lean_step", "one_pass"}
TESTS = {
    path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
    for folder in ("fp8lens", "helpers")
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
}
WEEKLY = set(TESTS) - OF_THE_LOCK - LONG
# JAX 0.10 has block scales for GPUs alone, and reads no array transposed from shared memory.
NEED_JAX_0_11 = {"18_beyond_hopper"}
READS_TEXT = {"import", "hlo_text", "hlo_diff", "targets"}


def output(environment: list[str], *command: str) -> str:
    """What a command of an environment's Python prints; it must succeed."""
    done = subprocess.run(
        [*environment, "python", *command],
        cwd=ROOT,
        env=variables(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode and "dns error" in done.stdout and "CI" not in os.environ:
        pytest.skip("there is no network to make the environment with")
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_tests(environment: list[str], names: set[str]) -> None:
    paths = [TESTS[name] for name in sorted(names)]
    output(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)


def test_oldest_is_what_pyproject_names():
    said = output(OLDEST, "-c", "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)")
    assert said.split() == ["0.10.2", "0.10.2"]
    assert "jax>=0.10.2" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(not NIGHTLY, reason="a chapter is tried in each run: NIGHTLY=1 tries all")
def test_packages_on_the_oldest_jax():
    # What reads texts alone is the same with every JAX: the other Python tries it.
    run_tests(OLDEST, WEEKLY - {"properties", *READS_TEXT})


@NEEDS_LINUX
def test_chapters_on_the_oldest_jax():
    names = [name for name in chapters.names() if name not in NEED_JAX_0_11] if NIGHTLY else ["03"]
    said = output(OLDEST, "-m", "tools.outputs", "check", *names)
    assert "no outputs were compared: " in said


@pytest.mark.skipif(not NIGHTLY, reason="Python's releases differ rarely: NIGHTLY=1 tries both")
def test_packages_on_the_other_python():
    run_tests(OTHER_PYTHON, WEEKLY)
