"""Sums over the ranks of one host, in place, in the memory that they share.

They are the rounds within a host of `exchange.shared_memory`'s schedule, carried by memory instead
of messages: what would arrive is read where it is, and what would be sent is written where it
belongs. A barrier stands for what messages would wait for. On one host each element is read p times
and written p times in all, never copied in or out, and no message carries any of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.exchange.leaves import tree_sum
from firecaffe.exchange.schedule import Schedule
from firecaffe.exchange.shared_memory import memory_part
from firecaffe.transport.local import LocalRanks

BLOCK_ELEMENTS = 65_536
"""Additions of a block find it in the cache where the copies then take it from. In shorter
ones the calls take more than the memory does: LOG.md."""

Block = list[Tensor]
"""The same elements of each local rank's vector."""


@dataclass(frozen=True)
class SharedVector:
    """A vector of each local rank, and what this rank does with them. Worked out once for all sums:
    it took a quarter of a sum's time (LOG.md).
    """

    by_rank: Sequence[Tensor]
    """As `LocalRanks.share` gave them."""
    blocks: Sequence[Block]
    """What this rank adds up."""
    into: Sequence[int]
    """Local ranks whose vectors take these sums; the others' may be changed."""
    reads: int | None
    """The local rank whose total this one copies after the messages, if it sends none itself."""
    is_several: bool
    """Whether messages follow, to other hosts."""


def shared_vector(local: LocalRanks, by_rank: Sequence[Tensor], schedule: Schedule) -> SharedVector:
    """This rank's part of the schedule's rounds in memory."""
    part = memory_part(schedule, local.first_rank + local.own)
    blocks = [
        [vector[start : min(start + BLOCK_ELEMENTS, stop)] for vector in by_rank]
        for first, stop in part.adds
        for start in range(first, stop, BLOCK_ELEMENTS)
    ]
    into = [rank - local.first_rank for rank in part.into]
    reads = None if part.reads is None else part.reads - local.first_rank
    return SharedVector(by_rank, blocks, into, reads, schedule.world_size > local.size)


def sum_in_place(
    local: LocalRanks, shared: SharedVector, send: Callable[[], None], divide_by: int = 1
) -> None:
    """The sum of all ranks' vectors, in place.

    send: carries out this rank's messages, on its own vector. divide_by: each vector is divided by
    this before the sum. When this returns on one rank it is done on all of the host.
    """
    local.barrier()
    for parts in shared.blocks:
        _sum_block(parts, shared.into, divide_by)
    local.barrier()
    if not shared.is_several:
        return
    if shared.reads is None:
        send()
    local.barrier()
    if shared.reads is not None:
        shared.by_rank[local.own].copy_(shared.by_rank[shared.reads])
    # What is read may not change before everybody has read it.
    local.barrier()


def _sum_block(parts: Block, into: Sequence[int], divide_by: int) -> None:
    if divide_by != 1:
        torch._foreach_div_(parts, divide_by)
    total = tree_sum(parts, Tensor.add_)
    for target in into:
        if parts[target] is not total:
            parts[target].copy_(total)
