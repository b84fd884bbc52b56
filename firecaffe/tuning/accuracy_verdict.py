"""Judges whether the small batch's accuracy was kept, by the interval of the difference (a gain).

kept: the interval lies above -band.
lost: the interval lies below -band, or a seed has learned nothing.
not enough seeds: -band lies within the interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from firecaffe.runs.measure import failure, measure_of, of_difference, of_mean
from firecaffe.runs.statistics import (
    BAND,
    MAX_RUNS,
    RELATIVE_BAND,
    ROUNDING,
    Difference,
    Mean,
    as_gain,
    differences,
    mean_of,
    more_runs,
)

KEPT, LOST, UNDECIDED = "kept", "lost", "not enough seeds"


@dataclass(frozen=True)
class Verdict:
    """The verdict on the metric; shares are fractions of 1."""

    before: Mean
    after: Mean
    against: Difference
    band: float
    verdict: str
    more: int | None
    """More seeds that each side needs; None if even MAX_RUNS would not suffice."""
    words: str


def judge(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], band: float | None
) -> Verdict:
    """Judge by the runs' result.json at the old and the new batch size, one run for each seed."""
    measure = measure_of(before[0])
    firsts, seconds = ([measure.value_in(result) for result in side] for side in (before, after))
    if band is None:
        band = BAND if measure.is_share else RELATIVE_BAND * abs(fmean(firsts))
    against = differences(firsts, [seconds], band)[0]
    gain = as_gain(against, measure.higher_is_better)
    means = mean_of(firsts), mean_of(seconds)
    verdict, more, why = _verdict(firsts, seconds, gain, band)
    failures = failure(before), failure(after)
    if failures[0]:
        verdict, more, why = UNDECIDED, None, f": the recipe as it is: {failures[0]}"
    elif failures[1]:
        verdict, more, why = LOST, 0, f": {failures[1]}"
    shown = [
        f"{of_mean(mean, measure, bool(failed))} (n = {mean.n})"
        for mean, failed in zip(means, failures, strict=True)
    ]
    said = (
        f"{verdict}{why}: {shown[1]} against {shown[0]}, {of_difference(against, measure)}; "
        f"up to {measure.scale * band:g} may be lost"
    )
    return Verdict(*means, against, band, verdict, more, said)


def _verdict(
    before: Sequence[float], after: Sequence[float], gain: Difference, band: float
) -> tuple[str, int | None, str]:
    if gain.low >= -band - ROUNDING:
        return KEPT, 0, ""
    if gain.high < -band - ROUNDING:
        return LOST, 0, ""
    more = more_runs(before, after, [[abs(gain.value + band)]])
    why = f", nor would {MAX_RUNS} be" if more is None else f", about {more} more of each would do"
    return UNDECIDED, more, why
