"""The ranks that rank 0 goes on without, as it tells them to the launchers of all hosts.

Both meet in the launchers' store, which outlives the ranks:

    firecaffe/goes_on/ATTEMPT   set while rank 0 goes on without ranks that are lost
    firecaffe/lost/ATTEMPT/N    the fault of the lost rank N, from 0 in the order of their losses

A launcher sees at once that a process of its own has ended, mostly before rank 0 does. The first
key says that it may wait for rank 0's word.

Which ranks of its host a launcher lets go, for rank 0 goes on without them.

Rank 0 says whom it has given up. A launcher mostly sees before that a process has ended; if rank 0
goes on without lost ranks at all, that one is let go too, and told of when rank 0 has its word. A
process that is given up and still there cannot come back. It is killed: at once if it is stopped,
else after some seconds for its own last word.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from firecaffe.cluster.aside import Aside
from firecaffe.cluster.calls import Calls
from firecaffe.errors import DivergedError, LauncherLostError, NotFiniteError, PreemptedError
from firecaffe.faults import ANOTHER, Fault

TELL_S = 5.0
"""Seconds for a store that does not answer, at the end."""


class LossTeller:
    """Rank 0's end. The store may be out of reach, so it is told in a thread of its own."""

    def __init__(self, store: Store | None, attempt: int) -> None:
        """store: the launchers'; None without one, and then nobody is told."""
        self._store, self._attempt, self._count = store, attempt, 0
        self._calls = Calls("launchers")
        self._set(goes_on_key(attempt), "yes")

    def tell(self, fault: Fault) -> None:
        """Tells of a lost rank."""
        self._set(lost_key(self._attempt, self._count), fault.as_text())
        self._count += 1

    def close(self) -> None:
        """Says that every rank is needed again: one that is lost from now on ends the run."""
        self._set(goes_on_key(self._attempt), "")
        self._calls.close(TELL_S)

    def _set(self, key: str, text: str) -> None:
        store = self._store
        if store is not None:
            self._calls.put(_quietly(lambda: store.set(key, text)))


class LossReader:
    """A launcher's end, for one attempt."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        self.given_up: dict[int, tuple[Fault, float]] = {}
        """What rank 0 has said of ranks, and when that was read, by time.monotonic()."""

    def goes_on(self) -> bool:
        """Asks the store whether rank 0 goes on without ranks that are lost now."""
        key = goes_on_key(self._attempt)
        return self._store.check([key]) and self._store.get(key) != b""

    def read(self) -> None:
        """Reads from the store whom rank 0 has given up."""
        while self._store.check([key := lost_key(self._attempt, len(self.given_up))]):
            fault = Fault.parse(self._store.get(key).decode())
            self.given_up[fault.rank] = fault, time.monotonic()


def goes_on_key(attempt: int) -> str:
    return f"firecaffe/goes_on/{attempt}"


def lost_key(attempt: int, number: int) -> str:
    return f"firecaffe/lost/{attempt}/{number}"


def _quietly(call: Callable[[], object]) -> Callable[[], None]:
    """The call, with nobody to hear that the store is gone: the launcher is, then."""

    def quiet() -> None:
        with suppress(DistError, RuntimeError):
            call()

    return quiet


STORE_S = 1.0
"""Seconds for the store to answer."""

PATIENCE_S = 60.0
"""Seconds for which a store may be silent while it hangs on its answer whether all are ended."""

LAST_WORD_S = 5.0
"""Seconds for a rank that was given up to end by itself."""

TOGETHER = {
    each.exit_code for each in (PreemptedError, LauncherLostError, NotFiniteError, DivergedError)
}
"""Exit codes of ranks that have stopped together: nobody has to be ended, nothing is restarted."""

OnLoss = Callable[[int, Fault | None, ProcessFailure | None], object]
"""(rank, what rank 0 says of it, how it has ended by itself): either is None if it is not known."""


@dataclass(frozen=True)
class Seen:
    """A process of this host, as its launcher sees it."""

    has_ended: bool
    is_stopped: bool
    failure: ProcessFailure | None = None
    """How it has ended, if with another code than 0."""


class LetGo:
    """The ranks of this host that are let go, in one attempt."""

    def __init__(
        self, losses: LossReader, aside: Aside, on_loss: OnLoss, kill: Callable[[int], object]
    ) -> None:
        """on_loss: told of each once. kill: kills a rank."""
        self._losses, self._aside, self._on_loss, self._kill = losses, aside, on_loss, kill
        self.ranks: set[int] = set()
        self._heard_s = time.monotonic()
        self._waiting: dict[int, ProcessFailure | None] = {}
        """Of those that are let go before rank 0 has said so, how they have ended."""

    def look(self, seen: Mapping[int, Seen]) -> bool:
        """Looks at the ranks that are not let go yet. seen: by rank. Returns whether it is known of
        those that have ended which were needed.
        """
        failed = {r: each.failure for r, each in seen.items() if each.failure is not None}
        own = {rank for rank, failure in failed.items() if is_own_end(rank, failure)}
        try:
            self._aside.run(self._losses.read, STORE_S)
            if own - self._losses.given_up.keys():
                goes_on = self._aside.run(self._losses.goes_on, STORE_S)
                self._waiting |= {rank: failed[rank] for rank in own if goes_on}
                if not goes_on:  # it told of them before it stopped going on
                    self._aside.run(self._losses.read, STORE_S)
        except TimeoutError:  # on a machine that is busy, or cut off
            return not own or time.monotonic() - self._heard_s > PATIENCE_S
        except (DistError, RuntimeError, ValueError):
            return True  # nobody says that they are not needed
        self._heard_s = time.monotonic()
        self.ranks |= self._waiting.keys()
        for rank in self._losses.given_up.keys() & {*seen, *self._waiting}:
            self._let(rank, seen.get(rank))
        return True

    def _let(self, rank: int, seen: Seen | None) -> None:
        fault, since_s = self._losses.given_up[rank]
        if seen is not None and not seen.has_ended:
            if not seen.is_stopped and time.monotonic() - since_s < LAST_WORD_S:
                return
            self._kill(rank)
        self.ranks.add(rank)
        failure = self._waiting.pop(rank, None if seen is None else seen.failure)
        self._on_loss(rank, fault, failure)

    def tell_rest(self) -> None:
        """Tells of those of which rank 0 has said nothing to its end."""
        for rank in list(self._waiting):
            self._on_loss(rank, None, self._waiting.pop(rank))


def is_own_end(rank: int, failure: ProcessFailure) -> bool:
    """Whether a rank has ended for a reason of its own, and is not rank 0, without which nobody
    goes on: not together with all, nor because it has lost another.
    """
    fault = fault_in(failure)
    is_of_other = fault is not None and (fault.rank != rank or fault.seen == ANOTHER)
    return rank != 0 and failure.exitcode not in TOGETHER and not is_of_other


def fault_in(failure: ProcessFailure) -> Fault | None:
    """The fault that a rank has left to its launcher, if it has."""
    message: Any = failure.error_file_data.get("message")  # a text if no report was left
    text = message["extraInfo"].get("fault") if isinstance(message, dict) else None
    return None if text is None else Fault.parse(text)
