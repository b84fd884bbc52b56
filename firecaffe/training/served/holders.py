"""Who holds the weights of a training under the real clock, beside rank 0, which decides.

What the holders of weights are told of an event.
"""

from collections.abc import Callable
from dataclasses import dataclass

from firecaffe.synchrony.events import Event
from firecaffe.training.served.compute import Bench, Workbench


@dataclass(frozen=True)
class Told:
    """An event, and what an update that it brings about takes from its step."""

    event: Event
    rate: float
    momentum: float | None
    delay: int
    """The updates over which momentum is delayed; 0 if it is not."""


class Holders:
    """Nobody: rank 0's server has them all, and sends them. Others subclass it."""

    are_others = False
    """Whether somebody else has them, and gets gradients; then no worker can come later."""

    def bench(self, bench: Workbench, place: int) -> Bench:
        """Where this rank's learner at a place computes."""
        return bench

    def tell(self, told: Told) -> None:
        """Tells the next event, on rank 0."""

    def gather(self, look: Callable[[], None]) -> None:
        """Brings the training's state up to date, on rank 0. look: called while it waits; it may
        raise.
        """

    @property
    def moved(self) -> dict[int, tuple[int, int]]:
        """Bytes that each rank has sent to learners of others as a server and received from them,
        up to the last `gather`; empty if rank 0 alone is one.
        """
        return {}

    def end(self) -> None:
        """Ends it, on rank 0, once all learners have ended."""

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of this rank's threads. Returns whether it has come."""
        return True

    def check(self) -> None:
        """Raises: what a thread has met."""

    def cut(self) -> None:
        """Ends all waiting of this rank's threads."""
