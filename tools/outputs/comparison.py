"""How the outputs of a committed notebook differ from those of a fresh run."""

import base64
import difflib
import io
import itertools
import json
import struct

import numpy as np
from matplotlib.image import imread
from nbformat import NotebookNode

from tools.outputs.notebook import VOLATILE, WIDGET, describe, joined, tags, text_of

CHUNKS = {b"IHDR", b"IDAT", b"IEND", b"pHYs", b"tEXt"}  # of a PNG that is one picture alone
PIXEL_TOLERANCE = 8 / 255  # last-bit differences of plotted numbers move antialiased pixels by less


def normal_outputs(outputs: list[NotebookNode]) -> list[tuple[str, object]]:
    """Outputs as (what, content): streams joined, pictures as pixels and what else is in their
    file.
    """
    result: list[tuple[str, object]] = []
    for output in joined(outputs):
        rest = {**output}
        kind = rest.pop("output_type")
        if kind == "stream":
            result.append((rest.pop("name"), text_of(rest.pop("text"))))
        elif kind == "error":
            result += [(key, str(rest.pop(key))) for key in ("ename", "evalue", "traceback")]
        else:
            rest.pop("execution_count", None)
            for mime, content in sorted(rest.pop("data").items()):
                result += _normal_data(f"{kind} {mime}", mime, content)
        if any(rest.values()):  # metadata, such as a picture's description
            result.append((f"{kind}'s metadata", json.dumps(rest, indent=1, sort_keys=True)))
    return result


def _normal_data(what: str, mime: str, content) -> list[tuple[str, object]]:
    if mime == WIDGET:
        return []
    if mime == "image/png":
        pixels, rest = picture(text_of(content))
        return [(what, pixels), (f"{what}'s file", rest)]
    if mime.endswith("json"):
        return [(what, json.dumps(content, indent=1, sort_keys=True))]
    return [(what, text_of(content))]


def picture(encoded: str) -> tuple[np.ndarray | str, str]:
    """A PNG's pixels and what else its file holds; of what is not one PNG alone, the bytes
    themselves.
    """
    try:
        content = base64.b64decode("".join(encoded.split()), validate=True)
        chunks, at = [], 8
        while at < len(content):
            size, kind = struct.unpack_from(">I4s", content, at)
            chunks.append((kind, content[at + 8 : at + 8 + size]))
            at += 12 + size
        ends_there = at == len(content) and chunks[-1] == (b"IEND", b"")
        if ends_there and {kind for kind, _ in chunks} <= CHUNKS:
            rest = [chunk for chunk in chunks if chunk[0] != b"IDAT"]
            return imread(io.BytesIO(content), "png"), str(rest)
    except (ValueError, struct.error, SyntaxError, OSError):  # as base64, as chunks, as Pillow says
        pass
    return encoded, "not one PNG, and nothing besides"


def difference(committed: list[tuple], fresh: list[tuple]) -> str | None:
    """How two cells' normal outputs differ, or None."""
    if [what for what, _ in committed] != [what for what, _ in fresh]:
        return f"committed {[what for what, _ in committed]}, fresh {[what for what, _ in fresh]}"
    for (what, old), (_, new) in zip(committed, fresh, strict=True):
        apart = _apart(old, new)
        if apart:
            return f"{what}{apart}"
    return None


def _apart(old, new) -> str | None:
    if type(old) is not type(new):
        return ": no single picture, or more than that in its file"
    if not isinstance(old, str):
        return _pictures_apart(old, new)
    if old == new:
        return None
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "committed", "fresh", n=1, lineterm=""
    )
    return "\n" + ("\n".join(itertools.islice(lines, 40)) or "line ends differ")


def _pictures_apart(old: np.ndarray, new: np.ndarray) -> str | None:
    if old.shape != new.shape:
        return f": size {old.shape} committed, {new.shape} fresh"
    apart = np.abs(old.astype(float) - new)
    if apart.max() <= PIXEL_TOLERANCE:
        return None
    changed = (apart > PIXEL_TOLERANCE).any(axis=-1).mean()
    return f": {changed:.2%} of the pixels differ, by up to {apart.max():.0%}"


def compare(committed: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Problems: every way in which the outputs of a committed notebook differ from those of a fresh
    run.
    """
    if len(committed.cells) != len(fresh.cells):
        return [f"{len(committed.cells)} cells committed, {len(fresh.cells)} in the fresh run"]
    problems = []
    for number, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True), 1):
        if old.cell_type != "code":
            continue
        if new.execution_count is None:
            problems.append(f"{describe(number, old)}: did not run")
        elif VOLATILE not in tags(old):
            apart = difference(normal_outputs(old.outputs), normal_outputs(new.outputs))
            if apart:
                problems.append(
                    f"{describe(number, old)}: the output differs from a fresh run: {apart}"
                )
    return problems
