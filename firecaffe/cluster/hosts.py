"""The hosts of a run: where their launchers meet, and how they end together.

A launcher whose ranks are done sets a key in the launchers' store, and waits for the hosts that
show signs of life in torch's rendezvous. The one that holds the store ends last; else torch warns.

torch unpickles what it finds in that store, so every value is signed (`cluster.secret`). Its store
would listen at all addresses, so it gets our listener: on a single host, at the loopback.
"""

import errno
import re
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import psutil
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
)

from firecaffe.cluster.addresses import (
    LOOPBACK,
    check_reachable,
    is_here,
    is_one_host,
    listen,
    own_addresses,
    split_place,
    wait_for_listener,
)
from firecaffe.cluster.calls import SideThread
from firecaffe.cluster.secret import SignedStore, hold_store
from firecaffe.errors import LaunchError, RecipeError

RANK_BYTES = 200_000_000
"""Bytes of memory that a rank takes before it has a network (torch 2.13, CPU: 203 MB)."""

PATIENCE_S = 600.0
"""Seconds to wait for the endpoint's host, as torch's rendezvous waits for the others."""


@dataclass(frozen=True)
class Hosts:
    """The hosts that take part, in torchrun's terms. By default this host alone."""

    nproc_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    master_port: int = 0
    """The port at which the ranks of a single host meet; 0 takes a free one."""
    secret_file: str = ""
    """A file with the run's secret; see `cluster.secret`."""

    @property
    def is_one(self) -> bool:
        return self.max_nodes == 1

    @property
    def endpoint(self) -> tuple[str, int]:
        """The host and port at which the launchers meet. Raises: ValueError if it is none."""
        return split_place(self.rdzv_endpoint)

    @property
    def counted(self) -> str:
        is_fixed = self.min_nodes == self.max_nodes
        return str(self.min_nodes) if is_fixed else f"{self.min_nodes} to {self.max_nodes}"


MAX_HOSTS = 10_000


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX`. Raises: RecipeError."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least = int(match[1]) if match else 0
    most = int(match[2] or least) if match else 0
    if not 1 <= least <= most <= MAX_HOSTS:
        raise RecipeError(
            f"--nnodes is {text!r}; it must be N, or MIN:MAX with 1 <= MIN <= MAX <= {MAX_HOSTS:,}"
        )
    return least, most


def check_hosts_options(hosts: Hosts) -> None:
    """Raise RecipeError or LaunchError if the hosts' options or port are wrong."""
    if hosts.is_one:
        if hosts.rdzv_endpoint or hosts.rdzv_id:
            raise RecipeError(
                "--rdzv-endpoint and --rdzv-id are for several hosts; say how many (--nnodes), or "
                "leave them out"
            )
        check_port(hosts.master_port)
        return
    if hosts.master_port:
        raise RecipeError(
            f"--master-port is {hosts.master_port}, which is for one host; several meet at "
            "--rdzv-endpoint"
        )
    try:
        _ = hosts.endpoint
    except ValueError:
        is_what = f"is {hosts.rdzv_endpoint!r}" if hosts.rdzv_endpoint else "is missing"
        raise RecipeError(
            f"--rdzv-endpoint {is_what}; several hosts need HOST:PORT "
            "([IPv6]:PORT), the same on all, on a host that stays to the end"
        ) from None
    if not hosts.rdzv_id:
        raise RecipeError("--rdzv-id is missing; several hosts need one name for their run")


def own_address(hosts: Hosts) -> str:
    """Return the address at which the other hosts reach this one. Raises: LaunchError."""
    if hosts.is_one:
        return LOOPBACK
    # The name may not be known yet, as a pod's that is yet to start.
    wait_for_endpoint(hosts)
    host, _ = hosts.endpoint
    check_reachable(host, "put the one that others reach into --rdzv-endpoint")
    return own_addresses(host)[0]


def check_memory(nproc_per_node: int, word: str = "--nproc-per-node") -> None:
    """Check that this host has memory for the ranks; `word`: the option. Raises: RecipeError."""
    has_bytes = psutil.virtual_memory().total
    most = max(1, has_bytes // RANK_BYTES)
    if nproc_per_node > most:
        raise RecipeError(
            f"{word} is {nproc_per_node}; a rank takes {RANK_BYTES / 1e9:g} GB at least "
            f"and this host has {has_bytes / 1e9:.1f} GB, so it must be at most {most}"
        )


def check_port(port: int) -> None:
    """Check that a port is free. Raises: LaunchError if it cannot be used."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise LaunchError(
                f"--master-port {port} on {LOOPBACK} cannot be used ({error}); "
                "give another, or 0 for a free one"
            ) from error


def wait_for_endpoint(hosts: Hosts) -> bool:
    """Wait for the endpoint's launcher; return whether it must be this one. Raises: LaunchError."""
    place = hosts.endpoint
    advice = "start one on that host with the same words, unless the run is over"
    return not wait_for_listener(
        "a launcher", place, PATIENCE_S, advice, is_own=lambda: is_here(place[0])
    )


TOGETHER_S = 300.0
"""Seconds for which the first launcher waits for the last, as in torch's own agent."""

PART_S = 10.0
"""Seconds for which the launcher that holds the store waits for the others' last message."""

POLL_S = 0.1


class ExitAgreement:
    """The agreement of hosts on the end of an attempt. Every call asks the store."""

    def __init__(
        self, store: Store, attempt: int, here: int, there: Callable[[], set[int]]
    ) -> None:
        """`here` is this host's number; `there` returns the numbers of the hosts that are alive."""
        self._store, self._attempt, self._here, self._there = store, attempt, here, there
        self._ended_with: set[int] = set()

    def is_done(self, host: int) -> bool:
        return self._store.check([self._key(host)])

    def is_there(self, host: int) -> bool:
        return host in self._there()

    def leave(self) -> None:
        """Report that this host is done, and wait for the others."""
        self._store.set(self._key(self._here), "")
        until = time.monotonic() + TOGETHER_S
        while time.monotonic() < until:
            there = self._there()
            if all(self.is_done(host) for host in there):
                self._ended_with = there - {self._here}
                return
            time.sleep(POLL_S)

    def part(self, holds_store: bool) -> None:
        """Write this host's last message; if it holds the store, wait for those of the others."""
        self._store.set(self._parting(self._here), "")
        until = time.monotonic() + PART_S
        while holds_store and time.monotonic() < until:
            if all(self._store.check([self._parting(host)]) for host in self._ended_with):
                return
            time.sleep(POLL_S)

    def _key(self, host: int) -> str:
        return f"firecaffe/done/{self._attempt}/{host}"

    def _parting(self, host: int) -> str:
        return f"firecaffe/parted/{self._attempt}/{host}"


MEETING_ERRORS = (RendezvousError, RuntimeError, OSError)
"""Errors that torch raises if ranks, or hosts, do not find each other."""


def reason_of(error: Exception) -> str:
    """Describe one of `MEETING_ERRORS` in one line."""
    if isinstance(error, RendezvousConnectionError):
        return "no launcher is there any more"
    if isinstance(error, RendezvousClosedError):
        return "the run there has ended"
    if isinstance(error, DistStoreError):
        return f"a host that had come did not answer in {READ_S:.0f} s"
    return (str(error) or type(error).__name__).splitlines()[0]


READ_S = 60.0
"""Seconds to wait for a value in the store."""

ANSWER_S = 1.0
"""Seconds to wait for an answer that the caller can do without."""

LAST_S = 5.0
"""Seconds for the last questions of a launch, once its ranks have ended."""


class OwnClockState(_BackendRendezvousStateHolder):
    """torch's state of a rendezvous, in which a host is lost by this host's clock alone.

    torch (2.13) takes the time that each host writes for one of its own clock: hosts whose clocks
    differ drop each other, and train without each other.
    """

    def __init__(self, backend: RendezvousBackend, settings: RendezvousSettings) -> None:
        super().__init__(backend, settings)
        self._seen: dict[Any, tuple[datetime, float]] = {}
        """The time that each host wrote last, and when it was first read here."""

    def _sanitize(self) -> None:
        now_s, written = time.monotonic(), self._state.last_heartbeats
        kept = {host: seen for host, seen in self._seen.items() if written.get(host) == seen[0]}
        self._seen = {host: (at, now_s) for host, at in written.items()} | kept
        ages_s = {host: now_s - read_s for host, (_, read_s) in self._seen.items()}
        now = datetime.now(UTC)
        by_us = {host: now - timedelta(seconds=age_s) for host, age_s in ages_s.items()}
        self._state.last_heartbeats = by_us
        super()._sanitize()
        left = self._state.last_heartbeats
        self._state.last_heartbeats = {host: written[host] for host in left}


class Rendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, whose store may be out of reach; running ranks are not ended for that.

    It has no second listener: ranks of one host use the launcher's store. What is not overridden
    here is to be called by `SideThread.run`.
    """

    aside: SideThread
    _asked: Future[int] | None = None
    """A pending query for the hosts that wait."""

    def num_nodes_waiting(self) -> int:
        """Return the number of hosts that wait to join; 0 while the store does not answer."""
        answer = self._asked = self._asked or self.aside.begin(super().num_nodes_waiting)
        if not wait([answer], ANSWER_S).done:
            return 0
        self._asked = None
        return answer.result() if answer.exception() is None else 0  # the store is gone

    def leave(self) -> None:
        """Give no more signs of life, so that the others meet again without this host."""
        self._stop_heartbeats()

    def shutdown(self) -> bool:
        """Close the rendezvous for all hosts; return False if the store does not answer."""
        try:
            return self.aside.run(super().shutdown, LAST_S)
        except Exception:
            return False

    @property
    def participants(self) -> dict[Any, int]:
        """The number of each host that has joined (`addr`), as of the store's last query."""
        return self._state_holder.state.participants  # torch (2.13) has no public name for them

    def hosts_of_attempt(self) -> frozenset[Any]:
        """Return the hosts that met last, each by a name of its own."""
        return frozenset(self.participants)

    def hosts_there(self) -> set[int]:
        """Return the numbers of hosts with a recent sign of life; call it by `SideThread.run`."""
        self.is_closed()  # asks the store for the state
        return set(self.participants.values())

    @property
    def store(self) -> TCPStore:
        """The launchers' store without signatures."""
        return cast(TCPStore, cast(SignedStore, self._store).inner)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return self.store


def meet_launchers(
    hosts: Hosts, address: str, secret: bytes, aside: SideThread
) -> tuple[Rendezvous, bool]:
    """Return the rendezvous, and whether this launcher holds it.

    Raises: `MEETING_ERRORS`; LaunchError if another run meets there.
    """
    store, holds_it = _store(hosts)
    signed = SignedStore(store, secret)
    run_id = hosts.rdzv_id or uuid.uuid4().hex
    meets = signed.compare_set("firecaffe/run_id", "", run_id).decode()
    if meets != run_id:  # the store holds one run's folders and attempts, and ends with it
        raise LaunchError(
            f"at {hosts.rdzv_endpoint} a run with --rdzv-id {meets} meets, not {run_id}; take "
            "another port for this one, or start it when that one is over"
        )
    settings = RendezvousSettings(
        run_id,
        hosts.min_nodes,
        hosts.max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=PATIENCE_S),
            # How long to wait for further hosts, once the least number of hosts is there.
            last_call=timedelta(seconds=1 if hosts.is_one else 5),
        ),
        # A host that has left, or is lost, is removed after three of these intervals.
        keep_alive_interval=timedelta(seconds=2),
        keep_alive_max_attempt=3,
    )
    node = Rendezvous._node_desc_generator.generate(address)
    backend = C10dRendezvousBackend(signed, run_id)
    met = Rendezvous(node, settings, backend.name, signed, OwnClockState(backend, settings))
    met.aside = aside
    return met, holds_it


def _store(hosts: Hosts) -> tuple[TCPStore, bool]:
    if hosts.is_one:
        listener = listen(one_host=True, port=hosts.master_port)
        return hold_store(listener, LOOPBACK, READ_S), True
    host, port = hosts.endpoint
    if wait_for_endpoint(hosts):
        try:
            listener = listen(is_one_host(host), host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another launcher on this host was quicker
                raise
        else:
            return hold_store(listener, host, READ_S), True
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=READ_S)), False
