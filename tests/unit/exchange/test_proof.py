"""The proof against schedules that are wrong in every way that it must notice."""

from collections.abc import Iterable

import pytest

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.proof import Proof, prove
from firecaffe.exchange.schedule import Round, Schedule, Transfer, from_rounds

RIGHT = Proof(complete=True, in_tree_order=True)
OTHER_ORDER = Proof(complete=True, in_tree_order=False)
WRONG = Proof(complete=False, in_tree_order=False)


def add(source: int, destination: int, start: int = 0, stop: int = 10) -> Transfer:
    return Transfer(source, destination, start, stop, reduce=True)


def copy(source: int, destination: int, start: int = 0, stop: int = 10) -> Transfer:
    return Transfer(source, destination, start, stop, reduce=False)


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


def with_rounds(schedule: Schedule, rounds: Iterable[Round]) -> Schedule:
    return from_rounds(schedule.algorithm, schedule.world_size, schedule.num_elements, rounds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_every_transfer_of_every_algorithm_is_needed(algorithm: str, world_size: int) -> None:
    schedule = ALGORITHMS[algorithm](world_size, 4 * world_size)
    for index, round_ in enumerate(schedule.rounds):
        for left_out in range(len(round_)):
            rest = round_[:left_out] + round_[left_out + 1 :]
            rounds = (*schedule.rounds[:index], rest, *schedule.rounds[index + 1 :])
            assert not prove(
                from_rounds("by hand", schedule.world_size, schedule.num_elements, rounds)
            ).complete


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_transfer_of_every_algorithm_needs_its_whole_slice(algorithm: str) -> None:
    schedule = ALGORITHMS[algorithm](5, 20)
    for index, round_ in enumerate(schedule.rounds):
        for place, transfer in enumerate(round_):
            shorter = transfer._replace(stop=transfer.stop - 1)
            changed = (*round_[:place], shorter, *round_[place + 1 :])
            rounds = (*schedule.rounds[:index], changed, *schedule.rounds[index + 1 :])
            assert not prove(
                from_rounds("by hand", schedule.world_size, schedule.num_elements, rounds)
            ).complete
