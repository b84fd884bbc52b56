"""The real clock with learners that bring what they are told to; and workers that ask to come."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store

from firecaffe.cluster import joining
from firecaffe.cluster.joining import JoinListener, JoinRequest
from firecaffe.errors import LaunchError, NotFiniteError, PeerLostError
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push
from firecaffe.synchrony.server_policies import Asynchronous, LeafQueue, Work
from firecaffe.tasks import CLASSIFICATION
from firecaffe.training.forward import Forward
from firecaffe.training.modes.served import real_ranks
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.messages import Messages
from firecaffe.training.modes.served.real_clock import (
    Arrival,
    Arrivals,
    Begin,
    ClockLearner,
    Failed,
    Joined,
    LostLearner,
    LostRank,
    RealClock,
)
from firecaffe.training.modes.served.real_ranks import ServerRank
from firecaffe.training.modes.served.server_memory import Gradient, ServerMemory
from firecaffe.training.modes.served.work_gradient import Contribution
from tests.kit.training_fixtures import Patch
from tests.unit.synchrony.drive import LEAVES

# --- the clock ------------------------------------------------------------------------------------

BROUGHT = Contribution(Gradient({}, []), torch.zeros(0), 0.25, 0.5)


class UpdateOrder(ClockLearner):
    """One that is done when the test says so; a rank for each two."""

    def __init__(self, number: int, arrivals: Arrivals) -> None:
        self.works: list[Work] = []
        super().__init__(number, number // 2, arrivals)

    def begin(self, work: Work, weights: Mapping[str, Tensor]) -> None:
        assert weights
        self.works.append(work)

    def bring(self) -> None:
        self._arrivals.put(Arrival(self, self.works[-1], BROUGHT))

    def _do(self, order: Begin) -> Contribution:
        raise AssertionError

    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        pass


def clock_of(learners: int, starts: bool = True) -> tuple[RealClock, list[UpdateOrder]]:
    net = nn.Linear(2, 2)
    memory = ServerMemory(net, dict(net.named_parameters()), squares=False)
    words = SynchronyConfig()
    policy = Asynchronous(LeafQueue(LEAVES), learners, LEAVES.first_step, words)
    clock = RealClock(policy, memory)
    made = [UpdateOrder(number, clock.arrivals) for number in range(learners)]
    if starts:
        clock.start(made)
    return clock, made


def until(clock: RealClock, kind: type[Event]) -> None:
    while not isinstance(clock.next(), kind):
        pass


def test_a_rank_idles_only_while_it_is_there(monkeypatch: Patch) -> None:
    """One is lost at 40 s and one comes at 90 s; each computes for all of its time."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock, learners = clock_of(4)
    for _ in learners:
        clock.next()
    now[0] = 40.0
    learners[0].bring()
    clock.next()
    clock.arrivals.put(LostRank(1, "gone"))
    until(clock, Lose)
    now[0] = 90.0
    comer = UpdateOrder(4, clock.arrivals)
    learners[1].bring()
    until(clock, Push)
    clock.arrivals.put(Joined([comer]))
    until(clock, Join)
    now[0] = 100.0
    learners[0].bring()
    until(clock, Push)
    for each, busy_s in ((learners[0], 100.0), (learners[2], 40.0), (comer, 10.0)):
        each.spent.busy_s = busy_s
    assert clock.row["idle_by_rank"] == pytest.approx({"0": 0, "1": 0, "2": 0})


def test_who_goes_on_from_a_state_loses_all_who_were_there() -> None:
    clock, _ = clock_of(3)
    pulled = [clock.next() for _ in range(3)]
    second, others = clock_of(2, starts=False)
    second.load_state_dict(clock.state_dict())
    second.start(others)
    events = [second.next() for _ in range(7)]
    assert [type(each) for each in events] == [Lose] * 3 + [Join] * 2 + [Pull] * 2
    first = [each.work.leaf for each in (*pulled, *events) if isinstance(each, Pull)]
    assert first[3:] == first[:2]  # what was under way comes first
    assert events[0].time_s >= clock.time_s


def test_a_gradient_of_who_is_lost_is_not_taken() -> None:
    clock, learners = clock_of(4)
    pulled = [clock.next() for _ in learners]
    clock.arrivals.put(LostRank(1, "gone"))
    for number in (2, 0):
        learners[number].bring()
    events = [clock.next() for _ in range(3)]
    assert [type(each) for each in (*pulled, *events)] == [Pull] * 4 + [Lose] * 2 + [Push]
    assert isinstance(events[2], Push)
    assert events[2].work.learner == 0


def test_who_comes_too_late_is_there_to_be_told_the_end() -> None:
    clock, _ = clock_of(2)
    late = [UpdateOrder(number, clock.arrivals) for number in (2, 3)]
    clock._due.append(late[0])
    clock.arrivals.put(Joined([late[1]]))
    clock.arrivals.put(LostRank(0, "gone"))
    for _ in range(2):
        clock.drain_arrivals()
    assert list(clock.learners) == [2, 3]
    assert [each.number for each in clock.all_learners] == [0, 1, 2, 3]
    assert clock.row["lost_ranks"] == {"0": "gone"}


def test_an_error_of_this_process_ends_it_and_one_after_the_last_event_is_not_lost() -> None:
    clock, _ = clock_of(1)
    clock.next()
    first = MemoryError("full")
    clock.arrivals.put(Failed(first))
    with pytest.raises(MemoryError, match="full"):
        clock.next()
    for each in (first, ValueError("after it")):
        clock.arrivals.put(Failed(each))
    assert clock.drain_arrivals() is first
    assert clock.drain_arrivals() is None


def test_a_rank_that_goes_away_does_not_hide_why_the_training_ends(monkeypatch: Patch) -> None:
    def end(*_: object) -> None:
        raise PeerLostError("rank 1 went away")

    rank = object.__new__(ServerRank)
    monkeypatch.setattr(ServerRank, "_end", end)
    with pytest.raises(NotFiniteError), rank._sending_errors():
        raise NotFiniteError("the loss is NaN")


# --- the door -------------------------------------------------------------------------------------

ENDS_S = 30.0


class Asked:
    """A door: who asks, one after the other, and what becomes of each. Then the store is gone, as
    with its launcher.
    """

    def __init__(self, outcomes: Sequence[Callable[[], object]]) -> None:
        self.outcomes, self.is_closed = list(outcomes), False
        self.let: list[int] = []

    def next(self) -> JoinRequest:
        number = len(self.let)
        if number == len(self.outcomes):
            raise RuntimeError("Broken pipe")
        self.let.append(number)
        if self.outcomes[number] is NO_WORKER:
            NO_WORKER()
        return JoinRequest(number, f"host{number}", {})

    def admit(self, comer: JoinRequest, rank: int, hosts: list[str]) -> socket.socket:
        self.outcomes[comer.number]()
        return cast(socket.socket, None)

    def store_of(self, comer: JoinRequest) -> Store:
        return HashStore()

    def close(self) -> None:
        self.is_closed = True


def failing(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


NO_WORKER = failing(LaunchError("somebody asked"))
NEVER_CALLS = failing(LaunchError("it did not call"))
HAS_NO_SOCKET = failing(OSError("too many open files"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeper(said: list[str], monkeypatch: Patch) -> Callable[..., Any]:
    monkeypatch.setattr(joining, "POLL_S", 0)
    monkeypatch.setattr(joining, "run_pulse", lambda *_: nullcontext())
    net = nn.Linear(1, 1)
    forward = Forward(net, CLASSIFICATION, TrainConfig())

    def make(per_rank: int) -> tuple[JoinListener[Joined], Arrivals]:
        arrivals: Arrivals = SimpleQueue()
        world: Any = SimpleNamespace(watch=SimpleNamespace(hosts=["a"], add_rank=lambda *_: None))
        server: Any = object.__new__(ServerRank)
        server.recipe = Recipe(synchrony=SynchronyConfig(in_flight=per_rank))
        server.clock = SimpleNamespace(arrivals=arrivals)
        named = dict(net.named_parameters())
        server._messages_over = partial(Messages, forward=forward, named=named, coder=Coder())
        connect = partial(server._connect, count(1))
        return JoinListener(world, 1.0, connect, arrivals.put, said.append), arrivals

    return make


def test_those_behind_one_that_stays_away_are_taken(
    keeper: Callable[..., Any], said: list[str]
) -> None:
    made, arrivals = keeper(0)
    made._look(Asked([NO_WORKER, NEVER_CALLS, HAS_NO_SOCKET, bool]))
    assert said == [
        "somebody asked",
        "a worker on host1 asked to join and failed: it did not call",
        "a worker on host2 asked to join and failed: too many open files",
        "rank 1 on host3 has joined",
        "no more workers can join: Broken pipe",
    ]
    assert isinstance(arrivals.get(timeout=ENDS_S), Joined)


def test_at_the_run_s_end_nobody_else_is_let_in(keeper: Callable[..., Any]) -> None:
    made, _ = keeper(0)
    door = Asked([made._is_over.set, bool])
    made._look(door)
    assert door.let == [0]
    assert door.is_closed


class Half:
    """Lanes of a worker that comes to the first of its two."""

    cuts = 0

    def __call__(self, store: Store, name: str, is_first: bool, timeout_s: float) -> "Half":
        if name == "1.0":
            return self
        raise PeerLostError("no lane to another rank")

    def send(self, data: Tensor) -> None:
        raise PeerLostError("it was cut")

    def cut(self) -> None:
        self.cuts += 1


def test_a_worker_that_misses_a_lane_leaves_no_learner(
    keeper: Callable[..., Any], said: list[str], monkeypatch: Patch
) -> None:
    lanes = Half()
    monkeypatch.setattr(real_ranks, "Lane", lanes)
    made, arrivals = keeper(2)
    made._look(Asked([bool]))
    assert "a worker on host0 asked to join and failed: no lane to another rank" in said
    assert lanes.cuts == 1
    gone = arrivals.get(timeout=ENDS_S)
    assert isinstance(gone, LostLearner)
    assert gone.learner.join(ENDS_S)
    assert arrivals.empty()
