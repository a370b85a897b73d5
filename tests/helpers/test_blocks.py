"""What is measured on a GPU of chapter 13 is what the chapter writes."""

import ast
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jupytext
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8lens.matmul.kernels import kernels
from helpers import inspect
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
    besides = {name: ours.pop(name) for name in ("PAIR", "kernel_of_pairs", "by_pairs")}
    assert {"by_block", "batched", "B"} <= ours.keys() and not besides.keys() & written.keys()
    assert {name: written[name] for name in ours} == ours


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX interprets no kernel"
)
def test_a_kernel_of_pairs_computes_the_same_and_is_one_kernel_on_a_hopper():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(size, 256)).astype(jnp.float8_e4m3fn) for size in (256, 128))
    scales = (rng.uniform(0.5, 1.5, dims).astype(np.float32) for dims in ((2, 256), (1, 2)))
    args = a, b, *scales
    got = blocks.by_pairs(*args, interpret=plgpu.InterpretGPUParams())
    gap = np.asarray(got, np.float32) - np.asarray(blocks.batched(*args), np.float32)
    assert np.linalg.norm(gap) < 1e-4 * np.linalg.norm(np.asarray(got, np.float32))
    module = inspect(blocks.by_pairs, *args).module
    assert len(kernels(module)) == 1 and "wgmma.mma_async" in module.text
