"""Every exchange over real process groups, against the interpreter and torch's own collectives.

Folds of micro-batches are in the matrix (`test_matrix.py`).
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.world import World, join
from firecaffe.exchange import ALGORITHMS, EXCHANGES
from firecaffe.exchange.collectives import COLLECTIVES, average, block
from firecaffe.exchange.leaves import leaf_share, tree_sum
from firecaffe.exchange.schedule import ALL_GATHER, AVERAGE, BROADCAST, pieces, shard
from firecaffe.measure.known_sum import interpret
from firecaffe.parallel.cut import cut
from firecaffe.parallel.flow import PartGroup
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold_nodes import NodeWire
from firecaffe.transport.run_schedule import Collectives
from tests.world import Ranks

SIZES = (0, 1, 5, 1009, 800_003)
"""The last one is cut into pieces by a ring of 3 too."""


def vector_of(rank: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    return torch.randn(num_elements, generator=generator)


def all_reduce() -> dict[tuple[str, int], torch.Tensor]:
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
        p = world.world_size
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
                ours.run(name, partial(make, p), vector)
                expected = {ALL_GATHER: gathered, BROADCAST: first, AVERAGE: total / p}
                match name.split()[0]:
                    case "reduce_scatter":
                        is_same = torch.equal(vector[start:stop], scattered)
                    case "all_to_all":
                        column = (block(num_elements, p, a, world.rank) for a in range(p))
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


NODES = 8
NODE_SIZES = (1, 7, 24, 1009)
LENGTHS = {
    "all different": [0, 1, 2, 300, 0, 7, 64, 5],
    "the first empty": [0, 0, 0, 0, 9, 8, 7, 6],
    "all empty": [0] * NODES,
    "all alike": [33] * NODES,
}
ROW = 5


def payload_of(node: int, length: int) -> Tensor:
    return (torch.arange(length) * (node + 3) + node).to(torch.uint8)


@dataclass(frozen=True)
class LargestOfRow:
    """A codec by rows that changes values: a float16 of each, less the row's largest."""

    row_elements: int = ROW

    def encode(self, vector: Tensor) -> Tensor:
        rows = vector.view(-1, self.row_elements)
        largest = rows.amax(1, keepdim=True)
        return torch.cat([largest, rows - largest], 1).to(torch.float16)

    def decode(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide[:, 1:] + wide[:, :1]).reshape(-1)


def coded(vector: Tensor) -> Tensor:
    codec = LargestOfRow()
    padded = torch.cat([vector, torch.zeros(-len(vector) % ROW)])
    rows = [codec.decode(codec.encode(row)) for row in padded.view(-1, ROW).unbind()]
    return torch.cat(rows)[: len(vector)]


def over_wire() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Sums of nodes and of rows at each size, and all payloads of each kind."""
    with join("cpu") as world:
        wire = NodeWire(world, NODES)
        own = leaf_share(NODES, world.world_size, world.rank)

        def vectors(num_elements: int) -> list[Tensor]:
            return [vector_of(node, num_elements) for node in own]

        assert wire.sum_nodes(vectors(0)).numel() == 0  # a parameter may have no element
        return (
            [wire.sum_nodes(vectors(size)) for size in NODE_SIZES],
            [wire.sum_rows(vectors(size), LargestOfRow()) for size in NODE_SIZES],
            [
                wire.gather([payload_of(node, n[node]) for node in own], len(set(n)) == 1)
                for n in LENGTHS.values()
            ],
        )


def test_nodes_are_summed_and_gathered_as_by_one_process(ranks: Ranks) -> None:
    for plain, by_rows, payloads in ranks.shared(3, over_wire):
        for index, size in enumerate(NODE_SIZES):
            vectors = [vector_of(node, size) for node in range(NODES)]
            assert torch.equal(plain[index], tree_sum(vectors, torch.add))
            total = coded(tree_sum([coded(vector) for vector in vectors], torch.add))
            assert torch.equal(by_rows[index], total)
        for gathered, lengths in zip(payloads, LENGTHS.values(), strict=True):
            assert len(gathered) == NODES
            for node, payload in enumerate(gathered):
                assert torch.equal(payload, payload_of(node, lengths[node]))


SHAPE = (3, 13, 5)


def addends(num_parts: int) -> list[Tensor]:
    """Numbers of which each order of addition has another sum."""
    generator = torch.Generator().manual_seed(num_parts)
    return [torch.randn(SHAPE, generator=generator) for _ in range(num_parts)]


def exchanged(num_parts: int, dim: int) -> tuple[Tensor, Tensor]:
    with join("cpu") as world:
        group = PartGroup(world, num_parts)
        own = [addends(num_parts)[part] for part in group.own]
        before = [each.clone() for each in own]
        total = group.sum(own)
        assert all(map(torch.equal, own, before))
        whole, ends = addends(1)[0], cut(SHAPE[dim], num_parts)
        parts = group.slice(whole, ends, dim)
        return total, group.gather(parts, ends, dim)


def test_sums_are_the_trees_and_parts_make_a_whole(ranks: Ranks) -> None:
    """6 parts on 2 ranks are no subtrees, and 13 columns in 6 parts are uneven."""
    expected = tree_sum(addends(6), torch.add)
    for total, whole in ranks.shared(2, exchanged, 6, 1):
        assert torch.equal(total, expected)
        assert torch.equal(whole, addends(1)[0])
