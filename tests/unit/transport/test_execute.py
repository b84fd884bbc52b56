"""The executor ends with the bits of the interpreter, over a network that is as unhelpful as can
be: all-reduces, collectives of every kind, and ranks with several inputs. The interpreter adds as
the proof says; and what a rank does round by round.
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import chain, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.exchange import ALGORITHMS, find_schedule, fold
from firecaffe.exchange.collectives import COLLECTIVES
from firecaffe.exchange.leaves import equal_shares, sum_of_nodes, tree_sum
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Transfer, from_rounds, shards
from firecaffe.measure.known_sum import interpret
from firecaffe.transport.execute import (
    AHEAD,
    ActivePiece,
    RankRound,
    execute,
    rounds_of_rank,
    scratch_elements,
)
from tests.kit.exchange import (
    MAKERS,
    OVER_NODES,
    WORLD_SIZES,
    MakeSchedule,
    add,
    copy,
    random_vectors,
    same_bits,
)
from tests.kit.exchange_network import (
    Choose,
    DeadlockError,
    Network,
    eager,
    lazy,
    receiver_last,
    shuffled,
)

COLLECTIVE = {
    f"{kind} {name}": make
    for kind, by_name in COLLECTIVES.items()
    for name, make in by_name.items()
}


@cache
def find(algorithm: str, ranks_per_node: int) -> MakeSchedule:
    return MAKERS[algorithm] if algorithm in MAKERS else find_schedule(algorithm, ranks_per_node)


def check(
    make: MakeSchedule,
    world_size: int,
    num_elements: int,
    num_pieces: int,
    choose: Choose,
    at_once: bool = False,
) -> None:
    """All ranks end with the bits of the interpreter.

    Raises: DeadlockError, HazardError.
    """
    vectors = random_vectors(world_size, num_elements)
    held = [vector.clone() for vector in vectors]
    parts = shards(num_elements, num_pieces)
    schedules = [make(world_size, stop - start) for start, stop in parts]
    network = Network(world_size, choose, at_once)

    def pieces_of(rank: int) -> Iterator[ActivePiece]:
        for tag, ((start, stop), schedule) in enumerate(zip(parts, schedules, strict=True)):
            rounds = rounds_of_rank(schedule, rank)
            scratch = torch.full((scratch_elements(rounds),), torch.nan)
            part = held[rank][start:stop]
            yield ActivePiece(part, rounds, scratch, network.start(rank, tag), rank, at_once)

    network.run([partial(execute, list(pieces_of(rank))) for rank in range(world_size)])
    for (start, stop), schedule in zip(parts, schedules, strict=True):
        expected = interpret(schedule, [vector[start:stop] for vector in vectors])
        for rank in range(world_size):
            assert same_bits(held[rank][start:stop], expected[rank])


@pytest.mark.parametrize("algorithm", MAKERS)
def test_no_order_of_arrival_changes_a_bit_or_stops_a_rank(algorithm: str) -> None:
    for world_size in (*range(1, 10), 12, 17):
        for num_elements, choose in ((3, eager), (101, lazy), (3, lazy), (101, receiver_last)):
            check(MAKERS[algorithm], world_size, num_elements, 1, choose)


@pytest.mark.parametrize("algorithm", OVER_NODES)
def test_nodes(algorithm: str) -> None:
    for ranks_per_node in [2, 3, 4]:
        for nodes in (1, 2, 3, 4):
            make = find(algorithm, ranks_per_node)
            check(make, ranks_per_node * nodes, 31, 1 + nodes % 2, lazy)


@pytest.mark.parametrize("num_pieces", [2, 3, 4])
@pytest.mark.parametrize("algorithm", MAKERS)
def test_pieces_do_not_wait_for_each_other(algorithm: str, num_pieces: int) -> None:
    for world_size, choose in ((3, lazy), (6, eager), (8, lazy), (9, receiver_last)):
        check(MAKERS[algorithm], world_size, 29 * num_pieces + 1, num_pieces, choose)


@given(
    st.sampled_from([*MAKERS, *OVER_NODES]),
    *(st.integers(1, 4), st.integers(1, 6), st.integers(0, 150), st.integers(1, 4)),
    st.integers(0, 2**32),
)
@settings(max_examples=100, derandomize=True)
def test_any_order_of_arrival(
    algorithm: str, on_node: int, nodes: int, num_elements: int, num_pieces: int, seed: int
) -> None:
    make = find(algorithm, on_node)
    check(make, on_node * nodes, num_elements, num_pieces, shuffled(seed))


@pytest.mark.parametrize("algorithm", MAKERS)
def test_a_backend_that_starts_messages_together(algorithm: str) -> None:
    """As NCCL does: a call is one kernel, and a stream runs one after the other."""
    for world_size in [2, 3, 5, 8, 13]:
        for choose in (eager, lazy):
            check(MAKERS[algorithm], world_size, 61, 1, choose, at_once=True)


@pytest.mark.parametrize("collective", COLLECTIVE)
def test_collectives_of_every_kind(collective: str) -> None:
    for world_size in (1, 2, 3, 5, 8):
        for choose in (eager, lazy, receiver_last):
            check(COLLECTIVE[collective], world_size, 61, 1, choose)


def by_hand(*rounds: tuple[Transfer, ...]) -> MakeSchedule:
    return lambda world_size, num_elements: from_rounds("by hand", world_size, num_elements, rounds)


def test_a_slow_send_keeps_what_it_sends() -> None:
    """Rank 0 sends, and at once adds to, or is given, what it sends."""
    for back in (add(2, 0, 0, 4), copy(2, 0, 0, 4)):
        check(by_hand((copy(0, 1, 0, 4),), (back,)), 3, 4, 1, lazy)


def test_a_receive_posted_early_leaves_what_earlier_rounds_use() -> None:
    """What rank 0 sends in round 1, or adds to, is overwritten in round 2 by one with no wait."""
    for middle in (copy(0, 2, 2, 6), add(2, 0, 2, 6)):
        check(by_hand((add(0, 2, 6, 8),), (middle,), (copy(1, 0, 0, 4),)), 3, 8, 1, eager)


def test_the_network_notices_a_deadlock() -> None:
    """Rank 0 wants what rank 1 sends in the round after."""
    network = Network(2, eager, at_once=False)

    def wait_first(rank: int) -> None:
        memory = torch.zeros(1)
        [received] = network.start(rank, 0)([(False, 1 - rank, memory)])
        received.wait()
        network.start(rank, 0)([(True, 1 - rank, memory)])

    with pytest.raises(DeadlockError, match="0, 1"):
        network.run([partial(wait_first, 0), partial(wait_first, 1)])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("world_size", "num_leaves"), [(2, 2), (2, 7), (3, 16), (5, 11), (6, 6)])
@pytest.mark.parametrize(("num_elements", "choose"), [(3, eager), (101, lazy), (61, receiver_last)])
def test_fold_adds_as_the_tree_over_leaves(
    world_size: int, num_leaves: int, at_once: bool, early: bool, num_elements: int, choose: Choose
) -> None:
    """Over nodes that ranks hold, in whatever order they arrive: the bits of all leaves on one."""
    leaves = random_vectors(num_leaves, num_elements)
    expected = tree_sum(leaves, torch.add)
    inputs = fold.inputs_of(num_leaves, equal_shares(num_leaves, world_size))
    schedule = fold.schedule(inputs, num_leaves, num_elements, early=early)
    nodes = [node for own in inputs for node in own]
    sums = [
        tree_sum(leaves[node.index << node.level : (node.index + 1) << node.level], torch.add)
        for node in nodes
    ]
    assert all(same_bits(each, expected) for each in interpret(schedule, sums))
    network = Network(world_size, choose, at_once)
    totals = [torch.empty(num_elements) for _ in range(world_size)]

    def run(rank: int) -> None:
        """The early rounds by themselves, before the rest."""
        rounds = rounds_of_rank(schedule, rank)
        scratch = torch.full((scratch_elements(rounds),), torch.nan)
        early = [each for each in rounds if each.number < schedule.early_rounds]
        for part in (*([each] for each in early), rounds[len(early) :]):
            execute([piece(rank, part, scratch)])

    def piece(rank: int, rounds: list[RankRound], scratch: Tensor) -> ActivePiece:
        return ActivePiece(
            totals[rank], rounds, scratch, network.start(rank, 0), rank, at_once,
            inputs={number: sums[number].clone() for number in schedule.own_inputs(rank)},
            sum_inputs=lambda parts: sum_of_nodes(nodes, parts, num_leaves, Tensor.add_),
        )  # fmt: skip

    network.run([partial(run, rank) for rank in range(world_size)])
    assert all(same_bits(total, expected) for total in totals)


@pytest.mark.parametrize("algorithm", [*MAKERS, "hierarchical(tree,ring)"])
def test_interpreted_bits_are_those_of_the_tree_where_the_proof_says_so(algorithm: str) -> None:
    """And the inputs stay as they are."""
    for world_size in WORLD_SIZES:
        vectors = random_vectors(world_size, 1009)
        before = [vector.clone() for vector in vectors]
        results = interpret(find(algorithm, 1)(world_size, 1009), vectors)
        tree = tree_sum(before, torch.add)
        assert len(results) == world_size
        assert all(torch.allclose(result, tree, atol=1e-4) for result in results)
        assert all(same_bits(result, results[0]) for result in results)
        in_order = adds_in_tree_order(algorithm.split(", ")[0], world_size)
        assert same_bits(results[0], tree) == in_order
        assert all(map(same_bits, vectors, before))


def test_transfers_read_what_was_there_when_the_round_began() -> None:
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
    results = interpret(
        from_rounds("by hand", 3, 2, ((add(0, 1, 0, 2), add(1, 2, 0, 2)),)), vectors
    )
    assert [result.tolist() for result in results] == [[1, 2], [11, 22], [110, 220]]


def used(round_: RankRound) -> set[int]:
    """Elements of the vector that the round reads or writes."""
    slices = [
        *((start, stop) for _, start, stop, _ in round_.sends),
        *((receive.start, receive.stop) for receive in round_.receives),
        *((addition.start, addition.stop) for addition in round_.additions),
    ]
    return set(chain.from_iterable(range(*slice_) for slice_ in slices))


@pytest.mark.parametrize("algorithm", [*MAKERS, "hierarchical(tree,ring)"])
def test_only_what_is_still_in_use_goes_over_scratch(algorithm: str) -> None:
    """All receives are posted AHEAD rounds early: none overwrites what those rounds touch."""
    for world_size, num_elements in product(WORLD_SIZES, (0, 1, 5, 61)):
        schedule = find(algorithm, 1)(world_size, num_elements)
        for rank in range(world_size):
            rounds = rounds_of_rank(schedule, rank)
            for index, round_ in enumerate(rounds):
                before = set().union(*map(used, rounds[max(0, index - AHEAD) : index]))
                for receive in round_.receives:
                    if receive.scratch is None:
                        assert before.isdisjoint(range(receive.start, receive.stop))
                for start, stop, _ in round_.detours:
                    assert not before.isdisjoint(range(start, stop))


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
