import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens.matmul.kernels import roofline_seconds
from helpers import aot_compile
from helpers.figures.widgets import (
    neighbours_svg,
    rounding_panel,
    speedup,
    speedup_panel,
    speedup_svg,
)
from helpers.numerics.formats import FORMATS, rounding
from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot


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


@pytest.mark.parametrize(
    "value, scale, sentence",
    [
        ("abc", "1", "value &#x27;abc&#x27; is not a finite number"),
        ("1", "", "scale &#x27;&#x27; is not a finite number"),
        ("1", "-1", "scale -1 is not above zero"),
        ("nan", "1", "not a finite number"),
        ("<b>", "1", "&lt;b&gt;"),
    ],
)
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
    assert (
        all(0 <= float(x) <= 336 for x in re.findall(r'c?x[12]?="([-\d.]+)"', svg))
        and "nan" not in svg
    )
    assert "rounds to" in svg


@pytest.mark.parametrize(
    ("box", "chosen", "given"),
    [
        (rounding_panel("465", "1"), "value 465, scale 1, format float8_e4m3fn", "0x7E"),
        (speedup_panel("H200"), "M 4096, N 4096, K 4096, chip H200", "times as fast"),
    ],
)
def test_a_panel_without_a_kernel_is_a_picture_of_itself(box, chosen, given):
    shown = box._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown and "VBox" not in shown["text/plain"]
    assert chosen in shown["text/plain"] and chosen in shown["text/html"]
    assert (
        given in shown["text/html"]
        and "<svg" in shown["text/html"]
        and "In JupyterLab" in shown["text/html"]
    )


# Whether FP8 is faster ----------------------------------------------------------------------------


def test_speedup_panel_follows_what_is_chosen():
    box = speedup_panel("H200", 8192, 8192, 8192)
    sliders, choices, shown = box.children[0].children, box.children[1].children, box.children[2]
    # 2 * 8192^3 FLOPs at 989.4 and 1978.9 TFLOP/s, and 3 * 8192^2 bytes at 4.8 TB/s before the
    # second
    assert "FP8 is 1.86 times as fast" in shown.value and "estimated" in shown.value
    m, n, k = sliders
    n.value = 64  # little work for each value of A that is quantized
    assert "bf16 is" in shown.value and "<svg" in shown.value
    choices[1].value = "FP8 already"
    assert "FP8 is" in shown.value
    assert set(choices[0].options) == {"L40S", "H100", "H200", "B200"}
    for chip in choices[0].options:
        for choices[1].value in choices[1].options:  # noqa: B020
            choices[0].value = chip
            assert "times as fast" in shown.value


def test_speedup_is_the_roofline_of_what_is_compiled():
    m, n, k = 512, 1024, 2048

    def layer(x, w, scale):
        return scaled_dot(quantize(x, scale), w, scale, scale, jnp.bfloat16)

    of = jax.ShapeDtypeStruct
    args = of((m, k), jnp.bfloat16), of((n, k), jnp.float8_e4m3fn), of((), jnp.float32)
    compiled = aot_compile(layer, *args, target="H200")
    _, fp8 = speedup(m, n, k, "H200", "bf16, scales known", "FP8 already", "bf16")
    assert fp8 == pytest.approx(
        roofline_seconds(compiled, "H200"), rel=1e-4
    )  # but for the scales' few bytes


@pytest.mark.parametrize("ratios", [[0.5, 1.0, 1.5], [3.0, 2.0, 1.0]])
def test_speedup_picture_stays_inside_its_frame(ratios):
    svg = speedup_svg(32, [16, 32, 64], ratios)
    (line,) = re.findall(r'points="(.*?)"', svg)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) == 3 and all(0 <= x <= 336 and 0 <= y <= 190 for x, y in points)
    assert f"{ratios[1]:.2f} times bf16 at 32 rows" in svg
