"""What an H100's tensor core made of sums of 32 products, as others measured it.

    python -m tools.recorders.tensor_core_sums    reads it from GitHub, and writes it

into notebooks/results/sums.json.

F. A. Khattak and M. Mikaitis (arXiv:2512.07004) published operands and results under the BSD
licence that goes into the file as well. By their Validate_TC_models.m, in FP8 the instruction was
`wgmma`, and every sum began at zero. Of each format's 5,000 sums each fifth is taken, operands as
FP8 codes.
"""

import base64
import urllib.request
from typing import Any

import ml_dtypes
import numpy as np

from tools.recorders.data import RESULTS, signed, write

REPOSITORY = "north-numerical-computing/MATLAB-tensor-core"
COMMIT = "b12b5a700957655375a1b0c1d0c26e76065da015"
FORMATS = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
EACH = 5


def read(name: str) -> str:
    """A file of theirs."""
    url = f"https://raw.githubusercontent.com/{REPOSITORY}/{COMMIT}/{name}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def floats(name: str, base: int) -> np.ndarray:
    """A file of float32 patterns, in hexadecimal or binary digits: a line for each sum."""
    lines = read(f"model_validation/H100/{name}").splitlines()[::EACH]
    bits = [[int(word, base) for word in line.split()] for line in lines]
    return np.array(bits, np.uint32).view(np.float32)


def recorded() -> dict[str, Any]:
    """What the file holds."""
    formats = {}
    for dtype, name in FORMATS.items():
        kind = ml_dtypes.finfo(dtype).dtype
        arrays = {
            "a": floats(f"{name}/a_H100_{name}.txt", 16).astype(kind),
            "b": floats(f"{name}/b_H100_{name}.txt", 16).astype(kind),
            "sums": floats(f"{name}/d_H100_fp32.txt", 2).astype("<f4"),
        }
        formats[dtype] = {
            key: base64.b64encode(array.tobytes()).decode() for key, array in arrays.items()
        }
    return {
        "measured_by": "F. A. Khattak and M. Mikaitis, arXiv:2512.07004",
        "repository": f"https://github.com/{REPOSITORY}",
        "commit": COMMIT,
        "device": "NVIDIA H100",
        "instruction": "wgmma, sums from zero",
        "each": EACH,
        "licence": read("LICENCE"),
        "formats": formats,
    }


if __name__ == "__main__":
    write(RESULTS / "sums.json", signed(recorded()))
