"""Which exchange is timed where, and how often: by what its formula predicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from firecaffe.exchange import ALGORITHMS, NATIVE, SEGMENTED
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT, lower_bound_elements, pieces

PAYLOAD_SHARE = 1448 / 1514
"""Of a link's rate: TCP's payload in each Ethernet frame."""

MAX_REPETITIONS = 7
MIN_REPETITIONS = 3

MAX_CELL_S = 25.0
"""Predicted for one call; what would take longer is not run."""

MAX_BITS_PER_S = 16e9
"""Hosts times rate: above it the figures show two processors and no longer the links."""
QUIET_BITS_PER_S = 8e9
"""From here on they do so where anything else runs."""

BACK_TO_BACK_S = 1.5
"""A repetition has as many calls as take so long, as nccl-tests loops: a barrier lets ranks out one
after the other (16 of them within 11 to 18 ms on two cores), and one short call would count that.
"""

FIRST_CALL_S = 4.0
"""A slower one has no uncounted first call at each size: cold connections are nothing beside it."""

START_S = 5.0
START_EACH_HOST_S = 1.2
"""A run's start and small checks, predicted: importing torch, above all."""


@dataclass(frozen=True)
class Cell:
    """One exchange with one vector on one cluster."""

    hosts: int
    rate_bits_per_s: int
    size_bytes: int
    algorithm: str

    @property
    def predicted_s(self) -> float:
        """By formula, the rounds one after the other; a message's own cost is left out."""
        return formula_s(self, 0.0, in_pieces=False)

    @property
    def calls(self) -> int:
        """Of one repetition, one after the other."""
        return max(1, ceil(BACK_TO_BACK_S / max(self.predicted_s, 1e-6)))

    @property
    def repetition_s(self) -> float:
        return self.calls * self.predicted_s

    @property
    def has_first_call(self) -> bool:
        # Making a long schedule takes too long to be in a time.
        return self.predicted_s <= FIRST_CALL_S or self.algorithm in SEGMENTED

    def reason_not_to_run(self) -> str:
        """Empty where it is to be run."""
        total_bits_per_s = self.hosts * self.rate_bits_per_s
        if total_bits_per_s > MAX_BITS_PER_S:
            return (
                f"P × rate is {total_bits_per_s / 1e9:g} Gbit/s, and the machine carries "
                f"{MAX_BITS_PER_S / 1e9:g} at most"
            )
        if self.predicted_s > MAX_CELL_S:
            return f"{self.predicted_s:.0f} s a call by formula, over {MAX_CELL_S:g} s"
        return ""


def bound_s(cell: Cell) -> float:
    """2 (p - 1) / p · bytes / rate: the least time of any all-reduce, at the nominal rate.

    Source: Patarasuk and Yuan 2009, theorem 1.
    """
    return lower_bound_elements(cell.hosts, cell.size_bytes) * 8 / cell.rate_bits_per_s


def formula_s(cell: Cell, alpha_s: float, *, in_pieces: bool) -> float:
    """α times the messages of the schedule plus β times its bytes; β is that of TCP's payload.

    As the schedule has it, the vector goes through the rounds whole. The executor cuts it into
    pieces which follow each other: then all but the first cost only what the busiest port carries.
    """
    serial, busiest, messages, count = _counts(cell.algorithm, cell.hosts, cell.size_bytes)
    count = count if in_pieces else 1
    elements = (serial + (count - 1) * busiest) / count
    beta_s = 8 / (cell.rate_bits_per_s * PAYLOAD_SHARE)
    return count * messages * alpha_s + elements * BYTES_PER_ELEMENT * beta_s


def choose_repetitions(cells: Iterable[Cell], budget_s: float) -> dict[Cell, int]:
    """As many repetitions as fit, 3 to 7, so that no cell that has more than 3 takes longer than
    another one.

    The slow have 3 even where the whole then takes longer than the budget.
    """
    kept = list(cells)
    share_s = MAX_REPETITIONS * MAX_CELL_S
    while True:
        chosen = {
            cell: max(
                MIN_REPETITIONS,
                min(MAX_REPETITIONS, int(share_s / max(cell.repetition_s, 1e-6))),
            )
            for cell in kept
        }
        if predicted_s(chosen) <= budget_s or set(chosen.values()) <= {MIN_REPETITIONS}:
            return chosen
        share_s *= 0.9


def predicted_s(chosen: dict[Cell, int]) -> float:
    """Seconds of all runs, from start to end."""
    starts = {(cell.hosts, cell.rate_bits_per_s) for cell in chosen}
    return sum(START_S + START_EACH_HOST_S * hosts for hosts, _ in starts) + sum(
        cell.repetition_s * (count + cell.has_first_call) for cell, count in chosen.items()
    )


def _by(algorithm: str) -> str:
    """Gloo's own all_reduce is a ring."""
    return "ring" if algorithm == NATIVE else algorithm


@lru_cache
def _counts(algorithm: str, hosts: int, size_bytes: int) -> tuple[int, int, int, int]:
    schedule = ALGORITHMS[_by(algorithm)](hosts, size_bytes // BYTES_PER_ELEMENT)
    return (
        schedule.serial_elements(),
        schedule.elements_of_busiest_rank(),
        schedule.serial_messages(),
        len(pieces(schedule, BYTES_PER_ELEMENT)),
    )
