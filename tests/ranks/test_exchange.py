"""Every exchange over real process groups, against the interpreter and torch's own collectives.

Nodes of the micro-batch tree, and parts, are in the matrix (`test_matrix.py`).
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.world import World, join
from firecaffe.exchange import ALGORITHMS, EXCHANGES
from firecaffe.exchange.all_to_all import block
from firecaffe.exchange.collectives import COLLECTIVES, average
from firecaffe.exchange.pieces import pieces
from firecaffe.exchange.schedule import ALL_GATHER, AVERAGE, BROADCAST, shard
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.interpret import interpret
from firecaffe.transport.run_schedule import Collectives
from tests.world import Ranks

SIZES = (0, 1, 5, 1009, 800_003)
"""The last one is cut into pieces by a ring of 3 too."""


def vector_of(rank: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    return torch.randn(num_elements, generator=generator)


def all_reduce() -> dict[tuple[str, int], torch.Tensor]:
    """The sums by every exchange at every size."""
    results = {}
    with join("cpu") as world:
        for algorithm in EXCHANGES:
            exchange = Exchange.of_vectors(world, algorithm)
            for num_elements in SIZES:
                for _ in range(2):  # buffers are used again
                    vector = vector_of(world.rank, num_elements)
                    exchange.all_reduce(vector)
                results[algorithm, num_elements] = vector
    return results


@pytest.mark.parametrize("world_size", [3, 5])
def test_all_ranks_get_the_bits_of_the_interpreter(ranks: Ranks, world_size: int) -> None:
    by_rank = ranks.shared(world_size, all_reduce)
    assert len(pieces(ALGORITHMS["tree"](world_size, SIZES[-1]), 4)) > 1
    assert len(by_rank[0]) == len(EXCHANGES) * len(SIZES)
    for algorithm, num_elements in by_rank[0]:
        case = f"{algorithm} of {num_elements}"
        vectors = [vector_of(rank, num_elements) for rank in range(world_size)]
        results = [of_rank[algorithm, num_elements] for of_rank in by_rank]
        assert all(torch.equal(result, results[0]) for result in results), case
        torch.testing.assert_close(results[0], torch.stack(vectors).sum(0))
        if algorithm in ALGORITHMS:
            # Each piece goes through a schedule of its own.
            for start, stop in pieces(ALGORITHMS[algorithm](world_size, num_elements), 4):
                schedule = ALGORITHMS[algorithm](world_size, stop - start)
                parts = [vector[start:stop] for vector in vectors]
                for result, expected in zip(results, interpret(schedule, parts), strict=True):
                    assert torch.equal(result[start:stop], expected), case


def all_to_all_of_torch(own: torch.Tensor, world: World) -> torch.Tensor:
    """What torch gives this rank, of blocks of which it begins with its row."""
    n, p, rank = own.numel(), world.world_size, world.rank
    row = [slice(*block(n, p, rank, other)) for other in range(p)]
    column = [stop - start for start, stop in (block(n, p, other, rank) for other in range(p))]
    exchanged = torch.empty(sum(column))
    given = torch.cat([own[each] for each in row])
    counts = [each.stop - each.start for each in row]
    dist.all_to_all_single(exchanged, given, column, counts, group=world.group)
    return exchanged


def collectives_and_torchs() -> dict[str, bool]:
    """Whether each of ours ends in what torch's own collective gives, of whole numbers."""
    same: dict[str, bool] = {}
    with join("cpu") as world:
        p, ranks = world.world_size, range(world.world_size)
        ours = Collectives(world)
        for num_elements in (p, 5 * p, 30_000 * p):
            own = (torch.arange(num_elements) * (world.rank + 3) % 1013).float()
            start, stop = shard(num_elements, p, world.rank)
            total, gathered, first = own.clone(), torch.empty_like(own), own.clone()
            dist.all_reduce(total, group=world.group)
            dist.all_gather_single(gathered, own[start:stop].clone(), group=world.group)
            dist.broadcast(first, group_src=0, group=world.group)
            scattered = torch.empty(stop - start)
            dist.reduce_scatter_single(scattered, own.clone(), group=world.group)
            exchanged = all_to_all_of_torch(own, world)
            mean = {f"{AVERAGE} {name}": average(make) for name, make in ALGORITHMS.items()}
            makers = {
                f"{kind} {name}": make
                for kind, by_name in COLLECTIVES.items()
                for name, make in by_name.items()
            } | mean
            for name, make in makers.items():
                vector = own.clone()
                ours.run(name, partial(make, p), vector, ranks)
                expected = {ALL_GATHER: gathered, BROADCAST: first, AVERAGE: total / p}
                match name.split()[0]:
                    case "reduce_scatter":
                        is_same = torch.equal(vector[start:stop], scattered)
                    case "all_to_all":
                        column = (block(num_elements, p, a, world.rank) for a in ranks)
                        found = torch.cat([vector[start:stop] for start, stop in column])
                        is_same = torch.equal(found, exchanged)
                    case kind:
                        is_same = torch.equal(vector, expected[kind])
                same[name] = same.get(name, True) and is_same
    return same


@pytest.mark.parametrize("world_size", [3, 4])
def test_collectives_of_every_kind_give_what_torchs_own_do(ranks: Ranks, world_size: int) -> None:
    for same in ranks.shared(world_size, collectives_and_torchs):
        assert len(same) == sum(map(len, COLLECTIVES.values())) + len(ALGORITHMS)
        assert all(same.values()), same
