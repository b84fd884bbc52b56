"""The watch alone: forks of one process, each with its links and the process beside it.

    python -m benchmarks.faults.many_watches --ranks 512 --on-host 8

One JSON row: sockets of a rank, share of a core that a rank and the process beside it take, and how
long after a kill each other rank has known of it. The hosts are names; all processes are here.
"""

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import psutil

from firecaffe.cluster.links import links_of
from firecaffe.cluster.watch import PeerWatch
from firecaffe.cluster.world import run_pulse

SILENT_S = 20.0
TIMEOUT_S = 300.0
SETTLED_S, START_S = 3.0, 0.03
"""From the start until times are taken; and more for each rank."""


@dataclass(frozen=True)
class Watched:
    """What came out for so many ranks."""

    ranks: int
    on_host: int
    measured_s: float
    sockets: Sequence[float]
    """Median and most of a rank, as in each that follows."""
    of_a_core: Sequence[float]
    """Of the rank's process."""
    of_a_core_beside: Sequence[float]
    known_s: Mapping[str, Sequence[float]]
    """By who was killed: from the kill on."""
    names: Mapping[str, Sequence[str]]
    """What the others say of it."""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--on-host", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    given = parser.parse_args()
    print(json.dumps(asdict(measure(given.ranks, given.on_host, given.seconds))))


def measure(ranks: int, on_host: int, seconds: float) -> Watched:
    """Two times: one process that all of a subtree hang on is killed, then one that none does."""
    inner, leaf = on_host, ranks - 1
    known_s, names = {}, {}
    for name, victim in (("a leaf", leaf), ("a watcher inside the tree", inner)):
        for_s = seconds if victim == inner else 1.0
        cost, late_s, told = _watch_and_kill(ranks, on_host, for_s, victim)
        known_s[name], names[name] = summary(late_s), told
    sockets, own, beside = zip(*cost, strict=True)
    return Watched(
        ranks, on_host, seconds, summary(sockets), summary(own), summary(beside), known_s, names
    )


def _watch_and_kill(
    ranks: int, on_host: int, seconds: float, victim: int
) -> tuple[list[tuple[float, float, float]], list[float], list[str]]:
    """(sockets, shares of a core) by rank; seconds until each knows; what they say."""
    hosts = [f"host{rank // on_host}" for rank in range(ranks)]
    processes, pipes = _start(hosts, seconds)
    try:
        cost = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("watch")
        killed_s = time.time()
        os.kill(processes[victim], signal.SIGKILL)
        told = [pipe.recv() for rank, pipe in enumerate(pipes) if rank != victim]
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return cost, [at_s - killed_s for at_s, _ in told], sorted({line for _, line in told})


def _start(hosts: Sequence[str], seconds: float) -> tuple[list[int], list[Connection]]:
    ends: list[dict[int, socket.socket]] = [{} for _ in hosts]
    for rank in range(len(hosts)):
        for other in links_of(rank, hosts).ranks:
            if rank < other:
                ends[rank][other], ends[other][rank] = _connected()
    processes: list[int] = []
    pipes: list[Connection] = []
    for rank in range(len(hosts)):
        own, of_rank = Pipe()
        process = os.fork()
        if process == 0:
            try:
                for other, of_other in enumerate(ends):
                    for each in of_other.values() if other != rank else ():
                        each.close()
                for pipe in (*pipes, own):
                    pipe.close()
                _be_rank(rank, hosts, ends[rank], of_rank, seconds)
            finally:
                os._exit(1)
        of_rank.close()
        processes.append(process)
        pipes.append(own)
    for of_rank_ends in ends:
        for each in of_rank_ends.values():
            each.close()
    return processes, pipes


def _be_rank(
    rank: int,
    hosts: Sequence[str],
    sockets: dict[int, socket.socket],
    pipe: Connection,
    seconds: float,
) -> None:
    watch = PeerWatch(rank, hosts, sockets, SILENT_S, TIMEOUT_S)
    watch.place.step = 1
    with run_pulse(sockets.values(), SILENT_S):
        (beside,) = psutil.Process().children()
        time.sleep(SETTLED_S + len(hosts) * START_S)  # until all others are there
        before = _own_s(), _of_process_s(beside.pid)
        time.sleep(seconds)
        after = _own_s(), _of_process_s(beside.pid)
        shares = [(end - begin) / seconds for begin, end in zip(before, after, strict=True)]
        pipe.send((len(sockets), *shares))
        pipe.recv()
        watch._known.wait(TIMEOUT_S)
        fault = watch.fault
        words = "nothing" if fault is None else f"rank {fault.rank} on {fault.host}: {fault.kind}"
        pipe.send((time.time(), words))
        time.sleep(TIMEOUT_S)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def _own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _of_process_s(process: int) -> float:
    """Processor time of another process, in nanoseconds by the scheduler, as seconds."""
    with open(f"/proc/{process}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def summary(values: Sequence[float]) -> tuple[float, float]:
    """Median and most."""
    return statistics.median(values), max(values)


if __name__ == "__main__":
    main()
