"""Alterations of a chapter and of the data, one of each kind: the check catches them. `tools/attack/mutate.py` tries more."""

import random

import nbformat
import pytest

from tools import outputs
from tools.attack import mutate
from tools.outputs import prose

CHAPTER = outputs.NOTEBOOKS / "01_fp8_formats.ipynb"


@pytest.mark.parametrize("kind", mutate.KINDS)
def test_an_alteration_is_caught(kind, tmp_path):
    said = mutate.caught(CHAPTER, mutate.KINDS[kind], random.Random(kind), tmp_path)
    assert said or kind in mutate.MAY_PASS


def test_what_is_not_altered_is_not_caught(tmp_path):
    assert mutate.caught(CHAPTER, lambda notebook, by: None, random.Random(0), tmp_path) is None


def test_altered_data_is_not_read(tmp_path):
    counted = mutate.data(tmp_path, 5)
    assert len(counted) == 2 and all(caught for _, caught in counted) and counted.total() == 10


def said(text: str, printed: str = "64 kernels") -> list[str]:
    cells = [
        nbformat.v4.new_markdown_cell("## A head"),
        nbformat.v4.new_code_cell(
            "x = 17  # 23", outputs=[nbformat.v4.new_output("stream", text=printed)]
        ),
        nbformat.v4.new_markdown_cell(text),
    ]
    return [
        what
        for number, what in prose.problems(nbformat.v4.new_notebook(cells=cells))
        if number == 3
    ]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("It has 64 kernels, of E4M3 on an H100.", "64 kernels"),
        ("x is 17", ""),
        ("Seventeen", ""),
        ("1,048,576 of them", "1048576"),
        ("of 448, as [chapter 03](03_a.ipynb) has it, in JAX 0.10.2", ""),
        ("3.0 and 3", "3.00"),
        ("see <https://example.org/99>", ""),
        ("## References\n\n- Nature 521, 2015", ""),
        ("1. first\n2. second", ""),
        ("`python -m pytest`\n\n```bash\nmake test\n```", ""),
    ],
)
def test_a_number_that_is_computed_or_named_may_be_said(text, printed):
    assert said(text, printed) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It has 65 kernels.", "65"),
        ("65x as fast", "65"),
        ("v65", "65"),
        ("a hundred", "hundred"),
        ("65. That", "65"),
        ("<https://a.org/1> has 65", "65"),
        ("<details><summary>65 times</summary>\n\na\n\n</details>", "65"),
        ("[^a]\n\n[^a]: 65 times", "65"),
        ("a tenfold gain", "tenfold"),
        ("### 65. times", "65"),
        ("23, a comment says", "23"),
        ("twelve of them", "twelve"),
        ("in `f32[128]`", "128"),
        ("| a | 12 |\n|---|---|\n| b | c |", "12"),
        ("$2^{-9}$", "9"),
        ("```bash\nmake test 88\n```", "88"),
    ],
)
def test_a_number_from_nowhere_is_named(text, number):
    assert said(text)[-1].startswith(f"'{number}' stands in ")
