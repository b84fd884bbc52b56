"""The launchers' rendezvous, torch's dynamic one, in a store of signed values.

torch unpickles what it finds in that store, so every value is signed (`cluster.secret`). torch's
store listens at all addresses, so it gets a listener of ours: on a single host, at the loopback.
"""

import errno
import uuid
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from firecaffe.cluster.addresses import LOOPBACK, is_one_host, listen_at, listen_to_all
from firecaffe.cluster.hosts import PATIENCE_S, Hosts, wait_for_endpoint
from firecaffe.cluster.secret import SignedStore
from firecaffe.cluster.store import BACKLOG, hold_store

MEETING_ERRORS = (DistError, RendezvousError, RuntimeError, OSError)
"""Errors that torch raises if ranks, or hosts, do not find each other."""

READ_S = 60.0
"""Seconds to wait for a value in the store."""


class Rendezvous(DynamicRendezvousHandler):
    """torch's, with no second listener: ranks of a single host use the launcher's store."""

    @property
    def store(self) -> TCPStore:
        """The launchers' store without signatures."""
        return cast(TCPStore, cast(SignedStore, self._store).inner)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return self.store


def meet_launchers(hosts: Hosts, address: str, secret: bytes) -> tuple[Rendezvous, bool]:
    """Return the rendezvous, and whether this launcher holds it. Raises: `MEETING_ERRORS`."""
    store, holds_it = _store(hosts)
    signed = SignedStore(store, secret)
    run_id = hosts.rdzv_id or uuid.uuid4().hex
    handler = Rendezvous.from_backend(
        run_id,
        signed,
        C10dRendezvousBackend(signed, run_id),
        hosts.min_nodes,
        hosts.max_nodes,
        address,
        RendezvousTimeout(
            join=timedelta(seconds=PATIENCE_S),
            # How long to wait for more hosts than are needed, once those are there.
            last_call=timedelta(seconds=1 if hosts.is_one else 5),
        ),
        # A host that has left, or is gone, is forgotten after three of these.
        keep_alive_interval=2,
    )
    return cast(Rendezvous, handler), holds_it


def _store(hosts: Hosts) -> tuple[TCPStore, bool]:
    if hosts.is_one:
        listener = listen_at(LOOPBACK, hosts.master_port, BACKLOG)
        return hold_store(listener, LOOPBACK, READ_S), True
    host, port = hosts.endpoint
    if wait_for_endpoint(hosts):
        try:
            alone = is_one_host(host)
            listener = listen_at(host, port, BACKLOG) if alone else listen_to_all(BACKLOG, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another launcher on this host was quicker
                raise
        else:
            return hold_store(listener, host, READ_S), True
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=READ_S)), False
