"""Sums in shared memory follow a schedule: who adds what is what the sharded server says."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from firecaffe.exchange.check import check
from firecaffe.exchange.proof import prove
from firecaffe.exchange.sharded_parameter_server import schedule
from firecaffe.transport.local import LocalRanks
from firecaffe.transport.shared_sum import BLOCK_ELEMENTS, LINE_ELEMENTS, own_blocks


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 100, 1009, 3 * BLOCK_ELEMENTS + 5])
def test_each_rank_adds_what_the_schedule_brings_it(size: int, num_elements: int) -> None:
    whole = schedule(size, num_elements, grain=LINE_ELEMENTS)
    check(whole)
    proof = prove(whole)
    assert (proof.complete, proof.in_tree_order) == (True, True)
    assert whole.sent_elements == sum(t.num_elements for t in whole.transfers())
    vectors = [torch.arange(num_elements) for _ in range(size)]
    found = []
    for rank in range(size):
        blocks = own_blocks(cast(LocalRanks, SimpleNamespace(size=size, own=rank)), vectors)
        assert all(len(block) == size and len(block[0]) <= BLOCK_ELEMENTS for block in blocks)
        own = [int(each) for block in blocks for each in block[0]]
        arriving = {
            (t.start, t.stop) for t in whole.transfers() if t.destination == rank and t.reduce
        }
        assert own == [each for slice_ in arriving for each in range(*slice_)]
        assert not own or own[0] % LINE_ELEMENTS == 0  # owners share no cache line
        found += own
    assert found == list(range(num_elements))
