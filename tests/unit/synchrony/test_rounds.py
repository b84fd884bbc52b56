"""When replicas are averaged: what holds of all plans, and the rules of those who gave them."""

from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.rounds import Rounds, plan_rounds


def fixed(_: int) -> float:
    return 0.1


def plan(
    steps: int, local_steps: int, synchronous: int = 0, overlap_steps: int = 0, growth: float = 0.0
) -> Rounds:
    words = SynchronyConfig(
        "local",
        local_steps=local_steps,
        overlap_steps=overlap_steps,
        growth_coefficient=growth,
    )
    return plan_rounds(words, synchronous, steps, fixed)


@given(
    steps=st.integers(1, 60),
    local_steps=st.integers(1, 20),
    synchronous=st.integers(0, 59),
    overlap_steps=st.integers(0, 19),
)
def test_every_step_is_in_one_round_or_synchronous(
    steps: int, local_steps: int, synchronous: int, overlap_steps: int
) -> None:
    synchronous, overlap_steps = min(synchronous, steps - 1), min(overlap_steps, local_steps - 1)
    rounds = plan(steps, local_steps, synchronous, overlap_steps)
    found = [rounds.of(step) for step in range(synchronous, steps)]
    for step, one in enumerate(found, synchronous):
        assert one.first <= step < one.stop
        assert one.stop - one.first == min(local_steps, steps - one.first)
        assert one.applied == min(steps, one.stop + overlap_steps)
    assert found[-1].stop == found[-1].applied == steps
    # An average has come before the next one is taken, and the state is whole when it has.
    for one, following in pairwise(found):
        assert one == following or one.applied <= following.stop
    whole = [done for done in range(1, steps + 1) if rounds.is_whole(done)]
    assert whole == [*range(1, synchronous + 1), *sorted({one.applied for one in found})]
    for before, done in zip([0, *whole], whole, strict=False):
        assert rounds.last_whole(done) == before


def test_no_round_begins_before_the_synchronous_steps_end() -> None:
    rounds = plan(steps=10, local_steps=4, synchronous=3)
    with pytest.raises(ValueError, match="step 2 is in no round; the first is 3"):
        rounds.of(2)
    assert Rounds(7).longest == 0


def test_the_quadratic_rule() -> None:
    """H = max(H_base, floor((c / rate)^2)) with the rate of the round's first step."""

    def halving(step: int) -> float:
        return 0.4 * 0.5 ** (step // 20)

    words = SynchronyConfig("local", local_steps=2, growth_coefficient=0.65)
    rounds = plan_rounds(words, 0, 80, halving)
    first = 0
    while first < 80:
        expected = max(2, floor((0.65 / halving(first)) ** 2))
        assert rounds.of(first).stop == min(80, first + expected)
        first = rounds.of(first).stop
    assert [rounds.of(step).steps for step in (0, 20)] == [2, 10]


def test_as_long_as_the_rate_rises_its_highest_counts() -> None:
    """As after the warm-up, which the rule's authors set for it."""
    words = SynchronyConfig("local", local_steps=2, growth_coefficient=0.65)
    rounds = plan_rounds(words, 0, 40, lambda step: 0.2 * min(1, (step + 1) / 10))
    assert rounds.of(0).steps == floor((0.65 / 0.2) ** 2) == 10


def test_a_rate_of_zero_is_one_round() -> None:
    words = SynchronyConfig("local", local_steps=2, growth_coefficient=0.6)
    assert plan_rounds(words, 0, 40, lambda _: 0.0).of(0).stop == 40
