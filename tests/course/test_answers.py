"""Every checker accepts right answers that are written unusually, and refuses wrong ones with a
sentence that says why: `answers` has them.

The first chapter in each run; with NIGHTLY=1 in the environment, all of them. One chapter:

    NIGHTLY=1 .venv/bin/python -m pytest tests/course/test_answers.py -k 04
"""

import pytest

from tests.course.answers import RIGHT, WRONG, answers, chapters, needed, solutions
from tests.weekly import NIGHTLY

CHAPTERS = chapters()
PUZZLES = [
    (name, number)
    for name in (CHAPTERS if NIGHTLY else CHAPTERS[:1])
    for number in range(1, len(solutions(name)) + 1)
]


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_puzzle_has_answers_of_both_kinds(name):
    puzzles = answers(name)._puzzles
    assert len(puzzles) == len(solutions(name))
    for puzzle in puzzles:
        assert len(puzzle.right_answers) >= RIGHT, f"puzzle {puzzle.number}"
        assert len(puzzle.wrong_answers) >= WRONG, f"puzzle {puzzle.number}"


@pytest.mark.parametrize("name, number", PUZZLES)
def test_a_checker_tells_right_from_wrong(name, number):
    puzzle = answers(name)._puzzles[number - 1]
    puzzle.prepare()
    mistakes = puzzle.mistakes()
    assert not mistakes, "\n\n".join(mistakes)


def test_a_checker_that_accepts_or_refuses_everything_is_noticed():
    puzzle = answers(CHAPTERS[0])._puzzles[0]
    puzzle.prepare()
    accepting = puzzle.mistakes(lambda answer: True)
    assert len(accepting) == len(puzzle.wrong_answers) + 1  # the stub, too
    assert all("is not refused" in mistake for mistake in accepting)

    def refuse(answer):
        print("not yet")
        return False

    refusing = [mistake for mistake in puzzle.mistakes(refuse) if "is refused" in mistake]
    assert len(refusing) == len(puzzle.right_answers)


def test_a_checker_that_fails_or_says_nothing_is_noticed():
    puzzle = answers(CHAPTERS[0])._puzzles[0]
    puzzle.prepare()
    for check, said in ((lambda answer: False, "no "), (lambda answer: 1 / 0, "ZeroDivisionError")):
        mistakes = puzzle.mistakes(check)
        assert len(mistakes) == len(puzzle.right_answers) + len(puzzle.wrong_answers) + 1
        assert said in mistakes[-1]


def test_only_the_cells_that_are_needed_are_run():
    cells = [
        "import math",
        "x = 1",
        "y = x",
        "print(y)",
        "def f():\n    return math.pi + x",
        "x = 2",
    ]
    assert needed(cells, {"f"}) == [cells[0], cells[1], cells[4], cells[5]]
