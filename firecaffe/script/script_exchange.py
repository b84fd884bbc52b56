"""The exchange of a script's ranks, over their own groups, and the mean of DDP's buckets.

Ranks of one host add in shared memory: after the first step, DDP's buckets move there with all
their views, and are summed in place.
"""

import json
import os
import platform
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from firecaffe.cluster.agree import agree, copy_from_first, gather_text
from firecaffe.cluster.group import Group
from firecaffe.cluster.groups import backend_for, env_int, make_world, meeting
from firecaffe.cluster.process_settings import non_preempting_threads
from firecaffe.cluster.world import TIMEOUT_S, peers_may_be_lost
from firecaffe.errors import LaunchError, RecipeError
from firecaffe.exchange import AUTO, NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.route import find_route
from firecaffe.gradients.buckets import layout_of, make_bucket
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW, Compressor
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold_nodes import NodeWire
from firecaffe.transport.local_ranks import meet_local_ranks


def join_launched_world(device: torch.device, timeout_s: float | None) -> None:
    """Initialize `torch.distributed` as the launcher says, unless it is. Raises LaunchError."""
    if dist.is_initialized():
        return
    make_world(device, TIMEOUT_S if timeout_s is None else timeout_s)
    # It runs at the program's end after the exchange threads' finalizers, which are younger.
    weakref.finalize(_leave, _leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(
    group: ProcessGroup | None, device: torch.device, timeout_s: float | None
) -> tuple[Group, list[int]]:
    """Meet the ranks of a group; return this rank's new group, and the ranks of each host.

    Only its ranks call it, all of them. None: all ranks, or the group's time-out. Raises
    LaunchError.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise LaunchError("torch.distributed is not initialized, which the first bucket needs")
    if group.size() == 1:
        return Group(0, 1, device), [1]
    with meeting(group.size()), non_preempting_threads():
        ranks = dist.get_process_group_ranks(group)
        backend = backend_for(device)
        timeout = timeout_of(group, device)
        if timeout_s is not None:
            timeout = timedelta(seconds=timeout_s)
        exchange_group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            # Ranks outside of the group do not take part.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
            sort_ranks=False,
        )
        if device.type == "cuda":
            # NCCL needs all ranks in a group's first operation; a schedule may start with some.
            dist.all_reduce(torch.zeros(1, device=device), group=exchange_group)
    world = Group(group.rank(), group.size(), device, exchange_group, exchange_group)
    per_host = ranks_per_host(gather_text(world, host_key()))
    size = per_host[0] if len(set(per_host)) == 1 else 1
    return replace(world, local_rank=world.rank % size, local_world_size=size), per_host


def share_network(world: Group, network: nn.Module, facts: dict[str, str]) -> None:
    """Check that all ranks have such a network and the same facts, and give them rank 0's tensors.

    Raises: AgreementError; PeerLostError.
    """
    shapes = {n: [str(p.dtype), *p.shape, p.requires_grad] for n, p in network.named_parameters()}
    agree(world, {**facts, "the model": json.dumps(shapes)})
    copy_from_first(world, {**dict(network.named_parameters()), **dict(network.named_buffers())})


def leave(world: Group) -> None:
    # torch names a subgroup by the number of groups of the process. If a rank destroys one before
    # the others do, the ranks of the next subgroup would not find each other.
    if dist.is_initialized() and 1 < world.world_size == dist.get_world_size():
        with suppress(ValueError):  # destroyed already
            dist.destroy_process_group(world.exchange_group)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def ranks_per_host(keys: Sequence[str]) -> list[int]:
    """Return the lengths of runs of ranks on one host, in rank order, from the ranks' host keys."""
    return [len(list(run)) for _, run in groupby(keys)]


def host_key() -> str:
    """Return a key of kernel, network and launcher's host, equal for ranks that share memory."""
    place = ""
    if "LOCAL_RANK" in os.environ:
        place = str(env_int("RANK", 0) - env_int("LOCAL_RANK", 0))
    if not sys.platform.startswith("linux"):
        return f"{platform.node()} {place}"
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{kernel} {os.stat('/proc/self/ns/net').st_ino} {place}"


def open_exchange(
    world: Group,
    per_host: Sequence[int],
    exchange: str,
    compressor: str,
    sizes_bytes: Sequence[int],
    num_leaves: int | None,
) -> tuple[Exchange, AutoChoice | None]:
    """Open the exchange of several ranks, with the choice of "auto"; all must call it.

    `sizes_bytes`: of the buckets. For `num_leaves` see `find_route`. Raises RecipeError if the
    exchange does not fit the hosts; PeerLostError.
    """
    _check_hosts(exchange, world, per_host)
    local = None
    if world.device.type == "cpu":
        # The processes' sockets have the time-out of the group.
        assert world.exchange_group is not None
        patience = timeout_of(world.exchange_group, world.device)
        local = meet_local_ranks(world, patience.total_seconds())
    route_by = partial(
        find_route,
        num_leaves=num_leaves,
        world_size=world.world_size,
        ranks_per_host=world.local_world_size,
        shared_memory=local is not None,
        codec=compressor if compressor != NO_COMPRESSOR else "",
    )
    choice = None
    if exchange == AUTO:
        choice = choose_exchange(world, sizes_bytes, route_by("tree"))
    route = route_by(exchange if choice is None else choice.algorithm)
    return Exchange(world, route, local), choice


def _check_hosts(exchange: str, world: Group, per_host: Sequence[int]) -> None:
    if exchange in (NATIVE, AUTO):
        return
    if parse_hierarchical(exchange) is not None and len(set(per_host)) > 1:
        counts = ", ".join(map(str, per_host))
        raise RecipeError(
            f"exchange: {exchange} needs as many ranks on each host; there are {counts}"
        )
    try:
        find_schedule(exchange, world.local_world_size)(world.world_size, 1)
    except ValueError as error:
        raise RecipeError(f"exchange: {error}") from None


@dataclass(frozen=True)
class DDPBucket:
    index: int
    is_last: bool
    buffer: Tensor
    """The gradients of `parameters` in sequence, as they lie in memory."""
    parameters: Sequence[Tensor]
    is_active: bool = True
    """Whether this rank still has inputs (`torch.distributed.algorithms.Join`)."""
    counts_ranks: bool = False
    """Whether the mean is over the ranks that still have inputs, not over all."""


class RankMean:
    def __init__(self, exchange: Exchange) -> None:
        self._world, self._exchange = exchange.world, exchange
        self._codec = exchange.route.codec
        self._wire = NodeWire(self._world, self._world.world_size)
        self._is_first_step = True
        self._places: dict[int, Tensor] = {}
        self._names: dict[Tensor, str] = {}
        self._coded: dict[int, CodedBucket] = {}
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, bucket: DDPBucket) -> Tensor:
        """Return the mean, in the buffer or in shared memory, until the bucket comes again."""
        # Vectors are divided before the sum, as in DDP, so that nothing overflows except the mean.
        count = self._count(bucket)
        buffer = bucket.buffer
        # DDP cuts its buckets anew after the first step, so no memory is kept for the first ones.
        is_first_step = self._is_first_step
        if bucket.is_last:
            self._is_first_step = False
        if buffer.is_sparse:
            buffer.div_(count)
            with peers_may_be_lost(self._world):
                dist.all_reduce(buffer, group=self._world.exchange_group)
        elif is_first_step or not (self._codec or self._exchange.route.shares_memory):
            self._exchange.all_reduce(buffer, divide_by=count)
        elif self._codec:
            buffer.div_(count)
            self._reduce_coded(bucket)
        else:
            place = self._place_of(bucket)
            if place.data_ptr() != buffer.data_ptr():
                place.copy_(buffer)
            self._exchange.all_reduce(place, divide_by=count)
            return place
        return buffer

    def close(self) -> None:
        self._places.clear()
        self._exchange.close()

    def _count(self, bucket: DDPBucket) -> int:
        if not bucket.counts_ranks:
            return self._world.world_size
        active = torch.full((1,), float(bucket.is_active), device=bucket.buffer.device)
        self._exchange.all_reduce(active)
        return max(1, round(active.item()))

    def _place_of(self, bucket: DDPBucket) -> Tensor:
        """Return the shared memory of a bucket: usually its own buffer, which moves there."""
        # All ranks decide alike. The caller copies other buffers: a rank without inputs has another
        # one each time (`Join`), and DDP may cut buckets of the same sizes anew.
        buffer = bucket.buffer
        place = self._places.get(bucket.index)
        if place is None or place.numel() != buffer.numel() or place.dtype != buffer.dtype:
            if place is not None:
                self._exchange.forget(place)
            place = self._places[bucket.index] = self._exchange.place_for(buffer)
        return place

    def _reduce_coded(self, bucket: DDPBucket) -> None:
        check_encodable(self._codec, bucket.buffer.dtype)
        coded = self._coded.get(bucket.index)
        if coded is None or not coded.holds(bucket.parameters):
            coded = self._lay_out(bucket, is_stale=coded is not None)
        parts = bucket.buffer.split_with_sizes([p.numel() for p in bucket.parameters])
        torch._foreach_copy_(coded.parts_of(coded.vector), parts)
        nodes = [(self._world.rank, coded.vector)]
        torch._foreach_copy_(parts, coded.parts_of(coded.compressor.reduce(0, nodes, self._wire)))

    def _lay_out(self, bucket: DDPBucket, is_stale: bool) -> "CodedBucket":
        """Make the aligned vector of a bucket. A compressor's memory follows the parameters."""
        if is_stale:
            for coded in self._coded.values():
                self._memory |= coded.compressor.state()
            self._coded.clear()
        for parameter in bucket.parameters:
            # Named in the order of DDP, which is the same on all ranks.
            self._names.setdefault(parameter, f"parameter{len(self._names)}")
        names = [self._names[parameter] for parameter in bucket.parameters]
        aligned = make_bucket(
            bucket.parameters,
            range(len(names)),
            multiple=self._world.world_size * ROW,
            allocate=lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device),
            alignment=ROW,
        )
        layout = layout_of(aligned, names)
        compressor = make_compressor(self._codec, [layout])
        own = [key for key in self._memory if key.partition(".")[2] in names]
        memory = {key: self._memory.pop(key) for key in own}
        compressor.load_state(memory, [self._world.rank])
        coded = CodedBucket(bucket.parameters, aligned.flat, layout.spans, compressor)
        self._coded[bucket.index] = coded
        return coded


@dataclass(frozen=True)
class CodedBucket:
    """A DDP bucket for a compressor, with every parameter at a multiple of `ROW`."""

    parameters: Sequence[Tensor]
    vector: Tensor
    spans: tuple[tuple[int, int], ...]
    compressor: Compressor

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    def parts_of(self, vector: Tensor) -> list[Tensor]:
        return [vector[start:stop] for start, stop in self.spans]


def check_encodable(compressor: str, dtype: torch.dtype) -> None:
    if compressor != NO_COMPRESSOR and dtype != torch.float32:
        raise RecipeError(f"compressor {compressor} encodes float32 gradients; some are {dtype}")
