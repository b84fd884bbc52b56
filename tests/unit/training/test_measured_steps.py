"""What is measured of steps: lines of progress, norms for the noise scale, shares by speed."""

import dataclasses
import json
from math import inf, nan
from typing import Any

import pytest
import rich.console
import torch

from firecaffe.cluster.world import World
from firecaffe.data import SampleOrder
from firecaffe.exchange.leaves import equal_shares
from firecaffe.recipe.worker_numbers import RankLayout
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.modes import every_step
from firecaffe.training.modes.every_step import ShareBalancer
from firecaffe.training.outcome import EVERY, MAX_STEPS, NoiseMeter, StepResult, Timings
from firecaffe.training.records import RunProgress, say
from tests.kit.training_fixtures import Capture, Patch

# --- progress -------------------------------------------------------------------------------------

STEP = StepResult(16, 1.5, {}, Timings(1, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1, 1))


@pytest.mark.parametrize("in_notebook", [False, True])
@pytest.mark.parametrize("forced", ["", "1"])
def test_a_pipe_gets_plain_lines(
    forced: str, in_notebook: bool, monkeypatch: Patch, capsys: Capture
) -> None:
    """A notebook sets FORCE_COLOR for the processes that it starts."""
    monkeypatch.setenv("FORCE_COLOR", forced)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: in_notebook)
    with RunProgress("run", 0, 20, shown=True) as progress:
        for step in range(1, 21):
            progress.step(step, 0.1, STEP)
    say("the end")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert lines.pop() == "the end"
    assert len(lines) == 10
    assert all("160 samples/s" in line and "s left" in line for line in lines)


def test_an_evaluation_that_is_no_number_says_what_to_do(capsys: Capture) -> None:
    for loss, is_warned in ((0.5, False), (nan, True), (inf, True)):
        with RunProgress("run", 0, 20, shown=True) as progress:
            progress.evaluation("test", 20, Evaluation(8, loss, {}, [], None))
        assert ("batch_norm_samples" in capsys.readouterr().out) == is_warned


# --- noise ----------------------------------------------------------------------------------------

ORDER = SampleOrder(0, 90, 20, 5)
"""Of five steps in an epoch, the last one has half the samples."""


def test_a_few_steps_are_measured() -> None:
    for steps in (10, 100, 100_000):
        meter = NoiseMeter(ORDER, steps, True)
        due = [step for step in range(steps) if meter.is_due(step)]
        assert len(due) <= min(MAX_STEPS, steps / EVERY)
        assert len(due) > min(MAX_STEPS, steps / EVERY) / 2 - 1
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


# --- balance --------------------------------------------------------------------------------------

FULL = 32


def result(step: int, own_s: float, micro_batches: int, samples: int = FULL) -> StepResult:
    """Of a step with half of a rank's own time for data, and much waiting for others."""
    waits: dict[str, Any] = {"exposed_communication_s": 50.0, "exchange_s": 60.0, "update_s": 7.0}
    own: dict[str, Any] = {"data_s": own_s / 2, "compute_s": own_s / 2, "step_s": own_s + 57.0}
    timings = Timings(step=step, micro_batches=micro_batches, **own, **waits)
    return StepResult(samples, 0.0, {}, timings)


def two_ranks(monkeypatch: Patch, other_s: str) -> ShareBalancer:
    """Rank 0 of two; the other one always says the same."""
    monkeypatch.setattr(every_step, "gather_text", lambda _, own: [own, other_s])
    world, layout = World(0, 2, torch.device("cpu")), RankLayout(2, 1, True)
    return ShareBalancer(world, layout, 8, FULL, 4, equal_shares(8, 2))


def test_own_time_is_what_a_smaller_share_would_shorten() -> None:
    """And waits for the row."""
    timings = result(1, 6.0, 3).timings
    assert every_step.own_seconds(timings) == 2.0
    assert every_step.own_seconds(dataclasses.replace(timings, idle_s=1.5)) == 2.5
    assert every_step.own_seconds(dataclasses.replace(timings, activations_s=3.0)) == 3.0


def test_shares_follow_the_medians_of_full_steps(monkeypatch: Patch) -> None:
    own = two_ranks(monkeypatch, "1.0")
    # The first step warms up, and the last one of an epoch has few samples.
    for step, taken_s in enumerate([400.0, 12.0, 12.4, 11.6], 1):
        own.add(result(step, taken_s, 4))
    own.add(result(5, 0.1, 4, samples=1))
    said = own.decide(4)
    assert own.micro_batches_by_rank == [2, 6]
    assert "from step 5 on: 2, 6 micro-batches (before: 4, 4)" in said
    assert own.row["changes"] == [
        {"step": 4, "micro_batches_by_rank": [2, 6], "seconds_by_rank": [3.05, 1.0]}
    ]


def test_each_decision_is_by_the_steps_since_the_last(monkeypatch: Patch) -> None:
    own = two_ranks(monkeypatch, "1.0")
    own.add(result(1, 12.0, 4))
    own.decide(4)
    own.add(result(5, 2.0, 2))  # as fast as the other now
    own.decide(8)
    assert own.micro_batches_by_rank == [4, 4]
    assert own.decide(12) == ""  # nothing was measured
    assert [each for each in range(1, 13) if own.is_due(each)] == [4, 8, 12]


ROWS = {
    # Of same samples a row has one share, of own ones each of its ranks an equal part of it.
    "same samples": (True, equal_shares(12, 2), [8, 8, 4, 4], [range(8), range(8, 12)]),
    "own samples": (
        *(False, equal_shares(12, 4), [4, 4, 2, 2]),
        [range(4), range(4, 8), range(8, 10), range(10, 12)],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_as_fast_as_its_slowest_rank(monkeypatch: Patch, name: str) -> None:
    shares_samples, first, counts, shares = ROWS[name]
    others = [json.dumps(seconds) for seconds in (1.0, 1.0, 2.0)]
    monkeypatch.setattr(every_step, "gather_text", lambda _, own: [own, *others])
    world = World(2, 4, torch.device("cpu"))
    own = ShareBalancer(world, RankLayout(2, 2, shares_samples), 12, FULL, 4, first)
    own.add(result(1, 0.5 * len(first[0]), len(first[0])))
    said = own.decide(4)
    assert own.micro_batches_by_rank == counts
    assert list(own.shares) == shares
    assert own.own_share == shares[1 if shares_samples else 2]
    assert f"{counts[0]}, {counts[2]} micro-batches" in said
    assert "one takes 1e+03, 2e+03 ms" in said
    assert own.changes[0].seconds_by_rank == [0.5, 1.0, 1.0, 2.0]
    assert own.decide(8) == ""  # nothing was measured
