"""What the prose of a chapter may hold: words, and numbers that the chapter computes.

A number is one that a cell near it prints, or has in its code, with the same unit; or it belongs to
a name or a date, by the lists here. Comments are prose too. What looks like code or output, or is
not text, comes from a cell. References are a list of links. Other pages (`page_problems`) may say
what the chapters print to which the same section links.
"""

import ast
import dataclasses
import io
import itertools
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tools.outputs import chapters

NEAR = 3  # cells on either side
LANGUAGES = {"bash", "python", "yaml"}  # of what is not run: a command, a file, a program on a GPU
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
HTML = re.compile(r"</?(details|summary)>|\s+")
# What Jupyter does not know.
MYST = re.compile(r"^\s*(?:%|:{3}).*|\{[\w:-]+\}`.*|\{\{.*|^\s*\(.*\)=$", re.M)
CHARACTERS = re.compile(r"[^\n -~·×¹⁴−±≈]")  # others can look like what they are not

# Numbers and units --------------------------------------------------------------------------------

_COUNTED = (
    "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_TENS = "thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
WORDS = {
    **{word: str(number) for number, word in enumerate(_COUNTED.split(), 3)},
    **{word: str(10 * number) for number, word in enumerate(_TENS.split(), 3)},
}
# A place, "a third kernel": of three. A part, "two thirds": 0.67, or 66%.
ORDINALS = {word: number for number, word in enumerate(_ORDINALS.split(), 3)}
# The spellings of a unit, in a line. What is left out, as "matmuls", is rarely printed as a word
# beside its number.
_SPELLINGS = """\
B byte bytes
kB KB
MB
GB gigabytes
TB
KiB
MiB
GiB
TiB
bit bits
dB db
ns
us µs
ms
s second seconds
minute minutes
hour hours
FLOP FLOPs
MFLOP
GFLOP
TFLOP
TFLOP/s
GB/s
TB/s
MHz
W
% percent
times x × fold
kernel kernels""".splitlines()
UNITS = {spelling: line.split()[0] for line in _SPELLINGS for spelling in line.split()}
_UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
# "2x", but not "2 x 3": that is a shape.
_WITH_UNIT = rf"(?:[ -]?(?P<unit>{_UNIT})(?![\w/^])(?! ?\d))?"
NUMBER = re.compile(
    rf"(?P<number>{_DIGITS}|\b(?:{'|'.join(WORDS)})\b|"
    rf"\b(?:{'|'.join(ORDINALS)})s?\b|"
    rf"\b(?:dozens?|hundred|thousand|million|billion)\b|\w+fold\b){_WITH_UNIT}",
    re.I,
)
PART = re.compile(rf"\b(a|one|two|{'|'.join(WORDS)})[ -](?:{'|'.join(ORDINALS)})s?$", re.I)
NEARLY = 0.09  # as a printed number is a part: 21% a fifth; not 10% a ninth
PRINTED = re.compile(rf"(?P<number>{_DIGITS}){_WITH_UNIT}")
LABEL = re.compile(rf"(?<![\w/])(?:{_UNIT})(?![\w/])")  # of a column, an axis, a variable
SHAPE = re.compile(r"(?<=\w) [x×] (?=\w)")
WIDTH = re.compile(r"(?:float|int|fp|f|m)(\d+)", re.I)  # a type has its bits in its name
FACTOR = re.compile(rf"({_DIGITS}) \*(?!\*)|(?<!\*)\* ({_DIGITS})")  # so many times, in code

# Names --------------------------------------------------------------------------------------------

KNOWN = {"448"}  # E4M3's largest number, which chapter 01 prints


_CHAPTER = f"(?:{'|'.join(name[:2] for name in chapters.names() if name[0].isdigit())})"
NAMES = [
    re.compile(name)
    for name in (
        # This course: its chapters, their minutes (tests count them), what is numbered in one.
        rf"[Cc]hapters? {_CHAPTER}(?:(?:, | to | and ){_CHAPTER})*",
        rf"^{_CHAPTER} · ",
        r"^\d\d minutes, \d\d with the puzzles$",
        r"^\d\. ",
        r"NB=11",
        r"^# Solution \d$",
        # Standards, types and formats.
        r"IEEE 754",
        r"0x[0-9A-Fa-f]{2}\b",
        r"\bE(?:4M3|5M2|8M0)(?:B11)?(?:FN)?(?:UZ)?\b",
        r"\b(?:bfloat16|float(?:16|32|64)|bf16|f(?:8|16|32|64)|tf32|FP(?:[468]|16)|int8|relu6)\b",
        r"\b(?:MXFP[468]|NVFP4)\b",
        r"\w*fp8\w*",
        r"ten bits",  # those of tf32's mantissa
        r"\b24 bits",  # those of float32's significand
        # Chips, systems and releases.
        r"\b(?:A100|H[128]00|B200|L40S|MI3[05]0)X?\b",
        r"\bTPU7x\b",
        r"Below 8\.9",
        r"\b(?:aarch64|m64)\b",
        r"x86-64",
        r"ubuntu-24\.04",
        r'python-version: "3\.12"',
        r"@v[56]\b",
        r"\b0\.(?:4|9|1[0-2])(?:\.\d+)+\b",  # JAX, to the patch
        r"(?:JAX|than|and|in) 0\.(?:9|1[0-2])(?:\.\d+)*\b",
        r"XLA of 2024",
        r"In October 2024",
        r"in December 2023",
        # What others wrote, and named.
        r"[Ss]ection 4\.2\b",  # of Higham's book
        r"[Ss]ections 3\.3\.2 and 3\.5\.2\b",  # of DeepSeek-V3's report
        r"about 14 bits",  # as that report has it
        r"\btcgen05\b",
        r"\bcuBLAS 12\.9\b",  # with scales for blocks, as NVIDIA's engineers say
        r"issue (?:17887|2377)\b",
        r"an MLP four times as wide",  # in Transformer Engine's quickstart
        r"1024 (?:amaxes|long) by default",  # in Transformer Engine's and Flax's documentation
        r"\bDeepSeek-V3\b",
        r"\bQwen3\b",
        # No number is meant.
        r"(?:[Ss]everal|many) hundred",
        r"dozen",
    )
]
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
# In references: what their addresses do not have, as it is written there.
CITED = [
    re.compile(name)
    for name in (
        r"\bTable 1 defines\b",
        rf"\b\d\d? (?:{MONTHS}) 20\d\d\b",  # the day of an answer
        r"\bversion 1\.0, 2023\.",  # of the MX specification
        r"\bIEEE Std 754-2019\b",
        r"\bF8(?:ConvertD|AddDAmax)\b",
        r"\b2nd edition, SIAM, 2002\. Section 4\.2\b",
        r"\bsections? 3\.3\.2\b(?: and 3\.5\.2\b)?",
        r"\bCACM 2009\b",
        r"\bLlama 2\b",
        r"\bFloat8\w+Scaling\b",
        r"\b8-bit Numerical Formats\b",
    )
]


def without_names(text: str) -> str:
    """The text without what only looks like a claim."""
    for name in NAMES:
        text = name.sub("", text)
    return text


# What is shown ------------------------------------------------------------------------------------


def is_ordinal(number: str) -> bool:
    """Whether it is "third", "thirds", ... "tenths"."""
    return number.lower().removesuffix("s") in ORDINALS


@dataclasses.dataclass(frozen=True)
class Shown:
    """Numbers in outputs and code, and the units with which they stand there."""

    numbers: frozenset[str] = frozenset()
    with_units: frozenset[tuple[str, str]] = frozenset()

    def lacks(self, said: re.Match) -> str | None:
        """What of a number that the prose says is shown nowhere, or None."""
        number, unit = value(said["number"]), said["unit"]
        if is_ordinal(said["number"]):
            number = said["number"].lower()
            of = ORDINALS[number.removesuffix("s")]
            if not number.endswith("s") and str(of) in self.numbers:
                return None  # a place
            part = PART.search(said.string[: said.end("number")])
            if part and self.has_part(part[1], of):
                return None
            return said["number"]
        if number not in self.numbers | KNOWN:
            return said["number"]
        if unit and (number, UNITS.get(unit, unit.lower())) not in self.with_units:
            return said[0]
        return None

    def has_part(self, count: str, of: int) -> bool:
        """Whether a number or a percentage is about so many parts of a whole."""
        words = {"a": 1, "one": 1, "two": 2}
        meant = words.get(count.lower()) or int(WORDS[count.lower()])
        shares = [float(number.replace(",", "")) for number in self.numbers]
        shares += [float(number) / 100 for number, unit in self.with_units if unit == "%"]
        return any(abs(share - meant / of) <= NEARLY * meant / of for share in shares)


def together(shown: Iterable[Shown]) -> Shown:
    """What several cells show."""
    shown = [*shown]
    return Shown(
        frozenset().union(*(one.numbers for one in shown)),
        frozenset().union(*(one.with_units for one in shown)),
    )


class _Values(ast.NodeTransformer):
    """Leaves out the numbers of code that are no values: bounds of slices, widths in print."""

    def visit_Slice(self, node: ast.Slice) -> ast.Slice:
        return ast.Slice()

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.FormattedValue:
        self.generic_visit(node)
        return ast.FormattedValue(node.value, node.conversion)


def shown_by(cell) -> Shown:
    """What a cell's outputs show, and its code without the comments.

    A number has the unit that follows it. Where none does, it may have any that stands alone in the
    same cell: the head of a column, the label of an axis, a variable's name.
    """
    if cell.cell_type != "code":
        return Shown()
    code = ast.unparse(_Values().visit(ast.parse(cell.source)))
    pieces = [re.sub(r"\b0x[0-9a-fA-F]+", " ", piece) for piece in (code, *_outputs(cell))]
    # x may be a variable or part of a shape: in code a unit is a word, or part of a name.
    words = [re.sub(r"[\W\d_]+|\b[A-Za-z]\b", " ", pieces[0])]
    words += [PRINTED.sub(" ", SHAPE.sub(" ", piece)) for piece in pieces[1:]]
    labels = {UNITS[label] for text in words for label in LABEL.findall(text)}
    bare, pairs = set(), set()
    widths = {(width, "bit") for piece in pieces for width in WIDTH.findall(piece)}
    factors = {(value(one or other), "times") for one, other in FACTOR.findall(code)}
    for piece in pieces:
        for found in PRINTED.finditer(piece):
            if found["unit"]:
                pairs.add((value(found["number"]), UNITS[found["unit"]]))
            else:
                bare.add(value(found["number"]))
    numbers = bare | {number for number, _ in pairs}
    with_labels = set(itertools.product(bare, labels))
    return Shown(frozenset(numbers), frozenset(pairs | with_labels | widths | factors))


def _outputs(cell) -> Iterator[str]:
    """The texts among a cell's outputs."""
    for output in cell.outputs:
        yield _joined(output.get("text", ""))
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/") or kind == "image/svg+xml":
                yield re.sub(r"<style.*?</style>|<[^>]*>", " ", _joined(content), flags=re.S)
        for meta in output.get("metadata", {}).values():
            if isinstance(meta, dict):  # anything may stand there in a file that somebody edited
                yield str(meta.get("alt", ""))


def value(said: str) -> str:
    """A number as a cell prints it."""
    return WORDS.get(said.lower(), re.sub(r"\.0+$", "", said.replace(",", "")))


def _joined(content) -> str:
    return "".join(content) if isinstance(content, list) else content


# What is said -------------------------------------------------------------------------------------


def problems(notebook) -> list[tuple[int, str]]:
    """(cell, what is wrong) for everything in a chapter's prose that no cell of it bears out."""
    shown = [shown_by(cell) for cell in notebook.cells]
    found: list[tuple[int, str]] = []
    for number, cell in enumerate(notebook.cells):
        near = together(shown[max(0, number - NEAR) : number + NEAR + 1])
        wrong: list[str] = []
        wrong += unsaid(said_by(cell, wrong), near, "no cell near it has that")
        found += [(number + 1, what) for what in wrong]
    return found


def said_by(cell, wrong: list[str]) -> list[str]:
    """The texts of a cell: its prose, or its comments."""
    return texts(cell.source, wrong) if cell.cell_type == "markdown" else _comments(cell.source)


def unsaid(said: Iterable[str], shown: Shown, why: str) -> list[str]:
    """A sentence for each number in these texts that is not shown with its unit."""
    return [
        f"{lacking!r} stands in {text.strip()[:80]!r}, and {why}: print it, or name it in "
        f"tools/outputs/prose.py"
        for text in said
        for number in NUMBER.finditer(without_names(text))
        if (lacking := shown.lacks(number))
    ]


def page_problems(source: str, shown_in: Callable[[str], Shown], facts: Iterable[str]) -> list[str]:
    """What is wrong in a page that is no chapter, such as the README.

    A number there is in one of the `facts`, phrases that the caller has computed, or shown in a
    chapter that the same section names: `shown_in` gives what one shows, by the beginning of its
    name. Of a fence only comments are read: tests run the programs and commands in such pages, and
    compare what they print.
    """
    facts = [*facts]
    found = [f"nowhere in it: {fact!r}" for fact in facts if fact not in source]
    source = FENCE.sub(lambda fence: "\n".join(re.findall("#.*", fence[0])), source)
    for section in re.split(r"^(?=## )", source, flags=re.M):
        named = re.findall(r"\bchapter \d\d\b|\((?:notebooks/)?(?:\d\d|[A-Z])(?=_)", section)
        names = {re.split("[ (/]", name)[-1] for name in named}
        shown = together(map(shown_in, sorted(names)))
        for fact in facts:
            section = section.replace(fact, "")
        found += unsaid(texts(section, [], images=True), shown, "no chapter named there has that")
    return found


def texts(source: str, wrong: list[str], images: bool = False) -> list[str]:
    """The pieces of text of a text cell, in which a number is a claim; what may not be in one goes
    to `wrong`.

    With `images`, their descriptions are such texts; without, an image is wrong.
    """
    if odd := CHARACTERS.findall(source):
        wrong.append(
            f"{odd[0]!a}, which may look like another: tools/outputs/prose.py has the characters "
            f"in use"
        )
    wrong += [f"what MyST alone reads: {myst[0].strip()[:60]!r}" for myst in MYST.finditer(source)]
    # Summaries and footnotes.
    aside = re.findall(r"<summary>([^<]*)</summary>|^\[[^\]]*\]:(.*)", source, re.M)
    found = [" ".join(pair) for pair in aside]
    # TeX's spaces do not part a number.
    source = re.sub(r"(?<=\d)(?:\\[,;:! ]|\{,?\}|~)+(?=\d)", "", source)
    source, *references = re.split(r"^## References$", source, flags=re.M)
    _references("\n".join(references), wrong)
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        if token.type == "list_item_open" and len(token.info) > 1:
            found.append(token.info)  # where a list starts
        if token.type == "fence":
            found.append(token.content)
        wrong += _not_prose(token, images)
        found.append(_text(token.children or [], images))
    return found


def _not_prose(token: Token, images: bool) -> list[str]:
    """What is wrong with a block, and with what stands in its lines."""
    wrong = []
    if token.type == "fence" and token.info.strip() not in LANGUAGES:
        wrong.append(
            f"a fence of {token.info.strip()!r}: what a program printed is the output of a cell, "
            f"and a command or file is one of {', '.join(sorted(LANGUAGES))}"
        )
    elif token.type == "code_block":
        wrong.append(f"an indented block: {token.content.strip()[:60]!r}; code belongs in a cell")
    for part in (token, *(token.children or ())):
        if part.type in ("html_block", "html_inline"):
            wrong += _html(part.content)
        elif part.type == "image" and not images:
            wrong.append("a picture that no cell draws")
    return wrong


def _text(parts: list[Token], images: bool = False) -> str:
    """What is read of a line: not the addresses."""
    text = ""
    address = False
    for part in parts:
        if address:
            address = False
            continue
        address = part.type == "link_open" and part.markup == "autolink"
        if part.type in ("text", "code_inline") or part.type == "image" and images:
            text += part.content
        elif "break" in part.type:
            text += " "
    return text


def _references(source: str, wrong: list[str]) -> None:
    """What is wrong in a list of references.

    Each entry has a link, and each of its numbers is in a link's address too: that of a paper, an
    issue, a type, a year. Or it is among the CITED.
    """
    inside = 0
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        inside += token.nesting if token.type.startswith("bullet_list") else 0
        wrong += _not_prose(token, False)
        if token.type in (
            "fence",
            "code_block",
            "html_block",
            "heading_open",
            "table_open",
            "ordered_list_open",
        ):
            wrong.append("more than a list of references")
        if token.type != "inline":
            continue
        parts = token.children or []
        text = _text(parts)
        links = [str(part.attrs["href"]) for part in parts if part.type == "link_open"]
        if not inside and not text.endswith(":"):
            wrong.append(f"no entry of the list of references: {text[:60]!r}")
        if inside and not any(link.startswith("https://") for link in links):
            wrong.append(f"a reference without an address: {text[:60]!r}")
        for name in CITED:
            text = name.sub("", text)
        wrong += [
            f"{number['number']!r} stands in the reference {text[:60]!r}, but not in its address: "
            f"name it in tools/outputs/prose.py"
            for number in NUMBER.finditer(without_names(text))
            if value(number["number"]) not in _in_addresses(" ".join(links))
        ]


def _in_addresses(addresses: str) -> set[str]:
    """The numbers in addresses, with the year of a paper in arXiv's: 2209.05433 is of 2022."""
    numbers = {value(number) for number in re.findall(r"\d+(?:\.\d+)*", addresses)}
    numbers |= {value(pair.replace("-", ".")) for pair in re.findall(r"\d+-\d+", addresses)}
    years = {f"20{year}" for year in re.findall(r"arxiv\.org/abs/(\d\d)", addresses)}
    return numbers | years


def _html(html: str) -> list[str]:
    rest = HTML.sub("", re.sub(r"<summary>[^<]*</summary>", "", html))
    return [f"HTML in prose: {rest[:60]!r}"] if rest else []


def _comments(source: str) -> list[str]:
    lines = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in lines if token.type == tokenize.COMMENT]
