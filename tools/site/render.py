"""Draw mystmd's parsed pages (its JSON syntax trees) as static HTML that needs no network and no JavaScript.

Every kind of node is drawn or reported: a node this file does not know is a problem of the build, never dropped.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

Node = dict
WIDGET = "application/vnd.jupyter.widget-view+json"
# A tile with the bits of an E4M3 number: sign, exponent, mantissa. Inline, or browsers would ask for /favicon.ico.
ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'><rect width='8' height='8' rx='1.5' fill='#1f4fd1'/>"
    "<path d='M1 2.5h1v3H1z' fill='#ff9f6b'/><path d='M2.5 2.5h2v3h-2z' fill='#fff'/>"
    "<path d='M5 2.5h2v3H5z' fill='#8fd3c8'/></svg>"
)


@dataclass(frozen=True)
class Entry:
    """A line of the navigation: a page, or the title of a part (no slug)."""

    title: str
    slug: str | None
    level: int


@dataclass(frozen=True)
class Site:
    """What every page shares. `public` is the folder with the pictures and files that pages refer to by /name."""

    title: str
    description: str
    entries: tuple[Entry, ...]
    public: Path

    @property
    def pages(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.slug is not None)


def path_of(slug: str) -> str:
    """Where a page lies under the site's root: as the public theme has it, so that links fit both."""
    return "index.html" if slug == "index" else f"{slug.replace('.', '/')}/index.html"


def load_site(folder: Path) -> Site:
    """The site's title and navigation from mystmd's `_build/site`."""
    config = json.loads((folder / "config.json").read_text())
    project = config["projects"][0]
    index = json.loads((folder / "content" / f"{project['index']}.json").read_text())
    entries = [Entry(index["frontmatter"].get("title", ""), project["index"], 1)]
    entries += [Entry(p.get("title", ""), p.get("slug"), p["level"]) for p in project["pages"]]
    title = config.get("title") or project.get("title", "")
    return Site(title, config.get("description") or project.get("description", ""), tuple(entries), folder / "public")


def render_site(folder: Path, out: Path) -> list[str]:
    """Write a page to `out` for every page of `folder` (mystmd's `_build/site`); return what could not be drawn."""
    site, problems = load_site(folder), []
    for entry in site.pages:
        page = PageRenderer(site, entry.slug, json.loads((folder / "content" / f"{entry.slug}.json").read_text()))
        target = out / path_of(entry.slug)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page.html(), encoding="utf-8")
        problems += page.problems
    return problems


# --- text of terminals --------------------------------------------------------------------------------------------

SGR = re.compile(r"\x1b\[([0-9;]*)m")
OTHER_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b\][^\x07]*\x07")
LINE_REWRITE = re.compile(r"^.*\r(?!\n)", re.MULTILINE)  # a progress line: what a carriage return overwrote


def _palette(index: int) -> str:
    """Colour `index` (16 to 255) of xterm's table: a 6x6x6 cube, then greys."""
    if index >= 232:
        return "#" + f"{8 + 10 * (index - 232):02x}" * 3
    steps = (0, 95, 135, 175, 215, 255)
    index -= 16
    return "#" + "".join(f"{steps[i]:02x}" for i in (index // 36, index // 6 % 6, index % 6))


def _sgr(state: dict[str, str], codes: list[int]) -> dict[str, str]:
    """The style after an escape sequence: attribute to class ("ansi-...") or CSS declaration."""
    state = dict(state)
    flags = {1: "bold", 2: "faint", 3: "italic", 4: "underline", 7: "inverse"}
    codes = list(codes or [0])
    while codes:
        code = codes.pop(0)
        if code == 0:
            state = {}
        elif code in flags:
            state[flags[code]] = f"ansi-{flags[code]}"
        elif code == 22:
            state.pop("bold", None), state.pop("faint", None)
        elif code in (23, 24, 27):
            state.pop(flags[code - 20], None)
        elif code in (39, 49):
            state.pop("fg" if code == 39 else "bg", None)
        elif code in (38, 48):
            where, prop = ("fg", "color") if code == 38 else ("bg", "background")
            if codes[:1] == [5] and len(codes) > 1:
                number = codes[1]
                state[where] = f"ansi-{where}-{number}" if number < 16 else f"{prop}:{_palette(min(number, 255))}"
                del codes[:2]
            elif codes[:1] == [2] and len(codes) > 3:
                state[where] = f"{prop}:rgb({codes[1]},{codes[2]},{codes[3]})"
                del codes[:4]
        else:
            for base, where, bright in ((30, "fg", 0), (40, "bg", 0), (90, "fg", 8), (100, "bg", 8)):
                if base <= code < base + 8:
                    state[where] = f"ansi-{where}-{code - base + bright}"
    return state


def ansi_to_html(text: str) -> str:
    """Terminal text as HTML: colours and weights become spans, other control sequences go."""
    text = LINE_REWRITE.sub("", OTHER_ESCAPES.sub("", text)).replace("\r", "")
    parts, state = [], {}
    for i, piece in enumerate(SGR.split(text)):
        if i % 2:
            state = _sgr(state, [int(c) for c in piece.split(";") if c])
        elif piece:
            classes = " ".join(v for v in state.values() if ":" not in v)
            style = ";".join(v for v in state.values() if ":" in v)
            attributes = (f' class="{classes}"' if classes else "") + (f' style="{style}"' if style else "")
            words = escape(piece, quote=False)
            parts.append(f"<span{attributes}>{words}</span>" if attributes else words)
    return "".join(parts)


def highlighted(source: str, language: str | None) -> str:
    """Source text with pygments' classes; plain where pygments has no such language."""
    try:
        lexer = get_lexer_by_name("python" if language in ("ipython", "ipython3") else language or "text")
    except ClassNotFound:
        return escape(source, quote=False)
    return highlight(source, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")


def plain_text(node: Node) -> str:
    """The words of a node, without markup."""
    if "children" in node:
        return "".join(map(plain_text, node["children"]))
    return node.get("value", "") if node.get("type") in ("text", "inlineCode", "inlineMath") else ""


# --- one page -----------------------------------------------------------------------------------------------------

# A sign after an opening bracket, a relation or a comma: browsers space it as a sum's unless told that it is a prefix.
UNARY = re.compile(r"(<mo[^>]*>[(\[=<>≤≥≈,⋅×∈]</mo>)<mo>([−+±])</mo>")

# Nodes that are one HTML element around their children.
ELEMENTS = {
    "paragraph": "p", "emphasis": "em", "strong": "strong", "underline": "u", "delete": "del", "subscript": "sub",
    "superscript": "sup", "keyboard": "kbd", "summary": "summary", "tableRow": "tr", "caption": "figcaption",
    "legend": "div", "definitionList": "dl", "definitionTerm": "dt", "definitionDescription": "dd", "span": "span",
    "div": "div",
}  # fmt: skip
TRANSPARENT = ("root", "glossary", "mystTarget")


class PageRenderer:
    """Draws one page. `problems` lists what it could not draw, each line naming the source file."""

    def __init__(self, site: Site, slug: str, page: Node):
        self.site, self.slug, self.page = site, slug, page
        self.source = page["location"].lstrip("/")
        self.root = "../" * path_of(slug).count("/")
        self.problems: list[str] = []
        self.sections: list[tuple[str, str]] = []  # (id, text) of the second-level headings, for the navigation
        self.footnotes: list[Node] = []

    def problem(self, message: str) -> str:
        self.problems.append(f"{self.source}: {message}")
        return ""

    # Nodes

    def node(self, node: Node) -> str:
        kind = node["type"]
        if kind in TRANSPARENT:
            return self.children(node)
        if kind in ELEMENTS:
            return self.element(ELEMENTS[kind], node)
        draw: Callable[[Node], str] | None = getattr(self, f"draw_{kind}", None)
        return draw(node) if draw else self.problem(f"the local template cannot draw {kind!r} nodes")

    def children(self, node: Node) -> str:
        return "".join(map(self.node, node.get("children", ())))

    def element(self, tag: str, node: Node, extra: str = "") -> str:
        classes = node.get("class", "")
        if classes in ("math-inline", "math-display"):
            return self.problem(f"math inside raw HTML stays TeX source: {plain_text(node)!r}; move it out of the HTML")
        style = ";".join(f"{re.sub('[A-Z]', lambda m: '-' + m[0].lower(), k)}:{v}" for k, v in _style(node).items())
        attributes = (f' id="{escape(node["html_id"])}"' if node.get("html_id") else "") + extra
        attributes += f' class="{escape(classes)}"' if classes else ""
        attributes += f' style="{escape(style)}"' if style else ""
        return f"<{tag}{attributes}>{self.children(node)}</{tag}>"

    def draw_text(self, node: Node) -> str:
        return escape(node["value"], quote=False)

    def draw_break(self, node: Node) -> str:
        return "<br>"

    def draw_thematicBreak(self, node: Node) -> str:
        return "<hr>"

    def draw_comment(self, node: Node) -> str:
        return ""

    def draw_inlineCode(self, node: Node) -> str:
        return f"<code>{escape(node['value'], quote=False)}</code>"

    def draw_abbreviation(self, node: Node) -> str:
        return self.element("abbr", node, f' title="{escape(node["title"])}"')

    def draw_heading(self, node: Node) -> str:
        text, anchor, tag = self.children(node), node.get("html_id"), f"h{node['depth']}"
        if not anchor:
            return f"<{tag}>{text}</{tag}>"
        if node["depth"] == 2:
            self.sections.append((anchor, plain_text(node)))
        link = f'<a class="anchor" href="#{escape(anchor)}" aria-label="Link to this section">#</a>'
        return f'<{tag} id="{escape(anchor)}">{text} {link}</{tag}>'

    def draw_blockquote(self, node: Node) -> str:
        first = node["children"][0].get("children") or [{"type": ""}]
        return f'<blockquote{" class=ask" * (first[0]["type"] == "strong")}>{self.children(node)}</blockquote>'

    def draw_list(self, node: Node) -> str:
        tag, start = ("ol", node.get("start")) if node.get("ordered") else ("ul", None)
        return self.element(tag, node, f' start="{start}"' if start not in (None, 1) else "")

    def draw_listItem(self, node: Node) -> str:
        if node.get("checked") is None:
            return self.element("li", node)
        checked = " checked" * node["checked"]
        label = f'<input type="checkbox" disabled{checked} aria-label="{"done" if checked else "to do"}"> '
        return f'<li class="task">{label}{self.children(node)}</li>'

    def draw_table(self, node: Node) -> str:
        rows = node["children"]
        if all(cell.get("header") and not cell.get("children") for cell in rows[0]["children"]):
            rows = rows[1:]  # Markdown cannot leave the heading out, only leave it empty
        return f'<div class="table" tabindex="0"><table>{"".join(map(self.node, rows))}</table></div>'

    def draw_tableCell(self, node: Node) -> str:
        spans = "".join(f' {name}="{node[name]}"' for name in ("colspan", "rowspan") if node.get(name))
        align = f' class="{node["align"]}"' if node.get("align") in ("center", "right") else ""
        scope = ' scope="col"' if node.get("header") else ""
        tag = "th" if node.get("header") else "td"
        return f"<{tag}{scope}{spans}{align}>{self.children(node)}</{tag}>"

    def draw_admonition(self, node: Node) -> str:
        kind = node.get("kind") or next(iter((node.get("class") or "note").split()))
        return f'<aside class="admonition {escape(kind)}">{self.children(node)}</aside>'

    def draw_admonitionTitle(self, node: Node) -> str:
        return f'<p class="title">{self.children(node)}</p>'

    def draw_details(self, node: Node) -> str:
        kids = node.get("children", [])
        if not kids or kids[0]["type"] != "summary":
            return self.problem("<details> does not begin with <summary>, or is closed in another cell")
        return f"<details>{self.node(kids[0])}<div>{''.join(map(self.node, kids[1:]))}</div></details>"

    def draw_container(self, node: Node) -> str:
        return self.element("figure", node)

    def draw_captionNumber(self, node: Node) -> str:
        return f'<span class="number">{self.children(node)}</span> '

    def draw_footnoteReference(self, node: Node) -> str:
        mark = escape(node["enumerator"])
        return f'<sup><a href="#fn-{mark}" id="fnref-{mark}" aria-label="Footnote {mark}">{mark}</a></sup>'

    def draw_footnoteDefinition(self, node: Node) -> str:
        self.footnotes.append(node)  # drawn at the foot of the page
        return ""

    def draw_math(self, node: Node) -> str:
        anchor = f' id="{escape(node["html_id"])}"' if node.get("html_id") else ""
        number = node.get("enumerator")
        number = f'<span class="number">({escape(number)})</span>' if number else ""
        return f'<div class="math" tabindex="0"{anchor}>{self.mathml(node)}{number}</div>'

    def draw_inlineMath(self, node: Node) -> str:
        return self.mathml(node)

    def mathml(self, node: Node) -> str:
        """KaTeX gives HTML, which needs its fonts, and MathML, which browsers draw by themselves."""
        found = re.search(r"<math\b.*</math>", node.get("html", ""), re.DOTALL)
        if not found:
            return self.problem(f"math was not rendered: {node['value']!r}")
        return UNARY.sub(r'\1<mo form="prefix">\2</mo>', found[0])

    # Links and pictures

    def href(self, url: str) -> str:
        """A link as seen from this page: pages and files of the site are relative, so that any folder can serve it."""
        path, mark, fragment = url.partition("#")
        if re.match(r"(https?|mailto):", url) or not path:
            return escape(url)
        if not path.startswith("/"):
            return self.problem(f"link to {url!r}: no page or file of the site; link its web address instead")
        slugs = {"/": "index"} | {f"/{p.slug}".replace(".", "/"): p.slug for p in self.site.pages}
        target = path_of(slugs[path]) if path in slugs else quote(path.lstrip("/"))
        return escape(self.root + target + mark + fragment)

    def draw_link(self, node: Node) -> str:
        if not node.get("children"):
            self.problem(f"link to {node['url']!r} has no text")
        return f'<a href="{self.href(node["url"])}">{self.children(node)}</a>'

    def draw_crossReference(self, node: Node) -> str:
        if not node.get("resolved"):
            return self.problem(f"reference to {node.get('label') or node.get('identifier')!r} leads nowhere")
        return f'<a href="{self.href(node.get("url", "") + "#" + node["html_id"])}">{self.children(node)}</a>'

    def picture(self, url: str, alt: str, width: str = "") -> str:
        if not re.match(r"data:", url):
            if not (url.startswith("/") and (self.site.public / url.lstrip("/")).is_file()):
                return self.problem(f"picture {url!r} is not there")
            url = self.root + quote(url.lstrip("/"))
        if not alt.strip():
            self.problem(f"picture {url!r} has no alt text")
        return f'<img src="{escape(url)}" alt="{escape(alt)}"{width} loading="lazy">'

    def draw_image(self, node: Node) -> str:
        width = str(node.get("width") or "")
        width = f' style="width:{escape(width if re.search(r"[a-z%]$", width) else width + "px")}"' if width else ""
        return self.picture(node["url"], node.get("alt") or "", width)

    # Code and its outputs

    def draw_code(self, node: Node) -> str:
        language = node.get("lang")
        pre = f'<pre class="code" tabindex="0"><code>{highlighted(node["value"], language)}</code></pre>'
        return f'<div class="input">{pre}</div>' if node.get("executable") else pre

    def draw_block(self, node: Node) -> str:
        if node.get("visibility") == "remove":
            return ""
        if node.get("kind") != "notebook-code":
            return self.children(node)
        parts, title = [], "Code"
        for child in node["children"]:
            if child["type"] == "code":
                # A cell's first comment names its fold, as JupyterLab shows the first line of a folded cell.
                comment = re.match(r"#+ *(\S.*)", child["value"])
                title = comment[1] if comment else title
            drawn = self.node(child)
            if child.get("visibility") == "remove" or not drawn:
                continue
            name = title if child["type"] == "code" else "Output"
            parts.append(fold(name, drawn) if child.get("visibility") == "hide" else drawn)
        cell = f'<div class="cell">{"".join(parts)}</div>' if parts else ""
        return fold(title, cell) if node.get("visibility") == "hide" else cell

    def draw_outputs(self, node: Node) -> str:
        drawn = []
        for name, outputs in groupby(node.get("children", ()), key=_stream):
            drawn += [self.stream(name, outputs)] if name else map(self.node, outputs)
        return f'<div class="outputs">{"".join(drawn)}</div>' if any(drawn) else ""

    def stream(self, name: str, outputs: Iterable[Node]) -> str:
        """What a cell printed: a kernel sends it in pieces, cut anywhere."""
        text = "".join(self.content(output["jupyter_data"], "text") for output in outputs)
        return f'<pre class="{escape(name)}" tabindex="0">{ansi_to_html(text)}</pre>'

    def content(self, data: Node, key: str = "content") -> str:
        """The text of an output: mystmd puts long ones in a file of their own."""
        text = (self.site.public / data["path"].lstrip("/")).read_text() if "path" in data else data[key]
        return "".join(text) if isinstance(text, list) else text

    def draw_output(self, node: Node) -> str:
        data = node["jupyter_data"]
        if data["output_type"] == "error":
            return f'<pre class="error" tabindex="0">{ansi_to_html(self.content(data, "traceback"))}</pre>'
        return self.bundle(data.get("data", {}), data.get("metadata", {}))

    def bundle(self, data: Node, metadata: Node) -> str:
        """The richest form of a result that static HTML can show."""
        if WIDGET in data:
            note = "This panel is interactive. Open the notebook in JupyterLab to use it."
            rest = {k: v for k, v in data.items() if k not in (WIDGET, "text/plain")}
            return f'<p class="widget">{note}</p>' + (self.bundle(rest, metadata) if rest else "")
        if "text/html" in data:
            return f'<div class="html" tabindex="0">{self.content(data["text/html"])}</div>'
        for mime in ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp"):
            if mime in data:
                alt = metadata.get(mime, {}).get("alt") or metadata.get("alt") or "Figure drawn by the code above"
                if mime == "image/svg+xml":  # as a picture: its ids and styles cannot meet the page's
                    return self.picture("data:image/svg+xml," + quote(self.content(data[mime])), alt)
                return self.picture(data[mime]["path"], alt)
        if "application/json" in data:
            value = json.dumps(json.loads(self.content(data["application/json"])), indent=2, ensure_ascii=False)
            return f'<pre class="code" tabindex="0"><code>{highlighted(value, "json")}</code></pre>'
        if set(data) == {"text/plain"}:
            return f'<pre class="result" tabindex="0">{ansi_to_html(self.content(data["text/plain"]))}</pre>'
        return self.problem(f"the local template cannot show an output of type {', '.join(sorted(data))}")

    # The page around them

    def navigation(self) -> str:
        lines, is_open = [], False
        for entry in self.site.entries[1:]:  # the first is the landing page: the site's title links there
            if entry.slug is None:
                lines.append("</ol>" * is_open + f'<p class="part">{escape(entry.title)}</p>')
                is_open = False
                continue
            if not is_open:
                lines.append("<ol>")
                is_open = True
            here = entry.slug == self.slug
            current = ' aria-current="page"' if here else ""
            lines.append(f'<li><a href="{self.root}{path_of(entry.slug)}"{current}>{escape(entry.title)}</a>')
            if here and self.sections:
                items = (f'<li><a href="#{escape(i)}">{escape(text)}</a></li>' for i, text in self.sections)
                lines.append(f'<ol class="sections">{"".join(items)}</ol>')
            lines.append("</li>")
        return "".join(lines) + "</ol>" * is_open

    def neighbours(self) -> str:
        pages = self.site.pages
        here = [p.slug for p in pages].index(self.slug)
        links = []
        for rel, words, i in (("prev", "Previous", here - 1), ("next", "Next", here + 1)):
            if 0 <= i < len(pages):
                target = self.root + path_of(pages[i].slug)
                links.append(
                    f'<a rel="{rel}" href="{target}"><small>{words}</small><span>{escape(pages[i].title)}</span></a>'
                )
        return f'<nav class="neighbours" aria-label="Previous and next page">{"".join(links)}</nav>' if links else ""

    def description(self) -> str:
        """The page's own description, or its first paragraph, cut at a sentence."""
        given = self.page["frontmatter"].get("description")
        if given or self.slug == "index":
            return given or self.site.description
        queue = list(self.page["mdast"]["children"])
        while queue:
            node = queue.pop(0)
            if node["type"] == "paragraph":
                text = " ".join(plain_text(node).split())
                if len(text) > 200:
                    text = text[:200].rpartition(". " if ". " in text[:200] else " ")[0] + "."
                return text
            if node["type"] in ("root", "block"):
                queue = node.get("children", []) + queue
        return self.site.description

    def html(self) -> str:
        body = self.children(self.page["mdast"])
        notes = "".join(
            f'<li id="fn-{escape(n["enumerator"])}">{self.children(n)}'
            f'<a href="#fnref-{escape(n["enumerator"])}" aria-label="Back to the text">↩</a></li>'
            for n in self.footnotes
        )
        title = self.page["frontmatter"].get("title", "")
        heading = "" if self.page["frontmatter"].get("content_includes_title") else f"<h1>{escape(title)}</h1>"
        exports = [e for e in self.page["frontmatter"].get("exports", ()) if e["format"] == "ipynb"]
        download = "".join(
            f'<p class="download"><a href="{self.href(e["url"])}" download="{escape(e["filename"])}">'
            f"Download {escape(e['filename'])}</a></p>"
            for e in exports
        )
        full_title = self.site.title if self.slug == "index" else f"{title} · {self.site.title}"
        nav = self.navigation()
        current = ' aria-current="page"' * (self.slug == self.site.entries[0].slug)
        home = f'<a class="home" href="{self.root}index.html"{current}>{escape(self.site.title)}</a>'
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(full_title)}</title>
<meta name="description" content="{escape(self.description())}">
<link rel="icon" href="data:image/svg+xml,{quote(ICON)}">
<link rel="stylesheet" href="{self.root}style.css">
</head>
<body>
<a class="skip" href="#content">Skip to the text</a>
<header class="top">
{home}
<details><summary>Chapters</summary><nav aria-label="Chapters">{nav}</nav></details>
</header>
<div class="columns">
<nav class="side" aria-label="Chapters">
{home}
{nav}
</nav>
<main id="content" tabindex="-1">
<article>
{heading}{download}
{body}
{f'<section class="footnotes" aria-label="Footnotes"><ol>{notes}</ol></section>' if notes else ""}
</article>
{self.neighbours()}
</main>
</div>
</body>
</html>
"""


def _stream(node: Node) -> str:
    """Which stream an output is text of, "stdout" or "stderr"; "" if of none."""
    data = node.get("jupyter_data", {})
    return data["name"] if data.get("output_type") == "stream" else ""


def _style(node: Node) -> Node:
    """mystmd gives a style as a dictionary with JavaScript's names."""
    style = node.get("style")
    return style if isinstance(style, dict) else {}


def fold(title: str, body: str) -> str:
    """A cell, or a part of it, that is shown on demand."""
    return f'<details class="fold"><summary>{escape(title)}</summary>{body}</details>'
