"""Commands in other environments than .venv: another Python, another JAX, more libraries.

uv makes such an environment for one command, of what is in its cache, and removes it afterwards.
Transformer Engine's stays, because it is built.
"""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools" / "bin" / "uv"
# What a process of another environment must not take over from this one.
DROPPED = ("VIRTUAL_ENV", "PYTHON", "PYTEST", "JAX_", "XLA_", "TF_CPP_", "NIGHTLY")


def run(*options: str, python: str = "3.12") -> list[str]:
    """The start of a command: `uv run` with these options, and that version of Python."""
    uv = [str(UV), "run", "--quiet", "--system-certs", "--isolated"]
    return [*uv, "--python", python, *options]


def with_packages(*packages: str) -> list[str]:
    """The start of a command in an environment that has these packages alone, and what they ask
    for.
    """
    return run("--no-project", *(f"--with={package}" for package in packages))


def variables(**more: str) -> dict[str, str]:
    """The variables for a process of another environment: this process's, less what names this
    environment or sets JAX, and `more`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | more


ENGINE = "2.20.2"  # Transformer Engine's release
# What its extension for JAX is built with, and what it and its Python files ask for.
ENGINE_NEEDS = (
    "pybind11",
    "setuptools",
    "wheel",
    "ninja",
    "pydantic",
    "nvidia-cudnn-frontend",
    "nvidia-nvtx",
    "nvidia-curand",
)


def with_transformer_engine() -> list[str]:
    """The start of a command in an environment that has this project's libraries and Transformer
    Engine's layers for JAX, which need neither a GPU nor a driver to be traced and compiled.

    The first time it is built, in .tools/engine: 8 GB, and five minutes of a core. NVIDIA's wheels
    have the headers that the extension is compiled with. CUDA's driver is not in a wheel: where the
    libraries look for it they find functions that answer "no device".
    """
    folder = ROOT / ".tools" / "engine"
    python, driver = folder / "bin" / "python", folder / "driver" / "libcuda.so.1"
    packages = folder / "lib" / "python3.12" / "site-packages"
    parts = ("cu13", "cudnn", "nccl")
    if not driver.exists():

        def uv(*arguments: str, **more: str) -> None:
            settings = variables(UV_PROJECT_ENVIRONMENT=str(folder), VIRTUAL_ENV=str(folder))
            subprocess.run(
                [str(UV), *arguments, "--system-certs"],
                env=settings | more,
                cwd=ROOT,
                check=True,
            )

        uv("sync", "--locked", "--python=3.12", "--group=libraries", "--extra=gpu")
        uv("pip", "install", *ENGINE_NEEDS)
        wheels = (f"{name}=={ENGINE}" for name in ("transformer-engine", "transformer-engine-cu13"))
        uv("pip", "install", "--no-deps", *wheels)
        headers = (str(packages / "nvidia" / part / "include") for part in parts)
        uv(
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            f"transformer-engine-jax=={ENGINE}",
            CPATH=":".join(headers),
            CUDA_HOME=str(packages / "nvidia" / "cu13"),
            NVTE_FRAMEWORK="jax",
            MAX_JOBS="2",
        )
        ours = packages.glob("transformer_engine/wheel_lib/*.so")
        write_driver(driver, [*ours, *packages.glob("nvidia/cudnn/lib/*.so*")])
    found = (packages / "nvidia" / part / "lib" for part in parts)
    return ["env", f"LD_LIBRARY_PATH={':'.join(map(str, (*found, driver.parent)))}", str(python)]


def write_driver(driver: Path, libraries: list[Path]) -> None:
    """A libcuda.so.1 with the functions that these libraries ask CUDA's driver for. Each returns
    100, CUDA_ERROR_NO_DEVICE.
    """
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    )
    # cuInit, but not cudaMalloc or cublasLtMatmul, which other libraries have
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)", listed.stdout)))
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
    driver.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o"]
    subprocess.run([*command, str(driver)], input=source, text=True, check=True)
