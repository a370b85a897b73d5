"""What a chapter's notebook holds, and the one way in which its two halves are written.

A chapter is a Jupytext pair: the .ipynb holds the outputs, the .md (MyST) the same cells without
them.
"""

import copy
import hashlib
import re
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

# A cell whose output may differ from run to run: a training, whose last digits differ from one kind
# of CPU to the next.
VOLATILE = "volatile-output"
# Everything that a cell may be tagged: what folds, and the above. Not what would keep a cell from
# running or failing.
TAGS = {"hide-input", "hide-output", "hide-cell", VOLATILE}
# All that a notebook records of where it was made: nothing of the machine.
METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
    "jupytext": {"formats": "ipynb,md:myst"},
}
# JupyterLab folds away what its own metadata says; here that follows from the tags.
FOLDS = {
    "outputs_hidden": {"hide-output", "hide-cell"},
    "source_hidden": {"hide-input", "hide-cell"},
}
# Of a widget the HTML is kept: its model is gone with the kernel.
WIDGET = "application/vnd.jupyter.widget-view+json"


def text_of(value: str | list[str]) -> str:
    """A text that nbformat may have cut into lines."""
    return "".join(value) if isinstance(value, list) else value


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def describe(number: int, cell: NotebookNode) -> str:
    """How a problem names a cell: its number and the beginning of its first line."""
    first = cell.source.strip().partition("\n")[0]
    return f"cell {number} ({first[:60] or 'empty'})"


def lookup(metadata: Any, dotted: str) -> Any:
    """The entry of nested metadata under a name such as "jupytext.formats"; {} where there is
    none.
    """
    for key in dotted.split("."):
        metadata = metadata.get(key, {})
    return metadata


def cells_of(notebook: NotebookNode) -> list[tuple]:
    """What both halves of a pair must agree on, cell by cell."""
    return [
        (cell.cell_type, cell.source.rstrip(), tags(cell), cell.metadata.get("jupyter", {}))
        for cell in notebook.cells
    ]


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with neighbouring pieces of one stream as one: where a stream is cut depends on
    timing.
    """
    result: list[NotebookNode] = []
    for output in outputs:
        last = result[-1] if result else None
        is_stream = output.output_type == "stream"
        if last and is_stream and last.output_type == "stream" and output.name == last.name:
            last.text = text_of(last.text) + text_of(output.text)
        else:
            result.append(copy.deepcopy(output))
    return result


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    """The same notebook, its outputs and counts removed in place."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy with nothing in it that a second run, another machine or JupyterLab would write
    differently.
    """
    title = notebook.cells[0].source.partition("\n")[0] if notebook.cells else ""
    seen: dict[str, int] = {}
    cells: list[dict[str, Any]] = []
    for cell in notebook.cells:
        source = cell.source.rstrip()
        # The id follows from the text, so that it is the same whoever saves the chapter.
        seen[source] = seen.get(source, 0) + 1
        said = f"{title} {seen[source]} {source}"
        same = {
            "id": hashlib.sha256(said.encode()).hexdigest()[:8],
            "cell_type": cell.cell_type,
            "metadata": _normal_metadata(cell),
            "source": source,
        }
        if cell.cell_type == "code":
            count = 1 + sum(before["cell_type"] == "code" for before in cells)
            same["execution_count"] = cell.execution_count and count
            same["outputs"] = _normal_outputs(cell.outputs, count)
        cells.append(same)
    return nbformat.from_dict(
        {
            "cells": cells,
            "metadata": copy.deepcopy(METADATA),
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def _normal_metadata(cell: NotebookNode) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    folded = {key: True for key, by in FOLDS.items() if by & set(tags(cell))}
    if folded and cell.cell_type == "code":
        metadata["jupyter"] = folded
    if tags(cell):
        metadata["tags"] = tags(cell)
    return metadata


def _normal_outputs(outputs: list[NotebookNode], count: int) -> list[NotebookNode]:
    outputs = joined(outputs)
    for output in outputs:
        output.get("data", {}).pop(WIDGET, None)
        if "execution_count" in output:
            output.execution_count = count
    return outputs


def of_explorer(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """A notebook of "Try it" in its normal form, without a twin. Its cell of code shows the picture
    that it shows in `stored`, whatever a reader saw when they ran it. It leaves out the empty cell
    that JupyterLab adds when a reader runs the last one.
    """
    result = normalise(notebook)
    del result.metadata["jupytext"]
    result.cells = [cell for cell in result.cells if cell.source]
    pictures = [cell for cell in stored.cells if cell.cell_type == "code"]
    cells = [cell for cell in result.cells if cell.cell_type == "code"]
    for cell, picture in zip(cells, pictures, strict=False):
        cell.execution_count, cell.outputs = None, copy.deepcopy(picture.outputs)
    return result


def twin_of(notebook: NotebookNode) -> str:
    """The .md of a normal notebook. It names no Jupytext version, so that an update changes no
    file.
    """
    text = jupytext.writes(notebook, fmt="md:myst")
    return re.sub(r"\n +jupytext_version: .*", "", text, count=1)


def written(notebook: NotebookNode) -> dict[str, str]:
    """The text of both halves of a normal notebook's pair, by the ends of their names."""
    return {".ipynb": nbformat.writes(notebook) + "\n", ".md": twin_of(notebook)}
