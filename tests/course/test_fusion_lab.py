"""The fusion lab, operated in a browser by mouse, keyboard and touch: what it says of a program is
what is recorded, and that is what Python's own reading of the record says."""

import re
import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect

from fp8lens.hlo.text import counted, size
from helpers.explorers import fusion_lab as lab
from helpers.figures.source_lines import verdict
from tests.course.test_explorers import ANEW, TOUCHABLE, shown
from tests.course.test_site import opened, overflows

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
EXPLORER = "fusion_lab"


@pytest.fixture
def page(desktop: Page) -> Page:
    """The page as it begins."""
    desktop.get_by_role("button", name="All in one call").click()
    expect_answer(desktop, {})
    return desktop


def choose(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.locator(f"select[name={name}]").select_option(value)


def texts(page: Page, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in page.locator(selector).all_text_contents()]


def expect_answer(page: Page, change: lab.Choice) -> None:
    """That the page says of the first program with this change what is recorded of it."""
    choice = {**lab.STATE, **change}
    for name, value in choice.items():
        expect(page.locator(f"select[name={name}]")).to_have_value(value)
    found = lab.outcome(choice)
    assert page.locator(".code code").all_text_contents() == (lab.program(choice).code.splitlines())
    assert texts(page, ".verdict") == [f"{': '.join(verdict(found))}."]
    moved = [size(kernel["bytes"]) for kernel in found["kernels"]]
    assert texts(page, ".kernels li:not(.before) .moved") == moved
    titles = [kernel["title"] for kernel in found["kernels"]]
    assert texts(page, ".kernels b") == titles
    rules = [reason["rule"] for reason in found["reasons"]]
    assert [one.get_attribute("data-rule") for one in page.locator(".reasons li").all()] == rules
    for reason in found["reasons"]:
        card = page.locator(f".reasons li[data-rule={reason['rule']}]").first
        expect(card).to_contain_text(reason["fix"])
        link = card.get_by_role("link", name=reason["rule"])
        expect(link).to_have_attribute("href", re.compile(f"/rules/{reason['rule']}[.]html$"))
    assert page.locator(".hlo pre").text_content() == "\n".join(found["hlo"]) + "\n"


SOME = (
    {"result": "e4m3-no-clamp", "amax": "no"},
    {"library": "triton"},
    {"sizes": "1000-columns"},
    {"release": lab.RELEASES[0]},
)


@pytest.mark.parametrize("change", SOME, ids=lambda change: "-".join(change.values()))
def test_a_program_that_is_chosen_is_answered_as_recorded(page, change):
    choose(page, **change)
    expect_answer(page, change)


def test_what_changed_is_said(page):
    choose(page, bias="f32")
    expect(page.locator(".changed")).to_contain_text("Bias: bfloat16 → float32.")
    expect(page.locator(".changed")).to_contain_text("Kernels: 1 → ")
    expect(page.locator(".changed")).to_contain_text("New: bias-in-f32")
    assert texts(page, ".code .new code") == ["d = d + bias"]


def test_a_fix_is_a_click_away_and_shows_the_reason_behind_it(page):
    choose(page, bias="f32", result="e4m3-no-clamp")
    rules = page.locator(".reasons li").first
    expect(rules).to_have_attribute("data-rule", "bias-in-f32")
    page.get_by_role("button", name="Apply the fix: Bias").click()
    expect(rules).to_have_attribute("data-rule", "no-clamp")
    expect(page.get_by_role("status").first).to_be_focused()
    page.get_by_role("button", name="Apply the fix: Result").click()
    expect_answer(page, {})


def test_a_keyboard_is_enough(page):
    page.locator("select[name=bias]").focus()
    page.keyboard.press("ArrowDown")
    expect_answer(page, {"bias": "f32"})
    page.keyboard.press("Tab")
    expect(page.locator("select[name=activation]")).to_be_focused()


def test_the_address_is_the_program_and_back_undoes_a_choice(address, browser):
    with opened(browser, f"{address}#bias=f32&activation=none&amax=no") as page:
        shown(page)
        chosen = {"bias": "f32", "activation": "none", "amax": "no"}
        expect_answer(page, chosen)
        choose(page, amax="yes")
        page.wait_for_url("**#bias=f32&activation=none")
        page.go_back()
        expect(page.locator("select[name=amax]")).to_have_value("no")
        expect_answer(page, chosen)


def test_a_phone_shows_all_of_it_and_fingers_find_it(address, browser):
    with opened(browser, address, 390, has_touch=True, is_mobile=True) as page:
        shown(page)
        for name, change in lab.TRIES.items():
            page.get_by_role("button", name=name).tap()
            expect_answer(page, change)
            assert not overflows(page), name
        for control in page.locator(".explorer :is(button, select, summary, a):visible").all():
            box = control.bounding_box()
            assert box and min(box["width"], box["height"]) >= TOUCHABLE, control.inner_text()


def test_the_code_that_is_copied_is_a_file_that_fp8lens_answers_as_the_page(page, tmp_path):
    change = {"stored": "kn", "operands": "e4m3", "bias": "f32"}
    choose(page, **change)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the code").press("Enter")
    expect(page.locator(".lines [role=status]")).to_have_text("Copied.")
    file = tmp_path / "layer.py"
    file.write_text(page.evaluate("navigator.clipboard.readText()"))
    (command,) = re.findall("^# +fp8lens (.*)$", file.read_text(), re.M)
    told = [
        subprocess.run([sys.executable, *asked], cwd=tmp_path, capture_output=True, text=True)
        for asked in (["layer.py"], ["-m", "fp8lens", *command.split()])
    ]
    found = lab.outcome({**lab.STATE, **change})
    kernels = counted(len(found["kernels"]), "kernel")
    for one in told:
        assert f"{kernels}, {size(found['bytes'])} moved" in one.stdout, one.stderr


def test_the_compact_form_shows_two_programs(address, browser):
    with opened(browser, address, 390) as page:
        shown(page)
        page.evaluate(ANEW, {"compact": "all.html", "quiet": ""})
        small = page.locator(".explorer[data-shown]").first
        for name in ("Bias in float32, b stored as [K, N]", "All in one call"):
            small.get_by_role("button", name=name).click()
            choice = {**lab.STATE, **lab.TRIES[name]}
            said = f"{': '.join(verdict(lab.outcome(choice)))}."
            expect(small.locator(".verdict")).to_have_text(said)
            code = lab.program(choice).code.splitlines()
            assert small.locator(".code code").all_text_contents() == code
        assert not overflows(page) and not page.locator("select").count()


# The record ---------------------------------------------------------------------------------------


def test_each_choice_has_one_place_in_the_record():
    numbers = [lab.number(choice) for choice in lab.choices()]
    assert numbers == [*range(len(lab.recorded()["programs"]))]
    with pytest.raises(KeyError, match="not recorded"):
        lab.number({**lab.STATE, "chip": "A100", "stored": "kn"})
    for change in lab.TRIES.values():
        lab.number({**lab.STATE, **change})


@pytest.mark.parametrize("rule", lab.FIXES)
def test_a_fix_that_the_page_offers_fixes(rule):
    """In every program that breaks the rule, the reason is gone after the change."""
    tried = 0
    for choice in lab.choices():
        found = lab.outcome(choice)
        if rule not in [reason["rule"] for reason in found.get("reasons", ())]:
            continue
        fixes = lab.FIXES[rule]  # the page offers the first that is a change
        change = next((fix for fix in fixes if not fix.items() <= choice.items()), {})
        changed = {**choice, **change}
        try:
            after = lab.outcome(changed)
        except KeyError:
            continue  # not recorded
        tried += 1
        assert rule not in [reason["rule"] for reason in after["reasons"]], (choice, changed)
    assert tried
