"""Detects a training that diverges without reaching NaN: its loss stays far above its start.

The start is the median loss of the first FIRST steps, the present that of the last LAST: a step of
few samples has outliers. A training has diverged if the present loss exceeds the start by the
start's size, or by LEAST if that is more, for PATIENCE steps in a row. So a warm-up of the rate
stays below the limit, and so do good weights, whose loss may reach a few times its start.

A run that has diverged saves nothing more, and all ranks give the same reason.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from firecaffe.cluster.agree import broadcast_text
from firecaffe.cluster.world import World
from firecaffe.errors import DivergedError, NotFiniteError, RunError
from firecaffe.schema import Count, checked
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, STALE, SynchronyConfig
from firecaffe.training.checkpoint import good_checkpoint
from firecaffe.training.saver import Saver

# Few, because with many updates in a step, a diverging training soon leaves its start.
FIRST = 3

LAST = 20

# In the unit of the loss. The loss of guessing is ln(classes): 2.3 for 10 classes.
LEAST = 1.0

PATIENCE = 100


class _RiseRow(TypedDict):
    first: Annotated[list[float], Meta(max_length=FIRST)]
    last: Annotated[list[float], Meta(max_length=LAST)]
    above: Count
    lowest: float | None


class LossRise:
    """Watches the loss of each step. The state is JSON, equal on all ranks that know the losses."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST)
        # steps in a row with the loss above the limit
        self._above = 0
        # the lowest loss at any save
        self._lowest: float | None = None

    def add(self, loss: float) -> None:
        if len(self._first) < FIRST:
            self._first.append(loss)
        self._last.append(loss)
        self._above = self._above + 1 if self._now > self._limit else 0

    @property
    def line(self) -> str:
        """The reason to stop; empty unless the loss was above the limit for PATIENCE steps."""
        if self._above < PATIENCE:
            return ""
        return (
            f"the loss, {self._now:.4g} as the median of the last {LAST} steps, has been far above "
            f"its start, {self._start:.4g}, for {self._above} steps"
        )

    def record_save(self) -> bool:
        """Note that the state is saved. Returns whether the loss is the lowest of all saves."""
        is_lowest = bool(self._last) and (self._lowest is None or self._now < self._lowest)
        if is_lowest:
            self._lowest = self._now
        return is_lowest

    @property
    def _start(self) -> float:
        return median(self._first)

    @property
    def _limit(self) -> float:
        return self._start + max(abs(self._start), LEAST)

    @property
    def _now(self) -> float:
        return median(self._last)

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": list(self._first),
            "last": list(self._last),
            "above": self._above,
            "lowest": self._lowest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        row = checked(state, _RiseRow)
        self._first, self._above = list(row["first"]), row["above"]
        self._last = deque(row["last"], maxlen=LAST)
        self._lowest = row["lowest"]


class NoLossRise:
    """Watches nothing. If all ranks make each step together, checks for infinities are enough."""

    line = ""

    def add(self, loss: float) -> None: ...

    def record_save(self) -> bool:
        return False


def server_advice(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    """Describe the updates, and what to try. staleness: mean of the last gradients, in updates."""
    return ADVICE[words.mode](words, learners, staleness, momentum)


def _backup_advice(synchrony: SynchronyConfig, _: int, __: float, momentum: float) -> str:
    return (
        f"updates are means over the micro-batches of a step but {synchrony.backup_workers}, in "
        f"synchrony.mode {synchrony.mode}, with momentum {momentum:g}: try a lower rate or momentum"
    )


def _late_advice(
    synchrony: SynchronyConfig, learners: int, staleness: float, momentum: float
) -> str:
    is_delayed = synchrony.server_momentum == "delayed_nesterov"
    has_server = not synchrony.is_lockless  # that applies the updates itself
    tries = {
        "staleness_rate inverse": synchrony.staleness_rate == "none" and has_server,
        "server_momentum delayed_nesterov": momentum > 0 and not is_delayed and has_server,
        "warm_steps": not synchrony.warm_steps,
    }
    left = [word for word, is_open in tries.items() if is_open]
    more = f", synchrony.{', or '.join(left)}" if left else ""
    how = "that is delayed" if is_delayed else "in each update"
    return (
        f"gradients of {learners} learners come late in synchrony.mode {synchrony.mode}, by "
        f"{staleness:.2f} updates in the mean of the last, with momentum {momentum:g} {how}: try a "
        f"lower rate or momentum{more}"
    )


ADVICE: dict[str, Callable[[SynchronyConfig, int, float, float], str]] = {
    BACKUP: _backup_advice,
    STALE: _late_advice,
    ASYNCHRONOUS: _late_advice,
}


def replica_advice(words: SynchronyConfig, momentum: float) -> str:
    """Describe how replicas train and what to try. momentum: the solver's; 0 if it has none."""
    shorter = f", shorter rounds than synchrony.local_steps {words.local_steps}"
    outer = ", a lower synchrony.outer_lr" if words.outer != "average" else ""
    return (
        f"{words.replicas} replicas train by themselves between averages (synchrony.outer "
        f"{words.outer}), with momentum {momentum:g}: try a lower rate or momentum"
        f"{shorter if words.local_steps > 1 else ''}{outer}"
    )


@contextmanager
def explained(
    world: World, saver: Saver, folder: Path, resumed: Path | None, rate: Callable[[int], float]
) -> Iterator[None]:
    """Add the learning rate and the last good checkpoint to a NotFiniteError or DivergedError.

    All ranks raise it, and wait for the last save into `folder`. resumed: where the run began.
    """
    try:
        yield
    except (NotFiniteError, DivergedError) as error:
        with suppress(RunError):
            saver.wait(world)
        name = broadcast_text(world, good_checkpoint(folder, resumed) if world.is_first else "")
        good = f"the last good checkpoint is {name}" if name else "there is no checkpoint"
        step = error.step or world.place.step
        raised = type(error)(f"{error}; the learning rate is {rate(step - 1):.4g}; {good}")
        raised.is_secondary, raised.step = not world.is_first, step
        raise raised from None
