"""Sums over the ranks of one host, in place, in the memory that they share.

It is the schedule of the sharded parameter server, carried by memory instead of messages. Rank r
of p owns shard r: it adds that shard of all vectors in tree order (round 1: what would arrive is
read where it is) and writes the total back into all of them (round 2). A barrier stands for what
messages would wait for. Each element is read p times and written p times in all, never copied in
or out, and no message carries any of it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from firecaffe.exchange import sharded_parameter_server
from firecaffe.exchange.leaves import tree_sum
from firecaffe.transport.local import LocalRanks

BLOCK_ELEMENTS = 65_536
"""Additions of a block find it in the cache where the copies then take it from. In shorter
ones the calls take more than the memory does: LOG.md."""

LINE_ELEMENTS = 16
"""Owners do not share a cache line."""

Block = list[Tensor]
"""The same elements of each local rank's vector."""


def own_blocks(local: LocalRanks, vectors: Sequence[Tensor]) -> list[Block]:
    """This rank's shard of vectors by local rank, as `LocalRanks.share` gave them, in blocks.

    Cut once for all sums: it took a quarter of a sum's time (LOG.md).
    """
    schedule = sharded_parameter_server.schedule(
        local.size, vectors[0].numel(), grain=LINE_ELEMENTS
    )
    added = {
        (t.start, t.stop)
        for _, transfers in schedule.rounds_of(local.own)
        for t in transfers
        if t.reduce and t.destination == local.own
    }
    return [
        [vector[start : min(start + BLOCK_ELEMENTS, stop)] for vector in vectors]
        for first, stop in added
        for start in range(first, stop, BLOCK_ELEMENTS)
    ]


def sum_in_place(
    local: LocalRanks, blocks: Iterable[Block], into: Sequence[int], divide_by: int = 1
) -> None:
    """The sum of the local ranks' vectors, in those whose numbers are in `into`.

    blocks: `own_blocks` of them; vectors that are not in `into` may be changed. divide_by: each is
    divided by this before the sum. When this returns on one rank it is done on all.
    """
    local.barrier()
    for parts in blocks:
        if divide_by != 1:
            torch._foreach_div_(parts, divide_by)
        total = tree_sum(parts, Tensor.add_)
        for target in into:
            if parts[target] is not total:
                parts[target].copy_(total)
    local.barrier()
