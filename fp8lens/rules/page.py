"""A rule's page: what it means, why XLA does so, a program that breaks it, and the same one fixed.

It is the docstring of the rule's function. It begins with a summary of one sentence and paragraphs
of prose. "Loses it:" stands before a program, and "Keeps it:" before the fixed one, if there is
one. Each program is a function, indented, with what it needs around it. "Compiled with:" before
either of them gives options of `fp8lens.inspect`.

A program's arguments have the shapes in ARGUMENTS by their names, or others by annotation, as in
`def layer(a: "f8e4m3fn[64,256]")`. The names in PRELUDE are there.
"""

import ast
import dataclasses
import difflib
import re
import textwrap

from fp8lens.hlo.text import Ink, Style, page_width, uncoloured
from fp8lens.rules.rule import RULES, Rule

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
_SECTION = re.compile(r"^(Loses it|Keeps it|Compiled with):(.*)$", re.M)


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

    rule: Rule
    why: str
    loses: Program | None
    keeps: Program | None

    @property
    def fix(self) -> str:
        """The rule's fix; what a report fills in stands in braces, and so do braces of its own."""
        return self.rule.fix.replace("{{", "{").replace("}}", "}")

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, its headings in this style."""
        rule = self.rule
        lost = f", lost {rule.lost}" if rule.lost else ""
        lines = [style(f"{rule.name}{lost}", Ink.HEADING), "", rule.summary, ""]
        if self.why:
            lines += [self.why, ""]
        texts = (("reason", rule.reason), ("fix", self.fix), ("rule", rule.authority))
        for name, text in texts:
            lines += textwrap.wrap(f"{name}: {text}", page_width(), subsequent_indent="    ")
        if "{" in rule.reason + rule.fix:
            lines.append("A report fills in what stands in braces.")
        for title, program in (("Loses it:", self.loses), ("Keeps it:", self.keeps)):
            if program:
                options = f" (compiled with {program.options})" if program.options else ""
                lines += [
                    "",
                    style(title + options, Ink.HEADING),
                    "",
                    textwrap.indent(program.code, "    "),
                ]
        return "\n".join(lines)


def page_of(rule: Rule) -> Page:
    """The page of a rule."""
    text = textwrap.dedent("    " + rule.text).strip()
    start = _SECTION.search(text)
    prose = text[: start.start()] if start else text
    why = prose.partition("\n\n")[2].strip()
    found: dict[str, Program] = {}
    options = ""
    sections = [*_SECTION.finditer(text)]
    ends = [section.start() for section in sections[1:]] + [len(text)]
    for section, end in zip(sections, ends, strict=False):  # of none there is the end alone
        body = text[section.end() : end]
        if section[1] == "Compiled with":
            options = section[2].strip()
            continue
        found[section[1]] = Program(textwrap.dedent(body).strip("\n"), options)
        options = ""
    return Page(rule, why, found.get("Loses it"), found.get("Keeps it"))


def every_name() -> list[str]:
    """The names of all rules, by what is lost and then by name."""
    import fp8lens.rules.find  # noqa: F401  where all rules are

    return sorted(RULES, key=lambda name: (RULES[name].lost or "", name))


def explain(name: str) -> Page:
    """The page of the rule with this name. KeyError, which tells names like it, for no rule's."""
    if name not in every_name():
        close = difflib.get_close_matches(name, RULES, 3) or sorted(RULES)[:3]
        raise KeyError(f"no rule {name!r}: did you mean {', '.join(close)}?")
    return page_of(RULES[name])
