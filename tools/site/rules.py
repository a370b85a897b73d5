"""A Sphinx extension: a page for each rule of fp8lens, an index of them, and links to them.

They are written while the site is built, from the rules' docstrings and from what was recorded of
their programs. Wherever a page has a rule's name as code, that is a link.
"""

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from fp8lens.rules.page import ARGUMENTS, PRELUDE, Page, Program, every_name, explain
from fp8lens.rules.rule import RULES
from helpers import pages
from helpers.records.results import load_rules

FOLDER = "rules"
INDEX = f"{FOLDER}/index"
CHAPTER = "notebooks/D_rules.ipynb"  # what the index stands behind in the contents
SHARED = "What the programs share"
_CODE = re.compile(r"`(?P<quoted>[^`]+)`|(?<![\w./{-])(?>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?!/)")
# What goes on behind a name: a call, an attribute of that, or a value.
_MORE = re.compile(r"\(|\.[A-Za-z_]\w*|=(?:\{|'[^']*'|\"[^\"]*\"|[\w-](?:[\w.=-]*\w)?)")
_NAME = re.compile(r"<code>([a-z0-9-]+)</code>")

# Text ---------------------------------------------------------------------------------------------


def words(text: str) -> str:
    """Text of a rule as Markdown: nothing in it is markup but what looks like code, which is code,
    and names that are rules'.
    """
    hyphenated = "|".join(name for name in every_name() if "-" in name)
    said = []
    for is_code, part in _parts(text):
        if is_code:
            said.append(f"`{part}`")
            continue
        escaped = re.sub(r"([\\*_<>$\[\]{}#|~`])", r"\\\1", part)
        said.append(re.sub(rf"(?<![\w-])({hyphenated})(?![\w-])", r"`\1`", escaped))
    return "".join(said)


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Pieces of a text, and whether each is code: in backticks, a call, a name with a dot or an
    underscore, or a name with its value.
    """
    start = 0
    for found in _CODE.finditer(text):
        if found.start() < start:  # in the parentheses of the piece before
            continue
        end = found.end() if found["quoted"] else _end(text, found.end())
        if found["quoted"] or re.search(r"[._(=]", text[found.start() : end]):
            yield False, text[start : found.start()]
            yield True, found["quoted"] or text[found.start() : end]
            start = end
    yield False, text[start:]


def _end(text: str, end: int) -> int:
    """Where the code ends that begins with a name up to `end`: calls, attributes, a value."""
    while more := _MORE.match(text, end):
        end = more.end()
        if more[0][-1] in "({":
            depth = 1
            while depth and end < len(text):
                depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(text[end], 0)
                end += 1
            if depth:  # it is not closed: no call
                return more.start()
    return end


def _table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _and(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _code(program: Program, changed: list[int]) -> str:
    """A program, with the lines that the other one has not in another colour."""
    emphasized = f":emphasize-lines: {','.join(map(str, changed))}\n" if changed else ""
    options = f"Compiled with `{program.options}`:\n\n" if program.options else ""
    return f"{options}````{{code-block}} python\n{emphasized}\n{program.code}\n````"


def _differing(one: Program, other: Program) -> tuple[list[int], list[int]]:
    """The numbers of lines, from 1, that only one of the two has."""
    matcher = difflib.SequenceMatcher(None, one.code.splitlines(), other.code.splitlines())
    mine: list[int] = []
    others: list[int] = []
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind != "equal":
            mine += range(i1 + 1, i2 + 1)
            others += range(j1 + 1, j2 + 1)
    return mine, others


def _title(lost: str | None) -> str:
    """The title of the index's section."""
    meaning = pages.LOSSES[lost]
    return f"{lost}: {meaning}" if lost else meaning.capitalize()


def _anchor(title: str) -> str:
    """The anchor of the index's section, as tools.site.pages makes it."""
    return title.replace(" ", "-")


# A rule's page ------------------------------------------------------------------------------------


def _pairs(name: str, recorded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was recorded of a rule: by chip and release, oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for version, entry in recorded.items():
        for chip, pair in entry["rows"].get(name, {"chips": {}})["chips"].items():
            found.setdefault(chip, {})[version] = pair
    return found


def _figures(pairs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each chip, and for each run of releases that make the same of the programs."""
    rows = []
    for chip, by_release in pairs.items():
        for pair, group in itertools.groupby(by_release, key=lambda version: by_release[version]):
            releases = list(group)
            first, last = releases[0], releases[-1]
            versions = first if first == last else f"{first} to {last}"
            of = (pages.types, pages.kernels, pages.nbytes)
            rows.append((f"{chip}, JAX {versions}", *(pages.change(pair, one) for one in of)))
    return _table(rows, ("compiled for", "type", "kernels", "bytes"))


def _holds(name: str, pairs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """For which chips and releases the rule holds, and why not for the others."""
    chips: dict[tuple[str, ...], list[str]] = {}  # by the releases with which it holds
    for chip, by_release in pairs.items():
        releases = tuple(one for one, pair in by_release.items() if pages.holds(name, pair))
        chips.setdefault(releases, []).append(chip)
    for releases, which in chips.items():
        if releases:
            yield f"The rule holds on {_and(which)} with JAX {_and(list(releases))}."
    against: dict[tuple[str, str], list[str]] = {}  # by chip and reason: releases
    for chip, by_release in pairs.items():
        for release, pair in by_release.items():
            if not pages.holds(name, pair):
                against.setdefault((chip, _why_not(name, pair)), []).append(release)
    for (chip, why), without in against.items():
        yield f"It does not hold on {chip} with JAX {_and(without)}: {why}."


def _why_not(name: str, pair: Mapping[str, Any]) -> str:
    for which, program in (("loses", "first"), ("keeps", "fixed")):
        if error := pair.get(which, {}).get("error"):
            return f"the {program} program does not compile ({words(error)})"
    if name not in pair["loses"]["rules"]:
        others = pair["loses"]["rules"]
        instead = f", but {_and([f'`{one}`' for one in others])}" if others else ""
        return f"the first program does not break it{instead}"
    return "the fixed program breaks it too"


def _others(name: str, pairs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The other rules that the programs break, on the first chip with the newest release."""
    pair = list(next(iter(pairs.values())).values())[-1]
    if not pages.holds(name, pair):
        return
    for which, breaks in (("loses", "first program also breaks"), ("keeps", "fixed one breaks")):
        if others := [rule for rule in pair.get(which, {}).get("rules", ()) if rule != name]:
            yield f"The {breaks} {_and([f'`{one}`' for one in others])}."


def _arguments(page: Page) -> str:
    """The shapes of the programs' arguments, and where the other names come from."""
    assert page.loses
    shapes = page.loses.arguments | (page.keeps.arguments if page.keeps else {})
    said = ", ".join(f"`{name}` is {words(shape)}" for name, shape in shapes.items())
    return f"{said}. [{SHARED}](index.md#{_anchor(SHARED)})."


def _programs(page: Page, recorded: Mapping[str, Any]) -> Iterator[str]:
    """The sections with programs, and with what becomes of them."""
    if not page.loses:
        return
    mine, others = _differing(page.loses, page.keeps) if page.keeps else ([], [])
    yield f"## Loses it\n\n{_code(page.loses, mine)}"
    if page.keeps:
        yield f"## Keeps it\n\n{_code(page.keeps, others)}"
    yield _arguments(page)
    if pairs := _pairs(page.rule.name, recorded):
        of = "Of the first program, then of the fixed one" if page.keeps else "Of this program"
        yield (
            f"## Kernels and bytes\n\n{of}: what the matmuls multiply, how many kernels run, and "
            "how many bytes they read and write."
        )
        yield _figures(pairs)
        yield " ".join([*_holds(page.rule.name, pairs), *_others(page.rule.name, pairs)])


def _sentences(page: Page, recorded: Mapping[str, Any]) -> tuple[str, str, str]:
    """The reason and the fix that the newest release gives for the first program, and a sentence
    that says so; those of the rule, with {names} in them, where it has no program.
    """
    for by_release in _pairs(page.rule.name, recorded).values():
        *_, newest = by_release.values()
        if page.loses and (says := newest["loses"].get("says")):
            note = "Reason and fix are those of the first program below."
            return says[0]["reason"], says[0]["fix"], note
    has_names = "{" in page.rule.reason + page.rule.fix
    note = "A report fills in what stands in braces." if has_names else ""
    return page.rule.reason, page.fix, note


def rule_page(page: Page, recorded: Mapping[str, Any]) -> str:
    """A rule's page as Markdown."""
    rule = page.rule
    reason, fix, note = _sentences(page, recorded)
    facts = [
        ("**Lost**", f"[{_title(rule.lost)}](index.md#{_anchor(_title(rule.lost))})"),
        ("**Reason**", words(reason)),
        ("**Fix**", words(fix)),
        ("**Source**", words(rule.authority.partition(': "')[0] if rule.logs else rule.authority)),
    ]
    if rule.logs:
        facts.append(("**XLA logs**", words(f'"{rule.logs}"')))
    parts = [
        f"# {rule.name}",
        words(rule.summary),
        words(page.why),
        _table(facts, ("", "")),
        note,
        *_programs(page, recorded),
        "[All rules](index.md)",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# The index ----------------------------------------------------------------------------------------


def index_page(recorded: Mapping[str, Any]) -> str:
    """The page that leads to those of all rules, as Markdown."""
    newest = list(recorded)[-1]
    shapes = [(f"`{name}`", words(shape)) for name, shape in ARGUMENTS.items()]
    parts = [
        "# The rules, one by one",
        "Each name leads to a page: what the rule means, why XLA does so, a program that breaks "
        "it, and the same one fixed. Kernels and bytes are those of the first program and of the "
        f"fixed one, on an H100 with JAX {newest}.",
    ]
    for lost in pages.LOSSES:
        rows = [
            (f"`{name}` <br> {words(said)}", *figures)
            for name, said, *figures in pages.index(recorded, lost)
        ]
        parts += [f"## {_title(lost)}", _table(rows, pages.Index.HEAD)]
    parts += [
        f"## {SHARED}",
        "Every program has these names. A scale multiplies codes to dequantize them.",
        f"````{{code-block}} python\n\n{PRELUDE}````",
        "An argument has the shape of its name here, where the program gives it no other:",
        _table(shapes, ("argument", "shape")),
    ]
    return "\n\n".join(parts) + "\n"


def _write_pages(app: Sphinx, config: Any) -> None:
    """Write the pages beside the chapters, where rules are recorded."""
    source = Path(app.srcdir)
    results = source / "notebooks" / "results"
    if not (results / "rules.json").is_file():
        return
    recorded = load_rules(results)
    config.rules_in_order = [name for name, *_ in pages.index(recorded, *pages.LOSSES)]
    (source / FOLDER).mkdir()
    for name in every_name():
        text = rule_page(explain(name), recorded)
        (source / FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    (source / f"{INDEX}.md").write_text(index_page(recorded), encoding="utf-8")
    config.include_patterns.append(f"{FOLDER}/*.md")
    for part in config.contents:
        listed = part.get("children", [])
        files = [page["file"] for page in listed]
        if CHAPTER in files:
            listed.insert(files.index(CHAPTER) + 1, {"file": f"{INDEX}.md"})


# Links --------------------------------------------------------------------------------------------


def is_generated(name: str) -> bool:
    """Whether a page is one that this module writes."""
    return name.startswith(f"{FOLDER}/")


def _keep_out_of_the_contents(app: Sphinx, document: nodes.document) -> None:
    """A rule's page is reached from the index; and it shares one picture, where it is shared."""
    name = app.env.docname
    if not is_generated(name) or name == INDEX:
        return
    app.env.metadata[name]["orphan"] = "true"
    if app.config.html_baseurl:
        app.env.metadata[name]["og:image"] = f"{app.config.html_baseurl}_static/one_call.png"


def neighbours(name: str, order: Sequence[str]) -> tuple[str, str]:
    """The pages before and after a rule's page, in the order of the index, which is the first."""
    listed = [INDEX, *(f"{FOLDER}/{rule}" for rule in order), ""]
    place = listed.index(name)
    return listed[place - 1], listed[place + 1]


def _lead_on(app: Sphinx, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """A rule's page is not in the contents, from which Sphinx takes the neighbours of others."""
    if not is_generated(name) or name == INDEX:
        return
    pages_beside = neighbours(name, app.config.rules_in_order)
    for where, page in zip(("prev", "next"), pages_beside, strict=True):
        if page:
            title = app.env.titles[page].astext()
            context[where] = {"link": app.builder.get_relative_uri(name, page), "title": title}


def _link(app: Sphinx, document: nodes.document, name: str) -> None:
    """Link each rule's name that stands as code, in words and in what a cell shows as HTML."""
    if INDEX not in app.env.found_docs:
        return
    for literal in list(document.findall(nodes.literal)):
        rule = literal.astext()
        if rule in RULES and not _is_in_a_link_or_title(literal):
            link = nodes.reference("", "", internal=True, refuri=_address(app, name, rule))
            link["reftitle"] = RULES[rule].summary
            link["classes"].append("rule")
            literal.parent.replace(literal, link)
            link += literal
    for raw in document.findall(nodes.raw):
        if "html" in raw["format"].split():
            text = _NAME.sub(lambda found: _linked(app, name, found), raw.astext())
            raw.clear()
            raw += nodes.Text(text)


def _is_in_a_link_or_title(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, (nodes.reference, nodes.title)):
            return True
    return False


def _address(app: Sphinx, name: str, rule: str) -> str:
    return app.builder.get_relative_uri(name, f"{FOLDER}/{rule}")


def _linked(app: Sphinx, name: str, found: re.Match[str]) -> str:
    if found[1] not in RULES:
        return found[0]
    return (
        f'<a class="rule reference internal" href="{_address(app, name, found[1])}">{found[0]}</a>'
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("rules_in_order", [], "html")
    app.connect("html-page-context", _lead_on)
    app.connect("config-inited", _write_pages, priority=600)  # the contents have been read
    app.connect("doctree-read", _keep_out_of_the_contents)
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
