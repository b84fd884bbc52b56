"""The events of a run with a server, which determine its result together with the recipe.

They come from a simulated clock, real workers or a log. As rows, they are lines of events.jsonl.
"""

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from firecaffe.schema import Count, Real, checked
from firecaffe.synchrony.leaf_queue import Leaf
from firecaffe.synchrony.server_policies import Update, Work, row_of, work_of


@dataclass(frozen=True)
class Pull:
    """A learner receives a leaf and the present weights."""

    time_s: float
    """Seconds since the start; with a simulated clock, in the unit of its speeds."""
    work: Work


@dataclass(frozen=True)
class Push:
    """A learner delivers the gradient of its work."""

    time_s: float
    work: Work
    counts: bool
    """False if the gradient is dropped."""
    update: Update | None = None


@dataclass(frozen=True)
class Lose:
    time_s: float
    learner: int


@dataclass(frozen=True)
class Join:
    time_s: float
    learner: int


Event = Pull | Push | Lose | Join


def to_row(event: Event) -> dict[str, Any]:
    kind, row = type(event).__name__.lower(), {"time_s": event.time_s}
    match event:
        case Pull():
            return {"event": kind, **row, "work": row_of(event.work)}
        case Push():
            update = None
            if event.update is not None:
                update = {
                    "version": event.update.version,
                    "works": [row_of(work) for work in event.update.works],
                    "dropped": [list(leaf) for leaf in event.update.dropped],
                }
                if event.update.again:
                    update["again"] = [list(leaf) for leaf in event.update.again]
            counts = {"counts": event.counts, "update": update}
            return {"event": kind, **row, "work": row_of(event.work), **counts}
        case _:
            return {"event": kind, **row, "learner": event.learner}


_LeafRow = tuple[Count, Count]
_WorkRow = tuple[Count, Count, Count, Count]


class _UpdateRow(TypedDict):
    version: Count
    works: list[_WorkRow]
    dropped: list[_LeafRow]
    again: NotRequired[list[_LeafRow]]


class _PullRow(TypedDict):
    time_s: Real
    work: _WorkRow


class _PushRow(_PullRow):
    counts: bool
    update: _UpdateRow | None


class _LearnerRow(TypedDict):
    time_s: Real
    learner: Count


def from_row(row: dict[str, Any]) -> Event:
    """Return the event of a JSON row. Raises: ValueError if it is none."""
    match kind := row.get("event"):
        case "pull":
            pull = checked(row, _PullRow)
            return Pull(float(pull["time_s"]), work_of(pull["work"]))
        case "push":
            push = checked(row, _PushRow)
            made, update = push["update"], None
            if made is not None:
                update = Update(
                    made["version"],
                    tuple(map(work_of, made["works"])),
                    tuple(Leaf(*leaf) for leaf in made["dropped"]),
                    tuple(Leaf(*leaf) for leaf in made.get("again", ())),
                )
            return Push(float(push["time_s"]), work_of(push["work"]), push["counts"], update)
        case "lose" | "join":
            of = checked(row, _LearnerRow)
            return (Lose if kind == "lose" else Join)(float(of["time_s"]), of["learner"])
    raise ValueError(f"no event {kind!r:.60}")
