"""Fold: nodes of the micro-batch tree stay apart until they meet at the owner of their shard.

A rank may hold several nodes: because its share of micro-batches is no subtree, or because nodes
are encoded one by one. Rank r is the owner of shard r, as in the sharded parameter server: it
receives that shard of all nodes of all ranks, goes on with the tree over leaves where the ranks
stopped, and gives the total to everybody. With one node a rank it is the sharded parameter server;
with m of M nodes a rank sends (m + 1) (p - 1) / p · n elements.

A rank computes its largest node last. All others can be sent while it does, in a round of their own
that nobody waits for; what is left for the end is one node of each rank.

Source: Li et al., OSDI 2014 (shards); the order of additions is that of `exchange.leaves`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

from firecaffe.exchange.leaves import Node, Shares, largest_nodes, small_first
from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, shard


def schedule(
    inputs: Sequence[Sequence[Node]],
    num_leaves: int,
    num_elements: int,
    grain: int = 1,
    early: bool = False,
) -> Schedule:
    """inputs: each rank's nodes; those of all ranks, in order, are the whole tree. grain: shards
    are of whole grains, of which the vector is a multiple. early: whether the nodes of which
    `early_nodes` tells go in a round before the others', if there are any.
    """
    p, n = len(inputs), num_elements
    early = early and any(len(nodes) > 1 for nodes in inputs)
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
        partial(_rounds, _waves(inputs, num_leaves, early), n, grain),
        num_rounds=3 if early else 2,
        num_messages=(sum(counts) + p) * (p - 1),
        sent_elements=sum(counts) * n - kept + (p - 1) * n,
        in_tree_order=True,
        inputs=tuple(map(tuple, inputs)),
        num_leaves=num_leaves,
        early_rounds=int(early),
    )


def early_nodes(nodes: Sequence[Node], num_leaves: int) -> list[Node]:
    """Those of a rank's nodes that are whole before it computes its last one."""
    return small_first(nodes, num_leaves)[:-1]


def inputs_of(num_leaves: int, shares: Shares) -> list[list[Node]]:
    """The nodes of each rank, in order."""
    return [largest_nodes(num_leaves, share) for share in shares]


Wave = list[list[int]]
"""The numbers of the inputs that each rank sends in one round."""


def _waves(inputs: Sequence[Sequence[Node]], num_leaves: int, early: bool) -> list[Wave]:
    """The rounds in which inputs go: all in one, or the early ones before the others."""
    first = [0, *accumulate(len(nodes) for nodes in inputs)]
    if not early:
        return [[list(range(a, b)) for a, b in pairwise(first)]]
    waves: list[Wave] = [[], []]
    for start, nodes in zip(first, inputs, strict=False):
        before = early_nodes(nodes, num_leaves)
        numbers = [(start + i, node in before) for i, node in enumerate(nodes)]
        waves[0].append([number for number, is_early in numbers if is_early])
        waves[1].append([number for number, is_early in numbers if not is_early])
    return waves


def _rounds(waves: Sequence[Wave], n: int, grain: int, rank: int) -> Iterator[OwnRound]:
    p = len(waves[0])
    others = [(rank + distance) % p for distance in range(1, p)]
    pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
    for number, wave in enumerate(waves):
        yield (
            number,
            [
                Transfer(a, b, *_shard(n, grain, p, b), True, reads)
                for a, b in pairs
                for reads in wave[a]
            ],
        )
    totals = [Transfer(a, b, *_shard(n, grain, p, a), reduce=False) for a, b in pairs]
    yield len(waves), totals


def _shard(n: int, grain: int, p: int, index: int) -> tuple[int, int]:
    start, stop = shard(n // grain, p, index)
    return start * grain, stop * grain
