"""What the inspector says is held to what is known of any program without it.

A sample in each run; with NIGHTLY=1 in the environment, 300 of each. A failure prints the program.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable

import jax
import pytest

from fp8lens import Inspection
from fp8lens.rules.find import AT_OPERANDS
from fp8lens.rules.page import Program, every_name, explain
from fp8lens.rules.rule import RULES
from tests.programs.oracle_programs import (
    COULD_BE_FUSED,
    IN_FRONT,
    Source,
    beside,
    exchanged,
    given_otherwise,
    kernels_of,
    looped,
    readers,
    results,
    smaller,
    taken,
)
from tests.programs.page_programs import compiled, keeping, losing
from tests.programs.random_programs import Module
from tests.weekly import NIGHTLY

SEEDS = range(300 if NIGHTLY else 6)
#: Lost behind a matmul.
BEHIND = {"epilogue", "bias", "scale", "output", "amax", "fp8"}
# XLA does not compile every program: see fp8lens.compile.bugs.
REFUSED = ("has_aux_output", "A cycle is detected", "algebraic_simplifier.cc")


def inspected(source: Source) -> Inspection:
    return compiled(source.page)


def is_refused(source: Source) -> bool:
    """Whether XLA's compiler fails, by a bug that is known."""
    try:
        inspected(source)
    except jax.errors.JaxRuntimeError as error:
        if not any(bug in str(error) for bug in REFUSED):
            raise
        return True
    return False


def drawn(seed: int) -> Source:
    """The first program of this seed that XLA compiles."""
    draws = (results(seed + 10_000 * attempt) for attempt in itertools.count())
    return next(source for source in draws if not is_refused(source))


def smallest(source: Source, wrong: Callable[[Source], str]) -> str:
    """What is wrong with a program, as small as something still is; "" where nothing is."""
    if not wrong(source):
        return ""
    return wrong(smaller(source, lambda fewer: not is_refused(fewer) and bool(wrong(fewer))))


def rules(asked: Inspection) -> Counter[str]:
    return Counter(reason.rule for reason in asked.reasons)


def kernels(asked: Inspection) -> Counter[tuple]:
    return kernels_of(asked.compiled.as_text())


# The order of results -----------------------------------------------------------------------------


def orders(source: Source, seed: int) -> list[Source]:
    """The same, returned the other way round and in a random order."""
    shuffled = [*source.returns]
    random.Random(seed).shuffle(shuffled)
    found = (source.returning(turned) for turned in (source.returns[::-1], shuffled))
    return [other for other in dict.fromkeys(found) if other != source and not is_refused(other)]


def disagreement(source: Source, seed: int) -> str:
    """Where two orders of the same results get other reasons, though their kernels are the same:
    XLA may fuse otherwise in another order, and then other work stays outside.
    """
    asked = inspected(source)
    for other in orders(source, seed):
        other_asked = inspected(other)
        if rules(asked) != rules(other_asked) and kernels(asked) == kernels(other_asked):
            more = dict(rules(asked) - rules(other_asked))
            less = dict(rules(other_asked) - rules(asked))
            return f"{source}\nsays {more}\n{other}\nsays {less}"
    return ""


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_results_says_nothing(seed):
    wrong = smallest(drawn(seed), lambda source: disagreement(source, seed))
    assert not wrong, wrong


# A move and a step change places ------------------------------------------------------------------


def false_all_clear(first: Source, second: Source) -> str:
    """What is wrong where the calls of one order take more, and of the other nothing is said."""
    both = [(source, inspected(source)) for source in (first, second)]
    for (more, one), (less, other) in itertools.permutations(both):
        takes = taken(one.compiled.as_text()) - taken(other.compiled.as_text())
        is_told = any(r.rule.startswith("unknown") or r.lost in BEHIND for r in other.reasons)
        if takes and not is_told:
            says = [reason.rule for reason in other.reasons]
            return f"{more}\ntakes {dict(takes)}, and of this is said {says}:\n{less}"
    return ""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_move_hides_no_step(seed):
    compile_ = [source for source in exchanged(seed) if not is_refused(source)]
    for first, second in itertools.pairwise(compile_):
        wrong = false_all_clear(first, second)
        assert not wrong, wrong


# Fixes, and losses together -----------------------------------------------------------------------

FIXED = [name for name in every_name() if explain(name).keeps]
random.Random(0).shuffle(FIXED)
#: Rules whose losing programs need no options of their own.
PLAIN = [name for name in every_name() if (page := explain(name).loses) and not page.options]
# What XLA makes of the scales is one kernel: the first thing that is wrong with it is named.
ALONE = {"scales-one-by-one", "product-of-scales", "divided-by-scale", "scale-not-f32"}


@pytest.mark.parametrize("name", FIXED if NIGHTLY else FIXED[:6])
def test_fixes_lead_in_no_circle(name):
    """A fix may leave something lost; the fixes of that never lead back."""
    ways = [[name]]
    for way in ways:
        fixed = keeping(way[-1])
        for after in rules(fixed) if fixed else ():
            assert after not in way, " -> ".join([*way, after])
            ways.append([*way, after])


def together(seed: int) -> tuple[str, Program, list[Inspection]]:
    """Two programs of pages as one, of which the second loses something, and the first may."""
    r = random.Random(seed)
    one, two = r.sample(PLAIN, 2)
    page = explain(one)
    is_fixed = page.keeps is not None and not page.keeps.options and r.random() < 0.25
    first = page.keeps if is_fixed else page.loses
    alone = keeping(one) if is_fixed else losing(one)
    asked = [each for each in (alone, losing(two)) if each]
    about = f"{one}{' fixed' if is_fixed else ''}, {two}"
    return about, beside(first, explain(two).loses), asked


@pytest.mark.parametrize("seed", SEEDS)
def test_what_two_layers_lose_is_all_named(seed):
    about, program, alone = together(seed)
    asked = compiled(program)
    expected = sum(map(rules, alone), Counter())
    said = f"{about}: {dict(expected)}, and {dict(rules(asked))} of\n{program.code}"
    assert asked.reasons, said
    # Beside another layer XLA may compile one otherwise, as by choosing another layout.
    if kernels(asked) == sum(map(kernels, alone), Counter()):
        assert rules(asked) == expected, said


def behind_the_call() -> list[str]:
    """Rules whose programs lose something behind an FP8 call that is theirs alone."""
    given = {"a": "f8e4m3fn[64,256]", "b": "f8e4m3fn[128,256]"}
    found = []
    for name in PLAIN:
        has = explain(name).loses.arguments.items()
        if given.items() <= has and RULES[name].family not in ("operands", "wire", "layout"):
            found.append(name)
    in_front = {rule.name for rule in AT_OPERANDS}
    return [name for name in found if name not in ALONE | in_front]


BEHIND_THE_CALL = behind_the_call()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_lost_in_front_and_behind_is_both_named(seed):
    r = random.Random(seed)
    name = r.choice(BEHIND_THE_CALL)
    page = explain(name).loses
    possible = [way for way in IN_FRONT if way[0] in page.arguments]
    argument, shape, how, front = r.choice(possible)
    program = given_otherwise(page, argument, shape, how)
    said = set(rules(compiled(program)))
    about = f"{name}, {front} of {argument}: {said} of\n{program.code}"
    assert front in said, about
    # For an input that is transposed, XLA multiplies the other way round, and so gets the result
    # transposed: this comes first.
    assert name in said or (argument == "a" and "by-columns" in said), about


# In a loop, a kernel stores the result. It runs in any case, and does what no call could do.
DONE_WHERE_IT_IS_STORED = {
    "amax-in-16-bits",
    "another-type",
    "bounded-relu",
    "clamp-alone",
    "compared-only",
    "copied-choice",  # and a kernel takes its array out of the stack in any case
    "changed-in-part",  # what is stored is another part then
    "negated-last",
    "no-such-type",
    "other-activation",
    "own-padding",
    "result-layout",
    "vector-scale",
}
# A call that adds a matrix writes its result in that matrix's place. Each iteration copies it then.
COPIED_FOR_EACH = {"copied-matrix", "transposed-matrix"}
LOOPED = [
    name
    for name in PLAIN
    if not {"a", "x"}.isdisjoint(explain(name).loses.arguments)
    and name not in DONE_WHERE_IT_IS_STORED | COPIED_FOR_EACH
]
random.Random(1).shuffle(LOOPED)


@pytest.mark.parametrize("name", LOOPED if NIGHTLY else LOOPED[:6])
def test_a_loop_hides_nothing(name):
    page = explain(name).loses
    program = looped(page, "a" if "a" in page.arguments else "x")
    said = set(rules(compiled(program)))
    assert name in said, f"{said} of\n{program.code}"


# Account ------------------------------------------------------------------------------------------


def account(source: Source) -> str:
    """What is wrong where a kernel is not in one line of the ledger, with its bytes, or where one
    does with a result what some call could have done, and nobody says so.
    """
    asked = inspected(source)
    module = Module(asked.compiled.as_text())
    launched = Counter((line.name, times, times * moved) for line, times, moved in module.kernels())
    listed = Counter((line.name, line.runs, line.nbytes) for line in asked.ledger)
    if launched != listed:
        return f"{source}\nlaunches {launched - listed}, lists {listed - launched}"
    classes = {line.name: line.what for line in asked.ledger}
    named = {reason.instruction for reason in asked.reasons}
    for reader in readers(module):
        could = COULD_BE_FUSED & reader.does
        is_rest = bool(could) and reader.only and classes[reader.kernel] == "rest"
        if (is_rest or reader.at_once) and reader.call not in named:
            does = reader.at_once or sorted(could)
            return f"{source}\n{reader.kernel} does {does} with {reader.call}: nobody says so"
    return ""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_is_accounted_for(seed):
    for source in (drawn(1000 + seed), *exchanged(1000 + seed)[:1]):
        wrong = "" if is_refused(source) else smallest(source, account)
        assert not wrong, wrong
