"""Figures for the chapters. Each function returns a Figure of its own, outside pyplot's global
state: nothing to show or close. Ink on a transparent ground: where a page inlines the SVG, its text
and axes have the page's own colour, in the light and in the dark; everywhere else the same picture
has white paper.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from helpers.numerics.formats import code_values, describe

# Black to the eye, and found again in the SVG: what is drawn in it takes the page's own ink.
INK = "#010203"
# Okabe and Ito's colours, distinguishable with the common colour-vision deficiencies:
# https://jfly.uni-koeln.de/color/
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
STYLES = ("-", "--", "-.", ":")  # colour is never the only difference between two lines
MARKERS = "os^Dv"
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


class Picture(Figure):
    """A matplotlib Figure with alternative text, `alt`, shown by Jupyter with or without pyplot in
    the kernel: as SVG, as PNG to who trusts no SVG, and as its text. `least` is the part of its
    width below which nobody can read it.
    """

    alt = ""
    least = 0.5

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = io.BytesIO()
        # No version in the outputs.
        self.savefig(png, format="png", dpi=100, metadata={"Software": None})
        data = {"image/svg+xml": self.svg(), "image/png": png.getvalue(), "text/plain": self.alt}
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
        attributes = (
            'xmlns="http://www.w3.org/2000/svg"',
            f'width="{_CSS * width:.0f}" height="{_CSS * height:.0f}"',
            f'viewBox="0 0 {_POINTS * width:.2f} {_POINTS * height:.2f}"',
            f'style="min-width: {_CSS * self.least * width:.0f}px; font-family: {_FAMILY};',
            'stroke-linejoin: round; stroke-linecap: butt"',
        )
        return f"<svg\n{' '.join(attributes)}>\n<style>{_PAPER}</style>{svg}"


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
    """Every code of a format as a map: high bits down, low bits across, coloured by sign and
    magnitude.
    """
    f, values = describe(dtype), code_values(dtype)
    if f.bits > 8:
        raise ValueError(
            f"plot_codes({f.name}): {len(values)} codes do not fit a map; 8 bits or fewer do"
        )
    columns = 2 ** ((f.bits + 1) // 2)
    grid, big = values.reshape(-1, columns), f.bits == 8
    rows = len(grid)
    if f.signed:
        said = (
            "positive values in the upper half, negative below, "
            f"magnitude doubling every {2**f.mantissa_bits} codes up to {f.max:g}; "
            f"{f.nan_codes} codes are NaN, {f.inf_codes} inf"
        )
    else:
        said = f"powers of two from {f.min:.3g} to {f.max:.3g}"
    alt = f"Map of the {len(values)} codes of {f.name}: {said}."
    figure, axes = _axes(8.2 if big else 6, 0.4 * rows + 1, alt)
    figure.least = 0.78 if big else 0.5
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
        if len(text) > 6:
            text = f"{value:.3g}".replace("e-0", "e-")
        if big:
            points = 7.5 if len(text) < 7 else 5.8
        else:
            points = 10.0
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
            fontsize=points,
        )
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_xticks(range(columns), [f"_{c:X}" if big else f"+{c}" for c in range(columns)])
    axes.set_yticks(
        range(rows), [f"0x{r:X}_" if big else f"0x{r * columns:02X}" for r in range(rows)]
    )
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    title = f.name
    if f.signed and big:
        title += ": orange positive, purple negative, bold italic subnormal"
    axes.set(xlabel="low bits of the code (hex)", ylabel="high bits (hex)", title=title)
    return figure


def _kind(value: float) -> str:
    """The name of a value that is none of the others: "NaN", "inf" or "0"; else ""."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "inf"
    return "0" if value == 0 else ""


@mpl.rc_context(STYLE)
def plot_number_line(dtypes: Sequence, limit: float = 8.0) -> Picture:
    """The representable numbers between 0 and `limit`, a row a format; subnormals are drawn
    shorter.
    """
    formats = [describe(d) for d in dtypes]
    figure, axes = _axes(
        7,
        0.55 * len(formats) + 1.1,
        f"Representable numbers from 0 to {limit:g} as ticks, a row each for "
        f"{', '.join(f.label for f in formats)}: the gap doubles at powers of two.",
    )
    for row, f in enumerate(formats):
        values = code_values(f.dtype)
        values = np.unique(values[np.isfinite(values) & (values >= 0) & (values <= limit)])
        heights = np.where(values < f.smallest_normal, 0.2, 0.36)
        axes.vlines(
            values, row - heights, row + heights, color=PALETTE[row % len(PALETTE)], linewidth=1.2
        )
    axes.set_yticks(range(len(formats)), [f.label for f in formats])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set(xlim=(-0.01 * limit, 1.01 * limit), xlabel="value")
    return figure


@mpl.rc_context(STYLE)
def plot_relative_error(dtypes: Sequence, low: int = -28, high: int = 20) -> Picture:
    """Worst relative rounding error, saturating, in each binade from 2**low to 2**high; log-log."""
    formats = [describe(d) for d in dtypes]
    said = []
    for f in formats:
        error = f"about 2^-{f.mantissa_bits + 1}"
        said.append(f"{f.label} ({error} from {f.smallest_normal:.2g} to {f.max:.3g})")
    figure, axes = _axes(
        7,
        4.2,
        f"Worst relative rounding error against magnitude for {', '.join(said)}; "
        "outside its range each curve climbs to 1.",
    )
    binades = 2.0 ** np.arange(low, high)
    # Holds the midpoints of up to 11 mantissa bits.
    x = binades[:, None] * (1 + np.arange(4096) / 4096)
    for i, f in enumerate(formats):
        rounded = np.clip(x, f.min, f.max).astype(f.dtype).astype(np.float64)
        axes.step(
            binades,
            np.max(np.abs(rounded - x) / x, axis=1),
            STYLES[i % 4],
            color=PALETTE[i % 7],
            where="post",
            label=f.label,
            linewidth=1.8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(
        ylim=(2.0**-12, 2), xlabel="magnitude |x|", ylabel="worst |x - rounded x| / |x| in a binade"
    )
    axes.legend(frameon=False, ncols=len(formats), loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


@mpl.rc_context(STYLE)
def plot_histogram(tensors: Mapping[str, np.ndarray], dtypes: Sequence) -> Picture:
    """Magnitudes of tensors in binades (zeros left out) above the ranges of formats (thin where
    subnormal).
    """
    formats = [describe(d) for d in dtypes]
    ranges = ", ".join(f"{f.label} ({f.smallest_subnormal:.2g} to {f.max:.3g})" for f in formats)
    figure, (top, bottom) = _axes(
        7,
        4.8,
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
    for row, f in enumerate(formats):
        smallest = f.smallest_subnormal or f.smallest_normal
        low, normal, high = np.log2([smallest, f.smallest_normal, f.max])
        bottom.barh(row, high - normal, left=normal, height=0.6, color=INK, alpha=0.6)
        bottom.barh(row, normal - low, left=low, height=0.2, color=INK, alpha=0.6)
    bottom.set_yticks(range(len(formats)), [f.label for f in formats])
    bottom.invert_yaxis()
    top.set(ylabel="share of values (%)")
    bottom.set(xlabel="log2 |value|")
    top.legend(frameon=False)
    return figure


@mpl.rc_context(STYLE)
def plot_snr(
    scales, curves: Mapping[str, Sequence[float]], marks: Mapping[str, float] | None = None
) -> Picture:
    """Signal-to-noise ratio in dB against the scale, a line per curve; `marks` draws labelled
    scales.
    """
    peaks = []
    for name, curve in curves.items():
        peak = max(ratio for ratio in curve if np.isfinite(ratio))
        peaks.append(f"{name} peaks at {peak:.1f} dB")
    figure, axes = _axes(7, 4, f"Signal-to-noise ratio in dB against scale: {'; '.join(peaks)}.")
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(scales, curve, STYLES[i % 4], color=PALETTE[i % 7], label=name, linewidth=1.8)
    for name, scale in (marks or {}).items():
        axes.axvline(scale, color=INK, alpha=0.6, linewidth=1)
        axes.annotate(
            name,
            (scale, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -9),
            textcoords="offset points",
        )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="scale (x is divided by it before rounding)", ylabel="signal-to-noise ratio (dB)"
    )
    axes.legend(frameon=False)
    return figure


@mpl.rc_context(STYLE)
def plot_roofline(
    points: Mapping[str, tuple[float, float, float]],
    peak_flops: Mapping[str, float],
    bandwidth: float,
    title: str = "",
) -> Picture:
    """A roofline: `peak_flops` in FLOP/s by number format, a roof for each; `bandwidth` in byte/s.
    `points` maps a label to (FLOPs, bytes moved, seconds), measured or estimated: a point lies on
    its roof or below it.
    """
    intensity = {name: flops / moved for name, (flops, moved, _) in points.items()}
    rate = {name: flops / seconds for name, (flops, _, seconds) in points.items()}
    ridges = [peak / bandwidth for peak in peak_flops.values()]
    said = "; ".join(
        f"{name} at {intensity[name]:.3g} FLOP/byte, {rate[name] / 1e12:.3g} TFLOP/s"
        for name in points
    )
    figure, axes = _axes(7, 4.4, f"Roofline, FLOP/s against FLOP per byte: {said}")
    shown = [*intensity.values(), *ridges]
    x = np.geomspace(min(shown) / 4, max(shown) * 4, 200)
    for i, (name, peak) in enumerate(peak_flops.items()):
        axes.plot(
            x,
            np.minimum(peak, x * bandwidth) / 1e12,
            STYLES[i % 4],
            color=INK,
            alpha=0.7,
            linewidth=1.8,
        )
        axes.annotate(
            f"{name}: {peak / 1e12:.4g} TFLOP/s",
            (x[-1], peak / 1e12),
            ha="right",
            xytext=(0, 4),
            textcoords="offset points",
        )
    for i, name in enumerate(points):
        axes.plot(
            intensity[name],
            rate[name] / 1e12,
            marker=MARKERS[i % 5],
            color=PALETTE[i % 7],
            markersize=9,
            linestyle="none",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set(
        yscale="log",
        xlabel="arithmetic intensity (FLOP per byte moved)",
        ylabel="TFLOP/s",
        title=title or f"{bandwidth / 1e12:.3g} TB/s",
    )
    axes.legend(frameon=False, loc="lower right")
    return figure


@mpl.rc_context(STYLE)
def plot_speedup(
    m: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    title: str = "",
) -> Picture:
    """How many times faster than bf16, against the rows `m`: a line for each estimate, `points` (m,
    ratio) measured.
    """
    points = {name: found for name, found in (points or {}).items() if found}
    said = [
        f"{name}, {curve[0]:.2f} at {m[0]} rows and {curve[-1]:.2f} at {m[-1]}"
        for name, curve in curves.items()
    ]
    said.append(f"measured: {', '.join(points)}" if points else "nothing measured")
    figure, axes = _axes(7, 4.6, f"Time in bf16 over time in FP8 against M: {'; '.join(said)}.")
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(
            m, curve, STYLES[i % 4], color=PALETTE[i % 7], label=f"{name}, estimated", linewidth=1.8
        )
    for i, name in enumerate(curves):  # a point has the colour of its curve
        if name in points:
            rows, ratios = zip(*points[name], strict=True)
            axes.plot(
                rows,
                ratios,
                marker=MARKERS[i % 5],
                color=PALETTE[i % 7],
                linestyle="none",
                markersize=8,
                label=f"{name}, measured",
            )
    axes.axhline(1, color=INK, alpha=0.6, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(m, [f"{rows:,}" for rows in m], rotation=45)
    axes.set(
        ylim=(0, None),
        xlabel=f"M, rows of A; {title}" if title else "M, rows of A",
        ylabel="times as fast as bf16",
    )
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


@mpl.rc_context(STYLE)
def plot_bytes(programs: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Bytes moved, a bar for each program and in it a part for each kernel, (label, bytes), in
    launch order. Parts too narrow for their labels are named below.
    """
    total = {}
    heads = {}
    for name, parts in programs.items():
        total[name] = sum(moved for _, moved in parts)
        heads[name] = f"{name}: {total[name] / 1e6:.0f} MB"
        if len(parts) > 1:
            heads[name] += f" in {len(parts)} kernels"
    most = max(total.values())
    figure, axes = _axes(
        7, 1 + 0.85 * len(programs), f"Megabytes moved. {'; '.join(heads.values())}."
    )
    labels = _labels(programs)
    colour = {label: PALETTE[n % 6] for n, label in enumerate(labels)}
    hatch = {label: "///" if n > 5 else "" for n, label in enumerate(labels)}
    named = set()
    for row, (name, parts) in enumerate(programs.items()):
        left = 0.0
        axes.text(0, row - 0.4, heads[name], va="bottom", weight="bold")
        for label, moved in parts:
            axes.barh(
                row, moved / 1e6, left=left, height=0.7, color=colour[label], hatch=hatch[label]
            )
            if moved / most > (text_width(label, 11) + 0.1) / 6.6 and not hatch[label]:
                axes.text(
                    left + moved / 2e6,
                    row,
                    label,
                    ha="center",
                    va="center",
                    color=ink_on(colour[label]),
                )
                named.add(label)
            left += moved / 1e6
    axes.set_yticks([])
    axes.set(
        xlim=(0, 1.01e-6 * most), ylim=(len(programs) - 0.5, -0.75), xlabel="memory traffic (MB)"
    )
    axes.spines["left"].set_visible(False)
    if below := [label for label in labels if label not in named]:
        figure.legend(
            handles=[
                mpl.patches.Patch(facecolor=colour[label], hatch=hatch[label], label=label)
                for label in below
            ],
            loc="outside lower center",
            ncols=3,
            frameon=False,
        )
        figure.set_figheight(figure.get_figheight() + 0.25 * -(-len(below) // 3))
    return figure


def _labels(programs: Mapping[str, Sequence[tuple[str, int]]]) -> list[str]:
    """The labels of all parts, each once: what most programs have, first."""
    found: dict[str, None] = {}
    for parts in reversed(list(programs.values())):
        found |= dict.fromkeys(label for label, _ in parts)

    def lacking(label: str) -> int:
        return len([parts for parts in programs.values() if label not in dict(parts)])

    return sorted(found, key=lacking)


@mpl.rc_context(STYLE)
def plot_lattice(
    panels: Mapping[str, Sequence[Sequence[tuple[int, str]]]],
    rows: Sequence[tuple[str, str]],
    columns: Sequence[tuple[str, str]],
    kinds: Sequence[str],
    xlabel: str,
) -> Picture:
    """A grid for each panel, one above the other. A cell is (kind, text): `kinds` names up to four
    kinds, best first. `rows` and `columns` are labels, (group, label); groups stand apart, and have
    headings.
    """
    said = [f"{name}, {_counted(grid, kinds)}" for name, grid in panels.items()]
    figure, axes = _axes(
        7,
        1.2 + len(panels) * (1 + 0.3 * len(rows)),
        f"{'; '.join(said)}.",
        ratios=(1,) * len(panels),
    )
    across, down = _apart(columns), _apart(rows)
    for axis, (name, grid) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        for y, line in zip(down, grid, strict=True):
            for x, (kind, text) in zip(across, line, strict=True):
                _draw_cell(axis, x, y, text, *_CELLS[kind])
        for group in dict.fromkeys(group for group, _ in columns):
            places = [x for x, label in zip(across, columns, strict=True) if label[0] == group]
            middle = np.mean(places)
            axis.annotate(
                group,
                (middle, 1),
                (0, 34),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="bottom",
            )
        axis.set_title(name, loc="left", x=0, pad=34, ha="right", weight="bold", fontsize=11)
        axis.set_yticks(down, [f"{group} {label}" for group, label in rows], fontsize=9.5)
        axis.set_xticks(across, [label for _, label in columns], fontsize=9.5, rotation=30)
        axis.set(xlim=(-0.6, across[-1] + 0.6), ylim=(down[-1] + 0.6, -0.5))
        axis.tick_params(length=0, labeltop=True, labelbottom=False)
        axis.spines[:].set_visible(False)
        axis.grid(False)
    axis.set(xlabel=xlabel)
    figure.legend(
        handles=[
            mpl.patches.Patch(facecolor=paper, hatch=hatch, edgecolor="#777777", label=kind)
            for kind, (paper, hatch) in zip(kinds, _CELLS, strict=False)  # kinds may be fewer
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


# The colour and the hatch of a cell of `plot_lattice`, best first.
_CELLS = ((PALETTE[0], ""), (PALETTE[5], ""), (PALETTE[4], ""), ("white", "////"))


def _counted(grid: Sequence[Sequence[tuple[int, str]]], kinds: Sequence[str]) -> str:
    """How many programs a grid has, and of which kinds, in words."""
    found: list[int] = []
    for line in grid:
        found += [kind for kind, _ in line]
    numbers = [found.count(kind) for kind in range(len(kinds))]
    said = [f"{number} {kind}" for number, kind in zip(numbers, kinds, strict=True) if number]
    return f"{len(found)} programs: {', '.join(said)}"


def _apart(labels: Sequence[tuple[str, str]]) -> list[float]:
    """Where rows or columns with these labels (group, label) stand: groups stand apart."""
    places, groups = [], 0
    for at, (group, _) in enumerate(labels):
        if at and group != labels[at - 1][0]:
            groups += 1
        places.append(at + 0.3 * groups)
    return places


def _draw_cell(axis: Any, x: float, y: float, text: str, paper: str, hatch: str) -> None:
    axis.add_patch(
        mpl.patches.Rectangle(
            (x - 0.46, y - 0.44),
            0.92,
            0.88,
            facecolor=paper,
            hatch=hatch,
            edgecolor="#777777" if hatch else paper,
            linewidth=0.5,
        )
    )
    under_text = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=9.5,
        color=ink_on(paper),
        bbox=under_text if hatch and text else None,
    )
