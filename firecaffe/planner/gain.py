"""How much faster one forecast is than another of the same training, with a band.

What both share is off by the same factor in both: computing, as the device is one, and the exchange
if the link is one, too. Two links may be off in opposite ways.
"""

from dataclasses import dataclass
from itertools import product

from firecaffe.planner.cluster import Cluster
from firecaffe.planner.forecast import Forecast, errors_of
from firecaffe.planner.step_cost import Scales, StepCost
from firecaffe.planner.workload import Workload

On = tuple[Cluster, Forecast]
"""A forecast, and the cluster that it is of."""


@dataclass(frozen=True)
class Gain:
    """Samples a second of the one over the other's, minus 1."""

    middle: float
    low: float
    high: float

    def is_sure(self, least: float) -> bool:
        """Whether the whole band is at least this."""
        return self.low >= least


def gain_of(work: Workload, other: On, over: On) -> Gain:
    """Compare `other` with `over`, on clusters of the same device."""
    costs = [StepCost(work, on, row.exchange, row.compressor) for on, row in (other, over)]
    workers = [row.workers for _, row in (other, over)]
    errors = [errors_of(work, on, row.workers, row.compressor) for on, row in (other, over)]
    is_same_link = other[0].links == over[0].links and errors[0] == errors[1]
    gains = []
    for side, one, two in product((-1, 1), repeat=3):
        signs = (one, one) if is_same_link else (one, two)
        step_s, over_s = (
            cost.step(count, Scales(1 + side * compute, 1 + sign * exchange)).step_s
            for cost, count, (compute, exchange), sign in zip(
                costs, workers, errors, signs, strict=True
            )
        )
        gains.append(over_s / step_s - 1)
    return Gain(over[1].step_s / other[1].step_s - 1, min(gains), max(gains))
