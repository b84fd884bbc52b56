"""What ranks that hold parts exchange: sums in the order of the tree, and whole tensors."""

import pytest
import torch
from torch import Tensor

from firecaffe.cluster.world import join
from firecaffe.exchange.leaves import tree_sum
from firecaffe.parallel.cut import cut
from firecaffe.parallel.parts import PartGroup
from tests.world import Ranks

SHAPE = (3, 13, 5)


def addends(num_parts: int) -> list[Tensor]:
    """Numbers of which each order of addition has another sum."""
    generator = torch.Generator().manual_seed(num_parts)
    return [torch.randn(SHAPE, generator=generator) for _ in range(num_parts)]


def exchanged(num_parts: int, dim: int) -> tuple[Tensor, Tensor]:
    """The sum of addends and the gathering of parts, on this rank."""
    with join("cpu") as world:
        group = PartGroup(world, num_parts)
        own = [addends(num_parts)[part] for part in group.own]
        before = [each.clone() for each in own]
        total = group.sum(own)
        assert all(map(torch.equal, own, before))
        whole, ends = addends(1)[0], cut(SHAPE[dim], num_parts)
        parts = group.slice(whole, ends, dim)
        return total, group.gather(parts, ends, dim)


@pytest.mark.parametrize(
    ("world_size", "num_parts"), [(1, 5), (2, 2), (2, 6), (3, 3), (3, 6), (4, 4), (4, 12)]
)
def test_sums_are_the_trees_and_parts_make_a_whole(
    ranks: Ranks, world_size: int, num_parts: int
) -> None:
    """6 parts on 2 ranks are no subtrees; 13 columns in 4 parts are uneven."""
    expected = tree_sum(addends(num_parts), torch.add)
    for total, whole in ranks.shared(world_size, exchanged, num_parts, 1):
        assert torch.equal(total, expected)
        assert torch.equal(whole, addends(1)[0])
