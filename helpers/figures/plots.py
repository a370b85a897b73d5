"""Figures for the chapters. Each function returns a Figure of its own, outside pyplot's global
state: nothing to show or close. Ink on a transparent ground: where a page inlines the SVG, its text
and axes have the page's own colour, in the light and in the dark; everywhere else the same picture
has white paper.
"""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from helpers.numerics.formats import code_values, describe

# Okabe and Ito's colours, distinguishable with the common colour-vision deficiencies:
# https://jfly.uni-koeln.de/color/
# black to the eye, and found again in the SVG: what is drawn in it takes the page's own ink
INK = "#010203"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
STYLES = ("-", "--", "-.", ":")  # colour is never the only difference between two lines
STYLE = {
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
_FAMILY = (  # all as wide as the one that places are measured with
    "'DejaVu Sans', Verdana, sans-serif"
)
# where the picture is a document by itself, or an <img>: not where inlined
_PAPER = "svg:root { background: #fff }"


class Picture(Figure):
    """A matplotlib Figure with alternative text, `alt`, shown by Jupyter with or without pyplot in
    the kernel: as SVG, as PNG to who trusts no SVG, and as its text. `least` is the part of its
    width below which nobody can read it.
    """

    alt, least = "", 0.5

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = io.BytesIO()
        self.savefig(
            png, format="png", dpi=100, metadata={"Software": None}
        )  # no version in the outputs
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
        svg = re.sub(
            r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|"
            r" font-family: [^;]*;",
            "",
            svg,
            flags=re.S,
        )
        used = set(re.findall(r"#([\w-]+)", svg))
        svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
        svg = (
            re.sub(
                r"<[^>]*>",
                lambda tag: re.sub(
                    r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", " ".join(tag[0].split())
                ),
                svg,
            )
            .replace(INK, "currentColor")
            .replace("xlink:href", "href")
        )
        (width, height), css = self.get_size_inches(), 96
        return (
            f'<svg\nxmlns="http://www.w3.org/2000/svg" width="{css * width:.0f}"'
            f' height="{css * height:.0f}" viewBox="0 0 {72 * width:.2f} {72 * height:.2f}"'
            f' style="min-width: {css * self.least * width:.0f}px; font-family: {_FAMILY};'
            f' stroke-linejoin: round; stroke-linecap: butt">\n<style>{_PAPER}</style>'
            + re.sub(r"\n\s*", "\n", svg).rstrip()
        )


def contrast(a: str, b: str) -> float:
    """How well two colours stand off from each other, from 1 to 21: WCAG 2's ratio of relative
    luminances.
    """

    def luminance(colour: str) -> float:
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in mpl.colors.to_rgb(colour)
        ]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour."""
    return max("black", "white", key=lambda ink: contrast(ink, colour))


def text_width(text: str, points: float, weight: str = "normal") -> float:
    """Of a line of text, in inches."""
    font = mpl.font_manager.FontProperties(weight=weight)
    return TextPath((0, 0), text, size=points, prop=font).get_extents().width / 72 if text else 0.0


def _axes(width: float, height: float, alt: str, ratios: Sequence[float] = (1,)):
    """A new Picture and its axes: one, or an array of rows in the height ratios given, sharing x."""
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
    columns = 2 ** ((f.bits + 1) // 2)
    grid, big = values.reshape(-1, columns), f.bits == 8
    rows = len(grid)
    if f.bits > 8:
        raise ValueError(
            f"plot_codes({f.name}): {len(values)} codes do not fit a map; 8 bits or fewer do"
        )
    figure, axes = _axes(
        8.2 if big else 6,
        0.4 * rows + 1,
        (
            f"Map of the {len(values)} codes of {f.name}: positive values in the upper half,"
            f" negative below, magnitude doubling every {2**f.mantissa_bits} codes up to {f.max:g};"
            f" {f.nan_codes} codes are NaN, {f.inf_codes} inf."
            if f.signed
            else (
                f"Map of the {len(values)} codes of {f.name}: powers of two from {f.min:.3g} to"
                f" {f.max:.3g}."
            )
        ),
    )
    figure.least = 0.78 if big else 0.5
    finite = np.isfinite(grid) & (grid != 0)
    depth = np.full(grid.shape, 0.0)  # 0.25 ... 1 by binade, with the sign of the value
    exponents = np.log2(np.abs(grid[finite]))
    depth[finite] = np.sign(grid[finite]) * (
        0.25 + 0.75 * (exponents - exponents.min()) / np.ptp(exponents)
    )
    colours = mpl.colormaps["PuOr_r"]((depth + 1.25) / 2.5)
    papers = {"NaN": "black", "inf": "#444444", "0": "white"}
    for (row, column), value in np.ndenumerate(grid):
        kind = "NaN" if np.isnan(value) else "inf" if np.isinf(value) else "0" if value == 0 else ""
        subnormal = not kind and abs(value) < f.smallest_normal
        text = f"{value:.10g}" if len(f"{value:.10g}") <= 6 else f"{value:.3g}".replace("e-0", "e-")
        paper = papers.get(kind, mpl.colors.to_hex(colours[row, column]))
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
            fontsize=10 if not big else 7.5 if len(text) < 7 else 5.8,
        )
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.set_xticks(range(columns), [f"_{c:X}" if big else f"+{c}" for c in range(columns)])
    axes.set_yticks(
        range(rows), [f"0x{r:X}_" if big else f"0x{r * columns:02X}" for r in range(rows)]
    )
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set(
        xlabel="low bits of the code (hex)",
        ylabel="high bits (hex)",
        title=f.name
        + (": orange positive, purple negative, bold italic subnormal" if f.signed and big else ""),
    )
    return figure


@mpl.rc_context(STYLE)
def plot_number_line(dtypes: Sequence, limit: float = 8.0) -> Picture:
    """The representable numbers between 0 and `limit`, a row a format; subnormals are drawn
    shorter.
    """
    formats = [describe(d) for d in dtypes]
    figure, axes = _axes(
        7,
        0.55 * len(formats) + 1.1,
        f"Representable numbers from 0 to {limit:g} as ticks, a row "
        f"each for {', '.join(f.label for f in formats)}: the gap doubles at powers of two.",
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
    figure, axes = _axes(
        7,
        4.2,
        "Worst relative rounding error against magnitude for "
        + ", ".join(
            f"{f.label} (about 2^-{f.mantissa_bits + 1} from {f.smallest_normal:.2g} to "
            f"{f.max:.3g})"
            for f in formats
        )
        + "; outside its range each curve climbs to 1.",
    )
    binades = 2.0 ** np.arange(low, high)
    x = binades[:, None] * (
        1 + np.arange(4096) / 4096
    )  # holds the midpoints of up to 11 mantissa bits
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
    figure, (top, bottom) = _axes(
        7,
        4.8,
        (
            f"Histogram of log2 magnitude for {', '.join(tensors)}, above bars for the ranges of "
            + ", ".join(f"{f.label} ({f.smallest_subnormal:.2g} to {f.max:.3g})" for f in formats)
            + "."
        ),
        ratios=(3, 0.35 * len(formats) + 0.2),
    )
    logs = {
        name: np.log2(np.abs(t[t != 0]))
        for name, t in ((name, np.asarray(t).astype(np.float64)) for name, t in tensors.items())
    }
    bins = np.arange(
        np.floor(min(v.min() for v in logs.values())),
        np.ceil(max(v.max() for v in logs.values())) + 1,
    )
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
        top.plot(
            values.max(), 1, "v", color=PALETTE[i % 7], markersize=9
        )  # its amax, above the axis
    for row, f in enumerate(formats):
        low, normal, high = np.log2([f.smallest_subnormal, f.smallest_normal, f.max])
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
    figure, axes = _axes(
        7,
        4,
        "Signal-to-noise ratio in dB against scale: "
        + "; ".join(
            f"{name} peaks at {max(v for v in curve if np.isfinite(v)):.1f} dB"
            for name, curve in curves.items()
        )
        + ".",
    )
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
    figure, axes = _axes(
        7,
        4.4,
        "Roofline, FLOP/s against FLOP per byte: "
        + "; ".join(
            f"{name} at {intensity[name]:.3g} FLOP/byte, {rate[name] / 1e12:.3g} TFLOP/s"
            for name in points
        ),
    )
    x = np.geomspace(
        min([*intensity.values(), *ridges]) / 4, max([*intensity.values(), *ridges]) * 4, 200
    )
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
            marker="os^Dv"[i % 5],
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
    figure, axes = _axes(
        7,
        4.6,
        "Time in bf16 over time in FP8 against M: "
        + "; ".join(
            f"{name}, {curve[0]:.2f} at {m[0]} rows and {curve[-1]:.2f} at {m[-1]}"
            for name, curve in curves.items()
        )
        + (f"; measured: {', '.join(points)}" if points else "; nothing measured")
        + ".",
    )
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(
            m, curve, STYLES[i % 4], color=PALETTE[i % 7], label=f"{name}, estimated", linewidth=1.8
        )
    for i, name in enumerate(curves):  # a point has the colour of its curve
        if name in points:
            axes.plot(
                *zip(*points[name]),
                marker="os^Dv"[i % 5],
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
        xlabel=f"M, rows of A{title and f'; {title}'}",
        ylabel="times as fast as bf16",
    )
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


@mpl.rc_context(STYLE)
def plot_bytes(programs: Mapping[str, Sequence[tuple[str, int]]]) -> Picture:
    """Bytes moved, a bar for each program and in it a part for each kernel, (label, bytes), in
    launch order. Parts too narrow for their labels are named below.
    """
    heads = {
        name: (
            f"{name}: {sum(moved for _, moved in parts) / 1e6:.0f} MB"
            + f" in {len(parts)} kernels" * (len(parts) > 1)
        )
        for name, parts in programs.items()
    }
    most = max(sum(moved for _, moved in parts) for parts in programs.values())
    figure, axes = _axes(
        7, 1 + 0.85 * len(programs), f"Megabytes moved. {'; '.join(heads.values())}."
    )
    labels = list(
        dict.fromkeys(label for parts in reversed(programs.values()) for label, _ in parts)
    )
    labels.sort(
        key=lambda label: sum(label not in dict(parts) for parts in programs.values())
    )  # what all have, first
    colour = {label: PALETTE[n % 6] for n, label in enumerate(labels)}
    hatch = {label: "///" * (n > 5) for n, label in enumerate(labels)}
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
    papers = ((PALETTE[0], ""), (PALETTE[5], ""), (PALETTE[4], ""), ("white", "////"))
    count = {
        name: np.bincount([kind for line in grid for kind, _ in line], minlength=len(kinds))
        for name, grid in panels.items()
    }
    figure, axes = _axes(
        7,
        1.2 + len(panels) * (1 + 0.3 * len(rows)),
        "; ".join(
            f"{name}, {sum(n)} programs: "
            + ", ".join(f"{k} {kind}" for k, kind in zip(n, kinds) if k)
            for name, n in count.items()
        )
        + ".",
        ratios=(1,) * len(panels),
    )
    place = [
        [
            at + 0.3 * sum(labels[i][0] != labels[i + 1][0] for i in range(at))
            for at in range(len(labels))
        ]
        for labels in (columns, rows)
    ]
    for axis, (name, grid) in zip(np.atleast_1d(axes), panels.items()):
        for y, line in zip(place[1], grid):
            for x, (kind, text) in zip(place[0], line):
                paper, hatch = papers[kind]
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
                axis.text(
                    x,
                    y,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9.5,
                    color=ink_on(paper),
                    bbox=(
                        {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                        if hatch and text
                        else None
                    ),
                )
        for group in dict.fromkeys(group for group, _ in columns):
            middle = np.mean([x for x, label in zip(place[0], columns) if label[0] == group])
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
        axis.set_yticks(place[1], [f"{group} {label}" for group, label in rows], fontsize=9.5)
        axis.set_xticks(place[0], [label for _, label in columns], fontsize=9.5, rotation=30)
        axis.set(xlim=(-0.6, place[0][-1] + 0.6), ylim=(place[1][-1] + 0.6, -0.5))
        axis.tick_params(length=0, labeltop=True, labelbottom=False)
        axis.spines[:].set_visible(False)
        axis.grid(False)
    axis.set(xlabel=xlabel)
    figure.legend(
        handles=[
            mpl.patches.Patch(facecolor=paper, hatch=hatch, edgecolor="#777777", label=kind)
            for kind, (paper, hatch) in zip(kinds, papers)
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure
