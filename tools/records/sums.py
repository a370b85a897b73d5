"""What an H100's tensor core made of sums of 32 products, as others measured it: into notebooks/results/sums.json.

    git clone https://github.com/north-numerical-computing/MATLAB-tensor-core
    .venv/bin/python tools/records/sums.py MATLAB-tensor-core

F. A. Khattak and M. Mikaitis (arXiv:2512.07004) published operands and results under the BSD licence that goes into the
file as well. By their Validate_TC_models.m, in FP8 the instruction was `wgmma`, and every sum began at zero. Of each
format's 5,000 sums each fifth is taken, operands as FP8 codes.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from helpers.results import digest
from tools.files import in_one_step

DATA = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results" / "sums.json"
FORMATS = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
EACH = 5


def main(arguments: list[str] | None = None) -> None:
    (folder,) = sys.argv[1:] if arguments is None else arguments

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *words], capture_output=True, text=True, check=True
        ).stdout

    def floats(name: str, base: int) -> np.ndarray:
        """A file of float32 patterns, in hexadecimal or binary digits: a line for each sum."""
        lines = git("show", f"HEAD:model_validation/H100/{name}").splitlines()[::EACH]
        return np.array(
            [[int(word, base) for word in line.split()] for line in lines], np.uint32
        ).view(np.float32)

    formats = {}
    for dtype, name in FORMATS.items():
        arrays = {
            operand: floats(f"{name}/{operand}_H100_{name}.txt", 16).astype(
                ml_dtypes.finfo(dtype).dtype
            )
            for operand in "ab"
        } | {"sums": floats(f"{name}/d_H100_fp32.txt", 2).astype("<f4")}
        formats[dtype] = {
            kind: base64.b64encode(array.tobytes()).decode() for kind, array in arrays.items()
        }
    data = {
        "measured_by": "F. A. Khattak and M. Mikaitis, arXiv:2512.07004",
        "repository": "https://github.com/north-numerical-computing/MATLAB-tensor-core",
        "commit": git("rev-parse", "HEAD").strip(),
        "device": "NVIDIA H100",
        "instruction": "wgmma, sums from zero",
        "each": EACH,
        "licence": git("show", "HEAD:LICENCE"),
        "formats": formats,
    }
    in_one_step(DATA, (json.dumps(data | {"digest": digest(data)}, indent=1) + "\n").encode())
    print(f"{DATA.name}: {sum(len(f['sums']) * 3 // 16 for f in formats.values())} sums")


if __name__ == "__main__":
    main()
