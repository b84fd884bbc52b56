"""The stores that ranks hold for each other: who reaches them."""

import os
from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from firecaffe.cluster.addresses import LOOPBACK
from firecaffe.cluster.groups import _own_store

TIMEOUT = timedelta(seconds=300)


def listens_at(store: TCPStore) -> set[str]:
    places = psutil.Process(os.getpid()).net_connections("inet")
    return {
        each.laddr.ip
        for each in places
        if each.status == psutil.CONN_LISTEN and each.laddr.port == store.port
    }


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "a-name.invalid"])
def test_ranks_of_one_host_meet_at_its_loopback(host: str) -> None:
    store = _own_store(host, 0, 0, True, TIMEOUT)
    assert listens_at(store) <= {LOOPBACK, "::1"}
    other = _own_store(host, store.port, 1, True, TIMEOUT)
    store.set("key", "value")
    assert other.get("key") == b"value"
    # As a script that initializes torch.distributed by itself has it, in the process of rank 0.
    again = _own_store(host, store.port, 0, True, TIMEOUT)
    assert again.get("key") == b"value"


def test_ranks_of_several_hosts_are_reached_from_all() -> None:
    store = _own_store(LOOPBACK, 0, 0, False, TIMEOUT)
    assert listens_at(store) <= {"::", "0.0.0.0"}
