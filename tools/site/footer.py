"""A Sphinx extension: what a page says of itself at its foot.

The version of fp8lens, the day on which the page changed last, where changes are listed and how to
cite; where the repository has an address, the page's source, and where to report an issue.
`tools/site/templates/page-footer.html` shows it.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from sphinx.application import Sphinx

from fp8lens.rules.rule import RULES
from tools.site import api, cite, repository, rules

CHANGELOG = "CHANGELOG"


def file_of(app: Sphinx, name: str) -> str:
    """The file of the project from which a page is made, or the folder of such files; empty for
    the page that searches.
    """
    if name == app.config.root_doc:
        return app.config.contents[0]["file"]
    if name == api.PAGE:
        return "fp8lens"
    if name == rules.INDEX:
        return "fp8lens/rules"
    if rules.is_generated(name):
        return f"fp8lens/rules/{RULES[PurePosixPath(name).name].family}.py"
    if name == cite.PAGE:
        return cite.FILE
    if name not in app.env.found_docs:
        return ""
    return Path(app.env.doc2path(name, base=False)).as_posix()


def changed(file: str, dates: dict[str, str]) -> str:
    """The day on which a file, or one in a folder, changed last; empty where that is not known."""
    found = [day for name, day in dates.items() if name == file or name.startswith(f"{file}/")]
    return max(found, default="")


def _describe(app: Sphinx, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    file = file_of(app, name)
    address = app.config.repository
    pages = ((CHANGELOG, "Changes between versions"), (cite.PAGE, "How to cite"))
    context["page_version"] = repository.facts(Path(app.srcdir)).get("version", "")
    context["page_changed"] = changed(file, app.config.dates)
    context["page_links"] = [
        (context["pathto"](page), text) for page, text in pages if page in app.env.found_docs
    ]
    if address and file:
        context["page_links"] += [
            (repository.source(address, file), "Source of this page"),
            (repository.issue(address, file), "Report an issue"),
        ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("dates", {}, "html")
    app.connect("html-page-context", _describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
