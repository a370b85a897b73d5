"""Figures for the chapters. Each function returns a Figure of its own, outside pyplot's global
state: nothing to show or close. Ink on a transparent ground: where a page inlines the SVG, its text
and axes have the page's own colour, in the light and in the dark; everywhere else the same picture
has white paper.
"""

import contextlib
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from fp8lens.hlo.text import size
from helpers.figures.palette import INK, PALETTE
from helpers.numerics.number_formats import code_values, describe

STYLES = ("-", "--", "-.", ":")  # colour is never the only difference between two lines
# Any: matplotlib's own hint names each of its 300 settings.
STYLE: Any = {
    "font.size": 11,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}
# All as wide as the one that places are measured with.
_FAMILY = "'DejaVu Sans', Verdana, sans-serif"
# Where the picture is a document by itself, or an <img>: not where it is inlined.
_PAPER = "svg:root { background: #fff }"


# What matplotlib writes into an SVG and a page has no use for.
_NOT_FOR_A_PAGE = re.compile(
    r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|"
    r" font-family: [^;\"]*;?",
    re.S,
)
_CSS, _POINTS = 96, 72  # pixels and points in an inch
READABLE = 11  # CSS pixels: no text of a figure is smaller, on any screen
# Inches. A phone shows a figure 336 pixels wide where it stands in a fold: text of 11 points then
# has 11.4 pixels.
FIGURE_WIDTH = 4.5
WIDE = 8.7  # inches: the column of a page on a laptop
# A picture in the size for a phone, beside the wide one. Only the site knows this type.
NARROW = "application/vnd.narrow+svg"
_HEADS = 0.6  # inches: what panels beside each other need above and below them
# The part of its size at which mathtext draws what is raised or lowered.
_RAISED = 0.7


class Picture(Figure):
    """A matplotlib Figure with alternative text, `alt`, shown by Jupyter with or without pyplot in
    the kernel: as SVG, as PNG to who trusts no SVG, and as its text. A page makes it smaller only
    as far as its smallest text stays readable, and scrolls the rest.

    It is drawn for a phone, with constrained layout, and shown as wide as a page's column. `wide`
    says how: at this height in inches, or as this other Picture. Without it, panels of one height
    that stand in a column get beside each other, and all else keeps its height.
    """

    alt = ""
    wide: "float | Picture | None" = None

    def _repr_mimebundle_(self, include=None, exclude=None):
        narrow = self.svg()
        with _widened(self) as wide:
            png = io.BytesIO()
            # No version in the outputs.
            wide.savefig(png, format="png", dpi=100, metadata={"Software": None})
            data = {"image/svg+xml": wide.svg(), "image/png": png.getvalue()}
        data |= {NARROW: narrow, "text/plain": self.alt}
        return data, {kind: {"alt": self.alt} for kind in data if kind.startswith("image")}

    def svg(self) -> str:
        """The picture as SVG that a page can inline: no declarations, no ids but those that are
        referred to, numbers of two decimals, text as text.
        """
        text = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": self.alt, "svg.fonttype": "none"}):
            self.savefig(
                text,
                format="svg",
                transparent=True,
                metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
            )
        svg = re.sub(r".*?<svg[^>]*>", "", text.getvalue(), count=1, flags=re.S)
        svg = _NOT_FOR_A_PAGE.sub("", svg)
        used = set(re.findall(r"#([\w-]+)", svg))
        svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
        svg = re.sub(r"<[^>]*>", _short_tag, svg)
        svg = svg.replace(INK, "currentColor").replace("xlink:href", "href")
        svg = re.sub(r"\n\s*", "\n", svg).rstrip()
        width, height = self.get_size_inches()
        least = f"{_CSS * width * self._least():.0f}px"
        attributes = (
            'xmlns="http://www.w3.org/2000/svg"',
            f'width="{_CSS * width:.0f}" height="{_CSS * height:.0f}"',
            f'viewBox="0 0 {_POINTS * width:.2f} {_POINTS * height:.2f}"',
            f'style="min-width: {least}; font-family: {_FAMILY};',
            'stroke-linejoin: round; stroke-linecap: butt"',
        )
        return f"<svg\n{' '.join(attributes)}>\n<style>{_PAPER}</style>{svg}"

    def _least(self) -> float:
        """The part of its width at which its smallest text is just readable; 0 without text."""
        sizes = []
        for text in self.findobj(mpl.text.Text):
            if text.get_visible() and text.get_text().strip():
                is_math = "$" in text.get_text() and text.get_parse_math()
                sizes.append(float(text.get_fontsize()) * (_RAISED if is_math else 1))
        return READABLE * _POINTS / (_CSS * min(sizes)) if sizes else 0.0


@contextlib.contextmanager
def _widened(picture: Picture) -> Iterator[Picture]:
    """A picture in its wide form. Afterwards it is as it was."""
    if isinstance(picture.wide, Picture):
        picture.wide.alt = picture.alt
        yield picture.wide
        return
    width, height = picture.get_size_inches()
    places = [(axes, place) for axes in picture.axes if (place := axes.get_subplotspec())]
    grids = {place.get_gridspec() for _, place in places}
    panels = _panels(*grids) if len(grids) == 1 else 1
    shown = picture.wide or height
    with contextlib.ExitStack() as undo:
        if picture.wide is None and panels > 1:
            shown = height / panels + _HEADS
            beside = picture.add_gridspec(1, panels)
            label = picture.axes[-1].get_xlabel()
            for axes, place in places:
                undo.callback(axes.set_subplotspec, place)
                undo.callback(axes.set_xlabel, axes.get_xlabel())
                has_labels = axes.xaxis.get_tick_params()["labelbottom"]
                undo.callback(axes.tick_params, labelbottom=has_labels)
                axes.set_subplotspec(beside[place.rowspan.start])
                axes.set_xlabel(axes.get_xlabel() or label)
                axes.tick_params(labelbottom=True)
        undo.callback(picture.set_size_inches, width, height)
        picture.set_size_inches(WIDE, shown)
        yield picture


def _panels(grid: Any) -> int:
    """How many panels stand in a column, all of one height; 1 in any other grid."""
    return grid.nrows if grid.ncols == 1 and len(set(grid.get_height_ratios())) == 1 else 1


def _short_tag(tag: re.Match) -> str:
    """A tag of an SVG on one line, its numbers with two decimals."""
    line = " ".join(tag[0].split())
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", line)


def contrast(a: str, b: str) -> float:
    """How well two colours stand off from each other, from 1 to 21: WCAG 2's ratio of relative
    luminances.
    """

    def luminance(colour: str) -> float:
        linear = []
        for part in mpl.colors.to_rgb(colour):
            linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour."""
    return max("black", "white", key=lambda ink: contrast(ink, colour))


def text_width(text: str, points: float, weight: str = "normal") -> float:
    """Of a line of text, in inches."""
    if not text:
        return 0.0
    font = mpl.font_manager.FontProperties(weight=weight)
    return TextPath((0, 0), text, size=points, prop=font).get_extents().width / _POINTS


def _axes(width: float, height: float, alt: str, ratios: Sequence[float] = (1,)):
    """A new Picture and its axes: one, or an array of rows in the height ratios given, that share
    x.
    """
    figure = Picture(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(ratios), sharex=True, height_ratios=ratios)
    figure.alt = alt
    return figure, axes


@mpl.rc_context(STYLE)
def plot_codes(dtype) -> Picture:
    """The codes of a format as a map, four to a row on a phone, else eight, coloured by sign and
    magnitude. Of a signed format of 8 bits only the codes without the sign bit are drawn: the
    others are their negative.
    """
    figure = _map_of_codes(dtype, 4, FIGURE_WIDTH)
    figure.wide = _map_of_codes(dtype, 8, WIDE)
    return figure


def _map_of_codes(dtype, columns: int, width: float) -> Picture:
    f, values = describe(dtype), code_values(dtype)
    if f.bits > 8:
        raise ValueError(
            f"plot_codes({f.name}): {len(values)} codes do not fit a map; 8 bits or fewer do"
        )
    is_half = f.signed and f.bits == 8
    drawn = values[: len(values) // 2] if is_half else values
    grid = drawn.reshape(-1, columns)
    rows = len(grid)
    if f.signed:
        said = (
            f"magnitude doubling every {2**f.mantissa_bits} codes up to {f.max:g}; "
            f"{f.nan_codes} codes are NaN, {f.inf_codes} inf"
        )
        if not is_half:
            said = f"positive values first, then negative, {said}"
    else:
        said = f"powers of two from {f.min:.3g} to {f.max:.3g}"
    shown = f"the {len(drawn)} codes" + (" without a sign bit" if is_half else "")
    figure, axes = _axes(width, 0.24 * rows + 1.1, f"Map of {shown} of {f.name}: {said}.")
    finite = np.isfinite(grid) & (grid != 0)
    depth = np.full(grid.shape, 0.0)  # 0.25 ... 1 by binade, with the sign of the value
    exponents = np.log2(np.abs(grid[finite]))
    binade = (exponents - exponents.min()) / np.ptp(exponents)
    depth[finite] = np.sign(grid[finite]) * (0.25 + 0.75 * binade)
    colours = mpl.colormaps["PuOr_r"]((depth + 1.25) / 2.5)
    papers = {"NaN": "black", "inf": "#444444", "0": "white"}
    for (row, column), value in np.ndenumerate(grid):
        kind = _kind(value)
        subnormal = not kind and abs(value) < f.smallest_normal
        text = f"{value:.10g}"
        if len(text) > 8:
            text = f"{value:.3g}".replace("e-0", "e-")
        paper = papers.get(kind, mpl.colors.to_hex(tuple(colours[row, column])))
        axes.add_patch(
            mpl.patches.Rectangle((column - 0.5, row - 0.5), 1, 1, color=paper, linewidth=0)
        )
        axes.text(
            column,
            row,
            text.replace("nan", "NaN"),
            ha="center",
            va="center",
            color=ink_on(paper),
            style="italic" if subnormal else "normal",
            weight="bold" if kind or subnormal else "normal",
        )
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_xticks(range(columns), [f"+{c}" for c in range(columns)])
    digits = (f.bits + 3) // 4
    axes.set_yticks(range(rows), [f"0x{r * columns:0{digits}X}" for r in range(rows)])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    below = "code: row + column"
    if f.signed:
        below += "; bold italic: subnormal"
    if is_half:
        below += f"\n{_negative_half(values)}"
    axes.set(title=f.name, xlabel=below)
    return figure


def _negative_half(values: np.ndarray) -> str:
    """What the codes with the sign bit are, in words."""
    half = len(values) // 2
    others = []
    for code in range(half, 2 * half):
        if not np.array_equal(values[code], -values[code - half], equal_nan=True):
            others.append(f"0x{code:02X}: {values[code]:g}".replace("nan", "NaN"))
    return "; ".join([f"+ 0x{half:02X}: the same, negative", *others])


def _kind(value: float) -> str:
    """The name of a value that is none of the others: "NaN", "inf" or "0"; else ""."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "inf"
    return "0" if value == 0 else ""


@mpl.rc_context(STYLE)
def plot_histogram(tensors: Mapping[str, np.ndarray], dtypes: Sequence) -> Picture:
    """Magnitudes of tensors in binades (zeros left out) above the ranges of formats (thin where
    subnormal).
    """
    formats = [describe(d) for d in dtypes]
    ranges = ", ".join(f"{f.label} ({f.smallest_subnormal:.2g} to {f.max:.3g})" for f in formats)
    figure, (top, bottom) = _axes(
        FIGURE_WIDTH,
        5,
        f"Histogram of log2 magnitude for {', '.join(tensors)}, "
        f"above bars for the ranges of {ranges}.",
        ratios=(3, 0.35 * len(formats) + 0.2),
    )
    logs = {}
    for name, tensor in tensors.items():
        values = np.asarray(tensor).astype(np.float64)
        logs[name] = np.log2(np.abs(values[values != 0]))
    first = np.floor(min(values.min() for values in logs.values()))
    last = np.ceil(max(values.max() for values in logs.values()))
    bins = np.arange(first, last + 1)
    for i, (name, values) in enumerate(logs.items()):
        top.hist(
            values,
            bins,
            weights=np.full(len(values), 100 / len(values)),
            histtype="step",
            linewidth=2,
            linestyle=STYLES[i % 4],
            color=PALETTE[i % 7],
            label=name,
        )
        # Its amax, above the axis.
        top.plot(values.max(), 1, "v", color=PALETTE[i % 7], markersize=9)
    _draw_ranges(bottom, formats)
    top.set(ylabel="share of values (%)")
    top.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.05))
    return figure


@mpl.rc_context(STYLE)
def plot_ranges(dtypes: Sequence) -> Picture:
    """The magnitudes that formats hold, a bar for each format, thin where they are subnormal."""
    formats = [describe(d) for d in dtypes]
    ranges = (
        f"{f.label} {f.smallest_subnormal or f.smallest_normal:.2g} to {f.max:.3g}" for f in formats
    )
    alt = f"Bars for the ranges of {'; '.join(ranges)}."
    figure, axes = _axes(FIGURE_WIDTH, 0.7 + 0.28 * len(formats), alt)
    _draw_ranges(axes, formats)
    return figure


def _draw_ranges(axes: Any, formats: Sequence) -> None:
    for row, f in enumerate(formats):
        smallest = f.smallest_subnormal or f.smallest_normal
        low, normal, high = np.log2([smallest, f.smallest_normal, f.max])
        axes.barh(row, high - normal, left=normal, height=0.6, color=INK, alpha=0.6)
        axes.barh(row, normal - low, left=low, height=0.2, color=INK, alpha=0.6)
    axes.set_yticks(range(len(formats)), [f.label for f in formats])
    axes.invert_yaxis()
    axes.set(xlabel="log2 |value|")


def plain_numbers(axis: Any, at: Iterable[float] | None = None) -> None:
    """Ticks of a logarithmic axis at these numbers, or at the powers of ten that it shows. They are
    written without raised exponents, which would be smaller than all other text.
    """
    low, high = sorted(axis.get_view_interval())
    numbers = _round_numbers(low, high) if at is None else list(at)
    axis.set_ticks(numbers, [_plain(number) for number in numbers])
    axis.set_minor_locator(mpl.ticker.NullLocator())


def _plain(number: float) -> str:
    """A number as people write it: 1,000 or 1/16 or 1e-8."""
    inverse = 1 / number
    if number >= 1e5 or number <= 1e-5:
        return f"{number:.0e}".replace("e+0", "e").replace("e-0", "e-")
    if number < 1 and float(np.log2(inverse)).is_integer():
        return f"1/{inverse:,.0f}"
    return f"{number:,.0f}" if number >= 1 else f"{number:g}"


def _round_numbers(low: float, high: float) -> list[float]:
    """The powers of ten in a range; where they are fewer than three, 2 and 5 times those, too."""
    exponents = range(math.floor(np.log10(low)), math.ceil(np.log10(high)) + 1)
    # Of the text: the last bit of NumPy's power depends on the CPU.
    tens = [float(f"1e{exponent}") for exponent in exponents]
    inside = [number for number in tens if low <= number <= high]
    if len(inside) < 3:
        inside = [n * times for n in tens for times in (1, 2, 5) if low <= n * times <= high]
    return inside


@mpl.rc_context(STYLE)
def plot_intervals(rows: Mapping[str, tuple[float, float, float]], label: str) -> Picture:
    """For each row a mean within its interval, as (low, mean, high), beside a line at 0."""
    said = [f"{name}: {low:+.2f} to {high:+.2f}" for name, (low, _, high) in rows.items()]
    alt = f"Intervals of {label}: {'; '.join(said)}."
    figure, axes = _axes(FIGURE_WIDTH, 0.9 + 0.4 * len(rows), alt)
    axes.axvline(0, color=INK, linewidth=1)
    for row, (low, mean, high) in enumerate(rows.values()):
        axes.plot([low, high], [row, row], color=PALETTE[0], linewidth=3)
        axes.plot(mean, row, "o", color=INK)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=label)
    return figure


@mpl.rc_context(STYLE)
def plot_lines(
    panels: Mapping[str, Mapping[str, tuple[Any, Any]]], label: str, alt: str, **settings: Any
) -> Picture:
    """Lines by name, each as (x, y), in a panel for each title. The first panel has all names: each
    has one colour and one style in all panels. `label` says what x is, `settings` are those of all
    axes.
    """
    figure, grid = _axes(FIGURE_WIDTH, 1 + 2 * len(panels), alt, ratios=[1] * len(panels))
    names = list(next(iter(panels.values())))
    for axes, (title, lines) in zip(np.ravel(grid), panels.items(), strict=True):
        for name, (x, y) in lines.items():
            n = names.index(name)
            axes.plot(x, y, STYLES[n % 4], color=PALETTE[n], linewidth=2, label=name)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set(**settings)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                plain_numbers(axis)
    figure.axes[-1].set_xlabel(label)
    figure.legend(
        handles=figure.axes[0].get_lines(), loc="outside upper left", ncols=2, frameon=False
    )
    return figure


class _Bar(NamedTuple):
    """A kernel: its place from the top, in rows, and the bytes moved before and by it."""

    row: float
    label: str
    before: int
    moved: int


@mpl.rc_context(STYLE)
def plot_bytes(programs: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Bytes moved, a row for each kernel (label, bytes) in launch order, each bar beginning where
    the one before it ends. Kernels too small for a bar are counted below the others.
    """
    most = max(sum(moved for _, moved in parts) for parts in programs.values())
    heads: list[tuple[float, str]] = []
    notes: list[tuple[float, str]] = []
    bars: list[_Bar] = []
    row = 0.0
    for name, parts in programs.items():
        heads.append((row, _head(name, parts)))
        before = 0
        small = []
        for label, moved in parts:
            if moved < most * _SEEN:
                small.append(moved)
            else:
                row += 1
                bars.append(_Bar(row, label, before, moved))
            before += moved
        if small:
            row += 1
            kernels = "kernels" if len(small) > 1 else "kernel"
            notes.append((row, f"+{len(small)} {kernels} under {_bound(max(small))}"))
        row += 1.3
    said = "; ".join(head for _, head in heads)
    figure, axes = _axes(FIGURE_WIDTH, 0.26 * row + 0.7, f"Megabytes moved. {said}.")
    everywhere = set.intersection(*({label for label, _ in parts} for parts in programs.values()))
    for bar in bars:
        _draw_bar(axes, bar, most, PALETTE[0] if bar.label in everywhere else PALETTE[1])
    for at, note in notes:
        axes.text(0, at, f" {note}", va="center_baseline")
    for at, head in heads:
        # From the left edge of the picture on: it may be longer than the axes are.
        place = {"xycoords": ("figure fraction", "data"), "annotation_clip": False}
        text = axes.annotate(head, (0.01, at), va="center_baseline", weight="bold", **place)
        text.set_in_layout(False)
    axes.set_yticks([bar.row for bar in bars], [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 1.01e-6 * most), ylim=(row - 0.6, -0.6), xlabel="memory traffic (MB)")
    axes.spines["left"].set_visible(False)
    return figure


def _head(name: str, parts: Sequence[tuple[str, int]]) -> str:
    head = f"{name}: {sum(moved for _, moved in parts) / 1e6:.0f} MB"
    return f"{head} in {len(parts)} kernels" if len(parts) > 1 else head


def _draw_bar(axes: Any, bar: _Bar, most: int, colour: str) -> None:
    """A bar, and its megabytes in it, or beside it where it is short."""
    axes.barh(bar.row, bar.moved / 1e6, left=bar.before / 1e6, height=0.85, color=colour)
    text = f"{bar.moved / 1e6:.0f}"
    room = 1.2 * text_width(text, STYLE["font.size"]) / _INSIDE * most
    style = {"va": "center_baseline", "color": INK}
    end = bar.before + bar.moved
    if bar.moved > room:
        place = bar.before + bar.moved / 2
        style |= {"ha": "center", "color": ink_on(colour)}
    elif end + room < most:
        place = end + room / 10
        style |= {"ha": "left"}
    else:
        place = bar.before - room / 10
        style |= {"ha": "right"}
    axes.text(place / 1e6, bar.row, text, **style)


_SEEN = 1 / 500  # of the longest program: what is shorter is no bar, but a line
_INSIDE = 2.5  # inches from 0 to the longest program's end, at least


def _bound(moved: int) -> str:
    """The next power of ten above a number of bytes."""
    return size(10 ** len(str(moved))).replace(".0", "")


@mpl.rc_context(STYLE)
def plot_parts(panels: Mapping[str, Mapping[str, Mapping[str, float]]], label: str) -> Picture:
    """Bars of parts, one after the other in the legend's order: in each panel, by its title, each
    bar's parts. `label` says what the numbers are. A part has its number if there is room.
    """
    bars = [(title, *bar) for title, panel in panels.items() for bar in panel.items()]
    said = []
    for title, name, parts in bars:
        numbers = ", ".join(f"{part} {value:.4g}" for part, value in parts.items())
        said.append(f"{', '.join(filter(None, (title, name)))}: {numbers}")
    figure, grid = _axes(
        FIGURE_WIDTH,
        1.1 + 0.42 * len(bars) + 0.2 * len(panels),
        f"Bars of parts, {label}. {'; '.join(said)}.",
        ratios=[len(panel) for panel in panels.values()],
    )
    figure.wide = figure.get_figheight()
    names = dict.fromkeys(part for *_, parts in bars for part in parts)
    colours = dict(zip(names, PALETTE, strict=False))
    most = max(sum(parts.values()) for *_, parts in bars)
    for axes, (title, panel) in zip(np.ravel(grid), panels.items(), strict=True):
        for name, bar in panel.items():
            left = 0.0
            for part, value in bar.items():
                axes.barh(name, value, left=left, color=colours[part])
                if value > 0.085 * most:
                    axes.text(
                        left + value / 2,
                        name,
                        f"{value:.1f}".removesuffix(".0"),
                        ha="center",
                        va="center_baseline",
                        color=ink_on(colours[part]),
                    )
                left += value
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    figure.axes[-1].set_xlabel(label)
    _legend(figure, colours, columns=2)
    return figure


_MOMENTS = 120  # of a program's run that a picture of its memory has at most
_SHOWN = 1 / 50  # of the peak: what holds less at any moment is not told apart


@mpl.rc_context(STYLE)
def plot_memory(programs: Mapping[str, Sequence[Mapping[str, int]]]) -> Picture:
    """What is alive in a device's memory while programs run: in a panel for each, the bytes at each
    instruction by what they hold, as `fp8lens.bill.memory.alive_over_time` returns them, one on the
    other, with the peak marked. Of many instructions that follow one another, the one is drawn at
    which most is alive.
    """
    moments = {name: _fullest(alive) for name, alive in programs.items()}
    peaks = {name: max(map(_total, alive)) for name, alive in programs.items()}
    most = max(peaks.values())
    kinds = []
    for kind in next(iter(programs.values()))[0]:
        if any(held[kind] > _SHOWN * most for alive in programs.values() for held in alive):
            kinds.append(kind)
    heads = {name: f"{name}: {peak / 1e9:.2f} GB at the peak" for name, peak in peaks.items()}
    figure, grid = _axes(
        FIGURE_WIDTH,
        1.9 * len(programs) + 1.8,
        f"Memory over a program's instructions. {'; '.join(heads.values())}.",
        ratios=[1] * len(programs),
    )
    for axes, (name, alive) in zip(np.ravel(grid), moments.items(), strict=True):
        done = np.linspace(0, 100, len(alive))
        rows = [[held[kind] / 1e9 for held in alive] for kind in kinds]
        axes.stackplot(done, rows, colors=PALETTE, step="post", linewidth=0)
        at = max(range(len(alive)), key=lambda n: _total(alive[n]))
        axes.plot(done[at], 1.04e-9 * peaks[name], "v", color=INK, markersize=8)
        axes.set_title(heads[name], loc="left", fontsize=11)
        axes.set(xlim=(0, 100), ylim=(0, 1.12e-9 * most), ylabel="GB alive")
    figure.axes[-1].set_xlabel("instructions run (%)")
    _legend(figure, dict(zip(kinds, PALETTE, strict=False)), columns=1)
    return figure


def _total(held: Mapping[str, int]) -> int:
    return sum(held.values())


def _fullest(alive: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Of each of at most _MOMENTS stretches, the moment at which most is alive."""
    length = math.ceil(len(alive) / _MOMENTS)
    return [max(stretch, key=_total) for stretch in itertools.batched(alive, length)]


def _legend(figure: Figure, colours: Mapping[str, str], columns: int) -> None:
    """Above a figure, what each colour is."""
    patches = [mpl.patches.Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper left", ncols=columns, frameon=False)
