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
import contextlib
import copy
import datetime
import io
import itertools
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import nbformat
from PIL import Image, PngImagePlugin

from helpers.records.results import load_published, load_releases
from tools import outputs
from tools.outputs import pages, prose
from tools.outputs.run import run
from tools.recorders import form, published, sources

KINDS: dict[str, Callable] = {}
# Where the neighbour of a number stands near it too, or another small one.
MAY_PASS = {"prose: a number, by one", "prose: an ordinal"}


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


def with_outputs(notebook) -> Iterator:
    """The cells that have outputs, which are compared."""
    return (cell for cell in compared(notebook) if cell.outputs)


def results(notebook) -> Iterator:
    """The outputs that are no streams."""
    return (output for cell in compared(notebook) for output in cell.outputs if "data" in output)


def described(notebook) -> Iterator:
    """The metadata of outputs that describe a picture."""
    for output in results(notebook):
        yield from (about for about in output.metadata.values() if "alt" in about)


def text_cells(notebook) -> Iterator:
    """The cells with prose."""
    return (cell for cell in notebook.cells if cell.cell_type == "markdown")


def untagged(notebook) -> Iterator:
    """The cells with code that have no tag."""
    return (cell for cell in code(notebook) if not outputs.tags(cell))


# What is printed and drawn ------------------------------------------------------------------------


def shown(notebook, mime: str) -> Iterator[tuple[dict, str]]:
    """(a bundle, its key) for every text of that type among the outputs, streams as plain text."""
    for output in (output for cell in compared(notebook) for output in cell.outputs):
        if "text" in output and mime == "text/plain":
            yield output, "text"
        if mime in output.get("data", {}):
            yield output.data, mime


def other_digit(text: str) -> str:
    """The text with its first digit outside of tags changed."""
    return re.sub(
        r"\d(?=[^<>]*(?:<|$))", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1
    )


def adds(added: str) -> Callable[[str], str]:
    """A change that adds something to a text."""
    return lambda text: text + added


def draws(added: str) -> Callable[[str], str]:
    """A change that adds something to a drawing."""
    return lambda text: text.replace("</svg>", f"{added}</svg>")


def in_png(change: Callable[[bytes], bytes]) -> Callable[[str], str]:
    """A change of the bytes of a picture."""
    return lambda text: base64.b64encode(change(base64.b64decode(text))).decode()


def drawn_anew(png: bytes, change: Callable | None = None, **options) -> bytes:
    """The picture, changed, in a file that has what else its file had, and these options."""
    image = Image.open(io.BytesIO(png))
    image.load()
    if change:
        change(image)
    file = io.BytesIO()
    image.save(file, "png", dpi=image.info["dpi"], **options)
    return file.getvalue()


def other_pixels(png: bytes) -> bytes:
    """The picture with its upper half dark."""
    return drawn_anew(
        png, lambda image: image.paste("black", (0, 0, image.width, image.height // 2))
    )


def animated(png: bytes) -> bytes:
    """The picture, followed by another one."""
    return drawn_anew(png, save_all=True, append_images=[Image.open(io.BytesIO(other_pixels(png)))])


def titled(png: bytes) -> bytes:
    """The picture with a title in its file."""
    title = PngImagePlugin.PngInfo()
    title.add_text("Title", "reaches 65504")
    return drawn_anew(png, pnginfo=title)


PLAIN, HTML, DRAWING, PICTURE = "text/plain", "text/html", "image/svg+xml", "image/png"
# What is altered: texts of one type, and how each of them is. Of what no page may hold, a script
# stands for all: tests/course/test_site.py has the others.
TEXTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "text: a digit": (PLAIN, other_digit),
    "text: a line gone": (PLAIN, lambda text: text.partition("\n")[2]),
    "text: a line more": (PLAIN, adds("\nfused: yes")),
    "text: a blank at its end": (PLAIN, adds(" ")),
    "text: another colour": (PLAIN, lambda text: f"\x1b[32m{text}\x1b[0m"),
    "HTML: a digit": (HTML, other_digit),
    "HTML: a script": (HTML, adds("<script>1</script>")),
    "a drawing: a digit": (DRAWING, other_digit),
    "a drawing: one more line": (DRAWING, draws('<path d="M0 0L9 9"/>')),
    "a drawing: a script": (DRAWING, draws("<script>1</script>")),
    "a picture: other pixels": (PICTURE, in_png(other_pixels)),
    "a picture: animated": (PICTURE, in_png(animated)),
    "a picture: bytes behind it": (PICTURE, in_png(lambda png: png + b"PK\x03\x04 something")),
    "a picture: text in its file": (PICTURE, in_png(titled)),
    "a picture: no base64": (PICTURE, lambda text: text[:99] + "*" + text[99:]),
}


def rewrite(notebook, by: random.Random, mime: str, change: Callable[[str], str]) -> None:
    """Change one text of this type, one that the change changes."""
    changed = []
    for bundle, key in shown(notebook, mime):
        text = outputs.text_of(bundle[key])
        if change(text) != text:
            changed.append((bundle, key, change(text)))
    bundle, key, text = choose(changed, by)
    bundle[key] = text


for name_, (mime_, change_) in TEXTS.items():
    kind(name_)(
        lambda notebook, by, mime=mime_, change=change_: rewrite(notebook, by, mime, change)
    )


# Outputs, cells and metadata ----------------------------------------------------------------------


def tag(cell, name: str) -> None:
    """Tag a cell."""
    cell.metadata["tags"] = [*outputs.tags(cell), name]


def add(text: str) -> Callable:
    """A change that adds a text to a cell's source."""
    return lambda cell: cell.update({"source": cell.source + text})


def skip(cell) -> None:
    """Make a cell false, and keep it from being run."""
    cell.source += FALSE
    tag(cell, "skip-execution")


def let_fail(cell) -> None:
    """Make a cell false, and let it fail."""
    cell.source += FALSE
    cell.outputs.append(
        nbformat.v4.new_output(
            "error", ename="AssertionError", evalue="", traceback=["AssertionError: as it should"]
        )
    )
    tag(cell, "raises-exception")


def let_vary(cell) -> None:
    """Give a cell another output, and let that vary."""
    cell.outputs = [nbformat.v4.new_output("stream", text="one kernel\n")]
    tag(cell, outputs.VOLATILE)


FALSE = "\nassert 1 + 1 == 3"
ONE_MORE = nbformat.v4.new_output("display_data", {"text/plain": "448 reached"})
ITSELF = "import json, pathlib\nprint(pathlib.Path('../notebooks/01.ipynb').read_text())"
ATTACHED = {"attachments": {"a.png": {"image/png": "aGVsbG8="}}}
# What is altered: one of these, and how it is.
PLACES: dict[str, tuple[Callable, Callable]] = {
    "a picture: its description": (described, lambda about: about.update(alt="reaches 65504")),
    "outputs: one gone": (with_outputs, lambda cell: cell.outputs.pop()),
    "outputs: one more": (with_outputs, lambda cell: cell.outputs.append(copy.deepcopy(ONE_MORE))),
    "outputs: another type": (results, lambda output: output.data.update({"text/latex": "$256$"})),
    "outputs: a script's type": (
        results,
        lambda output: output.data.update({"application/javascript": "1"}),
    ),
    "outputs: an unknown key": (with_outputs, lambda cell: cell.outputs[0].update(alt="256")),
    "outputs: metadata": (results, lambda output: output.metadata.update(needs_background="light")),
    "outputs: a count": (with_outputs, lambda cell: cell.update(execution_count=99)),
    "cells: skipped, and false": (code, skip),
    "cells: fails, as it is let": (code, let_fail),
    "cells: let vary, and altered": (with_outputs, let_vary),
    "cells: hidden by a tag": (code, lambda cell: tag(cell, "remove-cell")),
    "cells: not run, by a magic": (
        code,
        lambda cell: cell.update(source=f"%%script false --no-raise-error\n{cell.source}"),
    ),
    "cells: the shell's": (code, add("\n!echo one kernel")),
    "cells: a comment's number": (code, add("\n# It is 7351 times as fast.")),
    "cells: prints what is stored": (with_outputs, lambda cell: cell.update(source=ITSELF)),
    "cells: an attachment": (text_cells, lambda cell: cell.update(ATTACHED)),
    "cells: metadata": (lambda notebook: notebook.cells, lambda cell: cell.metadata.update(x=1)),
    "cells: folded by hand": (
        untagged,
        lambda cell: cell.metadata.update(jupyter={"source_hidden": True}),
    ),
    "cells: another id": (lambda notebook: notebook.cells, lambda cell: cell.update(id="0badf00d")),
    "notebook: errors allowed": (
        lambda notebook: [notebook.metadata],
        lambda metadata: metadata.update(execution={"allow_errors": True}),
    ),
    "notebook: another kernel": (
        lambda notebook: [notebook.metadata],
        lambda metadata: metadata.kernelspec.update(name="mine"),
    ),
}
for name_, (places_, alter_) in PLACES.items():
    kind(name_)(
        lambda notebook, by, places=places_, alter=alter_: alter(choose(places(notebook), by))
    )


@kind("outputs: of another cell")
def _exchanged(notebook, by):
    one = choose(with_outputs(notebook), by)
    other = choose((cell for cell in with_outputs(notebook) if cell.outputs != one.outputs), by)
    one.outputs, other.outputs = other.outputs, one.outputs


kind("cells: a raw one")(
    lambda notebook, by: notebook.cells.insert(
        by.randrange(1, len(notebook.cells)), nbformat.v4.new_raw_cell("1 kernel, 50 MB")
    )
)
kind("cells: one gone")(
    lambda notebook, by: notebook.cells.remove(choose(with_outputs(notebook), by))
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


NUMBERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "prose: a number": ("number", lambda number: "7351" if number[0].isdigit() else None),
    "prose: a number, by one": ("number", by_one),
    "prose: a number in words": ("number", _as_word),
    "prose: an ordinal": ("number", _as_ordinal),
    "prose: a unit": ("unit", other_unit),  # an ordinal has none: "a third kernel"
}
for name_, (part_, other_) in NUMBERS.items():
    kind(name_)(
        lambda notebook, by, part=part_, change=other_: number_in_prose(notebook, by, part, change)
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
    "a picture": "![One kernel](../img/one_call.svg)",
    "a picture in itself": "![One kernel](data:image/png;base64,aGVsbG8=)",
    "a directive": "```{raw} html\n<b>one kernel</b>\n```",
    "a directive by colons": ":::{figure} ../img/one_call.svg\nOne kernel\n:::",
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


Tried = Iterator[tuple[str, bool]]  # a kind of alteration, and whether one of it was caught


def chapters(paths: list[Path], each: int, seed: int = 0) -> Tried:
    """Alter each chapter in every way, so often."""
    with tempfile.TemporaryDirectory() as folder:
        for path, (name, alter), number in itertools.product(paths, KINDS.items(), range(each)):
            by = random.Random(f"{path.stem} {name} {number} {seed}")
            with contextlib.suppress(NoPlace):
                yield name, caught(path, alter, by, Path(folder)) is not None


CODE = re.compile(r"^[^#\n]+", re.M)  # of a fence: what is no comment


def _blank(found: re.Match) -> str:
    return "\0" * len(found[0])


def with_a_number_more(text: str, by: random.Random) -> str:
    """The page with one more sentence, outside of its fences."""
    outside = prose.FENCE.sub(_blank, text)
    end = choose(re.finditer(r"\n\n(?=\S)", outside), by).end()
    return text[:end] + "It is 7351 times as fast.\n\n" + text[end:]


# Of other pages: what is altered, outside of commands, and what it becomes.
IN_PAGES = {
    "pages: a number": (r"(?<![\w./])\d+(?![\w.])", "7351"),
    "pages: a number in words": (rf"\b(?i:{'|'.join(prose.WORDS)})\b", "eighty"),
    "pages: a unit": (r"(?<=\d )GB\b|(?<=seven )kernels", "TB"),
}


def other_pages(each: int, seed: int = 0) -> Tried:
    """Alter the README, the package's page and the glossary."""
    for name, number in itertools.product(pages.PAGES, range(each)):
        text = (pages.ROOT / name).read_text()
        bare = prose.FENCE.sub(lambda fence: CODE.sub(_blank, fence[0]), text)
        by = random.Random(f"{name} {number} {seed}")
        forged = with_a_number_more(text, by)
        yield "pages: a number more", bool(pages.problems(name, forged))
        for what, (pattern, new) in IN_PAGES.items():
            if places := [*re.finditer(pattern, bare)]:
                start, end = by.choice(places).span()
                yield what, bool(pages.problems(name, text[:start] + new + text[end:]))


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
}


def data(folder: Path, each: int, seed: int = 0) -> Tried:
    """Alter the recorded data."""
    for (name, alter), number in itertools.product(RECORDED.items(), range(each)):
        yield f"data: {name}", alter(random.Random(f"{name} {number} {seed}"), folder)


def false_assertions(paths: list[Path], runs: int, seed: int = 0) -> Tried:
    """Make an assertion of a chapter false, and run the chapter."""
    by = random.Random(seed)
    for path in itertools.islice(itertools.cycle(paths), runs):
        notebook = nbformat.read(path, 4)
        asserting = (cell for cell in code(notebook) if re.search("^assert ", cell.source, re.M))
        cell = choose(asserting, by)
        tree = ast.parse(cell.source)
        one = by.choice([node for node in tree.body if isinstance(node, ast.Assert)])
        one.test = ast.UnaryOp(ast.Not(), one.test)
        cell.source = ast.unparse(tree)
        done = run({path.stem: notebook}, path.parent)[path.stem]
        yield "code: an assertion made false", done.failure is not None


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
    counted = collections.Counter(chapters(paths, options.each, options.seed))
    counted.update(other_pages(10 * options.each, options.seed))
    with tempfile.TemporaryDirectory() as folder:
        counted.update(data(Path(folder), 10 * options.each, options.seed))
    counted.update(false_assertions(paths, options.runs, options.seed))
    print(table(counted))
    return int(any(not found and name not in MAY_PASS for name, found in counted))


if __name__ == "__main__":
    sys.exit(main())
