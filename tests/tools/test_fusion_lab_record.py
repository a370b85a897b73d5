"""What is recorded of the fusion lab's programs is what XLA makes of them."""

import copy
import gzip
import json

import pytest

from helpers.explorers import fusion_lab as lab
from helpers.records.results import digest
from tests.weekly import one_in
from tools.records import form
from tools.records import fusion_lab as record

RECORDED = lab.recorded()


def test_the_record_has_its_form_and_is_small_enough():
    assert form.problems(dict(RECORDED), "fusion_lab") == []
    assert lab.RECORD.stat().st_size <= record.MOST_BYTES
    assert gzip.decompress(lab.RECORD.read_bytes()) == gzip.decompress(record.written(RECORDED))


@pytest.mark.parametrize(
    "choice", one_in(200, lab.choices()), ids=lambda one: "-".join(one.values())
)
def test_a_program_becomes_what_is_recorded(choice):
    """A sample; with NIGHTLY=1 all, in a quarter of an hour."""
    assert record.problems(choice, RECORDED) == []


def test_another_outcome_would_be_noticed(monkeypatch):
    made = copy.deepcopy(lab.outcome(lab.STATE))
    monkeypatch.setattr(record, "outcome", lambda choice: copy.deepcopy(made))
    assert record.problems(lab.STATE, RECORDED) == []
    made["bytes"] += 1
    made["kernels"][0]["title"] = "another"
    assert len(record.problems(lab.STATE, RECORDED)) == 2


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
    grid |= {"bias": ("none", "bf16", "f32"), "chip": ("H100",)}
    made = lab.outcome(lab.STATE)
    asked = []

    def outcome(choice):
        asked.append(choice["bias"])
        return copy.deepcopy(made)

    monkeypatch.setattr(lab, "GRIDS", (grid,))
    monkeypatch.setattr(record, "outcome", outcome)
    monkeypatch.setattr(record, "DATA", tmp_path / "fusion_lab.json.gz")
    monkeypatch.setattr(record, "PARTS", tmp_path / "parts")
    return made, asked


def test_a_record_has_each_text_once_and_goes_on_where_it_was_stopped(few, tmp_path, capsys):
    made, asked = few
    record.kept_outcome({**lab.STATE, "bias": "none"}, record.PARTS)
    assert asked == ["none"]
    data = json.loads(json.dumps(record.measured(record.PARTS)))
    assert asked == ["none", "bf16", "f32"]
    assert len(data["outcomes"]) == len(data["steps"]) == 1
    assert len(data["codes"]) == len(data["programs"]) == 3
    for choice in lab.choices():
        assert lab.outcome(choice, data) == made
    assert record.record() == 0
    assert "3 programs in" in capsys.readouterr().out
    assert lab.recorded(record.DATA)["programs"] == data["programs"]
    assert not record.PARTS.exists()
