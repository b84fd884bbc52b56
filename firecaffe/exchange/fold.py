"""Fold: nodes of the micro-batch tree stay apart until they meet at the owner of their shard.

A rank may hold several nodes, if its share of micro-batches is no subtree, or nodes are encoded one
by one. Rank r owns shard r. It receives that shard of all nodes, continues the tree over leaves
where the ranks stopped, and gives the total to all. With m nodes a rank sends
(m + 1) (p - 1) / p · n elements. All nodes of a rank but its last can be sent early, while it
computes the others: the first ones of all ranks in one round, the second ones in the next.
Source: Li et al., OSDI 2014 (shards); the order of additions is that of `exchange.leaves`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

from firecaffe.exchange.leaves import Node, Shares, largest_nodes, small_first
from firecaffe.exchange.schedule import REDUCE_SCATTER, OwnRound, Schedule, Transfer, equal_cuts
from firecaffe.exchange.sharded_parameter_server import with_all_others


def schedule(
    inputs: Sequence[Sequence[Node]],
    num_leaves: int,
    num_elements: int,
    grain: int = 1,
    early: bool = False,
    cuts: Sequence[int] = (),
) -> Schedule:
    """Make the schedule for each rank's nodes; all ranks' nodes, in order, are the whole tree.

    grain: shards and the vector are multiples of this number of elements. early: whether
    `early_nodes` go in earlier rounds. cuts: the ends of shards, from 0, unless shards are equal.
    """
    p, n = len(inputs), num_elements
    ends = tuple(cuts or equal_cuts(n, p, grain))
    early_rounds = num_early(inputs) if early else 0
    counts = [len(nodes) for nodes in inputs]
    kept = sum(
        count * (stop - start) for count, (start, stop) in zip(counts, pairwise(ends), strict=True)
    )
    return Schedule(
        "fold",
        p,
        n,
        partial(_rounds, _waves(inputs, num_leaves, early), ends),
        num_rounds=early_rounds + 2,
        num_messages=(sum(counts) + p) * (p - 1),
        sent_elements=sum(counts) * n - kept + (p - 1) * n,
        in_tree_order=True,
        inputs=tuple(map(tuple, inputs)),
        num_leaves=num_leaves,
        early_rounds=early_rounds,
        cuts=tuple(cuts),
    )


def reduce_scatter(
    inputs: Sequence[Sequence[Node]],
    num_leaves: int,
    num_elements: int,
    early: bool = False,
    cuts: Sequence[int] = (),
) -> Schedule:
    whole = schedule(inputs, num_leaves, num_elements, early=early, cuts=cuts)
    p = len(inputs)
    return whole.only(
        lambda _, t: t.reduce,
        kind=REDUCE_SCATTER,
        num_rounds=whole.num_rounds - 1,
        num_messages=whole.num_messages - p * (p - 1),
        sent_elements=whole.sent_elements - (p - 1) * num_elements,
    )


def early_nodes(nodes: Sequence[Node], num_leaves: int) -> list[Node]:
    return small_first(nodes, num_leaves)[:-1]


def num_early(inputs: Sequence[Sequence[Node]]) -> int:
    """Return the number of early rounds; in each, a rank sends one early node, if any is left."""
    return max(len(nodes) for nodes in inputs) - 1


def inputs_of(num_leaves: int, shares: Shares) -> list[list[Node]]:
    return [largest_nodes(num_leaves, share) for share in shares]


Wave = list[list[int]]
"""The numbers of the inputs that each rank sends in one round."""


def _waves(inputs: Sequence[Sequence[Node]], num_leaves: int, early: bool) -> list[Wave]:
    first = [0, *accumulate(len(nodes) for nodes in inputs)]
    if not early:
        return [[list(range(a, b)) for a, b in pairwise(first)]]
    waves: list[Wave] = [[[] for _ in inputs] for _ in range(num_early(inputs) + 1)]
    for rank, (start, nodes) in enumerate(zip(first, inputs, strict=False)):
        *before, last = small_first(nodes, num_leaves)
        for wave, node in [*zip(waves, before, strict=False), (waves[-1], last)]:
            wave[rank].append(start + nodes.index(node))
    return waves


def _rounds(waves: Sequence[Wave], ends: Sequence[int], rank: int) -> Iterator[OwnRound]:
    pairs = with_all_others(len(waves[0]), rank)
    for number, wave in enumerate(waves):
        yield (
            number,
            [
                Transfer(a, b, ends[b], ends[b + 1], True, reads)
                for a, b in pairs
                for reads in wave[a]
            ],
        )
    totals = [Transfer(a, b, ends[a], ends[a + 1], reduce=False) for a, b in pairs]
    yield len(waves), totals
