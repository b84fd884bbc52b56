"""Was the small batch's accuracy kept? The whole interval of the difference says it.

kept: the interval lies above -band, so that a loss of more than the band is shown not to be.
lost: it lies below -band, so that such a loss is shown; or a seed has learned nothing.
not enough seeds: -band lies within it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firecaffe.runs.learned import failure
from firecaffe.runs.statistics import (
    FEWEST,
    MOST_RUNS,
    ROUNDING,
    Difference,
    Mean,
    differences,
    mean_of,
    pooled_spread,
    runs_enough,
)
from firecaffe.runs.words import percent, points

KEPT, LOST, UNDECIDED = "kept", "lost", "not enough seeds"


@dataclass(frozen=True)
class Verdict:
    """What became of the accuracy; top-1 as fractions of 1."""

    before: Mean
    after: Mean
    against: Difference
    """After less before."""
    band: float
    """Top-1 that may be lost."""
    verdict: str
    """kept, lost or not enough seeds."""
    more: int | None
    """Seeds that each side needs besides, if means and spread stay as they are. None: no number up
    to MOST_RUNS would do.
    """
    words: str


def judge(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], band: float
) -> Verdict:
    """before, after: the result.json of the runs at the old and the new batch size, one for each
    seed.
    """
    firsts, seconds = ([float(each["top1"]) for each in side] for side in (before, after))
    against = differences(firsts, [seconds], band)[0]
    means = mean_of(firsts), mean_of(seconds)
    verdict, more, why = _verdict(firsts, seconds, against, band)
    failures = failure(before), failure(after)
    if failures[0]:
        verdict, more, why = UNDECIDED, None, f": the recipe as it is: {failures[0]}"
    elif failures[1]:
        verdict, more, why = LOST, 0, f": {failures[1]}"
    shown = [
        f"{percent(mean, bool(failed))} (n = {mean.n})"
        for mean, failed in zip(means, failures, strict=True)
    ]
    said = (
        f"{verdict}{why}: {shown[1]} against {shown[0]}, {points(against)} points; "
        f"up to {100 * band:g} may be lost"
    )
    return Verdict(*means, against, band, verdict, more, said)


def _verdict(
    before: Sequence[float], after: Sequence[float], against: Difference, band: float
) -> tuple[str, int | None, str]:
    """The verdict, how many more seeds of each side would do for one, and that in words."""
    if against.low >= -band - ROUNDING:
        return KEPT, 0, ""
    if against.high < -band - ROUNDING:
        return LOST, 0, ""
    spread = pooled_spread(before, after)
    enough = FEWEST
    if spread is not None:
        found = runs_enough(spread, [[abs(against.value + band)]])
        if found is None:
            return UNDECIDED, None, f", nor would {MOST_RUNS} be"
        enough = found
    more = max(1, enough - min(len(before), len(after)))
    return UNDECIDED, more, f", about {more} more of each would do"
