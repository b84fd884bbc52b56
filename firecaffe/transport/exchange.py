"""A gradient exchange that runs: a route, bound to this rank and its group.

Ranks of one host carry out the rounds within the host of the schedule in `exchange.shared_memory`,
with reads, writes and barriers instead of messages. On one host each element is read p times and
written p times in all, and never copied in or out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.exchange.leaves import tree_sum
from firecaffe.exchange.route import Route, find_route
from firecaffe.exchange.schedule import Schedule
from firecaffe.exchange.shared_memory import memory_part
from firecaffe.transport.local_ranks import LocalRanks
from firecaffe.transport.run_schedule import Collectives

BLOCK_ELEMENTS = 65_536
"""Elements that stay in the cache from addition to copy; shorter blocks take longer (LOG.md)."""

Block = list[Tensor]


@dataclass(frozen=True)
class SharedVector:  # computed once, because it took a quarter of a sum's time (LOG.md)
    """A vector of each local rank, and this rank's work on them, for all sums."""

    local: LocalRanks
    by_rank: Sequence[Tensor]
    blocks: Sequence[Block]
    into: Sequence[int]
    """Local ranks whose vectors get these sums; the other vectors may be changed."""
    reads: int | None
    """The local rank whose total this one copies after the messages, if it sends none itself."""
    is_several: bool
    """Whether there are other hosts, to which messages follow."""

    @classmethod
    def of(cls, local: LocalRanks, by_rank: Sequence[Tensor], schedule: Schedule) -> Self:
        part = memory_part(schedule, local.first_rank + local.own)
        blocks = [
            [vector[start : min(start + BLOCK_ELEMENTS, stop)] for vector in by_rank]
            for first, stop in part.adds
            for start in range(first, stop, BLOCK_ELEMENTS)
        ]
        into = [rank - local.first_rank for rank in part.into]
        reads = None if part.reads is None else part.reads - local.first_rank
        return cls(local, by_rank, blocks, into, reads, schedule.world_size > local.size)

    @property
    def own(self) -> Tensor:
        return self.by_rank[self.local.own]

    def sum_in_place(self, send: Callable[[], None], divide_by: int = 1) -> None:
        """Sum all ranks' vectors in place, each divided by `divide_by` first.

        send: carries out this rank's messages. Once one rank returns, all of its host are done.
        """
        self.local.barrier()
        for parts in self.blocks:
            _sum_block(parts, self.into, divide_by)
        self.local.barrier()
        if not self.is_several:
            return
        if self.reads is None:
            send()
        self.local.barrier()
        if self.reads is not None:
            self.own.copy_(self.by_rank[self.reads])
        # The vector may not change before all ranks have read it.
        self.local.barrier()


def _sum_block(parts: Block, into: Sequence[int], divide_by: int) -> None:
    if divide_by != 1:
        torch._foreach_div_(parts, divide_by)
    total = tree_sum(parts, Tensor.add_)
    for target in into:
        if parts[target] is not total:
            parts[target].copy_(total)


class Exchange:
    """Sums vectors over all ranks, in place. Each lane is used by one thread at a time."""

    def __init__(self, world: Group, route: Route, local: LocalRanks | None = None) -> None:
        self.world = world
        self.route = route
        self._local = local
        self._shared: dict[int, SharedVector] = {}
        self._collectives = Collectives(world)

    @classmethod
    def of_vectors(cls, world: Group, algorithm: str, local: LocalRanks | None = None) -> Self:
        """Make an exchange that sums one vector per rank, always by the named algorithm."""
        ranks, per_host = world.world_size, world.local_world_size
        shares = local is not None
        return cls(world, find_route(algorithm, None, ranks, per_host, shared_memory=shares), local)

    @property
    def lanes(self) -> int:
        """The number of vectors that may be under way at once."""
        # On a GPU, messages are matched by their order alone.
        is_alone = self.world.exchange_group is None or self.world.device.type != "cpu"
        return 1 if is_alone else self.route.lanes

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a vector of zeros to be summed. All ranks must ask for the same, in one order."""
        if not self.route.shares_memory or device.type != "cpu" or num_elements == 0:
            return torch.zeros(num_elements, dtype=dtype, device=device)
        return self._share(num_elements, dtype)

    def place_for(self, vector: Tensor) -> Tensor:
        """Return a vector in shared memory: this one, moved with all its views, or a new one."""
        return self._share(vector.numel(), vector.dtype, vector)

    def forget(self, vector: Tensor) -> None:
        self._shared.pop(vector.data_ptr(), None)

    def all_reduce(self, vector: Tensor, lane: int = 0, divide_by: int = 1) -> None:
        """Sum a vector over all ranks, in place, each divided by `divide_by` first.

        lane: below `lanes`, the same on all ranks. Raises: PeerLostError.
        """
        shared = self._shared.get(vector.data_ptr())
        # A part of a vector from `empty` may begin where the vector does.
        if shared is not None and shared.by_rank[0].numel() == vector.numel():
            send = partial(self._send, "between hosts", self._between_hosts, vector, lane=0)
            shared.sum_in_place(send, divide_by)
            return
        if divide_by != 1:
            vector.div_(divide_by)
        if self.world.exchange_group is None:
            return
        if self.route.algorithm == NATIVE:
            self.world.traffic.add_unknown()
            with peers_may_be_lost(self.world):
                dist.all_reduce(vector, group=self.world.exchange_group)
        else:
            route = self.route
            find = find_schedule(route.algorithm, route.ranks_per_host)
            self._send(route.algorithm, partial(find, route.world_size), vector, lane)

    def close(self) -> None:
        self._shared.clear()
        if self._local is not None:
            self._local.close()

    def _share(self, num_elements: int, dtype: torch.dtype, own: Tensor | None = None) -> Tensor:
        assert self._local is not None
        by_rank = self._local.share(num_elements, dtype, own)
        shared = SharedVector.of(self._local, by_rank, self.route.schedule(num_elements))
        self._shared[shared.own.data_ptr()] = shared
        return shared.own

    def _between_hosts(self, num_elements: int) -> Schedule:
        return self.route.schedule(num_elements).by_messages()

    def _send(self, name: str, make: Callable[[int], Schedule], vector: Tensor, lane: int) -> None:
        self._collectives.run(name, make, vector, lane)
