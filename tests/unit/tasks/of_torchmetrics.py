"""Metrics of torchmetrics, to compare with and to refuse. It takes 3 s of a processor to load, so
tests import this where they use it: each process collects the tests, and one runs them.
"""

from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics import regression as of_numbers
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
    MultilabelAUROC,
    MultilabelExactMatch,
)

REFERENCES: dict[str, tuple[torchmetrics.Metric, Any]] = {
    "classification f1": (MulticlassF1Score(4), lambda x: x.argmax(1)),
    "classification auroc": (MulticlassAUROC(4), lambda x: x.softmax(1)),
    "multilabel auroc": (MultilabelAUROC(4), lambda x: x.sigmoid()),
    "multilabel exact_match": (MultilabelExactMatch(4), lambda x: x.sigmoid()),
    "segmentation mean_iou": (MulticlassJaccardIndex(3, ignore_index=255), None),
    "regression mae": (of_numbers.MeanAbsoluteError(), None),
    "regression rmse": (of_numbers.MeanSquaredError(squared=False), None),
    "regression r2": (of_numbers.R2Score(), None),
}
"""By task and name: the metric, and what it takes of a network's outputs."""


class Pixels(torchmetrics.Metric):
    """Counts in float32, as many do."""

    higher_is_better = True
    seen: Tensor
    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("most", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, prediction: Tensor, targets: Tensor) -> None:
        self.seen += 2.0**24
        self.seen += 1
        self.most = torch.maximum(self.most, prediction.max())

    def compute(self) -> Tensor:
        return self.seen - 2.0**24 * 8 + self.most * 0


class Counting(Pixels):
    """Counts batches in an attribute."""

    batches = 0

    def update(self, prediction: Tensor, targets: Tensor) -> None:
        super().update(prediction, targets)
        self.batches += 1


class PerSample(torchmetrics.Metric):
    """Keeps the high outputs of each sample, as a metric of detections keeps its boxes."""

    higher_is_better = True
    high: list[Tensor]

    def __init__(self, reduction: str | None) -> None:
        super().__init__()
        self.add_state("high", [], dist_reduce_fx=reduction)
        self.add_state("none", [], dist_reduce_fx=None)

    def update(self, prediction: Tensor, targets: Tensor) -> None:
        self.high += [row[row > 0].reshape(-1, 1) for row in prediction]

    def compute(self) -> Tensor:
        return torch.stack([rows.sum() / max(1, len(rows)) for rows in self.high]).mean()


class Averaged(Pixels):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")


REFUSED: list[tuple[Any, list[str]]] = [
    (Averaged(), ["Averaged", "mean"]),
    (of_numbers.PearsonCorrCoef(), ["PearsonCorrCoef", "none"]),  # a state that no sum makes
    (MulticlassF1Score, ["'mine'", "torchmetrics.Metric"]),
    (torchmetrics.MetricCollection([MulticlassF1Score(4)]), ["'mine'", "MulticlassF1Score"]),
    (3, ["'mine'", "3"]),
]
"""What is no metric of a task, and the words of its line."""


def f1(average: Any = "macro") -> torchmetrics.Metric:
    return MulticlassF1Score(4, average=average)
