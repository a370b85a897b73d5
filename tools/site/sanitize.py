"""Write raw HTML and pictures anew: a page holds only what was parsed, and only what is on a list.

nh3, a sanitizer, parses a piece as browsers do, keeps listed elements, attributes, style properties
and addresses, and serializes what it kept. Only that text reaches a page, so a piece cannot leave
anything open. This module compares a piece before and after only to tell its author what was
dropped: no safety rests on that.
"""

import re
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from xml.etree import ElementTree

import nh3

# Elements, each with its attributes ---------------------------------------------------------------

# In the text of a chapter. None may have a style or a class: the theme has classes that cover a
# page.
_WORDS = {
    "a": "href title",
    "abbr": "title",
    **dict.fromkeys(
        "b blockquote br caption code dd del div dl dt em figcaption figure hr i ins kbd p pre q s "
        "samp small span strong sub summary sup table tbody tfoot thead tr u ul var wbr".split(),
        "",
    ),
    "details": "open",
    "img": "src alt title width height",
    "li": "value",
    "ol": "start type",
    "td": "colspan rowspan align valign",
    "th": "colspan rowspan align valign scope",
}
# In what a cell shows: pictures too. The outermost <svg> may not have a transform, which would move
# it over the page.
_PAINT = (
    "style fill fill-opacity fill-rule stroke stroke-width stroke-opacity stroke-dasharray "
    "stroke-linecap stroke-linejoin opacity clip-path text-anchor dominant-baseline font-size "
    "font-family font-weight font-style"
)
_PICTURES = {
    "svg": "xmlns width height viewBox preserveAspectRatio role aria-label tabindex",
    "circle": "id transform cx cy r",
    "clipPath": "id",
    "defs": "",
    "desc": "",
    "ellipse": "id transform cx cy rx ry",
    "g": "id transform",
    "image": "id transform href x y width height preserveAspectRatio",
    "line": "id transform x1 x2 y1 y2",
    "path": "id transform d",
    "pattern": "id patternUnits x y width height viewBox",
    "polygon": "id transform points",
    "polyline": "id transform points",
    "rect": "id transform x y width height rx ry",
    "text": "id transform x y dx dy",
    "tspan": "x y dx dy",
    "use": "id transform href x y width height",
}
# None of these can lay an element over another, or take it out of its place.
_PROPERTIES = frozenset(
    "background background-color border border-collapse color fill fill-opacity fill-rule "
    "font-family font-size font-style font-weight height line-height max-width min-width opacity "
    "padding padding-left padding-right stroke stroke-dasharray stroke-dashoffset stroke-linecap "
    "stroke-linejoin stroke-opacity stroke-width text-align text-anchor vertical-align white-space "
    "width".split()
)
_VOID = frozenset("br hr img wbr".split())

# Values of attributes -----------------------------------------------------------------------------

_TEXTS = frozenset("alt aria-label title".split())
_PIXELS = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[\w+/=\s]*", re.ASCII)
_ADDRESSES = {
    ("a", "href"): re.compile(r"(https?://|mailto:)[^\s\x00-\x1f]+"),
    ("img", "src"): _PIXELS,
    ("image", "href"): _PIXELS,
    ("use", "href"): re.compile(r"#[\w.-]+"),
    ("svg", "xmlns"): re.compile(re.escape("http://www.w3.org/2000/svg")),
    ("svg", "role"): re.compile("img"),
}
# Words, numbers, colours and calls of what can load nothing. A backslash could spell any of the
# calls that can.
_CALLS = r"(?:rgba?|var|matrix|translate|scale|rotate|skewX|skewY)\("
_OWN = r"url\(([\"']?)#[\w.-]+\1\)"  # what the same picture defines
_OTHER = re.compile(rf"(?:{_OWN}|{_CALLS}|\)|[\w\s#.,:;%+'\"-])*")

_SCHEMES = {"http", "https", "mailto", "data"}
# Where the text of a chapter stands between two pieces of raw HTML: a character that Unicode gives
# to nobody.
_MARK = "\ue000"
# What helpers.figures.plots puts under a figure that is a document by itself. On a page it would
# be the page's own style.
_PAPER = re.compile(r"<style>svg:root \{ background: #fff \}</style>")


def _value(element: str, name: str, value: str) -> str | None:
    """Return an attribute's value, or None where it may not have that value."""
    if _MARK in value:
        return None
    if name in _TEXTS:
        return value
    allowed = _ADDRESSES.get((element, name), _OTHER)
    return value if allowed.fullmatch(value) else None


def _written(html: str, words: bool, prefix: str = "") -> str:
    """Return what nh3 keeps of `html`, with `prefix` before every id and where one is named."""

    def attribute(element: str, name: str, value: str) -> str | None:
        kept = _value(element, name, value)
        if kept is None or not prefix or name in _TEXTS:
            return kept
        if name == "id":
            return prefix + kept
        if name == "href":
            return re.sub("^#", f"#{prefix}", kept)
        return re.sub(r"url\(([\"']?)#", rf"url(\1#{prefix}", kept)

    elements = {name: set(attributes.split()) for name, attributes in _WORDS.items()}
    if not words:
        for name in elements:
            elements[name].add("style")
        for name, attributes in _PICTURES.items():
            elements[name] = {*attributes.split(), *_PAINT.split()}
    return nh3.Cleaner(
        tags=set(elements),
        attributes=elements,
        attribute_filter=attribute,
        filter_style_properties=set(_PROPERTIES),
        url_schemes=_SCHEMES,
        link_rel=None,
    ).clean(html)


# What was dropped, for the author -----------------------------------------------------------------


_TEXT = "text"


class _Reader(HTMLParser):
    """What a piece consists of, each part in the words in which its author is told of it."""

    def __init__(self, html: str):
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.begins_pre = False
        self.undescribed = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tbody":  # a parser adds it to a table that has none
            return
        self.begins_pre = tag == "pre"
        self.undescribed |= tag == "img" and not dict(attributes).get("alt")
        self.found.append(f"<{tag}>")
        for name, value in attributes:
            if name == "style":
                properties = re.findall(r"(?:^|;)\s*([^\s:;]+)\s*:", value or "")
                self.found += [f"the style {key.lower()!r} of <{tag}>" for key in properties]
            else:
                self.found.append(f"{name}={(value or '')[:60]!r} of <{tag}>")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID and tag != "tbody":
            self.found.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self.begins_pre:
            data = data.removeprefix("\n")  # browsers do not show it
            self.begins_pre = False
        if data and self.found[-1:] != [_TEXT]:
            self.found.append(_TEXT)
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.found.append("a comment")

    def handle_decl(self, decl: str) -> None:
        self.found.append(f"<!{decl[:60]}>")

    def handle_pi(self, data: str) -> None:
        self.found.append(f"<?{data[:60]}>")

    def unknown_decl(self, data: str) -> None:
        self.handle_decl(data)


def _differences(given: str, written: str) -> list[str]:
    """Name what is in one text only; say that the order differs where that is all."""
    before, after = _Reader(given), _Reader(written)
    dropped = Counter(before.found) - Counter(after.found)
    added = Counter(after.found) - Counter(before.found)
    said = []
    for what in dropped:
        if what == _TEXT:
            continue
        if not what.startswith("</"):
            said.append(f"{what}, which no page may hold")
        elif what.replace("/", "", 1) not in dropped:
            said.append(f"{what}, which closes nothing")
    for what in added:
        if what.startswith("</"):
            said.append(f"{what.replace('/', '', 1)}, which is not closed")
    if not said and (before.found != after.found or before.text != after.text):
        said.append("text or tags which a browser would show in another order, or not at all")
    if after.undescribed:
        said.append("<img> without a description (alt)")
    return said


# For the site and for what looks at stored outputs ------------------------------------------------


def pieces(parts: Sequence[str], *, words: bool) -> tuple[list[str], list[str]]:
    """Write anew pieces of raw HTML that belong together, with a chapter's text between them.

    `words` says that they come from a chapter's text, not from an output. Returns the pieces, and
    what had to be dropped.
    """
    given = "".join(part + _MARK for part in parts)
    written = _written(given, words)
    wrong = _differences(given, written)
    found = written.split(_MARK)
    if len(found) != len(parts) + 1 or found[-1]:
        wrong.append("something that is left open at its end: a tag, an attribute or a comment")
        return [""] * len(parts), wrong
    if _written(written, words) != written:
        wrong.append("tags in each other that a browser would read in another way")
        return [""] * len(parts), wrong
    return found[:-1], wrong


def html(text: str) -> tuple[str, list[str]]:
    """Write an output's HTML anew. Returns it, and what had to be dropped."""
    (written,), wrong = pieces([text], words=False)
    return written, wrong


def svg(text: str, prefix: str = "") -> tuple[str, list[str]]:
    """Write a picture anew, as a part of a page, with `prefix` before its ids.

    Returns it, and what had to be dropped. It must be XML too, as JupyterLab reads it.
    """
    written, wrong = html(_PAPER.sub("", text, count=1))
    if not wrong:
        try:
            ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            wrong.append(f"a picture that cannot be read: {error}")
    if not re.match(r"\s*<svg[\s>]", written):
        wrong.append("no <svg> at its beginning")
    return _written(written, False, prefix), wrong
