"""Launchers of several hosts end together: one whose ranks are done waits for the others.

Each says in the launchers' store that it is done. A host that is gone says nothing; so hosts that
torch's rendezvous has not heard of for some seconds are not waited for. The launcher that holds the
store ends last: one that asks a store that is gone prints torch's warnings.
"""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

TOGETHER_S = 300.0
"""Seconds for which the first waits for the last, as in torch's own agent."""

PART_S = 10.0
"""Seconds for which the one that holds the store waits for the others' last word."""

LOOK_S = 0.1


class HostEnds:
    """This host among those of one attempt, by their numbers. Every call asks the store."""

    def __init__(
        self, store: Store, attempt: int, here: int, there: Callable[[], set[int]]
    ) -> None:
        """here: this host's number. there: the numbers of the hosts that are there."""
        self._store, self._attempt, self._here, self._there = store, attempt, here, there
        self._ended_with: set[int] = set()

    def is_done(self, host: int) -> bool:
        """Whether a host's ranks have succeeded."""
        return self._store.check([self._key(host)])

    def is_there(self, host: int) -> bool:
        return host in self._there()

    def leave(self) -> None:
        """Says that this host is done, and waits for the others."""
        self._store.set(self._key(self._here), "")
        until = time.monotonic() + TOGETHER_S
        while time.monotonic() < until:
            there = self._there()
            if all(self.is_done(host) for host in there):
                self._ended_with = there - {self._here}
                return
            time.sleep(LOOK_S)

    def part(self, holds_store: bool) -> None:
        """This host's last word to the store. holds_store: whether it has to wait for that of the
        others with which it has ended.
        """
        self._store.set(self._parting(self._here), "")
        until = time.monotonic() + PART_S
        while holds_store and time.monotonic() < until:
            if all(self._store.check([self._parting(host)]) for host in self._ended_with):
                return
            time.sleep(LOOK_S)

    def _key(self, host: int) -> str:
        return f"firecaffe/done/{self._attempt}/{host}"

    def _parting(self, host: int) -> str:
        return f"firecaffe/parted/{self._attempt}/{host}"
