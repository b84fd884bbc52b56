"""What failures and checkpoints leave of a cluster's time.

Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
first order: the best interval is sqrt(2 · cost · time between failures).
"""

from math import exp, inf, sqrt


def time_between_failures_s(failures_per_node_hour: float, nodes: int) -> float:
    rate = failures_per_node_hour * nodes / 3600
    return inf if rate == 0 else 1 / rate


def best_interval_s(checkpoint_s: float, between_s: float) -> float:
    """Training time between two checkpoints that loses least."""
    return inf if between_s == inf else sqrt(2 * checkpoint_s * between_s)


def goodput(checkpoint_s: float, restart_s: float, interval_s: float, between_s: float) -> float:
    """The share of time that is training which stays.

    Failures come at random (exponential); each loses what was done since the last checkpoint, and
    a restart. Source: Daly 2006, equation 13.
    """
    if between_s == inf:
        return 1.0 if interval_s == inf else interval_s / (interval_s + checkpoint_s)
    span = (interval_s + checkpoint_s) / between_s
    if span > 500:
        return 0.0
    return interval_s / (between_s * exp(restart_s / between_s) * (exp(span) - 1))
