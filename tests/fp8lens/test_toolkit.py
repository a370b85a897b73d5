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


def toolkit_paths() -> tuple[set[Path], set[Path]]:
    """Folders and programs of CUDA toolkits here, from the system's package, NVIDIA's installer or
    wheels.
    """
    folders = {
        folder.resolve()
        for pattern in ("usr/local/cuda*", "opt/cuda*", "usr/lib/cuda*")
        for folder in Path("/").glob(pattern)
        if folder.is_dir()
    }
    path = [
        *os.environ["PATH"].split(os.pathsep),
        *(str(folder / "bin") for folder in wheel_folders()),
    ]
    programs = {
        Path(folder, name)
        for folder in path
        for name in ("nvcc", "ptxas", "nvlink", "fatbinary")
        if Path(folder, name).is_file()
    }
    return folders, {
        program.resolve()
        for program in programs
        if not any(program.resolve().is_relative_to(folder) for folder in folders)
    }


def wheel_folders() -> list[Path]:
    """Where NVIDIA's wheels are installed."""
    spec = importlib.util.find_spec("nvidia")
    return (
        [folder for base in spec.submodule_search_locations for folder in Path(base).glob("cu*")]
        if spec
        else []
    )


def run_hidden(folders, programs, tmp_path) -> subprocess.CompletedProcess:
    """PROGRAM in a mount namespace of its own, where `folders` are empty and `programs` cannot be
    run.
    """
    mounts = [f"mount -t tmpfs none '{folder}'" for folder in sorted(folders)]
    mounts += [f"mount --bind /dev/null '{program}'" for program in sorted(programs)]
    script = " && ".join([*mounts, f"exec '{sys.executable}' -c \"$PROGRAM\""])
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("CUDA", "XLA_", "LD_LIBRARY", "TF_"))
    }
    return subprocess.run(
        ["unshare", "--mount", *as_root, "sh", "-c", script],
        cwd=tmp_path,
        text=True,
        env=environment | {"PROGRAM": PROGRAM, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if sys.platform != "linux" or not shutil.which("unshare"):
        pytest.skip("needs Linux's unshare")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    attempt = subprocess.run(
        ["unshare", "--mount", *as_root, "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    if attempt.returncode:
        pytest.skip(f"this machine allows no mount namespaces: {attempt.stderr.strip()}")


def test_compiles_without_a_toolkit(tmp_path):
    result = run_hidden(*toolkit_paths(), tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split("\n")[:2] == ["cublaslt True True", "triton False True"]
    assert result.stderr == "", "start-up warnings would show in every chapter's first output"


def test_without_the_wheels_too_it_fails_with_the_fix(tmp_path):
    if attached_gpu() is not None:
        pytest.skip("a GPU's driver can make machine code too, and cannot be hidden")
    # Shows that the toolkit above was really out of reach: nothing is left to make machine code
    # with.
    folders, programs = toolkit_paths()
    result = run_hidden({*folders, *wheel_folders()}, programs, tmp_path)
    assert result.returncode != 0
    assert "nvidia-nvjitlink" in result.stderr
