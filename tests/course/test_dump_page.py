"""The page "Read my dump" in a browser: it reads what it is given with fp8lens, sends nothing
anywhere, and nothing in a dump becomes markup, a script or a request."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from fp8lens import aot_compile, report_gemms
from helpers.explorers import compiled, fusion_lab
from helpers.explorers.dump import EXAMPLE
from tests.course.test_bits import follow
from tests.course.test_site import opened, overflows, see
from tests.helpers.test_reader import MARKUP, WRITTEN
from tests.programs import hlo_baits
from tools.bench import replicated
from tools.site import pyodide

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
TEXT = EXAMPLE.read_text()
PAGE = "notebooks/try/dump.html"
DUMP = "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt"
# A script, a handler or an address in a dump would end here.
ATTACK = "window.attack = () => { attack.ran = true }"
# Of everything in the explorer: elements that could load or run something, and handlers.
DANGEROUS = """() => [...document.querySelectorAll(".explorer *")].filter(element =>
    element.matches("img, script, iframe, object, embed, svg, style, link, base, form[action]")
    || [...element.attributes].some(({name, value}) => /^on|^src|^href|srcset/i.test(name))
).map(element => element.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module", autouse=True)
def python() -> None:
    """The page needs Pyodide, which is fetched before the site is built."""
    try:
        pyodide.fetched()
    except pyodide.NotFetched as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(python, site, browser: Browser) -> Iterator[Page]:
    """The page, in which Python is loaded once for all tests: that takes longest."""
    with opened(browser, site + PAGE, script=ATTACK) as page:
        yield page


@pytest.fixture
def page(loaded: Page) -> Page:
    """The page with the example open, as if it had just been loaded."""
    follow(loaded, "view=matmuls")  # also what the last test chose, and is not in the address yet
    see(loaded, 1280, "light")
    loaded.get_by_role("button", name="Open the example").click()
    read(loaded, "example.txt")
    return loaded


def read(page: Page, name: str) -> None:
    page.locator(".explorer:not([data-busy])").wait_for()
    expect(page.locator(".told")).to_contain_text(f"Read {name}")
    page.locator(".tabs").wait_for()


def give(page: Page, *files: tuple[str, bytes], where: str = ".drop") -> None:
    """Choose files, by name and bytes."""
    chosen = [{"name": name, "mimeType": "", "buffer": data} for name, data in files]
    page.locator(f"{where} input[type=file]").first.set_input_files(chosen)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_the_example_says_what_the_stored_page_says_and_every_view_opens(page):
    verdict = page.locator(".result .verdict")
    stored = page.locator(".stored .verdict").text_content()
    assert verdict.inner_text() == stored.strip()
    assert verdict.inner_text().startswith("1 of 3 matmuls is not in FP8")
    rows = page.locator("#panel-matmuls tbody tr:not(.below)")
    assert rows.count() == 3 and "explorers/example.py" in rows.first.inner_text()
    tab(page, "Why not FP8")
    assert "nothing that reaches it is FP8" in page.locator("#panel-lost li.lost").inner_text()
    tab(page, "Kernels")
    page.locator("#panel-kernels tbody tr").first.wait_for()
    sizes = page.locator("#panel-kernels td:nth-child(3)").all_inner_texts()
    assert sizes == ["4.2 MB", "2.88 MB", "2.62 MB", "1.84 MB", "6.14 kB"]
    page.get_by_label("Order of the kernels").select_option("program")
    expect(page.locator("#panel-kernels tbody tr").first).to_contain_text("wrapped_convert")
    tab(page, "Between devices")
    assert page.locator("#panel-sent").inner_text() == "No collectives."


def test_a_name_leads_to_its_maker_and_back_returns(page):
    page.get_by_role("button", name="512 x 512 x 1024").click()
    here = page.locator(".here")
    expect(here).to_contain_text("%custom-call.3")
    page.wait_for_url("**#view=hlo&at=main.2%2Fcustom-call.3")
    here.locator(".own").press("Enter")
    about = page.locator(".about")
    expect(about).to_contain_text("jit(gated)/down/dot_general")
    page.wait_for_timeout(1100)  # what follows sooner is one step
    about.get_by_role("button", name="%loop_multiply_fusion").click()
    expect(here).to_contain_text("%loop_multiply_fusion")
    page.wait_for_timeout(1100)
    here.get_by_role("button", name="%fused_multiply").click()
    expect(page.locator("details.here[open]")).to_contain_text("%fused_multiply")
    page.go_back()
    expect(page.locator(".line.here")).to_contain_text("%loop_multiply_fusion")
    page.get_by_label("Search the HLO").fill("TANH(")
    page.keyboard.press("Enter")
    expect(page.locator(".found p")).to_have_text("0 lines")
    page.get_by_label("Search the HLO").fill("parameter(7)")
    page.keyboard.press("Enter")
    page.locator(".found li button").click()
    expect(here).to_contain_text("%bias.1")


def test_a_name_leads_to_its_line_once(page):
    """The view and the place change together; a second way there would replace the lines, and
    with them the focus.
    """
    focused = """() => {
        window.focused = []
        addEventListener("focusin", ({target}) => focused.push(target.className))
    }"""
    page.evaluate(focused)
    page.get_by_role("button", name="512 x 512 x 1024").click()
    expect(page.locator(".here .own")).to_be_focused()
    page.wait_for_timeout(500)
    assert page.evaluate("focused").count("link own") == 1


def test_a_link_leads_to_the_place_once_the_dump_is_given(site, browser):
    place = "#view=hlo&find=f8e4m3fn&at=main.2%2Fcublas-gemm.6"
    with opened(browser, site + PAGE + place) as page:
        page.get_by_text("This link leads to a place in a dump.").wait_for()
        give(page, ("mine.txt", TEXT.encode()))
        expect(page.locator(".here")).to_contain_text("%cublas-gemm.6")
        expect(page.locator(".found p")).to_have_text("4 lines")
        assert page.get_by_text("This link leads to a place in a dump.").is_hidden()
    with opened(browser, f"{site}{PAGE}#view={MARKUP.replace('&', '')}&at=no/thing") as page:
        give(page, ("mine.txt", TEXT.encode()))
        read(page, "mine.txt")
        assert page.get_by_role("tab", selected=True).inner_text() == "Matmuls"
        tab(page, "HLO")
        page.locator(".line").first.wait_for()


def test_files_folders_and_gzipped_text_are_read_and_the_right_one_is_named(page):
    give(page, (f"{DUMP}.gz", gzip.compress(TEXT.encode())))
    read(page, f"{DUMP}.gz.")
    beside = ("module_0001.jit_f.before_optimizations.txt", TEXT.encode() * 2)
    give(page, beside, (DUMP, TEXT.encode()), ("module_0001.ptx", b"x" * 99))
    read(page, f"{DUMP}, the one program that XLA compiled for a GPU among 3 files.")
    page.get_by_role("button", name="Paste its text").click()
    page.get_by_label("The text of a dump").fill(TEXT)
    page.get_by_role("button", name="Read this text").click()
    read(page, "pasted.txt")
    for data, said in (
        (b"", "bad.txt is empty"),
        (gzip.compress(TEXT.encode())[:-40], "bad.txt cannot be read: it is gzipped, and damaged"),
        (TEXT[:5000].encode(), "bad.txt is not one whole HLO module (line "),
        (b"\0", "bad.txt is no text"),
    ):
        give(page, ("bad.txt", data))
        expect(page.locator(".told.wrong")).to_contain_text(said)
        assert not page.locator(".tabs").count() and page.locator(".stored").is_visible()
    give(page, ("one.ptx", b"x"), ("two.ptx", b"x"))
    expect(page.locator(".told.wrong")).to_contain_text("None of these 2 files is the text")


def test_of_a_folder_with_what_xlas_rewriter_was_given_the_rules_are_said(page, tmp_path):
    choice = {**fusion_lab.STATE, "bias": "f32"}
    fn, arguments = compiled.function(choice)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    options |= {"xla_dump_hlo_pass_re": "gemm-rewriter"}
    aot_compile(fn, *arguments, compiler_options=options)
    files = [(path.name, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    give(page, *files)
    name = next(name for name, _ in files if name.endswith("gpu_after_optimizations.txt"))
    read(page, f"{name}, the one program that XLA compiled for a GPU among {len(files)} files.")
    tab(page, "Why not FP8")
    reasons = page.locator(".reasons li")
    wanted = compiled.inspected(choice).reasons
    assert [one.get_attribute("data-rule") for one in reasons.all()] == [r.rule for r in wanted]
    for shown, one in zip(reasons.all(), wanted, strict=True):
        expect(shown).to_contain_text(f"{one.reason}.")
        expect(shown).to_contain_text(f"Fix: {one.fix}.")
        link = shown.get_by_role("link", name=one.rule)
        expect(link).to_have_attribute("href", f"../../rules/{one.rule}.html")
    # The program alone does not tell them: then it is said how to dump.
    give(page, (name, dict(files)[name]))
    read(page, f"{name}.")
    tab(page, "Why not FP8")
    expect(page.locator(".panel, .explorer").first).to_contain_text("xla_dump_hlo_pass_re")
    assert not reasons.count()


def test_a_dropped_file_is_read(page):
    files = page.evaluate_handle(
        """text => {
            const transfer = new DataTransfer()
            transfer.items.add(new File([text], "dropped.txt"))
            return transfer
        }""",
        TEXT,
    )
    page.locator(".drop").first.dispatch_event("drop", {"dataTransfer": files})
    read(page, "dropped.txt")


def test_megabytes_are_read_while_the_page_stays_alive_and_can_be_cancelled(page):
    text = replicated(TEXT, 600)
    assert len(text) > 2_000_000
    page.evaluate("""() => {
        window.longest = 0
        let last = performance.now()
        setInterval(() => {
            longest = Math.max(longest, performance.now() - last)
            last = performance.now()
        }, 10)
    }""")
    data = ("large.txt", text.encode())
    give(page, data)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".told")).to_have_text("Cancelled. Nothing is kept of the dump.")
    give(page, data)
    read(page, "large.txt")
    assert page.locator(".result .verdict").inner_text().startswith("600 of 1800 matmuls are not")
    tab(page, "HLO")
    page.locator(".line").nth(99).wait_for()
    assert page.locator(".line").count() == 100, "only a part is drawn"
    page.get_by_role("button", name="more (").first.click()
    page.locator(".line").nth(199).wait_for()
    seconds = float(page.locator(".explorer").get_attribute("data-seconds"))
    longest = page.evaluate("longest") / 1000
    assert longest < max(1.0, seconds / 2), "the page waits for nothing that the worker does"


@pytest.mark.parametrize("place", ["module", "op_name", "target", "configuration", "literal"])
def test_markup_in_a_dump_stays_text(page, place):
    word = MARKUP.replace('"', "")
    if place == "module":
        word = word.replace(" ", "/")
    if place == "configuration":
        word = f'"a":"{word}"'
    text = hlo_baits.PLACES[place](word)
    give(page, (f"{MARKUP.replace('/', '')}.txt", text.encode()))
    read(page, "<img src=x onerror=attack()>")
    for view in ("Matmuls", "Why not FP8", "Kernels", "Between devices", "HLO"):
        tab(page, view)
    page.locator(".line .own").last.click()
    about = page.locator(".about")
    about.wait_for()
    if place != "module":
        assert "<img src=x onerror=attack()>" in about.inner_text()
    page.get_by_label("Search the HLO").fill("negate" if place == "module" else "<script>")
    page.keyboard.press("Enter")
    page.locator(".found li").first.wait_for()
    tab(page, "Compare")
    give(page, (f"{MARKUP.replace('/', '')}.txt", TEXT.encode()), where="#panel-compare .drop")
    page.locator(".diff tr").first.wait_for()
    assert page.evaluate(DANGEROUS) == [] and page.evaluate("attack.ran") is None


def test_it_is_saved_as_json_and_as_a_page_that_runs_nothing(page, site, browser, tmp_path):
    give(page, ("mine.txt", TEXT.replace("jit(gated)/up", MARKUP.replace('"', "")).encode()))
    read(page, "mine.txt")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as JSON").click()
    assert download.value.suggested_filename == "mine.json"
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["file"] == "mine.txt" and len(saved["rows"]) == len(report_gemms(TEXT).rows)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as a page").click()
    assert download.value.suggested_filename == "mine.html"
    text = Path(download.value.path()).read_text()
    with browser.new_context(java_script_enabled=True) as context:
        context.add_init_script(ATTACK)
        other = context.new_page()
        asked: list[str] = []
        other.on("request", lambda request: asked.append(request.url))
        other.set_content(text)
        assert "1 of 3 matmuls is not in FP8" in other.locator("h1").inner_text()
        assert other.evaluate("attack.ran") is None and asked == []
        assert not other.locator("script, img").count()
        link = other.locator("details[open] a", has_text="%loop_multiply_fusion").first
        assert other.locator(f'[id="{link.get_attribute("href")[1:]}"]').is_visible()


def test_two_dumps_stand_beside_each_other(page):
    tab(page, "Compare")
    after = TEXT.replace("bf16[512,1024]", "f32[512,1024]")
    give(page, ("after.txt", after.encode()), where="#panel-compare .drop")
    expect(page.locator("#panel-compare .verdict")).to_have_text("6 lines of HLO differ.")
    moved = page.locator("#panel-compare tr.changed")
    assert moved.all_inner_texts() == ["bytes moved\t11.5 MB\t15.7 MB"]
    give(page, ("same.txt", TEXT.encode()), where="#panel-compare .drop")
    expect(page.locator("#panel-compare .verdict")).to_have_text("The HLO computes the same.")


def test_the_second_dump_may_be_broken_or_cancelled_and_the_first_stays(page):
    tab(page, "Compare")
    other = "#panel-compare .drop"
    after = TEXT.replace("bf16[512,1024]", "f32[512,1024]").encode()
    give(page, ("after.txt", after), where=other)
    expect(page.locator("#panel-compare .verdict")).to_have_text("6 lines of HLO differ.")
    give(page, ("bad.txt", TEXT[:5000].encode()), where=other)
    expect(page.locator("#panel-compare .lacks")).to_contain_text("bad.txt is not one whole HLO")
    assert not page.locator("#panel-compare .verdict, .diff").count()
    page.locator(f"{other} button").first.focus()
    give(page, ("large.txt", replicated(TEXT, 600).encode()), where=other)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".told")).to_have_text("Cancelled. The first dump is kept.", timeout=60_000)
    assert page.locator(".result > .verdict").inner_text().startswith("1 of 3 matmuls")
    expect(page.locator(f"{other} button").first).to_be_focused()
    tab(page, "Kernels")
    page.locator("#panel-kernels tbody tr").first.wait_for()
    tab(page, "Compare")
    give(page, ("same.txt", TEXT.encode()), where=other)
    expect(page.locator("#panel-compare .verdict")).to_have_text("The HLO computes the same.")


def test_a_file_may_be_chosen_twice_and_the_answer_has_the_focus(page):
    expect(page.locator(".result > .verdict")).to_be_focused()
    give(page, ("mine.txt", TEXT.encode()))
    read(page, "mine.txt")
    inputs = page.locator("input[type=file]")
    assert inputs.evaluate_all("all => all.map(one => one.files.length)") == [0] * 2
    assert "up to 64 MB of text" in page.locator(".drop").first.inner_text()


def test_of_a_program_before_the_optimizations_nothing_is_judged(page):
    give(page, ("m.before_optimizations.txt", WRITTEN.encode()))
    read(page, "m.before_optimizations.txt")
    said = "Unknown: this is a program that XLA has not optimized yet."
    expect(page.locator(".result > .verdict")).to_contain_text(said)
    assert not page.locator(".result").locator("tr.lost, tr.below, .mark").count()
    for view in ("Why not FP8", "Kernels", "Between devices"):
        tab(page, view)
        expect(page.get_by_role("tabpanel", name=view)).to_contain_text(said)


def test_it_is_operated_by_the_keyboard(page):
    page.get_by_role("tab", name="Matmuls").focus()
    for name in ("Why not FP8", "Kernels"):
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
    page.keyboard.press("End")
    expect(page.get_by_role("tab", name="Compare")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("Tab")
    expect(page.get_by_role("region", name="Matmuls")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".here .own")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".about")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(1366, "light"), (390, "dark")])
def test_everybody_can_use_each_view(page, width, scheme):
    see(page, width, scheme)
    for view in ("Matmuls", "Why not FP8", "Kernels", "Between devices", "HLO", "Compare"):
        tab(page, view)
        if view == "HLO":
            page.locator(".line .own").nth(9).click()
            page.locator(".about").wait_for()
        if view == "Compare":
            other = TEXT.replace("bf16[512,1024]", "f32[512,1024]").encode()
            give(page, ("after.txt", other), where="#panel-compare .drop")
            page.locator(".diff tr").first.wait_for()
        assert not overflows(page), view
        found = Axe().run(page, options={"preload": False, "resultTypes": ["violations"]})
        assert not found.response["violations"], f"{view}\n{found.generate_report()}"
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{folder}/dump-{view}-{width}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("lacks", ["WebAssembly", "Worker"])
def test_where_python_cannot_run_the_page_names_the_command(site, browser, lacks):
    script = {
        "WebAssembly": "delete window.WebAssembly",
        "Worker": "window.Worker = class { postMessage() { this.onerror(new Event('x')) } "
        "terminate() {} }",
    }[lacks]
    with opened(browser, site + PAGE, script=script) as page:
        if lacks == "Worker":
            page.get_by_role("button", name="Open the example").click()
        page.get_by_text("In a terminal, fp8lens dump.txt says the same.").wait_for()
        assert page.locator(".stored .verdict").is_visible()
