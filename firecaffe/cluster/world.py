"""The world: this rank, its device, and its process groups to the other ranks.

Environment variables say which world to join: torchrun's `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`MASTER_ADDR` and `MASTER_PORT`, or those of mpirun or srun (`launcher_variables`). Without them
the world is this one process, without groups. A world that the script has made itself is used.
"""

import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError

from firecaffe.cluster import pulse
from firecaffe.cluster.addresses import join_place, split_place
from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import (
    GLOO_INTERFACE,
    attempt,
    env_int,
    is_alone,
    meet,
    meeting,
    rank_and_size,
    without_source,
)
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.launcher_variables import adopt_variables, check_rank_and_size
from firecaffe.cluster.links import Shape, connect_ranks, links_of
from firecaffe.cluster.neighbors import PULSE, RankProgress, beat_s, pack
from firecaffe.cluster.process_settings import keep_freed_memory, variables_kept
from firecaffe.cluster.secret import signed
from firecaffe.cluster.watch import PeerWatch, Watch
from firecaffe.errors import LaunchError, PeerLostError, memory_full
from firecaffe.output import say

TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others before it gives up."""

SILENT_S = 20.0
"""Seconds of silence after which a rank counts as frozen or cut off."""

FOLDER = "firecaffe/run_folder"
"""Key in the launcher's store, for all attempts: FOLDER/N is the folder of training N, from 0."""


def own_folder_key(key: str, host: str, launcher: str) -> str:
    """Return the key of a host's own run folder, used if the host does not see the run's."""
    return f"{key}/{host}/{launcher}"


LAUNCHER_STORE = "FIRECAFFE_STORE"
"""Environment variable: HOST:PORT of the store in which our launcher's agents meet."""


@dataclass(frozen=True)
class World(Group):
    store: Store = field(default_factory=HashStore)
    """The launcher's store, which outlives the ranks; if it has none, one of this rank's own."""
    attempt: int = 0

    @property
    def host(self) -> str:
        return self.watch.hosts[self.rank]


def is_launched(nnodes: str = "1") -> bool:
    """Whether a launcher has started this process as a rank. Raises: LaunchError.

    With several hosts (`nnodes`), mpirun or srun has started each host's launcher instead.
    """
    if nnodes == "1":
        adopt_variables()
        check_rank_and_size()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


_WORLDS = count()


@contextmanager
def join(
    device: str = "auto",
    timeout_s: float = TIMEOUT_S,
    silent_s: float = SILENT_S,
    shape: Shape = links_of,
) -> Iterator[World]:
    """Join the existing world, else the environment's; leave it at the end. Raises: LaunchError.

    A rank waits for others for `timeout_s`, and gives up one that is silent for `silent_s`. shape:
    the links of the watch; with `star_of` rank 0 can continue without others.
    """
    # Groups that are made in the block read this variable, too.
    with variables_kept(GLOO_INTERFACE), _join(device, timeout_s, silent_s, shape) as world:
        yield world


@contextmanager
def _join(device: str, timeout_s: float, silent_s: float, shape: Shape) -> Iterator[World]:
    keep_freed_memory()
    rank, world_size = rank_and_size()
    local_rank = env_int("LOCAL_RANK", 0)
    chosen = _device(device, local_rank, world_size)
    if world_size == 1:
        yield World(rank, world_size, chosen, store=launcher_store(), attempt=attempt())
        return
    local_world_size = env_int("LOCAL_WORLD_SIZE", 1)
    if rank == 0 and LAUNCHED not in os.environ and not is_alone(world_size):
        _say_what_is_trusted()
    if next(_WORLDS):
        # The error that ended an earlier training and its stack frames may refer to each other.
        # They keep connections open on which other ranks of that training still wait.
        gc.collect()
    groups = meet(chosen, timeout_s)
    watch = Watch()
    try:
        with meeting(world_size):
            one_host = local_world_size == world_size
            hosts, sockets = connect_ranks(
                groups.store, rank, world_size, timeout_s, one_host=one_host, shape=shape
            )
        watch = PeerWatch(rank, hosts, sockets, silent_s, timeout_s, shape)
        with closing(watch), run_pulse(sockets.values(), silent_s):
            yield World(
                rank,
                world_size,
                chosen,
                groups.main,
                groups.exchange,
                local_rank,
                local_world_size,
                watch,
                store=launcher_store(),
                attempt=attempt(),
            )
    finally:
        # If a rank is lost, a thread may still wait for it. The next world is a new one anyway,
        # also for a rank that has reported its own error and lives on.
        groups.leave(is_lost=watch.fault is not None)


@contextmanager
def run_pulse(sockets: Iterable[socket.socket], silent_s: float) -> Iterator[None]:
    """Run `cluster.pulse` as a process for a `with` block. Raises: LaunchError."""
    if not sys.platform.startswith("linux"):  # others do not say whether a process is stopped
        yield
        return
    numbers = [peer.fileno() for peer in sockets]
    arguments = [os.getpid(), beat_s(silent_s), pack(PULSE, RankProgress()).hex(), *numbers]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", pulse.__file__, *map(str, arguments)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It is not a rank and needs no variables but the path of the interpreter's libraries.
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,  # a terminal's signals are for the rank
        )
    except OSError as error:
        raise LaunchError(f"no process can be started beside the rank: {error}") from error
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def peers_may_be_lost(world: Group, runs_user_code: bool = False) -> Iterator[None]:
    """Turn a process group's errors in the block into PeerLostError, about the lost rank if known.

    The block holds only a group's calls. If it also runs a user's communication hook
    (`runs_user_code`), only errors whose text shows a group count.
    """
    try:
        yield
    except torch.AcceleratorError:
        raise
    except (RuntimeError, PeerLostError) as error:  # Gloo's errors have no class of their own
        if runs_user_code and not _is_of_group(error):
            raise
        if isinstance(error, PeerLostError) and error.fault is not None:
            raise  # named already
        if memory_full(error) is not None:  # this rank's own
            raise
        reason = without_source(str(error))
        timed_out = re.search(r"tim(ed|e) ?out|in time", reason, re.IGNORECASE) is not None
        fault = world.watch.verdict(timed_out)
        if fault is not None:
            raise PeerLostError.of(fault) from error
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"another rank went away or did not answer: {reason}") from error


@contextmanager
def waiting(world: Group) -> Iterator[None]:
    """Show others that this rank waits in the block; put it around `peers_may_be_lost`."""
    # While a rank asks which rank is lost, it must count as waiting; otherwise another rank would
    # take it for the rank that all wait for.
    world.place.waits_from_s, world.place.waits = time.monotonic(), True
    try:
        yield
    finally:
        world.place.waits = False


def _is_of_group(error: Exception) -> bool:
    # Gloo's error messages begin with a place in its source.
    of_gloo = re.search(r"/gloo/transport/|ProcessGroupGloo", str(error))
    return isinstance(error, (DistError, PeerLostError)) or of_gloo is not None


def launcher_place() -> str | None:
    """Return HOST:PORT of the launcher's or agent's store, which outlives the ranks, if any."""
    place = os.environ.get(LAUNCHER_STORE)
    if place is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        place = join_place(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    return place


def launcher_store() -> Store:
    """Connect to the store of `launcher_place`; else make an empty one. Raises: LaunchError."""
    place = launcher_place()
    if place is None:
        return HashStore()
    try:
        return signed(TCPStore(*split_place(place), is_master=False))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"the launcher's store at {place} does not answer: {reason}") from error


@cache
def _say_what_is_trusted() -> None:
    # Ranks of our launcher do not need this: it signs all values that they trust.
    say(
        "the ranks trust the network between their hosts, for another launcher than firecaffe's "
        "has started them; docs/howto/ssh_and_mpi.md says what to close to others"
    )


def _device(name: str, local_rank: int, world_size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise LaunchError(f"device is {name!r}; it must be auto, cpu or cuda")
    count = torch.cuda.device_count()
    if world_size > 1 and "LOCAL_RANK" not in os.environ:
        raise LaunchError("LOCAL_RANK is not set; it says which GPU is this rank's")
    if count == 0:
        raise LaunchError("device is cuda; this host shows no GPU (use cpu or auto)")
    if local_rank >= count:
        raise LaunchError(
            f"local rank {local_rank} has no GPU: this host shows {count}; "
            "start at most one rank for each (--nproc-per-node)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
