"""Some ranks that move data among themselves. The world is one such group.

A rank may be in several: of a mesh of workers it is in the row over which gradients are summed and
in the column over which a layer is split. Groups are made by all ranks of the world in one order,
and whoever is in two of them uses them in the same order as everybody else; else two ranks may wait
for each other.

Counts the bytes that a rank sends in a training's steps, as they are handed to the network.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from firecaffe.cluster.groups import backend_for, connected_when_used, destroy
from firecaffe.cluster.message import Place
from firecaffe.cluster.watch import Watch


class Traffic:
    """Counts bytes sent to other ranks. Threads may count at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = True
        self.begin()

    def begin(self) -> None:
        """Begins at 0."""
        self._sent_bytes = 0
        self._is_known = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts nothing in a `with` block, in which no thread of a step sends."""
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
        """Notes a collective of the backend's, of which nobody knows the messages."""
        if self._counts:
            self._is_known = False

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent so far; None if some of them are not known."""
        return self._sent_bytes if self._is_known else None


ORDERED = ("nccl",)
"""Backends whose calls wait on the device, and hold up those that come after them: two ranks that
start the calls of two groups in different orders may wait for each other. Source: NCCL's user
guide, "Using multiple NCCL communicators concurrently".
"""


@dataclass(frozen=True)
class Group:
    """This rank in a group of ranks. `rank` and `world_size` count within it, as torch counts them.
    A group of one has no process groups.
    """

    rank: int
    world_size: int
    device: torch.device
    group: ProcessGroup | None = None
    """The process group of the main thread, for agreement and evaluation."""
    exchange_group: ProcessGroup | None = None
    """The process group of the communication threads alone: no order between the two can matter."""
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks of the group on this host; 1 if they are not consecutive in it."""
    watch: Watch | None = None
    """The watch of the world."""
    place: Place = field(default_factory=Place)
    traffic: Traffic = field(default_factory=Traffic)
    """The count of gradients that this rank has sent, in all its groups."""
    members: tuple[int, ...] = ()
    """The ranks' numbers in the world, in the group's order; empty for all of them."""

    @property
    def needs_one_order(self) -> bool:
        """Whether all ranks have to use this group's exchange in one order with their other groups:
        then the thread that uses those starts it, too, and the device does it beside.
        """
        if self.exchange_group is None:
            return False
        return self.exchange_group._get_backend(self.device).name() in ORDERED

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def in_world(self, rank: int) -> int:
        """The number that a rank of the group has in the world."""
        return self.members[rank] if self.members else rank


def check_parts(world_size: int, parts: Sequence[Sequence[int]]) -> None:
    """Raises: ValueError unless each rank is in one part."""
    found = sorted(rank for part in parts for rank in part)
    if found != list(range(world_size)) or not all(parts):
        raise ValueError(f"{parts!s:.120} do not hold each of {world_size} ranks once")


@contextmanager
def divide(world: Group, parts: Sequence[Sequence[int]]) -> Iterator[Group]:
    """The group that this rank is in, if the ranks are divided into `parts`, for a `with` block.
    All ranks call it, with the same parts.

    Raises: ValueError unless each rank is in one part.
    """
    check_parts(world.world_size, parts)
    own = next(tuple(part) for part in parts if world.rank in part)
    made: list[ProcessGroup] = []
    try:
        for part in parts if len(parts) < world.world_size else ():
            for _ in ("main", "exchange"):
                group = _new(part, world)  # of the others' parts too: torch asks all
                if tuple(part) == own:
                    made.append(group)
        main, exchange = made if len(own) > 1 else (None, None)
        size = world.local_world_size
        on_host = [place for place, rank in enumerate(own) if rank // size == world.rank // size]
        is_run = on_host == list(range(on_host[0], on_host[-1] + 1))
        if world.device.type == "cuda" and exchange is not None:
            # NCCL wants all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=world.device), group=exchange)
        yield Group(
            rank=own.index(world.rank),
            world_size=len(own),
            device=world.device,
            group=main,
            exchange_group=exchange,
            local_rank=own.index(world.rank) - on_host[0] if is_run else 0,
            local_world_size=len(on_host) if is_run else 1,
            watch=world.watch,
            place=world.place,
            traffic=world.traffic,
            members=own,
        )
    finally:
        destroy(made, is_lost=world.watch is not None and world.watch.fault is not None)


def _new(part: Sequence[int], world: Group) -> ProcessGroup:
    assert world.group is not None
    with connected_when_used():
        made: ProcessGroup = dist.new_group(
            list(part),
            backend=backend_for(world.device),
            timeout=world.group._get_backend(world.device).options._timeout,
            sort_ranks=False,
        )
    return made
