"""The pages of fp8lens' rules: their programs compiled, and what was recorded of them."""

import ast
import html
import textwrap
from collections.abc import Mapping
from typing import Any

import jax

from fp8lens import Inspection, inspect
from fp8lens.cli import parse_shapes
from fp8lens.hlo.text import size
from fp8lens.rules.find import every_name
from fp8lens.rules.page import PRELUDE, Program
from fp8lens.rules.rule import RULES

#: What each rule loses, and what that means; None: the program decides.
LOSSES = {
    "fp8": "the matmul does not run in FP8",
    "output": "a conversion of the result runs in a kernel of its own",
    "epilogue": "an activation runs in a kernel of its own",
    "bias": "an addition runs in a kernel of its own",
    "amax": "the largest magnitude is taken in a kernel of its own",
    "scale": "a scale is applied or computed in a kernel of its own",
    "transpose": "a kernel transposes an operand or the result",
    "pad": "a kernel pads an operand or cuts the result",
    "duplicate": "a matmul, or a quantization, runs more often than it has to",
    "wire": "devices send each other a wide type instead of FP8",
    "kernel": "it is not known what a kernel does",
    None: "the program decides what is lost",
}


def compiled(program: Program, **options: Any) -> Inspection:
    """A page's program, compiled as its page says, and with these options where it says nothing.

    Raises what `fp8lens.inspect` raises.
    """
    names: dict[str, Any] = {}
    function = ast.parse(program.code).body[-1]
    assert isinstance(function, ast.FunctionDef)
    # A report names the program's lines, as if it stood in a file, and none of what they call.
    exec(compile(PRELUDE, __file__, "exec"), names)
    exec(compile(program.code, f"{function.name}.py", "exec"), names)
    shapes = parse_shapes(" ".join(program.arguments.values()))
    given = eval(f"dict({program.options})", names | {"P": jax.sharding.PartitionSpec})
    return inspect(names[function.name], *shapes, **options | given)


# What was recorded, a pair of programs for each chip: tools/recorders/rule_programs.py ---


def holds(name: str, pair: Mapping[str, Any]) -> bool:
    """Whether the rule is broken by the first program of a recorded pair, and not by the second."""
    broken = name in pair["loses"].get("rules", ())
    return broken and name not in pair.get("keeps", {}).get("rules", ())


def types(made: Mapping[str, Any]) -> str:
    """What the matmuls of a recorded program multiply in."""
    return "does not compile" if "error" in made else ", ".join(made["types"]) or "no matmul"


def kernels(made: Mapping[str, Any]) -> str:
    """How many kernels a recorded program launches."""
    return str(made.get("kernels", ""))


def nbytes(made: Mapping[str, Any]) -> str:
    """How many bytes a recorded program's kernels read and write."""
    unbroken = "\N{NO-BREAK SPACE}"
    return size(made["bytes"]).replace(" ", unbroken) if "bytes" in made else ""


def change(pair: Mapping[str, Any], of: Any) -> str:
    """`of` the program that loses something, and of the fixed one: "2 → 1", or "2" for both."""
    said = [of(pair[which]) for which in ("loses", "keeps") if which in pair]
    return " → ".join(dict.fromkeys(filter(None, said)))


def _kernels_and_types(pair: Mapping[str, Any]) -> str:
    """The change in kernels; with the types, where these change too: "tf32: 3 → FP8: 1"."""
    if "→" not in change(pair, types):
        return change(pair, kernels)
    return change(pair, lambda made: f"{types(made)}: {kernels(made)}".rstrip(": "))


class Index(list[tuple[str, str, str, str]]):
    """Rules, each with its first sentence, kernels and bytes, as text; in a notebook a table."""

    HEAD = ("rule", "kernels", "bytes")

    def __repr__(self) -> str:
        lines = []
        for name, sentence, *figures in self:
            lines += [", ".join(filter(None, [name, *figures])), f"    {sentence}"]
        return "\n".join(
            part for line in lines for part in textwrap.wrap(line, 100, subsequent_indent="    ")
        )

    def _repr_html_(self) -> str:
        style = "text-align:left;vertical-align:top;padding:.3em .8em .3em 0"
        heads = "".join(f'<th style="{style}">{head}</th>' for head in self.HEAD)
        lines = [f"<tr>{heads}</tr>"]
        for name, sentence, *figures in self:
            cells = [f"<code>{name}</code><br>{html.escape(sentence)}", *figures]
            lines.append(
                "<tr>" + "".join(f'<td style="{style}">{cell}</td>' for cell in cells) + "</tr>"
            )
        return f"<table>\n{''.join(lines)}</table>"


def index(recorded: Mapping[str, Mapping[str, Any]], *lost: str | None) -> Index:
    """The rules by which one of these is `lost`, with what the newest recorded release makes of
    their programs on the first chip: kernels and bytes of the one that loses something, and of
    the fixed one.
    """
    newest = list(recorded.values())[-1]
    rows = Index()
    for loss in lost:
        for name in every_name():
            if RULES[name].lost != loss:
                continue
            row = newest["rows"].get(name)
            pair = next(iter(row["chips"].values())) if row else None
            figures = (_kernels_and_types(pair), change(pair, nbytes)) if pair else ("", "")
            rows.append((name, RULES[name].page.summary, *figures))
    return rows
