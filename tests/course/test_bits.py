"""The explorer of bits, operated in a browser by mouse, keyboard and touch: what it answers is what
Python says, with ml_dtypes."""

import itertools
import math
import re
import urllib.parse

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from helpers.explorers import bits
from helpers.numerics.formats import code_values, describe, rounding
from helpers.numerics.microscaling import BLOCK_FORMATS, to_blocks
from tests.course.test_explorers import TOUCHABLE, shown
from tests.course.test_site import DRAWN, opened, overflows, see

pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")
EXPLORER = "bits"
NUMBERS = itertools.count()


# The number makes each address another one, so that the page follows it.
FOLLOW = """async state => {
    const followed = new Promise(done => addEventListener("hashchange", done, {once: true}))
    location.hash = state
    await followed
}"""


def follow(page: Page, state: str) -> None:
    page.evaluate(FOLLOW, f"{state}&number={next(NUMBERS)}")
    page.evaluate(DRAWN)


@pytest.fixture
def fresh(page: Page) -> Page:
    """The page as it begins."""
    follow(page, "zoom=1")
    expect(page.get_by_label("Value", exact=True)).to_have_value("465")
    return page


def number(text: str) -> float:
    return float(text.replace("infinity", "inf"))


def told(page: Page, which: str = "format") -> tuple[float, str]:
    """What a panel says: the number that is read back, and the code."""
    page.evaluate(DRAWN)
    place = page.locator(f".format[data-which={which}]")
    return (
        number(place.locator("[data-answer=dequantized]").inner_text()),
        place.locator("[data-answer=code]").inner_text(),
    )


def cast(value: float, name: str) -> tuple[float, str]:
    """What ml_dtypes makes of a value without a clamp."""
    with np.errstate(all="ignore"):
        code = np.float64(value).astype(name)
    return float(code), hexadecimal(int(code.view(f"u{code.itemsize}")), name)


def hexadecimal(code: int, name: str) -> str:
    return f"0x{code:0{math.ceil(describe(name).bits / 4)}X}"


def same(got: tuple[float, str], expected: tuple[float, str]) -> bool:
    shown_value = float(f"{expected[0]:.9g}")
    is_same = got[0] == shown_value or math.isnan(got[0]) and math.isnan(shown_value)
    return is_same and got[1] == expected[1]


def choose(page: Page, **state: object) -> None:
    """By the address, as somebody's link would."""
    follow(page, urllib.parse.urlencode(state))
    value = str(state.get("value", "465"))
    expect(page.get_by_label("Value", exact=True)).to_have_value(value)
    for key, label in (("format", "Format"), ("beside", "Beside it")):
        if key in state:
            expect(page.get_by_label(label, exact=True)).to_have_value(str(state[key]))


VALUES = [465, 464, 0.001, 0.0009, -3.3, 17, 1e6, -1e-9, 0, 240.5, 6, "inf", "nan"]


@pytest.mark.parametrize("name", bits.NAMES)
def test_what_is_said_of_values_is_what_python_says(page, name):
    for value, clamp in itertools.product(VALUES, (True, False)):
        choose(page, value=value, format=name, clamp=str(clamp).lower(), zoom=3)
        f, exact = describe(name), float(value)
        if clamp and not math.isnan(exact):
            exact = min(max(exact, f.min), f.max)
        assert same(told(page), cast(exact, name)), (value, clamp, told(page))


@pytest.mark.parametrize("value, scale", [("465", "1"), ("-3.3", "0.25"), ("0.001", "0.5")])
def test_the_steps_neighbours_and_error_are_pythons(page, value, scale):
    for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float16"):
        choose(page, value=value, scale=scale, format=name)
        r = rounding(value, scale, name)
        text = page.locator(".format[data-which=format] .steps").inner_text()
        assert f"= {r.target:.9g}\n" in text and f"{r.bits} = " in text
        kept = min(max(r.target, r.format.min), r.format.max)
        if r.below < kept < r.above:
            assert f"between {r.below:.9g} and {r.above:.9g}" in text
        error = re.search(r"Error\s+(\S+)", text)
        assert float(error[1]) == float(f"{r.error:.3g}")


def test_the_stored_answer_says_what_is_said_when_scripts_run(address, browser, fresh):
    with browser.new_context(java_script_enabled=False) as context:
        stored = context.new_page()
        stored.goto(address)
        words = stored.locator(".explorer p").first.inner_text()
    assert words == " ".join(fresh.locator(".answer p").all_inner_texts())
    assert words.startswith("465 becomes 448 in E4M3FN") and "without the clamp gives NaN" in words


# By mouse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float16"])
def test_each_bit_that_is_clicked_flips(fresh, name):
    choose(fresh, value="1", format=name)
    code = int(cast(1.0, name)[1], 16)
    buttons = fresh.locator(".format[data-which=format] button.bit")
    assert buttons.count() == describe(name).bits
    for bit in range(describe(name).bits):
        code ^= 1 << bit
        fresh.locator(f".format[data-which=format] [data-bit='{bit}']").click()
        # the one on which the pointer stands keeps the keyboard, and says its new value
        expect(fresh.locator(".format[data-which=format] button.bit:focus")).to_have_text(
            str(code >> bit & 1)
        )
        assert same(told(fresh), (code_values(name)[code], hexadecimal(code, name))), bit
    assert "".join(buttons.all_inner_texts()) == f"{code:0{describe(name).bits}b}"


def test_bits_that_make_infinity_or_nan_show_it(fresh):
    choose(fresh, value="57344", format="float8_e5m2")
    for bit, code, value in ((0, 0x7A, 49152.0), (2, 0x7E, math.nan), (1, 0x7C, math.inf)):
        fresh.locator(f".format[data-which=format] [data-bit='{bit}']").click()
        expect(fresh.locator("[data-answer=code]").first).to_have_text(f"0x{code:02X}")
        assert same(told(fresh), (value, f"0x{code:02X}"))


def test_the_bits_of_nan_in_the_second_format_flip_too(fresh):
    choose(fresh, value="nan", beside="bfloat16")
    assert told(fresh, "beside")[1] == "0x7FC0"
    fresh.locator(".format[data-which=beside] [data-bit='15']").click()
    assert told(fresh, "beside")[1] == "0xFFC0"
    fresh.locator(".format[data-which=format] [data-bit='7']").click()
    assert told(fresh)[1] == "0xFF"
    assert told(fresh, "beside")[1] == "0xFFC0", "it keeps what was made of it"
    fresh.locator(".format[data-which=beside] [data-bit='14']").click()
    assert not math.isnan(told(fresh, "beside")[0])


def test_the_next_number_is_the_next_code(fresh):
    choose(fresh, value="465")
    below = fresh.get_by_role("button", name="Number below").first
    above = fresh.get_by_role("button", name="Number above").first
    assert above.is_disabled(), "448 is the largest"
    for code in (0x7D, 0x7C, 0x7B):
        below.click()
        expect(fresh.locator("[data-answer=code]").first).to_have_text(f"0x{code:02X}")
    above.click()
    expect(fresh.locator("[data-answer=code]").first).to_have_text("0x7C")


def test_pressing_the_line_takes_its_number(fresh):
    line = fresh.locator(".line svg")
    box = line.bounding_box()
    line.click(position={"x": box["width"] * 0.9, "y": 90})
    value = fresh.get_by_label("Value", exact=True)
    expect(value).not_to_have_value("465")
    assert 465 < float(value.input_value()) < 600
    before = line.get_attribute("aria-label")
    fresh.get_by_role("button", name="Zoom out").click()
    expect(line).not_to_have_attribute("aria-label", before)


def test_what_is_typed_wrong_is_answered_with_a_sentence(fresh):
    value, scale = (fresh.get_by_label(name, exact=True) for name in ("Value", "Scale"))
    for text, words in (("abc", "“abc” is not a number"), ("", "is not a number")):
        value.fill(text)
        expect(fresh.get_by_role("alert")).to_contain_text(words)
    value.fill("<b>1</b>")
    expect(fresh.get_by_role("alert")).to_contain_text("“<b>1</b>” is not a number")
    value.fill("1")
    for text, words in (("0", "not above zero"), ("-1", "not above zero"), ("inf", "not a finite")):
        scale.fill(text)
        expect(fresh.get_by_role("alert")).to_contain_text(words)
    scale.fill("465/448")
    value.fill("465")
    expect(fresh.get_by_role("alert")).to_have_text("")
    expect(fresh.locator(".answer p").first).to_have_text("465 becomes 465 in E4M3FN: exact.")


def test_long_text_that_is_no_number_does_not_widen_the_page(address, browser):
    with opened(browser, f"{address}#value={'x' * 1000}&scale={'y' * 1000}", 390) as page:
        shown(page)
        assert not overflows(page)
        assert len(page.get_by_role("alert").inner_text()) < 200


# By keyboard --------------------------------------------------------------------------------------


def test_the_keyboard_reaches_and_operates_everything(fresh):
    fresh.get_by_label("Value", exact=True).focus()
    fresh.keyboard.press("Control+a")
    fresh.keyboard.type("17")
    expect(fresh.locator("[data-answer=code]").first).to_have_text("0x58")
    assert "a tie: 16 has the even code" in fresh.locator(".steps").first.inner_text()
    fresh.keyboard.press("Tab")
    fresh.keyboard.press("Control+a")
    fresh.keyboard.type("0.5")
    expect(fresh.locator("[data-answer=code]").first).to_have_text("0x60")
    fresh.keyboard.press("Tab")
    fresh.keyboard.press("Space")
    assert not fresh.get_by_label("Clamp first").is_checked()
    format_ = fresh.get_by_label("Format", exact=True)
    for _ in range(30):
        fresh.keyboard.press("Tab")
        if format_.evaluate("control => control == document.activeElement"):
            break
    fresh.keyboard.press("ArrowDown")
    expect(format_).to_have_value("float8_e5m2")
    fresh.keyboard.press("Tab")
    fresh.keyboard.press("Enter")  # the sign
    assert told(fresh)[0] == -rounding(17, 0.5, "float8_e5m2").dequantized
    slider = fresh.get_by_role("slider")
    slider.focus()
    before = fresh.locator(".line svg").get_attribute("aria-label")
    fresh.keyboard.press("ArrowRight")
    expect(fresh.locator(".line svg")).not_to_have_attribute("aria-label", before)
    assert slider.get_attribute("aria-valuetext")


def test_every_control_has_a_name_and_the_answer_is_announced(fresh):
    nameless = fresh.locator(".explorer").aria_snapshot()
    assert not re.search(r"- (button|textbox|combobox|slider|checkbox)\s*$", nameless, re.M)
    assert fresh.locator(".answer[aria-live=polite]").count() == 1
    assert fresh.get_by_role("button", name="1, exponent bit worth 8").count()


# By touch -----------------------------------------------------------------------------------------


def test_a_phone_answers_to_touch_and_shows_all(address, browser):
    options = {"has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    with opened(browser, address, 390, **options) as page:
        shown(page)
        box = page.locator(".answer p").first.bounding_box()
        assert box["y"] + box["height"] < 700, "the answer is on the first screen"
        page.locator(".format[data-which=format] [data-bit='3']").tap()
        expect(page.locator("[data-answer=code]").first).to_have_text("0x76")
        page.get_by_role("button", name="0.0009").tap()
        expect(page.locator(".answer p").first).to_contain_text("0.0009 becomes 0 in E4M3FN")
        for name in ("bfloat16", "float16", "float8_e8m0fnu", "float4_e2m1fn"):
            page.get_by_label("Format", exact=True).select_option(name)
            page.wait_for_timeout(50)
            assert not overflows(page), name
        small = page.locator(
            ".explorer :is(button, select, input, textarea, summary)"
        ).evaluate_all(
            "all => all.filter(one => one.offsetParent).map(one => [one.outerHTML.slice(0, 80),"
            " one.getBoundingClientRect()]).filter(([, box]) => Math.min(box.width, box.height) < "
            f"{TOUCHABLE}).map(([text]) => text)"
        )
        assert not small


# The block ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding_", ["up", "down", "nearest"])
@pytest.mark.parametrize(
    "label", [name for name, form in BLOCK_FORMATS.items() if form.block == 32]
)
def test_a_block_is_what_microscaling_makes_of_it(page, label, rounding_):
    form = BLOCK_FORMATS[label]
    choose(page, value="465", element=form.element.jax, rounding=rounding_)
    expect(page.get_by_label("Element", exact=True)).to_have_value(form.element.jax)
    expect(page.get_by_label("Round the scale")).to_have_value(rounding_)
    numbers = [465.0, *map(float, bits.STATE["others"].split())]
    expected = to_blocks(np.array([numbers], np.float32), form, rounding_)
    (exponent,) = np.log2(expected.scales.astype(np.float64)).ravel().astype(int)
    expect(page.locator("[data-answer=scale]")).to_have_text(f"2^{exponent}")
    got = [float(text) for text in page.locator(".cells .is").all_inner_texts()]
    for one, other in zip(got, expected.dequantized().ravel(), strict=True):
        assert one == pytest.approx(float(f"{other:.3g}"), rel=1e-2)


def test_a_block_says_what_it_cannot_take(page):
    choose(page, others="1 2 x")
    expect(page.locator(".block .said")).to_contain_text("finite numbers")
    choose(page, others=" ".join(["1"] * 40))
    expect(page.locator(".block .said")).to_contain_text("these are 41")
    choose(page, others="1 2 3")
    expect(page.locator(".block .said")).to_contain_text("Of 4:")


# The address --------------------------------------------------------------------------------------


def test_a_finding_is_in_the_address_and_can_be_sent(fresh, address, browser):
    fresh.get_by_label("Value", exact=True).fill("0.3")
    fresh.get_by_label("Beside it", exact=True).select_option("float4_e2m1fn")
    fresh.wait_for_url("**#value=0.3&beside=float4_e2m1fn")
    with opened(browser, fresh.url) as other:
        shown(other)
        assert told(other, "beside") == told(fresh, "beside")
        assert same(told(other, "beside"), cast(0.3, "float4_e2m1fn"))
    fresh.context.grant_permissions(["clipboard-read", "clipboard-write"])
    fresh.get_by_role("button", name="Copy the link").click()
    expect(fresh.get_by_role("status")).to_have_text("Copied.")
    assert fresh.evaluate("navigator.clipboard.readText()") == fresh.url
    fresh.get_by_label("Value", exact=True).fill("0.4")
    expect(fresh.get_by_role("status")).to_have_text("")  # it is another link now


@pytest.mark.parametrize("fragment", ["format=gone", "zoom=-5", "zoom=1e9", "rounding=x&element=y"])
def test_an_address_that_nobody_wrote_breaks_nothing(address, browser, fragment):
    with opened(browser, f"{address}#{fragment}") as page:
        shown(page)
        assert told(page)[1] == "0x7E"


@pytest.mark.parametrize("state", ["value=abc", "value=nan&format=float8_e5m2", "format=bfloat16"])
def test_everybody_can_use_it_in_other_states(address, browser, state):
    with opened(browser, f"{address}#{state}", 390) as page:
        shown(page)
        for scheme in ("light", "dark"):
            see(page, 390, scheme)
            found = Axe().run(page, options={"preload": False, "resultTypes": ["violations"]})
            assert not found.response["violations"], found.generate_report()
            assert not overflows(page)
