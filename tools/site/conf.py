"""Sphinx's configuration for the site, and what a page has that a notebook has not: labels on folds, answers behind a
click, a line of its own for a panel, and the glossary's words where they are met first.

The table of contents, the title and the description are myst.yml's.
"""
import logging as python_logging
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import yaml
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)
HERE = Path(__file__).resolve().parent
SITE_URL = os.environ.get("SITE_URL", "")  # where the site will stand
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")

language, root_doc = "en", "index"
extensions = ["myst_nb", "sphinx_copybutton", "sphinxext.opengraph", *["sphinx_sitemap"] * bool(SITE_URL)]
# Text
myst_enable_extensions = ["dollarmath", "amsmath", "tasklist"]
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
    "navbar_persistent": [], "home_page_in_toc": True, "show_toc_level": 2, "toc_title": "On this page",
    "use_fullscreen_button": False, "footer_content_items": "", "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light", "pygments_dark_style": "a11y-high-contrast-dark",
    **({"repository_url": REPOSITORY_URL, "use_repository_button": True} if REPOSITORY_URL else {}),
}
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["search-button-field.html", "sbt-sidebar-nav.html"]}
copybutton_selector = "div.highlight:not(.cell_output *) > pre"
# What is shown of a page where somebody shares a link to it
ogp_site_url, ogp_enable_meta_description = SITE_URL, True
ogp_social_cards = {"enable": bool(SITE_URL)}
python_logging.getLogger("matplotlib.font_manager").setLevel("ERROR")  # it looks for weights that the font lacks
sitemap_url_scheme, sitemap_excludes = "{link}", ["search.html"]

SHOWN = {"text/html", "text/plain", "image/png", "image/svg+xml"}  # kinds of output that a page shows
WIDGET = "application/vnd.jupyter.widget-view+json"
GLOSSARY = "notebooks/glossary"
_VOID = frozenset("area br col embed hr img input link meta source track wbr".split())


def jupyter_anchor(title: str) -> str:
    """The anchor of a section as Jupyter makes it: links between sections are written so, for both."""
    return title.replace(" ", "-")


# The contents -----------------------------------------------------------------------------------------------------

def _read_contents(app, config) -> None:
    contents = yaml.safe_load((Path(app.srcdir) / "myst.yml").read_text(encoding="utf-8"))["project"]
    config.project = config.html_title = config.ogp_site_name = contents["title"]
    config.author = config.copyright = ""
    config.contents = contents["toc"]
    first, *rest = contents["toc"]
    pages = [page["file"] for entry in rest for page in entry.get("children", [entry])]
    config.include_patterns = ["index.md", *pages]
    for page in pages:
        if not (Path(app.srcdir) / page).is_file():
            logger.warning("myst.yml: %s is not there", page)
    if (icon := Path(app.srcdir) / "img" / "favicon.svg").is_file():
        config.html_favicon = str(icon)
    if contents.get("description"):
        config.ogp_description = contents["description"]


def _read_source(app, name: str, source: list[str]) -> None:
    if name == root_doc:
        for entry in app.config.contents[1:]:
            pages = [Path(page["file"]).with_suffix("").as_posix() for page in entry.get("children", [entry])]
            caption = [f":caption: {entry['title']}"] if "children" in entry else []
            source[0] += "\n\n" + "\n".join(["```{toctree}", ":hidden:", *caption, "", *pages, "```"])
    elif source[0].startswith("{"):
        source[0] = _prepared(source[0], name)


# Notebooks --------------------------------------------------------------------------------------------------------

def _prepared(text: str, name: str) -> str:
    """A notebook's text, with labels on its folds; what answers a prediction is behind a click."""
    notebook = nbformat.reads(text, 4)
    asked = False
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            asked = cell.source.rstrip().rpartition("\n\n")[2].startswith("> **Predict.**")
            continue
        tags = set(cell.metadata.get("tags", ()))
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            data = output.get("data", {})
            data.pop(WIDGET, None)
            for kind in data.keys() - SHOWN:
                logger.warning("%s: cell %d has an output of type %s, which a page does not show", name, number, kind)
            for kind in ("image/png", "image/svg+xml"):
                if alt := output.get("metadata", {}).get(kind, {}).get("alt"):
                    cell.metadata["mystnb"] = {"image": {"alt": alt}}
        first = cell.source.partition("\n")[0]
        label = "Show the code"
        if asked and cell.outputs:
            tags = tags - {"hide-input", "hide-output"} | {"hide-cell" if "hide-input" in tags else "hide-output"}
            label, asked = "Show the answer", False
        elif "hide-output" in tags:
            label = "Show the output"
        elif first.startswith("# "):
            label = first[2:].partition(":")[0]
        if tags & {"hide-cell", "hide-input", "hide-output"}:
            cell.metadata |= {"tags": sorted(tags), "mystnb": cell.metadata.get("mystnb", {}) | {
                "code_prompt_show": label, "code_prompt_hide": label.replace("Show", "Hide", 1)}}
    return nbformat.writes(notebook)


def _merged(outputs: list) -> list:
    """What one cell writes in pieces is one output, as in JupyterLab."""
    merged = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


# What a page may not hold -----------------------------------------------------------------------------------------

class _Refused(HTMLParser):
    """What raw HTML, of an output or between a chapter's words, has that no page of ours may have."""

    def __init__(self, html: str, whole: bool):
        super().__init__()
        self.wrong, self.open = [], []
        self.feed(html)
        self.close()
        if whole and self.open:
            self.wrong.append(f"<{self.open[-1]}> is not closed")

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag in ("script", "iframe", "object", "embed", "link", "meta", "base", "form"):
            self.wrong.append(f"<{tag}>")
        for name, value in attributes:
            value = (value or "").strip()
            if name.startswith("on") or re.match(r"(javascript|vbscript):", value, re.I):
                self.wrong.append(f"{name}={value[:40]!r}, a script")
            addresses = re.findall(r"url\(\s*['\"]?(.*?)['\"]?\s*\)|@import", value) if name == "style" else (
                [value] if name in ("src", "srcset", "poster", "data", "background", "xlink:href")
                or name == "href" and tag in ("image", "use") else [])
            self.wrong += [f"{name}={address[:60]!r}, which would be loaded from elsewhere" for address in addresses
                           if urlsplit(address).netloc or urlsplit(address).scheme not in ("", "data")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag not in _VOID:
            self.wrong.append(f"</{tag}> closes {f'<{self.open[-1]}>' if self.open else 'nothing'}")

    def handle_data(self, data: str) -> None:
        if "style" in self.open and re.search(r"url\(|@import", data):
            self.wrong.append("a style that loads from elsewhere")


def _refuse(app, document: nodes.document) -> None:
    """Raw HTML is looked at where it comes in. An output must close what it opens; words may stand between the tags of
    a fold, as long as they do in one section of a page."""
    for image in document.findall(nodes.image):
        if not image.get("alt"):
            logger.warning("a picture without a description: %s", image["uri"], location=image)
    for raw in document.findall(nodes.raw):
        if raw["format"] != "html":
            continue
        output = any(isinstance(up, nodes.container) and up.get("nb_element") for up in _ancestors(raw))
        for what in _Refused(raw.astext(), output).wrong:
            if output or not re.match("</?[a-z]+>", what) or "clos" not in what:
                logger.warning("raw HTML has %s", what, location=raw)
    for parent in {id(raw.parent): raw.parent for raw in document.findall(nodes.raw)}.values():
        together = "".join(child.astext() for child in parent.children
                           if isinstance(child, nodes.raw) and child["format"] == "html")
        for what in _Refused(together, True).wrong:
            if "clos" in what:
                logger.warning("raw HTML, with what stands beside it: %s", what, location=parent)


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
    entries = re.findall(r"^## (.+)\n+(.+?)(?=\n\n|\Z)", file.read_text(encoding="utf-8"), re.M) if file.is_file() else []
    app.meanings = {}
    for title, text in entries:
        text = re.sub(r"\[(.+?)\]\(.*?\)|[`*]", r"\1", text)
        for word in title.split(", "):
            app.meanings[word.lower()] = (title, text)
    words = sorted(map(re.escape, app.meanings), key=len, reverse=True)
    app.words = re.compile(rf"(?<![\w./-])({'|'.join(words)})(?:e?s)?(?![\w/-])", re.I) if words else None


def _link_glossary(app, document: nodes.document, name: str) -> None:
    """A link, with the meaning as its title, from where a page uses a word of the glossary first."""
    if app.words is None or name in (GLOSSARY, root_doc, "CONTRIBUTING"):
        return
    seen = set()
    skipped = nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.math, nodes.thead, nodes.strong
    for paragraph in document.findall(nodes.paragraph):
        for text in list(paragraph.findall(nodes.Text)):
            if any(isinstance(up, skipped) for up in _ancestors(text)) or not isinstance(text.parent, nodes.Element):
                continue
            made, end = [], 0
            for m in app.words.finditer(text):
                title, meaning = app.meanings[m[1].lower()]
                if title in seen:
                    continue
                seen.add(title)
                uri = app.builder.get_relative_uri(name, GLOSSARY) + "#" + nodes.make_id(title)
                made += [nodes.Text(text[end:m.start()]), nodes.reference(
                    "", m[0], internal=True, refuri=uri, reftitle=meaning, classes=["term"])]
                end = m.end()
            if made:
                text.parent.replace(text, [*made, nodes.Text(text[end:])])


# Mathematics, as MathML: no font and no script has to be loaded for it --------------------------------------------

def _math(self, node: nodes.Element, block: bool) -> None:
    try:
        if (tex := node.astext()).count("{") != tex.count("}"):
            raise MathError("a brace is missing")
        mathml = tex2mathml(tex, as_block=block)
    except MathError as error:
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
    app.add_html_math_renderer("mathml", (lambda self, node: _math(self, node, False), None),
                               (lambda self, node: _math(self, node, True), None))
