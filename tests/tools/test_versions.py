"""The packages and the chapters on the oldest JAX that pyproject.toml allows, the packages on the
other Python.

A chapter is tried in each run, on the oldest JAX. NIGHTLY=1, as in CI
once a week, tries all of it, and the other Python.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weekly import NIGHTLY
from tools.environments import Environment, NotMadeError, variables
from tools.outputs import chapters

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDS_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only"
)

OLDEST = Environment(
    "oldest",
    "3.12",
    install=(
        "--resolution=lowest-direct",
        "--editable=.[jax]",
        "--group=course",
        "--group=lab",
        "--group=site",  # `tools.outputs` asks the site whether it would take an output
        "--group=test",
    ),
)
OTHER = "3.13" if sys.version_info[:2] == (3, 12) else "3.12"
OTHER_PYTHON = Environment(f"py{OTHER.replace('.', '')}", OTHER, sync=())

# These hold what is said of one compiler, the lock's: its log, its rules, its output for many
# programs.
OF_THE_LOCK = {"corpus", "random_programs", "libraries", "toolkit", "pyodide"}
# These take minutes, and the chapters try the same code on the oldest JAX.
LONG = {"autotune", "fusion", "plots", "gpt", "decoder", "lean_step", "one_pass"}
TESTS = {
    path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
    for folder in ("fp8lens", "helpers")
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
}
WEEKLY = set(TESTS) - OF_THE_LOCK - LONG
# JAX 0.10 has block scales for GPUs alone, and reads no array transposed from shared memory.
NEED_JAX_0_11 = {"17_beyond_hopper"}
READS_TEXT = {"import", "hlo_text", "hlo_diff", "targets"}


def python_of(environment: Environment) -> str:
    """Its Python; without a network the test is skipped, but in CI."""
    try:
        return str(environment.make())
    except NotMadeError as error:
        if error.unreachable and not os.environ.get("CI"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def oldest() -> str:
    return python_of(OLDEST)


@pytest.fixture(scope="module")
def other_python() -> str:
    return python_of(OTHER_PYTHON)


def output(*command: str) -> str:
    """What a command prints, which must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def run_tests(python: str, names: set[str]) -> None:
    paths = [TESTS[name] for name in sorted(names)]
    output(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths)


def test_oldest_is_what_pyproject_names(oldest):
    said = output(oldest, "-c", "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)")
    assert said.split() == ["0.10.2", "0.10.2"]
    assert "jax>=0.10.2" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(not NIGHTLY, reason="a chapter is tried in each run: NIGHTLY=1 tries all")
def test_packages_on_the_oldest_jax(oldest):
    # What reads texts alone is the same with every JAX: the other Python tries it.
    run_tests(oldest, WEEKLY - {"properties", *READS_TEXT})


@NEEDS_LINUX
def test_chapters_on_the_oldest_jax(oldest):
    names = [name for name in chapters.names() if name not in NEED_JAX_0_11] if NIGHTLY else ["03"]
    said = output(oldest, "-m", "tools.outputs", "check", *names)
    assert "no outputs were compared: " in said


@NEEDS_LINUX
@pytest.mark.skipif(not NIGHTLY, reason="the chapter has such rows too: NIGHTLY=1 tries all")
def test_recorded_rows_on_the_oldest_jax(oldest):
    output(oldest, "-m", "tools.records.releases", "--check")


@pytest.mark.skipif(not NIGHTLY, reason="Python's releases differ rarely: NIGHTLY=1 tries both")
def test_packages_on_the_other_python(other_python):
    run_tests(other_python, WEEKLY)
