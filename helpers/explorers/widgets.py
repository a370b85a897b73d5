"""Explorers in a notebook, where a kernel runs: the modules of this folder as anywidget's."""

from html import escape
from typing import Any

import anywidget
import jax
import traitlets

from helpers.explorers import bits, compiled, css, esm, fusion_lab, scaling, speedup

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
    beside_code = traitlets.Int().tag(sync=True)
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


class FusionLab(_Explorer):
    """What XLA makes of a layer that is chosen part by part, compiled by this kernel while the
    reader looks on. The keys of `fusion_lab.FIRST` are its traits, and `m`, `n` and `k`: the layer
    multiplies [M, K] and [K, N]. ValueError for what cannot be chosen.

    The view asks by a message, {"choice": ..., "sizes": [M, N, K]}; the answer repeats this, and
    has besides "found", or "wrong": a sentence. Where requests come sooner than they are answered,
    only the last one is.
    """

    _esm = esm("fusion_lab")
    _css = css("fusion_lab")
    operands = traitlets.Unicode().tag(sync=True)
    layout = traitlets.Unicode().tag(sync=True)
    scales = traitlets.Unicode().tag(sync=True)
    dequantize = traitlets.Unicode().tag(sync=True)
    bias = traitlets.Unicode().tag(sync=True)
    activation = traitlets.Unicode().tag(sync=True)
    amax = traitlets.Unicode().tag(sync=True)
    result = traitlets.Unicode().tag(sync=True)
    chip = traitlets.Unicode().tag(sync=True)
    library = traitlets.Unicode().tag(sync=True)
    m = traitlets.Int().tag(sync=True)
    n = traitlets.Int().tag(sync=True)
    k = traitlets.Int().tag(sync=True)
    installed = traitlets.Unicode().tag(sync=True)
    axes: traitlets.List = traitlets.List().tag(sync=True)
    grids: traitlets.List = traitlets.List().tag(sync=True)
    tries: traitlets.Dict = traitlets.Dict().tag(sync=True)
    fixes: traitlets.Dict = traitlets.Dict().tag(sync=True)
    first: traitlets.Dict = traitlets.Dict().tag(sync=True)

    def __init__(self, m: int = 4096, n: int = 4096, k: int = 4096, **choice: str):
        chosen = {**fusion_lab.FIRST, **choice}
        fusion_lab.check(chosen, (m, n, k))
        needed = fusion_lab.live(jax.__version__)
        super().__init__(m=m, n=n, k=k, **{**needed, **chosen})
        self._latest = compiled.Latest(self._reply)
        self.on_msg(self._asked)

    def _asked(self, widget: Any, asked: Any, buffers: Any) -> None:
        self._latest.ask(asked)

    def _reply(self, asked: Any) -> None:
        """In the thread that compiles: whatever goes wrong there, the view is told."""
        told: dict[str, Any]
        try:
            told = {"found": compiled.answer(asked["choice"], asked["sizes"])}
        except Exception as error:
            told = {"wrong": str(error) or repr(error)}
        self.send({"asked": asked} | told)

    def _answer(self) -> tuple[str, str]:
        choice = {name: getattr(self, name) for name in fusion_lab.FIRST}
        sizes = (self.m, self.n, self.k)
        parts = []
        for axis in fusion_lab.LAYER:
            value = choice[axis.name]
            parts.append(f"{axis.label}: {axis.values.get(value, value)}")
        said = f"A layer at {' × '.join(map(str, sizes))}. {'; '.join(parts)}."
        try:
            asked = fusion_lab.asked_of_record(choice, sizes, self.installed)
            answer = fusion_lab.answer(asked, plain=True)
        except KeyError:
            code = escape(fusion_lab.program(choice, sizes).code)
            answer = f"<pre>{code}</pre><p>What XLA makes of it is not recorded.</p>"
        return said, answer
