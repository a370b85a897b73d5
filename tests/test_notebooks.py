"""Every chapter runs under nbmake, and its committed outputs are those of the run. `make check` reports the same."""
import outputs
import pytest

CHAPTERS = outputs.find([], outputs.NOTEBOOKS)


@pytest.fixture(scope="session")
def report():
    found = outputs.check(CHAPTERS)
    print(f"\n{found}")
    return found


@pytest.mark.parametrize("name", [path.stem for path in CHAPTERS])
def test_chapter_is_true(report, name):
    assert not report.problems[name], "\n\n".join(report.problems[name])


def test_report_says_whether_outputs_were_compared(report, record_property):
    record_property("not_compared", report.not_compared)
    assert report.not_compared == outputs.why_not_compared()
    assert ("no outputs were compared" in str(report)) == bool(report.not_compared)
