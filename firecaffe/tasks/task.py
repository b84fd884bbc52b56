"""A task as the step and the evaluation see it. It alone knows what a sample, an output or a metric
is.

What a task knows of its data and words, and how class weights are taken.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.runs.measure import LOSS, Measure
from firecaffe.tasks.config import TaskConfig
from firecaffe.tasks.metric import Metric
from firecaffe.tasks.own_metric import as_metric

Loss = Callable[[Any, Any], Tensor]
"""(the network's outputs, targets) -> the mean loss of the samples, a scalar."""


@dataclass(frozen=True)
class Counts:
    """What is counted beside the loss of each step, of the samples it has seen."""

    names: tuple[str, ...]
    count: Callable[[Any, Any], Tensor]
    """(outputs, targets) to a number of samples for each name: float32, shape (names,). Whole
    numbers have the same sum in any order, so workers change no bit of it.
    """


@dataclass(frozen=True)
class Task:
    """A loss to lower, and metrics that evaluations measure.

    A task of one's own:

        firecaffe.Task(loss, metrics={"mae": torchmetrics.MeanAbsoluteError()})
    """

    loss: Loss
    """(outputs, targets) to the mean loss of the samples, a scalar."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """By name: a `torchmetrics.Metric`, a `firecaffe.Sums`, or a function (outputs, targets) to the
    sum over the samples, whose mean is the value.
    """
    metric: str = ""
    """The one that chooses: a name of `metrics`, or loss. Empty: the first; the loss if there is
    none.
    """
    higher_is_better: bool | None = None
    """Whether more of `metric` is better; None if the metric itself says so."""
    counts: Counts | None = None
    """What is counted beside the loss of each step; None for nothing."""
    classes: Callable[[Any], list[int]] | None = None
    """The class of each sample of some targets, if samples have one: the share of the largest class
    is what a network gets that has learned nothing.
    """
    wrong: Callable[[Any], str] | None = None
    """(outputs) to what is wrong with them and what is expected; empty if they will do. Asked with
    shapes alone, on the meta device, before any rank is started.
    """

    @property
    def counted(self) -> tuple[str, ...]:
        """What is counted in the steps of a training, by name."""
        return () if self.counts is None else self.counts.names

    @cached_property
    def measured(self) -> Mapping[str, Metric]:
        """The metrics, each as an evaluation takes it.

        Raises: RecipeError if one cannot be.
        """
        return {name: as_metric(name, each) for name, each in self.metrics.items()}

    @property
    def measure(self) -> Measure:
        """What a run of it is judged by."""
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
    """num_classes: classes or labels of the data; None if the data do not say. ignore_index: the
    target that is left out; None if there is none.
    """

    num_classes: int | None = None
    ignore_index: int | None = None

    def classes(self) -> int:
        """Their number. Raises: RecipeError if nobody knows it."""
        if self.num_classes is None:
            raise RecipeError(
                "the data do not say how many classes there are; set "
                "task.args = { num_classes = N }"
            )
        return self.num_classes


def class_weights(config: TaskConfig, known: Known) -> Tensor | None:
    """float32 (classes,); None if there are none. Raises: RecipeError if not one for each class."""
    found = config.class_weights
    if not found:
        return None
    if known.num_classes is not None and len(found) != known.num_classes:
        raise RecipeError(
            f"task.class_weights has {len(found)} numbers; there are {known.num_classes} classes"
        )
    return torch.tensor(found)
