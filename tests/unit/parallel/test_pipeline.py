"""The orders of a pipeline's stages: complete, free of deadlock, idle for as long as published."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.parallel.pipeline import ORDERS, Action, idle_share, most_held, simulate

STAGES, MICRO_BATCHES = st.integers(1, 9), st.integers(1, 20)


@pytest.mark.parametrize("name", ORDERS)
@given(num_stages=STAGES, num_micro_batches=MICRO_BATCHES)
def test_each_micro_batch_goes_forward_then_backward_in_order(
    name: str, num_stages: int, num_micro_batches: int
) -> None:
    for stage in range(num_stages):
        actions = ORDERS[name](num_stages, num_micro_batches, stage)
        for is_forward in (True, False):
            found = [n for is_one, n in actions if is_one == is_forward]
            assert found == list(range(num_micro_batches))
        for number in range(num_micro_batches):
            assert actions.index(Action(True, number)) < actions.index(Action(False, number))


@pytest.mark.parametrize("name", ORDERS)
@given(
    num_stages=STAGES,
    num_micro_batches=MICRO_BATCHES,
    forward_s=st.integers(1, 5),
    backward_s=st.integers(1, 5),
)
def test_the_idle_share_is_the_published_one(
    name: str, num_stages: int, num_micro_batches: int, forward_s: int, backward_s: int
) -> None:
    stages = [ORDERS[name](num_stages, num_micro_batches, k) for k in range(num_stages)]
    found = simulate(stages, [forward_s] * num_stages, [backward_s] * num_stages)
    assert found.idle_share == idle_share(num_stages, num_micro_batches)


@given(num_stages=STAGES, num_micro_batches=MICRO_BATCHES)
def test_what_is_held_at_once(num_stages: int, num_micro_batches: int) -> None:
    for stage in range(num_stages):
        by_gpipe, by_1f1b = (
            most_held(ORDERS[name](num_stages, num_micro_batches, stage))
            for name in ("gpipe", "1f1b")
        )
        assert by_gpipe == num_micro_batches
        assert by_1f1b == min(num_stages - stage, num_micro_batches)


def test_a_step_by_hand() -> None:
    """Two stages, the second twice as slow; three micro-batches. 1f1b: the second stage begins at 1
    and computes 3 x (2 + 4); then the first has one backward of 2.
    """
    stages = [ORDERS["1f1b"](2, 3, k) for k in range(2)]
    found = simulate(stages, [1, 2], [2, 4])
    assert found.length_s == 1 + 3 * (2 + 4) + 2
    assert found.busy_s == (Fraction(9), Fraction(18))
    assert found.idle_share == 1 - Fraction(27, 2 * 21)


def test_orders_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match="stage 0 waits forever"):
        simulate([[Action(False, 0), Action(True, 0)], [Action(True, 0)]], [1, 1], [1, 1])
