"""What "Bits" begins with, and what it shows of that before any script runs: `bits.mjs` shows the
same, and answers when it is touched.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.numerics.formats import FORMATS, Rounding, describe, rounding

NAMES = (*FORMATS, "bfloat16", "float16")
_BLOCK = 32  # numbers with one scale, of the MX formats
_LAST_BITS = 2.0**-50  # of a number's size: a double has 53 bits, and two roundings spoil the last


def _others() -> str:
    """The numbers beside the value in its block: with heavy tails, as activations have them."""
    numbers = np.random.default_rng(8).standard_t(3, _BLOCK - 1)
    return " ".join(f"{number:.3g}" for number in numbers)


#: By the model's keys, which `bits.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "value": "465",
    "scale": "1",
    "format": "float8_e4m3fn",
    "beside": "float8_e5m2",
    "clamp": True,
    "code": -1,
    "beside_code": -1,
    "zoom": 1,
    "element": "float4_e2m1fn",
    "rounding": "up",
    "others": _others(),
}


def data() -> dict[str, Any]:
    """What the explorer needs besides: every format, as its codes show it."""
    return {"formats": [dataclasses.asdict(describe(name)) for name in NAMES]}


def _digits(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "infinity" if number > 0 else "-infinity"
    return f"{number:.9g}"


def _rounding(value: str, scale: str, name: str) -> Rounding:
    """As `rounding`; but what differs from a number of the format in a double's last bits alone, as
    44.8 / 0.1 from 448, is that number.
    """
    r = rounding(value, scale, name)
    if r.decoded == 0 or abs(r.target - r.decoded) > _LAST_BITS * abs(r.decoded):
        return r
    return dataclasses.replace(
        r,
        target=r.decoded,
        unclamped=r.decoded,
        below=r.decoded,
        above=r.decoded,
        dequantized=r.value,
        error=0.0,
        relative_error=0.0,
    )


def answer(
    value: str = STATE["value"],
    scale: str = STATE["scale"],
    format: str = STATE["format"],
    beside: str = STATE["beside"],
) -> str:
    """What becomes of a finite value in two formats, with the clamp, as HTML: a sentence and a
    table. Raises ValueError, in a sentence, for what is not a finite number.
    """
    found = [_rounding(value, scale, name) for name in (format, beside)]
    sentences, rows = [], []
    for r in found:
        f, back = r.format, _digits(r.dequantized)
        into = f"{_digits(r.value)} becomes {back} in {f.label}"
        is_beyond = not f.min <= r.target <= f.max
        if r.error == 0:
            sentences.append(f"{into}: exact.")
        else:
            off = f"off by {_few(r.error)}"
            if r.value != 0:
                off += f", {_few(100 * r.relative_error)} %"
            cast = f", clamped; a cast without the clamp gives {_digits(r.unclamped)}"
            sentences.append(f"{into}: {off}{cast if is_beyond else ''}.")
        digits = (f.bits + 3) // 4
        cells = (
            f"<b>{back}</b>",
            f"<code>{r.bits}</code> = <code>0x{r.code:0{digits}X}</code>",
            " and ".join(dict.fromkeys((_digits(r.below), _digits(r.above)))),
            _few(r.error),
        )
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th>{f.label}</th>{row}</tr>")
    heads = ("format", "number", "code", "neighbours", "error")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<p>{' '.join(sentences)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _few(number: float) -> str:
    return f"{number:.3g}"
