"""Rank 0's door, and who comes to it, in a store of their own."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from torch._C._distributed_c10d import TCPStore

from firecaffe.cluster import joining
from firecaffe.cluster.joining import ATTEMPTS, Comer, Comes, Door, door_key
from firecaffe.errors import LaunchError, RecipeError
from tests.loopback import free_port

LONG_S = 300.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def door(store: TCPStore) -> Door:
    attempt = store.add(ATTEMPTS, 1) - 1
    own = TCPStore("127.0.0.1", store.port, is_master=False)
    door = Door(own, attempt, one_host=True)
    door.open({"learners": 2})
    own.get(door_key(attempt))  # answered, so that others see it too
    return door


def who_asks(door: Door) -> Comer:
    """What one client of a store sets, another may see a little later."""
    while (comer := door.next()) is None:
        pass
    return comer


def ask(store: TCPStore, number: int, text: str) -> None:
    store.set(f"firecaffe/comer/0/{number}", text)


def test_a_worker_that_comes_meets_rank_0(store: TCPStore, door: Door) -> None:
    comes = Comes(f"127.0.0.1:{store.port}", LONG_S)
    assert comes.facts == {"learners": 2}
    with ThreadPoolExecutor() as threads:
        entering = threads.submit(comes.enter, {"doubt": ""})
        comer = who_asks(door)
        ours = door.let_in(comer, 3, ["a", "b", "c"])
        place = entering.result(LONG_S)
    with ours, place.socket as its:
        assert (place.rank, place.hosts) == (3, ["a", "b", "c", socket.gethostname()])
        ours.sendall(b"x")
        assert its.recv(1) == b"x"


def test_who_asks_and_never_calls_is_not_waited_for(store: TCPStore, door: Door) -> None:
    ask(store, 0, json.dumps({"host": "silent"}))
    comer = who_asks(door)
    with (
        patch.object(joining, "COME_S", 0.05),
        pytest.raises(LaunchError, match="rank 1 did not call in time"),
    ):
        door.let_in(comer, 1, ["here"])


def test_who_asks_for_something_else_is_passed_over(store: TCPStore, door: Door) -> None:
    nonsense = ["no JSON", "{}", '["host"]']
    for number, text in enumerate([*nonsense, json.dumps({"host": "next"})]):
        ask(store, number, text)
    for _ in nonsense:
        with pytest.raises(LaunchError, match="somebody asked to come with"):
            who_asks(door)
    comer = who_asks(door)
    assert (comer.number, comer.host) == (3, "next")


def test_torch_prints_nothing_where_no_run_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="--join: 'nonsense' is not HOST:PORT"):
        Comes("nonsense", LONG_S)
    place = f"127.0.0.1:{free_port()}"
    with (
        patch.object(joining, "ANSWER_S", 0.1),
        pytest.raises(LaunchError, match=f"--join {place}: no run answers there: .*refused"),
    ):
        Comes(place, LONG_S)
    assert capfd.readouterr().err == ""
