"""The orders of a pipeline's stages: complete, free of deadlock, idle for as long as published."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.parallel.pipeline import ORDERS, Action, idle_share, most_held, simulate

STAGES, COUNTS = st.integers(1, 9), st.integers(1, 20)


@pytest.mark.parametrize("name", ORDERS)
@given(stages=STAGES, count=COUNTS, forward_s=st.integers(1, 5), backward_s=st.integers(1, 5))
def test_an_order_is_complete_and_idle_for_as_long_as_published(
    name: str, stages: int, count: int, forward_s: int, backward_s: int
) -> None:
    orders = [ORDERS[name](stages, count, stage) for stage in range(stages)]
    for actions in orders:
        for is_forward in (True, False):
            assert [n for is_one, n in actions if is_one == is_forward] == list(range(count))
        for number in range(count):
            assert actions.index(Action(True, number)) < actions.index(Action(False, number))
    simulated = simulate(orders, [forward_s] * stages, [backward_s] * stages)
    assert simulated.idle_share == idle_share(stages, count)


@given(stages=STAGES, count=COUNTS)
def test_what_is_held_at_once(stages: int, count: int) -> None:
    for stage in range(stages):
        assert most_held(ORDERS["gpipe"](stages, count, stage)) == count
        assert most_held(ORDERS["1f1b"](stages, count, stage)) == min(stages - stage, count)


def test_a_step_by_hand() -> None:
    """Two stages, the second twice as slow; three micro-batches. 1f1b: the second stage begins at 1
    and computes 3 x (2 + 4); then the first has one backward of 2.
    """
    stages = [ORDERS["1f1b"](2, 3, k) for k in range(2)]
    found = simulate(stages, [1, 2], [2, 4])
    assert found.length_s == 1 + 3 * (2 + 4) + 2
    assert found.busy_s == (Fraction(9), Fraction(18))
    assert found.idle_share == 1 - Fraction(27, 2 * 21)
    with pytest.raises(ValueError, match="stage 0 waits forever"):
        simulate([[Action(False, 0), Action(True, 0)], [Action(True, 0)]], [1, 1], [1, 1])
