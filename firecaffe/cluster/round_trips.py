"""How long the beats of the watch are on their way: what a run records of its links."""

from collections import deque
from dataclasses import dataclass

MOST_KEPT = 10_000
"""Kept until they are taken."""


@dataclass(frozen=True)
class RoundTrip:
    """A beat's way to a rank and back, in a step."""

    step: int
    peer: int
    in_host: bool
    """Whether both are on one host, where no link is between them."""
    round_trip_s: float


class RoundTrips:
    """The newest; one thread adds, another takes."""

    def __init__(self) -> None:
        self._kept: deque[RoundTrip] = deque(maxlen=MOST_KEPT)

    def add(self, trip: RoundTrip) -> None:
        self._kept.append(trip)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> list[RoundTrip]:
        """Those since the last time."""
        taken = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken
