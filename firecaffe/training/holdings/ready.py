"""A micro-batch between its forward and its backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from firecaffe.parallel.own_samples import Gradients

EMPTY: Sequence[tuple[int, Gradients]] = ()


@dataclass(frozen=True)
class Ready:
    leaf: int
    root: Tensor | None
    """The tensor to differentiate; None without samples, or if nothing here has a gradient."""
    tail: Sequence[Tensor]
    """The plain loss, and the changes to buffers."""
    parts: Sequence[tuple[int, Gradients]] = field(default=EMPTY)
    """The row's micro-batches by number, with this rank's parts' gradients, set by backward."""
