"""Try the check of the chapters: alter what is committed as somebody might, and count what is caught.

    python tools/attack/mutate.py            all chapters, three alterations of each kind; --each 10 for more, 03 for one
    python tools/attack/mutate.py --runs 9   and as many assertions made false, each in a run of its chapter

What a run gives is taken from the committed outputs: `make check` proves those.
"""

import argparse
import ast
import base64
import collections
import copy
import random
import re
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat

from helpers.results import load_published, load_releases
from tools import outputs
from tools.outputs import prose

KINDS: dict[str, Callable] = {}
MAY_PASS = {"prose: a number, by one"}  # where the neighbour of a number stands near it too


class NoPlace(Exception):
    """A chapter has nothing that could be altered so."""


def kind(name: str):
    """Register a way to alter a notebook in place, or the texts of its two files where it returns them."""

    def registered(alter: Callable) -> Callable:
        KINDS[name] = alter
        return alter

    return registered


def choose(choices, by: random.Random):
    if not (choices := [*choices]):
        raise NoPlace
    return by.choice(choices)


def code(notebook) -> Iterator:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def text_cells(notebook) -> Iterator:
    return (cell for cell in notebook.cells if cell.cell_type == "markdown")


def shown(notebook, *mimes: str) -> list[tuple[dict, str]]:
    """(a bundle, its key) for every text of that type among the outputs; of streams without one."""
    found = []
    for output in (output for cell in code(notebook) for output in cell.outputs):
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
    return re.sub(
        r"\d(?=[^<>]*(?:<|$))", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1
    )


# What is printed and drawn --------------------------------------------------------------------------------------------

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
    def changed(text: str) -> str:
        return base64.b64encode(change(base64.b64decode(text))).decode()

    return lambda notebook, by: rewrite(notebook, by, changed, "image/png")


def chunk(name: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def other_pixels(png: bytes) -> bytes:
    """The picture with its upper half dark: IDAT written anew."""
    sizes, data, rest = struct.unpack(">II", png[16:24]), b"", []
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
def description(notebook, by):
    places = [
        meta
        for cell in code(notebook)
        for output in cell.outputs
        for meta in output.get("metadata", {}).values()
        if "alt" in meta
    ]
    choose(places, by)["alt"] = "reaches 65504"


def with_outputs(notebook, by):
    return choose((cell for cell in code(notebook) if cell.outputs), by)


def result(notebook, by):
    return choose(
        (output for cell in code(notebook) for output in cell.outputs if "data" in output), by
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
def exchanged(notebook, by):
    one = with_outputs(notebook, by)
    other = choose(
        (cell for cell in code(notebook) if cell.outputs and cell.outputs != one.outputs), by
    )
    one.outputs, other.outputs = other.outputs, one.outputs


# Cells ----------------------------------------------------------------------------------------------------------------


def tagged(cell, *names: str) -> None:
    cell.metadata["tags"] = [*outputs.tags(cell), *names]


FALSE = "\nassert 1 + 1 == 3"
FAILED = nbformat.v4.new_output(
    "error", ename="AssertionError", evalue="", traceback=["AssertionError: as it should"]
)


@kind("cells: skipped, and false")
def skipped(notebook, by):
    cell = choose(code(notebook), by)
    cell.source += FALSE
    tagged(cell, "skip-execution")


@kind("cells: fails, as it is let")
def let_fail(notebook, by):
    cell = choose(code(notebook), by)
    cell.source += FALSE
    cell.outputs.append(copy.deepcopy(FAILED))
    tagged(cell, "raises-exception")


@kind("cells: let vary, and altered")
def let_vary(notebook, by):
    cell = with_outputs(notebook, by)
    cell.outputs = [nbformat.v4.new_output("stream", text="one kernel\n")]
    tagged(cell, outputs.VOLATILE)


@kind("cells: hidden by a tag")
def hidden(notebook, by):
    tagged(choose(code(notebook), by), "remove-cell")


@kind("cells: not run, by a magic")
def magic(notebook, by):
    cell = choose(code(notebook), by)
    cell.source = f"%%script false --no-raise-error\n{cell.source}"


@kind("cells: the shell's")
def shell(notebook, by):
    choose(code(notebook), by).source += "\n!echo one kernel"


@kind("cells: a comment's number")
def comment(notebook, by):
    choose(code(notebook), by).source += "\n# It is 7351 times as fast."


@kind("cells: prints what is stored")
def reads_itself(notebook, by):
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


# Prose ----------------------------------------------------------------------------------------------------------------


def number_in_prose(notebook, by, change: Callable[[str], str], words: bool = False) -> None:
    """Change one number that is not part of a name: in a text cell, before the references."""
    places = []
    for cell in text_cells(notebook):
        for text in prose.texts(cell.source, []):
            free = text
            for name in prose.NAMES:
                free = name.sub(lambda found: "\0" * len(found[0]), free)
            places += [
                (cell, text, found)
                for found in prose.NUMBER.finditer(free)
                if found[0].isalpha() == words and text in cell.source
            ]
    cell, text, found = choose(places, by)
    cell.source = cell.source.replace(
        text, text[: found.start()] + change(found[0]) + text[found.end() :], 1
    )


def by_one(number: str) -> str:
    digits = re.search(r"\d+(?!.*\d)", number)
    return number[: digits.start()] + str(int(digits[0]) + 1) + number[digits.end() :]


def appended(text: str) -> Callable:
    def alter(notebook, by):
        cell = choose(
            (cell for cell in text_cells(notebook) if "## References" not in cell.source), by
        )
        cell.source += "\n\n" + text

    return alter


kind("prose: a number")(lambda notebook, by: number_in_prose(notebook, by, lambda number: "7351"))
kind("prose: a number, by one")(lambda notebook, by: number_in_prose(notebook, by, by_one))
kind("prose: a number in words")(
    lambda notebook, by: number_in_prose(notebook, by, lambda number: "eighty", True)
)
kind("prose: a number more")(appended("So it is 7351 times as fast."))
kind("prose: an output's likeness")(appended("```\nkernels 1, 50.3 MB\n```"))
kind("prose: an output's likeness, as text")(appended("```text\none kernel\n```"))
kind("prose: an output's likeness, indented")(appended("So:\n\n    one kernel"))
kind("prose: HTML")(appended('<div class="output">one kernel</div>'))
kind("prose: HTML in a line")(appended('So <b style="color:red">one kernel</b>.'))
kind("prose: a comment")(appended("<!-- one kernel -->"))
kind("prose: a picture")(appended("![One kernel](../img/one_call.png)"))
kind("prose: a picture in itself")(appended("![One kernel](data:image/png;base64,aGVsbG8=)"))
kind("prose: a directive")(appended("```{raw} html\n<b>one kernel</b>\n```"))
kind("prose: a directive by colons")(appended(":::{figure} ../img/one_call.png\nOne kernel\n:::"))


# Files ----------------------------------------------------------------------------------------------------------------


@kind("files: the text half alone")
def text_half(notebook, by):
    said = outputs.twin_of(outputs.normalise(notebook))
    return nbformat.writes(notebook) + "\n", said + "\nIt is always so.\n"


@kind("files: the text half's header")
def header(notebook, by):
    said = outputs.twin_of(outputs.normalise(notebook))
    return nbformat.writes(notebook) + "\n", said.replace("---\n", "---\ntitle: One kernel\n", 1)


@kind("files: a key twice")
def twice(notebook, by):
    text = nbformat.writes(notebook) + "\n"
    place = choose(re.finditer(r'^   "source": ', text, re.M), by).start()
    return text[:place] + '   "source": "One kernel",\n' + text[place:], None


# Trying it ------------------------------------------------------------------------------------------------------------


def caught(path: Path, alter: Callable, by: random.Random, folder: Path) -> str | None:
    """What the check says first of an altered pair, or None: it is taken for true. Raises NoPlace."""
    committed = nbformat.read(path, 4)
    altered = copy.deepcopy(committed)
    texts = alter(altered, by)
    if not isinstance(texts, tuple):
        if [cell.source for cell in altered.cells] != [cell.source for cell in committed.cells]:
            ids = outputs.normalise(altered)  # as careful as one can be who alters a chapter
            for cell, normal in zip(altered.cells, ids.cells):
                cell.id = normal.id
        texts = nbformat.writes(altered) + "\n", None
    half = folder / path.name
    half.write_text(texts[0])
    half.with_suffix(".md").write_text(texts[1] or outputs.twin_of(outputs.normalise(altered)))
    found = outputs.standing_problems(half) or outputs.compare(nbformat.read(half, 4), committed)
    return found[0] if found else None


def chapters(paths: list[Path], each: int, seed: int = 0) -> collections.Counter:
    """(kind, whether it was caught) to how often, for each kind of alteration and chapter; prints what passed."""
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


def data(folder: Path, each: int, seed: int = 0) -> collections.Counter:
    """The same of the recorded data: a number or a word of a row that somebody changed."""
    counted: collections.Counter = collections.Counter()
    by = random.Random(seed)
    for name, load in (("releases.json", load_releases), ("published.json", load_published)):
        text = (outputs.NOTEBOOKS / "results" / name).read_text()
        pattern = (
            r'"(?:kernels|alpha|outside|count)": (\d)'
            if name == "releases.json"
            else r'"(?:value|over)": (\d)'
        )
        for place in by.sample([*re.finditer(pattern, text)], each):
            (folder / name).write_text(
                text[: place.start(1)] + str(int(place[1]) + 1) + text[place.end(1) :]
            )
            try:
                load(folder)
                counted[f"data: a number in {name}", False] += 1
            except ValueError:
                counted[f"data: a number in {name}", True] += 1
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="beginnings of names, such as 03; all without")
    parser.add_argument("--each", type=int, default=3, help="alterations of a kind in a chapter")
    parser.add_argument("--runs", type=int, default=0, help="assertions to make false")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    paths = outputs.find(options.chapters, outputs.NOTEBOOKS)
    counted = chapters(paths, options.each, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        counted += data(Path(folder), 10 * options.each, options.seed)
    counted += false_assertions(paths, options.runs, options.seed)
    print(table(counted))
    return int(any(not found and name not in MAY_PASS for name, found in counted))


if __name__ == "__main__":
    sys.exit(main())
