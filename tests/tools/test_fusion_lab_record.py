"""What is recorded of the fusion lab's programs is what XLA makes of them."""

import copy
import gzip
import json

import jax
import pytest

from helpers.explorers import fusion_lab as lab
from helpers.records.results import digest
from tests.weekly import NIGHTLY, one_in
from tools.recorders import data, form
from tools.recorders import fusion_lab as record
from tools.recorders import rule_programs as rules

RECORDED = lab.recorded()
OWN = [choice for choice in lab.choices() if choice["release"] == jax.__version__]


def test_the_record_has_its_form_and_is_small_enough():
    assert form.problems(dict(RECORDED), "fusion_lab") == []
    assert lab.RECORD.stat().st_size <= record.MOST_BYTES
    assert gzip.decompress(lab.RECORD.read_bytes()) == gzip.decompress(record.written(RECORDED))


def test_the_releases_are_those_of_the_rules_and_the_lock():
    assert lab.RELEASES == (*rules.RELEASES, data.locked()["jax"]), "helpers/explorers/fusion_lab"
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


def test_an_altered_record_is_not_read(tmp_path):
    path = tmp_path / "fusion_lab.json.gz"
    altered = {**RECORDED, "date": "2020-01-01"}
    path.write_bytes(record.written(altered))
    with pytest.raises(ValueError, match="not as it was recorded: `make fusion-lab`"):
        lab.recorded(path)
    whole = tmp_path / "whole.json.gz"
    whole.write_bytes(record.written(altered | {"digest": digest(altered)}))
    assert lab.recorded(whole)["date"] == "2020-01-01"
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(b"x")
    with pytest.raises(ValueError, match="cannot be read"):
        lab.recorded(broken)


@pytest.fixture
def few(monkeypatch, tmp_path):
    """A record of three programs, of which two become the same, beside the true one."""
    grid = {name: (value,) for name, value in lab.STATE.items()}
    grid |= {"bias": ("none", "bf16", "f32"), "release": (jax.__version__,)}
    made = lab.outcome(lab.STATE)
    asked = []

    def outcome(choice):
        asked.append(choice["bias"])
        return copy.deepcopy(made)

    monkeypatch.setattr(lab, "GRIDS", (grid,))
    monkeypatch.setattr(lab, "RELEASES", (jax.__version__,))
    monkeypatch.setattr(record, "outcome", outcome)
    monkeypatch.setattr(record, "DATA", tmp_path / "fusion_lab.json.gz")
    monkeypatch.setattr(record, "PARTS", tmp_path / "parts")
    return made, asked


def test_a_record_has_each_text_once_and_goes_on_where_it_was_stopped(few, tmp_path, capsys):
    made, asked = few
    kept = record.part({**lab.STATE, "bias": "none", "release": jax.__version__}, record.PARTS)
    kept.parent.mkdir()
    kept.write_text(json.dumps(made))
    found = json.loads(json.dumps(record.measured(record.PARTS)))
    assert asked == ["bf16", "f32"]
    assert len(found["outcomes"]) == len(found["steps"]) == 1
    assert len(found["codes"]) == len(found["programs"]) == 3
    for choice in lab.choices():
        assert lab.outcome(choice, found) == made
    assert record.record() == 0
    assert "3 programs in" in capsys.readouterr().out
    assert lab.recorded(record.DATA)["programs"] == found["programs"]
    assert not record.PARTS.exists()
