"""What the holders of weights are told of an event."""

from dataclasses import dataclass

from firecaffe.synchrony.events import Event


@dataclass(frozen=True)
class Told:
    """An event, and what an update that it brings about takes from its step."""

    event: Event
    rate: float
    momentum: float | None
    delay: int
    """The updates over which momentum is delayed; 0 if it is not."""
