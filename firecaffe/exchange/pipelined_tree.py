"""Pipelined tree: the binomial tree, segment by segment; a new one starts in every round.

With s segments and k = ceil(lg p) there are 2 k + s - 1 rounds. The root's port is the busiest,
with k segments each way in a round. From s = 2 k on the time is k (s + k) (α + n / s β) + k n γ:
half the tree's and no less, as all k copies pass one port. Segments are added as by the tree.
Shorter segments fill the pipeline sooner, but each message costs time whatever its length.
Source: Thakur, Rabenseifner, Gropp 2005; Pjesivac-Grbovic et al. 2007 (segmentation);
Sanders, Speck, Träff 2009.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from firecaffe.exchange import tree
from firecaffe.exchange.schedule import OwnRound, Schedule, shards

SEGMENT_ELEMENTS = 32_768
"""128 kB of float32: 1 ms of a 1 Gbit/s line, several times the cost of a message."""


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


def num_segments(num_elements: int, segment_elements: int) -> int:
    """Return the number of segments of at most `segment_elements`. Raises: ValueError below 1."""
    if segment_elements < 1:
        raise ValueError(f"segment_elements is {segment_elements}; it must be at least 1")
    return max(1, -(-num_elements // segment_elements))


def overlay(
    own: Sequence[OwnRound], segments: Sequence[tuple[int, int]], stride: int
) -> Iterator[OwnRound]:
    """Yield a rank's rounds for all segments: round r of segment c is round r + c · stride."""
    if not own:
        return
    numbers = [number for number, _ in own]
    for number in range(min(numbers), max(numbers) + (len(segments) - 1) * stride + 1):
        active = []
        for first, transfers in own:
            segment, between = divmod(number - first, stride)
            if between == 0 and 0 <= segment < len(segments):
                start, stop = segments[segment]
                active += [t._replace(start=start, stop=stop) for t in transfers]
        if active:
            yield number, active
