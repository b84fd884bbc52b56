"""The world: who this rank is, its device, and the process groups to the other ranks.

torchrun's environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) says
which world to join; without it the world is this one process and no group is made.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, ProcessGroup

from firecaffe.comm.memory import keep_freed_memory
from firecaffe.errors import LaunchError, PeerLostError

TIMEOUT_S = 300.0
"""How long a rank waits for the others before it gives up."""

LAUNCHED = "FIRECAFFE_LAUNCHED"
"""In the environment of ranks that firecaffe's own launcher started."""


@dataclass(frozen=True)
class World:
    """This rank among all. A world of one has no groups."""

    rank: int
    world_size: int
    device: torch.device
    group: ProcessGroup | None = None
    """For the main thread: agreement, evaluation."""
    exchange_group: ProcessGroup | None = None
    """For the communication thread alone, so that no order between the two can matter."""
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this host, as the launcher says."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher such as torchrun has started this process as one of its ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


@contextmanager
def join(device: str = "auto", timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Joins the world that the environment names, and leaves it at the end.

    Raises: LaunchError where the environment is incomplete, a device is missing, or the ranks do
    not find each other in `timeout_s` seconds.
    """
    keep_freed_memory()
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank = _number("LOCAL_RANK", 0)
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"RANK is {rank}; with WORLD_SIZE={world_size} it must be 0..{world_size - 1}"
        )
    chosen = _device(device, local_rank)
    if world_size == 1:
        yield World(rank, world_size, chosen)
        return
    group, exchange_group = _connect(world_size, chosen, timedelta(seconds=timeout_s))
    try:
        local_world_size = _number("LOCAL_WORLD_SIZE", 1)
        yield World(rank, world_size, chosen, group, exchange_group, local_rank, local_world_size)
    finally:
        dist.destroy_process_group()


@contextmanager
def peers_may_be_lost() -> Iterator[None]:
    """Says in our words what a process group says when a rank at the other end is gone.

    Raises: PeerLostError.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # Gloo's errors have no class of their own
        reason = _without_source(str(error))
        raise PeerLostError(f"another rank went away or did not answer: {reason}") from error


def _without_source(message: str) -> str:
    """A process group's first sentence, without the place in its own code."""
    first = message.splitlines()[0]
    return re.sub(r"^\[[^]]*\] *", "", first).split(". ")[0]


def _connect(
    world_size: int, device: torch.device, timeout: timedelta
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise LaunchError(f"WORLD_SIZE={world_size} but {name} is not set; start with torchrun")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timeout)
        exchange_group = dist.new_group(backend=backend, timeout=timeout)
        if device.type == "cuda":
            # NCCL wants all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=device), group=exchange_group)
        return dist.group.WORLD, exchange_group
    except (DistError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error) or "address already in use" in str(error):
            reason = "the port is in use; choose another MASTER_PORT (--master-port)"
        raise LaunchError(f"{world_size} ranks did not meet at {where}: {reason}") from error


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise LaunchError(f"device is {name!r}; it must be auto, cpu or cuda")
    count = torch.cuda.device_count()
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ and _number("WORLD_SIZE", 1) > 1:
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


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name} is {text!r} in the environment; it must be a number") from None
