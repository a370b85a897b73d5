"""A Sphinx extension: a page links the glossary's words where it uses them first.

The meaning is the link's title.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

GLOSSARY = "notebooks/glossary"
_NOT_LINKED = (nodes.reference, nodes.literal, nodes.math, nodes.strong, nodes.thead)


def _read(app: Sphinx) -> None:
    """Read the glossary: second-level headings, each with words for a title and a paragraph."""
    file = Path(app.srcdir) / f"{GLOSSARY}.md"
    text = (
        file.read_text(encoding="utf-8") if f"{GLOSSARY}.md" in app.config.include_patterns else ""
    )
    meanings = {}
    for title, paragraph in re.findall(r"^## (.+)\n\n((?:.+\n?)+)", text, re.M):
        meaning = re.sub(r"\[(.+?)\]\(.*?\)|[`*]", r"\1", " ".join(paragraph.split()))
        for word in title.split(", "):
            meanings[word.lower()] = (title, meaning)
    app.config.meanings = meanings


def _link(app: Sphinx, document: nodes.document, name: str) -> None:
    """Link the first use of each word in the page's paragraphs."""
    meanings = app.config.meanings
    if not meanings or name in (GLOSSARY, app.config.root_doc, "CONTRIBUTING"):
        return
    words = "|".join(sorted(map(re.escape, meanings), key=len, reverse=True))
    word = re.compile(rf"(?<![\w./-])({words})(?:e?s)?(?![\w/-])", re.I)
    glossary = app.builder.get_relative_uri(name, GLOSSARY)
    seen: set[str] = set()
    for paragraph in document.findall(nodes.paragraph):
        for text in list(paragraph.findall(nodes.Text)):
            if text.parent is None or _is_not_linked(text):
                continue
            made: list[nodes.Node] = []
            end = 0
            for match in word.finditer(text):
                title, meaning = meanings[match[1].lower()]
                if title in seen:
                    continue
                seen.add(title)
                address = f"{glossary}#{nodes.make_id(title)}"
                link = nodes.reference("", match[0], internal=True, refuri=address)
                link["reftitle"] = meaning
                link["classes"] = ["term"]
                made += [nodes.Text(text[end : match.start()]), link]
                end = match.end()
            text.parent.replace(text, [*made, nodes.Text(text[end:])])


def _is_not_linked(text: nodes.Text) -> bool:
    node: nodes.Element | None = text.parent
    while node is not None and not isinstance(node, _NOT_LINKED):
        node = node.parent
    return node is not None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("meanings", {}, "")
    app.connect("builder-inited", _read)
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
