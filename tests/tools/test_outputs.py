"""The check of the committed outputs can fail: altered outputs, halves and numbers are caught."""

import copy
import os
import subprocess
from pathlib import Path

import jupytext
import nbformat
import pytest

from tests.weekly import one_in
from tools.outputs import commands, prose
from tools.outputs.chapters import Refused
from tools.outputs.comparison import compare

SOURCE = """---
jupytext:
  formats: ipynb,md:myst
kernelspec:
  display_name: Python 3 (ipykernel)
  language: python
  name: python3
---

# A chapter

It multiplies 6 by 7, which is 42.

```{code-cell} ipython3
print("custom-call", 6 * 7)
```

```{code-cell} ipython3
:tags: [hide-input]

import matplotlib.pyplot as plt
plt.plot([1, 4, 2]);
```

```{code-cell} ipython3
:tags: [volatile-output]

import time
time.perf_counter()
```
"""


@pytest.fixture(scope="session")
def chapter(tmp_path_factory) -> Path:
    """A chapter of which there was an .md alone, refreshed."""
    path = tmp_path_factory.mktemp("book") / "01_tiny.ipynb"
    path.with_suffix(".md").write_text(SOURCE)
    commands.refresh([path])
    return path


@pytest.fixture
def pair(chapter, tmp_path) -> Path:
    """A copy of the chapter that a test may alter."""
    for half in (chapter, chapter.with_suffix(".md")):
        (tmp_path / half.name).write_bytes(half.read_bytes())
    return tmp_path / chapter.name


@pytest.fixture
def committed(pair, monkeypatch, needs_git) -> Path:
    # somebody's own settings may sign commits, or run hooks
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(pair.parent)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    return pair


def edit(path: Path, old: str, new: str, seconds: int = 0) -> None:
    """Edit a file; it was saved so many seconds after its time before."""
    saved = path.stat().st_mtime + seconds
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    os.utime(path, (saved, saved))


def test_a_second_run_is_the_same(pair):
    assert commands.check([pair]) == {"01_tiny": []}


def test_an_altered_output_a_wrong_number_and_an_edited_half_are_caught(pair, monkeypatch):
    fresh = nbformat.read(pair, 4)
    monkeypatch.setattr(commands, "run", lambda notebooks: {"01_tiny": fresh})
    monkeypatch.setattr(commands, "why_not_compared", lambda: None)
    edit(pair, "custom-call 42", "custom_call 40")
    edit(pair.with_suffix(".md"), "# A chapter", "# Another")
    number, twin, output = commands.check([pair])["01_tiny"]
    assert "'42' stands in the prose" in number
    assert "01_tiny.md is not what `make refresh` writes" in twin
    assert "-custom_call 40\n+custom-call 42" in output


@pytest.mark.parametrize(
    ("added", "said"),
    one_in(
        3,
        [
            ("1 / 0", "ZeroDivisionError"),
            ("import warnings; warnings.warn('slow')", "writes to stderr"),
            ("import os; os._exit(1)", "did not run"),
        ],
    ),
)
def test_a_refresh_that_fails_writes_nothing_and_says_why(pair, added, said):
    twin = pair.with_suffix(".md")
    twin.write_text(f"{twin.read_text()}\n```{{code-cell}} ipython3\n{added}\n```\n")
    before = {path: path.read_bytes() for path in pair.parent.iterdir()}
    with pytest.raises(Refused, match=said):
        commands.refresh([pair], "md")
    assert {path: path.read_bytes() for path in pair.parent.iterdir()} == before


def test_what_differs_by_nature_is_let_through(chapter):
    fresh = nbformat.read(chapter, 4)
    other = copy.deepcopy(fresh)
    other.cells[3].outputs[0].data["text/plain"] = "1.0"  # volatile
    # the same text, arriving in two pieces
    other.cells[1].outputs = [
        nbformat.v4.new_output("stream", text=text) for text in ("custom-", "call 42\n")
    ]
    assert compare(other, fresh) == []
    del other.cells[2].outputs[0].data["image/png"]
    assert compare(other, fresh)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("It prints 17 MB, of 1,024, in E4M3 on an H100, in chapter 03.", []),
        ("| **Time** | 1 minutes, 1 with the puzzles |", []),
        ("It takes 18 MB, or `19`.", ["18", "19"]),
        ("> 99%\n\n## References\n\n- In 1999", ["99"]),
    ],
)
def test_a_digit_in_prose_is_printed(said, wrong):
    assert prose.unshown(said, prose.numbers_in("f8[17,1024] 4e3")) == wrong


@pytest.mark.parametrize(
    "text",
    ["see /home/ada/nb.py", r"C:\Users\ada", "on 2026-03-01", "at 12:30:59", "<f at 0x7f12ab34cd>"],
)
def test_an_output_that_tells_of_a_machine_is_caught(text):
    def said(text):
        output = nbformat.v4.new_output("stream", text=text)
        cell = nbformat.v4.new_code_cell("print()", outputs=[output])
        return commands.machine_problems(nbformat.v4.new_notebook(cells=[cell]))

    assert said(text)
    assert not said("f32[64,128]/f8e4m3fn, a/b, https://github.com/openxla/xla/tmp/root, 2.0.1")


def test_refresh_takes_the_half_that_was_edited(committed, monkeypatch):
    monkeypatch.setattr(commands, "ROOT", committed.parent)
    twin = committed.with_suffix(".md")
    edit(twin, "# A chapter", "# From the text", -60)
    assert commands.edited_side(committed) == "md"
    edit(committed, "# A chapter", "# From the notebook")
    assert commands.edited_side(committed) == "ipynb"  # both were: the one saved last
    commands.keep_the_other(committed, "ipynb")
    kept = committed.parent / "_build" / "replaced" / twin.name
    assert "# From the text" in kept.read_text()
    subprocess.run(["git", "-C", str(committed.parent), "checkout", "-q", twin.name], check=True)
    assert commands.edited_side(committed) == "ipynb"


def test_a_new_pair_needs_no_commit(pair, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pair.parent.parent))
    edit(pair.with_suffix(".md"), "# A chapter", "# From the text", 60)
    assert commands.edited_side(pair) == "md"


def test_a_committed_pair_that_differs_asks(committed, monkeypatch):
    edit(committed.with_suffix(".md"), "# A chapter", "# From the text")
    halves = (committed.with_suffix(f".{side}") for side in commands.SIDES)
    said = {half: commands.said(jupytext.read(half)) for half in halves}
    monkeypatch.setattr(commands, "_committed", said.get)
    with pytest.raises(Refused, match="FROM=md or FROM=ipynb"):
        commands.edited_side(committed)


def test_an_unknown_chapter_is_named(capsys):
    assert commands.main(["check", "9"]) == 2
    assert "begins with '9': 01_fp8_formats" in capsys.readouterr().err
