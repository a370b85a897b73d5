"""A Sphinx extension: what a page has that a notebook has not, and what a page may not hold.

Folds get labels, answers stand behind a click, pictures are drawn inline with the page's ink,
formulas are MathML. Raw HTML and pictures are written anew by sanitize.py. What is wrong is a
warning, and any warning fails the build.
"""

import html
import itertools
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import yaml
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.util import logging

from tools.site import api, cite, explorers, repository, rules, sanitize

logger = logging.getLogger(__name__)

# Kinds of output that a page shows
SHOWN = {"text/html", "text/plain", "image/png", "image/svg+xml"}
WIDGET = "application/vnd.jupyter.widget-view+json"
# MyST's own words, which Jupyter shows as they are: no chapter is written for one engine.
_DIRECTIVE = re.compile(r"^ {0,3}(?:`{3,}|~{3,}|:{3,})\{.*|\{[a-z][\w:-]*\}`.*?`", re.M)
_CODE_BLOCK = re.compile(r"^(`{3,}|~{3,})[^`{\n]*\n.*?^\1", re.M | re.S)
_CODE = re.compile(r"(?<![`}])(`+)(?!`).*?(?<!`)\1(?!`)")
_PREDICTION = re.compile(r"^> \*\*Predict\.\*\*", re.M)
# What a terminal would not show: a line that was written over, a title of its window, moves of its
# cursor.
_NOT_SHOWN = re.compile(r"[^\n]*\r(?!\n)|\x1b\][^\x07]*\x07|\x1b\[[\d;?]*[A-Za-ln-z]")
_FOLDED = {"hide-cell", "hide-input", "hide-output"}
_CHECKED = "# Checked"
_CELL = re.compile(r"<td\b.*?</td>", re.S)
_PHONE = 336  # CSS pixels that a picture has there, in a fold


def jupyter_anchor(title: str) -> str:
    """Return the anchor of a section as Jupyter makes it: links are written so, for both."""
    return title.replace(" ", "-")


# The contents -------------------------------------------------------------------------------------


def _read_contents(app: Sphinx, config: Any) -> None:
    file = Path(app.srcdir) / "myst.yml"
    contents = yaml.safe_load(file.read_text(encoding="utf-8"))["project"]
    config.project = config.html_title = config.ogp_site_name = contents["title"]
    config.author = config.copyright = ""
    config.contents = contents["toc"]
    config.include_patterns = ["index.md"]
    for entry in config.contents[1:]:
        config.include_patterns += _files(entry)
    if (icon := Path(app.srcdir) / "img" / "favicon.svg").is_file():
        config.html_favicon = str(icon)
    if (shared := Path(app.srcdir) / "img" / "one_call.png").is_file():
        config.html_static_path.append(str(shared))


def _files(entry: dict) -> list[str]:
    """Return the files of an entry of the contents: a page, or a part with pages."""
    return [page["file"] for page in entry.get("children", [entry])]


def _table_of_contents(entries: list[dict]) -> str:
    """Return the first page's directives from which the theme makes its sidebar."""
    text = ""
    for entry in entries:
        text += "\n\n```{toctree}\n:hidden:\n"
        if "children" in entry:
            text += f":caption: {entry['title']}\n"
        for file in _files(entry):
            text += f"\n{Path(file).with_suffix('').as_posix()}"
        text += "\n```"
    return text


def _read_source(app: Sphinx, name: str, source: list[str]) -> None:
    if rules.is_generated(name) or name in (api.PAGE, cite.PAGE):
        return
    if source[0].startswith("{"):
        source[0] = _prepared(source[0], name, app.config.repository)
        return
    if source[0].startswith("---"):
        logger.warning("%s: front matter, which Jupyter and GitHub show as text", name)
    _check_words(source[0], name)
    source[0] = _links_to_the_index(source[0])
    if name == app.config.root_doc:
        source[0] += _table_of_contents(app.config.contents[1:])


def _check_words(text: str, where: str) -> None:
    text = _CODE.sub("", _CODE_BLOCK.sub("", text))
    for found in _DIRECTIVE.findall(text):
        logger.warning("%s: %s, which Jupyter does not show as MyST does", where, found)


def _links_to_the_index(text: str) -> str:
    """The README is the first page, whose name here is another."""
    return re.sub(r"(\]\((?:\.\./)*)README\.md(?=[#)])", r"\1index.md", text)


# Notebooks ----------------------------------------------------------------------------------------


def _prepared(text: str, name: str, address: str) -> str:
    """Return a notebook's text with labels on its folds, and answers behind a click.

    Nothing in its metadata has a say in what is run or shown. `address`: the repository's, or
    nothing.
    """
    try:
        notebook = nbformat.reads(text, 4)
    except Exception as error:  # whatever a damaged file makes it raise
        logger.warning("%s: not a notebook (%s)", name, error)
        return nbformat.writes(nbformat.v4.new_notebook())
    for engine in ("mystnb", "myst"):
        notebook.metadata.pop(engine, None)
    notebook.metadata.setdefault("language_info", {"name": "python", "pygments_lexer": "ipython3"})
    asked = False
    for number, cell in enumerate(notebook.cells):
        where = f"{name}: cell {number}"
        cell.metadata.pop("mystnb", None)
        if cell.cell_type == "code":
            asked = _prepare_code(cell, where, asked)
        else:
            asked = _prepare_words(cell, where, asked)
    if asked:
        logger.warning("%s: nothing answers the last prediction", name)
    is_chapter = notebook.cells and not explorers.is_explorers(name)
    if is_chapter and notebook.cells[0].cell_type == "markdown":
        notebook.cells[0].source += repository.ways_to_run(address, f"{name}.ipynb")
    return nbformat.writes(notebook)


def _prepare_words(cell: NotebookNode, where: str, asked: bool) -> bool:
    """Check a cell of text. `asked`, and the result: whether a prediction waits for its answer."""
    if cell.cell_type == "raw":
        logger.warning("%s is raw, which a page does not show", where)
    _check_words(cell.source, where)
    if asked and cell.source.startswith("#"):
        logger.warning("%s: nothing answers the prediction before it", where)
    cell.source = _links_to_the_index(cell.source)
    return asked or bool(_PREDICTION.search(cell.source))


def _prepare_code(cell: NotebookNode, where: str, asked: bool) -> bool:
    """Prepare a cell's outputs and label its fold.

    `asked`, and the result: whether a prediction waits for its answer.
    """
    tags = set(cell.metadata.get("tags", ()))
    cell.outputs, description = _shown(cell.outputs, where)
    settings: dict[str, Any] = {}
    if description:
        settings["image"] = {"alt": description}
    answers = asked and cell.outputs and not tags & {"remove-cell", "remove-output"}
    if answers and not tags & {"hide-cell", "hide-output"}:
        logger.warning(
            "%s answers the prediction before it, and is not folded: tag it hide-output", where
        )
    if {"hide-input", "hide-output"} <= tags:
        tags = tags - {"hide-input", "hide-output"} | {"hide-cell"}  # one fold, not two
    if description and "hide-input" in tags:
        tags = tags - {"hide-input"} | {"remove-input"}  # the notebook has the code that draws
    if cell.source.startswith(_CHECKED):
        tags = tags | {"checked"}  # style.css styles the fold by it
    cell.metadata.tags = sorted(tags)
    if tags & _FOLDED:
        label = "Show the answer" if answers else _label(cell.source, tags)
        settings["code_prompt_show"] = label
        settings["code_prompt_hide"] = label.replace("Show", "Hide", 1)
    if settings:
        cell.metadata.mystnb = settings
    return asked and not answers


def _label(source: str, tags: set[str]) -> str:
    """Return what a fold says: its cell's first comment up to a colon, as "Solution 1"; of a cell
    that checks, all of the comment.
    """
    first = source.partition("\n")[0]
    if "hide-output" in tags:
        return "Show the output"
    if "checked" in tags:
        comment = itertools.takewhile(lambda line: line.startswith("# "), source.splitlines())
        return " ".join(line[2:].strip() for line in comment).replace("`", "")
    if first.startswith("# "):
        return first[2:].partition(":")[0].replace("`", "").strip() or "Show the code"
    return "Show the code"


def _shown(outputs: list[NotebookNode], where: str) -> tuple[list[NotebookNode], str]:
    """Return a cell's outputs as a page shows them, and the description of its picture."""
    shown = []
    descriptions = []
    for output in _joined(outputs):
        data = output.get("data", {})
        if data.pop(WIDGET, None) is not None and not data.keys() - {"text/plain"}:
            continue  # a widget, of which a page shows what it gives for where no kernel runs
        for kind in data.keys() - SHOWN:
            logger.warning("%s has an output of type %s, which a page does not show", where, kind)
        pictures = [kind for kind in ("image/svg+xml", "image/png") if kind in data]
        if pictures:
            about = output.get("metadata", {}).get(pictures[0], {})
            descriptions.append(about.get("alt") or "")
        if "image/svg+xml" in data:
            picture = _inlined(data["image/svg+xml"], descriptions[-1], where)
            output.data = {"text/html": picture}
        shown.append(output)
    if len(descriptions) > 1:
        logger.warning(
            "%s has %d pictures: one to a cell, as their descriptions are kept by the cell",
            where,
            len(descriptions),
        )
    return shown, descriptions[0] if descriptions else ""


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join what a cell writes in pieces, as JupyterLab does."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = _NOT_SHOWN.sub("", output.text)
    return joined


def _inlined(svg: str, alt: str, where: str) -> str:
    """Return a picture as a part of the page, with the page's ink, in the light and in the dark."""
    own = nodes.make_id(where.rpartition(": ")[2])  # no id is twice on a page
    written, wrong = sanitize.svg(svg, f"{own}-")
    for what in wrong:
        logger.warning("%s: a picture has %s", where, what)
    if not alt:
        logger.warning("%s: a picture without a description", where)
    attributes = f'role="img" aria-label="{html.escape(alt)}"'
    least = re.search(r"min-width:\s*(\d+)", written)
    if least and int(least[1]) > _PHONE:
        attributes += ' tabindex="0"'  # a phone scrolls it: from a keyboard too
    return written.replace("<svg", f"<svg {attributes}", 1)


# What a page may not hold -------------------------------------------------------------------------


def _check_pictures(app: Sphinx, document: nodes.document) -> None:
    for image in document.findall(nodes.image):
        address = image["uri"]
        if not image.get("alt"):
            logger.warning("a picture without a description: %s", address, location=image)
        if urlsplit(address).scheme or urlsplit(address).netloc:
            logger.warning("a picture from elsewhere: %s", address, location=image)


def _inline_own_drawings(app: Sphinx, document: nodes.document) -> None:
    """An SVG file of the project is drawn inline, as the pictures of notebooks are."""
    for image in list(document.findall(nodes.image)):
        file = Path(app.srcdir) / image["uri"]
        if file.suffix == ".svg" and file.is_file():
            where = f"{app.env.docname}: {file.stem}"
            picture = _inlined(file.read_text(encoding="utf-8"), image.get("alt", ""), where)
            image.replace_self(nodes.raw("", picture, format="html"))


def _write_raw_html_anew(app: Sphinx, document: nodes.document) -> None:
    """Write an output anew by itself, and pieces of HTML that stand beside each other together."""
    beside: dict[int, list[nodes.raw]] = {}
    for raw in document.findall(nodes.raw):
        if "html" not in raw["format"].split():
            continue
        if "text_html" in raw["classes"]:
            _write_anew([raw], words=False)
        else:
            beside.setdefault(id(raw.parent), []).append(raw)
    for group in beside.values():
        _write_anew(group, words=True)


def _write_anew(group: list[nodes.raw], *, words: bool) -> None:
    written, wrong = sanitize.pieces([raw.astext() for raw in group], words=words)
    for what in wrong:
        logger.warning("raw HTML has %s", what, location=group[0])
    for raw, text in zip(group, written, strict=True):
        raw.clear()
        raw += nodes.Text(text)


def _drop_empty_heads(app: Sphinx, document: nodes.document) -> None:
    """A table of Markdown has a head, if only an empty one, which says nothing to who hears it."""
    for head in list(document.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def _name_folds(app: Sphinx, page: str, template: str, context: dict, document: Any) -> None:
    """Name each fold by the words on it: voice control looks for them."""
    if "body" in context:
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")


def _keep_arrows(app: Sphinx, page: str, template: str, context: dict, document: Any) -> None:
    """In a narrow table an arrow begins the line of what it leads to, and no line has it alone."""
    if "body" in context:
        context["body"] = _CELL.sub(
            lambda cell: cell[0].replace("\N{RIGHTWARDS ARROW} ", "\N{RIGHTWARDS ARROW}&nbsp;"),
            context["body"],
        )


def _make_buttons(app: Sphinx, document: nodes.document, name: str) -> None:
    """On the first page, a paragraph of links alone becomes a row of buttons."""
    if name != app.config.root_doc:
        return
    for paragraph in document.findall(nodes.paragraph):
        links = [child for child in paragraph.children if isinstance(child, nodes.reference)]
        between = [child.astext() for child in paragraph.children if child not in links]
        if len(links) > 1 and not re.sub(r"[\s·]", "", "".join(between)):
            paragraph["classes"].append("buttons")
            paragraph.children = [*links]


# Mathematics, as MathML: no font and no script has to be loaded for it ----------------------------


def _mathml(node: nodes.Element, block: bool) -> str:
    tex = node.astext()
    braces = re.sub(r"\\.", "", tex)
    try:
        if braces.count("{") != braces.count("}"):
            raise MathError("a brace is missing")
        return tex2mathml(tex, as_block=block)
    except Exception as error:  # it raises whatever its reading of TeX runs into
        logger.warning("TeX that cannot be read: %s: %s", tex, error, location=node)
        return ""


def _visit_math(self: Any, node: nodes.Element) -> None:
    self.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def _visit_math_block(self: Any, node: nodes.Element) -> None:
    self.body.append(f'<div class="formula" tabindex="0">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("contents", [], "env")
    app.connect("config-inited", _read_contents)
    app.connect("source-read", _read_source)
    app.connect("doctree-read", _check_pictures)
    app.connect("doctree-read", _write_raw_html_anew)
    app.connect("doctree-read", _inline_own_drawings)
    app.connect("doctree-read", _drop_empty_heads)
    app.connect("html-page-context", _name_folds)
    app.connect("html-page-context", _keep_arrows)
    app.connect("doctree-resolved", _make_buttons)
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
