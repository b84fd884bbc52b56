"""What the sums of a step are like."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

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
