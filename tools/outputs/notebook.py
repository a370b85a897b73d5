"""What a chapter's notebook holds, and the one way in which its two halves are written.

A chapter is a Jupytext pair: the .ipynb holds the outputs, the .md (MyST) the same cells without
them.
"""

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Iterator

import jupytext
import nbformat
from nbformat import NotebookNode

# A cell whose output may differ from run to run: a training, whose last digits differ from one kind
# of CPU to the next.
VOLATILE = "volatile-output"
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
}
PAIRED = {"jupytext": {"formats": "ipynb,md:myst"}}
# JupyterLab folds away what its own metadata says; here that follows from the tags.
FOLDS = {
    "outputs_hidden": {"hide-output", "hide-cell"},
    "source_hidden": {"hide-input", "hide-cell"},
}
# Of a widget the HTML is kept: its model is gone with the kernel.
WIDGET = "application/vnd.jupyter.widget-view+json"


def text_of(value: str | list[str]) -> str:
    """A text that nbformat may have cut into lines."""
    return "".join(value)


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def describe(number: int, cell: NotebookNode) -> str:
    """How a problem names a cell: its number and the beginning of its first line."""
    first = cell.source.strip().partition("\n")[0]
    return f"cell {number} ({first[:60]})"


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The cells of code, each with its number among all cells."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code":
            yield number, cell


def said(notebook: NotebookNode) -> list[tuple]:
    """What both halves of a pair hold of each cell."""
    return [(cell.cell_type, cell.source.rstrip(), tags(cell)) for cell in notebook.cells]


def normalise(notebook: NotebookNode, metadata: dict = METADATA | PAIRED) -> NotebookNode:
    """A copy with nothing in it that a second run, another machine or JupyterLab would write
    differently.
    """
    title = notebook.cells[0].source.partition("\n")[0]
    seen: Counter[str] = Counter()
    ran = 0
    cells = []
    for cell in notebook.cells:
        source = cell.source.rstrip()
        seen[source] += 1
        # The id follows from the text, so that it is the same whoever saves the chapter.
        identity = hashlib.sha256(f"{title} {seen[source]} {source}".encode()).hexdigest()[:8]
        new = {
            "id": identity,
            "cell_type": cell.cell_type,
            "metadata": _normal_metadata(cell),
            "source": source,
        }
        if cell.cell_type == "code":
            ran += 1
            new["execution_count"] = cell.execution_count and ran
            new["outputs"] = _normal_outputs(cell.outputs, ran)
        cells.append(new)
    return nbformat.from_dict(
        {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    )


def _normal_metadata(cell: NotebookNode) -> dict:
    metadata: dict = {}
    folded = {key: True for key, by in FOLDS.items() if by & set(tags(cell))}
    if folded and cell.cell_type == "code":
        metadata["jupyter"] = folded
    if tags(cell):
        metadata["tags"] = tags(cell)
    return metadata


def _normal_outputs(outputs: list[NotebookNode], count: int) -> list[NotebookNode]:
    """Outputs with neighbouring pieces of one stream as one: where a stream is cut depends on
    timing.
    """
    result: list[NotebookNode] = []
    for output in copy.deepcopy(outputs):
        output.get("data", {}).pop(WIDGET, None)
        if "execution_count" in output:
            output.execution_count = count
        if output.output_type == "stream" and result and result[-1].get("name") == output.name:
            result[-1].text = text_of(result[-1].text) + text_of(output.text)
        else:
            result.append(output)
    return result


def of_explorer(notebook: NotebookNode, stored: NotebookNode) -> NotebookNode:
    """A notebook of "Try it" in its normal form, without a twin. Its cell of code shows the picture
    that it shows in `stored`, whatever a reader saw when they ran it. It leaves out the empty cell
    that JupyterLab adds when a reader runs the last one.
    """
    result = normalise(notebook, METADATA)
    result.cells = [cell for cell in result.cells if cell.source]
    pairs = zip(code_cells(result), code_cells(stored), strict=False)
    for (_, cell), (_, picture) in pairs:
        cell.execution_count, cell.outputs = None, picture.outputs
    return result


def twin_of(notebook: NotebookNode) -> str:
    """The .md of a normal notebook. It names no Jupytext version, so that an update changes no
    file.
    """
    text = jupytext.writes(notebook, fmt="md:myst")
    return re.sub(r"\n +jupytext_version: .*", "", text, count=1)


def written(notebook: NotebookNode) -> dict[str, str]:
    """The text of both halves of a notebook's pair, by the ends of their names."""
    normal = normalise(notebook)
    return {".ipynb": nbformat.writes(normal) + "\n", ".md": twin_of(normal)}
