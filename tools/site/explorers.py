"""A Sphinx extension: the pages on which a reader tries something out, without a kernel.

A page is `notebooks/try/NAME.ipynb` in myst.yml's contents; its explorer is NAME.mjs in
helpers/explorers, and stands behind the page's first paragraph. The notebook's one cell of code is
for JupyterLab, where it starts the explorer, and for GitHub, which shows its picture: the tag
`remove-cell` keeps it from the page. What is stored in the page answers already, before any script
runs. A page of an explorer may load and run only what the site has.
"""

import base64
import hashlib
import html
import json
import posixpath
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, urlencode

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

import fp8lens
from helpers.explorers import FOLDER as MODULES
from helpers.explorers import bits, dump, fusion_lab, scaling, speedup
from tools.site import pyodide

logger = logging.getLogger(__name__)

FOLDER = "notebooks/try"
STATIC = "explorers"  # below _static
_INLINE = re.compile(r"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.S)
_HANDLER = re.compile(r"\son\w+=\"([^\"]*)\"")
_CHARSET = '<meta charset="utf-8" />'


@dataclass(frozen=True)
class Explorer:
    """`answer`: what the page's stored HTML shows, which is written into it as it is. `state`: what
    the explorer begins with, and keeps in the page's address. `data`: what it needs besides.
    `lacks`: a sentence, where the site is built without something that the explorer needs.
    """

    name: str
    answer: Callable[[], str]
    state: Mapping[str, Any] = field(default_factory=dict)
    data: Callable[[], Mapping[str, Any]] = dict
    lacks: Callable[[], str] = lambda: ""


def _without_python() -> str:
    if pyodide.FOLDER.is_dir():
        return ""
    return (
        "This copy of the site was built without a network, and so without the part that reads "
        "dumps. In a terminal, fp8lens dump.txt says the same."
    )


_ALL = (
    Explorer("dump", dump.answer, {"view": "matmuls", "at": "", "find": ""}, lacks=_without_python),
    Explorer("bits", bits.answer, bits.STATE, bits.data),
    Explorer("fusion_lab", fusion_lab.answer, fusion_lab.STATE, fusion_lab.data),
    Explorer("scaling", scaling.answer, scaling.STATE, scaling.data),
    Explorer("speedup", speedup.answer, speedup.STATE, speedup.data),
)  # in the order of myst.yml
EXPLORERS = {explorer.name: explorer for explorer in _ALL}


def is_explorers(page: str) -> bool:
    """Whether an explorer stands on a page, given by its name, as notebooks/try/bits."""
    return PurePosixPath(page).parent.as_posix() == FOLDER


def element(explorer: Explorer) -> str:
    """The element into which page.mjs renders an explorer."""
    name, state = html.escape(explorer.name), html.escape(json.dumps(dict(explorer.state)))
    data = f'data-explorer="{name}" data-state="{state}"'
    if needed := dict(explorer.data()):
        data += f' data-data="{html.escape(json.dumps(needed))}"'
    if lacks := explorer.lacks():
        data += f' data-lacks="{html.escape(lacks)}"'
    return f'<div class="explorer explorer-{name}" {data}>{explorer.answer()}</div>'


def policy(page: str) -> str:
    """The Content-Security-Policy of a page as it was written: its own inline scripts may run, and
    what the site has; nothing is loaded from elsewhere, and nothing is sent anywhere.
    """
    scripts = [*_INLINE.findall(page), *map(html.unescape, _HANDLER.findall(page))]
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    allowed = " ".join(f"'sha256-{one}'" for one in sorted(hashes))
    return "; ".join(
        [
            "default-src 'self'",  # among what is not named: Firefox fetches the next page ahead
            "object-src 'none'",
            "frame-src 'none'",
            f"script-src 'self' 'wasm-unsafe-eval' 'unsafe-hashes' {allowed}",
            "style-src 'self' 'unsafe-inline'",  # the theme and MyST have style attributes
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "form-action 'self'",
            "base-uri 'none'",
        ]
    )


def _insert(app: Sphinx, document: nodes.document, page: str) -> None:
    if not is_explorers(page):
        return
    explorer = EXPLORERS.get(PurePosixPath(page).name)
    if explorer is None:
        logger.warning("%s: there is no explorer of this name in tools/site/explorers.py", page)
        return
    first = next(iter(document.findall(nodes.paragraph)), None)
    if first is None:
        logger.warning("%s: a page of an explorer begins with a paragraph", page)
        return
    place = first.parent.index(first) + 1
    first.parent.insert(place, nodes.raw("", element(explorer), format="html"))


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
        explorer = EXPLORERS.get(PurePosixPath(target).name)
        unknown = chosen.keys() - explorer.state.keys() if explorer else chosen.keys()
        if unknown:
            logger.warning("%s: %s has no %s", page, target, ", ".join(unknown), location=link)
        link["refuri"] = f"{path}.html#{urlencode(chosen, doseq=True)}"
        del link["reftitle"]


def _load(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Only a page of an explorer loads its files."""
    if not is_explorers(page):
        return
    name = PurePosixPath(page).name
    for file in ("explorer.css", f"{name}.css"):
        if (MODULES / file).is_file():
            app.add_css_file(f"{STATIC}/{file}")
    app.add_js_file(f"{STATIC}/page.mjs", type="module")


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Copy the explorers' files, and write the policy of each page into it."""
    if error or not any(map(is_explorers, app.env.found_docs)):
        return
    static = Path(app.outdir, "_static", STATIC)
    static.mkdir(parents=True, exist_ok=True)
    for file in [*MODULES.glob("*.mjs"), *MODULES.glob("*.css")]:
        shutil.copyfile(file, static / file.name)
    if f"{FOLDER}/dump" in app.env.found_docs:
        write_python(static)
    if f"{FOLDER}/fusion_lab" in app.env.found_docs:
        shutil.copyfile(fusion_lab.RECORD, static / fusion_lab.RECORD.name)
    for name in filter(is_explorers, app.env.found_docs):
        page = Path(app.outdir, f"{name}.html")
        text = page.read_text(encoding="utf-8")
        meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy(text))}">'
        before, charset, after = text.partition(_CHARSET)
        if not charset:
            logger.warning("%s: no place for a Content-Security-Policy", name)
        page.write_text(before + charset + meta + after, encoding="utf-8")


def write_python(static: Path) -> None:
    """What "Read my dump" runs: Pyodide, and fp8lens without what compiles, as one archive."""
    if not pyodide.FOLDER.is_dir():
        return
    (static / "pyodide").mkdir(exist_ok=True)
    for name in pyodide.FILES:
        shutil.copyfile(pyodide.FOLDER / name, static / "pyodide" / name)
    package = Path(fp8lens.__file__).parent
    with zipfile.ZipFile(static / "fp8lens.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            inside = path.relative_to(package.parent)
            if "compile" not in inside.parts:
                _add(archive, inside.as_posix(), path)
        _add(archive, "reader.py", MODULES / "reader.py")
    shutil.copyfile(dump.EXAMPLE, static / dump.EXAMPLE.name)


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    """Add a file without its date, so that the archive is the same wherever it is made."""
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, path.read_bytes())


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-resolved", _insert)
    app.connect("doctree-resolved", _select)
    app.connect("html-page-context", _load)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
