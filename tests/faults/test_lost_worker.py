"""Workers that are killed, stopped or fail: rank 0 goes on without them, and so do the others."""

import os
import signal
from queue import SimpleQueue

import psutil
import pytest

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.links import star_of
from firecaffe.cluster.world import World, join
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault
from firecaffe.training.start import tell_faults
from tests.world import Ranks

SILENT_S = 1.5
WAIT_S = 120.0
OVER = "over"


class BadSampleError(Exception):
    """A worker's own error."""


def serve(victims: list[int], how: str) -> list[tuple[str, int]]:
    """What each rank hears of the others' losses."""
    with join("cpu", WAIT_S, SILENT_S, star_of) as world, tell_faults(world):
        watch, store = world.watch, world.store
        assert watch is not None
        assert store is not None
        told: SimpleQueue[Fault] = SimpleQueue()
        world.place.step = 5
        if world.is_first:
            watch.tolerate(told.put)
        gather_text(world, "all are here")
        if world.rank in victims:
            lose(world, how)
        faults = []
        if world.is_first:
            faults = [told.get(timeout=WAIT_S) for _ in victims]
            assert watch.losses == {fault.rank: fault for fault in faults}
            store.set(OVER, "")
        store.wait([OVER])
        watch.check()
        return [(fault.kind, fault.rank) for fault in faults]


def lose(world: World, how: str) -> None:
    if how == "raises":
        raise BadSampleError
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for beside in psutil.Process().children():
        beside.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("size", "victims", "how", "kind"),
    [
        (3, [1], "killed", "gone"),
        (4, [3, 1], "killed", "gone"),
        (3, [2], "stopped", "frozen"),
        (3, [1], "raises", "exception"),
    ],
)
def test_the_others_go_on(ranks: Ranks, size: int, victims: list[int], how: str, kind: str) -> None:
    told = ranks.run(size, serve, victims, how, lost=victims)
    assert sorted(told[0]) == [(kind, rank) for rank in sorted(victims)]
    assert [told[rank] for rank in range(1, size) if rank not in victims] == [[]] * (
        size - 1 - len(victims)
    )


def be_given_up() -> tuple[str, int, int]:
    with join("cpu", WAIT_S, SILENT_S, star_of) as world:
        watch, store = world.watch, world.store
        assert watch is not None
        assert store is not None
        told: SimpleQueue[Fault] = SimpleQueue()
        if world.is_first:
            watch.tolerate(told.put)
        gather_text(world, str(os.getpid()))
        if world.is_first:
            fault = told.get(timeout=WAIT_S)
            psutil.Process(int(store.get("pid"))).resume()
            store.wait(["said"])
            watch.check()
            return fault.kind, fault.rank, fault.exit_code
        store.set("pid", str(os.getpid()))
        for beside in psutil.Process().children():
            beside.suspend()
        os.kill(os.getpid(), signal.SIGSTOP)
        assert watch._known.wait(WAIT_S)
        store.set("said", "")
        try:
            watch.check()
        except PeerLostError as error:
            return error.kind, error.rank or 0, error.exit_code
        raise AssertionError("it was given up")


def test_a_worker_that_wakes_up_after_it_was_given_up_ends(ranks: Ranks) -> None:
    assert ranks.run(2, be_given_up) == [("frozen", 1, 11)] * 2


def lose_rank_0(how: str) -> tuple[str, int]:
    with join("cpu", WAIT_S, SILENT_S, star_of) as world:
        watch = world.watch
        assert watch is not None
        if world.is_first:
            watch.tolerate(lambda _: None)
        gather_text(world, "all are here")
        if world.is_first:
            lose(world, how)
        assert watch._known.wait(WAIT_S)
        try:
            watch.check()
        except PeerLostError as error:
            return error.kind, error.rank or 0
        raise AssertionError("rank 0 was lost")


@pytest.mark.parametrize(("how", "kind"), [("killed", "gone"), ("stopped", "frozen")])
def test_the_loss_of_rank_0_ends_all(ranks: Ranks, how: str, kind: str) -> None:
    assert ranks.run(3, lose_rank_0, how, lost=[0])[1:] == [(kind, 0)] * 2
