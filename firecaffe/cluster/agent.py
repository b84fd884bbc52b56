"""torch's elastic agent, with rank processes that it starts, watches and ends itself.

The base class meets the agents of other hosts, numbers the ranks and restarts them together. This
one reports the rank that failed first, restarts for no error that would recur, and drops ranks that
rank 0 continues without. It queries the launchers' store in another thread, so that it can always
handle signals. torch documents the methods that are overridden here.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from firecaffe.cluster.addresses import SAY_EVERY_S, join_place
from firecaffe.cluster.calls import SideThread, repeated
from firecaffe.cluster.groups import ATTEMPT, ATTEMPTS
from firecaffe.cluster.hosts import (
    LAST_S,
    PART_S,
    PATIENCE_S,
    ExitAgreement,
    Rendezvous,
)
from firecaffe.cluster.lost_ranks import TOGETHER, LossReader, ReleasedRanks
from firecaffe.cluster.process_settings import SAME_S, heard
from firecaffe.cluster.rank_process import (
    NEEDED,
    ProcessState,
    RankFailure,
    RankProcess,
    wait_for_descriptors,
)
from firecaffe.cluster.world import LAUNCHER_STORE
from firecaffe.errors import LaunchError
from firecaffe.faults import Fault

SURVIVORS_S = 5.0
"""Seconds for the survivors of a failure to end; a stopped rank is killed at once."""
STOP_S = 600.0
"""Seconds for ranks that are asked to stop: they finish their step and save."""
POLL_S = 0.05

MEETING_S = PATIENCE_S + 60.0
"""Seconds for launchers to meet; torch's rendezvous gives up sooner if its store answers."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that are passed on to the ranks."""

HOPELESS = {*range(2, 9)}
"""Exit codes of errors that would recur after a restart; see errors.py."""


class Callbacks(Protocol):
    """The events that the agent reports about its ranks."""

    def on_restart(self, failures: dict[int, RankFailure], number: int | None) -> None:
        """Report failures before restart `number`, from 1; None if a host leaves the run."""

    def on_rank_lost(self, rank: int, fault: Fault | None, failure: RankFailure | None) -> None:
        """Report that the run continues without a rank of this host; see `OnRankLost`."""

    def on_joined(self) -> None:
        """Report that a host waits to join, for which the ranks restart."""

    def on_waiting(self, waited_s: float) -> None:
        """Report, every `SAY_EVERY_S` seconds, that the launcher waits for other hosts."""

    def on_done(self) -> None:
        """Report that this host's ranks have succeeded, while the store still exists."""


class FaultAgent(SimpleElasticAgent):
    """The agent of this host's ranks."""

    def __init__(
        self,
        spec: WorkerSpec,
        reports: Path,
        callbacks: Callbacks,
        aside: SideThread,
        *,
        is_elastic: bool,
    ) -> None:
        """Run the ranks of `spec`, whose handler is a Rendezvous.

        reports: a folder for the ranks' final reports. is_elastic: other hosts may leave.
        """
        super().__init__(spec)
        self.reports, self.callbacks, self.aside = reports, callbacks, aside
        self.is_elastic = is_elastic
        self._released: ReleasedRanks | None = None
        self._ends: ExitAgreement | None = None
        self.ended_by_us: set[int] = set()
        """Global ranks that the agent has ended."""
        self._hosts: frozenset[Any] = frozenset()  # of this attempt, or the one before
        self._is_first = True  # this is the first attempt
        self._is_late = False  # this host came to the run of others
        self._others_are_late = False
        self.is_refused = False
        """Whether this host came late and its ranks cannot join, so that the others go on."""
        self._is_left = False
        # The time and number of the first of the signals that count as one.
        self._signal: tuple[float, signal.Signals] | None = None
        self._is_starting = False  # while it is set, nothing may interrupt
        self._ranks: dict[int, RankProcess] = {}  # of this attempt, by global rank
        self.last_failures: dict[int, RankFailure] = {}
        """The failures of the last attempt that failed; empty if none has."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to their end. A signal after their last step does not undo the run."""
        try:
            result: RunResult = super().run(role)
            return result
        except SignalException:
            needed = self._ranks.keys() - self.released
            if not needed or self._running() or self.failures():
                raise
            self._exit_barrier()
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(self._ranks))

    def raise_late_signal(self) -> None:
        """Raise the signal that came too late to stop the run, if the caller has a handler."""
        if self._signal is not None:
            number = self._signal[1]
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
                signal.raise_signal(number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        begun_s = time.monotonic()

        def tell() -> None:
            self.callbacks.on_waiting(time.monotonic() - begun_s)

        with repeated(tell, SAY_EVERY_S):
            while not self._meet(worker_group, begun_s + MEETING_S):
                pass

    def _meet(self, worker_group: WorkerGroup, until_s: float) -> bool:
        # False if a host was lost after it had joined, and before it had told the others its ranks.
        meet = super()._rendezvous
        self.aside.catch_up(PATIENCE_S)  # the link to the store may come back
        try:
            self.aside.run(lambda: meet(worker_group), MEETING_S)
            self.aside.run(lambda: self._begin_attempt(worker_group), MEETING_S)
        except DistStoreError:
            may_wait = self.is_elastic or self._remaining_restarts > 0
            if not may_wait or time.monotonic() > until_s:
                raise
            return False
        return True

    def _begin_attempt(self, worker_group: WorkerGroup) -> None:
        store = worker_group.store
        assert store is not None  # after the rendezvous
        lasting = store.underlying_store
        os.environ[LAUNCHER_STORE] = join_place(lasting.inner.host, lasting.inner.port)
        if worker_group.group_rank == 0:
            store.set("firecaffe/attempt", str(lasting.add(ATTEMPTS, 1) - 1))
        os.environ[ATTEMPT] = store.get("firecaffe/attempt").decode()
        rendezvous, attempt = worker_group.spec.rdzv_handler, int(os.environ[ATTEMPT])
        assert isinstance(rendezvous, Rendezvous)
        losses = LossReader(lasting, attempt)
        self._released = ReleasedRanks(losses, self.aside, self.callbacks.on_rank_lost, self._kill)
        self._note_hosts(rendezvous.hosts_of_attempt(), attempt)
        here = worker_group.group_rank
        self._ends = ExitAgreement(lasting, attempt, here, rendezvous.hosts_there)

    def _note_hosts(self, hosts: frozenset[Any], attempt: int) -> None:
        is_new, self._is_first = not self._hosts, attempt == 0
        self._is_late = self.is_elastic and is_new and not self._is_first
        self._others_are_late = self.is_elastic and not is_new and not hosts <= self._hosts
        self._hosts = hosts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ended_by_us.clear()
        wait_for_descriptors(NEEDED * (1 + len(worker_group.workers)))
        if threading.current_thread() is threading.main_thread():
            for number in heard(SIGNALS):
                signal.signal(number, self._handle)
        self._ranks, self._is_starting = {}, True
        try:
            for worker in worker_group.workers:
                self._ranks[worker.global_rank] = self._start(worker_group, worker)
        finally:
            self._is_starting = False
        self._raise_noted()
        return {rank.local_rank: rank.process.pid for rank in self._ranks.values()}

    def _start(self, worker_group: WorkerGroup, worker: Worker) -> RankProcess:
        spec = worker_group.spec
        report = self.reports / os.environ[ATTEMPT] / f"{worker.local_rank}.json"
        command = [str(spec.entrypoint), *map(str, spec.args)]
        variables = self._variables_of(worker_group, worker)
        return RankProcess.start(worker.local_rank, command, variables, report)

    def _variables_of(self, worker_group: WorkerGroup, worker: Worker) -> dict[str, str]:
        spec = worker_group.spec
        variables = {
            "RANK": worker.global_rank,
            "LOCAL_RANK": worker.local_rank,
            "GROUP_RANK": worker_group.group_rank,
            "ROLE_RANK": worker.role_rank,
            "ROLE_NAME": spec.role,
            "WORLD_SIZE": worker.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "ROLE_WORLD_SIZE": worker.role_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            # `_remaining_restarts` is the only attribute of torch's that this class uses.
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
        }
        return {name: str(value) for name, value in variables.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _handle(self, number: int, _: FrameType | None) -> None:
        # As torch's handler does, but once for signals that count as one. A second exception would
        # interrupt torch's handling of the first, and the ranks would get SIGTERM.
        now, sent = time.monotonic(), signal.Signals(number)
        if self._signal is None:
            self._signal = now, sent
        elif now - self._signal[0] <= SAME_S:
            return
        if not self._is_starting:  # else a process not recorded yet would be left behind
            raise _ended_by(sent)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._raise_noted()
        wait_for_descriptors()
        seen = {rank: process.seen() for rank, process in self._ranks.items()}
        if not self._release_lost(seen):
            return RunResult(WorkerState.HEALTHY)
        if len(self.released) == len(self._ranks):
            return self._without_ranks()
        needed = [state for rank, state in seen.items() if rank not in self.released]
        codes = {state.failure.exitcode for state in needed if state.failure is not None}
        if not codes and not all(state.has_ended for state in needed):
            return RunResult(WorkerState.HEALTHY)
        if codes and codes <= TOGETHER:
            self._end_ranks(None, STOP_S)  # the others are stopping already
        elif codes:
            self._end_ranks(signal.SIGTERM, SURVIVORS_S)
        failures = self.failures()
        if not failures:
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(self._ranks))
        causes = [f for rank, f in failures.items() if rank not in self.ended_by_us]
        codes = {failure.exitcode for failure in causes}
        # What is wrong before the first step with a new host is that host's fault: it ends alone.
        is_unfit = bool(codes & HOPELESS) and not any(cause.has_trained for cause in causes)
        self.is_refused = self._is_late and is_unfit
        # That ranks cannot meet is hopeless at the first start: later, one may be lost.
        hopeless = HOPELESS if self._is_first else HOPELESS - {LaunchError.exit_code}
        is_asked = self.is_elastic and {cause.is_asked_elsewhere for cause in causes} == {True}
        self._is_left = is_asked or (self._others_are_late and is_unfit)
        if self._is_left:
            # Another host leaves. The ranks continue on the hosts that stay.
            self._remaining_restarts += 1
        elif self.is_refused or codes & {*hopeless, *TOGETHER}:
            self._remaining_restarts = 0
        return self._failed(failures)

    def _raise_noted(self) -> None:
        # The signal came while ranks were being started, or in a destructor or a fork's hook, where
        # Python drops exceptions. Any other signal has already ended `run`.
        if self._signal is not None:
            raise _ended_by(self._signal[1])

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._raise_noted()
        if worker_group.state == WorkerState.FAILED:
            number = worker_group.spec.max_restarts - self._remaining_restarts
            self.callbacks.on_restart(self.last_failures, None if self._is_left else number)
        else:
            self.callbacks.on_joined()
        super()._restart_workers(worker_group)

    def _release_lost(self, seen: dict[int, ProcessState]) -> bool:
        assert self._released is not None
        left = {rank: state for rank, state in seen.items() if rank not in self.released}
        return self._released.look(left)

    def _without_ranks(self) -> RunResult:
        # A host that has dropped all its ranks ends with the host of rank 0.
        ends = self._ends
        assert ends is not None
        try:
            if self.aside.run(lambda: ends.is_done(0), MEETING_S):
                return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(self._ranks))
            if self.aside.run(lambda: ends.is_there(0), MEETING_S):
                return RunResult(WorkerState.HEALTHY)
        except (TimeoutError, RuntimeError, RendezvousError):
            pass  # the store is out of reach or gone; the others may go on, or have ended
        self._remaining_restarts = 0
        return self._failed(self._failures_of(self._ranks))

    def _failed(self, failures: dict[int, RankFailure]) -> RunResult:
        self.last_failures = failures
        return RunResult(WorkerState.FAILED, failures={**failures})

    def _exit_barrier(self) -> None:
        assert self._released is not None
        assert self._ends is not None
        self._released.report_rest()
        self.callbacks.on_done()
        # Even if the store is gone, the ranks have succeeded.
        with suppress(TimeoutError, RuntimeError, RendezvousError):
            self.aside.run(self._ends.leave, MEETING_S)

    def part(self, holds_store: bool) -> None:
        """Write this host's last message to the other launchers; see `ExitAgreement.part`."""
        ends = self._ends
        if ends is not None:
            # The run's result is known already, so a signal only ends the waiting.
            with suppress(TimeoutError, RuntimeError, SignalException):
                self.aside.run(lambda: ends.part(holds_store), LAST_S + PART_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks(death_sig, STOP_S)

    @property
    def released(self) -> set[int]:
        """The ranks of this host that the run continues without."""
        return set() if self._released is None else self._released.ranks

    def failures(self) -> dict[int, RankFailure]:
        """Return the failures of ended ranks by global rank, without dropped ranks."""
        return self._failures_of(rank for rank in self._ranks if rank not in self.released)

    def _failures_of(self, ranks: Iterable[int]) -> dict[int, RankFailure]:
        by_rank = {rank: self._ranks[rank].failure for rank in ranks}
        return {rank: failure for rank, failure in by_rank.items() if failure is not None}

    def _end_ranks(self, number: signal.Signals | None, patience_s: float) -> None:
        """Ask the ranks to end by a signal, if one is given; kill those that do not end in time."""
        running, second = self._running(), None
        begun_s = time.monotonic()
        until = begun_s + patience_s
        if number is not None:
            self.ended_by_us |= running.keys()
            for process in running.values():
                process.send(number)
        while running and time.monotonic() < until:
            try:
                for process in running.values():
                    if process.is_stopped:
                        process.send(signal.SIGKILL)
                time.sleep(POLL_S)
                running = self._running()
            except SignalException as error:
                second = error
                if time.monotonic() - begun_s > SAME_S:  # a second request: kill all
                    break
        for process in self._running().values():
            process.kill()
        if second is not None:
            raise second

    def _kill(self, rank: int) -> None:
        self._ranks[rank].send(signal.SIGKILL)

    def _running(self) -> dict[int, RankProcess]:
        return {rank: process for rank, process in self._ranks.items() if not process.has_ended}


def _ended_by(sent: signal.Signals) -> SignalException:
    return SignalException(f"process {os.getpid()} got {sent.name}", sigval=sent)
