"""The protocol of a mode: when ranks exchange what they have computed, and what counts."""

from collections.abc import Callable
from typing import Protocol

from firecaffe.training.holdings.holding import Holding
from firecaffe.training.outcome import StepResult, Votes
from firecaffe.training.updates.update import StepUpdate


class Queued(Protocol):
    """A step that is queued, or whose sums are on their way."""

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Waits for its end. All ranks read the same steps in the same order. look: called
        meanwhile; it may raise. Raises: NotFiniteError.
        """


class Mode(Protocol):
    """Runs steps on this rank."""

    @property
    def holding(self) -> Holding:
        """What of the model is here."""

    @property
    def update(self) -> StepUpdate:
        """Who updates it by sums of a step: of every step, or of the first ones."""

    @property
    def behind(self) -> int:
        """The number of steps, the last ones, whose outcome cannot be read yet."""

    @property
    def advice(self) -> str:
        """What may be done if the loss stays above its start, for people."""

    def run(self, step: int, learning_rate: float, vote: Callable[[], Votes] = Votes) -> Queued:
        """Trains step `step`, counted from 0. vote: asked once, before sums leave that tell it.

        Raises: PeerLostError; NotFiniteError, on all ranks, before the update.
        """
