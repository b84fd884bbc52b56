"""A pipeline's step in time: without messages as it is simulated exactly; with messages by hand."""

from fractions import Fraction

import numpy as np
import pytest

from firecaffe.parallel.pipeline import ORDERS, simulate
from firecaffe.plan.stage_times import turns


@pytest.mark.parametrize("order", ORDERS)
def test_without_messages_it_is_the_exact_simulation(order: str) -> None:
    draws = np.random.default_rng(3)
    for stages in (1, 2, 3, 4):
        for micro_batches in (1, 3, 8):
            forward, backward = draws.integers(1, 20, (2, stages)).tolist()
            actions = [ORDERS[order](stages, micro_batches, k) for k in range(stages)]
            none = [0.0] * (stages - 1)
            found = turns(actions, forward, backward, none, none)
            exact = simulate(actions, forward, backward)
            assert max(found.ends_s) == exact.length_s
            busy = [Fraction(end - wait) for end, wait in zip(*_of(found), strict=True)]
            assert tuple(busy) == exact.busy_s


def _of(found: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return found.ends_s, found.waits_s  # type: ignore[attr-defined]


def test_messages_by_hand() -> None:
    """Two stages, gpipe, two micro-batches: forward 1 s, backward 2 s, 0.5 s there, 0.25 s back.

    Stage 0: forward to 1 and 2. The first comes at 1.5, the second at 2.5. Stage 1: forward to 2.5
    and 3.5, backward to 5.5 and 7.5. Their gradients come at 5.75 and 7.75: backward of stage 0 to
    7.75 and 9.75.
    """
    orders = [ORDERS["gpipe"](2, 2, k) for k in range(2)]
    found = turns(orders, [1, 1], [2, 2], [0.5], [0.25])
    assert found.ends_s == (9.75, 7.5)
    assert found.waits_s == (3.75, 1.5)


def test_a_link_that_is_slower_than_the_stages_sets_the_pace() -> None:
    """One comes in while another is computed: m messages one after the other, then the last
    forward and backward, and what goes back.
    """
    orders = [ORDERS["gpipe"](2, 4, k) for k in range(2)]
    found = turns(orders, [1, 1], [1, 1], [10], [0])
    assert found.ends_s[1] == 1 + 4 * 10 + 1 + 4
    assert found.ends_s[0] == found.ends_s[1] + 1


def test_a_port_sends_one_message_after_the_other() -> None:
    """The middle one of three stages sends on and back, 3 s each; 1f1b, three micro-batches.

    Stage 1: forward to 2 and 3; its messages come at 5 and 8. Stage 2 ends backward of the first at
    7, stage 1 at 8: it goes back from 8 to 11. Its third forward ends at 9, and goes from 11 to 14;
    its second backward, from 10 to 11, goes from 14 to 17. Stage 2 ends at 16, stage 1 at 17, which
    goes to 20.
    """
    orders = [ORDERS["1f1b"](3, 3, k) for k in range(3)]
    found = turns(orders, [1, 1, 1], [1, 1, 1], [0, 3], [3, 0])
    assert found.ends_s == (21, 17, 16)
