"""Schedules run on real numbers: all ranks in one process, and rank by rank through queues."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from firecaffe.exchange import ALGORITHMS, ROOTED, double_tree, find_schedule, pipelined_tree
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Schedule, Transfer, from_rounds
from firecaffe.transport.interpret import interpret
from firecaffe.transport.rank_rounds import RankRound, rounds_of_rank, scratch_elements

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    **ALGORITHMS,
    "pipelined_tree, many segments": partial(pipelined_tree.schedule, segment_elements=100),
    "double_tree, many segments": partial(double_tree.schedule, segment_elements=100),
}
WORLD_SIZES = range(1, 18)
SIZES = (0, 1, 64, 1009, 4099)


def whole_numbers(world_size: int, num_elements: int) -> list[Tensor]:
    """Float tensors whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(world_size)
    shape = (world_size, num_elements)
    return list(torch.randint(-(2**16), 2**16, shape, generator=generator).float())


def random_numbers(world_size: int, num_elements: int) -> list[Tensor]:
    """Float tensors whose sums show the order in which they were added."""
    generator = torch.Generator().manual_seed(world_size)
    return list(torch.randn(world_size, num_elements, generator=generator))


def tree_sum(vectors: list[Tensor]) -> Tensor:
    """The fixed tree from its root: the largest power of two of ranks, and the others."""
    if len(vectors) == 1:
        return vectors[0]
    left = 1 << (len(vectors) - 1).bit_length() - 1
    return tree_sum(vectors[:left]) + tree_sum(vectors[left:])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sums_are_exact(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        for num_elements in SIZES:
            vectors = whole_numbers(world_size, num_elements)
            before = [vector.clone() for vector in vectors]
            total = torch.stack(vectors).sum(dim=0)
            results = interpret(SCHEDULES[algorithm](world_size, num_elements), vectors)
            assert len(results) == world_size
            assert all(torch.equal(result, total) for result in results)
            assert all(same_bits(vector, old) for vector, old in zip(vectors, before, strict=True))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_bits_are_those_of_the_tree_where_the_proof_says_so(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        vectors = random_numbers(world_size, 1009)
        results = interpret(SCHEDULES[algorithm](world_size, 1009), vectors)
        tree = tree_sum(vectors)
        assert all(torch.allclose(result, tree, atol=1e-4) for result in results)
        assert all(same_bits(result, results[0]) for result in results)
        name = algorithm.split(",")[0]
        assert same_bits(results[0], tree) == adds_in_tree_order(name, world_size)


@pytest.mark.parametrize("outer", ALGORITHMS)
@pytest.mark.parametrize("inner", ROOTED)
def test_nodes(inner: str, outer: str) -> None:
    """Sums over nodes, by interpreter and by ranks on their own, and the bits where proved."""
    name = f"hierarchical({inner},{outer})"
    for ranks_per_node, nodes in product((1, 2, 3, 4), (1, 2, 3, 4)):
        world_size = ranks_per_node * nodes
        schedule = find_schedule(name, ranks_per_node)(world_size, 1009)
        vectors = random_numbers(world_size, 1009)
        results = interpret(schedule, vectors)
        alone = run_through_queues(schedule, vectors)
        tree = tree_sum(vectors)
        assert all(torch.allclose(result, tree, atol=1e-4) for result in results)
        assert all(same_bits(a, results[0]) for a in (*alone, *results))
        in_order = adds_in_tree_order(name, world_size, ranks_per_node)
        assert same_bits(results[0], tree) == in_order


def test_transfers_read_what_was_there_when_the_round_began() -> None:
    rounds = ((Transfer(0, 1, 0, 2, reduce=True), Transfer(1, 2, 0, 2, reduce=True)),)
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]), torch.tensor([100.0, 200.0])]
    results = interpret(from_rounds("by hand", 3, 2, rounds), vectors)
    assert [result.tolist() for result in results] == [[1, 2], [11, 22], [110, 220]]


class LossError(Exception):
    """A rank waits for a message that nobody sent, or one of another length came."""


def run_through_queues(schedule: Schedule, vectors: list[Tensor]) -> list[Tensor]:
    """Every rank's own rounds over one queue for each pair of ranks, as over a process group.

    All ranks post a round's sends and receives in the order of `execute`; a receive takes the
    oldest message of its source, whatever that was meant to be. Ranks run at their own pace:
    each goes as far as it can before the next has its turn.

    Raises: LossError where the ranks wait for each other for ever.
    """
    held = [vector.clone() for vector in vectors]
    queues: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    waiting = [deque(rounds_of_rank(schedule, rank)) for rank in range(schedule.world_size)]
    sent = [False] * schedule.world_size
    progress = True
    while progress:
        progress = False
        for rank in range(schedule.world_size):
            while waiting[rank]:
                round_ = waiting[rank][0]
                if not sent[rank]:
                    for peer, start, stop, _ in round_.sends:
                        queues[rank, peer].append(held[rank][start:stop].clone())
                    sent[rank] = progress = True
                if not take_in(round_, rank, held[rank], queues):
                    break
                waiting[rank].popleft()
                sent[rank] = False
                progress = True
    if any(waiting) or any(queues.values()):
        raise LossError("ranks wait, or messages are left over")
    return held


def take_in(
    round_: RankRound,
    rank: int,
    own: Tensor,
    queues: dict[tuple[int, int], deque[Tensor]],
) -> bool:
    """Takes in one round, if all of its messages are there."""
    expected = Counter(receive.source for receive in round_.receives)
    if any(len(queues[peer, rank]) < count for peer, count in expected.items()):
        return False
    scratch = torch.full((scratch_elements([round_]),), torch.nan)
    for receive in round_.receives:
        message = queues[receive.source, rank].popleft()
        length = receive.stop - receive.start
        if receive.scratch is None:
            put(own[receive.start : receive.stop], message)
        else:
            put(scratch[receive.scratch : receive.scratch + length], message)
    for addition in round_.additions:
        slice_ = own[addition.start : addition.stop]
        by_rank = {source: scratch[at : at + len(slice_)] for source, at in addition.parts.items()}
        by_rank[rank] = slice_
        put(slice_, tree_sum([by_rank[source] for source in sorted(by_rank)]))
    for start, stop, offset in round_.detours:
        put(own[start:stop], scratch[offset : offset + stop - start])
    return True


def put(slice_: Tensor, message: Tensor) -> None:
    if slice_.shape != message.shape:
        raise LossError(f"{message.numel()} elements came where {slice_.numel()} belong")
    slice_.copy_(message)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_ranks_on_their_own_do_what_interpret_does(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        for num_elements in (1, 1009):
            schedule = SCHEDULES[algorithm](world_size, num_elements)
            vectors = random_numbers(world_size, num_elements)
            alone = run_through_queues(schedule, vectors)
            together = interpret(schedule, vectors)
            assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sends_match_receives_between_each_two_ranks(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        schedule = SCHEDULES[algorithm](world_size, 1009)
        sends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        receives: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for rank in range(world_size):
            for round_ in rounds_of_rank(schedule, rank):
                for peer, start, stop, _ in round_.sends:
                    sends[rank, peer].append((start, stop))
                for receive in round_.receives:
                    receives[receive.source, rank].append((receive.start, receive.stop))
        assert sends == receives
        assert sum(map(len, sends.values())) == len(list(schedule.transfers()))
        assert all(a != b for a, b in sends)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_a_pair_of_ranks_has_one_message_a_round_each_way(algorithm: str) -> None:
    """With one message from each rank there is nothing to confuse."""
    for world_size, num_elements in product(WORLD_SIZES, (1, 64, 1009)):
        for round_ in SCHEDULES[algorithm](world_size, num_elements).rounds:
            pairs = [(t.source, t.destination) for t in round_]
            assert len(set(pairs)) == len(pairs)


def test_a_rank_skips_the_rounds_in_which_it_does_nothing() -> None:
    schedule = ALGORITHMS["tree"](4, 8)
    assert [len(rounds_of_rank(schedule, rank)) for rank in range(4)] == [4, 2, 4, 2]


def test_scratch_holds_every_part_that_is_added_in_a_round() -> None:
    [push, pull] = rounds_of_rank(ALGORITHMS["parameter_server"](5, 100), 0)
    assert scratch_elements([push]) == 4 * 100
    assert scratch_elements([pull]) == 0
