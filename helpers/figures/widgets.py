"""The panel: choose a matmul and a chip and see whether FP8 is faster. `matmul_seconds` does the
arithmetic; here is only what is chosen and what is shown.
"""

from html import escape

import ipywidgets

from fp8lens.matmul.kernels import matmul_seconds, quantize_seconds
from fp8lens.targets import TARGETS


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
