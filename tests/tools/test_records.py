"""What is recorded has the form that schema.json gives, and is what the code makes again."""

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8lens import aot_compile
from fp8lens.matmul.kernels import fp8_calls, matmul_seconds
from fp8lens.matmul.rows import gemm_config
from helpers.numerics.number_formats import assert_matches_reference, matmul_reference, tolerance
from helpers.numerics.recipes import scaled_dot, to_e4m3
from helpers.records import stacks as stacked
from helpers.records.results import Goal, digest, goals, load_published, load_scale, load_tensors
from tests import form
from tests.weekly import NIGHTLY, weekly
from tools.recorders import ladder_costs as ladder
from tools.recorders import other_stacks as stacks
from tools.recorders import tensors, train

RECORDS = {name: json.loads((form.RESULTS / f"{name}.json").read_text()) for name in form.RECORDS}
nightly = pytest.mark.skipif(not NIGHTLY, reason="trains for a minute: NIGHTLY=1 does")


@pytest.mark.parametrize("name", form.RECORDS)
def test_a_record_has_its_form(name):
    assert form.problems(RECORDS[name], name) == []
    if "digest" in RECORDS[name]:
        assert RECORDS[name]["digest"] == digest(RECORDS[name])


def test_what_has_another_form_is_named():
    other = RECORDS["tensors"] | {"host": "mine", "date": "yesterday"}
    found = form.problems(other, "tensors")
    assert len(found) == 2 and any("'host'" in problem for problem in found)


def test_what_others_published_is_in_their_words():
    """The loaders hold each figure to its quotations, and to what its chip can do."""
    assert load_published(form.RESULTS) and load_scale(form.RESULTS)


# Goals --------------------------------------------------------------------------------------------

GOALS = [goal for part in ("speed", "train") for goal in goals(part, None, form.RESULTS)]


def share(goal: Goal) -> float:
    """The part of the rooflines' ratio that is wanted; goals.json says why under the same name."""
    if goal.part == "train":
        return 1.01
    if goal.most:
        return 1.03
    return 0.9 if goal.over == "bf16" else 0.98


def roofline(goal: Goal, chip: str) -> float:
    """The ratio of the rooflines of the two forms of a matmul of 8192 x 8192 x 8192: all but "bf16"
    multiply FP8 and write it.
    """
    kinds = ["bf16" if form == "bf16" else "f8e4m3fn" for form in (goal.of, goal.over)]
    of, over = (matmul_seconds(8192, 8192, 8192, kind, kind, chip) for kind in kinds)
    return over / of if goal.least else of / over


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: goal.name)
def test_a_goal_follows_from_its_reason(goal):
    """The roofline of a training step is compiled in another test."""
    assert goal.reason["share"] == share(goal)
    for chip, value in (goal.least or goal.most).items():
        if goal.part == "speed":
            assert goal.roofline[chip] == pytest.approx(roofline(goal, chip), abs=0.005)
        assert value == math.ceil(round(100 * share(goal) * goal.roofline[chip], 6)) / 100


# The training -------------------------------------------------------------------------------------


def test_the_training_gives_what_is_recorded():
    """With NIGHTLY=1 all of it, which takes minutes; else its first steps.

    A CPU of another kind adds in another order, and each step goes on from that: losses may differ
    by a thousandth, largest magnitudes by a hundredth.
    """
    steps = tensors.STEPS if NIGHTLY else 3
    recorded, again = RECORDS["tensors"], tensors.measured(steps)
    assert again["parameters"] == recorded["parameters"] and again["text"] == recorded["text"]
    assert again["losses"] == pytest.approx(recorded["losses"][:steps], rel=1e-3)
    for name, amaxes in again["amaxes"].items():
        assert amaxes == pytest.approx(recorded["amaxes"][name][:steps], rel=1e-2), name


def test_the_kept_weight_is_the_whole_one_of_the_last_amax():
    """Of the input and the gradient a sixteenth is kept: its largest is some part of the amax."""
    kept = load_tensors(form.RESULTS)
    for name, tensor in kept.tensors.items():
        part = np.abs(tensor.astype(np.float64)).max() / kept.amaxes[name][-1]
        assert abs(part - 1) < 2**-8 if name == "w" else 0.01 < part < 1 + 2**-8, name


# The ladder of chapter 15 ------------------------------------------------------------------------


@weekly
@pytest.mark.parametrize("name", ladder.STEPS)
def test_a_step_costs_what_is_recorded(name):
    """Chapter 15 holds the step with FP8 attention forward to the record in each run."""
    assert ladder.costs(name) == RECORDS["ladder"]["steps"][name]


# Other stacks, of chapter 17 ----------------------------------------------------------------------


def exact(kind: str, way: str) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and the size that its error is measured by."""
    given = stacked.operands(kind)
    a, b = (codes.astype(np.float64) for codes in (given.a, given.b))
    one, other = (scale.astype(np.float64) for scale in given.scales[way])
    if way == "block":
        a = a * np.repeat(one, stacked.B, axis=0).T
        b = b * np.repeat(np.repeat(other, stacked.B, axis=0), stacked.B, axis=1)
        return matmul_reference(a, b)
    return matmul_reference(a, b, one[:, None] if way == "row" else one, other)


def test_what_other_stacks_compute_is_within_the_bound():
    rows = stacked.load_stacks(form.RESULTS).rows
    assert {name[:2] for name in rows} == {
        ("torch", "tensor"),
        ("torch", "row"),
        *(("triton", way) for way in stacked.SCALES),
    }
    for (stack, way, kind), result in rows.items():
        value, size = (array[: len(result)] for array in exact(kind, way))
        assert_matches_reference(result, value, tolerance(value, size, stacked.K, np.float32))
        assert not np.array_equal(result, np.zeros_like(result)), stack


def table_of_attributes() -> list[list[str]]:
    """The rows of chapter 17's table of attributes, a text for each of its columns."""
    text = (form.RESULTS.parent / "17_other_stacks.md").read_text()
    (table,) = re.findall(r"^\| cuBLASLt \|.*\n\|[-|]*\n((?:\|.*\n)+)", text, re.M)
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()
    ]


def test_the_table_of_attributes_has_what_the_header_and_the_call_have():
    """Its first column names what cuBLASLt's header names, the second what XLA's call has."""
    known = RECORDS["stacks"]["cublaslt"]
    rows = table_of_attributes()
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert named <= {*known["attributes"], *known["scale modes"]}
    # All ways to scale, but the one for FP4 and the experimental one.
    assert {*known["scale modes"]} - named == {"VEC16_UE4M3", "PER_BATCH_SCALAR_32F"}

    def everything(a, b, bias, a_scale, b_scale, d_scale):
        d = jax.nn.relu(scaled_dot(a, b, a_scale, b_scale, jnp.bfloat16) + bias)
        return to_e4m3(d, d_scale), jnp.max(jnp.abs(d)).astype(jnp.float32)

    one = jax.ShapeDtypeStruct((), jnp.float32)
    codes = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
    bias = jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    (call,) = fp8_calls(aot_compile(everything, codes, codes, bias, one, one, one))
    fields = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert fields == {"scale_mode", "damax_output", "precision_config", "epilogue"}
    assert fields <= gemm_config(call).keys()
    without = [row[0] for row in rows if row[1] == "none"]
    assert without == ["`OUTER_VEC_32F`", "`VEC128_32F`, `BLK128x128_32F`"]


def test_the_kernel_needs_triton_alone():
    text = stacked.KERNEL.read_text()
    assert re.findall(r"^(?:import|from) ([\w.]+)", text, re.M) == ["triton", "triton.language"]


@pytest.mark.skipif(not NIGHTLY, reason="installs 5 GB: NIGHTLY=1 does")
def test_other_stacks_do_what_is_recorded():
    """All but the bits of sums that are rounded, or PyTorch's, whose order depends on the CPU."""
    again, recorded = stacks.found(), dict(RECORDS["stacks"])
    exact_sums = [name for name in again["results"] if re.match("triton.*whole", name)]
    for record in (again, recorded):
        record["results"] = {name: record["results"][name] for name in exact_sums}
    for part, value in again.items():
        assert value == recorded[part], part


# The runs of chapter 14 ---------------------------------------------------------------------------


SHORT, LONG = ("trained", train.runs.SHORT), ("trained_long", train.runs.LONG)
OTHERS = (
    *itertools.product([SHORT], ["bf16", "blocks", "delayed, tensor core"]),
    *itertools.product([LONG], ["bf16", "delayed", "blocks", "nvfp4"]),
)


@pytest.mark.parametrize(
    ("kept", "name"),
    [
        (SHORT, "delayed"),
        *(pytest.param(*other, marks=nightly) for other in OTHERS),
    ],
)
def test_a_run_begins_as_recorded(kept, name):
    """Its first steps. A CPU of another kind adds in another order: a code beside the other moves
    an amax by a twentieth."""
    record, plan = RECORDS[kept[0]], kept[1]
    recorded = record["ways"][name][0]
    again = train.result(train.Task(name, 0, plan=plan), count=record["together"])
    assert again["losses"] == pytest.approx(recorded["losses"][:1], rel=1e-3)
    for layer, operands in again.get("amaxes", {}).items():
        for before, now in zip(recorded["amaxes"][layer], operands, strict=True):
            assert now == pytest.approx(before[: record["together"]], rel=0.1)
    for layer, (amax, median, *_) in again.get("looks", [{}])[0].items():
        assert [amax, median] == pytest.approx(recorded["looks"][0][layer][:2], rel=0.1)
