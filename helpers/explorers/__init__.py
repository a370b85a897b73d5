"""Explorers: figures that answer when they are touched. Each is one ES module in this folder, which
JupyterLab runs as anywidget's `_esm`, and the site by `page.mjs`. What one shows where no script
runs is made by the same module: `answer` has Node run it.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What a widget leaves in a notebook for the site, which has the explorer itself in its place: the
#: name of its module, and what is chosen.
STATE = "application/vnd.fp8.explorer+json"
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


def program(name: str) -> str:
    """Node's `node` or `npm`, of the wheel that is installed beside this Python, else the
    machine's.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which(name, path=path) or name


def answer(name: str, values: Mapping[str, Any], plain: bool = False) -> str:
    """What an explorer shows first of these values of its model, as HTML: the `answer` of its
    module. `plain`: without classes and other attributes that a notebook's output may not have.
    Raises FileNotFoundError where there is no Node.
    """
    command = [program("node"), str(FOLDER / "answer.mjs"), name, "plain" if plain else ""]
    done = subprocess.run(
        command, input=json.dumps(dict(values)), capture_output=True, check=True, encoding="utf-8"
    )
    return done.stdout
