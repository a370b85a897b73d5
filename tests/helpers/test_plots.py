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
    assert figure.get_facecolor() == (1, 1, 1, 1)
    for axes in figure.axes[-1:]:
        assert axes.get_xlabel()


@pytest.mark.parametrize("form", ["image/svg+xml", plots.NARROW])
@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_a_part_of_a_page(name, form):
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
    ground = [
        e
        for e in root.iter()
        if re.search("fill: (#fff|white)", e.get("style", ""))
        and re.match(r"M 0 \S+ L \S+ \S+ L \S+ 0 ", e.get("d", ""))
    ]
    assert not ground, "the ground is the page's own"


def test_panels_of_one_height_stand_beside_each_other_in_the_wide_form():
    def made(ratios):
        figure = plots.Picture(figsize=(4.5, 6), layout="constrained")
        for axes in figure.subplots(2, sharex=True, height_ratios=ratios):
            axes.plot([1, 2])
        axes.set_xlabel("steps")
        root = ElementTree.fromstring(figure._repr_mimebundle_()[0]["image/svg+xml"])
        labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        return float(root.get("height")) / 96, labels.count("steps")

    assert made((1, 1)) == (pytest.approx(3.6, 0.01), 2)
    assert made((2, 1)) == (6, 1)


@pytest.mark.parametrize(
    ("a", "b", "ratio"), [("black", "white", 21), ("white", "white", 1), ("#767676", "white", 4.54)]
)
def test_contrast_is_wcags(a, b, ratio):
    assert plots.contrast(a, b) == plots.contrast(b, a) == pytest.approx(ratio, abs=0.01)


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


def test_code_map_writes_every_code_without_a_sign_in_its_place():
    axes = plots.plot_codes("float8_e4m3fn").axes[0]
    texts = [t.get_text() for t in axes.texts]
    assert len(texts) == 128
    assert (texts[0x00], texts[0x7E], texts[0x7F], texts[0x38]) == ("0", "448", "NaN", "1")
    assert [t.get_text() for t in axes.get_yticklabels()][:3] == ["0x00", "0x04", "0x08"]
    assert "+ 0x80: the same, negative" in axes.get_xlabel()


def test_bytes_are_rows_in_launch_order_each_from_where_the_one_before_ends():
    figure = plots.plot_bytes(
        {"many": [("a", 10_000_000), ("b", 2_000_000), ("d", 900)], "one": [("a", 3_000_000)]}
    )
    axes = figure.axes[0]
    assert [(bar.get_x(), round(bar.get_width(), 3)) for bar in axes.patches] == [
        (0, 10),
        (10, 2),
        (0, 3),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "a"]
    texts = [t.get_text().strip() for t in axes.texts]
    assert texts == [
        "10",
        "2",
        "3",
        "+1 kernel under 1 kB",
        "many: 12 MB in 3 kernels",
        "one: 3 MB",
    ]
    assert figure.alt == "Megabytes moved. many: 12 MB in 3 kernels; one: 3 MB."
    everywhere, extra, again = (to_hex(bar.get_facecolor()) for bar in axes.patches)
    assert everywhere == again != extra


@pytest.mark.parametrize(("form", "room"), [("image/svg+xml", 630), (plots.NARROW, 336)])
@pytest.mark.parametrize("name", FIGURES)
def test_a_page_makes_no_text_smaller_than_readable(name, form, room):
    svg = FIGURES[name]()._repr_mimebundle_()[0][form]
    root = ElementTree.fromstring(svg)
    least = float(re.search(r"min-width: (\d+)px", svg)[1]) / float(root.get("viewBox").split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*([\d.]+)px", svg)]
    assert sizes and min(sizes) * least >= plots.READABLE - 0.05
    assert float(re.search(r"min-width: (\d+)px", svg)[1]) < room, "the page shows it whole"
