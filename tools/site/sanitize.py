"""Write what a cell shows as HTML anew, with nh3, a sanitizer: a page holds only what is listed.

nh3 parses HTML as browsers do and keeps listed elements, attributes and style properties. That what
it kept loads nothing from elsewhere is up to the pages' Content-Security-Policy (policy.py).
"""

import re
from collections import Counter
from html.parser import HTMLParser

import nh3

# Elements, each with its attributes
_PAINT = (
    "style id transform fill fill-opacity fill-rule stroke stroke-width stroke-opacity "
    "stroke-dasharray stroke-linecap stroke-linejoin opacity clip-path text-anchor "
    "dominant-baseline font-size font-family font-weight font-style"
)
_ELEMENTS = {
    **dict.fromkeys(
        "b blockquote br caption code div em hr i kbd li ol p pre s samp small span strong sub "
        "summary sup table tbody td tfoot th thead tr u ul wbr".split(),
        "style",
    ),
    "a": "style href title",
    "abbr": "style title",
    "details": "style open",
    "img": "style src alt title width height",
    "td": "style colspan rowspan align valign",
    "th": "style colspan rowspan align valign scope",
    # A transform of the outermost <svg> would move it over the page.
    "svg": _PAINT.replace("transform ", "")
    + " xmlns width height viewBox preserveAspectRatio role aria-label tabindex",
    "circle": f"{_PAINT} cx cy r",
    "clipPath": _PAINT,
    "defs": "",
    "desc": "",
    "ellipse": f"{_PAINT} cx cy rx ry",
    "g": _PAINT,
    "image": f"{_PAINT} href x y width height preserveAspectRatio",
    "line": f"{_PAINT} x1 x2 y1 y2",
    "path": f"{_PAINT} d",
    "pattern": f"{_PAINT} patternUnits x y width height viewBox",
    "polygon": f"{_PAINT} points",
    "polyline": f"{_PAINT} points",
    "rect": f"{_PAINT} x y width height rx ry",
    "text": f"{_PAINT} x y dx dy",
    "tspan": f"{_PAINT} x y dx dy",
    "use": f"{_PAINT} href x y width height",
}
# None of these can lay an element over another, or take it out of its place.
_PROPERTIES = (
    "background background-color border border-collapse color fill fill-opacity fill-rule "
    "font-family font-size font-style font-weight height line-height max-width min-width opacity "
    "padding padding-left padding-right stroke stroke-dasharray stroke-dashoffset stroke-linecap "
    "stroke-linejoin stroke-opacity stroke-width text-align text-anchor vertical-align white-space "
    "width"
)
_CLEANER = nh3.Cleaner(
    tags=set(_ELEMENTS),
    attributes={element: set(names.split()) for element, names in _ELEMENTS.items()},
    filter_style_properties=set(_PROPERTIES.split()),
    url_schemes={"http", "https", "mailto", "data"},
    link_rel=None,
)
# What helpers.figures.plots puts under a figure that is a document by itself. On a page it would
# be the page's own style.
_PAPER = "<style>svg:root { background: #fff }</style>"


class _Names(HTMLParser):
    """Counts the elements, attributes and style properties of a text."""

    def __init__(self, text: str):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found[f"<{tag}>"] += 1
        for name, value in attributes:
            self.found[f"{name} of <{tag}>"] += 1
            if name == "style":
                properties = re.findall(r"(?:^|;)\s*([\w-]+)\s*:", value or "")
                self.found.update(f"the style {property} of <{tag}>" for property in properties)


def html(text: str) -> tuple[str, list[str]]:
    """Write an output's HTML anew. Returns it, and the names of what was dropped."""
    written = _CLEANER.clean(text)
    return written, sorted(_Names(text).found - _Names(written).found)


def svg(text: str, prefix: str = "") -> tuple[str, list[str]]:
    """Write a picture anew, as a part of a page, with `prefix` before its ids.

    Returns it, and the names of what was dropped.
    """
    written, dropped = html(text.replace(_PAPER, ""))
    return re.sub(r"( id=\"|href=\"#|url\(#)", rf"\1{prefix}", written), dropped
