"""Starts this host's ranks of a command with torch's elastic agent, as torchrun does."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from firecaffe.cluster.addresses import interface_of
from firecaffe.cluster.agent import SIGNALS, FaultAgent
from firecaffe.cluster.calls import SideThread
from firecaffe.cluster.groups import ATTEMPT, GLOO_INTERFACE
from firecaffe.cluster.handover import LAUNCHED, hand
from firecaffe.cluster.hosts import (
    LAST_S,
    MEETING_ERRORS,
    PATIENCE_S,
    Hosts,
    check_hosts_options,
    check_memory,
    meet_launchers,
    own_address,
    reason_of,
)
from firecaffe.cluster.process_settings import (
    exclusive_in_process,
    handlers_kept,
    oom_kill_count,
    variables_kept,
)
from firecaffe.cluster.rank_process import RankFailure, descriptors_kept, wait_for_descriptors
from firecaffe.cluster.secret import SECRET, SignatureError, secret_of
from firecaffe.cluster.world import FOLDER, LAUNCHER_STORE, own_folder_key
from firecaffe.errors import CheckpointError, FirecaffeError, LaunchError, PreemptedError
from firecaffe.faults import GOES_ON, ITSELF, Fault
from firecaffe.files import private_folder
from firecaffe.generators import generators_kept
from firecaffe.output import say, share_with_ranks

ENDED = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)
"""Exit codes of ranks that had stopped already when a signal ended them."""

REFUSED_S = 60.0
"""Seconds that a host which does not fit waits before it ends. The others meet again and train
meanwhile, even if a supervisor restarts this host at once.
"""

MEETING_LOGGER = "torch.distributed.elastic"
"""The parent of the loggers by which torch's agent and rendezvous report."""

Settle = Callable[[Path | None, Fault, str], Fault]
"""A function (run folder or None, fault, what happens next) -> the fault as it is reported."""


class RankFailedError(LaunchError):
    """A rank ended with an error of its own; the launcher ends with the same exit code."""

    def __init__(self, message: str, exit_code: int, own_traceback: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self._own_traceback = own_traceback

    @property
    def traceback(self) -> str:
        return self._own_traceback


def launch(
    arguments: list[str],
    hosts: Hosts,
    max_restarts: int = 0,
    advice: str = "",
    settle: Settle = lambda _, fault, __: fault,
    module: str = "firecaffe",
    for_ranks: object = None,
) -> list[Path]:
    """Run `python -m MODULE ARGUMENTS` as this host's ranks of one world.

    On rank 0's host, return the run folders of their trainings. advice: ends the message after a
    signal. settle: called with every fault. for_ranks: the value of `handed`. Raises: RecipeError
    or LaunchError if the ranks cannot start or meet; RankFailedError for the rank that failed
    first; PreemptedError if all have stopped as they were asked to.
    """
    check_hosts_options(hosts)
    check_memory(hosts.nproc_per_node)
    share_with_ranks()
    secret = secret_of(hosts.secret_file, hosts.is_one)
    with (
        exclusive_in_process("launch"),  # variables and loggers are the process's
        private_folder("firecaffe-ranks-") as folder,
        _silent(MEETING_LOGGER),
        handlers_kept(SIGNALS) as heard,  # the agent sets its own handlers, and leaves them set
        generators_kept(),  # the agent draws random waiting times
        SideThread() as aside,
    ):
        for number in heard:  # the wait for other hosts may be long; Ctrl-C raises anyway
            if number != signal.SIGINT:
                signal.signal(number, partial(_end, advice))
        command, address = ["-m", module, *arguments], own_address(hosts)
        variables = _variables_of_ranks(hosts, address, secret) | hand(for_ranks, folder)
        with _environment(variables):
            started = _Launch(
                command, hosts, max_restarts, address, secret, folder, advice, settle, aside
            )
            folders = started.run()
    started.agent.raise_late_signal()
    return folders


def _variables_of_ranks(hosts: Hosts, address: str, secret: bytes) -> dict[str, str]:
    variables = {
        LAUNCHED: str(os.getpid()),  # ranks leave their reports to this process
        SECRET: os.fsdecode(secret),
        # A host that joins several others later does not learn of a shared store (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if hosts.is_one else "1",
    }
    defaults = {
        "OMP_NUM_THREADS": "1",  # the recipe sets the ranks' threads
        # Else each process goes through a set of texts in another order, for example as a network
        # makes a layer of each, or a data set a number of each class.
        "PYTHONHASHSEED": "0",
        # Autograd allocates more small blocks than glibc's cache of a thread holds by default (7 of
        # each size): nin_small's step on one worker then takes 3 % longer.
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=2000",
    }
    if sys.platform.startswith("linux"):
        defaults[GLOO_INTERFACE] = interface_of(address)
    return variables | {name: os.environ.get(name, value) for name, value in defaults.items()}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with variables_kept(*variables, ATTEMPT, LAUNCHER_STORE):  # the agent sets these two
        os.environ.update(variables)
        yield


@contextmanager
def _silent(name: str) -> Iterator[None]:
    # Its child loggers have their own levels, and report in many lines what we report in one.
    logger = logging.getLogger(name)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


class _Launch:
    def __init__(
        self,
        command: list[str],
        hosts: Hosts,
        max_restarts: int,
        address: str,
        secret: bytes,
        folder: Path,
        advice: str,
        settle: Settle,
        aside: SideThread,
    ) -> None:
        self.hosts, self.max_restarts, self.address = hosts, max_restarts, address
        self.advice, self.settle, self.aside = advice, settle, aside
        self.killed_before = oom_kill_count()
        try:
            self.met, self.holds_store = meet_launchers(hosts, address, secret, aside)
        except (*MEETING_ERRORS, ValueError) as error:
            raise self._not_started(error) from error
        spec = WorkerSpec(
            role="rank",
            local_world_size=hosts.nproc_per_node,
            entrypoint=sys.executable,
            # -P: files of the current folder do not hide libraries of the same name.
            args=("-u", "-P", *command),
            rdzv_handler=self.met,
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=address,
        )
        is_elastic = hosts.min_nodes < hosts.max_nodes
        self.agent = FaultAgent(spec, folder, self, aside, is_elastic=is_elastic)
        self.folders: list[Path] = []
        self.known_folders: list[Path] = []
        self.has_patience, self.has_asked = True, False

    def run(self) -> list[Path]:
        with descriptors_kept(self.met.store.port) if self.holds_store else nullcontext():
            try:
                return self._run()
            except SignalException as error:  # also a signal while the end is reported
                if self.hosts.is_one:  # else others may continue without this host
                    self.met.shutdown()
                raise self._asked(error) from error
            finally:
                wait_for_descriptors()  # later code opens files, too

    def _run(self) -> list[Path]:
        try:
            result = self.agent.run()
        except MEETING_ERRORS as error:
            self.met.shutdown()
            failures = self.agent.last_failures
            if failures:  # they are the cause
                if not self.hosts.is_one:
                    say(
                        f"hosts cannot meet again at {self.hosts.rdzv_endpoint}: {reason_of(error)}"
                    )
                raise self._told(failures, "the run ended") from error
            raise self._not_started(error) from error
        if self.agent.is_refused:
            refusal = self._told(self.agent.last_failures, GOES_ON)
            say(f"{refusal}; this host leaves the run to the others, and ends in {REFUSED_S:.0f} s")
            with suppress(SignalException):
                self.met.leave()
                time.sleep(REFUSED_S)
            raise refusal
        self.met.shutdown()
        self.agent.part(self.holds_store)
        if result is None:
            raise LaunchError("the run ended before this host could join it")
        if result.is_failed():
            failures = self.agent.last_failures
            if failures.keys() <= self.agent.released:  # whether the others have ended is not known
                raise self._told(failures, GOES_ON, goes_on=True)
            raise self._told(failures, "the run ended")
        return self.folders

    def _not_started(self, error: Exception) -> LaunchError:
        stranger = error if isinstance(error, SignatureError) else error.__cause__
        if isinstance(stranger, SignatureError):
            return LaunchError(str(stranger))
        where = "" if self.hosts.is_one else f", meeting at {self.hosts.rdzv_endpoint}"
        if isinstance(error, RendezvousTimeoutError) and not self.hosts.is_one:
            # A host that gives up has already left the list.
            there = sorted({self.address, *self._there()})
            return LaunchError(
                f"{len(there)} of {self.hosts.counted} hosts came in {PATIENCE_S:.0f} s{where} "
                f"with --rdzv-id {self.hosts.rdzv_id}: {', '.join(there)}; start the others with "
                "the same words"
            )
        count = self.hosts.nproc_per_node
        return LaunchError(f"{count} ranks could not be started{where}: {reason_of(error)}")

    def on_restart(self, failures: dict[int, RankFailure], number: int | None) -> None:
        then = f"restart {number} of {self.max_restarts}"
        if number is None:
            then = "the hosts that stay meet again"
        error = self._told(failures, then, goes_on=True)
        say(f"{error}; {then}\n{error.traceback}".rstrip())

    def on_rank_lost(self, rank: int, fault: Fault | None, failure: RankFailure | None) -> None:
        reported, traceback = fault, ""
        if failure is not None:  # the rank's own report is better than rank 0's
            other = Fault(
                "other", rank, socket.gethostname(), 0, ITSELF, failure.line, failure.exitcode
            )
            reported = self._fault(rank, failure) or other
            reported = replace(reported, step=reported.step if fault is None else fault.step)
            traceback = failure.traceback
        assert reported is not None
        self.killed_before = oom_kill_count()
        reported = self._settled(reported, GOES_ON)
        say(f"{reported.event}; {GOES_ON}\n{traceback}".rstrip())

    def on_joined(self) -> None:
        say("a host joins: all ranks save a checkpoint and restart with its ranks")

    def on_done(self) -> None:
        if self.agent.get_worker_group().group_rank == 0:
            self.folders = self._folders()

    def on_waiting(self, waited_s: float) -> None:
        if self.hosts.is_one:
            return
        there = self._there()
        what = "a host to leave" if len(there) == self.hosts.max_nodes else "hosts"
        state = f"{len(there)} of {self.hosts.counted} there ({', '.join(there)})"
        if self.aside.is_overdue:
            what, state = "an answer", "is its host cut off?"
        say(
            f"waiting for {what} at {self.hosts.rdzv_endpoint} with --rdzv-id "
            f"{self.hosts.rdzv_id}, {waited_s:.0f} of {PATIENCE_S:.0f} s: {state}"
        )

    def _there(self) -> list[str]:
        return sorted(str(participant.addr) for participant in self.met.participants)

    def _asked(self, error: SignalException) -> FirecaffeError:
        # This launcher's ranks have got the signal, too.
        failures = self.agent.failures()
        codes = {failure.exitcode for failure in failures.values()}
        if PreemptedError.exit_code in codes and codes <= {PreemptedError.exit_code, *ENDED}:
            said = next(f for f in failures.values() if f.exitcode == PreemptedError.exit_code)
            return PreemptedError(said.line)
        if CheckpointError.exit_code in codes:
            return self._told(failures, "the run ended")
        return _ended_by(error.sigval, self.advice)

    def _told(
        self, failures: dict[int, RankFailure], then: str, goes_on: bool = False
    ) -> RankFailedError | PreemptedError:
        """Return the error of the first failure; `goes_on`: without advice, as the run goes on."""

        def when(rank: int) -> tuple[bool, bool, float]:
            # A rank that only lost another one is not the cause.
            is_of_other = failures[rank].is_for_another(rank)
            # A rank that was failing already when it was asked to end has reported its own fault.
            has_told = 0 < failures[rank].exitcode != PreemptedError.exit_code
            was_ended = rank in self.agent.ended_by_us and (is_of_other or not has_told)
            return was_ended, is_of_other, failures[rank].time_s

        rank = min(failures, key=when)
        failure = failures[rank]
        traceback, fault = failure.traceback, self._fault(rank, failure)
        self.killed_before = oom_kill_count()
        if failure.exitcode == PreemptedError.exit_code:
            return PreemptedError(failure.line)
        if fault is None:
            return RankFailedError(f"rank {rank}: {failure.line}", failure.exitcode, traceback)
        fault = self._settled(fault, then)
        return RankFailedError(fault.event if goes_on else fault.line, fault.exit_code, traceback)

    def _fault(self, rank: int, failure: RankFailure) -> Fault | None:
        """Return the fault that a rank reported or its exit code shows; None for a plain error."""
        if failure.has_reported:
            return failure.fault
        host = socket.gethostname()
        if failure.exitcode >= 0:
            detail = f"ended with code {failure.exitcode}"
            return Fault("exception", rank, host, 0, "its launcher", detail)
        name = signal.Signals(-failure.exitcode).name
        if name == "SIGKILL" and oom_kill_count() > self.killed_before:
            detail = "the kernel killed it for its memory"
            return Fault("out_of_memory", rank, host, 0, "its launcher", detail)
        return Fault("killed", rank, host, 0, "its launcher", name)

    def _settled(self, fault: Fault, then: str) -> Fault:
        folders = self._folders()
        if not folders and self.has_asked:  # no run has begun
            fault = replace(fault, can_resume=False)
        return self.settle(folders[-1] if folders else None, fault, then)

    def _folders(self) -> list[Path]:
        """Return the reported run folders; this host's own if it does not see rank 0's."""
        store = self.agent.get_worker_group().store
        folders: list[Path] = []

        def read() -> None:
            lasting = None if store is None else store.underlying_store
            while lasting is not None and lasting.check([key := f"{FOLDER}/{len(folders)}"]):
                local_key = own_folder_key(key, socket.gethostname(), str(os.getpid()))
                encoded = lasting.get(local_key if lasting.check([local_key]) else key)
                folders.append(Path(os.fsdecode(encoded)))
            self.has_asked = True

        # The store may be gone with its host, or out of reach. On a busy host an earlier query may
        # be overdue; the first time, wait for it, so that a first fault is recorded.
        with suppress(RuntimeError, TimeoutError):
            if self.has_patience:
                self.has_patience = False
                self.aside.catch_up(LAST_S)
            self.aside.run(read, LAST_S)
        self.known_folders = folders or self.known_folders
        return list(self.known_folders)


def _end(advice: str, number: int, _: FrameType | None) -> NoReturn:
    raise _ended_by(signal.Signals(number), advice)


def _ended_by(number: signal.Signals, advice: str) -> RankFailedError:
    return RankFailedError(f"ended by {number.name}{advice and '; '}{advice}", 128 + number)
