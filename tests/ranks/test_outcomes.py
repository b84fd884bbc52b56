"""What a test is told of its ranks where one fails: all of them, and the first cause first."""

import os
import re
import signal
import threading

import pytest

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
from tests import world
from tests.world import RankError, Ranks


def rank() -> int:
    return int(os.environ["RANK"])


def each_in_its_way() -> None:
    match rank():
        case 0:
            raise PeerLostError("rank 2 is gone")
        case 1:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        case 2:
            raise KeyError("mine")


def kill_one_and_wait() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def end_one() -> int:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank()


def meet() -> str:
    with join("cpu") as found:
        return "".join(gather_text(found, str(rank())))


def order(told: str) -> list[int]:
    return [int(number) for number in re.findall(r"^rank (\d):", told, re.MULTILINE)]


def test_every_rank_is_told_of_and_the_first_cause_first(ranks: Ranks) -> None:
    for call in (ranks.run, ranks.shared):
        with pytest.raises(RankError) as caught:
            call(4, each_in_its_way)
        first, *others, last = order(str(caught.value))
        assert (first, sorted(others), last) == (2, [0, 1], 3)
        for words in ("KeyError: 'mine'", "PeerLostError: rank 2 is gone", "rank 3: returned"):
            assert words in str(caught.value)


def test_a_rank_that_is_killed_is_the_cause_and_nobody_is_waited_for(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "AFTERWARDS_S", 0.1)
    with pytest.raises(RankError) as caught:
        ranks.run(2, kill_one_and_wait)
    assert str(caught.value) == "rank 1: its process ended with -9\nrank 0: no answer"


def test_in_the_place_of_a_lost_rank_another_starts(ranks: Ranks) -> None:
    assert ranks.shared(2, end_one, lost={1}) == [0, None]
    assert ranks.shared(2, meet) == ["01", "01"]
