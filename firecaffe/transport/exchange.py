"""A gradient exchange that runs: a route, bound to this rank and its group."""

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.exchange.route import Route, find_route
from firecaffe.exchange.schedule import Schedule
from firecaffe.transport.collectives import Collectives
from firecaffe.transport.local import LocalRanks
from firecaffe.transport.shared_sum import SharedVector, shared_vector, sum_in_place


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
        """Make the exchange of vectors, one of each rank, by an algorithm that nothing replaces."""
        ranks, per_host = world.world_size, world.local_world_size
        shares = local is not None
        return cls(world, find_route(algorithm, None, ranks, per_host, shared_memory=shares), local)

    @property
    def lanes(self) -> int:
        """The number of vectors that may be under way at once."""
        # On a GPU only their order tells messages apart.
        is_alone = self.world.exchange_group is None or self.world.device.type != "cpu"
        return 1 if is_alone else self.route.lanes

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a vector of zeros to be summed. All ranks must ask for the same, in one order."""
        if not self.route.shares_memory or device.type != "cpu" or num_elements == 0:
            return torch.zeros(num_elements, dtype=dtype, device=device)
        assert self._local is not None
        return self._know(self._local, self._local.share(num_elements, dtype))

    def place_for(self, vector: Tensor) -> Tensor:
        """Return shared memory for a vector: itself, moved with all its views, or another one."""
        assert self._local is not None
        return self._know(self._local, self._local.share(vector.numel(), vector.dtype, vector))

    def forget(self, vector: Tensor) -> None:
        """Let go of a vector from `empty` or `place_for`."""
        self._shared.pop(vector.data_ptr(), None)

    def all_reduce(self, vector: Tensor, lane: int = 0, divide_by: int = 1) -> None:
        """Sum a vector over all ranks, in place, each divided by `divide_by` first.

        lane: below `lanes`, the same on all ranks. Raises: PeerLostError.
        """
        shared = self._shared.get(vector.data_ptr())
        # A part of a vector from `empty` may begin where the vector does.
        if shared is not None and shared.by_rank[0].numel() == vector.numel():
            assert self._local is not None
            send = partial(self._send, "between hosts", self._between_hosts, vector, lane=0)
            sum_in_place(self._local, shared, send, divide_by)
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

    def _know(self, local: LocalRanks, by_rank: list[Tensor]) -> Tensor:
        own = by_rank[local.own]
        schedule = self.route.schedule(own.numel())
        self._shared[own.data_ptr()] = shared_vector(local, by_rank, schedule)
        return own

    def _between_hosts(self, num_elements: int) -> Schedule:
        return self.route.schedule(num_elements).by_messages()

    def _send(self, name: str, make: Callable[[int], Schedule], vector: Tensor, lane: int) -> None:
        self._collectives.run(name, make, vector, range(self.world.world_size), lane)
