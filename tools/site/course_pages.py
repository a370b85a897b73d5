"""A Sphinx extension: the pages that myst.yml lists, and what a page has that a notebook has not.

Folds get labels, answers stand behind a click, pictures are drawn inline with the page's ink,
formulas are MathML. What outputs show is written anew by sanitize.py. What is wrong is a warning,
and any warning fails the build.
"""

import html
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import yaml
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util import logging

import fp8lens
from helpers.explorers import STATE
from helpers.figures.plots import NARROW
from tools.site import explorers, rule_pages, sanitize

logger = logging.getLogger(__name__)

_PREDICTION = re.compile(r"^> \*\*Predict\.\*\*", re.M)
_FOLDED = {"hide-cell", "hide-input", "hide-output"}
_CHECKED = "# Checked"
_PHONE = 336  # CSS pixels that a picture has there, in a fold


def jupyter_anchor(title: str) -> str:
    """Return the anchor of a section as Jupyter makes it: links are written so, for both."""
    return title.replace(" ", "-")


# The contents -------------------------------------------------------------------------------------

_API = "api"
_API_PAGE = """\
# The public names

What `fp8lens` gives to a program. Everything else in it may change between versions.

```{{eval-rst}}
.. currentmodule:: fp8lens

.. autosummary::
   :nosignatures:

   {names}

.. automodule:: fp8lens
   :members:
   :exclude-members: TARGETS

.. autodata:: TARGETS
   :no-value:
```
"""


def _write_api(source: Path) -> None:
    text = _API_PAGE.format(names="\n   ".join(fp8lens.__all__))
    (source / f"{_API}.md").write_text(text, encoding="utf-8")


def _without_factories(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """A dataclass's default that a function makes is no Python, and Sphinx could not read it."""
    if not signature:
        return None
    return signature.replace("<factory>", "..."), returns


# Pages that are written now, behind the one of myst.yml that they belong to
_GENERATED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "notebooks/D_rules.ipynb": (rule_pages.INDEX, rule_pages.write),
    "fp8lens/README.md": (_API, _write_api),
}


def _read_contents(app: Sphinx, config: Any) -> None:
    source = Path(app.srcdir)
    contents = yaml.safe_load((source / "myst.yml").read_text(encoding="utf-8"))["project"]
    config.project = config.html_title = config.ogp_site_name = contents["title"]
    config.author = config.copyright = ""
    config.html_logo = config.html_favicon = str(source / "img" / "favicon.svg")
    config.html_static_path.append(str(source / "img" / "one_call.png"))
    _, *parts = contents["toc"]
    config.contents = {part["title"]: _pages(part["children"], source) for part in parts}
    config.include_patterns = ["index.md", f"{rule_pages.FOLDER}/*.md"]
    for pages in config.contents.values():
        config.include_patterns += pages


def _pages(listed: list[dict[str, str]], source: Path) -> list[str]:
    """Return the files of a part's pages, with those that are written for it."""
    pages = []
    for page in listed:
        pages.append(page["file"])
        if page["file"] in _GENERATED:
            name, write = _GENERATED[page["file"]]
            write(source)
            pages.append(f"{name}.md")
    return pages


def _table_of_contents(contents: dict[str, list[str]]) -> str:
    """Return the first page's directives from which the theme makes its sidebar."""
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```"
        for title, pages in contents.items()
    )


def _read_source(app: Sphinx, name: str, source: list[str]) -> None:
    if source[0].startswith("{"):
        source[0] = _prepared(source[0], name)
        return
    source[0] = _links_to_the_index(source[0])
    if name == app.config.root_doc:
        source[0] = _as_cards(source[0]) + _table_of_contents(app.config.contents)


def _links_to_the_index(text: str) -> str:
    """The README is the first page, whose name here is another."""
    return re.sub(r"(\]\((?:\.\./)*)README\.md(?=[#)])", r"\1index.md", text)


_TABLE = re.compile(r"\| you want to \| start at \|\n\|---\|---\|\n((?:\|.*\|\n)+)")


def _as_cards(text: str) -> str:
    """On the first page, the table of where to start becomes a grid of cards."""

    def cards(table: re.Match[str]) -> str:
        rows = [row.strip("| ").split(" | ", 1) for row in table[1].splitlines()]
        written = [
            f":::{{grid-item-card}} {title[0].upper()}{title[1:]}\n{body}\n:::"
            for title, body in rows
        ]
        return "::::{grid} 1 2 2 3\n:gutter: 2\n\n" + "\n".join(written) + "\n::::\n"

    return _TABLE.sub(cards, text)


# Notebooks ----------------------------------------------------------------------------------------


def _prepared(text: str, name: str) -> str:
    """Return a notebook's text with labels on its folds, and answers behind a click."""
    notebook = nbformat.reads(text, 4)
    notebook.metadata.setdefault("language_info", {"name": "python", "pygments_lexer": "ipython3"})
    asked = False  # whether a prediction waits for its answer
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs = _shown(cell, f"{name}: cell {number}", f"cell-{number}-")
            asked &= not _fold(cell, asked)
        else:
            cell.source = _links_to_the_index(cell.source)
            asked |= bool(_PREDICTION.search(cell.source))
    return nbformat.writes(notebook)


def _fold(cell: NotebookNode, asked: bool) -> bool:
    """Label a cell's fold. `asked`: whether a prediction waits; returns whether this answers it."""
    tags = set(cell.metadata.get("tags", ()))
    is_answer = asked and bool(cell.outputs) and not tags & {"remove-cell", "remove-output"}
    if {"hide-input", "hide-output"} <= tags:
        tags = tags - {"hide-input", "hide-output"} | {"hide-cell"}  # one fold, not two
    if "hide-input" in tags and any('role="img"' in str(output) for output in cell.outputs):
        tags = tags - {"hide-input"} | {"remove-input"}  # the notebook has the code that draws
    if cell.source.startswith(_CHECKED):
        tags = tags | {"checked"}  # style.css styles the fold by it
    cell.metadata.tags = sorted(tags)
    if tags & _FOLDED:
        label = "Show the answer" if is_answer else _label(cell.source, tags)
        cell.metadata.mystnb = {
            "code_prompt_show": label,
            "code_prompt_hide": label.replace("Show", "Hide", 1),
        }
    return is_answer


def _label(source: str, tags: set[str]) -> str:
    """Return what a fold says: its cell's first comment, of a solution as "Solution 1", so that it
    tells nothing; of a cell that checks, all of the comment.
    """
    if "hide-output" in tags:
        return "Show the output"
    said = _comment(source)
    if "checked" in tags:
        return said
    if said.startswith("Solution"):
        said = said.partition(":")[0]
    return said.strip() or "Show the code"


def _comment(source: str) -> str:
    """The comment with which a cell begins, on one line; "" without one."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), source.splitlines())
    return " ".join(line[2:].strip() for line in lines).replace("`", "")


def _shown(cell: NotebookNode, where: str, prefix: str) -> list[NotebookNode]:
    """Return a cell's outputs as a page shows them. `prefix`: of the ids in its pictures."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        if STATE in data:  # the page has the explorer itself
            output.data = {"text/html": explorers.element(**data[STATE])}
            shown.append(output)
            continue
        dropped: list[str] = []
        if "image/svg+xml" in data:
            alt = output.metadata["image/svg+xml"].get("alt", "")
            caption = _comment(cell.source).removeprefix("Drawn:").strip()
            if not caption:
                logger.warning("%s draws a picture, and its first line does not say which", where)
            forms = [data["image/svg+xml"], data.get(NARROW, "")]
            picture, dropped = figure(forms, alt, prefix, caption)
            output.data = {"text/html": picture}
        elif "text/html" in data:
            data["text/html"], dropped = sanitize.html(data["text/html"])
        for what in dropped:
            logger.warning("%s shows %s, which no page may hold", where, what)
        shown.append(output)
    return shown


def figure(forms: list[str], alt: str, prefix: str, caption: str) -> tuple[str, list[str]]:
    """Return a picture in its wide and its narrow form, of which style.css shows the one that fits
    the column, above its caption; and what it may not hold.
    """
    pictures, dropped = [], []
    for form, svg in zip(("wide", "narrow"), filter(None, forms), strict=False):
        picture, missing = inlined(svg, alt, f"{prefix}{form}-")
        pictures.append(picture)
        dropped += missing
    caption = html.escape(caption[:1].upper() + caption[1:])
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="drawn">{"".join(pictures)}{below}</figure>', dropped


def inlined(svg: str, alt: str, prefix: str) -> tuple[str, list[str]]:
    """Return a picture as a part of the page, with the page's ink, in the light and in the dark;
    and what it may not hold. `prefix`: of its ids, so that none is twice on a page.
    """
    written, dropped = sanitize.svg(svg, prefix)
    attributes = f'role="img" aria-label="{html.escape(alt)}"'
    least = re.search(r"min-width:\s*(\d+)", written)
    if least and int(least[1]) > _PHONE:
        attributes += ' tabindex="0"'  # a phone scrolls it: from a keyboard too
    return written.replace("<svg", f"<svg {attributes}", 1), dropped


# What Sphinx read ---------------------------------------------------------------------------------


def _inline_own_drawings(app: Sphinx, document: nodes.document) -> None:
    """An SVG file of the project is drawn inline, as the pictures of notebooks are, with the narrow
    form that has a file beside it. It stands in a paragraph of its own. On the first page the
    fusion lab takes its place.
    """
    for image in list(document.findall(nodes.image)):
        file = Path(app.srcdir) / image["uri"]
        if file.suffix == ".svg":
            files = [file, file.with_stem(f"{file.stem}_narrow")]
            forms = [form.read_text(encoding="utf-8") for form in files if form.exists()]
            picture, _ = figure(forms, image["alt"], f"{file.stem}-", "")
            if app.env.docname == app.config.root_doc:
                picture = explorers.element("fusion_lab", " data-quiet data-compact", picture)
            image.parent.replace_self(nodes.raw("", picture, format="html"))


def _make_buttons(app: Sphinx, document: nodes.document, name: str) -> None:
    """On the first page, a paragraph of links alone becomes a row of buttons."""
    if name != app.config.root_doc:
        return
    for paragraph in document.findall(nodes.paragraph):
        links = [child for child in paragraph.children if isinstance(child, nodes.reference)]
        between = [child.astext() for child in paragraph.children if child not in links]
        if len(links) > 1 and not "".join(between).strip(" ·\n"):
            paragraph["classes"].append("buttons")
            paragraph.children = [*links]


def _finish_page(app: Sphinx, name: str, template: str, context: dict, document: Any) -> None:
    if name == app.config.root_doc or explorers.is_explorers(name):
        context["theme_secondary_sidebar_items"] = []  # the page has the whole width
    if "body" in context:
        # A fold's name is the words on it: voice control looks for them.
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")
    if name in (app.config.root_doc, _API) or name.startswith(f"{rule_pages.FOLDER}/"):
        context["page_source_suffix"] = ""  # no file of the repository has this name


# Mathematics, as MathML: no font and no script has to be loaded for it ----------------------------


def _visit_math(self: Any, node: nodes.Element) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _visit_math_block(self: Any, node: nodes.Element) -> None:
    formula = tex2mathml(node.astext(), as_block=True)
    self.body.append(f'<div class="formula" tabindex="0">{formula}</div>')
    raise nodes.SkipNode


def _search_otherwise(app: Sphinx) -> None:
    """Pagefind makes the index (build.py), not Sphinx."""
    app.builder.search = False  # type: ignore[attr-defined]  # of builders of HTML


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", _search_otherwise)
    app.add_config_value("contents", {}, "env")
    app.connect("config-inited", _read_contents)
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-signature", _without_factories)
    app.connect("doctree-read", _inline_own_drawings)
    app.connect("doctree-resolved", _make_buttons)
    app.connect("html-page-context", _finish_page, priority=400)  # before the theme's buttons
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
