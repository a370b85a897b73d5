"""A reader's first minutes: `make lab` from a fresh clone, its address opened in a real browser, a
chapter run.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import jupytext
import nbformat
import pytest
from playwright.sync_api import Page, expect

from fp8lens.hlo.text import size
from helpers.explorers import compiled, fusion_lab
from tests.weekly import NIGHTLY
from tools import outputs
from tools.files import of_project
from tools.site import explorers

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTER = "01_fp8_formats"
# The first chapter has every kind of output, and an explorer; the other one compiles, too.
RUN = [CHAPTER, "03_scaled_matmul"] if NIGHTLY else [CHAPTER]
LIMIT = 300  # seconds for whatever is waited for: far more than it takes where the machine is busy

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and not shutil.which("make"), reason="needs make"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The project as git would clone it, each .md older than its .ipynb: the order Jupytext likes
    least.
    """
    clone = tmp_path_factory.mktemp("clone")
    for path in of_project("notebooks", "img", "README.md", "pyproject.toml"):
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for twin in clone.glob("notebooks/*.md"):
        os.utime(twin, (time.time() - 3600,) * 2)
    return clone


@pytest.fixture(scope="module")
def address(clone, tmp_path_factory) -> str:
    """The address that `make lab` prints, served from `clone`, for a user with no settings and no
    screen.
    """
    home = tmp_path_factory.mktemp("home")
    dropped = ("MAKE", "MFLAGS", "JUPYTER", "PYTEST", "DISPLAY", "WAYLAND", "JAX_", "BROWSER")
    environment = {
        k: v for k, v in outputs.run_environment(home).items() if not k.startswith(dropped)
    }
    environment |= {
        f"JUPYTER_{what}_DIR": str(home / what) for what in ("CONFIG", "DATA", "RUNTIME")
    }
    environment |= {
        f"JUPYTERLAB_{what}_DIR": str(home / what) for what in ("SETTINGS", "WORKSPACES")
    }
    log = home / "log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            ["make", "lab", f"ARGS=--ServerApp.root_dir={clone}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        deadline = time.time() + LIMIT
        while not (printed := re.search(r"http://127\.0\.0\.1:\d+/\S+", log.read_text())):
            assert server.poll() is None and time.time() < deadline, (
                f"make lab printed no address:\n{log.read_text()}"
            )
            time.sleep(0.2)
        yield printed[0]
        said = [line for line in log.read_text().splitlines() if line.strip()]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert "http://127.0.0.1:" in said[-1], (
        "something was printed after the address:\n" + "\n".join(said)
    )


@pytest.fixture(scope="module")
def page(browser, address) -> Page:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(LIMIT * 1000)  # playwright counts in milliseconds
    page = context.new_page()
    page.goto(address)
    assert f"/notebooks/{CHAPTER}.ipynb" in page.url
    panel_of(page, f"{CHAPTER}.ipynb")  # opened by the address alone
    yield page
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / "lab.png")
    context.close()


@pytest.fixture(scope="module", params=RUN)
def ran(request, page, clone) -> Path:
    """A chapter, all its cells run, as JupyterLab saved it."""
    chapter = request.param
    panel = open_chapter(page, f"{chapter}.ipynb")
    for menu, item in (("Edit", "Clear Outputs of All Cells"), ("Run", "Run All Cells")):
        page.locator(f'.lm-MenuBar-itemLabel:text-is("{menu}")').click()
        label = page.locator(f'.lm-Menu-itemLabel:text-is("{item}")')
        label.click()
        expect(label).to_be_hidden()  # a menu that stays open would keep the keys below to itself
    path, deadline = clone / "notebooks" / f"{chapter}.ipynb", time.time() + LIMIT
    while (
        True
    ):  # between two cells the kernel is idle for a moment: so until all of them are counted
        panel.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        save(page, chapter)
        counts = [
            cell.execution_count
            for cell in nbformat.read(path, 4).cells
            if cell.cell_type == "code"
        ]
        if counts == [*range(1, len(counts) + 1)] or time.time() > deadline:
            return path
        page.wait_for_timeout(500)


def save(page: Page, chapter: str) -> None:
    with page.expect_response(
        lambda r: r.request.method == "PUT" and f"{chapter}.ipynb" in r.url
    ) as saved:
        page.keyboard.press("Control+s")
    assert saved.value.ok
    saved.value.finished()


def as_committed(clone: Path, chapter: str) -> bool:
    """Whether both halves of a chapter are, to the byte, what git has of them."""
    return all(
        (clone / "notebooks" / f"{chapter}{end}").read_bytes()
        == (ROOT / "notebooks" / f"{chapter}{end}").read_bytes()
        for end in (".ipynb", ".md")
    )


def open_chapter(page: Page, name: str):
    """The panel of a notebook, opened by a double click or brought to the front by its tab, its
    kernel ready.
    """
    tab = page.locator(f'.lm-DockPanel-tabBar .lm-TabBar-tab:has-text("{name}")')
    # a double click on what is open moves the focus some time later, away from a menu or a field
    if tab.count():
        tab.click()
    else:
        page.locator(f'.jp-DirListing-item:has-text("{name}")').dblclick()
    return panel_of(page, name)


def panel_of(page: Page, name: str):
    """The panel of a notebook that is at the front, or will be, its kernel ready."""
    page.locator(f'.lm-TabBar-tab.jp-mod-current:has-text("{name}")').first.wait_for()
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.locator(
        '.jp-Toolbar-kernelName:has-text("Python 3")'
    ).wait_for()  # without one it is "idle" too
    panel.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
    assert page.locator(".jp-Dialog").count() == 0, page.locator(".jp-Dialog").inner_text()
    return panel


def scroll_to(page: Page, panel, selector: str):
    """The first element for `selector`: JupyterLab draws only the cells near the view."""
    found, deadline = panel.locator(selector), time.time() + LIMIT
    while not found.count():
        assert time.time() < deadline, f"no {selector} in the whole notebook"
        # From the end back to the start: a place may have been left before it was drawn.
        panel.locator(".jp-WindowedPanel-outer").evaluate(
            """e => {
                const at = e.scrollTop;
                e.scrollBy(0, e.clientHeight / 2);
                if (e.scrollTop <= at) e.scrollTo(0, 0);
            }"""
        )
        page.wait_for_timeout(50)
    found.first.scroll_into_view_if_needed()
    return found.first


def picture_width(page: Page, panel) -> int:
    picture = scroll_to(page, panel, '.jp-OutputArea-output img[src^="data:image/"]')
    expect(picture).to_be_visible()
    return picture.evaluate("image => image.decode().then(() => image.naturalWidth)")


def test_the_first_chapter_opens_with_its_outputs(page):
    panel = open_chapter(page, f"{CHAPTER}.ipynb")
    assert picture_width(page, panel) > 100
    scroll_to(page, panel, ".jp-OutputArea-output pre")
    expect(page.locator(".Toastify__toast")).to_have_count(0)  # no question about news


def test_a_chapter_runs_and_is_saved_as_git_has_it(page, ran):
    notebook = nbformat.read(ran, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    found = [
        output
        for cell in code
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert not found
    if any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs):
        assert picture_width(page, open_chapter(page, ran.name)) > 100
    # Saving wrote both halves: git has nothing to say, where the outputs made here are the
    # committed ones.
    assert outputs.pair_problems(notebook, jupytext.read(ran.with_suffix(".md"))) == []
    if not outputs.why_not_compared():
        assert as_committed(ran.parent.parent, ran.stem)


def test_chapters_that_are_opened_and_saved_are_as_they_were(page, clone):
    chapters = [path.stem for path in outputs.find([])]
    if not NIGHTLY:
        chapters = [name for name in chapters if name not in RUN][::6]
    for chapter in chapters:
        open_chapter(page, f"{chapter}.ipynb")
    page.wait_for_timeout(5000)  # what the kernels say of themselves has come by then
    unsaved = page.locator(".lm-DockPanel-tabBar .jp-mod-dirty")
    assert unsaved.all_inner_texts() == []  # nothing to save, and no question when it is closed
    for chapter in chapters:
        open_chapter(page, f"{chapter}.ipynb").locator(".jp-Notebook").click(
            position={"x": 5, "y": 5}
        )
        save(page, chapter)
        assert as_committed(clone, chapter), chapter


@pytest.mark.parametrize("ran", [CHAPTER], indirect=True)
def test_the_explorer_of_the_first_chapter_answers(page, ran):
    panel = open_chapter(page, f"{CHAPTER}.ipynb")
    scroll_to(page, panel, ".jp-OutputArea-output .explorer-bits input")
    area = panel.locator(".explorer-bits").first
    answer = area.locator(".answer p").first
    expect(answer).to_contain_text("465 becomes 448 in E4M3FN")
    area.get_by_label("Value", exact=True).fill("0.3")
    expect(answer).to_contain_text("0.3 becomes 0.3125 in E4M3FN")  # the nearest value
    area.locator("[data-which=format] [data-bit='0']").click()
    expect(answer).to_contain_text("0.34375 becomes 0.34375 in E4M3FN: exact.")
    area.locator("[data-which=format] [data-bit='7']").focus()
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("-0.34375 becomes -0.34375 in E4M3FN: exact.")


@pytest.fixture
def fusion(page):
    """The fusion lab, from the README's first link, its notebook's cell run."""
    open_path(page, "README.md")
    page.locator(".jp-MarkdownViewer a", has_text="Try it").first.click()
    yield started(page, "fusion_lab")


def expect_verdict(area, choice, sizes=(4096, 4096, 4096)) -> None:
    """What fp8lens says of the same program, compiled here."""
    seen = compiled.inspected(choice, sizes)
    expect(area.locator(".code code")).to_have_text(
        fusion_lab.program(choice, sizes).code.splitlines()
    )
    head = "FP8" if seen.report.fp8_flops_share == 1 else "Not FP8"
    expect(area.locator(".verdict strong")).to_contain_text(head)
    kernels = seen.report.kernels
    count = "one kernel" if kernels == 1 else f"{kernels} kernels"
    moved = f"{count}, {size(seen.report.bytes_moved)} moved"
    expect(area.locator(".verdict span")).to_have_text(moved)
    expect(area.locator(".kernels li:not(.before)")).to_have_count(kernels)
    rules = [one.get_attribute("data-rule") for one in area.locator(".reasons li").all()]
    assert rules == [reason.rule for reason in seen.reasons]
    expect(area.locator(".about")).to_contain_text(f"Compiled by JAX {jax.__version__}")


def test_the_fusion_lab_compiles_what_is_chosen(page, fusion):
    first = dict(fusion_lab.FIRST)
    expect_verdict(fusion, first)
    fusion.locator("select[name=bias]").select_option("f32")
    expect_verdict(fusion, first | {"bias": "f32"})
    expect(fusion.locator(".changed")).to_contain_text("Bias: bfloat16 → float32.")
    fusion.get_by_role("button", name="Apply the fix: Bias").click()
    expect_verdict(fusion, first)
    # By the keyboard alone: a chip, and sizes, that are not recorded.
    fusion.locator("select[name=chip]").focus()
    page.keyboard.press("ArrowDown")
    chosen = first | {"chip": "H200"}
    expect_verdict(fusion, chosen)
    fusion.locator("input[name=m]").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("100")
    page.keyboard.press("Tab")
    expect_verdict(fusion, chosen, (100, 4096, 4096))
    fusion.locator("input[name=m]").fill("1000000")
    fusion.locator("input[name=m]").blur()
    expect(fusion.locator(".note")).to_contain_text("M is 1000000: give a whole number from 1 to")
    fusion.locator("input[name=m]").fill("4096")
    fusion.locator("input[name=m]").blur()
    # Faster than the kernel compiles: the last one is shown.
    for result in ("bf16", "f32", "e4m3-no-clamp"):
        fusion.locator("select[name=result]").select_option(result)
    expect_verdict(fusion, chosen | {"result": "e4m3-no-clamp"})


def open_path(page: Page, path: str) -> None:
    """Open a file as a link to it does."""
    page.locator('.lm-MenuBar-itemLabel:text-is("File")').click()
    page.locator('.lm-Menu-itemLabel:text-matches("^Open from Path")').click()
    page.locator(".jp-Dialog input").fill(path)
    page.keyboard.press("Enter")
    expect(page.locator(".jp-Dialog")).to_have_count(0)


def started(page: Page, name: str):
    """An explorer, its notebook opened by a link: a picture, until its cell is run. Saved, it has
    the picture still.
    """
    panel = panel_of(page, f"{name}.ipynb")
    cell = panel.locator(".jp-CodeCell").first
    if not cell.locator(".jp-OutputArea .explorer").count():
        expect(cell.locator(".jp-OutputArea-output img")).to_be_visible()
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    # the one about dumps gives a table
    area = cell.locator(f".explorer-{name}, .jp-RenderedHTML table").first
    expect(area).to_be_visible()
    save(page, name)
    return area


def link_to(page: Page, there: str):
    """The first link in the first chapter that leads there."""
    panel = open_chapter(page, f"{CHAPTER}.ipynb")
    return scroll_to(page, panel, f'.jp-RenderedMarkdown a[href*="{there}"]')


def test_what_texts_link_to_opens_without_a_question_and_changes_no_file(page, clone):
    open_path(page, "notebooks")
    page.locator('.jp-DirListing-item:has-text("glossary.md")').wait_for()
    listed = page.locator(".jp-DirListing-itemText").all_inner_texts()
    assert f"{CHAPTER}.ipynb" in listed
    assert f"{CHAPTER}.md" not in listed
    shown = page.locator(".jp-MarkdownViewer:not(.lm-mod-hidden)")
    open_path(page, "README.md")
    expect(shown.locator("h1", has_text="FP8 matmuls in JAX")).to_be_visible()
    assert shown.locator("img").first.evaluate("i => i.decode().then(() => i.naturalWidth)") > 100
    link_to(page, "glossary.md").click()
    expect(shown.locator("h1", has_text="Glossary")).to_be_visible()
    link_to(page, "try/bits.ipynb").click()
    answer = started(page, "bits").locator(".answer p").first
    expect(answer).to_contain_text("465 becomes 448 in E4M3FN")
    for name in explorers.EXPLORERS:
        open_path(page, f"notebooks/try/{name}.ipynb")
        started(page, name)
    expect(page.locator(".lm-DockPanel-tabBar .jp-mod-dirty")).to_have_count(0)
    for path in of_project("notebooks/try", "notebooks/glossary.md", "README.md"):
        assert (clone / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path
    assert not [*clone.glob("notebooks/try/*.md")]
