"""How the outputs of a committed notebook differ from those of a fresh run."""

import base64
import difflib
import io
import itertools
import json
from collections.abc import Iterator

import numpy as np
from matplotlib.image import imread
from nbformat import NotebookNode

from tools.outputs.notebook import VOLATILE, code_cells, describe, normalise, tags, text_of

PIXEL_TOLERANCE = 8 / 255  # last-bit differences of plotted numbers move antialiased pixels by less


def compare(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """A problem for each cell whose outputs differ; VOLATILE cells may."""
    problems = []
    old_cells, new_cells = code_cells(normalise(committed)), code_cells(normalise(fresh))
    for (number, old), (_, new) in zip(old_cells, new_cells, strict=True):
        if VOLATILE in tags(old):
            continue
        if apart := _difference(old.outputs, new.outputs):
            problems.append(f"{describe(number, old)}: a fresh run prints another output:\n{apart}")
    return problems


def _difference(old: list[NotebookNode], new: list[NotebookNode]) -> str:
    """How two lists of outputs differ; "" where they do not."""
    lines = difflib.unified_diff(
        [*_lines(old)], [*_lines(new)], "committed", "fresh", n=1, lineterm=""
    )
    if apart := "\n".join(itertools.islice(lines, 40)):
        return apart
    same = all(map(_same_picture, _pictures(old), _pictures(new)))
    return "" if same else "the pixels of a picture"


def _lines(outputs: list[NotebookNode]) -> Iterator[str]:
    """All that outputs hold but the pixels, as lines of text."""
    for output in outputs:
        rest = {key: value for key, value in output.items() if key not in ("data", "text")}
        yield json.dumps(rest, sort_keys=True)
        yield from text_of(output.get("text", "")).splitlines()
        for kind, content in sorted(output.get("data", {}).items()):
            yield kind
            if kind != "image/png":
                text = content if isinstance(content, (str, list)) else json.dumps(content)
                yield from text_of(text).splitlines()


def _pictures(outputs: list[NotebookNode]) -> list[str]:
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def _same_picture(old: str, new: str) -> bool:
    if old == new:
        return True
    before, after = (imread(io.BytesIO(base64.b64decode(text)), "png") for text in (old, new))
    return before.shape == after.shape and np.allclose(before, after, rtol=0, atol=PIXEL_TOLERANCE)
