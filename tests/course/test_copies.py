"""The recipes are files that a reader copies: each runs its own example in an empty folder, with
the files beside it that its docstring names, and imports nothing of this project.

What XLA makes of them is in the tests of tests/helpers that have their names; of those for several
devices in the cells of chapter 16; of attention's it is here.
"""

import ast
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8lens import inspect
from helpers import RECIPES

from fp8_experts import fp8_experts
from fp8_sharded import Where, fp8_sharded
from fused_attention import fused_attention

NAMES = sorted(path.name for path in RECIPES.glob("*.py"))
# The checkout is on the path of its .venv: what a copy must not import is refused.
RUN = """
import runpy, sys

class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("helpers", "fp8lens", "tools", "tests", "notebooks"):
            raise ImportError(f"a recipe imports {name}, which a reader does not have")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, ".")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((RECIPES / name).read_text())) or ""


def beside(name: str) -> list[str]:
    """The files to copy, too, by the docstring."""
    named = re.search(r"^Copy (.+?) beside it\.", docstring(name), re.MULTILINE | re.DOTALL)
    return re.findall(r"`(\w+\.py)`", named[1]) if named else []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name):
    said = docstring(name)
    assert re.search(r"[Cc]hapter \d\d", said) and "What it leaves out" in said
    assert re.search(r"^Test (that|what)", said, re.MULTILINE) and "from fp8lens import" in said


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_runs_alone(name, tmp_path):
    for file in [name, *beside(name)]:
        shutil.copy(RECIPES / file, tmp_path)
    done = subprocess.run(
        [sys.executable, "-E", "-c", RUN, name],
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_a_recipe_cannot_take_is_an_error_that_says_what_it_takes():
    x = jnp.ones((16, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"\(2, 16\), and must have \[3, H\]"):
        fp8_sharded(Where(), x, x, jnp.zeros((2, 16)))
    with pytest.raises(ValueError, match="'all', and must be one of nothing, operands"):
        fp8_experts(x, x, x, x, None, on_wire="all")


def test_attention_on_the_chip_writes_no_scores():
    """Forward and backward: kernels by hand, and nothing as large as the scores."""
    batch, sequence, heads, size = 2, 1024, 4, 128
    x = jax.ShapeDtypeStruct((batch, sequence, heads, size), jnp.bfloat16)

    def step(q, k, v, g):
        y, back = jax.vjp(fused_attention, q, k, v)
        return y, back(g)

    lines = [*inspect(step, x, x, x, x, target="H100").ledger]
    assert sum(line.what == "opaque" for line in lines) == 3
    scores = 2 * batch * heads * sequence**2
    assert all(line.kernel.bytes_moved < scores for line in lines)
