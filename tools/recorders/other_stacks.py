"""What other stacks make of chapter 17's scaled matmul: PyTorch, torchao and Triton, on the CPU.

`make stacks` runs them in an environment of their own, and records in
notebooks/results/stacks.json what runs, what is refused and in which words, and the PTX that Triton
compiles for a Hopper. Nothing is timed, and no GPU is needed. They stay out of this project's
environment, because PyTorch's packages pin other versions of CUDA's libraries.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from helpers.records.stacks import arrays, operands_digest
from tools.environments import ROOT, variables, with_packages
from tools.recorders.data import RESULTS, provenance, signed, write

# In these versions; about 5 GB, because PyTorch's package on PyPI brings CUDA's libraries.
PACKAGES = {
    "torch": "2.15.0",
    "torchao": "0.18.0",
    "triton": "3.9.0",
    "numpy": np.__version__,
}


def found() -> dict[str, Any]:
    """What these packages make of the operands."""
    python = with_packages(*(f"{name}=={version}" for name, version in PACKAGES.items()))
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
                [*python, "python", "-m", "tools.recorders.measure_stacks", *arguments],
                env=variables(TRITON_INTERPRET=interpret, **settings),
                cwd=ROOT,
                check=True,
            )
        return json.loads(out.read_text()) | {"ptx": json.loads(ptx.read_text())}


def main() -> None:
    """Measure, and write the record."""
    # Which packages: those of the other environment.
    made = provenance("make stacks") | {"packages": PACKAGES, "operands": operands_digest()}
    write(RESULTS / "stacks.json", signed(made | found()))


if __name__ == "__main__":
    main()
