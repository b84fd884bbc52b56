"""The metric by which a run is judged, texts of metrics, and whether it learned anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from firecaffe.runs.statistics import Difference, Mean

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


def in_words(name: str) -> str:
    return WORDS.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class Measure:
    """A metric: its name in records, its direction, and whether it is a share of 1."""

    name: str = "top1"
    """The name in records."""
    higher_is_better: bool = True
    """Whether a higher value is better."""
    is_share: bool = True
    """Whether it is a share of 1, shown in per cent with differences in points."""

    @property
    def words(self) -> str:
        """The name for people."""
        return in_words(self.name)

    def shown(self, value: float) -> str:
        """Format a value for people."""
        return f"{value:.2%}" if self.is_share else f"{value:.4g}"

    @property
    def scale(self) -> float:
        """The factor from a record to the printed value: shares are printed in per cent."""
        return 100.0 if self.is_share else 1.0

    @property
    def unit(self) -> str:
        """The unit behind a formatted value."""
        return " %" if self.is_share else ""

    def gain(self, value: float) -> float:
        """Return the value, or its negative if lower is better."""
        return value if self.higher_is_better else -value

    def value_in(self, result: Mapping[str, Any]) -> float:
        """Return the value on the test samples; NaN if it was not finite."""
        value = result.get("test_loss" if self.name == LOSS.name else self.name)
        return float("nan") if value is None else float(value)


TOP1 = Measure()
LOSS = Measure("loss", higher_is_better=False, is_share=False)


def measure_of(result: Mapping[str, Any]) -> Measure:
    """Return the metric of a result.json; top-1 for runs older than the choice."""
    if "metric" not in result:
        return TOP1
    name = result["metric"]
    is_share = name in result.get("shares", ())
    return Measure(name, result.get("higher_is_better", True), is_share)


def other_metrics(result: Mapping[str, Any]) -> list[Measure]:
    """Return a run's other metrics; for older runs top-5."""
    names = result.get("metrics", [metric for metric in ("top5",) if metric in result])
    shares = result.get("shares", names)
    judged_by = measure_of(result).name
    return [Measure(name, is_share=name in shares) for name in names if name != judged_by]


def unlike_measures(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    measures = {name: measure_of(result) for name, result in results.items()}
    first, base = next(iter(measures.items()))
    return [
        f"{name} is judged by {measure.words}, {first} by {base.words}; these are not compared"
        for name, measure in measures.items()
        if measure != base
    ]


def of_mean(mean: Mean, measure: Measure, has_failed: bool = False) -> str:
    """Print a metric's mean with its interval, or the median and all values if seeds failed."""
    # If seeds failed or the interval of a share leaves 0 to 100 %, a mean describes no run.
    low, high = mean.value - mean.half, mean.value + mean.half
    unit = measure.unit
    is_beyond = measure.is_share and (low < 0 or high > 1)
    if mean.values and mean.n > 1 and (has_failed or is_beyond):
        every = ", ".join(_number(value, measure) for value in mean.values)
        return f"median {_number(median(mean.values), measure)}{unit} ({every})"
    interval = f" ± {_number(mean.half, measure)}" if isfinite(mean.half) else ""
    return f"{_number(mean.value, measure)}{interval}{unit}"


def of_difference(difference: Difference, measure: Measure) -> str:
    said = _number(difference.value, measure, "+")
    if isfinite(difference.low):
        low, high = (_number(bound, measure, "+") for bound in (difference.low, difference.high))
        said += f" ({low} to {high})"
    return said + (" points" if measure.is_share else "")


def of_band(band: float, measure: Measure) -> str:
    return f"{measure.scale * band:g}{' points' if measure.is_share else ''}"


def _number(value: float, measure: Measure, sign: str = "") -> str:
    return format(measure.scale * value, f"{sign}.2f" if measure.is_share else f"{sign}.4g")


SIGNIFICANCE = 0.001
"""The probability of mistaking a network that learned nothing for one that did."""


def has_learned(result: Mapping[str, Any]) -> bool | None:
    """Whether top-1 is above the largest class's share (binomial test), or R² above 0.

    The targets' mean, as a prediction, has an R² of 0. None if the result has neither metric.
    """
    share, samples = (result.get(name) for name in ("largest_class_share", "test_samples"))
    if share and samples and "top1" in result:
        # This import takes a second, and most modules that import this file do not test.
        from scipy.stats import binomtest

        correct = round(result["top1"] * samples)
        return bool(binomtest(correct, samples, share, alternative="greater").pvalue < SIGNIFICANCE)
    if result.get("r2") is not None:
        return bool(result["r2"] > 0)
    return None


def failure(results: Sequence[Mapping[str, Any]]) -> str:
    failed = [result for result in results if has_learned(result) is False]
    if not failed:
        return ""
    share = failed[0].get("largest_class_share")
    least = (
        f"top-1 not above {share:.2%}, the share of the largest class"
        if share
        else "R² not above 0, that of the targets' mean"
    )
    return f"{len(failed)} of {len(results)} runs did not learn ({least})"
