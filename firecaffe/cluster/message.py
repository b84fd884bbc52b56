"""The messages of ranks that watch over each other: a header of fixed length and a text."""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from firecaffe.faults import MOST_TEXT

HEADER = struct.Struct("!BI?I?IQI")
"""The header: kind; step, and whether the sender waits for others; step, waits and rank of who is
furthest behind; the sender's clock in ns; bytes of text that follow."""

BEAT, ECHO, GOODBYE, FAULT, PULSE, PARTING = range(6)
"""The kinds. An echo brings back the clock of the beat that it answers, for the time of the round
trip. A pulse is the beat of the process beside the rank, which knows no more than that the rank is
there. A parting says that another rank has said goodbye. A fault, and a parting, are passed on.
"""

MOST_BYTES = 40 * MOST_TEXT
"""The longest text of a message."""

NOBODY = (1 << 32) - 1
"""The number that stands for no rank."""


@dataclass
class Place:
    """How far a rank has got."""

    step: int = 0
    """The step under way, counted from 1; the training keeps it."""
    waits: bool = False
    """Whether the rank has done its part and waits for others."""
    waits_from_s: float = float("inf")
    """The time since which it waits, by time.monotonic()."""


class Standing(NamedTuple):
    """How far a rank has got, in an order of which the least is the furthest behind."""

    step: int
    waits: bool
    rank: int


class Message(NamedTuple):
    """A message as it was received."""

    kind: int
    step: int
    waits: bool
    furthest_behind: Standing | None
    """The rank furthest behind of those that the sender's side of the tree knows of."""
    clock_ns: int
    text: bytes


def pack(
    kind: int,
    place: Place,
    furthest_behind: Standing | None = None,
    clock_ns: int = 0,
    text: bytes = b"",
) -> bytes:
    """The bytes of a message."""
    behind = furthest_behind or Standing(0, False, NOBODY)
    return HEADER.pack(kind, place.step, place.waits, *behind, clock_ns, len(text)) + text


def take_messages(received: bytearray) -> list[Message]:
    """Takes the whole messages from the front of what was received; noise is thrown away."""
    taken = []
    while len(received) >= HEADER.size:
        kind, step, waits, *behind, clock_ns, length = HEADER.unpack_from(received)
        if length > MOST_BYTES or kind > PARTING:
            received.clear()  # no rank of ours talks like this
            break
        if len(received) < HEADER.size + length:
            break
        text = bytes(received[HEADER.size : HEADER.size + length])
        del received[: HEADER.size + length]
        standing = Standing(*behind)
        known = None if standing.rank == NOBODY else standing
        taken.append(Message(kind, step, waits, known, clock_ns, text))
    return taken
