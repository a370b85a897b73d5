"""Explorers: figures that answer when they are touched. Each is one ES module in this folder, which
JupyterLab runs as anywidget's `_esm`, and the site by `page.mjs`.
"""

import base64
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_IMPORT = re.compile(r"(\bfrom\s*)([\"'])\./([\w-]+\.mjs)\2")


def esm(name: str) -> str:
    """An explorer's module for anywidget, which runs a text: what it imports from this folder is
    in the text too.
    """

    def inlined(found: re.Match[str]) -> str:
        text = esm(found[3].removesuffix(".mjs")).encode("utf-8")
        return f'{found[1]}"data:text/javascript;base64,{base64.b64encode(text).decode("ascii")}"'

    return _IMPORT.sub(inlined, (FOLDER / f"{name}.mjs").read_text(encoding="utf-8"))


def css(name: str) -> str:
    """An explorer's style sheet for anywidget, after the one that all explorers share."""
    files = [FOLDER / "explorer.css", FOLDER / f"{name}.css"]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
