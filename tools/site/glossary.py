"""A Sphinx extension: a page links the glossary's words where it uses them first.

The meaning is the link's title.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

GLOSSARY = "notebooks/glossary"
_NO_TEXT_OF_A_PAGE = (
    nodes.reference,
    nodes.literal,
    nodes.literal_block,
    nodes.title,
    nodes.math,
    nodes.raw,
    nodes.thead,
    nodes.strong,
)


class Glossary:
    """The glossary's words, and what each means."""

    def __init__(self) -> None:
        self.meanings: dict[str, tuple[str, str]] = {}  # of a word, the entry's title and text
        self.words: re.Pattern[str] | None = None

    def read(self, app: Sphinx) -> None:
        """Read the glossary: second-level headings, each with words for a title and a paragraph."""
        file = Path(app.srcdir) / f"{GLOSSARY}.md"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        entries = re.findall(r"^## (.+)\n\n((?:.+\n?)+)", text, re.M)
        if len(entries) < len(re.findall("^## ", text, re.M)):
            logger.warning("%s: a word without a meaning", GLOSSARY)
        for title, paragraph in entries:
            meaning = re.sub(r"\[(.+?)\]\(.*?\)|[`*]", r"\1", " ".join(paragraph.split()))
            for word in title.split(", "):
                self.meanings[word.lower()] = (title, meaning)
        words = "|".join(sorted(map(re.escape, self.meanings), key=len, reverse=True))
        if words:
            self.words = re.compile(rf"(?<![\w./-])({words})(?:e?s)?(?![\w/-])", re.I)

    def link(self, app: Sphinx, document: nodes.document, name: str) -> None:
        """Link the first use of each word in the page's paragraphs."""
        if self.words is None or name in (GLOSSARY, app.config.root_doc, "CONTRIBUTING"):
            return
        to_glossary = app.builder.get_relative_uri(name, GLOSSARY)
        seen: set[str] = set()
        for text in list(_texts(document)):
            self._link_in(text, to_glossary, seen)

    def _link_in(self, text: nodes.Text, to_glossary: str, seen: set[str]) -> None:
        assert self.words is not None and text.parent is not None
        made: list[nodes.Node] = []
        end = 0
        for match in self.words.finditer(text):
            title, meaning = self.meanings[match[1].lower()]
            if title in seen:
                continue
            seen.add(title)
            link = nodes.reference("", match[0], internal=True, classes=["term"])
            link["refuri"] = f"{to_glossary}#{nodes.make_id(title)}"
            link["reftitle"] = meaning
            made += [nodes.Text(text[end : match.start()]), link]
            end = match.end()
        if made:
            text.parent.replace(text, [*made, nodes.Text(text[end:])])


def _texts(document: nodes.document) -> Iterator[nodes.Text]:
    """Yield the texts of paragraphs that are no code, no formula, no link and no title."""
    for paragraph in document.findall(nodes.paragraph):
        for text in paragraph.findall(nodes.Text):
            if text.parent is None:  # the theme has shortened a link, and left its text an orphan
                continue
            if not any(isinstance(up, _NO_TEXT_OF_A_PAGE) for up in _ancestors(text)):
                yield text


def _ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    glossary = Glossary()
    app.connect("builder-inited", glossary.read)
    app.connect("doctree-resolved", glossary.link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
