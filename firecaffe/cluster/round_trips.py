"""The round trips of the watch's beats: what a run records of its links."""

from collections import deque
from dataclasses import dataclass

MOST_KEPT = 10_000
"""The most round trips that are kept until they are taken."""


@dataclass(frozen=True)
class RoundTrip:
    """A beat's way to a rank and back, in a step."""

    step: int
    peer: int
    in_host: bool
    """Whether both are on one host, so that no link is between them."""
    round_trip_s: float


class RoundTrips:
    """The newest round trips; one thread adds, another takes."""

    def __init__(self) -> None:
        self._kept: deque[RoundTrip] = deque(maxlen=MOST_KEPT)

    def add(self, trip: RoundTrip) -> None:
        self._kept.append(trip)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> list[RoundTrip]:
        """Takes the round trips since the last call."""
        taken = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken
