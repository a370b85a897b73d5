"""Whether FP8 is faster, as a browser computes it, run by Node, against fp8lens' rooflines; and the
measurements beside it, against those that are recorded."""

import dataclasses
import random
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from fp8lens.matmul.kernels import matmul_seconds, quantize_seconds, roofline_seconds
from fp8lens.targets import TARGETS
from helpers import aot_compile
from helpers.explorers import speedup
from helpers.explorers.speedup import Choice
from helpers.explorers.widgets import Speedup
from helpers.numerics.quantize import quantize
from helpers.numerics.recipes import scaled_dot
from helpers.records.results import Record, load, load_published
from tests.helpers.test_explorer_formats import EXPLORERS, ask_node

RESULTS = EXPLORERS.parent.parent / "notebooks" / "results"
NODE = """
const { estimateOf, fasterOf, sentencesOf, timesOf } = explorer
const { data, choices } = given
const found = choices.map(choice => ({
    times: timesOf(data, choice),
    faster: fasterOf(data, choice),
    sentences: sentencesOf(data, choice),
}))
const estimates = data.points.map(point => estimateOf(data, point))
console.log(JSON.stringify({ found, estimates }))
"""


def in_node(choices: list[Choice]) -> dict[str, Any]:
    given = {"data": speedup.data(), "choices": [dataclasses.asdict(one) for one in choices]}
    return ask_node("speedup", NODE, given)


def some_choices(count: int) -> list[Choice]:
    """Of all chips and ways, with sizes of every magnitude, powers of two and others."""
    rng = random.Random(0)
    ways = list(speedup.WAYS)
    found = []
    for _ in range(count):
        sizes = [2 ** rng.randint(0, 20) if rng.random() < 0.5 else rng.randint(1, 60_000)]
        sizes += [int(2 ** rng.uniform(0, 17)) for _ in range(2)]
        rng.shuffle(sizes)
        chip = rng.choice(list(speedup.chips()))
        found.append(Choice(*sizes, chip, *rng.choices(ways, k=2), rng.choice(list(speedup.OUT))))
    return found


CHOICES = [Choice(), Choice(1, 1, 1), Choice(5, 20, 64, b="fp8"), *some_choices(1500)]


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    return in_node(CHOICES)


def test_the_browser_computes_the_rooflines_of_fp8lens(computed):
    for choice, found in zip(CHOICES, computed["found"], strict=True):
        wide, eight = found["times"]["bf16"], found["times"]["f8e4m3fn"]
        sizes, chip = (choice.m, choice.n, choice.k), choice.chip
        out = "f32" if choice.out == "f32" else "bf16"
        expected = matmul_seconds(*sizes, "bf16", out, chip)
        assert wide["seconds"] == wide["matmul"] == pytest.approx(expected, rel=1e-12)
        expected = matmul_seconds(*sizes, "f8e4m3fn", choice.out, chip)
        assert eight["matmul"] == pytest.approx(expected, rel=1e-12)
        for key, values in (("a", choice.m * choice.k), ("b", choice.n * choice.k)):
            way = getattr(choice, key)
            seconds = 0 if way == "fp8" else quantize_seconds(values, way, chip)
            assert eight[key] == pytest.approx(seconds, rel=1e-12)
            expected += seconds
        assert eight["seconds"] == pytest.approx(expected, rel=1e-12)
        bf16, fp8 = speedup.speedup(*dataclasses.astuple(choice))
        assert (wide["seconds"], eight["seconds"]) == pytest.approx((bf16, fp8), rel=1e-12)


def test_the_browser_says_what_python_says(computed):
    for choice, found in zip(CHOICES, computed["found"], strict=True):
        assert found["sentences"] == speedup.sentences(choice)
        assert [tuple(pair) for pair in found["faster"]] == speedup.faster(choice)


def test_what_takes_seconds_is_said_in_seconds():
    choice = Choice(*[speedup.MOST] * 3)
    assert max(speedup.speedup(*dataclasses.astuple(choice))) > 1000
    (found,) = in_node([choice])["found"]
    assert re.search(r" \d+ s against \d+ s,", found["sentences"][0])
    assert found["sentences"] == speedup.sentences(choice)


def test_from_the_m_that_is_said_on_fp8_is_faster():
    rng = random.Random(1)
    for choice in CHOICES[::50]:
        ranges = speedup.faster(choice)
        ends = {end for pair in ranges for end in pair if end}
        rows = {*range(1, 100), *(rng.randint(1, speedup.MOST) for _ in range(50))}
        rows |= {m for end in ends for m in (end - 1, end, end + 1) if 1 <= m <= speedup.MOST}
        for m in rows & set(range(1, speedup.MOST + 1)):
            bf16, fp8 = speedup.speedup(*dataclasses.astuple(dataclasses.replace(choice, m=m)))
            is_said = any(low <= m and (high is None or m <= high) for low, high in ranges)
            assert is_said == (fp8 < bf16) or fp8 == pytest.approx(bf16, rel=1e-12), (choice, m)


def test_for_many_rows_the_n_of_the_chapters_inequality_decides():
    for name, chip in speedup.chips().items():
        gained = 1 / chip["peak"]["bf16"] - 1 / chip["peak"]["f8e4m3fn"]
        for way, moved in (("given", 3), ("amax", 5)):
            least = moved / (2 * chip["bandwidth"] * gained)
            for n, is_faster in ((int(least * 1.01), True), (int(least * 0.99), False)):
                ranges = speedup.faster(Choice(1, n, 8192, name, way, "fp8"))
                assert (bool(ranges) and ranges[-1][1] is None) == is_faster


@pytest.mark.skipif(sys.platform != "linux", reason="XLA's CUDA compiler has wheels for Linux only")
def test_it_is_the_roofline_of_what_is_compiled():
    m, n, k = 512, 1024, 2048

    def layer(x, w, scale):
        return scaled_dot(quantize(x, scale), w, scale, scale, jnp.bfloat16)

    of = jax.ShapeDtypeStruct
    args = of((m, k), jnp.bfloat16), of((n, k), jnp.float8_e4m3fn), of((), jnp.float32)
    compiled = aot_compile(layer, *args, target="H200")
    _, fp8 = speedup.speedup(m, n, k, "H200", "given", "fp8")
    # but for the scales' few bytes
    assert fp8 == pytest.approx(roofline_seconds(compiled, "H200"), rel=1e-4)


def test_what_cannot_be_chosen_is_refused_with_what_can_be():
    with pytest.raises(ValueError, match="from 1 to 1048576, got 0"):
        Choice(m=0)
    with pytest.raises(ValueError, match="chip must be one of L40S, H100, H200, B200, got 'A100'"):
        Choice(chip="A100")
    with pytest.raises(ValueError, match="a must be one of fp8, given, amax, got 'bf16'"):
        Speedup(a="bf16")


# Measurements -------------------------------------------------------------------------------------


def test_every_published_fp8_matmul_stands_beside_its_estimate(computed):
    published = {
        (one.name, row.shape, row.value): (one, row)
        for one in load_published(RESULTS)
        for row in one.rows
        if row.shape and row.dtype == "f8e4m3fn" and one.chip
    }
    points = [point for point in speedup.points(RESULTS) if point.url]
    assert len(points) == len(published) > 15
    estimates = computed["estimates"][-len(points) :]
    for point, (one, row), found in zip(points, published.values(), estimates, strict=True):
        assert (point.source, point.url, point.shape) == (one.name, one.url, row.shape)
        assert (point.speedup, point.seconds) == (row.speedup, row.seconds)
        assert point.speedup or point.seconds
        seconds = row.estimate(TARGETS[one.chip])
        assert found["seconds"] == pytest.approx(seconds, rel=1e-12)
        bf16 = matmul_seconds(*row.shape, "bf16", "bf16", one.chip)
        assert found["ratio"] == pytest.approx(bf16 / seconds, rel=1e-12)


def record(rehearsal: bool = False, no_clock: str = "") -> Record:
    """A record of `make gpu` with one case, of one round number a form."""
    row = {
        "wall_seconds": 4e-3,
        "device_seconds": None if no_clock else 3e-3,
        "shape": [64, 128, 256],
    }
    half = {name: seconds / 2 for name, seconds in row.items() if isinstance(seconds, float)}
    rows = {
        "bf16": row,
        "FP8 scaled": row | half,
        "FP8 from bf16 by amax": {"error": "no memory"},
        "quantize A": row | half,
    }
    run = {"device": "NVIDIA H200", "date": "2026-01-02", "rehearsal": rehearsal}
    failed = {"a copy": {"error": "no"}}
    return Record("speed", (run,), {"64: main": rows, "memory": failed})


def test_what_make_gpu_records_is_a_point_too(monkeypatch):
    monkeypatch.setattr(speedup, "load", lambda part, folder: (record(),))
    point, *rest = speedup.points(RESULTS)
    assert (point.source, point.chip, point.shape) == ("this project", "H200", (64, 128, 256))
    assert (point.a, point.b, point.speedup, point.seconds) == ("fp8", "fp8", 2.0, 1.5e-3)
    assert point.date == "2026-01-02" and all(one.url for one in rest)
    monkeypatch.setattr(speedup, "load", lambda part, folder: (record(no_clock="none"),))
    assert speedup.points(RESULTS)[0].what == "FP8 already; by the host's clock"
    monkeypatch.setattr(speedup, "load", lambda part, folder: (record(rehearsal=True),))
    assert all(one.url for one in speedup.points(RESULTS))


def test_nothing_is_said_to_be_measured_here_that_is_not():
    own = [point for point in speedup.points(RESULTS) if not point.url]
    assert bool(own) == any(one.chip for one in load("speed", RESULTS))


# The widget ---------------------------------------------------------------------------------------


def test_the_widget_without_a_kernel_is_its_answer():
    widget = Speedup(m=16, chip="H200", a="amax", b="amax")
    shown, _ = widget._repr_mimebundle_()
    choice = Choice(m=16, chip="H200", a="amax", b="amax")
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert speedup.answer(choice) in shown["text/html"]
    assert shown["text/plain"].startswith(speedup.sentences(choice)[0])
    text = re.sub("<[^>]+>", " ", shown["text/html"])
    assert "times as fast as FP8" in text and "Run this cell in JupyterLab" in text
    for way in speedup.WAYS:
        widget.b = way
        bf16, fp8 = speedup.speedup(16, 4096, 11008, "H200", "amax", way)
        faster = "FP8 is" if fp8 < bf16 else "bf16 is"
        assert faster in widget._repr_mimebundle_()[0]["text/html"]
