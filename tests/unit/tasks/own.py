"""Own tasks that recipes of the tests name."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import firecaffe


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == labels).sum()


def good(scale: float = 1.0, better: bool | None = True) -> firecaffe.Task:
    import torchmetrics  # 3 s of a processor, which not all tests that import this need

    return firecaffe.Task(
        lambda outputs, labels: scale * F.cross_entropy(outputs, labels),
        metrics={"right": right, "mean": torchmetrics.MeanMetric()},
        metric="right",
        higher_is_better=better,
    )


def no_task() -> str:
    return "cross entropy"


def fails() -> firecaffe.Task:
    raise KeyError("weights")


def of_lower() -> firecaffe.Task:
    import torchmetrics

    error = torchmetrics.MeanSquaredError()
    return firecaffe.Task(F.mse_loss, metrics={"error": error}, higher_is_better=True)


def called_loss() -> firecaffe.Task:
    return firecaffe.Task(F.cross_entropy, metrics={"loss": right})


def both(outputs: Tensor, labels: Tensor) -> Any:
    return outputs.mean(), outputs.std()


def two_losses() -> firecaffe.Task:
    return firecaffe.Task(both)


def raises(outputs: Tensor, labels: Tensor) -> Tensor:
    raise LookupError("no such sample")


def loss_fails() -> firecaffe.Task:
    return firecaffe.Task(raises)


def one_alone(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels) if len(labels) <= 2 else raises(outputs, labels)


def loss_fails_later() -> firecaffe.Task:
    """What is tried before a rank is started is one sample, and two."""
    return firecaffe.Task(one_alone)


def with_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    error = F.cross_entropy(outputs, labels)
    (slope,) = torch.autograd.grad(error, outputs, create_graph=True)
    return error + slope.square().mean()


def loss_of_slopes() -> firecaffe.Task:
    """Has a loss that differentiates, which an evaluation does not allow."""
    return firecaffe.Task(with_slope)


def metric_fails() -> firecaffe.Task:
    return firecaffe.Task(F.cross_entropy, {"mine": raises}, higher_is_better=True)


def nan() -> firecaffe.Task:
    return firecaffe.Task(lambda outputs, labels: F.cross_entropy(outputs, labels) * torch.nan)
