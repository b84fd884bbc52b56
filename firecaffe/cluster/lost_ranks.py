"""The lost ranks that rank 0 continues without, and how launchers stop waiting for them.

Rank 0 and all hosts' launchers use the launchers' store, which outlives the ranks:

    firecaffe/goes_on/ATTEMPT   set while rank 0 continues without lost ranks
    firecaffe/lost/ATTEMPT/N    the fault of the lost rank N, from 0 in the order of losses

A launcher mostly sees that its rank's process has ended before rank 0 does. The first key says that
it may wait for rank 0's report. A lost rank's process that still exists is killed.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from torch._C._distributed_c10d import Store

from firecaffe.cluster.calls import Calls, SideThread
from firecaffe.cluster.rank_process import ProcessState, RankFailure
from firecaffe.errors import DivergedError, LauncherLostError, NotFiniteError, PreemptedError
from firecaffe.faults import Fault

TELL_S = 5.0
"""Seconds to wait at the end for a store that does not answer."""


class LossReporter:
    """Rank 0's reports of losses, written in a thread, because the store may be out of reach."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt, self._count = store, attempt, 0
        self._calls = Calls("launchers")
        self._set(goes_on_key(attempt), "yes")

    def tell(self, fault: Fault) -> None:
        self._set(lost_key(self._attempt, self._count), fault.as_text())
        self._count += 1

    def close(self) -> None:
        """Report that every rank is needed again: a loss from now on ends the run."""
        self._set(goes_on_key(self._attempt), "")
        self._calls.close(patience_s=TELL_S)

    def _set(self, key: str, text: str) -> None:
        def quiet() -> None:
            with suppress(RuntimeError):  # if the store is gone, so is the launcher
                self._store.set(key, text)

        self._calls.put(quiet)


class LossReader:
    """A launcher's reader of rank 0's reports, for one attempt."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt, self._count = store, attempt, 0
        self.given_up: dict[int, tuple[Fault, float]] = {}
        """Rank 0's reports by rank, and when each was read, by time.monotonic()."""

    def goes_on(self) -> bool:
        """Ask the store whether rank 0 now continues without lost ranks."""
        key = goes_on_key(self._attempt)
        return self._store.check([key]) and self._store.get(key) != b""

    def read(self) -> None:
        """Read from the store which ranks rank 0 has given up."""
        while self._store.check([key := lost_key(self._attempt, self._count)]):
            fault = Fault.parse(self._store.get(key).decode())
            self._count += 1  # not by rank: one may be reported twice
            self.given_up[fault.rank] = fault, time.monotonic()


def goes_on_key(attempt: int) -> str:
    return f"firecaffe/goes_on/{attempt}"


def lost_key(attempt: int, number: int) -> str:
    return f"firecaffe/lost/{attempt}/{number}"


STORE_S = 1.0

PATIENCE_S = 60.0
"""Seconds for which the store may be silent while the end of all ranks depends on it."""

LAST_WORD_S = 5.0
"""Seconds for a rank that was given up to end by itself."""

TOGETHER = {
    kind.exit_code for kind in (PreemptedError, LauncherLostError, NotFiniteError, DivergedError)
}
"""Exit codes with which all ranks stop together: none has to be ended or restarted."""

OnRankLost = Callable[[int, Fault | None, RankFailure | None], object]
"""A function (rank, rank 0's fault for it or None, how it ended by itself or None)."""


class ReleasedRanks:
    """The ranks of this host that the run continues without, in one attempt."""

    def __init__(
        self,
        losses: LossReader,
        aside: SideThread,
        on_rank_lost: OnRankLost,
        kill: Callable[[int], object],
    ) -> None:
        """Call `on_rank_lost` once for each such rank; `kill` kills a rank."""
        self._losses, self._aside = losses, aside
        self._on_rank_lost, self._kill = on_rank_lost, kill
        self.ranks: set[int] = set()
        self._heard_s = time.monotonic()
        # The failures of ranks that were let go before rank 0 has reported them.
        self._waiting: dict[int, RankFailure] = {}

    def look(self, seen: Mapping[int, ProcessState]) -> bool:
        """Check the remaining ranks; return whether it is known which ended ones were needed."""
        failed = {r: state.failure for r, state in seen.items() if state.failure is not None}
        self_ended = {  # by a fault of their own: not with all, nor for another rank
            rank
            for rank, failure in failed.items()
            if rank != 0 and failure.exitcode not in TOGETHER and not failure.is_for_another(rank)
        }
        try:
            self._aside.run(self._losses.read, STORE_S)
            if self_ended - self._losses.given_up.keys():
                goes_on = self._aside.run(self._losses.goes_on, STORE_S)
                self._waiting |= {rank: failed[rank] for rank in self_ended if goes_on}
                if not goes_on:  # it reported its losses before it cleared the key
                    self._aside.run(self._losses.read, STORE_S)
        except TimeoutError:  # this machine is busy, or cut off
            return not self_ended or time.monotonic() - self._heard_s > PATIENCE_S
        except (RuntimeError, ValueError):
            return True  # without the store, all ranks are needed
        self._heard_s = time.monotonic()
        self.ranks |= self._waiting.keys()
        for rank in self._losses.given_up.keys() & {*seen, *self._waiting}:
            self._release(rank, seen.get(rank))
        return True

    def _release(self, rank: int, seen: ProcessState | None) -> None:
        fault, since_s = self._losses.given_up[rank]
        if seen is not None and not seen.has_ended:
            if not seen.is_stopped and time.monotonic() - since_s < LAST_WORD_S:
                return
            self._kill(rank)  # it cannot come back
        self.ranks.add(rank)
        failure = self._waiting.pop(rank, None if seen is None else seen.failure)
        self._on_rank_lost(rank, fault, failure)

    def report_rest(self) -> None:
        """Report the ranks that rank 0 has not reported until its end."""
        for rank in list(self._waiting):
            self._on_rank_lost(rank, None, self._waiting.pop(rank))
