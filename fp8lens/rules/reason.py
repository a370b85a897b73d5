"""What one matmul lost and why, and how that prints."""

import dataclasses
import functools
import textwrap
from typing import Any

from fp8lens.hlo.parse import visible
from fp8lens.rules.texts import Rule


@dataclasses.dataclass(frozen=True)
class Reason:
    """What one matmul lost, and why. `lost` is "fp8" (it does not run in FP8 at all), or what
    stayed outside of the FP8 call: "epilogue" (an activation), "bias", "amax", "output" (a
    conversion of the result), "scale", "transpose", "pad", "duplicate" (it runs twice), "wire" (it
    is sent between devices in a wide type), or "kernel" (nobody knows what a kernel does there).
    `matmul` is its instruction's name in the compiled program, M x N x K, and the layer. `rule`
    says whose rule it is: a function of XLA, and in quotes what XLA logs (see fp8lens.rules).
    `source` is the program's line.
    """

    matmul: str
    lost: str
    reason: str
    fix: str
    rule: str
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return paragraph(f"{self.matmul}{where} lost {self.lost}: {self.reason}", self)


def paragraph(headline: str, reason: Reason | Rule, *further: str) -> str:
    """A reason in lines of 100 columns."""
    lines = (headline, f"  fix: {reason.fix}", f"  rule: {reason.rule}", *further)
    wrap = functools.partial(
        textwrap.wrap, width=100, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(
        part for line in map(visible, lines) for part in wrap(line, subsequent_indent=" " * 8)
    )


class Reasons(list[Reason]):
    """A list that prints a paragraph for each reason, and for what several matmuls share, one."""

    empty = "Every matmul is FP8, and no work that its call could do was left outside."

    def __str__(self) -> str:
        groups: dict[tuple, list[Reason]] = {}
        for reason in self:
            groups.setdefault((reason.lost, reason.reason, reason.fix), []).append(reason)
        texts = []
        for (lost, text, _), alike in groups.items():
            if len(alike) == 1:
                texts.append(str(alike[0]))
                continue
            places = [f"    {r.matmul}" + f" ({r.source})" * bool(r.source) for r in alike[:5]]
            places += [f"    and {len(alike) - 5} more"] * (len(alike) > 5)
            texts.append(paragraph(f"{len(alike)} matmuls lost {lost}: {text}", alike[0], *places))
        return "\n".join(texts) or self.empty

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
