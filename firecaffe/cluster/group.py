"""Groups of ranks that move data among themselves, such as the world, and a count of the bytes.

All ranks must make groups in the same order, and use them in the same order; otherwise two ranks
may wait for each other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from firecaffe.cluster.groups import backend_for, keep_for_ever, lazy_connections
from firecaffe.cluster.neighbors import RankProgress
from firecaffe.cluster.process_settings import non_preempting_threads
from firecaffe.cluster.watch import Watch


class Traffic:
    """A counter of bytes sent to other ranks. Several threads may count at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = True
        self.begin()

    def begin(self) -> None:
        self._sent_bytes = 0
        self._is_known = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing in a `with` block, in which no thread of a step may send."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def add(self, sent_bytes: int) -> None:
        if self._counts:
            with self._lock:
                self._sent_bytes += sent_bytes

    def add_unknown(self) -> None:
        """Note a collective of the backend, whose messages are unknown."""
        if self._counts:
            self._is_known = False

    @property
    def sent_bytes(self) -> int | None:
        """The bytes sent so far; None if some of them are unknown."""
        return self._sent_bytes if self._is_known else None


ORDERED = ("nccl",)
"""Backends whose calls wait on the device and hold up the calls after them.

Two ranks that start the calls of two groups in different orders may wait for each other. Source:
NCCL's user guide, "Using multiple NCCL communicators concurrently".
"""


@dataclass(frozen=True)
class Group:
    """This rank in a group of ranks; a group of one has no process groups."""

    rank: int
    world_size: int
    device: torch.device
    group: ProcessGroup | None = None
    """The process group of the main thread, for agreement and evaluation."""
    exchange_group: ProcessGroup | None = None
    """The process group of communication threads only, which need no order with `group`."""
    local_rank: int = 0
    local_world_size: int = 1
    """The number of the group's ranks on this host; 1 if they are not consecutive in the group."""
    watch: Watch = field(default_factory=Watch)
    traffic: Traffic = field(default_factory=Traffic)
    """The count of gradient bytes that this rank has sent, in all its groups."""
    members: tuple[int, ...] = ()
    """The ranks' numbers in the world, in the group's order; empty for the whole world."""

    @property
    def needs_one_order(self) -> bool:
        """Whether one thread must start this exchange and other groups' calls, in one order."""
        if self.exchange_group is None:
            return False
        return self.exchange_group._get_backend(self.device).name() in ORDERED

    @property
    def place(self) -> RankProgress:
        return self.watch.place

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def in_world(self, rank: int) -> int:
        return self.members[rank] if self.members else rank


def check_parts(world_size: int, parts: Sequence[Sequence[int]]) -> None:
    """Check that each rank is in exactly one part. Raises: ValueError."""
    ranks = sorted(rank for part in parts for rank in part)
    if ranks != list(range(world_size)) or not all(parts):
        raise ValueError(f"{parts!s:.120} do not hold each of {world_size} ranks once")


@contextmanager
def divide(world: Group, parts: Sequence[Sequence[int]]) -> Iterator[Group]:
    """Yield this rank's group of `parts`, which are equal on all ranks. Raises: ValueError."""
    check_parts(world.world_size, parts)
    members = next(tuple(part) for part in parts if world.rank in part)
    made: list[ProcessGroup] = []
    try:
        for part in parts if len(parts) < world.world_size else ():
            for _ in ("main", "exchange"):
                group = _new(part, world)  # also for other parts: torch needs all ranks
                if tuple(part) == members:
                    made.append(group)
        main, exchange = made if len(members) > 1 else (None, None)
        size = world.local_world_size
        on_host = [
            place for place, rank in enumerate(members) if rank // size == world.rank // size
        ]
        is_run = on_host == list(range(on_host[0], on_host[-1] + 1))
        if world.device.type == "cuda" and exchange is not None:
            # NCCL needs all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=world.device), group=exchange)
        yield Group(
            rank=members.index(world.rank),
            world_size=len(members),
            device=world.device,
            group=main,
            exchange_group=exchange,
            local_rank=members.index(world.rank) - on_host[0] if is_run else 0,
            local_world_size=len(on_host) if is_run else 1,
            watch=world.watch,
            traffic=world.traffic,
            members=members,
        )
    finally:
        if world.watch.fault is not None:
            # A world that was made for the training aborts all its groups together at its end. In
            # a script's own they stay: aborted alone, one may wait for another's kernel.
            keep_for_ever(*made)
        else:
            for group in made:
                dist.destroy_process_group(group)


def _new(part: Sequence[int], world: Group) -> ProcessGroup:
    assert world.group is not None
    with lazy_connections(), non_preempting_threads():
        made: ProcessGroup = dist.new_group(
            list(part),
            backend=backend_for(world.device),
            timeout=world.group._get_backend(world.device).options._timeout,
            sort_ranks=False,
        )
    return made
