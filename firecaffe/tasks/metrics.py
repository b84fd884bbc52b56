"""The metrics that a recipe may name: from torchmetrics, and exact counts of correct labels.

torchmetrics is loaded when one of its metrics is measured. Naming one, and top1, do not need it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan
from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.runs.measure import LOSS
from firecaffe.tasks import TaskConfig
from firecaffe.tasks.metric import Metric, Prepare, Reduction, State, Sums, TorchMetric
from firecaffe.tasks.outputs import flat, in_float64, prediction_of
from firecaffe.tasks.task import Known
from firecaffe.value_checks import did_you_mean

PLACES = 5


def count_correct(outputs: Any, labels: Tensor) -> Tensor:
    """Count labels that rank first, and in the first five: float32 (2,). Raises RecipeError."""
    if labels.ndim != 1:
        raise RecipeError(
            f"it takes one class for each sample, (samples,); found targets of "
            f"{tuple(labels.shape)} (of one-hot rows, argmax(1) is the class)"
        )
    logits = prediction_of(outputs)
    places = min(PLACES, logits.shape[1])
    best = logits.topk(places).indices == labels[:, None]
    up_to_place = best.sum(0, dtype=torch.float32).cumsum(0)
    return up_to_place[:: places - 1] if places > 1 else up_to_place.expand(2)


Make = Callable[[Known], Metric]


@dataclass(frozen=True)
class MetricRow:
    """A metric: how each task makes it, its direction, and whether it is a share of 1."""

    of: Mapping[str, Make]
    """Functions by task name, from the properties of the data to the metric."""
    higher_is_better: bool = True
    """Whether a higher value is better."""
    is_share: bool = True
    """Whether it is a share of 1, shown in per cent."""
    fewest: int = 1
    """The fewest samples that it has a value for."""


def _logits(outputs: Any, known: Known) -> Tensor:
    logits = prediction_of(outputs).float()
    if logits.shape[1] != known.classes():
        raise RecipeError(
            f"the network has {logits.shape[1]} outputs and the data {known.classes()} classes; "
            "this metric takes one output for each class (top1 and top5 take more)"
        )
    return logits


def _labels(known: Known) -> Prepare:
    def prepare(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        labels = _logits(outputs, known).argmax(1)
        wrong = (targets < 0) | (targets >= known.classes())
        if known.ignore_index is not None:
            wrong &= targets != known.ignore_index
        if bool(wrong.any()):
            raise RecipeError(
                f"found the class {int(targets[wrong][0])}; expected 0 to {known.classes() - 1}"
            )
        return labels, targets

    return prepare


def _probabilities(known: Known) -> Prepare:
    return lambda outputs, targets: (_logits(outputs, known).softmax(1), targets)


def _label_probabilities(known: Known) -> Prepare:
    return lambda outputs, targets: (_logits(outputs, known).sigmoid(), targets.int())


def _built(name: str, **options: Any) -> Any:
    import torchmetrics.classification as of_classes
    import torchmetrics.regression as of_numbers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some warn that they keep all predictions
        return {**vars(of_numbers), **vars(of_classes)}[name](**options)


def _multiclass(name: str, see: Callable[[Known], Prepare] = _labels, **options: Any) -> Make:
    def make(known: Known) -> Metric:
        ignored = known.ignore_index
        made = _built(name, num_classes=known.classes(), ignore_index=ignored, **options)
        return TorchMetric(made, see(known))

    return make


def _multilabel(name: str, **options: Any) -> Make:
    def make(known: Known) -> Metric:
        made = _built(name, num_labels=known.classes(), **options)
        return TorchMetric(made, _label_probabilities(known))

    return make


def _regression(name: str, see: Prepare = flat, **options: Any) -> Mapping[str, Make]:
    return {"regression": lambda known: TorchMetric(_built(name, **options), see)}


def _macro(name: str) -> Mapping[str, Make]:
    of_classes = _multiclass(f"Multiclass{name}", average="macro")
    of_labels = _multilabel(f"Multilabel{name}", average="macro")
    return {"classification": of_classes, "multilabel": of_labels, "segmentation": of_classes}


def _counted(place: int) -> Mapping[str, Make]:
    def count(outputs: Any, labels: Tensor) -> Tensor:
        return count_correct(outputs, labels)[place]

    return {"classification": lambda known: Sums(count)}


METRICS: dict[str, MetricRow] = {
    "top1": MetricRow(_counted(0)),
    "top5": MetricRow(_counted(1)),
    "accuracy": MetricRow(
        {
            "classification": _multiclass("MulticlassAccuracy", average="micro"),
            "multilabel": _multilabel("MultilabelAccuracy", average="macro"),
            "segmentation": _multiclass("MulticlassAccuracy", average="micro"),
        }
    ),
    "balanced_accuracy": MetricRow(
        {
            "classification": _multiclass("MulticlassAccuracy", average="macro"),
            "segmentation": _multiclass("MulticlassAccuracy", average="macro"),
        }
    ),
    "precision": MetricRow(_macro("Precision")),
    "recall": MetricRow(_macro("Recall")),
    "f1": MetricRow(_macro("F1Score")),
    "auroc": MetricRow(
        {
            "classification": _multiclass("MulticlassAUROC", _probabilities),
            "multilabel": _multilabel("MultilabelAUROC"),
        }
    ),
    "average_precision": MetricRow(
        {
            "classification": _multiclass("MulticlassAveragePrecision", _probabilities),
            "multilabel": _multilabel("MultilabelAveragePrecision"),
        }
    ),
    "calibration_error": MetricRow(
        {"classification": _multiclass("MulticlassCalibrationError", _probabilities)},
        higher_is_better=False,
    ),
    "mcc": MetricRow({"classification": _multiclass("MulticlassMatthewsCorrCoef")}, is_share=False),
    "exact_match": MetricRow({"multilabel": _multilabel("MultilabelExactMatch")}),
    "hamming_distance": MetricRow(
        {"multilabel": _multilabel("MultilabelHammingDistance")}, higher_is_better=False
    ),
    "mean_iou": MetricRow({"segmentation": _multiclass("MulticlassJaccardIndex", average="macro")}),
    "mae": MetricRow(_regression("MeanAbsoluteError"), higher_is_better=False, is_share=False),
    "mse": MetricRow(_regression("MeanSquaredError"), higher_is_better=False, is_share=False),
    "rmse": MetricRow(
        _regression("MeanSquaredError", squared=False), higher_is_better=False, is_share=False
    ),
    "mape": MetricRow(_regression("MeanAbsolutePercentageError"), higher_is_better=False),
    "r2": MetricRow(_regression("R2Score", in_float64), is_share=False, fewest=2),
    "spearman": MetricRow(_regression("SpearmanCorrCoef"), is_share=False, fewest=2),
}
"""The metrics by name. They are macro means over classes or labels, except accuracy of classes."""


class Named:
    """A row of METRICS for a task. The metric is made when it is first measured."""

    def __init__(self, task: str, name: str, known: Known) -> None:
        row = METRICS[name]
        if task in WITH_CLASSES and name not in EXACT:
            known.classes()  # raises now, not in the first evaluation
        self.higher_is_better, self.is_share = row.higher_is_better, row.is_share
        self._make, self._fewest = partial(row.of[task], known), row.fewest

    @cached_property
    def _made(self) -> Metric:
        return self._make()

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        return self._made.reductions

    def of_batch(self, outputs: Any, targets: Any) -> State:
        return self._made.of_batch(outputs, targets)

    def value(self, state: State, samples: int) -> float:
        return nan if samples < self._fewest else self._made.value(state, samples)


EXACT = ("top1", "top5")
"""Metrics that are counted here, and allow more outputs than classes."""

WITH_CLASSES = ("classification", "multilabel", "segmentation")


def names_for(task: str) -> list[str]:
    return [name for name, row in METRICS.items() if task in row.of]


def chosen(
    config: TaskConfig, task: str, known: Known, default: Sequence[str]
) -> Mapping[str, Metric]:
    """Return a recipe's metrics by name, with the one that chooses, even if `metrics` omits it."""
    choosing = [config.metric] if config.metric not in ("", LOSS.name) else []
    return {name: Named(task, name, known) for name in [*(config.metrics or default), *choosing]}


def check_named(config: TaskConfig, known: Sequence[str]) -> None:
    for word, names in (("task.metrics has", config.metrics), ("task.metric is", [config.metric])):
        for name in filter(None, names):
            if name not in (*known, LOSS.name) or (word.endswith("has") and name == LOSS.name):
                raise RecipeError(
                    f"{word} {name!r}; task.name {config.name!r} has "
                    f"{', '.join(known) or 'no metric'}{did_you_mean(name, known)}"
                )
