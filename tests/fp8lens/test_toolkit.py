"""Compiles for Hopper need no CUDA toolkit: proved with every toolkit on this machine hidden from
the compiler.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8lens.targets import attached_gpu

# The silu stays outside the GEMM call: a kernel of its own, which XLA must turn into machine code.
# The second program is a Triton GEMM: all of it is such a kernel.
PROGRAM = """
import jax, jax.numpy as jnp
from helpers import aot_compile

def scaled_silu(a, b, scale):
    a, b = a.astype(jnp.float32) * scale, b.astype(jnp.float32) * scale
    return jax.nn.silu(jax.lax.dot(a, b.T))

matrix = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
scale = jax.ShapeDtypeStruct((), jnp.float32)
for gemm in ("cublaslt", "triton"):
    text = aot_compile(scaled_silu, matrix, matrix, scale, gemm=gemm).as_text()
    print(gemm, '__cublas$lt$matmul$f8' in text, ' fusion(' in text)
"""


def toolkits() -> set[Path]:
    """Folders and programs of CUDA toolkits here, from the system's package or NVIDIA's
    installer.
    """
    places = ("usr/local/cuda*", "opt/cuda*", "usr/lib/cuda*")
    found = {path.resolve() for place in places for path in Path("/").glob(place)}
    programs = map(shutil.which, ("nvcc", "ptxas", "nvlink", "fatbinary"))
    return found | {Path(program).resolve() for program in programs if program}


def wheels() -> set[Path]:
    """Where NVIDIA's wheels are installed."""
    spec = importlib.util.find_spec("nvidia")
    bases = spec.submodule_search_locations or [] if spec else []
    return {folder for base in bases for folder in Path(base).glob("cu*")}


def run_hidden(paths, tmp_path, program=PROGRAM) -> subprocess.CompletedProcess:
    """A program in a mount namespace of its own, where these folders are empty, and these files
    cannot be run.
    """
    mounts = [
        f"mount -t tmpfs none '{path}'" if path.is_dir() else f"mount --bind /dev/null '{path}'"
        for path in sorted(paths)
    ]
    script = " && ".join([*mounts, f"exec '{sys.executable}' -c \"$PROGRAM\""])
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    left_out = ("CUDA", "XLA_", "LD_LIBRARY", "TF_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return subprocess.run(
        ["unshare", "--mount", *as_root, "sh", "-c", script],
        cwd=tmp_path,
        text=True,
        env=environment | {"PROGRAM": program, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )


@pytest.fixture(scope="module", autouse=True)
def namespaces(tmp_path_factory):
    if sys.platform != "linux" or not shutil.which("unshare"):
        pytest.skip("needs Linux's unshare")
    attempt = run_hidden({Path("/mnt")}, tmp_path_factory.mktemp("empty"), "")
    if attempt.returncode:
        pytest.skip(f"this machine allows no mount namespaces: {attempt.stderr.strip()}")


def test_compiles_without_a_toolkit(tmp_path):
    result = run_hidden(toolkits(), tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split("\n")[:2] == ["cublaslt True True", "triton False True"]
    assert result.stderr == "", "start-up warnings would show in every chapter's first output"


def test_without_the_wheels_too_it_fails_with_the_fix(tmp_path):
    if attached_gpu() is not None:
        pytest.skip("a GPU's driver can make machine code too, and cannot be hidden")
    # Shows that the toolkit above was really out of reach: nothing is left to make machine code
    # with.
    result = run_hidden(toolkits() | wheels(), tmp_path)
    assert result.returncode != 0
    assert "nvidia-nvjitlink" in result.stderr
