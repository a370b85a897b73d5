"""Write the notebooks of "Try it" anew: each has a picture of its explorer until its cell is run.

    make site && python -m tools.site.pictures      after a change to how an explorer looks

GitHub shows the picture. A page of the site has the explorer in its place.
"""

import base64
import functools
import http.server
import io
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import nbformat
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tools.files import ROOT, in_one_step
from tools.outputs.notebook import of_explorer
from tools.site.explorers import EXPLORERS, FOLDER

_SITE = ROOT / "_build" / "html"
_WIDTH = 1366  # CSS pixels: a laptop's
_HEIGHT = 1000  # CSS pixels of an explorer that a picture has at most
_EDGE = 12
_COLOURS = 64  # enough for text, lines and a few tints, in a fourth of the bytes


@contextmanager
def _served() -> Iterator[str]:
    """The address of the built site: a browser loads no module from a file."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

    handler = functools.partial(Quiet, directory=_SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def _taken(page: Page) -> bytes:
    """A picture of the page's explorer, from its top, with an edge."""
    box = page.locator(".explorer").bounding_box()
    assert box is not None
    return page.screenshot(
        full_page=True,
        clip={
            "x": box["x"] - _EDGE,
            "y": box["y"] - _EDGE,
            "width": box["width"] + 2 * _EDGE,
            "height": min(box["height"], _HEIGHT) + 2 * _EDGE,
        },
    )


def _smaller(png: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS).save(file, "png", optimize=True)
    return file.getvalue()


def main() -> int:
    """Take the pictures, and write the notebooks. The exit status."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not _SITE.is_dir():
        print("This needs chromium on PATH, and the site: run `make site` first.", file=sys.stderr)
        return 2
    with sync_playwright() as playwright, _served() as address:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, color_scheme="light")
        for name in EXPLORERS:
            page.goto(f"{address}{FOLDER}/{name}.html")
            page.locator(".explorer[data-shown]").wait_for(state="attached")
            picture = _smaller(_taken(page))
            file = ROOT / FOLDER / f"{name}.ipynb"
            notebook = nbformat.read(file, 4)
            (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code")
            title = notebook.cells[0].source.partition("\n")[0].removeprefix("# ")
            data = {
                "image/png": base64.b64encode(picture).decode() + "\n",
                "text/plain": f"A picture of the explorer: {title}",
            }
            cell.outputs = [nbformat.v4.new_output("display_data", data)]
            in_one_step(file, nbformat.writes(of_explorer(notebook, notebook)) + "\n")
            print(f"{file.relative_to(ROOT)}: {len(picture) // 1000} kB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
