"""Explorers in a notebook, where a kernel runs: the modules of this folder as anywidget's."""

import re
from collections.abc import Mapping
from html import unescape
from typing import Any

import anywidget
import jax
import traitlets

from helpers.explorers import (
    STATE,
    answer,
    bits,
    compiled,
    css,
    esm,
    fusion_lab,
    models,
    scaling,
    speedup,
)

_WHERE = "Run this cell in JupyterLab to change what it shows."
_TRAITS = {
    bool: traitlets.Bool,
    int: traitlets.Int,
    str: traitlets.Unicode,
    list: traitlets.List,
    dict: traitlets.Dict,
}


class _Explorer(anywidget.AnyWidget):
    """An explorer's module, with the values of its model as traits. Where no kernel runs, `_answer`
    stands in the widget's place.
    """

    def __init__(self, name: str, first: Mapping[str, Any], data: Mapping[str, Any], **state: Any):
        """`first` has what can be chosen, and as what the explorer begins; `state` what is chosen
        instead. Raises TypeError for what cannot be.
        """
        if unknown := state.keys() - first.keys():
            raise TypeError(f"{', '.join(unknown)} cannot be chosen: choose {', '.join(first)}")
        self._name, self._esm, self._css = name, esm(name), css(name)
        self._first = first
        self._values = {**data, **first, **state}
        traits = {key: _TRAITS[type(one)]().tag(sync=True) for key, one in self._values.items()}
        self.add_traits(**traits)
        super().__init__(**self._values)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict, dict]:
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        said, shown = self._answer()
        without_kernel = {
            "text/plain": f"{said} {_WHERE}".strip(),
            "text/html": f"{shown}<p><em>{_WHERE}</em></p>",
            STATE: {"explorer": self._name, **{key: getattr(self, key) for key in self._first}},
        }
        return data | without_kernel, metadata

    def _answer(self) -> tuple[str, str]:
        """What it shows: in plain text, its sentences alone, and as HTML; nothing without Node."""
        try:
            shown = answer(self._name, self._shown(), plain=True)
        except FileNotFoundError:
            return "", ""
        sentences = re.findall("<p>(.*?)</p>", shown)
        return unescape(re.sub("<[^>]*>", "", " ".join(sentences))), shown

    def _shown(self) -> dict[str, Any]:
        """What the module's `answer` asks the model for."""
        return {key: getattr(self, key) for key in self._values}


class Bits(_Explorer):
    """What becomes of a number in two small formats, bit by bit. What can be chosen are the keys of
    `bits.STATE`: `value` and `scale` as numbers or as text, `format` and `beside` by the formats'
    names.
    """

    def __init__(self, value: str | float = "465", scale: str | float = "1", **state: Any):
        typed = {"value": str(value), "scale": str(scale)}
        super().__init__("bits", bits.STATE, bits.data(), **typed, **state)


class DelayedScaling(_Explorer):
    """What delayed scaling makes of a trace of amaxes, step by step. What can be chosen are the
    keys of `scaling.STATE`; `trace` may be "own", with numbers in `drawn`.
    """

    def __init__(self, **state: Any):
        super().__init__("scaling", scaling.STATE, scaling.data(), **state)


class Speedup(_Explorer):
    """Whether FP8 is faster than bf16 for a matmul [m, k] times [n, k], by rooflines. What can be
    chosen are the keys of `speedup.STATE`: `a` and `b` are keys of `speedup.WAYS`, `out` one of
    `speedup.OUT`.
    """

    def __init__(self, **state: Any):
        super().__init__("speedup", speedup.STATE, speedup.data(), **state)


class Models(_Explorer):
    """What models become in JAX's FP8 libraries. What can be chosen are the keys of
    `models.STATE`.
    """

    def __init__(self, **state: Any):
        super().__init__("models", models.STATE, models.data(), **state)


class FusionLab(_Explorer):
    """What XLA makes of a layer that is chosen part by part, compiled by this kernel while the
    reader looks on. What can be chosen are the keys of `fusion_lab.FIRST`, and `m`, `n` and `k`:
    the layer multiplies [M, K] and [K, N]. ValueError for what cannot be.

    The view asks by a message, {"choice": ..., "sizes": [M, N, K]}; the answer repeats this, and
    has besides "found", or "wrong": a sentence. Where requests come sooner than they are answered,
    only the last one is.
    """

    def __init__(self, m: int = 4096, n: int = 4096, k: int = 4096, **choice: str):
        fusion_lab.check({**fusion_lab.FIRST, **choice}, (m, n, k))
        sizes = {"m": m, "n": n, "k": k}
        first = {**fusion_lab.FIRST, **sizes}
        super().__init__("fusion_lab", first, fusion_lab.live(jax.__version__), **choice)
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

    def _shown(self) -> dict[str, Any]:
        choice = {name: getattr(self, name) for name in fusion_lab.FIRST}
        sizes = (self.m, self.n, self.k)
        return {"found": fusion_lab.first_answer(choice, sizes, self.installed)}
