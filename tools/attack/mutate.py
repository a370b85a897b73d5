"""Try the checks of chapters, pages and records: alter what is committed, and count what is caught.

    python -m tools.attack.mutate            all, three alterations of each kind; --each 10 for more
    python -m tools.attack.mutate 03         chapter 03, and what is no chapter
    python -m tools.attack.mutate --runs 9   and as many assertions made false, each in a run

What a run gives is taken from the committed outputs, as `make check` proves those; what a source or
a training gives from the records, as the weekly checks prove these.
"""

import argparse
import ast
import base64
import collections
import copy
import datetime
import json
import random
import re
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import nbformat

from helpers.records.results import digest, goals, load_published, load_releases
from tools import outputs
from tools.outputs import pages, prose
from tools.records import form, published, sources, training
from tools.records import goals as reasons

KINDS: dict[str, Callable] = {}
# Where the neighbour of a number stands near it too, or another small one, or a year changes.
MAY_PASS = {"prose: a number, by one", "prose: an ordinal", "references: a number, by one"}


class NoPlace(Exception):
    """A chapter has nothing that could be altered so."""


def kind(name: str):
    """Register a way to alter a notebook in place, or the texts of its two files where it returns
    them.
    """

    def registered(alter: Callable) -> Callable:
        KINDS[name] = alter
        return alter

    return registered


def choose(choices, by: random.Random):
    """One of the choices. Raises NoPlace where there is none."""
    if not (choices := [*choices]):
        raise NoPlace
    return by.choice(choices)


def code(notebook) -> Iterator:
    """The cells with code."""
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def compared(notebook) -> Iterator:
    """The cells whose outputs are compared: not the few that are let vary, which are counted."""
    return (cell for cell in code(notebook) if outputs.VOLATILE not in outputs.tags(cell))


def text_cells(notebook) -> Iterator:
    """The cells with prose."""
    return (cell for cell in notebook.cells if cell.cell_type == "markdown")


def shown(notebook, *mimes: str) -> list[tuple[dict, str]]:
    """(a bundle, its key) for every text of that type among the outputs; of streams without one."""
    found = []
    for output in (output for cell in compared(notebook) for output in cell.outputs):
        if "text" in output and not mimes:
            found.append((output, "text"))
        found += [
            (output.data, mime)
            for mime in output.get("data", {})
            if mime in (mimes or ("text/plain",))
        ]
    return found


def rewrite(notebook, by: random.Random, change: Callable[[str], str], *mimes: str) -> None:
    """Change one text of these types, one that the change changes."""

    def changed(place):
        return change(outputs.text_of(place[0][place[1]]))

    place = choose(
        (
            place
            for place in shown(notebook, *mimes)
            if changed(place) != outputs.text_of(place[0][place[1]])
        ),
        by,
    )
    place[0][place[1]] = changed(place)


def other_digit(text: str) -> str:
    """The text with its first digit outside of tags changed."""
    return re.sub(
        r"\d(?=[^<>]*(?:<|$))", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1
    )


# What is printed and drawn ------------------------------------------------------------------------

for name_, mimes_ in {"text": (), "HTML": ("text/html",), "a drawing": ("image/svg+xml",)}.items():
    kind(f"{name_}: a digit")(
        lambda notebook, by, mimes=mimes_: rewrite(notebook, by, other_digit, *mimes)
    )
kind("text: a line gone")(
    lambda notebook, by: rewrite(notebook, by, lambda text: text.partition("\n")[2])
)
kind("text: a line more")(
    lambda notebook, by: rewrite(notebook, by, lambda text: text + "\nfused: yes")
)
kind("text: a blank at its end")(
    lambda notebook, by: rewrite(notebook, by, lambda text: text + " ")
)
kind("text: another colour")(
    lambda notebook, by: rewrite(notebook, by, lambda text: f"\x1b[32m{text}\x1b[0m")
)
for name_, html_ in {
    "a script": "<script>1</script>",
    "a picture from elsewhere": '<img src="https://example.org/a.png" alt="a">',
    "a style from elsewhere": '<p style="background:url(https://example.org)">a</p>',
    "a tag left open": "<div>",
    "an invisible cover": '<p style="position:fixed">256</p>',
    "a comment": "<!-- 256 -->",
    "a style": "<style>td { display: none }</style>",
}.items():
    kind(f"HTML: {name_}")(
        lambda notebook, by, html=html_: rewrite(
            notebook, by, lambda text: text + html, "text/html"
        )
    )
kind("a drawing: one more line")(
    lambda notebook, by: rewrite(
        notebook,
        by,
        lambda text: text.replace("</svg>", '<path d="M0 0L9 9"/></svg>'),
        "image/svg+xml",
    )
)
kind("a drawing: a script")(
    lambda notebook, by: rewrite(
        notebook,
        by,
        lambda text: text.replace("</svg>", "<script>1</script></svg>"),
        "image/svg+xml",
    )
)


def in_png(change: Callable[[bytes], bytes]) -> Callable:
    """A kind that changes the bytes of a picture."""

    def changed(text: str) -> str:
        return base64.b64encode(change(base64.b64decode(text))).decode()

    return lambda notebook, by: rewrite(notebook, by, changed, "image/png")


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def other_pixels(png: bytes) -> bytes:
    """The picture with its upper half dark: IDAT written anew."""
    sizes, data = struct.unpack(">II", png[16:24]), b""
    rest: list[bytes] = []
    at = 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        name, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        data, rest = (
            (data + content, rest) if name == b"IDAT" else (data, [*rest, chunk(name, content)])
        )
        at += 12 + size
    raw = bytearray(zlib.decompress(data))
    row = len(raw) // sizes[1]
    raw[: row * (sizes[1] // 2)] = bytes(row * (sizes[1] // 2))
    return (
        png[:8]
        + rest[0]
        + b"".join(rest[1:-1])
        + chunk(b"IDAT", zlib.compress(bytes(raw)))
        + rest[-1]
    )


ANIMATED = chunk(b"acTL", struct.pack(">II", 2, 0)) + chunk(
    b"fcTL", struct.pack(">IIIIIHHBB", 0, 9, 9, 0, 0, 1, 1, 0, 0)
)
kind("a picture: other pixels")(in_png(other_pixels))
kind("a picture: animated")(in_png(lambda png: png[:33] + ANIMATED + png[33:]))
kind("a picture: bytes behind it")(in_png(lambda png: png + b"PK\x03\x04 something"))
kind("a picture: text in its file")(
    in_png(lambda png: png[:33] + chunk(b"tEXt", b"Title\0reaches 65504") + png[33:])
)
kind("a picture: no base64")(
    lambda notebook, by: rewrite(
        notebook, by, lambda text: text[:99] + "*" + text[99:], "image/png"
    )
)


@kind("a picture: its description")
def _description(notebook, by):
    places = [
        meta
        for cell in compared(notebook)
        for output in cell.outputs
        for meta in output.get("metadata", {}).values()
        if "alt" in meta
    ]
    choose(places, by)["alt"] = "reaches 65504"


def with_outputs(notebook, by):
    """A cell that has outputs."""
    return choose((cell for cell in compared(notebook) if cell.outputs), by)


def result(notebook, by):
    """An output that is no stream."""
    return choose(
        (output for cell in compared(notebook) for output in cell.outputs if "data" in output), by
    )


kind("outputs: one gone")(lambda notebook, by: with_outputs(notebook, by).outputs.pop())
kind("outputs: one more")(
    lambda notebook, by: with_outputs(notebook, by).outputs.append(
        nbformat.v4.new_output("display_data", {"text/plain": "448 reached"})
    )
)
kind("outputs: another type")(
    lambda notebook, by: result(notebook, by).data.update({"text/latex": "$256$"})
)
kind("outputs: a script's type")(
    lambda notebook, by: result(notebook, by).data.update({"application/javascript": "1"})
)
kind("outputs: an unknown key")(
    lambda notebook, by: with_outputs(notebook, by).outputs[0].update({"alt": "256"})
)
kind("outputs: metadata")(
    lambda notebook, by: result(notebook, by).metadata.update({"needs_background": "light"})
)
kind("outputs: a count")(
    lambda notebook, by: with_outputs(notebook, by).update({"execution_count": 99})
)


@kind("outputs: of another cell")
def _exchanged(notebook, by):
    one = with_outputs(notebook, by)
    other = choose(
        (cell for cell in compared(notebook) if cell.outputs not in ([], one.outputs)), by
    )
    one.outputs, other.outputs = other.outputs, one.outputs


# Cells --------------------------------------------------------------------------------------------


def tagged(cell, *names: str) -> None:
    """Tag a cell."""
    cell.metadata["tags"] = [*outputs.tags(cell), *names]


FALSE = "\nassert 1 + 1 == 3"
FAILED = nbformat.v4.new_output(
    "error", ename="AssertionError", evalue="", traceback=["AssertionError: as it should"]
)


@kind("cells: skipped, and false")
def _skipped(notebook, by):
    cell = choose(code(notebook), by)
    cell.source += FALSE
    tagged(cell, "skip-execution")


@kind("cells: fails, as it is let")
def _let_fail(notebook, by):
    cell = choose(code(notebook), by)
    cell.source += FALSE
    cell.outputs.append(copy.deepcopy(FAILED))
    tagged(cell, "raises-exception")


@kind("cells: let vary, and altered")
def _let_vary(notebook, by):
    cell = with_outputs(notebook, by)
    cell.outputs = [nbformat.v4.new_output("stream", text="one kernel\n")]
    tagged(cell, outputs.VOLATILE)


@kind("cells: hidden by a tag")
def _hidden(notebook, by):
    tagged(choose(code(notebook), by), "remove-cell")


@kind("cells: not run, by a magic")
def _magic(notebook, by):
    cell = choose(code(notebook), by)
    cell.source = f"%%script false --no-raise-error\n{cell.source}"


@kind("cells: the shell's")
def _shell(notebook, by):
    choose(code(notebook), by).source += "\n!echo one kernel"


@kind("cells: a comment's number")
def _comment(notebook, by):
    choose(code(notebook), by).source += "\n# It is 7351 times as fast."


@kind("cells: prints what is stored")
def _reads_itself(notebook, by):
    cell = with_outputs(notebook, by)
    cell.source = "import json, pathlib\nprint(pathlib.Path('../notebooks/01.ipynb').read_text())"


kind("cells: an attachment")(
    lambda notebook, by: choose(text_cells(notebook), by).update(
        {"attachments": {"a.png": {"image/png": "aGVsbG8="}}}
    )
)
kind("cells: a raw one")(
    lambda notebook, by: notebook.cells.insert(
        by.randrange(1, len(notebook.cells)), nbformat.v4.new_raw_cell("1 kernel, 50 MB")
    )
)
kind("cells: metadata")(
    lambda notebook, by: choose(notebook.cells, by).metadata.update({"editable": False})
)
kind("cells: folded by hand")(
    lambda notebook, by: choose(
        (cell for cell in code(notebook) if not outputs.tags(cell)), by
    ).metadata.update(jupyter={"source_hidden": True})
)
kind("cells: another id")(
    lambda notebook, by: choose(notebook.cells, by).update({"id": "0badf00d"})
)
kind("cells: one gone")(lambda notebook, by: notebook.cells.remove(with_outputs(notebook, by)))
kind("notebook: errors allowed")(
    lambda notebook, by: notebook.metadata.update({"execution": {"allow_errors": True}})
)
kind("notebook: another kernel")(
    lambda notebook, by: notebook.metadata.kernelspec.update({"name": "mine"})
)


# Prose --------------------------------------------------------------------------------------------


def free_numbers(cell) -> Iterator[tuple[str, re.Match]]:
    """(text, number in it) for each number of a text cell that is no part of a name, before the
    references.
    """
    source = cell.source.partition("## References")[0]
    for text in prose.texts(source, []):
        free = text
        for name in prose.NAMES:
            free = name.sub(_blank, free)
        if text in source:
            yield from ((text, found) for found in prose.NUMBER.finditer(free))


def number_in_prose(
    notebook, by: random.Random, part: str, change: Callable[[str], str | None]
) -> None:
    """Change the number or the unit of one number, one that `change` gives another for."""
    places = [
        (cell, text, found)
        for cell in text_cells(notebook)
        for text, found in free_numbers(cell)
        if found[part] and change(found[part])
        if part == "number" or not prose.is_ordinal(found["number"])
    ]
    cell, text, found = choose(places, by)
    start, end = found.span(part)
    cell.source = cell.source.replace(text, text[:start] + change(found[part]) + text[end:], 1)


def by_one(number: str) -> str | None:
    """The next number, of one in digits."""
    digits = re.search(r"\d+(?!.*\d)", number)
    return digits and number[: digits.start()] + str(int(digits[0]) + 1) + number[digits.end() :]


def _as_word(number: str) -> str | None:
    return "ninety" if number.lower() in prose.WORDS else None


def _as_ordinal(number: str) -> str | None:
    word = number.lower().removesuffix("s")
    others = [*prose.ORDINALS]
    return others[others.index(word) - 1] + number[len(word) :] if word in others else None


def other_unit(unit: str) -> str | None:
    """A unit of the same kind where there is one: MB to TB. None for the sign in a shape, 1 × K."""
    if unit == "×":
        return None
    kinds = ("B kB MB GB TB".split(), "ns us ms s".split(), ["bits", "bytes"], ["kernels", "times"])
    for kind in kinds:
        if unit in kind:
            return kind[kind.index(unit) - 1]
    return "dB" if unit != "dB" else "%"


for name_, part_, change_ in (
    ("prose: a number", "number", lambda number: "7351" if number[0].isdigit() else None),
    ("prose: a number, by one", "number", by_one),
    ("prose: a number in words", "number", _as_word),
    ("prose: an ordinal", "number", _as_ordinal),
    ("prose: a unit", "unit", other_unit),  # an ordinal has none: "a third kernel"
):
    kind(name_)(
        lambda notebook, by, part=part_, change=change_: number_in_prose(notebook, by, part, change)
    )


def _append(notebook, by: random.Random, text: str, referring: bool) -> None:
    cells = (cell for cell in text_cells(notebook) if ("## References" in cell.source) == referring)
    choose(cells, by).source += text


SAID = {
    "a number more": "So it is 7351 times as fast.",
    "an output's likeness": "```\nkernels 1, 50.3 MB\n```",
    "an output's likeness, as text": "```text\none kernel\n```",
    "an output's likeness, indented": "So:\n\n    one kernel",
    "HTML": '<div class="output">one kernel</div>',
    "HTML in a line": 'So <b style="color:red">one kernel</b>.',
    "a comment": "<!-- one kernel -->",
    "a picture": "![One kernel](../img/one_call.png)",
    "a picture in itself": "![One kernel](data:image/png;base64,aGVsbG8=)",
    "a directive": "```{raw} html\n<b>one kernel</b>\n```",
    "a directive by colons": ":::{figure} ../img/one_call.png\nOne kernel\n:::",
}
REFERRED = SAID | {
    "a sentence": "It is one kernel.",
    "no address": "- XLA: it is always one kernel.",
    "a number with an address": "- [XLA](https://openxla.org): 7351 times as fast.",
    "a number in a title": "- [7351 times as fast](https://openxla.org).",
    "a heading": "## So it is one kernel",
    "a table": "| a |\n|---|\n| one kernel |",
}
for what_, text_ in SAID.items():
    kind(f"prose: {what_}")(
        lambda notebook, by, text=text_: _append(notebook, by, "\n\n" + text, False)
    )
for what_, text_ in REFERRED.items():
    kind(f"references: {what_}")(
        lambda notebook, by, text=text_: _append(notebook, by, "\n\n" + text, True)
    )


def _number_in_references(notebook, by: random.Random, change: Callable[[str], str | None]) -> None:
    places = [
        (cell, found)
        for cell in text_cells(notebook)
        for found in re.finditer(r"(?<![\w./])\d+(?!\w)(?![^(]*\))", cell.source)
        if found.start() > cell.source.find("## References") >= 0
    ]
    cell, found = choose(places, by)
    cell.source = (
        cell.source[: found.start()] + (change(found[0]) or "") + cell.source[found.end() :]
    )


kind("references: a number")(
    lambda notebook, by: _number_in_references(notebook, by, lambda number: "7351")
)
kind("references: a number, by one")(
    lambda notebook, by: _number_in_references(notebook, by, by_one)
)


# Files --------------------------------------------------------------------------------------------


@kind("files: the text half alone")
def _text_half(notebook, by):
    said = outputs.twin_of(outputs.normalise(notebook))
    return nbformat.writes(notebook) + "\n", said + "\nIt is always so.\n"


@kind("files: the text half's header")
def _header(notebook, by):
    said = outputs.twin_of(outputs.normalise(notebook))
    return nbformat.writes(notebook) + "\n", said.replace("---\n", "---\ntitle: One kernel\n", 1)


@kind("files: a key twice")
def _twice(notebook, by):
    text = nbformat.writes(notebook) + "\n"
    place = choose(re.finditer(r'^   "source": ', text, re.M), by).start()
    return text[:place] + '   "source": "One kernel",\n' + text[place:], None


# Trying it ----------------------------------------------------------------------------------------


def caught(path: Path, alter: Callable, by: random.Random, folder: Path) -> str | None:
    """What the check says first of an altered pair, None if taken for true. Raises NoPlace."""
    committed = nbformat.read(path, 4)
    altered = copy.deepcopy(committed)
    texts = alter(altered, by)
    if not isinstance(texts, tuple):
        if [cell.source for cell in altered.cells] != [cell.source for cell in committed.cells]:
            ids = outputs.normalise(altered)  # as careful as one can be who alters a chapter
            for cell, normal in zip(altered.cells, ids.cells, strict=True):
                cell.id = normal.id
        texts = nbformat.writes(altered) + "\n", None
    half = folder / path.name
    half.write_text(texts[0])
    half.with_suffix(".md").write_text(texts[1] or outputs.twin_of(outputs.normalise(altered)))
    found = outputs.standing_problems(half) or outputs.compare(nbformat.read(half, 4), committed)
    return found[0] if found else None


def chapters(paths: list[Path], each: int, seed: int = 0) -> collections.Counter:
    """(kind, whether it was caught) to how often, for each kind of alteration and chapter; prints
    what passed.
    """
    counted: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            for name, alter in KINDS.items():
                for number in range(each):
                    try:
                        said = caught(
                            path,
                            alter,
                            random.Random(f"{path.stem} {name} {number} {seed}"),
                            Path(folder),
                        )
                    except NoPlace:
                        continue
                    counted[name, said is not None] += 1
    return counted


CODE = re.compile(r"^[^#\n]+", re.M)  # of a fence: what is no comment


def _blank(found: re.Match) -> str:
    return "\0" * len(found[0])


def other_pages(each: int, seed: int = 0) -> collections.Counter:
    """The same of the README, the package's page and the glossary."""
    counted: collections.Counter = collections.Counter()
    for name in pages.PAGES:
        text = (pages.ROOT / name).read_text()
        bare = prose.FENCE.sub(lambda fence: CODE.sub(_blank, fence[0]), text)
        for number in range(each):
            by = random.Random(f"{name} {number} {seed}")
            outside = prose.FENCE.sub(_blank, text)
            ends = [found.end() for found in re.finditer(r"\n\n(?=\S)", outside)]
            end = choose(ends, by)
            forged = {"a number more": text[:end] + "It is 7351 times as fast.\n\n" + text[end:]}
            for what, pattern, new in (
                ("a number", r"(?<![\w./])\d+(?![\w.])", "7351"),
                ("a number in words", rf"\b(?i:{'|'.join(prose.WORDS)})\b", "eighty"),
                ("a unit", r"(?<=\d )GB\b|(?<=seven )kernels", "TB"),
            ):
                if places := [*re.finditer(pattern, bare)]:
                    place = by.choice(places)
                    forged[what] = text[: place.start()] + new + text[place.end() :]
            for what, forgery in forged.items():
                counted[f"pages: {what}", bool(pages.problems(name, forgery))] += 1
    return counted


# Records ------------------------------------------------------------------------------------------


def _digits_alone(name: str, pattern: str, load: Callable) -> Callable:
    """Change a digit in a file's text, and nothing else."""

    def alter(by: random.Random, folder: Path) -> bool:
        text = (form.RESULTS / name).read_text()
        place = by.choice([*re.finditer(pattern, text)])
        other = str(int(place[1]) + 1)
        (folder / name).write_text(text[: place.start(1)] + other + text[place.end(1) :])
        try:
            load(folder)
        except ValueError:
            return True
        return False

    return alter


def _record(name: str) -> dict:
    return json.loads((form.RESULTS / f"{name}.json").read_text())


def _training(by: random.Random, folder: Path) -> bool:
    """Change a loss, a largest magnitude or a number of a tensor, and compute the digest anew."""
    committed, forged = _record("training"), _record("training")
    trace = by.choice([forged["losses"], *forged["amaxes"].values(), None])
    if trace:
        trace[by.randrange(len(trace))] *= by.choice([0.9, 1.1])
    else:
        name = by.choice("xwg")
        held = training.tensor(committed["tensors"][name])
        held[by.randrange(len(held))] *= 2  # one token's, or one output's
        forged["tensors"][name] = training.stored(training.jnp.asarray(held))
    forged["digest"] = digest(forged)
    return bool(training.problems(forged, committed) or form.problems(forged, "training"))


def _goal(by: random.Random, folder: Path) -> bool:
    """Lower a goal by a hundredth, for one chip, at times with the share of its reason."""
    forged = _record("goals")
    goal = by.choice(forged["goals"])
    wanted, factor = (goal["least"], 0.99) if "least" in goal else (goal["most"], 1.01)
    wanted[by.choice([*wanted])] *= factor
    goal["reason"]["share"] *= by.choice([1, factor])
    (folder / "goals.json").write_text(json.dumps(forged))
    read = [one for part in ("speed", "train") for one in goals(part, None, folder)]
    return any(reasons.problems(one) for one in read)


def _published(by: random.Random, folder: Path) -> bool:
    """Change a figure and every quotation of it."""
    committed, forged = _record("published"), _record("published")
    number = by.randrange(len(forged["figures"]))
    entry = forged["figures"][number]
    row = by.choice(entry["rows"])
    # As it is written there: 1.90 is read as 1.9.
    wanted = {
        found
        for quote in entry["quotes"]
        for found in re.findall(r"\d+(?:\.\d+)?", quote)
        if float(found) == row["value"]
    }
    row["value"] = round(0.99 * row["value"], 3)
    for said in wanted:
        entry["quotes"] = [
            re.sub(rf"(?<![\d.]){re.escape(said)}(?![\d.]*\d)", f"{row['value']}", quote)
            for quote in entry["quotes"]
        ]
    (folder / "published.json").write_text(json.dumps(forged))
    source = " ".join(" ".join(committed["figures"][number]["quotes"]).split())
    patch = f"Date: {entry['date']}"
    try:
        read = load_published(folder)[number]
    except ValueError:
        return True
    with (
        mock.patch.object(sources, "said_at", lambda url: source),
        mock.patch.object(sources, "text_at", lambda url: patch),
        mock.patch.object(published, "_date", lambda patch: datetime.date.fromisoformat(patch[6:])),
    ):
        return bool(published.problems(read))


RECORDED = {
    "a number in releases.json": _digits_alone(
        "releases.json", r'"(?:kernels|alpha|outside|count)": (\d)', load_releases
    ),
    "a number in published.json": _digits_alone(
        "published.json", r'"(?:value|over)": (\d)', load_published
    ),
    "a figure and its quotation": _published,
    "a goal, by a hundredth": _goal,
    "training.json and its digest": _training,
}


def data(folder: Path, each: int, seed: int = 0) -> collections.Counter:
    """The same of the recorded data."""
    counted: collections.Counter = collections.Counter()
    for name, alter in RECORDED.items():
        for number in range(each):
            by = random.Random(f"{name} {number} {seed}")
            counted[f"data: {name}", alter(by, folder)] += 1
    return counted


def false_assertions(paths: list[Path], runs: int, seed: int = 0) -> collections.Counter:
    """The same of assertions made false, one in a chapter, and the chapter run."""
    counted: collections.Counter = collections.Counter()
    by = random.Random(seed)
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / "notebooks"
            shutil.copytree(outputs.NOTEBOOKS, copied)
            path = copied / paths[number % len(paths)].name
            notebook = nbformat.read(path, 4)
            cell = choose(
                (cell for cell in code(notebook) if re.search("^assert ", cell.source, re.M)), by
            )
            tree = ast.parse(cell.source)
            one = by.choice([node for node in tree.body if isinstance(node, ast.Assert)])
            one.test = ast.UnaryOp(ast.Not(), one.test)
            cell.source = ast.unparse(tree)
            nbformat.write(notebook, path)
            noticed = outputs.fresh_run([path])[path.stem].failure is not None
            counted["code: an assertion made false", noticed] += 1
    return counted


def table(counted: collections.Counter) -> str:
    """What was counted, a line for each kind."""
    names = list(dict.fromkeys(name for name, _ in counted))
    lines = [
        f"{name:42}{counted[name, True]:5} of {counted[name, True] + counted[name, False]:5}"
        for name in names
    ]
    total = sum(counted.values())
    return "\n".join(
        [
            *lines,
            f"{total} alterations of {len(names)} kinds, "
            f"{sum(n for (_, found), n in counted.items() if found)} caught",
        ]
    )


def main() -> int:
    """Try everything that the arguments name; 1 where something passed that may not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="beginnings of names, such as 03; all without")
    parser.add_argument("--each", type=int, default=3, help="alterations of a kind in a chapter")
    parser.add_argument("--runs", type=int, default=0, help="assertions to make false")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    paths = outputs.find(options.chapters, outputs.NOTEBOOKS)
    counted = chapters(paths, options.each, options.seed)
    counted += other_pages(10 * options.each, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        counted += data(Path(folder), 10 * options.each, options.seed)
    counted += false_assertions(paths, options.runs, options.seed)
    print(table(counted))
    return int(any(not found and name not in MAY_PASS for name, found in counted))


if __name__ == "__main__":
    sys.exit(main())
