"""Measuring over real process groups: what is measured, and what is refused before it is."""

import dataclasses

import pytest
import torch

from firecaffe.comm.bench_exchange import Timing, time_exchanges
from firecaffe.comm.exchange import Exchange
from firecaffe.comm.measure import Link, measure_link
from firecaffe.comm.world import World, join
from firecaffe.errors import NotIdenticalError
from firecaffe.exchange import ALGORITHMS, EXCHANGES, ring
from firecaffe.exchange.schedule import Schedule
from tests.world import Ranks


def link_between(first: int, second: int) -> Link:
    with join("cpu") as world:
        return measure_link(world, first, second, least_stream_s=0.001)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 0)])
def test_all_ranks_learn_what_the_first_end_measured(ranks: Ranks, first: int, second: int) -> None:
    link, *others = ranks.run(3, link_between, first, second)
    assert others == [link, link]
    assert (link.first, link.second) == (first, second)
    assert len(link.latency_samples_s) == 100
    assert len(link.bandwidth_samples_bytes_per_s) == 5
    assert min(link.latency_samples_s) > 0
    assert min(link.bandwidth_samples_bytes_per_s) > 0


def no_link_to_itself() -> str:
    with join("cpu") as world, pytest.raises(ValueError, match="two ends") as caught:
        measure_link(world, 0, 0)
    return str(caught.value)


def test_a_link_has_two_ends(ranks: Ranks) -> None:
    assert "rank 0 and rank 0" in ranks.run(2, no_link_to_itself)[0]


def timings(algorithms: list[str], sizes_bytes: list[int], repetitions: int) -> list[Timing]:
    with join("cpu") as world:
        return time_exchanges(world, algorithms, sizes_bytes, repetitions)


def test_every_exchange_at_every_size_with_the_slowest_ranks_time(ranks: Ranks) -> None:
    found, *others = ranks.run(3, timings, list(EXCHANGES), [4, 400_000], 2)
    assert others == [found, found]
    assert [(t.size_bytes, t.algorithm) for t in found] == [
        (size, name) for size in (4, 400_000) for name in EXCHANGES
    ]
    assert {t.world_size for t in found} == {3}
    assert {len(t.samples_s) for t in found} == {2}
    assert min(min(t.samples_s) for t in found) > 0


def turns_and_times() -> tuple[list[str], list[Timing]]:
    """Whose turn it was, and what is told where rank r takes r + 1 seconds for each."""
    turns = []

    def time_once(world: World, exchange: Exchange, vector: torch.Tensor) -> float:
        turns.append(exchange.algorithm)
        exchange.all_reduce(vector)
        return world.rank + 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.comm.bench_exchange._time_once", time_once)
        found = timings(["native", "tree", "ring"], [8, 64], 3)
    return turns, found


def test_exchanges_take_turns_and_the_slowest_rank_counts(ranks: Ranks) -> None:
    forth, back = ["native", "tree", "ring"], ["ring", "tree", "native"]
    for turns, found in ranks.run(2, turns_and_times):
        assert turns == 2 * [*back, *forth, *back, *forth]  # the first of each size warms up
        assert {t.samples_s for t in found} == {(2.0, 2.0, 2.0)}


def forgetful_ring(world_size: int, num_elements: int) -> Schedule:
    """A ring whose last round is missing: one shard of every rank is not the sum."""
    whole = ring.schedule(world_size, num_elements)
    return dataclasses.replace(whole, rounds=whole.rounds[:-1])


def refusal_of_a_wrong_sum() -> str:
    ALGORITHMS["ring"] = forgetful_ring  # in this rank's own process
    return refusal(["native", "tree", "ring"])


def refusal_of_another_order() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.comm.check_exchange.adds_in_tree_order", lambda *_: True)
        return refusal(["tree", "ring"])


class WrongLater(Exchange):
    """Right when it is checked, and then wrong on the last rank."""

    calls = 0

    def all_reduce(self, vector: torch.Tensor) -> None:
        super().all_reduce(vector)
        self.calls += self.algorithm == "ring"
        if self.calls > 2 and self.world.rank == self.world.world_size - 1:
            vector[-1] += 1


def refusal_of_a_sum_that_goes_wrong_later() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.comm.bench_exchange.Exchange", WrongLater)
        return refusal(["native", "ring"])


def refusal(algorithms: list[str]) -> str:
    with join("cpu") as world, pytest.raises(NotIdenticalError) as caught:
        time_exchanges(world, algorithms, [4000], 3)
    return str(caught.value)


def test_a_wrong_sum_is_refused_on_every_rank(ranks: Ranks) -> None:
    first, *others = ranks.run(2, refusal_of_a_wrong_sum)
    assert others == [first]
    assert first.startswith("ring over 2 ranks, 4000 bytes: the sum is wrong: element ")
    assert first.endswith(" on rank 0; no time of a wrong sum is shown")


def test_another_order_of_additions_is_refused(ranks: Ranks) -> None:
    first, *others = ranks.run(4, refusal_of_another_order)
    assert others == [first] * 3
    assert first.startswith("ring over 4 ranks, 4000 bytes: the bits are not the tree's: element ")


def test_a_sum_that_goes_wrong_while_it_is_timed_is_refused(ranks: Ranks) -> None:
    first, second = ranks.run(2, refusal_of_a_sum_that_goes_wrong_later)
    assert first == second
    assert first.startswith("ring over 2 ranks, 4000 bytes: element 999 of 1000 is ")
    assert "on rank 1, after a first sum that was right" in first
