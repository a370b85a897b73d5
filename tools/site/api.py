"""A Sphinx extension: a page with every public name of fp8lens, from its signature and docstring.

It is written while the site is built. Each name has a heading, and with it an anchor. The examples
are run by tests/fp8lens/test_examples.py.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import fp8lens
from tools.site.rules import words

PAGE = "api/index"
BEFORE = "fp8lens/README.md"  # what the page stands behind in the contents
_WIDEST = 80  # columns of a signature on one line
# Who gives these: nobody makes one by calling the class.
_MADE_BY = {
    "HloModule": "parse_hlo_module",
    "HloParseError": "parse_hlo_module",
    "Inspection": "inspect",
}
_MODULES = re.compile(r"\b(?:collections\.abc|fp8lens(?:\.\w+)+|jax(?:\.\w+)+|typing)\.(?=\w)")


def api_page() -> str:
    """The page as Markdown."""
    parts = [
        "# The public names",
        "What `fp8lens` gives to a program. Everything else in it may change between versions. "
        "Each example is run by a test.",
        ", ".join(f"[`{name}`](#{name})" for name in fp8lens.__all__),
    ]
    for name in fp8lens.__all__:
        parts += [f"## {name}", *_entry(name, getattr(fp8lens, name))]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    """What stands below a name's heading."""
    is_class = inspect.isclass(value)
    of = value if callable(value) else type(value)  # TARGETS: a dict has its class's docstring
    yield _code(_signature(name, value))
    if name in _MADE_BY:
        yield f"[`{_MADE_BY[name]}`](#{_MADE_BY[name]}) gives it: do not call the class."
    text, _, example = (inspect.getdoc(of) or "").partition("\n\nExample:\n\n")
    yield from _paragraphs(text)
    if is_class:
        members = [*_members(value)]
        if members:
            yield "\n".join(["| | |", "|---|---|", *members])
    yield _code(textwrap.dedent(example), "pycon")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield words(" ".join(paragraph.split()))


def _code(text: str, language: str = "python") -> str:
    return f"````{{code-block}} {language}\n\n{text.strip()}\n````"


def _signature(name: str, value: Any) -> str:
    """How a name is called, a parameter on each line where one line is too long."""
    if not callable(value):
        return f"{name}: Mapping[str, Target]"
    keyword = "class" if inspect.isclass(value) else "def"
    if name in _MADE_BY:
        return f"{keyword} {name}"
    signature = inspect.signature(value)
    found = f"{keyword} {name}{_short(signature)}"
    if len(found) <= _WIDEST:
        return found
    lines = [f"    {_short(parameter)}," for parameter in _with_star(signature)]
    returns = f" -> {_short(signature).rpartition(' -> ')[2]}" if keyword == "def" else ""
    return "\n".join([f"{keyword} {name}(", *lines, f"){returns}"])


def _with_star(signature: inspect.Signature) -> Iterator[object]:
    """The parameters as they are written: "*" where those begin that have to be named."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    needs_star = inspect.Parameter.VAR_POSITIONAL not in kinds
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and needs_star:
            yield "*"
            needs_star = False
        yield parameter


def _short(written: object) -> str:
    """A signature or a parameter, its types without their modules, and no address of an object."""
    return re.sub(r"<factory>", "...", _MODULES.sub("", str(written)))


def _members(value: type) -> Iterator[str]:
    """A row of a table for each public member that has a docstring."""
    for name, member in vars(value).items():
        about = inspect.getdoc(member)
        if name.startswith("_") or not about or not _is_documented(member):
            continue
        called = "()" if inspect.isfunction(member) else ""
        text = words(" ".join(about.split())).replace("|", r"\|")
        yield f"| `{name}{called}` | {text} |"


def _is_documented(member: Any) -> bool:
    """Whether a docstring is the member's own, and not that of its value's type."""
    return inspect.isfunction(member) or hasattr(member, "fget") or hasattr(member, "attrname")


def _write_page(app: Sphinx, config: Any) -> None:
    """Write the page, where the contents have what it stands behind."""
    for part in config.contents:
        listed = part.get("children", [])
        files = [page["file"] for page in listed]
        if BEFORE in files:
            file = Path(app.srcdir, f"{PAGE}.md")
            file.parent.mkdir()
            file.write_text(api_page(), encoding="utf-8")
            config.include_patterns.append(f"{PAGE}.md")
            listed.insert(files.index(BEFORE) + 1, {"file": f"{PAGE}.md"})


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("config-inited", _write_page, priority=600)  # the contents have been read
    return {"parallel_read_safe": True, "parallel_write_safe": True}
