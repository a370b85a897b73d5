"""What is recorded of the small decoder's runs: read as written, compared as SciPy compares."""

import json

import numpy as np
import pytest
from scipy import stats

from helpers.records.trained import load_trained, paired
from helpers.training import runs
from tools.recorders import form

FOLDER = form.RESULTS


def test_the_interval_is_scipys():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 8)) + [[0.3], [0]]
    found = paired(a, b)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(a - b))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.seeds == 8


def test_the_longer_one_is_cut_to_the_same_seeds():
    assert paired([3, 5, 4, 100], [1, 2, 3]) == paired([3, 5, 4], [1, 2, 3])


def test_an_interval_of_one_seed_is_refused():
    with pytest.raises(ValueError, match="two seeds or more, and here are 1"):
        paired([1], [2, 3])


@pytest.mark.parametrize(("shift", "resolved"), [(0.0, False), (10.0, True), (-10.0, True)])
def test_a_difference_is_resolved_if_its_interval_leaves_out_zero(shift, resolved):
    values = np.array([1.0, -1.0, 0.5, -0.5])
    assert paired(values + shift, np.zeros(4)).is_resolved == resolved


def test_every_way_is_recorded_with_at_least_five_seeds():
    record = load_trained(FOLDER)
    assert set(record.ways) == set(runs.WAYS)
    assert all(len(of_way) >= 5 for of_way in record.ways.values())
    assert record.sizes == runs.SIZES and record.steps == runs.STEPS


def test_the_runs_learned():
    """A model that only knows which letter follows which reaches about 2.45 nats."""
    record = load_trained(FOLDER)
    assert np.all(record.unseen("bf16") < 2.3)
    assert len(set(record.unseen("bf16"))) == len(record.unseen("bf16"))


def test_a_record_changed_by_hand_is_not_read(tmp_path):
    data = json.loads((FOLDER / "trained.json").read_text())
    data["ways"]["delayed"][0]["unseen"] -= 0.01
    (tmp_path / "trained.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="not as it was recorded: `make train`"):
        load_trained(tmp_path)
