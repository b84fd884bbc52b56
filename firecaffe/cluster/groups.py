"""Process groups for trainings, checks and DDP models, which a script runs one after the other.

Each gets new groups. An existing world is used and left alone; else one is made under a new name.
The ranks meet in the launcher's store, which outlives them, so the name includes the attempt. If
the launcher has no store (mpirun), rank 0 holds one from the first world to the end of its process.
Ranks that were numbered by hand register by number, so that errors name a missing or double rank.
"""

import ctypes
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any
from uuid import uuid4

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup
from torch.distributed.distributed_c10d import _abort_process_group, _get_process_group_store
from torch.distributed.rendezvous import rendezvous

from firecaffe.cluster.addresses import (
    LOOPBACK,
    check_known,
    check_reachable,
    interface_of,
    is_loopback_only,
    is_one_host,
    join_place,
    listen,
    own_addresses,
    wait_for_listener,
)
from firecaffe.cluster.calls import POLL_S, repeated
from firecaffe.cluster.handover import LAUNCHED, end_process, leave_report
from firecaffe.cluster.launcher_variables import adopt_variables
from firecaffe.cluster.process_settings import non_preempting_threads, variables_kept
from firecaffe.cluster.secret import hold_store
from firecaffe.errors import LauncherLostError, LaunchError

ALL = "all"
"""A key, set once all ranks have called in: to an empty text, or to the problem."""

MAX_NAMED = 8

OPEN_PORTS = "it has ended, or a firewall is in between: hosts need all ports to each other"


def register_rank(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have called in; the store is theirs only. Raises: LaunchError."""
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
        # Tell all ranks: those that came first time out first, and rank 0's store ends with rank 0.
        store.set(ALL, _missing(store, world_size, timeout))
    if problem := store.get(ALL).decode():
        raise LaunchError(problem)


def _missing(store: Store, world_size: int, timeout: timedelta) -> str:
    numbers = range(world_size)
    missing = [str(number) for number in numbers if not store.check([f"here/{number}/count"])]
    named = ", ".join(missing[:MAX_NAMED]) + (", …" if len(missing) > MAX_NAMED else "")
    return (
        f"{world_size - len(missing)} of WORLD_SIZE={world_size} ranks came in "
        f"{timeout.total_seconds():.0f} s; there is no rank {named}: start it, or set WORLD_SIZE "
        "to the number of ranks"
    )


def _myself() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _runs_beside(me: dict[str, Any], other: dict[str, Any]) -> bool:
    # On this host, the other process may have died and this one may replace it; in a container,
    # even with the same process number.
    return other["host"] != me["host"] or (other != me and psutil.pid_exists(other["pid"]))


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """Return a number that all ranks of this attempt get, and no earlier one in this store.

    torchrun's store keeps earlier keys; each host counts only the restarts that it begins itself.
    Raises: LaunchError.
    """
    wait_s = timeout.total_seconds()
    if rank == 0:
        number = store.add(ATTEMPTS, 1)
        calls = [f"firecaffe/calls/{number}/{other}" for other in range(1, world_size)]
        try:
            store.wait(calls, timeout)
        except dist.DistStoreError:
            missing = [str(n) for n, call in enumerate(calls, 1) if not store.check([call])]
            raise LaunchError(f"rank {', '.join(missing)} did not come in {wait_s:.0f} s") from None
        said = [store.get(call).decode() for call in calls]
        store.set(f"firecaffe/heard/{number}", json.dumps(said))
        return number - 1
    me, until, called = uuid4().hex, time.monotonic() + wait_s, -1
    while time.monotonic() < until:
        number = store.add(ATTEMPTS, 0)  # an earlier one's, until rank 0 has come
        if number != called:
            store.set(f"firecaffe/calls/{number}/{rank}", me)
            called = number
        heard = f"firecaffe/heard/{number}"
        if store.check([heard]) and me in json.loads(store.get(heard)):
            return number - 1
        time.sleep(CALL_S)
    raise LaunchError(f"not all ranks came in {wait_s:.0f} s")


ATTEMPT = "FIRECAFFE_ATTEMPT"
"""Environment variable: the number of this attempt, equal on all ranks; 0 is the first."""

ATTEMPTS = "firecaffe/attempts"
"""A key in the launchers' store: the number of attempts so far."""

CALL_S = 0.05

SERVER = "firecaffe/server"
"""A key in the store: set once it is certain that rank 0's process keeps the store."""

LAZILY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable that torch (2.13) reads when it makes a Gloo group."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that Gloo reads: the network interface at which it is reached."""

_worlds = count()  # every rank makes its worlds in the same order


@dataclass(frozen=True)
class Groups:
    """Two process groups of all ranks; the threads that use them need no common order."""

    main: ProcessGroup
    exchange: ProcessGroup
    store: Store
    """A store of these ranks only, as long as these groups exist."""
    made_world: bool
    """Whether torch.distributed was initialized for these groups."""

    def leave(self, is_lost: bool = False) -> None:
        """Destroy the groups, and the world if it was made for them.

        is_lost: whether an operation may still wait in them for a lost rank.
        """
        if is_lost:
            keep_for_ever(self.main, self.exchange)
        if is_lost and self.made_world:
            keep_for_ever(dist.group.WORLD)
        # NCCL destroys a group once all its ranks do so, and aborts one alone.
        end = _abort_process_group if is_lost else dist.destroy_process_group
        for group in (None,) if self.made_world else (self.main, self.exchange):
            end(group)


def keep_for_ever(*groups: ProcessGroup | None) -> None:
    """Keep references to groups, unknown to torch, until the process ends."""
    # Before torch frees a group, it waits for all its operations, and it cannot cancel them.
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world_size) of the world, else of the environment. Raises: LaunchError."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    adopt_variables()
    rank, world_size = env_int("RANK", 0), env_int("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"RANK is {rank}; with WORLD_SIZE={world_size} it must be 0..{world_size - 1}"
        )
    return rank, world_size


def check_alone(name: str) -> None:
    """Raise LaunchError if this is one of several ranks; the command `name` runs in one process."""
    rank, world_size = rank_and_size()
    if world_size > 1:
        raise LaunchError(
            f"{name} computes in one process, and this one was started as rank {rank} of "
            f"{world_size} (RANK, WORLD_SIZE); start it without a launcher"
        )


def meet(device: torch.device, timeout_s: float) -> Groups:
    """Make the groups of all ranks, which must all call it.

    timeout_s: how long a rank waits for the others, now and in each operation. Raises: LaunchError.
    """
    timeout = timedelta(seconds=timeout_s)
    backend = backend_for(device)
    _, world_size = rank_and_size()
    makes_world = not dist.is_initialized()
    if makes_world:
        with lazy_connections():
            make_world(device, timeout_s)
    with meeting(world_size), lazy_connections(), non_preempting_threads():
        main = dist.new_group(backend=backend, timeout=timeout)
        exchange = dist.new_group(backend=backend, timeout=timeout)
        if device.type == "cuda":
            # NCCL needs all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=device), group=exchange)
    return Groups(main, exchange, _get_process_group_store(main), makes_world)


def make_world(device: torch.device, timeout_s: float) -> None:
    """Initialize torch.distributed with the environment's ranks, or one. Raises: LaunchError."""
    timeout = timedelta(seconds=timeout_s)
    rank, world_size = rank_and_size()
    if world_size == 1:
        dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
        return
    with meeting(world_size), repeated(_end_with_launcher, POLL_S):
        choose_interface(world_size)
        place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        store = _store(place, rank, world_size, timeout)
        if is_numbered_by_agent() and ATTEMPT not in os.environ:  # torchrun's
            os.environ[ATTEMPT] = str(agree_on_attempt(store, rank, world_size, timeout))
        name = f"firecaffe/attempt-{attempt()}-of-{world_size}/world-{next(_worlds)}"
        store = PrefixStore(name, store)
        if not is_numbered_by_agent():
            register_rank(PrefixStore("roll_call", store), rank, world_size, timeout)
        dist.init_process_group(
            backend_for(device), store=store, rank=rank, world_size=world_size, timeout=timeout
        )


def _end_with_launcher() -> None:
    # The store of a launcher that is gone would not answer.
    if os.environ.get(LAUNCHED) not in (None, str(os.getppid())):
        leave_report("its launcher is gone before the ranks have met")
        end_process(LauncherLostError.exit_code)


def choose_interface(world_size: int) -> None:
    """Set Gloo's network interface, unless the user has set it. Raises: LaunchError."""
    rank_0 = os.environ["MASTER_ADDR"]
    if GLOO_INTERFACE in os.environ or not sys.platform.startswith("linux"):
        return
    # If this host's own name resolves to its loopback, as on Debian, Gloo would give that address
    # to other hosts. firecaffe's launcher sets the interface, too.
    if is_alone(world_size):
        os.environ[GLOO_INTERFACE] = interface_of(LOOPBACK)
    elif is_loopback_only(socket.gethostname()):
        check_reachable(rank_0, f"set {GLOO_INTERFACE} to the name of the interface to them")
        os.environ[GLOO_INTERFACE] = interface_of(own_addresses(rank_0)[0])


def is_alone(world_size: int) -> bool:
    is_counted = env_int("LOCAL_WORLD_SIZE", 1) == world_size
    return is_counted or is_one_host(os.environ.get("MASTER_ADDR", ""))


@contextmanager
def lazy_connections() -> Iterator[None]:
    """Let Gloo groups made in the block connect ranks at first use; only under a watch."""
    # By default all ranks connect with each other at once, and Gloo has no time-out for that.
    with variables_kept(LAZILY):
        os.environ.setdefault(LAZILY, "1")
        yield


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """Make a world of this rank alone, for code that needs a process group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """Return a device's backend. NCCL is for tensors on a GPU only; texts and counts use Gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def meeting(world_size: int) -> Iterator[None]:
    """Turn a group's errors in the block into LaunchError, as the ranks do not find each other."""
    where = ""
    if not dist.is_initialized():
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise LaunchError(
                    f"WORLD_SIZE={world_size} but {name} is not set; start with torchrun"
                )
        check_known(os.environ["MASTER_ADDR"], "MASTER_ADDR")  # torch would retry for long
        where = f" at {join_place(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])}"
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = without_source(str(error))
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            reason = "the port is in use; choose another MASTER_PORT (--master-port)"
        raise LaunchError(f"{world_size} ranks did not meet{where}: {reason}") from error


def is_numbered_by_agent() -> bool:
    """Whether an elastic agent, torchrun's or firecaffe's, has numbered the ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def attempt() -> int:
    """Return the number of this attempt, from a launcher that restarts ranks; else 0."""
    return env_int(ATTEMPT, env_int("TORCHELASTIC_RESTART_COUNT", 0))


def env_int(name: str, default: int) -> int:
    """Return an environment variable's whole number. Raises: LaunchError if it is none."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name} is {text!r} in the environment; it must be a number") from None


def without_source(message: str) -> str:
    """Return the first sentence of a process group's error, without the place in its source."""
    first = message.splitlines()[0]
    return re.sub(r"\[[^]]*/[^]]*\] *", "", first).split(". ")[0]


def _own_store(host: str, port: int, rank: int, alone: bool, timeout: timedelta) -> TCPStore:
    if alone and not is_one_host(host):
        host = LOOPBACK
    if rank > 0:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        listener = listen(alone, host, port)
    except OSError:
        # This process may hold a store at that port, which is used again; else torch's error shows.
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,  # torch would not say which rank is missing
            multi_tenant=True,
        )
    return hold_store(listener, host, timeout.total_seconds())


@cache  # by place: until the process ends
def _store(place: tuple[str, str], rank: int, world_size: int, timeout: timedelta) -> Store:
    until = time.monotonic() + timeout.total_seconds()
    if rank > 0 and not is_alone(world_size):
        # torch's client says nothing meanwhile, and ends with a stack of C++.
        where, is_silent = (place[0], int(place[1])), env_int("LOCAL_RANK", 0) > 0
        patience_s = timeout.total_seconds()
        wait_for_listener("rank 0", where, patience_s, OPEN_PORTS, is_silent=is_silent)
    while True:
        if is_numbered_by_agent():
            store: Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
        else:
            store = _own_store(place[0], int(place[1]), rank, is_alone(world_size), timeout)
        try:
            if rank == 0:
                store.set(SERVER, "")
            store.wait([SERVER], timeout)
            return store
        except DistNetworkError:
            # That server belonged to a world that the script has just left; rank 0 starts another.
            if time.monotonic() > until:
                raise
