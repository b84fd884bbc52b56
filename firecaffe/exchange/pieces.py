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
