"""Pipelined tree: the binomial tree, segment by segment; a new one starts in every round.

With s segments and k = ceil(lg p) there are 2 k + s - 1 rounds. The root's port is the busiest,
with k segments each way in a round. From s = 2 k on the time is k (s + k) (α + n / s β) + k n γ:
half the tree's and no less, as all k copies pass one port. Segments are added as by the tree.
Source: Thakur, Rabenseifner, Gropp 2005; Pjesivac-Grbovic et al. 2007 (segmentation).
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange import tree
from firecaffe.exchange.pieces import SEGMENT_ELEMENTS, num_segments, overlay
from firecaffe.exchange.schedule import OwnRound, Schedule, shards


def schedule(
    world_size: int, num_elements: int, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    count = num_segments(num_elements, segment_elements)
    whole = tree.schedule(world_size, num_elements)
    return Schedule(
        "pipelined_tree",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements, count),
        num_rounds=whole.num_rounds + count - 1,
        num_messages=whole.num_messages * count,
        sent_elements=whole.sent_elements,
        in_tree_order=True,
        # While the pipeline fills and empties, a longer segment may be at a child of the root.
        busiest=[0, *(1 << level for level in range(tree.num_levels(world_size)))],
    )


def _rounds(p: int, n: int, count: int, rank: int) -> Iterator[OwnRound]:
    tree_rounds = list(tree.rounds(p, n, rank))
    # Each pair of ranks meets once each way in a segment's rounds, so never twice in a round.
    yield from overlay(tree_rounds, shards(n, count), stride=1)
