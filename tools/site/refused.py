"""What raw HTML and pictures may hold on a page: a list of what is allowed. Whatever is not on it is refused, with its
name; it would load from elsewhere, run, or break the page around it, or nobody has needed it yet."""

import re
from html.parser import HTMLParser
from urllib.parse import urlsplit
from xml.etree import ElementTree

_VOID = frozenset("br col hr img wbr".split())
_TAGS = _VOID | frozenset(
    "a abbr b blockquote caption code colgroup dd del details div dl dt em figcaption figure h2 h3 h4 h5 h6 i ins kbd "
    "li mark ol p pre q s samp small span strong style sub summary sup table tbody td tfoot th thead tr u ul var "
    "svg circle clippath defs desc ellipse g image line path pattern polygon polyline rect text title tspan "
    "use".split()
)
_OWN = {
    "use": "#",
    "image": "data:image/png;base64,",
}  # what of the page itself, or in itself, may be drawn
_ATTRIBUTES = frozenset(
    "align alt border class colspan dir height href id lang name open role rowspan scope scoped span src start style "
    "tabindex title type valign width xmlns viewbox preserveaspectratio d points x y x1 x2 y1 y2 dx dy cx cy r rx ry "
    "transform fill fill-opacity fill-rule stroke stroke-width stroke-opacity stroke-dasharray stroke-linecap "
    "stroke-linejoin opacity clip-path patternunits text-anchor dominant-baseline font-size font-family font-weight "
    "font-style".split()
)
_FETCHES = re.compile(r"url\s*\((?!\s*['\"]?#)|image-set|image\s*\(|@|\\|expression", re.I)
_UNCLEAR = re.compile(r"<[!?]|--!?>|\]\]>|</[^a-z]|<[^\s\w/>]*\x00", re.I)


def _address(value: str) -> str:
    """The scheme that a browser sees: it drops white space and control characters."""
    return urlsplit(re.sub(r"[\x00-\x20]", "", value)).scheme.lower()


class _Reader(HTMLParser):
    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.open: list[str] = []
        if found := _UNCLEAR.search(
            html
        ):  # browsers read comments and the like in other ways than Python does
            self.wrong.append(f"{found[0]!r}, a comment or a declaration")
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag not in _TAGS:
            self.wrong.append(f"<{tag}>, which is not among the tags of a page")
        if tag == "img" and not dict(attributes).get("alt"):
            self.wrong.append("<img> without a description (alt)")
        for name, value in attributes:
            value = value or ""
            said = f"{name}={value[:60]!r}"
            if name not in _ATTRIBUTES and not re.fullmatch(r"(aria|data)-[a-z-]+", name):
                self.wrong.append(f"{said}, which is not among the attributes of a page")
            elif (
                name == "href"
                and not value.startswith(_OWN.get(tag, "\0"))
                and (tag != "a" or _address(value) not in ("", "http", "https", "mailto"))
            ):
                self.wrong.append(f"{said}, which is no address to go to")
            elif name == "src" and (urlsplit(value).netloc or _address(value) not in ("", "data")):
                self.wrong.append(f"{said}, which would be loaded from elsewhere")
            elif name not in ("href", "src", "alt", "title", "aria-label") and _FETCHES.search(
                value
            ):
                self.wrong.append(f"{said}, which would be loaded from elsewhere")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        elif tag not in _VOID:
            self.wrong.append(
                f"</{tag}>, which closes {f'<{self.open[-1]}>' if self.open else 'nothing'}"
            )

    def handle_data(self, data: str) -> None:
        if "style" in self.open and (_FETCHES.search(data) or "<" in data):
            self.wrong.append("a style that would load from elsewhere")


def in_html(html: str) -> list[str]:
    """What a whole piece of HTML has that no page may have."""
    return [
        *(reader := _Reader(html)).wrong,
        *(f"<{tag}>, which is not closed" for tag in reader.open[-1:]),
    ]


def in_svg(svg: str) -> list[str]:
    """What a picture has that would run, or load from elsewhere, where somebody opens it by itself."""
    if found := re.search(r"<\?xml-stylesheet|<!ENTITY", svg, re.I):
        return [f"{found[0]!r} in a picture"]
    try:
        elements = ElementTree.fromstring(svg).iter()
    except ElementTree.ParseError as error:
        return [f"a picture that cannot be read: {error}"]
    wrong = []
    for element in elements:
        tag = element.tag.rpartition("}")[2]
        if tag.lower() in ("script", "foreignobject", "iframe", "handler", "set", "animate"):
            wrong.append(f"<{tag}> in a picture")
        if tag == "style" and _FETCHES.search(
            re.sub(r"@(charset|font-face)?(?=\s*$)", "", element.text or "")
        ):
            wrong.append("a style in a picture that would load from elsewhere")
        for name, value in element.attrib.items():
            name = name.rpartition("}")[2].lower()
            if (
                name.startswith("on")
                or name in ("href", "src")
                and not value.startswith(("#", "data:image/"))
                or (re.search(r"url\s*\((?!\s*['\"]?#)", value, re.I))
            ):
                wrong.append(f"{name}={value[:60]!r} in a picture")
    return wrong
