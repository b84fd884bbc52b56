"""The interface of a task. Only the task knows what a sample, an output or a metric is.

Torch's losses of classes become means over samples, even if some have no label.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.runs.measure import LOSS, Measure
from firecaffe.tasks import TaskConfig
from firecaffe.tasks.metric import Metric, as_metric

Loss = Callable[[Any, Any], Tensor]
"""A function of (outputs, targets) that returns the mean loss of the samples, a scalar."""


@dataclass(frozen=True)
class Counts:
    """The numbers counted in each training step, next to the loss, over the samples of the step."""

    names: tuple[str, ...]
    count: Callable[[Any, Any], Tensor]
    """A function of (outputs, targets) that returns float32 (names,).

    The numbers are whole, so their sum has the same bits in any order, on any number of workers.
    """


@dataclass(frozen=True)
class Task:
    """A loss to minimize, and metrics that evaluations measure.

    A task of your own:

        firecaffe.Task(loss, metrics={"mae": torchmetrics.MeanAbsoluteError()})
    """

    loss: Loss
    """A function of (outputs, targets) that returns the mean loss of the samples, a scalar."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The metrics by name: a `torchmetrics.Metric`, a `firecaffe.Sums`, or a function.

    A function of (outputs, targets) returns the sum over the samples. Its mean is the value.
    """
    metric: str = ""
    """The metric that chooses: a name of `metrics`, or loss. Empty: the first, or else the loss."""
    higher_is_better: bool | None = None
    """Whether higher is better for `metric`; None if the metric itself says so."""
    counts: Counts | None = None
    """The numbers counted in each step, next to the loss; None for nothing."""
    classes: Callable[[Any], list[int]] | None = None
    """A function that returns the class of each sample of some targets, if samples have one.

    The share of the largest class is what a network reaches that has learned nothing.
    """
    wrong: Callable[[Any], str] | None = None
    """A function that says what is wrong with outputs and what is expected; "" if nothing is.

    It is called on the meta device, with shapes alone, before any rank starts.
    """

    @property
    def counted(self) -> tuple[str, ...]:
        """Return the names of what training steps count."""
        return () if self.counts is None else self.counts.names

    @cached_property
    def measured(self) -> Mapping[str, Metric]:
        """The metrics in the form that evaluations need. Raises RecipeError if one is invalid."""
        return {name: as_metric(name, metric) for name, metric in self.metrics.items()}

    @property
    def measure(self) -> Measure:
        """The metric that a run is judged by."""
        name = self.metric or next(iter(self.metrics), LOSS.name)
        if name == LOSS.name:
            return LOSS
        metric = self.measured[name]
        higher = metric.higher_is_better if self.higher_is_better is None else self.higher_is_better
        return Measure(name, bool(higher), metric.is_share)

    @property
    def shares(self) -> list[str]:
        """The metrics that are shares of 1."""
        return [name for name, metric in self.measured.items() if metric.is_share]


@dataclass(frozen=True)
class Known:
    """The data's properties: the number of classes or labels, and the ignored target, or None."""

    num_classes: int | None = None
    ignore_index: int | None = None

    def classes(self) -> int:
        if self.num_classes is None:
            raise RecipeError(
                "the data do not say how many classes there are; set "
                "task.args = { num_classes = N }"
            )
        return self.num_classes


def class_weights(config: TaskConfig, known: Known) -> Tensor | None:
    """Return the weights, float32 (classes,), or None. Raises RecipeError if not one per class."""
    weights = config.class_weights
    if not weights:
        return None
    if known.num_classes is not None and len(weights) != known.num_classes:
        raise RecipeError(
            f"task.class_weights has {len(weights)} numbers; there are {known.num_classes} classes"
        )
    return torch.tensor(weights)


def over_samples(loss: Loss) -> Loss:
    """Return the loss, but with torch's mean over labels replaced by the mean over all samples.

    torch divides by the labels that are not `ignore_index` in a micro-batch. Here a sample without
    a label adds 0. So the micro-batch's size does not change the weight of a label, and a
    micro-batch without labels has the loss 0, not NaN. Other losses are returned as they are.
    """
    is_torchs = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
    if not is_torchs or loss.reduction != "mean" or loss.weight is not None:  # type: ignore[attr-defined]
        return loss
    return _OverSamples(loss)


def leaves_labels_out(loss: Loss, targets: Any) -> bool:
    """Return whether targets have labels that `over_samples` counts and torch's mean leaves out."""
    if not isinstance(loss, _OverSamples) or not isinstance(targets, Tensor):
        return False
    return bool((targets == loss.loss.ignore_index).any())


class _OverSamples:
    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            value: Tensor = self.loss(outputs, targets)  # shares of classes
            return value
        summed = copy(self.loss)
        summed.reduction = "sum"
        total: Tensor = summed.forward(outputs, targets)
        return total / max(1, targets.numel())
