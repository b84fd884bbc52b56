"""A policy under events in any order, as threads or a network might bring them."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push
from firecaffe.synchrony.log import Lines, head
from firecaffe.synchrony.server_policies import (
    Asynchronous,
    Backup,
    BackupAgain,
    Leaf,
    LeafQueue,
    Leaves,
    Policy,
    Stale,
    Update,
    Work,
)

LEAVES = Leaves(first_step=2, last_step=7, steps_per_epoch=3, per_step=4, per_epoch=10)
"""Steps of 4, 4 and 2 leaves: the first one here is the last of an epoch."""

Choose = Callable[[int], int]
"""One of so many."""

POLICIES: dict[str, Callable[[LeafQueue], Policy]] = {
    "backup": lambda queue: Backup(queue, 3, 2, SynchronyConfig(backup_workers=1)),
    "backup again": lambda queue: BackupAgain(queue, 3, 2, SynchronyConfig(backup_workers=1)),
    "stale": lambda queue: Stale(queue, 3, 2, SynchronyConfig(max_staleness=2)),
    "asynchronous": lambda queue: Asynchronous(queue, 3, 2, SynchronyConfig()),
    "softsync": lambda queue: Asynchronous(queue, 3, 2, SynchronyConfig(gradients_per_update=3)),
}


def all_leaves(leaves: Leaves) -> set[Leaf]:
    steps = range(leaves.first_step, leaves.last_step)
    return {Leaf(step, place) for step in steps for place in range(leaves.of_step(step))}


def drive(
    make: Callable[[LeafQueue], Policy], choose: Choose, leaves: Leaves = LEAVES, faults: int = 0
) -> list[Event]:
    """Runs a policy to the end of its leaves. choose: decides who is next, and in the first
    `faults` of such decisions also whether somebody is lost or comes.
    """
    policy = make(LeafQueue(leaves))
    working: list[Work] = []
    late: list[Work] = []  # of learners that were lost
    events: list[Event] = []
    for time in map(float, count()):
        for learner in sorted(policy.learners - {work.learner for work in working}):
            work = policy.begin(learner)
            if work is not None:
                working.append(work)
                events.append(Pull(time, work))
        if not working and not late:
            return events
        if faults > 0 and choose(3) == 0:
            faults -= 1
            learner = choose(6)
            if learner in policy.learners and len(policy.learners) > 1:
                policy.lose(learner)
                late += [work for work in working if work.learner == learner]
                working = [work for work in working if work.learner != learner]
                events.append(Lose(time, learner))
            elif learner not in policy.learners:
                policy.join(learner)
                events.append(Join(time, learner))
            continue
        place = choose(len(working) + len(late))
        among = working if place < len(working) else late
        work = among.pop(place if among is working else place - len(working))
        counts = policy.contribute(work)
        events.append(Push(time, work, counts, policy.commit()))
    raise AssertionError


def some_events(name: str = "asynchronous", faults: int = 0) -> list[Event]:
    return drive(POLICIES[name], Random(5).randrange, faults=faults)


def write_log(path: Path, events: list[Event]) -> bytes:
    lines = Lines()
    path.write_bytes(b"".join([lines.line(head(2, 3)), *map(lines.event, events)]))
    return path.read_bytes()


def pushes(events: list[Event]) -> list[Push]:
    return [event for event in events if isinstance(event, Push)]


def updates(events: list[Event]) -> list[Update]:
    return [push.update for push in pushes(events) if push.update is not None]
