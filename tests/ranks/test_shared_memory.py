"""Sums in the memory that ranks of one host share: the bits of the tree, and nobody too early."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from firecaffe.cluster.world import World, join
from firecaffe.exchange import ring, tree
from firecaffe.exchange.schedule import pieces
from firecaffe.measure.known_sum import interpret
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.world import Ranks

SIZES = (0, 1, 15, 16, 17, 1009, 800_003)
"""The last one is cut into pieces by a ring."""
WAIT_S = 300.0
CPU = torch.device("cpu")


def vector_of(rank: int, num_elements: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + num_elements + seed)
    return torch.randn(num_elements, generator=generator, dtype=dtype)


def vectors_of(world_size: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
    return [vector_of(rank, num_elements, dtype) for rank in range(world_size)]


def by_tree(vectors: list[Tensor]) -> Tensor:
    return interpret(tree.schedule(len(vectors), vectors[0].numel()), vectors)[0]


def meet(world: World, algorithm: str) -> Exchange:
    local = meet_local_ranks(world, WAIT_S)
    assert local is not None
    exchange = Exchange.of_vectors(world, algorithm, local)
    assert exchange.route.shares_memory
    return exchange


def sums(algorithms: list[str], dtype: torch.dtype, seed: int = 0) -> list[list[Tensor]]:
    """The sum at each size, by memory; all vectors of an algorithm exist at once."""
    with join("cpu") as world:
        return [sums_by(meet(world, algorithm), dtype, seed) for algorithm in algorithms]


def sums_by(exchange: Exchange, dtype: torch.dtype, seed: int) -> list[Tensor]:
    vectors = [exchange.empty(num_elements, dtype, CPU) for num_elements in SIZES]
    for vector in vectors:
        assert not vector.any()
        vector.copy_(vector_of(exchange.world.rank, vector.numel(), dtype, seed))
    for vector in vectors:
        exchange.all_reduce(vector)
    results = [vector.clone() for vector in vectors]
    exchange.close()
    return results


NESTED = "hierarchical(tree,ring)"


@pytest.mark.parametrize(
    ("world_size", "local", "algorithms", "dtype"),
    [
        (2, 2, ["tree"], torch.float64),
        (5, 5, ["tree"], torch.float32),
        (6, 2, ["tree", "halving_doubling", "pipelined_tree"], torch.float32),
        (6, 3, [NESTED], torch.float32),
    ],
    ids=["one host", "one host of five", "hosts of two", "hosts of three"],
)
def test_the_bits_are_those_of_the_tree_or_of_the_hosts_own_exchange(
    ranks: Ranks, world_size: int, local: int, algorithms: list[str], dtype: torch.dtype
) -> None:
    """A ring of hosts; each has the tree over its own ranks, also if they are three."""
    by_rank = ranks.shared(world_size, sums, algorithms, dtype, local_world_size=local)
    for index, num_elements in enumerate(SIZES):
        vectors = vectors_of(world_size, num_elements, dtype)
        expected = by_hosts(vectors, local) if algorithms == [NESTED] else by_tree(vectors)
        for results in by_rank:
            assert all(torch.equal(of_size[index], expected) for of_size in results)


def by_hosts(vectors: list[Tensor], local: int) -> Tensor:
    of_hosts = [by_tree(vectors[first:][:local]) for first in range(0, len(vectors), local)]
    total = torch.empty_like(vectors[0])
    for start, stop in pieces(ring.schedule(len(of_hosts), len(total)), 4):
        parts = [vector[start:stop] for vector in of_hosts]
        total[start:stop] = interpret(ring.schedule(len(of_hosts), stop - start), parts)[0]
    return total


def sum_others(algorithm: str) -> list[Tensor]:
    """Sums of a shared vector, then of others: as long, a part of it, and again itself."""
    with join("cpu") as world:
        exchange = meet(world, algorithm)
        results = []
        shared = exchange.empty(1009, torch.float32, CPU)
        for vector in (shared, torch.empty(1009), shared[:100], shared[100:], shared):
            vector.copy_(vector_of(world.rank, vector.numel(), torch.float32))
            rest = shared[vector.numel() :].clone()
            exchange.all_reduce(vector)
            if vector.data_ptr() == shared.data_ptr():
                assert torch.equal(shared[vector.numel() :], rest)
            results.append(vector.clone())
        exchange.close()
        return results


def test_other_vectors_go_through_the_schedule(ranks: Ranks) -> None:
    for results in ranks.shared(4, sum_others, "tree", local_world_size=2):
        for result in results:
            assert torch.equal(result, by_tree(vectors_of(4, result.numel(), torch.float32)))


def sum_many_times(rounds: int) -> list[int]:
    """Rounds in which a sum was wrong. Ranks write their vectors as soon as they may."""
    with join("cpu") as world:
        exchange = meet(world, "tree")
        vectors = [exchange.empty(n, torch.float32, CPU) for n in (1009, 40, 70_000)]
        numbers = [torch.arange(len(vector)) % 7 for vector in vectors]
        p = world.world_size
        wrong = []
        for round_ in range(rounds):
            for vector, number in zip(vectors, numbers, strict=True):
                torch.add(number, (world.rank + 1) * (round_ + 1), out=vector)
                exchange.all_reduce(vector)
                # Whole numbers below 2^24: any order of addition gives the same.
                expected = number * p + (round_ + 1) * p * (p + 1) // 2
                if not torch.equal(vector, expected.float()):
                    wrong.append(round_)
        exchange.close()
        return wrong


@pytest.mark.parametrize(("world_size", "local"), [(3, 3), (4, 2)])
def test_many_sums_one_after_the_other(ranks: Ranks, world_size: int, local: int) -> None:
    results = ranks.shared(world_size, sum_many_times, 100, local_world_size=local)
    assert results == [[]] * world_size


def test_two_worlds_of_one_machine_do_not_meet(ranks: Ranks) -> None:
    def run(seed: int) -> list[list[list[Tensor]]]:
        return ranks.run(2, sums, ["tree"], torch.float32, seed)

    with ThreadPoolExecutor(2) as threads:
        results = threads.map(run, (1, 2))
    for seed, by_rank in enumerate(results, start=1):
        for index, num_elements in enumerate(SIZES):
            vectors = [vector_of(rank, num_elements, torch.float32, seed) for rank in range(2)]
            assert all(torch.equal(of_rank[index], by_tree(vectors)) for [of_rank] in by_rank)


def what_stays_open(algorithm: str) -> tuple[list[str], bool]:
    """Descriptors of vectors that are in use, and whether sockets are open after close."""
    with join("cpu") as world:
        local = meet_local_ranks(world, WAIT_S)
        assert local is not None
        exchange = Exchange.of_vectors(world, algorithm, local)
        vectors = [exchange.empty(100, torch.float32, CPU) for _ in range(3)]
        paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        targets = [os.readlink(path) for path in paths if os.path.lexists(path)]
        for vector in vectors:
            exchange.all_reduce(vector)
        exchange.close()
        is_open = any(peer.fileno() != -1 for peer in local.sockets.values())
        return [target for target in targets if target.startswith("/memfd:firecaffe")], is_open


@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_vectors_keep_no_descriptors_and_close_keeps_none(ranks: Ranks, algorithm: str) -> None:
    """A ring of three does not add in tree order, and so does not share; it met all the same."""
    assert ranks.shared(3, what_stays_open, algorithm) == [([], False)] * 3


def meet_where(told: list[list[int]]) -> list[bool]:
    """Whether ranks meet that are told these numbers of ranks on their hosts."""
    met = []
    with join("cpu") as world:
        for sizes in told:
            size = sizes[world.rank]
            as_told = dataclasses.replace(
                world, local_world_size=size, local_rank=world.rank % size
            )
            met.append(meet_local_ranks(as_told, WAIT_S) is not None)
    return met


def test_hosts_that_are_not_alike_do_not_share(ranks: Ranks) -> None:
    told = [[1, 1, 1], [2, 2, 1], [1, 2, 2], [2, 2, 2], [3, 3, 2]]
    assert ranks.shared(3, meet_where, told) == [[False] * len(told)] * 3
