"""What is recorded of the fusion lab's programs is what XLA makes of them."""

import copy
import gzip

import jax
import pytest

from helpers.explorers import fusion_lab as lab
from helpers.records.results import digest
from tests.weekly import NIGHTLY, one_in
from tools.recorders import data, form, rule_programs
from tools.recorders import lab_programs as record

RECORDED = lab.recorded()
OWN = [choice for choice in lab.choices() if choice["release"] == jax.__version__]


def test_the_record_has_its_form_and_is_small_enough():
    assert form.problems(dict(RECORDED), "fusion_lab") == []
    assert lab.RECORD.stat().st_size <= record.MOST_BYTES
    assert RECORDED["digest"] == digest(RECORDED)
    assert gzip.decompress(lab.RECORD.read_bytes()) == gzip.decompress(record.written(RECORDED))


def test_the_releases_are_those_of_the_rules_and_the_lock():
    assert lab.RELEASES == (*rule_programs.RELEASES, data.locked()["jax"]), (
        "helpers/explorers/fusion_lab"
    )
    assert {*RECORDED["releases"]} == {*lab.RELEASES}
    for release, packages in RECORDED["releases"].items():
        assert {packages[name] for name in data.OF_JAX} == {release}


@pytest.mark.parametrize("choice", one_in(200, OWN), ids=lambda one: "-".join(one.values()))
def test_a_program_becomes_what_is_recorded(choice):
    """A sample; with NIGHTLY=1 all, in a quarter of an hour."""
    assert record.problems(choice, RECORDED, record.outcome(choice)) == []


@pytest.mark.skipif(not NIGHTLY, reason="another release does not change: NIGHTLY=1 tries all")
def test_a_program_of_another_release_becomes_what_is_recorded():
    assert record.check([one for one in lab.RELEASES if one != jax.__version__]) == []


def test_another_outcome_would_be_noticed():
    made = copy.deepcopy(lab.outcome(lab.STATE))
    assert record.problems(lab.STATE, RECORDED, made) == []
    made["bytes"] += 1
    made["kernels"][0]["title"] = "another"
    assert len(record.problems(lab.STATE, RECORDED, made)) == 2


def test_a_record_has_each_text_once_and_gives_each_outcome_back(monkeypatch):
    """Three programs, of which two become the same."""
    grid = {name: (value,) for name, value in lab.STATE.items()} | {"bias": ("none", "bf16", "f32")}
    made, other = (lab.outcome({**lab.STATE, "amax": amax}) for amax in ("yes", "no"))
    monkeypatch.setattr(lab, "GRIDS", (grid,))
    found = [made, made, other]
    packed = record.packed(zip(lab.choices(), map(copy.deepcopy, found), strict=True))
    assert len(packed["outcomes"]) == 2 and len(packed["programs"]) == 3
    assert [lab.outcome(choice, packed) for choice in lab.choices()] == found
