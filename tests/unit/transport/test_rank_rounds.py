"""What one rank does round by round: what may be posted ahead, where scratch is, whose turn it is.

Held against sets of elements, one by one, for all algorithms.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations

import pytest

from firecaffe.exchange import ALGORITHMS, double_tree, find_schedule, pipelined_tree
from firecaffe.exchange.schedule import Schedule, Transfer, from_rounds
from firecaffe.transport.rank_rounds import (
    AHEAD,
    RankRound,
    rounds_of_rank,
    scratch_elements,
)

MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    **ALGORITHMS,
    "pipelined_tree, many segments": partial(pipelined_tree.schedule, segment_elements=7),
    "double_tree, many segments": partial(double_tree.schedule, segment_elements=7),
    "hierarchical(tree,ring)": find_schedule("hierarchical(tree,ring)", 1),
}
SIZES = (0, 1, 5, 61)


def ranks_of(algorithm: str, world_size: int) -> Iterator[list[RankRound]]:
    for num_elements in SIZES:
        schedule = MAKERS[algorithm](world_size, num_elements)
        for rank in range(world_size):
            yield rounds_of_rank(schedule, rank)


def used(round_: RankRound) -> set[int]:
    """Elements of the vector that the round reads or writes."""
    slices = [
        *((start, stop) for _, start, stop, _ in round_.sends),
        *((receive.start, receive.stop) for receive in round_.receives),
        *((addition.start, addition.stop) for addition in round_.additions),
    ]
    return set(chain.from_iterable(range(*slice_) for slice_ in slices))


def overwritten(round_: RankRound) -> set[int]:
    """Elements of the vector that receives write as soon as they are posted."""
    receives = [r for r in round_.receives if r.scratch is None]
    return set(chain.from_iterable(range(r.start, r.stop) for r in receives))


def parts(round_: RankRound) -> list[range]:
    """The slices of scratch that receives write as soon as they are posted."""
    return [
        range(r.scratch, r.scratch + r.stop - r.start)
        for r in round_.receives
        if r.scratch is not None
    ]


@pytest.mark.parametrize("algorithm", MAKERS)
def test_only_what_is_still_in_use_goes_over_scratch(algorithm: str) -> None:
    """All receives are posted AHEAD rounds early: none overwrites what those rounds touch."""
    for world_size in range(1, 18):
        for rounds in ranks_of(algorithm, world_size):
            for index, round_ in enumerate(rounds):
                before = set().union(*map(used, rounds[max(0, index - AHEAD) : index]))
                assert before.isdisjoint(overwritten(round_))
                for start, stop, _ in round_.detours:
                    assert not before.isdisjoint(range(start, stop))


@pytest.mark.parametrize("algorithm", MAKERS)
def test_parts_in_scratch_at_one_time_do_not_overlap(algorithm: str) -> None:
    for world_size in range(1, 18):
        for rounds in ranks_of(algorithm, world_size):
            size = scratch_elements(rounds)
            for first in range(len(rounds)):
                posted = [part for r in rounds[first : first + AHEAD + 1] for part in parts(r)]
                assert all(0 <= part.start < part.stop <= size for part in posted)
                assert all(set(a).isdisjoint(b) for a, b in combinations(posted, 2))


@pytest.mark.parametrize("algorithm", MAKERS)
def test_what_comes_over_scratch_is_added_or_copied(algorithm: str) -> None:
    for world_size in range(1, 18):
        for rounds in ranks_of(algorithm, world_size):
            for round_ in rounds:
                received = {
                    (r.source, r.start, r.stop, r.scratch)
                    for r in round_.receives
                    if r.scratch is not None
                }
                added = {
                    (source, addition.start, addition.stop, offset)
                    for addition in round_.additions
                    for source, offset in addition.parts.items()
                }
                copied = set(round_.detours)
                assert {r for r in received if r[1:] not in copied} == added
                assert copied <= {r[1:] for r in received}


def aheads(algorithm: str, world_size: int, rank: int) -> list[int]:
    schedule = ALGORITHMS[algorithm](world_size, 64)
    return [round_.ahead for round_ in rounds_of_rank(schedule, rank)]


def test_only_a_peer_of_the_round_that_is_due_is_told_early() -> None:
    """A leaf of the tree hears of its parent's total while it sends; a ring's neighbor stays. Of
    partners that change, only the last one is met twice running.
    """
    assert aheads("tree", 4, rank=1) == [1, 0]
    assert aheads("tree", 4, rank=0)[0] == 2  # a root sends nothing while it hears its children
    assert aheads("ring", 4, rank=2) == [2, 2, 2, 2, 1, 0]
    assert aheads("halving_doubling", 8, rank=5) == [0, 0, 1, 0, 0, 0]


def test_what_depends_on_timing_is_not_executed() -> None:
    both = (Transfer(0, 2, 0, 4, reduce=False), Transfer(1, 2, 0, 4, reduce=False))
    schedule = from_rounds("race", 3, 4, [both])
    assert rounds_of_rank(schedule, 0)  # a sender's own part is no race
    with pytest.raises(ValueError, match="overwrites"):
        rounds_of_rank(schedule, 2)
