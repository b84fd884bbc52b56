"""Chooses the exchange that is fastest on a measured link, among those that change no bit.

A choice by time may differ from start to start. So only exchanges that add in tree order at the
world size are candidates: all of them give the same bits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Schedule

AUTO = "auto"

BYTES_PER_ELEMENT = 4


@dataclass(frozen=True)
class Choice:
    """An exchange, and the predicted times."""

    algorithm: str
    predicted_s: float
    """The predicted seconds for one vector of each size, one after the other."""
    by_algorithm: dict[str, float]
    """The predicted seconds of all candidates, in the order of the table."""


def predict_s(
    schedule: Schedule, latency_s: float, bandwidth_bytes_per_s: float, bytes_per_element: int
) -> float:
    """Return the seconds that a schedule's rounds take one after the other, without additions.

    Source: the model of Thakur, Rabenseifner and Gropp 2005: latency for each message through the
    busiest port of a round, and the bytes through it over the bandwidth.
    """
    serial_bytes = schedule.serial_elements() * bytes_per_element
    return schedule.serial_messages() * latency_s + serial_bytes / bandwidth_bytes_per_s


def choose(
    world_size: int,
    sizes_bytes: Sequence[int],
    latency_s: float,
    bandwidth_bytes_per_s: float,
    senders: int | None = None,
) -> Choice:
    """Return the exchange with the least predicted time over vectors of these sizes.

    In a tie, the earlier one in the table wins. On one rank, which sends nothing, it is tree.
    senders: the number of ranks that send, if one does for each host; tree order must hold among
    them, too.
    """
    senders = world_size if senders is None else senders
    if senders == 1:
        return Choice("tree", 0.0, {"tree": 0.0})
    counts = Counter(-(-size // BYTES_PER_ELEMENT) for size in sizes_bytes)
    by_algorithm = {
        name: sum(
            count
            * predict_s(
                schedule(senders, num_elements),
                latency_s,
                bandwidth_bytes_per_s,
                BYTES_PER_ELEMENT,
            )
            for num_elements, count in counts.items()
        )
        for name, schedule in ALGORITHMS.items()
        if adds_in_tree_order(name, world_size) and adds_in_tree_order(name, senders)
    }
    algorithm = min(by_algorithm, key=by_algorithm.__getitem__)
    return Choice(algorithm, by_algorithm[algorithm], by_algorithm)
