"""Write the notebooks of "Try it" anew: each has a picture of its explorer until its cell is run.

    make site && python -m tools.site.pictures      after a change to how an explorer looks

GitHub shows the picture. A page of the site has the explorer in its place.
"""

import base64
import functools
import http.server
import io
import shutil
import threading

import nbformat
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tools.outputs.notebook import of_explorer
from tools.site.explorers import EXPLORERS, FOLDER, ROOT

_WIDTH = 1366  # CSS pixels: a laptop's
_HEIGHT = 1000  # CSS pixels of an explorer that a picture has at most
_COLOURS = 64  # enough for text, lines and a few tints, in a fourth of the bytes


def _taken(page: Page) -> str:
    """A picture of the page's explorer, from its top, as base64."""
    page.locator(".explorer[data-shown]").wait_for(state="attached")
    page.add_style_tag(content=f".explorer {{ max-height: {_HEIGHT}px; overflow: hidden }}")
    shown = Image.open(io.BytesIO(page.locator(".explorer").screenshot()))
    file = io.BytesIO()
    shown.convert("RGB").quantize(_COLOURS).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode() + "\n"


def main() -> None:
    """Take the pictures, and write the notebooks."""
    # Served, as a browser loads no module from a file.
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=ROOT / "_build" / "html"
    )
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, color_scheme="light")
        for name in EXPLORERS:
            page.goto(f"http://127.0.0.1:{server.server_port}/{FOLDER}/{name}.html")
            file = ROOT / FOLDER / f"{name}.ipynb"
            notebook = nbformat.read(file, 4)
            (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code")
            title = notebook.cells[0].source.partition("\n")[0].removeprefix("# ")
            data = {
                "image/png": _taken(page),
                "text/plain": f"A picture of the explorer: {title}",
            }
            cell.outputs = [nbformat.v4.new_output("display_data", data)]
            file.write_text(nbformat.writes(of_explorer(notebook, notebook)) + "\n")
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main()
