"""What a schedule may say, what it counts, the one order of additions; the proof against schedules
that are wrong in every way that it must notice; and one rank's rounds, asked for alone.
"""

import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.exchange import ALGORITHMS, find_schedule
from firecaffe.exchange.collectives import COLLECTIVES
from firecaffe.exchange.proof import Proof, check, prove
from firecaffe.exchange.schedule import (
    ALL_TO_ALL,
    OwnRound,
    Round,
    Schedule,
    Transfer,
    from_rounds,
    lower_bound_elements,
    shard,
    shards,
)
from tests.kit.exchange import MAKERS, OVER_NODES, WORLD_SIZES, add, copy

REFUSED: dict[str, tuple[Round, str]] = {
    "source beyond the ranks": ((add(3, 0),), r"round 1: .* names a rank outside 0\.\.2"),
    "destination beyond the ranks": ((add(0, 3),), r"names a rank outside 0\.\.2"),
    "negative rank": ((add(-1, 0),), r"names a rank outside 0\.\.2"),
    "to itself": ((copy(1, 1),), "sends to itself"),
    "before the vector": ((add(0, 1, -1, 5),), r"leaves 0\.\.10"),
    "beyond the vector": ((add(0, 1, 5, 11),), r"leaves 0\.\.10"),
    "backwards": ((add(0, 1, 6, 5),), r"leaves 0\.\.10"),
    "two copies into one slice": ((copy(0, 2), copy(1, 2)), "overwrites what another"),
    "copy into an addition": ((add(0, 2), copy(1, 2)), "overwrites what another"),
    "addition into a copy": ((copy(0, 2), add(1, 2)), "overwrites what another"),
    "additions overlap": ((add(0, 2, 0, 6), add(1, 2, 5, 10)), "overlapping slices .* rank 2"),
    "addition inside another": ((add(0, 2), add(1, 2, 4, 6)), "overlapping slices .* rank 2"),
    "copies overlap": ((copy(0, 2, 0, 6), copy(1, 2, 5, 10)), "overlapping slices .* rank 2"),
    "sends what it overwrites": ((copy(0, 1), copy(1, 2)), "rank 1 sends what it is overwriting"),
    "sends a part of what it overwrites": (
        (copy(0, 1, 0, 6), add(1, 2, 5, 10)),
        "rank 1 sends what it is overwriting",
    ),
}


@pytest.mark.parametrize(("round_", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(round_: Round, message: str) -> None:
    harmless = (add(1, 0),)
    with pytest.raises(ValueError, match=message):
        check(from_rounds("by hand", 3, 10, [harmless, (add(0, 1, 3, 3), *round_)]))


ALLOWED: dict[str, Round] = {
    "several additions to one slice": (add(0, 2), add(1, 2)),
    "swap and add": (add(0, 1), add(1, 0)),
    "swap other slices": (copy(0, 1, 0, 5), copy(1, 0, 5, 10)),
    "neighboring slices": (copy(0, 2, 0, 5), add(1, 2, 5, 10)),
}


@pytest.mark.parametrize("round_", ALLOWED.values(), ids=ALLOWED)
def test_allows(round_: Round) -> None:
    check(from_rounds("by hand", 3, 10, (round_,)))


def test_what_is_empty_is_left_out() -> None:
    rounds = [[], [add(0, 1, 4, 4)], [add(0, 1), copy(1, 0, 2, 2)]]
    assert from_rounds("by hand", 2, 10, rounds).rounds == ((add(0, 1),),)
    by_rank = replace(from_rounds("by hand", 2, 10, rounds), of_rank=apart(rounds), whole=None)
    assert by_rank.rounds == ((add(0, 1),),)
    assert list(by_rank.rounds_of(1)) == [(2, [add(0, 1)])]


def apart(rounds: Sequence[Sequence[Transfer]]) -> Callable[[int], Iterator[OwnRound]]:
    """What each rank says of the rounds."""

    def of_rank(rank: int) -> Iterator[OwnRound]:
        for number, round_ in enumerate(rounds):
            yield number, [t for t in round_ if rank in (t.source, t.destination)]

    return of_rank


@pytest.mark.parametrize("forgetful", [0, 1])
def test_both_ends_must_know_of_a_transfer(forgetful: int) -> None:
    """In the same round, and with the same slice."""
    rounds = [[add(1, 0)], [copy(0, 1)]]
    whole = from_rounds("by hand", 2, 10, rounds)
    for told in ([[add(1, 0)], []], [[], [add(1, 0), copy(0, 1)]], [[add(1, 0)], [copy(0, 1, 1)]]):
        by_rank = [list(apart(told if rank == forgetful else rounds)(rank)) for rank in (0, 1)]
        own = [iter(each) for each in by_rank]
        wrong = replace(whole, of_rank=own.__getitem__, whole=None)
        with pytest.raises(ValueError, match=r"round \d: only one end knows of Transfer"):
            _ = wrong.rounds


def test_counts_of_a_schedule_written_by_hand() -> None:
    """Rank 0 hears from both others at once, then speaks to one of them."""
    rounds = ((add(1, 0, 0, 10), add(2, 0, 0, 10), copy(0, 1, 10, 14)), (copy(0, 2, 0, 7),))
    schedule = from_rounds("by hand", 3, 20, rounds)
    assert schedule.elements_of_busiest_rank() == 20  # rank 0 receives 10 + 10 and sends 4 + 7
    assert schedule.serial_elements() == 20 + 7
    assert schedule.serial_messages() == 2 + 1
    assert schedule.serial_additions() == 20
    assert list(schedule.transfers()) == [*rounds[0], *rounds[1]]


@pytest.mark.parametrize(("world_size", "bound"), [(1, 0), (2, 60), (3, 80), (4, 90), (6, 100)])
def test_lower_bound(world_size: int, bound: float) -> None:
    assert lower_bound_elements(world_size, 60) == pytest.approx(bound)


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_shards_cover_the_vector_evenly(num_elements: int, parts: int) -> None:
    slices = shards(num_elements, parts)
    assert slices == [shard(num_elements, parts, index) for index in range(parts)]
    assert len(slices) == parts
    assert slices[0][0] == 0
    assert slices[-1][1] == num_elements
    assert all(stop == start for (_, stop), (start, _) in pairwise(slices))
    lengths = {stop - start for start, stop in slices}
    assert max(lengths) - min(lengths) <= 1


RIGHT = Proof(complete=True, in_tree_order=True)
OTHER_ORDER = Proof(complete=True, in_tree_order=False)
WRONG = Proof(complete=False, in_tree_order=False)
BY_HAND: dict[str, tuple[int, tuple[Round, ...], Proof]] = {
    "one rank": (1, (), RIGHT),
    "swap": (2, ((add(0, 1), add(1, 0)),), RIGHT),
    "through rank 0": (2, ((add(1, 0),), (copy(0, 1),)), RIGHT),
    "through rank 1": (2, ((add(0, 1),), (copy(1, 0),)), RIGHT),
    "chain of three": (3, ((add(2, 1),), (add(1, 0),), (copy(0, 1), copy(0, 2))), OTHER_ORDER),
    "tree of three": (3, ((add(1, 0),), (add(2, 0),), (copy(0, 1), copy(0, 2))), RIGHT),
    "one round at a server": (3, ((add(2, 0), add(1, 0)), (copy(0, 1), copy(0, 2))), RIGHT),
    "nothing sent": (2, (), WRONG),
    "one way only": (2, ((add(0, 1),),), WRONG),
    "no way back": (3, ((add(1, 0), add(2, 0)), (copy(0, 1),)), WRONG),
    "a rank never heard": (3, ((add(1, 0),), (copy(0, 1), copy(0, 2))), WRONG),
    "added twice": (2, ((add(1, 0),), (add(1, 0),), (copy(0, 1),)), WRONG),
    "added twice in one round": (2, ((add(1, 0), add(1, 0)), (copy(0, 1),)), WRONG),
    "added where it should overwrite": (2, ((add(1, 0),), (add(0, 1),)), WRONG),
    "overwritten where it should add": (2, ((copy(1, 0),), (copy(0, 1),)), WRONG),
    "last element forgotten": (2, ((add(1, 0, 0, 9),), (copy(0, 1),)), WRONG),
    "first element forgotten": (2, ((add(1, 0, 1, 10),), (copy(0, 1),)), WRONG),
    "other slice comes back": (2, ((add(1, 0),), (copy(0, 1, 0, 9),)), WRONG),
    "wrong half added": (2, ((add(0, 1, 5, 10), add(1, 0, 0, 5)), (copy(0, 1, 5, 10),)), WRONG),
    # Both start from the vectors before the round, so each has only two of the three parts.
    "a sum used in its own round": (3, ((add(2, 1), add(1, 0)), (copy(0, 1), copy(0, 2))), WRONG),
}


@pytest.mark.parametrize(("world_size", "rounds", "proof"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(world_size: int, rounds: tuple[Round, ...], proof: Proof) -> None:
    assert prove(from_rounds("by hand", world_size, 10, rounds)) == proof


def test_tree_order_is_lost_in_one_element_alone() -> None:
    """Four ranks: the last element is summed as a chain, all others by the tree."""
    tree = [[add(1, 0, 0, 9), add(3, 2, 0, 9)], [add(2, 0, 0, 9)]]
    chain = [[add(3, 2, 9, 10)], [add(2, 1, 9, 10)], [add(1, 0, 9, 10)]]
    down = tuple(copy(0, rank) for rank in (1, 2, 3))
    rounds = (*map(tuple, [*tree, *chain]), down)
    assert prove(from_rounds("by hand", 4, 10, rounds)) == OTHER_ORDER


EVERY = {**ALGORITHMS, **{f"{k} {n}": m for k, of in COLLECTIVES.items() for n, m in of.items()}}


@pytest.mark.parametrize("name", EVERY)
def test_every_transfer_of_every_schedule_is_needed(name: str) -> None:
    """With its whole slice, but in an all-to-all, whose blocks are proved as wholes."""
    for world_size in (2, 3, 5, 8):
        schedule = EVERY[name](world_size, 4 * world_size**2)
        for index, round_ in enumerate(schedule.rounds):
            for place, transfer in enumerate(round_):
                rest = round_[:place] + round_[place + 1 :]
                shorter = transfer._replace(stop=transfer.stop - 1)
                for changed in [rest] if schedule.kind == ALL_TO_ALL else [rest, (*rest, shorter)]:
                    rounds = (*schedule.rounds[:index], changed, *schedule.rounds[index + 1 :])
                    assert not prove(replace(schedule, whole=rounds)).complete


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
