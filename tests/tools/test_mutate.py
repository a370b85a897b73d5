"""Alterations of a chapter, of other pages and of records, one of each kind: the checks catch them.

`tools/attack/mutate.py` tries more.
"""

import random
import re

import nbformat
import pytest

from tools import outputs
from tools.attack import mutate
from tools.outputs import pages, prose

CHAPTER = outputs.NOTEBOOKS / "01_fp8_formats.ipynb"
OTHERS = {  # where the first chapter has no place
    "prose: a unit": outputs.NOTEBOOKS / "04_relu_matmul.ipynb",
    "prose: an ordinal": outputs.NOTEBOOKS / "08_train_a_layer.ipynb",
}


@pytest.mark.parametrize("kind", mutate.KINDS)
def test_an_alteration_is_caught(kind, tmp_path):
    chapter = OTHERS.get(kind, CHAPTER)
    said = mutate.caught(chapter, mutate.KINDS[kind], random.Random(kind), tmp_path)
    assert said or kind in mutate.MAY_PASS


def test_what_is_not_altered_is_not_caught(tmp_path):
    assert mutate.caught(CHAPTER, lambda notebook, by: None, random.Random(0), tmp_path) is None


def test_an_altered_record_is_noticed(tmp_path):
    tried = [*mutate.data(tmp_path, 3)]
    assert len(tried) == 3 * len(mutate.RECORDED) and all(caught for _, caught in tried)


# Other pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_says_what_chapters_print(name):
    assert pages.problems(name, (pages.ROOT / name).read_text()) == []


def test_an_altered_page_is_noticed():
    tried = {*mutate.other_pages(3)}
    assert tried == {(name, True) for name in ("pages: a number more", *mutate.IN_PAGES)}


def test_a_page_has_the_numbers_of_the_chapter_it_names():
    def chapters(name: str) -> prose.Shown:
        shown = prose.Shown(frozenset("7"), frozenset({("7", "MB")}))
        return shown if name == "05" else prose.Shown()

    def problems(text: str, *facts: str) -> int:
        return len(prose.page_problems(text, chapters, facts))

    assert problems("[It](05_amax.ipynb) has 7 MB, as chapter 05 says.") == 0
    assert problems("[It](05_amax.ipynb) has 7 GB.") == 1
    assert problems("It has 7 MB.\n\n## Elsewhere\n\n[Here](05_amax.ipynb).") == 1
    assert problems("It has 9 codes.", "9 codes") == 0 and problems("None.", "9 codes") == 1
    assert problems("```bash\nmake 8  # in 8 minutes\n```") == 1


# Prose --------------------------------------------------------------------------------------------


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


REFERENCES = "## References\n\n"
XLA = "[XLA](https://openxla.org)"


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
        ("1. first\n2. second", ""),
        ("`python -m pytest`\n\n```bash\nmake test\n```", ""),
        ("It moves 319 MB, 17 of them twice.", "319 MB"),
        ("319 MB and 50.3 MB", "name   MB\none   319\ntwo  50.3"),  # the head of a column
        ("a 16-bit bias", "bf16[4]"),
        ("twice the 3 ms, 2.5 times", "3 ms, 2.5x"),
        ("the third row, a third kernel, two thirds, a tenth", "3 rows, 0.1, 66%"),
        (f"{REFERENCES}Papers:\n\n- A, [arXiv:2209.05433](https://arxiv.org/abs/2209.05433).", ""),
        (f"{REFERENCES}- [A](https://a.org/revision-1-0-2023-12-01.pdf), revision 1.0, 2023", ""),
        (f"{REFERENCES}- A, 2022, [arXiv:2209.05433](https://arxiv.org/abs/2209.05433)", ""),
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
        ("the ninth row", "ninth"),
        ("a fifth of it", "fifth"),
        ("two thirds", "thirds"),
        ("64 MB", "64 MB"),
        ("17%", "17%"),
        ("64-bit numbers", "64-bit"),
        ("64 times", "64 times"),
        ("chapter 99", "99"),
        (f"{REFERENCES}- {XLA}: 7351 times as fast", "7351"),
        (f"{REFERENCES}- [7351 times](https://openxla.org)", "7351"),
        (f"{REFERENCES}- {XLA}, 2015", "2015"),
        (f"{REFERENCES}- A, 2023, [arXiv:2209.05433](https://arxiv.org/abs/2209.05433)", "2023"),
        (f"{REFERENCES}- {XLA}, section 4.3.2", "2"),
    ],
)
def test_a_number_from_nowhere_is_named(text, number):
    assert said(text)[-1].startswith(f"'{number}' stands in ")


def test_bounds_widths_and_shapes_are_no_numbers_and_units_of_the_code():
    source = "x = 17; y = text[:90]; print(f'{y:14} {x} MB')"
    cell = nbformat.v4.new_code_cell(source)
    assert prose.shown_by(cell) == prose.Shown(frozenset(["17"]), frozenset([("17", "MB")]))
    cell.outputs = [nbformat.v4.new_output("stream", text="M x N x K: 8 x 8 x 4")]
    assert ("8", "times") not in prose.shown_by(cell).with_units


@pytest.mark.parametrize("unit", ["kB", "GB", "TB", "MiB", "%", "ms", "bits", "times", "kernels"])
def test_a_number_has_no_other_unit(unit):
    assert said("It is 319 MB.", "319 MB, 17 kernels") == []
    assert said(f"It is 319 {unit}.", "319 MB, 17 kernels")[0].startswith(f"'319 {unit}' stands")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("It is one kernel.", "no entry of the list"),
        ("- It is one kernel.", "without an address"),
        ("- [XLA](other.md) is fast.", "without an address"),
        ("1. one\n2. two", "more than a list"),
        ("## A head", "more than a list"),
        (f"- {XLA}\n\n```\none kernel\n```", "more than a list"),
        (f"- {XLA} <b>one</b>", "HTML in prose"),
        (f"- {XLA} ![one](one.png)", "a picture"),
    ],
)
def test_references_are_a_list_of_links(text, what):
    assert any(what in problem for problem in said(REFERENCES + text))


# Names --------------------------------------------------------------------------------------------


def test_every_name_is_used():
    """An exception that no text needs any more would let something else through."""
    texts = [
        text for name in pages.PAGES for text in prose.texts((pages.ROOT / name).read_text(), [])
    ]
    for path in outputs.find([], outputs.NOTEBOOKS):
        for cell in nbformat.read(path, 4).cells:
            texts += prose.said_by(cell, [])
            texts.append(re.sub(r"[*[\]`]", "", cell.source.partition("## References")[2]))
    for name in (*prose.NAMES, *prose.CITED):
        hidden = (found[0] for text in texts for found in name.finditer(text))
        assert any(map(prose.NUMBER.search, hidden)), f"{name.pattern} names no number"


def test_chapters_are_named_by_the_files_that_there_are():
    numbers = {path.name[:2] for path in outputs.find([], outputs.NOTEBOOKS)}
    for number in (f"{n:02}" for n in range(1, 100)):
        assert prose.without_names(f"chapter {number}") == (
            "" if number in numbers else f"chapter {number}"
        )
