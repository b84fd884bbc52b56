"""One rank's rounds, asked for alone: what they say of all ranks, and how few they are."""

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from firecaffe.exchange import ALGORITHMS, find_schedule
from firecaffe.exchange.schedule import Schedule
from tests.kit.exchange import MAKERS, OVER_NODES, WORLD_SIZES

ALL = {**MAKERS, "nodes of one": find_schedule("hierarchical(tree,ring)", 1)}
MANY = 4096
ELEMENTS = 7_000_000


def schedules(name: str) -> Iterator[Schedule]:
    if name in OVER_NODES:
        for nodes in (1, 2, 3, 4, 5):
            for size in (1, 61, 1009):
                yield find_schedule(name, 3)(3 * nodes, size)
    else:
        for world_size in (*WORLD_SIZES, 24, 31, 33):
            for size in (1, 61, 400 if "segments" in name else 40_003):
                yield ALL[name](world_size, size)


@pytest.mark.parametrize("name", [*ALL, *OVER_NODES])
def test_what_is_said_of_all_ranks_is_so(name: str) -> None:
    """Counts, the ranks that are enough to know each round's busiest port, and rounds by number."""
    for schedule in schedules(name):
        transfers = list(schedule.transfers())
        assert schedule.sent_elements == sum(t.num_elements for t in transfers)
        if schedule.num_elements >= 10 * schedule.world_size:
            assert schedule.num_messages == len(transfers)
        by_all = replace(schedule, busiest=range(schedule.world_size))
        assert schedule.serial_messages() == by_all.serial_messages()
        assert schedule.serial_elements() == by_all.serial_elements()
        assert schedule.serial_additions() == by_all.serial_additions()
        for rank in range(schedule.world_size):
            numbers = [number for number, _ in schedule.rounds_of(rank)]
            assert numbers == sorted(set(numbers))
            assert not numbers or 0 <= numbers[0] <= numbers[-1] < schedule.num_rounds


TRANSFERS = {
    "parameter_server": 2 * (MANY - 1),
    "sharded_parameter_server": 4 * (MANY - 1),
    "tree": 2 * 12,
    "pipelined_tree": 2 * 12 * 214,
    "double_tree": 3 * 214,
    "ring": 4 * (MANY - 1),
    "recursive_doubling": 2 * 12,
    "halving_doubling": 4 * 12,
}
"""At rank 0 of so many; of a root in the trees, 214 segments; of a leaf in one of two trees."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_of_thousands_is_asked_for_its_own_transfers_alone(algorithm: str) -> None:
    """And neither pricing nor tree order asks any but the busiest."""
    schedule = ALGORITHMS[algorithm](MANY, ELEMENTS)
    tracemalloc.start()
    own = list(schedule.rounds_of(0))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6
    assert sum(len(transfers) for _, transfers in own) == TRANSFERS[algorithm]
    assert schedule.busiest is None or len(schedule.busiest) <= 13
    assert (schedule.busiest is None) == (algorithm in ("ring", "double_tree"))


@pytest.mark.parametrize("name", [*ALGORITHMS, "hierarchical(tree,halving_doubling)"])
@pytest.mark.parametrize("world_size", [MANY, 4080])
def test_two_ranks_of_thousands_say_the_same(name: str, world_size: int) -> None:
    schedule = find_schedule(name, 8 if name.startswith("h") else 1)(world_size, 100_003)
    numbers = random.Random(world_size)
    rounds_of = cache(lambda rank: dict(schedule.rounds_of(rank)))
    for rank in (0, world_size - 1, numbers.randrange(world_size)):
        own = [(number, t) for number, ts in schedule.rounds_of(rank) for t in ts]
        for number, t in numbers.sample(own, min(3, len(own))):
            assert rank in (t.source, t.destination)
            other = t.source + t.destination - rank
            assert t in rounds_of(other)[number]
