"""A store of torch's that answers at a listener of ours: torch itself listens at all addresses."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

BACKLOG = 1024
"""Calls that wait in the kernel."""


def hold_store(listener: socket.socket, host: str, timeout_s: float) -> TCPStore:
    """A store that answers at a listener, which it takes over. host: where it finds that itself."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a script that asks for a store at this port has this one
        master_listen_fd=listener.detach(),
    )
