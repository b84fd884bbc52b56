"""Rank 0's doorkeeper, and workers that ask to come and do not."""

import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store

from firecaffe.cluster.joining import Comer
from firecaffe.errors import LaunchError, PeerLostError
from firecaffe.recipe.config import TrainConfig
from firecaffe.tasks import CLASSIFICATION
from firecaffe.training.forward import Forward
from firecaffe.training.modes.served import door as own
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.door import Doorkeeper
from firecaffe.training.modes.served.real_clock import Arrivals, Came, Gone
from tests.kit.training_fixtures import Patch

ENDS_S = 30.0


class Asked:
    """A door: who asks, one after the other, and what becomes of each. Then the store is gone, as
    with its launcher.
    """

    def __init__(self, outcomes: Sequence[Callable[[], object]]) -> None:
        self.outcomes, self.is_closed = list(outcomes), False
        self.let: list[int] = []

    def next(self) -> Comer:
        number = len(self.let)
        if number == len(self.outcomes):
            raise RuntimeError("Broken pipe")
        self.let.append(number)
        if self.outcomes[number] is NO_WORKER:
            NO_WORKER()
        return Comer(number, f"host{number}", {})

    def let_in(self, comer: Comer, rank: int, hosts: list[str]) -> socket.socket:
        self.outcomes[comer.number]()
        return cast(socket.socket, None)

    def store_of(self, comer: Comer) -> Store:
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
    """Makes one for workers with so many learners each."""
    monkeypatch.setattr(own, "LOOK_S", 0)
    monkeypatch.setattr(own, "pulse_beside", lambda *_: nullcontext())
    net = nn.Linear(1, 1)
    forward = Forward(net, CLASSIFICATION, TrainConfig())

    def make(per_rank: int) -> tuple[Doorkeeper, Arrivals]:
        arrivals: Arrivals = SimpleQueue()
        world: Any = SimpleNamespace(watch=SimpleNamespace(hosts=["a"], welcome=lambda *_: None))
        named = dict(net.named_parameters())
        made = Doorkeeper(
            world, forward, named, Coder(), per_rank, 1, arrivals, ENDS_S, ENDS_S, said.append
        )
        return made, arrivals

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
    assert isinstance(arrivals.get(timeout=ENDS_S), Came)


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
    monkeypatch.setattr(own, "Lane", lanes)
    made, arrivals = keeper(2)
    made._look(Asked([bool]))
    assert "a worker on host0 asked to join and failed: no lane to another rank" in said
    assert lanes.cuts == 1
    gone = arrivals.get(timeout=ENDS_S)
    assert isinstance(gone, Gone)
    assert gone.learner.join(ENDS_S)
    assert arrivals.empty()
