"""Fold: nodes of the micro-batch tree stay apart until they meet at the owner of their shard.

A rank may hold several nodes: because its share of micro-batches is no subtree, or because nodes
are encoded one by one. Rank r is the owner of shard r, as in the sharded parameter server: it
receives that shard of all nodes of all ranks, goes on with the tree over leaves where the ranks
stopped, and gives the total to everybody. With one node a rank it is the sharded parameter server;
with m of M nodes a rank sends (m + 1) (p - 1) / p · n elements.

Source: Li et al., OSDI 2014 (shards); the order of additions is that of `exchange.leaves`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from firecaffe.exchange.leaves import Node, Shares, largest_nodes
from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, shard


def schedule(
    inputs: Sequence[Sequence[Node]], num_leaves: int, num_elements: int, grain: int = 1
) -> Schedule:
    """inputs: each rank's nodes; those of all ranks, in order, are the whole tree. grain: shards
    are of whole grains, of which the vector is a multiple.
    """
    p, n = len(inputs), num_elements
    counts = [len(nodes) for nodes in inputs]
    kept = sum(
        count * (stop - start)
        for rank, count in enumerate(counts)
        for start, stop in [_shard(n, grain, p, rank)]
    )
    return Schedule(
        "fold",
        p,
        n,
        partial(_rounds, counts, n, grain),
        num_rounds=2,
        num_messages=(sum(counts) + p) * (p - 1),
        sent_elements=sum(counts) * n - kept + (p - 1) * n,
        in_tree_order=True,
        inputs=tuple(map(tuple, inputs)),
        num_leaves=num_leaves,
    )


def inputs_of(num_leaves: int, shares: Shares) -> list[list[Node]]:
    """The nodes of each rank, in order."""
    return [largest_nodes(num_leaves, share) for share in shares]


def _rounds(counts: Sequence[int], n: int, grain: int, rank: int) -> Iterator[OwnRound]:
    p = len(counts)
    first = [0, *accumulate(counts)]

    def push(a: int, b: int) -> list[Transfer]:
        slice_ = _shard(n, grain, p, b)
        return [Transfer(a, b, *slice_, True, first[a] + i) for i in range(counts[a])]

    others = [(rank + distance) % p for distance in range(1, p)]
    pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
    yield 0, [t for a, b in pairs for t in push(a, b)]
    yield 1, [Transfer(a, b, *_shard(n, grain, p, a), reduce=False) for a, b in pairs]


def _shard(n: int, grain: int, p: int, index: int) -> tuple[int, int]:
    start, stop = shard(n // grain, p, index)
    return start * grain, stop * grain
