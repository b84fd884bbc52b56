"""Metrics and their differences as people read them: shares in per cent and points, others as they
are, with intervals.
"""

from math import isfinite
from statistics import median

from firecaffe.runs.measure import TOP1, Measure
from firecaffe.runs.statistics import Difference, Mean


def percent(mean: Mean, has_failed: bool = False) -> str:
    """An accuracy."""
    return of_mean(mean, TOP1, has_failed)


def of_mean(mean: Mean, measure: Measure, has_failed: bool = False) -> str:
    """A metric's mean. If seeds failed, or if the interval of a share leaves 0 to 100 %, the median
    and all values stand in the mean's place: a mean of 10 and 88 is nobody's.
    """
    low, high = mean.value - mean.half, mean.value + mean.half
    unit = measure.unit
    is_beyond = measure.is_share and (low < 0 or high > 1)
    if mean.values and mean.n > 1 and (has_failed or is_beyond):
        every = ", ".join(_number(value, measure) for value in mean.values)
        return f"median {_number(median(mean.values), measure)}{unit} ({every})"
    interval = f" ± {_number(mean.half, measure)}" if isfinite(mean.half) else ""
    return f"{_number(mean.value, measure)}{interval}{unit}"


def points(found: Difference) -> str:
    """A difference between accuracies, with its interval."""
    return _difference(found, TOP1)


def of_difference(found: Difference, measure: Measure) -> str:
    """A difference between values of a metric, with its interval and its unit."""
    return _difference(found, measure) + (" points" if measure.is_share else "")


def _difference(found: Difference, measure: Measure) -> str:
    said = _number(found.value, measure, "+")
    if isfinite(found.low):
        low, high = (_number(each, measure, "+") for each in (found.low, found.high))
        said += f" ({low} to {high})"
    return said


def of_band(band: float, measure: Measure) -> str:
    """What counts as no difference."""
    return f"{measure.scale * band:g}{' points' if measure.is_share else ''}"


def _number(value: float, measure: Measure, sign: str = "") -> str:
    return format(measure.scale * value, f"{sign}.2f" if measure.is_share else f"{sign}.4g")
