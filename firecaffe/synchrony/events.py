"""The events of a run with a server, and their tally. With the recipe they determine its result.

They come from a simulated clock, real workers or a log. As rows, they are lines of events.jsonl.
"""

from collections import Counter, defaultdict
from typing import Any, cast

import msgspec
from msgspec import Struct

from firecaffe.schema import Count, Real, checked
from firecaffe.synchrony.server_policies import Update, Work


class _Timed(Struct, frozen=True, tag_field="event", tag=str.lower):
    time_s: Real
    """Seconds since the start; with a simulated clock, in the unit of its speeds."""


class Pull(_Timed, frozen=True):
    """A learner receives a leaf and the present weights."""

    work: Work


class Push(_Timed, frozen=True):
    """A learner delivers the gradient of its work."""

    work: Work
    counts: bool
    """False if the gradient is dropped."""
    update: Update | None


class Lose(_Timed, frozen=True):
    learner: Count


class Join(_Timed, frozen=True):
    learner: Count


Event = Pull | Push | Lose | Join

KINDS = ("pull", "push", "lose", "join")


def expect_same(made: Event | None, expected: Event) -> None:
    """Raise ValueError unless two events are equal, apart from their times. None is no event."""
    if made is None or msgspec.structs.replace(made, time_s=expected.time_s) != expected:
        raise ValueError("is not what the recipe's mode does after the events before it")


def to_row(event: Event) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(event)
    return row


def from_row(row: dict[str, Any]) -> Event:
    """Return the event of a JSON row. Raises: ValueError if it is none."""
    if (kind := row.get("event")) not in KINDS:
        raise ValueError(f"no event {kind!r:.60}")
    return checked(row, cast(type[Event], Event))


class Tally:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.updates = 0
        self.staleness: Counter[int] = Counter()
        self.dropped = 0
        self.again = 0
        """The number of late leaves that were to be handed out again."""
        self.lost = 0
        self._waits_since: dict[int, float] = {}
        self._idle_s: defaultdict[int, float] = defaultdict(float)

    def take(self, event: Event) -> None:
        self.time_s = event.time_s
        match event:
            case Pull():
                learner = event.work.learner
                since = self._waits_since.pop(learner, event.time_s)
                self._idle_s[learner] += event.time_s - since
            case Push():
                self._waits_since[event.work.learner] = event.time_s
                if event.update is not None:
                    self.updates += 1
                    self.dropped += len(event.update.dropped)
                    self.again += len(event.update.again)
                    works = event.update.works
                    self.staleness.update(event.update.staleness(work) for work in works)
            case Lose():
                self.lost += 1
                self._waits_since.pop(event.learner, None)
            case Join():
                self._waits_since[event.learner] = event.time_s

    @property
    def mean_staleness(self) -> float:
        total = self.staleness.total()
        return sum(t * n for t, n in self.staleness.items()) / total if total else 0.0

    @property
    def row(self) -> dict[str, Any]:
        time_s = self.time_s or 1.0
        idle = {str(name): s / time_s for name, s in sorted(self._idle_s.items())}
        return {
            "updates": self.updates,
            "gradients": self.staleness.total(),
            "dropped": self.dropped,
            "again": self.again,
            "lost_learners": self.lost,
            "mean_staleness": self.mean_staleness,
            "staleness": {str(t): n for t, n in sorted(self.staleness.items())},
            "time_s": self.time_s,
            "idle_by_learner": idle,
        }

    @property
    def line(self) -> str:
        row = self.row
        idle = list(row["idle_by_learner"].values()) or [0.0]
        most = max(self.staleness, default=0)
        again = f", {self.again:,} computed again" if self.again else ""
        return (
            f"{self.updates:,} updates of {row['gradients']:,} gradients, {self.dropped:,} "
            f"dropped{again}; staleness {self.mean_staleness:.2f} (at most {most}); learners "
            f"waited {sum(idle) / len(idle):.1%} of their time (at most {max(idle):.1%})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "updates": self.updates,
            "dropped": self.dropped,
            "again": self.again,
            "lost": self.lost,
            "staleness": [list(item) for item in sorted(self.staleness.items())],
            "waits_since": [list(item) for item in self._waits_since.items()],
            "idle_s": [list(item) for item in self._idle_s.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s, self.updates = state["time_s"], state["updates"]
        self.dropped, self.lost = state["dropped"], state["lost"]
        self.again = state.get("again", 0)  # older checkpoints do not have it
        self.staleness = Counter(dict(map(tuple, state["staleness"])))
        self._waits_since = dict(map(tuple, state["waits_since"]))
        self._idle_s = defaultdict(float, dict(map(tuple, state["idle_s"])))
