"""A task as the step and the evaluation see it. It alone knows what a sample, an output or a metric
is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Loss = Callable[[Any, Any], Tensor]
"""(the network's outputs, targets) -> the mean loss of the samples, a scalar."""


@dataclass(frozen=True)
class Task:
    """A loss, and metrics whose sums over samples are exact in any order of workers."""

    loss: Loss
    metrics: tuple[str, ...]
    """The names of the metrics. Each value is a sum over samples, divided by their number."""
    count: Callable[[Any, Any], Tensor]
    """(outputs, targets) -> the sums of the metrics: float32, shape (number of metrics,), whole
    numbers.
    """
    classes: Callable[[Any], list[int]] | None = None
    """The class of each sample of some targets, if samples have one: the share of the largest class
    is what a network gets that has learned nothing.
    """
