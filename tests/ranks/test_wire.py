"""Nodes of the micro-batch tree over real ranks: the same bits and payloads on any number."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from firecaffe.cluster.world import World, join
from firecaffe.exchange.leaves import leaf_share, tree_sum
from firecaffe.transport.fold_nodes import NodeWire
from tests.world import Ranks

NODES = 8
SIZES = (1, 7, 24, 1009)
LENGTHS = {
    "all different": [0, 1, 2, 300, 0, 7, 64, 5],
    "the first empty": [0, 0, 0, 0, 9, 8, 7, 6],
    "all empty": [0] * NODES,
    "all alike": [33] * NODES,
}
ROW = 5


def vector_of(node: int, num_elements: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + num_elements)
    return torch.randn(num_elements, generator=generator)


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
    """What comes out at the other end, a row at a time."""
    codec = LargestOfRow()
    padded = torch.cat([vector, torch.zeros(-len(vector) % ROW)])
    rows = [codec.decode(codec.encode(row)) for row in padded.view(-1, ROW).unbind()]
    return torch.cat(rows)[: len(vector)]


def over_wire() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Sums of nodes and of rows at each size, and all payloads of each kind."""
    with join("cpu") as world:
        return over(world)


def over(world: World) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    wire = NodeWire(world, NODES)
    own = leaf_share(NODES, world.world_size, world.rank)
    plain = [wire.sum_nodes([vector_of(node, size) for node in own]) for size in SIZES]
    by_rows = [
        wire.sum_rows([vector_of(node, size) for node in own], LargestOfRow()) for size in SIZES
    ]
    payloads = [
        wire.gather([payload_of(node, lengths[node]) for node in own])
        for lengths in LENGTHS.values()
    ]
    return plain, by_rows, payloads


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nodes_are_summed_and_gathered_alike_on_any_number_of_ranks(
    ranks: Ranks, world_size: int
) -> None:
    for plain, by_rows, payloads in ranks.shared(world_size, over_wire):
        for index, size in enumerate(SIZES):
            vectors = [vector_of(node, size) for node in range(NODES)]
            assert torch.equal(plain[index], tree_sum(vectors, torch.add))
            total = coded(tree_sum([coded(vector) for vector in vectors], torch.add))
            assert torch.equal(by_rows[index], total)
        for gathered, lengths in zip(payloads, LENGTHS.values(), strict=True):
            assert len(gathered) == NODES
            for node, payload in enumerate(gathered):
                assert torch.equal(payload, payload_of(node, lengths[node]))


def sum_nothing() -> int:
    with join("cpu") as world:
        own = leaf_share(NODES, world.world_size, world.rank)
        return NodeWire(world, NODES).sum_nodes([torch.zeros(0) for _ in own]).numel()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_may_have_no_element(ranks: Ranks, world_size: int) -> None:
    assert ranks.shared(world_size, sum_nothing) == [0] * world_size
