"""torch's elastic agent, which also says what has happened to its ranks.

It starts this host's ranks, restarts them together with those of other hosts, and gives each start
a name of its own. Five things it does otherwise than its base:

- It knows who ended first, and tells a fault before it restarts.
- A rank that has nothing left to finish is not waited for: a stopped one is killed at once, the
  survivors of a failure have `SURVIVORS_S` seconds. But ranks that were asked to stop, because a
  host leaves or comes, have `STOP_S`: they end their step and save where they are.
- What a restart cannot mend (a wrong recipe, damaged data) is not restarted.
- A rank that rank 0 goes on without is let go (`cluster.let_go`). A host that has no other rank
  waits for the others' end.
- It asks the store of the launchers aside, so that it is never deaf to signals.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any, Protocol, cast

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    LogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError

from firecaffe.cluster.addresses import join_place
from firecaffe.cluster.aside import LAST_S, Aside, PatientRendezvous
from firecaffe.cluster.descriptors import NEEDED, wait_for_room
from firecaffe.cluster.groups import ATTEMPT
from firecaffe.cluster.host_ends import PART_S, HostEnds
from firecaffe.cluster.hosts import PATIENCE_S, SAY_EVERY_S
from firecaffe.cluster.joining import ATTEMPTS
from firecaffe.cluster.let_go import TOGETHER, LetGo, Seen, fault_in
from firecaffe.cluster.losses import LossReader
from firecaffe.cluster.signals import SAME_S
from firecaffe.cluster.world import LASTING
from firecaffe.errors import LaunchError, PreemptedError
from firecaffe.faults import ANOTHER, Fault

SURVIVORS_S = 5.0
STOP_S = 600.0
POLL_S = 0.05

MEETING_S = PATIENCE_S + 60.0
"""Seconds in which launchers have met, or torch's rendezvous says that they have not; else their
store is out of reach.
"""

HOPELESS = {*range(2, 9)} - {LaunchError.exit_code}
"""Exit codes of errors that a restart would meet again; see errors.py. LaunchError counts only at
the first start: later its reason may be a rank that was lost meanwhile."""


class Told(Protocol):
    """The listener that hears from the agent what happens to its ranks."""

    def on_restart(self, result: RunResult, number: int | None) -> None:
        """Hears what has failed before a restart. number: of the restart, from 1; None if it does
        not count, for the ranks have stopped because a host leaves.
        """

    def on_loss(self, rank: int, fault: Fault | None, failure: ProcessFailure | None) -> None:
        """Hears that the run goes on without a rank of this host; see `cluster.let_go.OnLoss`."""

    def on_joined(self) -> None:
        """Hears that a host waits to be let in, for which the ranks start again."""

    def on_waiting(self, waited_s: float) -> None:
        """Hears, every `SAY_EVERY_S` seconds, that hosts are waited for."""

    def on_done(self) -> None:
        """Hears that this host's ranks have succeeded; the store is still there."""


class FaultAgent(LocalElasticAgent):
    """Runs this host's ranks."""

    def __init__(
        self, spec: WorkerSpec, logs: LogsSpecs, told: Told, aside: Aside, *, is_elastic: bool
    ) -> None:
        """spec: with a PatientRendezvous. is_elastic: whether other hosts may leave, and this one
        goes on without them.
        """
        super().__init__(spec, logs)
        self.told, self.aside, self.is_elastic = told, aside, is_elastic
        self._let_go: LetGo | None = None
        self._ends: HostEnds | None = None
        self.ended_by_us: set[int] = set()
        """Global ranks that ended because the agent wanted it."""
        self._is_left = False
        self._processes: dict[int, psutil.Process] = {}
        self._result = RunResult(WorkerState.INIT)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun_s, met = time.monotonic(), threading.Event()

        def tell() -> None:
            while not met.wait(SAY_EVERY_S):
                self.told.on_waiting(time.monotonic() - begun_s)

        teller = threading.Thread(target=tell, name="waiting", daemon=True)
        teller.start()
        try:
            meet = super()._rendezvous
            self.aside.run(lambda: meet(worker_group), MEETING_S)
            self.aside.run(lambda: self._begin_attempt(worker_group), MEETING_S)
        finally:
            met.set()
            teller.join()

    def _begin_attempt(self, worker_group: WorkerGroup) -> None:
        """Gives this start of all hosts' ranks its number."""
        store = worker_group.store
        assert store is not None  # after the rendezvous
        lasting = store.underlying_store
        os.environ[LASTING] = join_place(lasting.inner.host, lasting.inner.port)
        if worker_group.group_rank == 0:
            store.set("firecaffe/attempt", str(lasting.add(ATTEMPTS, 1) - 1))
        os.environ[ATTEMPT] = store.get("firecaffe/attempt").decode()
        rendezvous, attempt = worker_group.spec.rdzv_handler, int(os.environ[ATTEMPT])
        assert isinstance(rendezvous, PatientRendezvous)
        losses = LossReader(lasting, attempt)
        self._let_go = LetGo(losses, self.aside, self.told.on_loss, self._kill)
        here = worker_group.group_rank
        self._ends = HostEnds(lasting, attempt, here, rendezvous.hosts_there)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ended_by_us.clear()
        wait_for_room(NEEDED * (1 + len(worker_group.workers)))
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._processes = {}
        for local_rank, pid in started.items():
            with suppress(psutil.NoSuchProcess):
                self._processes[local_rank] = psutil.Process(pid)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        wait_for_room()
        seen = self._see(worker_group)
        if not self._let_lost_go(worker_group, seen):
            return RunResult(WorkerState.HEALTHY)
        if len(self.let_go) == len(worker_group.workers):
            return self._without_ranks(worker_group)
        needed = [each for rank, each in seen.items() if rank not in self.let_go]
        codes = {each.failure.exitcode for each in needed if each.failure is not None}
        if not codes and not all(each.has_ended for each in needed):
            # A rank that has ended since may be one to let go; the base would end all for it.
            return RunResult(WorkerState.HEALTHY)
        if codes and codes <= TOGETHER:
            self._end_ranks(None, STOP_S)  # the others are on their way
        elif codes:
            self._end_ranks(signal.SIGTERM, SURVIVORS_S)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._result = result
            own = [f for rank, f in result.failures.items() if rank not in self.ended_by_us]
            codes = {failure.exitcode for failure in own}
            self._is_left = self.is_elastic and bool(own) and all(map(_is_asked_elsewhere, own))
            is_first = self._remaining_restarts == worker_group.spec.max_restarts
            if self._is_left:
                # Another host leaves. All have saved and go on with those that stay.
                self._remaining_restarts += 1
            elif codes & {*HOPELESS, *TOGETHER} or (is_first and LaunchError.exit_code in codes):
                self._remaining_restarts = 0
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.FAILED:
            number = worker_group.spec.max_restarts - self._remaining_restarts
            self.told.on_restart(self._result, None if self._is_left else number)
        else:
            self.told.on_joined()
        super()._restart_workers(worker_group)

    def _see(self, worker_group: WorkerGroup) -> dict[int, Seen]:
        """This host's ranks as they are now."""
        running, context = self._running(), cast(SubprocessContext, self._pcontext)
        seen = {}
        for each in worker_group.workers:
            # What is known is what their starter knows: a process that is on its way out runs.
            has_ended = context.subprocess_handlers[each.local_rank].proc.poll() is not None
            process = running.get(each.local_rank)
            is_stopped = process is not None and _status(process) == psutil.STATUS_STOPPED
            failure = self._failures().get(each.global_rank) if has_ended else None
            seen[each.global_rank] = Seen(has_ended, is_stopped, failure)
        return seen

    def _let_lost_go(self, worker_group: WorkerGroup, seen: dict[int, Seen]) -> bool:
        """Lets go of this host's ranks that rank 0 goes on without. Returns whether it is known of
        those that have ended which were needed.
        """
        assert self._let_go is not None
        left = {rank: each for rank, each in seen.items() if rank not in self.let_go}
        is_known = self._let_go.look(left)
        # Their end is none that the base is to see.
        let = {each.local_rank for each in worker_group.workers if each.global_rank in self.let_go}
        cast(SubprocessContext, self._pcontext)._running_local_ranks -= let
        return is_known

    def _without_ranks(self, worker_group: WorkerGroup) -> RunResult:
        """The state of a host that has let go of all its ranks: it ends with that of rank 0."""
        ends = self._ends
        assert ends is not None
        try:
            if self.aside.run(lambda: ends.is_done(0), MEETING_S):
                ranks = (each.global_rank for each in worker_group.workers)
                return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ranks))
            if self.aside.run(lambda: ends.is_there(0), MEETING_S):
                return RunResult(WorkerState.HEALTHY)
        except (TimeoutError, DistError, RuntimeError, RendezvousError):
            pass  # the store is gone, and the run with it
        self._remaining_restarts = 0
        self._result = RunResult(WorkerState.FAILED, failures=self._failures())
        return self._result

    def _exit_barrier(self) -> None:
        assert self._let_go is not None
        assert self._ends is not None
        self._let_go.tell_rest()
        self.told.on_done()
        # If the store is gone, the ranks have succeeded all the same.
        with suppress(TimeoutError, DistError, RuntimeError, RendezvousError):
            self.aside.run(self._ends.leave, MEETING_S)

    def part(self, holds_store: bool) -> None:
        """Says the last word to the other hosts' launchers; see `HostEnds.part`."""
        ends = self._ends
        if ends is not None:
            # How the run has ended is known; a signal, too, only ends the waiting.
            with suppress(TimeoutError, DistError, RuntimeError, SignalException):
                self.aside.run(lambda: ends.part(holds_store), LAST_S + PART_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(death_sig, STOP_S)
        super()._shutdown(death_sig, timeout)

    @property
    def last_failures(self) -> dict[int, ProcessFailure]:
        """The failures of the last attempt that failed; empty if none has."""
        return dict(self._result.failures)

    @property
    def let_go(self) -> set[int]:
        """The ranks of this host that the run goes on without."""
        return set() if self._let_go is None else self._let_go.ranks

    def failures(self) -> dict[int, ProcessFailure]:
        """The failures of the ranks that have ended, by global rank, if a signal has ended the
        agent. Those that were let go are none.
        """
        failures = self._failures()
        return {rank: each for rank, each in failures.items() if rank not in self.let_go}

    def _failures(self) -> dict[int, ProcessFailure]:
        """The failures of all ranks that have ended, by global rank."""
        context = self._pcontext
        found = {}
        for worker in self._worker_group.workers:
            handler = getattr(context, "subprocess_handlers", {}).get(worker.local_rank)
            if handler is not None and context is not None and handler.proc.poll():
                found[worker.global_rank] = ProcessFailure(
                    worker.local_rank,
                    handler.proc.pid,
                    handler.proc.returncode,
                    context.error_files[worker.local_rank],
                )
        return found

    def _end_ranks(self, number: signal.Signals | None, patience_s: float) -> None:
        """Asks the ranks to end, by a signal (None: they end by themselves). Kills those that
        cannot or do not end; at a second signal to the agent, `SAME_S` seconds later or more, all.
        """
        running, second = self._running(), None
        begun_s = time.monotonic()
        until = begun_s + patience_s
        if number is not None:
            of_rank = self._worker_group.workers
            self.ended_by_us |= {of_rank[local].global_rank for local in running}
            _send(running, number)
        while running and time.monotonic() < until:
            try:
                for local_rank, process in running.items():
                    if _status(process) == psutil.STATUS_STOPPED:
                        _send({local_rank: process}, signal.SIGKILL)
                time.sleep(POLL_S)
                running = self._running()
            except SignalException as error:
                second = error
                if time.monotonic() - begun_s > SAME_S:
                    break
        _send(self._running(), signal.SIGKILL)
        if second is not None:
            raise second

    def _kill(self, rank: int) -> None:
        """Kills a rank of this host."""
        local = {each.global_rank: each.local_rank for each in self._worker_group.workers}[rank]
        _send({local: self._processes[local]}, signal.SIGKILL)

    def _running(self) -> dict[int, psutil.Process]:
        """The processes that run, by local rank. Waiting for one would take its exit code from its
        starter.
        """
        ended = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return {
            local: process
            for local, process in self._processes.items()
            if _status(process) not in ended
        }


def _is_asked_elsewhere(failure: ProcessFailure) -> bool:
    """Whether a rank has stopped because one of another host was asked to."""
    fault = fault_in(failure)
    return (
        failure.exitcode == PreemptedError.exit_code and fault is not None and fault.seen == ANOTHER
    )


def _status(process: psutil.Process) -> str | None:
    wait_for_room(1)
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _send(processes: dict[int, psutil.Process], number: int) -> None:
    for process in processes.values():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
