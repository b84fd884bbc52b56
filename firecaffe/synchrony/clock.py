"""The simulated clock: learners in one process, with the speeds of the recipe's `speeds`.

A work goes through four stages: pull of the weights, computation, push of the gradient, update. In
each, something serves one work at a time, in order of arrival: the server's port out, the worker's
processor, the server's port in, the server. A learner that has to wait for the policy asks again
after each event, the longest waiting first. Equal recipes have equal events. Times are a function
of (seed, learner, count), so a resumed run needs no state of a generator.
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from firecaffe.errors import RecipeError
from firecaffe.schema import read_rows
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.server_policies import Policy, Work, row_of, work_of

Seconds = Callable[[int, int], float]
"""(learner, the number of leaves that it had before) -> the time that its next one takes."""

SLOW = 0

MOST_MEASURED = 1_000_000

LONGEST_S = 1e6


class _Row(TypedDict):
    compute_s: Annotated[float, Meta(gt=0, le=LONGEST_S)]


def seconds_of(config: SynchronyConfig, seed: int) -> Seconds:
    """Return the speeds of a recipe: seconds if measured, else with mean 1. Raises: RecipeError."""
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
    rows = read_rows(path, _Row, RecipeError)
    try:
        times = [row["compute_s"] for row in islice(rows, MOST_MEASURED)]
    except RecipeError as error:
        raise RecipeError(
            f"synchrony.speeds_from {error}; it must be the timings of a run, which have compute_s "
            "on each line"
        ) from error
    if not times:
        reason = "no line of it is whole" if path.exists() else "No such file"
        raise RecipeError(f"synchrony.speeds_from {path}: {reason}")
    return times


COMPUTE, LAST_STAGE = 1, 3
"""Two of the stages 0 (pull), 1 (compute), 2 (push) and 3 (the server applies the gradient)."""


@dataclass(frozen=True)
class Costs:
    """The costs of a work besides computing, in the unit of the speeds, and who computes."""

    pull: float = 0.0
    push: float = 0.0
    take: float = 0.0
    # Learner n belongs to worker n mod this, which computes one work at a time. Worker 0 contains
    # the server and sends nothing. 0: each learner is a worker by itself.
    workers: int = 0
    # Whether each worker serves an equal part of the weights. Then a pull and a push go in parts to
    # and from all others at once, through the ports of both.
    is_sharded: bool = False


class SimulatedClock:
    """Produces the events of a simulated run. Its state is JSON and contains that of the policy."""

    def __init__(self, policy: Policy, seconds: Seconds, costs: Costs | None = None) -> None:
        self.policy, self._seconds, self._costs = policy, seconds, costs or Costs()
        self.time_s = 0.0
        self._asking = sorted(policy.learners)
        self._counts = dict.fromkeys(self._asking, 0)
        self._ends: list[tuple[float, int, int]] = []
        """A heap of (when a stage ends, learner, stage)."""
        self._free_at: dict[str, float] = {}
        self._works: dict[int, Work] = {}

    def next(self) -> Event:
        """Return the next event. Raises: IndexError if all leaves are done."""
        for learner in self._asking:
            work = self.policy.begin(learner)
            if work is not None:
                self._asking.remove(learner)
                self._works[learner] = work
                self._enter(0, learner, self.time_s)
                return Pull(self.time_s, work)
        while True:
            end_s, learner, stage = heapq.heappop(self._ends)
            if stage == LAST_STAGE:
                break
            self._enter(stage + 1, learner, end_s)
        self.time_s = end_s
        work = self._works.pop(learner)
        counts = self.policy.contribute(work)
        self._asking.append(learner)
        return Push(self.time_s, work, counts, self.policy.commit())

    def _enter(self, stage: int, learner: int, time_s: float) -> None:
        costs = self._costs
        worker = learner % costs.workers if costs.workers else learner
        if stage == COMPUTE:
            took = self._seconds(learner, self._counts[learner])
            self._counts[learner] += 1
            uses = {f"worker {worker}": took}
        elif stage == LAST_STAGE:
            uses = {"server": costs.take / (costs.workers if costs.is_sharded else 1)}
        else:
            uses = self._ports(worker, stage)
        heapq.heappush(self._ends, (self._use(uses, time_s), learner, stage))

    def _ports(self, worker: int, stage: int) -> dict[str, float]:
        costs = self._costs
        took, theirs, mine = costs.pull, "out", "in"
        if stage != 0:
            took, theirs, mine = costs.push, "in", "out"
        if not costs.is_sharded:
            is_server = bool(costs.workers) and worker == 0
            return {} if is_server else {f"port {theirs}": took}
        part = took / costs.workers
        others = [other for other in range(costs.workers) if other != worker]
        return {f"port {theirs} {other}": part for other in others} | {
            f"port {mine} {worker}": part * len(others)
        }

    def _use(self, uses: Mapping[str, float], time_s: float) -> float:
        ends = [time_s]
        for name, took in uses.items():
            if took:
                self._free_at[name] = max(time_s, self._free_at.get(name, 0.0)) + took
                ends.append(self._free_at[name])
        return max(ends)

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "asking": list(self._asking),
            "counts": [list(item) for item in self._counts.items()],
            "ends": [list(end) for end in sorted(self._ends)],
            "free_at": dict(self._free_at),
            "works": [row_of(work) for work in self._works.values()],
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s = state["time_s"]
        self._asking = list(state["asking"])
        self._counts = dict(map(tuple, state["counts"]))
        self._ends = [tuple(end) for end in state["ends"]]  # sorted, which is a heap
        self._free_at = dict(state["free_at"])
        self._works = {row[0]: work_of(row) for row in state["works"]}
        self.policy.load_state_dict(state["policy"])
