"""Time "Fusion lab" in JupyterLab, `make bench`: in a browser, from a change to the verdict of what
the kernel compiled for it. Needs a chromium on PATH.

Each change is of one part of the layer, for an H100 and by cuBLASLt, to a program that was not
asked for before.
"""

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
from playwright.sync_api import Page, sync_playwright

from helpers.explorers import fusion_lab
from tools.files import ROOT

CHANGES = 20
GOAL = 150  # milliseconds
LIMIT = 120  # seconds for whatever is waited for
CELL = "from helpers.explorers.widgets import FusionLab\n\nFusionLab()"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
# Choose, and wait for the frame that has the answer.
TIMED = """async ([name, value]) => {
    const select = document.querySelector(`.explorer-fusion_lab select[name=${name}]`)
    const told = document.querySelector(".explorer-fusion_lab .told")
    const answered = new Promise(done => {
        const observer = new MutationObserver(() => { observer.disconnect(); done() })
        observer.observe(told, {childList: true})
    })
    const start = performance.now()
    select.value = value
    select.dispatchEvent(new Event("change", {bubbles: true}))
    await answered
    await new Promise(requestAnimationFrame)
    return performance.now() - start
}"""


def changes(count: int) -> Iterator[tuple[str, str]]:
    """An axis and its new value, each time to a choice that was not made before."""
    chance = random.Random(0)
    choice = dict(fusion_lab.FIRST)
    seen = {tuple(choice.values())}
    axes = [axis for axis in fusion_lab.LAYER if axis.name not in ("chip", "library")]
    while len(seen) <= count:
        axis = chance.choice(axes)
        value = chance.choice([one for one in axis.values if one != choice[axis.name]])
        after = choice | {axis.name: value}
        if tuple(after.values()) in seen:
            continue
        choice = after
        seen.add(tuple(choice.values()))
        yield axis.name, value


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a notebook with the explorer in JupyterLab, with no settings of anybody's."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "lab.ipynb")
    names = ("CONFIG", "DATA", "RUNTIME")
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in names}
    own |= {"JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(folder / "ipython")}
    own |= {"PYTHONPATH": str(ROOT)}
    log = folder / "log"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"]
    if os.name == "posix" and os.geteuid() == 0:
        command.append("--allow-root")
    with log.open("w") as sink:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        )
    try:
        deadline = time.monotonic() + LIMIT
        while not (printed := re.search(r"(http://127\.0\.0\.1:\d+/)lab\?(\S+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab does not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"{printed[1]}lab/tree/lab.ipynb?{printed[2]}"
    finally:
        server.terminate()
        server.wait()


def measured(page: Page, count: int = CHANGES) -> list[float]:
    """Milliseconds from a change to its verdict, in the order of the changes."""
    page.set_default_timeout(1000 * LIMIT)
    page.locator('.jp-Toolbar-kernelName:has-text("Python 3")').wait_for()
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
    page.locator(".jp-Cell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.locator('.explorer-fusion_lab .about:has-text("Compiled by JAX")').wait_for()
    return [page.evaluate(TIMED, change) for change in changes(count)]


def main() -> int:
    """Time the changes, and print their median and their 90th percentile."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    chromium = next(found, None)
    if chromium is None:
        print("the fusion lab in JupyterLab: not timed, there is no chromium on PATH")
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder)) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(address)
        times = measured(page)
        browser.close()
    middle, most = np.percentile(times, [50, 90])
    print(
        f"the fusion lab in JupyterLab: {len(times)} changes, from a change to its verdict "
        f"{middle:.0f} ms, of nine in ten {most:.0f} ms (goal {GOAL})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
