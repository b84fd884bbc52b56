"""Pieces: a vector is cut, and its parts go through the same schedule side by side.

While one is being added, or waits for a slow peer, the others keep both directions of the link
busy. What is executed and what is priced are cut alike.

Pipelining: the vector is cut into segments, and one follows the other through the same rounds.

A tree alone leaves most links idle: below, nobody sends any more; above, nobody does yet. Cut
into s segments, the next goes up while the last is still on its way. The shorter a segment, the
sooner the pipeline is full; but each is a message, which costs whatever its length.

Source: Pjesivac-Grbovic et al. 2007 (segmentation); Sanders, Speck, Träff 2009.
"""

from collections.abc import Iterator, Sequence

from firecaffe.exchange.schedule import OwnRound, Schedule, shards

PIECES = 4
"""A vector goes through its schedule in this many pieces at most; in twice as many if each would
be longer than LONGEST_PIECE_BYTES."""

LONGEST_PIECE_BYTES = 4_000_000
"""The longest piece: if partners change, messages of two pieces may meet in a switch's queue."""

SHORTEST_MESSAGE_BYTES = 512_000
"""The least mean bytes of a piece's messages. A message from Python costs some 140 us of processor
time, more than the addition that a piece of 128 kB hides; see LOG.md."""

SHORTEST_WHOLE_BYTES = 128_000
"""The same where each message is a whole piece, as in a tree: pieces also fill the links of later
rounds then. And where sums are not in tree order, for there the cuts decide bits, and stay those of
earlier runs."""


def pieces(schedule: Schedule, itemsize: int) -> list[tuple[int, int]]:
    """Cuts a schedule's vector into pieces, (start, stop) each; each piece goes through the
    algorithm's for its length.

    One that cuts it itself into short messages is not cut again. itemsize: bytes of an element.
    """
    mean_bytes = schedule.sent_elements * itemsize // max(1, schedule.num_messages)
    whole_bytes = schedule.num_elements * itemsize
    most = 2 * PIECES if whole_bytes > PIECES * LONGEST_PIECE_BYTES else PIECES
    is_kept = mean_bytes == whole_bytes or not schedule.in_tree_order
    shortest = SHORTEST_WHOLE_BYTES if is_kept else SHORTEST_MESSAGE_BYTES
    count = max(1, min(most, mean_bytes // shortest))
    return shards(schedule.num_elements, count)


SEGMENT_ELEMENTS = 32_768
"""128 kB of float32: 1 ms of a 1 Gbit/s line, several times what sending a message costs."""


def num_segments(num_elements: int, segment_elements: int) -> int:
    """As many as keep a segment to `segment_elements`, and at least one.

    Raises: ValueError where a segment is to hold nothing.
    """
    if segment_elements < 1:
        raise ValueError(f"segment_elements is {segment_elements}; it must be at least 1")
    return max(1, -(-num_elements // segment_elements))


def overlay(
    own: Sequence[OwnRound], segments: Sequence[tuple[int, int]], stride: int
) -> Iterator[OwnRound]:
    """A rank's rounds for all segments: segment c does its round r in round r + c · stride.

    own: the rank's rounds for one segment, whose slices do not matter.
    """
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
