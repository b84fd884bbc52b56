"""Ranks as new processes, on emulated hosts or on this one, forked from one that has torch loaded.

To load torch takes 3 s of a processor: sixteen ranks on two cores would take longer to start than
to be measured.
"""

import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

from benchmarks.emulated.namespaces import enter
from benchmarks.emulated.virtual_cluster import INTERFACE, VirtualCluster
from firecaffe.cluster.secret import SECRET

MODULES = ("torch", "torch.distributed", "torch._dynamo", "benchmarks.training.as_typed_rank")
MAX_LINES = 15

_secret = secrets.token_hex(16)


class RankError(Exception):
    """A rank has failed, or was not done in time."""


@cache
def _fork_server() -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun has it; read when torch is loaded
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context


@dataclass(frozen=True)
class Place:
    """Where ranks are, and what torchrun would tell each of them."""

    told: Sequence[Mapping[str, str]]
    namespaces: Sequence[str] = ()
    """Those of the ranks; empty: this machine's own."""


def on_hosts(cluster: VirtualCluster) -> Place:
    """One rank on each host."""
    told = [
        {
            **_told(host, cluster.hosts, cluster.address(0)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(host),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        for host in range(cluster.hosts)
    ]
    return Place(told, cluster.namespaces)


def on_one_host(ranks: int) -> Place:
    """Ranks of this machine."""
    own = {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    return Place(
        [
            {**_told(rank, ranks, "127.0.0.1"), **own, "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
    )


def _told(rank: int, ranks: int, master: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": master, SECRET: _secret}


def run(
    function: Callable[..., int],
    arguments: Sequence[object],
    place: Place,
    port: int,
    folder: Path,
    timeout_s: float,
) -> None:
    """Calls `function(*arguments)` on every rank, to the end, which is its exit code.

    port: where they meet. folder: takes what they print.

    Raises: RankError with the last lines of the first that failed.
    """
    processes = []
    for rank, words in enumerate(place.told):
        namespace = place.namespaces[rank] if place.namespaces else ""
        environment = {**os.environ, **words, "MASTER_PORT": str(port)}
        target = function, arguments, environment, namespace, folder / f"rank-{rank}.txt"
        processes.append(_fork_server().Process(target=_begin, args=target, daemon=True))
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    try:
        while running:
            ended = connection.wait(list(running), deadline - time.monotonic())
            if not ended:
                raise RankError(f"ranks {[*running.values()]} still run after {timeout_s:g} s")
            for rank in [running.pop(sentinel) for sentinel in ended]:
                processes[rank].join()
                if processes[rank].exitcode:
                    raise RankError(
                        f"rank {rank}: {processes[rank].exitcode}; {_last(folder, rank)}"
                    )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _last(folder: Path, rank: int) -> str:
    lines = (folder / f"rank-{rank}.txt").read_text("utf-8", "replace").splitlines()
    return "\n".join(["it said last:", *lines[-MAX_LINES:]])


def _begin(
    function: Callable[..., int],
    arguments: Sequence[object],
    environment: Mapping[str, str],
    namespace: str,
    out: Path,
) -> None:
    """In the new process."""
    if namespace:
        enter(namespace)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for place in (1, 2):
        os.dup2(file, place)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    os._exit(function(*arguments))
