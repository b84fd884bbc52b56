"""Finds the usual values of `planner.learn_rates` on published families, and their left-out errors.

    python -m benchmarks.planner.published_scaling_fit            # some ten minutes

It prints the values and writes benchmarks/results/published_scaling.json: each source's errors with
the values of the other sources. A source is what the name of a family begins with.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from math import exp, log, sqrt

import numpy as np
from scipy.stats import t as student

from benchmarks.planner.published_scaling import LEFT_OUT, families, first_rows
from firecaffe.files import write_atomically
from firecaffe.planner.learn_rates import Figures, Posterior, PricedRow, learn, priced_rows
from firecaffe.planner.offers import USUAL, Z_80, Usual

FACTORS = {
    "exchange": 1.4,
    "exchange_spread": 1.5,
    "link_spread": 1.5,
    "slowdown": 1.3,
    "slowdown_spread": 1.5,
    "jitter": 1.4,
    "jitter_spread": 1.3,
    "scatter_spread": 1.5,
    "residual": 1.4,
}
"""By how much a step of the search changes a value."""
MIN_SPREAD = 0.1
ROUNDS = 3
MIN_GAIN = 1e-4
FREEDOM = 4
STEP = 0.05
"""Of a logarithm, for a slope."""

KNOWN = (1, 2)
NOT_FITTED = ("firecaffe-titan",)
"""Families by which the values are judged alone."""


@dataclass(frozen=True)
class Error:
    """A row's error and its expected spread, both of the logarithm of the step's time."""

    error: float
    spread: float


Errors = Mapping[tuple[str, int], list[Error]]
"""By source and number of known rows."""


class Judge:
    """Errors of all families by usual values. It remembers what it has tried."""

    def __init__(self) -> None:
        self._seen: dict[tuple[float, ...], Errors] = {}
        self._priced = []
        for rates, cluster in families():
            if rates.name in NOT_FITTED:
                continue
            trainings = [first_rows(training, 1) for training in rates.trainings]
            self._priced.append((rates, cluster, trainings, priced_rows(cluster, trainings)))

    def errors(self, usual: Usual) -> Errors:
        key = astuple(usual)
        if key not in self._seen:
            found = defaultdict[tuple[str, int], list[Error]](list)
            for rates, cluster, trainings, rows in self._priced:
                for known in KNOWN:
                    given, others = _split(rows, known)
                    learned = learn(cluster, trainings, given, usual)
                    source = rates.name.partition("-")[0]
                    found[source, known] += [_error(row, learned) for row in others]
            self._seen[key] = found
        return self._seen[key]

    def score(self, usual: Usual, left_out: str = "") -> float:
        """Less is better."""
        by_source = defaultdict[str, list[Error]](list)
        for (source, _), errors in self.errors(usual).items():
            if source != left_out:
                by_source[source] += errors
        total = weights = 0.0
        for errors in by_source.values():
            if errors:
                weight = sqrt(len(errors))
                total += weight * float(np.mean([_surprise(error) for error in errors]))
                weights += weight
        return total / weights

    def search(self, usual: Usual, left_out: str = "") -> Usual:
        best = self.score(usual, left_out)
        for _ in range(ROUNDS):
            before = best
            for name, factor in FACTORS.items():
                for change in (factor, 1 / factor):
                    while True:
                        other = replace(usual, **{name: getattr(usual, name) * change})
                        is_narrow = name.endswith("spread") and getattr(other, name) < MIN_SPREAD
                        score = best if is_narrow else self.score(other, left_out)
                        if score >= best - MIN_GAIN:
                            break
                        best, usual = score, other
            if best == before:
                break
        return usual


def _split(rows: list[PricedRow], known: int) -> tuple[list[PricedRow], list[PricedRow]]:
    by_training = defaultdict[int, list[PricedRow]](list)
    for row in rows:
        by_training[row.training].append(row)
    given = [row for own in by_training.values() for row in own[:known]]
    return given, [row for own in by_training.values() for row in own[known:]]


def _error(row: PricedRow, learned: Posterior) -> Error:
    """Find the error, and its spread by the posterior, along each logarithm."""
    logs, count = np.log(learned.figures.all), len(learned.trainings)
    expected = log(row.step_s(learned.figures))
    slopes = np.zeros(len(logs))
    for place in range(len(logs)):
        moved = logs.copy()
        moved[place] += STEP
        slopes[place] = (log(row.step_s(Figures.of(moved, count))) - expected) / STEP
    variance = float(slopes @ learned.covariance @ slopes) + learned.usual.residual**2
    return Error(expected - log(row.measured_s), sqrt(variance))


def _surprise(error: Error) -> float:
    return float(-student.logpdf(error.error / error.spread, FREEDOM) + log(error.spread))


def main() -> None:
    judge = Judge()
    print(f"all sources: {judge.search(USUAL)}", flush=True)
    left_out = []
    for source in sorted({source for source, _ in judge.errors(USUAL)}):
        usual = judge.search(USUAL, source)
        entry: dict[str, object] = {"source": source, "usual": astuple(usual)}
        for known in KNOWN:
            errors = judge.errors(usual).get((source, known), [])
            entry[str(known)] = {
                "errors": [round(exp(-error.error) - 1, 4) for error in errors],
                "in_band": sum(abs(error.error) < Z_80 * error.spread for error in errors),
            }
        left_out.append(entry)
        print(f"without {source}: {usual}", flush=True)
    write_atomically(LEFT_OUT, json.dumps(left_out, indent=1) + "\n")


if __name__ == "__main__":
    main()
