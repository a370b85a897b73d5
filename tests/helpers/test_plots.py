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

LATTICE = {
    "cuBLASLt": [[(0, ""), (0, ""), (1, "2")], [(0, ""), (3, ""), (1, "1")]],
    "Triton": [[(2, "tf32"), (2, "tf32"), (2, "tf32")], [(2, "bf16"), (1, "1"), (1, "1")]],
}
FIGURES = {
    **{
        f"codes {name}": lambda name=name: plots.plot_codes(name)
        for name in ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn")
    },
    "number line": lambda: plots.plot_number_line(["float8_e4m3fn", "float4_e2m1fn"], 4),
    "relative error": lambda: plots.plot_relative_error(["bfloat16", "float8_e4m3fn"], -12, 12),
    "histogram": lambda: plots.plot_histogram(
        {"w": np.array([0.5, 0, -3])}, ["float8_e4m3fn", "float8_e5m2"]
    ),
    "snr": lambda: plots.plot_snr([0.5, 1, 2], {"E4M3FN": [1.0, 30.0, -np.inf]}, {"amax": 1.0}),
    "roofline": lambda: plots.plot_roofline(
        {"fused": (1e12, 1e9, 1e-3), "naive": (1e12, 1e10, 4e-3)}, {"FP8": 2e15}, 3e12
    ),
    "speedup": lambda: plots.plot_speedup(
        [16, 64, 256],
        {"FP8 already": [1.9, 2, 2], "by amax": [0.4, 1, 1.5]},
        {"FP8 already": [(64, 1.7)], "by amax": []},
    ),
    "bytes": lambda: plots.plot_bytes({"many": [("a", 10), ("b", 1)], "one": [("c", 3)]}),
    "lattice": lambda: plots.plot_lattice(
        LATTICE,
        [("f32", "to E4M3"), ("bf16", "to E4M3")],
        [("no bias", "relu"), ("bias", "relu"), ("bias", "silu")],
        ["fused", "outside", "lost", "refused"],
        "activation",
    ),
    "lattice of one panel": lambda: plots.plot_lattice(
        {"all the programs": [[(0, "")]]},
        [("f32", "to E4M3")],
        [("bias", "relu")],
        ["fused, nothing outside"],
        "activation",
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_shows_itself_once_with_alt_text_and_no_pyplot(name):
    figure = FIGURES[name]()
    data, metadata = DisplayFormatter().format(figure)
    assert isinstance(figure, Figure) and data["image/png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert set(data) == {"image/svg+xml", "image/png", "text/plain"}
    assert metadata == dict.fromkeys(("image/svg+xml", "image/png"), {"alt": figure.alt})
    assert len(figure.alt) > 40 and data["text/plain"] == figure.alt
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    assert figure.get_facecolor() == (1, 1, 1, 1)
    for axes in figure.axes[-1:]:
        assert axes.get_xlabel()


@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_a_part_of_a_page(name):
    svg = FIGURES[name]().svg()
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


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_of_a_figure_is_in_its_svg(name):
    figure = FIGURES[name]()
    drawn = "".join(ElementTree.fromstring(figure.svg()).itertext())
    drawn = re.sub(r"\s", "", drawn)
    texts = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]
    missing = {text for text in texts if re.sub(r"\s", "", text) not in drawn and "$" not in text}
    # Ticks beyond the axes are not drawn.
    ticks = {label.get_text() for axes in figure.axes for label in _ticks(axes)}
    assert missing <= ticks


def _ticks(axes):
    return [*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both")]


def test_same_figure_twice_gives_the_same_bytes():
    pictures = [FIGURES["snr"]()._repr_mimebundle_()[0].values() for _ in range(2)]
    for first, second in zip(*pictures, strict=True):
        assert first == second
    assert b"Software" not in FIGURES["snr"]()._repr_mimebundle_()[0]["image/png"]


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


def test_code_map_writes_every_code_in_its_place():
    texts = [t.get_text() for t in plots.plot_codes("float8_e4m3fn").axes[0].texts]
    assert len(texts) == 256
    assert (texts[0x00], texts[0x7E], texts[0x7F], texts[0x80], texts[0x38]) == (
        "0",
        "448",
        "NaN",
        "-0",
        "1",
    )


def test_code_map_refuses_16_bits():
    with pytest.raises(ValueError, match="65536 codes do not fit"):
        plots.plot_codes("bfloat16")


def test_relative_error_is_half_a_step_where_normal_and_one_where_flushed():
    (line,) = plots.plot_relative_error(["float8_e4m3fn"], -14, 12).axes[0].lines
    error = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert (
        error[1.0] == pytest.approx(1 / 17) and error[2.0**-6] == error[1.0]
    )  # 1 + 1/16 lies between 1 and 1 + 1/8
    assert error[2.0**-12] == 1 and error[2.0**9] > 0.5


def test_roofline_points_and_roofs():
    points = {"compute": (1e13, 1e9, 5e-3), "memory": (1e9, 1e9, 1e-3)}
    figure = plots.plot_roofline(points, {"f8": 2e15, "bf16": 1e15}, 3e12)
    lines = figure.axes[0].lines
    single = [line for line in lines if len(line.get_ydata()) == 1]
    marks = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in single}
    assert marks == {"compute": (1e4, 2000.0), "memory": (1.0, 1.0)}
    assert [max(line.get_ydata()) for line in lines if len(line.get_ydata()) > 1] == [
        2000.0,
        1000.0,
    ]


def test_bytes_are_stacked_in_launch_order():
    figure = plots.plot_bytes(
        {"many": [("a", 10_000_000), ("b", 100_000)], "one": [("c", 3_000_000)]}
    )
    axes = figure.axes[0]
    assert [(bar.get_x(), round(bar.get_width(), 3)) for bar in axes.patches] == [
        (0, 10),
        (10, 0.1),
        (0, 3),
    ]
    assert [t.get_text() for t in axes.texts] == ["many: 10 MB in 2 kernels", "a", "one: 3 MB", "c"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["b"], (
        "too narrow for its label"
    )
    assert figure.alt == "Megabytes moved. many: 10 MB in 2 kernels; one: 3 MB."


def test_bytes_of_the_same_label_have_one_colour():
    axes = plots.plot_bytes(
        {"many": [(label, 10) for label in "abcdefgh"], "one": [("a", 10)]}
    ).axes[0]
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in axes.patches[:8]}
    assert len(looks) == 8 and axes.patches[0].get_facecolor() == axes.patches[8].get_facecolor()


def test_lattice_writes_each_cell_in_its_place_and_counts_the_kinds():
    figure = FIGURES["lattice"]()
    assert figure.alt == (
        "cuBLASLt, 6 programs: 3 fused, 2 outside, 1 refused; "
        "Triton, 6 programs: 2 outside, 4 lost."
    )
    for axes, grid in zip(figure.axes, LATTICE.values(), strict=True):
        cells = {
            (round(t.get_position()[0]), t.get_position()[1]): t.get_text() for t in axes.texts[:6]
        }
        rows = sorted({y for _, y in cells})
        assert [[cells[x, y] for x in range(3)] for y in rows] == [
            [text for _, text in line] for line in grid
        ]
        assert [t.get_text() for t in axes.texts[6:]] == ["no bias", "bias"]
        papers = [patch.get_facecolor() for patch in axes.patches]
        kinds = [kind for line in grid for kind, _ in line]
        assert len(set(zip(kinds, papers, strict=True))) == len(set(kinds)) == len(set(papers))
        assert (
            axes.xaxis.get_tick_params()["labeltop"]
            and not axes.xaxis.get_tick_params()["labelbottom"]
        )
