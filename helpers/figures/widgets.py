"""The panels: type a value and a scale and see the rounding; choose a matmul and a chip and see
whether FP8 is faster. `formats.rounding` and `cost.matmul_seconds` do the arithmetic; here is only
what is typed and what is shown.
"""

from html import escape

import ipywidgets

from fp8lens.matmul.kernels import matmul_seconds, quantize_seconds
from fp8lens.targets import TARGETS
from helpers.numerics.formats import FORMATS, Rounding, rounding


class Panel(ipywidgets.VBox):
    """Rows of fields, and what they give below them. Where no kernel runs, as on a page, it is a
    picture of that.
    """

    def __init__(self, rows: list[list[ipywidgets.Widget]], shown: ipywidgets.HTML):
        super().__init__([*map(ipywidgets.HBox, rows), shown])
        self._fields, self._shown = [field for row in rows for field in row], shown

    def _repr_mimebundle_(self, **options) -> dict:
        chosen = ", ".join(f"{field.description} {field.value}" for field in self._fields)
        where = "A panel, as it opens. In JupyterLab, run its cell to change its fields."
        return super()._repr_mimebundle_(**options) | {
            "text/plain": f"{where} {chosen}",
            "text/html": (
                f"<p><b>{escape(chosen)}</b></p>{self._shown.value}<p><em>{where}</em></p>"
            ),
        }


def neighbours_svg(r: Rounding, width: int = 336) -> str:
    """The two representable neighbours and value / scale between them, drawn in the page's own text
    colour.
    """
    target, low, high = r.target, min(r.below, r.target), max(r.above, r.target)
    if low == high:  # representable: nothing to round
        low, high = low - 1, high + 1
    left, right = 60, width - 60

    def x(v: float) -> float:
        return left + (right - left) * (v - low) / (high - low)

    # Of a stored picture JupyterLab shows the words alone: what is in <desc> makes a sentence of
    # them.
    ticks = "<desc> and </desc>".join(
        f'<line x1="{x(v):.1f}" x2="{x(v):.1f}" y1="32" y2="52" stroke="currentColor"'
        f' stroke-width="2"/><text x="{x(v):.1f}" y="70" text-anchor="middle"'
        f' fill="currentColor">{v:.6g}</text>'
        for v in sorted({r.below, r.above})
    )
    words = f"{target:.6g} rounds to {r.decoded:.6g}"
    return (
        f'<svg width="{width}" viewBox="0 0 {width} 78" style="max-width:100%" role="img"'
        f' aria-label="{words}" font-size="13" font-family="sans-serif"><line x1="20"'
        f' x2="{width - 20}" y1="42" y2="42" stroke="currentColor"/><text x="{x(target):.1f}"'
        f' y="20" text-anchor="middle" fill="currentColor">{target:.6g}</text><desc> beside'
        f' </desc>{ticks}<circle cx="{x(target):.1f}" cy="42" r="6" fill="#D55E00"/><circle'
        f' cx="{x(r.decoded):.1f}" cy="42" r="10" fill="none" stroke="#0072B2"'
        ' stroke-width="3"/></svg>'
    )


def rounding_html(r: Rounding) -> str:
    """A Rounding as a table, a picture and the notes."""
    relative = f" ({r.relative_error:.3g} of the value)" if r.value else ""
    digits = (r.format.bits + 3) // 4
    rows = {
        "value / scale": f"{r.target:.9g}",
        "code": f"<code>{r.bits}</code> = <code>0x{r.code:0{digits}X}</code>",
        "code stands for": f"{r.decoded:.9g}",
        "times the scale": f"{r.dequantized:.9g}",
        "error": f"{r.error:.3g}{relative}",
    }
    table = "".join(
        f'<tr><td style="padding-right:1.5em">{name}</td><td>{text}</td></tr>'
        for name, text in rows.items()
    )
    notes = "".join(f"<p><b>Note</b>: {escape(note)}.</p>" for note in r.notes)
    return f"<table>{table}</table>{neighbours_svg(r)}{notes}"


def rounding_panel(value: str = "465", scale: str = "1", dtype: str = "float8_e4m3fn") -> Panel:
    """A panel with two text fields and a choice of format; unreadable input is answered with a
    sentence.
    """
    fields = [
        ipywidgets.Text(value, description="value"),
        ipywidgets.Text(scale, description="scale"),
        ipywidgets.Dropdown(options=list(FORMATS), value=dtype, description="format"),
    ]
    shown = ipywidgets.HTML()

    def update(_=None) -> None:
        try:
            shown.value = rounding_html(rounding(*(field.value for field in fields)))
        except ValueError as error:
            shown.value = f"<p><b>Not yet</b>: {escape(str(error))}.</p>"

    for field in fields:
        field.observe(update, names="value")
    update()
    return Panel([fields], shown)


# How an operand arrives, and whose scale it is quantized by first: None if by nobody's.
QUANTIZED = {"FP8 already": None, "bf16, scales known": "given", "bf16, scales by amax": "amax"}


def speedup(
    m: int, n: int, k: int, chip: str, arriving: str, weights: str, out_dtype: str
) -> tuple[float, float]:
    """Roofline seconds in (bf16, FP8): `arriving` and `weights` say what is quantized first, A [m,
    k] and B [n, k]. In bf16 a result is bf16, unless f32 is asked for.
    """
    eight = matmul_seconds(m, n, k, "f8e4m3fn", out_dtype, chip)
    quantizing = 0.0
    for values, how in ((m * k, arriving), (n * k, weights)):
        scale = QUANTIZED[how]
        if scale is not None:
            quantizing += quantize_seconds(values, scale, chip)
    wide = "f32" if out_dtype == "f32" else "bf16"
    return matmul_seconds(m, n, k, "bf16", wide, chip), eight + quantizing


def speedup_svg(
    chosen: int, rows: list[int], ratios: list[float], width: int = 336, height: int = 190
) -> str:
    """Times faster than bf16 against M, in powers of two, with the chosen M marked."""
    top = max(2.0, *ratios)

    def x(i: float) -> float:
        return 45 + (width - 70) * i / (len(rows) - 1)

    def y(ratio: float) -> float:
        return height - 35 - (height - 60) * ratio / top

    def level(ratio: int) -> str:
        # As fast as bf16 is the line to compare with: it stands out.
        opacity = 0.9 if ratio == 1 else 0.25
        return (
            f'<line x1="45" x2="{width - 25}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}"'
            f' stroke="currentColor" stroke-opacity="{opacity}"/>'
            f'<text x="38" y="{y(ratio) + 4:.1f}" text-anchor="end"'
            f' fill="currentColor">{ratio}</text>'
        )

    line = " ".join(f"{x(i):.1f},{y(r):.1f}" for i, r in enumerate(ratios))
    marks = "<desc>, </desc>".join(
        f'<text x="{x(i):.1f}" y="{height - 18}" text-anchor="middle"'
        f' fill="currentColor">{m}</text>'
        for i, m in enumerate(rows)
        if i % 3 == 0
    )
    levels = "<desc>, </desc>".join(map(level, (0, 1, 2)))
    at = rows.index(chosen)
    words = f"{ratios[at]:.2f} times bf16 at {chosen} rows"
    return (
        f'<svg width="{width}" viewBox="0 0 {width} {height}" style="max-width:100%" role="img"'
        f' aria-label="{words}" font-size="12" font-family="sans-serif">{levels}<desc>;'
        f' </desc>{marks}<polyline points="{line}" fill="none" stroke="#0072B2"'
        f' stroke-width="2.5"/><circle cx="{x(at):.1f}" cy="{y(ratios[at]):.1f}" r="6"'
        f' fill="#D55E00"/><text x="{width / 2}" y="{height - 5}" text-anchor="middle"'
        f' fill="currentColor">M, rows of A</text><desc>; </desc><text x="{width / 2}" y="12"'
        ' text-anchor="middle" fill="currentColor">times as fast as bf16</text></svg>'
    )


def speedup_panel(chip: str = "H200", m: int = 4096, n: int = 4096, k: int = 4096) -> Panel:
    """A panel for a matmul's sizes, the chip, and what has to be quantized first: whether FP8 is
    faster than bf16, by the roofline estimate. No time in it is measured.
    """
    sizes = [2**i for i in range(4, 16)]
    fields = [
        ipywidgets.SelectionSlider(options=sizes, value=value, description=name)
        for name, value in (("M", m), ("N", n), ("K", k))
    ]
    chips = [name for name, target in TARGETS.items() if target.has_fp8]
    fields += [
        ipywidgets.Dropdown(options=options, value=value, description=name)
        for name, options, value in (
            ("chip", chips, chip),
            ("A arrives in", list(QUANTIZED), "bf16, scales known"),
            ("B is stored in", list(QUANTIZED), "FP8 already"),
            ("result", ["bf16", "f8e4m3fn", "f32"], "bf16"),
        )
    ]
    shown = ipywidgets.HTML()

    def update(_=None) -> None:
        rows, *rest = (field.value for field in fields)
        times = [speedup(size, *rest) for size in sizes]
        bf16, fp8 = times[sizes.index(rows)]
        if fp8 <= bf16:
            faster = f"FP8 is {bf16 / fp8:.2f} times as fast"
        else:
            faster = f"bf16 is {fp8 / bf16:.2f} times as fast"
        picture = speedup_svg(rows, sizes, [of_bf16 / of_fp8 for of_bf16, of_fp8 in times])
        shown.value = (
            f"<p>bf16 {bf16 * 1e6:,.1f} µs, FP8 {fp8 * 1e6:,.1f} µs: <b>{faster}</b> "
            f"(estimated, without launches)</p>{picture}"
        )

    for field in fields:
        field.observe(update, names="value")
    update()
    return Panel([fields[:3], fields[3:]], shown)
