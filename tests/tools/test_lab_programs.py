"""What is recorded of the fusion lab's programs is what XLA makes of them."""

import gzip
import json

import jax
import pytest

from helpers.explorers import fusion_lab as lab
from helpers.records.results import digest
from tests import form
from tests.weekly import one_in, weekly
from tools.recorders import data, rule_programs
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
    made = json.loads(json.dumps(record.outcome(choice)))
    assert made == lab.outcome(choice), "run `make fusion-lab`"


@weekly
@pytest.mark.parametrize("release", rule_programs.RELEASES)
def test_programs_of_another_release_become_what_is_recorded(release):
    names = record.RECORD.names(release)
    python = record.RECORD.environment(release)
    made = data.measured_by(release, python, record.RECORD.module, names)["rows"]
    assert made == record.RECORD.read()[release]["rows"], "run `make fusion-lab`"
