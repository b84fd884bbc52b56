"""The epochs that a network needs to a target, against the global batch size.

E(B) = E_min (1 + B / B_crit) (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
equation 5.1 in epochs): a straight line in B, fitted by least squares of relative errors.
Hyperparameters differ between batch sizes, so points deviate from the line, and close batch sizes
deviate similarly. The deviations are a Gaussian process in ln B with the line as its basis
(Rasmussen and Williams 2006, section 2.7). So predictions follow the points, and their band widens
between and beyond the points, and with the fit's residuals. `benchmarks/planner/epochs_law.py`
chose FORM, and measures the errors.

A measured gradient noise scale S is a further row of the fit: ln B_crit is near
ln (NOISE_FACTOR · S). Its spread is wide, so it matters only for one batch, or if batches are too
close to determine B_crit. `benchmarks/planner/epochs_by_noise.py` measures the errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from firecaffe.errors import RecipeError
from firecaffe.value_checks import count_of

Array = NDArray[np.float64]

BAND = 0.8
MAX_WIDTH = 50.0
"""A band's largest half-width in ln epochs or ln B_crit; a band so wide says nothing."""
REACH = 2.0
"""The factor below the smallest and above the largest given batch up to which the law predicts."""
REACH_BY_NOISE = 16.0
"""REACH if the noise scale is known."""
RUN_SPREAD = 0.03
"""Relative standard deviation of a run's epochs: the median of benchmarks/published/epochs.toml."""


@dataclass(frozen=True)
class BatchPoint:
    """The mean epochs of some runs at one batch size."""

    batch: float
    epochs: float
    spread: float | None = None
    """Standard deviation between the runs, in epochs; None if unknown."""
    runs: int = 1

    @property
    def variance(self) -> float:
        spread = RUN_SPREAD if self.spread is None else self.spread / self.epochs
        return spread**2 / self.runs


@dataclass(frozen=True)
class Deviations:
    scatter: float
    """Standard deviation of a deviation, relative."""
    length: float
    """Difference of ln B at which the correlation is 1 / e; 0 if they are independent."""
    prior: float
    """The number of residuals that `scatter` is worth, next to the fit's own."""

    def correlation(self, a: Array, b: Array) -> Array:
        """The correlation between batches a and b: a matrix [len(a), len(b)]."""
        apart = np.abs(np.log(a)[:, None] - np.log(b))
        alike = np.exp(-apart / self.length) if self.length else apart == 0
        return np.asarray(alike, dtype=np.float64)


FORM = Deviations(scatter=0.03, length=0.5, prior=2.0)

ROUNDING = 1e-9
"""A smaller rise up to the largest batch, over E_min, is a rounding error of equal epochs."""

NOISE_FACTOR = 2.0
"""The usual ratio of B_crit to the noise scale."""
NOISE_SPREAD = 0.9
"""The standard deviation of the ratio's logarithm."""
NOISE_REACH = 6.0
"""Standard deviations within which B_crit is searched for."""


@dataclass(frozen=True)
class Epochs:
    target: str
    epochs: float
    low: float
    high: float | None
    """The band of 80 %; no upper end if it is not known."""
    is_at_least: bool
    """Whether the batch lies outside the law's range, and the epochs are a lower bound."""


@dataclass(frozen=True)
class EpochsLaw:
    """The law fitted to two points or more, or to one and the noise scale.

    Raises: RecipeError for points that determine no law.
    """

    target: str
    points: tuple[BatchPoint, ...]
    source: str
    form: Deviations = FORM
    noise_scale: float | None = None
    """The gradient noise scale that was measured, in samples; None for none."""

    def __post_init__(self) -> None:
        batches = [point.batch for point in self.points]
        wrong = [p for p in self.points if p.batch < 1 or not (isfinite(p.epochs) and p.epochs > 0)]
        if wrong:
            raise RecipeError(
                f"{wrong[0].batch:.0f}={wrong[0].epochs:g} is no batch and its epochs; both must "
                "be numbers above 0"
            )
        if len(set(batches)) < len(batches):
            twice = next(batch for batch in batches if batches.count(batch) > 1)
            raise RecipeError(f"batch {twice:.0f} is given twice; give the mean of its epochs")
        if len(batches) + (self.noise_scale is not None) < 2:
            raise RecipeError(
                f"{count_of(len(batches), 'batch', 'batches')} with known epochs; a law needs at "
                "least 2, or one and the gradient noise scale"
            )

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest batch for which the law predicts epochs."""
        batches = [point.batch for point in self.points]
        reach = REACH if self.noise_scale is None else REACH_BY_NOISE
        return min(batches) / reach, max(batches) * reach

    @property
    def e_min(self) -> float:
        """The epochs of a small batch."""
        return self._line[0]

    @property
    def b_crit(self) -> float:
        """The batch of twice E_min epochs; infinite if the points do not rise."""
        least, slope = self._line
        return least / slope if slope else inf

    @property
    def b_crit_band(self) -> tuple[float, float]:
        """The 80 % band of B_crit: low, high. It needs points that rise, and an E_min above 0."""
        least, slope = self._line
        tilt = np.array([1 / least, -1 / slope])  # ln B_crit is linear in the line, to first order
        excess, freedom = self._excess
        width = sqrt(excess * float(tilt @ np.linalg.solve(self._normal, tilt)))
        times = _times(width, freedom)
        return self.b_crit / times, self.b_crit * times

    def epochs_at(self, batch: int) -> Epochs:
        least, most = self.range
        if batch > most:
            low, middle, _ = self.band_at(most)
            return Epochs(self.target, middle, low, None, is_at_least=True)
        if batch < least:
            low, middle, _ = self.band_at(least)
            return Epochs(self.target, min(middle, self.e_min), min(low, self.e_min), None, True)
        low, middle, high = self.band_at(batch)
        return Epochs(self.target, middle, low, high, is_at_least=False)

    def band_at(self, batch: float) -> tuple[float, float, float]:
        """The epochs and their band of 80 %, at any batch: low, middle, high."""
        middle, width, freedom = self.predicted(batch)
        times = _times(width, freedom)
        return middle / times, middle, middle * times

    def predicted(self, batch: float) -> tuple[float, float, float]:
        """Predict ln epochs of one run by Student's t: exp(middle), width, degrees of freedom."""
        given, inverse, basis = self._batches, self._inverse, self._basis
        least, slope = self._line
        fitted = least + slope * batch
        scale = self.form.scatter**2
        near = scale * self.form.correlation(given, np.array([batch]))[:, 0]
        middle = fitted * exp(near @ inverse @ self._residuals)
        left = np.array([1.0, batch]) / fitted - basis.T @ inverse @ near
        of_line = left @ np.linalg.solve(self._normal, left)
        variance = float(scale - near @ inverse @ near + of_line)
        excess, freedom = self._excess
        return middle, sqrt(excess * max(0.0, variance) + RUN_SPREAD**2), freedom

    @cached_property
    def _residuals(self) -> Array:
        least, slope = self._line
        return np.asarray(np.log(self._epochs / (least + slope * self._batches)))

    @cached_property
    def _normal(self) -> Array:
        """The inverse covariance of the line."""
        normal = self._basis.T @ self._inverse @ self._basis
        if self.noise_scale is None:
            return np.asarray(normal)
        least, slope = self._line
        row = np.array([1 / least, -1 / slope]) / NOISE_SPREAD  # ln B_crit, to first order
        return np.asarray(normal + np.outer(row, row))

    @cached_property
    def _excess(self) -> tuple[float, float]:
        """The variance of deviations over the form's, and its degrees of freedom."""
        freedom = self.form.prior + len(self.points) + (self.noise_scale is not None) - 2
        missed = float(self._residuals @ self._inverse @ self._residuals)
        return (self.form.prior + missed) / freedom, freedom

    @cached_property
    def _batches(self) -> Array:
        return np.array([point.batch for point in self.points], dtype=float)

    @cached_property
    def _epochs(self) -> Array:
        return np.array([point.epochs for point in self.points], dtype=float)

    @cached_property
    def _basis(self) -> Array:
        """The line's two columns, relative to the epochs given."""
        return np.stack([1 / self._epochs, self._batches / self._epochs], axis=1)

    @cached_property
    def _inverse(self) -> Array:
        """The inverse of the covariance of relative deviations."""
        noise = np.diag([point.variance for point in self.points])
        process = self.form.scatter**2 * self.form.correlation(self._batches, self._batches)
        return np.asarray(np.linalg.inv(process + noise), dtype=np.float64)

    @cached_property
    def _line(self) -> tuple[float, float]:
        """E_min and the slope, both at least 0, by generalized least squares."""
        if self.noise_scale is not None:
            return self._line_near(NOISE_FACTOR * self.noise_scale)
        basis = self._basis
        normal, known = basis.T @ self._inverse @ basis, (basis.T @ self._inverse).sum(axis=1)
        least, slope = np.linalg.solve(normal, known)
        if slope * max(self._batches) < ROUNDING * least:
            return float(known[0] / normal[0, 0]), 0.0
        if least < 0:
            return 0.0, float(known[1] / normal[1, 1])
        return float(least), float(slope)

    def _line_near(self, usual: float) -> tuple[float, float]:
        """Fit the line with the noise scale's row: B_crit is near `usual`."""
        from scipy.optimize import minimize_scalar  # takes a tenth of a second

        def fitted(off: float) -> tuple[float, float]:
            """E_min if ln B_crit is off from the usual one by `off`, and the misfit."""
            column = self._basis @ np.array([1.0, exp(-off) / usual])
            least = (column @ self._inverse).sum() / (column @ self._inverse @ column)
            missed = 1 - least * column
            return float(least), float(missed @ self._inverse @ missed) + (off / NOISE_SPREAD) ** 2

        bounds = -NOISE_REACH * NOISE_SPREAD, NOISE_REACH * NOISE_SPREAD
        off = float(minimize_scalar(lambda at: fitted(at)[1], bounds=bounds, method="bounded").x)
        least, _ = fitted(off)
        return least, least * exp(-off) / usual


def _times(width: float, freedom: float) -> float:
    """The factor between a band's middle and its ends."""
    return exp(min(MAX_WIDTH, width * _student(freedom)))


def _student(freedom: float) -> float:
    """The quantile of Student's t that bounds the band."""
    from scipy.special import stdtrit  # takes a tenth of a second

    return float(stdtrit(freedom, (1 + BAND) / 2))


def law_of(
    target: str, rows: Sequence[tuple[int, float, float | None, int]], source: str
) -> EpochsLaw:
    """Make a law from rows of (batch, mean epochs, standard deviation, runs)."""
    return EpochsLaw(target, tuple(BatchPoint(*row) for row in rows), source)


PUBLISHED = {
    "resnet50": law_of(
        "75.9 % top-1",
        (
            (1632, 35.0, 1.118, 17),
            (3264, 35.2, 0.775, 15),
            (4096, 40.0, 1.054, 10),
            (8192, 42.0, 1.054, 10),
            (13056, 45.4, 0.699, 10),
            (32768, 56.0, 0.471, 10),
            (49152, 68.0, 0.667, 10),
            (58880, 79.9, 0.876, 10),
            (65536, 84.5, 0.972, 10),
            (67840, 85.857, 0.651, 28),
        ),
        "reference runs (LARS) in MLPerf Training's rcps_resnet.json, version 4.0",
    ),
    "googlenet": law_of(
        "68.3 % top-1, 88.7 % top-5",
        ((32, 64.0, None, 1), (1024, 72.0, None, 1)),
        "Iandola et al. 2016 (FireCaffe), table of GoogLeNet",
    ),
    "nin": law_of(
        "58.9 % top-1 at batch 256, 58.6 % at 1024",
        ((256, 47.0, None, 1), (1024, 47.0, None, 1)),
        "Iandola et al. 2016 (FireCaffe), table of NiN",
    ),
}
