"""Schedules run on real numbers; and what one rank does of them round by round: what may be posted
ahead, where scratch is, whose turn it is, held against sets of elements, one by one.
"""

from collections.abc import Iterator
from itertools import chain, combinations, product

import pytest
import torch
from torch import Tensor

from firecaffe.exchange import ALGORITHMS, find_schedule
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Schedule, from_rounds
from firecaffe.transport.execute import AHEAD, RankRound, rounds_of_rank, scratch_elements
from firecaffe.transport.interpret import interpret
from tests.kit.exchange import MAKERS, OVER_NODES, WORLD_SIZES, add, copy, random_vectors, same_bits


def tree_sum(vectors: list[Tensor]) -> Tensor:
    """The fixed tree from its root: the largest power of two of ranks, and the others."""
    if len(vectors) == 1:
        return vectors[0]
    left = 1 << (len(vectors) - 1).bit_length() - 1
    return tree_sum(vectors[:left]) + tree_sum(vectors[left:])


@pytest.mark.parametrize("algorithm", MAKERS)
def test_sums_are_exact(algorithm: str) -> None:
    """Of whole numbers, which are so in any order; and the inputs stay as they are."""
    for world_size, num_elements in product(WORLD_SIZES, (0, 1, 64, 1009, 4099)):
        generator = torch.Generator().manual_seed(world_size)
        shape = (world_size, num_elements)
        vectors = list(torch.randint(-(2**16), 2**16, shape, generator=generator).float())
        before = [vector.clone() for vector in vectors]
        results = interpret(MAKERS[algorithm](world_size, num_elements), vectors)
        assert len(results) == world_size
        assert all(torch.equal(result, torch.stack(before).sum(dim=0)) for result in results)
        assert all(same_bits(vector, old) for vector, old in zip(vectors, before, strict=True))


def check_order(schedule: Schedule, in_tree_order: bool) -> None:
    """The sum on all ranks, and the bits of the tree if it is so."""
    vectors = random_vectors(schedule.world_size, 1009)
    results = interpret(schedule, vectors)
    tree = tree_sum(vectors)
    assert all(torch.allclose(result, tree, atol=1e-4) for result in results)
    assert all(same_bits(result, results[0]) for result in results)
    assert same_bits(results[0], tree) == in_tree_order


@pytest.mark.parametrize("algorithm", MAKERS)
def test_bits_are_those_of_the_tree_where_the_proof_says_so(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        in_order = adds_in_tree_order(algorithm.split(",")[0], world_size)
        check_order(MAKERS[algorithm](world_size, 1009), in_order)


@pytest.mark.parametrize("algorithm", OVER_NODES)
def test_nodes(algorithm: str) -> None:
    for on_node, nodes in product((1, 2, 3, 4), (1, 2, 3, 4)):
        in_order = adds_in_tree_order(algorithm, on_node * nodes, on_node)
        check_order(find_schedule(algorithm, on_node)(on_node * nodes, 1009), in_order)


def test_transfers_read_what_was_there_when_the_round_began() -> None:
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
    results = interpret(
        from_rounds("by hand", 3, 2, ((add(0, 1, 0, 2), add(1, 2, 0, 2)),)), vectors
    )
    assert [result.tolist() for result in results] == [[1, 2], [11, 22], [110, 220]]


@pytest.mark.parametrize("algorithm", MAKERS)
def test_a_pair_of_ranks_has_one_message_a_round_each_way(algorithm: str) -> None:
    """With one message from each rank there is nothing to confuse."""
    for world_size, num_elements in product(WORLD_SIZES, (1, 64, 1009)):
        for round_ in MAKERS[algorithm](world_size, num_elements).rounds:
            pairs = [(t.source, t.destination) for t in round_]
            assert len(set(pairs)) == len(pairs)


ALL = {**MAKERS, "hierarchical(tree,ring)": find_schedule("hierarchical(tree,ring)", 1)}


def ranks_of(algorithm: str) -> Iterator[list[RankRound]]:
    for world_size, num_elements in product(WORLD_SIZES, (0, 1, 5, 61)):
        schedule = ALL[algorithm](world_size, num_elements)
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


@pytest.mark.parametrize("algorithm", ALL)
def test_only_what_is_still_in_use_goes_over_scratch(algorithm: str) -> None:
    """All receives are posted AHEAD rounds early: none overwrites what those rounds touch."""
    for rounds in ranks_of(algorithm):
        for index, round_ in enumerate(rounds):
            before = set().union(*map(used, rounds[max(0, index - AHEAD) : index]))
            for receive in round_.receives:
                if receive.scratch is None:
                    assert before.isdisjoint(range(receive.start, receive.stop))
            for start, stop, _ in round_.detours:
                assert not before.isdisjoint(range(start, stop))


@pytest.mark.parametrize("algorithm", ALL)
def test_parts_in_scratch_at_one_time_do_not_overlap(algorithm: str) -> None:
    for rounds in ranks_of(algorithm):
        size = scratch_elements(rounds)
        for first in range(len(rounds)):
            posted = [
                range(r.scratch, r.scratch + r.stop - r.start)
                for round_ in rounds[first : first + AHEAD + 1]
                for r in round_.receives
                if r.scratch is not None
            ]
            assert all(0 <= part.start < part.stop <= size for part in posted)
            assert all(set(a).isdisjoint(b) for a, b in combinations(posted, 2))


@pytest.mark.parametrize("algorithm", ALL)
def test_what_comes_over_scratch_is_added_or_copied(algorithm: str) -> None:
    for rounds in ranks_of(algorithm):
        for round_ in rounds:
            over = (r for r in round_.receives if r.scratch is not None)
            received = {(r.source, r.start, r.stop, r.scratch) for r in over}
            added = {
                (source, addition.start, addition.stop, offset)
                for addition in round_.additions
                for source, offset in addition.parts.items()
            }
            copied = set(round_.detours)
            assert {r for r in received if r[1:] not in copied} == added
            assert copied <= {r[1:] for r in received}


def test_a_rank_skips_the_rounds_in_which_it_does_nothing() -> None:
    schedule = ALGORITHMS["tree"](4, 8)
    assert [len(rounds_of_rank(schedule, rank)) for rank in range(4)] == [4, 2, 4, 2]


def test_scratch_holds_every_part_that_is_added_in_a_round() -> None:
    [push, pull] = rounds_of_rank(ALGORITHMS["parameter_server"](5, 100), 0)
    assert (scratch_elements([push]), scratch_elements([pull])) == (4 * 100, 0)


def test_only_a_peer_of_the_round_that_is_due_is_told_early() -> None:
    """A leaf of the tree hears of its parent's total while it sends; a ring's neighbor stays. Of
    partners that change, only the last one is met twice running. A root sends nothing while it
    hears its children.
    """

    def aheads(algorithm: str, world_size: int, rank: int) -> list[int]:
        schedule = ALGORITHMS[algorithm](world_size, 64)
        return [round_.ahead for round_ in rounds_of_rank(schedule, rank)]

    assert aheads("tree", 4, rank=1) == [1, 0]
    assert aheads("tree", 4, rank=0)[0] == 2
    assert aheads("ring", 4, rank=2) == [2, 2, 2, 2, 1, 0]
    assert aheads("halving_doubling", 8, rank=5) == [0, 0, 1, 0, 0, 0]


def test_what_depends_on_timing_is_not_executed() -> None:
    schedule = from_rounds("race", 3, 4, [(copy(0, 2, 0, 4), copy(1, 2, 0, 4))])
    assert rounds_of_rank(schedule, 0)  # a sender's own part is no race
    with pytest.raises(ValueError, match="overwrites"):
        rounds_of_rank(schedule, 2)
