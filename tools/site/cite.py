"""A Sphinx extension: a page that says how to cite, from CITATION.cff."""

from pathlib import Path
from typing import Any

import yaml
from sphinx.application import Sphinx

PAGE = "cite"
FILE = "CITATION.cff"
BEFORE = "CHANGELOG.md"  # what the page stands behind in the contents
_KEY = "fp8lens"


def cite_page(cff: str, address: str) -> str:
    """The page as Markdown. `address`: the repository's, or nothing."""
    facts = yaml.safe_load(cff)
    authors = [author["name"] for author in facts["authors"]]
    fields = {
        "author": " and ".join(f"{{{name}}}" for name in authors),
        "title": f"{{{facts['title']}}}",
        "version": facts["version"],
    }
    if "date-released" in facts:
        fields["year"] = str(facts["date-released"])[:4]
    if address:
        fields["url"] = address
    text = f"{', '.join(authors)}. *{facts['title']}*. Version {facts['version']}."
    if address:
        # The theme shortens a link that shows its whole address.
        text += f" [{address.removeprefix('https://')}]({address})"
    entry = "\n".join(f"  {name} = {{{value}}}," for name, value in fields.items())
    parts = [
        "# How to cite",
        text,
        "For BibTeX:",
        f"````{{code-block}} bibtex\n\n@software{{{_KEY},\n{entry}\n}}\n````",
        f"The repository's file `{FILE}` says the same to programs.",
    ]
    return "\n\n".join(parts) + "\n"


def _write_page(app: Sphinx, config: Any) -> None:
    """Write the page, where the contents have what it stands behind."""
    file = Path(app.srcdir, FILE)
    for part in config.contents:
        listed = part.get("children", [])
        files = [page["file"] for page in listed]
        if BEFORE in files and file.is_file():
            text = cite_page(file.read_text(encoding="utf-8"), config.repository)
            Path(app.srcdir, f"{PAGE}.md").write_text(text, encoding="utf-8")
            config.include_patterns.append(f"{PAGE}.md")
            listed.insert(files.index(BEFORE) + 1, {"file": f"{PAGE}.md"})


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("config-inited", _write_page, priority=600)  # the contents have been read
    return {"parallel_read_safe": True, "parallel_write_safe": True}
