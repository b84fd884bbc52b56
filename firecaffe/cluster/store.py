"""A store of torch's that answers at a listener of ours: torch itself listens at all addresses."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

BACKLOG = 1024
"""Most calls that wait in the kernel."""


def hold_store(listener: socket.socket, host: str, timeout_s: float) -> TCPStore:
    """Return a store that takes over a listener, which this process finds at `host`."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a script that asks for a store at this port gets this one
        master_listen_fd=listener.detach(),
    )
