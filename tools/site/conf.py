"""Sphinx's configuration for the site, and what a page has that a notebook has not: labels on folds, answers behind a
click, and the glossary's words where they are met first.

The table of contents and the title are myst.yml's, whose form build.py has looked at.
"""

import html
import logging as python_logging
import os
import re
import sys
from pathlib import Path

import nbformat
import yaml
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from tools.site import refused

logger = logging.getLogger(__name__)
SITE_URL = (
    f"{url.rstrip('/')}/" if (url := os.environ.get("SITE_URL", "")) else ""
)  # where the site will stand
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")

language, root_doc = "en", "index"
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    *["sphinx_sitemap"] * bool(SITE_URL),
]
# Text
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "conf.jupyter_anchor"
# Notebooks: shown as they are stored
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # a panel needs a kernel, which a page has not
# Pages
html_theme = "sphinx_book_theme"
html_static_path, html_css_files, html_favicon = [str(HERE / "style.css")], ["style.css"], None
html_use_index = html_domain_indices = False
html_math_renderer = "mathml"
html_baseurl = SITE_URL
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "use_fullscreen_button": False,
    "footer_content_items": "",
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    **({"repository_url": REPOSITORY_URL, "use_repository_button": True} if REPOSITORY_URL else {}),
}
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["search-button-field.html", "sbt-sidebar-nav.html"]}
copybutton_selector = "div.highlight:not(.cell_output *) > pre"
# What is shown of a page where somebody shares a link to it
ogp_site_url, ogp_enable_meta_description = SITE_URL, True
ogp_social_cards = {"enable": bool(SITE_URL), "image_mini": "img/one_call.png"}
python_logging.getLogger("matplotlib.font_manager").setLevel(
    "ERROR"
)  # it looks for weights that the font lacks
sitemap_url_scheme, sitemap_excludes = "{link}", ["search.html"]

SHOWN = {
    "text/html",
    "text/plain",
    "image/png",
    "image/svg+xml",
}  # kinds of output that a page shows
WIDGET = "application/vnd.jupyter.widget-view+json"
GLOSSARY = "notebooks/glossary"
# MyST's own words, which Jupyter shows as they are: no chapter is written for one engine.
_DIRECTIVE = re.compile(r"^ {0,3}(?:`{3,}|~{3,}|:{3,})\{.*|\{[a-z][\w:-]*\}`.*?`", re.M)


def jupyter_anchor(title: str) -> str:
    """The anchor of a section as Jupyter makes it: links between sections are written so, for both."""
    return title.replace(" ", "-")


# The contents -----------------------------------------------------------------------------------------------------


def _read_contents(app, config) -> None:
    contents = yaml.safe_load((Path(app.srcdir) / "myst.yml").read_text(encoding="utf-8"))[
        "project"
    ]
    config.project = config.html_title = config.ogp_site_name = contents["title"]
    config.author = config.copyright = ""
    config.contents = contents["toc"]
    pages = [
        page["file"] for entry in contents["toc"][1:] for page in entry.get("children", [entry])
    ]
    config.include_patterns = ["index.md", *pages]
    if (icon := Path(app.srcdir) / "img" / "favicon.svg").is_file():
        config.html_favicon = str(icon)


def _read_source(app, name: str, source: list[str]) -> None:
    if source[0].startswith("{"):
        source[0] = _prepared(source[0], name)
        return
    if source[0].startswith("---"):
        logger.warning("%s: front matter, which Jupyter and GitHub show as text", name)
    _check_words(source[0], name)
    source[0] = _links_to_the_index(source[0])
    if name == root_doc:
        for entry in app.config.contents[1:]:
            pages = [
                Path(page["file"]).with_suffix("").as_posix()
                for page in entry.get("children", [entry])
            ]
            caption = [f":caption: {entry['title']}"] if "children" in entry else []
            source[0] += "\n\n" + "\n".join(
                ["```{toctree}", ":hidden:", *caption, "", *pages, "```"]
            )


def _check_words(text: str, where: str) -> None:
    text = re.sub(
        r"^(`{3,}|~{3,})[^`{\n]*\n.*?^\1", "", text, flags=re.M | re.S
    )  # blocks of code, then words of it
    for found in _DIRECTIVE.findall(re.sub(r"(?<![`}])(`+)(?!`).*?(?<!`)\1(?!`)", "", text)):
        logger.warning("%s: %s, which Jupyter does not show as MyST does", where, found)


def _links_to_the_index(text: str) -> str:
    """The README is the first page, whose name here is another."""
    return re.sub(r"(\]\((?:\.\./)*)README\.md(?=[#)])", r"\1index.md", text)


# Notebooks --------------------------------------------------------------------------------------------------------


def _prepared(text: str, name: str) -> str:
    """A notebook's text, with labels on its folds; what answers a prediction is behind a click. Nothing in its metadata
    has a say in what is run or shown."""
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
        if cell.cell_type != "code":
            if cell.cell_type == "raw":
                logger.warning("%s is raw, which a page does not show", where)
            _check_words(cell.source, where)
            if asked and re.search(r"^#", cell.source):
                logger.warning("%s: nothing answers the prediction before it", where)
            asked = asked or bool(re.search(r"^> \*\*Predict\.\*\*", cell.source, re.M))
            cell.source = _links_to_the_index(cell.source)
            continue
        tags = set(cell.metadata.get("tags", ()))
        cell.outputs = _shown(cell.outputs, where, cell.metadata)
        first = cell.source.partition("\n")[0]
        label = "Show the code"
        if asked and cell.outputs and not tags & {"remove-cell", "remove-output"}:
            if not tags & {"hide-cell", "hide-output"}:
                logger.warning(
                    "%s answers the prediction before it, and is not folded: tag it hide-output",
                    where,
                )
            label, asked = "Show the answer", False
        elif "hide-output" in tags:
            label = "Show the output"
        elif first.startswith("# "):
            label = first[2:].partition(":")[0].strip() or label
        if {"hide-input", "hide-output"} <= tags:
            tags = tags - {"hide-input", "hide-output"} | {"hide-cell"}  # one fold, not two
        if tags & {"hide-cell", "hide-input", "hide-output"}:
            cell.metadata |= {
                "tags": sorted(tags),
                "mystnb": cell.metadata.get("mystnb", {})
                | {"code_prompt_show": label, "code_prompt_hide": label.replace("Show", "Hide", 1)},
            }
    if asked:
        logger.warning("%s: nothing answers the last prediction", name)
    return nbformat.writes(notebook)


def _shown(outputs: list, where: str, metadata: dict) -> list:
    """The outputs as a page shows them. What a cell writes in pieces is one output, as in JupyterLab, and a line that
    was written over is gone; a panel is what it gives for where no kernel runs. Of a picture, its description."""
    shown, described = [], []
    for output in outputs:
        data = output.get("data", {})
        if data.pop(WIDGET, None) is not None and not data.keys() - {"text/plain"}:
            continue  # what is left names the panel's parts
        for kind in data.keys() - SHOWN:
            logger.warning("%s has an output of type %s, which a page does not show", where, kind)
        if kind := next((kind for kind in ("image/svg+xml", "image/png") if kind in data), ""):
            described.append(output.get("metadata", {}).get(kind, {}).get("alt"))
        if kind == "image/svg+xml":
            output.data = {"text/html": _inlined(data[kind], described[-1], where, len(described))}
        if output.output_type == "stream" and shown and shown[-1].get("name") == output.name:
            shown[-1].text += output.text
        else:
            shown.append(output)
    for output in shown:
        if output.output_type == "stream":
            output.text = re.sub(
                r"[^\n]*\r(?!\n)|\x1b\][^\x07]*\x07|\x1b\[[\d;?]*[A-Za-ln-z]", "", output.text
            )
    if len(described) > 1:
        logger.warning(
            "%s has %d pictures: one to a cell, as their descriptions are kept by the cell",
            where,
            len(described),
        )
    elif described and described[0]:
        metadata["mystnb"] = {"image": {"alt": described[0]}}
    return shown


def _inlined(svg: str, alt: str | None, where: str, number: int) -> str:
    """A picture as a part of the page, so that it has the page's ink, in the light and in the dark."""
    for what in refused.in_svg(svg):
        logger.warning("%s has %s", where, what)
    if not alt:
        logger.warning("%s: a picture without a description", where)
    own = nodes.make_id(f"{where.rpartition(': ')[2]}-{number}-")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)  # no id twice on a page
    least = re.search(
        r"min-width: (\d+)", svg
    )  # wider than a phone, it is scrolled: from a keyboard too
    focus = ' tabindex="0"' if least and int(least[1]) > 350 else ""
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt or "")}"{focus}', 1)


# What a page may not hold -----------------------------------------------------------------------------------------


def _refuse(app, document: nodes.document) -> None:
    """Raw HTML is looked at where it comes in: of an output by itself, of a text with what stands beside it."""
    for image in document.findall(nodes.image):
        if not image.get("alt"):
            logger.warning("a picture without a description: %s", image["uri"], location=image)
    beside = {}
    for raw in document.findall(nodes.raw):
        if raw["format"] == "html":
            beside.setdefault(id(raw.parent), []).append(raw)
    for parts in beside.values():
        for what in refused.in_html("".join(raw.astext() for raw in parts)):
            logger.warning("raw HTML has %s", what, location=parts[0])


def _drop_empty_heads(app, document: nodes.document) -> None:
    """A table of Markdown has a head, if only an empty one, which says nothing to who hears it."""
    for head in list(document.findall(nodes.thead)):
        if not head.astext().strip():
            head.parent.remove(head)


def _ancestors(node: nodes.Node):
    while node := node.parent:
        yield node


# The glossary -----------------------------------------------------------------------------------------------------


def _read_glossary(app, *_) -> None:
    """The glossary's words, as a pattern, and what each means."""
    file = Path(app.srcdir) / f"{GLOSSARY}.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    entries = re.findall(r"^## (.+)\n\n((?:.+\n?)+)", text, re.M)
    if len(entries) < len(re.findall("^## ", text, re.M)):
        logger.warning("%s: a word without a meaning", GLOSSARY)
    app.meanings = {}
    for title, text in entries:
        text = " ".join(text.split())
        text = re.sub(r"\[(.+?)\]\(.*?\)|[`*]", r"\1", text)
        for word in title.split(", "):
            app.meanings[word.lower()] = (title, text)
    words = sorted(map(re.escape, app.meanings), key=len, reverse=True)
    app.words = (
        re.compile(rf"(?<![\w./-])({'|'.join(words)})(?:e?s)?(?![\w/-])", re.I) if words else None
    )


def _link_glossary(app, document: nodes.document, name: str) -> None:
    """A link, with the meaning as its title, from where a page uses a word of the glossary first."""
    if app.words is None or name in (GLOSSARY, root_doc, "CONTRIBUTING"):
        return
    seen = set()
    skipped = (
        nodes.reference,
        nodes.literal,
        nodes.literal_block,
        nodes.title,
        nodes.math,
        nodes.thead,
        nodes.strong,
    )
    for paragraph in document.findall(nodes.paragraph):
        for text in list(paragraph.findall(nodes.Text)):
            if any(isinstance(up, skipped) for up in _ancestors(text)) or not isinstance(
                text.parent, nodes.Element
            ):
                continue
            made, end = [], 0
            for m in app.words.finditer(text):
                title, meaning = app.meanings[m[1].lower()]
                if title in seen:
                    continue
                seen.add(title)
                uri = app.builder.get_relative_uri(name, GLOSSARY) + "#" + nodes.make_id(title)
                made += [
                    nodes.Text(text[end : m.start()]),
                    nodes.reference(
                        "", m[0], internal=True, refuri=uri, reftitle=meaning, classes=["term"]
                    ),
                ]
                end = m.end()
            if made:
                text.parent.replace(text, [*made, nodes.Text(text[end:])])


# Mathematics, as MathML: no font and no script has to be loaded for it --------------------------------------------


def _math(self, node: nodes.Element, block: bool) -> None:
    try:
        braces = re.sub(r"\\.", "", tex := node.astext())
        if braces.count("{") != braces.count("}"):
            raise MathError("a brace is missing")
        mathml = tex2mathml(tex, as_block=block)
    except Exception as error:  # it raises whatever its reading of TeX runs into
        logger.warning("TeX that cannot be read: %s: %s", tex, error, location=node)
        mathml = ""
    self.body.append(f'<div class="formula" tabindex="0">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_config_value("contents", [], "env")
    app.connect("config-inited", _read_contents)
    app.connect("builder-inited", _read_glossary)
    app.connect("source-read", _read_source)
    app.connect("doctree-read", _refuse)
    app.connect("doctree-read", _drop_empty_heads)
    app.connect("doctree-resolved", _link_glossary)
    app.add_html_math_renderer(
        "mathml",
        (lambda self, node: _math(self, node, False), None),
        (lambda self, node: _math(self, node, True), None),
    )
