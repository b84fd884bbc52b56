"""The protocol of an update by sums of a step: how gradients are summed, and who applies them.

What the sums of a step are like.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.totals import Totals
from firecaffe.training.holdings.ready import Ready
from firecaffe.training.times import Span
from firecaffe.transport.queue import Queue


@dataclass(frozen=True)
class Found:
    """The sums of a step, and whether its gradients are fit for an update: the same on all ranks
    that hold one model.
    """

    sums: Tensor
    """Of the loss, of what the task counts, and of what was counted with these."""
    is_finite: Tensor
    """Whether each parameter's mean gradient is: bool, shape (names,)."""
    norm: Tensor
    """Of the whole gradient, if it is clipped, before that; else 0. Shape ()."""
    names: Sequence[str]
    """The parameters, in network order."""
    may_overflow: bool = False
    """Whether gradients may be infinite: the loss scale mends that."""

    def to_host(self, queue: Queue) -> "Found":
        """The same in the host's memory, once the device has got there."""
        return replace(
            self,
            sums=queue.to_host(self.sums),
            is_finite=queue.to_host(self.is_finite),
            norm=queue.to_host(self.norm),
        )


class StepUpdate(Protocol):
    """Sums the gradients of a step over ranks, and updates the weights by them."""

    @property
    def queue(self) -> Queue:
        """The work of this rank's device."""

    @property
    def is_known(self) -> bool:
        """Whether what `check` finds is there when it returns, and not a step later."""

    def begin(self, weight: float, leaves: Sequence[int], counts: Callable[[], Tensor]) -> None:
        """Begins a step. weight: the number of full micro-batches, by which sums are divided.
        leaves: this rank's, in the order in which they are added. counts: asked before the last
        backward for what this rank has counted of all.
        """

    def add(self, ready: Ready) -> None:
        """Runs backward for a micro-batch, and adds its gradients. Sums leave for other ranks when
        those of this rank's last micro-batch are there.
        """

    def sums(self) -> Totals:
        """Waits for the sums. The mean gradients are in the `grad` of what this rank updates then.
        All ranks call it. Raises: PeerLostError.
        """

    def check(self, totals: Totals, counted: int) -> Found:
        """Undoes the loss scale, clips, and finds out whether gradients are fit for an update. All
        ranks call it. counted: as many of the counts, the last ones, every rank has a share of.

        Raises: PeerLostError.
        """

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> None:
        """Updates the weights; then all ranks that hold the same part have the same. All call it.
        Raises: PeerLostError.
        """

    def share_out(self, shares: Shares) -> None:
        """Gives ranks other micro-batches from the next step on. No bit depends on it."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Puts the moving average in the weights' place, if one is kept, for a `with` block. All
        ranks call it.
        """

    def take_average(self) -> None:
        """Puts the moving average in the weights' place for good, if one is kept."""

    def close(self) -> None:
        """Ends what exchanges gradients; nobody waits for other ranks from here on."""

    @property
    def parts_s(self) -> float:
        """Seconds of exchanges of the gradients of parts of layers so far."""

    @property
    def exchanges(self) -> Sequence[Span]:
        """The exchanges of this step that no computation hides, beside those of gradients."""
