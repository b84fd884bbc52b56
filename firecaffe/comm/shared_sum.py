"""Sums over the ranks of one host, in place, in the memory that they share.

Rank r of p owns shard r: it adds that shard of all vectors in tree order and writes the total back
into all of them. Each element is read p times and written p times in all, never copied in or out,
and no message carries any of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from firecaffe.comm.local import LocalRanks
from firecaffe.exchange.schedule import fold, shards

BLOCK_ELEMENTS = 32_768
"""Additions of a block find it in the cache where the copies then take it from."""

LINE_ELEMENTS = 16
"""Owners do not share a cache line."""


def sum_in_place(local: LocalRanks, vectors: Sequence[Tensor], into: Sequence[int]) -> None:
    """The sum of the local ranks' vectors, in those whose numbers are in `into`.

    vectors: by local rank, as `LocalRanks.share` gave them; those not in `into` may be changed.
    When this returns on one rank it is done on all.
    """
    local.barrier()
    lines = -(-vectors[0].numel() // LINE_ELEMENTS)
    first, last = shards(lines, local.size)[local.own]
    stop = min(last * LINE_ELEMENTS, vectors[0].numel())
    for start in range(first * LINE_ELEMENTS, stop, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, stop)
        parts = [vector[start:end] for vector in vectors]
        total = fold(parts, _add_in_place)
        for target in into:
            if parts[target] is not total:
                parts[target].copy_(total)
    local.barrier()


def _add_in_place(left: Tensor, right: Tensor) -> Tensor:
    return torch.add(left, right, out=left)
