"""A Sphinx extension: explorers, with which a reader tries something out, without a kernel.

An explorer is NAME.mjs in helpers/explorers. It stands

- on its own page, `notebooks/try/NAME.ipynb` in myst.yml's contents, behind the first paragraph.
  The notebook's one cell of code is for JupyterLab, where it starts the explorer, and for GitHub,
  which shows its picture: the tag `remove-cell` keeps it from the page.
- in a chapter, in the place of a widget that a cell shows (course_pages.py);
- on the first page, in the place of its picture.

It answers already before any script runs: Node writes what the explorer's own module shows first.
"""

import html
import json
import posixpath
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

import fp8lens
from helpers.explorers import FOLDER as MODULES
from helpers.explorers import answer, bits, dump, fusion_lab, models, own_model, scaling, speedup
from tools.site import pyodide

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "notebooks/try"
STATIC = "explorers"  # below _static


class Explorer(NamedTuple):
    """What a page gives to its explorer. `state`: what that begins with, and keeps in the page's
    address. `data`: what it needs besides. `answer`: its HTML of a state, before any script runs.
    """

    state: Mapping[str, Any]
    data: Callable[[], Mapping[str, Any]]
    answer: Callable[[Mapping[str, Any]], str]


def _explorer(name: str, state: Mapping[str, Any], data: Callable[[], Mapping]) -> Explorer:
    """One whose module Node runs."""
    return Explorer(state, data, lambda chosen: answer(name, {**data(), **chosen}))


def _of_dump() -> dict[str, Any]:
    lacks = "" if pyodide.FOLDER.is_dir() else _WITHOUT_PYTHON
    return {**dump.data(), "lacks": lacks}


def _answer_of_lab(chosen: Mapping[str, Any]) -> str:
    sizes = fusion_lab.SIZES[chosen["sizes"]]
    found = fusion_lab.first_answer(chosen, sizes, chosen["release"])
    return answer("fusion_lab", {"found": found})


_WITHOUT_PYTHON = (
    "This copy of the site was built without a network, and so without the part that reads dumps. "
    "In a terminal, fp8lens dump.txt says the same."
)
EXPLORERS = {
    "fusion_lab": Explorer(fusion_lab.STATE, fusion_lab.data, _answer_of_lab),
    "models": _explorer("models", models.STATE, models.data),
    "model": _explorer("model", own_model.STATE, own_model.data),
    "dump": _explorer("dump", dump.STATE, _of_dump),
    "bits": _explorer("bits", bits.STATE, bits.data),
    "scaling": _explorer("scaling", scaling.STATE, scaling.data),
    "speedup": _explorer("speedup", speedup.STATE, speedup.data),
}  # in the order of myst.yml


def is_explorers(page: str) -> bool:
    """Whether an explorer stands on a page, given by its name, as notebooks/try/bits."""
    return PurePosixPath(page).parent.as_posix() == FOLDER


def element(explorer: str, attributes: str = " data-quiet", shown: str = "", **chosen: Any) -> str:
    """The element into which page.mjs renders an explorer. `shown`: what it holds before, instead
    of its answer. `chosen`: what it begins with instead of its own state. With `data-quiet` it
    leaves the page's address alone. `pages`, which it also gets, leads to the explorers' pages.
    """
    about = EXPLORERS[explorer]
    begins = {key: chosen.get(key, value) for key, value in about.state.items()}
    pages = {"pages": "try/" if attributes else ""}
    state = html.escape(json.dumps(begins))
    data = html.escape(json.dumps({**about.data(), **pages}))
    return (
        f'<div class="explorer explorer-{explorer}" data-explorer="{explorer}"{attributes} '
        f'data-state="{state}" data-data="{data}">{shown or about.answer(begins | pages)}</div>'
    )


def _insert(app: Sphinx, document: nodes.document, page: str) -> None:
    if not is_explorers(page):
        return
    first = next(iter(document.findall(nodes.paragraph)))
    place = nodes.raw("", element(PurePosixPath(page).name, ""), format="html")
    first.parent.insert(first.parent.index(first) + 1, place)


def _select(app: Sphinx, document: nodes.document, page: str) -> None:
    """Have a link's title be what is selected on the explorer's page that it leads to, as in
    [0.3 in E5M2](try/bits.ipynb "value=0.3&format=float8_e5m2"): every engine shows a title, and
    only here is it a part of the address.
    """
    for link in document.findall(nodes.reference):
        path, dot, _ = link.get("refuri", "").partition(".html")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if not dot or "=" not in link.get("reftitle", "") or not is_explorers(target):
            continue
        chosen = parse_qs(link["reftitle"])
        unknown = chosen.keys() - EXPLORERS[PurePosixPath(target).name].state.keys()
        if unknown:
            logger.warning("%s: %s has no %s", page, target, ", ".join(unknown), location=link)
        link["refuri"] = f"{path}.html#{urlencode(chosen, doseq=True)}"
        del link["reftitle"]


def _load(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Only a page with an explorer loads its files."""
    names = set(re.findall(r'data-explorer="(\w+)"', context.get("body", "")))
    for file in ("explorer.css", *(f"{name}.css" for name in sorted(names))):
        if names and (MODULES / file).is_file():
            app.add_css_file(f"{STATIC}/{file}")
    if names:
        app.add_js_file(f"{STATIC}/page.mjs", type="module")


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Copy the explorers' files."""
    if error or not any(map(is_explorers, app.env.found_docs)):
        return
    static = Path(app.outdir, "_static", STATIC)
    static.mkdir(parents=True, exist_ok=True)
    for file in [*MODULES.glob("*.mjs"), *MODULES.glob("*.css")]:
        shutil.copyfile(file, static / file.name)
    if f"{FOLDER}/dump" in app.env.found_docs:
        write_python(static)
    if f"{FOLDER}/models" in app.env.found_docs:
        shutil.copytree(models.PROGRAMS, static / models.PROGRAMS.name, dirs_exist_ok=True)
    if f"{FOLDER}/fusion_lab" in app.env.found_docs:
        shutil.copyfile(fusion_lab.RECORD, static / fusion_lab.RECORD.name)


def write_python(static: Path) -> None:
    """What "Read my dump" runs: Pyodide, and fp8lens without what compiles, as one archive."""
    if not pyodide.FOLDER.is_dir():
        return
    (static / "pyodide").mkdir(exist_ok=True)
    for name in pyodide.FILES:
        shutil.copyfile(pyodide.FOLDER / name, static / "pyodide" / name)
    package = Path(fp8lens.__file__).parent
    with zipfile.ZipFile(static / "fp8lens.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted([*package.rglob("*.py"), *package.glob("rules/*.md")]):
            inside = path.relative_to(package.parent)
            if "compile" not in inside.parts:
                archive.write(path, inside)
        archive.write(MODULES / "reader.py", "reader.py")
    shutil.copyfile(dump.EXAMPLE, static / dump.EXAMPLE.name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-resolved", _insert)
    app.connect("doctree-resolved", _select)
    app.connect("html-page-context", _load)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
