"""Compares forecasts with rates that were not used to correct them: measured, and published."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import Forecast, forecast
from firecaffe.planner.learn_rates import Posterior, RatedTraining, RateRow
from firecaffe.value_checks import count_of


@dataclass(frozen=True)
class JudgedRate:
    training: RatedTraining
    row: RateRow
    said: Forecast

    @property
    def _samples(self) -> int:
        return self.row.devices * self.training.batch_of(self.row)

    @property
    def per_s(self) -> float:
        return self._samples / self.said.step_s

    @property
    def low_per_s(self) -> float:
        return self._samples / self.said.step_high_s

    @property
    def high_per_s(self) -> float:
        return self._samples / self.said.step_low_s

    @property
    def error(self) -> float:
        """The forecast's error as a share of the measured rate."""
        return self.per_s / self.row.per_s - 1

    @property
    def in_band(self) -> bool:
        return self.low_per_s <= self.row.per_s <= self.high_per_s

    @property
    def line(self) -> str:
        name = self.training.label or self.training.model
        return (
            f"  {name} on {self.row.devices}: {_shown(self.row.per_s)} measured, "
            f"{_shown(self.per_s)} forecast ({_shown(self.low_per_s)} to "
            f"{_shown(self.high_per_s)}), {self.error:+.1%}"
        )


def _shown(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def judged_rates(
    trainings: Sequence[RatedTraining], clusters: Sequence[Cluster]
) -> list[JudgedRate]:
    """Forecast the rows of each training that are not marked `fit`, on its own cluster."""
    return [
        JudgedRate(
            training, row, forecast(training.workload(row), on, row.devices, training.exchange)
        )
        for training, on in zip(trainings, clusters, strict=True)
        for row in training.rows
        if not row.fit
    ]


def judgement_lines(learned: Posterior) -> list[str]:
    """Describe the errors of forecasts of rows without `fit`: a line each, and a summary."""
    clusters = [learned.cluster_of(number) for number in range(len(learned.trainings))]
    judged = judged_rates(learned.trainings, clusters)
    if not judged:
        return []
    sizes = [abs(rate.error) for rate in judged]
    in_band = sum(rate.in_band for rate in judged)
    tenths = quantiles(sizes, n=10, method="inclusive") if len(sizes) > 1 else sizes
    return [
        "samples/s of rows that corrected nothing, with the band of four fifths:",
        *(rate.line for rate in judged),
        f"of {count_of(len(judged), 'such row', 'such rows')} the median error is "
        f"{median(sizes):.1%}, the ninth decile {tenths[-1]:.1%}; {in_band} lie in the band",
    ]
