"""The ranks that rank 0 goes on without, as it tells them to the launchers of all hosts.

Both meet in the launchers' store, which outlives the ranks:

    firecaffe/goes_on/ATTEMPT   set while rank 0 goes on without ranks that are lost
    firecaffe/lost/ATTEMPT/N    the fault of the lost rank N, from 0 in the order of their losses

A launcher sees at once that a process of its own has ended, mostly before rank 0 does. The first
key says that it may wait for rank 0's word.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from firecaffe.cluster.calls import Calls
from firecaffe.faults import Fault

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
