"""What other stacks make of chapter 16's scaled matmul: PyTorch, torchao and Triton, on the CPU.

`make stacks` makes an environment with them beside .venv, and records in
notebooks/results/stacks.json what runs, what is refused and in which words, and the PTX that Triton
compiles for a Hopper. Nothing is timed, and no GPU is needed. They stay out of this project's
environment, because PyTorch's packages pin other versions of CUDA's libraries.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from helpers.records.results import digest
from helpers.records.stacks import arrays, operands_digest
from tools.environments import Environment, variables
from tools.files import in_one_step
from tools.records.data import PYTHON, ROOT, made, provenance

DATA = ROOT / "notebooks" / "results" / "stacks.json"
COMMAND = "make stacks"
# In these versions; about 5 GB, because PyTorch's package on PyPI brings CUDA's libraries.
PACKAGES = {
    "torch": "2.15.0",
    "torchao": "0.18.0",
    "triton": "3.9.0",
    "numpy": np.__version__,
}
ENVIRONMENT = Environment(
    "stacks", PYTHON, install=tuple(f"{name}=={version}" for name, version in PACKAGES.items())
)


def found(python: Path) -> dict[str, Any]:
    """What that Python's packages make of the operands."""
    with tempfile.TemporaryDirectory() as folder:
        given, out, ptx = (Path(folder, name) for name in ("given.npz", "out.json", "ptx.json"))
        np.savez(given, **arrays())  # type: ignore[arg-type]
        settings = {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "TRITON_CACHE_DIR": folder,
            "CUDA_VISIBLE_DEVICES": "",
        }
        for interpret, arguments in (("1", (given, out)), ("0", ("ptx", ptx))):
            subprocess.run(
                [python, "-m", "tools.stacks.measure", *arguments],
                env=variables(TRITON_INTERPRET=interpret, **settings),
                cwd=ROOT,
                check=True,
            )
        return json.loads(out.read_text()) | {"ptx": json.loads(ptx.read_text())}


def main() -> None:
    """Make the environment, measure in it, and write the record."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measured = found(made(ENVIRONMENT))
    # Which packages: those of the other environment.
    record = provenance(COMMAND) | {"packages": PACKAGES, "operands": operands_digest()} | measured
    record |= {"digest": digest(record)}
    in_one_step(DATA, json.dumps(record, indent=1) + "\n")
    print(f"{len(measured['results'])} results, {len(measured['ptx'])} kernels")


if __name__ == "__main__":
    main()
