"""The whole answer on real programs, as it was read and found right."""

import pytest

from tests.programs.real import NAMES, answer, stored


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_one_that_was_read(name):
    """If a change is meant, `python -m tests.programs.real` writes the answers anew: read the
    difference.
    """
    assert answer(name).splitlines() == stored(name).read_text(encoding="utf-8").splitlines()
