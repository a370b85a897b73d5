"""Explorers in a notebook, where a kernel runs: the modules of this folder as anywidget's."""

from html import escape
from typing import Any

import anywidget
import traitlets

from helpers.explorers import bits, css, esm, scaling, speedup

_WHERE = "Run this cell in JupyterLab to change what it shows."


class _Explorer(anywidget.AnyWidget):
    """An explorer's module. Where no kernel runs, `_answer` stands in the widget's place."""

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        said, answer = self._answer()
        shown = {
            "text/plain": f"{said} {_WHERE}".strip(),
            "text/html": f"{answer}<p><em>{_WHERE}</em></p>",
        }
        return data | shown, metadata

    def _answer(self) -> tuple[str, str]:
        """What it shows as it begins: in plain text, and as HTML."""
        raise NotImplementedError


class Bits(_Explorer):
    """What becomes of a number in two small formats, bit by bit. The keys of `bits.STATE` are its
    traits: `value` and `scale` are texts, as they are typed; `format` and `beside` are names of
    formats.
    """

    _esm = esm("bits")
    _css = css("bits")
    value = traitlets.Unicode().tag(sync=True)
    scale = traitlets.Unicode().tag(sync=True)
    format = traitlets.Unicode().tag(sync=True)
    beside = traitlets.Unicode().tag(sync=True)
    clamp = traitlets.Bool().tag(sync=True)
    code = traitlets.Int().tag(sync=True)
    zoom = traitlets.Int().tag(sync=True)
    element = traitlets.Unicode().tag(sync=True)
    rounding = traitlets.Unicode().tag(sync=True)
    others = traitlets.Unicode().tag(sync=True)
    formats: traitlets.List = traitlets.List().tag(sync=True)

    def __init__(self, value: str | float = "465", scale: str | float = "1", **state: Any):
        typed = {"value": str(value), "scale": str(scale)}
        super().__init__(**{**bits.STATE, **bits.data(), **typed, **state})

    def _answer(self) -> tuple[str, str]:
        try:
            answer = bits.answer(self.value, self.scale, self.format, self.beside)
        except ValueError as error:  # what was typed is not a finite number
            answer = f"<p>{escape(str(error))}</p>"
        said = f"value {self.value}, scale {self.scale}, {self.format} and {self.beside}."
        return said, answer


class DelayedScaling(_Explorer):
    """What delayed scaling makes of a trace of amaxes, step by step. The keys of `scaling.STATE`
    are its traits; `trace` may be "own", with numbers in `drawn`.
    """

    _esm = esm("scaling")
    _css = css("scaling")
    trace = traitlets.Unicode().tag(sync=True)
    drawn = traitlets.Unicode().tag(sync=True)
    history = traitlets.Int().tag(sync=True)
    margin = traitlets.Int().tag(sync=True)
    depth = traitlets.Int().tag(sync=True)
    format = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    traces = traitlets.Dict().tag(sync=True)
    formats: traitlets.List = traitlets.List().tag(sync=True)

    def __init__(self, **state: Any):
        super().__init__(**{**scaling.STATE, **scaling.data(), **state})

    def _answer(self) -> tuple[str, str]:
        return "", scaling.answer()


class Speedup(_Explorer):
    """Whether FP8 is faster than bf16 for a matmul [m, k] times [n, k], by rooflines. The keys of
    `speedup.STATE` are its traits: `a` and `b` are keys of `speedup.WAYS`, `out` of `speedup.OUT`.
    Raises ValueError for what it cannot show.
    """

    _esm = esm("speedup")
    _css = css("speedup")
    m = traitlets.Int().tag(sync=True)
    n = traitlets.Int().tag(sync=True)
    k = traitlets.Int().tag(sync=True)
    chip = traitlets.Unicode().tag(sync=True)
    a = traitlets.Unicode().tag(sync=True)
    b = traitlets.Unicode().tag(sync=True)
    out = traitlets.Unicode().tag(sync=True)
    first = traitlets.Dict().tag(sync=True)
    chips = traitlets.Dict().tag(sync=True)
    bits = traitlets.Dict().tag(sync=True)
    moved = traitlets.Dict().tag(sync=True)
    ways = traitlets.Dict().tag(sync=True)
    outs = traitlets.Dict().tag(sync=True)
    weights = traitlets.Dict().tag(sync=True)
    most = traitlets.Int().tag(sync=True)
    points: traitlets.List = traitlets.List().tag(sync=True)

    def __init__(self, **state: Any):
        speedup.Choice(**{**speedup.STATE, **state})
        super().__init__(**{**speedup.STATE, **speedup.data(), **state})

    def _answer(self) -> tuple[str, str]:
        choice = speedup.Choice(**{key: getattr(self, key) for key in speedup.STATE})
        return " ".join(speedup.sentences(choice)), speedup.answer(choice)
