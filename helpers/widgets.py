"""The rounding panel: type a value and a scale, see the code, the rounding and the error. `formats.rounding` does the
arithmetic; here is only what is typed and what is shown."""
from html import escape

import ipywidgets

from helpers.formats import FORMATS, Rounding, rounding


def neighbours_svg(r: Rounding, width: int = 460) -> str:
    """The two representable neighbours and value / scale between them, drawn in the page's own text colour."""
    target, low, high = r.target, min(r.below, r.target), max(r.above, r.target)
    if low == high:  # representable: nothing to round
        low, high = low - 1, high + 1
    left, right = 60, width - 60

    def x(v: float) -> float:
        return left + (right - left) * (v - low) / (high - low)

    ticks = "".join(f'<line x1="{x(v):.1f}" x2="{x(v):.1f}" y1="32" y2="52" stroke="currentColor" stroke-width="2"/>'
                    f'<text x="{x(v):.1f}" y="70" text-anchor="middle" fill="currentColor">{v:.6g}</text>'
                    for v in sorted({r.below, r.above}))
    words = f"{target:.6g} rounds to {r.decoded:.6g}"
    return (f'<svg width="{width}" height="78" role="img" aria-label="{words}" font-size="13" font-family="sans-serif">'
            f'<line x1="20" x2="{width - 20}" y1="42" y2="42" stroke="currentColor"/>{ticks}'
            f'<circle cx="{x(target):.1f}" cy="42" r="6" fill="#D55E00"/>'
            f'<text x="{x(target):.1f}" y="20" text-anchor="middle" fill="currentColor">{target:.6g}</text>'
            f'<circle cx="{x(r.decoded):.1f}" cy="42" r="10" fill="none" stroke="#0072B2" stroke-width="3"/></svg>')


def rounding_html(r: Rounding) -> str:
    """A Rounding as a table, a picture and the notes."""
    relative = f" ({r.relative_error:.3g} of the value)" if r.value else ""
    digits = (r.format.bits + 3) // 4
    rows = {"value / scale": f"{r.target:.9g}",
            "code": f"<code>{r.bits}</code> = <code>0x{r.code:0{digits}X}</code>",
            "code stands for": f"{r.decoded:.9g}", "times the scale": f"{r.dequantized:.9g}",
            "error": f"{r.error:.3g}{relative}"}
    table = "".join(f'<tr><td style="padding-right:1.5em">{k}</td><td>{v}</td></tr>' for k, v in rows.items())
    notes = "".join(f"<p><b>Note</b>: {escape(note)}.</p>" for note in r.notes)
    return f"<table>{table}</table>{neighbours_svg(r)}{notes}"


def rounding_panel(value: str = "465", scale: str = "1", dtype: str = "float8_e4m3fn") -> ipywidgets.VBox:
    """A panel with two text fields and a choice of format; unreadable input is answered with a sentence."""
    fields = (ipywidgets.Text(value, description="value"), ipywidgets.Text(scale, description="scale"),
              ipywidgets.Dropdown(options=list(FORMATS), value=dtype, description="format"))
    shown = ipywidgets.HTML()

    def update(_=None) -> None:
        try:
            shown.value = rounding_html(rounding(*(field.value for field in fields)))
        except ValueError as error:
            shown.value = f"<p><b>Not yet</b>: {escape(str(error))}.</p>"

    for field in fields:
        field.observe(update, names="value")
    update()
    return ipywidgets.VBox([ipywidgets.HBox(fields), shown])
