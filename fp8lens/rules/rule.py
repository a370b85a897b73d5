"""What a rule is: one function with its texts, registered by its name."""

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable
from typing import Any


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
    COPY = "copy"  # an operand or a result is copied, or an operand repeated, in memory
    SUM = "sum"  # products are written one by one, and added up by a kernel
    DUPLICATE = "duplicate"  # it, or a quantization for it, runs more often than it has to
    WIRE = "wire"  # it is sent between devices in a wide type
    KERNEL = "kernel"  # nobody knows what a kernel does there


class Found(dict[str, Any]):
    """What the {names} in a rule's texts are in one program. `lost` is among them where the rule
    leaves that to the program.
    """


def found_if(condition: Any, **fields: Any) -> Found | None:
    """What a rule found, where the condition holds."""
    return Found(fields) if condition else None


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way to lose something. `reason` and `fix` are its texts, with {names} that the check
    fills in. `source` tells whose rule it is: a function of XLA's gemm_rewriter.cc, or another file
    or document; `logs` what XLA logs of it under TF_CPP_VMODULE=gemm_rewriter=1. `check` takes the
    facts of its family, such as a `fp8lens.rules.facts.Matmul`. `wrong`: whether the compiled
    program returns other numbers than were asked for, whatever its data.
    """

    name: str
    lost: Lost | None  # None: the check tells
    reason: str
    fix: str
    source: str
    logs: str
    check: "Check"
    wrong: bool = False

    def found(self, facts: Any) -> list[Found]:
        """All that it finds in the facts of its family."""
        found = self.check(facts)
        if found is None:
            return []
        return found if isinstance(found, list) else [found]

    @property
    def family(self) -> str:
        """The module that it stands in, such as "epilogue"."""
        return self.check.__module__.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Its page: the docstring of its function."""
        return self.check.__doc__ or ""

    @property
    def summary(self) -> str:
        """The first sentence of its page."""
        return " ".join(self.text.partition("\n\n")[0].split())

    @property
    def authority(self) -> str:
        """Whose rule it is, and what is logged of it, in one line."""
        source = self.source
        if re.match(r"[A-Z]\w+[a-z]", source) and ".cc" not in source:
            source += " (XLA's gemm_rewriter.cc)"
        return f'{source}: "{self.logs}"' if self.logs else source

    def __repr__(self) -> str:
        return self.name


#: A rule that several things in one matmul may break returns all it found.
Check = Callable[[Any], Found | list[Found] | None]
RULES: dict[str, Rule] = {}


def rule(
    name: str,
    *,
    reason: str,
    fix: str,
    source: str,
    lost: Lost | None = None,
    logs: str = "",
    wrong: bool = False,
) -> Callable[[Check], Rule]:
    """Make a rule of the function below it, which becomes the rule."""

    def made(check: Check) -> Rule:
        assert name not in RULES, name
        RULES[name] = Rule(name, lost, reason, fix, source, logs, check, wrong)
        return RULES[name]

    return made


def first(rules: Iterable[Rule], facts: Any) -> tuple[Rule, Found] | None:
    """The first of some rules that the facts break, and what it found."""
    for one in rules:
        if found := one.found(facts):
            return one, found[0]
    return None
