"""The agent's look at its ranks, one of which ends just after it was looked at."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from firecaffe.cluster.agent import FaultAgent

FAILED = RunResult(WorkerState.FAILED)


class Ranks:
    """Two processes as their starter knows them, by local rank, and who lets them go."""

    def __init__(self) -> None:
        self.codes: list[int | None] = [None, None]
        self.ranks: set[int] = set()
        self._running_local_ranks = {0, 1}
        self.error_files = {0: "", 1: ""}
        self.subprocess_handlers = {
            rank: SimpleNamespace(proc=SimpleNamespace(poll=lambda rank=rank: self.codes[rank]))
            for rank in range(2)
        }
        for rank, each in self.subprocess_handlers.items():
            each.proc.pid, each.proc.returncode = 100 + rank, -9

    def look(self, seen: Any) -> bool:
        """Rank 0 takes its time to answer, and rank 1 is killed meanwhile."""
        if self.codes[1] is not None and seen[1].has_ended:
            self.ranks.add(1)
        self.codes[1] = -9
        return True


def test_a_rank_that_ends_after_the_look_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks()
    agent: Any = object.__new__(FaultAgent)
    agent._pcontext = agent._let_go = ranks
    agent._processes, agent.ended_by_us = {}, set()
    workers = [SimpleNamespace(local_rank=rank, global_rank=rank) for rank in range(2)]
    group = agent._worker_group = SimpleNamespace(workers=workers)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: FAILED)
    for let_go in (set[int](), {1}):
        assert agent._monitor_workers(group).state == WorkerState.HEALTHY
        assert ranks.ranks == let_go
