"""The simulated clock: learners in one process, with the speeds of the recipe's `speeds`.

Only computing takes time; `planner.server_costs` adds all other times. A learner that has to wait
for the policy asks again after each event; the one that waits longest asks first. Equal recipes
have equal events. Times are a function of (seed, learner, count), so a resumed run needs no state
of a generator.
"""

import heapq
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from firecaffe.errors import RecipeError
from firecaffe.schema import read_rows
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push, expect_same
from firecaffe.synchrony.server_policies import Policy, Work

Seconds = Callable[[int, int], float]
"""(learner, the number of leaves that it had before) -> the time that its next leaf takes."""

SLOW = 0

MAX_MEASURED = 1_000_000

LONGEST_S = 1e6


class _SpeedRow(TypedDict):
    compute_s: Annotated[float, Meta(gt=0, le=LONGEST_S)]


def seconds_of(config: SynchronyConfig, seed: int) -> Seconds:
    """Return a recipe's speeds, in seconds if measured, else of mean 1. Raises: RecipeError."""
    if config.speeds == "gamma":
        # The coefficient of variation method, with a shape of 1 / spread². Source: Ali et al. 2000,
        # "Representing task and machine heterogeneities for heterogeneous computing systems".
        scale = config.spread**2
        return lambda *key: _drawn(seed, *key).gammavariate(1 / scale, scale)
    if config.speeds == "one_slow":
        return lambda learner, _: config.slow_factor if learner == SLOW else 1.0
    if config.speeds == "measured":
        times = measured(Path(config.speeds_from))
        return lambda *key: times[int(_drawn(seed, *key).random() * len(times))]
    return lambda *_: 1.0


def _drawn(seed: int, learner: int, count: int) -> random.Random:
    return random.Random(f"speeds {seed} {learner} {count}")


def measured(path: Path) -> list[float]:
    """Read `compute_s` from each line of a run's timings. Raises: RecipeError."""
    rows = read_rows(path, _SpeedRow, RecipeError)
    try:
        times = [row["compute_s"] for row in islice(rows, MAX_MEASURED)]
    except RecipeError as error:
        raise RecipeError(
            f"synchrony.speeds_from {error}; it must be the timings of a run, which have compute_s "
            "on each line"
        ) from error
    if not times:
        reason = "no line of it is whole" if path.exists() else "No such file"
        raise RecipeError(f"synchrony.speeds_from {path}: {reason}")
    return times


class SimulatedClock:
    """Produces the events of a simulated run. Its state is JSON and contains that of the policy."""

    def __init__(self, policy: Policy, seconds: Seconds) -> None:
        self.policy, self._seconds = policy, seconds
        self.time_s = 0.0
        self._asking = sorted(policy.learners)
        self._counts = dict.fromkeys(self._asking, 0)
        self._ends: list[tuple[float, int]] = []
        """A heap of (when a work ends, learner)."""
        self._works: dict[int, Work] = {}

    def next(self) -> Event:
        """Return the next event. Raises: IndexError if all leaves are done."""
        for learner in self._asking:
            work = self.policy.begin(learner)
            if work is not None:
                return self._pull(work)
        self.time_s, learner = self._next_end()
        return self._push(learner)

    def follow(self, event: Event) -> None:
        """Make the event that a log has. Raises: ValueError if this clock cannot make it now."""
        learner = event.work.learner if isinstance(event, Pull | Push) else event.learner
        made: Event | None = None
        if isinstance(event, Pull) and learner in self._asking:
            work = self.policy.begin(learner)
            made = None if work is None else self._pull(work)
        elif isinstance(event, Push) and learner in self._works:
            self._ends = [end for end in self._ends if end[1] != learner]
            heapq.heapify(self._ends)
            self.time_s = event.time_s
            made = self._push(learner)
        expect_same(made, event)

    def _pull(self, work: Work) -> Pull:
        self._asking.remove(work.learner)
        self._works[work.learner] = work
        self._begin(work)
        return Pull(self.time_s, work)

    def _push(self, learner: int) -> Push:
        work = self._works.pop(learner)
        counts = self.policy.contribute(work)
        self._asking.append(learner)
        return Push(self.time_s, work, counts, self.policy.commit())

    def _begin(self, work: Work) -> None:
        heapq.heappush(self._ends, (self.time_s + self._taken(work.learner), work.learner))

    def _next_end(self) -> tuple[float, int]:
        return heapq.heappop(self._ends)

    def _taken(self, learner: int) -> float:
        count = self._counts[learner]
        self._counts[learner] += 1
        return self._seconds(learner, count)

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "asking": list(self._asking),
            "counts": [list(item) for item in self._counts.items()],
            "ends": [list(end) for end in sorted(self._ends)],
            "works": [list(work) for work in self._works.values()],
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s = state["time_s"]
        self._asking = list(state["asking"])
        self._counts = dict(map(tuple, state["counts"]))
        self._ends = []
        for end_s, learner, *stage in state["ends"]:
            # Checkpoints of 0.2 have a stage; in stage 0 computing had no time yet.
            taken_s = self._taken(learner) if stage == [0] else 0.0
            heapq.heappush(self._ends, (end_s + taken_s, learner))
        self._works = {row[0]: Work(*row) for row in state["works"]}
        self.policy.load_state_dict(state["policy"])
