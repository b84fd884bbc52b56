"""Figures that data sheets of GPUs and networks leave open, as is usual in published trainings.

`benchmarks/planner/published_scaling.py` found these values. Shipped clusters of GPUs, and devices
that a buyer chooses from, have them; rates that are known draw them away (`learn_rates`).
"""

from dataclasses import dataclass, replace
from math import exp

from firecaffe.planner.cluster import Device, Link

FOUR_FIFTHS = 1.2816
"""Standard deviations of a normal distribution within which four fifths of it lie."""


@dataclass(frozen=True)
class Usual:
    """Usual values, and spreads as standard deviations of the logarithm.

    Nine are fitted by `benchmarks/planner/published_scaling.py`, and rounded; the spread of compute
    times is set by hand, for a training's first row decides them.
    """

    exchange: float = 1.4
    exchange_spread: float = 0.1
    """Time of a library's exchanges over that by the cluster's file."""
    link_spread: float = 0.225
    """Time of one link's exchanges over that of the library's."""
    slowdown: float = 1.7
    slowdown_spread: float = 0.15
    jitter: float = 0.04
    jitter_spread: float = 1.5
    scatter_spread: float = 1.0
    """That of one training's jitter, over that of a file's trainings."""
    compute_spread: float = 0.5
    residual: float = 0.035
    """The error of a row's forecast even if all figures are known."""
    band: float = 0.7
    """Width of a band over that of the posterior, for its parts are taken to one side together."""

    def error(self, spread: float) -> float:
        """The error of a value with this spread within which four fifths of cases lie, rounded."""
        return float(f"{exp(self.band * FOUR_FIFTHS * spread) - 1:.3g}")


USUAL = Usual()


def usual_device(device: Device, usual: Usual = USUAL) -> Device:
    return replace(
        device,
        jitter=usual.jitter,
        jitter_error=usual.error(usual.jitter_spread),
        exchange_slowdown=usual.slowdown,
        slowdown_error=usual.error(usual.slowdown_spread),
    )


def usual_link(link: Link, usual: Usual = USUAL) -> Link:
    return replace(link, exchange_scale=usual.exchange)
