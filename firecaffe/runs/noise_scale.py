"""The gradient noise scale: the batch size at which a gradient's noise is as large as itself.

B_simple = tr(Σ) / |G|², with the gradient G of the loss and the covariance Σ of a sample's
gradient. The squared norm of a mean over n samples has the expectation |G|² + tr(Σ) / n, so the
norms at two batch sizes give both terms without bias. Each is averaged over the measured steps,
with exponential weights, before the division. It is a rough scale: forecasts of epochs from it
alone were 2 to 8 times off.

Source: McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training",
appendix A.1. The band is Fieller's interval for a ratio (1954), over blocks of consecutive steps,
with Student's quantile by Abramowitz and Stegun, 26.7.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.schemas import NoiseRow
from firecaffe.runs.statistics import cut_in_blocks
from firecaffe.schema import read_rows

FEWEST = 4

MAX_BLOCKS = 16

CONFIDENCE = 0.8

MAX_SAMPLES = 1e12
"""A larger scale counts as unknown."""

HALF_LIFE = 0.25
"""The share of the measured steps after which a weight is halved.

So the later half has 80 % of the weight: the scale grows while a network learns.
"""


class GradientNorms(NamedTuple):
    step: int
    """Counted from 1."""
    micro_batch: float
    """Mean of the squared norms of the micro-batches' gradients."""
    batch: float
    """The squared norm of their mean."""


@dataclass(frozen=True)
class NoiseScale:
    samples: float | None
    """The scale; None if the gradient is too small to be told from its noise."""
    low: float
    high: float | None
    """The end of the 80 % band; None if there is none."""
    steps: list[int]
    """Counted from 1."""

    @property
    def numbers(self) -> dict[str, float]:
        known = {"": self.samples, "_low": self.low, "_high": self.high}
        return {f"noise_scale{end}": value for end, value in known.items() if value is not None}


def noise_scale(
    measured: Sequence[GradientNorms], micro_batch_size: int, batch_size: int
) -> NoiseScale | None:
    """Return the scale after the measured steps, in order; None if these are too few.

    Two sizes are needed: `batch_size` is larger than `micro_batch_size`.
    """
    if len(measured) < FEWEST:
        return None
    small, large = micro_batch_size, batch_size
    last, half_life = len(measured) - 1, HALF_LIFE * len(measured)
    terms = list[tuple[float, float]]()
    for place, norms in enumerate(measured):
        weight = 0.5 ** ((last - place) / half_life)
        noise = (norms.micro_batch - norms.batch) / (1 / small - 1 / large)
        signal = (large * norms.batch - small * norms.micro_batch) / (large - small)
        terms.append((weight * noise, weight * signal))
    noise, signal = _sums(terms)
    samples = max(0.0, noise) / signal if signal > 0 else inf
    low, high = _band(terms)
    steps = [norms.step for norms in measured]
    return NoiseScale(_known(samples), min(low, MAX_SAMPLES), _known(high), steps)


def _known(samples: float) -> float | None:
    return samples if samples <= MAX_SAMPLES else None


def _sums(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(noise for noise, _ in terms), sum(signal for _, signal in terms)


def _band(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the ends of all ratios r for which Σ (noise - r signal) is within its error of 0.

    The error is that of the blocks' sums, which are independent even if near steps are not. The
    ratios solve cc r² - 2 ac r + aa ≤ 0.
    """
    count = min(MAX_BLOCKS, len(terms))
    blocks = list(map(_sums, cut_in_blocks(terms, count)))
    square = _student(count - 1) ** 2
    factor = count * square / (count - 1 + square)  # for squares about 0 instead of the mean
    noise, signal = _sums(blocks)
    aa = noise**2 - factor * sum(a**2 for a, _ in blocks)
    ac = noise * signal - factor * sum(a * c for a, c in blocks)
    cc = signal**2 - factor * sum(c**2 for _, c in blocks)
    root = sqrt(max(0.0, ac**2 - aa * cc))
    if cc > 0 and signal > 0:
        return max(0.0, (ac - root) / cc), (ac + root) / cc
    # The gradient may be 0, so the scale has no upper bound.
    return ((ac - root) / cc if aa > 0 and cc < 0 else 0.0), inf


def _student(freedom: int) -> float:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def noise_lines(folder: Path) -> list[str]:
    """Describe the scale that a run, finished or not, has recorded last; empty without one."""
    rows = list(read_rows(folder / METRICS, NoiseRow, holding=b'"noise_scale_low"'))
    return [_sentence(rows[-1])] if rows else []


def _sentence(row: NoiseRow) -> str:
    low = row["noise_scale_low"]
    samples, high = row.get("noise_scale"), row.get("noise_scale_high")
    if samples is None or high is None:
        return (
            f"the gradient noise scale is at least {_rounded(low)} samples; more steps would tell "
            "how large"
        )
    return (
        f"the gradient noise scale is roughly {_rounded(samples)} samples ({_rounded(low)} to "
        f"{_rounded(high)}): batches much larger than that bring little; plan --epochs "
        f"BATCH=EPOCHS --noise-scale {_rounded(samples)} says how little"
    )


def _rounded(samples: float) -> str:
    return f"{float(f'{samples:.3g}'):,.0f}" if samples >= 10 else f"{samples:.2g}"
