"""What an H100's tensor core made of sums of 32 products, as others measured it.

    python -m tools.records.sums            reads it from GitHub, and writes results/sums.json
    python -m tools.records.sums --check    compares the file with what is read, at the same commit

F. A. Khattak and M. Mikaitis (arXiv:2512.07004) published operands and results under the BSD
licence that goes into the file as well. By their Validate_TC_models.m, in FP8 the instruction was
`wgmma`, and every sum began at zero. Of each format's 5,000 sums each fifth is taken, operands as
FP8 codes.
"""

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from helpers.records.results import digest
from tools.files import in_one_step
from tools.records import sources

DATA = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results" / "sums.json"
REPOSITORY = "north-numerical-computing/MATLAB-tensor-core"
COMMIT = "b12b5a700957655375a1b0c1d0c26e76065da015"
FORMATS = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
EACH = 5


def read(name: str) -> str:
    """A file of theirs."""
    return sources.text_at(f"{sources.RAW}/{REPOSITORY}/{COMMIT}/{name}")


def floats(name: str, base: int) -> np.ndarray:
    """A file of float32 patterns, in hexadecimal or binary digits: a line for each sum."""
    lines = read(f"model_validation/H100/{name}").splitlines()[::EACH]
    return np.array([[int(word, base) for word in line.split()] for line in lines], np.uint32).view(
        np.float32
    )


def recorded() -> dict[str, Any]:
    """What the file holds. Raises sources.Unreachable."""
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
    data = {
        "measured_by": "F. A. Khattak and M. Mikaitis, arXiv:2512.07004",
        "repository": f"https://github.com/{REPOSITORY}",
        "commit": COMMIT,
        "device": "NVIDIA H100",
        "instruction": "wgmma, sums from zero",
        "each": EACH,
        "licence": read("LICENCE"),
        "formats": formats,
    }
    return data | {"digest": digest(data)}


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or compare it: 1 where it differs, 2 where GitHub cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    try:
        data = recorded()
    except sources.Unreachable as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(data, indent=1) + "\n"
    same = DATA.exists() and DATA.read_text() == text
    if not check and not same:
        in_one_step(DATA, text.encode())
    differs = "differs from what is read" if check else "written"
    print(f"{DATA.name}: {'as read' if same else differs}")
    return int(check and not same)


if __name__ == "__main__":
    sys.exit(main())
