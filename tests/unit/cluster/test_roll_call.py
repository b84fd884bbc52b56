"""Ranks that were numbered by hand: those that are missing, or there twice, are named."""

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from firecaffe.cluster import groups
from firecaffe.cluster.groups import call_in
from firecaffe.errors import LaunchError

SHORT, LONG = timedelta(seconds=0.1), timedelta(seconds=300)


def said_by(ranks: Sequence[int], world_size: int, timeout: timedelta) -> list[str]:
    """What each of these ranks is told, as threads."""
    store, told = HashStore(), [""] * len(ranks)

    def one(place: int) -> Callable[[], None]:
        def call() -> None:
            try:
                call_in(store, ranks[place], world_size, timeout)
            except LaunchError as error:
                told[place] = str(error)

        return call

    threads = [threading.Thread(target=one(place)) for place in range(len(ranks))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return told


def test_all_are_there() -> None:
    assert said_by([2, 0, 1], 3, LONG) == ["", "", ""]


def test_the_missing_are_named_to_all_others() -> None:
    for said in said_by([0, 2], 4, SHORT):
        assert "2 of WORLD_SIZE=4" in said
        assert "no rank 1, 3" in said


def test_who_is_there_twice_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["node-a", "node-b"])
    monkeypatch.setattr(groups, "_myself", lambda: {"host": next(hosts), "pid": 1})
    for said in said_by([0, 0], 2, LONG):
        assert "RANK=0" in said
        assert "node-a and node-b" in said or "node-b and node-a" in said


def test_a_rank_that_was_started_again_is_not_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    dead = {"host": socket.gethostname(), "pid": 1 << 30}
    monkeypatch.setattr(groups, "_myself", lambda: dead)
    died = threading.Thread(target=call_in, args=(store, 1, 2, LONG))
    died.start()
    store.wait(["here/1"], LONG)
    monkeypatch.undo()
    again = threading.Thread(target=call_in, args=(store, 1, 2, LONG))
    again.start()
    call_in(store, 0, 2, LONG)
    again.join()
    died.join()
