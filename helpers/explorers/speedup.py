"""What "When is FP8 faster?" begins with, and what it shows of that before any script runs:
`speedup.mjs` shows the same, and answers when it is touched. Its seconds are rooflines, of
`matmul_seconds` and `quantize_seconds`. Beside them stand measurements: those that others
published, and those that `make gpu` records.
"""

import dataclasses
import decimal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8lens.formats import FORMATS
from fp8lens.matmul.kernels import QUANTIZED_BYTES, matmul_seconds, quantize_seconds
from fp8lens.targets import TARGETS
from helpers.records.results import Figure, Published, Record, load, load_published

_RESULTS = Path(__file__).resolve().parent.parent.parent / "notebooks" / "results"
_FP8, _BF16 = "f8e4m3fn", "bf16"

#: How an operand arrives: in FP8, or in bfloat16, and then whose scale it is quantized by.
WAYS = {"fp8": "FP8 already", "given": "bf16, scale known", "amax": "bf16, by its amax"}
#: A result's type. The bf16 matmul that FP8 is compared with has a bf16 result, or one of f32.
OUT = {"bf16": "bf16", "f8e4m3fn": "FP8", "f32": "f32"}
#: N and K of Llama 2's weights (Touvron et al. 2023), gate and up in one matmul.
WEIGHTS = {
    "7B QKV": (12288, 4096),
    "7B out": (4096, 4096),
    "7B gate and up": (22016, 4096),
    "7B down": (4096, 11008),
    "70B QKV": (10240, 8192),
    "70B gate and up": (57344, 8192),
    "70B down": (8192, 28672),
}
MOST = 2**20  # the largest size that can be chosen
_SAME = 1e-9  # times that differ by no more are the same, but for how floats round
_END = 2**40  # a speedup that does not change before this M does not change behind it

#: By the model's keys, which `speedup.mjs` describes. They are kept in the page's address.
STATE: Mapping[str, Any] = {
    "m": 2048,
    "n": 4096,
    "k": 11008,
    "chip": "H100",
    "a": "given",
    "b": "given",
    "out": "bf16",
}


def chips() -> dict[str, dict[str, Any]]:
    """By the names of the chips that multiply FP8: bytes a second, and FLOP/s of both types."""
    return {
        name: {
            "bandwidth": chip.memory_bandwidth,
            "peak": {dtype: chip.peak_flops[dtype] for dtype in (_BF16, _FP8)},
        }
        for name, chip in TARGETS.items()
        if chip.has_fp8
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    """A matmul [m, k] times [n, k] on a chip, how its operands arrive, and its result's type. The
    fields are the keys of `STATE`. Raises ValueError for what the explorer cannot choose.
    """

    m: int = STATE["m"]
    n: int = STATE["n"]
    k: int = STATE["k"]
    chip: str = STATE["chip"]
    a: str = STATE["a"]
    b: str = STATE["b"]
    out: str = STATE["out"]

    def __post_init__(self):
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if not isinstance(size, int) or not 1 <= size <= MOST:
                raise ValueError(f"{name} must be a whole number from 1 to {MOST}, got {size!r}")
        known: dict[str, Mapping[str, Any]] = {"chip": chips(), "a": WAYS, "b": WAYS, "out": OUT}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}"
                )

    @property
    def quantizing(self) -> tuple[float, float]:
        """Seconds to make A and B FP8, 0 for what is FP8 already."""
        seconds = []
        for values, way in ((self.m * self.k, self.a), (self.n * self.k, self.b)):
            seconds.append(0.0 if way == "fp8" else quantize_seconds(values, way, self.chip))
        return seconds[0], seconds[1]

    def multiplying(self, m: int, dtype: str) -> float:
        """Seconds of the matmul alone, with `m` rows."""
        wide = "f32" if self.out == "f32" else _BF16
        out = self.out if dtype == _FP8 else wide
        return matmul_seconds(m, self.n, self.k, dtype, out, self.chip)

    def waits_for_arithmetic(self, m: int, dtype: str) -> bool:
        """Whether arithmetic limits the matmul of `m` rows, and not memory bandwidth."""
        arithmetic = 2 * m * self.n * self.k / TARGETS[self.chip].peak_flops[dtype]
        return arithmetic >= self.multiplying(m, dtype)


def speedup(
    m: int, n: int, k: int, chip: str, a: str, b: str, out: str = "bf16"
) -> tuple[float, float]:
    """Roofline seconds in (bf16, FP8) of [m, k] times [n, k]: `a` and `b` are keys of `WAYS`, `out`
    one of `OUT`. What has to be quantized first is in the seconds of FP8.
    """
    choice = Choice(m, n, k, chip, a, b, out)
    return choice.multiplying(m, _BF16), choice.multiplying(m, _FP8) + sum(choice.quantizing)


def _change(is_so: Callable[[int], bool], low: int, high: int) -> int:
    """Where something changes, once, behind `low` and up to `high`: the first number for which it
    is as it is for `high`.
    """
    will = is_so(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) == will else (middle, high)
    return high


def _pays(saved: float, quantizing: float) -> int:
    """1 if more seconds are saved than quantizing takes, -1 if fewer, 0 if as many."""
    if abs(saved - quantizing) <= _SAME * saved:
        return 0
    return 1 if saved > quantizing else -1


def faster(choice: Choice) -> list[tuple[int, int | None]]:
    """The M for which FP8 is faster, as pairs (first, last); None for the last if there is none.
    All else is as chosen.
    """
    quantizing_b = choice.quantizing[1]
    per_row = choice.quantizing[0] / choice.m

    def is_faster(m: int) -> bool:
        saved = choice.multiplying(m, _BF16) - choice.multiplying(m, _FP8)
        return _pays(saved, per_row * m + quantizing_b) > 0

    # Between these M all times grow by the same in each row, so "faster" changes at most once.
    knots = {1, _END}
    for dtype in (_BF16, _FP8):

        def is_reached(m: int, dtype: str = dtype) -> bool:
            return choice.waits_for_arithmetic(m, dtype)

        if is_reached(_END) and not is_reached(1):
            first = _change(is_reached, 1, _END)
            knots |= {first - 1, first}
    changes = []
    ordered = sorted(knots)
    for low, high in zip(ordered, ordered[1:], strict=False):
        if is_faster(low) != is_faster(high):
            changes.append(_change(is_faster, low, high))
    begins = ([1] if is_faster(1) else []) + [m for m in changes if is_faster(m)]
    ends: list[int | None] = [m - 1 for m in changes if not is_faster(m)]
    if len(ends) < len(begins):
        ends.append(None)
    return list(zip(begins, ends, strict=True))


# Words --------------------------------------------------------------------------------------------


# A browser rounds what is in the middle up.
_THREE_DIGITS = decimal.Context(prec=3, rounding=decimal.ROUND_HALF_UP)


def _few(number: float) -> str:
    return f"{float(_THREE_DIGITS.create_decimal_from_float(number)):.9g}"


def _ratio(number: float) -> str:
    rounded = decimal.Decimal(number).quantize(decimal.Decimal("0.01"), decimal.ROUND_HALF_UP)
    return str(rounded)


def duration(seconds: float) -> str:
    """Seconds in three digits: "93.3 µs"."""
    if seconds >= 1:
        return f"{_few(seconds)} s"
    if seconds >= 1e-3:
        return f"{_few(seconds * 1e3)} ms"
    return f"{_few(seconds * 1e6)} µs" if seconds >= 1e-6 else f"{_few(seconds * 1e9)} ns"


def _range(first: int, last: int | None) -> str:
    if last is None:
        return "for every M" if first == 1 else f"from M = {first} on"
    return f"up to M = {last}" if first == 1 else f"from M = {first} to {last}"


def _verdict(bf16: float, fp8: float) -> str:
    if _ratio(max(bf16, fp8) / min(bf16, fp8)) == "1.00":
        return "FP8 and bf16 are equally fast, within half a percent"
    if fp8 < bf16:
        return f"FP8 is {_ratio(bf16 / fp8)} times as fast as bf16"
    return f"bf16 is {_ratio(fp8 / bf16)} times as fast as FP8"


def _limits(choice: Choice) -> str:
    names = {True: "arithmetic", False: "memory bandwidth"}
    bf16, fp8 = (names[choice.waits_for_arithmetic(choice.m, dtype)] for dtype in (_BF16, _FP8))
    if bf16 == fp8:
        return f"The matmul's limit is {bf16} in both types."
    return f"The matmul's limit is {bf16} in bf16, and {fp8} in FP8."


def _inequality(saved: float, quantizing: float) -> str:
    if not quantizing:
        return f"The matmul takes {duration(saved)} less in FP8, and nothing has to be quantized."
    than = {1: "less than that", -1: "more than that", 0: "as much"}
    return (
        f"The matmul takes {duration(saved)} less in FP8. Quantizing takes "
        f"{duration(quantizing)}, {than[_pays(saved, quantizing)]}."
    )


def sentences(choice: Choice) -> list[str]:
    """The answer, the sentence that matters first."""
    bf16, alone = (choice.multiplying(choice.m, dtype) for dtype in (_BF16, _FP8))
    quantizing = sum(choice.quantizing)
    fp8 = alone + quantizing
    times = [("FP8", fp8), ("bf16", bf16)]
    if bf16 < fp8:
        times.reverse()
    one, other = (duration(seconds) for _, seconds in times)
    ranges = " and ".join(_range(*pair) for pair in faster(choice)) or "for no M"
    said = [
        f"{_verdict(bf16, fp8)}: {one} against {other}, by the {choice.chip}'s roofline, without "
        "launches.",
        _limits(choice),
        _inequality(bf16 - alone, quantizing),
        f"With all else as chosen, FP8 is faster {ranges}.",
    ]
    if choice.m % 16 or choice.n % 16 or choice.k % 16:
        said.append(
            "XLA pads a size that is not a multiple of 16, in extra kernels, which are not counted."
        )
    return said


def answer(choice: Choice = Choice()) -> str:
    """Whether FP8 is faster, as HTML: sentences, and where the time goes."""
    first, *rest = sentences(choice)
    verdict, colon, how = first.partition(":")
    text = f"<p><strong>{verdict}</strong>{colon}{how}</p><p>{' '.join(rest)}</p>"
    a, b = choice.quantizing
    matmul = {dtype: choice.multiplying(choice.m, dtype) for dtype in (_BF16, _FP8)}
    rows = {
        "matmul": matmul.values(),
        "quantizing A": (0.0, a),
        "quantizing B": (0.0, b),
        "together": (matmul[_BF16], matmul[_FP8] + a + b),
    }
    size = f"{choice.m} × {choice.n} × {choice.k}"
    table = f"<tr><th>{size}</th><th>bf16</th><th>FP8</th></tr>"
    for name, seconds in rows.items():
        cells = "".join(f"<td>{duration(one) if one else 'none'}</td>" for one in seconds)
        table += f"<tr><th>{name}</th>{cells}</tr>"
    return f"{text}<table>{table}</table>"


# Measurements -------------------------------------------------------------------------------------

_OPERANDS = {"": "FP8 already", "A": "A quantized", "A and B": "both quantized"}
# Forms of a case of `make gpu`, and how their operands arrive.
_FORMS = {
    "FP8 scaled": ("fp8", "fp8", "FP8 already"),
    "FP8, A from bf16": ("given", "fp8", "A quantized, scale known"),
    "FP8 from bf16": ("given", "given", "both quantized, scales known"),
    "FP8 from bf16 by amax": ("amax", "amax", "both quantized by their amax"),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured matmul of `shape` (M, N, K) with a bf16 result on `hardware`, whose rates are
    those of `chip`; `a` and `b` as the operands arrive. `what` says what is in the time. `speedup`
    is times as fast as bf16, None where that is not said; `seconds` what it took in FP8.
    """

    source: str
    url: str
    date: str
    hardware: str
    chip: str
    shape: tuple[int, int, int]
    a: str
    b: str
    what: str
    speedup: float | None
    seconds: float | None


def _point(one: Published, row: Figure) -> Point | None:
    """A published row, None where it is not of one FP8 matmul of a known shape on a known chip."""
    if row.shape is None or row.dtype != _FP8 or one.chip is None:
        return None
    ways = {0: "fp8", 3: "given", 5: "amax"}
    way = ways[row.bytes_moved]
    what = _OPERANDS[row.quantized]
    if row.per:
        what += f", a scale a {row.per}"
    if row.known:
        what += " of earlier steps"
    if row.of != "FP8":
        what += f"; {row.of.removeprefix('FP8, ')}"
    b = way if row.quantized == "A and B" else "fp8"
    return Point(
        one.name,
        one.url,
        one.date or "",
        one.hardware.removeprefix("NVIDIA ").replace("with a power limit of", "at"),
        one.chip,
        row.shape,
        way,
        b,
        what,
        row.speedup,
        row.seconds,
    )


def _measured(record: Record) -> list[Point]:
    """What `make gpu` timed of one matmul, by one clock in each case; nothing of a rehearsal."""
    if record.chip is None or record.provenance["rehearsal"]:
        return []
    found = []
    for name, rows in record.cases.items():
        times = record.times(name)
        for form in times.keys() & _FORMS.keys() if "bf16" in times else ():
            a, b, what = _FORMS[form]
            by_gpu = bool(rows[form]["device_seconds"])
            point = Point(
                "this project",
                "",
                record.provenance["date"],
                record.provenance["device"].removeprefix("NVIDIA "),
                record.chip.name,
                tuple(rows[form]["shape"]),
                a,
                b,
                what if by_gpu else f"{what}; by the host's clock",
                times["bf16"] / times[form],
                times[form],
            )
            found.append(point)
    return found


def points(folder: str | Path = _RESULTS) -> list[Point]:
    """All measurements of one FP8 matmul that are recorded here: our own first."""
    own = [point for record in load("speed", folder) for point in _measured(record)]
    others = [_point(one, row) for one in load_published(folder) for row in one.rows]
    return [*own, *(point for point in others if point)]


def data() -> dict[str, Any]:
    """What the explorer needs besides: rates, sizes in bits and bytes, names, measurements, and
    what it begins with.
    """
    return {
        "first": dict(STATE),
        "chips": chips(),
        "bits": {name: FORMATS[name].bits for name in OUT},
        "moved": {"fp8": 0, **QUANTIZED_BYTES},
        "ways": WAYS,
        "outs": OUT,
        "weights": WEIGHTS,
        "most": MOST,
        "points": [dataclasses.asdict(point) for point in points()],
    }
