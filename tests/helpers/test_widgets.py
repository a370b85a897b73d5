import re

import jax
import jax.numpy as jnp
import pytest

from fp8lens.matmul.kernels import roofline_seconds
from helpers import aot_compile
from helpers.figures.widgets import (
    speedup,
    speedup_panel,
    speedup_svg,
)
from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot


def test_the_panel_without_a_kernel_is_a_picture_of_itself():
    shown = speedup_panel("H200")._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown and "VBox" not in shown["text/plain"]
    chosen = "M 4096, N 4096, K 4096, chip H200"
    assert chosen in shown["text/plain"] and chosen in shown["text/html"]
    for given in ("times as fast", "<svg", "In JupyterLab"):
        assert given in shown["text/html"]


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
