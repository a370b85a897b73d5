import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from helpers.figures import plots
from tools.site import sanitize

FIGURES = {
    **{
        f"codes {name}": lambda name=name: plots.plot_codes(name)
        for name in ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn")
    },
    "histogram": lambda: plots.plot_histogram(
        {"w": np.array([0.5, 0, -3])}, ["float8_e4m3fn", "float8_e5m2"]
    ),
    "intervals": lambda: plots.plot_intervals({"FP8": (-0.1, 0.1, 0.3)}, "error (%)"),
    "lines": lambda: plots.plot_lines(
        {"H100": {"FP8": ([1], [2])}},
        "tokens",
        "The time of a step, by its tokens: one line.",
    ),
    "ranges": lambda: plots.plot_ranges(["float8_e4m3fn", "float16"]),
    "parts": lambda: plots.plot_parts({"H100": {"bf16": {"matmuls": 2, "rest": 1}}}, "time (ms)"),
    "memory": lambda: plots.plot_memory(
        {
            "bf16": [{"argument": 5, "saved": n} for n in (1, 7, 2)],
            "FP8": [{"argument": 5, "saved": 1}],
        }
    ),
    "bytes": lambda: plots.plot_bytes({"many": [("a", 10), ("b", 1)], "one": [("c", 3)]}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_shows_itself_once_with_alt_text_and_no_pyplot(name):
    figure = FIGURES[name]()
    data, metadata = DisplayFormatter().format(figure)
    assert isinstance(figure, Figure) and data["image/png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert set(data) == {"image/svg+xml", "image/png", plots.NARROW, "text/plain"}
    wide, narrow = (ElementTree.fromstring(data[kind]) for kind in ("image/svg+xml", plots.NARROW))
    assert float(wide.get("width")) / float(narrow.get("width")) == pytest.approx(8.7 / 4.5, 0.01)
    assert figure.get_figwidth() == 4.5, "it is again as it was"
    assert metadata == dict.fromkeys(("image/svg+xml", "image/png"), {"alt": figure.alt})
    assert len(figure.alt) > 40 and data["text/plain"] == figure.alt
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    for axes in figure.axes[-1:]:
        assert axes.get_xlabel()


@pytest.mark.parametrize(("form", "room"), [("image/svg+xml", 630), (plots.NARROW, 336)])
@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_a_part_of_a_page_that_makes_no_text_too_small(name, form, room):
    svg = FIGURES[name]()._repr_mimebundle_()[0][form]
    assert svg.startswith("<svg\n") and not sanitize.svg(svg)[1]
    assert "currentColor" in svg and plots.INK not in svg and len(svg) < 150_000
    assert not re.search(r"\b20\d\d-|matplotlib|(?<![<\w])/(home|root|tmp|usr|work)/", svg)
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and set(ids) == set(
        re.findall(r"#([\w-]+)\)|href=\"#([\w-]+)", svg) and ids
    )
    root = ElementTree.fromstring(svg)
    width, height, *box = (
        float(n) for n in (root.get("width"), root.get("height"), *root.get("viewBox").split())
    )
    assert width / height == pytest.approx(box[2] / box[3], rel=0.01)
    wanted = float(re.search(r"min-width: (\d+)px", svg)[1])
    assert wanted < room, "the page shows it whole"
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", svg)]
    assert sizes and min(sizes) * wanted / box[2] >= plots.READABLE - 0.05


@pytest.mark.parametrize("name", FIGURES)
def test_everybody_can_read_what_stands_on_a_colour(name):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    patches = [patch for axes in figure.axes for patch in axes.patches]
    extents = np.array([patch.get_window_extent().extents for patch in patches]).reshape(-1, 4)
    for text in (text for text in figure.findobj(Text) if text.get_text().strip()):
        x, y = text.get_window_extent().get_points().mean(axis=0)
        under = np.flatnonzero(
            (extents[:, 0] < x) & (x < extents[:, 2]) & (extents[:, 1] < y) & (y < extents[:, 3])
        )
        if not len(under):
            assert to_hex(text.get_color()) == plots.INK, f"{text}: the page's own ink"
        else:
            paper = text.get_bbox_patch() or patches[under[-1]]
            assert plots.contrast(text.get_color(), paper.get_facecolor()) >= 4.5, text
