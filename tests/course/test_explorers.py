"""The pages of "Try it", in a browser: each shows an answer before any script runs, keeps its state
in the address, loads only what the site has, and everybody can use it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from helpers.explorers import esm
from tests.course.test_site import DRAWN, opened, overflows, see, served
from tools.site import build, explorers

ROOT = Path(__file__).resolve().parent.parent.parent
TOUCHABLE = 24  # CSS pixels: WCAG 2.2, 2.5.8
NAMES = list(explorers.EXPLORERS)
# Sphinx tells the authors of its extensions what will change.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")

# A module as an explorer is one, to try page.mjs with: its model is what the tests look at.
PROBE = "export default { render({ model, el }) { window.model = model; el.append('rendered') } }"
BROKEN = "export default { render({ model, el }) { el.append('half'); throw Error('broken') } }"

ICON = '<link rel="icon" href="favicon.svg">'


@contextlib.contextmanager
def try_site(project: Path) -> Iterator[str]:
    """The address of a site with the pages of explorers alone, which is built in seconds."""
    contents = yaml.safe_load((ROOT / "myst.yml").read_text())
    pages = [f"{explorers.FOLDER}/{name}.ipynb" for name in NAMES]
    contents["project"]["toc"] = [
        {"file": "README.md"},
        {"title": "Try it", "children": [{"file": page} for page in pages]},
    ]
    (project / "myst.yml").write_text(yaml.safe_dump(contents))
    (project / "README.md").write_text("# Index\n\nText.\n")
    shutil.copytree(ROOT / "img", project / "img")
    for page in pages:
        (project / page).parent.mkdir(parents=True, exist_ok=True)
        (project / page).write_text((ROOT / page).read_text())
    source, out = project / "source", project / "html"
    build.copy_sources(project, source)
    # What it warns of: links to pages that are not there. The whole site's test has none.
    build.run_sphinx(source, out, project / "doctrees")
    shutil.copyfile(ROOT / "img" / "favicon.svg", out / "favicon.svg")
    for name, module in (("probe", PROBE), ("broken", BROKEN)):
        (out / "_static" / explorers.STATIC / f"{name}.mjs").write_text(module)
    script = f'<script type="module" src="_static/{explorers.STATIC}/page.mjs"></script>'
    for name in ("probe", "broken"):
        state = '{"format": "e4m3fn", "code": 7, "is_on": false, "trace": [1, 2]}'
        element = f"<div class=explorer data-explorer={name} data-state='{state}'>stored</div>"
        (out / f"{name}.html").write_text(f"<!DOCTYPE html>{ICON}<p id=x>x</p>{element}{script}")
    with served(out) as address:
        yield address


def shown(page: Page) -> None:
    page.locator(".explorer[data-shown]").wait_for(state="attached")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_answers_before_any_script_runs(site, browser, name):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{site}notebooks/try/{name}.html")
        assert page.locator(".explorer").inner_text().strip()


# What a page tries that its policy refuses, and what became of it.
TRY = """async () => {
    const refused = []
    addEventListener("securitypolicyviolation", event => refused.push(event.effectiveDirective))
    await fetch("data:text/plain,x").catch(() => 0)
    const script = document.createElement("script")
    script.textContent = "window.ran = true"
    document.body.append(script)
    await new Promise(done => setTimeout(done, 100))
    return [refused.sort(), window.ran]
}"""


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_its_own_scripts_and_no_other(site, browser, name):
    address = f"{site}notebooks/try/{name}.html"
    with opened(browser, address) as page:  # a refusal would be on the console
        shown(page)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        assert page.evaluate(TRY) == [["connect-src", "script-src-elem"], None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (390, "dark")])
def test_everybody_can_use_it(site, browser, name, width, scheme):
    with opened(browser, f"{site}notebooks/try/{name}.html", width) as page:
        shown(page)
        see(page, width, scheme)
        assert not overflows(page)
        found = Axe().run(page, options={"preload": False, "resultTypes": ["violations"]})
        assert not found.response["violations"], found.generate_report()
        page.add_style_tag(content="html { font-size: 200% !important }")
        page.evaluate(DRAWN)
        assert not overflows(page), "with large text"


# page.mjs -----------------------------------------------------------------------------------------


def value(page: Page, key: str) -> object:
    return page.evaluate("key => model.get(key)", key)


def test_the_address_gives_values_of_the_types_that_the_explorer_begins_with(site, browser):
    fragment = "#format=e5m2&code=60&is_on=true&trace=[3]&other=1"
    with opened(browser, f"{site}probe.html{fragment}") as page:
        shown(page)
        found = [value(page, key) for key in ("format", "code", "is_on", "trace", "other")]
        assert found == ["e5m2", 60, True, [3], None]
    with opened(browser, f'{site}probe.html#code="7"&is_on=1&trace={{}}&code=x') as page:
        shown(page)
        assert [value(page, key) for key in ("code", "is_on", "trace")] == [7, False, [1, 2]]
    with opened(browser, f"{site}probe.html#x") as page:
        shown(page)
        assert value(page, "code") == 7, "a place on the page says nothing of the explorer"


def test_what_is_saved_is_in_the_address_and_back_undoes_it(site, browser):
    with opened(browser, f"{site}probe.html") as page:
        shown(page)
        page.evaluate("model.on('change:code', (_, code) => (window.heard ??= []).push(code))")
        page.evaluate("model.set('code', 8); model.set('format', 'a&b'); model.save_changes()")
        page.wait_for_url("**#format=a%26b&code=8")
        page.evaluate("model.set('code', 7); model.set('memory', 1)")
        page.wait_for_timeout(1100)
        page.evaluate("model.save_changes()")
        page.wait_for_url("**#format=a%26b")
        page.go_back()
        page.wait_for_function("model.get('code') == 8")
        page.go_back()
        page.wait_for_function("model.get('format') == 'e4m3fn'")
        page.go_forward()
        page.wait_for_function("model.get('format') == 'a&b'")
        assert page.evaluate("heard") == [8, 7, 8, 7, 8]
        assert value(page, "memory") == 1


def test_a_model_forgets_who_no_longer_listens(site, browser):
    with opened(browser, f"{site}probe.html") as page:
        shown(page)
        counts = page.evaluate("""() => {
            let count = 0
            const counts = [], listener = () => count++, each = set => (set(), counts.push(count))
            model.on("change:code change:format", listener)
            each(() => model.set({code: 1, format: "e5m2"}))
            each(() => model.set("code", 1))
            each(() => (model.off("change:code", listener), model.set("code", 2)))
            each(() => (model.off("change:format"), model.set("format", "e3m4")))
            return counts
        }""")
        assert counts == [2, 2, 2, 2]


def test_an_explorer_that_fails_leaves_the_stored_answer(site, browser):
    with pytest.raises(AssertionError, match="broken"):
        # The error may come before anybody waits for it.
        script = "addEventListener('unhandledrejection', () => { window.failed = true })"
        with opened(browser, f"{site}broken.html", script=script) as page:
            page.wait_for_function("window.failed")
            expect(page.locator(".explorer")).to_have_text("stored")


@pytest.mark.parametrize("name", NAMES)
def test_for_a_notebook_a_module_is_one_text(browser: Browser, name):
    with browser.new_context() as context:
        kind = context.new_page().evaluate(
            """async text => {
                const address = URL.createObjectURL(new Blob([text], {type: "text/javascript"}))
                return typeof (await import(address)).default.render
            }""",
            esm(name),
        )
        assert kind == "function"
