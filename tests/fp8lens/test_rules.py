"""The rules themselves: each has a function, a page, and programs that prove it."""

import re

import jax
import pytest

from fp8lens import assert_fp8_gemms
from fp8lens.cli import main
from fp8lens.rules.find import every_name, explain
from fp8lens.rules.page import FOLDER
from fp8lens.rules.rule import RULES, Found, Lost, Rule, rule
from helpers.rule_index import compiled
from tests.programs.page_programs import in_a_batch, in_a_loop, seen, seen_in
from tests.weekly import weekly
from tools.recorders import rule_programs as rules

NAMES = every_name()
PAGES = {name: explain(name) for name in NAMES}
WITH_PROGRAMS = [name for name in NAMES if PAGES[name].loses]
RECORDED = rules.RECORD.read()
#: Programs for several devices, or whose kernels take no batch, are tried as they are alone.
_BY_ITSELF = ("gathered-operand", "ragged-dot", "summed-wide")
IN_OTHER_SHAPES = [
    name
    for name in WITH_PROGRAMS
    if RULES[name].family != "wire" and name not in _BY_ITSELF and "fp4" not in name
]


def fields(text: str) -> set[str]:
    """The {names} of a text."""
    return set(re.findall(r"\{(\w+)\}", text))


def test_each_rule_has_a_page_and_each_page_a_rule():
    assert {path.stem for path in FOLDER.glob("*.md")} == {*RULES}


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_says_what_it_has_to(name):
    one, page = RULES[name], PAGES[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
    assert page.summary.endswith(".") and page.reason and page.fix and page.source
    assert one.lost is None or one.lost in Lost
    text = (FOLDER / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    for see in re.findall(r"see ([a-z]+(?:-[a-z0-9]+)+)", text):
        assert see in RULES


def test_the_first_rule_that_holds_is_the_reason():
    several = Rule("several", Lost.SCALE, lambda facts: [Found(n=1), Found(n=2)])
    never = Rule("never", Lost.SCALE, lambda facts: None)
    assert [found["n"] for found in several.found(None)] == [1, 2]
    assert never.found(None) == []


def test_a_name_is_given_once():
    with pytest.raises(AssertionError, match="no-clamp"):
        rule("no-clamp")(lambda facts: None)


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_a_pages_program_breaks_its_rule_and_the_fixed_one_does_not(name):
    """And what becomes of both is what the site's page of the rule says."""
    page = PAGES[name]
    made = {
        which: rules.outcome(seen(program), name if which == "loses" else "")
        for which, program in rules.programs_of(page).items()
    }
    assert name in made["loses"]["rules"]
    for said in made["loses"]["says"]:
        assert not fields(said["reason"]) | fields(said["fix"])
    assert name not in made.get("keeps", {"rules": ()})["rules"]
    if jax.__version__ in RECORDED:
        chips = RECORDED[jax.__version__]["rows"][name]["chips"]
        assert made == chips[rules.chips_of(page)[0]], "run `make rules`"


@pytest.mark.parametrize("name", IN_OTHER_SHAPES)
@pytest.mark.parametrize("shape", [in_a_loop, pytest.param(in_a_batch, marks=weekly)])
def test_a_fix_works_in_other_shapes_too(name, shape):
    """In the body of a loop, and with one dimension more: what was lost there is won by the fix."""
    page = PAGES[name]
    lost = seen_in(page.loses, shape)
    if not page.keeps or name not in {reason.rule for reason in lost.reasons}:
        return  # another loss comes first there, or none
    kept = seen_in(page.keeps, shape)
    assert name not in {reason.rule for reason in kept.reasons}
    if RULES[name].lost is Lost.FP8 and not lost.report.opaque:
        assert kept.report.fp8_flops_share > lost.report.fp8_flops_share


def test_the_record_has_the_programs_of_the_pages():
    marks = {name: rules.mark_of(PAGES[name]) for name in rules.with_programs()}
    for version, entry in RECORDED.items():
        recorded = {name: row["programs"] for name, row in entry["rows"].items()}
        assert recorded == marks, f"JAX {version}: run `make rules`"


def test_a_page_is_printed_whole():
    text = str(explain("late-relu"))
    assert text.startswith("late-relu\n\nThe relu comes after")
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
    assert said.startswith("late-relu\n") and "\nno-clamp\n" in said
    assert main(["explain", "late-relus"]) == 2
    assert "did you mean late-relu" in capsys.readouterr().err


def test_a_rule_is_allowed_by_its_name():
    asked = compiled(PAGES["late-relu"].loses)
    with pytest.raises(AssertionError, match="lost epilogue"):
        assert_fp8_gemms(asked, fused=True)
    assert_fp8_gemms(asked, fused=True, allow="late-relu")
    with pytest.raises(ValueError, match="or the name of a rule, such as late-relu"):
        assert_fp8_gemms(asked, fused=True, allow="late-relus")
