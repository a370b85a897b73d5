"""The check of the committed outputs can fail: every way of altering a chapter is caught, and only
those.
"""

import copy
import errno
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

from tools import outputs
from tools.outputs import commands, rules

SOURCE = """---
jupytext:
  formats: ipynb,md:myst
kernelspec:
  display_name: Python 3 (ipykernel)
  language: python
  name: python3
---

# A chapter

```{code-cell} ipython3
print("\\x1b[31mf8e4m3fn\\x1b[0m[64,64]")
print("custom-call")
[1, 2]
```

+++

Next to it, another cell of text.

```{code-cell} ipython3
:tags: [hide-input]

import matplotlib.pyplot as plt
plt.plot([1, 4, 2]);
```

```{code-cell} ipython3
import anywidget

class Slider(anywidget.AnyWidget):
    _esm = "export default { render() {} }"

    def _repr_mimebundle_(self, **options):
        data, metadata = super()._repr_mimebundle_(**options)
        return data | {"text/plain": "a slider", "text/html": "<p>3.0</p>"}, metadata

Slider()
```

```{code-cell} ipython3
:tags: [volatile-output]

import time
time.perf_counter()
```
"""


@pytest.fixture(scope="session")
def chapter(tmp_path_factory) -> Path:
    """A refreshed chapter in a folder of its own: text in colour, a picture, a widget, a volatile
    cell.
    """
    path = tmp_path_factory.mktemp("book") / "notebooks" / "01_tiny.ipynb"
    path.parent.mkdir()
    path.with_suffix(".md").write_text(SOURCE)
    assert outputs.refresh([path]) == ["01_tiny: rewritten"]
    return path


@pytest.fixture
def pair(chapter, tmp_path) -> Path:
    """A copy of the chapter that a test may alter."""
    for half in (chapter, chapter.with_suffix(".md")):
        (tmp_path / half.name).write_bytes(half.read_bytes())
    return tmp_path / chapter.name


@pytest.fixture(autouse=True)
def compared(monkeypatch):
    """Outputs of these tests' own chapter can be compared on any machine."""
    monkeypatch.setattr(commands, "why_not_compared", lambda: None)
    monkeypatch.setattr(rules, "MAY_VARY", {"01_tiny": 1})


def read(path: Path):
    return nbformat.read(path, 4), jupytext.read(path.with_suffix(".md"))


def cell(notebook, text: str):
    """The cell whose source holds `text`."""
    return next(cell for cell in notebook.cells if text in cell.source)


# The fresh run ------------------------------------------------------------------------------------


def test_a_second_run_changes_nothing(chapter, pair):
    report = outputs.check([pair])
    assert not report.problems["01_tiny"], str(report)
    assert report.volatile == ["01_tiny cell 6 (import time)"]
    old = nbformat.read(chapter, 4)
    outputs.refresh([pair])
    new = nbformat.read(pair, 4)
    cell(old, "perf_counter").outputs = cell(new, "perf_counter").outputs
    assert old == new
    assert pair.with_suffix(".md").read_text() == chapter.with_suffix(".md").read_text()


def test_the_command_fails_on_one_altered_character(pair, capsys, monkeypatch):
    fresh = outputs.Run(nbformat.read(pair, 4), 1.0, None)
    monkeypatch.setattr(commands, "fresh_run", lambda paths: {"01_tiny": fresh})
    text = pair.read_text()
    assert text.count("custom-call\\n") == 1
    pair.write_text(text.replace("custom-call\\n", "custom_call\\n"))
    assert outputs.main(["check", "01", "--folder", str(pair.parent)]) == 1
    report = capsys.readouterr().out
    assert (
        "01_tiny: cell 2" in report
        and "-custom_call\n+custom-call" in report
        and "volatile cells, run and not compared: 01_tiny cell 6" in report
    )


def fails_with(number: int):
    def fail(_):
        raise OSError(number, os.strerror(number))

    return fail


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("1 / 0", "01_tiny fails, and stays as it was:\n"),
        ("import os\nos._exit(1)", "The kernel died: mostly for want of memory"),
    ],
)
def test_a_refresh_that_fails_writes_nothing_and_says_why(pair, capsys, added, said):
    twin = pair.with_suffix(".md")
    twin.write_text(f"{twin.read_text()}\n```{{code-cell}} ipython3\n{added}\n```\n")
    before = contents(pair)
    assert outputs.main(["refresh", "--from", "md", "--folder", str(pair.parent)]) == 2
    assert said in capsys.readouterr().err
    assert contents(pair) == before


def contents(pair: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in pair.parent.iterdir()}


DISK_FAULTS = [
    (
        errno.ENOSPC,
        "No space left on device: a file. What was not written is as it was: make room, and run "
        "the command again.",
    ),
    (errno.EROFS, "it was: its folder is read-only, or another user's."),
    (errno.EACCES, "Permission denied: a file. What was not written is "),
    (errno.EIO, "a file. What was not written is as it was.\n"),
]


@pytest.mark.parametrize(("number", "said"), DISK_FAULTS)
def test_a_disk_that_fails_loses_nothing(pair, chapter, capsys, monkeypatch, number, said):
    monkeypatch.setattr(commands, "run", as_run(chapter))
    monkeypatch.setattr(os, "fsync", fails_with(number))
    edit(pair.with_suffix(".md"), "# A chapter", "# Another")
    before = contents(pair)
    assert outputs.main(["refresh", "--from", "md", "--folder", str(pair.parent)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed
    assert contents(pair) == before


def as_run(chapter: Path):
    """Stands for a run that changed an output."""
    notebook = nbformat.read(chapter, 4)
    notebook.cells[1].outputs[1].data["text/plain"] = "new"
    return lambda notebooks, folder: {"01_tiny": outputs.Run(notebook, 1.0, None)}


def test_an_interrupted_refresh_loses_nothing(pair, capsys, monkeypatch):
    monkeypatch.setattr(commands, "run", interrupted)
    before = contents(pair)
    assert outputs.main(["refresh", "--folder", str(pair.parent)]) == 130
    assert capsys.readouterr().err.startswith("Stopped.") and contents(pair) == before


def test_under_other_versions_it_runs_and_says_that_it_compared_nothing(pair, capsys, monkeypatch):
    said = "jax 0.10.2 is installed, uv.lock has 0.12.0"
    monkeypatch.setattr(commands, "why_not_compared", lambda: said)
    fresh = outputs.Run(nbformat.read(pair, 4), 1.0, None)
    monkeypatch.setattr(commands, "fresh_run", lambda paths: {"01_tiny": fresh})
    pair.write_text(pair.read_text().replace("custom-call\\n", "custom_call\\n"))
    assert outputs.main(["check", "--folder", str(pair.parent)]) == 0
    assert "no outputs were compared: jax 0.10.2 is installed" in capsys.readouterr().out
    assert outputs.main(["refresh", "--folder", str(pair.parent)]) == 2
    assert "would differ from everybody else's: jax 0.10.2" in capsys.readouterr().err


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="another reason comes first here",
)
def test_a_package_of_another_version_is_named(monkeypatch):
    monkeypatch.undo()
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.0.1" if name == "ml-dtypes" else real(name)
    )
    assert "ml-dtypes 0.0.1 is installed, uv.lock has " in outputs.why_not_compared()


def test_a_failing_cell_and_a_warning_fail_the_check(pair):
    notebook, _ = read(pair)
    notebook.cells[1].source = "import warnings; warnings.warn('slow')"
    notebook.cells[3].source = "assert 1 + 1 == 3"
    nbformat.write(notebook, pair)
    problems = "\n".join(outputs.check([pair]).problems["01_tiny"])
    assert "fails when run" in problems and "assert 1 + 1 == 3" in problems
    assert "cell 2 (import warnings; warnings.warn('slow')) writes to stderr" in problems


# What is caught (tools/attack/mutate.py alters chapters in many more ways) -----------------------


def drop_panel(notebook):
    del cell(notebook, "Slider").outputs[0].data["text/html"]


def move_panel(notebook):
    cell(notebook, "Slider").outputs[0].data["text/html"] = "<p>4.0</p>"


@pytest.mark.parametrize("alter", [drop_panel, move_panel])
def test_an_altered_panel_is_caught(chapter, alter):
    fresh = nbformat.read(chapter, 4)
    assert outputs.compare(copy.deepcopy(fresh), fresh) == []
    altered = copy.deepcopy(fresh)
    alter(altered)
    assert outputs.compare(altered, fresh)


def test_what_differs_by_nature_is_let_through(chapter):
    fresh = nbformat.read(chapter, 4)
    other = copy.deepcopy(fresh)
    cell(other, "perf_counter").outputs[0].data["text/plain"] = "1.0"  # volatile
    stream = other.cells[1].outputs.pop(0)  # the same text, arriving in two pieces
    other.cells[1].outputs[:0] = [
        nbformat.v4.new_output("stream", text=line) for line in stream.text.splitlines(True)
    ]
    assert outputs.compare(other, fresh) == []


@pytest.mark.parametrize(
    "old, new",
    [
        ("custom-call", "custom-cal"),  # a source cell
        ("hide-input", "hide-output"),  # a tag
        ("tags: [hide-input]\n", ""),
        ("# A chapter", "# The chapter"),  # prose
        (
            "# A chapter\n",
            "# A chapter\n\n```{code-cell} ipython3\n1\n```\n",
        ),  # a cell in one half only
        ("another cell of text.", "another cell of text.\n\n+++\n\nAnd one more."),
        ("+++\n\n", ""),  # joins nothing here: the two text cells stay apart, so this one must pass
        ("name: python3", "name: python3.12"),
    ],
)
def test_a_half_of_a_pair_altered_alone_is_caught(pair, old, new):
    twin = pair.with_suffix(".md")
    assert outputs.pair_problems(*read(pair)) == []
    text = twin.read_text()
    assert old in text or old.startswith("+++")
    twin.write_text(text.replace(old, new, 1))
    assert bool(outputs.pair_problems(*read(pair))) == (not old.startswith("+++"))


def unrun_cell(notebook):
    cell(notebook, "plt.plot").execution_count = None


def add_stderr(notebook):
    cell(notebook, "plt.plot").outputs.append(
        nbformat.v4.new_output("stream", name="stderr", text="a warning")
    )


@pytest.mark.parametrize("alter", [unrun_cell, add_stderr])
def test_what_a_reader_could_not_reproduce_is_caught(chapter, alter):
    notebook = nbformat.read(chapter, 4)
    assert outputs.static_problems(notebook, chapter.stem) == []
    alter(notebook)
    assert outputs.static_problems(notebook, chapter.stem)


@pytest.mark.parametrize(
    "text, found",
    [
        ("see /home/ada/fp8/nb.py", "an absolute path"),
        ("/tmp/ipykernel_12/3.py:1", "an absolute path"),
        ("'/root/x'", "an absolute path"),
        (r"C:\Users\ada", "an absolute path"),
        ("on 2026-03-01", "a date"),
        ("at 12:30:59", "a time of day"),
        ("<function f at 0x7f12ab34cd56>", "a memory address"),
        ("f32[64,128]/f8e4m3fn, a/b, 1/2, </tmp-like", None),
        ("https://github.com/openxla/xla/tmp/root", None),
        ("root mean square 0.5, version 2.0.1", None),
    ],
)
def test_traces_of_a_machine(text, found):
    for output in (
        nbformat.v4.new_output("stream", text=text),
        nbformat.v4.new_output("display_data", data={"text/html": f"<b>{text}</b>"}),
    ):
        assert [what for what, _ in outputs.machine_traces(output)] == ([found] if found else [])


def test_the_name_of_the_host_is_a_trace(monkeypatch):
    monkeypatch.setattr(rules.socket, "gethostname", lambda: "gpu-box-17")
    output = nbformat.v4.new_output("stream", text="running on gpu-box-17.")
    assert outputs.machine_traces(output) == [("the host's name", "gpu-box-17")]


# Which half a refresh takes -----------------------------------------------------------------------


@pytest.fixture
def committed(pair, monkeypatch, needs_git) -> Path:
    monkeypatch.setenv(
        "GIT_CONFIG_GLOBAL", os.devnull
    )  # somebody's own settings may sign commits, or run hooks
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(pair.parent)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    return pair


def edit(path: Path, old: str, new: str):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_refresh_takes_the_half_that_was_edited(committed):
    edit(committed.with_suffix(".md"), "# A chapter", "# From the text")
    assert outputs.edited_side(committed) == "md"
    subprocess.run(["git", "-C", str(committed.parent), "checkout", "-q", "."], check=True)
    edit(committed, "# A chapter", "# From the notebook")
    assert outputs.edited_side(committed) == "ipynb"


def test_refresh_refuses_to_choose_between_two_edits(committed, capsys):
    edit(committed.with_suffix(".md"), "# A chapter", "# From the text")
    edit(committed, "# A chapter", "# From the notebook")
    assert outputs.main(["refresh", "--folder", str(committed.parent)]) == 2
    assert "--from md or --from ipynb" in capsys.readouterr().err
    assert "From the text" in committed.with_suffix(".md").read_text()


@pytest.mark.parametrize("git", [True, False])
def test_without_a_commit_to_compare_with_a_refresh_asks(pair, capsys, monkeypatch, git):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pair.parent.parent))
    if not git:
        monkeypatch.setenv("PATH", str(pair.parent))
    edit(pair.with_suffix(".md"), "# A chapter", "# From the text")
    assert outputs.main(["refresh", "--folder", str(pair.parent)]) == 2
    said = capsys.readouterr().err
    assert "git shows no commit here that tells which was edited: say which to take" in said


def test_an_unknown_chapter_is_named(pair, capsys):
    assert outputs.main(["check", "9", "--folder", str(pair.parent)]) == 2
    assert "'9'; there are 01_tiny" in capsys.readouterr().err


def test_a_missing_half_is_named(pair, capsys):
    pair.with_suffix(".md").unlink()
    assert outputs.main(["check", "--folder", str(pair.parent)]) == 2
    assert "01_tiny.md is missing" in capsys.readouterr().err


def test_ids_and_metadata_stay_through_a_refresh(chapter):
    notebook = json.loads(chapter.read_text())
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert "version" not in notebook["metadata"]["language_info"]
    assert "jupytext_version" not in chapter.with_suffix(".md").read_text()
