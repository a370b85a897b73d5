"""The explorer of when FP8 is faster, operated in a browser by mouse, keyboard and touch: what it
answers is what Python says."""

import dataclasses
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from helpers.explorers import speedup
from helpers.explorers.speedup import Choice
from tests.course.test_bits import follow
from tests.course.test_explorers import TOUCHABLE, shown
from tests.course.test_site import opened, overflows, see

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
EXPLORER = "speedup"


def choose(page: Page, choice: Choice) -> None:
    state = dataclasses.asdict(choice)
    follow(page, "&".join(f"{key}={value}" for key, value in state.items()))


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page as it begins."""
    choose(page, Choice())
    return page


def is_answered(page: Page, choice: Choice) -> None:
    expect(page.locator(".answer")).to_have_text("".join(paragraphs(choice)))


def paragraphs(choice: Choice) -> tuple[str, str]:
    first, *rest = speedup.sentences(choice)
    return first, " ".join(rest)


@pytest.mark.parametrize("chip", speedup.chips())
@pytest.mark.parametrize("out", speedup.OUT)
def test_the_answer_is_pythons(page, chip, out):
    for m, n, k, a, b in ((1, 4096, 11008, "fp8", "fp8"), (300, 500, 7, "amax", "given")):
        choice = Choice(m, n, k, chip, a, b, out)
        choose(page, choice)
        is_answered(page, choice)


def test_the_stored_answer_is_what_is_said_when_scripts_run(address, browser, fresh):
    with browser.new_context(java_script_enabled=False) as context:
        stored = context.new_page()
        stored.goto(address)
        words = stored.locator(".explorer p").all_inner_texts()
    assert words == fresh.locator(".answer p").all_inner_texts() == [*paragraphs(Choice())]


def test_a_size_is_typed_as_any_whole_number(fresh):
    box = fresh.get_by_label("K, columns of both")
    box.fill("12,345")
    is_answered(fresh, Choice(k=12345))
    fresh.wait_for_url("**#k=12345")
    for text in ("", "x", "0", "1.5", "-3", "1048577"):
        box.fill(text)
        expect(fresh.get_by_role("alert")).to_have_text(
            "Not yet: K must be a whole number from 1 to 1048576."
        )
        assert box.get_attribute("aria-invalid") == "true"
    is_answered(fresh, Choice(k=12345))
    box.blur()
    expect(box).to_have_value("12345")
    expect(fresh.get_by_role("alert")).to_have_text("")


def test_a_step_back_changes_the_field_that_is_focused(fresh):
    box = fresh.get_by_label("M, rows of A")
    box.fill("101")
    fresh.wait_for_url("**#m=101")
    fresh.wait_for_timeout(1100)  # a later change is another step
    box.fill("102")
    fresh.wait_for_url("**#m=102")
    expect(box).to_be_focused()
    fresh.go_back()
    is_answered(fresh, Choice(m=101))
    expect(box).to_have_value("101")


def test_the_keyboard_chooses_all(fresh):
    slider = fresh.get_by_role("slider", name="M in powers of two")
    slider.focus()
    for _ in range(3):
        fresh.keyboard.press("ArrowLeft")
    is_answered(fresh, Choice(m=256))
    assert slider.get_attribute("aria-valuetext") == "256"
    expect(fresh.get_by_label("M, rows of A")).to_have_value("256")
    fresh.get_by_label("Chip").select_option("B200")
    fresh.get_by_label("A arrives in").select_option("FP8 already")
    fresh.get_by_label("B is stored in").select_option("bf16, by its amax")
    fresh.get_by_label("Result").select_option("f32")
    is_answered(fresh, Choice(256, chip="B200", a="fp8", b="amax", out="f32"))
    fresh.get_by_label("Weights of Llama 2").select_option("70B down")
    n, k = speedup.WEIGHTS["70B down"]
    is_answered(fresh, Choice(256, n, k, "B200", "fp8", "amax", "f32"))
    fresh.get_by_label("N, rows of B").fill("1000")
    expect(fresh.get_by_label("Weights of Llama 2")).to_have_value("")


def test_the_chart_is_pressed_at_an_m(fresh):
    chart = fresh.locator("svg.speedups")
    box = chart.bounding_box()
    chart.click(position={"x": 50, "y": 100})
    is_answered(fresh, Choice(m=1))
    chart.click(position={"x": box["width"] - 15, "y": 100})
    is_answered(fresh, Choice(m=2**17))


def test_where_the_time_goes_adds_up(fresh):
    for choice in (Choice(), Choice(m=16, a="amax", b="amax"), Choice(a="fp8", b="fp8")):
        choose(fresh, choice)
        bf16, fp8 = speedup.speedup(*dataclasses.astuple(choice))
        row = fresh.locator("[data-part=together] td")
        expect(row.nth(0)).to_have_text(speedup.duration(bf16))
        expect(row.nth(1)).to_have_text(speedup.duration(fp8))
        for number, name in ((0, "bf16"), (1, "FP8")):
            bar = fresh.locator(".timed").nth(number)
            expect(bar).to_contain_text(name)
            widths = bar.locator(".bar span").evaluate_all(
                "all => all.map(one => parseFloat(one.style.width))"
            )
            share = (bf16, fp8)[number] / max(bf16, fp8)
            assert sum(widths) == pytest.approx(100 * share, abs=0.1)


def test_a_measurement_is_chosen_and_stands_on_the_chart(fresh):
    points = [point for point in speedup.points() if point.speedup]
    rows = fresh.get_by_role("region", name="Times as fast as bf16").locator("tr:has(td)")
    assert rows.count() == len(points)
    for number, point in enumerate(points):
        m, n, k = point.shape
        choice = Choice(m, n, k, point.chip, point.a, point.b)
        bf16, fp8 = speedup.speedup(*dataclasses.astuple(choice))
        cells = rows.nth(number).locator("td").all_inner_texts()
        assert cells[1:3] == [f"{bf16 / fp8:.2f}", f"{point.speedup:.2f}"]
        error = int(re.sub(" %", "", cells[3]).replace("−", "-"))
        assert error == pytest.approx(100 * (bf16 / fp8 / point.speedup - 1), abs=0.51)
        link = rows.nth(number).get_by_role("link", name=point.source)
        assert link.get_attribute("href") == point.url
    vllm = next(number for number, point in enumerate(points) if point.source == "vLLM")
    rows.nth(vllm).get_by_role("button").click()
    m, n, k = points[vllm].shape
    is_answered(fresh, Choice(m, n, k, points[vllm].chip, points[vllm].a, points[vllm].b))
    near = fresh.locator(".near li").all_inner_texts()
    assert sum("vLLM, 16 × 12288 × 5376" in text for text in near) == 2
    assert fresh.locator("circle.measured").count() == len(near)


def test_what_cannot_be_chosen_is_not_taken_from_the_address(fresh):
    follow(fresh, "m=0&n=1.5&k=x&chip=A100&a=toString&b=&out=f64")
    is_answered(fresh, Choice())


def test_it_can_be_sent(fresh, browser):
    choose(fresh, Choice(m=16, chip="H200"))
    with opened(browser, fresh.url) as other:
        shown(other)
        is_answered(other, Choice(m=16, chip="H200"))


def test_a_phone_answers_to_touch(address, browser):
    with opened(browser, address, 390, has_touch=True, is_mobile=True) as page:
        shown(page)
        chart = page.locator("svg.speedups")
        chart.tap(position={"x": chart.bounding_box()["width"] - 15, "y": 60})
        is_answered(page, Choice(m=2**17))
        assert not overflows(page)
        for control in page.locator(".explorer :is(button, select, input)").all():
            box = control.bounding_box()
            assert min(box["width"], box["height"]) >= TOUCHABLE, control.inner_text()
        for text in page.locator(".explorer svg text").all():
            assert float(text.evaluate("one => parseFloat(getComputedStyle(one).fontSize)")) >= 11


@pytest.mark.parametrize(("width", "scheme"), [(1366, "dark"), (390, "light")])
def test_everybody_can_use_what_it_becomes(address, browser, width, scheme):
    state = "#m=65536&n=2560&k=2560&chip=B200&a=amax&b=amax"
    with opened(browser, address + state, width) as page:
        shown(page)
        see(page, width, scheme)
        assert page.locator(".near li").count() > 3 and not overflows(page)
        found = Axe().run(page, options={"preload": False, "resultTypes": ["violations"]})
        assert not found.response["violations"], found.generate_report()
