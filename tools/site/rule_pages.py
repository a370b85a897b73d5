"""A Sphinx extension: a page for each rule of fp8lens, an index of them, and links to them.

They are written while the site is built, from the rules' own pages and from what was recorded of
their programs. Wherever a page has a rule's name as code, that is a link.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from fp8lens.rules.find import every_name
from fp8lens.rules.page import ARGUMENTS, PRELUDE, Page, Program
from fp8lens.rules.rule import RULES, Rule
from helpers import rule_index
from helpers.records.results import load_rules

FOLDER = "rules"
INDEX = f"{FOLDER}/index"
SHARED = "What the programs share"
# What looks like code in a rule's texts: in backticks, a call, a name with its value, or a name
# with a dot or an underscore.
_DOTTED = r"[A-Za-z]\w*(?:\.\w+)*"
_CALL = rf"{_DOTTED}(?:\((?:[^()]|\([^()]*\))*\)(?:\.\w+)*)+"
_VALUE = rf"{_DOTTED}=(?:\{{[^}}]*\}}|'[^']*'|-*\w[\w.=-]*\w|\w)"
_NAME = r"(?>[A-Za-z]\w*(?:\.[A-Za-z_]\w*)+|[A-Za-z]+_\w+)"
_CODE = re.compile(rf"`[^`]+`|(?<![\w./{{-])(?:{_CALL}|{_VALUE}|{_NAME})(?![\w/])")
_TAGGED = re.compile(r"<code>([a-z0-9-]+)</code>")

# Text ---------------------------------------------------------------------------------------------


def words(text: str) -> str:
    """Text of a rule as Markdown: nothing in it is markup but what looks like code, which is code,
    and names that are rules'.
    """
    said = []
    end = 0
    for code in _CODE.finditer(text):
        said += [_escaped(text[end : code.start()]), f"`{code[0].strip('`')}`"]
        end = code.end()
    return "".join([*said, _escaped(text[end:])])


def _escaped(text: str) -> str:
    hyphenated = "|".join(name for name in every_name() if "-" in name)
    escaped = re.sub(r"([\\*_<>$\[\]{}#|~`])", r"\\\1", text)
    return re.sub(rf"(?<![\w-])({hyphenated})(?![\w-])", r"`\1`", escaped)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows])


def _title(lost: str | None) -> str:
    """The title of the index's section."""
    meaning = rule_index.LOSSES[lost]
    return f"{lost}: {meaning}" if lost else meaning.capitalize()


def _link_to(title: str) -> str:
    return f"[{title}](index.md#{title.replace(' ', '-')})"


# A rule's page ------------------------------------------------------------------------------------


def _program(title: str, program: Program, other: Program | None) -> str:
    """A section with a program; lines that the other one has not are in another colour."""
    theirs = other.code.splitlines() if other else program.code.splitlines()
    differ = difflib.ndiff(theirs, program.code.splitlines())
    mine = [line for line in differ if line[0] in " +"]
    changed = [str(number) for number, line in enumerate(mine, 1) if line[0] == "+"]
    emphasized = f":emphasize-lines: {','.join(changed)}\n" if changed else ""
    options = f"Compiled with `{program.options}`:\n\n" if program.options else ""
    return f"## {title}\n\n{options}````{{code-block}} python\n{emphasized}\n{program.code}\n````"


def _recorded_of(name: str, recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was recorded of a rule: by chip and release, oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for version, entry in recorded.items():
        for chip, pair in entry["rows"].get(name, {"chips": {}})["chips"].items():
            found.setdefault(chip, {})[version] = pair
    return found


def _figures(name: str, pairs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each chip, and for each run of releases that make the same of the programs."""
    rows = []
    for chip, by_release in pairs.items():
        for pair, group in itertools.groupby(by_release, key=by_release.__getitem__):
            releases = list(group)
            versions = " to ".join(dict.fromkeys([releases[0], releases[-1]]))
            of = (rule_index.types, rule_index.kernels, rule_index.nbytes)
            made = [rule_index.change(pair, one) for one in of]
            holds = "yes" if rule_index.holds(name, pair) else "no"
            rows.append((f"{chip}, JAX {versions}", *made, holds))
    return _table(("compiled for", "type", "kernels", "bytes", "the rule holds"), rows)


def _programs(page: Page, pairs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The sections with programs, and with what becomes of them."""
    if not page.loses:
        return
    yield _program("Loses it", page.loses, page.keeps)
    if page.keeps:
        yield _program("Keeps it", page.keeps, page.loses)
    shapes = page.loses.arguments | (page.keeps.arguments if page.keeps else {})
    said = ", ".join(f"`{name}` is {words(shape)}" for name, shape in shapes.items())
    yield f"{said}. {_link_to(SHARED)}."
    if pairs:
        of = "Of the first program, then of the fixed one" if page.keeps else "Of this program"
        yield (
            f"## Kernels and bytes\n\n{of}: what the matmuls multiply, how many kernels run, and "
            "how many bytes they read and write. The rule holds if the first program breaks it, "
            "and the fixed one does not."
        )
        yield _figures(page.name, pairs)


def _sentences(page: Page, pairs: Mapping[str, Mapping[str, Any]]) -> tuple[str, str, str]:
    """The reason and the fix that the newest release gives for the first program, and a sentence
    that says so; those of the rule, with {names} in them, where it has no program.
    """
    for by_release in pairs.values():
        *_, newest = by_release.values()
        if page.loses and (says := newest["loses"].get("says")):
            note = "Reason and fix are those of the first program below."
            return says[0]["reason"], says[0]["fix"], note
    has_names = "{" in page.reason + page.fix
    note = "A report fills in what stands in braces." if has_names else ""
    return page.reason, page.fix, note


def rule_page(rule: Rule, recorded: Mapping[str, Any]) -> str:
    """A rule's page as Markdown."""
    page = rule.page
    pairs = _recorded_of(rule.name, recorded)
    reason, fix, note = _sentences(page, pairs)
    facts = [
        ("**Lost**", _link_to(_title(rule.lost))),
        ("**Reason**", words(reason)),
        ("**Fix**", words(fix)),
        ("**Source**", words(rule.authority)),
    ]
    parts = [
        f"# {rule.name}",
        words(page.summary),
        words(page.why),
        _table(("", ""), facts),
        note,
        *_programs(page, pairs),
        "[All rules](index.md)",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# The index ----------------------------------------------------------------------------------------


def index_page(recorded: Mapping[str, Any]) -> str:
    """The page that leads to those of all rules, as Markdown."""
    newest = list(recorded)[-1]
    parts = [
        "# The rules, one by one",
        "Each name leads to a page: what the rule means, why XLA does so, a program that breaks "
        "it, and the same one fixed. Kernels and bytes are those of the first program and of the "
        f"fixed one, on an H100 with JAX {newest}.",
    ]
    order = []
    for lost in rule_index.LOSSES:
        rows = rule_index.index(recorded, lost)
        order += [name for name, *_ in rows]
        cells = [(f"`{name}` <br> {words(said)}", *figures) for name, said, *figures in rows]
        parts += [f"## {_title(lost)}", _table(rule_index.Index.HEAD, cells)]
    parts += [
        f"## {SHARED}",
        "Every program has these names. A scale multiplies codes to dequantize them.",
        f"````{{code-block}} python\n\n{PRELUDE}````",
        "An argument has the shape of its name here, where the program gives it no other:",
        _table(("argument", "shape"), [(f"`{name}`", words(s)) for name, s in ARGUMENTS.items()]),
        "```{toctree}\n:hidden:\n\n" + "\n".join(order) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def write(source: Path) -> None:
    """Write the pages beside the chapters."""
    recorded = load_rules(source / "notebooks" / "results")
    (source / FOLDER).mkdir()
    for name in every_name():
        text = rule_page(RULES[name], recorded)
        (source / FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    (source / f"{INDEX}.md").write_text(index_page(recorded), encoding="utf-8")


# Links --------------------------------------------------------------------------------------------


def _link(app: Sphinx, document: nodes.document, name: str) -> None:
    """Link each rule's name that stands as code, in words and in what a cell shows as HTML."""
    if INDEX not in app.env.found_docs:
        return
    to = {rule: app.builder.get_relative_uri(name, f"{FOLDER}/{rule}") for rule in RULES}
    for literal in list(document.findall(nodes.literal)):
        rule = literal.astext()
        if rule in RULES and not isinstance(literal.parent, nodes.reference | nodes.title):
            link = nodes.reference("", "", internal=True, refuri=to[rule], classes=["rule"])
            link["reftitle"] = RULES[rule].page.summary
            literal.parent.replace(literal, link)
            link += literal

    def linked(found: re.Match[str]) -> str:
        if found[1] not in RULES:
            return found[0]
        return f'<a class="rule reference internal" href="{to[found[1]]}">{found[0]}</a>'

    for raw in document.findall(nodes.raw):
        if "html" in raw["format"].split():
            raw.children = [nodes.Text(_TAGGED.sub(linked, raw.astext()))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
