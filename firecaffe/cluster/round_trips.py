"""Round trips of the watch's beats, which a run records for its links."""

from collections import deque
from dataclasses import dataclass

MOST_KEPT = 10_000


@dataclass(frozen=True)
class RoundTrip:
    """A beat's way to a rank and back, in a step."""

    step: int
    peer: int
    in_host: bool
    """Whether both are on one host, so that no link is between them."""
    round_trip_s: float


class RoundTrips:
    """The newest round trips. One thread adds them, another takes them."""

    def __init__(self) -> None:
        self._kept: deque[RoundTrip] = deque(maxlen=MOST_KEPT)

    def add(self, trip: RoundTrip) -> None:
        self._kept.append(trip)

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> list[RoundTrip]:
        taken = []
        while self._kept:
            taken.append(self._kept.popleft())
        return taken
