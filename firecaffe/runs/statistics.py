"""What a few repeated runs allow to be said: means with their intervals, differences, effects.

Source: Student 1908; Welch 1947; Hedges 1981 (the effect's correction for few samples).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gamma, inf, sqrt
from statistics import fmean, stdev

from scipy.stats import t, ttest_ind

CONFIDENCE = 0.95
ALPHA = 0.05
FEWEST = 3
"""Runs on each side, with fewer of which no difference is tested."""


@dataclass(frozen=True)
class Mean:
    """Of n values, and half its interval at CONFIDENCE; infinite where one value bears none."""

    value: float
    half: float
    n: int


@dataclass(frozen=True)
class Difference:
    """Of two means (second less first), with its interval at CONFIDENCE."""

    value: float
    low: float
    high: float
    p_value: float
    """Of Welch's test, two-sided."""
    effect: float
    """Hedges' g: in standard deviations."""
    verdict: str
    """For people: different, no difference shown, or not enough runs to say."""


def mean_of(values: Sequence[float]) -> Mean:
    """Raises: ValueError where there is no value."""
    if not values:
        raise ValueError("no value has no mean")
    if len(values) == 1:
        return Mean(values[0], inf, 1)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
    return Mean(fmean(values), half, len(values))


def difference(first: Sequence[float], second: Sequence[float], tests: int = 1) -> Difference:
    """second less first, by Welch. tests: how many are made together, each at ALPHA / tests."""
    value = fmean(second) - fmean(first)
    if min(len(first), len(second)) < FEWEST:
        few = f"{len(first)} and {len(second)} runs, of {FEWEST} at least"
        return Difference(value, -inf, inf, 1.0, float("nan"), f"not enough runs to say ({few})")
    if stdev(first) == stdev(second) == 0:
        verdict = "different" if value else "no difference shown"
        sure = 0.0 if value else 1.0
        return Difference(value, value, value, sure, inf if value else 0.0, verdict)
    found = ttest_ind(second, first, equal_var=False)
    low, high = found.confidence_interval(CONFIDENCE)
    p_value = float(found.pvalue)
    verdict = "different" if p_value < ALPHA / tests else "no difference shown"
    return Difference(
        value, float(low), float(high), p_value, _effect(first, second, value), verdict
    )


def _effect(first: Sequence[float], second: Sequence[float], value: float) -> float:
    freedom = len(first) + len(second) - 2
    pooled = sqrt(
        ((len(first) - 1) * stdev(first) ** 2 + (len(second) - 1) * stdev(second) ** 2) / freedom
    )
    correction = gamma(freedom / 2) / (sqrt(freedom / 2) * gamma((freedom - 1) / 2))
    return correction * value / pooled
