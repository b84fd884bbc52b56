"""A micro-batch between its forward and its backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from firecaffe.parallel.own_samples import Gradients

EMPTY: Sequence[tuple[int, Gradients]] = ()


@dataclass(frozen=True)
class Ready:
    """A micro-batch that is ready for backward."""

    leaf: int
    root: Tensor | None
    """To be differentiated; None if it has no samples, or nothing here has a gradient."""
    tail: Sequence[Tensor]
    """The loss by itself, and the changes to buffers."""
    parts: Sequence[tuple[int, Gradients]] = field(default=EMPTY)
    """Of micro-batches that other ranks of the row brought with it: their numbers, and the
    gradients of this rank's parts, which backward fills in."""
