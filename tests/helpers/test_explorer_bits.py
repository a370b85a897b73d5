"""What "Bits" says of a number, run by Node, against what Python says."""

import re

import pytest

from helpers.explorers import bits
from tests.helpers.test_explorer_formats import ask_node

NODE = """
const { became, complaint, parse, sentence } = explorer
const { formats, asked } = given
console.log(JSON.stringify(asked.map(({ name, value, scale, clamp }) => {
    const wrong = complaint(value, scale)
    if (wrong) return { wrong }
    const given = [formats.find(one => one.name === name), parse(value), parse(scale), clamp]
    return { sentence: sentence(...given), ...became(...given) }
})))
"""


def ask(*asked: tuple[str, str, str, bool]) -> list[dict]:
    """What is said of each format's name, value, scale and whether it is clamped."""
    keys = ("name", "value", "scale", "clamp")
    given = {**bits.data(), "asked": [dict(zip(keys, one, strict=True)) for one in asked]}
    return ask_node("bits", NODE, given)


E4M3, E5M2, E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"


def test_without_the_clamp_nothing_is_said_to_be_clamped():
    asked = [(E4M3, value, "1", False) for value in ("450", "464", "-450")]
    asked += [("float4_e2m1fn", "inf", "1", False), (E8M0, "0", "1", False)]
    found = [one["sentence"] for one in ask(*asked)]
    rounds = "beyond the largest number, rounds to it."
    assert found == [
        f"450 becomes 448 in E4M3FN: off by 2, 0.444 %; {rounds}",
        f"464 becomes 448 in E4M3FN: off by 16, 3.45 %; {rounds}",
        f"-450 becomes -448 in E4M3FN: off by 2, 0.444 %; {rounds}",
        f"infinity becomes 6 in E2M1FN: {rounds}",
        "0 becomes NaN in E8M0FNU: it is below the smallest number, and nothing clamps it.",
    ]


VALUES = [
    (E4M3, "465", "1"),
    (E4M3, "450", "1"),
    (E4M3, "44.8", "0.1"),
    (E4M3, "-44.8", "0.1"),
    (E5M2, "0.3", "0.1"),
    (E4M3, "1.0001", "1"),
    (E4M3, "1e-300", "1e300"),
    (E8M0, "0", "1"),
    (E8M0, "-1", "1"),
    (E4M3, "0", "1"),
]


@pytest.mark.parametrize(("name", "value", "scale"), VALUES)
def test_the_sentence_is_pythons(name, value, scale):
    (found,) = ask((name, value, scale, True))
    answer = re.search("<p>(.*?)</p>", bits.answer(value, scale, name, name))
    assert answer and answer[1] == f"{found['sentence']} {found['sentence']}"


def test_the_rounding_of_doubles_is_not_the_formats_error():
    (found,) = ask((E4M3, "44.8", "0.1", True))
    assert found["sentence"] == "44.8 becomes 44.8 in E4M3FN: exact."
    assert (found["below"], found["above"], found["error"]) == (448, 448, 0)
    (found,) = ask((E4M3, "1.0000000001", "1", True))
    assert found["error"] > 0, "more than a double's last bits"


def test_of_zero_there_is_no_percent():
    (found,) = ask((E8M0, "0", "1", True))
    assert "off by 5.88e-39, clamped" in found["sentence"] and "%" not in found["sentence"]


def test_a_number_that_no_double_holds_is_refused():
    asked = [(E4M3, value, "1", True) for value in ("1e400", "-1e400", "1e-400", "1e300/1e-300")]
    for (_, value, *_), found in zip(asked, ask(*asked), strict=True):
        assert found == {"wrong": f"“{value}” is not a number that a double holds."}
    (found,) = ask((E4M3, "1", "1e400", True))
    assert found["wrong"] == "The scale “1e400” is not a number that a double holds."
    assert all(
        "wrong" not in one for one in ask((E4M3, "0e5", "1", True), (E4M3, "inf", "1", True))
    )


def test_of_long_text_the_beginning_is_repeated():
    (found,) = ask((E4M3, "x" * 1000, "1", True))
    assert found["wrong"].startswith(f"“{'x' * 40}…” is not a number.")
