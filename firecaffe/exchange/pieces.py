"""Cuts of a vector into pieces and segments, which go through the same schedule in parallel.

While one piece is being added, or waits for a slow peer, the others keep the link busy. Segments
pipeline a tree: the next goes up while the last is still on its way. Shorter ones fill the pipeline
sooner, but each message costs time whatever its length. Source: Pjesivac-Grbovic et al. 2007
(segmentation); Sanders, Speck, Träff 2009.
"""

from collections.abc import Iterator, Sequence

from firecaffe.exchange.schedule import OwnRound, Schedule, shards

PIECES = 4
"""Most pieces of a vector; twice as many if each would exceed LONGEST_PIECE_BYTES."""

LONGEST_PIECE_BYTES = 4_000_000
"""The longest piece: longer messages of two pieces may meet in a switch's queue."""

SHORTEST_MESSAGE_BYTES = 512_000
"""Least mean bytes of a piece's messages; each takes Python some 140 us (LOG.md)."""

SHORTEST_WHOLE_BYTES = 128_000
"""Least bytes if each message is a whole piece, or sums are not in tree order."""


def pieces(schedule: Schedule, itemsize: int) -> list[tuple[int, int]]:
    """Cut a schedule's vector into pieces, (start, stop) each.

    If a schedule already cuts its vector into short messages, it is not cut again. itemsize: bytes
    per element.
    """
    mean_bytes = schedule.sent_elements * itemsize // max(1, schedule.num_messages)
    whole_bytes = schedule.num_elements * itemsize
    most = 2 * PIECES if whole_bytes > PIECES * LONGEST_PIECE_BYTES else PIECES
    is_kept = mean_bytes == whole_bytes or not schedule.in_tree_order
    # In a tree, pieces also fill the links of later rounds. If sums are not in tree order, the cuts
    # decide their bits, so the cuts stay those of earlier runs.
    shortest = SHORTEST_WHOLE_BYTES if is_kept else SHORTEST_MESSAGE_BYTES
    count = max(1, min(most, mean_bytes // shortest))
    return shards(schedule.num_elements, count)


SEGMENT_ELEMENTS = 32_768
"""128 kB of float32: 1 ms of a 1 Gbit/s line, several times the cost of a message."""


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
