"""Which steps measure the norms of gradients, and which norms count."""

import json
from math import inf, nan

import pytest

from firecaffe.data import SampleOrder
from firecaffe.training.noise_meter import EVERY, MOST_STEPS, NoiseMeter

ORDER = SampleOrder(0, 90, 20, 5)
"""Of five steps in an epoch, the last one has half the samples."""


def test_a_few_steps_are_measured() -> None:
    for steps in (10, 100, 100_000):
        meter = NoiseMeter(ORDER, steps, True)
        due = [step for step in range(steps) if meter.is_due(step)]
        assert len(due) <= min(MOST_STEPS, steps / EVERY)
        assert len(due) > min(MOST_STEPS, steps / EVERY) / 2 - 1
        assert all(ORDER.samples_in_step(step) == 20 and step > 0 for step in due)
    single = NoiseMeter(SampleOrder(0, 90, 20, 20), 100, True)
    without = NoiseMeter(ORDER, 100, False)
    assert not any(single.is_due(step) or without.is_due(step) for step in range(100))


def test_what_counts_and_is_kept() -> None:
    meter = NoiseMeter(ORDER, 100, True)
    for step, squares in enumerate([None, (inf, inf), (nan, 1.0), *[(8.0, 1.0)] * 3]):
        assert meter.add(step, squares) == {}
    other = NoiseMeter(ORDER, 100, True)
    assert other.state_dict() == {}
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    # (2 - 1) / (1/5 - 1/20) over (20 · 1 - 5 · 2) / 15, without any spread.
    names = "noise_scale", "noise_scale_low", "noise_scale_high"
    assert other.add(6, (8.0, 1.0)) == pytest.approx(dict.fromkeys(names, 10.0))
    assert other.row is not None
    assert other.row["steps"] == [3, 4, 5, 6]
