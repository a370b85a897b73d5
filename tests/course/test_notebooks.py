"""Every chapter runs under nbmake, and its committed outputs are those of the run. `make check`
reports the same.
"""

import re
import sys

import nbformat
import pytest

from tools.outputs import minutes, prose
from tools.outputs.chapters import NOTEBOOKS, ROOT, TIME, find, names, path_names
from tools.outputs.commands import check, readme_wanted

CHAPTERS = {path.stem: nbformat.read(path, 4) for path in find([])}
PATH_MINUTES, WITH_PUZZLES = range(110, 121), range(170, 196)
# Phrases of the README whose numbers no command and no chapter prints.
OF_THE_README = (
    "takes about two hours|about a minute and 2 GB|CUDA 13 \\(580 or newer\\)|License 2\\.0"
)


@pytest.fixture(scope="session")
def problems(request) -> dict[str, list[str]]:
    """Those of the chapters whose test is among the tests to run: the others need not run."""
    wanted = {
        test.callspec.params["name"]
        for test in request.session.items
        if getattr(test, "originalname", "") == "test_chapter_is_true"
    }
    return check([path for path in find([]) if path.stem in wanted])


@pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler comes for Linux only")
@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_is_true(problems, name):
    assert not problems[name], "\n\n".join(problems[name])


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("try/*.ipynb")), ids=lambda path: path.stem)
def test_the_cell_of_an_explorers_page_runs(path):
    """Its stored output is a picture, which no run makes."""
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    exec(cell.source, {})


def test_every_pair_is_in_the_contents():
    halves = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    halves |= {path.stem for path in NOTEBOOKS.glob("[0-9A-Z]*_*.md")}
    assert halves == set(names())


def test_a_chapter_takes_the_time_that_it_states():
    counted = {name: minutes.count(notebook) for name, notebook in CHAPTERS.items()}
    for name, notebook in CHAPTERS.items():
        if stated := TIME.search(notebook.cells[0].source):
            assert counted[name] == pytest.approx([*map(int, stated.groups())], abs=1), name
        else:
            assert not name[0].isdigit(), f"{name} states no time, and is no reference"
    of_path = [counted[name] for name in path_names()]
    assert sum(reading for reading, _ in of_path) in PATH_MINUTES
    assert sum(with_puzzles for _, with_puzzles in of_path) in WITH_PUZZLES


def test_the_readme_has_every_chapter_and_its_picture():
    for path, content in readme_wanted().items():
        assert path.read_bytes() == content, f"{path.name}: run `make refresh`"


def test_the_readme_says_what_its_commands_or_a_chapter_print():
    """Its commands print what it shows: tests/fp8lens/test_cli.py runs them."""
    readme = (ROOT / "README.md").read_text()
    printed = prose.numbers_in("".join(re.findall(r"^```text\n(.*?)^```", readme, re.M | re.S)))
    for section in re.split(r"^(?=## )", readme, flags=re.M):
        linked = re.findall(r"notebooks/([0-9A-Z]\w*)\.ipynb", section)
        shown = [prose.shown_by(cell) for name in linked for cell in CHAPTERS[name].cells]
        text = re.sub(rf"{OF_THE_README}|^\|.*", "", section, flags=re.M)
        assert prose.unshown(text, printed.union(*shown)) == []
    (ratio,) = re.findall(r"^time at least .* (\S+)$", readme, re.M)[:1]
    assert f"takes {ratio} of its bf16 time in FP8, by the roofline" in readme
