"""Sums over the ranks of one host, in place, in the memory that they share.

They are the rounds within a host of `exchange.shared_memory`'s schedule, with reads, writes and
barriers instead of messages. On one host each element is read p times and written p times in all,
and never copied in or out.
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
"""Elements that stay in the cache from addition to copy; shorter blocks take longer (LOG.md)."""

Block = list[Tensor]
"""One slice of each local rank's vector."""


@dataclass(frozen=True)
class SharedVector:  # worked out once, as it took a quarter of a sum's time (LOG.md)
    """A vector of each local rank, and this rank's work on them, for all sums."""

    by_rank: Sequence[Tensor]
    blocks: Sequence[Block]
    into: Sequence[int]
    """Local ranks whose vectors get these sums; the others' may be changed."""
    reads: int | None
    """The local rank whose total this one copies after the messages, if it sends none itself."""
    is_several: bool
    """Whether messages follow, to other hosts."""


def shared_vector(local: LocalRanks, by_rank: Sequence[Tensor], schedule: Schedule) -> SharedVector:
    """Return this rank's part of the schedule's rounds in memory."""
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
    """Sum all ranks' vectors in place, each divided by `divide_by` first.

    send: carries out this rank's messages. When this returns on one rank, all of the host are done.
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
    # The vector may not change before all ranks have read it.
    local.barrier()


def _sum_block(parts: Block, into: Sequence[int], divide_by: int) -> None:
    if divide_by != 1:
        torch._foreach_div_(parts, divide_by)
    total = tree_sum(parts, Tensor.add_)
    for target in into:
        if parts[target] is not total:
            parts[target].copy_(total)
