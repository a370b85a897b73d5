"""Delayed scaling as a browser computes it, run by Node, against what the decoder trains with."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from helpers.explorers import scaling
from helpers.numerics.formats import describe
from tests.helpers.test_explorer_formats import ask_node

from fp8_decoder import remember, scale_of

NODE = """
const { simulate, summary } = explorer
const { format, trace, ...chosen } = given
const amaxes = trace.map(amax => amax === null ? Infinity : amax)
const found = {}
for (const scheme of ["delayed", "last", "current", "frozen"]) {
    const steps = simulate(format, amaxes, scheme, chosen)
    found[scheme] = {steps, ...summary(steps)}
}
console.log(JSON.stringify(found))
"""


def simulated(trace: list[float], name: str, **chosen: int) -> dict:
    """By scheme. An amax that is not finite is given as null."""
    amaxes = [amax if np.isfinite(amax) else None for amax in trace]
    given = {"format": dataclasses.asdict(describe(name)), "trace": amaxes} | chosen
    return ask_node("scaling", NODE, given)


TRACES = {
    "spike": [1.0] * 20 + [100.0] + [1.0] * 20,
    "noise": np.random.default_rng(0).lognormal(sigma=2, size=60).tolist(),
    "zeros": [0.0, 0.0, 3.0, 0.0, 1.0],
    "infinite": [1.0, float("inf"), 2.0, 4.0],
    "small": [1e-40, 1e-38, 1e-30, 1.0],
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_the_scales_are_those_that_the_decoder_trains_with(trace, name):
    for history in (1, 4, 16):
        found = simulated(TRACES[trace], name, history=history, margin=0, depth=14)
        amaxes = jnp.zeros(history, jnp.float32)
        for amax, step in zip(TRACES[trace], found["delayed"]["steps"], strict=True):
            scale = float(scale_of(amaxes, describe(name).dtype))
            # XLA's CPU compiler divides by a constant as it multiplies by its inverse, and takes
            # what is below float32's normal numbers as zero.
            known = float(jnp.max(amaxes))
            if known >= 2.0**-126:
                assert step["scale"] == pytest.approx(scale, rel=1e-6)
            if np.isfinite(amax):
                assert step["saturates"] == (amax > step["reach"])
                assert step["reach"] == pytest.approx(step["scale"] * describe(name).max, rel=1e-6)
            amaxes = remember(amaxes, jnp.float32(amax))


def test_what_is_counted_is_what_python_counts():
    f = describe("float8_e4m3fn")
    for amaxes in scaling.traces().values():
        for history, margin, depth in ((16, 0, 14), (1, 1, 20), (64, 3, 8)):
            found = simulated(amaxes, f.name, history=history, margin=margin, depth=depth)
            saturates, worst, underflows = scaling.losses(amaxes, f, history, margin, depth)
            assert found["delayed"]["saturates"] == saturates
            assert found["delayed"]["worst"] == pytest.approx(worst)
            assert found["delayed"]["underflows"] == underflows
            assert found["current"]["saturates"] == 0


def test_a_spike_saturates_once_and_then_small_numbers_are_lost():
    found = simulated(TRACES["spike"], "float8_e4m3fn", history=16, margin=0, depth=14)
    counts = {name: (of["saturates"], of["underflows"]) for name, of in found.items()}
    # Without a history the first step has the scale 1, which is too large for its small numbers.
    first = 1
    assert counts == {
        "delayed": (1, 16 + first),
        "last": (1, 1 + first),
        "current": (0, 0),
        "frozen": (1, first),
    }


ASK = """
const { amaxProblem, simulate, summary, traceProblem, MOST_STEPS } = explorer
const chosen = { history: 1, margin: 0, depth: 14 }
const many = Array.from({ length: 400000 }, (_, n) => (n % 2 ? 100 : 1))
const { saturates, worst } = summary(simulate(given, many, "last", chosen))
const told = ["1 2", "1 x", "1 -2", "1 ".repeat(MOST_STEPS), "1 ".repeat(40000)].map(traceProblem)
const typed = ["", "x", "-1", "Infinity", "0", " 2.5 ", "1e-3"].map(amaxProblem)
console.log(JSON.stringify({ saturates, worst, told, typed, most: MOST_STEPS }))
"""


@pytest.fixture(scope="module")
def asked() -> dict:
    return ask_node("scaling", ASK, dataclasses.asdict(describe("float8_e4m3fn")))


def test_a_long_trace_is_counted_and_what_is_not_shown_is_said(asked):
    assert (asked["saturates"], asked["worst"]) == (200_000, 100)
    *problems, long = asked["told"]
    assert [bool(problem) for problem in problems] == [False, True, True, False]
    assert long == f"Your trace has 40000 steps. The first {asked['most']} are shown."
    longest = max(len(trace) for trace in scaling.traces().values())
    assert longest <= asked["most"], "what is recorded can be drawn on"


def test_a_wrong_amax_of_a_step_is_answered_with_a_sentence(asked):
    assert [bool(problem) for problem in asked["typed"]] == [True] * 4 + [False] * 3
    assert asked["typed"][0].startswith("Not yet: ")
