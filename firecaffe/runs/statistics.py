"""What a few repeated runs allow to be said: means with their intervals, differences, effects.

Source: Student 1908; Welch 1947; Holm 1979; Hedges 1981 (the effect's correction for few samples).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import copysign, gamma, inf, sqrt
from statistics import fmean, stdev

from scipy.stats import t, ttest_ind

from firecaffe.runs.explain import holm

CONFIDENCE = 0.95
ALPHA = 0.05
DIFFERENT, ALIKE = TOLD = ("different", "no difference shown")
"""What a test may tell."""

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
    """Of Welch's test, two-sided, after Holm's correction."""
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


def differences(first: Sequence[float], others: Sequence[Sequence[float]]) -> list[Difference]:
    """Each of the others less first, by Welch; at ALPHA over all of them together (Holm)."""
    found = [_difference(first, other) for other in others]
    told = {place: each.p_value for place, each in enumerate(found) if not each.verdict}
    for place, p_value in holm(told).items():
        verdict = DIFFERENT if p_value < ALPHA else ALIKE
        found[place] = replace(found[place], p_value=p_value, verdict=verdict)
    return found


def _difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Without a verdict where there are runs enough for one."""
    value = fmean(second) - fmean(first)
    if min(len(first), len(second)) < FEWEST:
        few = f"{len(first)} and {len(second)} runs, of {FEWEST} at least"
        return Difference(value, -inf, inf, 1.0, float("nan"), f"not enough runs to say ({few})")
    if stdev(first) == stdev(second) == 0:
        p_value, effect = (0.0, copysign(inf, value)) if value else (1.0, 0.0)
        return Difference(value, value, value, p_value, effect, "")
    with warnings.catch_warnings():
        # One side may be of runs that all failed, with next to no spread; the other has some.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = ttest_ind(second, first, equal_var=False)
    low, high = found.confidence_interval(CONFIDENCE)
    p_value = float(found.pvalue)
    return Difference(value, float(low), float(high), p_value, _effect(first, second, value), "")


def _effect(first: Sequence[float], second: Sequence[float], value: float) -> float:
    freedom = len(first) + len(second) - 2
    pooled = sqrt(
        ((len(first) - 1) * stdev(first) ** 2 + (len(second) - 1) * stdev(second) ** 2) / freedom
    )
    correction = gamma(freedom / 2) / (sqrt(freedom / 2) * gamma((freedom - 1) / 2))
    return correction * value / pooled
