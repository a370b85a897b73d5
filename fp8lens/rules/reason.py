"""What one matmul lost, why, and how that prints."""

import dataclasses
import re
import textwrap
from typing import Any

from fp8lens.formats import FORMATS
from fp8lens.hlo.origin import is_of_a_gradient, source_line
from fp8lens.hlo.parse import Instruction, visible
from fp8lens.hlo.text import Ink, Style, page_width, size, uncoloured
from fp8lens.rules.facts import Matmul
from fp8lens.rules.libraries import fix_there
from fp8lens.rules.rule import RULES, Found, Lost, Rule


@dataclasses.dataclass(frozen=True)
class Reason:
    """What one matmul lost, and why. `lost` is one of `fp8lens.rules.rule.Lost`: "fp8" (it does not
    run in FP8 at all), or what stayed outside of the FP8 call: "epilogue" (an activation), "bias",
    "amax", "output" (a conversion of the result), "scale", "transpose", "pad", "duplicate" (it, or
    a quantization for it, runs more often than it has to), "wire" (it is sent between devices in a
    wide type), or "kernel" (it is not known what a kernel does there).

    `at` is the operation that breaks the rule, with its line: "tanh (model.py:12)"; `nbytes` what
    the kernels read and write that it costs, 0 where none is known; `chain` has what stands around
    the matmul, where no rule explains the loss.

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
    at: str = ""
    nbytes: int = 0
    chain: tuple[str, ...] = ()

    @property
    def gives_wrong_numbers(self) -> bool:
        """Whether the compiled program returns other numbers than were asked for."""
        return RULES[self.rule].wrong

    def __str__(self) -> str:
        return self.text()

    def text(self, style: Style = uncoloured) -> str:
        """What `str` gives, each line in this style."""
        where = f" ({self.source})" if self.source else ""
        headline = f"{self.matmul}{where} lost {self.lost}{self.blamed}: {self.reason}"
        return paragraph(headline, self, *self.chain, style=style)

    @property
    def blamed(self) -> str:
        """The operation that breaks the rule, as " at tanh (model.py:12)"; "" where none does."""
        return f" at {self.at}" if self.at else ""


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

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: str(fields[name[1]]), text)

    return {
        "lost": rule.lost or Lost(found["lost"]),
        "reason": filled(rule.page.reason),
        "fix": filled(rule.page.fix),
        "rule": rule.name,
        "authority": rule.authority,
    }


#: What a fix adds for a gradient's matmul.
_OF_A_GRADIENT = (
    "; this matmul is of a gradient: a jax.custom_vjp of the layer decides what it multiplies "
    "(chapter 09)"
)


def named(i: Instruction | None) -> str:
    """An operation and its line, as "tanh (model.py:12)"; "" for None, and for one of XLA's own."""
    if i is None:
        return ""
    line = source_line(i)
    return f"{i.opcode} ({line})" if line else ""


def of_matmul(
    m: Matmul, rule: Rule, found: Found, at: Instruction | None = None, nbytes: int = 0
) -> Reason:
    """What a rule found at a matmul, in the terms of the library that wrote it where they are
    known; `at` is the operation that breaks it, `nbytes` what that costs.
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
        gradient=_OF_A_GRADIENT if is_of_a_gradient(m.given.op_name) else "",
    )
    texts = texts_of(rule, Found(known | found))
    if texts["lost"] is Lost.FP8 and row.is_transposed_fp8:
        texts["fix"] = _OWN_GRADIENT
    texts["fix"] += fix_there(rule.name, m.given.instruction)
    return Reason(
        matmul=f"{row.title} {row.path}" if row.path else row.title,
        source=m.given.source or row.source,
        instruction=row.name,
        layer=row.path,
        at=named(found.get("at", at)),
        nbytes=nbytes,
        **texts,
    )


_OWN_GRADIENT = (
    "JAX made this gradient of an FP8 matmul, and its numbers are wide: give the layer a gradient "
    "of its own that quantizes them (jax.custom_vjp, chapter 09)"
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
            key = (reason.rule, reason.fix, None if reason.chain else reason.lost)
            groups.setdefault(key, []).append(reason)
        # What costs most stands first: a matmul that is not FP8, then bytes.
        order = sorted(groups.values(), key=_costs, reverse=True)
        paragraphs = [_together(alike, style) for alike in order]
        if any(reason.lost is Lost.FP8 for reason in self):
            lines = textwrap.wrap(self.ask_again, page_width())
            paragraphs += [style(line, None) for line in lines]
        return "\n".join(paragraphs) or style(self.empty, None)

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _costs(alike: list[Reason]) -> tuple[bool, bool, int]:
    one = alike[0]
    return one.gives_wrong_numbers, one.lost is Lost.FP8, sum(reason.nbytes for reason in alike)


def _together(alike: list[Reason], style: Style, most: int = 5) -> str:
    """A paragraph for reasons by one rule: what they have in common once, and a line for each."""
    one = alike[0]
    if len(alike) == 1:
        return one.text(style)
    is_one_sentence = len({reason.reason for reason in alike}) == 1
    said = one.reason if is_one_sentence else RULES[one.rule].page.summary
    lost = ", ".join(dict.fromkeys(reason.lost for reason in alike))
    is_one_place = is_one_sentence and len({reason.at for reason in alike}) == 1
    headline = f"{len(alike)} times lost {lost}{one.blamed if is_one_place else ''}: {said}"
    # A layer's name tells more than a place among attention's matmuls.
    alike = sorted(alike, key=lambda reason: (-reason.nbytes, not reason.layer))
    lines = []
    for reason in alike[:most]:
        lines.append(_line(reason, is_one_sentence, is_one_place))
        lines += [f"      {line}" for line in reason.chain]
    if len(alike) > most:
        lines.append(f"    and {len(alike) - most} more")
    return paragraph(headline, one, *lines, style=style)


def _line(reason: Reason, is_sentence_said: bool, is_place_said: bool) -> str:
    """One of several reasons: its matmul, what it costs, and what is its own of the sentence."""
    place = f" ({reason.source})" if reason.source else ""
    cost = f", {size(reason.nbytes)}" if reason.nbytes else ""
    own = "" if is_place_said or reason.chain else reason.blamed
    if not is_sentence_said and not reason.chain:
        # The condition behind the colon is the same for all.
        own += f": {reason.reason.partition(': ')[0]}"
    return f"    {reason.matmul}{place}{cost}{own}"
