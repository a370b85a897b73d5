"""Every chapter runs under nbmake, and its committed outputs are those of the run. `make check`
reports the same.
"""

import itertools
import re
from types import SimpleNamespace

import nbformat
import pytest

from tools import outputs
from tools.outputs import minutes
from tools.outputs.chapters import names, path_names
from tools.outputs.commands import readme_wanted

CHAPTERS = outputs.find([])


def asked_for(tests: list) -> list:
    """The chapters whose truth is among the tests to run: the others need not run."""
    names = {
        test.callspec.params["name"]
        for test in tests
        if getattr(test, "originalname", "") == "test_chapter_is_true"
    }
    return [path for path in CHAPTERS if path.stem in names]


@pytest.fixture(scope="session")
def report(request):
    found = outputs.check(asked_for(request.session.items))
    print(f"\n{found}")
    return found


@pytest.mark.parametrize("name", [path.stem for path in CHAPTERS])
def test_chapter_is_true(report, name):
    assert not report.problems[name], "\n\n".join(report.problems[name])


def test_report_says_whether_outputs_were_compared(report, record_property):
    record_property("not_compared", report.not_compared)
    assert report.not_compared == outputs.why_not_compared()
    assert ("no outputs were compared" in str(report)) == bool(report.not_compared)


def test_only_the_chapters_that_were_asked_for_are_run():
    tests = [
        SimpleNamespace(originalname=test, callspec=SimpleNamespace(params={"name": name}))
        for test, name in (
            ("test_chapter_is_true", "03_scaled_matmul"),
            ("test_what_is_folded_says_what_it_is", "01_fp8_formats"),
        )
    ]
    assert [path.stem for path in asked_for(tests)] == ["03_scaled_matmul"]


def test_every_pair_is_in_the_contents():
    assert [path.stem for path in CHAPTERS] == names()


def test_the_readme_has_every_chapter_and_its_picture():
    for path, content in readme_wanted().items():
        assert path.read_bytes() == content, f"{path.name}: run `make refresh`"


# How a chapter is laid out ------------------------------------------------------------------------

NOTEBOOKS = {path.stem: nbformat.read(path, 4) for path in CHAPTERS}
PATH = path_names()
NUMBERED = [name for name in NOTEBOOKS if name[0].isdigit()]  # the others are reference
LONGEST = 40  # minutes for a chapter that is not of the path


@pytest.mark.parametrize("name", NUMBERED)
def test_a_chapter_takes_the_time_that_it_states(name):
    counted = minutes.count(NOTEBOOKS[name])
    (stated,) = re.findall(
        r"^\| \*\*Time\*\* \| (\d+) minutes, (\d+) with the puzzles \|",
        NOTEBOOKS[name].cells[0].source,
        re.M,
    )
    to_read, with_puzzles = map(int, stated)
    assert abs(to_read - counted.minutes) <= 1, f"{stated} stated: {counted}"
    assert abs(with_puzzles - counted.with_puzzles) <= 1, f"{stated} stated: {counted}"
    low, high = (15, 25) if name in PATH else (0, LONGEST)
    assert low <= counted.minutes <= high


def test_the_path_takes_two_hours_and_three_with_the_puzzles():
    counted = [minutes.count(NOTEBOOKS[name]) for name in PATH]
    assert 110 <= sum(chapter.minutes for chapter in counted) <= 120
    assert 170 <= sum(chapter.with_puzzles for chapter in counted) <= 195


def test_what_is_counted():
    def code(source, *tags, outputs=()):
        return nbformat.v4.new_code_cell(source, metadata={"tags": [*tags]}, outputs=[*outputs])

    text, shown = (
        nbformat.v4.new_markdown_cell,
        nbformat.v4.new_output("stream", text="one\n\ntwo\n"),
    )
    picture = nbformat.v4.new_output(
        "display_data", {"image/svg+xml": "<svg/>", "text/plain": "a picture"}
    )
    cells = [
        text("## A head\n\nFour words [of prose](far/away.md)."),
        code("x = 1\n\ny = 2", outputs=[shown]),
    ]
    assert minutes.count(nbformat.v4.new_notebook(cells=cells)) == minutes.Count(6, 2, 2)
    folded = [
        code("x = 1", "hide-input", outputs=[picture]),
        code("x = 1", "hide-output", outputs=[shown]),
        code("x = 1", "hide-cell", outputs=[shown]),
    ]
    assert minutes.count(nbformat.v4.new_notebook(cells=cells + folded)) == minutes.Count(
        6, 3, 2 + minutes.PICTURE
    )
    asked = [text("> **Predict.** Well?"), code("x", "hide-output", outputs=[shown])]
    assert minutes.count(nbformat.v4.new_notebook(cells=asked)) == minutes.Count(
        2, 1, 2, predictions=1
    )
    puzzle = [
        text("**1. Do it.** Now."),
        code("def f(): ...", outputs=[shown]),
        code("# Solution 1", "hide-cell"),
        text("Words.\n\n## References\n\n- none"),
        code("x"),
    ]
    assert minutes.count(nbformat.v4.new_notebook(cells=puzzle)) == minutes.Count(
        5, 0, 0, puzzles=1
    )


def cells_from(name: str, pattern: str):
    """(number, the cells from there on) for each text cell that holds the pattern."""
    cells = NOTEBOOKS[name].cells
    return [
        (number, cells[number:])
        for number, cell in enumerate(cells)
        if cell.cell_type == "markdown" and re.search(pattern, cell.source, re.M)
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_answer_to_a_prediction_is_folded(name):
    for number, (_, *following) in cells_from(name, r"^> \*\*Predict\.\*\*"):
        answer = next(cell for cell in following if cell.get("outputs"))
        assert {"hide-output", "hide-cell"} & {*outputs.tags(answer)}, (
            f"cell {number}: {answer.source[:60]}"
        )
        if "hide-input" not in outputs.tags(answer):
            assert "assert " not in answer.source, f"cell {number}: its code gives the answer away"


@pytest.mark.parametrize("name", NUMBERED)
def test_a_folded_answer_is_not_on_its_fold(name):
    """JupyterLab shows the first line of what is folded: it is in the cell's code, or a tag, or the
    first of three.
    """
    for number, (_, *following) in cells_from(name, r"^> \*\*Predict\.\*\*"):
        answer = next(cell for cell in following if cell.get("outputs"))
        data = answer.outputs[0].get("data", {"text/plain": answer.outputs[0].get("text", "")})
        shown = next(
            data[kind] for kind in ("text/html", "image/svg+xml", "text/plain") if kind in data
        )
        first, *rest = [line for line in outputs.text_of(shown).splitlines() if line.strip()]
        assert (
            len(rest) > 1
            or first in answer.source
            or re.fullmatch(r"<[^>]{,40}>?", first)
            or not re.search(
                r"\d", first.replace("E4M3", "").replace("bfloat16", "").replace("float32", "")
            )
        ), f"cell {number}: {first}"


@pytest.mark.parametrize("name", NUMBERED)
def test_what_explains_an_answer_is_folded_with_it(name):
    for number, (_, *following) in cells_from(name, r"^> \*\*Predict\.\*\*"):
        until_text = itertools.takewhile(lambda cell: cell.cell_type == "code", following)
        assert not [cell for cell in until_text if cell.outputs and not outputs.tags(cell)], (
            f"cell {number}"
        )
        text = next(cell.source for cell in following if cell.cell_type == "markdown")
        assert "<details><summary>Explained</summary>\n\n" in text, f"cell {number}: {text[:60]}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_puzzle_has_a_folded_solution_whose_title_says_nothing(name):
    solutions = [cell for cell in NOTEBOOKS[name].cells if cell.source.startswith("# Solution")]
    puzzles = re.findall(
        r"^\*\*(\d+)\. ",
        "\n".join(cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown"),
        re.M,
    )
    assert puzzles == [*map(str, range(1, len(puzzles) + 1))]
    titles = [cell.source.partition("\n")[0] for cell in solutions]
    assert (
        set(titles) == {f"# Solution {number}" for number in puzzles}
        or not solutions
        and not puzzles
    )
    assert all(outputs.tags(cell) == ["hide-cell"] for cell in solutions)
    if name in PATH:
        where = [number for number, _ in cells_from(name, r"^\*\*\d+\. ")]
        assert len(where) >= 2 and where[0] < 0.75 * len(NOTEBOOKS[name].cells), (
            "one in the middle, one at the end"
        )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_folded_says_what_it_is(name):
    for cell in NOTEBOOKS[name].cells:
        if "hide-input" in outputs.tags(cell):
            assert cell.source.startswith("# "), f"no label: {cell.source[:60]}"
        elif cell.cell_type == "code" and not outputs.tags(cell):
            lines = cell.source.splitlines()
            assert sum(line.startswith(("import ", "from ")) for line in lines) <= 10, (
                "fold imports away"
            )
            assert all(len(line) <= 100 for line in lines), f"too wide: {cell.source[:60]}"
