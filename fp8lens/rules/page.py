"""A rule's page: what it means, why XLA does so, a program that breaks it, and the same one fixed.

It is Markdown beside the code. Its title is the rule's name, its first paragraph a summary of one
sentence. The sections "Reason" and "Fix" are the sentences that a report prints, with {names} that
the rule fills in; "Source" says whose rule it is, and after "Logs:" what XLA logs of it under
TF_CPP_VMODULE=gemm_rewriter=1. "Loses it" and, if there is one, "Keeps it" have a program: its last
function is compiled, with the options in a line "Compiled with `...`." before it.

A program's arguments have the shapes in ARGUMENTS by their names, or others by annotation, as in
`def layer(a: "f8e4m3fn[64,256]")`. The names in PRELUDE are there.
"""

import ast
import dataclasses
import re
import textwrap
from pathlib import Path

from fp8lens.hlo.text import Ink, Style, page_width, uncoloured

FOLDER = Path(__file__).parent
#: Shapes as HLO writes them: M is 64, N 128 and K 256.
ARGUMENTS = {
    "a": "f8e4m3fn[64,256]",
    "b": "f8e4m3fn[128,256]",
    "a_scale": "f32[]",
    "b_scale": "f32[]",
    "d_scale": "f32[]",
    "bias": "bf16[128]",
    "c": "bf16[64,128]",
    "x": "bf16[64,256]",
}
PRELUDE = '''\
import jax
import jax.numpy as jnp

e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
relu, gelu = jax.nn.relu, jax.nn.gelu


def dequantize(q, scale, dtype=f32):
    """What the codes stand for."""
    return q.astype(dtype) * scale.astype(dtype)


def scaled_dot(a, b, a_scale, b_scale, dtype=f32):
    """The product of [M, K] and [N, K], K last in both."""
    return jax.lax.dot(dequantize(a, a_scale, dtype), dequantize(b, b_scale, dtype).T)


def quantize(x, scale):
    """Codes for x * scale, which saturate at E4M3's largest numbers."""
    return jnp.clip(x * scale.astype(x.dtype), -448, 448).astype(e4m3)
'''


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a page: its code, and the options that it is compiled with, as written."""

    code: str
    options: str = ""

    @property
    def arguments(self) -> dict[str, str]:
        """The shape of each argument of the function, which is the code's last."""
        function = ast.parse(self.code).body[-1]
        if not isinstance(function, ast.FunctionDef):
            raise ValueError(f"a program ends in its function, not in {ast.unparse(function)!r}")
        shapes = {}
        for argument in function.args.args:
            shape = argument.annotation
            given = shape.value if isinstance(shape, ast.Constant) else ARGUMENTS.get(argument.arg)
            if not isinstance(given, str):
                raise ValueError(f"{argument.arg}: give it a shape, as in ARGUMENTS")
            shapes[argument.arg] = given
        return shapes


@dataclasses.dataclass(frozen=True)
class Page:
    """A rule in words. `why` is in paragraphs; the programs are None where there are none."""

    name: str
    summary: str
    why: str
    reason: str
    fix: str
    source: str
    logs: str
    loses: Program | None
    keeps: Program | None

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, its headings in this style."""
        lines = [style(self.name, Ink.HEADING), "", self.summary, ""]
        if self.why:
            lines += [self.why, ""]
        source = f'{self.source}: "{self.logs}"' if self.logs else self.source
        for name, text in (("reason", self.reason), ("fix", self.fix), ("source", source)):
            lines += textwrap.wrap(f"{name}: {text}", page_width(), subsequent_indent="    ")
        if "{" in self.reason + self.fix:
            lines.append("A report fills in what stands in braces.")
        for title, program in (("Loses it:", self.loses), ("Keeps it:", self.keeps)):
            if program:
                options = f" (compiled with {program.options})" if program.options else ""
                code = textwrap.indent(program.code, "    ")
                lines += ["", style(title + options, Ink.HEADING), "", code]
        return "\n".join(lines)


def read_page(name: str) -> Page:
    """The page of a rule. FileNotFoundError where there is none; ValueError where a section is
    missing.
    """
    path = FOLDER / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    head, *rest = re.split(r"^## (.+)\n", text, flags=re.M)
    sections = {title: body.strip() for title, body in zip(rest[::2], rest[1::2], strict=True)}
    if missing := [title for title in ("Reason", "Fix", "Source") if title not in sections]:
        raise ValueError(f"{path.name} has no section {missing[0]!r}")
    _, summary, *why = head.strip().split("\n\n")
    source, _, logs = sections["Source"].partition("Logs:")
    return Page(
        name,
        _one_line(summary),
        "\n\n".join(why),
        _one_line(sections["Reason"]),
        _one_line(sections["Fix"]),
        _one_line(source),
        _one_line(logs).strip('"'),
        _program(sections.get("Loses it", "")),
        _program(sections.get("Keeps it", "")),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _program(section: str) -> Program | None:
    code = re.search(r"^```python\n(.*?)\n```$", section, re.M | re.S)
    options = re.search(r"^Compiled with `(.+)`\.$", section, re.M)
    return Program(code[1], options[1] if options else "") if code else None
