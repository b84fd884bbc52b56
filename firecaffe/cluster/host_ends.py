"""Launchers of several hosts end together: one whose ranks are done waits for the others.

Each says in the launchers' store that it is done. A host that is gone says nothing; so hosts that
torch's rendezvous has not heard of for some seconds are not waited for.
"""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

TOGETHER_S = 300.0
"""Seconds for which the first waits for the last, as in torch's own agent."""

LOOK_S = 0.1


class HostEnds:
    """This host among those of one attempt, by their numbers. Every call asks the store."""

    def __init__(
        self, store: Store, attempt: int, here: int, there: Callable[[], set[int]]
    ) -> None:
        """here: this host's number. there: the numbers of the hosts that are there."""
        self._store, self._attempt, self._here, self._there = store, attempt, here, there

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
            if all(self.is_done(host) for host in self._there()):
                return
            time.sleep(LOOK_S)

    def _key(self, host: int) -> str:
        return f"firecaffe/done/{self._attempt}/{host}"
