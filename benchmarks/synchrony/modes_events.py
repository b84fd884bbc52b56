"""Rates of a training with a server, by its events; and the same by the simulated clock."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.planner.server_costs import Costs, ServedClock
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push, Tally
from firecaffe.synchrony.log import EVENTS, LogReader
from firecaffe.synchrony.server_policies import Leaf, Leaves, make_policy


@dataclass(frozen=True)
class Rates:
    """Of a training, without its first steps, and its end, where learners run out of work."""

    leaves_per_s: float
    """That count."""
    updates_per_s: float
    staleness: float
    """The mean, of the whole training."""


def logged(folder: Path) -> Iterator[Event]:
    """The events of a run that is over. Raises: RunError if its log is damaged."""
    path = folder / EVENTS
    reader = LogReader(path)
    with path.open("rb") as file:
        lines = sum(1 for _ in file)
    while reader.number < lines:
        yield reader.next()


def rates(events: Iterable[Event], skipped_leaves: int) -> Rates:
    """skipped_leaves: at the beginning."""
    tally, rows, last = Tally(), list[tuple[float, int, int]](), 0
    leaves = updates = 0
    for event in events:
        tally.take(event)
        if isinstance(event, Pull):
            last = len(rows)
        if isinstance(event, Push):
            leaves += event.counts
            updates += event.update is not None
            rows.append((event.time_s, leaves, updates))
    first = next(row for row in rows if row[1] >= skipped_leaves)
    until = rows[last - 1]
    passed_s = until[0] - first[0]
    return Rates(
        (until[1] - first[1]) / passed_s, (until[2] - first[2]) / passed_s, tally.mean_staleness
    )


def simulated(
    words: SynchronyConfig,
    leaves: Leaves,
    took_s: Sequence[Sequence[float]],
    late_s: Callable[[Leaf], float],
    costs: Costs,
) -> Iterator[Event]:
    """The events of the same policy under the simulated clock. took_s: what each worker's
    micro-batches took elsewhere; they are gone through again and again. late_s: how much later one
    is, whoever has it.
    """
    policy = make_policy(words, leaves, words.num_learners(len(took_s)))
    leaf_of = dict[int, Leaf]()

    def seconds(learner: int, count: int) -> float:
        own = took_s[learner % len(took_s)]
        return own[count % len(own)] + late_s(leaf_of[learner])

    clock = ServedClock(policy, seconds, costs)
    with suppress(IndexError):  # all are done
        while True:
            event = clock.next()
            if isinstance(event, Pull):
                leaf_of[event.work.learner] = event.work.leaf
            yield event


def row_of(found: Rates, leaf_size: int) -> dict[str, Any]:
    """As raw lines have it. leaf_size: samples."""
    return {
        "images_per_s": found.leaves_per_s * leaf_size,
        "steps_per_s": found.updates_per_s,
        "staleness": found.staleness,
    }
