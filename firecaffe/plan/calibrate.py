"""Parameters from measurements: never more of them than the data bear, and with their errors.

Fits are of relative errors (a tenth off counts the same for a millisecond and a minute), of
parameters that are above 0. A fit says how far off it is where it has not looked: each row is
predicted from the others (leave one out).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

Model = Callable[[Mapping[str, float], Any], float]
"""(parameters, a row's conditions) -> what would be measured."""


@dataclass(frozen=True)
class Fit:
    """Parameters with their relative standard errors, and how good they are."""

    values: dict[str, float]
    errors: dict[str, float]
    rows: int
    held_out_error: float
    """Median over rows of the relative error when predicted from the other rows; NaN if there
    are no more rows than parameters."""


def fit(
    model: Model,
    start: Mapping[str, float],
    rows: Sequence[tuple[Any, float]],
    hold_out: bool = True,
) -> Fit:
    """rows: (conditions, measured). start: rough values, all above 0.

    Raises: ValueError if there are fewer rows than parameters, or a value is not above 0.
    """
    # Takes half a second, and most who import this file fit nothing.
    from scipy.optimize import least_squares

    names = list(start)
    if len(rows) < len(names):
        raise ValueError(
            f"{len(rows)} measurements do not bear {len(names)} parameters ({', '.join(names)})"
        )
    if min([*start.values(), *(measured for _, measured in rows)], default=1.0) <= 0:
        raise ValueError("what is fitted, and its start, must be above 0")

    def residuals(logs: NDArray[np.float64]) -> list[float]:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return [log(model(values, conditions) / measured) for conditions, measured in rows]

    begin = np.log([start[name] for name in names])
    found = least_squares(residuals, begin, loss="soft_l1", f_scale=0.1)
    values = dict(zip(names, np.exp(found.x).tolist(), strict=True))
    freedom = max(1, len(rows) - len(names))
    variance = float(np.sum(np.square(residuals(found.x)))) / freedom
    slopes = np.asarray(found.jac, dtype=float)
    covariance = np.linalg.pinv(slopes.T @ slopes) * variance
    errors = dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    missed = []
    if hold_out and len(rows) > len(names):
        for index, (conditions, measured) in enumerate(rows):
            others = [row for place, row in enumerate(rows) if place != index]
            guess = fit(model, values, others, hold_out=False).values
            missed.append(abs(model(guess, conditions) / measured - 1))
    return Fit(values, errors, len(rows), median(missed) if missed else float("nan"))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """α and 1/β of times against bytes: seconds of an empty message, bytes per second.

    Raises: ValueError as `fit`.
    """
    least, most = min(points), max(points)
    start = {"latency_s": max(1e-9, least[1]), "rate": most[0] / most[1]}
    found = fit(lambda v, size: v["latency_s"] + size / v["rate"], start, points, hold_out=False)
    return found.values["latency_s"], found.values["rate"]


def relative_spread(samples: Sequence[float]) -> float:
    """Half the width of the middle four fifths, over the median."""
    tenths = quantiles(samples, n=10)
    return (tenths[-1] - tenths[0]) / 2 / median(samples)
