"""What a run is judged by: a metric of its task, which way it is better, and how it is said."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORDS = {
    "top1": "top-1",
    "top5": "top-5",
    "mean_iou": "mean IoU",
    "f1": "F1",
    "auroc": "AUROC",
    "mcc": "MCC",
    "mae": "MAE",
    "mse": "MSE",
    "rmse": "RMSE",
    "mape": "MAPE",
    "r2": "R²",
}
"""Metrics that people call otherwise than a record does."""


def in_words(name: str) -> str:
    """What people call a metric."""
    return WORDS.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class Measure:
    """A metric: its name in records, its direction, and whether it is a share of 1."""

    name: str = "top1"
    higher_is_better: bool = True
    is_share: bool = True
    """Shares are said in per cent, and their differences in points."""

    @property
    def words(self) -> str:
        """What people call it."""
        return in_words(self.name)

    def shown(self, value: float) -> str:
        """A value for people."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}"

    def gain(self, value: float) -> float:
        """The value, or its negative if lower is better: more of it is better."""
        return value if self.higher_is_better else -value


TOP1 = Measure()
LOSS = Measure("loss", higher_is_better=False, is_share=False)


def measure_of(result: Mapping[str, Any]) -> Measure:
    """That of a run, by its result.json; top-1 of runs that were made before there were others."""
    if "metric" not in result:
        return TOP1
    name = str(result["metric"])
    return Measure(name, bool(result["higher_is_better"]), name in result["shares"])
