"""Pipelined tree: the binomial tree, segment by segment; a new one starts in every round.

With s segments and k = ceil(lg p) there are 2 k + s - 1 rounds. The root is the busiest: it has k
children, so that in the middle each round brings k segments through its port, both ways at
once. From s = 2 k on that is k (s + k) (α + n / s β) + k n γ: half the tree's time, and no less,
for all k copies of the vector go through one port. One segment makes it the tree. Every segment
is added as by the tree.

Source: Thakur, Rabenseifner, Gropp 2005; Pjesivac-Grbovic et al. 2007 (segmentation).
"""

from firecaffe.exchange import tree
from firecaffe.exchange.pipeline import SEGMENT_ELEMENTS, num_segments, overlay
from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule, shards


def schedule(
    world_size: int, num_elements: int, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    tree_rounds = tree.schedule(world_size, 1).rounds
    segments = shards(num_elements, num_segments(num_elements, segment_elements))
    rounds = overlay(
        (
            [
                [Transfer(t.source, t.destination, *segment, t.reduce) for t in r]
                for r in tree_rounds
            ]
            for segment in segments
        ),
        # Each pair of ranks meets once each way in a segment's rounds, so never twice in a round.
        stride=1,
    )
    return make_schedule("pipelined_tree", world_size, num_elements, rounds)
