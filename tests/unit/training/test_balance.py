"""What ranks measure of themselves, and when they decide."""

import pytest
import torch

import firecaffe
from firecaffe import Recipe, SynchronyConfig
from firecaffe.cluster.world import World
from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import equal_shares
from firecaffe.training import balance
from firecaffe.training.balance import Balance
from firecaffe.training.outcome import StepResult, Timings

FULL = 32


def result(step: int, own_s: float, micro_batches: int, samples: int = FULL) -> StepResult:
    """Of a step with half of a rank's own time for data, and much waiting for others."""
    timings = Timings(
        step=step,
        data_s=own_s / 2,
        compute_s=own_s / 2,
        exposed_communication_s=50.0,
        exchange_s=60.0,
        update_s=7.0,
        step_s=own_s + 57.0,
        micro_batches=micro_batches,
    )
    return StepResult(samples, 0.0, {}, timings)


def two_ranks(monkeypatch: pytest.MonkeyPatch, other_s: str) -> Balance:
    """Rank 0 of two; the other one always says the same."""
    monkeypatch.setattr(balance, "gather_text", lambda _, own: [own, other_s])
    return Balance(World(0, 2, torch.device("cpu")), 8, FULL, 4, equal_shares(8, 2))


def test_own_time_is_what_a_smaller_share_would_shorten() -> None:
    assert balance.own_seconds(result(1, 6.0, 3).timings) == 2.0


def test_shares_follow_the_medians_of_full_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    own = two_ranks(monkeypatch, "1.0")
    # The first step warms up, and the last one of an epoch has few samples.
    for step, taken_s in enumerate([400.0, 12.0, 12.4, 11.6], 1):
        own.add(result(step, taken_s, 4))
    own.add(result(5, 0.1, 4, samples=1))
    said = own.decide(4)
    assert own.micro_batches_by_rank == [2, 6]
    assert "from step 5 on: 2, 6 micro-batches (before: 4, 4)" in said
    assert own.as_dict()["changes"] == [
        {"step": 4, "micro_batches_by_rank": [2, 6], "seconds_by_rank": [3.05, 1.0]}
    ]


def test_each_decision_is_by_the_steps_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    own = two_ranks(monkeypatch, "1.0")
    own.add(result(1, 12.0, 4))
    own.decide(4)
    own.add(result(5, 2.0, 2))  # as fast as the other now
    own.decide(8)
    assert own.micro_batches_by_rank == [4, 4]
    assert own.decide(12) == ""  # nothing was measured
    assert [each for each in range(1, 13) if own.is_due(each)] == [4, 8, 12]


def test_a_hook_beside_measured_shares_is_refused() -> None:
    recipe = Recipe(synchrony=SynchronyConfig(shares="measured"))
    with pytest.raises(
        RecipeError, match=r"synchrony\.shares measured and comm_hook: .* leave one"
    ):
        firecaffe.train(recipe, comm_hook=(None, lambda state, bucket: bucket))
