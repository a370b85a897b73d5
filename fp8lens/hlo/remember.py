"""Answers about a program's parts that many ask for, each worked out once."""

import functools
from collections.abc import Callable

from fp8lens.hlo.parse import Computation, HloModule, Instruction


def remembered[Part: (HloModule, Computation, Instruction), Answer](
    answer: Callable[[Part], Answer],
) -> Callable[[Part], Answer]:
    """Have a function of a module's part work out its answer for each part once.

    The answers are kept in `HloModule.notes`, by function and part, and are freed together with
    the module. Nobody changes a module, nor an answer.
    """

    @functools.wraps(answer)
    def known(part: Part) -> Answer:
        answers = _module(part).notes[answer]
        if part not in answers:
            answers[part] = answer(part)
        return answers[part]

    return known


def _module(part: HloModule | Computation | Instruction) -> HloModule:
    if isinstance(part, Instruction):
        return part.computation.module
    return part.module if isinstance(part, Computation) else part
