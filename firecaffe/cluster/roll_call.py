"""Ranks that were numbered by hand call in by number: who is missing, or there twice, is named."""

import json
import os
import socket
from datetime import timedelta
from typing import Any

import psutil
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from firecaffe.errors import LaunchError

ALL = "all"
"""A key: set once all are there, to nothing, or to what is wrong."""

MOST_NAMED = 8
"""Missing ranks that a line names."""


def call_in(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Waits until all ranks have called in. store: of these ranks alone.

    Raises: LaunchError if some do not come in time, or two say that they are the same rank.
    """
    key, me = f"here/{rank}", _myself()
    if store.add(f"{key}/count", 1) == 1:
        store.set(key, json.dumps(me))
        if store.add("here", 1) == world_size:
            store.set(ALL, "")
    else:
        other = json.loads(store.get(key))
        if _runs_beside(me, other):
            text = (
                f"two processes say that they are rank {rank} (RANK={rank}), on {other['host']} "
                f"and {me['host']}; number the ranks 0..{world_size - 1}, each once"
            )
            store.set(ALL, text)
    try:
        store.wait([ALL], timeout)
    except DistStoreError:
        # For all: who came first goes first, and rank 0 takes the store with it.
        store.set(ALL, _missing(store, world_size, timeout))
    if problem := store.get(ALL).decode():
        raise LaunchError(problem)


def _missing(store: Store, world_size: int, timeout: timedelta) -> str:
    numbers = range(world_size)
    missing = [str(each) for each in numbers if not store.check([f"here/{each}/count"])]
    named = ", ".join(missing[:MOST_NAMED]) + (", …" if len(missing) > MOST_NAMED else "")
    return (
        f"{world_size - len(missing)} of WORLD_SIZE={world_size} ranks came in "
        f"{timeout.total_seconds():.0f} s; there is no rank {named}: start it, or set WORLD_SIZE "
        "to the number of ranks"
    )


def _myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _runs_beside(me: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether who has called in under this number still runs, as far as can be seen. On this host
    it may have died, and this process was started in its place; in a container with its number.
    """
    return other["host"] != me["host"] or (other != me and psutil.pid_exists(other["pid"]))
