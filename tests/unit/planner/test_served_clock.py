"""The clock of a planned server: what ports and servers cost, in closed forms."""

from contextlib import suppress
from typing import Any

import pytest

from firecaffe.planner.server_costs import Costs, ServedClock
from firecaffe.synchrony.clock import SimulatedClock, seconds_of
from firecaffe.synchrony.config import SERVED, SynchronyConfig
from firecaffe.synchrony.events import Event, Push, to_row
from firecaffe.synchrony.server_policies import Leaves, make_policy

STEPS, LEAVES_PER_STEP = 30, 8


def clock(mode: str, costs: Costs, kind: type[SimulatedClock] = ServedClock, **words: Any) -> Any:
    config = SynchronyConfig(mode, **words)
    leaves = Leaves(0, STEPS, STEPS, LEAVES_PER_STEP, LEAVES_PER_STEP * STEPS)
    made = make_policy(config, leaves, config.learners), seconds_of(config, 7)
    return kind(*made) if kind is SimulatedClock else ServedClock(*made, costs)


def events_of(clock: SimulatedClock) -> list[Event]:
    events = []
    with suppress(IndexError):
        while True:
            events.append(clock.next())
    return events


def sharded(workers: int) -> tuple[Costs, int, float, float]:
    """Each leaf goes through its worker's port but for its own part, both ways, and as much through
    the others' ports: all W of them carry 2 (W - 1) / W of a leaf in each direction.
    """
    costs = Costs(pull=4.0, push=4.0, workers=workers, is_sharded=True)
    a_leaf = 4.0 * 2 * (workers - 1) / workers / workers
    return costs, 6 * workers, a_leaf, 24 * a_leaf


COSTS: dict[str, tuple[Costs, int, float, float]] = {
    # Five workers, one with the server in it, which computes a leaf in 1. The others pull together
    # in 4, compute in 1, and push together in 1.
    "a port has one rate for all pulls": (Costs(1.0, 0.25, workers=5), 5, 1 / (1 + 4 / 6), 3),
    **{f"a server in parts uses all {workers} ports": sharded(workers) for workers in (2, 3, 4)},
    # Of four leaves each worker computes one, in 1, and makes its part of four updates, in 2.
    "owners share an update": (Costs(take=2.0, workers=4, is_sharded=True), 8, 3 / 4, 2),
    # Worker 0 makes an update of each leaf in 0.25, and computes in what is left: a fifth of what
    # each of the three others does.
    "updates take a worker's time": (Costs(take=0.25, workers=4), 8, 1 / 3.2, 3),
    # Two workers, the first beside the server; two learners of one worker compute in turns.
    "pull and push are waited for": (Costs(0.25, 0.25, workers=2), 2, 1 / (1 + 1 / 1.5), 3),
    "a second micro-batch hides them": (Costs(0.25, 0.25, workers=2), 4, 1 / 2, 3),
}
"""Learners, and the seconds of each of 240 leaves, to so many seconds of all."""


@pytest.mark.parametrize(("costs", "learners", "a_leaf", "to_s"), COSTS.values(), ids=COSTS)
def test_what_ports_and_servers_cost(
    costs: Costs, learners: int, a_leaf: float, to_s: float
) -> None:
    last = events_of(clock("asynchronous", costs, learners=learners))[-1]
    assert last.time_s == pytest.approx(240 * a_leaf, abs=to_s)


def test_transfers_under_way_share_a_port() -> None:
    """Steps of two leaves, of two workers beside a third with the server, which gets none.

    Both pull at once, in twice the time of one, and then push so: 2 + 1 + 2. With one after the
    other the first would push while the second pulls, and a step would take 4.
    """
    costs = Costs(pull=1.0, push=1.0)
    config = SynchronyConfig("backup", backup_workers=0, learners=2)
    leaves = Leaves(0, 10, 10, 2, 20)
    served = ServedClock(make_policy(config, leaves, 2), lambda *_: 1.0, costs)
    updates = [
        event.time_s for event in events_of(served) if isinstance(event, Push) and event.update
    ]
    assert updates == pytest.approx([5.0 * step for step in range(1, 11)])
    assert (served.pulls, served.pushes) == (20, 20)


def test_a_version_is_pulled_once() -> None:
    """One worker beside the server's takes all leaves of a step: one pull, then a push of each."""
    costs = Costs(pull=1.0, push=0.5)
    config = SynchronyConfig("backup", backup_workers=0, learners=1)
    served = ServedClock(make_policy(config, Leaves(0, 5, 5, 4, 20), 1), lambda *_: 1.0, costs)
    last = events_of(served)[-1]
    assert last.time_s == pytest.approx(5 * (1.0 + 4 * 1.5))
    assert (served.pulls, served.pushes) == (5, 20)


@pytest.mark.parametrize("mode", SERVED)
def test_without_costs_it_is_the_simulated_clock(mode: str) -> None:
    words: dict[str, Any] = {"learners": 5, "speeds": "gamma", "spread": 0.6}
    served, simulated = (
        events_of(clock(mode, Costs(), kind, **words)) for kind in (ServedClock, SimulatedClock)
    )
    assert [to_row(event) for event in served] == [to_row(event) for event in simulated]
