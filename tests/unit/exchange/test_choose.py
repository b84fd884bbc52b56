"""The choice by a link: predictions against docs/exchange.md's formulas, worked out by hand."""

import pytest

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.choose import AUTO, choose, predict_s
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import lower_bound_elements

ALPHA_S, BANDWIDTH = 50e-6, 25e6
"""The emulated cluster's: 50 µs and 200 Mbit/s."""

SIZE = 7_000_000
SERIAL = {  # messages one after the other, and vectors' lengths, at p = 8
    "parameter_server": (14, 14),
    "sharded_parameter_server": (14, 14 / 8),
    "tree": (6, 6),
    "recursive_doubling": (3, 3),
    "halving_doubling": (6, 14 / 8),
}


def test_auto_is_no_exchange_of_the_table() -> None:
    assert AUTO not in ALGORITHMS


@pytest.mark.parametrize("name", SERIAL)
def test_prediction_is_the_formula(name: str) -> None:
    messages, vectors = SERIAL[name]
    schedule = ALGORITHMS[name](8, SIZE // 4)
    predicted_s = predict_s(schedule, ALPHA_S, BANDWIDTH, 4)
    assert predicted_s == pytest.approx(messages * ALPHA_S + vectors * SIZE / BANDWIDTH)
    assert choose(8, [SIZE], ALPHA_S, BANDWIDTH).by_algorithm[name] == pytest.approx(predicted_s)


def test_bytes_of_an_element_count() -> None:
    schedule = ALGORITHMS["tree"](4, 1000)
    assert predict_s(schedule, 0.0, 1.0, 2) == 4 * 2000
    assert predict_s(schedule, 1.0, 1e30, 4) == pytest.approx(4)


@pytest.mark.parametrize(
    ("size_bytes", "algorithm"),
    [
        # 3 α + 3 B β against 6 α + 14/8 B β: equal at B = 3 α / (5/4 β) = 3000 bytes.
        (2900, "recursive_doubling"),
        (3100, "halving_doubling"),
        (SIZE, "halving_doubling"),
    ],
)
def test_long_vectors_want_few_bytes_and_short_ones_few_messages(
    size_bytes: int, algorithm: str
) -> None:
    assert choose(8, [size_bytes], ALPHA_S, BANDWIDTH).algorithm == algorithm


@pytest.mark.parametrize("world_size", range(2, 18))
@pytest.mark.parametrize("size_bytes", [4, 100_000, SIZE])
def test_only_what_keeps_every_bit_is_chosen_from_and_the_fastest_taken(
    world_size: int, size_bytes: int
) -> None:
    found = choose(world_size, [size_bytes], ALPHA_S, BANDWIDTH)
    in_order = [name for name in ALGORITHMS if adds_in_tree_order(name, world_size)]
    assert list(found.by_algorithm) == in_order
    assert "tree" in in_order
    assert found.predicted_s == min(found.by_algorithm.values())
    assert found.predicted_s == found.by_algorithm[found.algorithm]
    least = lower_bound_elements(world_size, size_bytes // 4) * 4 / BANDWIDTH
    assert found.predicted_s >= least


def test_a_ring_is_none_of_them_from_three_ranks_on() -> None:
    assert "ring" not in choose(3, [SIZE], ALPHA_S, BANDWIDTH).by_algorithm


def test_times_of_all_vectors_add_up() -> None:
    both = choose(8, [4000, SIZE, 4000], ALPHA_S, BANDWIDTH)
    short, long = (choose(8, [size], ALPHA_S, BANDWIDTH) for size in (4000, SIZE))
    for name, seconds in both.by_algorithm.items():
        assert seconds == pytest.approx(2 * short.by_algorithm[name] + long.by_algorithm[name])


def test_ties_go_to_the_earlier_row() -> None:
    # With no latency halving-doubling and the sharded server both send the least there is.
    found = choose(8, [8000], 0.0, BANDWIDTH)
    assert found.by_algorithm["halving_doubling"] == found.predicted_s
    assert found.algorithm == "sharded_parameter_server"
    assert choose(8, [], ALPHA_S, BANDWIDTH).algorithm == "parameter_server"


@pytest.mark.parametrize(("world_size", "senders"), [(1, None), (4, 1)])
def test_where_nothing_is_sent_it_is_tree(world_size: int, senders: int | None) -> None:
    found = choose(world_size, [SIZE], ALPHA_S, BANDWIDTH, senders)
    assert (found.algorithm, found.predicted_s) == ("tree", 0)


def test_where_one_rank_of_each_host_sends_it_is_predicted_for_them() -> None:
    found = choose(24, [SIZE], ALPHA_S, BANDWIDTH, senders=6)
    messages_and_bytes = 6 * ALPHA_S + 6 * SIZE / BANDWIDTH
    assert found.by_algorithm["tree"] == pytest.approx(messages_and_bytes)
    # In tree order over 6 hosts, but not over the 10 ranks that the same name stands for.
    assert adds_in_tree_order("recursive_doubling", 6)
    assert "recursive_doubling" not in choose(10, [SIZE], ALPHA_S, BANDWIDTH, 6).by_algorithm
    assert "ring" not in choose(8, [SIZE], ALPHA_S, BANDWIDTH, senders=2).by_algorithm
    # And the other way round: over the 12 ranks, but not over 5 that send.
    assert adds_in_tree_order("recursive_doubling", 12)
    assert "recursive_doubling" not in choose(12, [SIZE], ALPHA_S, BANDWIDTH, 5).by_algorithm


def test_bytes_that_do_not_fill_an_element_count_as_one() -> None:
    for part, whole in ((1, 4), (5, 8), (4001, 4004)):
        of_part = choose(4, [part], ALPHA_S, BANDWIDTH)
        assert of_part.by_algorithm == choose(4, [whole], ALPHA_S, BANDWIDTH).by_algorithm
