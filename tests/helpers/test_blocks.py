"""What is measured on a GPU of chapter 13 is what the chapter writes."""

import ast
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jupytext
import numpy as np
from jax import lax

from helpers.numerics import blocks

CHAPTER = Path(__file__).resolve().parents[2] / "notebooks/13_scaling_strategies.md"


def definitions(text: str) -> dict[str, str]:
    """The functions and the constants of a text, each as it is written."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.unparse(node.value)
    return found


def of_chapter() -> dict[str, str]:
    """The definitions of chapter 13."""
    cells = jupytext.read(CHAPTER).cells
    return definitions("\n".join(cell.source for cell in cells if cell.cell_type == "code"))


def of_chapter_12(*names: str) -> dict[str, Any]:
    """These functions of chapter 13, to be called."""
    space = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "f32": jnp.float32}
    space["functools"] = functools
    written = of_chapter()
    exec("\n".join(written[name] for name in names), space)
    return space


def test_it_is_what_the_chapter_writes():
    written, ours = of_chapter(), definitions(Path(blocks.__file__).read_text())
    assert {"by_block", "batched", "B"} <= ours.keys()
    assert {name: written[name] for name in ours} == ours
