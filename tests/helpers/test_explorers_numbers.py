"""What explorers compute, run by Node: formats against ml_dtypes, rooflines against fp8lens,
delayed scaling against the decoder's own, and the measurements against those that are recorded."""

import json
import shlex
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lens.hlo.text import parts
from fp8lens.matmul.kernels import matmul_seconds, quantize_seconds
from helpers.explorers import FOLDER, answer, bits, dump, own_model, program, speedup
from helpers.explorers.widgets import Bits, Speedup
from helpers.numerics.microscaling import BLOCK_FORMATS, ROUNDING, dtype_of, to_blocks
from helpers.numerics.number_formats import code_values, describe
from helpers.records.results import load_published

from fp8_linear import remember, scale_of

FORMATS = {one["name"]: one for one in bits.data()["formats"]}
SPEEDUP = speedup.data()
# Runs a program that has a module, and what is given as JSON; numbers that are not finite are text.
NODE = """
const module = await import(process.argv[1])
let text = ""
for await (const piece of process.stdin) text += piece
const given = JSON.parse(text)
const written = (_, x) => typeof x == "number" && (!Number.isFinite(x) || Object.is(x, -0))
    ? (Object.is(x, -0) ? "-0" : String(x)) : x
"""


def ask(name: str, result: str, **given: Any) -> Any:
    """A result of JavaScript, which has the module of this name and `given`."""
    done = subprocess.run(
        [
            program("node"),
            "--input-type=module",
            "-e",
            f"{NODE}\nconsole.log(JSON.stringify({result}, written))",
            (FOLDER / f"{name}.mjs").as_uri(),
        ],
        input=json.dumps(given),
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def numbers(found: list) -> np.ndarray:
    """With NaN, infinity and -0."""
    return np.array([float(one) for one in found])


# Formats ------------------------------------------------------------------------------------------


def texts(values: np.ndarray) -> list[str]:
    """As JSON has them: it has no NaN and no infinity."""
    return [str(float(one)).replace("inf", "Infinity").replace("nan", "NaN") for one in values]


def tried(name: str) -> np.ndarray:
    """Float32: random ones around the format, and what lies at, between and beside its numbers."""
    rng, f = np.random.default_rng(0), describe(name)
    low, high = np.log2([f.smallest_subnormal or f.smallest_normal, f.max])
    near = np.exp2(rng.uniform(low - 3, min(high + 2, 127), 5000)) * rng.choice([-1, 1], 5000)
    values = np.unique(code_values(name)[np.isfinite(code_values(name))])
    with np.errstate(over="ignore"):
        edges = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
        beside = [np.nextafter(edges, np.float32(to)) for to in (np.inf, -np.inf)]
    special = [0, -0.0, np.nan, np.inf, -np.inf, 2**-149]
    found = np.concatenate([near, edges, *beside, special]).astype(np.float32)
    if name == "float8_e8m0fnu":
        # ml_dtypes gives to all between 2^-127 and 2^-126 the upper one, the nearest or not.
        found = found[(found <= 2.0**-127) | (found >= 1.5 * 2.0**-127) | np.isnan(found)]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_and_every_cast_is_that_of_ml_dtypes(name):
    values, f = tried(name), describe(name)
    codes, casts, clamped = ask(
        "formats",
        "[given.codes.map(code => module.decode(given.format, code)),"
        " ...[false, true].map(clamp =>"
        " given.values.map(x => module.encode(given.format, Number(x), clamp)))]",
        format=FORMATS[name],
        codes=list(range(len(code_values(name)))),
        values=texts(values),
    )
    expected = code_values(name)
    assert np.array_equal(numbers(codes), expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(np.signbit(numbers(codes)[finite]), np.signbit(expected[finite]))
    for found, of in ((casts, values), (clamped, np.clip(values.astype(float), f.min, f.max))):
        with np.errstate(all="ignore"):
            cast = of.astype(name)
        assert np.array_equal(found, cast.view(f"u{cast.itemsize}"))


@pytest.mark.parametrize("label", [name for name, of in BLOCK_FORMATS.items() if of.block == 32])
def test_a_blocks_scale_and_numbers_are_those_of_microscaling(label):
    form, rng = BLOCK_FORMATS[label], np.random.default_rng(2)
    x = rng.standard_t(2, (60, 32)) * np.exp2(rng.uniform(-20, 20, (60, 1)))
    x[0] = 0
    x[1:8] = 0
    x[1:8, 0] = form.element.largest * 2.0 ** np.arange(7)  # exact powers times the largest
    x = x.astype(np.float32)
    for how in ROUNDING:
        found = ask(
            "formats",
            "given.x.map(row => module.roundBlock(given.format, row, given.how))"
            ".map(({ exponent, rounded }) => [exponent, ...rounded.map(one => one.decoded)])",
            format=FORMATS[dtype_of(form.element).name],
            x=x.astype(float).tolist(),
            how=how,
        )
        expected = to_blocks(x, form, how)
        exponents, codes = np.split(np.array(found, float), [1], axis=1)
        assert np.array_equal(np.exp2(exponents), expected.scales.astype(np.float64)), how
        assert np.array_equal(codes, expected.codes.astype(np.float64)), how


SENTENCES = [
    ("465", "1", "float8_e4m3fn", True, "448 in E4M3FN: off by 17, 3.66 %, clamped; a cast"),
    ("44.8", "0.1", "float8_e4m3fn", True, "44.8 becomes 44.8 in E4M3FN: exact."),
    ("nan", "1", "float4_e2m1fn", True, "E2M1FN has no NaN: a cast stores 0x8, which reads as -0."),
    ("0", "1", "float8_e8m0fnu", False, "0 becomes NaN in E8M0FNU: it is below the smallest"),
    ("1e400", "1", "float16", True, "“1e400” is not a number that a double holds."),
    ("2^-9", "1", "float8_e4m3fn", True, "0.001953125 becomes 0.001953125 in E4M3FN: exact."),
    ("0x7E", "2", "float8_e4m3fn", True, "896 becomes 896 in E4M3FN: exact."),
    ("0x1FF", "1", "float8_e5m2", True, "“0x1FF” is not a code of E5M2, which has 8 bits."),
    ("1", "-1", "float16", True, "The scale “-1” is not a finite number above zero."),
]


@pytest.mark.parametrize(("value", "scale", "name", "clamp", "said"), SENTENCES)
def test_what_is_said_of_a_number(value, scale, name, clamp, said):
    typed = {"value": value, "scale": scale, "format": name, "clamp": clamp}
    assert said in answer("bits", {**bits.STATE, **bits.data(), **typed}, plain=True)


# Delayed scaling ----------------------------------------------------------------------------------

TRACES = {
    "spike": [1.0] * 20 + [100.0] + [1.0] * 20,
    "noise": np.random.default_rng(0).lognormal(sigma=2, size=60).tolist(),
    "zeros": [0.0, 0.0, 3.0, 0.0, 1.0],
}


def simulated(trace: list[float], name: str, scheme: str, **chosen: int) -> list[dict]:
    return ask(
        "scaling",
        "module.simulate(given.format, given.trace, given.scheme, given.chosen)",
        format=FORMATS[name],
        trace=trace,
        scheme=scheme,
        chosen={"history": 16, "margin": 0, "depth": 14} | chosen,
    )


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("history", [1, 16])
def test_the_scales_are_those_that_the_decoder_trains_with(trace, name, history):
    amaxes = jnp.zeros(history, jnp.float32)
    found = simulated(TRACES[trace], name, "delayed", history=history)
    for amax, step in zip(TRACES[trace], found, strict=True):
        # XLA's CPU compiler divides by a constant as it multiplies by its inverse.
        assert step["scale"] == pytest.approx(float(scale_of(amaxes, describe(name).dtype)), 1e-6)
        reach = float(jnp.max(amaxes)) or describe(name).max
        assert step["saturates"] == (amax > reach) and step["reach"] == pytest.approx(reach, 1e-6)
        amaxes = remember(amaxes, jnp.float32(amax))


# When is FP8 faster? ------------------------------------------------------------------------------

SIZE = st.integers(1, 100_000)
CHOICES = st.fixed_dictionaries(
    {
        "m": SIZE,
        "n": SIZE,
        "k": SIZE,
        "chip": st.sampled_from([*speedup.chips()]),
        "a": st.sampled_from([*speedup.WAYS]),
        "b": st.sampled_from([*speedup.WAYS]),
        "out": st.sampled_from([*speedup.OUT]),
    }
)


def seconds(choice: dict[str, Any]) -> tuple[float, float]:
    """By fp8lens: in bf16, and in FP8 with what has to be quantized."""
    m, n, k, chip = (choice[key] for key in ("m", "n", "k", "chip"))
    wide = "f32" if choice["out"] == "f32" else "bf16"
    fp8 = matmul_seconds(m, n, k, "f8e4m3fn", choice["out"], chip)
    for values, way in ((m * k, choice["a"]), (n * k, choice["b"])):
        fp8 += 0 if way == "fp8" else quantize_seconds(values, way, chip)
    return matmul_seconds(m, n, k, "bf16", wide, chip), fp8


@settings(max_examples=10, deadline=None)
@given(st.lists(CHOICES, min_size=20, max_size=40))
def test_the_rooflines_are_those_of_fp8lens_and_fp8_is_faster_where_it_is_said_to_be(choices):
    found = ask(
        "speedup",
        "given.choices.map(choice => [module.timesOf(given.data, choice),"
        " module.fasterOf(given.data, choice)])",
        data=SPEEDUP,
        choices=choices,
    )
    for choice, (times, faster) in zip(choices, found, strict=True):
        computed = times["bf16"]["seconds"], times["f8e4m3fn"]["seconds"]
        assert computed == pytest.approx(seconds(choice), rel=1e-12)
        ends = {end for pair in faster for end in pair if end}
        for m in {1, choice["m"], *ends, *(end - 1 for end in ends), *(end + 1 for end in ends)}:
            bf16, fp8 = seconds(choice | {"m": max(m, 1)})
            is_said = any(low <= m and (high is None or m <= high) for low, high in faster)
            assert m < 1 or is_said == (fp8 < bf16) or fp8 == pytest.approx(bf16, rel=1e-9)


def test_every_published_fp8_matmul_stands_beside_its_estimate():
    rows = [
        (one, row)
        for one in load_published(FOLDER.parent.parent / "notebooks" / "results")
        for row in one.rows
        if row.shape and row.dtype == "f8e4m3fn" and one.chip
    ]
    points = [point for point in SPEEDUP["points"] if point["url"]]
    assert len(points) == len(rows) > 15
    estimates = ask(
        "speedup",
        "given.points.map(point => module.estimateOf(given.data, point))",
        data=SPEEDUP,
        points=points,
    )
    for point, (one, row), found in zip(points, rows, estimates, strict=True):
        sizes = dict(zip("mnk", row.shape, strict=True))
        choice = sizes | {"chip": one.chip, "a": point["a"], "b": point["b"], "out": "bf16"}
        bf16, fp8 = seconds(choice)
        assert (found["ratio"], found["seconds"]) == pytest.approx((bf16 / fp8, fp8))


# Check my model -----------------------------------------------------------------------------------

FLAX = """
import jax.numpy as jnp
from flax import linen

import jax.nn
model = linen.Dense(512, dtype=jnp.bfloat16)


def größe(
    variables: dict,
    x: jax.Array,  # def of(rows, width)
    scale: tuple[int, ...],
    *, slope=0.1, **others,
):
    return jax.nn.leaky_relu(model.apply(variables, x), slope) * scale


def main():
    print(größe)
"""
BROUGHT = {
    "code": FLAX,
    "asked": "",
    "shapes": {"x": "bf16[128, 256]", "scale": "f32[512]", "w": "of another function"},
    "chip": "H200",
    "gemm": "triton",
    "backward": True,
}


def test_what_is_given_for_a_function_runs(tmp_path):
    given = {**own_model.data(), **own_model.STATE}
    command = ask("model", "module.textsOf(given)", **given)["texts"][1]["text"]
    assert f'layers.py:layer --shapes "{" ".join(given["shapes"].values())}" ' in command
    given |= BROUGHT
    found = ask("model", "module.textsOf(given)", **given)
    assert found["wrong"] == ""
    file, command, test, dumping = (one["text"] for one in found["texts"])
    assert dumping == f"{own_model.COMMAND}\n"
    assert " --args größe_arguments " in command
    (tmp_path / "layers.py").write_text(file)
    (tmp_path / "test_layers.py").write_text(test)
    told, tried = (
        subprocess.run(
            [sys.executable, "-m", *asked],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for asked in (shlex.split(command), ["pytest", "-q", "-p", "no:cacheprovider"])
    )
    assert told.returncode == 0, told.stderr
    assert "3 matmuls, 0 in FP8" in told.stdout and "rule: not-quantized" in told.stdout
    assert "AssertionError" in tried.stdout, tried.stdout


WRONG = [
    ({"code": "def f(self, x): ..."}, "This is a method"),
    ({"shapes": {"x": "bf16[2,x]"}}, "Of x, give a type and a shape"),
    ({"code": "def f(y, x): ..."}, "Of y, give a type and a shape"),
    ({"shapes": {"x": "bf16[64@data,32]"}}, "x is sharded."),
    ({"backward": True}, "There is nothing to differentiate"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_cannot_be_brought_is_said(change, said):
    given = {**own_model.data(), **own_model.STATE, **change}
    assert ask("model", "module.textsOf(given)", **given)["wrong"].startswith(said)


# Colours ------------------------------------------------------------------------------------------


def test_hlo_has_the_colours_that_fp8lens_gives_it():
    text = dump.example()
    painted = ask("elements", "module.partsOfHlo(given.text)", text=text)
    coloured = [tuple(part) for part in painted if part[1]]
    assert coloured == [part for part in parts(text) if part[1]] and len(coloured) > 100


# The widget ---------------------------------------------------------------------------------------


def test_a_widget_without_a_kernel_is_its_answer(monkeypatch):
    widget = Speedup(m=16, chip="H200", a="amax", b="amax")
    shown, _ = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in shown
    assert shown["text/plain"].startswith("bf16 is ") and "H200" in shown["text/plain"]
    assert "<table>" in shown["text/html"] and "class=" not in shown["text/html"]
    with pytest.raises(TypeError, match="chips cannot be chosen: choose m, n, k, chip"):
        Speedup(chips={})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("helpers.explorers.sys.executable", "/nowhere/python")
    assert "Run this cell in JupyterLab" in Bits(0.3)._repr_mimebundle_()[0]["text/html"]
