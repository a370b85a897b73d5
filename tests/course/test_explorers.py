"""The pages of "Try it", in a browser: each shows an answer before any script runs, answers to the
keyboard and to touch, keeps its state in the address, and everybody can use it."""

import contextlib
import gzip
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from fp8lens import inspect
from helpers.explorers import dump as dump_data
from helpers.explorers import esm, fusion_lab
from tests.course.test_site import DRAWN, opened, overflows, see, served
from tools.site import build, explorers, pyodide

ROOT = Path(__file__).resolve().parent.parent.parent
TOUCHABLE = 24  # CSS pixels: WCAG 2.2, 2.5.8
NAMES = list(explorers.EXPLORERS)
CHAPTERS = ("notebooks/03_scaled_matmul", "notebooks/11_libraries")
# Sphinx tells the authors of its extensions what will change.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")


@contextlib.contextmanager
def try_site(project: Path) -> Iterator[str]:
    """The address of a site of the first page, two chapters and the pages of explorers, which is
    built in seconds.
    """
    contents = yaml.safe_load((ROOT / "myst.yml").read_text())
    pages = [f"{page}.ipynb" for page in (*CHAPTERS, *(f"{explorers.FOLDER}/{n}" for n in NAMES))]
    contents["project"]["toc"] = [
        {"file": "README.md"},
        {"title": "Try it", "children": [{"file": page} for page in pages]},
    ]
    (project / "myst.yml").write_text(yaml.safe_dump(contents))
    shutil.copyfile(ROOT / "README.md", project / "README.md")
    shutil.copytree(ROOT / "img", project / "img")
    shutil.copytree(ROOT / explorers.FOLDER, project / explorers.FOLDER)
    for name in CHAPTERS:
        shutil.copyfile(ROOT / f"{name}.ipynb", project / f"{name}.ipynb")
    source, out = project / "source", project / "html"
    build.copy_sources(project, source)
    # What it warns of: links to pages that are not there. The whole site's test has none.
    build.run_sphinx(source, out, project / "doctrees")
    with served(out) as address:
        yield address


def shown(page: Page) -> None:
    page.locator(".explorer[data-shown]").wait_for(state="attached")


@contextlib.contextmanager
def explorer(browser: Browser, site: str, name: str, state: str = "", **options) -> Iterator[Page]:
    """An explorer's page, as somebody's link opens it."""
    with opened(browser, f"{site}notebooks/try/{name}.html{state}", **options) as page:
        shown(page)
        yield page


def accessible(page: Page) -> None:
    """Without a fault that axe finds, and no wider than the screen."""
    found = Axe().run(page, options={"preload": False, "resultTypes": ["violations"]})
    assert not found.response["violations"], found.generate_report()
    assert not overflows(page)


def words(text: str | None) -> str:
    return " ".join((text or "").split())


# All of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_without_scripts_a_page_shows_what_its_module_says_first(site, browser, name):
    about = explorers.EXPLORERS[name]
    answer = about.answer({**about.state, "pages": ""})
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{site}notebooks/try/{name}.html")
        stored = page.locator(".explorer").text_content()
        assert words(stored) == words(html.unescape(re.sub("<[^>]+>", "", answer)))
    with explorer(browser, site, name) as page:
        said = words(page.locator(".explorer").text_content())
        for paragraph in re.findall("<p[^>]*>(.*?)</p>", answer):
            assert words(html.unescape(re.sub("<[^>]+>", "", paragraph))) in said


STATES = {
    "bits": ["", "#value=abc", "#value=nan&format=float8_e5m2"],
    "speedup": ["", "#m=65536&n=2560&k=2560&chip=B200&a=amax&b=amax"],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (390, "dark")])
def test_everybody_can_use_it(site, browser, name, width, scheme):
    for state in STATES.get(name, [""]):
        with explorer(browser, site, name, state, width=width) as page:
            see(page, width, scheme)
            accessible(page)
            page.add_style_tag(content="html { font-size: 200% !important }")
            page.evaluate(DRAWN)
            assert not overflows(page), "with large text"


# Of each list, what has no room in its box. Before its arrow a browser leaves some pixels.
CUT = """() => [...document.querySelectorAll(".explorer select")].flatMap(select => {
    const style = getComputedStyle(select), pen = document.createElement("canvas").getContext("2d")
    pen.font = style.font
    const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight)
    const room = select.clientWidth - padding - 18
    const texts = [...select.options].map(option => option.text)
    return select.checkVisibility() ? texts.filter(text => pen.measureText(text).width > room) : []
})"""


@pytest.mark.parametrize("name", NAMES)
def test_no_list_cuts_its_texts(site, browser, name):
    with explorer(browser, site, name) as page:
        for width in (1920, 1366, 390):
            see(page, width, "light")
            page.evaluate(DRAWN)
            assert page.evaluate(CUT) == [], width


# In the place of the page's explorer it stands anew, in boxes of two sizes, with these attributes.
ANEW = """async attributes => {
    const whole = document.querySelector(".explorer")
    whole.replaceWith(...[350, 600].map(width => {
        const copy = whole.cloneNode(false)
        Object.assign(copy.dataset, attributes)
        Object.assign(copy.style, { width: `${width}px`, maxWidth: "100%" })
        delete copy.dataset.shown
        return copy
    }))
    await import(`${document.querySelector("script[src*='page.mjs']").src}?anew`)
}"""


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dump"])
def test_an_explorer_stands_twice_on_a_page_and_leaves_its_address_alone(site, browser, name):
    with explorer(browser, site, name, "#place", width=700) as page:
        page.evaluate(ANEW, {"quiet": ""})
        expect(page.locator(".explorer[data-shown]")).to_have_count(2)
        for control in page.locator(".explorer select").all():
            control.select_option(index=1)
        page.wait_for_timeout(500)  # the address is written after a moment
        assert page.url.endswith("#place")
        accessible(page)  # and no id, nor the name of a landmark, is there twice


@pytest.mark.parametrize("name", NAMES)
def test_for_a_notebook_a_module_is_one_text(browser, name):
    with browser.new_context() as context:
        kind = context.new_page().evaluate(
            """async text => {
                const address = URL.createObjectURL(new Blob([text], {type: "text/javascript"}))
                return typeof (await import(address)).default.render
            }""",
            esm(name),
        )
        assert kind == "function"


def test_an_explorer_that_fails_leaves_the_stored_answer(site, browser):
    with browser.new_context() as context:
        page = context.new_page()
        broken = "export default { render({ el }) { el.append('half'); throw Error('broken') } }"
        page.route(
            "**/bits.mjs", lambda route: route.fulfill(body=broken, content_type="text/javascript")
        )
        with page.expect_event("pageerror"):
            page.goto(f"{site}notebooks/try/bits.html")
        expect(page.locator(".explorer")).to_contain_text("465 becomes 448")
        expect(page.locator(".explorer")).not_to_contain_text("half")


BITS, TRACE, CHOICE = "[data-answer=code]", ".answer", ".answer strong"
LINKS = [
    ("model", "#code=def f(x): x%0Adef g(y): y&asked=g", ".wrong", "Of y, give a type and a shape"),
    ("bits", "#value=1&format=float8_e5m2", BITS, "0x3C"),
    ("bits", "#format=gone&zoom=1e9&clamp=3&value=465", BITS, "0x7E"),
    ("scaling", "#history=4", TRACE, "With a history of 4 "),
    ("scaling", "#trace=own&drawn=1 1 1", TRACE, "nothing saturates"),
    ("scaling", "#trace=gone&format=gone&history=0&step=1e9", TRACE, "With a history of 1 "),
    ("speedup", "#m=16&a=amax&b=amax", CHOICE, "bf16 is 3.00 times as fast as FP8"),
    ("speedup", "#m=0&n=1.5&k=x&chip=A100&a=toString&out=f64", CHOICE, "FP8 is 1.21 times"),
]


@pytest.mark.parametrize(("name", "state", "place", "said"), LINKS)
def test_a_link_opens_what_it_says_and_one_that_nobody_wrote_breaks_nothing(
    site, browser, name, state, place, said
):
    with explorer(browser, site, name, state) as page:
        expect(page.locator(place).first).to_contain_text(said)


# By keyboard, and by touch ------------------------------------------------------------------------


def test_bits_answers_to_the_keyboard_and_can_be_sent(site, browser):
    with explorer(browser, site, "bits") as page:
        value = page.get_by_label("Value", exact=True)
        value.fill("1")
        page.wait_for_url("**#value=1")
        page.wait_for_timeout(1100)  # a later change is another step
        page.locator("[data-which=format] [data-bit='0']").press("Enter")
        expect(page.locator(BITS).first).to_have_text("0x39")
        page.wait_for_url("**#value=1.125")
        page.go_back()
        expect(value).to_have_value("1")
        value.fill("x")
        page.wait_for_url("**#value=x")
        expect(page.get_by_role("alert")).to_contain_text("Not yet: “x” is not a number")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy the link").press("Enter")
        expect(page.get_by_role("status")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_delayed_scaling_answers_to_the_keyboard(site, browser):
    with explorer(browser, site, "scaling") as page:
        expect(page.locator("p.now")).to_contain_text("Its amax 100 is beyond that and saturates.")
        page.get_by_role("button", name="Next step").press("Enter")
        expect(page.locator("p.now")).to_contain_text("Step 51 knows 16 amaxes")
        history = page.get_by_role("slider", name="History")
        history.focus()
        for _ in range(12):
            page.keyboard.press("ArrowLeft")
        expect(page.locator(".answer")).to_contain_text("With a history of 4 ")
        page.wait_for_url("**history=4*")
        page.get_by_label("Amax of this step").fill("-1")
        expect(page.get_by_role("alert").last).to_contain_text("Not yet: the amax")


def test_when_is_fp8_faster_answers_to_the_keyboard(site, browser):
    with explorer(browser, site, "speedup") as page:
        slider = page.get_by_role("slider", name="M in powers of two")
        slider.focus()
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        expect(page.get_by_label("M, rows of A")).to_have_value("256")
        page.get_by_label("A arrives in").select_option("FP8 already")
        page.get_by_label("Weights of a model").select_option("Llama 2, 3 70B down")
        page.wait_for_url("**#m=256&n=8192&k=28672&a=fp8*")
        box = page.get_by_label("K, columns of both")
        box.fill("0")
        expect(page.get_by_role("alert")).to_contain_text("must be a whole number from 1")
        row = page.get_by_role("group", name="Times as fast as bf16").locator("tr:has(td)").first
        row.get_by_role("button").press("Enter")
        expect(box).to_have_value("8192")
        expect(page.locator("circle.measured").first).to_be_visible()


TAPS = [
    ("bits", "[data-which=format] [data-bit='1']", None, "384 becomes"),
    ("bits", ".line svg", {"x": 5, "y": 100}, " becomes "),
    ("scaling", "svg", {"x": 100, "y": 100}, "Step "),
    ("speedup", "svg.speedups", {"x": 50, "y": 60}, "memory bandwidth"),
]


@pytest.mark.parametrize(("name", "place", "position", "said"), TAPS)
def test_a_phone_answers_to_touch(site, browser, name, place, position, said):
    options = {"width": 390, "has_touch": True, "is_mobile": True}
    with explorer(browser, site, name, **options) as page:
        before = page.url
        page.locator(f".explorer {place}").first.tap(position=position)
        page.wait_for_function("before => location.href != before", arg=before)
        expect(page.locator(".explorer")).to_contain_text(said)
        for control in page.locator(".explorer :is(button, select, input:not([type=file]))").all():
            box = control.bounding_box()
            assert box is None or min(box["width"], box["height"]) >= TOUCHABLE
        for text in page.locator(".explorer svg text").all():
            assert float(text.evaluate("one => parseFloat(getComputedStyle(one).fontSize)")) >= 11


# Read my dump -------------------------------------------------------------------------------------

TEXT = dump_data.example()
NAME = "module_0001.jit_block.sm_9.0a_gpu_after_optimizations.txt"
DUMP = "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"
MARKUP = "<img src=x onerror=attack()>"
# Of everything in the explorer: elements that could load or run something, handlers, and links but
# for the page's own.
DANGEROUS = """() => [...document.querySelectorAll(".explorer *")].filter(element =>
    element.matches("img, script, iframe, object, embed, svg, style, link, base, form[action]")
    || [...element.attributes].some(({name, value}) => /^on|^src|^href|srcset/i.test(name)
        && !/^model[.]html$|[/]rules[/][a-z0-9-]+[.]html$/.test(value))
).map(element => element.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module")
def dump(site: str, browser: Browser) -> Iterator[Page]:
    """The page, in which Python is loaded once for all tests: that takes longest."""
    if not pyodide.FOLDER.is_dir():
        pytest.fail("no Pyodide") if os.environ.get("CI") else pytest.skip("no Pyodide")
    with explorer(browser, site, "dump") as page:
        page.get_by_role("button", name="Open the example").press("Enter")
        read(page, NAME)
        yield page


def read(page: Page, name: str) -> None:
    page.locator(".explorer:not([data-busy])").wait_for()
    expect(page.locator(".told")).to_contain_text(f"Read {name}")
    page.locator(".tabs").wait_for()


def give(page: Page, *files: tuple[str, bytes]) -> None:
    """Choose files, by name and bytes."""
    chosen = [{"name": name, "mimeType": "", "buffer": data} for name, data in files]
    page.locator("input[type=file]").first.set_input_files(chosen)


def test_the_example_opens_in_every_view_by_keyboard_and_everybody_can_use_it(dump):
    verdict = dump.locator(".result .verdict")
    assert verdict.inner_text() == dump.locator(".stored .verdict").text_content()
    tabs = ("Matmuls", "Why not FP8", "Kernels", "Between devices", "HLO")
    said = ("explorers/example.py", "Fix: quantize to", "39.8 MB", "No coll", "%cubl")
    dump.get_by_role("tab", name="Matmuls").focus()
    for name, text in zip(tabs, said, strict=True):
        expect(dump.get_by_role("tab", name=name)).to_be_focused()
        expect(dump.locator(".result > [role=tabpanel]:visible")).to_contain_text(text)
        for width, scheme in ((1366, "light"), (390, "dark")):
            see(dump, width, scheme)
            accessible(dump)
        dump.keyboard.press("ArrowRight")


def test_a_name_leads_to_its_line_and_back_returns(dump):
    dump.get_by_role("tab", name="Matmuls").click()
    dump.get_by_role("button", name="2048 x 1024 x 4096").click()
    here = dump.locator(".here")
    expect(here).to_contain_text("%custom-call.5")
    expect(here.locator(".own")).to_be_focused()
    dump.wait_for_url("**view=hlo&at=main.5%2Fcustom-call.5")
    dump.wait_for_timeout(1100)  # what follows sooner is one step
    here.locator(".own").press("Enter")
    dump.locator(".about").get_by_role("button", name="%loop_multiply_fusion").click()
    dump.wait_for_url("**loop_multiply_fusion")
    dump.go_back()
    expect(here).to_contain_text("%custom-call.5")


def test_files_and_text_are_read_and_what_is_no_dump_is_refused(dump):
    give(dump, (f"{DUMP}.gz", gzip.compress(TEXT.encode())))
    read(dump, f"{DUMP}.gz.")
    dump.get_by_role("button", name="Paste its text").click()
    dump.get_by_label("The text of a dump").fill(TEXT)
    dump.get_by_role("button", name="Read this text").click()
    read(dump, "pasted.txt")
    with dump.expect_download() as download:
        dump.get_by_role("button", name="Save as JSON").click()
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved == json.loads(inspect(TEXT).json())
    give(dump, ("bad.txt", TEXT[:5000].encode()))
    expect(dump.locator(".told.wrong")).to_contain_text("bad.txt is not one whole HLO module")
    expect(dump.locator(".result")).to_contain_text("pasted.txt (module")  # as before


# In the place of a program that runs on a GPU: it is compiled for one.
TRAIN = """
from fp8lens import aot_compile
from helpers.explorers import compiled, fusion_lab

layer, arguments = compiled.function({**fusion_lab.STATE, "bias": "f32"})
aot_compile(layer, *arguments)
"""


def test_what_the_command_dumps_is_told_with_the_rules_from_a_folder_and_a_zip(dump, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    dump.evaluate("location.hash = ''")  # not to where a test before was
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(dump_data.COMMAND, shell=True, check=True, cwd=tmp_path, env=env)
    shutil.make_archive(str(tmp_path / "dumped"), "zip", tmp_path, "dumps")
    wanted = fusion_lab.outcome({**fusion_lab.STATE, "bias": "f32"})["reasons"]
    for files in (tmp_path / "dumps").iterdir(), [tmp_path / "dumped.zip"]:
        give(dump, *((path.name, path.read_bytes()) for path in files))
        read(dump, "")
        dump.get_by_role("tab", name="Why not FP8").click()
        items = dump.locator(".result .reasons li")
        expect(items).to_have_count(len(wanted))
        for item, one in zip(items.all(), wanted, strict=True):
            expect(item).to_contain_text(f"Fix: {one['fix']}.")


def test_a_dump_outlives_a_reload_until_it_is_forgotten(dump):
    give(dump, (DUMP, TEXT.encode()))
    read(dump, DUMP)
    expect(dump.locator(".keeping")).to_contain_text("a reload shows it again")
    verdict = dump.locator(".result .verdict").inner_text()
    give(dump, ("picture.png", b"\x89PNG"))  # which is no dump
    expect(dump.locator(".told.wrong")).to_contain_text("picture.png is ")
    dump.get_by_role("tab", name="HLO").click()
    expect(dump.locator("#panel-hlo")).to_contain_text("%cubl")
    dump.reload()
    shown(dump)
    read(dump, DUMP)
    expect(dump.locator(".result .verdict")).to_have_text(verdict)
    dump.get_by_role("button", name="Forget it").press("Enter")
    expect(dump.locator(".told")).to_have_text("Forgotten: nothing is kept of the dump.")
    dump.reload()
    shown(dump)
    expect(dump.locator(".stored")).to_be_visible()


def test_a_link_opens_a_program_that_the_site_has(dump):
    body = gzip.compress(TEXT.encode())
    dump.route("**/programs/gated.txt.gz", lambda route: route.fulfill(body=body))
    dump.evaluate("location.hash = '#program=gated'")
    read(dump, "gated.txt.gz")
    give(dump, ("own.txt", TEXT.encode()))
    read(dump, "own.txt")
    expect(dump).not_to_have_url(re.compile("program="))


def test_markup_in_a_dump_stays_text(dump):
    dump.evaluate("() => { window.attack = () => { attack.ran = true } }")
    give(dump, (f"{MARKUP}.txt", TEXT.replace("jit(block)/down", MARKUP).encode()))
    read(dump, MARKUP)
    for view in ("Matmuls", "Why not FP8", "Kernels", "HLO"):
        dump.get_by_role("tab", name=view).click()
    dump.get_by_label("Search the HLO").fill("onerror")
    dump.keyboard.press("Enter")
    found = dump.locator(".found li button", has_text="onerror").first
    found.click()
    expect(dump.locator(".here .own")).to_be_focused()  # no longer at what a test before had found
    dump.locator(".here .own").press("Enter")
    expect(dump.locator(".about")).to_contain_text(MARKUP)
    assert dump.evaluate(DANGEROUS) == [] and dump.evaluate("attack.ran") is None
