"""How a vector is cut: pieces of messages that are worth their own cost."""

from itertools import pairwise

import pytest

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.pieces import (
    PIECES,
    SHORTEST_MESSAGE_BYTES,
    SHORTEST_WHOLE_BYTES,
    pieces,
)

LEAST, WHOLE = SHORTEST_MESSAGE_BYTES // 4, SHORTEST_WHOLE_BYTES // 4
"""Elements of float32."""


@pytest.mark.parametrize(
    ("algorithm", "world_size", "num_elements", "count"),
    [
        ("tree", 2, 2 * WHOLE - 1, 1),  # every message is the whole vector
        ("tree", 2, 2 * WHOLE, 2),
        ("tree", 8, 100 * WHOLE, PIECES),
        ("tree", 8, 4_000_000, PIECES),
        ("tree", 8, 4_000_001, 2 * PIECES),
        ("ring", 8, 8 * WHOLE, 1),  # every message is an eighth; its cuts decide bits
        ("ring", 8, 16 * WHOLE, 2),
        ("halving_doubling", 4, 8 * LEAST, 3),  # halves and quarters: 3 / 8 on average
        ("recursive_doubling", 4, 3 * WHOLE, 3),
        ("pipelined_tree", 8, 20 * LEAST, 1),
        ("double_tree", 8, 20 * LEAST, 1),
        ("tree", 1, 20 * WHOLE, 1),
        ("tree", 4, 0, 1),
    ],
)
def test_pieces_have_messages_of_some_length(
    algorithm: str, world_size: int, num_elements: int, count: int
) -> None:
    schedule = ALGORITHMS[algorithm](world_size, num_elements)
    found = pieces(schedule, 4)
    assert len(found) == count
    assert (found[0][0], found[-1][1]) == (0, num_elements)
    assert all(stop == start for (_, stop), (start, _) in pairwise(found))
