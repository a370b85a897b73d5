"""What the prose of a chapter may hold: words, and numbers that the chapter computes.

A number is one that a cell near it prints, or has in its code; or it belongs to a name or a date, by the lists here.
Comments are prose too. What looks like code or output, or is not text, comes from a cell.
"""

import ast
import io
import itertools
import re
import tokenize

from markdown_it import MarkdownIt

NEAR = 3  # cells on either side
LANGUAGES = {"bash", "python", "yaml"}  # of what is not run: a command, a file, a program on a GPU
HTML = re.compile(r"</?(details|summary)>|\s+")
MYST = re.compile(
    r"^\s*(?:%|:{3}).*|\{[\w:-]+\}`.*|\{\{.*|^\s*\(.*\)=$", re.M
)  # what Jupyter does not know
WORDS = {
    word: str(number)
    for number, word in enumerate(
        "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
        "nineteen twenty".split(),
        3,
    )
} | {
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "sixty": "60",
    "seventy": "70",
    "eighty": "80",
    "ninety": "90",
}
NUMBER = re.compile(
    rf"\d+(?:,\d{{3}})*(?:\.\d+)?(?:e[+-]?\d+)?|\b(?:{'|'.join(WORDS)})\b|"
    r"\b(?:dozens?|hundred|thousand|million|billion)\b|\w+fold\b",
    re.I,
)
CHARACTERS = re.compile(r"[^\n -~·×¹⁴−±≈]")  # others can look like what they are not
PRINTED = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
KNOWN = {"448"}  # E4M3's largest number, which chapter 01 prints
NAMES = [
    re.compile(name)
    for name in (
        r"[Cc]hapters? (?:0\d|1[0-2])(?:(?:, | to | and )(?:0\d|1[0-2]))*",
        r"^(?:0\d|1[0-2]) · ",
        r"^\d\d minutes$",
        r"^\d\. ",
        r"NB=09",
        r"Six chapters",
        r"^# Solution \d$",
        r"IEEE (?:Std )?754(?:-\d+)?",
        r"[Ss]ections? (?:4\.2|3\.3\.2(?: and 3\.5\.2)?)\b",
        r"issue 17887\b|request 7751\b",
        r"\b0\.(?:4|9|1[0-2])(?:\.\d+)+\b|(?:JAX|than|and|in) 0\.(?:9|1[0-2])(?:\.\d+)*\b",  # releases of JAX
        r"XLA of 2024|In October 2024|in December 2023",
        r"x86-64",
        r"ubuntu-24\.04",
        r'python-version: "3\.12"',
        r"0x[0-9A-Fa-f]{2}\b|\bE(?:4M3|5M2|8M0)(?:B11)?(?:FN)?(?:UZ)?\b|\bP3109|@v[56]\b|(?:[Ss]everal|many) hundred|dozen",
        r"\b(?:bfloat16|float(?:16|32|64)|bf16|f(?:8|16|32|64)|tf32|FP(?:[468]|16)|int8|relu6|B11|aarch64|m64)\b",
        r"\b(?:A100|H[128]00|B200|L40S|MI3[05]0)X?\b",
        r"[Cc]apability 9\.0|Below 8\.9|12\.0 is Blackwell|A100 as 9\.0",
        r"ten bits",  # those of tf32's mantissa
        r"1024 (?:amaxes|long) by default",  # in Transformer Engine's and Flax's documentation
    )
]


def problems(notebook) -> list[tuple[int, str]]:
    """(cell, what is wrong) for everything in a chapter's prose that no cell of it bears out."""
    shown = [_printed(cell) if cell.cell_type == "code" else set() for cell in notebook.cells]
    found = []
    for number, cell in enumerate(notebook.cells):
        there = set().union(*shown[max(0, number - NEAR) : number + NEAR + 1])
        for text in (
            texts(cell.source, found, number + 1)
            if cell.cell_type == "markdown"
            else _comments(cell.source)
        ):
            for name in NAMES:
                text = name.sub("", text)
            found += [
                (
                    number + 1,
                    f"{said!r} stands in {text.strip()[:80]!r}, and no cell near it has that number: "
                    f"print it, or name it in tools/outputs/prose.py",
                )
                for said in NUMBER.findall(text)
                if value(said) not in there | KNOWN
            ]
    return found


def texts(source: str, wrong: list[tuple[int, str]], number: int = 0) -> list[str]:
    """The pieces of text of a text cell, in which a number is a claim; what may not be in one goes to `wrong`."""
    found = []
    if odd := CHARACTERS.findall(source):
        wrong.append(
            (
                number,
                f"{odd[0]!a}, which may look like another: tools/outputs/prose.py has the characters in use",
            )
        )
    wrong += [
        (number, f"what MyST alone reads: {myst[0].strip()[:60]!r}")
        for myst in MYST.finditer(source)
    ]
    found += map(
        " ".join, re.findall(r"<summary>([^<]*)</summary>|^\[[^\]]*\]:(.*)", source, re.M)
    )  # and footnotes
    source = re.sub(
        r"(?<=\d)(?:\\[,;:! ]|\{,?\}|~)+(?=\d)", "", source
    )  # TeX's spaces do not part a number
    source, *references = re.split(r"^## References$", source, flags=re.M)
    for token in MarkdownIt("commonmark").enable("table").parse("\n".join(references)):
        if token.type in ("fence", "code_block", "html_block", "heading_open"):
            wrong.append((number, "more than a list of references"))
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.type == "list_item_open" and len(token.info) > 1:
            found.append(token.info)  # where a list starts
        if token.type == "fence":
            found.append(token.content)
            if token.info.strip() not in LANGUAGES:
                wrong.append(
                    (
                        number,
                        f"a fence of {token.info.strip()!r}: what a program printed is the output of a "
                        f"cell, and a command or file is one of {', '.join(sorted(LANGUAGES))}",
                    )
                )
        elif token.type == "code_block":
            wrong.append(
                (
                    number,
                    f"an indented block: {token.content.strip()[:60]!r}; code belongs in a cell",
                )
            )
        elif token.type == "html_block":
            wrong += _html(token.content, number)
        text = ""
        for before, part in itertools.pairwise([None, *(token.children or ())]):
            if before and before.type == "link_open" and before.markup == "autolink":
                continue  # the address itself
            if part.type == "html_inline":
                wrong += _html(part.content, number)
            elif part.type == "image":
                wrong.append((number, "a picture that no cell draws"))
            text += (
                part.content
                if part.type in ("text", "code_inline")
                else " "
                if "break" in part.type
                else ""
            )
        found.append(text)
    return found


def _html(html: str, number: int) -> list[tuple[int, str]]:
    rest = HTML.sub("", re.sub(r"<summary>[^<]*</summary>", "", html))
    return [(number, f"HTML in prose: {rest[:60]!r}")] if rest else []


def _comments(source: str) -> list[str]:
    lines = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in lines if token.type == tokenize.COMMENT]


def value(said: str) -> str:
    """A number as a cell prints it."""
    return WORDS.get(said.lower(), re.sub(r"\.0+$", "", said.replace(",", "")))


def _printed(cell) -> set[str]:
    """Numbers in a cell's outputs, and in its code without the comments."""
    pieces = [ast.unparse(ast.parse(cell.source))]
    for output in cell.outputs:
        pieces.append(_joined(output.get("text", "")))
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/") or kind == "image/svg+xml":
                pieces.append(
                    re.sub(r"<style.*?</style>|<[^>]*>", " ", _joined(content), flags=re.S)
                )
        pieces += [meta["alt"] for meta in output.get("metadata", {}).values() if "alt" in meta]
    return {
        value(number)
        for piece in pieces
        for number in PRINTED.findall(re.sub(r"\b0x[0-9a-fA-F]+", " ", piece))
    }


def _joined(value) -> str:
    return "".join(value) if isinstance(value, list) else value
