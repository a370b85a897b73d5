"""What a sharded program sends between devices in a wide type, or moves after it was sent.

Each rule takes a `Collective`, which gives the {names} of its texts.
"""

from fp8lens.matmul.collectives import Collective, Problem
from fp8lens.rules.rule import Found, Lost, Rule, found_if, rule


@rule("gathered-wide", lost=Lost.WIRE)
def gathered_wide(sent: Collective) -> Found | None:
    """An array is sent in a wide type, and each device quantizes all of it."""
    return _problem(sent, Problem.GATHERED_WIDE)


def _problem(sent: Collective, problem: Problem) -> Found | None:
    return found_if(problem in sent.problems, **sent.in_words(problem))


@rule("dequantized-then-gathered", lost=Lost.WIRE)
def dequantized_then_gathered(sent: Collective) -> Found | None:
    """An FP8 array is dequantized, then sent in the wide type."""
    return _problem(sent, Problem.DEQUANTIZED)


@rule("gathered-wide-read-wide", lost=Lost.WIRE)
def gathered_wide_read_wide(sent: Collective) -> Found | None:
    """An array is sent in a wide type and quantized, and something else reads it in the wide
    type."""
    return _problem(sent, Problem.READ_WIDE)


@rule("gathered-twice", lost=Lost.WIRE)
def gathered_twice(sent: Collective) -> Found | None:
    """The same array is gathered twice at once."""
    return _problem(sent, Problem.TWICE)


@rule("summed-wide", lost=Lost.WIRE)
def summed_wide(sent: Collective) -> Found | None:
    """A sum over devices is computed in a wide type, and quantized after that."""
    return found_if(sent.is_summed_wide, **sent.in_words())


@rule("transposed-after-gathering", lost=Lost.TRANSPOSE)
def transposed_after_gathering(sent: Collective) -> Found | None:
    """An FP8 array is gathered, and then each device transposes all of it."""
    return _problem(sent, Problem.TRANSPOSED)


#: By what is wrong with a collective.
WIRE: dict[Problem, Rule] = {
    Problem.GATHERED_WIDE: gathered_wide,
    Problem.DEQUANTIZED: dequantized_then_gathered,
    Problem.READ_WIDE: gathered_wide_read_wide,
    Problem.TWICE: gathered_twice,
    Problem.TRANSPOSED: transposed_after_gathering,
}
