"""Ranks that cannot beat, or do not come: busy in C, stopped, elsewhere."""

import ctypes
import os
import signal

import psutil
import torch
import torch.distributed as dist

from firecaffe.cluster import agree
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
from tests.world import Ranks

SILENT_S = 1.5
BUSY, STOPPED, LATE = 1, 2, 1


def fall_silent() -> tuple[float, str, int]:
    with join("cpu", 60, SILENT_S) as world:
        watch = world.watch
        assert watch is not None
        world.place.step = 1
        if world.rank == BUSY:
            # A PyDLL's function keeps the lock, as a long sum(range(...)) does.
            ctypes.PyDLL(None).usleep(int(2 * SILENT_S * 1e6))
        total = torch.ones(1)
        dist.all_reduce(total, group=world.exchange_group)
        watch.check()

        world.place.step = 2
        if world.rank == STOPPED:
            for beside in psutil.Process().children():
                beside.suspend()
            os.kill(os.getpid(), signal.SIGSTOP)
        assert watch._known.wait(60)
        try:
            watch.check()
        except PeerLostError as error:
            return total.item(), error.kind, error.rank or 0
        raise AssertionError("a rank was lost")


def test_only_what_is_stopped_is_frozen(ranks: Ranks) -> None:
    """The busy rank is waited for; the other one is stopped with all that runs beside it."""
    told = ranks.run(3, fall_silent, lost=(STOPPED,))
    assert told == [(3.0, "frozen", STOPPED)] * 2 + [None]


def come_to_no_meeting() -> tuple[str, int]:
    # Time enough for the meeting itself on a busy machine.
    with join("cpu", 6 * SILENT_S, SILENT_S) as world:
        watch = world.watch
        assert watch is not None
        world.place.step = 1
        try:
            if world.rank == LATE:
                assert watch._known.wait(60)
                watch.check()
            agree.gather_text(world, "")
        except PeerLostError as error:
            return error.kind, error.rank or 0
        raise AssertionError("a rank was lost")


def test_who_is_waited_for_while_two_ranks_are_being_connected_is_stuck(ranks: Ranks) -> None:
    """Gloo knows no time-out then for one of the two; which one is chance."""
    assert ranks.run(3, come_to_no_meeting) == [("stuck", LATE)] * 3
