"""What a rule is: one function, registered by its name, and one page, `fp8lens/rules/NAME.md`.

The function takes the facts that its module names and returns what it found. The rules of a module
are tried in the order in which they stand there; the first that holds is the reason.
"""

import dataclasses
import enum
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from fp8lens.rules.page import Page, read_page


class Lost(enum.StrEnum):
    """What a matmul lost."""

    FP8 = "fp8"  # it does not run in FP8 at all; the others stayed outside of the FP8 call
    EPILOGUE = "epilogue"  # an activation
    BIAS = "bias"
    AMAX = "amax"
    OUTPUT = "output"  # a conversion of the result
    SCALE = "scale"
    TRANSPOSE = "transpose"
    PAD = "pad"
    DUPLICATE = "duplicate"  # it, or a quantization for it, runs more often than it has to
    WIRE = "wire"  # it is sent between devices in a wide type
    KERNEL = "kernel"  # nobody knows what a kernel does there


class Found(dict[str, Any]):
    """What the {names} in a rule's texts are in one program. `lost` is among them where the rule
    leaves that to the program, and `at` where another operation is to blame than the facts' own.
    """


def found_if(condition: Any, **fields: Any) -> Found | None:
    """What a rule found, where the condition holds."""
    return Found(fields) if condition else None


#: What a rule's function returns: several where several things in one matmul may break it.
Check = Callable[[Any], Found | list[Found] | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to lose something. `lost` is None where the check tells. `wrong`: whether the
    compiled program returns other numbers than were asked for, whatever its data.
    """

    name: str
    lost: Lost | None
    check: Check
    wrong: bool = False

    def found(self, facts: Any) -> list[Found]:
        """All that it finds in the facts of its family."""
        found = self.check(facts)
        if found is None:
            return []
        return found if isinstance(found, list) else [found]

    @property
    def family(self) -> str:
        """The module that it stands in, such as "after_the_dot"."""
        return self.check.__module__.rpartition(".")[2]

    @cached_property
    def page(self) -> Page:
        """Its page. FileNotFoundError where there is none."""
        return read_page(self.name)

    @property
    def authority(self) -> str:
        """Whose rule it is, and what is logged of it, in one line."""
        source = self.page.source
        if re.match(r"[A-Z]\w+[a-z]", source) and ".cc" not in source:
            source += " (XLA's gemm_rewriter.cc)"
        return f'{source}: "{self.page.logs}"' if self.page.logs else source

    def __repr__(self) -> str:
        return self.name


RULES: dict[str, Rule] = {}


def rule(name: str, *, lost: Lost | None = None, wrong: bool = False) -> Callable[[Check], Rule]:
    """Make a rule of the function below it, which becomes the rule."""

    def made(check: Check) -> Rule:
        assert name not in RULES, name
        RULES[name] = Rule(name, lost, check, wrong)
        return RULES[name]

    return made


def first(family: str, facts: Any) -> tuple[Rule, Found] | None:
    """The first rule of a family that the facts break, and what it found."""
    for one in RULES.values():
        if one.family == family and (found := one.found(facts)):
            return one, found[0]
    return None


def every(family: str, facts: Any) -> list[tuple[Rule, Found]]:
    """All rules of a family that the facts break, and what each found."""
    return [
        (one, found) for one in RULES.values() if one.family == family for found in one.found(facts)
    ]
