"""The README's picture is an output of chapter 6, not a drawing. `python tests/test_pictures.py` takes it over."""

import base64
from pathlib import Path

import nbformat

from tools.files import in_one_step

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "img" / "one_call.png"


def from_chapter() -> bytes:
    notebook = nbformat.read(ROOT / "notebooks" / "06_bias_matmul.ipynb", as_version=4)
    outputs = (
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output
    )
    (data,) = (
        o.data
        for o in outputs
        if "".join(o.data.get("text/plain", "")).startswith("Megabytes moved")
    )
    return base64.b64decode(data["image/png"])


def test_the_readme_shows_what_the_chapter_drew():
    assert PICTURE.read_bytes() == from_chapter(), (
        "run `make refresh`: the picture in img/ is not chapter 6's any more"
    )


def test_every_other_picture_is_the_sites_mark():
    assert {path.name for path in PICTURE.parent.iterdir()} == {PICTURE.name, "favicon.svg"}, (
        "which cell draws it?"
    )


if __name__ == "__main__" and PICTURE.read_bytes() != from_chapter():
    in_one_step(PICTURE, from_chapter())
