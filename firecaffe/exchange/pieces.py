"""Pieces: a vector is cut, and its parts go through the same schedule side by side.

While one is being added, or waits for a slow peer, the others keep both directions of the link
busy. What is executed and what is priced are cut alike.
"""

from firecaffe.exchange.schedule import Schedule, shards

PIECES = 4
"""A vector goes through its schedule in this many pieces at most; in twice as many if each would
be longer than LONGEST_PIECE_BYTES."""

LONGEST_PIECE_BYTES = 4_000_000
"""The longest piece: if partners change, messages of two pieces may meet in a switch's queue."""

SHORTEST_MESSAGE_BYTES = 512_000
"""The least mean bytes of a piece's messages. A message from Python costs some 140 us of processor
time, more than the addition that a piece of 128 kB hides; see LOG.md."""


def pieces(schedule: Schedule, itemsize: int) -> list[tuple[int, int]]:
    """Cuts a schedule's vector into pieces, (start, stop) each; each piece goes through the
    algorithm's for its length.

    One that cuts it itself into short messages is not cut again. itemsize: bytes of an element.
    """
    mean_bytes = schedule.sent_elements * itemsize // max(1, schedule.num_messages)
    is_long = schedule.num_elements * itemsize > PIECES * LONGEST_PIECE_BYTES
    most = 2 * PIECES if is_long else PIECES
    count = max(1, min(most, mean_bytes // SHORTEST_MESSAGE_BYTES))
    return shards(schedule.num_elements, count)
