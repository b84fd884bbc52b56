"""Workers that are killed, stopped, fail, are busy or do not come: rank 0 goes on without them, and
so do the others, where it may; where not, all name them.
"""

import ctypes
import os
import signal
from collections.abc import Callable
from queue import SimpleQueue

import psutil
import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.links import star_of
from firecaffe.cluster.watch import PeerWatch
from firecaffe.cluster.world import World, join
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault
from firecaffe.training.start import report_faults
from tests.world import Ranks

SILENT_S = 1.5
WAIT_S = 120.0
OVER = "over"


class BadSampleError(Exception):
    """A worker's own error."""


def serve(victims: list[int], how: str) -> list[tuple[str, int]]:
    """What each rank hears of the others' losses."""
    with join("cpu", WAIT_S, SILENT_S, star_of) as world, report_faults(world):
        watch, store = world.watch, world.store
        told: SimpleQueue[Fault] = SimpleQueue()
        world.place.step = 5
        if world.is_first:
            watch.tolerate(told.put)
        gather_text(world, "all are here")
        if world.rank in victims:
            lose(how)
        faults = []
        if world.is_first:
            faults = [told.get(timeout=WAIT_S) for _ in victims]
            assert watch.losses == {fault.rank: fault for fault in faults}
            store.set(OVER, "")
        store.wait([OVER])
        watch.check()
        return [(fault.kind, fault.rank) for fault in faults]


def lose(how: str) -> None:
    if how == "raises":
        raise BadSampleError
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    stop_this()


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


def stop_this() -> None:
    """With all that runs beside it."""
    for beside in psutil.Process().children():
        beside.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


def heard(world: World, act: Callable[[], object] | None = None) -> tuple[str, int, int]:
    """The loss that ends this rank's waiting: its kind, the rank and the exit code. act: what it
    does once it knows; else it waits for the news.
    """
    watch = world.watch
    try:
        if act is None:
            assert isinstance(watch, PeerWatch)
            assert watch._known.wait(WAIT_S)
        else:
            act()
        watch.check()
    except PeerLostError as error:
        return error.kind, error.rank or 0, error.exit_code
    raise AssertionError("a rank was lost")


def be_given_up() -> tuple[str, int, int]:
    with join("cpu", WAIT_S, SILENT_S, star_of) as world:
        watch, store = world.watch, world.store
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
        stop_this()
        found = heard(world)
        store.set("said", "")
        return found


def test_a_worker_that_wakes_up_after_it_was_given_up_ends(ranks: Ranks) -> None:
    assert ranks.run(2, be_given_up) == [("frozen", 1, 11)] * 2


def lose_rank_0(how: str) -> tuple[str, int, int]:
    with join("cpu", WAIT_S, SILENT_S, star_of) as world:
        if world.is_first:
            world.watch.tolerate(lambda _: None)
        gather_text(world, "all are here")
        if world.is_first:
            lose(how)
        return heard(world)


@pytest.mark.parametrize(("how", "kind"), [("killed", "gone"), ("stopped", "frozen")])
def test_the_loss_of_rank_0_ends_all(ranks: Ranks, how: str, kind: str) -> None:
    found = ranks.run(3, lose_rank_0, how, lost=[0])[1:]
    assert [each[:2] for each in found] == [(kind, 0)] * 2


BUSY, STOPPED, LATE = 1, 2, 1


def fall_silent() -> tuple[float, str, int]:
    with join("cpu", 60, SILENT_S) as world:
        world.place.step = 1
        if world.rank == BUSY:
            # A PyDLL's function keeps the lock, as a long sum(range(...)) does.
            ctypes.PyDLL(None).usleep(int(2 * SILENT_S * 1e6))
        total = torch.ones(1)
        dist.all_reduce(total, group=world.exchange_group)
        world.watch.check()

        world.place.step = 2
        if world.rank == STOPPED:
            stop_this()
        kind, rank, _ = heard(world)
        return total.item(), kind, rank


def test_only_what_is_stopped_is_frozen(ranks: Ranks) -> None:
    """The busy rank is waited for; the other one is stopped with all that runs beside it."""
    told = ranks.run(3, fall_silent, lost=(STOPPED,))
    assert told == [(3.0, "frozen", STOPPED)] * 2 + [None]


def come_to_no_meeting() -> tuple[str, int]:
    # Time enough for the meeting itself on a busy machine.
    with join("cpu", 6 * SILENT_S, SILENT_S) as world:
        world.place.step = 1
        return heard(world, None if world.rank == LATE else lambda: gather_text(world, ""))[:2]


def test_who_is_waited_for_while_two_ranks_are_being_connected_is_stuck(ranks: Ranks) -> None:
    """Gloo knows no time-out then for one of the two; which one is chance."""
    assert ranks.run(3, come_to_no_meeting) == [("stuck", LATE)] * 3
