"""Lets a worker join running ranks: it and rank 0 meet in the launchers' store.

    firecaffe/door/ATTEMPT      set while rank 0 accepts workers: its facts about the run
    firecaffe/comers/ATTEMPT    the number of workers that have asked to join
    firecaffe/comer/ATTEMPT/N   the facts of the Nth of these workers about itself, from 0
    firecaffe/place/ATTEMPT/N   rank 0's answer: the new rank, all hosts, where rank 0 listens

All values are signed under the run's secret, if it has one. Then the worker calls rank 0, as ranks
call each other at the start (`cluster.links`), and gets a store that only it and rank 0 use.
"""

import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from firecaffe.cluster.addresses import listen, split_place
from firecaffe.cluster.groups import ATTEMPTS
from firecaffe.cluster.links import Listener, call
from firecaffe.cluster.secret import SECRET, SignatureError, SignedStore, accept, signed
from firecaffe.errors import LaunchError, RecipeError

ANSWER_S = 10.0

COME_S = 10.0
"""Seconds in which a joining worker must call rank 0, and connect each lane to it."""


@dataclass(frozen=True)
class JoinRequest:
    number: int
    host: str
    facts: dict[str, Any]


class JoinServer:
    def __init__(self, store: Store, attempt: int, *, one_host: bool) -> None:
        """Use a client of the launchers' store. one_host: workers of other hosts cannot join."""
        self._store, self._attempt, self._one_host = store, attempt, one_host
        self._count = 0

    def open(self, facts: dict[str, Any]) -> None:
        self._store.set(door_key(self._attempt), json.dumps(facts))

    def next(self) -> JoinRequest | None:
        """Return the next worker that asks to join, or None. Raises: LaunchError if malformed."""
        key = f"firecaffe/comer/{self._attempt}/{self._count}"
        if not self._store.check([key]):
            return None
        self._count += 1
        said = self._store.get(key)
        try:
            facts = json.loads(said)
            return JoinRequest(self._count - 1, facts["host"], facts)
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                f"somebody asked to come with {said[:80]!r}; a worker says its host in JSON"
            ) from error

    def admit(self, comer: JoinRequest, rank: int, hosts: list[str]) -> socket.socket:
        """Give a worker its rank and accept its call. Raises: LaunchError if it does not call."""
        with listen(self._one_host) as listener:
            described = Listener.of(listener, self._one_host)
            said = {"rank": rank, "hosts": hosts, "listener": asdict(described)}
            self._store.set(place_key(self._attempt, comer.number), json.dumps(said))
            return accept(listener, described.key, {rank}, time.monotonic() + COME_S)[rank]

    def store_of(self, comer: JoinRequest) -> Store:
        return own_store(self._store, self._attempt, comer.number)

    def close(self) -> None:
        self._store.set(door_key(self._attempt), "")


@dataclass(frozen=True)
class JoinedPlace:
    rank: int
    hosts: list[str]
    """The hosts of all earlier ranks, then this worker's."""
    socket: socket.socket  # to rank 0
    store: Store
    """The store of rank 0 and this worker only."""


class JoinClient:
    def __init__(self, place: str, timeout_s: float) -> None:
        """Find a run by HOST:PORT of its launchers' store. Raises: RecipeError, LaunchError."""
        self._where, self._timeout = place, timedelta(seconds=timeout_s)
        try:
            split_place(place)
        except ValueError as error:
            raise RecipeError(f"--join: {error}") from error
        try:
            # Try a plain connection first: torch prints its own lines if it cannot connect.
            socket.create_connection(split_place(place), ANSWER_S).close()
            patience = timedelta(seconds=ANSWER_S)
            self._store = signed(TCPStore(*split_place(place), is_master=False, timeout=patience))
            self._attempt = self._store.add(ATTEMPTS, 0) - 1
            key = door_key(self._attempt)
            said = self._store.get(key) if self._store.check([key]) else b""
        except SignatureError as error:
            raise LaunchError(f"--join {place}: {error}") from error
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise LaunchError(f"--join {place}: no run answers there: {reason}") from error
        if not said:
            raise LaunchError(
                f"--join {place}: the run there takes no workers now; it does if its "
                "synchrony.mode has a server, after the warm steps"
            )
        try:
            facts = json.loads(said)
        except ValueError as error:
            raise LaunchError(
                f"--join {place}: the run there has a secret; its workers are given it "
                f"(--secret-file, {SECRET})"
            ) from error
        self.facts: dict[str, Any] = facts

    def enter(self, facts: dict[str, Any]) -> JoinedPlace:
        """Ask to join with these facts, and call rank 0. Raises: LaunchError if it is silent."""
        host = socket.gethostname()
        try:
            number = self._store.add(f"firecaffe/comers/{self._attempt}", 1) - 1
            asked = f"firecaffe/comer/{self._attempt}/{number}"
            self._store.set(asked, json.dumps({**facts, "host": host}))
            answer = place_key(self._attempt, number)
            self._store.wait([answer], self._timeout)
            said = json.loads(self._store.get(answer))
        except SignatureError as error:
            raise LaunchError(f"--join {self._where}: {error}") from error
        except RuntimeError as error:
            raise LaunchError(
                f"--join {self._where}: the run's end came first, or rank 0 did not answer in "
                f"{self._timeout.total_seconds():.0f} s"
            ) from error
        rank, until = said["rank"], time.monotonic() + self._timeout.total_seconds()
        to_rank_0 = call(Listener(**said["listener"]), rank, 0, until)
        store = own_store(self._store, self._attempt, number)
        return JoinedPlace(rank, [*said["hosts"], host], to_rank_0, store)


def door_key(attempt: int) -> str:
    return f"firecaffe/door/{attempt}"


def place_key(attempt: int, number: int) -> str:
    return f"firecaffe/place/{attempt}/{number}"


def own_store(store: Store, attempt: int, number: int) -> Store:
    inner = store.inner if isinstance(store, SignedStore) else store  # Gloo uses it from C++
    return PrefixStore(f"firecaffe/comer-store/{attempt}/{number}", inner)
