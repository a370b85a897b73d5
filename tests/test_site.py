"""The site is built offline, checked strictly, and reads well in a real browser."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from playwright.sync_api import Browser, Locator, Page

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "tools" / "site" / "build.py"
CHAPTERS = [
    page["file"] for part in yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"] if "children" in part
    for page in part["children"]
]  # fmt: skip
HLO = "__cublas$lt$matmul$f8"
NOWHERE = "http://127.0.0.1:9"
LIMIT = 900  # seconds for a build, or a page: far more than it takes where the machine is busy
WIDGET = "application/vnd.jupyter.widget-view+json"


def page_of(notebook: str) -> str:
    """The page of a chapter: mystmd drops the number from the name."""
    return Path(notebook).stem.split("_", 1)[1].replace("_", "-") + "/index.html"


def run_build(*arguments: str, project: Path = ROOT, isolated: bool = False, **environment: str):
    """Run the build; `isolated`: in a network namespace of its own, where the kernel allows that."""
    unshare = [shutil.which("unshare"), "-rn"] if isolated and shutil.which("unshare") else []
    if unshare and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        unshare = []
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return subprocess.run(
        [*unshare, sys.executable, str(BUILD), "--project", str(project), *arguments],
        env=os.environ | proxies | environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


def write_project(folder: Path, pages: dict[str, str | nbformat.NotebookNode]) -> Path:
    """A MyST project with the real one's settings and other pages."""
    config = yaml.safe_load((ROOT / "myst.yml").read_text())
    config["project"]["toc"] = [{"file": name} for name in pages]
    (folder / "myst.yml").write_text(yaml.safe_dump(config))
    for name, page in pages.items():
        text = page if isinstance(page, str) else nbformat.writes(page)
        (folder / name).write_text(text) if text else None
    return folder


def html_output(html: str) -> nbformat.NotebookNode:
    return new_output("display_data", {"text/html": html, "text/plain": "x"})


def cell(source: str, *outputs, **metadata) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


# --- what must fail the build: one page each, so that each is seen to be caught ------------------------------------

BROKEN = {
    "toc.md": ("", "entry does not exist"),
    "role.md": ("{nosuchrole}`x`", "unknown role: nosuchrole"),
    "directive.md": ("```{nosuchdirective}\nx\n```", "unknown directive: nosuchdirective"),
    "reference.md": ("[](#nothing-here)", "nothing-here"),
    "equation.md": ("{eq}`nothing`", "Cross reference target was not found: nothing"),
    "section.md": ("[a section](index.md#no-such-section)", "Cross reference target was not found: no-such-section"),
    "file.md": ("[a chapter](07_unwritten.ipynb)", "link to '07_unwritten.ipynb'"),
    "folder.md": ("[a folder](helpers)", "link to 'helpers'"),
    "picture.md": ("![A picture](missing.png)", 'Cannot find image "missing.png"'),
    "table.md": ("| a |\n|---|\n| ![t](gone.png) |", "picture 'gone.png' is not there"),
    "alt.md": ("![](dot.svg)", "has no alt text"),
    "tex.md": ("$$ \\frac{ $$", "Unexpected end of input"),
    "warning.md": ("{doc}`index`", "role is not recommended"),
    "node.md": ("```{mermaid}\ngraph TD; A-->B\n```", "cannot draw 'mermaid' nodes"),
    "folded.md": ("<details><summary>s</summary>\n\n$x^2$\n\n</details>", "math inside raw HTML"),
    "split.ipynb": (
        new_notebook(cells=[new_markdown_cell("# T\n\n<details>"), new_markdown_cell("</details>")]),
        "closed in another cell",
    ),
    "dead.ipynb": (new_notebook(cells=[cell("f()", html_output("<a href='gone.html'>x</a>"))]), "'gone.html' leads"),
    "cdn.ipynb": (
        new_notebook(cells=[cell("f()", html_output("<script src='https://example.org/x.js'></script>"))]),
        "would load 'https://example.org/x.js'",
    ),
    "mime.ipynb": (
        new_notebook(cells=[cell("f()", new_output("display_data", {"text/markdown": "x", "text/plain": "y"}))]),
        "cannot show an output of type text/markdown",
    ),
}


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "helpers").mkdir()
    (folder / "dot.svg").write_text(SVG)
    pages = {name: text if not isinstance(text, str) or not text else f"# Page\n\n{text}\n"
             for name, (text, _) in BROKEN.items()}  # fmt: skip
    write_project(folder, {"index.md": "# Index\n\nText.\n"} | pages)
    return run_build("--offline", project=folder, isolated=True, PATH="/nowhere")  # and no node on PATH


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_is_listed_and_fails_the_build(broken, name):
    assert broken.returncode == 1, broken.stdout
    page, message = name.rpartition(".")[0], BROKEN[name][1]
    lines = [line for line in broken.stderr.splitlines() if message in line]
    assert any(name in line or f"{page}/index.html" in line for line in lines), broken.stderr


# --- a sound project with everything that chapters may use --------------------------------------------------------

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'
# mystmd moves outputs of this length into files.
LONG = "x" * 400 + "\n" + "".join(f"line {i} of a long output\n" for i in range(4000))
SOUND = new_notebook(
    metadata={
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "jupytext": {"formats": "ipynb,md:myst", "default_lexer": "ipython3"},
    },
    cells=[
        new_markdown_cell(
            "# Every idiom\n\nThe lead paragraph, with `__cublas$lt$matmul$f8`, $E = m c^2$ and <kbd>Shift</kbd>.\n\n"
            "$$\\begin{aligned} y &= \\sum_k A_{ik} B_{jk} \\\\ &\\approx A B^T \\end{aligned}$$\n\n"
            "- [x] done\n- [ ] to do\n\n| a | b |\n|:--|--:|\n| 1 | $x$ |\n\n> **Predict.** What comes out?\n\n"
            "> **Note**\n> A callout.\n\n[Two](02_two.ipynb#A-second-section), [here](#Folds-and-cells),"
            " [start](index.md).\n\n![A black box](dot.svg)\n"
        ),
        new_markdown_cell(
            "## Folds and cells\n\n<details><summary>Answer</summary>\n\nIt is **448**.\n\n"
            "```python\nx = 1\n```\n\n</details>"
        ),
        cell("print(1)", new_output("stream", name="stdout", text="\x1b[1;31mbold red\x1b[0m <plain>\n")),
        cell("pieces()", *(new_output("stream", name="stdout", text=t) for t in ("in pie", "ces\n"))),
        cell("warn()", new_output("stream", name="stderr", text="careful\n")),
        cell("1/0", new_output("error", ename="E", evalue="division", traceback=["\x1b[31mZero\x1b[0m"])),
        cell(f"table({'x' * 300!r})", html_output("<table><tr><td>from html</td></tr></table>")),
        cell("svg", new_output("display_data", {"image/svg+xml": SVG, "text/plain": "svg"})),
        cell("json", new_output("display_data", {"application/json": {"key": 1}, "text/plain": "json"})),
        cell("panel", new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "VBox()"})),
        cell("print(LONG)", new_output("stream", name="stdout", text=LONG)),
        cell("# Solution 1: clamp\nx = 1", new_output("stream", name="stdout", text="solved\n"), tags=["hide-cell"]),
        cell("hidden_source()", new_output("stream", name="stdout", text="kept\n"), tags=["hide-input"]),
        cell("print('never shown')", tags=["remove-cell"]),
    ],
)


@pytest.fixture(scope="session")
def sound_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    (folder / "dot.svg").write_text(SVG)
    two = new_notebook(cells=[new_markdown_cell("# Two\n\nText.\n\n## A second section\n\n[Back](01_one.ipynb)")])
    pages = {"index.md": "# Start\n\n[One](01_one.ipynb)", "01_one.ipynb": SOUND, "02_two.ipynb": two}
    return write_project(folder, pages)


@pytest.fixture(scope="session")
def sound_site(sound_project: Path) -> Path:
    """Built as a reader would, with no way to the theme."""
    done = run_build(project=sound_project, API_URL=NOWHERE)
    assert done.returncode == 0, done.stderr
    assert "book-theme could not be downloaded" in done.stdout
    assert "building with the local template in tools/site" in done.stdout
    return sound_project / "_build" / "html"


def test_forcing_the_theme_fails_where_it_cannot_be_had(sound_site, sound_project):
    done = run_build("--theme", "book", project=sound_project, API_URL=NOWHERE)
    assert done.returncode == 1 and "book-theme could not be downloaded" in done.stderr
    assert (sound_site / "one" / "index.html").is_file(), "the local build is kept"


def test_the_theme_is_used_where_it_is_at_hand(sound_project, tmp_path):
    project = shutil.copytree(sound_project, tmp_path / "themed", ignore=shutil.ignore_patterns("_build"))
    theme = project / "_build/templates/site/myst/book-theme"
    theme.mkdir(parents=True)
    (theme / "template.yml").write_text("jtex: v1\nversion: 1.0.0\nbuild: {render: sh render.sh}\n")
    (theme / "render.sh").write_text(
        'for d in . one two; do mkdir -p "$BUILD_DIRECTORY/$d"\n'
        'echo "themed $BASE_URL" > "$BUILD_DIRECTORY/$d/index.html"; done'
    )
    done = run_build(project=project, API_URL=NOWHERE, BASE_URL="/fp8")
    assert done.returncode == 0 and done.stdout.startswith("book-theme: 3 pages"), done.stderr
    assert (project / "_build/html/one/index.html").read_text() == "themed /fp8\n"


# --- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which any error, and any request that leaves the machine, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(LIMIT * 1000)  # playwright counts in milliseconds
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url[:80]}"))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"left: {r.url}"))
    yield page
    context.close()
    assert not wrong


def open_page(page: Page, file: Path) -> None:
    page.goto(file.as_uri())
    page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    page.evaluate("Promise.all([...document.images].map(i => i.decode().catch(() => 0)))")


def follow(page: Page, link: Locator) -> None:
    """Click a link, and wait until all of its page is there: a click returns before, and leaves requests that fail."""
    address = link.evaluate("link => link.href")
    link.click()
    page.wait_for_url(address)


def widths_of_pictures(page: Page) -> list[int]:
    return page.evaluate("[...document.images].map(i => i.naturalWidth)")


def boxes_of_math(page: Page) -> list[float]:
    """Areas of the formulas that are not in a closed fold."""
    return page.evaluate(
        "[...document.querySelectorAll('math')].filter(m => !m.closest('details:not([open])'))"
        ".map(m => m.getBoundingClientRect()).map(b => b.width * b.height)"
    )


def overflows(page: Page, width: int) -> bool:
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function("width => innerWidth === width", arg=width)
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_a_page_shows_every_idiom(sound_site, page):
    open_page(page, sound_site / "one" / "index.html")
    assert widths_of_pictures(page) == [40, 40]
    assert len(boxes_of_math(page)) == 3 and all(boxes_of_math(page))
    outputs = page.locator(".outputs")
    assert page.locator(".ansi-bold.ansi-fg-1").inner_text() == "bold red"
    for text in ("<plain>", "in pieces", "careful", "Zero", "from html", '"key"', "This panel is interactive", "kept"):
        assert outputs.get_by_text(text).first.is_visible(), text
    assert page.get_by_text(LONG.splitlines()[-1]).count() == 1, "a long output is complete"
    assert page.locator(".cell .input .nb").first.inner_text() == "print", "code is highlighted"
    for hidden in ("solved", "hidden_source", "448"):
        assert not page.get_by_text(hidden).first.is_visible(), hidden
    for fold in ("Solution 1: clamp", "Code", "Answer"):
        page.locator("summary", has_text=fold).last.click()
    for shown in ("solved", "hidden_source", "448"):
        assert page.get_by_text(shown).last.is_visible(), shown
    assert "never shown" not in page.content()
    assert page.locator("blockquote.ask, aside.note").count() == 2
    assert page.locator("meta[name=description]").get_attribute("content").startswith("The lead paragraph")
    assert not overflows(page, 390)


def test_links_lead_to_pages_and_places(sound_site, page):
    open_page(page, sound_site / "index.html")
    follow(page, page.locator("article a", has_text="One"))
    follow(page, page.locator("article a", has_text="Two"))
    assert page.url.endswith("/two/index.html#a-second-section")
    assert page.locator("#a-second-section").is_visible()
    follow(page, page.locator("a[rel=prev]"))
    assert page.locator("h1").inner_text() == "Every idiom"
    assert page.locator("nav.side a[aria-current=page]").inner_text() == "Every idiom"


def test_pages_follow_the_readers_colours(sound_site, page):
    open_page(page, sound_site / "index.html")
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"))
    assert colours[0][0] != colours[1][0] and colours[0][1] != colours[1][1]


# --- the real site ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def site() -> Path:
    done = run_build("--offline", isolated=True)
    assert done.returncode == 0, done.stderr
    return ROOT / "_build" / "html"


def test_every_chapter_is_in_the_table_of_contents():
    assert sorted(CHAPTERS) == sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("notebooks/*.ipynb"))


def test_the_landing_page_leads_to_every_chapter(site, page):
    open_page(page, site / "index.html")
    assert page.locator("h1").is_visible() and all(widths_of_pictures(page))
    linked = page.locator("nav.side li > a").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert linked == [page_of(name) for name in CHAPTERS]
    assert not overflows(page, 390)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_reads_well(site, page, chapter):
    open_page(page, site / page_of(chapter))
    assert page.locator("nav.side a[aria-current=page]").inner_text() == page.locator("h1").inner_text()
    assert page.locator("a[rel=prev]").count() == 1
    assert page.locator("a[rel=next]").count() == (chapter != CHAPTERS[-1])
    assert page.locator("meta[name=description]").get_attribute("content")
    assert page.locator(".cell .input .k, .cell .input .kn").count() > 3, "code is highlighted"
    assert all(widths_of_pictures(page)) and all(boxes_of_math(page))
    assert page.get_by_alt_text("Figure drawn by the code above").count() == 0, "every picture says what it shows"
    if chapter == CHAPTERS[0]:
        assert widths_of_pictures(page) and boxes_of_math(page)
    else:
        calls = page.locator(".outputs").filter(has_text=HLO)
        assert any(calls.nth(i).is_visible() for i in range(calls.count())), "the FP8 call is to be seen"
    assert not overflows(page, 1280) and not overflows(page, 390)
