"""The arithmetic of formats that runs in a browser, against ml_dtypes: run by Node."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.numerics.formats import FORMATS, code_values, describe, rounding
from helpers.numerics.microscaling import BLOCK_FORMATS, ROUNDING, dtype_of, to_blocks

EXPLORERS = Path(__file__).resolve().parent.parent.parent / "helpers" / "explorers"
NAMES = [*FORMATS, "bfloat16", "float16"]
COUNT = 100_000  # random values for each format, besides ties and boundaries
# Reads a list of {call, format, input} of JSON and numbers as float64, writes numbers as float64.
NODE = """
import { readFileSync, writeFileSync } from "node:fs"
const formats = await import(process.argv[1])
const [folder, jobs] = [process.argv[2], JSON.parse(readFileSync(process.argv[2] + "/jobs.json"))]
const calls = {
    decode: ({ format }, x) => [formats.decode(format, x)],
    cast: ({ format }, x) => [formats.encode(format, x)],
    saturate: ({ format }, x) => [formats.encode(format, x, true)],
    round: ({ format }, x, scale) => {
        const r = formats.round(format, x, scale)
        return [r.target, r.code, r.decoded, r.below, r.above, r.dequantized, r.error, r.unclamped]
    },
}
const blocks = ({ format, rounding }, numbers) => {
    const found = []
    for (let start = 0; start < numbers.length; start += 32) {
        const block = formats.roundBlock(format, [...numbers.slice(start, start + 32)], rounding)
        found.push(block.exponent, ...block.rounded.map(one => one.decoded))
    }
    return found
}
for (const [number, job] of jobs.entries()) {
    const input = readFileSync(`${folder}/${number}.in`)
    const given = new Float64Array(input.buffer, input.byteOffset, input.length / 8)
    let found = []
    if (job.call == "blocks") found = blocks(job, given)
    else if (job.call == "round") {
        for (let i = 0; i < given.length; i += 2)
            found.push(...calls.round(job, given[i], given[i + 1]))
    } else found = Array.from(given, x => calls[job.call](job, x)[0])
    writeFileSync(`${folder}/${number}.out`, new Uint8Array(new Float64Array(found).buffer))
}
"""


def node() -> str:
    """Node's program, of the wheel that is installed beside this Python, else the machine's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which("node", path=path) or "node"


# Before a program of Node's that is asked: the explorer's module, and what the program is given
ASKED = """
const explorer = await import(process.argv[1])
let text = ""
for await (const piece of process.stdin) text += piece
const given = JSON.parse(text)
"""


def ask_node(name: str, program: str, given: Any) -> Any:
    """What a program prints, as JSON, that has the module of an explorer and what is given."""
    address = (EXPLORERS / f"{name}.mjs").as_uri()
    done = subprocess.run(
        [node(), "--input-type=module", "-e", ASKED + program, address],
        input=json.dumps(given),
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def data(name: str) -> dict:
    """A format as the explorers get it."""
    return dataclasses.asdict(describe(name))


def run_node(folder: Path, jobs: list[tuple[dict, np.ndarray]]) -> list[np.ndarray]:
    """What formats.mjs answers to each job: a call's name and data, and its numbers."""
    for number, (_, numbers) in enumerate(jobs):
        numbers.astype(np.float64).tofile(folder / f"{number}.in")
    (folder / "jobs.json").write_text(json.dumps([job for job, _ in jobs]))
    address = (EXPLORERS / "formats.mjs").as_uri()
    subprocess.run(
        [node(), "--input-type=module", "-e", NODE, address, str(folder)], check=True, timeout=100
    )
    return [np.fromfile(folder / f"{number}.out") for number in range(len(jobs))]


def float32s(name: str) -> np.ndarray:
    """Random bits of float32, and what lies at, between and beside the format's numbers."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, COUNT // 2, dtype=np.uint32).view(np.float32)
    # Few of random bits are in the range of a small format: the same mantissas around it.
    f = describe(name)
    low, high = np.log2([f.smallest_subnormal or f.smallest_normal, f.max])
    size = np.exp2(rng.uniform(low - 3, min(high + 2, 127), COUNT // 2))
    near = (size * rng.choice([-1, 1], COUNT // 2)).astype(np.float32)
    values = np.unique(code_values(name)[np.isfinite(code_values(name))])
    beyond = values[-1] + (values[-1] - values[-2]) * np.array([0.5, 1, 2])
    with np.errstate(over="ignore"):
        edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, beyond, -beyond])
        edges = edges.astype(np.float32)
        beside = [np.nextafter(edges, np.float32(to)) for to in (np.inf, -np.inf)]
    special = np.array([0, -0.0, np.nan, np.inf, -np.inf, 2**-149, -(2**-149)], np.float32)
    found = np.concatenate([bits, near, edges, *beside, special])
    # NumPy would keep the sign of a NaN, which JavaScript has not.
    return np.where(np.isnan(found), np.float32(np.nan), found)


def as_dtype(numbers: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return numbers.astype(name)


def codes_of(numbers: np.ndarray) -> np.ndarray:
    return numbers.view(f"u{numbers.dtype.itemsize}").astype(np.float64)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """By call and format: what was given, and what Node answered. One start of Node for all."""
    jobs = []
    for name in NAMES:
        codes = np.arange(len(code_values(name)), dtype=np.float64)
        values = float32s(name)
        for call, numbers in (("decode", codes), ("cast", values), ("saturate", values)):
            jobs.append(({"call": call, "name": name, "format": data(name)}, numbers))
    found = run_node(tmp_path_factory.mktemp("node"), jobs)
    return {
        (job["call"], job["name"]): (numbers, answer)
        for (job, numbers), answer in zip(jobs, found, strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(answers, name):
    _, decoded = answers["decode", name]
    expected = code_values(name)
    assert np.array_equal(decoded, expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(np.signbit(decoded[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("name", NAMES)
def test_a_cast_gives_the_code_that_ml_dtypes_gives(answers, name):
    given, codes = answers["cast", name]
    assert len(given) > COUNT
    expected = codes_of(as_dtype(given, name))
    wrong = codes != expected
    if name == "float8_e8m0fnu":
        # ml_dtypes gives to all between 2^-127 and 2^-126 the upper one, the nearest or not.
        too_high = (2.0**-127 < given) & (given < 1.5 * 2.0**-127)
        assert np.all(expected[too_high] == 1) and np.all(codes[too_high] == 0)
        wrong &= ~too_high
    assert not wrong.any(), (given[wrong][:5], codes[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("name", NAMES)
def test_saturating_is_clamping_before_the_cast(answers, name):
    given, codes = answers["saturate", name]
    f = describe(name)
    clamped = np.clip(given.astype(np.float64), f.min, f.max)
    wrong = codes != codes_of(as_dtype(clamped, name))
    if name == "float8_e8m0fnu":
        wrong &= ~((2.0**-127 < given) & (given < 1.5 * 2.0**-127))  # as above
    assert not wrong.any()


@pytest.mark.parametrize("name", [name for name in FORMATS if describe(name).signed])
def test_rounding_with_a_scale_says_what_python_says(tmp_path, name):
    rng = np.random.default_rng(1)
    typed = [0.0, 465, 464, 1 / 3, -3.3, 1e-9, 1e30, 5e-324, 17, 19, describe(name).max]
    values = np.concatenate([typed, np.exp2(rng.uniform(-12, 18, 90)) * rng.choice([-1, 1], 90)])
    scales = np.concatenate([np.ones(len(typed)), np.exp2(rng.uniform(-5, 5, 90))])
    given = np.stack([values, scales], axis=1)
    job = {"call": "round", "format": data(name)}
    (found,) = run_node(tmp_path, [(job, given.ravel())])
    for (value, scale), answer in zip(given, found.reshape(-1, 8), strict=True):
        r = rounding(value, scale, name)
        expected = [r.target, r.code, r.decoded, r.below, r.above, r.dequantized, r.error]
        assert answer[:7].tolist() == expected, (value, scale)
        assert answer[7] == r.unclamped or np.isnan([answer[7], r.unclamped]).all()


@pytest.mark.parametrize("label", [name for name, of in BLOCK_FORMATS.items() if of.block == 32])
def test_a_blocks_scale_and_numbers_are_those_of_microscaling(tmp_path, label):
    form = BLOCK_FORMATS[label]
    rng = np.random.default_rng(2)
    x = rng.standard_t(2, (200, 32)) * np.exp2(rng.uniform(-20, 20, (200, 1)))
    x[0] = 0
    x[1:8, 0] = form.element.largest * 2.0 ** np.arange(7)  # exact powers times the largest
    x[1:8, 1:] = 0
    x = x.astype(np.float32)
    element = dtype_of(form.element).name
    jobs = []
    for how in ROUNDING:
        jobs.append(({"call": "blocks", "format": data(element), "rounding": how}, x.ravel()))
    for how, found in zip(ROUNDING, run_node(tmp_path, jobs), strict=True):
        expected = to_blocks(x, form, how)
        exponents, numbers = np.split(found.reshape(200, 33), [1], axis=1)
        assert np.array_equal(np.exp2(exponents), expected.scales.astype(np.float64)), how
        assert np.array_equal(numbers, expected.codes.astype(np.float64)), how


def test_ml_dtypes_has_no_format_that_the_explorers_lack():
    small = {name for name in vars(ml_dtypes) if name.startswith("float")}
    assert small <= {*NAMES}, "describe it, and say so in the explorers"
