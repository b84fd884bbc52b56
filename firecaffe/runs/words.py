"""Accuracies and their differences as people read them: in per cent and points, with intervals."""

from math import isfinite
from statistics import median

from firecaffe.runs.statistics import Difference, Mean


def percent(mean: Mean, has_failed: bool = False) -> str:
    """An accuracy. If seeds failed, or if its interval leaves 0 to 100 %, the median and all values
    stand in the mean's place: a mean of 10 and 88 is nobody's.
    """
    low, high = mean.value - mean.half, mean.value + mean.half
    if mean.values and mean.n > 1 and (has_failed or low < 0 or high > 1):
        every = ", ".join(f"{100 * value:.2f}" for value in mean.values)
        return f"median {100 * median(mean.values):.2f} % ({every})"
    interval = f" ± {100 * mean.half:.2f}" if isfinite(mean.half) else ""
    return f"{100 * mean.value:.2f}{interval} %"


def points(found: Difference) -> str:
    """A difference between accuracies, with its interval."""
    said = f"{100 * found.value:+.2f}"
    if isfinite(found.low):
        said += f" ({100 * found.low:+.2f} to {100 * found.high:+.2f})"
    return said
