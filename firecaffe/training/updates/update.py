"""The protocol of an update: how gradients are summed over ranks, and who applies the sums."""

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
    """A step's sums, and whether its gradients are fit for an update; equal on a model's ranks."""

    sums: Tensor
    """The sums of the loss, of the task's counts, and of what was counted with them."""
    is_finite: Tensor
    """Whether each parameter's mean gradient is finite: bool, shape (names,)."""
    norm: Tensor
    """The norm of the whole gradient before clipping, shape (); 0 if gradients are not clipped."""
    names: Sequence[str]
    """The parameters' names, in network order."""
    may_overflow: bool = False
    """Whether gradients may be infinite because the loss scale handles it."""
    squares: Tensor | None = None
    """Squared norms of gradients, shape (2,), before clipping; None if they are not measured.

    The first is the sum over micro-batches, the second that of their mean.
    """

    def to_host(self, queue: Queue) -> "Found":
        return replace(
            self,
            sums=queue.to_host(self.sums),
            is_finite=queue.to_host(self.is_finite),
            norm=queue.to_host(self.norm),
            squares=None if self.squares is None else queue.to_host(self.squares),
        )


class StepUpdate(Protocol):
    @property
    def queue(self) -> Queue: ...

    @property
    def is_known(self) -> bool:
        """Whether the result of `check` is known when it returns, and not a step later."""

    def begin(
        self,
        weight: float,
        leaves: Sequence[int],
        counts: Callable[[], Tensor],
        measures: bool = False,
    ) -> None:
        """Begin a step of `weight` full micro-batches, by which sums are divided.

        `leaves` are this rank's micro-batches, in the order in which they are added. `counts` is
        called before the last backward, and returns all that this rank has counted. `measures` asks
        for the squared norms of the gradients of micro-batches and of their mean.
        """

    def add(self, ready: Ready) -> None:
        """Run backward for a micro-batch, and add its gradients.

        Sums that include this rank's last micro-batch are sent to the other ranks at once.
        """

    def sums(self) -> Totals:
        """Wait for the sums; set each `grad` to the mean. All call it. Raises: PeerLostError."""

    def check(self, totals: Totals, counted: int) -> Found:
        """Undo the loss scale, clip, check the gradients. All call it. Raises: PeerLostError."""

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> None:
        """Update the weights, equally on all ranks. All call it. Raises: PeerLostError."""

    def share_out(self, shares: Shares) -> None:
        """Give ranks other micro-batches from the next step on. This changes no bit of a result."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Use the moving average, if there is one, in a `with` block. All ranks call it."""

    def take_average(self) -> None:
        """Replace the weights by the moving average for good, if there is one."""

    def close(self) -> None:
        """Stop exchanging gradients. No rank waits for others from here on."""

    @property
    def parts_s(self) -> float: ...

    @property
    def exchanges(self) -> Sequence[Span]:
        """The exchanges of this step that no computation hides, other than those of gradients."""
