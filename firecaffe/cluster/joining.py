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
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from firecaffe.cluster.addresses import listen, split_place
from firecaffe.cluster.groups import ATTEMPTS
from firecaffe.cluster.links import Listener, call
from firecaffe.cluster.secret import SECRET, SignatureError, SignedStore, accept, own_secret, signed
from firecaffe.cluster.world import World, launcher_place, launcher_store, run_pulse
from firecaffe.errors import FirecaffeError, LaunchError, RecipeError

T = TypeVar("T")

ANSWER_S = 10.0

COME_S = 10.0
"""Seconds in which a joining worker must call rank 0, and connect each lane to it."""

POLL_S = 0.2
"""Seconds between two looks for a worker that asks to join."""


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


class JoinListener(Generic[T]):
    """Admits workers on rank 0, in a thread of its own."""

    def __init__(
        self,
        world: World,
        silent_s: float,
        connect: Callable[[int, Store], T],
        take: Callable[[T], object],
        say: Callable[[str], None],
    ) -> None:
        """Give `take` what `connect` makes of a new rank and the store of it and rank 0 only.

        Both run in the listener's thread. silent_s: the time of silence after which a watch gives
        up. If `connect` raises a FirecaffeError, the worker is not admitted.
        """
        self._world, self._silent_s, self._say = world, silent_s, say
        self._connect, self._take = connect, take
        self._is_over = threading.Event()
        self._resources = ExitStack()
        self._thread: threading.Thread | None = None

    def open(self, facts: dict[str, Any]) -> None:
        """Admit workers from now on, if there is a store where they can ask."""
        place, world = launcher_place(), self._world
        if place is None or world.world_size == 1:
            return
        one_host = world.local_world_size == world.world_size
        server = JoinServer(launcher_store(), world.attempt, one_host=one_host)
        server.open(facts)
        self._say(_invitation(f"firecaffe train RECIPE --join {place}"))
        self._thread = threading.Thread(
            target=self._look, args=(server,), name="join server", daemon=True
        )
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Admit no more workers. Wait for one that is being admitted."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(patience_s)
        self._resources.close()

    def _look(self, server: JoinServer) -> None:
        try:
            while not self._is_over.wait(POLL_S):
                self._next(server)
            server.close()
        except RuntimeError as error:  # the store is gone, with the launcher
            self._say(f"no more workers can join: {str(error).splitlines()[0]}")

    def _next(self, server: JoinServer) -> None:
        try:
            while not self._is_over.is_set() and (comer := server.next()) is not None:
                self._admit(server, comer)
        except LaunchError as error:  # the next look continues with the next worker
            self._say(str(error))

    def _admit(self, server: JoinServer, comer: JoinRequest) -> None:
        watch = self._world.watch
        rank = len(watch.hosts)
        try:
            to_it = server.admit(comer, rank, list(watch.hosts))
            watch.add_rank(comer.host, to_it)
            self._resources.enter_context(run_pulse([to_it], self._silent_s))
            connected = self._connect(rank, server.store_of(comer))
        except (FirecaffeError, OSError) as error:
            self._say(f"a worker on {comer.host} asked to join and failed: {error}")
            return
        self._say(f"rank {rank} on {comer.host} has joined")
        if doubt := comer.facts.get("doubt"):
            self._say(f"warning: rank {rank} {doubt}")
        self._take(connected)


def _invitation(command: str) -> str:
    if own_secret() is None:
        return f"more workers can join: {command}"
    # A secret that the launcher has made itself is in no file.
    return f"{command} --secret-file FILE joins this run, if it was started with that file"


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
