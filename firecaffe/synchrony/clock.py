"""The simulated clock: learners that take as long as `speeds` says, in one process.

A work goes through stages, one after the other: its weights are pulled, it is computed, its
gradient is pushed, the server takes it. Each stage has something that serves one work at a time,
who comes first first: the server's port out, the worker's processor, the server's port in, the
server. Whoever has to wait for the policy asks again after each event, those that wait longest
first. Equal recipes have equal events.

How long a simulated learner takes for a micro-batch: a function of (seed, learner, count).

Nothing is drawn from a generator with a state, so a resumed run needs none.
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
from firecaffe.synchrony.policy import Policy, Work, row_of, work_of

Seconds = Callable[[int, int], float]
"""(learner, the number of leaves that it had before) to the time of its next one."""

SLOW = 0
"""The slow learner of one_slow."""

MOST_MEASURED = 1_000_000
"""Times of a file that are read at most."""

LONGEST_S = 1e6
"""What a micro-batch may have taken at most; a clock adds these up."""


class _Row(TypedDict):
    """A line of that file."""

    compute_s: Annotated[float, Meta(gt=0, le=LONGEST_S)]


def seconds_of(config: SynchronyConfig, seed: int) -> Seconds:
    """The speeds of a recipe. Their mean is 1, but for measured ones, which are seconds.

    gamma: a shape of 1 / spread². Source: Ali et al. 2000, "Representing task and machine
    heterogeneities for heterogeneous computing systems" (the coefficient of variation method).

    Raises: RecipeError if the file of measured steps cannot be read.
    """
    if config.speeds == "gamma":
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
    """The times of a run's timings, `compute_s` of each line. Raises: RecipeError."""
    rows = read_rows(path, _Row, RecipeError)
    try:
        times = [row["compute_s"] for row in islice(rows, MOST_MEASURED)]
    except RecipeError as error:
        raise RecipeError(
            f"synchrony.speeds_from {error}; it must be the timings of a run, which have compute_s "
            "on each line"
        ) from error
    if not times:
        found = "no line of it is whole" if path.exists() else "No such file"
        raise RecipeError(f"synchrony.speeds_from {path}: {found}")
    return times


COMPUTE, LAST_STAGE = 1, 3
"""Of the stages 0 (pull), 1 (compute), 2 (push) and 3 (the server takes it)."""


@dataclass(frozen=True)
class Costs:
    """What a work costs beside computing, in the unit of the speeds, and who computes."""

    pull: float = 0.0
    """Time of a pull over the server's port."""
    push: float = 0.0
    """Time of a push over it."""
    take: float = 0.0
    """The server's time for a gradient."""
    workers: int = 0
    """Learner n is of worker n mod this, which computes one work at a time; worker 0 has the server
    in it, and sends nothing. 0: each learner is a worker by itself."""
    is_sharded: bool = False
    """Whether each worker serves an equal part of the weights. Then a pull and a push go by parts
    to and from all others at once, through the ports of both."""


class SimulatedClock:
    """Brings events about. The state is JSON; the policy's goes with it."""

    def __init__(self, policy: Policy, seconds: Seconds, costs: Costs | None = None) -> None:
        """costs: of a work beside computing; None: it has none."""
        self.policy, self._seconds, self._costs = policy, seconds, costs or Costs()
        self.time_s = 0.0
        self._asking = sorted(policy.learners)
        self._counts = dict.fromkeys(self._asking, 0)
        self._ends: list[tuple[float, int, int]] = []
        """A heap of (when a stage ends, learner, stage)."""
        self._free_at: dict[str, float] = {}
        """When what serves one work at a time is free again."""
        self._works: dict[int, Work] = {}

    def next(self) -> Event:
        """The next event. Raises: IndexError if all leaves are done."""
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
        """A learner's work comes to a stage."""
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
        """The ports that a worker's pull or push goes through, and for how long."""
        costs = self._costs
        took, theirs, mine = costs.pull, "out", "in"
        if stage != 0:
            took, theirs, mine = costs.push, "in", "out"
        if not costs.is_sharded:
            is_server = bool(costs.workers) and worker == 0
            return {} if is_server else {f"port {theirs}": took}
        part = took / costs.workers
        others = [each for each in range(costs.workers) if each != worker]
        return {f"port {theirs} {each}": part for each in others} | {
            f"port {mine} {worker}": part * len(others)
        }

    def _use(self, uses: Mapping[str, float], time_s: float) -> float:
        """Uses what serves one work at a time, each for a while. Returns when all have done so."""
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
            "counts": [list(each) for each in self._counts.items()],
            "ends": [list(each) for each in sorted(self._ends)],
            "free_at": dict(self._free_at),
            "works": [row_of(work) for work in self._works.values()],
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s = state["time_s"]
        self._asking = list(state["asking"])
        self._counts = dict(map(tuple, state["counts"]))
        self._ends = [tuple(each) for each in state["ends"]]  # sorted, which is a heap
        self._free_at = dict(state["free_at"])
        self._works = {row[0]: work_of(row) for row in state["works"]}
        self.policy.load_state_dict(state["policy"])
