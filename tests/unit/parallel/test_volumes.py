"""Closed forms: what is sent, against sizes and schedules; and orders of stages."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.exchange import fold
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.leaves import equal_shares
from firecaffe.exchange.schedule import ALL_GATHER
from firecaffe.parallel.cut import cut
from firecaffe.parallel.stages import ORDERS, Action, idle_share, most_held
from firecaffe.parallel.volumes import (
    Sizes,
    by_both,
    by_inputs,
    by_outputs,
    data_numbers,
    gather_numbers,
    most_samples,
    sum_numbers,
)
from tests.unit.parallel.in_stages import simulate

# --- what is sent ---------------------------------------------------------------------------------

FC6 = Sizes(37_752_832, 9216, 4096, 9216, 4096, True)
FC7 = Sizes(16_781_312, 4096, 4096, 4096, 4096, True)
FC8 = Sizes(4_097_000, 4096, 1000, 4096, 1000, True)


def test_fully_connected_layers_of_alexnet() -> None:
    """The row of AlexNet in docs/explanation/splitting.md, from which its factor (K - 1) / K is
    taken out, at numbers of workers that divide all of its dimensions.
    """
    for workers in (2, 4, 8):
        share = (workers - 1) / workers
        a_sample = by_outputs(FC6, workers)
        for each in (FC7, FC8):  # whose inputs are in parts
            saved = sum_numbers(workers, each.inputs) - gather_numbers(
                workers, each.inputs, each.input_elements
            )
            a_sample += by_outputs(each, workers) - saved
        by_data = sum(data_numbers(each, workers) for each in (FC6, FC7, FC8))
        assert a_sample == share * 35_816
        assert by_data == share * 2 * 58_631_144
        assert most_samples(by_data, a_sample) == 3_274


def test_by_inputs_is_by_outputs_turned_round() -> None:
    turned = Sizes(FC6.weights, FC6.outputs, FC6.inputs, 4096, 9216, True)
    assert by_inputs(FC6, 4) == by_outputs(turned, 4) == 3 / 4 * (2 * 4096 + 9216)
    assert by_both(FC6, 4) == by_both(turned, 4) == 3 / 4 * (4096 + 9216)


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    first = Sizes(100, 8, 12, 8, 12, input_has_gradient=False)
    assert by_outputs(first, 4) == by_both(first, 4) == 3 / 4 * 12
    assert by_inputs(first, 4) == 3 / 4 * 2 * 12
    assert data_numbers(FC6, 1) == by_outputs(FC6, 1) == by_inputs(FC6, 1) == by_both(FC6, 1) == 0
    assert [most_samples(numbers, 4.0) for numbers in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("elements", [8, 24, 37])
def test_a_sum_and_a_gathering_send_what_their_schedules_do(workers: int, elements: int) -> None:
    inputs = fold.inputs_of(workers, equal_shares(workers, workers))
    summed = fold.schedule(inputs, workers, elements).sent_elements / workers
    assert summed == pytest.approx(sum_numbers(workers, elements), rel=1e-12)
    # Each element of 6 numbers; the vector has room for the largest part of each worker.
    ends = cut(elements, workers)
    most = 6 * max(ends[part + 1] - ends[part] for part in range(workers))
    schedule = find_collective(ALL_GATHER, "sharded_parameter_server")(workers, workers * most)
    assert schedule.sent_elements / workers == gather_numbers(workers, 6 * elements, elements)


# --- orders of a pipeline's stages ----------------------------------------------------------------


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
