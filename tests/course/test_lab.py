"""A reader's first minutes: `make lab`, its address opened in a real browser, a chapter run and
saved, an explorer used; git has nothing to say afterwards.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page, expect

from tools.outputs.run import DROPPED, why_not_compared

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTER = "01_fp8_formats"
LIMIT = 300  # seconds for whatever is waited for: far more than it takes where the machine is busy

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and not shutil.which("make"), reason="needs make"
)


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What JupyterLab serves: the notebooks in a repository of their own."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("notebooks", "img"):
        shutil.copytree(ROOT / name, clone / name)
    for name in ("README.md", "pyproject.toml", ".gitignore"):
        shutil.copyfile(ROOT / name, clone / name)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first", "--no-verify"]):
        git(clone, *arguments)
    return clone


@pytest.fixture(scope="module")
def address(clone, tmp_path_factory) -> str:
    """The address that `make lab` prints, for a user with no settings and no screen."""
    home = tmp_path_factory.mktemp("home")
    dropped = (*DROPPED, "MAKE", "MFLAGS", "JUPYTER", "DISPLAY", "WAYLAND", "BROWSER")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    for what in ("CONFIG", "DATA", "RUNTIME"):
        environment[f"JUPYTER_{what}_DIR"] = str(home / what)
    for what in ("SETTINGS", "WORKSPACES"):
        environment[f"JUPYTERLAB_{what}_DIR"] = str(home / what)
    log = home / "log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            ["make", "lab", f"ARGS=--ServerApp.root_dir={clone}"],
            cwd=ROOT,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        deadline = time.time() + LIMIT
        while not (printed := re.search(r"http://127\.0\.0\.1:\d+/\S+", log.read_text())):
            assert server.poll() is None and time.time() < deadline, log.read_text()
            time.sleep(0.2)
        yield printed[0]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def page(browser, address) -> Page:
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(LIMIT * 1000)  # playwright counts in milliseconds
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def panel_of(page: Page, name: str) -> Locator:
    """The panel of a notebook that is at the front, or will be, its kernel ready."""
    page.locator(f'.lm-TabBar-tab.jp-mod-current:has-text("{name}")').first.wait_for()
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    # without a kernel it is "idle" too
    panel.locator('.jp-Toolbar-kernelName:has-text("Python 3")').wait_for()
    panel.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
    return panel


def save(page: Page, name: str) -> None:
    """Save the notebook at the front, as Ctrl-S does."""

    def of_notebook(response) -> bool:
        return response.request.method == "PUT" and f"{name}.ipynb" in response.url

    with page.expect_response(of_notebook) as saved:
        page.keyboard.press("Control+s")
    assert saved.value.ok
    saved.value.finished()


def choose(page: Page, menu: str, item: str) -> None:
    page.locator(f'.lm-MenuBar-itemLabel:text-is("{menu}")').click()
    label = page.locator(f'.lm-Menu-itemLabel:text-matches("^{item}")')
    label.click()
    expect(label).to_be_hidden()  # a menu that stays open would keep the keys to itself


def open_path(page: Page, path: str) -> None:
    """Open a file as a link to it does."""
    choose(page, "File", "Open from Path")
    page.locator(".jp-Dialog input").fill(path)
    page.keyboard.press("Enter")
    expect(page.locator(".jp-Dialog")).to_have_count(0)


def test_the_first_chapter_runs_and_is_saved_as_git_has_it(page, clone, needs_git):
    panel = panel_of(page, f"{CHAPTER}.ipynb")  # opened by the address alone
    choose(page, "Edit", "Clear Outputs of All Cells")
    choose(page, "Run", "Run All Cells")
    path, deadline = clone / "notebooks" / f"{CHAPTER}.ipynb", time.time() + LIMIT
    # Between two cells the kernel is idle for a moment: so until all of them are counted.
    counts = [None]
    while None in counts:
        assert time.time() < deadline, counts
        panel.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        save(page, CHAPTER)
        cells = nbformat.read(path, 4).cells
        counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    page.wait_for_timeout(1000)
    save(page, CHAPTER)
    changed = git(clone, "status", "--porcelain")
    if why_not_compared():
        assert set(changed.split()) <= {"M", f"notebooks/{CHAPTER}.ipynb"}
    else:
        assert not changed, git(clone, "diff")[:3000]


def test_an_explorer_answers_and_keeps_its_picture(page, clone, needs_git):
    open_path(page, "notebooks/try/bits.ipynb")
    cell = panel_of(page, "bits.ipynb").locator(".jp-CodeCell").first
    expect(cell.locator(".jp-OutputArea-output img")).to_be_visible()
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    area = cell.locator(".explorer-bits")
    area.get_by_label("Value", exact=True).fill("0.3")
    expect(area.locator(".answer p").first).to_contain_text("0.3 becomes 0.3125 in E4M3FN")
    cell.locator(".cm-content").click()
    save(page, "bits")
    assert not git(clone, "status", "--porcelain", "notebooks/try")


def test_a_link_to_a_text_shows_it(page):
    open_path(page, "README.md")
    shown = page.locator(".jp-MarkdownViewer:not(.lm-mod-hidden)")
    expect(shown.locator("h1", has_text="FP8 matmuls in JAX")).to_be_visible()
