"""Statistics of a few repeated runs: means with intervals, differences and speedups.

One interval decides: Welch's, which holds at CONFIDENCE for all comparisons of a table together
(Bonferroni, in the p-value as in the interval). If it excludes zero, the two differ. If it lies
inside the band, they are equivalent. Otherwise there are not enough runs.

Source: Student 1908; Welch 1947; Schuirmann 1987 (two one-sided tests); Dunn 1961 (intervals by
Bonferroni); Hedges 1981 (the effect's correction for few samples).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import copysign, exp, gamma, inf, isnan, log, nan, sqrt
from statistics import fmean, stdev
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row")

CONFIDENCE = 0.95
BAND = 0.003
"""The default difference of a share, as a fraction of 1, that counts as none."""

RELATIVE_BAND = 0.01
"""The default band of other metrics, as a fraction of the first group's mean."""

EQUIVALENT, DIFFERENT, UNDECIDED = "equivalent", "different", "not enough runs to say"

FEWEST = 3

POWER = 0.8
MAX_RUNS = 1000

ROUNDING = 1e-9
"""A tolerance: accuracies are counts of images, so a loss of exactly the band is common."""


@dataclass(frozen=True)
class Mean:
    """The mean of n values, and half its interval at CONFIDENCE; infinite for a single value."""

    value: float
    half: float
    n: int
    values: tuple[float, ...] = ()
    """All values in ascending order; empty if they were not kept."""


@dataclass(frozen=True)
class Difference:
    """The second mean minus the first, with an interval at CONFIDENCE for all rows together."""

    value: float
    low: float
    high: float
    p_value: float
    """The p-value of Welch's two-sided test, times the number of comparisons."""
    effect: float
    """Hedges' g, in standard deviations."""
    verdict: str
    more: int | None
    """Further runs of each side for a verdict, by this mean and spread; None if not known."""


@dataclass(frozen=True)
class Ratio:
    """A speedup of geometric means, with its interval; 0 to infinity for a single run."""

    value: float
    low: float
    high: float

    @property
    def is_shown(self) -> bool:
        return not self.low <= 1 <= self.high


def cut_in_blocks(rows: Sequence[Row], count: int) -> list[Sequence[Row]]:
    """Cut rows into blocks of nearly equal length; near rows, which are correlated, fall in one."""
    ends = [len(rows) * number // count for number in range(count + 1)]
    return [rows[start:stop] for start, stop in pairwise(ends)]


def mean_of(values: Sequence[float], tests: int = 1) -> Mean:
    """Compute a mean, one of `tests` whose intervals hold together. Raises ValueError if empty."""
    if not values:
        raise ValueError("an empty list has no mean")
    half = inf
    if len(values) > 1:
        from scipy.stats import t  # takes a second, and most importers compare nothing

        quantile = float(t.ppf(1 - (1 - CONFIDENCE) / 2 / tests, len(values) - 1))
        spread = nan if any(map(isnan, values)) else stdev(values)  # which raises at NaN
        half = quantile * spread / sqrt(len(values))
    return Mean(fmean(values), half, len(values), tuple(sorted(values)))


def as_gain(found: Difference, higher_is_better: bool) -> Difference:
    if higher_is_better:
        return found
    return replace(
        found, value=-found.value, low=-found.high, high=-found.low, effect=-found.effect
    )


def differences(
    first: Sequence[float], others: Sequence[Sequence[float]], band: float = BAND
) -> list[Difference]:
    return [_difference(first, other, band, len(others)) for other in others]


def _difference(
    first: Sequence[float], second: Sequence[float], band: float, tests: int
) -> Difference:
    value = fmean(second) - fmean(first)
    if isnan(value):
        return Difference(value, -inf, inf, 1.0, nan, UNDECIDED, None)
    low, high, p_value, effect = -inf, inf, 1.0, nan
    if min(len(first), len(second)) >= FEWEST:
        low, high, p_value = _welch(first, second, tests)
        effect = _effect(first, second, value)
    difference = Difference(value, low, high, p_value, effect, DIFFERENT, 0)
    if -band - ROUNDING <= low and high <= band + ROUNDING:
        return replace(difference, verdict=EQUIVALENT)
    if not low <= 0 <= high:
        return difference
    more = more_runs(first, second, [[abs(value)], [band - value, band + value]], tests)
    return replace(difference, verdict=UNDECIDED, more=more)


def _welch(
    first: Sequence[float], second: Sequence[float], tests: int
) -> tuple[float, float, float]:
    if stdev(first) == stdev(second) == 0:
        value = fmean(second) - fmean(first)
        return value, value, 0.0 if value else 1.0
    from scipy.stats import ttest_ind  # as above

    with warnings.catch_warnings():
        # One side may have almost no spread.
        warnings.simplefilter("ignore", RuntimeWarning)
        test = ttest_ind(second, first, equal_var=False)
    low, high = test.confidence_interval(1 - (1 - CONFIDENCE) / tests)
    return float(low), float(high), min(1.0, tests * float(test.pvalue))


def ratios(first: Sequence[float], others: Sequence[Sequence[float]]) -> list[Ratio]:
    """Return the first times over the others', by logarithms, because these scatter equally."""
    logs = [log(time_s) for time_s in first]
    quotients = []
    for other in others:
        other_logs = [log(time_s) for time_s in other]
        value = exp(fmean(logs) - fmean(other_logs))
        low, high = -inf, inf
        if min(len(first), len(other)) > 1:
            low, high, _ = _welch(other_logs, logs, len(others))
        quotients.append(Ratio(value, exp(low), exp(high)))
    return quotients


def runs_enough(spread: float, ways: Sequence[Sequence[float]], tests: int = 1) -> int | None:
    """Return the runs of each side for a verdict with a chance of POWER; None above MAX_RUNS.

    `spread` is the standard deviation of a run. `ways` has for each verdict the distances of the
    true difference from all bounds that its interval must exclude.
    """
    runs = np.arange(FEWEST, MAX_RUNS + 1)
    chances = [
        np.sum([_power(runs, margin, spread, tests) for margin in margins], axis=0)
        - (len(margins) - 1)
        for margins in ways
    ]
    places = np.flatnonzero(np.max(chances, axis=0) >= POWER)
    return int(runs[places[0]]) if len(places) else None


def _power(
    runs: NDArray[np.int64], margin: float, spread: float, tests: int
) -> NDArray[np.float64]:
    from scipy.stats import t  # as above

    # The shifted central t is near the noncentral t, and has no numeric limits.
    freedom = 2 * (runs - 1)
    error = spread * np.sqrt(2 / runs)
    limit = t.ppf(1 - (1 - CONFIDENCE) / 2 / tests, freedom)
    return np.asarray(t.sf(limit - margin / np.maximum(error, 1e-300), freedom))


def pooled_spread(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the standard deviation of a run about its side's mean; None without two runs."""
    freedom = len(first) + len(second) - 2
    if not freedom:
        return None
    squares = sum(stdev(side) ** 2 * (len(side) - 1) for side in (first, second) if len(side) > 1)
    return sqrt(squares / freedom)


def more_runs(
    first: Sequence[float], second: Sequence[float], ways: Sequence[Sequence[float]], tests: int = 1
) -> int | None:
    """Return the further runs of each side for a verdict, as `runs_enough` counts them."""
    spread = pooled_spread(first, second)
    enough = FEWEST if spread is None else runs_enough(spread, ways, tests)
    return enough and max(1, enough - min(len(first), len(second)))


def _effect(first: Sequence[float], second: Sequence[float], value: float) -> float:
    pooled = pooled_spread(first, second)
    if not pooled:
        return copysign(inf, value) if value else 0.0
    freedom = len(first) + len(second) - 2
    correction = gamma(freedom / 2) / (sqrt(freedom / 2) * gamma((freedom - 1) / 2))
    return correction * value / pooled
