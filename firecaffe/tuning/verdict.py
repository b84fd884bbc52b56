"""Was the small batch's accuracy kept? A mean within the band, and what the interval bears."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from firecaffe.runs.statistics import Difference, Mean, differences, mean_of


@dataclass(frozen=True)
class Verdict:
    """Of top-1 accuracies, as fractions of 1."""

    before: Mean
    after: Mean
    against: Difference
    """After less before."""
    band: float
    is_kept: bool
    """Whether the mean has lost no more than the band."""
    words: str


def judge(before: Sequence[float], after: Sequence[float], band: float) -> Verdict:
    """before, after: top-1 of the runs at the old and the new batch size, one for each seed."""
    against = differences(before, [after])[0]
    is_kept = _is_within(against.value, band)
    said = (
        f"{'kept' if is_kept else 'lost'}: {_percent(mean_of(after))} against "
        f"{_percent(mean_of(before))}, {100 * against.value:+.2f} points"
    )
    if isfinite(against.low):
        said += f" ({100 * against.low:+.2f} to {100 * against.high:+.2f})"
    said += f"; up to {100 * band:g} may be lost"
    return Verdict(
        mean_of(before), mean_of(after), against, band, is_kept, said + _doubt(against, band)
    )


def _doubt(against: Difference, band: float) -> str:
    """Where the runs do not bear the verdict out at 95 %."""
    if not isfinite(against.low):
        return f"; {against.verdict}"
    if _is_within(against.low, band) or not _is_within(against.high, band):
        return ""
    return "; the interval has both verdicts in it, more seeds would tell"


def _is_within(difference: float, band: float) -> bool:
    """Accuracies are counts of images, so a loss of exactly the band is ordinary."""
    return difference >= -band - 1e-9


def _percent(mean: Mean) -> str:
    interval = f" ± {100 * mean.half:.2f}" if isfinite(mean.half) else ""
    return f"{100 * mean.value:.2f}{interval} % (n = {mean.n})"
