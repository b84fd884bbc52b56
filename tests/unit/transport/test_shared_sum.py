"""Sums in shared memory follow a schedule: a rank adds the slices that it brings there."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from firecaffe.exchange.route import find_route
from firecaffe.exchange.shared_memory import memory_part
from firecaffe.transport.exchange import BLOCK_ELEMENTS, shared_vector
from firecaffe.transport.local_ranks import LocalRanks


@pytest.mark.parametrize(("hosts", "size"), [(1, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("num_elements", [1, 100, 3 * BLOCK_ELEMENTS + 5])
def test_blocks_are_what_the_schedule_says(hosts: int, size: int, num_elements: int) -> None:
    schedule = find_route("tree", None, hosts * size, size, shared_memory=True).schedule(
        num_elements
    )
    vectors = [torch.arange(num_elements) for _ in range(size)]
    for rank in range(hosts * size):
        first = rank - rank % size
        local = SimpleNamespace(size=size, own=rank - first, first_rank=first)
        found = shared_vector(cast(LocalRanks, local), vectors, schedule)
        assert all(len(block) == size and len(block[0]) <= BLOCK_ELEMENTS for block in found.blocks)
        part = memory_part(schedule, rank)
        added = [int(each) for block in found.blocks for each in block[0]]
        assert added == [each for slice_ in part.adds for each in range(*slice_)]
        assert [first + each for each in found.into] == part.into
        assert found.is_several == (hosts > 1)
