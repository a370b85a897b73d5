"""What is measured on a GPU of chapter 12 is what the chapter writes."""

import ast
from pathlib import Path

import jupytext

from helpers.numerics import blocks

CHAPTER = Path(__file__).resolve().parent.parent.parent / "notebooks/12_scaling_strategies.md"


def definitions(text: str) -> dict[str, str]:
    """The functions and the constants of a text, each as it is written."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node.value)
    return found


def test_it_is_what_the_chapter_writes():
    written = {}
    for cell in jupytext.read(CHAPTER).cells:
        if cell.cell_type == "code":
            written |= definitions(cell.source)
    ours = definitions(Path(blocks.__file__).read_text())
    assert {"by_block", "hopper_sums", "promoted_sums", "B"} <= ours.keys()
    assert {name: written[name] for name in ours} == ours
