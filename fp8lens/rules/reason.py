"""What one matmul lost, why, and how that prints."""

import dataclasses
import textwrap
from typing import Any

from fp8lens.formats import FORMATS
from fp8lens.hlo.parse import visible
from fp8lens.hlo.text import Ink, Style, page_width, uncoloured
from fp8lens.rules.facts import Matmul
from fp8lens.rules.libraries import fix_there
from fp8lens.rules.rule import RULES, Found, Lost, Rule


@dataclasses.dataclass(frozen=True)
class Reason:
    """What one matmul lost, and why. `lost` is one of `fp8lens.rules.rule.Lost`: "fp8" (it does not
    run in FP8 at all), or what stayed outside of the FP8 call: "epilogue" (an activation), "bias",
    "amax", "output" (a conversion of the result), "scale", "transpose", "pad", "copy" (a kernel
    copies or repeats an operand in memory), "sum" (products are written one by one, then added),
    "duplicate" (it, or a quantization for it, runs more often than it has to), "wire" (it is sent
    between devices in a wide type), or "kernel" (it is not known what a kernel does there).

    `rule` is the rule's name; `fp8lens explain` prints its page. `authority` says whose rule it is:
    a function of XLA, and in quotes what XLA logs. `matmul` is its instruction's name in the
    compiled program, M x N x K, and the layer; `instruction` and `layer` are two of these alone.
    `source` is the program's line.
    """

    matmul: str
    lost: Lost
    reason: str
    fix: str
    rule: str
    authority: str
    source: str
    instruction: str = ""
    layer: str = ""

    @property
    def gives_wrong_numbers(self) -> bool:
        """Whether the compiled program returns other numbers than were asked for."""
        return RULES[self.rule].wrong

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        where = f" ({self.source})" if self.source else ""
        headline = f"{self.matmul}{where} lost {self.lost}: {self.reason}"
        return paragraph(headline, self, style=style)


def paragraph(headline: str, reason: Reason, *further: str, style: Style = uncoloured) -> str:
    """A reason in lines as wide as the page."""
    sentences = [
        (headline, Ink.HEADING),
        (f"  fix: {reason.fix}", Ink.FIX),
        (f"  rule: {reason.rule}: {reason.authority}", None),
        *((line, None) for line in further),
    ]
    lines = []
    for sentence, ink in sentences:
        parts = textwrap.wrap(
            visible(sentence),
            page_width(),
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [style(part, ink) for part in parts]
    return "\n".join(lines)


def texts_of(rule: Rule, found: Found) -> dict[str, Any]:
    """The rule's texts, and its name, as fields of a Reason."""
    jax_names = {
        f"jax_{name}": f"jnp.{FORMATS[value].jax}"
        for name, value in found.items()
        if isinstance(value, str) and value in FORMATS
    }
    fields = jax_names | found
    return {
        "lost": rule.lost or Lost(found["lost"]),
        "reason": rule.reason.format(**fields),
        "fix": rule.fix.format(**fields),
        "rule": rule.name,
        "authority": rule.authority,
    }


def of_matmul(m: Matmul, rule: Rule, found: Found) -> Reason:
    """What a rule found at a matmul, in the terms of the library that wrote it where they are
    known.
    """
    row = m.row
    known = Found(
        chip=m.chip.name,
        library=row.library,
        math=row.math_dtype,
        epilogue=row.epilogue,
        beta=f"{row.beta:g}",
        out=row.out_dtype,
        scales=" and ".join(row.scales) or "none",
    )
    texts = texts_of(rule, Found(known | found))
    if texts["lost"] is Lost.FP8 and row.is_transposed_fp8:
        texts["fix"] = _OWN_GRADIENT
    texts["fix"] += fix_there(rule.name, m.given.instruction)
    title = f"{row.title} {row.path}" if row.path else row.title
    return Reason(
        matmul=title,
        source=m.given.source or row.source,
        instruction=row.name,
        layer=row.path,
        **texts,
    )


_OWN_GRADIENT = (
    "JAX made this gradient of an FP8 matmul, and its numbers are wide: give the layer a gradient "
    "of its own that quantizes them (jax.custom_vjp, chapter 08)"
)


class Reasons(list[Reason]):
    """A list that prints a paragraph for each reason, and for what several matmuls share, one."""

    empty = "Every matmul is FP8, and no work that its call could do was left outside."
    ask_again = (
        "Fix what lost fp8, then ask again: until XLA makes an FP8 call, what it leaves outside is "
        "hidden."
    )

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        groups: dict[tuple, list[Reason]] = {}
        for reason in self:
            groups.setdefault((reason.lost, reason.reason, reason.fix), []).append(reason)
        paragraphs = [_together(alike, style) for alike in groups.values()]
        if any(reason.lost is Lost.FP8 for reason in self):
            lines = textwrap.wrap(self.ask_again, page_width())
            paragraphs += [style(line, None) for line in lines]
        return "\n".join(paragraphs) or style(self.empty, None)

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _together(alike: list[Reason], style: Style, most: int = 5) -> str:
    """A paragraph for reasons that differ in their matmuls alone."""
    one = alike[0]
    if len(alike) == 1:
        return one.text(style)
    if len(alike) > most:  # a layer's name tells more than a place among attention's matmuls
        alike = sorted(alike, key=lambda reason: not reason.layer)
    places = [f"    {r.matmul} ({r.source})" if r.source else f"    {r.matmul}" for r in alike]
    further = places[:most]
    if len(places) > most:
        further.append(f"    and {len(places) - most} more")
    headline = f"{len(alike)} matmuls lost {one.lost}: {one.reason}"
    return paragraph(headline, one, *further, style=style)
