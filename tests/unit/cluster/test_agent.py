"""The agent's look at its ranks, one of which ends just after it was looked at; its signals."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException

from firecaffe.cluster import agent as agents
from firecaffe.cluster.agent import SIGNALS, FaultAgent
from firecaffe.cluster.groups import ATTEMPT
from firecaffe.cluster.rank_process import RankProcess
from firecaffe.cluster.signals import SAME_S, handlers_kept


class Ranks:
    """Two processes as their starter knows them, and who lets them go."""

    def __init__(self) -> None:
        self.codes: list[int | None] = [None, None]
        self.ranks: set[int] = set()

    def process(self, rank: int) -> RankProcess:
        process = SimpleNamespace(pid=os.getpid(), poll=lambda: self.codes[rank])
        return RankProcess(rank, cast(Any, process), Path("none"))

    def look(self, seen: Any) -> bool:
        """Rank 0 takes its time to answer, and rank 1 is killed meanwhile."""
        if self.codes[1] is not None and seen[1].has_ended:
            self.ranks.add(1)
        self.codes[1] = -9
        return True


def test_a_rank_that_ends_after_the_look_is_looked_at_again() -> None:
    ranks = Ranks()
    agent: Any = object.__new__(FaultAgent)
    agent._let_go, agent.ended_by_us, agent._signal = ranks, set(), None
    agent._ranks = {rank: ranks.process(rank) for rank in range(2)}
    for let_go in (set[int](), {1}):
        assert agent._monitor_workers(SimpleNamespace()).state == WorkerState.HEALTHY
        assert ranks.ranks == let_go


def test_signals_that_come_together_end_the_agent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second exception would leave torch's handling of the first half done."""
    now_s = 100.0
    monkeypatch.setattr(agents, "time", SimpleNamespace(monotonic=lambda: now_s))
    agent: Any = object.__new__(FaultAgent)
    agent.ended_by_us, agent._signal, agent._is_starting = set(), None, False
    with handlers_kept(SIGNALS):
        agent._start_workers(SimpleNamespace(workers=[], spec=None))
        with pytest.raises(SignalException) as ended:
            os.kill(os.getpid(), signal.SIGHUP)
        assert ended.value.sigval == signal.SIGHUP
        now_s += SAME_S
        os.kill(os.getpid(), signal.SIGTERM)
        now_s += SAME_S
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)


class Interrupted:
    """Python drops what a destructor raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_in_a_destructor_is_not_lost() -> None:
    agent: Any = object.__new__(FaultAgent)
    agent.ended_by_us, agent._signal, agent._is_starting = set(), None, False
    agent._let_go, agent._ranks = None, {}
    with handlers_kept(SIGNALS):
        agent._start_workers(SimpleNamespace(workers=[], spec=None))
        Interrupted()
        for look in (agent._monitor_workers, agent._restart_workers):
            with pytest.raises(SignalException) as ended:
                look(SimpleNamespace())
            assert ended.value.sigval == signal.SIGINT


def test_a_signal_leaves_no_rank_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the fork, before anybody knows of the process."""
    begun = []

    def start(local_rank: int, *_: object) -> RankProcess:
        begun.append(local_rank)
        os.kill(os.getpid(), signal.SIGINT)
        return Ranks().process(0)

    monkeypatch.setattr(RankProcess, "start", start)
    monkeypatch.setenv(ATTEMPT, "0")
    monkeypatch.setattr(FaultAgent, "_words_of", lambda *_: {})
    agent: Any = object.__new__(FaultAgent)
    agent.ended_by_us, agent._signal, agent._is_starting = set(), None, False
    agent.reports = tmp_path
    workers = [SimpleNamespace(local_rank=rank, global_rank=rank) for rank in range(2)]
    spec = SimpleNamespace(entrypoint="rank", args=())
    with handlers_kept(SIGNALS):
        with pytest.raises(SignalException) as ended:
            agent._start_workers(SimpleNamespace(workers=workers, spec=spec))
        assert ended.value.sigval == signal.SIGINT
        assert sorted(agent._ranks) == begun == [0, 1]
