"""The rules themselves: each has a name, its texts, a page, and its place in one order."""

import inspect
import re
import string
from types import ModuleType

import jax
import pytest

from fp8lens import assert_fp8_gemms
from fp8lens.cli import main
from fp8lens.rules import amax, extra_kernels, find, layout, operand_types, wire
from fp8lens.rules.page import explain, page_of
from fp8lens.rules.rule import RULES, Found, Lost, Rule, first, rule
from helpers.rule_index import compiled
from tests.programs.page_programs import losing, seen
from tests.programs.renamed import figures, under_other_names
from tools.recorders import rule_programs as rules

ORDERS: dict[str, tuple[Rule, ...]] = {
    "operands": operand_types.NOT_FP8,
    "in front": find.IN_FRONT,
    "padding": layout.PADDING,
    "moved": layout.MOVED,
    "conversion": find.CONVERSION,
    "step": find.STEP,
    "wrong": find.WRONG,
    "amax": amax.AMAX,
    "opaque": extra_kernels.OPAQUE,
    "wire": tuple(wire.WIRE.values()),
}


def fields(text: str) -> set[str]:
    """The {names} of a text."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_it_has_to(name):
    one = RULES[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
    assert one.reason and one.fix and one.source and one.summary.endswith(".")
    assert one.lost is None or one.lost in Lost
    assert not {"lost"} & fields(one.reason)
    assert one.name in one.authority or one.source.split(":")[0] in one.authority


def test_every_rule_is_tried_in_a_place_that_stands_in_the_text():
    """In one of the orders, or by its name in the module that tries all."""
    in_order = {one.name for order in ORDERS.values() for one in order}
    tried = inspect.getsource(find)
    for name, one in RULES.items():
        by_name = f"{one.family}.{one.check.__name__}"
        assert name in in_order or re.search(rf"\b{re.escape(by_name)}\b", tried), name
    for order in ORDERS.values():
        assert len(set(map(str, order))) == len(order)


def test_a_rule_stands_in_its_familys_module():
    for one in RULES.values():
        module = getattr(find, one.family, None)
        assert isinstance(module, ModuleType) and getattr(module, one.check.__name__) is one


def test_the_first_rule_that_holds_is_the_reason():
    def made(name, check):
        one = Rule(name, Lost.SCALE, "reason", "fix", "source", "", check)
        return one

    never, always = made("never", lambda facts: None), made("always", lambda facts: Found(n=facts))
    several = made("several", lambda facts: [Found(n=1), Found(n=2)])
    assert first((never, always), 3) == (always, {"n": 3})
    assert first((never,), 3) is None and first((several,), 3) == (several, {"n": 1})
    assert [found["n"] for found in several.found(None)] == [1, 2]


def test_a_name_is_given_once():
    with pytest.raises(AssertionError, match="no-clamp"):
        rule("no-clamp", reason="", fix="", source="")(lambda facts: None)


# Pages --------------------------------------------------------------------------------------------

PAGES = {name: page_of(one) for name, one in RULES.items()}
WITH_PROGRAMS = [name for name, page in PAGES.items() if page.loses]


RECORDED = rules.RECORD.read()


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_a_pages_program_breaks_its_rule_and_the_fixed_one_does_not(name):
    """And what becomes of both is what the site's page of the rule says."""
    page = PAGES[name]
    made = {
        which: rules.outcome(seen(program), name if which == "loses" else "")
        for which, program in rules.programs_of(page).items()
    }
    assert name in made["loses"]["rules"]
    assert name not in made.get("keeps", {"rules": ()})["rules"]
    if jax.__version__ in RECORDED:
        chips = RECORDED[jax.__version__]["rows"][name]["chips"]
        assert made == chips[rules.chips_of(page)[0]], "run `make rules`"


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_no_reason_of_a_page_is_of_a_name(name):
    asked = losing(name)
    other, names = under_other_names(asked)
    assert figures(other, names) == figures(asked)


def test_the_record_has_the_programs_of_the_pages():
    marks = {name: rules.mark_of(PAGES[name]) for name in rules.with_programs()}
    for version, entry in RECORDED.items():
        recorded = {name: row["programs"] for name, row in entry["rows"].items()}
        assert recorded == marks, f"JAX {version}: run `make rules`"


def test_a_page_is_printed_whole():
    text = str(explain("late-relu"))
    assert text.startswith("late-relu, lost epilogue\n\nThe relu comes after")
    for part in ("fix: apply relu directly", "FuseReluActivation", "Loses it:", "Keeps it:"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(KeyError, match="did you mean late-relu"):
        explain("late-relus")


def test_the_command_explains_rules(capsys):
    assert main(["explain"]) == 0
    assert set(capsys.readouterr().out.split()) == set(RULES)
    assert main(["explain", "late-relu", "no-clamp"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("late-relu, lost epilogue") and "no-clamp, lost output" in said
    assert main(["explain", "late-relus"]) == 2
    assert "did you mean late-relu" in capsys.readouterr().err


def test_a_rule_is_allowed_by_its_name():
    asked = compiled(PAGES["late-relu"].loses)
    with pytest.raises(AssertionError, match="lost epilogue"):
        assert_fp8_gemms(asked, fused=True)
    assert_fp8_gemms(asked, fused=True, allow="late-relu")
    with pytest.raises(ValueError, match="or the name of a rule, such as late-relu"):
        assert_fp8_gemms(asked, fused=True, allow="late-relus")
