"""A loss that stays far above its start: a training that diverges, and never reaches NaN.

The start is the median loss of the first FIRST steps; the loss of the moment is the median of the
last LAST. If that is above the start, by the start's size or by LEAST if that is more, for PATIENCE
steps in a row, the training has diverged. Medians, since the loss of a step with few samples has
outliers. While a rate warms up the loss stays near its start, and a training that goes on from good
weights may come to a few times their small loss; neither is above by so much.

What may be done about a training that diverges because not all compute together, in words.
"""

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from firecaffe.schema import Count, checked
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, STALE, SynchronyConfig

FIRST = 3
"""Few: with many updates a step, a training that diverges leaves its start within some steps."""

LAST = 20

LEAST = 1.0
"""In the unit of the loss. Guessing costs ln(classes): 2.3 with 10 of them."""

PATIENCE = 100


class _Row(TypedDict):
    """What goes with a checkpoint."""

    first: Annotated[list[float], Meta(max_length=FIRST)]
    last: Annotated[list[float], Meta(max_length=LAST)]
    above: Count
    lowest: float | None


class Rise:
    """Takes the loss of each step. The state is JSON; all that know the losses have the same."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LAST)
        self._above = 0
        """Steps in a row at which the loss was above the limit."""
        self._lowest: float | None = None
        """The lowest loss of all moments at which the state was saved."""

    def add(self, loss: float) -> None:
        """Takes the next step's loss, which is finite."""
        if len(self._first) < FIRST:
            self._first.append(loss)
        self._last.append(loss)
        self._above = self._above + 1 if self._now > self._limit else 0

    @property
    def line(self) -> str:
        """What has happened, for people; empty if the loss has not been above for so long."""
        if self._above < PATIENCE:
            return ""
        return (
            f"the loss, {self._now:.4g} as the median of the last {LAST} steps, has been far above "
            f"its start, {self._start:.4g}, for {self._above} steps"
        )

    def saves_lowest(self) -> bool:
        """Takes note that the state is saved. Returns whether the loss is the lowest of all such
        moments.
        """
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
        """Raises: ValueError if it is none."""
        row = checked(state, _Row)
        self._first, self._above = list(row["first"]), row["above"]
        self._last = deque(row["last"], maxlen=LAST)
        self._lowest = row["lowest"]


def for_server(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    """How the updates are made, and what to try.

    Args:
        words: The section.
        learners: How many there are.
        staleness: Of the last gradients, the mean.
        momentum: Of the solver; 0 if it has none.
    """
    return ADVICE[words.mode](words, learners, staleness, momentum)


def _for_backup(words: SynchronyConfig, _: int, __: float, momentum: float) -> str:
    return (
        f"updates are means over the micro-batches of a step but {words.backup_workers}, in "
        f"synchrony.mode {words.mode}, with momentum {momentum:g}: try a lower rate or momentum"
    )


def _for_late(words: SynchronyConfig, learners: int, staleness: float, momentum: float) -> str:
    is_delayed = words.server_momentum == "delayed_nesterov"
    has_server = not words.is_lockless  # that has the updates in its hands
    tries = {
        "staleness_rate inverse": words.staleness_rate == "none" and has_server,
        "server_momentum delayed_nesterov": momentum > 0 and not is_delayed and has_server,
        "warm_steps": not words.warm_steps,
    }
    left = [word for word, is_open in tries.items() if is_open]
    more = f", synchrony.{', or '.join(left)}" if left else ""
    how = "that is delayed" if is_delayed else "in each update"
    return (
        f"gradients of {learners} learners come late in synchrony.mode {words.mode}, by "
        f"{staleness:.2f} updates in the mean of the last, with momentum {momentum:g} {how}: try a "
        f"lower rate or momentum{more}"
    )


ADVICE: dict[str, Callable[[SynchronyConfig, int, float, float], str]] = {
    BACKUP: _for_backup,
    STALE: _for_late,
    ASYNCHRONOUS: _for_late,
}
"""By synchrony.mode; the arguments as of `for_server`."""


def for_replicas(words: SynchronyConfig, momentum: float) -> str:
    """How replicas train, and what to try. momentum: of the solver; 0 if it has none."""
    shorter = f", shorter rounds than synchrony.local_steps {words.local_steps}"
    outer = ", a lower synchrony.outer_lr" if words.outer != "average" else ""
    return (
        f"{words.replicas} replicas train by themselves between averages (synchrony.outer "
        f"{words.outer}), with momentum {momentum:g}: try a lower rate or momentum"
        f"{shorter if words.local_steps > 1 else ''}{outer}"
    )
