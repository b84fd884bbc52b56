"""Messages of ranks that watch over each other: a header of fixed length, and a text."""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from firecaffe.faults import MAX_TEXT

HEADER = struct.Struct("!BI?I?IQQI")
"""Fields: kind; step, waits; step, waits, rank of the rank furthest behind; clock, echo; bytes."""

BEAT, GOODBYE, FAULT, PULSE, PARTING = range(5)
"""The kinds.

A pulse is the beat of the process next to the rank, and shows only that the rank is there. A
parting says that another rank has said goodbye. Faults and partings are passed on.
"""

MAX_BYTES = 40 * MAX_TEXT
"""Most bytes of a message's text."""

NOBODY = (1 << 32) - 1
"""The number that stands for no rank."""


@dataclass
class RankProgress:
    step: int = 0
    """The step under way, counted from 1; the training updates it."""
    waits: bool = False
    """Whether the rank has done its part and waits for others."""
    waits_from_s: float = float("inf")
    """The time at which the wait began, by time.monotonic()."""


class Standing(NamedTuple):
    """A rank's progress, ordered so that the least is furthest behind."""

    step: int
    waits: bool
    rank: int


class WatchMessage(NamedTuple):
    kind: int
    step: int
    waits: bool
    furthest_behind: Standing | None
    """The rank furthest behind that the sender's side of the tree knows of."""
    clock_ns: int
    """The sender's clock; 0 if it wants no echo."""
    echo_ns: int
    """The receiver's clock of its last beat, plus the time that the sender held it; 0 if none."""
    text: bytes


def pack(
    kind: int,
    place: RankProgress,
    furthest_behind: Standing | None = None,
    clock_ns: int = 0,
    echo_ns: int = 0,
    text: bytes = b"",
) -> bytes:
    behind = furthest_behind or Standing(0, False, NOBODY)
    return HEADER.pack(kind, place.step, place.waits, *behind, clock_ns, echo_ns, len(text)) + text


def take_messages(received: bytearray) -> list[WatchMessage]:
    """Remove and return the complete messages at the front of the bytes; drop malformed bytes."""
    taken = []
    while len(received) >= HEADER.size:
        kind, step, waits, *behind, clock_ns, echo_ns, length = HEADER.unpack_from(received)
        if length > MAX_BYTES or kind > PARTING:
            received.clear()  # no rank of ours sends this
            break
        if len(received) < HEADER.size + length:
            break
        text = bytes(received[HEADER.size : HEADER.size + length])
        del received[: HEADER.size + length]
        standing = Standing(*behind)
        known = None if standing.rank == NOBODY else standing
        taken.append(WatchMessage(kind, step, waits, known, clock_ns, echo_ns, text))
    return taken
