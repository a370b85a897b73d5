import re

import pytest

from helpers.formats import FORMATS, rounding
from helpers.widgets import neighbours_svg, rounding_panel


def panel(**chosen):
    box = rounding_panel(**chosen)
    (value, scale, dtype), shown = box.children[0].children, box.children[1]
    return value, scale, dtype, shown


def test_panel_shows_code_value_and_error():
    *_, shown = panel()
    for text in ("0 1111 110", "0x7E", "448", "17 (0.0366 of the value)", "a bare cast gives nan"):
        assert text in shown.value


def test_panel_follows_what_is_typed_and_chosen():
    value, scale, dtype, shown = panel()
    value.value, scale.value, dtype.value = "3", "0.5", "float4_e2m1fn"
    assert "0 11 1" in shown.value and "0x7<" in shown.value and "Note" not in shown.value


@pytest.mark.parametrize("value, scale, sentence", [
    ("abc", "1", "value &#x27;abc&#x27; is not a finite number"),
    ("1", "", "scale &#x27;&#x27; is not a finite number"),
    ("1", "-1", "scale -1 is not above zero"), ("nan", "1", "not a finite number"), ("<b>", "1", "&lt;b&gt;")])
def test_panel_answers_bad_input_with_a_sentence_and_recovers(value, scale, sentence):
    value_field, scale_field, _, shown = panel()
    value_field.value, scale_field.value = value, scale
    assert "Not yet" in shown.value and sentence in shown.value and "Traceback" not in shown.value
    value_field.value, scale_field.value = "1", "1"
    assert "0 0111 000" in shown.value


def test_panel_offers_every_format_and_prints_nothing(capsys):
    for name in FORMATS:
        *_, dtype, shown = panel(value="1", dtype=name)
        assert dtype.value == name and "<svg" in shown.value
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize("value", [0.0, 1.0, 1.05, -3.3, 465.0, -1e9, 1e-9])
def test_picture_stays_inside_its_width_and_says_what_it_shows(value):
    svg = neighbours_svg(rounding(value))
    assert all(0 <= float(x) <= 460 for x in re.findall(r'c?x[12]?="([-\d.]+)"', svg)) and "nan" not in svg
    assert "rounds to" in svg
