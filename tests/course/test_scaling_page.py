"""The explorer of delayed scaling, operated in a browser: what it answers is what Python counts."""

import pytest
from playwright.sync_api import Page, expect

from helpers.explorers import scaling
from helpers.numerics.formats import describe
from tests.course.test_bits import follow
from tests.course.test_explorers import shown
from tests.course.test_site import opened, overflows

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
EXPLORER = "scaling"


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page as it begins."""
    follow(page, "trace=spike")
    return page


def counts(page: Page, scheme: str = "delayed") -> list[str]:
    row = page.locator(f"[data-scheme={scheme}]")
    return [
        row.locator(f"[data-answer={name}]").inner_text() for name in ("saturates", "underflows")
    ]


@pytest.mark.parametrize("trace", scaling.traces())
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_the_counts_are_pythons(page, trace, name):
    for history, margin, depth in ((16, 0, 14), (3, 1, 6)):
        follow(page, f"trace={trace}&format={name}&history={history}&margin={margin}&depth={depth}")
        found = scaling.losses(scaling.traces()[trace], describe(name), history, margin, depth)
        assert counts(page) == [str(found[0]), str(found[2])]


def test_the_stored_answer_is_what_is_said_when_scripts_run(address, browser, fresh):
    with browser.new_context(java_script_enabled=False) as context:
        stored = context.new_page()
        stored.goto(address)
        words = stored.locator(".explorer p").first.inner_text()
    assert words == fresh.locator(".answer p").inner_text()


def test_the_keyboard_steps_and_changes_the_history(fresh):
    expect(fresh.locator("p.now")).to_contain_text("Its amax 100 is beyond that and saturates.")
    fresh.get_by_role("button", name="Next step").press("Enter")
    expect(fresh.locator("p.now")).to_contain_text("Step 51 knows 16 amaxes")
    expect(fresh.locator("p.now")).to_contain_text("become zero")
    history = fresh.get_by_role("slider", name="History")
    history.focus()
    for _ in range(12):
        fresh.keyboard.press("ArrowLeft")
    expect(fresh.locator(".answer")).to_contain_text("With a history of 4 ")
    assert counts(fresh)[1] == "5", "four steps that remember the spike, and the first"
    fresh.wait_for_url("**history=4*")


def test_a_trace_is_typed_or_drawn_and_can_be_sent(fresh, browser):
    fresh.get_by_label("Amax of this step").fill("1")
    expect(fresh.get_by_label("Trace of amaxes")).to_have_value("own")
    expect(fresh.locator(".answer")).to_contain_text("nothing saturates")
    fresh.get_by_label("Draw on the picture").check()
    box = fresh.locator(".explorer svg").bounding_box()
    fresh.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    fresh.mouse.down()
    fresh.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 20, steps=8)
    fresh.mouse.up()
    fresh.get_by_label("Draw on the picture").uncheck()
    expect(fresh.locator(".answer")).to_contain_text("the largest number saturates in")
    fresh.wait_for_url("**drawn=*")
    fresh.wait_for_timeout(300)
    said = fresh.locator(".answer").inner_text()
    with opened(browser, fresh.url) as other:
        shown(other)
        expect(other.locator(".answer")).to_have_text(said)


def test_a_phone_answers_to_touch(address, browser):
    with opened(browser, address, 390, has_touch=True, is_mobile=True) as page:
        shown(page)
        page.locator(".explorer svg").tap(position={"x": 100, "y": 100})
        expect(page.locator("p.now")).not_to_contain_text("Step 50 ")
        assert not overflows(page)


def test_what_is_no_trace_is_answered_with_a_sentence(fresh):
    follow(fresh, "trace=own&drawn=1 x 2")
    expect(fresh.get_by_role("alert").first).to_contain_text("Not yet")
    follow(fresh, "trace=gone&format=gone&history=0&step=1e9")
    expect(fresh.get_by_label("Trace of amaxes")).to_have_value("spike")


def test_a_wrong_amax_is_answered_beside_its_field(fresh):
    box = fresh.get_by_label("Amax of this step")
    box.fill("-1")
    expect(fresh.get_by_role("alert").last).to_contain_text("Not yet: the amax")
    assert box.get_attribute("aria-invalid") == "true"
    box.blur()
    expect(box).to_have_value("100")
    expect(fresh.get_by_role("alert").last).to_have_text("")


def test_a_long_trace_is_shown_in_part(fresh):
    follow(fresh, f"trace=own&drawn={'1+' * 40_000}")
    expect(fresh.get_by_role("alert").first).to_contain_text("Your trace has 40000 steps")
    expect(fresh.locator(".answer")).to_contain_text("nothing saturates")
