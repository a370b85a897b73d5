"""A number in a chapter's prose is one that a cell near it prints, or has in its code.

Only digits count: a number in words is the writer's and the reviewer's. References are not read,
nor is the row of minutes in the opening table, which a test counts.
"""

import ast
import re
from collections.abc import Iterable, Iterator

from markdown_it import MarkdownIt
from nbformat import NotebookNode

from tools.outputs.chapters import TIME
from tools.outputs.notebook import describe, text_of

NEAR = 3  # cells on either side
# A number, not the digits of a name such as E4M3, x86-64 or FP8.
NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z][-.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?"
)
# What looks like a claim, and is a name.
NAMES = re.compile(
    r"\b448\b"  # E4M3's largest number, which chapter 01 prints
    r"|\b\d+(?:\.\d+){2,}"  # a version to the patch
    r"|\b(?:JAX|jax|Python|CUDA|cuBLAS|than|in|and) \d+\.\d+"
    r"|[Cc]hapters? \d\d(?:(?:, | to | and )\d\d)*|^\d\d · |NB=\d+"
    r"|^\d+\. "  # a puzzle's number
    r"|[Ss]ections? [\d.]+(?: and [\d.]+)?"
    r"|IEEE 754|x86-64|XLA of 2024|issue \d+|\b0x[0-9A-Fa-f]+"
    r"|Below 8\.9"  # the compute capability of the first chips with FP8
    r"|1024 (?:amaxes|long) by default"  # in Transformer Engine's and Flax's documentation
    r"|\b(?:January|October|December|in) 20\d\d\b"
)


def problems(notebook: NotebookNode) -> list[str]:
    """A sentence for each number in a chapter's prose that no cell near it has."""
    shown = [shown_by(cell) for cell in notebook.cells]
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            near = set().union(*shown[max(0, number - NEAR) : number + NEAR + 1])
            where = describe(number + 1, cell)
            found += [
                f"{where}: {said!r} stands in the prose, and no cell near it prints that: print it"
                for said in unshown(cell.source, near)
            ]
    return found


def unshown(source: str, shown: Iterable[str]) -> list[str]:
    """The numbers in a text that are not among these."""
    texts = (NAMES.sub("", text) for text in prose_of(source))
    said = (number for text in texts for number in NUMBER.findall(text))
    return [number for number in said if _value(number) not in shown]


def prose_of(source: str) -> Iterator[str]:
    """What is read of a text, block by block: no program, address, reference or tag."""
    source = re.split(r"^## References$", TIME.sub("", source), flags=re.M)[0]
    # TeX's spaces do not part a number.
    source = re.sub(r"(?<=\d)(?:\\[,;:! ]|\{,?\}|~)+(?=\d)", "", source)
    for token in MarkdownIt("commonmark").enable("table").parse(source):
        parts = token.children or []
        texts = [part.content for part in parts if part.type in ("text", "code_inline")]
        yield "".join(texts)


def numbers_in(text: str) -> set[str]:
    """The numbers that a program or an output has, also within names and shapes."""
    with_commas = re.findall(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)
    plain = re.findall(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)
    return {_value(number) for number in with_commas + plain}


def shown_by(cell: NotebookNode) -> set[str]:
    """The numbers in a cell's code and outputs."""
    if cell.cell_type != "code":
        return set()
    texts = [ast.unparse(ast.parse(cell.source))]  # without its comments
    for output in cell.outputs:
        texts.append(text_of(output.get("text", "")))
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/") or kind == "image/svg+xml":
                texts.append(
                    re.sub(r"<style.*?</style>|<[^>]*>", " ", text_of(content), flags=re.S)
                )
        texts.append(str(output.get("metadata", {})))  # the description of a picture
    return set().union(*map(numbers_in, texts))


def _value(number: str) -> str:
    return re.sub(r"\.0+$", "", number.replace(",", ""))
